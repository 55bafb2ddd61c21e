"""The draft vocabulary: which target ids a draft can propose, and the maps between the two numberings."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from eyas.cache_format.digests import content_digest
from eyas.cache_format.errors import ConfigError, CorruptStoreError
from eyas.cache_format.layout import replace_file

__all__ = ["VocabMap", "choose_draft_vocab", "read_vocab", "write_vocab"]


@dataclass(frozen=True)
class VocabMap:
    """A draft vocabulary of W ids out of V.

    Invariants, held by a test: ids strictly ascending in [0, V); ``ids == arange(W) + d2t``; ``t2d[ids]`` all true and
    ``t2d.sum() == W``.
    """

    ids: np.ndarray
    """int64 [W]: target id of every draft id, ascending."""
    vocab_size: int
    """V: rows of the target's lm_head."""

    def __post_init__(self) -> None:
        ids = self.ids
        ascending = len(ids) > 0 and bool((np.diff(ids) > 0).all()) and ids[0] >= 0 and ids[-1] < self.vocab_size
        if not ascending:
            raise ConfigError(f"draft vocabulary ids must be strictly ascending and inside [0, {self.vocab_size})")

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def is_identity(self) -> bool:
        """Whether draft and target vocabulary are one; then no d2t or t2d is exported."""
        return len(self) == self.vocab_size

    @cached_property
    def d2t(self) -> np.ndarray:
        """int64 [W] offsets: target id = draft id + d2t[draft id]."""
        return self.ids - np.arange(len(self), dtype=np.int64)

    @cached_property
    def t2d(self) -> np.ndarray:
        """bool [V]: whether a target id can be drafted."""
        mask = np.zeros(self.vocab_size, dtype=bool)
        mask[self.ids] = True
        return mask

    @cached_property
    def _draft_ids(self) -> np.ndarray:
        table = np.full(self.vocab_size, -1, dtype=np.int64)
        table[self.ids] = np.arange(len(self), dtype=np.int64)
        return table

    def to_draft(self, target_ids: np.ndarray) -> np.ndarray:
        """Return int64 draft ids of target ids, -1 for ids outside the draft vocabulary."""
        return self._draft_ids[np.asarray(target_ids, dtype=np.int64)]

    @cached_property
    def digest(self) -> str:
        """xxh3-128 of V and the ids."""
        return content_digest(np.concatenate([[self.vocab_size], self.ids]).astype("<i8").tobytes())


def choose_draft_vocab(
    token_counts: np.ndarray, draft_vocab_size: int | None, always_keep: Iterable[int] = ()
) -> VocabMap:
    """Choose the W most frequent supervised tokens.

    Args:
        token_counts: int64 [V], occurrences of each target id at supervised positions.
        draft_vocab_size: W; None or V takes the whole vocabulary.
        always_keep: ids that come first (eos, end of turn); ids outside [0, V) are ignored.

    Order of selection: `always_keep`, then descending count with ties to the lower id, then the lowest unused ids; the
    chosen set is stored ascending. Source: NVIDIA-NeMo/Automodel components/speculative/eagle/core.py, whose
    selection is the same set in another order.

    Raises:
        ConfigError: W is not in [1, V].
    """
    vocab_size = len(token_counts)
    if draft_vocab_size is None:
        draft_vocab_size = vocab_size
    if not 1 <= draft_vocab_size <= vocab_size:
        raise ConfigError(f"draft vocabulary size {draft_vocab_size} must be between 1 and the target's {vocab_size}")
    first = [i for i in dict.fromkeys(always_keep) if 0 <= i < vocab_size]
    by_count = np.argsort(-np.asarray(token_counts, dtype=np.int64), kind="stable")
    rank = np.empty(vocab_size, dtype=np.int64)
    rank[by_count] = np.arange(vocab_size)
    rank[first] = np.arange(len(first)) - len(first)
    chosen = np.argsort(rank, kind="stable")[:draft_vocab_size]
    return VocabMap(np.sort(chosen), vocab_size)


def write_vocab(path: Path, token_counts: np.ndarray, vocab: VocabMap) -> None:
    """Write vocab.safetensors: `token_counts` int64 [V] and `draft_vocab_ids` int64 [W]."""
    tensors = {"token_counts": np.asarray(token_counts, np.int64), "draft_vocab_ids": vocab.ids.astype(np.int64)}
    replace_file(path, save(tensors))


def read_vocab(path: Path, expected_digest: str) -> tuple[np.ndarray, VocabMap]:
    """Read (token_counts [V], vocabulary) and check the vocabulary against the manifest's digest."""
    try:
        tensors = load(path.read_bytes())
        counts, ids = tensors["token_counts"], tensors["draft_vocab_ids"]
        vocab = VocabMap(ids, len(counts))
    except (OSError, KeyError, ConfigError, SafetensorError) as error:
        raise CorruptStoreError(f"{path} cannot be read ({error}); restore it from a copy", field="vocab") from error
    if vocab.digest != expected_digest:
        raise CorruptStoreError(
            f"{path} holds vocabulary {vocab.digest}, the manifest names {expected_digest}; restore it from a copy",
            field="vocab",
        )
    return counts, vocab
