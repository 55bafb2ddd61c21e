"""The fused TTT attention: a flash kernel for the step-0 block, diagonals merged by log-sum-exp.

torch's scaled_dot_product_attention does not differentiate through the log-sum-exp it returns, so one
autograd.Function owns the merge. With l_0 the kernel's log-sum-exp and s_i the score of diagonal i, the merged
l = log(exp l_0 + sum_i exp s_i) and out = exp(l_0 - l) out_0 + sum_i exp(s_i - l) v_i. Backward: the kernel's own
backward recomputes its weights from whatever log-sum-exp it is given, so with the *merged* out and l it returns the
exact share of the step-0 block; for the diagonals w_i = exp(s_i - l), ds_i = w_i <dO, v_i - out>, dq += scale ds_i k_i,
dk_i = scale ds_i q, dv_i = w_i dO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from eyas.cache_format.errors import ConfigError
from eyas.train.batch import PackedLayout

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class BlockOutput:
    """Result of the step-0 block: out [N, h, d], logsumexp [N, h] float32 or wider, and what the kernel keeps."""

    out: Tensor
    logsumexp: Tensor
    state: tuple[Tensor, ...] = ()


@runtime_checkable
class BlockKernel(Protocol):
    """Causal attention inside each document of a packed axis, forward and backward."""

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, layout: PackedLayout, scale: float) -> BlockOutput:
        """Attend; tensors are [N, heads, d]."""
        ...

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        merged: BlockOutput,
        layout: PackedLayout,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of query, keys and values for the given out and logsumexp."""
        ...


class CpuFlashKernel:
    """torch's CPU flash kernel, one call for each document; grouped key heads are read in place."""

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, layout: PackedLayout, scale: float) -> BlockOutput:
        """See BlockKernel."""
        out = torch.empty_like(query)
        precision = torch.float64 if query.dtype == torch.float64 else torch.float32
        logsumexp = query.new_empty(query.shape[:2], dtype=precision)
        for start, end in layout.bounds:
            span = slice(start, end)
            block, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
                _heads_first(query[span]), _heads_first(keys[span]), _heads_first(values[span]), 0.0, True, scale=scale
            )
            out[span] = block[0].transpose(0, 1)
            logsumexp[span] = lse[0].transpose(0, 1)
        return BlockOutput(out, logsumexp)

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        merged: BlockOutput,
        layout: PackedLayout,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See BlockKernel."""
        grads = (torch.empty_like(query), torch.empty_like(keys), torch.empty_like(values))
        for start, end in layout.bounds:
            span = slice(start, end)
            parts = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                _heads_first(grad[span]),
                _heads_first(query[span]),
                _heads_first(keys[span]),
                _heads_first(values[span]),
                _heads_first(merged.out[span]),
                merged.logsumexp[span].transpose(0, 1)[None].contiguous(),
                0.0,
                True,
                scale=scale,
            )
            for target, part in zip(grads, parts, strict=True):
                target[span] = part[0].transpose(0, 1)
        return grads


class CudaFlashKernel:
    """torch's own variable-length flash attention: all documents in one call, bf16 or fp16."""

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, layout: PackedLayout, scale: float) -> BlockOutput:
        """See BlockKernel."""
        longest, starts = max(layout.document_lengths), layout.cu_seqlens
        out, lse, seed, offset, _ = _aten._flash_attention_forward(
            query, keys, values, starts, starts, longest, longest, 0.0, True, False, scale=scale
        )
        return BlockOutput(out, lse.transpose(0, 1), (seed, offset))

    def backward(
        self,
        grad: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        merged: BlockOutput,
        layout: PackedLayout,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See BlockKernel."""
        longest, starts = max(layout.document_lengths), layout.cu_seqlens
        lse = merged.logsumexp.transpose(0, 1).contiguous()
        return _aten._flash_attention_backward(
            grad.contiguous(),
            query,
            keys,
            values,
            merged.out,
            lse,
            starts,
            starts,
            longest,
            longest,
            0.0,
            True,
            *merged.state,
            scale=scale,
        )


BLOCK_KERNELS: dict[str, BlockKernel] = {"cpu": CpuFlashKernel(), "cuda": CudaFlashKernel()}
_KERNEL_DTYPES = {
    "cpu": (torch.float32, torch.float64, torch.bfloat16, torch.float16),
    "cuda": (torch.bfloat16, torch.float16),
}


def supports_fused(query: Tensor) -> bool:
    """Whether a fused kernel exists for the device and dtype of `query`."""
    return query.dtype in _KERNEL_DTYPES.get(query.device.type, ())


def fused_ttt_attention(
    query: Tensor,
    step0_keys: Tensor,
    step0_values: Tensor,
    diagonal_keys: Sequence[Tensor],
    diagonal_values: Sequence[Tensor],
    layout: PackedLayout,
    rows: Tensor | None,
) -> Tensor:
    """Same contract as `ttt_attention`; ConfigError where there is no kernel for this device and dtype."""
    if not supports_fused(query):
        raise ConfigError(
            f"attention 'fused' has no kernel for {query.dtype} on {query.device.type}; use 'eager' or 'auto'"
        )
    return _TttAttention.apply(
        query.contiguous(), step0_keys, step0_values, layout, rows, *diagonal_keys, *diagonal_values
    )


class _TttAttention(torch.autograd.Function):
    """Owns the merge of the step-0 block with the diagonals; all arithmetic of the merge is float32 or wider."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        layout: PackedLayout,
        rows: Tensor | None,
        *diagonals: Tensor,
    ) -> Tensor:
        scale = query.shape[-1] ** -0.5
        block = BLOCK_KERNELS[query.device.type].forward(_to_slots(query, rows, layout), keys, values, layout, scale)
        out, logsumexp = _of_rows(block.out, rows), _of_rows(block.logsumexp, rows)
        depth = len(diagonals) // 2
        scores = _diagonal_scores(query, diagonals[:depth], logsumexp, scale)
        merged_lse = torch.cat((logsumexp[None], scores)).logsumexp(0)
        weights = (scores - merged_lse).exp()
        merged = out.to(weights.dtype) * (logsumexp - merged_lse).exp()[..., None]
        for weight, own in zip(weights, diagonals[depth:], strict=True):
            _by_group(merged, own).add_(_by_group(weight[..., None], own) * own[:, :, None])
        merged = merged.to(query.dtype)
        ctx.layout, ctx.depth, ctx.scale = layout, depth, scale
        ctx.has_rows, ctx.num_state = rows is not None, len(block.state)
        optional = () if rows is None else (rows,)
        ctx.save_for_backward(query, keys, values, merged, merged_lse, weights, *optional, *block.state, *diagonals)
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, keys, values, merged, merged_lse, weights, *rest = ctx.saved_tensors
        grad = grad.contiguous()
        rows = rest.pop(0) if ctx.has_rows else None
        state, diagonals = rest[: ctx.num_state], rest[ctx.num_state :]
        layout, scale = ctx.layout, ctx.scale
        # Slots without a query carry zeros: with a zero gradient they contribute nothing to keys and values.
        block = BlockOutput(_to_slots(merged, rows, layout), _to_slots(merged_lse, rows, layout), tuple(state))
        slot_grads = BLOCK_KERNELS[query.device.type].backward(
            _to_slots(grad, rows, layout), _to_slots(query, rows, layout), keys, values, block, layout, scale
        )
        grad_query = _of_rows(slot_grads[0], rows)
        diagonal_grads = _diagonal_backward(grad, query, merged, weights, diagonals, scale)
        grad_query = grad_query + diagonal_grads[0]
        return grad_query, slot_grads[1], slot_grads[2], None, None, *diagonal_grads[1]


def _diagonal_scores(query: Tensor, keys: Sequence[Tensor], logsumexp: Tensor, scale: float) -> Tensor:
    """Scores of each diagonal, [k, M, h] in the dtype of `logsumexp` [M, h]."""
    scores = logsumexp.new_empty(len(keys), *logsumexp.shape)
    for index, own in enumerate(keys):
        scores[index] = (_by_group(query, own) * own[:, :, None]).sum(-1).flatten(1) * scale
    return scores


def _diagonal_backward(
    grad: Tensor, query: Tensor, merged: Tensor, weights: Tensor, diagonals: Sequence[Tensor], scale: float
) -> tuple[Tensor, list[Tensor]]:
    """(share of the query's gradient, gradients of the diagonal keys then values)."""
    depth = len(diagonals) // 2
    grad_query = torch.zeros_like(query)
    shared = (grad * merged).sum(-1)
    grad_keys, grad_values = [], []
    for weight, key, value in zip(weights.to(query.dtype), diagonals[:depth], diagonals[depth:], strict=True):
        received = (_by_group(grad, value) * value[:, :, None]).sum(-1).flatten(1)
        grad_score = (weight * (received - shared) * scale)[..., None]
        _by_group(grad_query, key).add_(_by_group(grad_score, key) * key[:, :, None])
        grad_keys.append((_by_group(grad_score, key) * _by_group(query, key)).sum(2))
        grad_values.append((_by_group(weight[..., None], value) * _by_group(grad, value)).sum(2))
    return grad_query, [*grad_keys, *grad_values]


def _heads_first(tokens: Tensor) -> Tensor:
    return tokens.transpose(0, 1)[None]


def _by_group(tokens: Tensor, grouped: Tensor) -> Tensor:
    """[M, h, x] seen as [M, g, h / g, x], to meet a key head with the query heads that share it."""
    groups = grouped.shape[1]
    return tokens.view(tokens.shape[0], groups, tokens.shape[1] // groups, tokens.shape[2])


def _to_slots(of_rows: Tensor, rows: Tensor | None, layout: PackedLayout) -> Tensor:
    if rows is None:
        return of_rows
    return of_rows.new_zeros(layout.num_slots, *of_rows.shape[1:]).index_copy_(0, rows, of_rows)


def _of_rows(of_slots: Tensor, rows: Tensor | None) -> Tensor:
    return of_slots if rows is None else of_slots.index_select(0, rows)
