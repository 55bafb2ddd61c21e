"""`eyas export`: one directory that TensorRT-LLM, vLLM and SGLang load unchanged.

    config.json                  both spellings of layer ids, rotary embedding and dtype
    model.safetensors            bare keys; embeddings only when they were trained; d2t and t2d only when reduced
    extra_llm_api_options.yaml   TensorRT-LLM's options: it reads no layer ids from config.json
    eyas.json                    provenance: the store, the training configuration, the metrics

The directory is written beside its final name, checked, and renamed, so it is either whole or absent.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas.cache_format.errors import ConfigError
from eyas.cache_format.layout import sync_folder, translate_disk_full
from eyas.cache_format.report import Report
from eyas.cache_format.schema import default_aux_layer_outputs
from eyas.train.checkpoint import Meta, load_meta, load_weights
from eyas.train.config import ExportConfig
from eyas.train.drafts.config import captured_layers
from eyas.train.errors import ExportError
from eyas.train.export_checks import faults_of_export

EXPORT_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
PROVENANCE = "eyas.json"
VOCABULARY_MAP = ("d2t", "t2d")


def export_draft(config: ExportConfig) -> Report:
    """Run `eyas export`: write the serving directory of a checkpoint.

    Raises:
        CheckpointError: the path is not a checkpoint.
        ExportError: the folder holds something else, or what was written breaks an engine's contract.
    """
    write_export(config.checkpoint, config.out, dtype=config.dtype, max_draft_len=config.max_draft_len)
    return Report(f"exported {config.checkpoint.resolve()} to {config.out} ({config.dtype})")


def write_export(checkpoint: Path, out: Path, *, dtype: str, max_draft_len: int | None = None) -> Path:
    """Write, check and publish the serving directory; return its path."""
    meta = load_meta(checkpoint)
    _require_own_folder(out)
    out = out.absolute()
    temporary = out.with_name(f".writing-{out.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    with translate_disk_full(temporary):
        weights = serving_tensors(load_weights(checkpoint), dtype)
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        for name, text in _texts(meta, out, dtype, max_draft_len).items():
            (temporary / name).write_text(text, encoding="utf-8")
    faults = faults_of_export(temporary, aux_layer_outputs=captured_layers(meta.draft))
    if faults:
        lines = "\n  ".join(faults)
        raise ExportError(
            f"the draft of {checkpoint} was written to {temporary} but engines would misread it:\n  {lines}\n"
            "nothing was published; this is a fault of eyas, please report it with these lines"
        )
    _publish(temporary, out)
    return out


def serving_tensors(weights: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint as engines name and type them; d2t stays int64 and t2d bool."""
    return {
        name: (tensor if name in VOCABULARY_MAP else tensor.to(EXPORT_DTYPES[dtype])).contiguous()
        for name, tensor in weights.items()
    }


def tensorrt_llm_options(meta: Meta, out: Path, max_draft_len: int) -> str:
    """Return extra_llm_api_options.yaml: the minimal set, since TensorRT-LLM refuses fields it does not know."""
    lines = [
        "# TensorRT-LLM: trtllm-serve TARGET --extra_llm_api_options THIS_FILE",
        "# speculative_model names this directory: change it when the directory moves.",
        "speculative_config:",
        "  decoding_type: Eagle3",
        f"  max_draft_len: {max_draft_len}",
        f"  speculative_model: {json.dumps(str(out))}",
    ]
    layers = captured_layers(meta.draft)
    if not _is_default(layers, meta.provenance["target"]["num_layers"]):
        lines.append(f"  eagle3_layers_to_capture: {list(layers)}")
    return "\n".join(lines) + "\n"


def _is_default(layers: tuple[int, ...], num_layers: int) -> bool:
    try:
        return layers == default_aux_layer_outputs(num_layers)
    except ConfigError:
        return False  # too shallow to have a default: every engine must be told


def _texts(meta: Meta, out: Path, dtype: str, max_draft_len: int | None) -> dict[str, str]:
    config = {**meta.draft, "dtype": dtype, "torch_dtype": dtype}
    provenance: dict[str, Any] = {
        "written_by": "eyas",
        "global_step": meta.global_step,
        "training": meta.config,
        "heldout": meta.heldout,
        "d2t_kind": "offset",
        **meta.provenance,
    }
    return {
        "config.json": json.dumps(config, indent=2) + "\n",
        PROVENANCE: json.dumps(provenance, indent=2) + "\n",
        "extra_llm_api_options.yaml": tensorrt_llm_options(meta, out, max_draft_len or meta.config["ttt_steps"]),
    }


def _require_own_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise ExportError(f"{out} is a file; choose a folder for the export")
    if out.is_dir() and any(out.iterdir()) and not (out / PROVENANCE).is_file():
        raise ExportError(
            f"{out} holds files that no export wrote ({PROVENANCE} is missing); choose another folder or empty it"
        )


def _publish(temporary: Path, out: Path) -> None:
    for path in temporary.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    doomed = out.with_name(f".deleting-{out.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    if out.exists():
        os.replace(out, doomed)
    os.replace(temporary, out)
    sync_folder(out.parent)
    shutil.rmtree(doomed, ignore_errors=True)
