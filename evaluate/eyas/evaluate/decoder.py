"""The reference decoder: greedy decoding, plain and with a drafted chain.

Both emit the same tokens: a drafted token is kept only where it is the target's own greedy choice, and behind the kept
ones comes the target's next token, which the verification pass gives for free (the bonus token).

One verification pass with depth K: the target reads the last emitted token and K drafted ones and so gives its greedy
choice after each of the K + 1. The longest prefix of drafted tokens that equals these choices is accepted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from eyas.evaluate.drafter import Drafter
from eyas.evaluate.target import DecodingTarget, roll_back

__all__ = ["ChainOutput", "Stop", "count_accepted", "decode_chain", "decode_plain"]


@dataclass(frozen=True, slots=True)
class Stop:
    """When an answer ends."""

    eos_ids: frozenset[int]
    """Ends an answer, as its last token."""
    max_new_tokens: int

    def length(self, tokens: Sequence[int], *, fresh: int) -> int | None:
        """Return how many of the emitted `tokens` belong to the answer, or None while it goes on.

        Only the last `fresh` tokens are looked at: the ones before ended nothing.
        """
        for index in range(max(len(tokens) - fresh, 0), len(tokens)):
            if tokens[index] in self.eos_ids or index + 1 == self.max_new_tokens:
                return index + 1
        return None


@dataclass(frozen=True, slots=True)
class ChainOutput:
    """What decoding with a drafted chain gave."""

    tokens: list[int]
    """The answer, cut exactly where plain decoding ends."""
    accepted: list[int]
    """Accepted drafted tokens of each verification pass, counted as verified, before the answer is cut."""
    discarded: int
    """Verified tokens behind the end of the answer."""


@torch.inference_mode()
def decode_plain(target: DecodingTarget, prompt: Int[Tensor, " T"], stop: Stop) -> list[int]:
    """Return the greedy answer of the target alone."""
    cache = target.new_cache()
    tokens: list[int] = []
    ids = prompt
    while stop.length(tokens, fresh=1) is None:
        ids = target.forward(ids, cache, logit_rows=1).greedy()
        tokens += ids.tolist()
    return tokens


@torch.inference_mode()
def decode_chain(
    target: DecodingTarget, drafter: Drafter, prompt: Int[Tensor, " T"], stop: Stop, *, depth: int
) -> ChainOutput:
    """Return the same answer, decoded with `depth` drafted tokens for each pass of the target.

    Every pass drafts and verifies the full depth, also when fewer tokens are wanted, as serving engines do: otherwise
    the end of an answer would count against the draft.
    """
    cache = target.new_cache()
    drafter.begin()
    step = target.forward(prompt, cache, logit_rows=1)
    fresh = step.greedy()
    tokens, accepted = fresh.tolist(), []
    confirmed, next_ids = step.aux_hidden_states, torch.cat((prompt[1:], fresh))
    end = stop.length(tokens, fresh=1)
    while end is None:
        drafted = drafter.propose(confirmed, next_ids, depth)
        step = target.forward(torch.cat((fresh[-1:], drafted)), cache, logit_rows=depth + 1)
        choices = step.greedy()
        matches = count_accepted(drafted, choices)
        roll_back(cache, depth - matches)
        # The accepted tokens are the target's choices, and so is the bonus token behind them.
        fresh = next_ids = choices[: matches + 1]
        confirmed = step.aux_hidden_states[: matches + 1]
        tokens += fresh.tolist()
        accepted.append(matches)
        end = stop.length(tokens, fresh=matches + 1)
    return ChainOutput(tokens[:end], accepted, len(tokens) - end)


def count_accepted(drafted: Int[Tensor, " K"], choices: Int[Tensor, " K1"]) -> int:
    """Return the length of the longest prefix of `drafted` that equals the target's choices; K1 = K + 1."""
    return int((drafted == choices[:-1]).cumprod(dim=0).sum())
