"""The books of a capture: what a run has committed, lost and left, and whether every planned row is accounted for."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas.cache_format.layout import StorePaths
from eyas.cache_format.plan import Plan
from eyas.cache_format.receipt import load_receipt
from eyas.cache_format.tables import bytes_text
from eyas.pipeline.errors import CaptureError
from eyas.pipeline.journal import RunFolder

__all__ = ["Tally", "check_books", "outcome_text"]


@dataclass
class Tally:
    """What the records of one run add up to."""

    root: Path
    plan: Plan
    max_quarantine: float
    pending: set[int]
    """Shards without a receipt."""
    captured_tokens: int = 0
    """Planned tokens of the shards that this run committed."""
    quarantined: int = 0
    """Rows that this run lost."""

    def add(self, record: dict[str, Any]) -> None:
        """Add the record of one shard.

        Raises:
            CaptureError: the shard failed, or more rows are lost than `max_quarantine` allows.
        """
        shard = record["shard"]
        if record["status"] == "failed":
            raise CaptureError(f"shard {shard:06d}: {record['error']}")
        if record["status"] == "committed" and shard in self.pending:  # Ray may run a shard twice
            self.pending.remove(shard)
            self.captured_tokens += self.tokens(shard)
            self.quarantined += record["quarantined"]
            _check_budget(self.root, self.quarantined, len(self.plan), self.max_quarantine)

    def tokens(self, shard: int, rows: int | None = None) -> int:
        """Return the planned tokens of a shard, or of its first `rows` rows."""
        return int(self.plan.length[self.plan.shard_slice(shard)][:rows].sum(dtype=np.int64))

    def tokens_by_now(self, run: RunFolder) -> int:
        """Return the captured tokens, those of shards in flight included."""
        in_flight = run.rows_done(self.pending)
        return self.captured_tokens + sum(self.tokens(shard, rows) for shard, rows in in_flight.items())


def check_books(root: Path, plan: Plan, max_quarantine: float) -> None:
    """Check that the rows of the plan are the rows committed plus the rows quarantined, shard by shard, from receipts.

    Raises:
        CaptureError: a receipt counts other rows or tokens than the plan, or too many rows are lost.
    """
    paths, quarantined = StorePaths(root), 0
    for shard in range(plan.num_shards):
        content = load_receipt(paths, shard).content
        lost = {row.row for row in content.quarantined}
        planned = plan.length[plan.shard_slice(shard)]
        stored = sum(int(length) for row, length in enumerate(planned) if row not in lost)
        if content.rows != len(planned) or content.tokens != stored:
            raise CaptureError(
                f"shard {shard:06d}: its receipt counts {content.rows} rows and {content.tokens} tokens, the plan "
                f"{len(planned)} and {stored}; delete {paths.receipt(shard)} and run again"
            )
        quarantined += len(lost)
    _check_budget(root, quarantined, len(plan), max_quarantine)


def _check_budget(root: Path, quarantined: int, planned_rows: int, max_quarantine: float) -> None:
    """One row is always allowed, so that a share means something for small data too."""
    if quarantined > max(1.0, max_quarantine * planned_rows):
        raise CaptureError(
            f"{quarantined} of {planned_rows} rows could not be captured, more than max_quarantine "
            f"{max_quarantine:g} allows; {root}/quarantine names them, shard by shard, with the reasons. To go on "
            f"without them, raise --max-quarantine; to capture a shard again, delete its file in {root}/receipts and "
            "run the same command"
        )


def outcome_text(root: Path, plan: Plan) -> str:
    """Return what a complete store holds, from its receipts."""
    contents = [load_receipt(StorePaths(root), shard).content for shard in range(plan.num_shards)]
    tokens = sum(content.tokens for content in contents)
    stored = sum(record.stored_bytes for content in contents for record in content.arrays)
    quarantined = sum(len(content.quarantined) for content in contents)
    return (
        f"{root} is complete: {tokens:,} tokens, {bytes_text(stored)} of arrays ({stored / max(1, tokens):,.0f} "
        f"bytes/token), {quarantined} rows quarantined"
    )
