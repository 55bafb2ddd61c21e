"""lm_head and loss over many rows without keeping their logits: one chunk of rows at a time, gradients in the forward.

The loss is a weighted sum over rows whose weights are known beforehand, so the gradient of a chunk can be formed while
its logits exist, and the backward only scales it: seven TTT steps hold one chunk of logits instead of seven full sets.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from eyas.train.objectives.supervision import Supervision


def weighted_head_loss(
    head_inputs: Float[Tensor, "M H"],
    weight: Float[Tensor, "W H"],
    row_weights: Float[Tensor, "M"],
    supervision: Supervision,
    rows: Int[Tensor, "M"],
    chunk_rows: int,
) -> tuple[Float[Tensor, ""], Float[Tensor, "M"], Int[Tensor, "M"]]:
    """(sum_m row_weights[m] * loss[m], losses [M] without graph, argmax draft ids [M]).

    `rows` are the stored rows to compare with; they are visited in ascending order. No rows give a loss of 0 that
    still reaches `head_inputs` and `weight`.
    """
    order = rows.argsort(stable=True)
    wants_grad = torch.is_grad_enabled() and (head_inputs.requires_grad or weight.requires_grad)
    loss, losses, predictions = _ChunkedHead.apply(
        head_inputs.index_select(0, order), weight, row_weights[order], supervision, rows[order], chunk_rows, wants_grad
    )
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return loss, losses[inverse], predictions[inverse]


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        head_inputs: Tensor,
        weight: Tensor,
        row_weights: Tensor,
        supervision: Supervision,
        rows: Tensor,
        chunk_rows: int,
        wants_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses = row_weights.new_empty(rows.shape)
        predictions = torch.empty_like(rows)
        grad_inputs = torch.zeros_like(head_inputs) if wants_grad else None
        grad_weight = torch.zeros_like(weight) if wants_grad else None
        for start in range(0, rows.numel(), chunk_rows):
            span = slice(start, start + chunk_rows)
            inputs = head_inputs[span]
            logits = functional.linear(inputs, weight).requires_grad_(wants_grad)
            with torch.set_grad_enabled(wants_grad):
                chunk = supervision.losses(logits, rows[span])
                weighted = (chunk * row_weights[span]).sum()
            losses[span], predictions[span] = chunk.detach(), logits.argmax(-1)
            if grad_inputs is not None and grad_weight is not None:
                (grad_logits,) = torch.autograd.grad(weighted, logits)
                grad_inputs[span] = grad_logits @ weight
                grad_weight += grad_logits.T @ inputs
        if grad_inputs is not None and grad_weight is not None:
            ctx.save_for_backward(grad_inputs, grad_weight)
        ctx.mark_non_differentiable(losses, predictions)
        return (losses * row_weights).sum(), losses, predictions

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
        grad_inputs, grad_weight = ctx.saved_tensors
        return grad_inputs * grad_loss, grad_weight * grad_loss, None, None, None, None, None
