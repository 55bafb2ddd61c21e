"""Turn a conversation into token ids and a loss mask, by the tokenizer's own chat template.

The mask of an assistant turn j is found on what the template itself prints:

    {% generation %} block   the tokens that start inside the block, when the template marks assistant text
    prefix rendering         what render(turns[:j+1]) adds to render(turns[:j] + generation prompt)

Both end with the first eos token of the generation config, so template text after it is never supervised. No pattern is
searched in text: a user who types the template's own markers changes nothing but their own turn. When the rendering of
the whole conversation does not begin with the rendering up to each turn, the template rewrites history; then every
assistant turn becomes a sample of its own, rendered as it is served.
"""

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from transformers.utils.chat_template_utils import render_jinja_template

from eyas.cache_format.samples import Span
from eyas.pipeline.conversations import Conversation
from eyas.pipeline.errors import DataError

__all__ = ["ChatEncoder", "ChatRefused", "EncodedChat", "truncate"]

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SAYING_FIELDS = ("content", "tool_calls", "reasoning_content", "reasoning", "thinking")
_TEXT_ROLES = ("user", "tool", "function", "system", "developer")


class ChatRefused(Exception):
    """One conversation cannot be encoded; the message is the reason used in the books."""


@dataclass(frozen=True, slots=True)
class EncodedChat:
    """One sample: T tokens."""

    input_ids: np.ndarray
    """uint32 [T]."""
    loss_mask: np.ndarray
    """uint8 [T], 1 where the assistant wrote the token."""
    spans: tuple[Span, ...]
    """Turns in order, template text included; the supervised part of an assistant turn is where the mask is 1."""


@dataclass(frozen=True, slots=True)
class _Rendered:
    text: str
    ids: list[int]
    starts: list[int] | None
    """Character at which each token starts, when the tokenizer knows."""
    blocks: list[tuple[int, int]]
    """Character ranges of {% generation %} blocks."""


class ChatEncoder:
    """Encodes conversations with one tokenizer, its chat template and fixed template switches."""

    def __init__(self, tokenizer: Any, *, eos_ids: Sequence[int], switches: dict[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.switches = dict(switches or {})
        try:
            self.template: str = tokenizer.get_chat_template()
        except ValueError as error:
            raise DataError(
                f"the tokenizer of {tokenizer.name_or_path} has no chat template; add chat_template.jinja to the target"
            ) from error
        self.marks_generation = bool(_GENERATION_BLOCK.search(self.template)) and tokenizer.is_fast
        self._specials = [token for token in tokenizer.all_special_tokens if token]

    # -- the public story ------------------------------------------------------------------------------------------

    def encode(self, chat: Conversation) -> list[EncodedChat]:
        """Return the samples of one conversation: one, or one per assistant turn when the template rewrites history.

        Assistant turns before the first user turn, and empty ones, are context with mask 0.

        Raises:
            ChatRefused: the template refuses the conversation, or no assistant turn can be found in what it prints.
        """
        turns = list(_supervised_turns(chat.messages))
        if not turns:
            raise ChatRefused("empty_answer")
        whole = self._render(chat, len(chat.messages))
        masked = [self._mask_turn(chat, turn, whole) for turn in turns]
        if all(_is_prefix(rendered.ids, mask, whole.ids) for rendered, mask in masked):
            return [self._sample(chat, len(chat.messages), whole, _union(whole.ids, masked))]
        return [self._sample(chat, turn + 1, *pair) for turn, pair in zip(turns, masked, strict=True)]

    def prompt(self, chat: Conversation, count: int) -> list[int]:
        """Return the ids that a server hands to the target after the first `count` turns: what an answer follows.

        Raises:
            ChatRefused: the template refuses the conversation.
        """
        return self._render(chat, count, generation_prompt=True).ids

    def notes(self, chat: Conversation) -> list[str]:
        """Return what a user should know about a conversation that is kept, by the names used in the books."""
        found = []
        texts = [message["content"] for message in chat.messages if message["role"] in _TEXT_ROLES]
        if any(token in text for text in texts for token in self._specials):
            found.append("special_tokens_in_content")
        printed = self._text(chat, len(chat.messages), generation_prompt=False)
        found += [f"not_printed:{name}" for name in _unprinted(chat.messages, printed)]
        return found

    def probe(self) -> list[int]:
        """Check the template on a two-turn chat before any data is read; return the ids that end a turn.

        Raises:
            DataError: the template prints no assistant turn that can be told from its prompt.
        """
        messages = [
            {"role": "user", "content": "What is a falcon?"},
            {"role": "assistant", "content": "A bird of prey."},
            {"role": "user", "content": "Does it fly?"},
            {"role": "assistant", "content": "Yes, fast."},
        ]
        chat = Conversation(source="probe", source_row=0, conversation_id="probe", messages=messages)
        try:
            samples = self.encode(chat)
        except ChatRefused as error:
            raise DataError(
                f"the chat template of {self.tokenizer.name_or_path} does not allow a loss mask ({error}): it has no "
                "generation block, and what it prints for a turn does not begin with the prompt it prints for that turn"
            ) from error
        special = set(self.tokenizer.all_special_ids) | self.eos_ids
        supervised = [sample.input_ids[sample.loss_mask == 1] for sample in samples]
        return sorted({int(i) for ids in supervised for i in ids} & special)

    # -- rendering -------------------------------------------------------------------------------------------------

    def _text(self, chat: Conversation, count: int, *, generation_prompt: bool) -> str:
        return self._print(chat, count, generation_prompt=generation_prompt, blocks=False)[0]

    def _print(
        self, chat: Conversation, count: int, *, generation_prompt: bool, blocks: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return what the template prints for the first `count` turns, and its generation blocks."""
        try:
            rendered: Any = render_jinja_template(
                conversations=[_present(chat.messages[:count])],
                tools=chat.tools,
                chat_template=self.tokenizer.get_chat_template(tools=chat.tools),
                return_assistant_tokens_mask=blocks,
                add_generation_prompt=generation_prompt,
                **{**self.tokenizer.special_tokens_map, **self.switches},
            )
        except Exception as error:  # a template is a program: whatever it raises is its refusal of this conversation
            raise ChatRefused(f"template_refused:{type(error).__name__}") from error
        texts, indices = rendered
        return texts[0], [(int(start), int(end)) for start, end in indices[0]] if blocks else []

    def _render(self, chat: Conversation, count: int, *, generation_prompt: bool = False) -> _Rendered:
        blocks = self.marks_generation and not generation_prompt
        text, found = self._print(chat, count, generation_prompt=generation_prompt, blocks=blocks)
        ids, starts = self._tokenize(text)
        return _Rendered(text, ids, starts, found)

    def _tokenize(self, text: str) -> tuple[list[int], list[int] | None]:
        # The template prints every special token itself, BOS included; serving engines add none either.
        fast = self.tokenizer.is_fast
        out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=fast, verbose=False)
        ids = list(out["input_ids"])
        return ids, [start for start, _ in out["offset_mapping"]] if fast else None

    # -- masks -----------------------------------------------------------------------------------------------------

    def _mask_turn(self, chat: Conversation, turn: int, whole: _Rendered) -> tuple[_Rendered, np.ndarray]:
        """Return the rendering up to and including one assistant turn, and uint8 mask of what that turn wrote."""
        last = turn + 1 == len(chat.messages)
        upto = whole if last else self._render(chat, turn + 1)
        mask = np.zeros(len(upto.ids), np.uint8)
        ranges = self._block_ranges(chat, turn, upto) or [self._prefix_range(chat, turn, upto)]
        for start, end in ranges:
            mask[start : self._end_of_turn(upto.ids, start, end)] = 1
        return upto, mask

    def _block_ranges(self, chat: Conversation, turn: int, upto: _Rendered) -> list[tuple[int, int]]:
        """Return token ranges of the generation blocks that this turn added; none when it has none."""
        if not upto.blocks or upto.starts is None:
            return []
        try:
            before = len(self._print(chat, turn, generation_prompt=False, blocks=True)[1])
        except ChatRefused:
            before = 0  # a template may refuse a conversation that ends with this prefix
        token_ranges = [(bisect_left(upto.starts, a), bisect_left(upto.starts, b)) for a, b in upto.blocks[before:]]
        return [(start, end) for start, end in token_ranges if start < end]

    def _prefix_range(self, chat: Conversation, turn: int, upto: _Rendered) -> tuple[int, int]:
        """Return the token range that this turn adds to its own prompt."""
        prompt = self._render(chat, turn, generation_prompt=True)
        shared = _shared_length(prompt.ids, upto.ids)
        if shared < len(prompt.ids):
            if upto.starts is None or not upto.text.startswith(prompt.text):
                raise ChatRefused("turn_not_found")
            # Tokens merged across the boundary belong to the prompt: the target never emitted them in this form.
            shared = bisect_left(upto.starts, len(prompt.text))
        if shared >= len(upto.ids):
            raise ChatRefused("turn_not_found")
        return shared, len(upto.ids)

    def _end_of_turn(self, ids: list[int], start: int, end: int) -> int:
        """Return the end of a span: past its first eos, which may stand right behind a generation block."""
        for position in range(start, min(end + 1, len(ids))):
            if ids[position] in self.eos_ids:
                return position + 1
        return end

    # -- samples ---------------------------------------------------------------------------------------------------

    def _sample(self, chat: Conversation, count: int, rendered: _Rendered, mask: np.ndarray) -> EncodedChat:
        spans = tuple(self._spans(chat, count, rendered, mask))
        return EncodedChat(np.asarray(rendered.ids, np.uint32), mask, spans)

    def _spans(self, chat: Conversation, count: int, rendered: _Rendered, mask: np.ndarray) -> Iterator[Span]:
        """Yield the turns as token ranges: a turn ends where the rendering up to it ends, if that is a prefix."""
        start = 0
        for turn in range(count):
            end = len(rendered.ids) if turn + 1 == count else self._boundary(chat, turn + 1, rendered)
            if end is not None and end > start:
                yield Span(chat.messages[turn]["role"], turn, start, end)
                start = end

    def _boundary(self, chat: Conversation, count: int, rendered: _Rendered) -> int | None:
        try:
            text = self._text(chat, count, generation_prompt=False)
        except ChatRefused:
            return None
        if rendered.starts is None:
            ids = self._tokenize(text)[0]
            return len(ids) if rendered.ids[: len(ids)] == ids else None
        return bisect_left(rendered.starts, len(text)) if rendered.text.startswith(text) else None


def truncate(sample: EncodedChat, max_length: int) -> EncodedChat:
    """Return the first `max_length` tokens of a sample: ids, mask and spans cut at one place."""
    if len(sample.input_ids) <= max_length:
        return sample
    spans = tuple(s._replace(end=min(s.end, max_length)) for s in sample.spans if s.start < max_length)
    return EncodedChat(sample.input_ids[:max_length], sample.loss_mask[:max_length], spans)


def _supervised_turns(messages: Sequence[dict[str, Any]]) -> Iterator[int]:
    """Yield the assistant turns that answer something and say something."""
    asked = False
    for index, message in enumerate(messages):
        asked = asked or message["role"] not in ("assistant", "system", "developer")
        says = any(message.get(name) for name in _SAYING_FIELDS)
        if message["role"] == "assistant" and asked and says:
            yield index


def _present(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages without null keys, as `apply_chat_template` hands them to a template."""
    return [{key: value for key, value in message.items() if value is not None} for message in messages]


def _shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return min(len(a), len(b))


def _is_prefix(ids: list[int], mask: np.ndarray, whole: list[int]) -> bool:
    """Whether a rendering agrees with the whole conversation up to the last supervised token of its turn.

    A turn without eos may merge its last token with the next turn's first, so that one token is allowed to differ.
    """
    last = int(np.flatnonzero(mask)[-1]) + 1
    return whole[:last] == ids[:last] or (last == len(ids) and whole[: last - 1] == ids[: last - 1])


def _union(whole: list[int], masked: Sequence[tuple[_Rendered, np.ndarray]]) -> np.ndarray:
    """Return the mask of the whole conversation: every turn's tokens, where the whole has the same token there."""
    union = np.zeros(len(whole), np.uint8)
    for rendered, mask in masked:
        shared = min(len(mask), len(union))
        same = np.equal(whole[:shared], rendered.ids[:shared])
        union[:shared] |= mask[:shared] & same
    return union


def _unprinted(messages: Sequence[dict[str, Any]], printed: str) -> list[str]:
    """Return the names of text fields that the template did not print."""
    names = {
        name
        for message in messages
        for name, value in message.items()
        if isinstance(value, str) and value.strip() and name != "role" and value.strip() not in printed
    }
    return sorted(names)
