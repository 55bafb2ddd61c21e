"""Read chats: JSONL, Parquet or `datasets`, in OpenAI or ShareGPT form, one outcome for every row.

A row either becomes a `Conversation`, whose messages are those of the row, or a `Dropped` with a reason: nothing
is skipped silently and no bad row ends a run. JSONL is split at newline bytes alone and decoded line by line, so that
neither a byte order mark, nor U+2028, nor one broken line touches its neighbours.
"""

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from eyas.pipeline.errors import DataError

__all__ = ["Conversation", "Dropped", "parse_row", "read_conversations", "source_files"]

OPENAI_ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles of `messages`, handed to the template as written."""

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Roles of `conversations` rows, and the role that the template sees. Any other role drops the row."""

_BOM = b"\xef\xbb\xbf"
_GZIP = b"\x1f\x8b"
_DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".ndjson", ".parquet")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """One chat, ready for the template."""

    source: str
    source_row: int
    conversation_id: str
    """The row's own id, or the hash of its messages."""
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None

    @property
    def where(self) -> str:
        """Source and row number, for messages."""
        return f"{self.source}:{self.source_row + 1}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """One row that cannot be used, and why."""

    source: str
    source_row: int
    reason: str

    @property
    def where(self) -> str:
        """Source and row number, for messages."""
        return f"{self.source}:{self.source_row + 1}"


class _BadRow(Exception):
    """The reason for which a row is dropped; never leaves this module."""


def read_conversations(
    sources: tuple[str, ...], *, split: str = "train", need_answer: bool = True
) -> Iterator[Conversation | Dropped]:
    """Yield one outcome for every row of every source, in order.

    A row number counts the rows of its source from 0; in JSONL it is the line number, blank lines included.

    Args:
        sources: files, folders, `datasets` folders or hub ids.
        split: split to read of a `datasets` source.
        need_answer: drop a row without an assistant turn; False reads prompts that nobody has answered yet.

    Raises:
        DataError: a source does not exist or cannot be opened.
    """
    files = [entry for source in sources for entry in source_files(source)]
    names = _short_names([name for name, _ in files])
    for (source, path), name in zip(files, names, strict=True):
        for row_number, row in _rows(path if path is not None else source, split):
            yield parse_row(name, row_number, row, need_answer=need_answer)


def source_files(source: str) -> list[tuple[str, Path | None]]:
    """Return the (name, path) entries of a source; path None means a hub id."""
    path = Path(source)
    if not path.exists():
        if source.endswith(_DATA_SUFFIXES) or source.startswith(("/", ".")) or source.count("/") > 1:
            raise DataError(f"chat source {source} does not exist; check the path")
        return [(source, None)]
    if path.is_file() or _is_dataset_folder(path):
        return [(str(path), path)]
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(_DATA_SUFFIXES))
    if not files:
        raise DataError(f"folder {source} holds no {', '.join(_DATA_SUFFIXES)} file and no saved dataset")
    return [(str(p), p) for p in files]


def _is_dataset_folder(path: Path) -> bool:
    return (path / "state.json").exists() or (path / "dataset_dict.json").exists()


def _short_names(names: list[str]) -> list[str]:
    """Return the shortest path tails that tell the sources apart, so that moving the data changes no plan."""
    for depth in range(1, 64):
        tails = ["/".join(Path(name).parts[-depth:]) for name in names]
        if len(set(tails)) == len(set(names)):
            return tails
    return names


def _rows(source: Path | str, split: str) -> Iterator[tuple[int, Any]]:
    """Yield (row number, decoded row or the reason it has none) of one source; a string is a hub id."""
    if isinstance(source, str) or source.is_dir():
        return _dataset_rows(source, split)
    return _parquet_rows(source) if source.suffix == ".parquet" else _jsonl_rows(source)


def _jsonl_rows(path: Path) -> Iterator[tuple[int, Any]]:
    with path.open("rb") as head:
        is_gzip = head.read(2) == _GZIP  # by content: gzip files named .jsonl are common
    number = -1
    try:
        with gzip.open(path, "rb") if is_gzip else path.open("rb") as lines:
            for number, line in enumerate(lines):
                line = line.removeprefix(_BOM) if number == 0 else line
                if line.strip():
                    yield number, _decode_line(line)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be read past line {number + 1} ({error}); repair the file") from error


def _decode_line(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError:
        return _BadRow("not_utf8")
    except (ValueError, RecursionError):  # also a number of thousands of digits
        return _BadRow("bad_json")


def _parquet_rows(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=256):
            for row in _plain_rows(batch):
                yield number, row
                number += 1
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} cannot be read as Parquet past row {number} ({error}); repair the file") from error


def _plain_rows(batch: Any) -> list[Any]:
    """Return the rows of an Arrow batch as plain values; Parquet promises UTF-8, but nothing checks it."""
    try:
        return [_without_null_keys(row) for row in batch.to_pylist()]
    except UnicodeDecodeError:
        if batch.num_rows == 1:
            return [_BadRow("not_utf8")]
        return [row for index in range(batch.num_rows) for row in _plain_rows(batch.slice(index, 1))]


def _dataset_rows(path: Path | str, split: str) -> Iterator[tuple[int, Any]]:
    import datasets

    try:
        if isinstance(path, Path):
            data = datasets.load_from_disk(str(path))
            data = data[split] if isinstance(data, datasets.DatasetDict) else data
        else:
            data = datasets.load_dataset(path, split=split)
    except (KeyError, ValueError, OSError) as error:
        raise DataError(f"chat source {path}, split {split!r}, cannot be loaded: {error}") from error
    for number, row in enumerate(data):
        yield number, _without_null_keys(row)


def _without_null_keys(value: Any) -> Any:
    """Drop the null keys that a columnar schema adds to rows which never had them, at every depth.

    A message's own null content is kept: it tells a tool call from a message without text.
    """
    if isinstance(value, dict):
        return {k: _without_null_keys(v) for k, v in value.items() if v is not None or k == "content"}
    if isinstance(value, list):
        return [_without_null_keys(v) for v in value]
    return value


def parse_row(source: str, row_number: int, row: Any, *, need_answer: bool = True) -> Conversation | Dropped:
    """Return the conversation of one decoded row, or why there is none."""
    try:
        return _parse(source, row_number, row, need_answer=need_answer)
    except _BadRow as bad:
        return Dropped(source=source, source_row=row_number, reason=str(bad))


def _parse(source: str, row_number: int, row: Any, *, need_answer: bool) -> Conversation:
    if isinstance(row, _BadRow):
        raise row
    if not isinstance(row, dict):
        raise _BadRow("not_an_object")
    messages, tools = _messages(row), _tools(row)
    roles = {message["role"] for message in messages}
    if need_answer and "assistant" not in roles:
        raise _BadRow("system_only" if roles <= {"system", "developer"} else "no_assistant_turn")
    _check_encodable([messages, tools])
    conversation_id = _conversation_id(row, messages)
    _check_encodable(conversation_id)
    return Conversation(
        source=source, source_row=row_number, conversation_id=conversation_id, messages=messages, tools=tools
    )


def _tools(row: dict[str, Any]) -> list[Any] | None:
    tools = row.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise _BadRow("tools_not_json") from None
    if tools is not None and not isinstance(tools, list):
        raise _BadRow("tools_not_a_list")
    return tools or None


def _messages(row: dict[str, Any]) -> list[dict[str, Any]]:
    openai, sharegpt = row.get("messages"), row.get("conversations")
    if openai is not None and sharegpt is not None:
        raise _BadRow("both_messages_and_conversations")
    turns = openai if openai is not None else sharegpt
    if turns is None:
        raise _BadRow("no_messages")
    if not isinstance(turns, list):
        raise _BadRow("messages_not_a_list")
    if not turns:
        raise _BadRow("empty_messages")
    if not all(isinstance(turn, dict) for turn in turns):
        raise _BadRow("message_not_an_object")
    return [_message(turn) for turn in turns]


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    """Return one turn as the template sees it: everything as written, except what serving engines rewrite too."""
    if "role" in turn:
        role, message = turn["role"], dict(turn)
    elif "from" in turn:
        role = SHAREGPT_ROLES.get(turn["from"]) if isinstance(turn["from"], str) else None
        rest = {key: value for key, value in turn.items() if key not in ("from", "value")}
        message = {"role": role, "content": turn.get("value"), **rest}
        if role is None:
            raise _unknown_role(turn["from"])
    else:
        raise _BadRow("message_without_role")
    if not isinstance(role, str) or role not in OPENAI_ROLES:
        raise _unknown_role(role)
    message["content"] = _content(message)
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_tool_call(call) for call in message["tool_calls"]]
    return message


def _unknown_role(role: Any) -> _BadRow:
    """The role goes into logs and books: short, and escaped unless it is plain text."""
    return _BadRow(f"unknown_role:{ascii(str(role)[:32])[1:-1]}")


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return ""  # as vLLM and SGLang render a null next to tool calls; a template would print "None" or fail
    if content is None:
        raise _BadRow("null_content")
    if not isinstance(content, list):
        raise _BadRow("content_not_text")
    if not all(isinstance(part, dict) and part.get("type", "text") == "text" for part in content):
        raise _BadRow("content_part_not_text")
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise _BadRow("content_part_not_text")
    return "\n".join(texts)  # vLLM's join for templates that read plain strings


def _tool_call(call: Any) -> Any:
    """Parse arguments given as JSON text, as serving engines do before the template; other text stays as it is."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _check_encodable(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise _BadRow("lone_surrogate") from None  # no tokenizer can encode half a character
    except (TypeError, ValueError, RecursionError):
        raise _BadRow("message_not_json") from None


def _conversation_id(row: dict[str, Any], messages: list[dict[str, Any]]) -> str:
    for key in ("conversation_id", "id"):
        value = row.get(key)
        if isinstance(value, str | int) and not isinstance(value, bool) and value != "":
            return str(value)
    return xxhash.xxh3_128_hexdigest(json.dumps(messages, sort_keys=True).encode())
