"""Quality on the held-out split, from the store alone: loss, accuracy by depth, simulated acceptance length."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from eyas.train.metrics import TttCounters, simulated_accept_length


@dataclass(frozen=True, kw_only=True, slots=True)
class DraftMetrics:
    """What the counters of any number of micro-batches say; None stands for "n/a": nothing was supervised."""

    loss: float | None
    """Weighted mean over TTT steps of the mean loss of each step: the training objective."""
    accuracy: list[float | None]
    """By depth: the draft's argmax equals the target's, over supervised slots inside the draft vocabulary."""
    accept_length: float | None
    """Simulated acceptance length of a greedy chain as deep as the TTT steps, in [1, 1 + ttt_steps]."""
    accept_length_depth3: float | None
    """The same for a chain of depth 3, comparable between runs of other ttt_steps."""
    supervised: int
    """Supervised slots at the first step."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as they are logged and stored."""
        return asdict(self)


def draft_metrics(counters: TttCounters, *, decay: float) -> DraftMetrics:
    """Return the metrics of summed counters; depths without a supervised slot are n/a, never 0 or NaN."""
    supervised = counters.supervised.tolist()
    correct, losses = counters.correct.tolist(), counters.step_losses().tolist()
    weights = [decay**k for k in range(len(supervised))]
    nothing = supervised[0] == 0
    return DraftMetrics(
        loss=None if nothing else sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights),
        accuracy=[c / n if n else None for c, n in zip(correct, supervised, strict=True)],
        accept_length=_accept_length(counters, len(supervised)),
        accept_length_depth3=_accept_length(counters, min(3, len(supervised))),
        supervised=supervised[0],
    )


def sum_counters(parts: Iterable[TttCounters], ttt_steps: int) -> TttCounters:
    """Return the sum of the counters of many micro-batches, on the CPU."""
    total = TttCounters.zeros(ttt_steps)
    for part in parts:
        total.add(TttCounters.from_tensor(part.to_tensor().cpu()))
    return total


def _accept_length(counters: TttCounters, depth: int) -> float | None:
    if int(counters.valid[0]) == 0:
        return None
    return float(simulated_accept_length(counters.hits[:depth], counters.valid[:depth]))
