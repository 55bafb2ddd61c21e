"""Make a tiny random target and chats for it, in code and in a second.

Every part's tests start here: the folder is an ordinary Hugging Face model folder (config, generation config,
safetensors weights, tokenizer with a chat template), so nothing downstream knows that the target is a toy. Same
arguments, same bytes.
"""

import json
import random
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# ChatML twice: as most checkpoints ship it, and with the block that marks what the assistant wrote.
CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

CHATML_GENERATION = """\
{%- for message in messages -%}
{%- if message['role'] == 'assistant' -%}
{{ '<|im_start|>assistant\\n' }}
{%- generation -%}{{ message['content'] + '<|im_end|>' }}{%- endgeneration -%}
{{ '\\n' }}
{%- else -%}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

# Rewrites history: thinking survives only in the last assistant turn.
CHATML_THINKING = """\
{%- for message in messages -%}
{%- set text = message['content'] -%}
{%- if message['role'] == 'assistant' and not loop.last and '</think>' in text -%}
{%- set text = text.split('</think>')[-1] -%}
{%- endif -%}
{{ '<|im_start|>' + message['role'] + '\\n' + text + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"""

TEMPLATES = {"chatml": CHATML, "generation": CHATML_GENERATION, "thinking": CHATML_THINKING}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MERGES = (
    *("th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "st", "or", "te", "es", "is", "it", "ar", "ou"),
    *("ing", "the", "and", "ion", "\u0120t", "\u0120a", "\u0120s", "\u0120w", "\u0120the", "\u0120an", "\u0120and"),
)
_WORDS = (
    *("the", "falcon", "sees", "a", "small", "red", "stone", "and", "then", "it", "flies", "over", "river", "to"),
    *("rest", "in", "an", "old", "tree", "while", "rain", "is", "falling", "on", "green", "hills", "near", "our"),
    *("town", "where", "people", "read", "write", "think", "about", "light", "water", "fire", "wind", "snow"),
)


def make_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of 288 ids: 3 special tokens, 256 bytes, 29 merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL_TOKENS, *alphabet, *_MERGES]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=_merges(), fuse_unk=False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=template
    )


def _merges() -> list[tuple[str, str]]:
    """Return the merge that makes each piece: the two parts that the merges before it leave of it."""
    merges: list[tuple[str, str]] = []
    for piece in _MERGES:
        parts = list(piece)
        for left, right in merges:
            index = 0
            while index < len(parts) - 1:
                if (parts[index], parts[index + 1]) == (left, right):
                    parts[index : index + 2] = [left + right]
                index += 1
        left, right = parts
        merges.append((left, right))
    return merges


def make_tiny_target(
    folder: str | Path,
    *,
    num_layers: int = 8,
    seed: int = 0,
    dtype: Literal["float32", "bfloat16", "float16"] = "float32",
    vocab: int = 300,
    hidden_size: int = 32,
    template: str = "chatml",
    tied: bool = False,
    max_position_embeddings: int = 2048,
) -> Path:
    """Write a random Llama with its tokenizer as an ordinary model folder and return the folder.

    Norm weights lie far from 1 and the head is sharp, so that a state taken before the final norm, from the next layer
    or from the next row is plainly wrong rather than slightly off.

    Args:
        folder: where to write; made when missing.
        num_layers: decoder layers; 6 or more have default auxiliary layers.
        seed: of the weights.
        dtype: of the stored weights.
        vocab: rows of embedding and head; the tokenizer has 288 ids, the rest is padding as in real checkpoints.
        hidden_size: width; 4 heads, 2 key-value heads.
        template: "chatml", "generation" (marks assistant text), "thinking" (rewrites history), or a template's text.
        tied: whether head and input embeddings share one matrix.
        max_position_embeddings: longest input.
    """
    folder = Path(folder)
    tokenizer = make_tokenizer(TEMPLATES.get(template, template))
    bos, _, eos = (SPECIAL_TOKENS.index(token) for token in SPECIAL_TOKENS)  # their ids come first
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=None,
    )
    model = LlamaForCausalLM(config)
    _randomise(model, seed)
    model.to(getattr(torch, dtype))
    model.generation_config = GenerationConfig(bos_token_id=bos, eos_token_id=[eos, bos], do_sample=False)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def _randomise(model: LlamaForCausalLM, seed: int) -> None:
    """Draw every weight from one generator, in name order: the module order of a library release is no input."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.ndim == 1:
            parameter.copy_(0.5 + 1.5 * torch.rand(parameter.shape, generator=generator))
        else:
            scale = 1.0 if "embed_tokens" in name else parameter.shape[1] ** -0.5 * (3.0 if "lm_head" in name else 1.0)
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def make_chats(path: str | Path, n: int = 20, seed: int = 0, *, max_words: int = 24) -> Path:
    """Write `n` chats as JSONL, `{"id", "messages"}` a line, one to three turns, some with a system turn."""
    draw = random.Random(seed)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8", newline="\n") as out:
        for index in range(n):
            out.write(json.dumps({"id": f"chat-{seed}-{index:05d}", "messages": _messages(draw, max_words)}) + "\n")
    return path


def _messages(draw: random.Random, max_words: int) -> list[dict[str, str]]:
    def say() -> str:
        return " ".join(draw.choice(_WORDS) for _ in range(draw.randint(3, max_words)))

    messages = [{"role": "system", "content": say()}] if draw.random() < 0.3 else []
    for _ in range(draw.randint(1, 3)):
        messages += [{"role": "user", "content": say()}, {"role": "assistant", "content": say() + "."}]
    return messages


def make_tiny_store(
    folder: str | Path, *, target: str | Path | None = None, n: int = 20, seed: int = 0, **config: Any
) -> Path:
    """Precompute a store of `n` generated chats in this process, without Ray, and return its folder.

    Args:
        folder: parent of `target`, `chats.jsonl` and `store`.
        target: a target folder, or None for a tiny one made in `folder`.
        n: number of chats.
        seed: of chats and target.
        config: further fields of `PrecomputeConfig`.
    """
    from eyas.pipeline.cluster import capture_in_process
    from eyas.pipeline.config import PrecomputeConfig
    from eyas.pipeline.precompute import precompute

    folder = Path(folder)
    target = make_tiny_target(folder / "target", seed=seed) if target is None else Path(target)
    chats = make_chats(folder / "chats.jsonl", n, seed)
    defaults = {"shard_tokens": 1024, "topk": 8, "draft_vocab_size": 128, "heldout_fraction": 0.2}
    settings = PrecomputeConfig(chats=(str(chats),), target=str(target), out=str(folder / "store"), **defaults | config)
    precompute(settings, capture=capture_in_process)
    return folder / "store"
