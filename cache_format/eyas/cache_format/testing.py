"""Small synthetic stores for tests: ragged random samples written through the real writer."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eyas.cache_format.frozen import write_frozen_target
from eyas.cache_format.manifest import Identity, LogitTransform, Manifest, TargetIdentity
from eyas.cache_format.plan import build_plan
from eyas.cache_format.samples import PlannedSample, Span
from eyas.cache_format.schema import FORMAT_VERSION, FieldSpec, kept_rows, store_fields
from eyas.cache_format.vocab import VocabMap, choose_draft_vocab
from eyas.cache_format.writer import ShardWriter, complete_store, create_store

__all__ = ["make_samples", "make_store", "random_rows"]

TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "vocab_size": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_samples(num_samples: int, *, vocab_size: int = 64, seed: int = 0, longest: int = 24) -> list[PlannedSample]:
    """Return ragged samples of one or two user/assistant exchanges, lengths between 4 and `longest`."""
    random = np.random.default_rng(seed)
    samples = []
    for number in range(num_samples):
        length = int(random.integers(4, longest + 1))
        cuts = [0, max(1, length // 4), max(2, length // 2), max(3, 3 * length // 4), length]
        roles = ("user", "assistant", "user", "assistant")
        spans = tuple(Span(role, turn, cuts[turn], cuts[turn + 1]) for turn, role in enumerate(roles))
        mask = np.zeros(length, np.uint8)
        for span in spans:
            mask[span.start : span.end] = span.role == "assistant"
        ids = random.integers(3, vocab_size, length).astype(np.uint32)
        samples.append(PlannedSample(f"chat-{number}", "synthetic", number, number % 5 == 4, ids, mask, spans))
    return samples


def random_rows(spec: FieldSpec, num_rows: int, random: np.random.Generator) -> np.ndarray:
    """Return plausible values of a field: finite floats, ids below 64."""
    shape = spec.shape(num_rows)
    if spec.dtype == "uint32":
        return random.integers(0, 64, shape).astype(np.uint32)
    return random.standard_normal(shape).astype(spec.numpy_dtype)


def make_store(
    root: Path | str,
    *,
    samples_per_shard: Sequence[int] = (3, 4),
    container: str = "zarr",
    hidden_dtype: str = "bfloat16",
    supervision: Sequence[str] = ("hidden", "topk"),
    topk: int = 8,
    draft_vocab_size: int = 32,
    chunk_bytes: int = 1024,
    hidden_size: int = 16,
    longest: int = 24,
    seed: int = 0,
    quarantine: Sequence[tuple[int, int]] = (),
    rows_of: Callable[[FieldSpec, int, np.random.Generator], np.ndarray] = random_rows,
    complete: bool = True,
) -> Path:
    """Write a store of random values with a tied random target of 8 layers and 64 tokens.

    Args:
        quarantine: (shard, row) pairs that are recorded as not captured.
        rows_of: makes the rows of a field for one sample.
        complete: whether to write complete.json.
    """
    root = Path(root)
    random = np.random.default_rng(seed)
    samples = make_samples(sum(samples_per_shard), seed=seed, longest=longest)
    shards = [[samples.pop(0) for _ in range(count)] for count in samples_per_shard]
    everything = [s for shard in shards for s in shard]
    vocab_size = TINY_CONFIG["vocab_size"]
    counts = np.bincount(
        np.concatenate([s.input_ids[s.loss_mask == 1] for s in everything if not s.heldout]), minlength=vocab_size
    ).astype(np.int64)
    vocab = choose_draft_vocab(counts, draft_vocab_size, always_keep=(2,))
    plan = build_plan(
        shards, {"rows_read": len(everything), "samples": len(everything), "dropped": {}, "duplicates": 0}
    )
    fields = store_fields(
        aux_layer_outputs=(1, 3, 4),
        hidden_size=hidden_size,
        hidden_dtype=hidden_dtype,
        supervision=supervision,
        topk=topk,
        draft_vocab_size=draft_vocab_size,
    )
    table = (random.standard_normal((vocab_size, hidden_size)) * 0.3).astype(fields[0].numpy_dtype)
    write_frozen_target(
        root,
        config={**TINY_CONFIG, "hidden_size": hidden_size, "head_dim": hidden_size // 2},
        generation_config={"eos_token_id": 2},
        tensors={"embed_tokens.weight": table, "norm.weight": np.ones(hidden_size, fields[0].numpy_dtype)},
        token_bytes=[f" t{i}".encode() for i in range(vocab_size)],
        special=[i < 3 for i in range(vocab_size)],
        copy_files={},
    )
    manifest = Manifest(
        FORMAT_VERSION, _identity(plan.digest, vocab, fields, container, chunk_bytes, supervision, topk), {}
    )
    create_store(root, manifest=manifest, plan=plan, shards=shards, token_counts=counts, vocab=vocab)
    for shard, shard_samples in enumerate(shards):
        with ShardWriter(root, shard) as writer:
            for row, sample in enumerate(shard_samples):
                num_rows = {"token": len(sample.input_ids), "kept": int(kept_rows(sample.loss_mask).sum())}
                arrays = {spec.name: rows_of(spec, num_rows[spec.rows], random) for spec in fields}
                if (shard, row) in quarantine:
                    writer.quarantine(row, "made so by a test")
                else:
                    writer.append(row, arrays)
            writer.commit({"made_by": "testing"})
    if complete:
        complete_store(root)
    return root


def _identity(
    plan_digest: str,
    vocab: VocabMap,
    fields: tuple[FieldSpec, ...],
    container: str,
    chunk_bytes: int,
    supervision: Sequence[str],
    topk: int,
) -> Identity:
    return Identity(
        plan_digest=plan_digest,
        tokenizer_digest="tokenizer",
        template_digest="template",
        template_switches={},
        target=TargetIdentity("tiny", "", "config", "weights", fields[0].dtype, "none", 8, fields[0].width or 1, 64),
        aux_layer_outputs=(1, 3, 4),
        logit_transform=LogitTransform(),
        embedding_multiplier=1.0,
        supervision=tuple(supervision),  # type: ignore[arg-type]
        topk=topk,
        draft_vocab_size=len(vocab),
        draft_vocab_digest=vocab.digest,
        container=container,  # type: ignore[arg-type]
        chunk_bytes=chunk_bytes,
        fields=fields,
        max_length=256,
    )
