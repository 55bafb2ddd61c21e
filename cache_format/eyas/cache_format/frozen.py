"""The target's frozen parts: all a trainer or an inspector needs of the target, and nothing more.

target/config.json, generation_config.json, tokenizer files and chat template are copies. tokens.arrow holds the bytes
and the special flag of every id, so that nobody downstream needs a tokenizer. frozen.safetensors holds the input
embeddings, the lm_head (absent when tied) and the final norm.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pyarrow as pa
import safetensors.numpy

from eyas.cache_format.arrow_files import READ_ERRORS, arrow_bytes, read_arrow
from eyas.cache_format.digests import digest_parts, file_digest
from eyas.cache_format.errors import CorruptStoreError, MissingFieldError
from eyas.cache_format.layout import StorePaths, replace_file

__all__ = ["FrozenTarget", "TokenTable", "target_digest", "write_frozen_target"]

EMBED = "embed_tokens.weight"
NORM = "norm.weight"
HEAD = "lm_head.weight"
HEAD_BIAS = "lm_head.bias"

_SAFETENSORS_DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
_TOKENS = pa.schema([("bytes", pa.binary()), ("special", pa.bool_())])


def write_frozen_target(
    store_root: Path | str,
    *,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None,
    tensors: Mapping[str, np.ndarray],
    token_bytes: Sequence[bytes],
    special: Sequence[bool],
    copy_files: Mapping[str, bytes],
) -> None:
    """Write target/ of a store; each file appears whole, and writing the same parts again changes nothing.

    Args:
        config: the target's config.json.
        generation_config: its generation_config.json, or None when it has none.
        tensors: `embed_tokens.weight` [V, H], `norm.weight` [H], `lm_head.weight` [V, H] unless tied, and
            `lm_head.bias` [V] if there is one.
        token_bytes: bytes that each id stands for, V entries or fewer (ids beyond have no token).
        special: whether each id is a special token.
        copy_files: further files by name (tokenizer.json, chat_template.jinja).
    """
    folder = StorePaths(store_root).target
    files = dict(copy_files)
    files["config.json"] = json.dumps(config, indent=2, sort_keys=True).encode()
    if generation_config is not None:
        files["generation_config.json"] = json.dumps(generation_config, indent=2, sort_keys=True).encode()
    tokens = pa.record_batch([pa.array(token_bytes, pa.binary()), pa.array(special, pa.bool_())], schema=_TOKENS)
    files["tokens.arrow"] = arrow_bytes(tokens)
    files["frozen.safetensors"] = safetensors.numpy.save(
        {name: np.ascontiguousarray(value) for name, value in tensors.items()}, metadata={"format": "pt"}
    )
    for name, data in sorted(files.items()):
        replace_file(folder / name, data)


def target_digest(store_root: Path | str) -> str:
    """Return one digest over the names and contents of every file of target/."""
    folder = StorePaths(store_root).target
    return digest_parts(part for path in sorted(folder.iterdir()) for part in (path.name, file_digest(path)))


class TokenTable:
    """What each token id stands for, without a tokenizer."""

    def __init__(self, path: Path) -> None:
        try:
            table = read_arrow(path).combine_chunks()
            self._bytes, self._special = (table.column(name).chunk(0) for name in _TOKENS.names)
        except READ_ERRORS as error:
            raise CorruptStoreError(
                f"{path} cannot be read ({error}); restore it from a copy", field="target"
            ) from error

    def __len__(self) -> int:
        return len(self._bytes)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of one id; an id that no token has gives a visible marker."""
        if token_id >= len(self):
            return f"<no token {token_id}>".encode()
        return bytes(self._bytes[token_id].as_py())

    def is_special(self, token_id: int) -> bool:
        """Return whether an id is a special token."""
        return token_id < len(self) and bool(self._special[token_id].as_py())

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ids; bytes that are no valid UTF-8 show as U+FFFD."""
        return b"".join(self.bytes_of(int(i)) for i in token_ids).decode("utf-8", errors="replace")


class FrozenTarget:
    """Reader of target/; tensors are memory-mapped, read-only views."""

    def __init__(self, store_root: Path | str) -> None:
        self.folder = StorePaths(store_root).target

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            return dict(json.loads(path.read_bytes()))
        except (OSError, ValueError) as error:
            raise CorruptStoreError(
                f"{path} cannot be read ({error}); restore it from a copy", field="target"
            ) from error

    @cached_property
    def config(self) -> dict[str, Any]:
        """The target's config.json."""
        return self._json("config.json")

    @cached_property
    def generation_config(self) -> dict[str, Any]:
        """The target's generation_config.json, empty when it has none."""
        return self._json("generation_config.json") if (self.folder / "generation_config.json").exists() else {}

    @cached_property
    def tokens(self) -> TokenTable:
        """Bytes and special flag of every token id."""
        return TokenTable(self.folder / "tokens.arrow")

    @cached_property
    def _tensors(self) -> dict[str, np.ndarray]:
        # Parsed here because safetensors' numpy reader copies the whole file, and these can be gigabytes.
        path = self.folder / "frozen.safetensors"
        try:
            data = np.memmap(path, np.uint8, mode="r")
            start = 8 + int.from_bytes(data[:8].tobytes(), "little")
            header = json.loads(data[8:start].tobytes())
            header.pop("__metadata__", None)
            return {
                name: data[start + entry["data_offsets"][0] : start + entry["data_offsets"][1]]
                .view(_SAFETENSORS_DTYPES[entry["dtype"]])
                .reshape(entry["shape"])
                for name, entry in header.items()
            }
        except (OSError, ValueError, KeyError) as error:
            raise CorruptStoreError(
                f"{path} cannot be read ({error}); restore it from a copy", field="target"
            ) from error

    def _tensor(self, name: str) -> np.ndarray:
        if name not in self._tensors:
            raise MissingFieldError(f"{self.folder / 'frozen.safetensors'} has no {name}; the store was cut short")
        return self._tensors[name]

    def embed_tokens(self) -> np.ndarray:
        """Return the input embeddings [V, H] in their stored dtype."""
        return self._tensor(EMBED)

    def lm_head(self) -> np.ndarray:
        """Return the output projection [V, H]; the input embeddings when the target ties them."""
        return self._tensor(HEAD) if HEAD in self._tensors else self.embed_tokens()

    def lm_head_bias(self) -> np.ndarray | None:
        """Return the bias [V] of the output projection, or None."""
        return self._tensors.get(HEAD_BIAS)

    def final_norm(self) -> np.ndarray:
        """Return the weight [H] of the final norm."""
        return self._tensor(NORM)
