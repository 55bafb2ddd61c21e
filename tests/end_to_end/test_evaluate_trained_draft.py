"""Capture, train, export, evaluate on a toy: the draft that training writes is one that decodes, by the front door."""

import json

import pytest

from eyas import cli
from eyas.evaluate.draft_folder import open_draft
from eyas.pipeline.target_folder import open_target
from eyas.pipeline.testing import make_tiny_store
from eyas.train.config import TrainConfig
from eyas.train.train_from_cache import train_from_cache


@pytest.fixture(scope="module", params=["eagle3", "eagle3.1"])
def trained(request, tmp_path_factory):
    """(work folder, run folder): a store of 16 chats and one epoch over it."""
    folder = tmp_path_factory.mktemp("work")
    store = make_tiny_store(folder, n=16)
    run = folder / "run"
    train_from_cache(TrainConfig(store=store, out=run, family=request.param, ttt_steps=2, device="cpu"))
    return folder, run, request.param


def test_a_trained_and_exported_draft_decodes_to_the_plain_tokens(trained, capsys):
    folder, run, family = trained
    out = run / "evaluation.json"
    words = ["--target", folder / "target", "--draft", run / "export", "--prompts", folder / "chats.jsonl"]
    words += ["--depth", 2, "--max-new-tokens", 12, "--limit", 4, "--threads", 1, "--device", "cpu", "--out", out]
    assert cli.main(["evaluate", *map(str, words)]) == 0
    result, text = json.loads(out.read_text()), capsys.readouterr().out
    assert result["equal_to_plain"]["holds"]
    assert 1.0 <= result["acceptance_length"] <= 3.0
    assert text.splitlines()[-1] == f"acceptance length: {result['acceptance_length']:.2f} (chain, greedy, depth 2)"
    assert result["setting"]["family"] == {"eagle3": "EAGLE-3", "eagle3.1": "EAGLE-3.1"}[family]


def test_the_layers_read_are_the_layers_captured(trained):
    folder, run, _ = trained
    manifest = json.loads((folder / "store" / "manifest.json").read_text())
    opened = open_draft(run / "export", open_target(str(folder / "target")))
    assert list(opened.aux_layer_outputs) == manifest["identity"]["aux_layer_outputs"]
