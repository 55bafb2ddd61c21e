"""What a capture will store and how large it will be, said before the target runs."""

import shutil
from pathlib import Path

import numpy as np

from eyas.cache_format.errors import DiskFullError
from eyas.cache_format.estimate import FieldSize, estimate_fields
from eyas.cache_format.schema import FieldSpec
from eyas.cache_format.tables import bytes_text
from eyas.pipeline.plan import PlannedData

__all__ = ["estimate_text", "field_sizes", "plan_text", "require_space"]


def plan_text(data: PlannedData) -> str:
    """Return where the rows of the sources went and what was planned, one fact a line."""
    plan, books = data.plan, data.plan.books
    dropped = ", ".join(f"{n} {reason}" for reason, n in {**books["dropped"], **books["dropped_samples"]}.items() if n)
    lines = [
        f"rows read {books['rows_read']:,}, kept {books['rows_kept']:,}; dropped: {dropped or 'none'}",
        f"samples {books['samples']:,} ({int(plan.heldout.sum()):,} held out, {books['duplicates']:,} duplicates "
        f"left out, {books['truncated']:,} truncated) in {plan.num_shards:,} shard{'s' * (plan.num_shards != 1)}",
        f"tokens {_tokens(data):,}, supervised {int(plan.supervised.sum(dtype=np.int64)):,}",
        f"draft vocabulary {len(data.vocab):,} of {data.vocab.vocab_size:,} ids covers {100 * data.coverage:.2f} % of "
        "the supervised training tokens",
    ]
    return "\n".join(lines)


def field_sizes(fields: tuple[FieldSpec, ...], data: PlannedData) -> list[FieldSize]:
    """Return the bytes per token of every field, and of ids and mask, for the planned data."""
    return estimate_fields(fields, float(data.plan.kept.sum(dtype=np.int64) / _tokens(data)))


def estimate_text(fields: tuple[FieldSpec, ...], data: PlannedData) -> str:
    """Return the estimate, one field a line, and the total last."""
    sizes, tokens = field_sizes(fields, data), _tokens(data)
    per_token = sum(size.bytes_per_token for size in sizes)
    lines = [f"  {size.name:<28} {size.bytes_per_token:>10,.1f} bytes/token" for size in sizes]
    total = f"estimate: {per_token:,.0f} bytes/token, {bytes_text(per_token * tokens)} for {tokens:,} tokens"
    return "\n".join([*lines, total])


def require_space(root: Path, fields: tuple[FieldSpec, ...], data: PlannedData) -> None:
    """Refuse a capture that would not fit on the disk of the existing folder `root`.

    Raises:
        DiskFullError: less is free than the estimate needs.
    """
    needed = sum(size.bytes_per_token for size in field_sizes(fields, data)) * _tokens(data)
    free = shutil.disk_usage(root).free
    if needed > free:
        raise DiskFullError(
            f"{root} has {bytes_text(free)} free, the store needs about {bytes_text(needed)}; choose another disk, "
            "fewer chats (--limit), or a smaller --supervision"
        )


def _tokens(data: PlannedData) -> int:
    return int(data.plan.length.sum(dtype=np.int64))
