"""What a tensor container is: a folder or file that holds one array as a sequence of encoded chunks.

A container knows nothing of digests, codecs' meaning or samples. Chunk i holds the encoded rows
[i * chunk_rows, (i + 1) * chunk_rows); the last chunk may cover rows past the end (Zarr pads it) or not (Arrow).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

__all__ = ["MAX_FILE_BYTES", "ArrayLayout", "ChunkSink", "ChunkSource", "TornArrayError", "plan_chunks"]

MAX_FILE_BYTES = 128 << 20
"""Upper bound of one shard file: small enough to upload in one piece."""


class TornArrayError(Exception):
    """The bytes of an array are not what its layout says; the reader turns this into a CorruptStoreError."""


class ArrayLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one array lies in its container."""

    shape: tuple[int, ...]
    """Rows first; one axis for scalar fields."""
    dtype: str
    codec: dict[str, Any]
    chunk_rows: int
    chunks_per_file: int
    """Chunks of one Zarr shard file; an Arrow array is one file."""

    @property
    def num_rows(self) -> int:
        """Rows of the array."""
        return self.shape[0]

    @property
    def num_chunks(self) -> int:
        """Chunks of the array."""
        return -(-self.num_rows // self.chunk_rows)


def plan_chunks(num_rows: int, row_bytes: int, chunk_bytes: int) -> tuple[int, int]:
    """Return (chunk_rows, chunks_per_file) for an array: even chunks of at most `chunk_bytes`, at least one row.

    Even chunks keep the padding of the last one below one row a chunk.
    """
    most_rows = max(1, chunk_bytes // row_bytes)
    num_chunks = max(1, -(-num_rows // most_rows))
    chunk_rows = max(1, -(-num_rows // num_chunks))
    return chunk_rows, max(1, min(num_chunks, MAX_FILE_BYTES // (chunk_rows * row_bytes)))


class ChunkSink(Protocol):
    """Writes one array, chunk after chunk."""

    def write_chunk(self, data: bytes | memoryview) -> None:
        """Append the next encoded chunk."""
        ...

    def finish(self, layout: ArrayLayout) -> None:
        """Write the metadata and make every byte durable."""
        ...

    def close(self) -> None:
        """Release what an abandoned attempt holds open; the written bytes are deleted by the caller."""
        ...


class ChunkSource(Protocol):
    """Reads encoded chunks of one array without copying them."""

    def chunks(self) -> Sequence[memoryview]:
        """Return a view of every encoded chunk, in order.

        Raises:
            TornArrayError: files are missing or shorter than the layout says.
        """
        ...
