"""Acceptance counted as engines count it (vLLM 0.32 spec-decode counters): by verification pass, over all prompts."""

from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Acceptance"]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Counts of a chain of K drafted tokens a pass. The token that prefill emits belongs to no pass."""

    passes: int
    """Verification passes of the target."""
    accepted_at: tuple[int, ...]
    """[K] passes that accepted the drafted token at each position; never increasing."""

    @classmethod
    def count(cls, accepted: Iterable[int], depth: int) -> "Acceptance":
        """Return the counts of passes that accepted so many tokens each."""
        passes = list(accepted)
        return cls(len(passes), tuple(sum(length > position for length in passes) for position in range(depth)))

    @property
    def accepted(self) -> int:
        """Accepted drafted tokens."""
        return sum(self.accepted_at)

    @property
    def length(self) -> float | None:
        """Acceptance length: tokens a pass, 1 + accepted / passes; None without a pass."""
        return 1 + self.accepted / self.passes if self.passes else None

    def unconditional(self) -> list[float | None]:
        """Return the share of all passes that accepted each position, [K]."""
        return [count / self.passes if self.passes else None for count in self.accepted_at]

    def conditional(self) -> list[float | None]:
        """Return the share of passes that accepted a position among those that accepted the one before, [K]."""
        before = (self.passes, *self.accepted_at)
        return [count / reached if reached else None for count, reached in zip(self.accepted_at, before, strict=False)]
