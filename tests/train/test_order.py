"""The order of training: every sample once an epoch, on every world size, and never a held-out one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.train.order import epoch_order, sequential_packs

PLAN = "0123abcd"


def order_of(lengths, *, heldout=None, available=None, seed=0, epoch=0, tokens=64, micro_batches=2, plan=PLAN):
    lengths = np.asarray(lengths, np.uint32)
    n = len(lengths)
    return epoch_order(
        plan_digests=(plan,),
        lengths=lengths,
        heldout=np.zeros(n, bool) if heldout is None else np.asarray(heldout),
        available=np.ones(n, bool) if available is None else np.asarray(available),
        seed=seed,
        epoch=epoch,
        tokens=tokens,
        micro_batches=micro_batches,
    )


plans = st.lists(st.tuples(st.integers(1, 100), st.booleans(), st.booleans()), max_size=60)


@settings(deadline=None, max_examples=60)
@given(plan=plans, world_size=st.integers(1, 5), micro_batches=st.integers(1, 4), epoch=st.integers(0, 2))
def test_ranks_together_see_each_available_training_row_once(plan, world_size, micro_batches, epoch):
    lengths, heldout, available = ([row[i] for row in plan] for i in range(3))
    order = order_of(
        lengths,
        heldout=np.array(heldout, bool),
        available=np.array(available, bool),
        epoch=epoch,
        micro_batches=micro_batches,
    )
    seen = []
    for step in range(order.num_steps):
        dealt = [order.deal(step, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert len({len(packs) for packs in dealt}) == 1, "every rank runs the same number of micro-batches"
        rows = sorted(int(row) for packs in dealt for pack in packs for row in pack)
        assert rows == sorted(int(row) for pack in order.global_batch(step) for row in pack)
        seen += rows
    assert sorted(seen) == [row for row in range(len(plan)) if available[row] and not heldout[row]]


@settings(deadline=None, max_examples=60)
@given(lengths=st.lists(st.integers(1, 100), max_size=80), tokens=st.integers(1, 100))
def test_a_pack_keeps_the_budget_unless_it_is_one_long_document(lengths, tokens):
    order = order_of(lengths, tokens=tokens)
    for index in range(order.num_packs):
        pack = order.pack(index)
        assert len(pack) >= 1
        assert sum(lengths[row] for row in pack) <= tokens or len(pack) == 1


@settings(deadline=None, max_examples=30)
@given(plan=plans)
def test_absent_rows_leave_a_gap_and_move_nothing(plan):
    lengths, heldout, available = ([row[i] for row in plan] for i in range(3))
    whole = order_of(lengths, heldout=np.array(heldout, bool))
    partial = order_of(lengths, heldout=np.array(heldout, bool), available=np.array(available, bool))
    assert whole.digest == partial.digest
    assert whole.num_steps == partial.num_steps
    for index in range(whole.num_packs):
        assert partial.pack(index).tolist() == [row for row in whole.pack(index) if available[row]]


def test_equal_inputs_give_the_same_order_and_every_input_counts():
    lengths = np.arange(1, 200) % 50 + 1
    digest = order_of(lengths).digest
    assert order_of(lengths).digest == digest
    others = [
        order_of(lengths, seed=1),
        order_of(lengths, epoch=1),
        order_of(lengths, tokens=65),
        order_of(lengths, micro_batches=3),
        order_of(lengths, plan="another"),
        order_of(lengths[:-1]),
    ]
    assert len({digest, *(other.digest for other in others)}) == len(others) + 1


def test_the_order_is_pinned_so_that_a_checkpoint_resumes_under_any_library_version():
    order = order_of([5, 3, 9, 2, 7, 4, 8, 6], tokens=12, micro_batches=2)
    assert [order.pack(index).tolist() for index in range(order.num_packs)] == [[7, 3], [4, 0], [6, 5], [2, 1]]


def test_packing_wastes_little():
    lengths = np.random.default_rng(0).integers(20, 900, 2000)
    order = order_of(lengths, tokens=2048)
    assert lengths.sum() / (order.num_packs * 2048) > 0.97


def test_shuffling_mixes_sources_that_lie_one_after_the_other():
    order = order_of(np.full(1000, 10), tokens=10, micro_batches=1)
    rank_correlation = np.corrcoef(np.arange(1000), order.rows)[0, 1]
    assert abs(rank_correlation) < 0.1


def test_documents_longer_than_the_budget_are_neither_cut_nor_dropped():
    order = order_of([10, 500, 10, 300], tokens=64)
    alone = [order.pack(index).tolist() for index in range(order.num_packs) if len(order.pack(index)) == 1]
    assert [1] in alone
    assert [3] in alone
    assert sorted(order.rows.tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_ten_rows_on_any_number_of_ranks_take_the_same_steps(world_size):
    order = order_of([64] * 10, micro_batches=4)
    assert order.num_steps == 3
    micro = [len(order.deal(2, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert micro == [-(-2 // world_size)] * world_size


def test_evaluation_packs_keep_the_order_given():
    lengths = np.array([30, 30, 30, 100, 5])
    packs = sequential_packs(np.arange(5), lengths, 64)
    assert [pack.tolist() for pack in packs] == [[0, 1], [2], [3], [4]]
    assert sequential_packs(np.zeros(0, np.int64), lengths, 64) == []
