"""metrics.jsonl reads as if a resumed run had never stopped; people get one line an interval."""

import json
import logging

import pytest

from eyas.train.train_log import TrainLog, read_metrics

RECORD = {
    "epoch": 0,
    "loss": 2.5,
    "accuracy": [0.5, None],
    "accept_length": 1.5,
    "lr": 1e-3,
    "grad_norm": 0.7,
    "tokens": 100,
    "seconds": 2.0,
    "tokens_per_s": 50.0,
    "stall": 0.01,
}


def write(out, steps, *, done=0, total=10, every=2):
    with TrainLog(out, done_steps=done, total_steps=total, log_every=every) as log:
        for step in steps:
            log.train_step({"step": step, **RECORD})
            log.flush()


def test_resuming_drops_what_lies_behind_the_checkpoint_and_a_torn_line(tmp_path):
    write(tmp_path, [1, 2, 3, 4])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    write(tmp_path, [3, 4, 5], done=2)
    assert [record["step"] for record in read_metrics(tmp_path, "train")] == [1, 2, 3, 4, 5]


def test_numbers_survive_the_file_exactly(tmp_path):
    loss = 0.1 + 0.2
    with TrainLog(tmp_path, done_steps=0, total_steps=1, log_every=1) as log:
        log.train_step({"step": 1, **RECORD, "loss": loss})
    assert read_metrics(tmp_path, "train")[0]["loss"] == loss


@pytest.mark.parametrize("every", [2, 3])
def test_one_line_an_interval_and_one_at_the_end(tmp_path, caplog, every):
    with caplog.at_level(logging.INFO, "eyas.train"):
        write(tmp_path, range(1, 8), total=7, every=every)
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("step ")]
    assert [int(line.split("/")[0].removeprefix("step ")) for line in lines] == sorted({*range(every, 8, every), 7})
    assert "accuracy 0.500/n/a" in lines[0]
    assert "stall 1.0%" in lines[0]


def test_a_skipped_step_and_an_empty_evaluation_say_not_available(tmp_path, caplog):
    with (
        caplog.at_level(logging.INFO, "eyas.train"),
        TrainLog(tmp_path, done_steps=0, total_steps=1, log_every=1) as log,
    ):
        log.train_step({"step": 1, **RECORD, "loss": None, "grad_norm": None})
        log.heldout({"step": 1, "loss": None, "accuracy": [None], "accept_length": None})
    assert "loss n/a" in caplog.text
    assert "simulated acceptance length n/a" in caplog.text


def test_a_line_averages_what_happened_since_the_last_one(tmp_path, caplog):
    with (
        caplog.at_level(logging.INFO, "eyas.train"),
        TrainLog(tmp_path, done_steps=0, total_steps=2, log_every=2) as log,
    ):
        log.train_step({"step": 1, **RECORD, "loss": 1.0, "accuracy": [0.2, None], "tokens": 100, "seconds": 1.0})
        log.train_step({"step": 2, **RECORD, "loss": 3.0, "accuracy": [0.4, 0.5], "tokens": 300, "seconds": 3.0})
    assert "loss 2.0000  accuracy 0.300/0.500" in caplog.text
    assert "100 tok/s" in caplog.text
    assert [record["loss"] for record in read_metrics(tmp_path, "train")] == [1.0, 3.0]


def test_metrics_reach_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, [1, 2], every=1)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {"train/loss", "train/accuracy/depth_1", "train/stall", "train/accept_length"} <= set(
        events.Tags()["scalars"]
    )
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2]


def test_every_line_is_one_json_object(tmp_path):
    write(tmp_path, [1, 2, 3])
    assert all(json.loads(line)["kind"] == "train" for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
