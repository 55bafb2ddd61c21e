"""Digests: xxh3-64 for encoded chunks, xxh3-128 for everything that identifies content."""

from collections.abc import Iterable
from pathlib import Path

import xxhash

__all__ = ["Buffer", "chunk_digest", "content_digest", "digest_parts", "file_digest"]

Buffer = bytes | bytearray | memoryview


def chunk_digest(data: Buffer) -> int:
    """Return xxh3-64 of an encoded chunk."""
    return xxhash.xxh3_64_intdigest(data)


def content_digest(data: Buffer) -> str:
    """Return xxh3-128 of ``data`` as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_parts(parts: Iterable[Buffer | str]) -> str:
    """Return xxh3-128 over length-prefixed parts, so that moving a byte between parts changes the digest."""
    state = xxhash.xxh3_128()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        state.update(memoryview(data).nbytes.to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()


def file_digest(path: Path) -> str:
    """Return xxh3-128 of a whole file, read in pieces of 8 MiB."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(8 << 20):
            state.update(piece)
    return state.hexdigest()
