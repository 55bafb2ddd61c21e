"""`eyas inspect`: numbers that agree with the data, samples a person can read, text that cannot harm a terminal."""

import json
from pathlib import Path

import numpy as np
import pytest

from eyas.cache_format.config import EstimateConfig, InspectConfig
from eyas.cache_format.errors import ConfigError
from eyas.cache_format.estimate import estimate
from eyas.cache_format.frozen import FrozenTarget, write_frozen_target
from eyas.cache_format.inspection import inspect_store
from eyas.cache_format.reader import StoreReader
from eyas.cache_format.testing import make_samples, make_store


def summary_of(root: Path) -> dict:
    return json.loads(inspect_store(InspectConfig(store=root, json=True)).text)["summary"]


def test_the_summary_agrees_with_the_samples(tmp_path: Path) -> None:
    summary, samples = summary_of(make_store(tmp_path)), make_samples(7)
    lengths = [len(s.input_ids) for s in samples]
    assert summary["complete"] is True
    assert summary["samples"] == 7
    assert summary["heldout_samples"] == sum(s.heldout for s in samples)
    assert summary["tokens"] == sum(lengths)
    assert summary["supervised_tokens"] == sum(int(s.loss_mask.sum()) for s in samples)
    assert summary["length"]["minimum"] == min(lengths)
    assert summary["length"]["median"] == np.median(lengths)
    sizes = {f["name"]: f["stored_bytes"] for f in summary["fields"]}
    assert sizes["last_hidden_state"] >= sum(lengths) * 32


def test_quarantined_rows_leave_the_counts_and_are_listed_by_reason(tmp_path: Path) -> None:
    summary = summary_of(make_store(tmp_path, quarantine=[(0, 0)]))
    assert summary["available_samples"] == 6
    assert summary["quarantined"] == {"made so by a test": 1}


def test_coverage_is_the_share_of_supervised_train_tokens_in_the_draft_vocabulary(tmp_path: Path) -> None:
    reader = StoreReader(make_store(tmp_path))
    inside = outside = 0
    for index, sample in enumerate(make_samples(7)):
        if not reader.plan.heldout[index]:
            drafted = reader.vocab.t2d[sample.input_ids[sample.loss_mask == 1]]
            inside, outside = inside + int(drafted.sum()), outside + int((~drafted).sum())
    assert summary_of(tmp_path)["draft_vocab_coverage"] == inside / (inside + outside)


@pytest.mark.parametrize("supervision", [("hidden",), ("topk",), ("probs",), ("hidden", "topk", "probs")])
def test_a_sample_shows_tokens_masks_roles_and_next_tokens(tmp_path: Path, supervision: tuple[str, ...]) -> None:
    root = make_store(tmp_path, supervision=supervision)
    report = json.loads(inspect_store(InspectConfig(store=root, sample="2", json=True, top=2)).text)["sample"]
    reader, sample = StoreReader(root), make_samples(7)[2]
    assert report["text"] == "".join(f" t{i}" for i in sample.input_ids)
    assert [p["id"] for p in report["positions"]] == sample.input_ids.tolist()
    assert [p["loss_mask"] for p in report["positions"]] == sample.loss_mask.tolist()
    assert {p["role"] for p in report["positions"]} == {"user", "assistant"}
    assert [p["in_draft_vocab"] for p in report["positions"]] == reader.vocab.t2d[sample.input_ids].tolist()
    shown = [p["position"] for p in report["positions"] if p["next"]]
    assert shown == reader.kept_positions(2).tolist()


def test_the_sample_table_is_cut_at_max_tokens_and_says_so(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    length = int(StoreReader(root).plan.length[0])
    text = inspect_store(InspectConfig(store=root, sample="0", max_tokens=3)).text
    assert f"... {length - 3} more positions" in text
    assert "more positions" not in inspect_store(InspectConfig(store=root, sample="0", max_tokens=0)).text


def test_an_unknown_or_ambiguous_sample_is_a_user_error(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    for name in ("ffffffffff", "", "-1"):
        with pytest.raises(ConfigError, match="--sample"):
            inspect_store(InspectConfig(store=root, sample=name))


def test_an_unfinished_store_is_shown_and_verify_exits_1(tmp_path: Path) -> None:
    root = make_store(tmp_path, complete=False)
    (root / "receipts" / "000001.json").unlink()
    report = inspect_store(InspectConfig(store=root))
    assert "NOT COMPLETE" in report.text
    assert report.exit_code == 0
    assert "NOT CAPTURED" in inspect_store(InspectConfig(store=root, sample="4")).text
    verified = inspect_store(InspectConfig(store=root, verify=True))
    assert verified.exit_code == 1
    assert "1 shards are not captured yet" in verified.text


def test_hostile_tokens_cannot_reach_the_terminal_raw(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    hostile = [b"\x1b[31mred", "\u202eabc".encode(), b"\x00", b"[bold]x[/bold]", b"</td><script>"]
    tensors = {"embed_tokens.weight": FrozenTarget(root).embed_tokens(), "norm.weight": FrozenTarget(root).final_norm()}
    write_frozen_target(
        root, config={}, generation_config=None, tensors={k: np.array(v) for k, v in tensors.items()},
        token_bytes=[hostile[i % 5] for i in range(64)], special=[False] * 64, copy_files={},
    )  # fmt: skip
    text = inspect_store(InspectConfig(store=root, sample="0")).text
    assert not any(c in text for c in ("\x1b", "\u202e", "\x00"))
    assert "\\x1b[31mred" in text
    assert "[bold]x[/bold]" in text, "markup is shown, not interpreted"


def test_tokens_that_are_no_whole_characters_show_whole_in_the_text(tmp_path: Path) -> None:
    tokens = [bytes([b]) for b in range(256)]
    write_frozen_target(
        tmp_path, config={}, generation_config=None, tensors={"embed_tokens.weight": np.zeros((1, 1), np.float32)},
        token_bytes=tokens, special=[False] * 256, copy_files={},
    )  # fmt: skip
    table = FrozenTarget(tmp_path).tokens
    assert table.decode(list("hawk 🦅".encode())) == "hawk 🦅"
    assert table.decode([0xF0]) == "\ufffd"
    assert table.decode([300]) == "<no token 300>"


def test_the_target_s_tensors_read_back_in_their_dtype(tmp_path: Path) -> None:
    reader = StoreReader(make_store(tmp_path))
    head = reader.target.lm_head()
    assert head.shape == (64, 16)
    assert head.dtype.name == "bfloat16"
    assert np.array_equal(head.view(np.uint16), reader.target.embed_tokens().view(np.uint16)), "tied"
    assert reader.target.lm_head_bias() is None
    assert reader.target.generation_config == {"eos_token_id": 2}


def test_the_readme_s_sizing_table_is_what_estimate_prints() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    shown = readme.split("<!-- eyas estimate -->\n```\n")[1].split("```")[0]
    by_field, known = estimate(EstimateConfig()).text.split("\n\n")
    assert known.strip() == shown.strip()
    assert "aux_hidden_states" in by_field
