"""What a tensor container is: a folder or file that holds one array as a sequence of encoded chunks.

A container knows nothing of digests, codecs' meaning or samples. Chunk i holds the encoded rows
[i * chunk_rows, (i + 1) * chunk_rows); the last chunk may cover rows past the end (Zarr pads it) or not (Arrow).
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

__all__ = ["ArrayLayout", "ChunkSink", "ChunkSource", "TornArrayError"]


class TornArrayError(Exception):
    """The bytes of an array are not what its layout says; the reader turns this into a CorruptStoreError."""


class ArrayLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one array lies in its container."""

    shape: tuple[int, ...]
    """Rows first; one axis for scalar fields."""
    dtype: str
    codec: dict[str, Any]
    chunk_rows: int

    @property
    def num_rows(self) -> int:
        """Rows of the array."""
        return self.shape[0]

    @property
    def num_chunks(self) -> int:
        """Chunks of the array."""
        return -(-self.num_rows // self.chunk_rows)


class ChunkSink(Protocol):
    """Writes one array, chunk after chunk."""

    def write_chunk(self, data: bytes | memoryview) -> None:
        """Append the next encoded chunk."""
        ...

    def finish(self, layout: ArrayLayout) -> None:
        """Write the metadata and make every byte durable."""
        ...


class ChunkSource(Protocol):
    """Reads encoded chunks of one array without copying them."""

    def chunks(self) -> Sequence[memoryview]:
        """Return a view of every encoded chunk, in order.

        Raises:
            TornArrayError: files are missing or shorter than the layout says.
        """
        ...
