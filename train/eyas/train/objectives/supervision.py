"""What a draft is taught at a slot: three encodings of the target's distribution behind one method.

The compact tensors hold one row for each kept position, documents concatenated, in raw order; a batch knows which row
a slot asks for (`PackedBatch.supervision_rows`). R rows, W draft vocabulary, K top-k, Ht target width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eyas.train.losses import soft_cross_entropy, tail_cross_entropy


@runtime_checkable
class Supervision(Protocol):
    """Per-slot distillation losses against stored rows."""

    def losses(self, logits: Float[Tensor, "M W"], rows: Int[Tensor, "M"]) -> Float[Tensor, "M"]:
        """Loss of each row of draft logits against stored row `rows[m]`; differentiable in `logits`.

        Rows may repeat and arrive ascending, so that an implementation can compute each distinct row once.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseSupervision:
    """Stored probabilities over the draft vocabulary (`probs`)."""

    probs: Float[Tensor, "R W"]
    """Any float dtype; renormalised on W, columns in the order of the draft ids."""

    def losses(self, logits: Float[Tensor, "M W"], rows: Int[Tensor, "M"]) -> Float[Tensor, "M"]:
        """See Supervision."""
        return soft_cross_entropy(logits, self.probs[rows].to(logits.device))


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetHead:
    """The target's lm_head restricted to the draft vocabulary, with the model's own logit transform."""

    weight: Float[Tensor, "W Ht"]
    """Rows of the draft vocabulary, in the order of the draft ids."""
    bias: Float[Tensor, "W"] | None = None
    """Bias of the same rows."""
    scale: float = 1.0
    """Factor on the projection, as `logit_transform.scale` of the manifest."""
    softcap: float | None = None
    """Soft cap c: logits become c * tanh(logits / c)."""

    def logits(self, hidden: Float[Tensor, "R Ht"]) -> Float[Tensor, "R W"]:
        """float32 logits (float64 for float64 weights): the projection is accumulated in that precision."""
        precision = torch.float64 if self.weight.dtype == torch.float64 else torch.float32
        bias = None if self.bias is None else self.bias.to(precision)
        logits = torch.nn.functional.linear(hidden.to(precision), self.weight.to(precision), bias) * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenSupervision:
    """Distributions projected on the fly from stored last hidden states (`hidden`): exact for any draft vocabulary."""

    last_hidden_state: Float[Tensor, "R Ht"]
    """After the target's final norm."""
    head: TargetHead
    """Restricted to the draft vocabulary."""

    @torch.no_grad()
    def probs(self, rows: Int[Tensor, "M"]) -> Float[Tensor, "M W"]:
        """Softmax over W of the asked rows; each distinct row is projected once."""
        distinct, back = torch.unique(rows, return_inverse=True)
        with torch.autocast(rows.device.type, enabled=False):
            return self.head.logits(self.last_hidden_state[distinct]).softmax(-1)[back]

    def losses(self, logits: Float[Tensor, "M W"], rows: Int[Tensor, "M"]) -> Float[Tensor, "M"]:
        """See Supervision."""
        return soft_cross_entropy(logits, self.probs(rows))


@dataclass(frozen=True, kw_only=True, slots=True)
class TopKSupervision:
    """The target's top-k with the tail inside W as one extra class (`topk`); needs no head."""

    draft_ids: Int[Tensor, "R K"]
    """int64: the stored target ids as draft ids, -1 outside W."""
    probs: Float[Tensor, "R K"]
    """float32: the target's probability over W of those ids, 0 outside."""

    @classmethod
    def from_store(
        cls,
        *,
        draft_ids: Int[Tensor, "R K"],
        topk_logprobs: Float[Tensor, "R K"],
        target_logz: Float[Tensor, "R"],
        target_draft_logz: Float[Tensor, "R"],
    ) -> TopKSupervision:
        """From stored log-probabilities over V: p over W = exp(logprob + logz - draft_logz)."""
        log_share = (target_logz.double() - target_draft_logz.double())[:, None]
        probs = (topk_logprobs.double() + log_share).exp().to(torch.float32)
        return cls(draft_ids=draft_ids.to(torch.int64), probs=torch.where(draft_ids >= 0, probs, 0.0))

    def losses(self, logits: Float[Tensor, "M W"], rows: Int[Tensor, "M"]) -> Float[Tensor, "M"]:
        """See Supervision and `tail_cross_entropy`."""
        return tail_cross_entropy(logits, self.draft_ids[rows], self.probs[rows])
