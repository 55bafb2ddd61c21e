"""Configurations of `eyas inspect` and `eyas estimate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from eyas.cache_format.errors import ConfigError

__all__ = ["EstimateConfig", "InspectConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class InspectConfig:
    """Look at a store: what it is, how big, which tokens are trained on, whether every byte is right."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("store",)

    store: Path
    """Folder of the store."""

    verify: bool = False
    """Read every byte and check it against its digest; exit code 1 when anything is wrong."""

    sample: str | None = None
    """Show one sample token by token: its hex id (a prefix will do) or its plan row."""

    top: int = 3
    """Most probable next tokens shown at each position of --sample."""

    max_tokens: int = 400
    """Positions of --sample shown at most; 0 shows all."""

    json: bool = False
    """Print one JSON object instead of tables."""

    def __post_init__(self) -> None:
        if self.top < 0 or self.max_tokens < 0:
            raise ConfigError("--top and --max-tokens must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class EstimateConfig:
    """Print how many bytes a store takes, before anything runs."""

    hidden_size: int = 4096
    """H: hidden size of the target."""

    num_aux_layers: int = 3
    """A: captured layers."""

    hidden_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Dtype of the stored hidden states."""

    supervision: tuple[Literal["hidden", "topk", "probs"], ...] = ("hidden", "topk")
    """Stored encodings of the target's distribution."""

    topk: int = 64
    """K of the `topk` encoding."""

    draft_vocab_size: int = 32000
    """W of the `probs` encoding."""

    tokens: int = 1_000_000
    """Tokens of the data."""

    kept_share: float = 0.7
    """Share of tokens that are kept rows: written by the assistant, or beside such a token."""

    def __post_init__(self) -> None:
        sizes = (self.hidden_size, self.num_aux_layers, self.topk, self.draft_vocab_size, self.tokens)
        if min(sizes) < 1 or not 0 < self.kept_share <= 1:
            raise ConfigError("sizes must be positive, and --kept-share between 0 and 1")
