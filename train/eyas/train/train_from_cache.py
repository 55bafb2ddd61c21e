"""`eyas train-from-cache`: open the store, build or resume the draft, train, evaluate, checkpoint, export.

Read this file first. The target is not resident: of it, the store holds the input embeddings, the lm_head and the
final norm. What a step is lies in stepping.py, what the draft learns in objectives/, the order of samples in order.py.
"""

import logging
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from eyas.cache_format.layout import replace_file
from eyas.cache_format.report import Report
from eyas.cache_format.writer import StoreLock
from eyas.configuration import to_toml
from eyas.train.checkpoint import (
    Checkpoint,
    Meta,
    checkpoints_folder,
    find_latest,
    load_checkpoint,
    require_same_run,
    restore_rng,
    rng_state,
    save_checkpoint,
)
from eyas.train.config import TrainConfig
from eyas.train.errors import CheckpointError, ExportError, TrainError
from eyas.train.evaluation import evaluate_heldout
from eyas.train.export import write_export
from eyas.train.export_checks import faults_of_draft
from eyas.train.loader import Loader, Position
from eyas.train.optim import build_optimizer, quarantine_step
from eyas.train.progress import Progress, describe, finished_report, stop_signals, stopped_report
from eyas.train.run import Run
from eyas.train.stepping import Accumulator, StepResult, accumulate, apply_step
from eyas.train.train_log import TrainLog, keep_until

logger = logging.getLogger(__name__)

# One bad sample costs one step; this many in a row mean that training has diverged.
MAX_SKIPPED_IN_A_ROW = 20


def train_from_cache(config: TrainConfig) -> Report:
    """Run `eyas train-from-cache`; the same command again resumes exactly where the last checkpoint lies.

    Raises:
        StoreError: the store cannot be opened or a stored byte is wrong; nothing is trained on it.
        TrainError: the configuration does not fit the store or the existing run, or training diverged.
    """
    run = Run.open(config)
    require_own_folder(config.out)
    require_servable(run)
    with StoreLock(config.out):
        return train(run)


def train(run: Run) -> Report:
    """Train to the end, or to a signal, while this process owns --out."""
    config = run.config
    optimizer = build_optimizer(run.draft, config)
    progress = resume_or_start(run, optimizer)
    describe(run, progress)
    with (
        stop_signals() as stopped,
        TrainLog(
            config.out,
            done_steps=progress.global_step,
            total_steps=run.schedule_steps,
            log_every=config.log_every,
        ) as log,
        run.loader(
            run.train_batches(epoch=progress.epoch, step=progress.step, done_steps=progress.global_step)
        ) as loader,
    ):
        for position, result in optimizer_steps(run, optimizer, progress, loader, log):
            note_step(run, progress, position, result)
            if is_due(config.evaluate_every, progress.global_step) or ends_epoch(config, position):
                evaluate_and_save(run, optimizer, progress, log)
            elif is_due(config.checkpoint_every, progress.global_step) or stopped:
                save(run, optimizer, progress, log, is_best=False)
            if stopped:
                return stopped_report(config, progress, stopped[0])
        if progress.evaluated_step != progress.global_step:
            evaluate_and_save(run, optimizer, progress, log)
    export = write_export(checkpoints_folder(config.out) / "best", config.out / "export", dtype=config.export_dtype)
    return finished_report(run, progress, export)


def resume_or_start(run: Run, optimizer: torch.optim.Optimizer) -> Progress:
    """Load the latest checkpoint of --out when there is one; write the resolved configuration either way."""
    latest = find_latest(run.config.out)
    progress = Progress() if latest is None else resume(run, optimizer, latest)
    keep_until(quarantine_path(run), progress.global_step)
    replace_file(run.config.out / "config.toml", to_toml(run.config).encode())
    return progress


def require_own_folder(out: Path) -> None:
    """Refuse an --out that is a file, or a folder with something else in it."""
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"--out {out} is a file; choose a folder")
    found = {path.name for path in out.iterdir()} - {"lock"} if out.is_dir() else set()
    if found and "config.toml" not in found:
        names = ", ".join(sorted(found)[:3])
        raise CheckpointError(f"--out {out} holds files of something else ({names}); choose a new folder")


def resume(run: Run, optimizer: torch.optim.Optimizer, folder: Path) -> Progress:
    """Put weights, moments, random state and position back; refuse any change of what is computed."""
    checkpoint = load_checkpoint(folder)
    meta = checkpoint.meta
    require_same_run(folder, meta, config=run.frozen_config, identity=run.identity)
    if run.order(meta.epoch).digest != meta.order_digest:
        raise CheckpointError(
            f"{folder} was trained in another order of the samples than this version computes "
            f"({meta.order_digest}, now {run.order(meta.epoch).digest}); start over with another --out"
        )
    run.draft.load_state_dict(checkpoint.weights, strict=not run.config.freeze_embeddings)
    optimizer.load_state_dict(checkpoint.optimizer)
    restore_rng(checkpoint.rng)
    return Progress(
        global_step=meta.global_step,
        epoch=meta.epoch,
        step=meta.step,
        skipped_steps=meta.skipped_steps,
        heldout=meta.heldout,
        best=meta.best,
    )


def require_servable(run: Run) -> None:
    """Refuse before training what no engine would load after it."""
    faults = faults_of_draft(run.serving_config(), run.trained_weights(), run.reader.identity.aux_layer_outputs)
    if faults:
        lines = "\n  ".join(faults)
        raise ExportError(f"a draft of this target cannot be served:\n  {lines}\nnothing was trained")


def optimizer_steps(
    run: Run, optimizer: torch.optim.Optimizer, progress: Progress, loader: Loader, log: TrainLog
) -> Iterator[tuple[Position, StepResult]]:
    """Train, one optimizer step an item; each is logged with its speed and the share of time spent waiting for data."""
    run.draft.train()
    work = Accumulator(ttt_steps=run.config.ttt_steps)
    started, waited = time.perf_counter(), loader.waited_s
    for micro in loader:
        accumulate(run, micro, work)
        if not micro.is_last:
            continue
        result = apply_step(run, optimizer, progress.global_step, work)
        progress.advance(micro.position)
        seconds = time.perf_counter() - started
        log.train_step(
            {
                "step": progress.global_step,
                "epoch": micro.position.epoch,
                **result.record(decay=run.step_config.decay),
                "seconds": seconds,
                "tokens_per_s": result.num_tokens / seconds,
                "stall": (loader.waited_s - waited) / seconds,
            }
        )
        yield micro.position, result
        work = Accumulator(ttt_steps=run.config.ttt_steps)
        started, waited = time.perf_counter(), loader.waited_s


def quarantine_path(run: Run) -> Path:
    """The samples of skipped steps."""
    return run.config.out / "quarantine.jsonl"


def note_step(run: Run, progress: Progress, position: Position, result: StepResult) -> None:
    """Count a step that was skipped, name its samples, and end a run that has diverged."""
    if result.is_finite:
        progress.skipped_in_a_row = 0
        return
    progress.skipped_steps += 1
    progress.skipped_in_a_row += 1
    path = quarantine_path(run)
    ids = [run.reader.plan.sample_ids[row].tobytes().hex() for row in result.rows]
    quarantine_step(
        path,
        epoch=position.epoch,
        step=progress.global_step,
        sample_ids=ids,
        loss=result.loss,
        norm=result.grad_norm,
    )
    logger.warning(
        "step %d skipped: loss %s, gradient norm %s; the weights stay as they were, its %d samples are named in %s",
        progress.global_step,
        result.loss,
        result.grad_norm,
        len(ids),
        path,
    )
    if progress.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
        raise TrainError(
            f"{MAX_SKIPPED_IN_A_ROW} steps in a row, up to step {progress.global_step}, were not finite: training has "
            f"diverged; their samples are in {path}. Start over with a lower --lr or a longer --warmup"
        )


def is_due(every: int, global_step: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens now."""
    return every > 0 and global_step % every == 0


def ends_epoch(config: TrainConfig, position: Position) -> bool:
    """Whether an epoch ends here, and evaluation is left to the ends of epochs."""
    return config.evaluate_every == 0 and position.step + 1 == position.num_steps


def evaluate_and_save(run: Run, optimizer: torch.optim.Optimizer, progress: Progress, log: TrainLog) -> None:
    """Measure the draft on the held-out split and checkpoint it, as the best one when it accepts longer."""
    run.draft.eval()
    metrics = evaluate_heldout(run)
    run.draft.train()
    if metrics is None or metrics.accept_length is None:
        logger.info(
            "held-out metrics: n/a (the store has no held-out rows to measure on); the newest draft is the best"
        )
        progress.best = {"step": progress.global_step}
        save(run, optimizer, progress, log, is_best=True)
        return
    progress.heldout = {"step": progress.global_step, **metrics.as_dict()}
    log.heldout(progress.heldout)
    is_best = progress.best is None or metrics.accept_length > progress.best["accept_length"]
    if is_best:
        progress.best = progress.heldout
    save(run, optimizer, progress, log, is_best=is_best)


def save(run: Run, optimizer: torch.optim.Optimizer, progress: Progress, log: TrainLog, *, is_best: bool) -> None:
    """Publish a checkpoint; metrics first, so that no checkpoint lies ahead of its log."""
    log.flush()
    meta = Meta(
        global_step=progress.global_step,
        epoch=progress.epoch,
        step=progress.step,
        order_digest=run.order(progress.epoch).digest,
        config=run.frozen_config,
        identity=run.identity,
        draft=run.serving_config(),
        provenance=run.provenance(),
        skipped_steps=progress.skipped_steps,
        heldout=progress.heldout,
        best=progress.best,
    )
    checkpoint = Checkpoint(meta=meta, weights=run.trained_weights(), optimizer=optimizer.state_dict(), rng=rng_state())
    save_checkpoint(run.config.out, checkpoint, is_best=is_best, keep=run.config.keep_checkpoints)
