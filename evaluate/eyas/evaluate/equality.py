"""Is speculative output equal to plain greedy decoding, token for token?

The target sees K + 1 tokens at once in one and a single token in the other, so float32 sums differ in their last bits.
Where two logits all but tie, that may decide. Such a divergence is excused, and the rest of the answer is compared with
plain decoding along the path that was taken.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from eyas.evaluate.decoder import Stop
from eyas.evaluate.target import DecodingTarget

__all__ = ["EXCUSED_MARGIN", "TOKENS_PER_EXCUSE", "Divergence", "Verdict", "find_divergences"]

EXCUSED_MARGIN = 1e-4
"""Logits closer than this are a tie that rounding may decide."""
TOKENS_PER_EXCUSE = 1000
"""At most one excused token for each thousand compared, begun thousands included."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """One place where the emitted token is not plain decoding's."""

    prompt_id: str
    index: int
    """Position in the answer, from 0."""
    expected: int | None
    """Plain decoding's token; None: the answer should have ended."""
    found: int | None
    """The emitted token; None: the answer ended early."""
    margin: float | None
    """Plain decoding's logit of its own token minus that of the emitted one; None where there is no such pair."""

    @property
    def excused(self) -> bool:
        """Whether rounding alone explains it."""
        return self.margin is not None and self.margin < EXCUSED_MARGIN

    def __str__(self) -> str:
        margin = "no margin" if self.margin is None else f"logit margin {self.margin:.2g}"
        where = f"prompt {self.prompt_id}, token {self.index}"
        return f"{where}: {self.found}, plain decoding gives {self.expected} ({margin})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome over all prompts."""

    tokens: int
    """Emitted tokens that were compared."""
    divergences: tuple[Divergence, ...]
    demanded: bool
    """Whether a failure fails the run: in float32."""

    @property
    def holds(self) -> bool:
        """Whether every divergence is excused and there are few of them."""
        allowed = -(-self.tokens // TOKENS_PER_EXCUSE)
        return all(divergence.excused for divergence in self.divergences) and len(self.divergences) <= allowed

    @classmethod
    def of(cls, tokens: int, found: Iterable[Divergence], *, demanded: bool) -> "Verdict":
        """Return the verdict on `tokens` compared tokens."""
        return cls(tokens, tuple(found), demanded)


def find_divergences(
    target: DecodingTarget,
    prompt_id: str,
    prompt: Int[Tensor, " T"],
    plain: Sequence[int],
    emitted: Sequence[int],
    stop: Stop,
) -> list[Divergence]:
    """Return every place where `emitted` is not what plain decoding would have emitted there."""
    if list(plain) == list(emitted):
        return []
    end = stop.length(emitted, fresh=len(emitted))
    found = _replay(target, prompt_id, prompt, emitted[:end])
    if end != len(emitted):
        found.append(_difference(prompt_id, plain, emitted, len(emitted) if end is None else end))
    return found or [_difference(prompt_id, plain, emitted, _first_difference(plain, emitted))]


@torch.inference_mode()
def _replay(
    target: DecodingTarget, prompt_id: str, prompt: Int[Tensor, " T"], emitted: Sequence[int]
) -> list[Divergence]:
    """Decode plainly along `emitted`: the same passes as plain decoding up to the first divergence."""
    cache = target.new_cache()
    ids, found = prompt, []
    for index, token in enumerate(emitted):
        logits = target.forward(ids, cache, logit_rows=1).logits[0]
        best = int(logits.argmax())
        if best != token:
            found.append(Divergence(prompt_id, index, best, token, float(logits[best] - logits[token])))
        ids = torch.tensor([token], device=prompt.device)
    return found


def _first_difference(plain: Sequence[int], emitted: Sequence[int]) -> int:
    pairs = zip(plain, emitted, strict=False)
    return next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(emitted)))


def _difference(prompt_id: str, plain: Sequence[int], emitted: Sequence[int], index: int) -> Divergence:
    """A wrong end, or plain decoding that did not repeat itself: never excused."""
    expected = plain[index] if index < len(plain) else None
    found = emitted[index] if index < len(emitted) else None
    return Divergence(prompt_id, index, expected, found, None)
