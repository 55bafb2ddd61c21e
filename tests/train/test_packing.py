"""Packing and the unroll are exact: packed equals unpacked, nothing leaks, skipped slots change nothing."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.cache_format.errors import ConfigError
from eyas.train.batch import make_batch, shift_left
from eyas.train.losses import masked_soft_cross_entropy
from eyas.train.metrics import TttCounters
from eyas.train.objectives.eagle3 import Eagle3StepConfig, count_supervised, eagle3_step
from eyas.train.objectives.supervision import DenseSupervision, TopKSupervision

STEPS = Eagle3StepConfig(ttt_steps=7, head_chunk_rows=5)


def step(draft, batch, probs, counts=None, config=STEPS):
    counts = count_supervised(batch, config.ttt_steps) if counts is None else counts
    return eagle3_step(draft, batch, DenseSupervision(probs=probs), config, counts)


def gradients(draft, loss):
    draft.zero_grad()
    loss.backward()
    return {name: parameter.grad.clone() for name, parameter in draft.named_parameters()}


def assert_gradients_close(ours, theirs):
    for name, grad in theirs.items():
        # float32 sums over the same slots in another grouping; entries are of order 1e-2 to 1.
        torch.testing.assert_close(
            ours[name], grad, atol=1e-5, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


def straightforward(draft, batch, probs, config):
    """The unroll as written down: every slot at every step, full logits, whole tensors shifted."""
    remaining = batch.layout.doc_remaining
    target = torch.where((batch.supervision_rows >= 0)[:, None], probs[batch.supervision_rows], 0.0)
    hidden, state = draft.first_step(
        draft.project_hidden_states(batch.aux_hidden_states), batch.input_ids, batch.position_ids, batch.layout
    )
    total = torch.zeros(())
    for k in range(config.ttt_steps):
        if k:
            hidden = draft.next_step(hidden, shift_left(batch.input_ids, remaining, k), state)
        mask = shift_left(batch.position_mask, remaining, k)
        wanted = shift_left(target, remaining, k)
        total = total + config.decay**k * masked_soft_cross_entropy(draft.compute_logits(hidden), wanted, mask)
    return total / sum(config.decay**k for k in range(config.ttt_steps))


@pytest.mark.parametrize("attention", ["eager", "fused"])
@pytest.mark.parametrize("switches", [{}, {"fc_norm": True, "norm_output": True}], ids=["eagle3", "eagle3.1"])
def test_active_slots_and_chunked_logits_equal_the_full_computation(
    make_draft, make_config, make_document, pack, attention, switches
):
    documents = [make_document(length, seed, make_config()) for seed, length in enumerate((17, 3, 24, 1, 9))]
    batch, probs = pack(documents)
    draft = make_draft(attention=attention, **switches)
    output = step(draft, batch, probs)
    full = straightforward(draft, batch, probs, STEPS)
    torch.testing.assert_close(output.loss, full, atol=1e-6, rtol=1e-6)
    assert_gradients_close(gradients(draft, output.loss), gradients(draft, full))


@pytest.mark.parametrize("attention", ["eager", "fused"])
@pytest.mark.parametrize("preset", ["serving", "nemo", "eagle"])
def test_packed_equals_unpacked(make_draft, make_config, make_document, pack, preset, attention):
    documents = [make_document(length, seed, make_config()) for seed, length in enumerate((13, 2, 30, 7))]
    draft = make_draft(attention=attention)
    batch, probs = pack(documents, preset)
    counts = count_supervised(batch, 7)
    packed = step(draft, batch, probs)
    packed_grads = gradients(draft, packed.loss)
    alone, counters = torch.zeros(()), TttCounters.zeros(7)
    for document in documents:
        output = step(draft, *pack([document], preset), counts)
        alone, _ = alone + output.loss, counters.add(output.counters)
    assert float(packed.loss.detach()) == pytest.approx(float(alone.detach()), abs=1e-5)
    assert_gradients_close(packed_grads, gradients(draft, alone))
    for name in ("supervised", "correct", "hits", "valid"):
        assert torch.equal(getattr(packed.counters, name), getattr(counters, name)), name
    assert torch.equal(packed.counters.supervised, counts)


@pytest.mark.parametrize("attention", ["eager", "fused"])
def test_documents_shorter_than_the_unroll_are_finite(make_draft, make_config, make_document, pack, attention):
    documents = [make_document(length, seed, make_config()) for seed, length in enumerate((1, 2, 3))]
    for document in documents:
        document["target_draft_ids"].fill_(4)
    draft = make_draft(attention=attention)
    batch, probs = pack(documents)
    output = step(draft, batch, probs)
    # Slots with a next token: none, one, two; the second step has one slot left, the third none.
    assert output.counters.supervised.tolist() == [3, 1, 0, 0, 0, 0, 0]
    assert torch.isfinite(output.loss)
    assert all(torch.isfinite(grad).all() for grad in gradients(draft, output.loss).values())


@pytest.mark.parametrize("attention", ["eager", "fused"])
@pytest.mark.parametrize("length", [1, 2, 3, 12])
def test_a_document_trains_the_same_whatever_follows_it(
    make_draft, make_config, make_document, pack, attention, length
):
    draft = make_draft(attention=attention)
    first = make_document(length, 0, make_config())
    first["target_draft_ids"].fill_(4)
    results = []
    for seed in (1, 2):
        neighbour = make_document(11, seed, make_config())
        neighbour["span_ids"].zero_()  # unsupervised: the loss is the first document's alone
        output = step(draft, *pack([first, neighbour]))
        results.append((output, gradients(draft, output.loss)))
    (with_b, grads_b), (with_c, grads_c) = results
    assert torch.equal(with_b.loss, with_c.loss)
    assert torch.equal(with_b.counters.to_tensor(), with_c.counters.to_tensor())
    for name, grad in grads_b.items():
        assert torch.equal(grad, grads_c[name]), name


def test_counts_of_micro_batches_add_up_and_follow_the_shift(make_config, make_document, pack):
    documents = [make_document(length, seed, make_config()) for seed, length in enumerate((8, 8))]
    for document in documents:
        document["span_ids"].fill_(1)
        document["target_draft_ids"].fill_(0)
    whole, _ = pack(documents)
    # Seven of eight slots have a next token; each step takes one more off each document.
    assert count_supervised(whole, 8).tolist() == [14, 12, 10, 8, 6, 4, 2, 0]
    parts = sum(count_supervised(pack([document])[0], 8) for document in documents)
    assert torch.equal(parts, count_supervised(whole, 8))


@given(lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4), seed=st.integers(0, 99), steps=st.integers(1, 8))
@settings(max_examples=25)
def test_counts_equal_the_shifted_masks(lengths, seed, steps):
    generator = torch.Generator().manual_seed(seed)
    num = sum(lengths)
    batch = make_batch(
        document_lengths=lengths,
        input_ids=torch.zeros(num, dtype=torch.int64),
        span_ids=torch.randint(3, (num,), generator=generator),
        aux_hidden_states=torch.zeros(num, 1),
        kept=torch.ones(num, dtype=torch.bool),
        target_draft_ids=torch.randint(-1, 2, (num,), generator=generator),
        preset="nemo",
    )
    masks = [shift_left(batch.position_mask, batch.layout.doc_remaining, k).sum() for k in range(steps)]
    assert count_supervised(batch, steps).tolist() == [int(mask) for mask in masks]


def test_first_step_does_not_depend_on_how_far_the_draft_is_unrolled(make_draft, make_config, make_document, pack):
    batch, probs = pack([make_document(20, 0, make_config())])
    losses = [
        step(make_draft(), batch, probs, config=Eagle3StepConfig(ttt_steps=steps)).counters.step_losses()[0]
        for steps in (1, 3, 7)
    ]
    # The same slots are summed in chunks of another size.
    assert max(losses) - min(losses) < 1e-6


def test_a_target_outside_the_draft_vocabulary_breaks_the_chain_but_counts(
    make_draft, make_config, make_document, pack
):
    document = make_document(8, 0, make_config())
    document["span_ids"].fill_(1)
    document["target_draft_ids"].fill_(0)
    document["target_draft_ids"][4] = -1  # asked for by slot 3 at step 0, slot 2 at step 1 ...
    batch, probs = pack([document])
    counters = step(make_draft(), batch, probs, config=Eagle3StepConfig(ttt_steps=3)).counters
    assert counters.valid.tolist() == [7, 6, 5]
    assert counters.supervised.tolist() == [6, 5, 4]
    assert (counters.hits <= torch.tensor([6, 4, 2])).all()


def test_hits_are_chains_that_are_correct_from_the_start(make_draft, make_config, make_document, pack):
    document = make_document(8, 0, make_config())
    document["span_ids"].fill_(1)
    document["target_draft_ids"].fill_(7)
    draft = make_draft()
    with torch.no_grad():
        draft.lm_head.weight.zero_()
    batch, probs = pack([document])
    # All logits are equal: the draft always says id 0.
    assert step(draft, batch, probs).counters.hits.tolist() == [0] * 7
    document["target_draft_ids"].fill_(0)
    document["target_draft_ids"][5] = 7
    counters = step(draft, *pack([document]), config=Eagle3StepConfig(ttt_steps=3)).counters
    # Slot 4 is wrong at step 0: chains of slots 3 and 2 break when they reach it.
    assert counters.hits.tolist() == [6, 4, 2]
    assert counters.correct.tolist() == [6, 5, 4]
    assert counters.valid.tolist() == [7, 6, 5]
    assert counters.accept_length() == pytest.approx(1 + 6 / 7 + 4 / 6 + 2 / 5)


def test_chunk_size_changes_nothing(make_draft, make_config, make_document, pack):
    batch, probs = pack([make_document(30, 0, make_config())])
    draft = make_draft()
    results = []
    for rows in (1, 7, 1000):
        output = step(draft, batch, probs, config=Eagle3StepConfig(ttt_steps=3, head_chunk_rows=rows))
        results.append((output, gradients(draft, output.loss)))
    for output, grads in results[1:]:
        torch.testing.assert_close(output.loss, results[0][0].loss, atol=1e-6, rtol=1e-6)
        assert_gradients_close(grads, results[0][1])


def test_top_k_supervision_trains_every_parameter(make_draft, make_config, make_document, pack):
    batch, probs = pack([make_document(20, 0, make_config())])
    values, ids = probs.topk(4, dim=-1)
    draft = make_draft()
    supervision = TopKSupervision(draft_ids=ids, probs=values)
    output = eagle3_step(draft, batch, supervision, STEPS, count_supervised(batch, 7))
    assert all(grad.any() for grad in gradients(draft, output.loss).values())


def test_evaluation_needs_no_graph(make_draft, make_config, make_document, pack):
    batch, probs = pack([make_document(20, 0, make_config())])
    draft = make_draft()
    trained = step(draft, batch, probs)
    with torch.no_grad():
        evaluated = step(draft, batch, probs)
    assert not evaluated.loss.requires_grad
    assert torch.equal(evaluated.loss, trained.loss)
    assert torch.equal(evaluated.counters.to_tensor(), trained.counters.to_tensor())


@pytest.mark.parametrize("mixed", [True, False], ids=["autocast", "bfloat16 weights"])
def test_bfloat16_trains_close_to_float32(make_draft, make_config, make_document, pack, mixed):
    batch, probs = pack([make_document(20, 0, make_config())])
    exact = step(make_draft(), batch, probs)
    draft = make_draft()
    if mixed:
        with torch.autocast("cpu", torch.bfloat16):
            output = step(draft, batch, probs)
    else:
        draft = draft.to(torch.bfloat16)
        rounded = replace(batch, aux_hidden_states=batch.aux_hidden_states.to(torch.bfloat16))
        output = step(draft, rounded, probs)
    # 8 bits of mantissa through seven steps on states of order 10; softmax and sums are float32.
    torch.testing.assert_close(output.loss, exact.loss, rtol=3e-2, atol=0.0)
    grads = gradients(draft, output.loss)
    assert all(torch.isfinite(grad).all() and grad.any() for grad in grads.values())


def test_counters_survive_an_all_reduce_tensor():
    counters = TttCounters.zeros(2)
    counters.loss_sums[:] = torch.tensor([1.5, 2.5])
    for index, name in enumerate(("supervised", "correct", "hits", "valid")):
        getattr(counters, name)[:] = torch.tensor([10 - index, 8 - index])
    back = TttCounters.from_tensor(counters.to_tensor())
    assert torch.equal(back.to_tensor(), counters.to_tensor())
    assert back.valid.dtype == torch.int64
    assert back.step_losses().tolist() == [0.15, 2.5 / 8]


def test_counts_of_another_unroll_are_refused(make_draft, make_config, make_document, pack):
    batch, probs = pack([make_document(8, 0, make_config())])
    with pytest.raises(ConfigError, match="one n_k for each of 7 steps"):
        step(make_draft(), batch, probs, count_supervised(batch, 3))


@pytest.mark.parametrize(
    "bad", [{"ttt_steps": 0}, {"ttt_steps": True}, {"decay": 0.0}, {"decay": 1.5}, {"head_chunk_rows": 0}]
)
def test_values_outside_their_range_are_refused(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Eagle3StepConfig(**bad)
