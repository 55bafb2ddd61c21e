"""Does a directory satisfy what TensorRT-LLM, vLLM and SGLang read? Checked from headers and config, after writing.

Engines load a wrong draft without a word (missing keys stay at random values, an absolute d2t gives wrong tokens), so
each rule here is one whose breach costs acceptance silently. Rule numbers are those of the serving notes: V01 names,
V02 prefixes, V03 shapes, V04 dtypes, V05 vocabulary map, V07 files, V10 config, V11 layer ids.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

WEIGHT_DTYPES = ("BF16", "F16", "F32")
_MAP_TENSORS = ("d2t", "t2d")
# Not tensors of a draft, but of what a trainer may leak into its file.
_FOREIGN_PREFIXES = ("model.", "module.", "_orig_mod.", "draft_model.")
_REQUIRED = (
    *("vocab_size", "draft_vocab_size", "hidden_size", "target_hidden_size", "num_aux_hidden_states", "head_dim"),
    *("intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"),
    *("rope_theta", "rope_parameters", "fc_norm", "norm_output", "dtype"),
)
# Fields of a target's config.json that would make an engine build something else.
_TARGET_ONLY = ("quantization_config", "num_experts", "auto_map", "layer_types", "vision_config", "text_config")


def expected_shapes(config: Mapping[str, Any], *, has_embeddings: bool) -> dict[str, tuple[int, ...]]:
    """Return every tensor of a one-layer EAGLE-3 draft and its shape, from its serving config.json."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    target, layers = config["target_hidden_size"], config["num_aux_hidden_states"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, layers * target),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{index}.weight": (target,) for index in range(layers)}
    if config["draft_vocab_size"] < config["vocab_size"]:
        shapes |= {"d2t": (config["draft_vocab_size"],), "t2d": (config["vocab_size"],)}
    if has_embeddings:
        shapes["embed_tokens.weight"] = (config["vocab_size"], hidden)
    return shapes


def faults_of_export(folder: Path, *, aux_layer_outputs: Sequence[int] | None = None) -> list[str]:
    """Return what is wrong with an exported draft, each fault with its rule; an empty list is a pass.

    `aux_layer_outputs` are the layers the draft was trained on, when known: V11 then also checks the ids' values.
    """
    weights = sorted(folder.glob("*.safetensors")) + sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt"))
    if [path.name for path in weights] != ["model.safetensors"]:
        return [f"V07: weight files are {[path.name for path in weights]}; expected model.safetensors alone"]
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        with safe_open(weights[0], framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - not a dict
            dtypes = {name: file.get_slice(name).get_dtype() for name in shapes}
            maps = {name: file.get_tensor(name) for name in _MAP_TENSORS if name in shapes}
            metadata = file.metadata() or {}
    except (OSError, ValueError, SafetensorError) as error:
        return [f"V01: {folder} cannot be read ({error})"]
    faults = config_faults(config, aux_layer_outputs)
    if not faults:
        faults += _name_faults(shapes, expected_shapes(config, has_embeddings="embed_tokens.weight" in shapes))
        faults += _dtype_faults(dtypes)
        faults += map_faults(config, maps)
    if metadata.get("format") != "pt":
        faults.append(f"V07: safetensors metadata is {metadata}; expected format pt")
    return faults


def faults_of_draft(
    config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], aux_layer_outputs: Sequence[int]
) -> list[str]:
    """Return what engines would refuse or misread of a draft in memory: known before training, not after it."""
    faults = config_faults(config, aux_layer_outputs)
    if faults:
        return faults
    shapes = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    maps = {name: weights[name].cpu() for name in _MAP_TENSORS if name in weights}
    expected = expected_shapes(config, has_embeddings="embed_tokens.weight" in shapes)
    return _name_faults(shapes, expected) + map_faults(config, maps)


def config_faults(config: Mapping[str, Any], aux_layer_outputs: Sequence[int] | None) -> list[str]:
    """Return breaches of V10 and V11."""
    expected = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1}
    expected |= dict.fromkeys(("tie_word_embeddings", "attention_bias", "mlp_bias", "norm_before_residual"), False)
    faults = [f"V10: {k} is {config.get(k)!r}; expected {v!r}" for k, v in expected.items() if config.get(k) != v]
    faults += [f"V10: {name} is absent" for name in _REQUIRED if config.get(name) is None]
    faults += [f"V16: {name} belongs to a target, not to a draft" for name in _TARGET_ONLY if name in config]
    if faults:
        return faults
    if config["rope_parameters"].get("rope_theta") != config["rope_theta"]:
        faults.append(f"V10: rope_theta {config['rope_theta']} and rope_parameters {config['rope_parameters']} differ")
    if config.get("torch_dtype") != config["dtype"]:
        faults.append(f"V10: dtype {config['dtype']!r} and torch_dtype {config.get('torch_dtype')!r} differ")
    return faults + _layer_faults(config, aux_layer_outputs)


def _layer_faults(config: Mapping[str, Any], aux_layer_outputs: Sequence[int] | None) -> list[str]:
    boundaries = config.get("eagle_aux_hidden_state_layer_ids") or []
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or []
    if len(boundaries) != config["num_aux_hidden_states"] or len(nested) != len(boundaries):
        return [f"V11: {boundaries} and {nested} do not name {config['num_aux_hidden_states']} layers each"]
    faults = []
    if list(boundaries) != sorted(set(boundaries)) or min(boundaries) < 1:
        faults.append(f"V11: layer boundaries {boundaries} are not ascending, unique and at least 1")
    # SGLang shifts by one itself, except for target families that it reads verbatim.
    if list(nested) not in ([boundary - 1 for boundary in boundaries], list(boundaries)):
        faults.append(f"V11: nested layer ids {nested} belong to other layers than {boundaries}")
    if aux_layer_outputs is not None and [boundary - 1 for boundary in boundaries] != list(aux_layer_outputs):
        faults.append(f"V11: layer boundaries {boundaries}; trained on the outputs of layers {list(aux_layer_outputs)}")
    return faults


def _name_faults(found: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> list[str]:
    faults = [f"V01: {name} is missing" for name in expected if name not in found]
    for name in sorted(set(found) - set(expected)):
        rule = "V02" if name.startswith(_FOREIGN_PREFIXES) else "V01"
        faults.append(f"{rule}: {name} is not a tensor of this draft")
    shared = expected.keys() & found.keys()
    return faults + [
        f"V03: {name} is {list(found[name])}; expected {list(expected[name])}"
        for name in sorted(shared)
        if found[name] != expected[name]
    ]


def _dtype_faults(dtypes: Mapping[str, str]) -> list[str]:
    weights = {dtype for name, dtype in dtypes.items() if name not in _MAP_TENSORS}
    faults = [] if len(weights) == 1 and weights < set(WEIGHT_DTYPES) else [f"V04: weight dtypes are {sorted(weights)}"]
    for name, expected in zip(_MAP_TENSORS, ("I64", "BOOL"), strict=True):
        if dtypes.get(name, expected) != expected:
            faults.append(f"V04: {name} is {dtypes[name]}; expected {expected}")
    return faults


def map_faults(config: Mapping[str, Any], maps: Mapping[str, torch.Tensor]) -> list[str]:
    """Return breaches of V05: offsets, ascending and unique targets inside the vocabulary, t2d their indicator."""
    if set(maps) != set(_MAP_TENSORS) or maps["d2t"].ndim != 1:
        return []  # V01 and V03 speak about absence and shape
    d2t, t2d = maps["d2t"], maps["t2d"]
    targets = torch.arange(len(d2t)) + d2t
    if not len(d2t) or int(targets.min()) < 0 or int(targets.max()) >= config["vocab_size"]:
        return ["V05: draft id + d2t leaves the vocabulary; d2t must hold offsets, not target ids"]
    faults = []
    if not bool((targets.diff() > 0).all()):
        faults.append("V05: draft id + d2t is not strictly ascending")
    if len(t2d) == config["vocab_size"] and (int(t2d.sum()) != len(d2t) or not bool(t2d[targets].all())):
        faults.append("V05: t2d does not mark exactly the target ids of d2t")
    return faults
