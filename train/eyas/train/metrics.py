"""Counters of a TTT run and the simulated acceptance length computed from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


def simulated_accept_length(hits: Int[Tensor, "K"], valid: Int[Tensor, "K"]) -> Float[Tensor, ""]:
    """1 + sum_k hits_k / max(valid_k, 1), float32, in [1, 1 + K].

    hits_k: slots whose greedy chain equals the target's argmax at every depth up to k. valid_k: slots supervised by
    the loss mask at every depth up to k, those whose target lies outside the draft vocabulary included: they break
    the chain. NeMo AutoModel `components/speculative/eagle`.
    """
    return 1.0 + (hits.to(torch.float32) / valid.clamp(min=1).to(torch.float32)).sum()


@dataclass(kw_only=True, slots=True)
class TttCounters:
    """Per-depth sums over any number of micro-batches and ranks; `to_tensor` is what an all-reduce adds up."""

    loss_sums: Float[Tensor, "K"]
    """float64: sum of the per-slot losses of each TTT step."""
    supervised: Int[Tensor, "K"]
    """int64: slots in the loss of each step (mask, and argmax inside the draft vocabulary)."""
    correct: Int[Tensor, "K"]
    """int64: of those, slots whose draft argmax equals the target's."""
    hits: Int[Tensor, "K"]
    """int64: slots whose chain is correct through this depth."""
    valid: Int[Tensor, "K"]
    """int64: slots supervised at every depth so far, the draft vocabulary ignored."""

    @classmethod
    def zeros(cls, ttt_steps: int, device: torch.device | str = "cpu") -> TttCounters:
        """Counters of an empty run of `ttt_steps` depths."""
        counts = [torch.zeros(ttt_steps, dtype=torch.int64, device=device) for _ in range(4)]
        sums = torch.zeros(ttt_steps, dtype=torch.float64, device=device)
        return cls(loss_sums=sums, supervised=counts[0], correct=counts[1], hits=counts[2], valid=counts[3])

    def add(self, other: TttCounters) -> None:
        """Add the sums of another micro-batch in place."""
        self.loss_sums += other.loss_sums
        self.supervised += other.supervised
        self.correct += other.correct
        self.hits += other.hits
        self.valid += other.valid

    def to_tensor(self) -> Float[Tensor, "5 K"]:
        """All sums as one float64 [5, K] tensor (exact below 2**53), ready for an all-reduce with SUM."""
        counts = (self.supervised, self.correct, self.hits, self.valid)
        return torch.stack((self.loss_sums, *(count.to(torch.float64) for count in counts)))

    @classmethod
    def from_tensor(cls, sums: Float[Tensor, "5 K"]) -> TttCounters:
        """The inverse of `to_tensor`."""
        supervised, correct, hits, valid = (row.round().to(torch.int64) for row in sums[1:])
        return cls(loss_sums=sums[0].clone(), supervised=supervised, correct=correct, hits=hits, valid=valid)

    def step_losses(self) -> Float[Tensor, "K"]:
        """Mean loss of each step over its supervised slots; 0 where there are none."""
        return self.loss_sums / self.supervised.clamp(min=1)

    def accuracy(self) -> float:
        """Correct over supervised, all steps together; 0 when nothing is supervised."""
        return float(self.correct.sum()) / max(int(self.supervised.sum()), 1)

    def accept_length(self) -> float:
        """Simulated acceptance length, see `simulated_accept_length`."""
        return float(simulated_accept_length(self.hits, self.valid))
