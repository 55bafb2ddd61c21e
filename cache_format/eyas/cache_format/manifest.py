"""manifest.json: the identity of a store and the provenance of its creation.

The identity is everything that changes a stored byte. A run that continues a store must have an equal identity; any
difference is refused, named field by field. The manifest is created once, after plan, samples, vocabulary and target
parts, and never changed.
"""

from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from eyas.cache_format.digests import content_digest
from eyas.cache_format.errors import (
    CorruptStoreError,
    FormatVersionError,
    IdentityMismatchError,
    IncompleteStoreError,
    StoreNotFoundError,
)
from eyas.cache_format.layout import StorePaths
from eyas.cache_format.schema import FORMAT_VERSION, FieldSpec

__all__ = [
    "Identity",
    "LogitTransform",
    "Manifest",
    "TargetIdentity",
    "decode_json",
    "differences",
    "encode_json",
    "load_manifest",
    "require_same_identity",
]

_Struct = TypeVar("_Struct")


class LogitTransform(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the target does to lm_head(last_hidden_state): add a bias, scale, then soft-cap."""

    bias: bool = False
    """Whether the stored lm_head has a bias."""
    scale: float = 1.0
    """Factor applied to the logits."""
    softcap: float | None = None
    """c of c * tanh(logits / c), or None."""


class TargetIdentity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which target produced the states."""

    name: str
    revision: str
    config_digest: str
    weights_digest: str
    """Over weight-file names, headers, sizes and a few evenly spaced blocks of the values: seconds for any model, and
    any fine-tuned, re-quantised or re-sharded copy changes it."""
    dtype: str
    """Dtype of the forward and of the stored hidden states."""
    quantization: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    """Rows of the lm_head, which may exceed the tokenizer's length."""


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that changes a stored byte."""

    plan_digest: str
    tokenizer_digest: str
    template_digest: str
    template_switches: dict[str, Any]
    target: TargetIdentity
    aux_layer_outputs: tuple[int, ...]
    """0-based decoder layers whose output is stored, ascending."""
    logit_transform: LogitTransform
    embedding_multiplier: float
    supervision: tuple[Literal["hidden", "topk", "probs"], ...]
    topk: int
    draft_vocab_size: int
    draft_vocab_digest: str
    container: Literal["zarr", "arrow"]
    chunk_bytes: int
    fields: tuple[FieldSpec, ...]
    max_length: int


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of manifest.json."""

    format_version: int
    identity: Identity
    provenance: dict[str, str]
    """Versions and device at creation: informative, never compared."""

    @property
    def digest(self) -> str:
        """xxh3-128 of the identity's canonical JSON."""
        return content_digest(encode_json(self.identity))


class _VersionOnly(msgspec.Struct):
    format_version: int


def encode_json(value: Any) -> bytes:
    """Return indented JSON with sorted keys and a final newline: equal values give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(value, order="deterministic"), indent=1) + b"\n"


def decode_json(data: bytes, kind: type[_Struct], path: Path) -> _Struct:
    """Decode strictly typed JSON; unknown fields, wrong types and torn files name the path."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise CorruptStoreError(f"{path}: {error}; restore the file from a copy or create the store again") from error


def load_manifest(root: Path | str) -> Manifest:
    """Read and check manifest.json of a store folder.

    Raises:
        StoreNotFoundError: no such folder, or a folder that is not a store.
        IncompleteStoreError: planning was interrupted before the manifest was written.
        FormatVersionError: written by another format version.
        CorruptStoreError: the file cannot be decoded.
    """
    paths = StorePaths(root)
    try:
        data = paths.manifest.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if paths.shards.is_dir() and paths.target.is_dir():
            raise IncompleteStoreError(
                f"{paths.root} was interrupted while planning: it has no manifest.json yet; run the same "
                "`eyas precompute` again to go on"
            ) from error
        raise StoreNotFoundError(f"{paths.root} holds no store: manifest.json is missing; check the path") from error
    version = decode_json(data, _VersionOnly, paths.manifest).format_version
    if version != FORMAT_VERSION:
        raise FormatVersionError(
            f"{paths.manifest} has format version {version}; this eyas reads version {FORMAT_VERSION}"
        )
    return decode_json(data, Manifest, paths.manifest)


def differences(old: Identity, new: Identity) -> list[tuple[str, Any, Any]]:
    """Return (field path, old value, new value) for every difference, nested structs spelled with dots."""
    return _differences("", msgspec.to_builtins(old), msgspec.to_builtins(new))


def _differences(prefix: str, old: Any, new: Any) -> list[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(dict.fromkeys([*old, *new]))
        return [d for key in keys for d in _differences(f"{prefix}.{key}".lstrip("."), old.get(key), new.get(key))]
    return [] if old == new else [(prefix, old, new)]


def require_same_identity(root: Path | str, old: Identity, new: Identity) -> None:
    """Raise IdentityMismatchError naming every differing field with both values."""
    found = differences(old, new)
    if found:
        lines = "\n".join(f"  {name}: store has {a!r}, this run has {b!r}" for name, a, b in found)
        raise IdentityMismatchError(
            f"{root} belongs to another capture; it differs in\n{lines}\n"
            "write to another folder, or run with the settings of the store"
        )
