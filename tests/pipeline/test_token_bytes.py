"""Bytes of every id, for the three families of tokenizers: joined, they are the text."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eyas.pipeline.testing import make_tokenizer
from eyas.pipeline.token_bytes import token_table

TEXT = "the h\u00e9n saw \U0001f985 in the\ttree"


def sentencepiece_like():
    """BPE with byte fallback and U+2581, as Llama 2 and Gemma ship it."""
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        *"thenasw",
        "\u2581t",
        "he",
    ]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("\u2581", "t"), ("h", "e")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("make", [make_tokenizer, sentencepiece_like], ids=["byte_level", "sentencepiece"])
def test_bytes_of_ids_joined_are_the_text(make):
    tokenizer = make()
    table, special = token_table(tokenizer)
    ids = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    assert b"".join(table[i] for i in ids).decode() == TEXT
    assert len(table) == len(special) == len(tokenizer)


def test_special_flags_and_added_text():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(["plain added"])
    table, special = token_table(tokenizer)
    assert [table[i] for i in range(3)] == [b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>"]
    assert special[:3] == [True, True, True]
    assert sum(special) == 3
    assert table[-1] == b"plain added"


def test_wordpiece_continuations_join_and_words_are_apart():
    vocab = {"[UNK]": 0, "fal": 1, "##con": 2, "flies": 3}
    backend = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]")
    table, _ = token_table(tokenizer)
    ids = tokenizer("falcon flies", add_special_tokens=False)["input_ids"]
    assert b"".join(table[i] for i in ids) == b" falcon flies"
