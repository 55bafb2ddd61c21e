"""Run the draft over the held-out split of the store, without gradients."""

import torch

from eyas.train.heldout import DraftMetrics, draft_metrics, sum_counters
from eyas.train.run import Run
from eyas.train.stepping import forward


def evaluate_heldout(run: Run) -> DraftMetrics | None:
    """Return the held-out metrics, or None when the store has no held-out rows: stated as n/a, never as 0."""
    with torch.no_grad(), run.loader(run.heldout_batches()) as loader:
        parts = [forward(run, micro).counters for micro in loader if micro.batch is not None]
    if not parts:
        return None
    return draft_metrics(sum_counters(parts, run.config.ttt_steps), decay=run.step_config.decay)
