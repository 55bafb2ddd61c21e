"""Deriving a draft from a target's config.json, its serving config.json, and its weights by serving name."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eyas.cache_format.errors import ConfigError
from eyas.train.drafts import DRAFTS
from eyas.train.drafts.config import Eagle3Config, captured_layers
from eyas.train.drafts.eagle3 import DraftWeightsError, Eagle3Draft
from eyas.train.drafts.layers import RotaryEmbedding, inverse_frequencies

TARGET_V4 = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "pad_token_id": 2,
}
TARGET_V5 = {key: value for key, value in TARGET_V4.items() if not key.startswith("rope")}
TARGET_V5 |= {"rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"}}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}


def derive(target=TARGET_V4, **options):
    return Eagle3Config.from_target(target, num_aux=3, draft_vocab_size=96, **options)


def test_both_spellings_of_a_target_give_the_same_draft():
    assert derive(TARGET_V4) == derive(TARGET_V5)
    assert derive(TARGET_V4).rope_parameters == {"rope_type": "default", "rope_theta": 100000.0}


def test_a_vision_language_target_is_read_through_its_text_config():
    assert derive({"model_type": "vlm", "hidden_size": 7, "text_config": TARGET_V4}) == derive(TARGET_V4)


def test_the_draft_inherits_the_target_and_never_its_biases():
    config = derive(TARGET_V4 | {"head_dim": 24, "attention_bias": True, "initializer_range": 0.01})
    assert (config.hidden_size, config.target_hidden_size, config.fc_width) == (64, 64, 192)
    assert (config.head_dim, config.max_position_embeddings, config.vocab_size) == (24, 512, 256)
    assert (config.attention_bias, config.mlp_bias, config.initializer_range) == (False, False, 0.01)
    assert derive().head_dim == 16


@pytest.mark.parametrize("pad", [None, -1, 256, [2, 3]])
def test_a_pad_token_that_is_no_row_is_left_out(pad):
    assert derive(TARGET_V4 | {"pad_token_id": pad}).pad_token_id is None


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"])
def test_a_missing_field_is_named(name):
    with pytest.raises(ConfigError, match=name):
        derive({key: value for key, value in TARGET_V4.items() if key != name})


def test_a_config_without_theta_means_transformers_default_and_writes_it_down():
    target = {key: value for key, value in TARGET_V4.items() if key != "rope_theta"}
    serving = derive(target).to_serving_dict(aux_layer_outputs=(1, 2, 4), dtype="float32")
    assert serving["rope_theta"] == serving["rope_parameters"]["rope_theta"] == 10000.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_scaling": {"rope_type": "moon", "factor": 2.0}}, "'moon' is not supported"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "'longrope' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1, 2]}}, "does not know mrope_section"),
        ({"rope_theta": 0}, "positive number"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "two rotary bases"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "several rotary embeddings"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "two rotary embeddings",
        ),
    ],
)
def test_a_rotary_embedding_that_would_be_trained_wrongly_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        derive(TARGET_V4 | change)


def test_the_user_can_give_the_draft_its_own_rotary_embedding():
    own = {"rope_type": "default", "rope_theta": 5000.0}
    target = TARGET_V4 | {"rope_scaling": {"type": "longrope"}}
    assert derive(target, rope_parameters=own).rope_parameters == own


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 500000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
        {"rope_type": "yarn", "rope_theta": 10000.0, **YARN},
        {"rope_type": "yarn", "rope_theta": 10000.0, **YARN, "attention_factor": 0.7},
    ],
    ids=["default", "linear", "llama3", "yarn", "yarn-attention-factor"],
)
def test_rotary_tables_equal_transformers(make_config, rope):
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=dict(rope), max_position_embeddings=512)
    )
    ours = RotaryEmbedding(make_config(head_dim=16, rope_parameters=rope, max_position_embeddings=512))
    positions = torch.tensor([0, 1, 5, 63, 64, 500])
    cos, sin = theirs(torch.zeros(1, 6, 64), positions[None])
    torch.testing.assert_close(ours.inv_freq, theirs.inv_freq, rtol=1e-6, atol=0.0)
    # Angles up to 500 radians carry 2e-5 of float32 rounding.
    torch.testing.assert_close(ours(positions)[0][:, 0], cos[0], atol=5e-5, rtol=0.0)
    torch.testing.assert_close(ours(positions)[1][:, 0], sin[0], atol=5e-5, rtol=0.0)


def test_default_frequencies_are_powers_of_theta():
    inv_freq, scaling = inverse_frequencies({"rope_type": "default", "rope_theta": 100.0}, 4, 64)
    torch.testing.assert_close(inv_freq, torch.tensor([1.0, 0.1]))
    assert scaling == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"draft_vocab_size": 61}, "exceeds vocab_size"),
        ({"num_key_value_heads": 3}, "not a multiple"),
        ({"head_dim": 7}, "even"),
        ({"hidden_size": 72}, "skip fc"),
        ({"num_attention_heads": 0}, "positive integer"),
        ({"intermediate_size": True}, "positive integer"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps"),
        ({"pad_token_id": 60}, "pad_token_id"),
    ],
)
def test_shapes_that_cannot_be_served_are_refused(make_config, change, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**change)


def test_serving_config_round_trips_every_switch():
    target = TARGET_V4 | {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    for switches in ({}, {"fc_norm": True}, {"norm_output": True}, {"fc_norm": True, "norm_output": True}):
        config = derive(target, **switches)
        serving = config.to_serving_dict(aux_layer_outputs=(1, 3, 5), dtype="bfloat16")
        assert Eagle3Config.from_serving_dict(serving) == config
        assert (serving["fc_norm"], serving["norm_output"]) == (config.fc_norm, config.norm_output)


def test_serving_config_spells_everything_that_engines_read():
    target = TARGET_V4 | {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}
    serving = derive(target).to_serving_dict(aux_layer_outputs=(1, 3, 5), dtype="bfloat16")
    assert serving["architectures"] == ["LlamaForCausalLMEagle3"]
    assert serving["model_type"] == "llama"
    assert serving["num_hidden_layers"] == 1
    assert serving["rope_theta"] == 100000.0
    assert serving["rope_scaling"] == {"rope_type": "llama3", **LLAMA3}
    assert serving["rope_parameters"] == {"rope_type": "llama3", "rope_theta": 100000.0, **LLAMA3}
    assert serving["eagle_aux_hidden_state_layer_ids"] == [2, 4, 6]
    assert serving["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True}
    assert serving["dtype"] == serving["torch_dtype"] == "bfloat16"
    for name in ("tie_word_embeddings", "norm_before_residual", "attention_bias", "mlp_bias"):
        assert serving[name] is False
    sizes = {"draft_vocab_size": 96, "vocab_size": 256, "target_hidden_size": 64, "num_aux_hidden_states": 3}
    assert sizes.items() <= serving.items()
    assert {"head_dim": 16, "max_position_embeddings": 512}.items() <= serving.items()
    assert captured_layers(serving) == (1, 3, 5)
    # A null in a field that engines validate is refused by strict readers; a window is optional.
    assert sorted(key for key, value in serving.items() if value is None) == ["sliding_window"]


@pytest.mark.parametrize(
    ("family", "outputs", "nested"),
    [
        ("llama", (0, 3, 5), [0, 3, 5]),
        ("deepseek_v3", (1, 3, 5), [1, 3, 5]),
        ("deepseek_v3", (2, 3, 5), [3, 4, 6]),
        ("glm4_moe_lite", (2, 3, 5), [3, 4, 6]),
    ],
)
def test_sglang_layer_ids_follow_the_target_family(family, outputs, nested):
    serving = derive().to_serving_dict(aux_layer_outputs=outputs, dtype="float32", target_model_type=family)
    assert serving["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == nested
    assert serving["eagle_aux_hidden_state_layer_ids"] == [layer + 1 for layer in outputs]


def test_layers_that_cannot_be_spelled_are_refused():
    with pytest.raises(ConfigError, match="layer 0 of a deepseek_v3"):
        derive().to_serving_dict(aux_layer_outputs=(0, 3, 5), dtype="float32", target_model_type="deepseek_v3")
    for outputs in ((1, 3), (1, 5, 3), (1, 1, 3)):
        with pytest.raises(ConfigError, match="reads 3 captured layers in ascending order"):
            derive().to_serving_dict(aux_layer_outputs=outputs, dtype="float32")


@pytest.mark.parametrize(
    "change", [{"architectures": ["LlamaForCausalLM"]}, {"num_hidden_layers": 2}, {"norm_before_residual": True}]
)
def test_a_serving_config_of_another_draft_is_refused(change):
    serving = derive().to_serving_dict(aux_layer_outputs=(1, 3, 5), dtype="float32")
    with pytest.raises(ConfigError):
        Eagle3Config.from_serving_dict(serving | change)


BARE_NAMES = {
    "fc.weight",
    "embed_tokens.weight",
    "norm.weight",
    "lm_head.weight",
    "d2t",
    "t2d",
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.post_attention_layernorm.weight",
    *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}


def test_tensor_names_are_the_serving_names(make_draft):
    assert make_draft().state_dict().keys() == BARE_NAMES
    norms = {f"fc_norm.{index}.weight" for index in range(3)}
    assert make_draft(fc_norm=True).state_dict().keys() == BARE_NAMES | norms
    assert make_draft(norm_output=True).state_dict().keys() == BARE_NAMES
    assert make_draft(draft_vocab_size=60).state_dict().keys() == BARE_NAMES - {"d2t", "t2d"}


def test_draft_names_choose_the_switches():
    assert DRAFTS["eagle3"] == (Eagle3Draft, {"fc_norm": False, "norm_output": False})
    assert DRAFTS["eagle3.1"] == (Eagle3Draft, {"fc_norm": True, "norm_output": True})


def test_d2t_holds_offsets_and_t2d_marks_the_draft_vocabulary(make_draft):
    draft = make_draft().to(torch.bfloat16)
    assert draft.d2t.dtype == torch.int64
    assert draft.d2t.tolist() == [2 * index for index in range(20)]
    assert draft.t2d.dtype == torch.bool
    assert draft.t2d.nonzero()[:, 0].tolist() == draft.draft_vocab_ids.tolist() == list(range(0, 60, 3))


@pytest.mark.parametrize("ids", [None, torch.arange(19), torch.arange(20) + 45, torch.zeros(20, dtype=torch.int64)])
def test_a_draft_vocabulary_that_does_not_fit_is_refused(make_config, ids):
    with pytest.raises(ConfigError, match="draft_vocab_ids"):
        Eagle3Draft(make_config(), draft_vocab_ids=ids)


def test_initial_weights_are_a_function_of_the_seed(make_draft):
    first, again, other = make_draft(seed=1), make_draft(seed=1), make_draft(seed=2)
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    assert not torch.equal(first.fc.weight, other.fc.weight)
    assert torch.equal(first.norm.weight, torch.ones(32))
    assert float(first.fc.weight.detach().std()) == pytest.approx(0.2, rel=0.1)


def test_weights_round_trip_and_embeddings_may_stay_with_the_target(make_draft):
    draft = make_draft(fc_norm=True)
    tensors = dict(draft.state_dict())
    embeddings = tensors.pop("embed_tokens.weight")
    loaded = Eagle3Draft.from_tensors(draft.config, tensors)
    loaded.load_target_embeddings(embeddings)
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda t: t.pop("fc.weight"), r"missing \['fc.weight'\]"),
        (lambda t: t.pop("d2t"), "no tensor d2t"),
        (lambda t: t.update({"model.fc.weight": t.pop("fc.weight")}), r"unexpected \['model.fc.weight'\]"),
        (lambda t: t.update({"norm.weight": torch.ones(3)}), r"wrong shape \[\('norm.weight', \(3,\), \(32,\)\)\]"),
    ],
)
def test_weights_that_do_not_fit_are_named(make_draft, break_it, message):
    draft = make_draft()
    tensors = dict(draft.state_dict())
    break_it(tensors)
    with pytest.raises(DraftWeightsError, match=message):
        Eagle3Draft.from_tensors(draft.config, tensors)


def test_frozen_embeddings_are_the_targets_and_get_no_gradient(make_draft):
    draft = make_draft()
    target = torch.randn(60, 32)
    draft.load_target_embeddings(target)
    draft.freeze_embeddings()
    assert torch.equal(draft.embed_tokens.weight, target)
    assert not draft.embed_tokens.weight.requires_grad
    with pytest.raises(DraftWeightsError, match="another width"):
        draft.load_target_embeddings(torch.randn(60, 16))


def test_the_head_can_start_from_the_targets_rows(make_draft):
    draft, target = make_draft(), torch.randn(60, 32)
    draft.load_target_head(target)
    assert torch.equal(draft.lm_head.weight, target[::3])
    with pytest.raises(DraftWeightsError, match="width 16"):
        draft.load_target_head(torch.randn(60, 16))


def test_each_captured_layer_has_its_own_norm(make_draft):
    draft = make_draft(fc_norm=True)
    aux = torch.randn(2, 72)
    before = draft.project_hidden_states(aux)
    with torch.no_grad():
        draft.fc_norm[1].weight.zero_()
        draft.fc.weight[:, :24].zero_()
        draft.fc.weight[:, 48:].zero_()
    assert not draft.project_hidden_states(aux).any()
    assert before.any()


def test_norm_output_normalises_once(make_draft):
    plain, normed = make_draft(), make_draft(norm_output=True)
    hidden = torch.randn(3, 32)
    torch.testing.assert_close(normed.compute_logits(plain.norm(hidden)), plain.compute_logits(hidden))


def test_an_unknown_activation_is_refused(make_draft):
    with pytest.raises(ConfigError, match="hidden_act 'wobble'"):
        make_draft(hidden_act="wobble")
