"""The hf engine finds its modules by structure and refuses what it cannot vouch for (C3, C5, C10-C12, B4)."""

import json

import numpy as np
import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from eyas.cache_format.manifest import LogitTransform
from eyas.pipeline.engine import EngineConfig, load_engine
from eyas.pipeline.errors import TargetError
from eyas.pipeline.hf_engine import find_decoder_layers
from eyas.pipeline.target_folder import open_target

ROW = np.arange(3, 23, dtype=np.uint32)
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
    "initializer_range": 0.3,
}
FAMILIES = {
    "gemma2": (Gemma2ForCausalLM, Gemma2Config, {"final_logit_softcapping": 5.0}),
    "granite": (GraniteForCausalLM, GraniteConfig, {"logits_scaling": 4.0, "embedding_multiplier": 3.0}),
    "cohere": (CohereForCausalLM, CohereConfig, {"logit_scale": 0.25}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
}


def save_model(folder, family, dtype=torch.float32):
    model_class, config_class, extra = FAMILIES[family]
    sizes = {key: value for key, value in SIZES.items() if family != "granite" or key != "head_dim"}
    torch.manual_seed(0)
    model_class(config_class(**sizes | extra)).to(dtype).save_pretrained(folder)
    return open_target(str(folder))


def engine_of(target, *, dtype="auto", **changes):
    values = {
        "folder": str(target.path),
        "dtype": target.dtype(dtype),
        "device": "cpu",
        "attention": "eager",
        "threads": 1,
        "aux_layer_outputs": (0, 1, 2),
        "logit_transform": target.logit_transform,
        "embedding_multiplier": target.embedding_multiplier,
    }
    return load_engine(EngineConfig(**values | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_projection_equals_the_models_own_logits_in_every_family(tmp_path, family, dtype):
    target = save_model(tmp_path, family, dtype)
    engine = engine_of(target)
    engine.check(ROW)  # within one unit in the last place; float32 exact
    frozen = target.frozen_tensors(target.dtype("auto"))
    for name, tensor in engine.frozen_tensors().items():
        np.testing.assert_array_equal(frozen[name].astype(np.float32), tensor.float().numpy())


@pytest.mark.parametrize(
    ("family", "wrong"),
    [
        ("gemma2", {"logit_transform": LogitTransform()}),
        ("granite", {"logit_transform": LogitTransform()}),
        ("cohere", {"logit_transform": LogitTransform(scale=0.5)}),
        ("qwen3", {"logit_transform": LogitTransform(softcap=5.0)}),
    ],
)
def test_wrong_logit_transform_is_refused(tmp_path, family, wrong):
    engine = engine_of(save_model(tmp_path, family), **wrong)
    with pytest.raises(TargetError, match="differs from the model's own logits"):
        engine.check(ROW)


@pytest.mark.parametrize("family", ["gemma2", "granite"])
def test_wrong_embedding_multiplier_is_refused(tmp_path, family):
    engine = engine_of(save_model(tmp_path, family), embedding_multiplier=1.0)
    with pytest.raises(TargetError, match="does not read the embedding table"):
        engine.check(ROW)


def test_learned_positions_are_refused(tmp_path):
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=4, n_positions=64)).save_pretrained(tmp_path)
    engine = engine_of(open_target(str(tmp_path)))
    with pytest.raises(TargetError, match="does not read the embedding table"):
        engine.check(ROW)


def test_state_before_the_final_norm_would_be_refused(tmp_path):
    engine = engine_of(save_model(tmp_path, "qwen3"))
    engine.backbone.norm.weight.data *= 3.0
    before = {"last": None}
    norm = engine.backbone.norm

    class Skipped(torch.nn.Module):
        def forward(self, hidden):
            before["last"] = hidden
            return norm(hidden)

    engine.backbone.norm = Skipped()
    states = engine.capture([ROW])[0].last
    assert not torch.allclose(states, before["last"][0])
    torch.testing.assert_close(states, norm(before["last"])[0])


def test_token_beyond_the_embeddings_stops_before_the_forward(target):
    engine = engine_of(target, attention="sdpa")
    with pytest.raises(TargetError, match=r"token 300 of batch row 1 is outside the target's 300 embeddings"):
        engine.capture([ROW, np.array([5, 300], np.uint32)])


def test_unknown_attention_kernel_is_named(target):
    with pytest.raises(TargetError, match="attention 'no_such_kernel'"):
        engine_of(target, attention="no_such_kernel")


def test_layers_without_weights_are_refused_not_made_up(tmp_path):
    save_model(tmp_path, "qwen3")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_hidden_layers": 5, "layer_types": ["full_attention"] * 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match=r"lacks \d+ tensors of its model \(model\.layers\.4\."):
        engine_of(open_target(str(tmp_path)))


def test_layers_are_found_by_length_and_a_strange_structure_is_refused():
    class Backbone(torch.nn.Module):
        def __init__(self, *lengths):
            super().__init__()
            for number, length in enumerate(lengths):
                setattr(self, f"list{number}", torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(length)))

    assert len(find_decoder_layers(Backbone(2, 4), 4)) == 4
    with pytest.raises(TargetError, match="found 0 module lists of 5 decoder layers"):
        find_decoder_layers(Backbone(2, 4), 5)
    with pytest.raises(TargetError, match="found 2 module lists"):
        find_decoder_layers(Backbone(4, 4), 4)
