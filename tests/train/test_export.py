"""The exported directory is what the engines read, whatever the draft's switches, and faults never pass the checks."""

import json
from dataclasses import replace

import msgspec
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eyas.cache_format.errors import ConfigError
from eyas.train.checkpoint import checkpoints_folder, find_latest, load_checkpoint, save_checkpoint
from eyas.train.config import ExportConfig, TrainConfig
from eyas.train.errors import CheckpointError, ExportError
from eyas.train.export import export_draft, write_export
from eyas.train.export_checks import expected_shapes, faults_of_export
from eyas.train.testing import AUX_LAYERS, make_store
from eyas.train.train_from_cache import train_from_cache

REQUIRED = {
    "fc.weight",
    "lm_head.weight",
    "norm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.post_attention_layernorm.weight",
    *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of one step by (draft vocabulary, family, frozen embeddings), each trained once."""
    folder, runs = tmp_path_factory.mktemp("export"), {}

    def train(draft_vocab_size=24, family="eagle3", freeze_embeddings=True):
        key = (draft_vocab_size, family, freeze_embeddings)
        if key not in runs:
            store = make_store(folder / f"store{len(runs)}", draft_vocab_size=draft_vocab_size)
            config = TrainConfig(
                store=store, out=folder / f"run{len(runs)}", family=family, freeze_embeddings=freeze_embeddings,
                max_steps=1, ttt_steps=3,
            )  # fmt: skip
            train_from_cache(config)
            runs[key] = config.out
        return runs[key]

    return train


def export(run, out, **settings):
    return export_draft(ExportConfig(checkpoint=checkpoints_folder(run) / "best", out=out, **settings))


def read(folder):
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def test_a_reduced_vocabulary_is_in_the_weights_file_as_offsets(trained, tmp_path):
    export(trained(), tmp_path / "draft")
    config, tensors = read(tmp_path / "draft")
    assert tensors.keys() == REQUIRED | {"d2t", "t2d"}
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    targets = torch.arange(24) + d2t
    assert (d2t.dtype, t2d.dtype) == (torch.int64, torch.bool)
    assert t2d.nonzero()[:, 0].tolist() == targets.tolist() == sorted(set(targets.tolist()))
    assert (config["draft_vocab_size"], config["vocab_size"]) == (24, 40)
    assert tensors["lm_head.weight"].shape[0] == 24


def test_a_full_vocabulary_has_no_map(trained, tmp_path):
    export(trained(draft_vocab_size=40), tmp_path / "draft")
    config, tensors = read(tmp_path / "draft")
    assert tensors.keys() == REQUIRED
    assert config["draft_vocab_size"] == config["vocab_size"] == 40


def test_embeddings_are_exported_only_when_they_were_trained(trained, tmp_path):
    export(trained(freeze_embeddings=False), tmp_path / "draft")
    _, tensors = read(tmp_path / "draft")
    assert "embed_tokens.weight" in tensors
    assert json.loads((tmp_path / "draft" / "eyas.json").read_text())["trained_embeddings"] is True


def test_eagle31_shows_in_config_and_tensors(trained, tmp_path):
    export(trained(family="eagle3.1"), tmp_path / "draft")
    config, tensors = read(tmp_path / "draft")
    assert (config["fc_norm"], config["norm_output"]) == (True, True)
    assert tensors.keys() - REQUIRED == {"d2t", "t2d", "fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"}


def test_the_config_says_what_each_engine_reads(trained, tmp_path):
    export(trained(), tmp_path / "draft")
    config, _ = read(tmp_path / "draft")
    assert (config["architectures"], config["model_type"]) == (["LlamaForCausalLMEagle3"], "llama")
    assert config["eagle_aux_hidden_state_layer_ids"] == [layer + 1 for layer in AUX_LAYERS]  # vLLM: boundaries
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == list(AUX_LAYERS)  # SGLang: outputs
    assert config["num_aux_hidden_states"] == len(AUX_LAYERS)
    assert config["max_position_embeddings"] == 512, "the target's, not the training length"
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    assert config["tie_word_embeddings"] is config["norm_before_residual"] is config["attention_bias"] is False


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_have_the_dtype_asked_for_and_are_the_checkpoints_rounded_once(trained, tmp_path, dtype):
    export(trained(), tmp_path / "draft", dtype=dtype)
    config, tensors = read(tmp_path / "draft")
    assert config["dtype"] == dtype
    checkpoint = load_checkpoint(checkpoints_folder(trained()) / "best")
    assert all(torch.equal(tensors[name], checkpoint.weights[name].to(getattr(torch, dtype))) for name in REQUIRED)
    with safe_open(tmp_path / "draft" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_tensorrt_llm_options_are_the_minimal_set(trained, tmp_path):
    export(trained(), tmp_path / "draft", max_draft_len=5)
    lines = (tmp_path / "draft" / "extra_llm_api_options.yaml").read_text().splitlines()
    body = [line for line in lines if not line.startswith("#")]
    assert body == [
        "speculative_config:",
        "  decoding_type: Eagle3",
        "  max_draft_len: 5",
        f'  speculative_model: "{tmp_path / "draft"}"',
    ]  # (1, 3, 4) is the default set of an 8-layer target


def test_other_layers_are_told_to_tensorrt_llm_as_outputs(trained, tmp_path):
    checkpoint = load_checkpoint(checkpoints_folder(trained()) / "best")
    draft = {**checkpoint.meta.draft, "eagle_aux_hidden_state_layer_ids": [2, 3, 6]}
    draft["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [1, 2, 5], "use_aux_hidden_state": True}
    meta = msgspec.structs.replace(checkpoint.meta, draft=draft)
    save_checkpoint(tmp_path / "run", replace(checkpoint, meta=meta), is_best=True, keep=1)
    export(tmp_path / "run", tmp_path / "draft")
    text = (tmp_path / "draft" / "extra_llm_api_options.yaml").read_text()
    assert "eagle3_layers_to_capture: [1, 2, 5]" in text
    assert "max_draft_len: 3" in text, "as deep as it was trained"


def test_the_provenance_names_store_training_and_metrics(trained, tmp_path):
    export(trained(), tmp_path / "draft")
    provenance = json.loads((tmp_path / "draft" / "eyas.json").read_text())
    assert provenance["training"]["ttt_steps"] == 3
    assert provenance["heldout"]["supervised"] > 0
    assert provenance["store"].keys() == {"manifest", "plan", "tokenizer", "template"}
    assert provenance["d2t_kind"] == "offset"


def test_an_earlier_export_is_replaced_but_anything_else_is_left_alone(trained, tmp_path):
    export(trained(), tmp_path / "draft")
    export(trained(draft_vocab_size=40), tmp_path / "draft")
    assert read(tmp_path / "draft")[0]["draft_vocab_size"] == 40
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "falcon.jpg").write_bytes(b"x")
    with pytest.raises(ExportError, match=r"photos holds files that no export wrote"):
        export(trained(), tmp_path / "photos")
    assert [path.name for path in (tmp_path / "photos").iterdir()] == ["falcon.jpg"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "photos"]


def test_a_mistyped_checkpoint_is_an_error_and_writes_nothing(trained, tmp_path):
    with pytest.raises(CheckpointError, match="bset is not a checkpoint"):
        export_draft(ExportConfig(checkpoint=checkpoints_folder(trained()) / "bset", out=tmp_path / "draft"))
    assert not (tmp_path / "draft").exists()


def test_a_draft_that_engines_would_misread_is_not_published(trained, tmp_path):
    checkpoint = load_checkpoint(find_latest(trained()))
    weights = {**checkpoint.weights, "d2t": checkpoint.weights["d2t"] + torch.arange(24)}  # absolute ids
    save_checkpoint(tmp_path / "run", replace(checkpoint, weights=weights), is_best=True, keep=1)
    with pytest.raises(ExportError, match=r"V05.*offsets|V05"):
        write_export(checkpoints_folder(tmp_path / "run") / "best", tmp_path / "draft", dtype="float32")
    assert not (tmp_path / "draft").exists()


def test_max_draft_len_of_zero_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="--max-draft-len is 0"):
        ExportConfig(checkpoint=tmp_path, out=tmp_path, max_draft_len=0)


def drop(name):
    return lambda tensors, _config: tensors.pop(name)


def put(name, tensor):
    return lambda tensors, _config: tensors.update({name: tensor})


def setting(**changes):
    return lambda _tensors, config: config.update(changes)


def prefixed(tensors, _config):
    tensors["model.fc.weight"] = tensors.pop("fc.weight")


def swapped_ids(tensors, _config):
    tensors["d2t"][0], tensors["d2t"][1] = tensors["d2t"][1] + 1, tensors["d2t"][0] - 1


FAULTS = {
    "missing head": (drop("lm_head.weight"), "V01: lm_head.weight is missing"),
    "missing map": (drop("d2t"), "V01: d2t is missing"),
    "prefix": (prefixed, "V02: model.fc.weight"),
    "optimizer leak": (put("exp_avg", torch.zeros(1, dtype=torch.bfloat16)), "V01: exp_avg is not a tensor"),
    "head too tall": (put("lm_head.weight", torch.zeros(25, 16, dtype=torch.bfloat16)), "V03: lm_head.weight"),
    "mixed dtypes": (put("norm.weight", torch.ones(16)), "V04: weight dtypes"),
    "map of int32": (put("d2t", torch.zeros(24, dtype=torch.int32)), "V04: d2t is I32"),
    "absolute map": (put("d2t", torch.arange(24) + 20), "V05: draft id + d2t leaves the vocabulary"),
    "map of zeros": (put("d2t", torch.zeros(24, dtype=torch.int64)), "V05: t2d does not mark"),
    "unsorted map": (swapped_ids, "V05: draft id + d2t is not strictly ascending"),
    "architecture": (setting(architectures=["LlamaForCausalLM"]), "V10: architectures"),
    "tied": (setting(tie_word_embeddings=True), "V10: tie_word_embeddings"),
    "theta in one place": (setting(rope_theta=1.0), "V10: rope_theta"),
    "dtype in one place": (setting(torch_dtype="float32"), "V10: dtype"),
    "null in a required field": (setting(max_position_embeddings=None), "V10: max_position_embeddings is absent"),
    "target config leak": (setting(quantization_config={}), "V16: quantization_config"),
    "one convention for both": (
        setting(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}), "V11: nested layer ids"),
    "descending layers": (setting(eagle_aux_hidden_state_layer_ids=[5, 4, 2]), "V11: layer boundaries"),
    "off by one": (setting(eagle_aux_hidden_state_layer_ids=[1, 3, 4]), "V11: layer boundaries"),
    "too few layers": (setting(eagle_aux_hidden_state_layer_ids=[2, 4]), "V11"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_the_checks_find_every_planted_fault(trained, tmp_path, name):
    plant, message = FAULTS[name]
    export(trained(), tmp_path / "draft")
    config, tensors = read(tmp_path / "draft")
    plant(tensors, config)
    save_file(tensors, tmp_path / "draft" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    faults = faults_of_export(tmp_path / "draft", aux_layer_outputs=AUX_LAYERS)
    assert any(message in fault for fault in faults), faults


def test_stray_weight_files_and_a_missing_format_tag_are_faults(trained, tmp_path):
    export(trained(), tmp_path / "draft")
    _, tensors = read(tmp_path / "draft")
    save_file(tensors, tmp_path / "draft" / "model.safetensors")
    assert any("expected format pt" in fault for fault in faults_of_export(tmp_path / "draft"))
    (tmp_path / "draft" / "optimizer.bin").write_bytes(b"")
    assert "optimizer.bin" in faults_of_export(tmp_path / "draft")[0]


def test_a_sound_export_has_no_fault(trained, tmp_path):
    for family in ("eagle3", "eagle3.1"):
        export(trained(family=family), tmp_path / "draft")
        assert faults_of_export(tmp_path / "draft", aux_layer_outputs=AUX_LAYERS) == []
        config, tensors = read(tmp_path / "draft")
        assert expected_shapes(config, has_embeddings=False) == {n: tuple(t.shape) for n, t in tensors.items()}
