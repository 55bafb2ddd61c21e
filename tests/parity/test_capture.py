"""A captured row is what the target computes for that row alone, and nothing else (C1-C4, C9, C11; golden `target`)."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from eyas.cache_format.manifest import LogitTransform
from eyas.cache_format.reader import StoreReader
from eyas.cache_format.schema import AUX, default_aux_layer_outputs
from eyas.cache_format.vocab import choose_draft_vocab
from eyas.pipeline.engine import EngineConfig, load_engine
from eyas.pipeline.testing import make_tiny_store, make_tiny_target

GOLDEN = Path(__file__).parents[1] / "golden"


def load_golden(name):
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["meta"])  # noqa: SIM118


def make_engine(folder, layers=(1, 3, 4), dtype="float32"):
    config = EngineConfig(
        folder=str(folder),
        dtype=dtype,
        device="cpu",
        attention="sdpa",
        threads=1,
        aux_layer_outputs=layers,
        logit_transform=LogitTransform(),
        embedding_multiplier=1.0,
    )
    return load_engine(config)


def lone_forward(model, ids):
    """Return (hidden_states, logits) of one row by the model's own full forward."""
    with torch.inference_mode():
        out = model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True, use_cache=False)
    return [state[0].float() for state in out.hidden_states], out.logits[0].float()


def relative(a, b):
    """Return the distance of two rows [T, H] per token, relative to the second's length."""
    return (torch.linalg.vector_norm(a - b, dim=-1) / torch.linalg.vector_norm(b, dim=-1).clamp_min(1e-30)).numpy()


def as_float(array):
    return torch.from_numpy(array.astype(np.float32))


# -- golden ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden_target(tmp_path_factory):
    tensors, meta = load_golden("target")
    model = LlamaForCausalLM(LlamaConfig(**meta["config"]))
    weights = {name.removeprefix("param/"): t for name, t in tensors.items() if name.startswith("param/")}
    model.load_state_dict(weights)
    folder = tmp_path_factory.mktemp("golden") / "target"
    model.save_pretrained(folder)
    return folder, tensors


def test_golden_eagle3_capture(golden_target):
    folder, tensors = golden_target
    layers = tuple(tensors["expect/aux_layer_ids"].tolist())
    assert layers == default_aux_layer_outputs(8)
    engine = make_engine(folder, layers)
    ids, mask = (tensors[f"input/plain/{name}"].numpy() for name in ("input_ids", "attention_mask"))
    lengths = mask.sum(1)
    rows = [row[:length].astype(np.uint32) for row, length in zip(ids, lengths, strict=True)]
    for batch in ([rows[0], rows[1]], [rows[0]], [rows[1]]):
        for captured in engine.capture(batch):
            number = next(i for i, row in enumerate(rows) if len(row) == len(captured.last))
            length = len(captured.last)
            expected = {k: tensors[f"expect/plain/eagle3/{k}"][number] for k in ("aux_hidden_states", "logits")}
            # Tolerances of the golden tensors' README for an independent float32 implementation.
            near = {"atol": 5e-5, "rtol": 1e-5}
            torch.testing.assert_close(torch.cat(captured.aux, 1), expected["aux_hidden_states"][:length], **near)
            logits = engine.head.logits(captured.last)
            torch.testing.assert_close(logits[1:], expected["logits"][: length - 1], **near)  # stored shifted by one


def test_golden_default_aux_layers():
    tensors, _ = load_golden("default_aux_layer_ids")
    for depth, expected in zip(
        tensors["input/num_layers"].tolist(), tensors["expect/aux_layer_ids"].tolist(), strict=True
    ):
        if expected[0] < 0:
            with pytest.raises(ValueError, match="too shallow"):
                default_aux_layer_outputs(depth)
        else:
            assert default_aux_layer_outputs(depth) == tuple(expected)


@pytest.mark.parametrize("case", load_golden("vocab_mapping")[1]["subcases"])
def test_golden_vocabulary_holds_the_same_ids_ascending(case):
    tensors, meta = load_golden("vocab_mapping")
    settings = meta["subcases"][case]
    size = settings["target_vocab_size"]
    counts = np.zeros(size, np.int64)
    for number in range(settings["num_batches"]):
        ids = tensors[f"input/{case}/batch{number}/input_ids"]
        supervised = ids[tensors[f"input/{case}/batch{number}/loss_mask"] != 0]
        np.add.at(counts, supervised[(supervised >= 0) & (supervised < size)].numpy(), 1)
    expected = tensors[f"expect/{case}/selected_token_ids"].numpy()
    if settings["draft_vocab_size"] is not None and settings["draft_vocab_size"] < size:
        np.testing.assert_array_equal(counts, tensors[f"expect/{case}/counts"].numpy())
    wanted = min(settings["draft_vocab_size"] or size, size)
    specials = [i for i in settings["special_token_ids"] if i is not None]
    np.testing.assert_array_equal(choose_draft_vocab(counts, wanted, specials).ids, np.sort(expected))


# -- the truths of a store ---------------------------------------------------------------------------------------------

BOUNDS = {"float32": (1e-5, 1e-5), "bfloat16": (5e-2, 1e-2)}
"""Worst and median relative error per token: the design's measured tolerances of other batch shapes."""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module", params=[0, 2048], ids=["lone", "batched"])
def store(request, dtype, tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    target = make_tiny_target(folder / "target", dtype=dtype)
    root = make_tiny_store(folder, target=target, n=12, batch_tokens=request.param, shard_tokens=4096)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype)).eval()
    return StoreReader(root), model, request.param


def test_cached_rows_equal_a_lone_forward_and_neighbours_are_ten_times_worse(store, dtype):
    reader, model, batch_tokens = store
    worst, median = BOUNDS[dtype]
    errors, neighbours, next_layers = [], [], []
    for index in range(len(reader)):
        states, _ = lone_forward(model, reader.input_ids(index))
        last = as_float(reader.read(index, ["last_hidden_state"])["last_hidden_state"])
        aux = as_float(reader.read(index, [AUX])[AUX]).split(32, dim=1)
        pairs = [(last, states[-1]), *((a, states[i + 1]) for a, i in zip(aux, (1, 3, 4), strict=True))]
        errors += [relative(mine, own) for mine, own in pairs]
        neighbours += [relative(mine[:-1], own[1:]) for mine, own in pairs]
        next_layers += [relative(a, states[i + 2]) for a, i in zip(aux, (1, 3, 4), strict=True)]
        if batch_tokens == 0:
            assert all(torch.equal(mine, own) for mine, own in pairs)
    errors = np.concatenate(errors)
    assert errors.max() <= worst
    assert np.median(errors) <= median
    for wrong in (neighbours, next_layers):
        assert np.median(np.concatenate(wrong)) > 10 * max(errors.max(), median)


def test_head_of_the_store_gives_the_models_own_distribution(store, dtype):
    reader, model, batch_tokens = store
    head = as_float(reader.target.lm_head())
    for index in range(len(reader)):
        states, own = lone_forward(model, reader.input_ids(index))
        kept = reader.kept_positions(index)
        row = reader.read(
            index, ["last_hidden_state", "target_argmax", "target_logz", "target_topk_ids", "target_topk_logprobs"]
        )
        logits = as_float(row["last_hidden_state"])[kept] @ head.T
        # Projections are stored in float32 and top-k log-probabilities in fp16, whose step below 16 is 2^-7.
        torch.testing.assert_close(torch.from_numpy(row["target_logz"]), logits.logsumexp(1), rtol=1e-5, atol=1e-4)
        stored = as_float(row["target_topk_logprobs"])
        expected = logits.log_softmax(1).gather(1, torch.from_numpy(row["target_topk_ids"].astype(np.int64)))
        torch.testing.assert_close(stored, expected, rtol=0, atol=2.0**-7)
        best = torch.from_numpy(row["target_argmax"].astype(np.int64))
        gap = logits.max(1).values - logits.gather(1, best[:, None])[:, 0]
        assert float(gap.max()) <= 1e-4  # a tie up to the order of summation
        if dtype == "float32":
            torch.testing.assert_close(logits, own[kept], rtol=1e-4, atol=1e-4)
        if dtype == "float32" and batch_tokens == 0:
            np.testing.assert_array_equal(row["target_argmax"], own[kept].argmax(1).numpy())
        torch.testing.assert_close(states[-1] @ head.T, own, rtol=2.0**-7, atol=1e-3 if dtype == "float32" else 5e-2)


def test_batch_size_and_a_second_call_change_no_row(tiny_rows):
    engine, rows = tiny_rows
    alone = [engine.capture([row])[0] for row in rows]
    for size in (2, 4, len(rows)):
        for start in range(0, len(rows), size):
            for captured, lone in zip(
                engine.capture(rows[start : start + size]), alone[start : start + size], strict=True
            ):
                assert len(captured.last) == len(lone.last)
                assert relative(captured.last, lone.last).max() <= 1e-5
                assert relative(torch.cat(captured.aux, 1), torch.cat(lone.aux, 1)).max() <= 1e-5
    again = engine.capture([rows[0]])[0]
    assert torch.equal(again.last, alone[0].last)


@pytest.fixture(scope="module")
def tiny_rows(tmp_path_factory):
    engine = make_engine(make_tiny_target(tmp_path_factory.mktemp("rows") / "target"))
    draw = np.random.default_rng(0)
    prefix = draw.integers(3, 280, 50)
    tails = [draw.integers(3, 280, n) for n in (3, 1, 30, 64)]
    rows = [np.concatenate([prefix, tail]).astype(np.uint32) for tail in tails[:2]]  # two rows share a prefix
    return engine, [*rows, *(tail.astype(np.uint32) for tail in tails)]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_frozen_parts_are_the_loaded_models_own(tmp_path, tied):
    root = make_tiny_store(tmp_path, target=make_tiny_target(tmp_path / "t", tied=tied), n=3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "t")
    frozen = StoreReader(root).target
    np.testing.assert_array_equal(frozen.embed_tokens(), model.get_input_embeddings().weight.detach().numpy())
    np.testing.assert_array_equal(frozen.lm_head(), model.get_output_embeddings().weight.detach().numpy())
    np.testing.assert_array_equal(frozen.final_norm(), model.model.norm.weight.detach().numpy())


def test_explicit_default_layers_equal_none_given(tmp_path):
    target = make_tiny_target(tmp_path / "t")
    stores = [
        make_tiny_store(tmp_path / name, target=target, n=4, aux_layer_outputs=layers)
        for name, layers in (("default", None), ("explicit", (1, 3, 4)))
    ]
    first, second = (StoreReader(store) for store in stores)
    assert first.identity == second.identity
    assert [r.digest for r in first.receipts.values()] == [r.digest for r in second.receipts.values()]


def test_each_captured_layer_is_the_output_of_that_block(tmp_path):
    """A marker model: block i adds the constant i + 1 to the residual stream, so that the state names its layer."""
    engine = make_engine(make_tiny_target(tmp_path / "t"), layers=(0, 2, 5))
    embedded = engine.embeddings.weight[torch.tensor([7, 8, 9])]
    for index, layer in enumerate(engine.layers):
        layer.forward = lambda hidden, *_args, index=index, **_kwargs: hidden + (index + 1)
    [captured] = engine.capture([np.array([7, 8, 9], np.uint32)])
    for state, layer in zip(captured.aux, (0, 2, 5), strict=True):
        torch.testing.assert_close(state, embedded + sum(range(1, layer + 2)))
