"""Small Arrow IPC files: written whole, and validated before a single value is trusted.

A flipped bit in an offset of an unvalidated file makes Arrow read outside its buffers, which ends the process.
"""

from pathlib import Path

import pyarrow as pa

__all__ = ["READ_ERRORS", "arrow_bytes", "read_arrow"]

READ_ERRORS = (OSError, pa.ArrowInvalid, pa.ArrowKeyError, pa.ArrowNotImplementedError, KeyError, IndexError)
"""What reading a damaged Arrow file can raise; each caller turns these into an error that names its file."""


def arrow_bytes(table: pa.Table | pa.RecordBatch) -> bytes:
    """Return an Arrow IPC file of one record batch; equal tables give equal bytes."""
    if isinstance(table, pa.RecordBatch):
        table = pa.Table.from_batches([table])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks(), max_chunksize=max(1, table.num_rows))
    return bytes(sink.getvalue())


def read_arrow(path: Path) -> pa.Table:
    """Return a memory-mapped, fully validated table.

    Raises:
        OSError, pa.ArrowInvalid, ...: see READ_ERRORS.
    """
    with pa.memory_map(str(path)) as file, pa.ipc.open_file(file) as reader:
        table = reader.read_all()
    table.validate(full=True)
    return table
