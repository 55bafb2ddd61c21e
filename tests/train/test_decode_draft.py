"""Decoding with a cache computes what training computed: same states, same logits, slot by slot, step by step."""

import pytest
import torch

from eyas.train.batch import shift_left

SWITCHES = [{}, {"fc_norm": True, "norm_output": True}]
# One float32 layer with sums in another order; states are of order 1 to 10.
CLOSE = {"atol": 2e-5, "rtol": 1e-5}


@pytest.fixture(params=SWITCHES, ids=["eagle3", "eagle3.1"])
def draft(request, make_draft):
    return make_draft(**request.param)


@pytest.fixture
def batch(make_config, make_document, pack):
    return pack([make_document(14, 0, make_config())])[0]


def training_states(draft, batch, steps):
    """Recurrent state of every slot at every TTT step, [steps][N, H]."""
    projected = draft.project_hidden_states(batch.aux_hidden_states)
    hidden, state = draft.first_step(projected, batch.input_ids, batch.position_ids, batch.layout)
    states = [hidden]
    for k in range(1, steps):
        fed = shift_left(batch.input_ids, batch.layout.doc_remaining, k)
        states.append(draft.next_step(states[-1], fed, state))
    return states


@torch.no_grad()
@pytest.mark.parametrize("slot", [0, 1, 6])
def test_a_chain_reproduces_the_unroll_of_its_slot(draft, batch, slot):
    states = training_states(draft, batch, 5)
    projected = draft.project_hidden_states(batch.aux_hidden_states)
    cache = draft.new_cache(capacity=1)
    seen = slice(0, slot + 1)
    hidden = draft.extend(projected[seen], batch.input_ids[seen], batch.position_ids[seen], cache)
    torch.testing.assert_close(hidden, states[0][seen], **CLOSE)
    for k in range(1, 5):
        fed, position = batch.input_ids[slot + k : slot + k + 1], torch.tensor([slot + k])
        hidden = draft.extend(hidden[-1:], fed, position, cache)
        torch.testing.assert_close(hidden[0], states[k][slot], **CLOSE)
        expected = draft.compute_logits(states[k][slot : slot + 1])
        torch.testing.assert_close(draft.compute_logits(hidden), expected, **CLOSE)
    assert cache.length == slot + 5


@torch.no_grad()
def test_rolling_back_forgets_the_chain(draft, batch):
    states = training_states(draft, batch, 2)
    projected = draft.project_hidden_states(batch.aux_hidden_states)
    cache = draft.new_cache()
    hidden = draft.extend(projected[:4], batch.input_ids[:4], batch.position_ids[:4], cache)
    draft.extend(hidden[-1:], torch.tensor([1]), torch.tensor([4]), cache)
    cache.rollback(4)
    # Two accepted tokens arrive at once, with the target's features.
    hidden = draft.extend(projected[4:6], batch.input_ids[4:6], batch.position_ids[4:6], cache)
    torch.testing.assert_close(hidden, states[0][4:6], **CLOSE)
    assert cache.length == 6


@torch.no_grad()
def test_one_by_one_equals_all_at_once(draft, batch):
    projected = draft.project_hidden_states(batch.aux_hidden_states)
    cache = draft.new_cache(capacity=2)
    single = [
        draft.extend(projected[t : t + 1], batch.input_ids[t : t + 1], batch.position_ids[t : t + 1], cache)
        for t in range(10)
    ]
    states = training_states(draft, batch, 1)
    torch.testing.assert_close(torch.cat(single), states[0][:10], **CLOSE)


@torch.no_grad()
def test_positions_beyond_the_trained_length_still_rotate(draft):
    """No table of positions: position 900 of a draft whose config says 64 differs from position 0."""
    results = []
    for start in (0, 900):
        cache = draft.new_cache()
        features = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
        ids, positions = torch.tensor([1, 2, 3]), torch.tensor([start, start + 1, start + 40])
        results.append(draft.extend(features, ids, positions, cache))
    # Rotary attention sees distances only; the float32 angles of large positions are good to about 1e-4.
    torch.testing.assert_close(results[0], results[1], atol=2e-3, rtol=1e-3)
    moved = draft.extend(features, ids, torch.tensor([900, 901, 902]), draft.new_cache())
    assert not torch.allclose(moved, results[1], atol=1e-2)


@pytest.mark.parametrize("length", [-1, 4])
def test_rolling_back_to_a_length_that_never_was_is_refused(draft, length):
    cache = draft.new_cache()
    with torch.no_grad():
        draft.extend(torch.zeros(3, 32), torch.tensor([1, 2, 3]), torch.arange(3), cache)
    with pytest.raises(ValueError, match="3 entries"):
        cache.rollback(length)
