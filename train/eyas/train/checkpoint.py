"""Checkpoints that a kill cannot spoil, and resumption that changes nothing.

    RUN/checkpoints/step_00000120/model.safetensors    trained weights; d2t and t2d when W < V
                                  state.pt             optimizer moments and random state (loads with weights_only)
                                  meta.json            position, configuration, identities, metrics
    RUN/checkpoints/latest, best                       relative links, replaced atomically

A folder is written under a temporary name, synced, and renamed; only then does `latest` move. So whatever moment a run
dies at, `latest` names a whole checkpoint, and anything unfinished has a name that starts with a dot.
"""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from eyas.cache_format.digests import file_digest
from eyas.cache_format.layout import replace_file, sync_folder, translate_disk_full
from eyas.train.errors import CheckpointError

CHECKPOINT_VERSION = 1


class Meta(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """meta.json: all of a checkpoint that is not a tensor."""

    version: int = CHECKPOINT_VERSION
    global_step: int
    """Optimizer steps done, skipped ones included."""
    epoch: int
    """Epoch of the last step done, 0-based."""
    step: int
    """Global batches of that epoch that are done; the epoch's length when it is finished."""
    order_digest: str
    """Digest of that epoch's order."""
    config: dict[str, Any]
    """The run's configuration as plain values."""
    identity: dict[str, str]
    """What the store must still be: manifest and draft vocabulary digests."""
    draft: dict[str, Any]
    """The draft's config.json as serving engines read it."""
    provenance: dict[str, Any]
    """Where the draft comes from, for the export."""
    skipped_steps: int
    """Steps without an update: loss or gradient norm was not finite."""
    heldout: dict[str, Any] | None
    """The last held-out metrics, or None before the first evaluation or without a held-out split."""
    best: dict[str, Any] | None
    """The best held-out metrics so far."""
    digests: dict[str, str] = {}
    """xxh3-128 of the other two files, filled in when they are written."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint in memory."""

    meta: Meta
    weights: dict[str, Tensor]
    optimizer: dict[str, Any] = field(default_factory=dict)
    rng: dict[str, Tensor] = field(default_factory=dict)


def checkpoints_folder(run: Path) -> Path:
    """Return the folder of a run's checkpoints."""
    return run / "checkpoints"


def save_checkpoint(run: Path, checkpoint: Checkpoint, *, is_best: bool, keep: int) -> Path:
    """Publish a checkpoint, move `latest` (and `best`) to it, and drop the oldest beyond `keep`.

    Returns:
        The checkpoint's folder.
    """
    folder = checkpoints_folder(run)
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step_{checkpoint.meta.global_step:08d}"
    _publish(checkpoint, final)
    _point(folder / "latest", final)
    if is_best:
        _point(folder / "best", final)
    _prune(folder, keep)
    return final


def find_latest(run: Path) -> Path | None:
    """Return the folder that `latest` names, or None when the run has no checkpoint yet.

    Raises:
        CheckpointError: `latest` names a folder that is gone.
    """
    latest = checkpoints_folder(run) / "latest"
    if not latest.is_symlink():
        return None
    if not latest.is_dir():
        raise CheckpointError(
            f"{latest} names {os.readlink(latest)}, which is gone; restore that folder, or remove {run} to start over"
        )
    return latest.resolve()


def load_meta(folder: Path) -> Meta:
    """Read meta.json of a checkpoint folder.

    Raises:
        CheckpointError: the path is not a checkpoint, or was written by another version.
    """
    path = folder / "meta.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is not a checkpoint: meta.json is missing; give a folder such as RUN/checkpoints/best"
        )
    try:
        return msgspec.json.decode(path.read_bytes(), type=Meta)
    except msgspec.DecodeError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use another checkpoint of the run") from error


def load_checkpoint(folder: Path) -> Checkpoint:
    """Read a whole checkpoint; nothing in it is ever unpickled."""
    meta = load_meta(folder)
    weights = load_weights(folder)
    _check_digest(folder / "state.pt", meta)
    try:
        state = torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    except (OSError, EOFError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(f"{folder} cannot be read ({error}); use another checkpoint of the run") from error
    return Checkpoint(meta=meta, weights=weights, optimizer=state["optimizer"], rng=state["rng"])


def load_weights(folder: Path) -> dict[str, Tensor]:
    """Read the tensors of model.safetensors of a checkpoint."""
    path = folder / "model.safetensors"
    _check_digest(path, load_meta(folder))
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use another checkpoint of the run") from error


def _check_digest(path: Path, meta: Meta) -> None:
    try:
        found = file_digest(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}); use another checkpoint of the run") from error
    if found != meta.digests.get(path.name):
        raise CheckpointError(f"{path} cannot be read (its bytes changed); use another checkpoint of the run")


def require_same_run(folder: Path, meta: Meta, *, config: dict[str, Any], identity: dict[str, str]) -> None:
    """Refuse to resume under another configuration or from another store, naming every field with both values."""
    changed = [
        f"  --{name.replace('_', '-')}: checkpoint has {meta.config.get(name)!r}, this run has {config.get(name)!r}"
        for name in dict.fromkeys([*meta.config, *config])
        if meta.config.get(name) != config.get(name)
    ]
    changed += [
        f"  store's {name}: checkpoint has {meta.identity.get(name)}, this run has {identity.get(name)}"
        for name in dict.fromkeys([*meta.identity, *identity])
        if meta.identity.get(name) != identity.get(name)
    ]
    if changed:
        lines = "\n".join(changed)
        raise CheckpointError(
            f"{folder} belongs to another run; it differs in\n{lines}\n"
            "run with the settings of the checkpoint to resume, or choose another --out"
        )


def rng_state() -> dict[str, Tensor]:
    """Return the random state of torch: CPU, and the current CUDA device when it is in use."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def restore_rng(state: dict[str, Tensor]) -> None:
    """Put back what `rng_state` returned."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _publish(checkpoint: Checkpoint, final: Path) -> None:
    temporary = final.with_name(f".writing-{final.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    with translate_disk_full(temporary):
        weights = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.weights.items()}
        save_file(weights, temporary / "model.safetensors", metadata={"format": "pt"})
        with (temporary / "state.pt").open("wb") as file:  # given a path, torch would lose why a write failed
            torch.save({"optimizer": checkpoint.optimizer, "rng": checkpoint.rng}, file)
        _sync_files(temporary.iterdir())
    digests = {name: file_digest(temporary / name) for name in ("model.safetensors", "state.pt")}
    # msgspec writes NaN, which a diverged draft's metrics hold, as null; the json module's NaN is not JSON.
    meta = msgspec.json.format(
        msgspec.json.encode(replace(checkpoint.meta, digests=digests), order="deterministic"), indent=1
    )
    replace_file(temporary / "meta.json", meta + b"\n")
    if final.exists():
        # A run that died between publishing and pointing left this folder; nothing points at it.
        _discard(final)
    os.replace(temporary, final)
    sync_folder(final.parent)


def _sync_files(paths: Iterable[Path]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _point(link: Path, target: Path) -> None:
    temporary = link.with_name(f".{link.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    os.replace(temporary, link)
    sync_folder(link.parent)


def _prune(folder: Path, keep: int) -> None:
    pointed = {os.readlink(folder / name) for name in ("latest", "best") if (folder / name).is_symlink()}
    for old in sorted(folder.glob("step_*"))[:-keep]:
        if old.name not in pointed:
            _discard(old)
    for leftover in folder.glob(".*-step_*"):
        shutil.rmtree(leftover)


def _discard(path: Path) -> None:
    # Renamed first: a folder that is half deleted must not look like a checkpoint.
    doomed = path.with_name(f".deleting-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.replace(path, doomed)
    shutil.rmtree(doomed)
