"""The target while it decodes one sequence: a key and value cache, and the layers that capture hooks.

Loading, hooks and output projection are those of the capture engine, so a draft reads here what it was trained on.
"""

import inspect
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import DynamicCache

from eyas.pipeline.engine import EngineConfig
from eyas.pipeline.hf_engine import HfEngine
from eyas.pipeline.target_folder import TargetFolder

__all__ = ["DecodingTarget", "TargetStep", "load_target", "roll_back"]


@dataclass(frozen=True, slots=True)
class TargetStep:
    """What one forward over n tokens gave."""

    logits: Float[Tensor, "r V"]
    """float32 logits of the last r tokens."""
    states: tuple[Float[Tensor, "n H"], ...]
    """Residual stream after each captured layer."""

    @property
    def aux_hidden_states(self) -> Float[Tensor, "n AH"]:
        """The captured layers side by side, in ascending order: what a draft's `fc` reads."""
        return torch.cat(self.states, dim=-1)

    def greedy(self) -> Int[Tensor, " r"]:
        """The most likely next token after each of the last r tokens; ties go to the lower id."""
        return self.logits.argmax(dim=-1)


class DecodingTarget(HfEngine):
    """The capture engine with one more way to run: token by token, or a few tokens at once, against a cache."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        names = inspect.signature(self.backbone.forward).parameters
        self._cache_name = "cache" if "cache" in names else "past_key_values"  # renamed within transformers 5

    def new_cache(self) -> DynamicCache:
        """An empty cache of one sequence. It keeps every position, also below a sliding window, so it can shrink."""
        return DynamicCache()

    def forward(self, ids: Int[Tensor, " n"], cache: DynamicCache, *, logit_rows: int) -> TargetStep:
        """Append n tokens to the cache; project only the last `logit_rows` of them."""
        last, states = self.run_backbone(input_ids=ids[None], use_cache=True, **{self._cache_name: cache})
        logits = self.head.logits(last[0, -logit_rows:])
        return TargetStep(logits, tuple(state[0] for state in states))


def roll_back(cache: DynamicCache, count: int) -> None:
    """Forget the last `count` tokens of a target's cache."""
    if count:  # transformers has read crop(0) both as "remove nothing" and as "keep nothing"
        cache.crop(-count)


def load_target(
    folder: TargetFolder, *, aux_layer_outputs: tuple[int, ...], dtype: str, device: str, attention: str, threads: int
) -> DecodingTarget:
    """Load the target with hooks on the layers that the draft reads.

    Raises:
        TargetError: the weights cannot be loaded, or the model is not built as capture expects.
    """
    return DecodingTarget(
        EngineConfig(
            folder=str(folder.path),
            dtype=dtype,
            device=device,
            attention=attention,
            threads=threads,
            aux_layer_outputs=aux_layer_outputs,
            logit_transform=folder.logit_transform,
            embedding_multiplier=folder.embedding_multiplier,
        )
    )
