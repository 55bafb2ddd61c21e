"""The target as files: everything that can be known without loading its weights.

Planning, the size estimate and the store's identity come from here, so that `--dry-run` and a refused resume cost
seconds.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from eyas.cache_format.digests import digest_parts
from eyas.cache_format.manifest import LogitTransform, TargetIdentity
from eyas.pipeline.errors import TargetError

__all__ = ["TargetFolder", "open_target"]

_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja"),
)
_SAMPLED_BLOCKS = 16
_BLOCK_BYTES = 64 << 10
_CONFIG_NOISE = ("transformers_version", "_name_or_path")
_EMBEDDINGS = (
    "embed_tokens.weight",
    "wte.weight",
    "embed_in.weight",
    "word_embeddings.weight",
    "tok_embeddings.weight",
)
_HEADS = ("lm_head.weight", "embed_out.weight", "output.weight")
_NORMS = (
    *("model.norm.weight", "norm.weight", "ln_f.weight", "final_layer_norm.weight", "final_layernorm.weight"),
    *("final_norm.weight", "embedding_norm.weight"),
)


@dataclass(frozen=True)
class TargetFolder:
    """A target's folder, its decoded configs and what follows from them."""

    path: Path
    name: str
    revision: str

    @cached_property
    def config_json(self) -> dict[str, Any]:
        """The content of config.json."""
        return _read_json(self.path / "config.json")

    @cached_property
    def generation_config(self) -> dict[str, Any] | None:
        """The content of generation_config.json, or None."""
        path = self.path / "generation_config.json"
        return _read_json(path) if path.exists() else None

    @cached_property
    def config(self) -> Any:
        """The text model's configuration object."""
        from transformers import AutoConfig

        try:
            return AutoConfig.from_pretrained(self.path).get_text_config()
        except (OSError, ValueError, KeyError) as error:
            raise TargetError(f"{self.path}/config.json is no configuration transformers knows: {error}") from error

    @cached_property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a turn: generation_config's, else config's."""
        for source in (self.generation_config or {}, self.config_json):
            found = source.get("eos_token_id")
            if found is not None:
                return tuple(found) if isinstance(found, list) else (int(found),)
        return ()

    def dtype(self, wanted: str) -> str:
        """Return the dtype of the forward: the wanted one, or the target's own for "auto"."""
        if wanted != "auto":
            return wanted
        own = (
            self.config_json.get("dtype") or self.config_json.get("torch_dtype") or getattr(self.config, "dtype", None)
        )
        return str(own or "float32").removeprefix("torch.")

    @cached_property
    def logit_transform(self) -> LogitTransform:
        """What the config says happens to the head's output; capture checks it against the model's own logits."""
        config = self.config
        softcap = getattr(config, "final_logit_softcapping", None)
        scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere multiplies
        scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite divides
        has_bias = any(name.endswith("lm_head.bias") for name in self._tensor_files)
        return LogitTransform(bias=has_bias, scale=scale, softcap=float(softcap) if softcap else None)

    @cached_property
    def embedding_multiplier(self) -> float:
        """Factor between the embedding table and the first layer's input; capture checks it."""
        config = self.config
        if str(config.model_type).startswith("gemma"):
            return float(config.hidden_size) ** 0.5
        return float(getattr(config, "embedding_multiplier", None) or getattr(config, "scale_emb", None) or 1.0)

    def identity(self, dtype: str) -> TargetIdentity:
        """Return the identity of the target when it runs in `dtype`."""
        quantization = self.config_json.get("quantization_config") or {}
        own = {key: value for key, value in self.config_json.items() if key not in _CONFIG_NOISE}
        return TargetIdentity(
            name=self.name,
            revision=self.revision,
            config_digest=digest_parts([json.dumps(own, sort_keys=True)]),
            weights_digest=self._weights_digest(),
            dtype=dtype,
            quantization=str(quantization.get("quant_method", "none")),
            num_layers=int(self.config.num_hidden_layers),
            hidden_size=int(self.config.hidden_size),
            vocab_size=int(self.config.vocab_size),
        )

    def _weights_digest(self) -> str:
        """Digest names, headers, sizes and a few evenly spaced blocks of the weight files: seconds for any model.

        The blocks tell a fine-tuned copy, whose headers and sizes are the same, from its parent.
        """
        parts: list[bytes | str] = []
        for path in self._weight_files:
            size = path.stat().st_size
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                parts += [path.name, str(size), file.read(length)]
                for block in range(_SAMPLED_BLOCKS):
                    file.seek(8 + length + (size - 8 - length) * block // _SAMPLED_BLOCKS)
                    parts.append(file.read(_BLOCK_BYTES))
        return digest_parts(parts)

    @cached_property
    def _weight_files(self) -> list[Path]:
        files = sorted(self.path.glob("*.safetensors"))
        if not files:
            raise TargetError(
                f"{self.path} holds no *.safetensors weights; convert the checkpoint to safetensors first"
            )
        return files

    @cached_property
    def _tensor_files(self) -> dict[str, Path]:
        """Which file holds each tensor."""
        found: dict[str, Path] = {}
        for path in self._weight_files:
            try:
                with safe_open(path, "numpy") as file:
                    found |= dict.fromkeys(file.keys(), path)
            except (OSError, SafetensorError) as error:
                raise TargetError(f"{path} cannot be read ({error}); fetch the file again") from error
        return found

    def tokenizer(self) -> Any:
        """Load the target's tokenizer."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.path)
        except (OSError, ValueError, KeyError) as error:
            raise TargetError(f"{self.path} holds no tokenizer that transformers can load: {error}") from error

    def tokenizer_files(self) -> dict[str, bytes]:
        """Return name and content of every tokenizer file."""
        return {name: (self.path / name).read_bytes() for name in _TOKENIZER_FILES if (self.path / name).exists()}

    def tokenizer_digest(self) -> str:
        """Digest the tokenizer's files; the chat template has a digest of its own."""
        files = {name: data for name, data in self.tokenizer_files().items() if name != "chat_template.jinja"}
        return digest_parts(part for name, data in sorted(files.items()) for part in (name, data))

    def frozen_tensors(self, dtype: str) -> dict[str, np.ndarray]:
        """Return embeddings [V, H], final norm [H] and, unless tied, the head [V, H], in the dtype of the forward.

        Raises:
            TargetError: a tensor is not in the checkpoint.
        """
        tied = bool(self.config_json.get("tie_word_embeddings", getattr(self.config, "tie_word_embeddings", False)))
        tensors = {
            "embed_tokens.weight": self._tensor("input embeddings", _EMBEDDINGS, dtype),
            "norm.weight": self._tensor("final norm", _NORMS, dtype),
        }
        if not tied:
            tensors["lm_head.weight"] = self._tensor("lm_head (config.json does not tie it)", _HEADS, dtype)
        if self.logit_transform.bias:
            tensors["lm_head.bias"] = self._tensor("lm_head bias", ("lm_head.bias",), dtype)
        return tensors

    def _tensor(self, what: str, suffixes: tuple[str, ...], dtype: str) -> np.ndarray:
        for suffix in suffixes:
            names = [n for n in self._tensor_files if n == suffix or n.endswith(f".{suffix}")]
            names = [n for n in names if not any(part.isdigit() for part in n.split("."))]  # never a layer's own norm
            if len(names) == 1:
                return self._load(names[0], dtype)
        raise TargetError(
            f"{self.path}: found no tensor for the {what}; looked for names ending in {', '.join(suffixes)}"
        )

    def _load(self, name: str, dtype: str) -> np.ndarray:
        import torch

        with safe_open(self._tensor_files[name], "pt") as file:
            tensor = file.get_tensor(name).to(getattr(torch, dtype)).contiguous()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
        return tensor.numpy()


def open_target(name: str, revision: str | None = None) -> TargetFolder:
    """Return the folder of a target named by path or hub id (downloaded, or found in the local hub cache).

    Raises:
        TargetError: neither a model folder nor a hub id that can be fetched.
    """
    path = Path(name)
    if path.is_dir():
        if not (path / "config.json").exists():
            raise TargetError(f"{path} is no model folder: config.json is missing")
        return TargetFolder(path, path.resolve().name, revision or "local")
    if name.startswith((".", "/")) or name.count("/") > 1:
        raise TargetError(f"target {name} does not exist; check the path")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise TargetError(f"target {name} is no local folder and could not be fetched from the hub: {error}") from error
    return TargetFolder(Path(folder), name, Path(folder).name)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TargetError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise TargetError(f"{path} holds a JSON {type(content).__name__}, expected an object")
    return content
