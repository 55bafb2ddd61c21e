"""Zarr v3 sharded arrays: the default container, readable by any Zarr library.

We write and read the sharding format ourselves. zarr-python reads random samples at a tenth of memory speed, returns
zeros for an absent chunk and does not notice two swapped ones; it serves as the oracle in the tests. One Zarr shard
file holds whole chunks back to back, then the index: (offset, length) as two little-endian uint64 a chunk. The index
carries no checksum of its own, since every chunk has a digest outside the file.

Source: Zarr v3 specification, section "Sharding codec".
"""

import json
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eyas.cache_format.containers.base import ArrayLayout, TornArrayError
from eyas.cache_format.layout import sync_folder, translate_disk_full

__all__ = ["ZarrSink", "ZarrSource", "write_zarr_group"]

_ABSENT = np.uint64(2**64 - 1)
_ZARR_DTYPES = {"bfloat16": "uint16", "float16": "float16", "float32": "float32", "uint32": "uint32"}


def _metadata(layout: ArrayLayout) -> dict[str, Any]:
    inner = [layout.chunk_rows, *layout.shape[1:]]
    codecs: list[dict[str, Any]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    sharding = {
        "chunk_shape": inner,
        "codecs": codecs,
        "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
        "index_location": "end",
    }
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(layout.shape),
        "data_type": _ZARR_DTYPES[layout.dtype],
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": [layout.chunk_rows * layout.chunks_per_file, *layout.shape[1:]]},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0,
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
        "attributes": {"eyas_dtype": layout.dtype},
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with translate_disk_full(path), path.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def write_zarr_group(folder: Path) -> None:
    """Make a folder a Zarr group, so that `zarr.open` on an attempt lists its arrays."""
    _write_json(folder / "zarr.json", {"zarr_format": 3, "node_type": "group", "attributes": {}})


def _shard_path(folder: Path, number: int, num_axes: int) -> Path:
    return folder.joinpath("c", str(number), *["0"] * (num_axes - 1))


class ZarrSink:
    """Writes one array; a shard file is written front to back, once."""

    def __init__(self, folder: Path, *, num_axes: int, chunks_per_file: int) -> None:
        self._folder = folder
        self._num_axes = num_axes
        self._per_file = chunks_per_file
        self._lengths: list[int] = []
        self._number = 0
        self._file: Any = None
        folder.mkdir(parents=True, exist_ok=True)

    def write_chunk(self, data: bytes | memoryview) -> None:
        """Append the next encoded chunk."""
        if self._file is None:
            path = _shard_path(self._folder, self._number, self._num_axes)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("wb")
        with translate_disk_full(self._folder):
            self._file.write(data)
        self._lengths.append(memoryview(data).nbytes)
        if len(self._lengths) == self._per_file:
            self._close_file()

    def _close_file(self) -> None:
        if self._file is None:
            return
        index = np.full((self._per_file, 2), _ABSENT, dtype="<u8")
        lengths = np.array(self._lengths, dtype="<u8")
        index[: len(lengths), 1] = lengths
        index[: len(lengths), 0] = np.cumsum(lengths) - lengths
        with translate_disk_full(self._folder), self._file as file:
            file.write(index.tobytes())
            file.flush()
            os.fsync(file.fileno())
        sync_folder(_shard_path(self._folder, self._number, self._num_axes).parent)
        self._file, self._lengths = None, []
        self._number += 1

    def finish(self, layout: ArrayLayout) -> None:
        """Close the last shard file and write zarr.json."""
        self._close_file()
        _write_json(self._folder / "zarr.json", _metadata(layout))

    def close(self) -> None:
        """Release the open file of an abandoned attempt."""
        if self._file is not None:
            self._file.close()
            self._file = None


class ZarrSource:
    """Reads one array through memory maps of its shard files."""

    def __init__(self, folder: Path, layout: ArrayLayout) -> None:
        self._folder = folder
        self._layout = layout

    def chunks(self) -> Sequence[memoryview]:
        """Return a view of every encoded chunk."""
        views: list[memoryview] = []
        total, per_file = self._layout.num_chunks, self._layout.chunks_per_file
        for number in range(-(-total // per_file)):
            expected = min(per_file, total - number * per_file)
            views += self._file_chunks(_shard_path(self._folder, number, len(self._layout.shape)), expected)
        return views

    def _file_chunks(self, path: Path, expected: int) -> list[memoryview]:
        index_bytes = 16 * self._layout.chunks_per_file
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < index_bytes:
                    raise TornArrayError(f"{path} has {size} bytes, its index alone needs {index_bytes}")
                view = memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ))
        except OSError as error:
            raise TornArrayError(f"{path} cannot be opened ({error.strerror})") from error
        index = np.frombuffer(view[size - index_bytes :], "<u8").reshape(-1, 2)[:expected]
        if (index == _ABSENT).any():
            raise TornArrayError(f"{path} lacks chunk {int((index == _ABSENT).any(1).argmax())} of {expected}")
        ends = index[:, 0] + index[:, 1]
        if (ends > size - index_bytes).any() or int(index[:, 1].sum()) != size - index_bytes:
            raise TornArrayError(f"{path} has {size} bytes, its index describes {int(index[:, 1].sum()) + index_bytes}")
        return [view[int(offset) : int(offset + length)] for offset, length in index]
