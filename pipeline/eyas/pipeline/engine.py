"""What capture needs of whatever runs the target, and the dispatch to those that exist.

T tokens of a row, H hidden size, V target vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from torch import Tensor

from eyas.cache_format.manifest import Identity, LogitTransform
from eyas.pipeline.projection import Head

__all__ = ["CapturedRow", "Engine", "EngineConfig", "load_engine"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """How to load the target; plain values, so that it travels to an actor."""

    folder: str
    """The target's model folder."""
    engine: str = "hf"
    dtype: str
    """Dtype of weights, forward and captured states."""
    device: str
    attention: str
    threads: int
    """CPU threads of the process."""
    aux_layer_outputs: tuple[int, ...]
    logit_transform: LogitTransform
    embedding_multiplier: float

    @classmethod
    def of(cls, identity: Identity, *, folder: str, device: str, attention: str, threads: int) -> "EngineConfig":
        """Return the engine that an identity describes."""
        return cls(
            folder=folder,
            dtype=identity.target.dtype,
            device=device,
            attention=attention,
            threads=threads,
            aux_layer_outputs=identity.aux_layer_outputs,
            logit_transform=identity.logit_transform,
            embedding_multiplier=identity.embedding_multiplier,
        )


@dataclass(frozen=True, slots=True)
class CapturedRow:
    """The states of one row, on the engine's device, real positions only."""

    aux: tuple[Float[Tensor, "T H"], ...]
    """Residual stream after each captured layer, in the order of `aux_layer_outputs`."""
    last: Float[Tensor, "T H"]
    """State after the final norm: what the head reads."""


@runtime_checkable
class Engine(Protocol):
    """A resident, frozen target."""

    head: Head
    """The output projection that capture projects with."""

    def capture(self, rows: Sequence[np.ndarray]) -> list[CapturedRow]:
        """Run one batch of token id rows (uint32 [T] each) and return the states of each row."""
        ...

    def check(self, row: np.ndarray) -> None:
        """Compare the projection of captured states with the model's own logits on a few tokens of `row`.

        Raises:
            TargetError: they differ by more than rounding.
        """
        ...

    def frozen_tensors(self) -> dict[str, Tensor]:
        """Return embeddings, final norm and head as loaded, by the names of the store."""
        ...


def load_engine(config: EngineConfig) -> Engine:
    """Load the target once; seconds to minutes."""
    from eyas.pipeline.hf_engine import HfEngine

    return {"hf": HfEngine}[config.engine](config)
