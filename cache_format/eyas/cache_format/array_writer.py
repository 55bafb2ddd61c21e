"""Writes the array of one field: rows in, digested chunks out, one chunk in memory."""

from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from eyas.cache_format.containers import CONTAINERS, ArrayLayout, plan_chunks
from eyas.cache_format.digests import chunk_digest, content_digest
from eyas.cache_format.errors import NonFiniteError, StoreError
from eyas.cache_format.receipt import ArrayRecord
from eyas.cache_format.schema import FieldSpec

__all__ = ["ArrayWriter", "bits_dtype", "magnitude"]

_FIRST_NON_FINITE = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}


def bits_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the unsigned integer dtype of the same size; numpy copies it as plain memory."""
    return np.dtype(f"<u{dtype.itemsize}")


def magnitude(spec: FieldSpec, rows: np.ndarray) -> float | None:
    """Return the largest magnitude of float rows, None for integer fields.

    Works on bit patterns: without its sign bit a float orders like an integer, and NaN and Inf order last, so one
    pass gives both the maximum and the check.

    Raises:
        NonFiniteError: a value is NaN or Inf.
    """
    limit = _FIRST_NON_FINITE.get(spec.dtype)
    if limit is None:
        return None
    bits = bits_dtype(rows.dtype)
    sign = bits.type(1 << (8 * bits.itemsize - 1))
    largest = (rows.view(bits) & ~sign).max(initial=bits.type(0))
    if largest >= limit:
        raise NonFiniteError(f"{spec.name} holds NaN or Inf", field=spec.name)
    return float(np.array([largest], bits).view(rows.dtype)[0])


class ArrayWriter:
    """Appends rows to the array of one field of one attempt."""

    def __init__(self, attempt: Path, spec: FieldSpec, *, container: str, planned_rows: int, chunk_bytes: int) -> None:
        self.spec = spec
        self.chunk_digests: list[int] = []
        self._container = CONTAINERS[container]
        self._chunk_rows, self._per_file = plan_chunks(planned_rows, spec.row_bytes, chunk_bytes)
        self._sink = self._container.sink(attempt, spec, self._per_file)
        self._buffer = np.zeros(spec.shape(self._chunk_rows), bits_dtype(spec.numpy_dtype))
        self._filled = 0
        self._num_rows = 0
        self._stored_bytes = 0
        self._content = xxhash.xxh3_128()
        self._abs_max = 0.0

    def check(self, rows: np.ndarray, expected_rows: int) -> tuple[np.ndarray, float]:
        """Return rows as contiguous memory and their largest magnitude, or raise when they cannot be stored."""
        expected = self.spec.shape(expected_rows)
        if rows.shape != expected or rows.dtype != self.spec.numpy_dtype:
            raise StoreError(
                f"{self.spec.name}: expected {self.spec.dtype} {list(expected)}, found {rows.dtype} {list(rows.shape)}"
            )
        rows = np.ascontiguousarray(rows)
        return rows, magnitude(self.spec, rows) or 0.0

    def append(self, rows: np.ndarray, abs_max: float) -> None:
        """Append checked rows."""
        self._abs_max = max(self._abs_max, abs_max)
        bits = rows.view(self._buffer.dtype)
        self._content.update(bits.data)
        self._num_rows += len(bits)
        start = 0
        while start < len(bits):
            count = min(len(bits) - start, self._chunk_rows - self._filled)
            self._buffer[self._filled : self._filled + count] = bits[start : start + count]
            self._filled += count
            start += count
            if self._filled == self._chunk_rows:
                self._flush()

    def _flush(self) -> None:
        # Arrow keeps every buffer it was given until the batch is written, Zarr files copy at once: both are done
        # with the bytes when write_chunk returns, so the buffer is reused.
        rows = self._buffer if self._container.pads_last_chunk else self._buffer[: self._filled]
        data = memoryview(rows.data).cast("B")
        self.chunk_digests.append(chunk_digest(data))
        self._stored_bytes += data.nbytes
        self._sink.write_chunk(data)
        self._filled = 0

    def finish(self) -> ArrayRecord:
        """Write the last chunk and the metadata; return the record for the receipt."""
        if self._filled:
            self._buffer[self._filled :] = 0
            self._flush()
        spec = self.spec
        layout = ArrayLayout(spec.shape(self._num_rows), spec.dtype, spec.codec, self._chunk_rows, self._per_file)
        self._sink.finish(layout)
        return ArrayRecord(
            field=spec.name,
            layout=layout,
            stored_bytes=self._stored_bytes,
            chunks_digest=content_digest(np.array(self.chunk_digests, "<u8").tobytes()),
            content_digest=self._content.hexdigest(),
            abs_max=self._abs_max if spec.dtype in _FIRST_NON_FINITE else None,
        )

    def close(self) -> None:
        """Release the files of an abandoned attempt."""
        self._sink.close()
