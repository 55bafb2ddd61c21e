"""Project hidden states to what the store keeps of the target's distribution.

Logits are accumulated in float32 and never rounded to bf16. Order is exact: logit descending, ties to the lower id.
n rows, H hidden size, V target vocabulary, W draft vocabulary, K top-k.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from eyas.cache_format.manifest import LogitTransform

__all__ = ["Head", "exact_topk", "project"]

LOGIT_BYTES = 64 << 20
"""Upper bound of one block of float32 logits: it stays near the caches and never grows with the sample."""


@dataclass(frozen=True)
class Head:
    """The target's output projection and what follows it."""

    weight: Float[Tensor, "V H"]
    bias: Float[Tensor, " V"] | None
    transform: LogitTransform
    _wide: list[Tensor] = field(default_factory=list)

    def logits(self, hidden: Float[Tensor, "n H"]) -> Float[Tensor, "n V"]:
        """Return float32 logits of hidden states in the head's dtype."""
        weight = self.weight
        if weight.dtype == torch.float32:
            logits = hidden @ weight.T
        elif weight.is_cuda:
            logits = torch.mm(hidden, weight.T, out_dtype=torch.float32)
        else:
            if not self._wide:
                self._wide.append(weight.float())  # CPU kernels have no narrow-in, float32-out product
            logits = hidden.float() @ self._wide[0].T
        return self.after(logits)

    def after(self, logits: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
        """Add the bias, scale and soft-cap, in the dtype given."""
        if self.bias is not None:
            logits = logits + self.bias.to(logits.dtype)
        if self.transform.scale != 1.0:
            logits = logits * self.transform.scale
        if self.transform.softcap is not None:
            logits = torch.tanh(logits / self.transform.softcap) * self.transform.softcap
        return logits


def exact_topk(logits: Float[Tensor, "n V"], k: int) -> tuple[Float[Tensor, "n K"], Int[Tensor, "n K"]]:
    """Return the k largest logits of each row and their ids, ordered by (logit descending, id ascending).

    `torch.topk` chooses freely among equal values. One value more than asked shows whether a tie crosses the cut; only
    such rows are ranked again with a stable sort.
    """
    size = logits.shape[1]
    values, ids = torch.topk(logits, min(k + 1, size), dim=1)
    ids, order = torch.sort(ids, dim=1)
    values = values.gather(1, order)
    values, order = torch.sort(values, dim=1, descending=True, stable=True)
    ids = ids.gather(1, order)
    if size > k:
        torn = (values[:, k] == values[:, k - 1]).nonzero()[:, 0]
        values, ids = values[:, :k].contiguous(), ids[:, :k].contiguous()
        for row in torn.tolist():
            ranked = torch.sort(logits[row], descending=True, stable=True)
            values[row], ids[row] = ranked.values[:k], ranked.indices[:k]
    return values, ids


def project(
    hidden: Float[Tensor, "n H"], head: Head, draft_ids: Int[Tensor, " W"], fields: Sequence[str], topk: int
) -> dict[str, np.ndarray]:
    """Return the wanted projected fields of n kept rows as host arrays; float32 where the store may be narrower.

    Args:
        hidden: states after the final norm.
        head: the projection.
        draft_ids: target ids of the default draft vocabulary, ascending.
        fields: names of the store's fields; those that are not projections are ignored.
        topk: K, capped at V by the caller.
    """
    rows = max(1, LOGIT_BYTES // (4 * head.weight.shape[0]))
    parts = [_project_block(block, head, draft_ids, fields, topk) for block in hidden.split(rows)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _project_block(
    hidden: Float[Tensor, "n H"], head: Head, draft_ids: Int[Tensor, " W"], fields: Sequence[str], topk: int
) -> dict[str, np.ndarray]:
    logits = head.logits(hidden)
    logz = torch.logsumexp(logits, dim=1)
    values, ids = exact_topk(logits, topk if "target_topk_ids" in fields else 1)
    out = {"target_argmax": ids[:, 0], "target_logz": logz}
    if "target_topk_ids" in fields:
        out |= {"target_topk_ids": ids, "target_topk_logprobs": values - logz[:, None]}
    if "target_draft_logz" in fields or "target_probs" in fields:
        draft = logits if len(draft_ids) == logits.shape[1] else logits.index_select(1, draft_ids)
        if "target_draft_logz" in fields:
            out["target_draft_logz"] = torch.logsumexp(draft, dim=1)
        if "target_probs" in fields:
            out["target_probs"] = torch.softmax(draft, dim=1)
    return {name: value.cpu().numpy() for name, value in out.items()}
