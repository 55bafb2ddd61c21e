"""Reading a store: open it, pick samples by plan row, get private copies of the fields you name."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from eyas.cache_format.digests import file_digest
from eyas.cache_format.errors import CorruptStoreError, IncompleteStoreError
from eyas.cache_format.frozen import FrozenTarget, target_digest
from eyas.cache_format.layout import StorePaths
from eyas.cache_format.manifest import Identity, Manifest, load_manifest
from eyas.cache_format.plan import Plan, read_plan
from eyas.cache_format.receipt import Completion, Receipt, committed_shards, load_completion, load_receipt
from eyas.cache_format.samples import Span
from eyas.cache_format.schema import AUX, FieldSpec, aux_field, kept_rows
from eyas.cache_format.shard_reader import ShardReader
from eyas.cache_format.vocab import VocabMap, read_vocab

__all__ = ["StoreReader"]

MAX_OPEN_SHARDS = 256
"""Shards kept mapped at a time; each holds one map a shard file, far below the usual limit of 65,530 maps."""


class StoreReader:
    """A store opened for reading. Samples are addressed by plan row, 0 .. len - 1.

        reader = StoreReader("cache")
        sample = reader.read(7, ("aux_hidden_states", "target_argmax"))

    Safe to use from several threads. Nothing is ever written. Every chunk is checked against its digest when this
    process touches it first, and a sample's ids and mask against its id.
    """

    def __init__(self, root: Path | str, *, allow_incomplete: bool = False) -> None:
        """Open a store.

        Args:
            root: folder of the store.
            allow_incomplete: open a store that is still being captured; only committed shards are available.

        Raises:
            StoreNotFoundError, FormatVersionError, IncompleteStoreError, CorruptStoreError.
        """
        self.paths = StorePaths(root)
        self.root = self.paths.root
        self.manifest: Manifest = load_manifest(root)
        self.identity: Identity = self.manifest.identity
        self.plan: Plan = read_plan(self.paths.plan)
        if self.plan.digest != self.identity.plan_digest:
            raise CorruptStoreError(
                f"{self.paths.plan} has digest {self.plan.digest}, the manifest names {self.identity.plan_digest}; "
                "restore it from a copy",
                field="plan",
            )
        self.completion: Completion | None = load_completion(self.paths, self.plan.num_shards)
        if self.completion is None and not allow_incomplete:
            missing = self.plan.num_shards - len(committed_shards(self.paths))
            raise IncompleteStoreError(
                f"{root} is not complete: {missing} of {self.plan.num_shards} shards are missing; run the same "
                "`eyas precompute` again to finish it"
            )
        self.receipts: dict[int, Receipt] = {s: self._receipt(s) for s in self._expected_shards()}
        self._open: OrderedDict[int, ShardReader] = OrderedDict()
        self._lock = threading.Lock()

    def _expected_shards(self) -> Sequence[int]:
        found = committed_shards(self.paths)
        strangers = [s for s in found if s >= self.plan.num_shards]
        if strangers:
            raise CorruptStoreError(
                f"shard {strangers[0]:06d}: {self.paths.receipt(strangers[0])} is not in the plan, which has "
                f"{self.plan.num_shards} shards; remove it",
                shard=strangers[0],
                field="receipt",
            )
        return found if self.completion is None else range(self.plan.num_shards)

    def _receipt(self, shard: int) -> Receipt:
        receipt = load_receipt(self.paths, shard)
        if self.completion is not None and receipt.digest != self.completion.receipts[shard]:
            raise CorruptStoreError(
                f"shard {shard:06d}: {self.paths.receipt(shard)} has digest {receipt.digest}, complete.json names "
                f"{self.completion.receipts[shard]}; restore it from a copy",
                shard=shard,
                field="receipt",
            )
        return receipt

    def __len__(self) -> int:
        return len(self.plan)

    @cached_property
    def available(self) -> np.ndarray:
        """bool [n]: plan rows that are committed and not quarantined."""
        available = np.zeros(len(self), bool)
        for shard, receipt in self.receipts.items():
            rows = self.plan.shard_slice(shard)
            available[rows] = True
            available[[rows.start + q.row for q in receipt.content.quarantined]] = False
        return available

    @cached_property
    def _vocab(self) -> tuple[np.ndarray, VocabMap]:
        return read_vocab(self.paths.vocab, self.identity.draft_vocab_digest)

    @property
    def token_counts(self) -> np.ndarray:
        """int64 [V]: supervised tokens of the plan, without held-out rows."""
        return self._vocab[0]

    @property
    def vocab(self) -> VocabMap:
        """The default draft vocabulary."""
        return self._vocab[1]

    @cached_property
    def target(self) -> FrozenTarget:
        """The target's frozen parts."""
        return FrozenTarget(self.root)

    def verify_frozen_parts(self) -> None:
        """Check manifest, vocab.safetensors and target/ against complete.json; without one there is no digest yet.

        Reads target/ whole, embeddings and lm_head included. A trainer does that anyway; `inspect` need not.

        Raises:
            CorruptStoreError: one of them differs.
        """
        if self.completion is None:
            return
        found = {
            "manifest": (self.paths.manifest, self.manifest.digest, self.completion.manifest),
            "vocab": (self.paths.vocab, file_digest(self.paths.vocab), self.completion.vocab),
            "target": (self.paths.target, target_digest(self.root), self.completion.target),
        }
        for field, (path, digest, expected) in found.items():
            if digest != expected:
                raise CorruptStoreError(
                    f"{path} has digest {digest}, complete.json names {expected}; restore it from a copy", field=field
                )

    def shard_reader(self, shard: int) -> ShardReader:
        """Return the reader of one shard; the least recently used ones are unmapped."""
        with self._lock:
            if shard in self._open:
                self._open.move_to_end(shard)
                return self._open[shard]
            reader = ShardReader(self.paths, self.identity, self.plan, shard, self.receipts.get(shard))
            self._open[shard] = reader
            if len(self._open) > MAX_OPEN_SHARDS:
                self._open.popitem(last=False)
            return reader

    def _locate(self, index: int) -> tuple[ShardReader, int]:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.root}: plan row {index} is not in 0 .. {len(self) - 1}")
        return self.shard_reader(int(self.plan.shard[index])), int(self.plan.row[index])

    def input_ids(self, index: int) -> np.ndarray:
        """Return uint32 [T], a read-only view."""
        shard, row = self._locate(index)
        return shard.checked_samples(row).input_ids(row)

    def loss_mask(self, index: int) -> np.ndarray:
        """Return uint8 [T], a read-only view: 1 where the assistant wrote the token."""
        shard, row = self._locate(index)
        return shard.checked_samples(row).loss_mask(row)

    def spans(self, index: int) -> tuple[Span, ...]:
        """Return the turns of the conversation as token ranges."""
        shard, row = self._locate(index)
        return shard.checked_samples(row).spans(row)

    def span_ids(self, index: int) -> np.ndarray:
        """Return uint16 [T]: 0 outside the loss mask, else 1 + the index of the turn the token belongs to."""
        shard, row = self._locate(index)
        return shard.checked_samples(row).span_ids(row)

    def kept_positions(self, index: int) -> np.ndarray:
        """Return int64 [kept]: positions that the rows of kept fields stand for."""
        return np.flatnonzero(kept_rows(self.loss_mask(index)))

    def field_spec(self, field: str) -> FieldSpec:
        """Return the spec of a stored field; for `aux_hidden_states` the concatenation of its layers.

        Raises:
            MissingFieldError: the store does not hold the field.
        """
        layers = self.identity.aux_layer_outputs
        name = aux_field(layers[0]) if field == AUX else field
        spec = next((s for s in self.identity.fields if s.name == name), None)
        if spec is None:
            spec = self.shard_reader(0).spec(field)
        if field != AUX:
            return spec
        return FieldSpec(AUX, spec.dtype, len(layers) * (spec.width or 1), spec.rows, spec.codec)

    def read_into(self, index: int, field: str, out: np.ndarray) -> None:
        """Copy one sample's rows of a field into a slice of a batch.

        Args:
            index: plan row.
            field: a stored field, or `aux_hidden_states` for all captured layers side by side.
            out: [T, width], [kept, width] or [kept], in the field's dtype.
        """
        shard, row = self._locate(index)
        try:
            if field != AUX:
                shard.read_into(row, field, out)
                return
            layers = self.identity.aux_layer_outputs
            width = out.shape[1] // len(layers)
            for position, layer in enumerate(layers):
                shard.read_into(row, aux_field(layer), out[:, position * width : (position + 1) * width])
        except CorruptStoreError as error:
            raise self._name_sample(error, index) from error

    def _name_sample(self, error: CorruptStoreError, index: int) -> CorruptStoreError:
        sample = self.plan.sample_ids[index].tobytes().hex()
        return CorruptStoreError(f"sample {sample} (plan row {index}): {error}", shard=error.shard, field=error.field)

    def read(self, index: int, fields: Sequence[str]) -> dict[str, np.ndarray]:
        """Return private copies of the named fields of one sample; `input_ids` and `loss_mask` may be named too.

        Raises:
            CorruptStoreError: a stored byte is missing or wrong; the message names shard, field and sample.
            MissingFieldError: the store does not hold a field.
        """
        return {field: self._read_field(index, field) for field in fields}

    def _read_field(self, index: int, field: str) -> np.ndarray:
        if field == "input_ids":
            return self.input_ids(index).copy()
        if field == "loss_mask":
            return self.loss_mask(index).copy()
        spec = self.field_spec(field)
        out = np.empty(spec.shape(self.num_rows(index, spec.rows)), spec.numpy_dtype)
        self.read_into(index, field, out)
        return out

    def num_rows(self, index: int, rows: str) -> int:
        """Return how many rows a `token` or `kept` field of this sample has; 0 for a quarantined one."""
        if not self.available[index]:
            return 0
        return int((self.plan.length if rows == "token" else self.plan.kept)[index])
