"""Arrow IPC files: one file an array, one record batch a chunk, raw bits, memory-mapped.

A wide field is a column `rows` of fixed-size lists, a scalar field a plain column; bf16 travels as uint16 with its true
name in the schema's metadata.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from eyas.cache_format.arrow_files import READ_ERRORS
from eyas.cache_format.containers.base import ArrayLayout, TornArrayError
from eyas.cache_format.layout import sync_folder, translate_disk_full

__all__ = ["ArrowSink", "ArrowSource"]

_VALUES = {"bfloat16": pa.uint16(), "float16": pa.float16(), "float32": pa.float32(), "uint32": pa.uint32()}


def _schema(dtype: str, width: int | None) -> pa.Schema:
    column = _VALUES[dtype] if width is None else pa.list_(_VALUES[dtype], width)
    return pa.schema([pa.field("rows", column, nullable=False)], metadata={"eyas_dtype": dtype})


class ArrowSink:
    """Writes one array as an Arrow IPC file."""

    def __init__(self, path: Path, *, dtype: str, width: int | None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._values = _VALUES[dtype]
        self._width = width
        self._schema = _schema(dtype, width)
        self._file = path.open("wb")
        self._writer = pa.ipc.new_file(self._file, self._schema)

    def write_chunk(self, data: bytes | memoryview) -> None:
        """Append one record batch whose values are exactly these bytes."""
        num_values = memoryview(data).nbytes // (self._values.bit_width // 8)
        column = pa.Array.from_buffers(self._values, num_values, [None, pa.py_buffer(data)])
        if self._width is not None:
            column = pa.FixedSizeListArray.from_arrays(column, self._width)
        with translate_disk_full(self._path):
            self._writer.write_batch(pa.record_batch([column], schema=self._schema))

    def finish(self, layout: ArrayLayout) -> None:
        """Write the footer and make the file durable."""
        with translate_disk_full(self._path):
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        sync_folder(self._path.parent)

    def close(self) -> None:
        """Release the open file of an abandoned attempt."""
        if not self._file.closed:
            self._file.close()


class ArrowSource:
    """Reads one array through a memory map."""

    def __init__(self, path: Path, layout: ArrayLayout) -> None:
        self._path = path
        self._layout = layout

    def chunks(self) -> Sequence[memoryview]:
        """Return a view of every record batch's values."""
        try:
            reader = pa.ipc.open_file(pa.memory_map(str(self._path)))
            columns = [reader.get_batch(i).column(0) for i in range(reader.num_record_batches)]
            for column in columns:
                column.validate(full=True)
        except READ_ERRORS as error:
            raise TornArrayError(f"{self._path} cannot be read ({error})") from error
        width = self._layout.shape[1] if len(self._layout.shape) == 2 else None
        if not reader.schema.equals(_schema(self._layout.dtype, width), check_metadata=True):
            raise TornArrayError(f"{self._path} is the array of another field (its column is {reader.schema})")
        if len(columns) != self._layout.num_chunks:
            raise TornArrayError(f"{self._path} has {len(columns)} chunks, expected {self._layout.num_chunks}")
        return [_values_view(column) for column in columns]


def _values_view(column: pa.Array) -> memoryview:
    values = column.flatten() if pa.types.is_fixed_size_list(column.type) else column
    return memoryview(np.asarray(values).view(np.uint8).data)
