"""Held-out metrics: n/a where nothing can be measured, and the numbers the counters say."""

import pytest
import torch

from eyas.train.config import TrainConfig
from eyas.train.evaluation import evaluate_heldout
from eyas.train.heldout import draft_metrics, sum_counters
from eyas.train.metrics import TttCounters
from eyas.train.run import Run
from eyas.train.testing import make_store


def counters(**columns):
    zeros = TttCounters.zeros(3)
    names = ("supervised", "correct", "hits", "valid")
    parts = {name: torch.tensor(columns.get(name, [0, 0, 0])) for name in names}
    return TttCounters(loss_sums=torch.tensor(columns.get("loss_sums", zeros.loss_sums.tolist())).double(), **parts)


def open_run(store, **settings):
    return Run.open(TrainConfig(store=store, out=store.parent / "run", ttt_steps=3, **settings))


def test_metrics_are_ratios_of_the_counters():
    metrics = draft_metrics(
        counters(
            loss_sums=[10.0, 8.0, 6.0], supervised=[10, 8, 6], correct=[5, 2, 3], hits=[5, 2, 1], valid=[20, 10, 5]
        ),
        decay=0.5,
    )
    assert metrics.loss == pytest.approx(1.0)
    assert metrics.accuracy == [0.5, 0.25, 0.5]
    assert metrics.accept_length == pytest.approx(1 + 5 / 20 + 2 / 10 + 1 / 5)
    assert metrics.supervised == 10


def test_nothing_supervised_is_not_available_instead_of_zero_or_nan():
    empty = draft_metrics(counters(), decay=0.8)
    assert (empty.loss, empty.accuracy, empty.accept_length) == (None, [None, None, None], None)
    shallow = draft_metrics(
        counters(supervised=[2, 0, 0], correct=[1, 0, 0], valid=[2, 0, 0], hits=[1, 0, 0]), decay=0.8
    )
    assert shallow.accuracy == [0.5, None, None]
    assert shallow.accept_length == 1.5


def test_counters_of_micro_batches_add_up():
    one = counters(supervised=[1, 2, 3], valid=[4, 5, 6])
    total = sum_counters([one, one], 3)
    assert (total.supervised.tolist(), total.valid.tolist()) == ([2, 4, 6], [8, 10, 12])


def test_evaluation_touches_held_out_rows_alone_and_leaves_no_gradient(tmp_path):
    store = make_store(tmp_path / "store", heldout=4, quarantined=(11,))
    run = open_run(store)
    seen = [row for _, packs in run.heldout_batches() for pack in packs for row in pack.tolist()]
    assert seen == [8, 9, 10]
    metrics = evaluate_heldout(run)
    assert metrics.supervised > 0
    assert all(parameter.grad is None for parameter in run.draft.parameters())


def test_evaluation_does_not_depend_on_the_token_budget(tmp_path):
    store = make_store(tmp_path / "store", heldout=6)
    one, other = (evaluate_heldout(open_run(store, tokens_per_micro_batch=tokens)) for tokens in (16, 4096))
    assert one.accuracy == other.accuracy
    assert one.accept_length == other.accept_length
    assert one.loss == pytest.approx(other.loss, rel=1e-5)  # fp32 sums in another order


def test_a_store_without_held_out_rows_has_no_metrics(tmp_path):
    assert evaluate_heldout(open_run(make_store(tmp_path / "store", heldout=0))) is None
