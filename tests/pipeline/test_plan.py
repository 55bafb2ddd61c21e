"""The plan is a pure function of the data, and its books balance (A1, A2, A5, A16, A21, B1, B4-B7, D2, D16)."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.cache_format.errors import ConfigError
from eyas.cache_format.samples import PlannedSample
from eyas.pipeline.chat import ChatEncoder
from eyas.pipeline.config import PrecomputeConfig
from eyas.pipeline.errors import DataError
from eyas.pipeline.plan import count_supervised, cut_shards, is_heldout, plan_capture
from eyas.pipeline.testing import CHATML_THINKING, make_chats, make_tokenizer

V = 300


def row(*contents, **fields):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)], **fields}


def config(*chats, **changes):
    defaults = {"target": "t", "out": "o", "shard_tokens": 200, "draft_vocab_size": 64, "heldout_fraction": 0.0}
    return PrecomputeConfig(chats=tuple(str(c) for c in chats), **defaults | changes)


def plan(encoder, *chats, vocab_size=V, **changes):
    return plan_capture(config(*chats, **changes), encoder, vocab_size=vocab_size, always_keep=[2, 0])


def samples_of(planned):
    return [sample for shard in planned.shards for sample in shard]


def test_books_balance_and_every_reason_is_counted(encoder, write_jsonl):
    rows = [
        row("q", "a"),
        row("q", "a"),  # the same sample again
        {},
        {"messages": []},
        row("only a question"),
        row("q", ""),
        row("x" * 400, "cut before the answer"),
        row("q", "long " * 200),
        {"messages": [{"role": "narrator", "content": "x"}]},
        {"messages": [{"role": "assistant", "content": "hi"}, *row("q", "b")["messages"]]},
    ]
    books = plan(encoder, write_jsonl(rows), max_length=128).plan.books
    assert books == {
        "rows_read": 10,
        "rows_kept": 4,
        "samples_made": 4,
        "samples": 3,
        "duplicates": 1,
        "truncated": 1,
        "dropped": {
            "empty_answer": 1,
            "empty_messages": 1,
            "no_assistant_turn": 1,
            "no_messages": 1,
            "truncated_before_answer": 1,
            "unknown_role:narrator": 1,
        },
        "dropped_samples": {},
        "notes": {"assistant_first": 1},
    }
    assert books["rows_read"] == books["rows_kept"] + sum(books["dropped"].values())
    assert books["samples_made"] == books["samples"] + books["duplicates"] + sum(books["dropped_samples"].values())


def test_a_file_without_a_usable_row_is_an_error_that_counts_the_reasons(encoder, write_jsonl):
    with pytest.raises(DataError, match=r"none of 2 rows can be used \(2 no_messages\)"):
        plan(encoder, write_jsonl([{"text": "a"}, {"text": "b"}]))


@pytest.mark.parametrize(
    ("policy", "kept", "tokens_of_hello"), [("context", 3, True), ("trim", 3, False), ("drop", 2, False)]
)
def test_conversation_that_begins_with_the_assistant_follows_the_policy(
    encoder, write_jsonl, policy, kept, tokens_of_hello
):
    first = {"messages": [{"role": "assistant", "content": "hello"}, *row("q", "b")["messages"]]}
    planned = plan(encoder, write_jsonl([row("q", "a"), first, row("q", "c")]), assistant_first=policy)
    assert len(planned.plan) == kept
    texts = [encoder.tokenizer.decode(s.input_ids.tolist()) for s in samples_of(planned)]
    assert any("hello" in text for text in texts) == tokens_of_hello
    assert all(int(s.loss_mask.sum()) == 2 for s in samples_of(planned))  # one letter and eos: never the greeting
    counted = planned.plan.books["dropped" if policy == "drop" else "notes"]
    assert counted == {"assistant_first": 1}


def test_length_at_the_limit_is_kept_whole_and_one_more_is_cut_or_dropped(encoder, write_jsonl):
    path = write_jsonl([row("q", "answer with some words")])
    length = int(plan(encoder, path).plan.length[0])
    for limit, expected in ((length + 1, length), (length, length), (length - 1, length - 1)):
        planned = plan(encoder, path, max_length=limit)
        [sample] = samples_of(planned)
        assert len(sample.input_ids) == len(sample.loss_mask) == expected
        assert sample.spans[-1].end == expected
        assert planned.plan.books["truncated"] == int(limit < length)
    with pytest.raises(DataError, match="1 over_long"):
        plan(encoder, path, max_length=length - 1, over_long="drop")


def test_rewritten_history_gives_samples_that_share_conversation_and_split(write_jsonl):
    encoder = ChatEncoder(make_tokenizer(CHATML_THINKING), eos_ids=[2])
    rows = [row(f"q{i}", "<think>a</think>b", "r", "<think>c</think>d", id=f"c{i}") for i in range(40)]
    planned = plan(encoder, write_jsonl(rows), heldout_fraction=0.5)
    by_chat = {}
    for sample in samples_of(planned):
        by_chat.setdefault(sample.conversation_id, []).append(sample.heldout)
    assert all(len(splits) == 2 and len(set(splits)) == 1 for splits in by_chat.values())
    assert 0 < planned.plan.heldout.sum() < len(planned.plan)


def test_same_data_same_plan_and_two_swapped_lines_another(encoder, tmp_path):
    path = make_chats(tmp_path / "a.jsonl", 12, 3)
    lines = path.read_text().splitlines(keepends=True)
    first = plan(encoder, path)
    again = plan(encoder, path)
    assert first.plan.digest == again.plan.digest
    path.write_text("".join([lines[1], lines[0], *lines[2:]]))
    assert plan(encoder, path).plan.digest != first.plan.digest


def test_rows_keep_their_place_in_the_source_and_shards_their_token_budget(encoder, tmp_path):
    path = make_chats(tmp_path / "a.jsonl", 20, 1)
    planned = plan(encoder, path, shard_tokens=700)
    for shard in planned.shards:
        lengths = [len(s.input_ids) for s in shard]
        assert sum(lengths) <= 700 or len(shard) == 1
        assert lengths == sorted(lengths, reverse=True)
    last_rows = [max(s.source_row for s in shard) for shard in planned.shards]
    first_rows = [min(s.source_row for s in shard) for shard in planned.shards]
    assert all(last < first for last, first in zip(last_rows, first_rows[1:], strict=False))


@given(st.lists(st.integers(1, 50), max_size=40), st.integers(1, 120))
def test_shards_hold_every_sample_once_in_source_order(lengths, budget):
    samples = [
        PlannedSample(str(i), "s", i, False, np.full(n, i, np.uint32), np.ones(n, np.uint8), ())
        for i, n in enumerate(lengths)
    ]
    shards = cut_shards(samples, budget)
    assert [s.source_row for shard in shards for s in sorted(shard, key=lambda s: s.source_row)] == list(
        range(len(lengths))
    )
    assert all(sum(len(s.input_ids) for s in shard) <= budget or len(shard) == 1 for shard in shards)


def test_only_supervised_tokens_of_kept_training_rows_are_counted(encoder, write_jsonl):
    rows = [row("z" * (i + 1), "ab", id=f"c{i}") for i in range(30)] + [row("q", "", id="dropped")]
    planned = plan(encoder, write_jsonl(rows), heldout_fraction=0.4)
    training = 30 - int(planned.plan.heldout.sum())
    ids = {letter: encoder.tokenizer.convert_tokens_to_ids(letter) for letter in "abz"}
    assert 0 < training < 30
    assert planned.token_counts[ids["a"]] == planned.token_counts[ids["b"]] == planned.token_counts[2] == training
    assert planned.token_counts[ids["z"]] == 0
    assert planned.token_counts.sum() == 3 * training
    assert planned.coverage == 1.0


def test_eos_stays_in_the_draft_vocabulary_when_every_answer_is_cut(encoder, write_jsonl):
    planned = plan(encoder, write_jsonl([row("q", "many words " * 30)]), max_length=64, draft_vocab_size=4)
    assert planned.token_counts[2] == 0
    assert 2 in planned.vocab.ids
    assert 0 < planned.coverage < 1


def test_draft_vocabulary_defaults_to_the_targets_and_a_larger_one_is_refused(encoder, write_jsonl):
    path = write_jsonl([row("q", "a")])
    assert plan(encoder, path, draft_vocab_size=None).vocab.is_identity
    assert len(plan(encoder, path, draft_vocab_size=128).vocab) == 128  # far above the distinct tokens seen
    with pytest.raises(ConfigError, match="301"):
        plan(encoder, path, draft_vocab_size=301)


def test_token_outside_the_targets_vocabulary_stops_naming_row_and_token(encoder, write_jsonl):
    path = write_jsonl([row("a", "b"), row("the", "and the")])
    worst = encoder.tokenizer.convert_tokens_to_ids("\u0120the")
    with pytest.raises(DataError, match=rf"chats\.jsonl:2: token {worst} .*vocabulary of {worst}"):
        plan(encoder, path, vocab_size=worst)


def test_unknown_role_can_be_an_error(encoder, write_jsonl):
    path = write_jsonl([row("q", "a"), {"messages": [{"role": "narrator", "content": "x"}]}])
    assert len(plan(encoder, path).plan) == 1
    with pytest.raises(DataError, match=r"chats\.jsonl:2: unknown_role:narrator"):
        plan(encoder, path, unknown_role="error")


def test_limit_reads_the_first_rows_only(encoder, tmp_path):
    path = make_chats(tmp_path / "a.jsonl", 20, 1)
    assert plan(encoder, path, limit=5).plan.books["rows_read"] == 5


def test_heldout_share_is_a_function_of_the_id_and_grows_with_the_fraction():
    ids = [f"chat-{i}" for i in range(2000)]
    small = {i for i in ids if is_heldout(i, 0.05)}
    large = {i for i in ids if is_heldout(i, 0.2)}
    assert small < large
    assert not any(is_heldout(i, 0.0) for i in ids)
    assert 300 < len(large) < 500  # 400 expected; six standard deviations are 107


def test_counts_ignore_heldout_samples():
    ids, mask = np.array([5, 6, 6], np.uint32), np.array([0, 1, 1], np.uint8)
    train = PlannedSample("a", "s", 0, False, ids, mask, ())
    counts = count_supervised([train, dataclasses.replace(train, heldout=True)], 10)
    assert counts.tolist() == [0, 0, 0, 0, 0, 0, 2, 0, 0, 0]


def test_plan_rows_name_their_source(encoder, tmp_path):
    path = tmp_path / "named.jsonl"
    path.write_text(json.dumps(row("q", "a")) + "\n")
    planned = plan(encoder, path)
    assert planned.plan.text("source", 0) == "named.jsonl"
    assert planned.plan.text("source_row", 0) == 0
