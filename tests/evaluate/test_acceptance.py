"""Acceptance arithmetic on passes that a person can count."""

from hypothesis import given
from hypothesis import strategies as st

from eyas.evaluate.acceptance import Acceptance


def test_counts_by_hand():
    counts = Acceptance.count([0, 3, 1, 0, 2], 3)
    assert counts.accepted_at == (3, 2, 1)
    assert counts.length == 1 + 6 / 5
    assert counts.unconditional() == [3 / 5, 2 / 5, 1 / 5]
    assert counts.conditional() == [3 / 5, 2 / 3, 1 / 2]


def test_a_position_that_no_pass_reached_has_no_conditional_rate():
    counts = Acceptance.count([0, 0], 3)
    assert counts.length == 1.0
    assert counts.unconditional() == [0.0, 0.0, 0.0]
    assert counts.conditional() == [0.0, None, None]


def test_without_passes_there_is_no_acceptance_length():
    counts = Acceptance.count([], 2)
    assert counts.length is None
    assert counts.unconditional() == counts.conditional() == [None, None]


@given(st.integers(1, 6).flatmap(lambda k: st.tuples(st.just(k), st.lists(st.integers(0, k), min_size=1))))
def test_length_is_the_mean_of_tokens_by_pass(case):
    depth, accepted = case
    counts = Acceptance.count(accepted, depth)
    assert counts.accepted == sum(accepted)
    assert counts.length == 1 + sum(accepted) / len(accepted)
    assert list(counts.accepted_at) == sorted(counts.accepted_at, reverse=True)
