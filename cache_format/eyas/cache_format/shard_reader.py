"""One shard, memory-mapped: rows of any field of any sample, every chunk checked at its first touch.

Thread-safe for readers: checking a chunk twice is harmless, and maps are read-only.
"""

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from eyas.cache_format.array_writer import bits_dtype
from eyas.cache_format.arrow_files import READ_ERRORS, read_arrow
from eyas.cache_format.containers import CONTAINERS, TornArrayError
from eyas.cache_format.digests import chunk_digest, content_digest
from eyas.cache_format.errors import CorruptStoreError, IncompleteStoreError, MissingFieldError
from eyas.cache_format.layout import StorePaths
from eyas.cache_format.manifest import Identity
from eyas.cache_format.plan import Plan
from eyas.cache_format.receipt import ArrayRecord, Receipt
from eyas.cache_format.samples import SampleTable
from eyas.cache_format.schema import FieldSpec

__all__ = ["ShardReader"]


class _Array:
    """The chunks of one field as views of bit patterns, with a mark for every checked chunk."""

    def __init__(
        self, chunks: list[memoryview], digests: np.ndarray, record: ArrayRecord, dtype: np.dtype[Any]
    ) -> None:
        self.chunk_rows = record.layout.chunk_rows
        self.num_rows = record.layout.num_rows
        self.raw = chunks
        self.digests = digests
        self.checked = bytearray(len(chunks))
        width = record.layout.shape[1:]
        self.rows = [np.frombuffer(chunk, bits_dtype(dtype)).reshape(-1, *width) for chunk in chunks]


class ShardReader:
    """Reads one shard: its samples always, its arrays once it is committed."""

    def __init__(self, paths: StorePaths, identity: Identity, plan: Plan, shard: int, receipt: Receipt | None) -> None:
        self.shard = shard
        self._receipt = receipt
        self._paths = paths
        self._specs = {spec.name: spec for spec in identity.fields}
        self._container = CONTAINERS[identity.container]
        self._plan_rows = plan.shard_slice(self.shard)
        self._plan = plan
        self._arrays: dict[str, _Array] = {}
        self._checked_samples = bytearray(self._plan_rows.stop - self._plan_rows.start)

    @property
    def receipt(self) -> Receipt:
        """The shard's commit."""
        if self._receipt is None:
            raise IncompleteStoreError(
                f"{self._paths.root}: shard {self.shard:06d} is not captured yet; run the same `eyas precompute` again"
            )
        return self._receipt

    @property
    def _attempt(self) -> Path:
        return self._paths.attempt(self.shard, self.receipt.attempt)

    def corrupt(self, what: str, field: str) -> CorruptStoreError:
        """Return the error of a fault in this shard, with what to do about it."""
        return CorruptStoreError(
            f"shard {self.shard:06d}, {field}: {what}; restore {self._paths.shard(self.shard)} from a copy, or delete "
            f"{self._paths.receipt(self.shard)} and {self._paths.complete} and run `eyas precompute` again to capture "
            "the shard anew",
            shard=self.shard,
            field=field,
        )

    @cached_property
    def samples(self) -> SampleTable:
        """Ids, masks and spans of the shard."""
        table = SampleTable(self._paths.samples(self.shard), self.shard)
        expected = self._plan_rows.stop - self._plan_rows.start
        if len(table) != expected:
            raise self.corrupt(f"{table.path} has {len(table)} rows, the plan has {expected}", "samples")
        if self._receipt is not None and table.digest != self._receipt.content.samples_digest:
            raise self.corrupt(f"{table.path} does not match the receipt", "samples")
        return table

    def checked_samples(self, row: int) -> SampleTable:
        """Return the samples table once the row hashes to the plan's sample id."""
        if not self._checked_samples[row]:
            self.samples.check_row(row, self._plan.sample_ids[self._plan_rows.start + row].tobytes())
            self._checked_samples[row] = 1
        return self.samples

    @cached_property
    def _present(self) -> np.ndarray:
        present = np.ones(self._plan_rows.stop - self._plan_rows.start, bool)
        present[[q.row for q in self.receipt.content.quarantined]] = False
        return present

    @cached_property
    def _offsets(self) -> dict[str, np.ndarray]:
        counts = {"token": self._plan.length[self._plan_rows], "kept": self._plan.kept[self._plan_rows]}
        return {
            rows: np.concatenate([[0], np.cumsum(np.where(self._present, count, 0), dtype=np.int64)])
            for rows, count in counts.items()
        }

    @cached_property
    def _digests(self) -> dict[str, np.ndarray]:
        path = self._attempt / "digests.arrow"
        try:
            table = read_arrow(path)
            names = table.column("field").to_numpy(zero_copy_only=False)
            values = table.column("xxh3_64").to_numpy()
        except READ_ERRORS as error:
            raise self.corrupt(f"{path} cannot be read ({error})", "digests") from error
        return {name: values[names == name] for name in set(names)}

    def _array(self, spec: FieldSpec) -> _Array:
        if spec.name not in self._arrays:
            self._arrays[spec.name] = self._open(spec)
        return self._arrays[spec.name]

    def _open(self, spec: FieldSpec) -> _Array:
        record = next((r for r in self.receipt.content.arrays if r.field == spec.name), None)
        if record is None:
            raise self.corrupt("the receipt has no such array", spec.name)
        expected = spec.shape(int(self._offsets[spec.rows][-1]))
        if tuple(record.layout.shape) != expected:
            raise self.corrupt(f"the receipt says {list(record.layout.shape)}, the plan {list(expected)}", spec.name)
        digests = self._digests.get(spec.name, np.empty(0, np.uint64))
        if content_digest(digests.astype("<u8").tobytes()) != record.chunks_digest:
            raise self.corrupt(f"{self._attempt / 'digests.arrow'} does not match the receipt", spec.name)
        try:
            chunks = list(self._container.source(self._attempt, spec, record.layout).chunks())
            return _Array(chunks, digests, record, spec.numpy_dtype)
        except (TornArrayError, ValueError) as error:
            raise self.corrupt(str(error), spec.name) from error

    def _check_chunk(self, array: _Array, chunk: int, field: str) -> None:
        if chunk_digest(array.raw[chunk]) != array.digests[chunk]:
            raise self.corrupt(f"chunk {chunk} of {len(array.raw)} is damaged (its digest does not match)", field)
        array.checked[chunk] = 1

    def _pieces(self, array: _Array, start: int, stop: int, field: str) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (position from `start`, checked rows) for every chunk that [start, stop) touches."""
        for chunk in range(start // array.chunk_rows, -(-stop // array.chunk_rows)):
            if not array.checked[chunk]:
                self._check_chunk(array, chunk, field)
            first = max(start, chunk * array.chunk_rows)
            last = min(stop, (chunk + 1) * array.chunk_rows)
            yield first - start, array.rows[chunk][first - chunk * array.chunk_rows : last - chunk * array.chunk_rows]

    def spec(self, field: str) -> FieldSpec:
        """Return the spec of a stored field."""
        if field not in self._specs:
            raise MissingFieldError(
                f"{self._paths.root} does not hold {field}; it holds {', '.join(self._specs)}; "
                "capture again with the --supervision that needs it"
            )
        return self._specs[field]

    def read_into(self, row: int, field: str, out: np.ndarray) -> None:
        """Copy one sample's rows of a stored field into `out`, which has their shape and dtype."""
        spec = self.spec(field)
        array = self._array(spec)
        start, stop = self._offsets[spec.rows][row : row + 2].tolist()
        if out.shape != spec.shape(stop - start) or out.dtype != spec.numpy_dtype:
            raise ValueError(
                f"{field}: out is {out.dtype} {out.shape}, rows are {spec.dtype} {spec.shape(stop - start)}"
            )
        bits = out.view(bits_dtype(out.dtype))
        for position, rows in self._pieces(array, start, stop, field):
            bits[position : position + len(rows)] = rows

    def verify(self, field: str) -> None:
        """Read the whole array of a field and check every chunk and the decoded content.

        Raises:
            CorruptStoreError: names the chunk.
        """
        array = self._array(self.spec(field))
        state = xxhash.xxh3_128()
        for chunk in range(len(array.raw)):
            self._check_chunk(array, chunk, field)
            rows = array.rows[chunk][: array.num_rows - chunk * array.chunk_rows]
            state.update(np.ascontiguousarray(rows).data)
        record = next(r for r in self.receipt.content.arrays if r.field == field)
        if state.hexdigest() != record.content_digest:
            raise self.corrupt("the decoded rows do not match the receipt", field)
