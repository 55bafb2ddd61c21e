"""samples.arrow: token ids, loss masks and turns of one shard, written at plan time.

One record batch, one row a sample, in row order. A row certifies itself: the hash of its ids and mask is its sample id,
which plan.arrow holds as well. The receipt holds a digest of the whole table, turns included.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from eyas.cache_format.arrow_files import READ_ERRORS, arrow_bytes, read_arrow
from eyas.cache_format.digests import Buffer, digest_parts
from eyas.cache_format.errors import CorruptStoreError
from eyas.cache_format.layout import replace_file
from eyas.cache_format.schema import kept_rows, sample_id

__all__ = ["PlannedSample", "SampleTable", "Span", "write_samples"]

_SPAN = pa.struct([("role", pa.string()), ("turn", pa.uint32()), ("start", pa.uint32()), ("end", pa.uint32())])
_SCHEMA = pa.schema(
    [
        ("sample_id", pa.binary(16)),
        ("token_offset", pa.int64()),
        ("kept_offset", pa.int64()),
        ("input_ids", pa.large_list(pa.uint32())),
        ("loss_mask", pa.large_list(pa.uint8())),
        ("spans", pa.large_list(_SPAN)),
    ]
)


class Span(NamedTuple):
    """One turn of a conversation as a token range [start, end), template tokens included."""

    role: str
    turn: int
    start: int
    end: int


@dataclass(frozen=True)
class PlannedSample:
    """One sample as the plan holds it."""

    conversation_id: str
    """Key of the held-out split: samples of one conversation never lie on both sides."""
    source: str
    """Name of the file or dataset it came from."""
    source_row: int
    """Row number inside the source, from 0."""
    heldout: bool
    """Whether it belongs to the held-out split."""
    input_ids: np.ndarray
    """uint32 [T], unshifted."""
    loss_mask: np.ndarray
    """uint8 [T], unshifted: 1 where the token was written by the assistant."""
    spans: tuple[Span, ...]
    """Turns in order."""

    @property
    def sample_id(self) -> bytes:
        """16 bytes: the hash of ids and mask."""
        return sample_id(self.input_ids, self.loss_mask)


def _offsets(counts: Sequence[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])


def _list_column(values: Sequence[np.ndarray], dtype: np.dtype, arrow_type: pa.DataType) -> pa.Array:
    offsets = _offsets([len(v) for v in values])
    flat = np.concatenate([np.asarray(v, dtype=dtype) for v in values]) if values else np.empty(0, dtype)
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(flat, arrow_type))


def write_samples(path: Path, samples: Sequence[PlannedSample]) -> None:
    """Write the table of one shard; equal samples give equal bytes.

    `token_offset` and `kept_offset` are the first rows of a sample in the shard's token and kept arrays while no row
    is quarantined.
    """
    columns = [
        pa.array([s.sample_id for s in samples], pa.binary(16)),
        pa.array(_offsets([len(s.input_ids) for s in samples])[:-1], pa.int64()),
        pa.array(_offsets([int(kept_rows(s.loss_mask).sum()) for s in samples])[:-1], pa.int64()),
        _list_column([s.input_ids for s in samples], np.dtype(np.uint32), pa.uint32()),
        _list_column([s.loss_mask for s in samples], np.dtype(np.uint8), pa.uint8()),
        pa.array([[span._asdict() for span in s.spans] for s in samples], pa.large_list(_SPAN)),
    ]
    replace_file(path, arrow_bytes(pa.record_batch(columns, schema=_SCHEMA)))


class SampleTable:
    """Memory-mapped samples.arrow of one shard."""

    def __init__(self, path: Path, shard: int) -> None:
        self.path = path
        self.shard = shard
        try:
            table = read_arrow(path)
        except READ_ERRORS as error:
            raise self._corrupt(f"it cannot be read ({error})") from error
        batches = table.to_batches()
        if not table.schema.equals(_SCHEMA) or len(batches) != 1:
            raise self._corrupt("it is another table than samples.arrow of this format")
        self._batch = batches[0]
        self._ids = self._batch.column("input_ids")
        self._masks = self._batch.column("loss_mask")

    def _corrupt(self, what: str) -> CorruptStoreError:
        return CorruptStoreError(
            f"shard {self.shard:06d}: {self.path}: {what}; restore the file from a copy or create the store again",
            shard=self.shard,
            field="samples",
        )

    def __len__(self) -> int:
        return int(self._batch.num_rows)

    def sample_id(self, row: int) -> bytes:
        """Return the stored 16-byte id of a row."""
        return bytes(self._batch.column("sample_id")[row].as_py())

    def input_ids(self, row: int) -> np.ndarray:
        """Return uint32 [T], a read-only view of the map."""
        return np.asarray(self._ids[row].values)

    def loss_mask(self, row: int) -> np.ndarray:
        """Return uint8 [T], a read-only view of the map."""
        return np.asarray(self._masks[row].values)

    def spans(self, row: int) -> tuple[Span, ...]:
        """Return the turns of a row."""
        return tuple(Span(**span) for span in self._batch.column("spans")[row].as_py())

    def span_ids(self, row: int) -> np.ndarray:
        """Return uint16 [T]: 0 where the mask is 0, else 1 + the index of the turn that the token belongs to."""
        numbers = np.zeros(len(self.input_ids(row)), np.uint16)
        for index, span in enumerate(self.spans(row)):
            numbers[span.start : span.end] = index + 1
        return np.where(self.loss_mask(row).astype(bool), numbers, 0).astype(np.uint16)

    @cached_property
    def digest(self) -> str:
        """xxh3-128 over all columns, independent of how Arrow laid the file out."""
        parts: list[Buffer] = [b"".join(self._batch.column("sample_id").to_pylist())]
        for name in ("input_ids", "loss_mask"):
            column = self._batch.column(name)
            parts += [np.diff(np.asarray(column.offsets)).tobytes(), np.asarray(column.flatten()).tobytes()]
        parts += [np.asarray(self._batch.column(name)).tobytes() for name in ("token_offset", "kept_offset")]
        parts.append(msgspec.json.encode(self._batch.column("spans").to_pylist()))
        return digest_parts(parts)

    def check_row(self, row: int, expected: bytes) -> None:
        """Raise unless the row's ids and mask hash to the id that the plan holds."""
        found = sample_id(self.input_ids(row), self.loss_mask(row))
        if found != expected:
            raise self._corrupt(f"row {row} hashes to {found.hex()}, the plan has {expected.hex()}")
