"""What a command returns to the front door: text to print and an exit code."""

from dataclasses import dataclass

__all__ = ["Report"]


@dataclass(frozen=True)
class Report:
    """The outcome of one command."""

    text: str
    """What a person reads on standard output."""

    exit_code: int = 0
    """0 done, 1 failed."""
