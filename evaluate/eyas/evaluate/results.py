"""What an evaluation found, as text for a person and as JSON."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from eyas.evaluate.acceptance import Acceptance
from eyas.evaluate.config import EvaluateConfig
from eyas.evaluate.equality import Verdict
from eyas.evaluate.prompts import Prompt, PromptSet

__all__ = ["Evaluation", "PromptResult", "Setting"]

SHOWN_DIVERGENCES = 20
"""Printed at most; the JSON holds all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What ran, as resolved."""

    target: str
    draft: str
    family: str
    dtype: str
    device: str
    attention: str
    threads: int
    aux_layer_outputs: tuple[int, ...]
    draft_vocab_size: int
    vocab_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptResult:
    """One decoded prompt."""

    prompt: Prompt
    tokens: list[int]
    text: str
    accepted: list[int]
    """Accepted drafted tokens of each verification pass."""
    discarded: int
    inside_vocabulary: int
    """Of the tokens behind the first, those that the draft can say at all."""
    seconds: float
    """Of decoding with the draft, prefill included."""
    plain_seconds: float | None
    """Of plain decoding, prefill included; None when it was not run."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "id": self.prompt.prompt_id,
            "where": self.prompt.where,
            "prompt_tokens": len(self.prompt.input_ids),
            "tokens": self.tokens,
            "text": self.text,
            "accepted": self.accepted,
            "discarded": self.discarded,
            "seconds": self.seconds,
            "plain_seconds": self.plain_seconds,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """All prompts of one run."""

    config: EvaluateConfig
    setting: Setting
    prompts: PromptSet
    results: tuple[PromptResult, ...]
    verdict: Verdict | None
    """Comparison with plain decoding; None when it was not run."""

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance over all passes of all prompts."""
        return Acceptance.count((count for result in self.results for count in result.accepted), self.config.depth)

    @property
    def num_tokens(self) -> int:
        """Emitted tokens."""
        return sum(len(result.tokens) for result in self.results)

    @property
    def coverage(self) -> float | None:
        """Share of the target's tokens that the draft vocabulary holds: no draft over it accepts more often."""
        drafted = sum(len(result.tokens) - 1 for result in self.results)
        return sum(result.inside_vocabulary for result in self.results) / drafted if drafted else None

    @property
    def tokens_per_second(self) -> float:
        """Of decoding with the draft, prefill included."""
        return self.num_tokens / sum(result.seconds for result in self.results)

    @property
    def plain_tokens_per_second(self) -> float | None:
        """Of plain decoding, prefill included: it emits as many tokens."""
        seconds = [result.plain_seconds for result in self.results if result.plain_seconds is not None]
        return self.num_tokens / sum(seconds) if seconds else None

    @property
    def exit_code(self) -> int:
        """1 when equality is demanded and does not hold."""
        return int(self.verdict is not None and self.verdict.demanded and not self.verdict.holds)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        counts, plain = self.acceptance, self.plain_tokens_per_second
        return {
            "acceptance_length": counts.length,
            "decoding": {"mode": "chain", "acceptance": "greedy", "depth": self.config.depth},
            "passes": counts.passes,
            "accepted": counts.accepted,
            "accepted_per_position": list(counts.accepted_at),
            "acceptance_rate_per_position": counts.unconditional(),
            "conditional_acceptance_rate_per_position": counts.conditional(),
            "tokens": self.num_tokens,
            "tokens_discarded": sum(result.discarded for result in self.results),
            "draft_vocabulary_coverage": self.coverage,
            "tokens_per_second": self.tokens_per_second,
            "plain_tokens_per_second": plain,
            "speedup": self.tokens_per_second / plain if plain else None,
            "equal_to_plain": None if self.verdict is None else self._verdict(self.verdict),
            "setting": dataclasses.asdict(self.setting),
            "config": _plain_values(dataclasses.asdict(self.config)),
            "rows_read": self.prompts.rows_read,
            "rows_dropped": dict(self.prompts.dropped),
            "prompts": [result.as_dict() for result in self.results],
        }

    def _verdict(self, verdict: Verdict) -> dict[str, Any]:
        return {
            "holds": verdict.holds,
            "demanded": verdict.demanded,
            "tokens_compared": verdict.tokens,
            "divergences": [{**dataclasses.asdict(d), "excused": d.excused} for d in verdict.divergences],
        }

    def text(self) -> str:
        """Return the table that a person reads; the last line is the acceptance length."""
        lines = [
            *self._heading(),
            "",
            *self._positions(),
            "",
            *self._speeds(),
            "",
            *self._equality(),
            self._last_line(),
        ]
        return "\n".join(lines)

    def _heading(self) -> list[str]:
        setting, counts = self.setting, self.acceptance
        layers = ", ".join(map(str, setting.aux_layer_outputs))
        dropped = "".join(f"; {count} {reason}" for reason, count in sorted(self.prompts.dropped.items()))
        coverage = "n/a" if self.coverage is None else f"{self.coverage:.1%}"
        return [
            f"target   {setting.target} ({setting.dtype}, {setting.attention}, {setting.device}, "
            f"{setting.threads} threads)",
            f"draft    {setting.draft} ({setting.family}, outputs of layers {layers})",
            f"vocab    {setting.draft_vocab_size:,} of {setting.vocab_size:,} ids, {coverage} of the target's tokens",
            f"prompts  {len(self.results)} of {self.prompts.rows_read} rows read{dropped}",
            f"decoded  {self.num_tokens:,} tokens, {counts.passes:,} verification passes",
        ]

    def _positions(self) -> list[str]:
        counts = self.acceptance
        rows = zip(counts.accepted_at, counts.unconditional(), counts.conditional(), strict=True)
        lines = ["position  accepted  of all passes  of passes that accepted the position before"]
        return lines + [
            f"{position:>8}  {accepted:>8,}  {_share(of_all):>13}  {_share(of_before):>13}"
            for position, (accepted, of_all, of_before) in enumerate(rows, 1)
        ]

    def _speeds(self) -> list[str]:
        speed, plain = self.tokens_per_second, self.plain_tokens_per_second
        lines = ["decoding     tokens/s (prefill included)"]
        if plain:
            lines.append(f"plain      {plain:>10.1f}")
        return [*lines, f"with draft {speed:>10.1f}" + (f"  ({speed / plain:.2f} x plain)" if plain else "")]

    def _equality(self) -> list[str]:
        verdict = self.verdict
        if verdict is None:
            return ["equal to plain greedy decoding: not checked"]
        found, tokens = verdict.divergences, f"{verdict.tokens:,} tokens of {len(self.results)} prompts"
        if not found:
            return [f"equal to plain greedy decoding: yes, all {tokens}"]
        excused = sum(divergence.excused for divergence in found)
        answer = "yes" if verdict.holds else "NO"
        if not verdict.demanded:
            answer = f"not demanded in {self.setting.dtype}"
        lines = [
            f"equal to plain greedy decoding: {answer}; {len(found)} of {tokens} diverge, {excused} at a tie of the "
            "target's logits"
        ]
        lines += [f"  {divergence}" for divergence in found[:SHOWN_DIVERGENCES]]
        hidden = len(found) - SHOWN_DIVERGENCES
        return lines + ([f"  and {hidden} more, all of them in the JSON of --out"] if hidden > 0 else [])

    def _last_line(self) -> str:
        length = self.acceptance.length
        shown = "n/a" if length is None else f"{length:.2f}"
        return f"acceptance length: {shown} (chain, greedy, depth {self.config.depth})"


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"


def _plain_values(config: dict[str, Any]) -> dict[str, Any]:
    plain = (str, int, float, bool, tuple, type(None))
    return {name: value if isinstance(value, plain) else str(value) for name, value in config.items()}
