"""What proposes tokens: a chain drafted by EAGLE-3, behind the small interface that the decoder needs."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from eyas.train.drafts.eagle3 import Eagle3Draft

__all__ = ["Drafter", "Eagle3Drafter"]


@runtime_checkable
class Drafter(Protocol):
    """Proposes the next tokens of one sequence at a time."""

    def begin(self) -> None:
        """Forget the last sequence."""
        ...

    def propose(
        self, aux_hidden_states: Float[Tensor, "n AH"], next_ids: Int[Tensor, " n"], depth: int
    ) -> Int[Tensor, " K"]:
        """Take n positions that the target has confirmed since the last call, and draft `depth` = K further tokens.

        `aux_hidden_states`: the target's captured states of those positions. `next_ids`: the token after each; the
        drafted tokens continue behind the last. All ids are the target's.
        """
        ...


class Eagle3Drafter:
    """A greedy chain: the draft runs on the target's states where there are any, then on its own, as in training.

    The slot of position t reads the token at t + 1. Chain step k of a chain that starts at slot t has the rotary
    position t + k, and sees the confirmed slots and the chain's earlier steps.
    """

    def __init__(self, draft: Eagle3Draft) -> None:
        self.draft = draft
        self.vocab_ids = draft.draft_vocab_ids
        self.begin()

    def begin(self) -> None:
        """Start with an empty cache."""
        self._cache = self.draft.new_cache()
        self._confirmed = 0

    def propose(
        self, aux_hidden_states: Float[Tensor, "n AH"], next_ids: Int[Tensor, " n"], depth: int
    ) -> Int[Tensor, " K"]:
        """Replace the last chain's entries by the confirmed positions, then draft."""
        self._cache.rollback(self._confirmed)
        features = self.draft.project_hidden_states(aux_hidden_states)
        positions = torch.arange(self._confirmed, self._confirmed + len(next_ids), device=next_ids.device)
        state = self.draft.extend(features, next_ids, positions, self._cache)[-1:]
        self._confirmed += len(next_ids)
        drafted = [self._likeliest(state)]
        for position in range(self._confirmed, self._confirmed + depth - 1):
            at = torch.tensor([position], device=next_ids.device)
            state = self.draft.extend(state, drafted[-1], at, self._cache)
            drafted.append(self._likeliest(state))
        return torch.cat(drafted)

    def _likeliest(self, state: Float[Tensor, "1 H"]) -> Int[Tensor, "1"]:
        return self.vocab_ids[self.draft.compute_logits(state).argmax(dim=-1)]
