"""The fused TTT attention against the eager oracle: outputs, every gradient, document borders."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from eyas.cache_format.errors import ConfigError
from eyas.train.batch import PackedLayout
from eyas.train.drafts.attention import ttt_attention
from eyas.train.drafts.fused_attention import BLOCK_KERNELS, supports_fused

LENGTHS = [1, 5, 2, 40, 3]


def inputs(lengths, depth, *, rows=None, heads=6, groups=2, dim=8, dtype=torch.float32, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    layout = PackedLayout.from_lengths(lengths)
    num_queries = layout.num_slots if rows is None else rows.numel()
    shapes = [
        (num_queries, heads, dim),
        *[(layout.num_slots, groups, dim)] * 2,
        *[(num_queries, groups, dim)] * 2 * depth,
    ]
    tensors = [torch.randn(shape, generator=generator, dtype=dtype).requires_grad_() for shape in shapes]
    return layout, tensors


def attend(layout, tensors, rows, attention):
    query, keys, values, *diagonals = tensors
    depth = len(diagonals) // 2
    return ttt_attention(
        query, keys, values, diagonals[:depth], diagonals[depth:], layout, rows=rows, attention=attention
    )


@pytest.mark.parametrize("rows", [None, [0, 3, 6, 7, 20, 30, 50], [45]], ids=["all", "some", "one"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_fused_equals_eager_with_every_gradient(depth, rows):
    rows = None if rows is None else torch.tensor(rows)
    results = []
    for attention in ("eager", "fused"):
        layout, tensors = inputs(LENGTHS, depth, rows=rows)
        output = attend(layout, tensors, rows, attention)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
        results.append((output, torch.autograd.grad((output * weights).sum(), tensors)))
    (eager, eager_grads), (fused, fused_grads) = results
    # float32 sums of up to 43 columns in another order, values of order 1.
    torch.testing.assert_close(fused, eager, atol=2e-6, rtol=1e-5)
    for ours, theirs in zip(fused_grads, eager_grads, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_fused_gradient_equals_finite_differences():
    rows = torch.tensor([0, 2, 3, 5])
    layout, tensors = inputs([2, 4], 2, rows=rows, heads=4, groups=2, dim=4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *t: attend(layout, t, rows, "fused"), tensors)


def test_eager_equals_one_dense_masked_softmax():
    layout, tensors = inputs([3, 4], 2, heads=2, groups=1, dim=4, dtype=torch.float64)
    query, keys, values, *diagonals = (tensor.detach() for tensor in tensors)
    output = attend(layout, [query, keys, values, *diagonals], None, "eager")
    for slot, start in ((0, 0), (2, 0), (3, 3), (6, 3)):
        columns = [*keys[start : slot + 1, 0], diagonals[0][slot, 0], diagonals[1][slot, 0]]
        seen = [*values[start : slot + 1, 0], diagonals[2][slot, 0], diagonals[3][slot, 0]]
        weights = (query[slot] @ torch.stack(columns).T / 2).softmax(-1)
        torch.testing.assert_close(output[slot], weights @ torch.stack(seen))


@pytest.mark.parametrize("attention", ["eager", "fused"])
def test_a_document_never_sees_its_neighbours(attention):
    layout, tensors = inputs([6, 7, 5], 1)
    before = attend(layout, tensors, None, attention)
    with torch.no_grad():
        for tensor in tensors:
            tensor[6:13] += 1.0
    after = attend(layout, tensors, None, attention)
    assert torch.equal(before[:6], after[:6])
    assert torch.equal(before[13:], after[13:])
    assert not torch.equal(before[6:13], after[6:13])


@pytest.mark.parametrize("attention", ["eager", "fused"])
def test_no_queries_give_an_empty_output_and_zero_gradients(attention):
    rows = torch.tensor([], dtype=torch.int64)
    layout, tensors = inputs([3, 4], 1, rows=rows)
    output = attend(layout, tensors, rows, attention)
    assert output.shape == (0, 6, 8)
    for grad in torch.autograd.grad(output.sum(), tensors, allow_unused=True):
        assert grad is None or not grad.any()


def test_bfloat16_merges_in_float32():
    layout, tensors = inputs(LENGTHS, 2)
    exact = attend(layout, tensors, None, "eager")
    rounded = [tensor.to(torch.bfloat16) for tensor in tensors]
    # Inputs and output are rounded to 8 bits of mantissa (2 ** -8 each), sums are not.
    torch.testing.assert_close(attend(layout, rounded, None, "fused").float(), exact, atol=3e-2, rtol=2e-2)


def test_auto_takes_the_fused_kernel_where_there_is_one():
    layout, tensors = inputs(LENGTHS, 1)
    assert supports_fused(tensors[0])
    assert torch.equal(attend(layout, tensors, None, "auto"), attend(layout, tensors, None, "fused"))


def test_fused_without_a_kernel_is_refused():
    layout, tensors = inputs([2], 0)
    with pytest.raises(ConfigError, match=r"no kernel for torch\.float32 on meta"):
        attend(layout, [tensor.to("meta") for tensor in tensors], None, "fused")


def test_unknown_attention_is_refused():
    layout, tensors = inputs([2], 0)
    with pytest.raises(ConfigError, match="auto, eager or fused"):
        attend(layout, tensors, None, "sdpa")


def test_cuda_kernel_is_called_with_shapes_it_accepts():
    """No GPU here: fake tensors run torch's own shape checks of the variable-length kernel, forward and backward."""
    with FakeTensorMode():
        integers = torch.empty(6, dtype=torch.int64, device="cuda")
        starts = torch.empty(3, dtype=torch.int32, device="cuda")
        layout = PackedLayout(document_lengths=(2, 4), cu_seqlens=starts, offsets=integers, doc_remaining=integers)
        query, keys, values = (torch.empty(6, n, 8, dtype=torch.bfloat16, device="cuda") for n in (6, 2, 2))
        assert supports_fused(query)
        kernel = BLOCK_KERNELS["cuda"]
        block = kernel.forward(query, keys, values, layout, 0.5)
        assert block.out.shape == query.shape
        assert block.logsumexp.shape == (6, 6)
        grads = kernel.backward(query, query, keys, values, block, layout, 0.5)
    assert [grad.shape for grad in grads] == [(6, 6, 8), (6, 2, 8), (6, 2, 8)]
