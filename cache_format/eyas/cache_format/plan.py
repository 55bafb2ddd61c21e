"""plan.arrow: every sample of a store, where it came from and in which shard and row it lies.

The plan is a pure function of the data and the settings that shape it. Rows are sorted by (shard, row) and are never
renumbered: a row that could not be captured keeps its place with zero tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from eyas.cache_format.arrow_files import READ_ERRORS, arrow_bytes, read_arrow
from eyas.cache_format.digests import digest_parts
from eyas.cache_format.errors import CorruptStoreError
from eyas.cache_format.layout import replace_file
from eyas.cache_format.samples import PlannedSample
from eyas.cache_format.schema import kept_rows

__all__ = ["Plan", "build_plan", "read_plan", "write_plan"]

_SCHEMA = pa.schema(
    [
        ("sample_id", pa.binary(16)),
        ("conversation_id", pa.string()),
        ("source", pa.dictionary(pa.int32(), pa.string())),
        ("source_row", pa.int64()),
        ("split", pa.dictionary(pa.int32(), pa.string())),
        ("length", pa.uint32()),
        ("supervised", pa.uint32()),
        ("kept", pa.uint32()),
        ("shard", pa.uint32()),
        ("row", pa.uint32()),
    ]
)
_SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class Plan:
    """One row a sample, sorted by (shard, row); n samples."""

    table: pa.Table
    """The columns of plan.arrow."""
    books: dict[str, Any]
    """Where every row of the sources went: counts by reason, which add up to the rows read."""

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def _numbers(self, name: str) -> np.ndarray:
        return np.asarray(self.table.column(name).to_numpy())

    @cached_property
    def sample_ids(self) -> np.ndarray:
        """uint8 [n, 16]."""
        buffer = self.table.column("sample_id").combine_chunks().buffers()[1]
        return np.frombuffer(buffer, np.uint8)[: 16 * len(self)].reshape(len(self), 16)

    @cached_property
    def length(self) -> np.ndarray:
        """uint32 [n]: tokens of each sample."""
        return self._numbers("length")

    @cached_property
    def supervised(self) -> np.ndarray:
        """uint32 [n]: tokens with loss mask 1."""
        return self._numbers("supervised")

    @cached_property
    def kept(self) -> np.ndarray:
        """uint32 [n]: kept rows of each sample."""
        return self._numbers("kept")

    @cached_property
    def shard(self) -> np.ndarray:
        """uint32 [n]."""
        return self._numbers("shard")

    @cached_property
    def row(self) -> np.ndarray:
        """uint32 [n]: row inside the shard."""
        return self._numbers("row")

    @cached_property
    def heldout(self) -> np.ndarray:
        """bool [n]: whether the sample belongs to the held-out split."""
        codes = self.table.column("split").combine_chunks().indices
        return np.asarray(np.asarray(codes) == _SPLITS.index("heldout"))

    def text(self, name: str, index: int) -> Any:
        """Return one cell of the columns `conversation_id`, `source`, `source_row` or `split`."""
        return self.table.column(name)[index].as_py()

    @cached_property
    def num_shards(self) -> int:
        """Number of shards; shard numbers are 0 .. num_shards - 1."""
        return int(self.shard[-1]) + 1 if len(self) else 0

    @cached_property
    def _bounds(self) -> np.ndarray:
        return np.searchsorted(self.shard, np.arange(self.num_shards + 1))

    def shard_slice(self, shard: int) -> slice:
        """Return the plan rows of one shard, in row order."""
        return slice(int(self._bounds[shard]), int(self._bounds[shard + 1]))

    @cached_property
    def digest(self) -> str:
        """xxh3-128 over every column and the books, independent of how Arrow laid the file out."""
        parts: list[bytes | str] = [msgspec.json.encode(self.books, order="deterministic")]
        for name in _SCHEMA.names:
            column = self.table.column(name)
            if name == "sample_id":
                parts.append(self.sample_ids.tobytes())
            elif pa.types.is_integer(column.type):
                parts.append(column.to_numpy().tobytes())
            else:
                parts.append(msgspec.json.encode(column.to_pylist()))
        return digest_parts(parts)

    def find(self, text: str) -> int:
        """Return the plan row of a sample named by hex id (or an unambiguous prefix) or by plan row number.

        Raises:
            KeyError: nothing, or more than one sample, matches.
        """
        if text.isdigit() and int(text) < len(self):
            return int(text)
        matches = [i for i, row in enumerate(self.sample_ids) if row.tobytes().hex().startswith(text.lower())]
        if len(matches) != 1:
            raise KeyError(f"{len(matches)} samples match {text!r}")
        return matches[0]


def build_plan(shards: Sequence[Sequence[PlannedSample]], books: dict[str, Any]) -> Plan:
    """Return the plan of samples already dealt to shards, in shard and row order."""
    rows = [(shard, row, sample) for shard, samples in enumerate(shards) for row, sample in enumerate(samples)]
    samples = [sample for _, _, sample in rows]
    columns = {
        "sample_id": [s.sample_id for s in samples],
        "conversation_id": [s.conversation_id for s in samples],
        "source": _dictionary([s.source for s in samples]),
        "source_row": [s.source_row for s in samples],
        "split": pa.DictionaryArray.from_arrays(
            pa.array([int(s.heldout) for s in samples], pa.int32()), pa.array(_SPLITS)
        ),
        "length": [len(s.input_ids) for s in samples],
        "supervised": [int(np.asarray(s.loss_mask).sum()) for s in samples],
        "kept": [int(kept_rows(s.loss_mask).sum()) for s in samples],
        "shard": [shard for shard, _, _ in rows],
        "row": [row for _, row, _ in rows],
    }
    return Plan(pa.table(columns, schema=_SCHEMA), books)


def _dictionary(values: list[str]) -> pa.DictionaryArray:
    names = sorted(set(values))
    index = {name: i for i, name in enumerate(names)}
    codes = pa.array([index[v] for v in values], pa.int32())
    return pa.DictionaryArray.from_arrays(codes, pa.array(names, pa.string()))


def write_plan(path: Path, plan: Plan) -> None:
    """Write plan.arrow; the books travel in the schema's metadata."""
    schema = _SCHEMA.with_metadata({"eyas.books": msgspec.json.encode(plan.books, order="deterministic")})
    replace_file(path, arrow_bytes(plan.table.cast(schema)))


def read_plan(path: Path) -> Plan:
    """Read plan.arrow through a memory map."""
    try:
        table = read_arrow(path)
        books = msgspec.json.decode((table.schema.metadata or {})[b"eyas.books"])
        if not table.schema.equals(_SCHEMA):
            raise pa.ArrowInvalid(f"columns {table.schema.names}")
    except (*READ_ERRORS, msgspec.DecodeError) as error:
        raise CorruptStoreError(
            f"{path} cannot be read as a plan ({error}); restore it from a copy or create the store again", field="plan"
        ) from error
    return Plan(table, books)
