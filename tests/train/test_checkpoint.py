"""Checkpoints: whole or absent, pointers that follow, refusals that name every difference."""

import json
import math
import os
from dataclasses import replace

import msgspec
import pytest
import torch

from eyas.train import checkpoint as module
from eyas.train.checkpoint import (
    Checkpoint,
    Meta,
    checkpoints_folder,
    find_latest,
    load_checkpoint,
    load_meta,
    require_same_run,
    restore_rng,
    rng_state,
    save_checkpoint,
)
from eyas.train.errors import CheckpointError


def make_checkpoint(step, **meta):
    fields = {
        "global_step": step,
        "epoch": 0,
        "step": step,
        "order_digest": "abcd",
        "config": {"lr": 0.1, "seed": 0},
        "identity": {"identity": "m"},
        "draft": {"hidden_size": 4},
        "provenance": {},
        "skipped_steps": 0,
        "heldout": None,
        "best": None,
    }
    weights = {"fc.weight": torch.full((2, 2), float(step)), "d2t": torch.arange(3)}
    optimizer = {"state": {0: {"exp_avg": torch.ones(2), "step": torch.tensor(float(step))}}, "param_groups": []}
    return Checkpoint(meta=Meta(**{**fields, **meta}), weights=weights, optimizer=optimizer, rng=rng_state())


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path):
    saved = make_checkpoint(7)
    folder = save_checkpoint(tmp_path, saved, is_best=True, keep=2)
    loaded = load_checkpoint(folder)
    assert msgspec.structs.replace(loaded.meta, digests={}) == saved.meta
    assert all(torch.equal(loaded.weights[name], saved.weights[name]) for name in saved.weights)
    assert torch.equal(loaded.optimizer["state"][0]["exp_avg"], saved.optimizer["state"][0]["exp_avg"])
    assert torch.equal(loaded.rng["cpu"], saved.rng["cpu"])


def test_metrics_of_a_diverged_draft_can_be_read_back(tmp_path):
    saved = make_checkpoint(7, heldout={"loss": math.nan, "kl": math.inf, "accept_length": 1.0})
    folder = save_checkpoint(tmp_path, saved, is_best=True, keep=2)
    assert load_meta(folder).heldout == {"loss": None, "kl": None, "accept_length": 1.0}
    json.loads((folder / "meta.json").read_text(), parse_constant=pytest.fail)


def test_random_state_goes_on_where_it_was():
    state = rng_state()
    first = torch.rand(3)
    restore_rng(state)
    assert torch.equal(torch.rand(3), first)


def test_latest_follows_every_save_and_best_only_the_best(tmp_path):
    save_checkpoint(tmp_path, make_checkpoint(1), is_best=True, keep=2)
    save_checkpoint(tmp_path, make_checkpoint(2), is_best=False, keep=2)
    folder = checkpoints_folder(tmp_path)
    assert os.readlink(folder / "latest") == "step_00000002"
    assert os.readlink(folder / "best") == "step_00000001"
    assert find_latest(tmp_path) == (folder / "step_00000002").resolve()


def test_old_checkpoints_go_but_never_the_best(tmp_path):
    for step in range(1, 7):
        save_checkpoint(tmp_path, make_checkpoint(step), is_best=step == 2, keep=2)
    names = sorted(path.name for path in checkpoints_folder(tmp_path).iterdir())
    assert names == ["best", "latest", "step_00000002", "step_00000005", "step_00000006"]


@pytest.mark.parametrize("stage", ["save_file", "replace_file", "sync_folder", "_point"])
def test_a_save_that_dies_leaves_the_last_checkpoint_in_place(tmp_path, monkeypatch, stage):
    save_checkpoint(tmp_path, make_checkpoint(1), is_best=True, keep=2)

    def die(*_args, **_kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, stage, die)
        with pytest.raises(KeyboardInterrupt):
            save_checkpoint(tmp_path, make_checkpoint(2), is_best=True, keep=2)
    latest = find_latest(tmp_path)
    assert load_checkpoint(latest).meta.global_step == 1
    save_checkpoint(tmp_path, make_checkpoint(2), is_best=True, keep=2)
    assert load_checkpoint(find_latest(tmp_path)).meta.global_step == 2
    assert not [path.name for path in checkpoints_folder(tmp_path).iterdir() if path.name.startswith(".")]


def test_a_run_without_checkpoints_has_no_latest_but_a_mistyped_path_is_an_error(tmp_path):
    assert find_latest(tmp_path / "new") is None
    with pytest.raises(CheckpointError, match=r"not a checkpoint: meta.json is missing"):
        load_meta(tmp_path / "checkpoints" / "bset")


def test_a_latest_that_names_a_deleted_folder_is_an_error_not_a_fresh_start(tmp_path):
    folder = save_checkpoint(tmp_path, make_checkpoint(1), is_best=True, keep=2)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"step_00000001, which is gone"):
        find_latest(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "meta.json"])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_torn_file_is_named(tmp_path, name, share):
    folder = save_checkpoint(tmp_path, make_checkpoint(1), is_best=True, keep=2)
    data = (folder / name).read_bytes()
    (folder / name).write_bytes(data[: int(len(data) * share)])
    with pytest.raises(CheckpointError, match=r"step_00000001.* cannot be read.*use another checkpoint"):
        load_checkpoint(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt"])
def test_a_flipped_bit_is_never_resumed_or_exported(tmp_path, name):
    folder = save_checkpoint(tmp_path, make_checkpoint(1), is_best=True, keep=2)
    data = bytearray((folder / name).read_bytes())
    data[len(data) // 2] ^= 1
    (folder / name).write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{name} cannot be read \\(its bytes changed\\)"):
        load_checkpoint(folder)


def test_nothing_is_unpickled(tmp_path):
    surprising = replace(make_checkpoint(1), optimizer={"surprise": replace})
    folder = save_checkpoint(tmp_path, surprising, is_best=True, keep=2)
    with pytest.raises(CheckpointError, match=r"(?i)weights.only"):
        load_checkpoint(folder)


def test_resuming_another_run_names_every_field_with_both_values(tmp_path):
    meta = make_checkpoint(1).meta
    with pytest.raises(CheckpointError) as error:
        require_same_run(tmp_path, meta, config={"lr": 0.2, "seed": 0, "extra": 1}, identity={"identity": "n"})
    text = str(error.value)
    assert "--lr: checkpoint has 0.1, this run has 0.2" in text
    assert "--extra: checkpoint has None, this run has 1" in text
    assert "identity: checkpoint has m, this run has n" in text
    assert "--seed" not in text
    require_same_run(tmp_path, meta, config=meta.config, identity=meta.identity)


def test_unknown_fields_in_meta_are_refused(tmp_path):
    folder = save_checkpoint(tmp_path, make_checkpoint(1), is_best=True, keep=2)
    meta = msgspec.json.decode((folder / "meta.json").read_bytes())
    (folder / "meta.json").write_bytes(msgspec.json.encode({**meta, "surprise": 1}))
    with pytest.raises(CheckpointError, match="surprise"):
        load_meta(folder)
