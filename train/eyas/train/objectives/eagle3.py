"""EAGLE-3 training-time test: the draft is unrolled on its own states while the target's tokens are fed.

At step k the query anchored at slot t reads the token x[t+1+k] and is taught the distribution of x[t+2+k], so step k
of slot t asks for the mask, the argmax and the supervision row of slot t + k of the same document. Nothing large is
shifted. A slot is computed at step k only while it, or one of its later steps, is in the loss: the keys of step k are
seen by their own slot alone, so leaving the others out is exact.

Loss = sum_k w_k (sum l_k m_k / n_k) / sum_k w_k with w_k = decay ** k, as NeMo AutoModel `Eagle3TrainerModule`,
n_k counted over the whole global batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from eyas.cache_format.errors import ConfigError
from eyas.train.batch import PackedBatch, shift_left
from eyas.train.drafts.eagle3 import Eagle3Draft
from eyas.train.metrics import TttCounters
from eyas.train.objectives.head import weighted_head_loss
from eyas.train.objectives.supervision import Supervision


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3StepConfig:
    """How far the draft is unrolled and how the steps are weighed."""

    ttt_steps: int = 7
    """TTT steps, one for each depth of the draft chain."""
    decay: float = 0.8
    """Step k weighs decay ** k."""
    head_chunk_rows: int = 1024
    """Rows of logits in memory at a time."""

    def __post_init__(self) -> None:
        """Refuse values outside their range."""
        for name in ("ttt_steps", "head_chunk_rows"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"{name} must be an integer of at least 1, got {value!r}")
        if not 0 < self.decay <= 1:
            raise ConfigError(f"decay must lie in (0, 1], got {self.decay!r}")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """Result of one micro-batch."""

    loss: Float[Tensor, ""]
    """This micro-batch's share of the global loss: sum the shares of a global batch, never average them."""
    counters: TttCounters
    """Per-step loss sums, supervised, correct, hits and valid counts of this micro-batch, without graph."""


def count_supervised(batch: PackedBatch, ttt_steps: int) -> Int[Tensor, "K"]:
    """n_k of this micro-batch, int64 [ttt_steps]; sum it over all micro-batches and ranks of a global batch.

    A supervised slot enters step k exactly when its document has k slots before it. Needs neither features nor
    supervision rows.
    """
    depth = batch.layout.offsets[batch.position_mask]
    steps = torch.arange(ttt_steps, device=depth.device)
    return (depth[None, :] >= steps[:, None]).sum(-1)


def step_masks(mask: Bool[Tensor, "N"], batch: PackedBatch, ttt_steps: int) -> Bool[Tensor, "K N"]:
    """The mask of every TTT step: row k is `mask` shifted left by k inside each document."""
    return torch.stack([shift_left(mask, batch.layout.doc_remaining, step) for step in range(ttt_steps)])


def eagle3_step(
    draft: Eagle3Draft,
    batch: PackedBatch,
    supervision: Supervision,
    config: Eagle3StepConfig,
    counts: Int[Tensor, "K"],
) -> StepOutput:
    """Loss and counters of one micro-batch; `counts` are the n_k of its whole global batch (`count_supervised`).

    n_k = 0 contributes 0. A micro-batch without supervised slots returns a loss of 0 that reaches every parameter.
    Raises ConfigError when `counts` has another number of steps than `config`.
    """
    if counts.shape != (config.ttt_steps,):
        raise ConfigError(f"counts must hold one n_k for each of {config.ttt_steps} steps, got {tuple(counts.shape)}")
    masks = step_masks(batch.position_mask, batch, config.ttt_steps)
    head_inputs, steps, slots = _unroll(draft, batch, masks)
    asked = slots + steps
    loss, losses, predictions = weighted_head_loss(
        head_inputs,
        draft.lm_head.weight,
        _step_weights(config, counts).to(head_inputs.device)[steps],
        supervision,
        batch.supervision_rows[asked],
        config.head_chunk_rows,
    )
    correct = torch.zeros_like(masks)
    correct[steps, slots] = predictions == batch.target_draft_ids[asked]
    return StepOutput(loss=loss, counters=_counters(batch, masks, correct, steps, losses))


def _unroll(
    draft: Eagle3Draft, batch: PackedBatch, masks: Bool[Tensor, "K N"]
) -> tuple[Float[Tensor, "M H"], Int[Tensor, "M"], Int[Tensor, "M"]]:
    """(inputs of lm_head, TTT step, anchor slot) of every supervised (step, slot) pair, step by step."""
    active = masks.flip(0).cummax(0).values.flip(0)
    rows = active[0].nonzero()[:, 0]
    projected = draft.project_hidden_states(batch.aux_hidden_states)
    hidden, state = draft.first_step(projected, batch.input_ids, batch.position_ids, batch.layout, rows)
    head_inputs, steps, slots = [], [], []
    for step in range(masks.shape[0]):
        if step > 0:
            kept = active[step][rows].nonzero()[:, 0]
            if kept.numel() == 0:
                break
            rows, state, hidden = rows[kept], state.select(kept), hidden.index_select(0, kept)
            hidden = draft.next_step(hidden, batch.input_ids[rows + step], state)
        supervised = masks[step][rows].nonzero()[:, 0]
        head_inputs.append(draft.head_inputs(hidden.index_select(0, supervised)))
        slots.append(rows[supervised])
        steps.append(torch.full_like(slots[-1], step))
    return torch.cat(head_inputs), torch.cat(steps), torch.cat(slots)


def _step_weights(config: Eagle3StepConfig, counts: Int[Tensor, "K"]) -> Float[Tensor, "K"]:
    """float32 [K]: w_k / (n_k sum_j w_j)."""
    weights = config.decay ** torch.arange(config.ttt_steps, dtype=torch.float64, device=counts.device)
    return (weights / weights.sum() / counts.clamp(min=1)).to(torch.float32)


def _counters(
    batch: PackedBatch, masks: Bool[Tensor, "K N"], correct: Bool[Tensor, "K N"], steps: Tensor, losses: Tensor
) -> TttCounters:
    sums = torch.zeros(masks.shape[0], dtype=torch.float64, device=losses.device)
    chain = step_masks(batch.loss_mask, batch, masks.shape[0])
    return TttCounters(
        loss_sums=sums.index_add_(0, steps, losses.double()),
        supervised=masks.sum(-1),
        correct=correct.sum(-1),
        hits=correct.cummin(0).values.sum(-1),
        valid=chain.cummin(0).values.sum(-1),
    )
