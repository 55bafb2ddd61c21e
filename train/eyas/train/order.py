"""The order in which a run sees its samples: a pure function, so that every rank and every resumed run agrees.

An epoch is a list of packs (micro-batches of whole documents, at most `tokens` long) and a global batch is
`micro_batches` consecutive packs. The order is computed over the full plan; rows that are absent (not captured, or
quarantined) are dropped afterwards, so the step count never depends on what a store happens to hold today. Held-out
rows never enter. Position in a run is (epoch, step), whatever the number of ranks.

Nothing here draws from a library's random generator: the shuffle sorts rows by a SplitMix64 key, which is the same
on every machine and in every version.
"""

import hashlib
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ORDER_VERSION = 1
# Rows are packed inside a window of this many packs' worth of tokens: large enough for small waste, small enough
# that the shuffle, not the lengths, decides which documents meet in a global batch.
WINDOW_PACKS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOrder:
    """One epoch: pack p holds plan rows `rows[offsets[p]:offsets[p + 1]]`; absent ones are never handed out."""

    rows: np.ndarray
    """int64 [n]: every training row of the plan, once."""
    offsets: np.ndarray
    """int64 [packs + 1], ascending."""
    available: np.ndarray
    """bool over plan rows: what the store can give."""
    micro_batches: int
    """Packs in one global batch; the last one of an epoch may hold fewer."""
    digest: str
    """Hex digest of rows and offsets: a checkpoint of another order does not resume."""

    @property
    def num_packs(self) -> int:
        """Packs of the epoch, those included whose every row is absent."""
        return len(self.offsets) - 1

    @property
    def num_steps(self) -> int:
        """Global batches of the epoch: equal on every rank, at every world size."""
        return -(-self.num_packs // self.micro_batches)

    def pack(self, index: int) -> np.ndarray:
        """Return the available plan rows of one pack, int64, possibly none."""
        rows = self.rows[self.offsets[index] : self.offsets[index + 1]]
        return rows[self.available[rows]]

    def global_batch(self, step: int) -> list[np.ndarray]:
        """Return the packs of global batch `step` (0-based within the epoch)."""
        first = step * self.micro_batches
        return [self.pack(index) for index in range(first, min(first + self.micro_batches, self.num_packs))]

    def deal(self, step: int, *, rank: int, world_size: int) -> list[np.ndarray]:
        """Return this rank's packs of a global batch: the same number on every rank, empty packs filling the tail.

        An empty pack gives a zero loss that touches every parameter, so no rank waits for another.
        """
        packs = self.global_batch(step)
        packs += [np.zeros(0, np.int64)] * (-len(packs) % world_size)
        return packs[rank::world_size]


def epoch_order(
    *,
    plan_digests: Sequence[str],
    lengths: np.ndarray,
    heldout: np.ndarray,
    available: np.ndarray,
    seed: int,
    epoch: int,
    tokens: int,
    micro_batches: int,
) -> EpochOrder:
    """Order one epoch of a plan.

    Args:
        plan_digests: Digests of the plans that `lengths` covers; another plan gives another order.
        lengths: Tokens of every plan row, [n].
        heldout: Rows that are never trained on, bool [n].
        available: Rows that the store can give, bool [n]; absent ones leave gaps, they move nothing.
        seed: Of the shuffle.
        epoch: 0-based; every epoch has a shuffle of its own.
        tokens: Token budget of a pack. A document longer than this gets a pack of its own, uncut.
        micro_batches: Packs in one global batch.
    """
    key = _key(*plan_digests, str(ORDER_VERSION), str(seed), str(epoch))
    train = np.flatnonzero(~heldout).astype(np.int64)
    shuffled = train[np.argsort(_splitmix64(train.astype(np.uint64), key), kind="stable")]
    packs = _pack(shuffled, lengths, tokens)
    dealt = np.argsort(_splitmix64(np.arange(len(packs), dtype=np.uint64), key ^ np.uint64(1)), kind="stable")
    packs = [packs[index] for index in dealt]
    rows = np.array([row for pack in packs for row in pack], np.int64)
    offsets = np.cumsum([0, *map(len, packs)], dtype=np.int64)
    return EpochOrder(
        rows=rows,
        offsets=offsets,
        available=available,
        micro_batches=micro_batches,
        digest=_digest(rows, offsets, micro_batches),
    )


def sequential_packs(rows: np.ndarray, lengths: np.ndarray, tokens: int) -> list[np.ndarray]:
    """Pack rows in the order given, closing a pack when the next document does not fit: the order of evaluation."""
    packs: list[list[int]] = []
    room = -1
    for row in rows.tolist():
        length = int(lengths[row])
        if length > room:
            packs.append([])
            room = tokens
        packs[-1].append(row)
        room -= length
    return [np.array(pack, np.int64) for pack in packs]


def _pack(shuffled: np.ndarray, lengths: np.ndarray, tokens: int) -> list[list[int]]:
    """Best-fit decreasing inside windows of the shuffled rows; ties keep the shuffled order."""
    row_tokens = lengths[shuffled].astype(np.int64)
    window = np.cumsum(row_tokens) // (WINDOW_PACKS * tokens)
    packs: list[list[int]] = []
    for start, stop in zip(*_runs(window), strict=True):
        longest_first = start + np.argsort(-row_tokens[start:stop], kind="stable")
        packs += _best_fit(shuffled[longest_first].tolist(), row_tokens[longest_first].tolist(), tokens)
    return packs


def _runs(values: np.ndarray) -> tuple[list[int], list[int]]:
    """Starts and stops of the runs of equal values."""
    if not len(values):
        return [], []
    starts = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist()]
    return starts, [*starts[1:], len(values)]


def _best_fit(rows: list[int], row_tokens: list[int], tokens: int) -> list[list[int]]:
    """Put each row where it leaves the least room; a row that fits nowhere opens a pack."""
    packs: list[list[int]] = []
    open_packs: list[tuple[int, int]] = []  # (room left, pack), ascending
    for row, length in zip(rows, row_tokens, strict=True):
        at = bisect_left(open_packs, (length, -1))
        if at == len(open_packs):
            packs.append([row])
            room, pack = tokens - length, len(packs) - 1
        else:
            room, pack = open_packs.pop(at)
            packs[pack].append(row)
            room -= length
        if room > 0:
            insort(open_packs, (room, pack))
    return packs


def _key(*parts: str) -> np.uint64:
    return np.uint64(int.from_bytes(hashlib.blake2b("\n".join(parts).encode(), digest_size=8).digest(), "little"))


def _splitmix64(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """SplitMix64 of (value, key), uint64: a bijection of the value for each key, so two rows never tie.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), the mixing function.
    """
    with np.errstate(over="ignore"):
        mixed = values * np.uint64(0x9E3779B97F4A7C15) + key
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def _digest(rows: np.ndarray, offsets: np.ndarray, micro_batches: int) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    for array in (rows, offsets, np.array([micro_batches], np.int64)):
        hashed.update(array.astype("<i8").tobytes())
    return hashed.hexdigest()
