"""Distillation losses over the draft vocabulary, one value per slot: the caller masks and reduces.

All of them compute in float32 (float64 inputs stay float64). W is the draft vocabulary, K the stored top-k.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor


def soft_cross_entropy(logits: Float[Tensor, "M W"], target_probs: Float[Tensor, "M W"]) -> Float[Tensor, "M"]:
    """-sum_v p_v log softmax(z)_v for each slot (NeMo AutoModel soft cross-entropy)."""
    log_q = torch.log_softmax(_at_least_float32(logits), dim=-1)
    return -(target_probs.to(log_q.dtype) * log_q).sum(-1)


def tail_cross_entropy(
    logits: Float[Tensor, "M W"], draft_ids: Int[Tensor, "M K"], probs: Float[Tensor, "M K"]
) -> Float[Tensor, "M"]:
    """Cross-entropy against a top-k whose missing mass is one extra class.

    loss = -sum_i p_i log q_i - r log(1 - sum_i q_i), where i runs over the stored ids inside the draft vocabulary
    (`draft_ids` is -1 outside, ids of a row are distinct), p is the target's probability over W and
    r = max(1 - sum_i p_i, 0) is the mass of W that was not stored. log(1 - sum q) is the log-sum-exp of the logits
    that are not in the row minus that of all, which stays finite when q is concentrated on the row. A row that
    holds every draft id has no tail and equals `soft_cross_entropy`.
    """
    scores = _at_least_float32(logits)
    inside = draft_ids >= 0
    probs = torch.where(inside, probs.to(scores.dtype), 0.0)
    log_z = scores.logsumexp(-1)
    log_q = scores.gather(-1, draft_ids.clamp(min=0)) - log_z[:, None]
    has_tail = inside.sum(-1) < scores.shape[-1]
    tail = torch.where(has_tail, (1.0 - probs.sum(-1)).clamp(min=0.0), 0.0)
    # A row without a tail keeps its logits: log-sum-exp over nothing has no gradient, and its weight is 0 anyway.
    stored = _stored_columns(draft_ids, scores.shape[-1]) & has_tail[:, None]
    log_tail = scores.masked_fill(stored, float("-inf")).logsumexp(-1) - log_z
    return -(probs * log_q).sum(-1) - tail * log_tail


def masked_mean(
    per_slot: Float[Tensor, "M"], mask: Bool[Tensor, "M"], denominator: int | Tensor | None = None
) -> Float[Tensor, ""]:
    """sum(per_slot where mask) / n; n defaults to the supervised slots here, or is a count over a larger batch.

    Nothing supervised, or n = 0, gives 0 and keeps the graph.
    """
    total = torch.where(mask, per_slot, 0.0).sum()
    count = mask.sum() if denominator is None else torch.as_tensor(denominator, device=per_slot.device)
    return total / count.clamp(min=1).to(total.dtype)


def masked_soft_cross_entropy(
    logits: Float[Tensor, "M W"],
    target_probs: Float[Tensor, "M W"],
    mask: Bool[Tensor, "M"],
    denominator: int | Tensor | None = None,
) -> Float[Tensor, ""]:
    """Soft cross-entropy averaged over supervised slots, see `soft_cross_entropy` and `masked_mean`."""
    return masked_mean(soft_cross_entropy(logits, target_probs), mask, denominator)


def _stored_columns(draft_ids: Int[Tensor, "M K"], width: int) -> Bool[Tensor, "M W"]:
    # Ids outside the draft vocabulary land in one spare column, which is cut off.
    marks = torch.zeros(draft_ids.shape[0], width + 1, dtype=torch.bool, device=draft_ids.device)
    return marks.scatter_(-1, torch.where(draft_ids >= 0, draft_ids, width), True)[:, :width]


def _at_least_float32(values: Shaped[Tensor, "..."]) -> Tensor:
    return values if values.dtype == torch.float64 else values.to(torch.float32)
