"""The bytes behind every token id, so that nothing downstream of the store needs a tokenizer."""

import json
import re
from typing import Any

__all__ = ["token_table"]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_METASPACE = "\u2581"


def token_table(tokenizer: Any) -> tuple[list[bytes], list[bool]]:
    """Return (bytes, special flag) of every id of a tokenizer, in id order.

    Byte-level BPE spells each byte as one printable character; SentencePiece spells a space as U+2581 and a lone byte
    as `<0xNN>`; WordPiece marks a continuation by a prefix. Added tokens stand for their own text.
    """
    size = max(tokenizer.get_vocab().values()) + 1
    added = tokenizer.added_tokens_decoder
    spell = _speller(tokenizer)
    pieces = tokenizer.convert_ids_to_tokens(list(range(size)))
    table = [
        added[index].content.encode() if index in added else spell(piece) if piece is not None else b""
        for index, piece in enumerate(pieces)
    ]
    special = set(tokenizer.all_special_ids) | {index for index, token in added.items() if token.special}
    return table, [index in special for index in range(size)]


def _speller(tokenizer: Any) -> Any:
    if not tokenizer.is_fast:
        return lambda piece: tokenizer.convert_tokens_to_string([piece]).encode()
    description = json.loads(tokenizer.backend_tokenizer.to_str())
    kinds = _component_types([description.get("decoder"), description.get("pre_tokenizer")])
    model = description["model"]
    if "ByteLevel" in kinds:
        return _byte_level
    if model["type"] == "WordPiece":
        prefix = model.get("continuing_subword_prefix", "##")
        return lambda piece: piece[len(prefix) :].encode() if piece.startswith(prefix) else b" " + piece.encode()
    return _sentencepiece


def _component_types(node: Any) -> set[str]:
    if isinstance(node, dict):
        own = {node["type"]} if isinstance(node.get("type"), str) else set()
        return own.union(*(_component_types(value) for value in node.values()))
    if isinstance(node, list):
        return set().union(*(_component_types(value) for value in node))
    return set()


def _byte_alphabet() -> dict[str, int]:
    """Return the character that byte-level BPE prints for each byte: printable Latin-1 as itself, the rest from U+0100.

    Source: openai/gpt-2 src/encoder.py, whose mapping every byte-level tokenizer shares.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTES = _byte_alphabet()


def _byte_level(piece: str) -> bytes:
    if all(character in _BYTES for character in piece):
        return bytes(_BYTES[character] for character in piece)
    return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    lone_byte = _BYTE_TOKEN.fullmatch(piece)
    return bytes([int(lone_byte[1], 16)]) if lone_byte else piece.replace(_METASPACE, " ").encode()
