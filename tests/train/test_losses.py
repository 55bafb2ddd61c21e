"""Per-slot losses: golden soft cross-entropy, the tail-aware top-k loss, and the supervision objects over them."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eyas.train.losses import masked_mean, masked_soft_cross_entropy, soft_cross_entropy, tail_cross_entropy
from eyas.train.objectives.supervision import DenseSupervision, HiddenSupervision, TargetHead, TopKSupervision

GOLDEN = Path(__file__).parents[1] / "golden" / "losses.safetensors"
W = 12


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def top_k(probs, k):
    values, ids = probs.topk(k, dim=-1)
    return ids, values


@pytest.mark.parametrize("name", ["soft_ce", "soft_ce_empty"])
def test_soft_cross_entropy_equals_the_reference_with_its_gradient(name):
    golden = load_file(GOLDEN)
    logits = golden[f"input/{name}/logits"].flatten(0, 1).requires_grad_()
    probs = golden[f"input/{name}/target_probs"].flatten(0, 1)
    mask = golden[f"input/{name}/position_mask"].flatten()
    loss = masked_soft_cross_entropy(logits, probs, mask)
    (grad,) = torch.autograd.grad(loss, logits)
    assert float(loss.detach()) == pytest.approx(float(golden[f"expect/{name}/loss"]), abs=1e-5)
    theirs = golden[f"grad/{name}/logits"].flatten(0, 1)
    assert float((grad - theirs).abs().max()) <= 1e-4 * float(theirs.abs().max()) + 1e-6


def test_denominator_is_the_count_given():
    logits, probs, mask = draw(4, W), draw(4, W, seed=1).softmax(-1), torch.tensor([True, True, False, True])
    alone = masked_soft_cross_entropy(logits, probs, mask)
    assert float(masked_soft_cross_entropy(logits, probs, mask, 6)) == pytest.approx(float(alone) / 2, rel=1e-6)
    assert float(masked_mean(torch.ones(4), mask, torch.tensor(12))) == 0.25


def test_a_masked_slot_adds_nothing_even_when_it_is_not_finite():
    per_slot = torch.tensor([1.0, float("nan"), 3.0], requires_grad=True)
    mean = masked_mean(per_slot, torch.tensor([True, False, True]))
    mean.backward()
    assert float(mean.detach()) == 2.0
    assert per_slot.grad.tolist() == [0.5, 0.0, 0.5]


def test_tail_loss_of_a_complete_row_is_the_soft_cross_entropy_exactly():
    probs = draw(5, W, seed=1).softmax(-1)
    ids = torch.arange(W).expand(5, W)
    dense_logits, tail_logits = draw(5, W).requires_grad_(), draw(5, W).requires_grad_()
    dense, tail = soft_cross_entropy(dense_logits, probs), tail_cross_entropy(tail_logits, ids, probs)
    # Same terms in the same order; log_softmax and logsumexp may still round the normaliser differently (1 ulp).
    torch.testing.assert_close(tail, dense, atol=1e-6, rtol=1e-6)
    dense.sum().backward()
    tail.sum().backward()
    torch.testing.assert_close(tail_logits.grad, dense_logits.grad, atol=1e-6, rtol=1e-6)


def test_order_of_a_complete_row_does_not_matter():
    probs = draw(3, W, seed=1, dtype=torch.float64).softmax(-1)
    ids, sorted_probs = top_k(probs, W)
    logits = draw(3, W, dtype=torch.float64)
    torch.testing.assert_close(tail_cross_entropy(logits, ids, sorted_probs), soft_cross_entropy(logits, probs))


def test_tail_loss_is_the_written_formula():
    logits, probs = draw(6, W, dtype=torch.float64), draw(6, W, seed=1, dtype=torch.float64).softmax(-1)
    ids, kept = top_k(probs, 4)
    q = logits.softmax(-1)
    q_kept = q.gather(-1, ids)
    formula = -(kept * q_kept.log()).sum(-1) - (1 - kept.sum(-1)) * (1 - q_kept.sum(-1)).log()
    torch.testing.assert_close(tail_cross_entropy(logits, ids, kept), formula)


def test_tail_loss_is_least_when_the_draft_equals_the_target():
    target = draw(1, W, dtype=torch.float64)
    ids, kept = top_k(target.softmax(-1), 4)
    logits = target.clone().requires_grad_()
    tail_cross_entropy(logits, ids, kept).sum().backward()
    torch.testing.assert_close(logits.grad, torch.zeros_like(logits))


def test_tail_gradient_equals_finite_differences():
    ids = torch.tensor([[0, 3, -1], [2, -1, -1], [-1, -1, -1]])
    probs = torch.tensor([[0.5, 0.2, 0.9], [0.1, 0.3, 0.4], [0.2, 0.2, 0.2]], dtype=torch.float64)
    logits = draw(3, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: tail_cross_entropy(z, ids, probs), logits)


def test_ids_outside_the_draft_vocabulary_carry_no_mass():
    logits = draw(1, W)
    inside = tail_cross_entropy(logits, torch.tensor([[4, 7]]), torch.tensor([[0.5, 0.2]]))
    padded = tail_cross_entropy(logits, torch.tensor([[-1, 4, 7]]), torch.tensor([[0.9, 0.5, 0.2]]))
    assert torch.equal(inside, padded)


@pytest.mark.parametrize("magnitude", [200.0, 2000.0])
def test_tail_loss_stays_finite_when_the_draft_is_certain(magnitude):
    logits = torch.zeros(1, W)
    logits[0, 2] = magnitude
    logits.requires_grad_()
    loss = tail_cross_entropy(logits, torch.tensor([[2]]), torch.tensor([[0.9]]))
    loss.sum().backward()
    # -0.1 log(1 - q): the other eleven logits lie `magnitude` below the normaliser.
    assert float(loss.detach()) == pytest.approx(0.1 * (magnitude - torch.tensor(11.0).log().item()), rel=1e-5)
    assert torch.isfinite(logits.grad).all()


def test_rounded_probabilities_above_one_leave_no_negative_tail():
    loss = tail_cross_entropy(torch.zeros(1, W), torch.tensor([[0, 1]]), torch.tensor([[0.7, 0.31]]))
    assert float(loss) == pytest.approx(1.01 * torch.tensor(float(W)).log().item(), rel=1e-6)


def test_top_k_from_the_store_is_the_distribution_over_the_draft_vocabulary():
    full = draw(4, 30, seed=2)
    draft_vocab = torch.arange(0, 30, 2)
    logz, draft_logz = full.logsumexp(-1), full[:, draft_vocab].logsumexp(-1)
    logprobs, ids = full.log_softmax(-1).topk(9, dim=-1)
    to_draft = torch.full((30,), -1)
    to_draft[draft_vocab] = torch.arange(15)
    supervision = TopKSupervision.from_store(
        draft_ids=to_draft[ids], topk_logprobs=logprobs, target_logz=logz, target_draft_logz=draft_logz
    )
    dense = full[:, draft_vocab].softmax(-1)
    inside = supervision.draft_ids >= 0
    expected = dense.gather(-1, supervision.draft_ids.clamp(min=0))
    torch.testing.assert_close(supervision.probs, torch.where(inside, expected, 0.0), atol=1e-6, rtol=1e-5)
    assert inside.any()
    assert not inside.all()


def test_hidden_supervision_equals_its_dense_distribution():
    hidden, weight = draw(5, 8), draw(W, 8, seed=1)
    head = TargetHead(weight=weight, bias=draw(W, seed=2), scale=0.5, softcap=3.0)
    logits = 3.0 * torch.tanh((hidden @ weight.T + head.bias) * 0.5 / 3.0)
    rows = torch.tensor([0, 1, 1, 4])
    dense = DenseSupervision(probs=logits.softmax(-1))
    ours = HiddenSupervision(last_hidden_state=hidden, head=head).losses(draw(4, W, seed=3), rows)
    torch.testing.assert_close(ours, dense.losses(draw(4, W, seed=3), rows), atol=1e-6, rtol=1e-6)


def test_top_k_with_every_draft_id_teaches_what_the_dense_distribution_teaches():
    probs = draw(5, W, seed=1).softmax(-1)
    ids, sorted_probs = top_k(probs, W)
    rows, logits = torch.tensor([3, 0, 0]), draw(3, W)
    ours = TopKSupervision(draft_ids=ids, probs=sorted_probs).losses(logits, rows)
    # The sum of twelve float32 products runs in another order.
    torch.testing.assert_close(ours, DenseSupervision(probs=probs).losses(logits, rows), atol=1e-6, rtol=1e-6)
