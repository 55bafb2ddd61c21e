"""Metrics of a run: metrics.jsonl for machines, TensorBoard when it is installed, one line or a bar for people.

metrics.jsonl has one object a line: {"kind": "train", ...} for every optimizer step and {"kind": "heldout", ...} for
every evaluation. A resumed run first drops the lines behind its checkpoint, so the file reads as if nothing happened.
"""

import json
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from eyas.cache_format.layout import replace_file

logger = logging.getLogger(__name__)


class TrainLog:
    """Writes the metrics of one run; a context manager."""

    def __init__(self, out: Path, *, done_steps: int, total_steps: int, log_every: int) -> None:
        self._path = out / "metrics.jsonl"
        keep_until(self._path, done_steps)
        self._file = self._path.open("a", encoding="utf-8")
        self._board = _tensorboard(out / "tensorboard", done_steps)
        self._total = total_steps
        self._every = log_every
        self._bar = _bar(total_steps, done_steps)
        self._window: list[Mapping[str, Any]] = []

    def __enter__(self) -> "TrainLog":
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._bar is not None:
            self._bar.stop()

    def train_step(self, record: Mapping[str, Any]) -> None:
        """Record one optimizer step. Keys: step, epoch, loss, accuracy (per depth), accept_length, and the rest."""
        self._write({"kind": "train", **record})
        self._window.append(record)
        mean = _mean_over(self._window)
        line = _progress_line(mean, self._total)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=record["step"], description=line)
        if record["step"] % self._every == 0 or record["step"] == self._total:
            self._window.clear()
            self._scalars("train", mean)
            if self._bar is None:
                logger.info(line)

    def heldout(self, record: Mapping[str, Any]) -> None:
        """Record one evaluation on the held-out split."""
        self._write({"kind": "heldout", **record})
        self._scalars("heldout", record)
        logger.info(
            "held-out after step %d: loss %s, accuracy by depth %s, simulated acceptance length %s",
            record["step"],
            _number(record["loss"]),
            _depths(record["accuracy"]),
            _number(record["accept_length"]),
        )

    def flush(self) -> None:
        """Make everything recorded so far durable; called before a checkpoint is published."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def _write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()

    def _scalars(self, group: str, record: Mapping[str, Any]) -> None:
        if self._board is None:
            return
        for name, value in record.items():
            if isinstance(value, list):
                for depth, part in enumerate(value):
                    if part is not None:
                        self._board.add_scalar(f"{group}/{name}/depth_{depth + 1}", part, record["step"])
            elif isinstance(value, int | float) and name != "step":
                self._board.add_scalar(f"{group}/{name}", value, record["step"])


def read_metrics(run: Path, kind: str) -> list[dict[str, Any]]:
    """Return the records of one kind ("train" or "heldout") of a run, in order."""
    with (run / "metrics.jsonl").open(encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return [record for record in records if record["kind"] == kind]


def keep_until(path: Path, done_steps: int) -> None:
    """Drop records behind the checkpoint, and a line that a kill cut in half."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if record["step"] > done_steps:
            break
        kept.append(line)
    replace_file(path, "".join(line + "\n" for line in kept).encode())


def _tensorboard(folder: Path, done_steps: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        logger.info("tensorboard is not installed: metrics go to metrics.jsonl alone")
        return None
    return SummaryWriter(str(folder), purge_step=done_steps + 1 if done_steps else None)


def _bar(total_steps: int, done_steps: int) -> Progress | None:
    if not sys.stderr.isatty():
        return None
    columns = (BarColumn(bar_width=24), TextColumn("{task.description}"), TimeRemainingColumn())
    bar = Progress(*columns, console=Console(stderr=True))
    bar.add_task("", total=total_steps, completed=done_steps)
    bar.start()
    return bar


def _mean_over(window: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the newest record with what fluctuates averaged since the last line; a skipped step counts for nothing."""
    mean = dict(window[-1])
    for name in ("loss", "accept_length", "grad_norm", "stall"):
        values = [record[name] for record in window if record[name] is not None]
        mean[name] = sum(values) / len(values) if values else None
    mean["tokens_per_s"] = sum(record["tokens"] for record in window) / sum(record["seconds"] for record in window)
    by_depth = zip(*(record["accuracy"] for record in window), strict=True)
    known = [[value for value in values if value is not None] for values in by_depth]
    mean["accuracy"] = [sum(values) / len(values) if values else None for values in known]
    return mean


def _progress_line(record: Mapping[str, Any], total_steps: int) -> str:
    return (
        f"step {record['step']}/{total_steps} epoch {record['epoch']}  loss {_number(record['loss'])}  "
        f"accuracy {_depths(record['accuracy'])}  acceptance {_number(record['accept_length'])} (simulated)  "
        f"{record['tokens_per_s']:.0f} tok/s  stall {100 * record['stall']:.1f}%  lr {record['lr']:.2e}  "
        f"grad {_number(record['grad_norm'])}"
    )


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"


def _depths(values: list[float | None]) -> str:
    return "/".join("n/a" if value is None else f"{value:.3f}" for value in values)
