"""One optimizer step: micro-batches of a global batch accumulated, clipped, applied, or skipped when not finite."""

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from eyas.train.heldout import draft_metrics, sum_counters
from eyas.train.loader import MicroBatch
from eyas.train.metrics import TttCounters
from eyas.train.objectives import OBJECTIVES
from eyas.train.objectives.eagle3 import StepOutput
from eyas.train.optim import clipped_gradient_norm, learning_rate, set_learning_rate
from eyas.train.run import Run


@dataclass(kw_only=True)
class StepResult:
    """What one optimizer step did."""

    loss: float
    grad_norm: float
    lr: float
    counters: TttCounters
    num_tokens: int
    rows: list[int]
    """Plan rows trained on."""

    @property
    def is_finite(self) -> bool:
        """Whether the weights were updated; a step that is not finite leaves them as they were."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    def record(self, *, decay: float) -> dict[str, Any]:
        """The deterministic part of the step's line in metrics.jsonl."""
        metrics = draft_metrics(self.counters, decay=decay)
        return {
            "loss": self.loss if self.is_finite else None,
            "accuracy": metrics.accuracy,
            "accept_length": metrics.accept_length,
            "lr": self.lr,
            "grad_norm": self.grad_norm if self.is_finite else None,
            "tokens": self.num_tokens,
            "supervised": metrics.supervised,
            "samples": len(self.rows),
        }


@dataclass(kw_only=True)
class Accumulator:
    """Gradients live in the parameters; this holds what is known about them until the step is applied."""

    ttt_steps: int
    losses: list[torch.Tensor] = field(default_factory=list)
    counters: list[TttCounters] = field(default_factory=list)
    num_tokens: int = 0
    rows: list[int] = field(default_factory=list)

    def add(self, micro: MicroBatch, output: StepOutput | None) -> None:
        """Note one micro-batch; None when nothing of the global batch is supervised."""
        self.num_tokens += micro.num_tokens
        self.rows += micro.rows.tolist()
        if output is not None:
            self.losses.append(output.loss.detach())
            self.counters.append(output.counters)


def forward(run: Run, micro: MicroBatch) -> StepOutput:
    """Return loss and counters of one micro-batch on the run's device."""
    assert micro.batch is not None
    batch = micro.batch.to(run.device)
    if run.config.precision == "fp32":
        batch = replace(batch, aux_hidden_states=batch.aux_hidden_states.to(torch.float32))
    supervision = run.build_supervision({name: part.to(run.device) for name, part in micro.fields.items()})
    with run.autocast():
        return OBJECTIVES[run.config.family](run.draft, batch, supervision, run.step_config, micro.counts)


def accumulate(run: Run, micro: MicroBatch, into: Accumulator) -> None:
    """Add one micro-batch's gradient. The loss is already this micro-batch's share of the global mean."""
    if micro.batch is None or int(micro.counts[0]) == 0:
        into.add(micro, None)
        return
    output = forward(run, micro)
    output.loss.backward()
    into.add(micro, output)


def apply_step(run: Run, optimizer: torch.optim.Optimizer, step: int, work: Accumulator) -> StepResult:
    """Update the weights with what was accumulated, unless nothing was supervised or something is not finite."""
    rate = learning_rate(step, total_steps=run.schedule_steps, config=run.config)
    loss, norm = 0.0, 0.0
    if work.losses:
        set_learning_rate(optimizer, rate)
        total = torch.stack([part.double() for part in work.losses]).sum()
        loss, norm = (float(value) for value in (total, clipped_gradient_norm(optimizer, run.config.grad_clip)))
    result = StepResult(
        loss=loss,
        grad_norm=norm,
        lr=rate,
        counters=sum_counters(work.counters, work.ttt_steps),
        num_tokens=work.num_tokens,
        rows=work.rows,
    )
    if work.losses and result.is_finite:
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return result
