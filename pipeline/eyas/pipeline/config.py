"""The configuration of `eyas precompute`: one flat, frozen record; every default of the command lives here.

Imports the standard library and the contract only, so that `eyas precompute --help` stays fast.
"""

import json
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from eyas.cache_format.errors import ConfigError
from eyas.cache_format.schema import DEFAULT_SUPERVISION, Supervision

__all__ = ["DEFAULT_DRAFT_VOCAB_SIZE", "PrecomputeConfig", "parse_switches"]

DEFAULT_DRAFT_VOCAB_SIZE = 32_000
"""Draft vocabulary when none is named, capped at the target's: the size EAGLE-3 drafts are commonly served with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecomputeConfig:
    """Run the frozen target once over chats and store what a draft has to learn from it."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("chats",)

    chats: tuple[str, ...]
    """Chat sources in order: JSONL (plain or gzip) or Parquet files, folders of them, `datasets` folders or hub ids."""
    target: str
    """Target model: a Hugging Face folder, or a hub id."""
    out: str
    """Folder of the store; a store of the same identity is continued."""
    revision: str | None = None
    """Hub revision of the target."""
    split: str = "train"
    """Split to read from a `datasets` folder or hub id."""
    limit: int | None = None
    """Read at most this many rows of the sources, in order."""

    template_switches: tuple[str, ...] = ()
    """Variables for the chat template as NAME=JSON, for example enable_thinking=false; part of the store's identity."""
    max_length: int = 2048
    """Longest sample in tokens."""
    over_long: Literal["truncate", "drop"] = "truncate"
    """What to do with a longer sample: keep its first max_length tokens, or drop it."""
    assistant_first: Literal["context", "trim", "drop"] = "context"
    """A conversation whose first turn after the system turn is the assistant's: keep that turn as context with loss
    mask 0, remove it, or drop the row. Counted in every case."""
    unknown_role: Literal["drop", "error"] = "drop"
    """A role outside the listed ones: drop the row and count it, or stop."""
    heldout_fraction: float = 0.05
    """Share of conversations held out from training, chosen by the hash of the conversation id."""

    draft_vocab_size: int | None = None
    """Size W of the default draft vocabulary; above the target's vocabulary is refused. Default: 32,000, or the
    target's vocabulary when that is smaller."""
    supervision: tuple[Supervision, ...] = DEFAULT_SUPERVISION
    """Encodings of the target's distribution to store: hidden, topk, probs."""
    topk: int = 64
    """K of the top-k encoding."""
    topk_dtype: Literal["float16", "float32"] = "float16"
    """Dtype of the stored top-k log-probabilities."""
    probs_dtype: Literal["float16", "float32"] = "float16"
    """Dtype of the stored dense probabilities."""
    aux_layer_outputs: tuple[int, ...] | None = None
    """0-based decoder layers whose output is stored, ascending. Default: 1, L//2 - 1, L - 4."""
    container: Literal["zarr", "arrow"] = "zarr"
    """Tensor container: sharded Zarr v3 arrays, or memory-mapped Arrow IPC files."""
    chunk_bytes: int = 1 << 20
    """Upper bound of one stored chunk in bytes."""
    shard_tokens: int = 32_768
    """Token budget of one shard, the unit of work, commit and resume."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Dtype of the target's forward and of the stored states; auto takes the target's own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the target runs; auto takes cuda when the machine that starts the command has it."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel; recorded as provenance."""
    batch_tokens: int | None = None
    """Token budget of a capture batch; 0 runs every row alone. Default: 0 on CPU, 16,384 on CUDA."""
    num_actors: int = 1
    """Processes that each hold one copy of the target."""
    threads_per_actor: int = 1
    """CPU threads of each actor."""

    max_quarantine: float = 0.01
    """Share of rows that may fail in the target before the run stops; one row is always allowed."""
    stall_timeout: float = 1800.0
    """Seconds without any captured batch after which the run stops and names the pending shards."""
    ray_address: str | None = None
    """Ray cluster to join. Default: a local Ray of this run; an inherited RAY_ADDRESS is ignored."""
    dry_run: bool = False
    """Plan and print the estimate; load no weights and write nothing."""
    progress_interval: float = 15.0
    """Seconds between progress lines when the output is no terminal."""

    def __post_init__(self) -> None:
        _require(len(self.chats) > 0, "chats: name at least one file or dataset")
        _require(self.max_length >= 2, f"max_length must be at least 2, found {self.max_length}")
        _require(
            0.0 <= self.heldout_fraction < 1.0, f"heldout_fraction must be in [0, 1), found {self.heldout_fraction}"
        )
        _require(0.0 <= self.max_quarantine <= 1.0, f"max_quarantine must be in [0, 1], found {self.max_quarantine}")
        _require(self.draft_vocab_size is None or self.draft_vocab_size >= 1, "draft_vocab_size must be at least 1")
        _require(len(self.supervision) > 0, "supervision must name some of hidden, topk, probs")
        _require(len(set(self.supervision)) == len(self.supervision), "supervision names an encoding twice")
        _require(self.batch_tokens is None or self.batch_tokens >= 0, "batch_tokens must not be negative")
        _require(self.limit is None or self.limit >= 1, f"limit must be at least 1, found {self.limit}")
        for name in ("topk", "chunk_bytes", "shard_tokens", "num_actors", "threads_per_actor"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1, found {getattr(self, name)}")
        _require(self.stall_timeout > 0, f"stall_timeout must be positive, found {self.stall_timeout}")
        parse_switches(self.template_switches)


def parse_switches(entries: tuple[str, ...]) -> dict[str, Any]:
    """Return the `--template-switches` of a command as variables for the chat template, by name.

    Raises:
        ConfigError: an entry is not NAME=JSON, or a name comes twice.
    """
    pairs = [entry.partition("=") for entry in sorted(entries)]
    names = [name for name, _, _ in pairs]
    try:
        values = {name: json.loads(value) for name, _, value in pairs}
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"--template-switches is {list(entries)}; expected NAME=JSON, as enable_thinking=false"
        ) from error
    if "" in names or len(values) != len(names):
        raise ConfigError(f"--template-switches is {list(entries)}; expected every entry to have a name of its own")
    return values


def _require(claim: bool, message: str) -> None:
    if not claim:
        raise ConfigError(message)
