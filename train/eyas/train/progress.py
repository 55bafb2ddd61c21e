"""How far a run has come, what it says about that, and the signals that end it early."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas.cache_format.report import Report
from eyas.train.config import TrainConfig
from eyas.train.loader import Position
from eyas.train.run import Run

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Progress:
    """How far a run has come: with the weights and moments, all that a checkpoint must remember."""

    global_step: int = 0
    epoch: int = 0
    step: int = 0
    skipped_steps: int = 0
    heldout: dict[str, Any] | None = None
    best: dict[str, Any] | None = None
    skipped_in_a_row: int = 0

    @property
    def evaluated_step(self) -> int | None:
        """Step of the last evaluation; without a held-out split, of the last checkpoint that stood in for one."""
        return (self.heldout or self.best or {}).get("step")

    def advance(self, position: Position) -> None:
        """Note that the global batch at `position` is done."""
        self.global_step += 1
        self.epoch, self.step = position.epoch, position.step + 1


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Yield a list that SIGTERM and SIGINT add their number to: the present step is finished and saved first."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    previous = {
        number: signal.signal(number, lambda number, _frame: received.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def describe(run: Run, progress: Progress) -> None:
    """Log what is about to happen, in three lines."""
    config, order = run.config, run.order(0)
    trainable = sum(parameter.numel() for parameter in run.draft.parameters() if parameter.requires_grad)
    train_rows = ~run.reader.plan.heldout
    absent = int((train_rows & ~run.reader.available).sum())
    long = int((run.reader.plan.length[train_rows] > config.tokens_per_micro_batch).sum())
    logger.info(
        "%s draft of %s: %.1f M trainable parameters, draft vocabulary %d of %d, %s supervision, %s",
        config.family,
        run.reader.identity.target.name,
        trainable / 1e6,
        len(run.vocab),
        run.vocab.vocab_size,
        run.encoding,
        run.device,
    )
    logger.info(
        "%d training samples (%d absent; %d longer than a micro-batch, packed alone), %d held out, %d steps an epoch",
        int(train_rows.sum()) - absent,
        absent,
        long,
        int(run.reader.plan.heldout.sum()),
        order.num_steps,
    )
    if progress.global_step:
        logger.info("resuming after step %d (epoch %d)", progress.global_step, progress.epoch)


def stopped_report(config: TrainConfig, progress: Progress, number: int) -> Report:
    """Return what a run says that a signal ended: 143 for SIGTERM, 130 for SIGINT, as a shell reports them."""
    name = signal.Signals(number).name
    return Report(
        f"stopped by {name} after step {progress.global_step}, which is saved in {config.out}/checkpoints/latest; "
        "run the same command again to go on",
        exit_code=128 + number,
    )


def finished_report(run: Run, progress: Progress, export: Path) -> Report:
    """Return the summary of a finished run."""
    best = progress.best or {}
    held = "n/a (no held-out rows)"
    if "accept_length" in best:
        held = f"{best['accept_length']:.3f} (simulated on held-out rows, chain, greedy, depth {run.config.ttt_steps})"
    lines = [
        f"trained {progress.global_step} steps from {run.config.store} ({run.encoding} supervision)",
        f"acceptance length: {held}, best at step {best.get('step')}",
        f"skipped steps: {progress.skipped_steps}",
        f"draft: {export}",
    ]
    return Report("\n".join(lines))
