"""Prompts from chat files: what a server would hand to the target, by the tokenizer's own template."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from eyas.evaluate.errors import PromptError
from eyas.pipeline.chat import ChatEncoder, ChatRefused
from eyas.pipeline.conversations import Conversation, Dropped, read_conversations

__all__ = ["Prompt", "PromptSet", "read_prompts"]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of T tokens, T >= 1."""

    prompt_id: str
    """The conversation's id."""
    where: str
    """Source file and line."""
    input_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PromptSet:
    """The usable prompts, and why other rows that were read are not among them."""

    prompts: tuple[Prompt, ...]
    rows_read: int
    dropped: Mapping[str, int]
    """Rows by reason."""


class _Unusable(Exception):
    """The reason for which a row gives no prompt; never leaves this module."""


def read_prompts(
    sources: tuple[str, ...],
    encoder: ChatEncoder,
    *,
    longest: int,
    split: str = "train",
    limit: int | None = None,
) -> PromptSet:
    """Read the first `limit` prompts (None: all) of at most `longest` tokens, each rendered by `encoder`.

    Raises:
        DataError: a source cannot be opened.
        PromptError: no row gives a prompt.
    """
    prompts: list[Prompt] = []
    dropped: Counter[str] = Counter()
    for outcome in _outcomes(sources, encoder, longest, split):
        if isinstance(outcome, Prompt):
            prompts.append(outcome)
        else:
            dropped[outcome] += 1
        if len(prompts) == limit:
            break
    if not prompts:
        reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.most_common()) or "they hold no rows"
        raise PromptError(
            f"{', '.join(sources)}: no row gives a prompt ({reasons}); expected chats with a user turn and at most "
            f"{longest} prompt tokens, in the formats of eyas precompute"
        )
    return PromptSet(tuple(prompts), len(prompts) + dropped.total(), dict(dropped))


def _outcomes(sources: tuple[str, ...], encoder: ChatEncoder, longest: int, split: str) -> Iterator[Prompt | str]:
    """Yield the prompt of each row, or the reason it has none."""
    for row in read_conversations(sources, split=split, need_answer=False):
        if isinstance(row, Dropped):
            yield row.reason
            continue
        try:
            yield Prompt(row.conversation_id, row.where, _prompt_ids(row, encoder, longest))
        except (_Unusable, ChatRefused) as reason:
            yield str(reason)


def _prompt_ids(chat: Conversation, encoder: ChatEncoder, longest: int) -> tuple[int, ...]:
    """Return the ids of a chat up to its last user turn, with the generation prompt."""
    users = [index for index, message in enumerate(chat.messages) if message["role"] == "user"]
    if not users:
        raise _Unusable("no_user_turn")
    ids = tuple(encoder.prompt(chat, users[-1] + 1))
    if not ids or len(ids) > longest:
        raise _Unusable("too_long" if ids else "empty_prompt")
    return ids
