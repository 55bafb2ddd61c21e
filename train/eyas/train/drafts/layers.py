"""The decoder layer of a Llama-style EAGLE-3 draft and its parts: norm, gated MLP, rotary embedding, projections."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from eyas.cache_format.errors import ConfigError
from eyas.train.drafts.config import Eagle3Config


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last axis; the statistics are computed in float32 for narrower inputs."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Float[Tensor, "... H"]) -> Float[Tensor, "... H"]:
        """Normalise the last axis; the result has the dtype of `hidden`."""
        wide = hidden if hidden.dtype in (torch.float32, torch.float64) else hidden.float()
        normed = functional.rms_norm(wide, self.weight.shape, eps=self.eps)
        return normed.to(hidden.dtype) * self.weight.to(hidden.dtype)


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(width, inner, bias=bias)
        self.up_proj = nn.Linear(width, inner, bias=bias)
        self.down_proj = nn.Linear(inner, width, bias=bias)
        self.act_fn = activation(config.hidden_act)

    def forward(self, hidden: Float[Tensor, "N H"]) -> Float[Tensor, "N H"]:
        """Apply the block to every row."""
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


def activation(name: str) -> nn.Module:
    """The activation of that transformers name; ConfigError when there is none."""
    if name not in ACT2FN:
        raise ConfigError(f"hidden_act {name!r} is not an activation that transformers knows")
    return ACT2FN[name]


class RotaryEmbedding(nn.Module):
    """Cosines and sines for given positions, computed in float32; no table, so no longest position."""

    inv_freq: Tensor

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        inv_freq, self.scaling = inverse_frequencies(
            config.rope_parameters, config.head_dim, config.max_position_embeddings
        )
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def forward(self, position_ids: Int[Tensor, "N"]) -> tuple[Tensor, Tensor]:
        """(cos, sin), each float32 [N, 1, head_dim]: the middle axis broadcasts over heads."""
        half = position_ids.to(torch.float32)[:, None] * self.inv_freq.to(torch.float32)[None, :]
        angles = torch.cat((half, half), dim=-1)[:, None, :]
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def inverse_frequencies(
    rope_parameters: Mapping[str, Any], head_dim: int, max_position_embeddings: int
) -> tuple[Float[Tensor, "half"], float]:
    """(inverse frequencies float32 [head_dim / 2], factor on cos and sin), as transformers computes them."""
    if rope_parameters["rope_type"] == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
        return 1.0 / (rope_parameters["rope_theta"] ** exponents), 1.0
    # transformers asks a model config for these; the draft has none of its classes.
    asked = SimpleNamespace(
        rope_parameters=dict(rope_parameters),
        standardize_rope_params=lambda: None,
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        max_position_embeddings=max_position_embeddings,
    )
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[rope_parameters["rope_type"]](asked, device=torch.device("cpu"))
    return inv_freq, float(scaling)


def rotate(heads: Float[Tensor, "N h d"], cos: Float[Tensor, "N 1 d"], sin: Float[Tensor, "N 1 d"]) -> Tensor:
    """Rotate the two halves of every head (the Llama layout, not the interleaved one), in the dtype of `heads`."""
    cos, sin = cos.to(heads.dtype), sin.to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


class Eagle3Attention(nn.Module):
    """Projections of the layer; the attention itself is a function of what they give."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, bias = 2 * config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, config.hidden_size, bias=bias)

    def query(self, normed: Float[Tensor, "M H2"], cos: Tensor, sin: Tensor) -> Float[Tensor, "M h d"]:
        """Rotated queries."""
        return rotate(self._heads(self.q_proj(normed)), cos, sin)

    def keys_values(
        self, normed: Float[Tensor, "N H2"], cos: Tensor, sin: Tensor
    ) -> tuple[Float[Tensor, "N g d"], Float[Tensor, "N g d"]]:
        """Rotated keys, and values."""
        return rotate(self._heads(self.k_proj(normed)), cos, sin), self._heads(self.v_proj(normed))

    def _heads(self, flat: Tensor) -> Tensor:
        return flat.view(flat.shape[0], flat.shape[1] // self.head_dim, self.head_dim)


class Eagle3Layer(nn.Module):
    """The one decoder layer."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Eagle3Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = GatedMLP(config)

    def normed_inputs(self, embeds: Float[Tensor, "N H"], hidden: Float[Tensor, "N H"]) -> Float[Tensor, "N H2"]:
        """[norm(embedding); norm(hidden)], embedding first."""
        return torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)

    def finish(self, attended: Float[Tensor, "M h d"], residual: Float[Tensor, "M H"]) -> Float[Tensor, "M H"]:
        """Output projection, residual, MLP, residual."""
        hidden = residual + self.self_attn.o_proj(attended.flatten(1))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))
