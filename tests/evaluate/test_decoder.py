"""Speculative output is plain greedy output, and acceptance is what a decoder without any cache would count."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from eyas.evaluate import decoder
from eyas.evaluate.acceptance import Acceptance
from eyas.evaluate.decoder import Stop, decode_chain, decode_plain
from eyas.evaluate.drafter import Eagle3Drafter
from eyas.train.batch import PackedLayout

DEPTHS = [1, 2, 3, 4, 5]
UNENDING = Stop(frozenset(), 28)
FAMILIES = ["eagle3", "eagle3.1"]


class ScriptedDrafter:
    """Drafts a given continuation; right for ever when that is the target's own."""

    def __init__(self, prompt, answer):
        self.prompt_length, self.answer = len(prompt), answer

    def begin(self):
        self.known = 0

    def propose(self, aux_hidden_states, next_ids, depth):
        assert len(aux_hidden_states) == len(next_ids)
        self.known += len(next_ids)
        emitted = self.known - self.prompt_length + 1
        return torch.tensor(self.answer[emitted : emitted + depth])


def test_plain_decoding_is_what_transformers_generates(target, target_folder, prompts):
    model = AutoModelForCausalLM.from_pretrained(target_folder.path, dtype=torch.float32)
    for prompt in prompts:
        generated = model.generate(
            prompt[None], attention_mask=torch.ones_like(prompt[None]), max_new_tokens=20, do_sample=False
        )
        stop = Stop(frozenset(target_folder.eos_ids), 20)
        assert decode_plain(target, prompt, stop) == generated[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("depth", DEPTHS)
def test_emitted_tokens_equal_plain_greedy_decoding(target, overfit, prompts, answers, depth, family):
    drafter = Eagle3Drafter(overfit(family))
    for prompt, answer in zip(prompts, answers, strict=True):
        output = decode_chain(target, drafter, prompt, UNENDING, depth=depth)
        assert output.tokens == answer
        assert 1 + sum(output.accepted) + len(output.accepted) == len(answer) + output.discarded


def test_an_untrained_draft_changes_nothing_but_the_speed(target, target_folder, prompts, answers, overfit):
    draft = overfit()
    untrained = Eagle3Drafter(type(draft)(draft.config, draft_vocab_ids=draft.draft_vocab_ids))
    untrained.draft.initialize(11)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert decode_chain(target, untrained, prompt, UNENDING, depth=4).tokens == answer


def test_every_length_of_accepted_chain_occurs(target, overfit, prompts):
    """Otherwise the tests around this one would not reach what they are for."""
    drafter, seen = Eagle3Drafter(overfit()), set()
    for prompt in prompts:
        seen |= set(decode_chain(target, drafter, prompt, UNENDING, depth=3).accepted)
    assert seen == {0, 1, 2, 3}


@pytest.mark.parametrize("max_new_tokens", [1, 2, 6, 7, 8, 12, 13])
def test_the_token_limit_cuts_inside_a_chain(target, prompts, answers, max_new_tokens):
    for prompt, answer in zip(prompts, answers, strict=True):
        output = decode_chain(
            target, ScriptedDrafter(prompt, answer), prompt, Stop(frozenset(), max_new_tokens), depth=5
        )
        assert output.tokens == answer[:max_new_tokens]
        assert output.accepted == [5] * -(-(max_new_tokens - 1) // 6)


@pytest.mark.parametrize("index", [0, 1, 2, 3, 6])
def test_an_eos_inside_the_accepted_chain_ends_the_answer_there(target, overfit, prompts, answers, index):
    for prompt, answer in zip(prompts, answers, strict=True):
        stop = Stop(frozenset({answer[index], 299}), 28)
        plain = decode_plain(target, prompt, stop)
        assert plain == answer[: answer.index(answer[index]) + 1]
        for drafter in (Eagle3Drafter(overfit()), ScriptedDrafter(prompt, answer)):
            assert decode_chain(target, drafter, prompt, stop, depth=4).tokens == plain


def test_each_of_several_eos_ids_ends_an_answer(target, prompts, answers):
    prompt, answer = prompts[-1], answers[-1]
    for eos in (answer[4], answer[7]):
        stop = Stop(frozenset({eos, 299, 298}), 28)
        tokens = decode_chain(target, ScriptedDrafter(prompt, answer), prompt, stop, depth=3).tokens
        assert tokens[-1] == eos
        assert tokens.count(eos) == 1


@pytest.mark.parametrize("depth", DEPTHS)
def test_a_perfect_draft_has_the_acceptance_length_depth_plus_one(target, prompts, answers, depth):
    accepted = []
    for prompt, answer in zip(prompts, answers, strict=True):
        drafter = ScriptedDrafter(prompt, answer)
        accepted += decode_chain(target, drafter, prompt, Stop(frozenset(), 20), depth=depth).accepted
    counts = Acceptance.count(accepted, depth)
    assert counts.length == depth + 1
    assert counts.unconditional() == counts.conditional() == [1.0] * depth


def test_a_draft_that_is_always_wrong_has_the_acceptance_length_one(target, prompts, answers):
    wrong = [(token + 1) % 300 for token in answers[-1]]
    output = decode_chain(target, ScriptedDrafter(prompts[-1], wrong), prompts[-1], Stop(frozenset(), 20), depth=3)
    assert output.tokens == answers[-1][:20]
    assert Acceptance.count(output.accepted, 3).length == 1.0


@pytest.mark.parametrize(("family", "depth"), [("eagle3", 1), ("eagle3", 4), ("eagle3.1", 3)])
def test_acceptance_equals_a_decoder_that_computes_everything_anew(target, overfit, prompts, family, depth):
    draft = overfit(family)
    for prompt in prompts:
        output = decode_chain(target, Eagle3Drafter(draft), prompt, Stop(frozenset(), 16), depth=depth)
        assert output.accepted == accepted_without_caches(target, draft, prompt, 16, depth)


@pytest.mark.parametrize("family", FAMILIES)
def test_acceptance_equals_a_teacher_forced_simulation_on_the_emitted_sequence(
    target, overfit, prompts, answers, family
):
    draft, depth = overfit(family), 3
    for prompt, answer in zip(prompts, answers, strict=True):
        output = decode_chain(target, Eagle3Drafter(draft), prompt, Stop(frozenset(), 22), depth=depth)
        simulated = simulate(target, draft, torch.cat((prompt, torch.tensor(answer))), len(prompt), depth)
        assert output.accepted == simulated[: len(output.accepted)]


def test_drafted_ids_are_the_targets(target, overfit, prompts):
    """The draft vocabulary is a subset with gaps, so an unmapped id would be another token."""
    draft = overfit()
    assert draft.config.maps_vocabulary
    assert int(draft.d2t.max()) > 0
    drafter = Eagle3Drafter(draft)
    features = torch.randn(5, 3 * 32, generator=torch.Generator().manual_seed(0))
    drafted = drafter.propose(features, prompts[-1][:5], 4)
    assert set(drafted.tolist()) <= set(draft.draft_vocab_ids.tolist())
    cache = draft.new_cache()
    states = draft.extend(draft.project_hidden_states(features), prompts[-1][:5], torch.arange(5), cache)
    first = int(draft.compute_logits(states[-1:]).argmax())
    assert int(drafted[0]) == first + int(draft.d2t[first])


def test_sequences_do_not_leak_into_each_other(target, overfit, prompts):
    drafter, stop = Eagle3Drafter(overfit()), Stop(frozenset(), 20)
    alone = decode_chain(target, Eagle3Drafter(overfit()), prompts[2], stop, depth=3)
    decode_chain(target, drafter, prompts[3], stop, depth=3)
    assert decode_chain(target, drafter, prompts[2], stop, depth=3) == alone


def test_logits_are_computed_only_where_they_are_read(target, overfit, prompts, monkeypatch):
    rows = []
    real = type(target.head).logits
    monkeypatch.setattr(
        type(target.head), "logits", lambda head, hidden: rows.append(len(hidden)) or real(head, hidden)
    )
    decode_chain(target, Eagle3Drafter(overfit()), prompts[-1], Stop(frozenset(), 12), depth=3)
    assert rows == [1] + [4] * (len(rows) - 1)


def test_counting_stops_at_the_first_mismatch():
    choices = torch.tensor([5, 6, 7, 8])
    cases = {(5, 6, 7): 3, (5, 6, 0): 2, (5, 0, 7): 1, (0, 6, 7): 0}
    for drafted, expected in cases.items():
        assert decoder.count_accepted(torch.tensor(drafted), choices) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_chain_step_has_the_state_that_training_computes(target, overfit, prompts, monkeypatch, family):
    """Positions, rolled back entries and the fed-back state, which the drafted ids alone would hardly betray."""
    draft, states, depth = overfit(family), [], 4
    extend = type(draft).extend
    monkeypatch.setattr(type(draft), "extend", lambda *args: states.append(extend(*args)) or states[-1])
    output = decode_chain(target, Eagle3Drafter(draft), prompts[3], Stop(frozenset(), 14), depth=depth)
    text, slot = torch.cat((prompts[3], torch.tensor(output.tokens))), len(prompts[3]) - 1
    assert len(states) == depth * len(output.accepted)
    for number, matches in enumerate(output.accepted):
        mine = [state[-1] for state in states[depth * number : depth * (number + 1)]]
        expected = chain_states(draft, aux_states(target, text[: slot + 1]), text[: slot + 2], slot, depth)
        # One float32 layer with sums in another order; a rotary position off by one moves these states by about 0.1.
        torch.testing.assert_close(torch.stack(mine), torch.cat(expected), atol=1e-4, rtol=1e-4)
        slot += matches + 1


@torch.no_grad()
def accepted_without_caches(target, draft, prompt, num_tokens, depth):
    """The same decoding with neither cache: every pass runs target and draft over the whole text, the draft by its
    training code."""
    text, accepted = prompt, []
    text = torch.cat((text, greedy_choices(target, text)[-1:]))
    while len(text) - len(prompt) < num_tokens:
        drafted = chain(draft, aux_states(target, text[:-1]), text, len(text) - 2, depth)
        choices = greedy_choices(target, torch.cat((text, drafted)))[len(text) - 1 :]
        matches = 0
        while matches < depth and int(drafted[matches]) == int(choices[matches]):
            matches += 1
        accepted.append(matches)
        text = torch.cat((text, choices[: matches + 1]))
    return accepted


@torch.no_grad()
def simulate(target, draft, text, prompt_length, depth):
    """Walk over a finished greedy text: draft from the present slot, accept what the text says, move on."""
    aux, slot, accepted = aux_states(target, text), prompt_length - 1, []
    while slot + 2 + depth < len(text):
        drafted = chain(draft, aux[: slot + 1], text[: slot + 2], slot, depth)
        matches = 0
        while matches < depth and int(drafted[matches]) == int(text[slot + 2 + matches]):
            matches += 1
        accepted.append(matches)
        slot += matches + 1
    return accepted


def chain(draft, aux, text, slot, depth):
    """Draft from one slot by the code that trains: `text` holds the tokens up to slot + 1."""
    states = chain_states(draft, aux, text, slot, depth)
    return draft.draft_vocab_ids[draft.compute_logits(torch.cat(states)).argmax(-1)]


def chain_states(draft, aux, text, slot, depth):
    layout, rows = PackedLayout.from_lengths([slot + 1]), torch.tensor([slot])
    projected = draft.project_hidden_states(aux)
    hidden, state = draft.first_step(projected, text[1 : slot + 2], layout.offsets, layout, rows)
    states = [hidden]
    for _ in range(depth - 1):
        drafted = draft.draft_vocab_ids[draft.compute_logits(states[-1]).argmax(-1)]
        states.append(draft.next_step(states[-1], drafted, state))
    return states


def aux_states(target, text):
    return torch.cat(target.capture([text.numpy()])[0].aux, dim=-1).clone()


def greedy_choices(target, text):
    return target.head.logits(target.capture([text.numpy()])[0].last).argmax(-1)
