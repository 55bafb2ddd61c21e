"""The story of a run: it learns, it reports, it stops on a signal, it resumes as if nothing had happened."""

import json
import math
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eyas.cache_format.errors import ConfigError, StoreLockedError, StoreNotFoundError
from eyas.cache_format.writer import StoreLock
from eyas.configuration import read_config
from eyas.train import train_from_cache as story
from eyas.train.checkpoint import checkpoints_folder, find_latest, load_checkpoint, load_meta
from eyas.train.config import TrainConfig
from eyas.train.errors import CheckpointError, ExportError, SupervisionError, TrainError
from eyas.train.run import Run
from eyas.train.testing import make_store
from eyas.train.train_from_cache import train_from_cache
from eyas.train.train_log import read_metrics

SETTINGS = {"ttt_steps": 3, "tokens_per_micro_batch": 48, "micro_batches": 2, "epochs": 4, "lr": 5e-3}


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("story") / "store")


def fit(store, out, **settings):
    config = TrainConfig(store=store, out=out, **{**SETTINGS, **settings})
    return config, train_from_cache(config)


def losses(out):
    return [(record["step"], record["loss"], record["grad_norm"]) for record in read_metrics(out, "train")]


def weights(out):
    return load_checkpoint(find_latest(out)).weights


def same_weights(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_learns_and_leaves_everything_it_promises(store, tmp_path):
    config, report = fit(store, tmp_path / "run", epochs=16)
    train = read_metrics(config.out, "train")
    assert report.exit_code == 0
    assert "hidden supervision" in report.text
    assert train[-1]["loss"] < 0.8 * train[0]["loss"]
    assert [record["step"] for record in train] == list(range(1, len(train) + 1))
    heldout = read_metrics(config.out, "heldout")
    assert len(heldout) == 16
    assert max(record["accept_length"] for record in heldout) > 1.3
    assert read_config(TrainConfig, config.out / "config.toml") == config
    assert (config.out / "export" / "model.safetensors").is_file()
    assert list((config.out / "tensorboard").iterdir())


@pytest.mark.parametrize("family", ["eagle3", "eagle3.1"])
@pytest.mark.parametrize("supervision", ["hidden", "topk", "probs"])
def test_every_family_trains_from_every_encoding(store, tmp_path, family, supervision):
    config, report = fit(store, tmp_path / "run", family=family, supervision=supervision, epochs=1)
    assert f"{supervision} supervision" in report.text
    assert all(np.isfinite(record["loss"]) for record in read_metrics(config.out, "train"))


def test_bf16_autocast_keeps_fp32_weights_and_learns_like_fp32(tmp_path):
    store = make_store(tmp_path / "store", hidden_dtype="bfloat16")
    for precision in ("fp32", "bf16"):
        fit(store, tmp_path / precision, precision=precision, epochs=3)
    assert {tensor.dtype for tensor in weights(tmp_path / "bf16").values()} == {torch.float32, torch.int64, torch.bool}
    exact, rounded = ([loss for _, loss, _ in losses(tmp_path / name)] for name in ("fp32", "bf16"))
    # bf16 rounds each activation to 8 bits: the curves agree to a few per cent on this small draft.
    assert rounded == pytest.approx(exact, rel=0.05)
    assert rounded != exact


def test_overfitting_a_few_rows_reaches_the_step_limit(tmp_path):
    # F16: whatever is wrong with alignment or masks shows as a chain that breaks on rows known by heart.
    store = make_store(tmp_path / "store", lengths=[14] * 4, heldout=0, hidden_size=32, draft_vocab_size=40)
    config, _ = fit(
        store, tmp_path / "run", epochs=120, tokens_per_micro_batch=64, evaluate_every=1000, lr=1e-2, micro_batches=1
    )
    assert read_metrics(config.out, "train")[-1]["accept_length"] == 4.0


def test_two_runs_with_one_seed_are_equal_and_another_seed_differs(store, tmp_path):
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        fit(store, tmp_path / name, seed=seed, epochs=1)
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    assert losses(tmp_path / "one") != losses(tmp_path / "three")


def test_micro_batches_do_not_change_the_step(store, tmp_path):
    # The same global batch as one pack or as several: only the order of fp32 additions differs.
    fit(store, tmp_path / "one", tokens_per_micro_batch=4096, micro_batches=1, epochs=1)
    fit(store, tmp_path / "many", tokens_per_micro_batch=30, micro_batches=100, epochs=1)
    one, many = losses(tmp_path / "one"), losses(tmp_path / "many")
    assert len(one) == len(many) == 1
    assert one[0][1:] == pytest.approx(many[0][1:], rel=1e-4)


@pytest.mark.parametrize("stop_after", [1, 3, 5])
def test_a_resumed_run_equals_the_straight_one_bit_for_bit(store, tmp_path, monkeypatch, stop_after):
    fit(store, tmp_path / "straight", checkpoint_every=2, epochs=2)
    with monkeypatch.context() as patch:
        patch.setattr(story, "note_step", dying_after(stop_after))
        with pytest.raises(KeyboardInterrupt):
            fit(store, tmp_path / "resumed", checkpoint_every=2, epochs=2)
    fit(store, tmp_path / "resumed", checkpoint_every=2, epochs=2)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "straight")
    assert same_weights(weights(tmp_path / "resumed"), weights(tmp_path / "straight"))
    assert [r["accept_length"] for r in read_metrics(tmp_path / "resumed", "heldout")] == [
        r["accept_length"] for r in read_metrics(tmp_path / "straight", "heldout")
    ]


def dying_after(steps):
    def note(_run, progress, _position, _result):
        if progress.global_step == steps:
            raise KeyboardInterrupt

    return note


def test_a_finished_run_is_not_trained_again(store, tmp_path):
    fit(store, tmp_path / "run", epochs=1)
    before, trained = losses(tmp_path / "run"), weights(tmp_path / "run")
    _, report = fit(store, tmp_path / "run", epochs=1)
    assert report.exit_code == 0
    assert losses(tmp_path / "run") == before
    assert same_weights(weights(tmp_path / "run"), trained)


def test_a_run_that_died_before_its_export_only_exports(store, tmp_path, monkeypatch):
    def die(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(story, "write_export", die)
        with pytest.raises(KeyboardInterrupt):
            fit(store, tmp_path / "run", epochs=1)
    before = losses(tmp_path / "run")
    fit(store, tmp_path / "run", epochs=1)
    assert losses(tmp_path / "run") == before
    assert (tmp_path / "run" / "export" / "config.json").is_file()


def test_resuming_with_another_setting_is_refused_by_name_and_leaves_the_run_alone(store, tmp_path):
    fit(store, tmp_path / "run", epochs=1)
    before = losses(tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"--lr: checkpoint has 0.005, this run has 0.1"):
        fit(store, tmp_path / "run", epochs=1, lr=0.1)
    with pytest.raises(CheckpointError, match=r"supervision: checkpoint has hidden, this run has topk"):
        fit(store, tmp_path / "run", epochs=1, supervision="topk")
    assert losses(tmp_path / "run") == before


def test_resuming_from_another_store_is_refused(store, tmp_path):
    fit(store, tmp_path / "run", epochs=1)
    other = make_store(tmp_path / "other", seed=1)
    with pytest.raises(CheckpointError, match="store's identity"):
        fit(other, tmp_path / "run", epochs=1)


def test_a_moved_store_and_other_reporting_resume(store, tmp_path):
    fit(store, tmp_path / "run", epochs=1)
    moved = make_store(tmp_path / "moved")
    _, report = fit(moved, tmp_path / "run", epochs=1, log_every=1, checkpoint_every=1, keep_checkpoints=5)
    assert report.exit_code == 0


def test_foreign_folders_and_mistyped_stores_are_refused(store, tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    with pytest.raises(CheckpointError, match=r"chapter1.txt.*choose a new folder"):
        fit(store, tmp_path / "thesis")
    with pytest.raises(StoreNotFoundError, match="stroe"):
        fit(tmp_path / "stroe", tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_draft_that_no_engine_loads_is_refused_before_training(store, tmp_path, monkeypatch):
    serving = Run.serving_config
    monkeypatch.setattr(Run, "serving_config", lambda run: {**serving(run), "rope_theta": None})
    with pytest.raises(ExportError, match=r"V10: rope_theta is absent[\s\S]*nothing was trained"):
        fit(store, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize("device", ["quantum", "cpu:x", "cuda:99"])
def test_a_device_that_is_not_there_is_a_usage_error(store, tmp_path, device):
    with pytest.raises(ConfigError, match=f"--device {device} cannot be used"):
        fit(store, tmp_path / "run", device=device)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "setting", [{"lr": math.inf}, {"grad_clip": math.inf}, {"weight_decay": math.nan}, {"seed": 2**63}]
)
def test_numbers_that_no_run_can_use_or_record_are_refused(tmp_path, setting):
    with pytest.raises(ConfigError, match=f"--{next(iter(setting)).replace('_', '-')} is"):
        TrainConfig(store=tmp_path, out=tmp_path, **setting)


def test_two_trainers_never_share_a_run(store, tmp_path):
    with StoreLock(tmp_path / "run"), pytest.raises(StoreLockedError):
        fit(store, tmp_path / "run")


def test_a_store_without_training_rows_is_refused(tmp_path):
    store = make_store(tmp_path / "store", num_samples=2, heldout=2)
    with pytest.raises(TrainError, match="every row is held out"):
        fit(store, tmp_path / "run")


def test_supervision_that_is_not_stored_is_refused_before_anything_is_written(tmp_path):
    store = make_store(tmp_path / "store", supervision=("topk",))
    with pytest.raises(SupervisionError):
        fit(store, tmp_path / "run", supervision="probs")
    assert not (tmp_path / "run").exists()


def test_without_held_out_rows_the_newest_draft_is_the_best_and_the_report_says_so(tmp_path):
    store = make_store(tmp_path / "store", heldout=0)
    config, report = fit(store, tmp_path / "run", epochs=1)
    assert "n/a (no held-out rows)" in report.text
    folder = checkpoints_folder(config.out)
    assert os.readlink(folder / "best") == os.readlink(folder / "latest")
    assert read_metrics(config.out, "heldout") == []


def test_rows_without_supervised_slots_take_no_step_and_report_no_accuracy(tmp_path):
    store = make_store(tmp_path / "store", lengths=[2, 2, 2], heldout=0, draft_vocab_size=40)
    config, _ = fit(store, tmp_path / "run", epochs=1)
    (record,) = read_metrics(config.out, "train")
    assert (record["loss"], record["grad_norm"], record["accuracy"]) == (0.0, 0.0, [None, None, None])


def test_short_rows_train_with_more_steps_than_they_have_tokens(tmp_path):
    store = make_store(tmp_path / "store", lengths=[1, 2, 3, 4, 20], heldout=0)
    config, _ = fit(store, tmp_path / "run", ttt_steps=7, tokens_per_micro_batch=8)
    assert all(np.isfinite(record["loss"]) for record in read_metrics(config.out, "train"))


def test_a_step_that_is_not_finite_is_skipped_counted_and_named(store, tmp_path, monkeypatch):
    accumulate = story.accumulate

    def poisoned(run, micro, into):
        accumulate(run, micro, into)
        if micro.position[:2] == (0, 1) and micro.is_last:
            next(p for p in run.draft.parameters() if p.grad is not None).grad[0] = float("nan")

    monkeypatch.setattr(story, "accumulate", poisoned)
    config, report = fit(store, tmp_path / "run", epochs=1)
    assert "skipped steps: 1" in report.text
    (line,) = [json.loads(text) for text in (config.out / "quarantine.jsonl").read_text().splitlines()]
    assert line["step"] == 2
    assert len(line["sample_ids"]) > 0
    assert read_metrics(config.out, "train")[1]["grad_norm"] is None
    assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(config.out).values())
    assert load_meta(find_latest(config.out)).skipped_steps == 1


def test_resuming_drops_skipped_steps_that_no_checkpoint_holds(store, tmp_path):
    config, _ = fit(store, tmp_path / "run", epochs=1)
    lines = [json.dumps({"step": step}) for step in (1, 10_000)]
    (config.out / "quarantine.jsonl").write_text("".join(line + "\n" for line in lines))
    fit(store, tmp_path / "run", epochs=1)
    assert (config.out / "quarantine.jsonl").read_text() == lines[0] + "\n"


def test_a_run_that_has_diverged_ends_with_advice(store, tmp_path, monkeypatch):
    monkeypatch.setattr(story, "MAX_SKIPPED_IN_A_ROW", 2)
    with pytest.raises(TrainError, match=r"2 steps in a row.*lower --lr"):
        fit(store, tmp_path / "run", lr=1e30, grad_clip=1e30, warmup=0.0)


def test_a_quarantined_row_is_left_out_and_training_goes_on(tmp_path):
    store = make_store(tmp_path / "store", quarantined=(0, 5))
    config, _ = fit(store, tmp_path / "run", epochs=1)
    assert sum(record["samples"] for record in read_metrics(config.out, "train")) == 7


def trainer(store, out, *flags):
    command = [sys.executable, "-m", "eyas", "train-from-cache", str(store), "--out", str(out), "--ttt-steps", "3"]
    command += ["--tokens-per-micro-batch", "48", "--epochs", "12", "--lr", "5e-3", "--checkpoint-every", "4", *flags]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=process_environment()
    )


def process_environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def wait_for_step(process, out, step, seconds=120):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and process.poll() is None:
        path = out / "metrics.jsonl"
        if path.exists() and path.read_bytes().count(b'"kind": "train"') >= step:
            return
        time.sleep(0.002)
    pytest.fail(f"the trainer did not reach step {step}: {process.communicate(timeout=10)}")


LIKE_TRAINER = {"micro_batches": 1, "epochs": 12, "checkpoint_every": 4}


def kill_and_resume(store, out, steps):
    for step in steps:
        process = trainer(store, out)
        wait_for_step(process, out, step)
        process.kill()
        process.communicate(timeout=60)
    fit(store, out, **LIKE_TRAINER)


@pytest.fixture(scope="module")
def straight(store, tmp_path_factory):
    out = tmp_path_factory.mktemp("straight") / "run"
    fit(store, out, **LIKE_TRAINER)
    return out


def assert_same_run(out, straight):
    assert losses(out) == losses(straight)
    assert same_weights(weights(out), weights(straight))
    one, other = (load_file(run / "export" / "model.safetensors") for run in (out, straight))
    assert same_weights(one, other)


def test_a_killed_trainer_resumes_to_the_losses_of_the_straight_run(store, straight, tmp_path):
    kill_and_resume(store, tmp_path / "run", [10])
    assert_same_run(tmp_path / "run", straight)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_kills_at_random_steps_change_nothing(store, straight, tmp_path, seed):
    kill_and_resume(store, tmp_path / "run", sorted(random.Random(seed).sample(range(1, len(losses(straight))), 3)))
    assert_same_run(tmp_path / "run", straight)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3, 13))
def test_many_kills_at_random_steps_change_nothing(store, straight, tmp_path, seed):
    kill_and_resume(store, tmp_path / "run", sorted(random.Random(seed).sample(range(1, len(losses(straight))), 3)))
    assert_same_run(tmp_path / "run", straight)


def test_sigterm_saves_the_present_step_and_says_how_to_go_on(store, straight, tmp_path):
    out = tmp_path / "run"
    process = trainer(store, out)
    wait_for_step(process, out, 5)
    process.send_signal(signal.SIGTERM)
    text, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "stopped by SIGTERM after step" in text
    assert "run the same command again" in text
    assert load_meta(find_latest(out)).global_step == len(losses(out)) < len(losses(straight))
    fit(store, out, **LIKE_TRAINER)
    assert_same_run(out, straight)
