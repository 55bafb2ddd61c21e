"""The command as a whole, captured in this process: resume, refusal, quarantine, books (C7, D1-D4, D14, G1, G6)."""

import json
import shutil
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.cache_format.errors import ConfigError, DiskFullError, EyasError, IdentityMismatchError, StoreError
from eyas.cache_format.layout import StorePaths
from eyas.cache_format.reader import StoreReader
from eyas.cache_format.receipt import load_receipt
from eyas.cache_format.samples import SampleTable
from eyas.cache_format.verify import verify_store
from eyas.pipeline import precompute as story
from eyas.pipeline.cluster import capture_in_process
from eyas.pipeline.config import PrecomputeConfig
from eyas.pipeline.errors import CaptureError, DataError, TargetError
from eyas.pipeline.hf_engine import HfEngine
from eyas.pipeline.precompute import precompute
from eyas.pipeline.sizing import field_sizes
from eyas.pipeline.testing import make_chats, make_tiny_target

AUX1 = "aux_hidden_states/1"


def settings(folder, **changes):
    defaults = {
        "chats": (str(folder / "chats.jsonl"),),
        "target": str(folder / "target"),
        "out": str(folder / "store"),
        "shard_tokens": 2048,
        "topk": 8,
        "draft_vocab_size": 128,
        "heldout_fraction": 0.2,
    }
    return PrecomputeConfig(**defaults | changes)


def run(folder, *, capture=capture_in_process, **changes):
    return precompute(settings(folder, **changes), capture=capture)


@pytest.fixture(scope="module")
def original(tmp_path_factory, tiny_target):
    """Target, chats and a finished store; tests work on copies, which cost no disk synchronisation."""
    folder = tmp_path_factory.mktemp("original")
    shutil.copytree(tiny_target, folder / "target")
    make_chats(folder / "chats.jsonl", 20, 0)
    run(folder)
    return folder


@pytest.fixture
def folder(tmp_path, original):
    """Target and chats, no store yet."""
    shutil.copytree(original, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("store"))
    return tmp_path


@pytest.fixture
def finished(tmp_path, original):
    """Target, chats and a complete store."""
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    return tmp_path


def contents(root):
    """Return the digest of every receipt's content and of the plan."""
    paths, reader = StorePaths(root), StoreReader(root)
    return [reader.plan.digest, *(load_receipt(paths, s).digest for s in range(reader.plan.num_shards))]


def fingerprint(root: Path):
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def never(*_args, **_kwargs):
    raise AssertionError("the target was run")


def test_store_is_complete_verified_and_accounts_for_every_row(finished):
    root = finished / "store"
    assert verify_store(root) == []
    reader = StoreReader(root)
    assert reader.available.all()
    assert reader.plan.books["rows_read"] == len(reader) == 20
    assert 0 < reader.plan.heldout.sum() < 20
    assert len({bytes(i) for i in reader.plan.sample_ids}) == 20
    assert not (root / "running").exists()


def test_all_three_encodings_agree_with_one_another(folder):
    run(folder, supervision=("hidden", "topk", "probs"), topk_dtype="float32", probs_dtype="float32")
    reader = StoreReader(folder / "store")
    row = reader.read(
        0, ["target_topk_ids", "target_topk_logprobs", "target_probs", "target_logz", "target_draft_logz"]
    )
    draft = reader.vocab.to_draft(row["target_topk_ids"])
    inside = draft >= 0
    share = np.exp(row["target_draft_logz"] - row["target_logz"])[:, None]
    from_probs = np.take_along_axis(row["target_probs"], np.maximum(draft, 0), 1) * share
    # Two routes to one float32 probability.
    np.testing.assert_allclose(np.exp(row["target_topk_logprobs"])[inside], from_probs[inside], rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(row["target_probs"].sum(1), 1.0, rtol=1e-5)


def test_hidden_states_are_left_out_when_not_asked_for(folder):
    run(folder, supervision=("topk",))
    assert "last_hidden_state" not in {f.name for f in StoreReader(folder / "store").identity.fields}


def test_second_run_on_a_complete_store_says_so_and_touches_nothing(finished):
    before = fingerprint(finished / "store")
    report = run(finished, capture=never)
    assert (report.exit_code, "complete already" in report.text) == (0, True)
    assert fingerprint(finished / "store") == before


def test_dry_run_prints_the_estimate_and_writes_nothing(folder, monkeypatch):
    monkeypatch.setattr(HfEngine, "__init__", never)
    report = run(folder, dry_run=True)
    assert "bytes/token" in report.text
    assert "20" in report.text
    assert not (folder / "store").exists()


def test_estimate_equals_what_is_stored(folder):
    run(folder, container="arrow")
    reader = StoreReader(folder / "store")
    sizes = field_sizes(reader.identity.fields, _planned(folder))
    estimated = sum(size.bytes_per_token for size in sizes if size.name != "input_ids, loss_mask")
    stored = sum(record.stored_bytes for receipt in reader.receipts.values() for record in receipt.content.arrays)
    assert stored == pytest.approx(estimated * reader.plan.length.sum(), rel=1e-6)


def _planned(folder):
    config = settings(folder)
    target = story.open_target(config.target)
    return story._plan(config, target)[0]


def swap_lines(folder):
    path = folder / "chats.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[1], lines[0], *lines[2:]]))


def edit_template(folder):
    path = folder / "target" / "chat_template.jinja"
    path.write_text(path.read_text() + "{# #}")


def edit_tokenizer(folder):
    path = folder / "target" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_max_length": 77}))


def edit_config(folder):
    path = folder / "target" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rms_norm_eps": 1e-4}))


def retrain(folder):
    path = folder / "target" / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor * 1.01 for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("plan_digest", swap_lines),
        ("plan_digest", {"heldout_fraction": 0.5}),
        ("plan_digest", {"shard_tokens": 4096}),
        ("max_length", {"max_length": 1024}),
        ("template_digest", edit_template),
        ("template_switches.enable_thinking", {"template_switches": ("enable_thinking=false",)}),
        ("tokenizer_digest", edit_tokenizer),
        ("target.config_digest", edit_config),
        ("target.weights_digest", retrain),
        ("target.revision", {"revision": "main"}),
        ("target.dtype", {"dtype": "bfloat16"}),
        ("aux_layer_outputs", {"aux_layer_outputs": (0, 3, 4)}),
        ("supervision", {"supervision": ("hidden",)}),
        ("topk", {"topk": 4}),
        ("fields", {"topk_dtype": "float32"}),
        ("draft_vocab_size", {"draft_vocab_size": 64}),
        ("container", {"container": "arrow"}),
        ("chunk_bytes", {"chunk_bytes": 4096}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or (value if isinstance(value, str) else "-".join(value)),
)
def test_resume_with_any_other_identity_is_refused_naming_the_field(finished, field, change):
    before = fingerprint(finished / "store")
    if callable(change):
        change(finished)
    with pytest.raises(IdentityMismatchError, match=rf"(?m)^  {field}: store has .*, this run has "):
        run(finished, capture=never, **({} if callable(change) else change))
    assert fingerprint(finished / "store") == before


def test_stopped_run_goes_on_from_disk_and_ends_with_the_same_bytes(folder, original):
    def two_shards(task, shards, **options):
        yield from capture_in_process(task, shards[:2])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, capture=two_shards)
    asked = []

    def count(task, shards, **options):
        asked.extend(shards)
        yield from capture_in_process(task, shards)

    report = run(folder, capture=count)
    assert (report.exit_code, "is complete" in report.text) == (0, True)
    assert asked == list(range(2, StoreReader(folder / "store").plan.num_shards))
    assert contents(folder / "store") == contents(original / "store")
    assert (folder / "store" / "complete.json").read_bytes() == (original / "store" / "complete.json").read_bytes()


def test_resume_under_other_provenance_goes_on_with_a_warning_that_names_it(finished, caplog):
    (finished / "store" / "receipts" / "000001.json").unlink()
    (finished / "store" / "complete.json").unlink()
    run(finished, attention="eager")
    assert "attention sdpa then, eager now" in caplog.text
    caplog.clear()
    (finished / "store" / "receipts" / "000001.json").unlink()
    (finished / "store" / "complete.json").unlink()
    run(finished)
    assert "then" not in caplog.text


def test_eos_beyond_the_vocabulary_is_refused_before_the_target_runs(folder):
    path = folder / "target" / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": [2, 300]}))
    with pytest.raises(TargetError, match=r"eos id 300 .* outside its vocabulary of 300"):
        run(folder, capture=never)


def test_deleted_receipt_is_captured_again(finished):
    before = contents(finished / "store")
    (finished / "store" / "receipts" / "000001.json").unlink()
    (finished / "store" / "complete.json").unlink()
    run(finished)
    assert contents(finished / "store") == before


def test_run_cut_before_the_manifest_starts_again(finished, original):
    for name in ("manifest.json", "complete.json"):
        (finished / "store" / name).unlink()
    shutil.rmtree(finished / "store" / "receipts")
    (finished / "store" / "target" / "merges.txt").write_text("of the target that the run was cut with")
    run(finished)
    assert not (finished / "store" / "target" / "merges.txt").exists()
    assert contents(finished / "store") == contents(original / "store")


def test_a_model_folder_called_target_is_not_taken_for_a_store(folder):
    before = fingerprint(folder / "target")
    with pytest.raises(StoreError, match=r"holds no store \(found chats\.jsonl, target\)"):
        run(folder, out=str(folder), capture=never)
    (folder / "chats.jsonl").rename(folder.parent / "elsewhere.jsonl")
    with pytest.raises(StoreError, match=r"holds no store \(found target\)"):
        run(folder, out=str(folder), chats=(str(folder.parent / "elsewhere.jsonl"),), capture=never)
    assert fingerprint(folder / "target") == before


def test_folder_with_strangers_is_refused_untouched(folder):
    (folder / "store").mkdir()
    (folder / "store" / "notes.txt").write_text("mine")
    with pytest.raises(StoreError, match=r"notes\.txt"):
        run(folder, capture=never)
    assert fingerprint(folder / "store") == {"notes.txt": b"mine"}


def test_a_store_that_another_run_finishes_in_between_is_continued_not_overwritten(finished, monkeypatch):
    before = fingerprint(finished / "store")
    found = iter([None])  # what the first look sees: no store yet
    look = story.open_for_resume
    monkeypatch.setattr(story, "open_for_resume", lambda root: next(found, look(root)))
    assert "complete already" in run(finished, capture=never).text
    assert fingerprint(finished / "store") == before


def test_a_disk_that_is_too_small_is_refused_before_anything_is_captured(folder, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**6, 0, 10**6))
    with pytest.raises(DiskFullError, match="free, the store needs about"):
        run(folder, capture=never)


@pytest.fixture
def poisoned(folder):
    """A target that gives NaN wherever the letter Z is read, and two chats of 22 that hold one."""
    path = folder / "target" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][60] = torch.nan
    save_file(tensors, path, metadata={"format": "pt"})
    vocabulary = json.loads((folder / "target" / "tokenizer.json").read_text())["model"]["vocab"]
    assert vocabulary["Z"] == 60
    return folder


def add_chat(folder, text):
    with (folder / "chats.jsonl").open("a") as file:
        messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "the owl sleeps"}]
        file.write(json.dumps({"id": text, "messages": messages}) + "\n")


@pytest.mark.parametrize("batch_tokens", [0, 4096], ids=["lone", "batched"])
def test_row_with_nan_is_quarantined_and_its_neighbours_are_stored(poisoned, batch_tokens):
    add_chat(poisoned, "Z for zebra")
    report = run(poisoned, batch_tokens=batch_tokens)
    assert "1 rows quarantined" in report.text
    root = poisoned / "store"
    reader = StoreReader(root)
    [bad] = np.flatnonzero(~reader.available)
    assert reader.plan.text("conversation_id", int(bad)) == "Z for zebra"
    [record] = [json.loads(line) for p in (root / "quarantine").iterdir() for line in p.read_text().splitlines()]
    assert (record["source"], record["source_row"], record["reason"]) == ("chats.jsonl", 20, f"{AUX1} holds NaN or Inf")
    assert verify_store(root) == []
    for index in np.flatnonzero(reader.available):
        assert np.isfinite(reader.read(int(index), ["last_hidden_state"])["last_hidden_state"]).all()


def test_more_bad_rows_than_the_budget_stop_the_run(poisoned):
    for number in range(3):
        add_chat(poisoned, f"Z{number}")
    with pytest.raises(CaptureError, match="max_quarantine"):
        run(poisoned, max_quarantine=0.05)
    report = run(poisoned, max_quarantine=0.2)
    assert "3 rows quarantined" in report.text


def test_row_on_which_the_target_raises_is_quarantined_with_the_reason(folder, monkeypatch):
    add_chat(folder, "Z for zebra")
    forward = HfEngine._forward

    def fragile(self, ids, mask):
        if bool((ids == 60).any()):
            raise RuntimeError("boom")
        return forward(self, ids, mask)

    monkeypatch.setattr(HfEngine, "_forward", fragile)
    run(folder, batch_tokens=4096)
    [record] = [json.loads(p.read_text()) for p in (folder / "store" / "quarantine").iterdir()]
    assert record["reason"] == "the target raised RuntimeError: boom"


def test_out_of_memory_restarts_the_shard_with_half_the_budget_and_says_so(folder, monkeypatch):
    forward = HfEngine._forward
    sizes = []

    def small(self, ids, mask):
        sizes.append(ids.numel())
        if ids.numel() > 600:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, ids, mask)

    # Twins in length make full batches, whatever the padding limit.
    rows = [
        {
            "id": f"c{i}",
            "messages": [{"role": "user", "content": f"{i:04d}" * 20}, {"role": "assistant", "content": "yes" * 20}],
        }
        for i in range(20)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(HfEngine, "_forward", small)
    run(folder, batch_tokens=2048, shard_tokens=4096)
    receipt = load_receipt(StorePaths(folder / "store"), 0)
    assert receipt.provenance["restarts_after_out_of_memory"] == "2"
    assert receipt.provenance["batch_tokens"] == "512"
    assert max(sizes) > 600
    assert StoreReader(folder / "store").available.all()


def test_row_too_large_even_alone_is_quarantined(folder, monkeypatch):
    forward = HfEngine._forward
    longest = int(_planned(folder).plan.length.max())

    def small(self, ids, mask):
        if ids.shape[1] == longest:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, ids, mask)

    monkeypatch.setattr(HfEngine, "_forward", small)
    run(folder, batch_tokens=1024)
    assert (~StoreReader(folder / "store").available).sum() == 1


def test_failure_of_a_shard_ends_the_run_with_its_message_and_leaves_no_torn_files(folder, monkeypatch):
    from eyas.cache_format.writer import ShardWriter

    append, calls = ShardWriter.append, []

    def full(self, row, arrays):
        calls.append(row)
        if len(calls) == 5:
            raise DiskFullError("no space left while writing x")
        append(self, row, arrays)

    monkeypatch.setattr(ShardWriter, "append", full)
    with pytest.raises(CaptureError, match=r"shard 0000\d\d: no space left"):
        run(folder)
    monkeypatch.undo()
    shards = folder / "store" / "shards"
    assert all(
        [p.name for p in shard.iterdir() if p.is_dir()] == [] for shard in shards.iterdir() if shard.name != "000000"
    )
    run(folder)
    assert verify_store(folder / "store") == []


@pytest.mark.parametrize("tied_when_loaded", [False, True])
def test_weights_that_changed_under_the_store_are_refused_by_the_actor(folder, monkeypatch, tied_when_loaded):
    if tied_when_loaded:  # a head that the engine does not count among its frozen tensors is compared all the same
        whole = HfEngine.frozen_tensors
        monkeypatch.setattr(
            HfEngine, "frozen_tensors", lambda self: {n: t for n, t in whole(self).items() if n != "lm_head.weight"}
        )

    def swap(task, shards, **options):
        path = folder / "target" / "model.safetensors"
        tensors = load_file(path)
        tensors["lm_head.weight"][7] += 1
        save_file(tensors, path, metadata={"format": "pt"})
        yield from capture_in_process(task, shards)

    with pytest.raises(CaptureError, match=r"lm_head\.weight of the loaded target differs"):
        run(folder, capture=swap)


def test_samples_that_changed_since_the_plan_are_refused_before_the_target_reads_them(folder):
    def damage(task, shards, **options):
        path = StorePaths(folder / "store").samples(0)
        ids = SampleTable(path, 0).input_ids(1).tobytes()
        data = path.read_bytes()
        path.write_bytes(data.replace(ids, bytes([ids[0] ^ 1]) + ids[1:]))
        yield from capture_in_process(task, shards)

    with pytest.raises(CaptureError, match=r"shard 000000: .*samples\.arrow: row 1 hashes to"):
        run(folder, capture=damage)
    assert not (folder / "store" / "receipts").exists()


def test_a_failed_device_ends_the_run_and_quarantines_nothing(folder, monkeypatch, original):
    forward, calls = HfEngine._forward, []

    def broken(self, ids, mask):
        calls.append(ids)
        if len(calls) > 8:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        return forward(self, ids, mask)

    monkeypatch.setattr(HfEngine, "_forward", broken)
    with pytest.raises(CaptureError, match="AcceleratorError: CUDA error"):
        run(folder)
    monkeypatch.undo()
    run(folder)
    assert contents(folder / "store") == contents(original / "store")


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"max_length": 4096}, ConfigError, "max_length 4096 exceeds the 2048 positions"),
        ({"draft_vocab_size": 301}, ConfigError, "301"),
        ({"aux_layer_outputs": (1, 3, 7)}, ConfigError, "aux_layer_outputs"),
        ({"target": "/nowhere"}, TargetError, "does not exist"),
        ({"chats": ("/nowhere.jsonl",)}, DataError, "does not exist"),
        ({"split": "train", "limit": 1, "max_length": 8}, DataError, "none of 1 rows can be used"),
    ],
    ids=["positions", "vocabulary", "layers", "target", "chats", "no_rows"],
)
def test_user_errors_come_before_the_target_runs(folder, changes, error, message):
    with pytest.raises(error, match=message) as caught:
        run(folder, capture=never, **changes)
    assert isinstance(caught.value, EyasError)


def test_cuda_where_there_is_none_is_refused_instead_of_waited_for(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA device on this machine"):
        run(folder, device="cuda", capture=never)


def test_target_too_shallow_for_the_default_layers_asks_for_explicit_ones(folder):
    make_tiny_target(folder / "shallow", num_layers=4)
    with pytest.raises(ConfigError, match="too shallow"):
        run(folder, target=str(folder / "shallow"), capture=never)
    run(folder, target=str(folder / "shallow"), aux_layer_outputs=(0, 2))
    assert StoreReader(folder / "store").identity.aux_layer_outputs == (0, 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"chats": ()},
        {"max_length": 1},
        {"heldout_fraction": 1.0},
        {"supervision": ()},
        {"supervision": ("topk", "topk")},
        {"num_actors": 0},
        {"topk": 0},
        {"draft_vocab_size": 0},
        {"batch_tokens": -1},
        {"template_switches": ("enable_thinking=maybe",)},
        {"template_switches": ("a=1", "a=2")},
        {"template_switches": ("=1",)},
        {"stall_timeout": 0.0},
        {"max_quarantine": -0.1},
    ],
    ids=str,
)
def test_values_out_of_range_are_config_errors(changes):
    with pytest.raises(ConfigError):
        PrecomputeConfig(**{"chats": ("a",), "target": "t", "out": "o"} | changes)
