"""The two containers behind one interface: open a sink to write an array, a source to read it back."""

from pathlib import Path

from eyas.cache_format.containers.arrow_container import ArrowSink, ArrowSource
from eyas.cache_format.containers.base import ArrayLayout, ChunkSink, ChunkSource, TornArrayError, plan_chunks
from eyas.cache_format.containers.zarr_container import ZarrSink, ZarrSource, write_zarr_group
from eyas.cache_format.schema import FieldSpec

__all__ = [
    "CONTAINERS",
    "ArrayLayout",
    "ArrowContainer",
    "ChunkSink",
    "ChunkSource",
    "TornArrayError",
    "ZarrContainer",
    "plan_chunks",
]


class ZarrContainer:
    """One Zarr v3 group an attempt, one sharded array a field."""

    pads_last_chunk = True
    """Zarr stores every chunk at full size."""

    @staticmethod
    def prepare(attempt: Path) -> None:
        """Make the attempt folder ready for arrays."""
        write_zarr_group(attempt)

    @staticmethod
    def sink(attempt: Path, spec: FieldSpec, chunks_per_file: int) -> ZarrSink:
        """Open the array of a field for writing."""
        parts = spec.name.split("/")
        for depth in range(1, len(parts)):
            write_zarr_group(attempt.joinpath(*parts[:depth]))
        num_axes = 1 if spec.width is None else 2
        return ZarrSink(attempt / spec.name, num_axes=num_axes, chunks_per_file=chunks_per_file)

    @staticmethod
    def source(attempt: Path, spec: FieldSpec, layout: ArrayLayout) -> ZarrSource:
        """Open the array of a field for reading."""
        return ZarrSource(attempt / spec.name, layout)


class ArrowContainer:
    """One memory-mapped Arrow IPC file a field."""

    pads_last_chunk = False

    @staticmethod
    def prepare(attempt: Path) -> None:
        """Nothing to prepare: an attempt is a plain folder."""

    @staticmethod
    def sink(attempt: Path, spec: FieldSpec, chunks_per_file: int) -> ArrowSink:
        """Open the array of a field for writing."""
        return ArrowSink(attempt / f"{spec.name}.arrow", dtype=spec.dtype, width=spec.width)

    @staticmethod
    def source(attempt: Path, spec: FieldSpec, layout: ArrayLayout) -> ArrowSource:
        """Open the array of a field for reading."""
        return ArrowSource(attempt / f"{spec.name}.arrow", layout)


CONTAINERS: dict[str, type[ZarrContainer] | type[ArrowContainer]] = {"zarr": ZarrContainer, "arrow": ArrowContainer}
