"""A draft as the directory that engines load: checked against its own files and against the target, then loaded."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor

from eyas.cache_format.errors import ConfigError
from eyas.cache_format.schema import check_aux_layer_outputs
from eyas.evaluate.errors import DraftError
from eyas.pipeline.target_folder import TargetFolder
from eyas.train.drafts.config import Eagle3Config, captured_layers
from eyas.train.drafts.eagle3 import DraftWeightsError, Eagle3Draft
from eyas.train.export_checks import faults_of_export

__all__ = ["DraftFolder", "open_draft"]


@dataclass(frozen=True, slots=True)
class DraftFolder:
    """A checked draft whose weights are not loaded yet."""

    path: Path
    config: Eagle3Config
    aux_layer_outputs: tuple[int, ...]
    """0-based target layers whose output the draft reads, ascending."""

    def load(self, embeddings: Float[Tensor, "V H"], *, dtype: torch.dtype, device: torch.device) -> Eagle3Draft:
        """Return the network, ready to decode; `embeddings` are the target's, used when the file holds none.

        Raises:
            DraftError: the tensors do not fit the config, or embeddings are missing and the target's do not fit.
        """
        tensors = load_file(self.path / "model.safetensors")
        try:
            draft = Eagle3Draft.from_tensors(self.config, tensors)
            if "embed_tokens.weight" not in tensors:
                draft.load_target_embeddings(embeddings)
        except DraftWeightsError as error:
            raise DraftError(f"{self.path}/model.safetensors: {error}") from error
        draft.requires_grad_(False)
        for parameter in draft.parameters():
            # Not `draft.to(dtype)`: the rotary frequencies are a buffer, and rounding them moves every far position.
            parameter.data = parameter.data.to(dtype)
        return draft.to(device).eval()


def open_draft(path: Path, target: TargetFolder) -> DraftFolder:
    """Check a draft's folder against what engines read and against the target; reads no weights but d2t and t2d.

    Raises:
        DraftError: not an exported draft, engines would misread it, or it was made for another target.
    """
    if not (path / "config.json").is_file():
        raise DraftError(
            f"{path} holds no config.json, so it is no exported draft; write one with: eyas export CHECKPOINT --out DIR"
        )
    faults = faults_of_export(path)
    if faults:
        raise DraftError(f"{path} would be misread by serving engines:\n  " + "\n  ".join(faults))
    serving = json.loads((path / "config.json").read_text(encoding="utf-8"))
    try:
        config = Eagle3Config.from_serving_dict(serving)
        layers = check_aux_layer_outputs(captured_layers(serving), int(target.config.num_hidden_layers))
        _check_nested_layers(serving, config, layers, str(target.config_json.get("model_type", "llama")))
    except ConfigError as error:
        raise DraftError(f"{path}/config.json does not fit {target.path}: {error}") from error
    _check_sizes(path, config, target)
    return DraftFolder(path, config, layers)


def _check_nested_layers(serving: dict[str, Any], config: Eagle3Config, layers: tuple[int, ...], family: str) -> None:
    """Refuse a nested list that names other layers than the top-level one, in the spelling of this target family."""
    written = config.to_serving_dict(aux_layer_outputs=layers, dtype="float32", target_model_type=family)
    key = "eagle_aux_hidden_state_layer_ids"
    expected, found = written["eagle_config"][key], serving["eagle_config"][key]
    if found != expected:
        raise ConfigError(
            f"layer ids disagree: the top-level {key} {serving[key]} means the outputs of layers {list(layers)}, for "
            f"which eagle_config must hold {expected}; found {found}. Engines that read one list would feed other "
            "states than engines that read the other"
        )


def _check_sizes(path: Path, config: Eagle3Config, target: TargetFolder) -> None:
    pairs = {
        "vocab_size": (config.vocab_size, int(target.config.vocab_size)),
        "target_hidden_size": (config.target_hidden_size, int(target.config.hidden_size)),
    }
    for name, (found, expected) in pairs.items():
        if found != expected:
            raise DraftError(
                f"{path}/config.json has {name} {found}, but the target {target.path} has {expected}: this draft was "
                "made for another target"
            )
