"""What counts as equal to plain greedy decoding, and what is excused."""

import pytest
import torch

from eyas.evaluate.decoder import Stop, decode_plain
from eyas.evaluate.equality import EXCUSED_MARGIN, Divergence, Verdict, find_divergences

STOP = Stop(frozenset({299}), 28)


def divergence(margin):
    return Divergence("p", 3, 1, 2, margin)


def find(target, prompts, answers, emitted, stop=STOP):
    return find_divergences(target, "p", prompts[-1], answers[-1], emitted, stop)


def test_the_same_tokens_have_no_divergence(target, prompts, answers):
    assert find(target, prompts, answers, list(answers[-1])) == []


def test_another_token_is_found_with_its_margin(target, prompts, answers):
    emitted = list(answers[-1])
    emitted[-1] = (emitted[-1] + 1) % 299
    (found,) = find(target, prompts, answers, emitted)
    assert (found.index, found.expected, found.found) == (27, answers[-1][-1], emitted[-1])
    assert found.margin > EXCUSED_MARGIN
    assert not found.excused


def test_after_a_divergence_the_rest_is_compared_along_the_path_taken(target, prompts, answers):
    forced = [*answers[-1][:5], (answers[-1][5] + 1) % 299]
    rest = decode_plain(target, torch.cat((prompts[-1], torch.tensor(forced))), Stop(frozenset(), 28 - 6))
    found = find(target, prompts, answers, forced + rest)
    assert [d.index for d in found] == [5]
    wrong = [*forced, *rest[:-1], (rest[-1] + 1) % 299]
    assert [d.index for d in find(target, prompts, answers, wrong)] == [5, 27]


def test_an_answer_that_ends_early_or_late_is_never_excused(target, prompts, answers):
    early, late = find(target, prompts, answers, answers[-1][:-1]), find(target, prompts, answers, [*answers[-1], 7])
    assert [(d.index, d.expected, d.found) for d in early] == [(27, answers[-1][27], None)]
    assert [(d.index, d.expected, d.found) for d in late] == [(28, None, 7)]
    assert not early[0].excused
    assert not late[0].excused


@pytest.mark.parametrize(
    ("tokens", "margins", "holds"),
    [
        (500, [], True),
        (500, [5e-5], True),
        (500, [2e-4], False),
        (500, [None], False),
        (500, [5e-5, 5e-5], False),
        (1001, [5e-5, 5e-5], True),
        (1001, [5e-5, 2e-4], False),
    ],
)
def test_few_ties_are_excused_and_nothing_else(tokens, margins, holds):
    assert Verdict.of(tokens, map(divergence, margins), demanded=True).holds is holds
