"""The flags of `eyas evaluate`. Imports no torch, so that `--help` answers at once.

A default lives here and nowhere else.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from eyas.cache_format.errors import ConfigError
from eyas.pipeline.config import parse_switches

__all__ = ["EvaluateConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """Decode prompts with target and draft (chain, greedy) and measure the acceptance length.

    Exit code 1 when float32 output differs from plain greedy decoding beyond ties of the target's own logits.
    """

    target: str
    """Target model: a Hugging Face folder, or a hub id."""
    draft: Path
    """Draft: a folder that `eyas export` wrote."""
    prompts: tuple[str, ...]
    """Chats in the formats of `eyas precompute`, read in order. A prompt is a chat up to its last user turn, as the
    target's template renders it with the generation prompt; earlier turns are the history as given, and an answer
    behind it is not needed."""
    revision: str | None = None
    """Hub revision of the target."""
    split: str = "train"
    """Split to read from a `datasets` folder or hub id."""
    limit: int | None = None
    """Decode at most this many prompts, the first ones that are usable."""
    template_switches: tuple[str, ...] = ()
    """Variables for the chat template as NAME=JSON, for example enable_thinking=false; give those of the store."""

    depth: int = 3
    """Tokens drafted before each verification pass of the target."""
    max_new_tokens: int = 128
    """Tokens emitted for a prompt, unless an end-of-text token of the target's generation config comes first."""
    compare_plain: bool = True
    """Also decode every prompt without the draft: checks that the tokens are the same and gives the speed-up."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Dtype of target and draft; auto takes the target's own. Equality with plain decoding is demanded in float32 and
    reported otherwise, where the rounding of another batch shape alone changes tokens."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where both run."""
    attention: Literal["sdpa", "eager", "flash_attention_2"] = "sdpa"
    """Attention kernel of the target."""
    threads: int | None = None
    """CPU threads. Default: what torch chooses."""
    out: Path | None = None
    """File for the results as JSON, per prompt too. Default: none."""

    def __post_init__(self) -> None:
        _require(len(self.prompts) > 0, "prompts: name at least one file or dataset")
        _require(self.depth >= 1, f"--depth is {self.depth}; expected 1 or more")
        _require(
            self.max_new_tokens >= 2,
            f"--max-new-tokens is {self.max_new_tokens}; expected 2 or more, since prefill emits the first token",
        )
        for name in ("limit", "threads"):
            value = getattr(self, name)
            _require(value is None or value >= 1, f"--{name} is {value}; expected 1 or more")
        parse_switches(self.template_switches)


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)
