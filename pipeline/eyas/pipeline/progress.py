"""Progress of a capture: a bar on a terminal, one log line per interval elsewhere."""

import logging
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

__all__ = ["Progress"]

_log = logging.getLogger(__name__)


class Progress:
    """Counts captured tokens."""

    def __init__(self, *, total: int, interval: float) -> None:
        self._total = total
        self._interval = interval
        self._done = 0
        self._start = self._last = time.monotonic()
        self._begun: tuple[float, int] | None = None  # when the first batch was seen, and its tokens
        columns = (TextColumn("capture"), BarColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
        self._bar = Bar(*columns, console=Console(stderr=True)) if sys.stderr.isatty() else None

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task("capture", total=self._total, rate="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif kind is None:
            self._line()

    def update(self, done: int) -> None:
        """Show how many tokens are captured by now."""
        self._done = done
        if done and self._begun is None:
            self._begun = time.monotonic(), done
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, rate=f"{self._rate():,.0f} tokens/s")
        elif time.monotonic() - self._last >= self._interval:
            self._line()

    def _rate(self) -> float:
        """Tokens a second since the first batch, so that loading the target does not count."""
        now = time.monotonic()
        if self._begun is not None and self._done > self._begun[1]:
            return (self._done - self._begun[1]) / max(1e-9, now - self._begun[0])
        return self._done / max(1e-9, now - self._start)

    def _line(self) -> None:
        self._last = time.monotonic()
        rate = self._rate()
        left = f"{(self._total - self._done) / rate:,.0f} s left" if rate > 0 else "no batch done yet"
        _log.info(
            "captured %s of %s tokens, %s tokens/s, %s", f"{self._done:,}", f"{self._total:,}", f"{rate:,.0f}", left
        )
