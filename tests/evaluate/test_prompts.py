"""A prompt is what capture saw before the assistant's last answer."""

import json

import pytest

from eyas.evaluate.errors import PromptError
from eyas.evaluate.prompts import read_prompts
from eyas.pipeline.chat import ChatEncoder
from eyas.pipeline.conversations import read_conversations
from eyas.pipeline.testing import CHATML_GENERATION, CHATML_THINKING, make_chats, make_tokenizer

USER, ANSWER = {"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (str(path),)


def read(sources, *, tokenizer=None, longest=500, switches=None, **settings):
    encoder = ChatEncoder(tokenizer or make_tokenizer(), eos_ids=[2], switches=switches)
    return read_prompts(sources, encoder, longest=longest, **settings)


@pytest.mark.parametrize("template", [None, CHATML_GENERATION, CHATML_THINKING])
def test_a_prompt_is_the_captured_text_before_its_last_answer(tmp_path, template):
    sources = (str(make_chats(tmp_path / "chats.jsonl", 12)),)
    tokenizer = make_tokenizer(template) if template else make_tokenizer()
    encoder = ChatEncoder(tokenizer, eos_ids=[2])
    prompts = read(sources, tokenizer=tokenizer).prompts
    assert len(prompts) == 12
    for chat, prompt in zip(read_conversations(sources), prompts, strict=True):
        sample = encoder.encode(chat)[-1]
        answer = sample.spans[-1].start + int(sample.loss_mask[sample.spans[-1].start :].argmax())
        assert prompt.input_ids == tuple(sample.input_ids[:answer].tolist())
        assert prompt.prompt_id == chat.conversation_id


def test_later_answers_are_cut_and_earlier_ones_are_history(tmp_path):
    more = [USER, ANSWER, {"role": "user", "content": "four"}, {"role": "assistant", "content": "five"}]
    (prompt,) = read(write(tmp_path / "a.jsonl", {"messages": more})).prompts
    text = make_tokenizer().decode(prompt.input_ids)
    assert "three" in text
    assert text.endswith("four<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("template", [None, CHATML_GENERATION, CHATML_THINKING])
def test_a_prompt_is_what_the_tokenizer_itself_prints(tmp_path, template):
    sources = (str(make_chats(tmp_path / "chats.jsonl", 6)),)
    tokenizer = make_tokenizer(template) if template else make_tokenizer()
    for chat, prompt in zip(read_conversations(sources), read(sources, tokenizer=tokenizer).prompts, strict=True):
        text = tokenizer.apply_chat_template(chat.messages[:-1], add_generation_prompt=True, tokenize=False)
        assert prompt.input_ids == tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_questions_that_nobody_has_answered_are_prompts(tmp_path):
    rows = [{"id": "one", "messages": [USER]}, {"id": "two", "conversations": [{"from": "human", "value": "hi"}]}]
    sources = write(tmp_path / "a.jsonl", *rows)
    prompts = read(sources).prompts
    assert [prompt.prompt_id for prompt in prompts] == ["one", "two"]
    assert make_tokenizer().decode(prompts[1].input_ids).endswith("hi<|im_end|>\n<|im_start|>assistant\n")
    assert [row.reason for row in read_conversations(sources)] == ["no_assistant_turn"] * 2


def test_switches_reach_the_template(tmp_path):
    tokenizer = make_tokenizer("{{ messages[0]['content'] }}{% if loud %}!{% endif %}")
    sources = write(tmp_path / "a.jsonl", {"messages": [USER, ANSWER]})
    texts = [
        tokenizer.decode(read(sources, tokenizer=tokenizer, switches=s).prompts[0].input_ids)
        for s in ({}, {"loud": True})
    ]
    assert texts == ["one two", "one two!"]


def test_rows_without_a_prompt_are_counted_by_reason(tmp_path):
    rows = [
        {"messages": [USER, ANSWER]},
        {"messages": [{"role": "system", "content": "x"}, ANSWER]},
        {"messages": [{"role": "user", "content": "word " * 400}, ANSWER]},
        {"messages": 3},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]},
    ]
    found = read(write(tmp_path / "a.jsonl", *rows), longest=200)
    assert len(found.prompts) == 2
    assert found.rows_read == 5
    assert found.dropped == {"no_user_turn": 1, "too_long": 1, "messages_not_a_list": 1}


def test_a_template_that_refuses_drops_its_row(tmp_path):
    refusing = make_tokenizer("{{ raise_exception('no') if messages[0]['content'] == 'bad' else 'x' }}")
    rows = [{"messages": [{"role": "user", "content": content}, ANSWER]} for content in ("bad", "good")]
    found = read(write(tmp_path / "a.jsonl", *rows), tokenizer=refusing)
    assert len(found.prompts) == 1
    assert found.dropped == {"template_refused:TemplateError": 1}


def test_the_limit_counts_usable_prompts_in_order(tmp_path):
    rows = [{"id": "bad", "messages": 3}, *({"id": f"c{i}", "messages": [USER, ANSWER]} for i in range(5))]
    found = read(write(tmp_path / "a.jsonl", *rows), limit=2)
    assert [prompt.prompt_id for prompt in found.prompts] == ["c0", "c1"]
    assert found.rows_read == 3


def test_files_without_any_prompt_are_refused_with_the_reasons(tmp_path):
    with pytest.raises(PromptError, match="2 messages_not_a_list"):
        read(write(tmp_path / "a.jsonl", {"messages": 3}, {"messages": 4}))
