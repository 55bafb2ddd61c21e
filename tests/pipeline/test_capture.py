"""Batches, and what a capture process leaves behind when it dies."""

import json
import re
import signal

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.cache_format.receipt import load_receipt
from eyas.pipeline.capture import MAX_PADDING, ShardCapture, batches, to_numpy
from eyas.pipeline.cluster import capture_in_process
from eyas.pipeline.config import PrecomputeConfig
from eyas.pipeline.hf_engine import HfEngine
from eyas.pipeline.journal import MAX_DEATHS, AttemptJournal, RunFolder
from eyas.pipeline.precompute import precompute
from eyas.pipeline.testing import make_chats


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), st.integers(0, 2000), st.sets(st.integers(0, 59)))
def test_batches_hold_every_row_once_in_order_within_budget_and_padding(lengths, budget, alone):
    lengths = sorted(lengths, reverse=True)
    found = list(batches(lengths, budget, alone=alone))
    assert [row for batch in found for row in batch] == list(range(len(lengths)))
    for batch in found:
        padded = lengths[batch[0]] * len(batch)
        real = sum(lengths[row] for row in batch)
        assert len(batch) == 1 or (padded <= budget and padded - real <= MAX_PADDING * padded)
        assert len(batch) == 1 or not alone & set(batch)


def test_bf16_reaches_numpy_bit_for_bit():
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.uint16)
    array = to_numpy(bits.view(torch.bfloat16))
    np.testing.assert_array_equal(array.view(np.uint16), bits.numpy())


@pytest.fixture
def run_folder(tmp_path):
    return RunFolder(tmp_path)


def test_rows_in_flight_at_a_death_are_remembered_and_orderly_ends_are_not(run_folder):
    first = AttemptJournal(run_folder, 3)
    first.begin()
    first.rows([0, 1])
    first.rows([2, 3])  # and then the process is gone
    second = AttemptJournal(run_folder, 3)
    assert second.deaths == {2: 1, 3: 1}
    second.begin()
    second.rows([2])
    second.end()
    third = AttemptJournal(run_folder, 3)
    assert (third.deaths, third.early_deaths) == ({2: 1, 3: 1}, 0)
    third.begin()
    fourth = AttemptJournal(run_folder, 3)
    assert (fourth.deaths, fourth.early_deaths) == ({2: 1, 3: 1}, 1)
    assert AttemptJournal(run_folder, 4).deaths == {}


def test_rows_behind_the_batch_in_flight_are_told_of_open_attempts_alone(run_folder):
    open_attempt, loading, closed = (AttemptJournal(run_folder, shard) for shard in (3, 4, 5))
    for journal in (open_attempt, loading, closed):
        journal.begin()
    open_attempt.rows([0, 1])
    open_attempt.rows([2, 3])
    closed.rows([7])
    closed.end()
    assert run_folder.rows_done({3, 4, 5, 6}) == {3: 2, 4: 0}
    assert run_folder.rows_done({4}) == {4: 0}


def test_torn_line_of_a_journal_is_ignored(run_folder):
    journal = AttemptJournal(run_folder, 0)
    journal.begin()
    journal.rows([5])
    with (run_folder.path / "000000.jsonl").open("a") as file:
        file.write("\n[6, ")
    again = AttemptJournal(run_folder, 0)
    assert again.deaths == {5: 1}
    again.begin()
    again.rows([5])
    assert AttemptJournal(run_folder, 0).deaths == {5: 2}, "the torn line swallows no later one"


class Died(BaseException):
    """Stands for the end of the process: nothing of ours may catch it."""


def test_row_that_always_kills_its_process_is_given_up_after_three_deaths(tmp_path, tiny_target, monkeypatch):
    chats = make_chats(tmp_path / "chats.jsonl", 6, 0)
    with chats.open("a") as file:
        messages = [{"role": "user", "content": "Z"}, {"role": "assistant", "content": "the owl sleeps"}]
        file.write(json.dumps({"id": "fatal", "messages": messages}) + "\n")
    forward, deaths = HfEngine._forward, []

    def fatal(self, ids, mask):
        if bool((ids == 60).any()):  # the letter Z
            deaths.append(ids.shape[0])
            raise Died
        return forward(self, ids, mask)

    monkeypatch.setattr(HfEngine, "_forward", fatal)
    monkeypatch.setattr(AttemptJournal, "end", lambda self: None)  # a dead process closes nothing

    def restart_forever(task, shards, **_options):
        for shard in shards:
            while True:
                try:
                    yield ShardCapture(task)({"shard": shard})
                    break
                except Died:
                    continue

    config = PrecomputeConfig(
        chats=(str(chats),), target=str(tiny_target), out=str(tmp_path / "store"), batch_tokens=4096
    )
    precompute(config, capture=restart_forever)
    assert len(deaths) == MAX_DEATHS
    assert deaths[1:] == [1, 1]  # after the first death, its rows run alone
    content = load_receipt(_paths(tmp_path), 0).content
    [lost] = content.quarantined
    assert (lost.source_row, lost.reason) == (6, "its capture ended the process 3 times")
    assert content.rows == 7


def _paths(tmp_path):
    from eyas.cache_format.layout import StorePaths

    return StorePaths(tmp_path / "store")


def test_process_that_dies_before_any_row_fails_its_shard_after_three_deaths(tmp_path, tiny_target):
    chats = make_chats(tmp_path / "chats.jsonl", 2, 0)
    records = []

    def doomed(task, shards, **_options):
        for _ in range(MAX_DEATHS):
            AttemptJournal(RunFolder(task.run_folder), shards[0]).begin()
        for record in capture_in_process(task, shards):
            records.append(record)
            yield record

    config = PrecomputeConfig(chats=(str(chats),), target=str(tiny_target), out=str(tmp_path / "store"))
    with pytest.raises(Exception, match="the process died 3 times before the first row"):
        precompute(config, capture=doomed)
    assert records[0]["status"] == "failed"


def test_stop_flag_leaves_shards_pending_and_the_next_run_finishes(tmp_path, tiny_target):
    chats = make_chats(tmp_path / "chats.jsonl", 10, 0)

    def stop_after_one(task, shards, **_options):
        yield from capture_in_process(task, shards[:1])
        RunFolder(task.run_folder).request_stop(signal.SIGTERM)
        yield from capture_in_process(task, shards[1:])

    config = PrecomputeConfig(
        chats=(str(chats),), target=str(tiny_target), out=str(tmp_path / "store"), shard_tokens=600
    )
    stopped = precompute(config, capture=stop_after_one)
    assert stopped.exit_code == 143
    assert re.fullmatch(r"stopped by SIGTERM with \d shards pending; run the same command again to go on", stopped.text)
    assert "is complete" in precompute(config, capture=capture_in_process).text


def test_stop_in_the_middle_of_a_shard_drops_the_attempt_and_the_shard_stays_pending(
    tmp_path, tiny_target, monkeypatch
):
    chats = make_chats(tmp_path / "chats.jsonl", 10, 0)
    config = PrecomputeConfig(
        chats=(str(chats),), target=str(tiny_target), out=str(tmp_path / "store"), shard_tokens=100_000
    )
    forward, rows = HfEngine._forward, []

    def stop_at_the_third_row(task, shards, **_options):
        def forward_and_stop(self, ids, mask):
            rows.append(ids)
            if len(rows) == 5:  # check() runs the first row once more, on its own
                RunFolder(task.run_folder).request_stop(signal.SIGTERM)
            return forward(self, ids, mask)

        monkeypatch.setattr(HfEngine, "_forward", forward_and_stop)
        yield from capture_in_process(task, shards)

    assert "with 1 shards pending" in precompute(config, capture=stop_at_the_third_row).text
    assert len(rows) == 5
    assert [p.name for p in (tmp_path / "store" / "shards" / "000000").iterdir()] == ["samples.arrow"]
    monkeypatch.undo()
    assert "is complete" in precompute(config, capture=capture_in_process).text


def test_an_actor_whose_driver_is_gone_stops(tmp_path):
    run = RunFolder(tmp_path / "run")
    assert run.stop_requested
    run.path.mkdir()
    assert not run.stop_requested
