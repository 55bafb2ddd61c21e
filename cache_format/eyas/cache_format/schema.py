"""The fields of a store: names, dtypes, widths, and which rows they cover.

Everything on disk is unshifted and ragged: row t of a field is what the target computed at position t of its sample.
A field covers either every token of a sample, or the *kept* rows alone: tokens of the assistant and their neighbours,
the only positions whose distribution a trainer can ask for under any mask preset.
"""

from collections.abc import Sequence
from typing import Any, Literal

import ml_dtypes
import msgspec
import numpy as np
import xxhash

from eyas.cache_format.errors import ConfigError

__all__ = [
    "AUX",
    "DEFAULT_SUPERVISION",
    "FORMAT_VERSION",
    "FieldSpec",
    "Supervision",
    "aux_field",
    "check_aux_layer_outputs",
    "default_aux_layer_outputs",
    "kept_rows",
    "numpy_dtype",
    "sample_id",
    "store_fields",
]

FORMAT_VERSION = 0

Supervision = Literal["hidden", "topk", "probs"]
DEFAULT_SUPERVISION: tuple[Supervision, ...] = ("hidden", "topk")

AUX = "aux_hidden_states"
"""Name under which a reader concatenates the captured layers, in the order of `aux_layer_outputs`."""

_DTYPES: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "uint32": np.dtype(np.uint32),
}


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return the numpy dtype of a stored dtype name (bf16 through ml_dtypes)."""
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r} cannot be stored; choose one of {', '.join(sorted(_DTYPES))}")
    return _DTYPES[name]


class FieldSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One field of the store: one array a shard."""

    name: str
    dtype: str
    """Dtype of the values. On disk bf16 and fp16 are 16-bit patterns; see SPEC.md."""
    width: int | None
    """Values a row; None for a field with one scalar a row, whose array has one axis."""
    rows: Literal["token", "kept"]
    codec: dict[str, Any] = msgspec.field(default_factory=lambda: {"id": "raw"})
    """numcodecs-style configuration; `{"id": "raw"}` is plain little-endian bits."""

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Dtype of decoded values."""
        return numpy_dtype(self.dtype)

    @property
    def row_bytes(self) -> int:
        """Bytes of one decoded row."""
        return self.numpy_dtype.itemsize * (1 if self.width is None else self.width)

    def shape(self, num_rows: int) -> tuple[int, ...]:
        """Shape of an array of `num_rows` rows of this field."""
        return (num_rows,) if self.width is None else (num_rows, self.width)


def aux_field(layer: int) -> str:
    """Return the field name of the residual stream after decoder layer `layer` (0-based)."""
    return f"{AUX}/{layer}"


def store_fields(
    *,
    aux_layer_outputs: Sequence[int],
    hidden_size: int,
    hidden_dtype: str,
    supervision: Sequence[str],
    topk: int,
    topk_dtype: str = "float16",
    draft_vocab_size: int,
    probs_dtype: str = "float16",
) -> tuple[FieldSpec, ...]:
    """Return the fields that a capture with these settings stores, in the order of SPEC.md."""
    unknown = set(supervision) - {"hidden", "topk", "probs"}
    if unknown or not supervision:
        raise ConfigError(
            f"supervision must name some of hidden, topk, probs; found {', '.join(supervision) or 'none'}"
        )
    fields = [FieldSpec(aux_field(i), hidden_dtype, hidden_size, "token") for i in aux_layer_outputs]
    if "hidden" in supervision:
        fields.append(FieldSpec("last_hidden_state", hidden_dtype, hidden_size, "token"))
    fields += [FieldSpec("target_argmax", "uint32", None, "kept"), FieldSpec("target_logz", "float32", None, "kept")]
    if "topk" in supervision:
        fields += [
            FieldSpec("target_topk_ids", "uint32", topk, "kept"),
            FieldSpec("target_topk_logprobs", topk_dtype, topk, "kept"),
            FieldSpec("target_draft_logz", "float32", None, "kept"),
        ]
    if "probs" in supervision:
        fields.append(FieldSpec("target_probs", probs_dtype, draft_vocab_size, "kept"))
    return tuple(fields)


def kept_rows(loss_mask: np.ndarray) -> np.ndarray:
    """Return bool [T]: rows t with m[t], m[t-1] or m[t+1] set, inside one sample.

    Row t holds the distribution of token t+1, and a draft slot t reads row t+1, so these rows cover the `serving`,
    `nemo` and `eagle` mask presets (design: conventions, point 3).
    """
    mask = np.asarray(loss_mask).astype(bool)
    kept = mask.copy()
    kept[1:] |= mask[:-1]
    kept[:-1] |= mask[1:]
    return kept


def default_aux_layer_outputs(num_layers: int) -> tuple[int, int, int]:
    """Return the default captured layers (1, L//2 - 1, L - 4), 0-based, whose output is stored.

    Raises:
        ConfigError: the three are not distinct and inside the model ("too shallow"); name the layers explicitly.

    Source: NVIDIA-NeMo/Automodel components/speculative/eagle/target.py; the same states as the defaults of
    TensorRT-LLM, vLLM and SGLang.
    """
    layers = (1, num_layers // 2 - 1, num_layers - 4)
    if len(set(layers)) != 3 or not all(0 <= i < num_layers for i in layers):
        raise ConfigError(
            f"a target of {num_layers} layers is too shallow for the default captured layers {list(layers)}; "
            "name them with --aux-layer-outputs"
        )
    return layers


def check_aux_layer_outputs(layers: Sequence[int], num_layers: int) -> tuple[int, ...]:
    """Return `layers` as a tuple, or raise unless ascending, unique and in [0, num_layers - 2].

    The output of the last layer is refused: engines spell it in two ways, before and after the final norm.
    """
    layers = tuple(layers)
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] > num_layers - 2:
        raise ConfigError(
            f"aux_layer_outputs {list(layers)} must be ascending, without repeats, and between 0 and {num_layers - 2} "
            f"for a target of {num_layers} layers (the last layer's output is stored as last_hidden_state)"
        )
    return layers


def sample_id(input_ids: np.ndarray, loss_mask: np.ndarray) -> bytes:
    """Return the 16-byte identity of a sample: xxh3-128 of its ids (uint32, little endian) and mask (uint8)."""
    state = xxhash.xxh3_128(np.ascontiguousarray(input_ids, dtype="<u4").tobytes())
    state.update(np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())
    return state.digest()
