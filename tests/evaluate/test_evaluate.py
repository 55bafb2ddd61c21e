"""The story of the verb: what it prints and writes, and when it fails."""

import json
import re

import pytest
import torch

from eyas.cache_format.errors import ConfigError
from eyas.evaluate import decoder
from eyas.evaluate.config import EvaluateConfig
from eyas.evaluate.errors import DraftError, PromptError
from eyas.evaluate.evaluate import evaluate
from eyas.pipeline.testing import make_chats


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return str(make_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 4, max_words=6))


@pytest.fixture(scope="module")
def draft_path(tmp_path_factory, export, overfit):
    return export(tmp_path_factory.mktemp("export") / "draft", overfit())


@pytest.fixture
def settings(target_folder, draft_path, chats):
    return {
        "target": str(target_folder.path),
        "draft": draft_path,
        "prompts": (chats,),
        "limit": 3,
        "max_new_tokens": 10,
        "threads": 1,
        "device": "cpu",
    }


@pytest.mark.parametrize("depth", [1, 3])
def test_a_run_prints_the_acceptance_length_last_and_writes_the_same_numbers(settings, tmp_path, depth):
    out = tmp_path / "deep" / "result.json"
    report = evaluate(EvaluateConfig(**settings, depth=depth, out=out))
    assert report.exit_code == 0
    result = json.loads(out.read_text())
    last = report.text.splitlines()[-1]
    assert last == f"acceptance length: {result['acceptance_length']:.2f} (chain, greedy, depth {depth})"
    assert "equal to plain greedy decoding: yes, all 30 tokens of 3 prompts" in report.text
    assert result["equal_to_plain"] == {"holds": True, "demanded": True, "tokens_compared": 30, "divergences": []}
    accepted = [count for prompt in result["prompts"] for count in prompt["accepted"]]
    assert result["acceptance_length"] == 1 + sum(accepted) / len(accepted)
    assert result["passes"] == len(accepted)
    assert len(result["accepted_per_position"]) == depth
    # Every pass emits its accepted tokens and one more; prefill emits one for each prompt.
    assert 3 + sum(accepted) + len(accepted) == result["tokens"] + result["tokens_discarded"]
    assert result["speedup"] == pytest.approx(result["tokens_per_second"] / result["plain_tokens_per_second"])
    assert result["setting"]["aux_layer_outputs"] == [1, 3, 4]
    assert result["config"]["depth"] == depth


def test_two_runs_decode_the_same(settings, tmp_path):
    runs = []
    for name in ("a", "b"):
        evaluate(EvaluateConfig(**settings, out=tmp_path / name))
        runs.append(json.loads((tmp_path / name).read_text()))
    decoded = [[(p["id"], p["tokens"], p["accepted"]) for p in run["prompts"]] for run in runs]
    assert decoded[0] == decoded[1]


def test_without_plain_decoding_nothing_is_compared(settings, tmp_path):
    report = evaluate(EvaluateConfig(**settings, compare_plain=False, out=tmp_path / "out.json"))
    result = json.loads((tmp_path / "out.json").read_text())
    assert report.exit_code == 0
    assert result["equal_to_plain"] is result["speedup"] is result["plain_tokens_per_second"] is None
    assert "not checked" in report.text


def accept_everything(drafted, choices):
    return len(drafted)


def test_a_decoder_that_accepts_wrong_tokens_fails_the_run(settings, monkeypatch):
    monkeypatch.setattr(decoder, "count_accepted", accept_everything)
    report = evaluate(EvaluateConfig(**settings))
    assert report.exit_code == 1
    assert "equal to plain greedy decoding: NO" in report.text
    assert re.search(r"prompt chat-0-\d+, token \d+: \d+, plain decoding gives \d+ \(logit margin", report.text)
    assert report.text.splitlines()[-1].startswith("acceptance length: 4.00")


def test_a_cache_that_is_not_rolled_back_fails_the_run(settings, monkeypatch):
    monkeypatch.setattr(decoder, "roll_back", lambda cache, count: None)
    assert evaluate(EvaluateConfig(**settings)).exit_code == 1


def test_in_a_narrow_dtype_a_difference_is_reported_and_not_demanded(settings, monkeypatch):
    monkeypatch.setattr(decoder, "count_accepted", accept_everything)
    report = evaluate(EvaluateConfig(**settings, dtype="bfloat16"))
    assert report.exit_code == 0
    assert "not demanded in bfloat16" in report.text


def test_a_draft_of_a_foreign_folder_stops_before_any_weights_are_loaded(settings, tmp_path, monkeypatch):
    monkeypatch.setattr("eyas.evaluate.evaluate.load_target", lambda *_a, **_k: pytest.fail("loaded the target"))
    with pytest.raises(DraftError):
        evaluate(EvaluateConfig(**settings | {"draft": tmp_path}))


def test_prompts_that_leave_no_room_for_an_answer_are_refused(settings):
    with pytest.raises(PromptError, match="too_long"):
        evaluate(EvaluateConfig(**settings | {"max_new_tokens": 2040}))


@pytest.mark.parametrize(
    "change",
    [
        {"depth": 0},
        {"max_new_tokens": 1},
        {"limit": 0},
        {"threads": 0},
        {"prompts": ()},
        {"template_switches": ("thinking",)},
    ],
)
def test_values_out_of_range_are_refused(settings, change):
    with pytest.raises(ConfigError):
        EvaluateConfig(**settings | change)


def test_threads_are_those_asked_for(settings):
    evaluate(EvaluateConfig(**settings | {"limit": 1}))
    assert torch.get_num_threads() == 1


def test_answers_that_leave_no_room_for_a_prompt_are_refused(settings):
    with pytest.raises(ConfigError, match=r"--max-new-tokens 2045 and --depth 3 leave no room .* 2048 positions"):
        evaluate(EvaluateConfig(**settings | {"max_new_tokens": 2045}))
