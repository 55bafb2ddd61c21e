"""The shape of an EAGLE-3 draft, its derivation from a target's config.json and its serving config.json.

What each serving engine reads is in the note beside the field (vLLM 0.32 `models/llama_eagle3.py`, SGLang 0.5.23
`srt/models/llama_eagle3.py`, TensorRT-LLM 1.2 `modeling_speculative.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eyas.cache_format.errors import ConfigError
from eyas.train.drafts.rope_parameters import check_rope_parameters, read_rope_parameters

_SERVING_ARCHITECTURE = "LlamaForCausalLMEagle3"
_COUNTS = (
    "hidden_size",
    "target_hidden_size",
    "num_aux_hidden_states",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "max_position_embeddings",
)
_SERVED_UNCHANGED = (
    *_COUNTS,
    "rms_norm_eps",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "fc_norm",
    "norm_output",
    "initializer_range",
)
"""Fields whose name and value are the same in the config.json that engines read."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Eagle3Config:
    """A one-layer Llama-style EAGLE-3 draft; `fc_norm` and `norm_output` make it EAGLE-3.1."""

    hidden_size: int
    """Width H of the draft."""
    target_hidden_size: int
    """Width Ht of the target's hidden states."""
    num_aux_hidden_states: int
    """Captured target layers A; `fc` reads A * Ht features."""
    intermediate_size: int
    """Width of the gated MLP."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key and value heads; divides the query heads."""
    head_dim: int
    """Width of one head; even, because of the rotary halves."""
    vocab_size: int
    """Target vocabulary V: rows of the target's embedding table, not the tokenizer's length."""
    draft_vocab_size: int
    """Draft vocabulary W, at most V; d2t and t2d exist exactly when W < V."""
    rms_norm_eps: float
    """Epsilon of every norm."""
    hidden_act: str
    """Activation of the MLP, as transformers names it."""
    rope_parameters: Mapping[str, Any]
    """Rotary embedding as transformers 5 spells it: rope_type, rope_theta and the scaling of that type."""
    max_position_embeddings: int
    """The target's context length: a smaller value silently switches speculation off in vLLM."""
    attention_bias: bool = False
    """Biases on the attention projections; SGLang serves none."""
    mlp_bias: bool = False
    """Biases on the MLP projections."""
    pad_token_id: int | None = None
    """Its embedding row gets no gradient."""
    fc_norm: bool = False
    """EAGLE-3.1: one RMSNorm for each captured layer before `fc`."""
    norm_output: bool = False
    """EAGLE-3.1: the recurrent state is the normalised one, which the head also reads."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        """Refuse shapes that cannot be built or that engines misread."""
        _check_positive(self)
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for the rotary halves, got {self.head_dim}")
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(f"draft_vocab_size {self.draft_vocab_size} exceeds vocab_size {self.vocab_size}")
        if self.fc_width == self.hidden_size:
            raise ConfigError(
                f"num_aux_hidden_states * target_hidden_size equals hidden_size ({self.hidden_size}): engines take "
                "such features as already projected and skip fc; choose another draft width or number of layers"
            )
        check_rope_parameters(self.rope_parameters)

    @property
    def fc_width(self) -> int:
        """Features of one position, A * Ht."""
        return self.num_aux_hidden_states * self.target_hidden_size

    @property
    def maps_vocabulary(self) -> bool:
        """Whether the draft speaks a part of the target's vocabulary, so that d2t and t2d exist."""
        return self.draft_vocab_size < self.vocab_size

    @classmethod
    def from_target(
        cls,
        target_config: Mapping[str, Any],
        *,
        num_aux: int,
        draft_vocab_size: int,
        fc_norm: bool = False,
        norm_output: bool = False,
        rope_parameters: Mapping[str, Any] | None = None,
    ) -> Eagle3Config:
        """One Llama-style layer as wide as the target, from the dictionary of the target's config.json.

        A vision-language config is read through its `text_config`. Biases are left out (engines drop or ignore
        them). `rope_parameters` replaces the target's rotary embedding, for targets whose own cannot be trained.
        ConfigError names a missing field or a rotary embedding that is not supported.
        """
        text = _text_config(target_config)
        hidden_size = _required(text, "hidden_size")
        heads = _required(text, "num_attention_heads")
        return cls(
            hidden_size=hidden_size,
            target_hidden_size=hidden_size,
            num_aux_hidden_states=num_aux,
            intermediate_size=_required(text, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=text.get("num_key_value_heads") or heads,
            head_dim=text.get("head_dim") or hidden_size // heads,
            vocab_size=_required(text, "vocab_size"),
            draft_vocab_size=draft_vocab_size,
            rms_norm_eps=_required(text, "rms_norm_eps"),
            hidden_act=text.get("hidden_act") or _required(text, "hidden_activation"),
            rope_parameters=rope_parameters or read_rope_parameters(text),
            max_position_embeddings=_required(text, "max_position_embeddings"),
            pad_token_id=_pad_token(text),
            fc_norm=fc_norm,
            norm_output=norm_output,
            initializer_range=text.get("initializer_range") or 0.02,
        )

    def to_serving_dict(
        self, *, aux_layer_outputs: Sequence[int], dtype: str, target_model_type: str = "llama"
    ) -> dict[str, Any]:
        """The config.json that TensorRT-LLM, vLLM and SGLang read.

        `aux_layer_outputs` are 0-based layers whose output was captured. Both spellings of the rotary embedding,
        of the dtype and of the layer ids are written; `target_model_type` decides SGLang's spelling of the ids.
        """
        ascending = list(aux_layer_outputs) == sorted(set(aux_layer_outputs))
        if len(aux_layer_outputs) != self.num_aux_hidden_states or not ascending:
            raise ConfigError(
                f"the draft reads {self.num_aux_hidden_states} captured layers in ascending order (engines sort "
                f"them), got aux_layer_outputs {list(aux_layer_outputs)}"
            )
        return {
            "architectures": [_SERVING_ARCHITECTURE],
            "model_type": "llama",
            "num_hidden_layers": 1,
            **{name: getattr(self, name) for name in _SERVED_UNCHANGED},
            **_rope_spellings(self.rope_parameters),
            **({} if self.pad_token_id is None else {"pad_token_id": self.pad_token_id}),
            "tie_word_embeddings": False,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "sliding_window": None,
            "use_cache": True,
            "dtype": dtype,
            "torch_dtype": dtype,
            **_layer_id_spellings(aux_layer_outputs, target_model_type),
        }

    @classmethod
    def from_serving_dict(cls, config: Mapping[str, Any]) -> Eagle3Config:
        """Read what `to_serving_dict` wrote; ConfigError for another architecture or a missing field."""
        architecture = config.get("architectures")
        if architecture != [_SERVING_ARCHITECTURE]:
            raise ConfigError(f"expected the config.json of a {_SERVING_ARCHITECTURE} draft, found {architecture!r}")
        if config.get("num_hidden_layers") != 1 or config.get("norm_before_residual"):
            raise ConfigError("only one-layer drafts without norm_before_residual are supported")
        return cls(
            **{name: _required(config, name) for name in _SERVED_UNCHANGED},
            rope_parameters=read_rope_parameters(config),
            pad_token_id=config.get("pad_token_id"),
        )


def captured_layers(config: Mapping[str, Any]) -> tuple[int, ...]:
    """`aux_layer_outputs` of a serving config.json, from the top-level spelling (boundary = output + 1)."""
    return tuple(boundary - 1 for boundary in _required(config, "eagle_aux_hidden_state_layer_ids"))


def _check_positive(config: Eagle3Config) -> None:
    for name in _COUNTS:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{name} must be a positive integer, got {value!r}")
    for name in ("rms_norm_eps", "initializer_range"):
        if not getattr(config, name) > 0:
            raise ConfigError(f"{name} must be positive, got {getattr(config, name)!r}")
    if config.pad_token_id is not None and not 0 <= config.pad_token_id < config.vocab_size:
        raise ConfigError(f"pad_token_id {config.pad_token_id} lies outside the vocabulary of {config.vocab_size}")


def _text_config(target_config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = target_config.get("text_config")
    return text if isinstance(text, Mapping) else target_config


def _required(config: Mapping[str, Any], name: str) -> Any:
    if config.get(name) is None:
        raise ConfigError(f"the config.json lacks {name!r}, which a Llama-style draft needs")
    return config[name]


def _pad_token(text: Mapping[str, Any]) -> int | None:
    pad = text.get("pad_token_id")
    return pad if isinstance(pad, int) and 0 <= pad < _required(text, "vocab_size") else None


def _rope_spellings(rope: Mapping[str, Any]) -> dict[str, Any]:
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope["rope_type"] == "default" else scaling,
        "rope_parameters": dict(rope),
    }


def _layer_id_spellings(outputs: Sequence[int], target_model_type: str) -> dict[str, Any]:
    return {
        # vLLM: id i is the state that enters layer i.
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in outputs],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": _sglang_layer_ids(outputs, target_model_type),
            "use_aux_hidden_state": True,
        },
    }


def _sglang_layer_ids(outputs: Sequence[int], target_model_type: str) -> list[int]:
    """SGLang captures the output of layer i, but its DeepSeek family shifts only lists that begin with 1."""
    shifts_by_first_id = target_model_type.startswith("deepseek_v") or target_model_type == "glm4_moe_lite"
    if not shifts_by_first_id or outputs[0] == 1:
        return list(outputs)
    if outputs[0] == 0:
        raise ConfigError(
            f"SGLang cannot capture the output of layer 0 of a {target_model_type} target: its layer list would "
            "begin with 1, which it reads as shifted; capture a later first layer"
        )
    return [layer + 1 for layer in outputs]
