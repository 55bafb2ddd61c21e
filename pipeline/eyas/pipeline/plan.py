"""Plan a capture: every row of the sources to samples in shards, with books that balance.

A pure function of the data, the tokenizer and the settings that shape samples: no clock, no worker count, no order of
arrival. Two runs over the same rows give the same bytes; two swapped lines give another plan.

    rows_read    = rows_kept + sum(dropped)
    samples_made = samples + duplicates + sum(dropped_samples)
"""

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import xxhash

from eyas.cache_format.plan import Plan, build_plan
from eyas.cache_format.samples import PlannedSample
from eyas.cache_format.vocab import VocabMap, choose_draft_vocab
from eyas.pipeline.chat import ChatEncoder, ChatRefused, EncodedChat, truncate
from eyas.pipeline.config import DEFAULT_DRAFT_VOCAB_SIZE, PrecomputeConfig
from eyas.pipeline.conversations import Conversation, Dropped, read_conversations
from eyas.pipeline.errors import DataError

__all__ = ["PlannedData", "count_supervised", "cut_shards", "is_heldout", "plan_capture"]

_log = logging.getLogger(__name__)
_SHOWN_ROWS = 3
"""Rows named per reason in the log; the books hold the counts."""


@dataclass(frozen=True)
class PlannedData:
    """What the plan stage hands on."""

    plan: Plan
    shards: list[list[PlannedSample]]
    token_counts: np.ndarray
    """int64 [V]: supervised tokens of the training split."""
    vocab: VocabMap
    """The default draft vocabulary."""
    coverage: float
    """Share of the training split's supervised tokens inside the draft vocabulary."""


@dataclass
class _Books:
    rows_read: int = 0
    rows_kept: int = 0
    samples_made: int = 0
    duplicates: int = 0
    truncated: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_samples: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    def drop_row(self, where: str, reason: str) -> None:
        self.dropped[reason] += 1
        if self.dropped[reason] <= _SHOWN_ROWS:
            _log.warning("%s: row dropped: %s", where, reason)

    def note(self, where: str, name: str) -> None:
        self.notes[name] += 1
        if self.notes[name] == 1:
            _log.warning("%s: %s", where, _NOTES.get(name.partition(":")[0], name).format(name.partition(":")[2]))

    def closed(self, samples: int) -> dict[str, Any]:
        """Return the books as plain values, checked."""
        assert self.rows_read == self.rows_kept + sum(self.dropped.values())
        assert self.samples_made == samples + self.duplicates + sum(self.dropped_samples.values())
        counters = ("dropped", "dropped_samples", "notes")
        numbers = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in counters}
        reasons = {name: {k: n for k, n in sorted(getattr(self, name).items()) if n} for name in counters}
        return {**numbers, "samples": samples, **reasons}


_NOTES = {
    "assistant_first": "the conversation begins with the assistant; see --assistant-first",
    "special_tokens_in_content": "a turn that the assistant did not write holds special tokens; its loss mask stays 0",
    "not_printed": "the chat template does not print the message field {!r}; the target will not see it",
}


def plan_capture(
    config: PrecomputeConfig, encoder: ChatEncoder, *, vocab_size: int, always_keep: Iterable[int]
) -> PlannedData:
    """Read, encode, filter, split, cut and count.

    Args:
        config: the command's configuration.
        encoder: the target's tokenizer and template.
        vocab_size: V, rows of the target's head.
        always_keep: ids that every draft vocabulary holds (eos, end of turn).

    Raises:
        DataError: no usable row, a token outside the target's vocabulary, or an unknown role with `error` chosen.
        ConfigError: the draft vocabulary is larger than the target's.
    """
    books = _Books()
    samples = list(_unique(_samples(config, encoder, books, vocab_size), books))
    if not samples:
        reasons = ", ".join(f"{n} {reason}" for reason, n in (books.dropped + books.dropped_samples).most_common())
        raise DataError(
            f"{' '.join(config.chats)}: none of {books.rows_read} rows can be used ({reasons or 'no rows'}); a row "
            "needs `messages` (OpenAI) or `conversations` (ShareGPT) with an answer of the assistant"
        )
    shards = cut_shards(samples, config.shard_tokens)
    counts = count_supervised(samples, vocab_size)
    size = min(DEFAULT_DRAFT_VOCAB_SIZE, vocab_size) if config.draft_vocab_size is None else config.draft_vocab_size
    vocab = choose_draft_vocab(counts, size, always_keep)
    coverage = float(counts[vocab.ids].sum() / max(1, counts.sum()))
    return PlannedData(build_plan(shards, books.closed(len(samples))), shards, counts, vocab, coverage)


def _samples(config: PrecomputeConfig, encoder: ChatEncoder, books: _Books, vocab_size: int) -> Iterator[PlannedSample]:
    rows = read_conversations(config.chats, split=config.split)
    for outcome in islice(rows, config.limit):
        books.rows_read += 1
        if isinstance(outcome, Dropped):
            if outcome.reason.startswith("unknown_role") and config.unknown_role == "error":
                raise DataError(
                    f"{outcome.where}: {outcome.reason}; map the role in the data or use --unknown-role drop"
                )
            books.drop_row(outcome.where, outcome.reason)
            continue
        yield from _row_samples(config, encoder, books, outcome, vocab_size)


def _row_samples(
    config: PrecomputeConfig, encoder: ChatEncoder, books: _Books, chat: Conversation, vocab_size: int
) -> Iterator[PlannedSample]:
    """Yield the samples of one row; a row without any is dropped and counted."""
    try:
        chat, notes = _leading_assistant(config, chat)
        encoded = encoder.encode(chat)
        notes += encoder.notes(chat)
    except ChatRefused as refusal:
        books.drop_row(chat.where, str(refusal))
        return
    kept = [
        sample for sample in (_bounded(config, books, sample) for sample in encoded) if isinstance(sample, EncodedChat)
    ]
    too_long = "truncated_before_answer" if config.over_long == "truncate" else "over_long"
    if not kept:
        books.drop_row(chat.where, too_long)
        return
    for name in notes:
        books.note(chat.where, name)
    books.rows_kept += 1
    books.samples_made += len(encoded)
    books.dropped_samples[too_long] += len(encoded) - len(kept)
    for sample in kept:
        _check_ids(sample, chat, encoder, vocab_size)
        heldout = is_heldout(chat.conversation_id, config.heldout_fraction)
        yield PlannedSample(
            chat.conversation_id,
            chat.source,
            chat.source_row,
            heldout,
            sample.input_ids,
            sample.loss_mask,
            sample.spans,
        )


def _leading_assistant(config: PrecomputeConfig, chat: Conversation) -> tuple[Conversation, list[str]]:
    """Apply the policy for a conversation whose first turn after the system turns is the assistant's; note it."""
    roles = [message["role"] for message in chat.messages]
    first = next((i for i, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    if first == len(roles) or roles[first] != "assistant":
        return chat, []
    if config.assistant_first == "drop":
        raise ChatRefused("assistant_first")
    if config.assistant_first == "trim":
        end = next((i for i in range(first, len(roles)) if roles[i] != "assistant"), len(roles))
        chat = replace(chat, messages=chat.messages[:first] + chat.messages[end:])
    return chat, ["assistant_first"]


def _bounded(config: PrecomputeConfig, books: _Books, sample: EncodedChat) -> EncodedChat | None:
    if len(sample.input_ids) <= config.max_length:
        return sample
    if config.over_long == "drop":
        return None
    cut = truncate(sample, config.max_length)
    if not cut.loss_mask.any():
        return None
    books.truncated += 1
    return cut


def _check_ids(sample: EncodedChat, chat: Conversation, encoder: ChatEncoder, vocab_size: int) -> None:
    worst = int(sample.input_ids.max())
    if worst >= vocab_size:
        raise DataError(
            f"{chat.where}: token {worst} ({encoder.tokenizer.convert_ids_to_tokens(worst)!r}) is outside the target's "
            f"vocabulary of {vocab_size}; tokenizer and model do not belong together"
        )


def _unique(samples: Iterable[PlannedSample], books: _Books) -> Iterator[PlannedSample]:
    """Yield each sample once: equal ids and mask give equal states, so a second capture would be waste."""
    seen: set[bytes] = set()
    for sample in samples:
        key = sample.sample_id
        if key in seen:
            books.duplicates += 1
            continue
        seen.add(key)
        yield sample


def is_heldout(conversation_id: str, fraction: float) -> bool:
    """Return whether a conversation belongs to the held-out split: its hash, as a number in [0, 1), lies below."""
    return xxhash.xxh3_64_intdigest(conversation_id.encode()) < int(fraction * 2**64)


def cut_shards(samples: Iterable[PlannedSample], shard_tokens: int) -> list[list[PlannedSample]]:
    """Deal samples to shards of at most `shard_tokens` tokens, in source order; a longer sample is a shard alone.

    Inside a shard, rows run from long to short (ties by sample id), so that capture batches of neighbours hold little
    padding and rows are written in plan order.
    """
    shards: list[list[PlannedSample]] = []
    room = 0
    for sample in samples:
        length = len(sample.input_ids)
        if not shards or length > room:
            shards.append([])
            room = shard_tokens
        shards[-1].append(sample)
        room -= length
    return [sorted(shard, key=lambda s: (-len(s.input_ids), s.sample_id)) for shard in shards]


def count_supervised(samples: Iterable[PlannedSample], vocab_size: int) -> np.ndarray:
    """Return int64 [V]: how often each id is supervised in the training split."""
    counts = np.zeros(vocab_size, np.int64)
    for sample in samples:
        if not sample.heldout:
            np.add.at(counts, sample.input_ids[sample.loss_mask == 1], 1)
    return counts
