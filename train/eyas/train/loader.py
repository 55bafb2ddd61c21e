"""Read packed micro-batches from a store, ahead of training, into buffers that are reused.

A thread follows the order, reads the small fields of a whole global batch first (ids, masks, argmax: enough to count
its supervised slots before its first forward), then each pack's tensors, straight from the store's maps into a
preallocated buffer. The number of buffers bounds memory. What is read, and in which order, does not depend on timing.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NamedTuple

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from eyas.cache_format.reader import StoreReader
from eyas.cache_format.schema import AUX, FieldSpec, kept_rows
from eyas.cache_format.vocab import VocabMap
from eyas.train.batch import MaskPreset, PackedBatch, make_batch
from eyas.train.errors import TrainError


class Position(NamedTuple):
    """Where a global batch lies in a run; the same at every world size."""

    epoch: int
    """0-based."""
    step: int
    """Global batch within the epoch, 0-based."""
    num_steps: int
    """Global batches of this epoch."""


GlobalBatches = Iterator[tuple[Position, list[np.ndarray]]]
"""Positions with this rank's packs: arrays of plan rows, possibly empty ones."""


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One pack, ready for the device. Its tensors are valid until the next micro-batch is asked for."""

    position: Position
    rows: np.ndarray
    """Plan rows of the documents, in packed order; none for an empty pack."""
    batch: PackedBatch | None
    """None for an empty pack."""
    fields: dict[str, Tensor]
    """Supervision fields of the kept rows, [R, ...] in the stored dtype; `last_hidden_state` too is cut to them."""
    counts: Tensor
    """n_k: supervised slots of every TTT step over the whole global batch, [ttt_steps]."""
    is_last: bool
    """Whether the optimizer steps after this one."""

    @property
    def num_tokens(self) -> int:
        """Real tokens of the pack."""
        return 0 if self.batch is None else self.batch.layout.num_slots


class PackReader:
    """Turns packs of plan rows into batches; holds no state but the open store."""

    def __init__(self, reader: StoreReader, *, vocab: VocabMap, fields: Sequence[str], mask: MaskPreset) -> None:
        self._reader = reader
        self._vocab = vocab
        self._specs = {spec.name: spec for spec in reader.identity.fields}
        self._fields = tuple(fields)
        self._mask = mask

    def header(self, rows: np.ndarray) -> PackedBatch | None:
        """Return the pack without its features ([N, 0]): all that counting needs, at a few bytes a token."""
        if not len(rows):
            return None
        ids = [self._reader.input_ids(int(row)) for row in rows]
        kept = [kept_rows(self._reader.loss_mask(int(row))) for row in rows]
        argmax = [self._reader.read(int(row), ["target_argmax"])["target_argmax"] for row in rows]
        num_slots = sum(map(len, ids))
        return make_batch(
            document_lengths=[len(document) for document in ids],
            input_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
            span_ids=torch.from_numpy(
                np.concatenate([self._reader.span_ids(int(row)) for row in rows]).astype(np.int64)
            ),
            aux_hidden_states=torch.empty(num_slots, 0),
            kept=torch.from_numpy(np.concatenate(kept)),
            target_draft_ids=torch.from_numpy(self._vocab.to_draft(np.concatenate(argmax))),
            preset=self._mask,
        )

    def body(self, rows: np.ndarray, header: PackedBatch, buffers: "Buffers") -> tuple[PackedBatch, dict[str, Tensor]]:
        """Return the pack with features, and its supervision fields, both living in `buffers`."""
        lengths = header.layout.document_lengths
        aux = self._read(AUX, rows, lengths, buffers)
        kept = [self._reader.kept_positions(int(row)) for row in rows]
        fields = {}
        for name in self._fields:
            if self._specs[name].rows == "kept":
                fields[name] = self._read(name, rows, [len(positions) for positions in kept], buffers)
            else:
                whole = self._read(name, rows, lengths, buffers)
                starts = np.cumsum([0, *lengths[:-1]])
                at = np.concatenate([positions + start for positions, start in zip(kept, starts, strict=True)])
                fields[name] = whole[torch.from_numpy(at)]
        return replace(header, aux_hidden_states=aux), fields

    def _read(self, name: str, rows: np.ndarray, lengths: Sequence[int], buffers: "Buffers") -> Tensor:
        out = buffers.take(name, sum(lengths))
        start = 0
        for row, length in zip(rows, lengths, strict=True):
            self._reader.read_into(int(row), name, out[start : start + length])
            start += length
        return to_torch(out)


class Buffers:
    """One reusable array per field, grown when a longer document comes."""

    def __init__(self, specs: Sequence[FieldSpec], *, aux_width: int, aux_dtype: np.dtype) -> None:
        self._kinds: dict[str, tuple[np.dtype, tuple[int, ...]]] = {
            spec.name: (spec.numpy_dtype, () if spec.width is None else (spec.width,)) for spec in specs
        }
        self._kinds[AUX] = (aux_dtype, (aux_width,))
        self._arrays: dict[str, np.ndarray] = {}

    @classmethod
    def of_store(cls, reader: StoreReader) -> "Buffers":
        """Return empty buffers for the fields of a store."""
        aux = [spec for spec in reader.identity.fields if spec.name.startswith(f"{AUX}/")]
        width = sum(spec.width or 0 for spec in aux)
        return cls(reader.identity.fields, aux_width=width, aux_dtype=aux[0].numpy_dtype)

    def take(self, name: str, num_rows: int) -> np.ndarray:
        """Return the first `num_rows` rows of a field's array, uninitialised."""
        array = self._arrays.get(name)
        if array is None or len(array) < num_rows:
            dtype, tail = self._kinds[name]
            array = self._arrays[name] = np.empty((num_rows, *tail), dtype)
        return array[:num_rows]


class Loader:
    """Micro-batches of a run, read ahead by one thread; a context manager that stops the thread.

    `count` maps the headers of this rank's packs of a global batch to n_k.
    """

    def __init__(
        self,
        packs: PackReader,
        batches: GlobalBatches,
        *,
        count: Callable[[Sequence[PackedBatch]], Tensor],
        make_buffers: Callable[[], Buffers],
        prefetch: int,
    ) -> None:
        self._packs = packs
        self._batches = batches
        self._count = count
        # One buffer is with the trainer and one is being filled, whatever waits in between.
        self._free: queue.SimpleQueue[Buffers] = queue.SimpleQueue()
        for _ in range(prefetch + 2):
            self._free.put(make_buffers())
        self._ready: queue.Queue[tuple[MicroBatch, Buffers] | BaseException | None] = queue.Queue(maxsize=prefetch)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="eyas-loader", daemon=True)
        self.waited_s = 0.0
        """Seconds that the trainer has waited for data so far."""

    def __enter__(self) -> "Loader":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        while self._thread.is_alive():
            try:
                self._ready.get(timeout=0.05)
            except queue.Empty:
                continue
        self._thread.join()

    def __iter__(self) -> Iterator[MicroBatch]:
        while True:
            started = time.perf_counter()
            item = self._ready.get()
            self.waited_s += time.perf_counter() - started
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            micro, buffers = item
            yield micro
            self._free.put(buffers)

    def _run(self) -> None:
        try:
            for item in self._produce():
                if not self._offer(item):
                    return
            self._offer(None)
        except BaseException as error:
            self._offer(error)

    def _offer(self, item: tuple[MicroBatch, Buffers] | BaseException | None) -> bool:
        while not self._stopped.is_set():
            try:
                self._ready.put(item, timeout=0.05)
            except queue.Full:
                continue
            return True
        return False

    def _produce(self) -> Iterator[tuple[MicroBatch, Buffers]]:
        for position, packs in self._batches:
            headers = [self._packs.header(rows) for rows in packs]
            counts = self._count([header for header in headers if header is not None])
            for index, (rows, header) in enumerate(zip(packs, headers, strict=True)):
                buffers = self._take_buffers()
                if buffers is None:
                    return
                batch, fields = (None, {}) if header is None else self._packs.body(rows, header, buffers)
                is_last = index == len(packs) - 1
                micro = MicroBatch(
                    position=position, rows=rows, batch=batch, fields=fields, counts=counts, is_last=is_last
                )
                yield micro, buffers

    def _take_buffers(self) -> Buffers | None:
        while not self._stopped.is_set():
            try:
                return self._free.get(timeout=0.05)
            except queue.Empty:
                continue
        return None


def to_torch(array: np.ndarray) -> Tensor:
    """Return a torch view of a stored array; bf16 keeps its bits, uint32 becomes int64 (a copy)."""
    if array.dtype == np.dtype(ml_dtypes.bfloat16):
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    if array.dtype == np.uint32:
        return torch.from_numpy(array.astype(np.int64))
    if array.dtype not in (np.float16, np.float32):
        raise TrainError(f"a stored array of dtype {array.dtype} has no torch counterpart")
    return torch.from_numpy(array)
