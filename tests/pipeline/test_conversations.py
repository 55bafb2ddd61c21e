"""Every row has an outcome: a conversation as written, or a counted reason (field reports A1, A2, A11-A20, G1)."""

import gzip
import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from eyas.pipeline.conversations import Conversation, Dropped, parse_row, read_conversations
from eyas.pipeline.errors import DataError

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
GOOD = {"messages": [USER, ANSWER]}


def read(*paths, **options):
    return list(read_conversations(tuple(str(p) for p in paths), **options))


def reasons(outcomes):
    return [o.reason if isinstance(o, Dropped) else "kept" for o in outcomes]


def test_unusable_rows_are_dropped_each_with_its_own_reason(write_jsonl):
    rows = [
        GOOD,
        {"messages": []},
        {"messages": None},
        {},
        {"messages": [{"role": "system", "content": "s"}]},
        {"messages": [USER]},
        {"messages": "hello"},
        {"messages": ["hello"]},
        {"text": "preformatted"},
        ["a", "list"],
        {"messages": [USER, {"role": "assistant", "content": None}]},
        {"messages": [USER, {"content": "no role"}]},
        {"messages": [USER, ANSWER], "conversations": []},
        GOOD,
    ]
    assert reasons(read(write_jsonl(rows))) == [
        "kept",
        "empty_messages",
        "no_messages",
        "no_messages",
        "system_only",
        "no_assistant_turn",
        "messages_not_a_list",
        "message_not_an_object",
        "no_messages",
        "not_an_object",
        "null_content",
        "message_without_role",
        "both_messages_and_conversations",
        "kept",
    ]


def test_byte_order_mark_and_crlf_change_nothing(tmp_path):
    plain = b'{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n' * 2
    files = {"plain": plain, "bom": b"\xef\xbb\xbf" + plain, "crlf": plain.replace(b"\n", b"\r\n")}
    for name, data in files.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "chats.jsonl").write_bytes(data)
    first, bom, crlf = (read(tmp_path / name / "chats.jsonl") for name in files)
    assert len(first) == 2
    assert first == bom == crlf


def test_odd_lines_are_named_by_row_and_touch_no_neighbour(tmp_path):
    good = json.dumps(GOOD).encode()
    lines = [
        good,
        b"",
        json.dumps({"messages": [USER, {"role": "assistant", "content": "\ud83d"}]}).encode(),
        json.dumps({"messages": [USER, {"role": "assistant", "content": "a\u2028b"}]}, ensure_ascii=False).encode(),
        "{}".encode("utf-16"),
        json.dumps({"messages": [USER, {"role": "assistant", "content": "nul \x00"}]}).encode(),
        good,
        good[: len(good) // 2],
    ]
    path = tmp_path / "odd.jsonl"
    path.write_bytes(b"\n".join(lines))
    outcomes = read(path)
    assert reasons(outcomes) == ["kept", "lone_surrogate", "kept", "not_utf8", "kept", "kept", "bad_json"]
    assert outcomes[2].messages[1]["content"] == "a\u2028b"
    assert [o.where for o in outcomes if isinstance(o, Dropped)] == ["odd.jsonl:3", "odd.jsonl:5", "odd.jsonl:8"]


def test_gzip_is_recognised_by_content(tmp_path):
    data = json.dumps(GOOD).encode() + b"\n"
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(data))
    assert reasons(read(tmp_path / "a.jsonl")) == ["kept"]


def test_torn_gzip_stops_with_file_and_line(tmp_path):
    data = b"".join(json.dumps({"id": i, **GOOD}).encode() + b"\n" for i in range(2000))
    (tmp_path / "a.jsonl").write_bytes(gzip.compress(data)[:-200])
    with pytest.raises(DataError, match=r"a\.jsonl cannot be read past line"):
        read(tmp_path / "a.jsonl")


def test_damage_inside_a_gzip_stream_stops_with_the_file(tmp_path):
    packed = bytearray(gzip.compress((json.dumps(GOOD) + "\n").encode() * 500))
    packed[60] ^= 0xFF
    path = tmp_path / "chats.jsonl.gz"
    path.write_bytes(packed)
    with pytest.raises(DataError, match=r"chats\.jsonl\.gz cannot be read"):
        read(path)


def test_hostile_values_drop_their_own_row_and_no_other(tmp_path):
    half = "\\ud83d"  # as JSON text: an escape that decodes to half a character
    lines = [
        '{"id": ' + "9" * 5000 + "}",
        '{"messages": [{"role": ["user"], "content": "x"}, {"role": "assistant", "content": "y"}]}',
        '{"messages": [{"role": {"a": 1}, "content": "x"}, {"role": "assistant", "content": "y"}]}',
        '{"messages": [{"role": "\\u001b[2J' + half + '", "content": "x"}]}',
        '{"messages": [{"role": "' + "r" * 99 + '", "content": "x"}]}',
        f'{{"id": "{half}", {json.dumps(GOOD)[1:]}',
        f'{{"tools": [{{"name": "{half}"}}], {json.dumps(GOOD)[1:]}',
        f'{{"tools": "{"[" * 9999}", {json.dumps(GOOD)[1:]}',
        json.dumps(GOOD),
    ]
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(lines))
    assert reasons(read(path)) == [
        "bad_json",
        "unknown_role:['user']",
        "unknown_role:{'a': 1}",
        r"unknown_role:\x1b[2J\ud83d",
        "unknown_role:" + "r" * 32,
        "lone_surrogate",
        "lone_surrogate",
        "tools_not_json",
        "kept",
    ]


def test_sharegpt_roles_are_mapped_by_a_list_and_strangers_are_counted(write_jsonl):
    turns = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "q"},
        {"from": "gpt", "value": "a"},
        {"from": "observation", "value": "o"},
        {"from": "bing", "value": "b"},
    ]
    stranger = [{"from": "human", "value": "q"}, {"from": "narrator", "value": "x"}, {"from": "gpt", "value": "a"}]
    kept, dropped, openai = read(
        write_jsonl(
            [
                {"conversations": turns},
                {"conversations": stranger},
                {"messages": [USER, {"role": "narrator", "content": "x"}, ANSWER]},
            ]
        )
    )
    assert [m["role"] for m in kept.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert kept.messages[0]["content"] == "s"
    assert dropped.reason == openai.reason == "unknown_role:narrator"


def test_null_content_beside_tool_calls_is_empty_text_and_arguments_are_parsed():
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    parsed = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    for given in (call, parsed):
        row = {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [given]},
                {"role": "tool", "content": "1"},
                ANSWER,
            ],
            "tools": None,
        }
        chat = parse_row("s", 0, row)
        assert isinstance(chat, Conversation)
        assert chat.messages[1] == {"role": "assistant", "content": "", "tool_calls": [parsed]}
        assert chat.tools is None


def test_text_parts_equal_the_plain_string_and_other_parts_are_refused():
    parts = parse_row("s", 0, {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}, ANSWER]})
    plain = parse_row("s", 0, GOOD)
    assert parts == plain
    image = parse_row("s", 0, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, ANSWER]})
    assert image.reason == "content_part_not_text"


def test_message_fields_reach_the_template_as_written(write_jsonl):
    message = {"role": "assistant", "content": "yes", "reasoning_content": "r", "extra": {"b": "x"}}
    other = {"role": "assistant", "content": "yes", "extra": {"a": 1}}
    first, second = read(write_jsonl([{"messages": [USER, message]}, {"messages": [USER, other]}]))
    assert first.messages == [USER, message]
    assert second.messages == [USER, other]


def test_parquet_rows_lose_the_null_keys_of_the_schema(tmp_path):
    rows = [
        {"messages": [USER, ANSWER]},
        {"messages": [USER, {**ANSWER, "name": "eyas"}]},
        {"messages": None},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second, empty = read(tmp_path / "a.parquet")
    assert first.messages == [USER, ANSWER]
    assert second.messages == [USER, {**ANSWER, "name": "eyas"}]
    assert empty.reason == "no_messages"


def test_parquet_text_that_is_not_utf8_drops_its_own_row(tmp_path):
    offsets = pa.py_buffer(np.array([0, 2, 4], np.int32).tobytes())
    ids = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"\xff\xfeok")])
    pq.write_table(pa.table({"id": ids, "messages": pa.array([GOOD["messages"]] * 2)}), tmp_path / "chats.parquet")
    assert reasons(read(tmp_path / "chats.parquet")) == ["not_utf8", "kept"]


def test_parquet_damaged_inside_stops_with_file_and_row(tmp_path):
    path = tmp_path / "chats.parquet"
    pq.write_table(pa.table({"messages": pa.array([GOOD["messages"]] * 600)}), path, compression="none")
    damaged = bytearray(path.read_bytes())
    damaged[10:18] = b"\xff" * 8
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"chats\.parquet cannot be read as Parquet past row 0"):
        read(path)


def test_hub_id_is_loaded_by_its_whole_name(monkeypatch):
    asked = []
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: asked.append((name, split)) or [GOOD])
    assert reasons(read("some-org/some-chats", split="test")) == ["kept"]
    assert asked == [("some-org/some-chats", "test")]


def test_saved_dataset_gives_the_same_rows_as_jsonl(tmp_path, write_jsonl):
    import datasets

    rows = [{"id": f"c{i}", "messages": [USER, {"role": "assistant", "content": str(i)}]} for i in range(3)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    from_disk, from_jsonl = read(tmp_path / "saved"), read(write_jsonl(rows))
    assert [c.messages for c in from_disk] == [c.messages for c in from_jsonl]
    assert [c.conversation_id for c in from_disk] == ["c0", "c1", "c2"]


def test_folder_reads_its_files_in_name_order_under_distinct_names(tmp_path):
    for name in ("b/x.jsonl", "a/x.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(json.dumps({"id": name, **GOOD}) + "\n")
    outcomes = read(tmp_path)
    assert [(o.source, o.conversation_id) for o in outcomes] == [("a/x.jsonl", "a/x.jsonl"), ("b/x.jsonl", "b/x.jsonl")]


def test_conversation_id_is_the_rows_own_or_a_hash_of_its_messages():
    assert parse_row("s", 0, {"id": 7, **GOOD}).conversation_id == "7"
    assert parse_row("s", 0, GOOD).conversation_id == parse_row("t", 9, GOOD).conversation_id
    other = {"messages": [USER, {"role": "assistant", "content": "no"}]}
    assert parse_row("s", 0, GOOD).conversation_id != parse_row("s", 0, other).conversation_id


def test_missing_file_is_an_error_that_names_it():
    with pytest.raises(DataError, match=r"nowhere/chats\.jsonl does not exist"):
        read("nowhere/chats.jsonl")
