"""Top-k with an exact order, and log-normalisers, against a plain numpy oracle."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.cache_format.manifest import LogitTransform
from eyas.pipeline import projection
from eyas.pipeline.projection import Head, exact_topk, project

FIELDS = ("target_topk_ids", "target_topk_logprobs", "target_draft_logz", "target_probs")


def oracle(logits, k):
    """Rank by (logit descending, id ascending): a stable sort of the negated logits."""
    order = np.argsort(-logits, axis=1, kind="stable")[:, :k]
    return np.take_along_axis(logits, order, 1), order


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 40), st.integers(1, 4), st.data())
def test_topk_equals_a_stable_sort_even_under_heavy_ties(seed, rows, size, levels, data):
    logits = np.random.default_rng(seed).integers(0, levels, (rows, size)).astype(np.float32)
    k = data.draw(st.integers(1, size))
    values, ids = exact_topk(torch.from_numpy(logits), k)
    expected_values, expected_ids = oracle(logits, k)
    np.testing.assert_array_equal(ids.numpy(), expected_ids)
    np.testing.assert_array_equal(values.numpy(), expected_values)


def test_topk_of_distinct_logits_at_real_size():
    logits = torch.randn(8, 5000, generator=torch.Generator().manual_seed(0))
    values, ids = exact_topk(logits, 64)
    expected_values, expected_ids = oracle(logits.numpy(), 64)
    np.testing.assert_array_equal(ids.numpy(), expected_ids)
    np.testing.assert_array_equal(values.numpy(), expected_values)


def make_head(dtype=torch.float32, transform=None, bias=False, vocab=50, hidden=16):
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(vocab, hidden, generator=draw).to(dtype)
    return Head(weight, torch.randn(vocab, generator=draw).to(dtype) if bias else None, transform or LogitTransform())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fields_equal_a_float64_oracle(dtype):
    head = make_head(dtype, LogitTransform(bias=True, scale=0.5, softcap=8.0), bias=True)
    hidden = torch.randn(9, 16, generator=torch.Generator().manual_seed(2)).to(dtype)
    draft_ids = torch.arange(0, 50, 3)
    out = project(hidden, head, draft_ids, FIELDS, 5)
    logits = hidden.double() @ head.weight.double().T + head.bias.double()
    logits = (torch.tanh(logits * 0.5 / 8.0) * 8.0).numpy()
    logz = np.log(np.exp(logits).sum(1))
    draft = logits[:, draft_ids.numpy()]
    draft_logz = np.log(np.exp(draft).sum(1))
    values, ids = oracle(logits, 5)
    np.testing.assert_array_equal(out["target_topk_ids"], ids)
    np.testing.assert_array_equal(out["target_argmax"], ids[:, 0])
    # float32 sums over 50 terms against float64: a few units in the last place of numbers below 10.
    for name, expected in (
        ("target_logz", logz),
        ("target_topk_logprobs", values - logz[:, None]),
        ("target_draft_logz", draft_logz),
        ("target_probs", np.exp(draft - draft_logz[:, None])),
    ):
        np.testing.assert_allclose(out[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)


def test_bf16_logits_are_never_rounded_to_bf16():
    head = make_head(torch.bfloat16)
    logits = head.logits(torch.randn(4, 16, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16))
    assert logits.dtype == torch.float32
    assert not torch.equal(logits, logits.to(torch.bfloat16).float())


def test_blocks_of_any_size_give_the_same_rows(monkeypatch):
    head, hidden = make_head(), torch.randn(7, 16, generator=torch.Generator().manual_seed(4))
    whole = project(hidden, head, torch.arange(50), FIELDS, 5)
    monkeypatch.setattr(projection, "LOGIT_BYTES", 2 * 4 * 50)
    parts = project(hidden, head, torch.arange(50), FIELDS, 5)
    for name, value in whole.items():
        # A matrix product of two rows may sum in another order than one of seven.
        np.testing.assert_allclose(parts[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def test_argmax_and_logz_need_no_topk():
    head, hidden = make_head(), torch.randn(3, 16, generator=torch.Generator().manual_seed(5))
    out = project(hidden, head, torch.arange(50), ("last_hidden_state",), 5)
    assert sorted(out) == ["target_argmax", "target_logz"]
    np.testing.assert_array_equal(out["target_argmax"], head.logits(hidden).argmax(1).numpy())
