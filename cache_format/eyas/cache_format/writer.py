"""Writing a store: the plan stage once, then one attempt a shard, committed by a receipt that is created once.

An attempt writes under a name of its own, so two writers of one shard never touch the same file. The receipt decides:
the first to create it wins, and the loser deletes its attempt. Only then are other attempts of the shard removed,
since an orphan that outlived its driver may still be writing one.
"""

import fcntl
import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType

import msgspec
import numpy as np
import pyarrow as pa

from eyas.cache_format.array_writer import ArrayWriter
from eyas.cache_format.arrow_files import arrow_bytes
from eyas.cache_format.containers import CONTAINERS
from eyas.cache_format.digests import file_digest
from eyas.cache_format.errors import IncompleteStoreError, StoreError, StoreLockedError, StoreNotFoundError
from eyas.cache_format.frozen import target_digest
from eyas.cache_format.layout import (
    StorePaths,
    create_once,
    remove_tree,
    replace_file,
    sync_folder,
    translate_disk_full,
)
from eyas.cache_format.manifest import Manifest, encode_json, load_manifest
from eyas.cache_format.plan import Plan, read_plan, write_plan
from eyas.cache_format.receipt import (
    Completion,
    QuarantinedRow,
    Receipt,
    ReceiptContent,
    committed_shards,
    load_receipt,
)
from eyas.cache_format.samples import PlannedSample, SampleTable, write_samples
from eyas.cache_format.schema import FORMAT_VERSION
from eyas.cache_format.vocab import VocabMap, write_vocab

__all__ = ["ShardWriter", "StoreLock", "complete_store", "create_store", "open_for_resume", "pending_shards"]

_log = logging.getLogger(__name__)
_KNOWN = {"lock", "target", "shards", "plan.arrow", "vocab.safetensors"}


class StoreLock:
    """The run lock of a local store: flock on `lock`, held while the context lasts."""

    def __init__(self, root: Path | str) -> None:
        self._path = StorePaths(root).lock

    def __enter__(self) -> "StoreLock":
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+")
        except OSError as error:
            raise StoreError(
                f"{self._path.parent} cannot be written ({error.strerror}); choose a folder that you may write"
            ) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.seek(0)
            owner = self._file.read().strip() or "unknown"
            self._file.close()
            raise StoreLockedError(
                f"{self._path.parent} is being written by another run (process {owner}); wait for it or stop it"
            ) from error
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.truncate(0)
        self._file.close()


def open_for_resume(root: Path | str) -> Manifest | None:
    """Return the manifest of a store that can be continued, None for a folder that is new or was cut while planning.

    A folder without a manifest that was never locked by a run is somebody else's, whatever its entries are called.

    Raises:
        StoreError: the folder holds something else; nothing in it is touched.
    """
    folder = Path(root)
    try:
        return load_manifest(folder)
    except (StoreNotFoundError, IncompleteStoreError):
        known = _KNOWN if StorePaths(folder).lock.exists() else set()
        strangers = sorted(p.name for p in folder.iterdir() if p.name not in known) if folder.is_dir() else []
        strangers = [name for name in strangers if not (name.startswith(".") and name.endswith(".tmp"))]
        if strangers:
            raise StoreError(
                f"{folder} is not empty and holds no store (found {', '.join(strangers[:5])}); choose another folder"
            ) from None
        return None


def create_store(
    root: Path | str,
    *,
    manifest: Manifest,
    plan: Plan,
    shards: Iterable[Sequence[PlannedSample]],
    token_counts: np.ndarray,
    vocab: VocabMap,
) -> None:
    """Write everything of the plan stage; the manifest comes last and makes the folder a store.

    target/ must be there already (`write_frozen_target`). Written again after an interruption, the same plan gives
    the same bytes.
    """
    paths = StorePaths(root)
    number = -1
    for number, samples in enumerate(shards):
        write_samples(paths.samples(number), samples)
    if number + 1 != plan.num_shards:
        raise StoreError(f"{root}: the plan has {plan.num_shards} shards, {number + 1} were given")
    write_plan(paths.plan, plan)
    write_vocab(paths.vocab, token_counts, vocab)
    if not create_once(paths.manifest, encode_json(manifest)):
        raise StoreError(f"{paths.manifest} exists already; a manifest is created once and never changed")


def pending_shards(root: Path | str) -> list[int]:
    """Return the shards without a receipt, decided from disk."""
    paths = StorePaths(root)
    done = set(committed_shards(paths))
    return [shard for shard in range(read_plan(paths.plan).num_shards) if shard not in done]


class ShardWriter:
    """One attempt of one shard. Rows are appended in plan order; leaving without commit deletes the attempt.

    with ShardWriter(root, shard) as writer:
        for row, arrays in captured:
            writer.append(row, arrays)
        receipt = writer.commit({"torch": "2.13.0"})
    """

    def __init__(self, root: Path | str, shard: int, *, attempt: str | None = None, plan: Plan | None = None) -> None:
        """Open an attempt; who writes many shards reads the plan once and hands it in."""
        self._paths = StorePaths(root)
        self._identity = load_manifest(root).identity
        plan = read_plan(self._paths.plan) if plan is None else plan
        self._rows = range(*plan.shard_slice(shard).indices(len(plan)))
        self._plan = plan
        self.shard = shard
        self.attempt = attempt or f"attempt-{os.urandom(6).hex()}"
        self._folder = self._paths.attempt(shard, self.attempt)
        self._next_row = 0
        self._tokens = 0
        self._kept = 0
        self._quarantined: list[QuarantinedRow] = []
        self._committed = False
        self._arrays: list[ArrayWriter] = []

    def __enter__(self) -> "ShardWriter":
        container = CONTAINERS[self._identity.container]
        plan_rows = self._plan.shard_slice(self.shard)
        planned = {
            "token": int(self._plan.length[plan_rows].sum(dtype=np.int64)),
            "kept": int(self._plan.kept[plan_rows].sum(dtype=np.int64)),
        }
        with translate_disk_full(self._folder):
            container.prepare(self._folder)
            for spec in self._identity.fields:
                self._arrays.append(
                    ArrayWriter(
                        self._folder,
                        spec,
                        container=self._identity.container,
                        planned_rows=planned[spec.rows],
                        chunk_bytes=self._identity.chunk_bytes,
                    )
                )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed:
            for array in self._arrays:
                array.close()
            remove_tree(self._folder)

    @property
    def num_rows(self) -> int:
        """Rows of the shard."""
        return len(self._rows)

    def _take(self, row: int) -> int:
        if row != self._next_row or row >= self.num_rows:
            raise StoreError(
                f"shard {self.shard:06d}: rows come in plan order; expected row {self._next_row} of {self.num_rows}, "
                f"found {row}"
            )
        self._next_row += 1
        return self._rows.start + row

    def append(self, row: int, arrays: dict[str, np.ndarray]) -> None:
        """Append all fields of one row; nothing is written when any of them is refused.

        Args:
            row: row inside the shard, the next in order.
            arrays: [T, width] for token fields, [kept, width] or [kept] for kept fields, in the manifest's dtypes.

        Raises:
            NonFiniteError: a value is NaN or Inf; the row can still be quarantined.
            StoreError: wrong order, fields, shape or dtype.
        """
        expected_names = {a.spec.name for a in self._arrays}
        if set(arrays) != expected_names:
            different = ", ".join(sorted(set(arrays) ^ expected_names))
            raise StoreError(f"shard {self.shard:06d} row {row}: fields differ from the manifest's: {different}")
        index = self._rows.start + self._next_row
        counts = {"token": int(self._plan.length[index]), "kept": int(self._plan.kept[index])}
        checked = [a.check(arrays[a.spec.name], counts[a.spec.rows]) for a in self._arrays]
        self._take(row)
        for array, (rows, abs_max) in zip(self._arrays, checked, strict=True):
            array.append(rows, abs_max)
        self._tokens += counts["token"]
        self._kept += counts["kept"]

    def quarantine(self, row: int, reason: str) -> None:
        """Record that a row could not be captured; it keeps its place with zero tokens."""
        index = self._take(row)
        self._quarantined.append(
            QuarantinedRow(
                row=row,
                sample_id=self._plan.sample_ids[index].tobytes().hex(),
                source=self._plan.text("source", index),
                source_row=self._plan.text("source_row", index),
                reason=reason,
            )
        )

    def commit(self, provenance: dict[str, str]) -> Receipt:
        """Make the attempt durable and create the receipt; return the receipt that counts.

        When another attempt committed first, ours is deleted and the winner's receipt is returned.
        """
        if self._next_row != self.num_rows:
            raise StoreError(f"shard {self.shard:06d}: {self._next_row} of {self.num_rows} rows were written")
        records = tuple(array.finish() for array in self._arrays)
        self._write_digests()
        sync_folder(self._folder)
        sync_folder(self._folder.parent)
        content = ReceiptContent(
            shard=self.shard,
            samples_digest=SampleTable(self._paths.samples(self.shard), self.shard).digest,
            rows=self.num_rows,
            tokens=self._tokens,
            kept_rows=self._kept,
            quarantined=tuple(self._quarantined),
            arrays=records,
        )
        receipt = Receipt(content, self.attempt, provenance)
        if not create_once(self._paths.receipt(self.shard), encode_json(receipt)):
            _log.warning("shard %06d was committed by another attempt; dropping %s", self.shard, self.attempt)
            return load_receipt(self._paths, self.shard)  # leaving the context deletes our attempt
        self._committed = True
        self._after_commit(content)
        return receipt

    def _write_digests(self) -> None:
        columns = {
            "field": [a.spec.name for a in self._arrays for _ in a.chunk_digests],
            "xxh3_64": [d for a in self._arrays for d in a.chunk_digests],
        }
        table = pa.table(columns, schema=pa.schema([("field", pa.string()), ("xxh3_64", pa.uint64())]))
        replace_file(self._folder / "digests.arrow", arrow_bytes(table))

    def _after_commit(self, content: ReceiptContent) -> None:
        _write_quarantine(self._paths, content)
        for other in self._folder.parent.iterdir():
            if other.is_dir() and other.name != self.attempt:
                remove_tree(other)


def _write_quarantine(paths: StorePaths, content: ReceiptContent) -> None:
    if content.quarantined:
        lines = b"".join(msgspec.json.encode(row) + b"\n" for row in content.quarantined)
        replace_file(paths.quarantine(content.shard), lines)


def complete_store(root: Path | str) -> Completion:
    """Write complete.json from what lies on disk; return it.

    Raises:
        IncompleteStoreError: shards have no receipt yet.
        StoreError: another complete.json is there already.
    """
    paths = StorePaths(root)
    missing = pending_shards(root)
    if missing:
        names = ", ".join(f"{s:06d}" for s in missing[:5])
        raise IncompleteStoreError(f"{root}: {len(missing)} shards have no receipt ({names}); run the capture again")
    manifest = load_manifest(root)
    shards = range(read_plan(paths.plan).num_shards)
    receipts = [load_receipt(paths, s) for s in shards]
    for receipt in receipts:  # a kill between receipt and quarantine file leaves only the receipt
        _write_quarantine(paths, receipt.content)
    completion = Completion(
        format_version=FORMAT_VERSION,
        manifest=manifest.digest,
        plan=manifest.identity.plan_digest,
        vocab=file_digest(paths.vocab),
        target=target_digest(root),
        receipts=tuple(receipt.digest for receipt in receipts),
    )
    data = encode_json(completion)
    if not create_once(paths.complete, data) and paths.complete.read_bytes() != data:
        raise StoreError(
            f"{paths.complete} describes other bytes than those on disk; `eyas inspect --verify {root}` says which"
        )
    return completion
