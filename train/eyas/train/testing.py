"""A tiny synthetic store, written through the contract's own writer, so that train tests need no capture.

The "target" is a bigram model: the last hidden state is a function of the present token, the captured layers are noisy
functions of it, and the stored supervision follows exactly from the stored lm_head. A draft can learn it in seconds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from eyas.cache_format.frozen import write_frozen_target
from eyas.cache_format.manifest import Identity, LogitTransform, Manifest, TargetIdentity
from eyas.cache_format.plan import Plan, build_plan
from eyas.cache_format.samples import PlannedSample, Span
from eyas.cache_format.schema import (
    FORMAT_VERSION,
    FieldSpec,
    Supervision,
    aux_field,
    kept_rows,
    numpy_dtype,
    store_fields,
)
from eyas.cache_format.vocab import VocabMap, choose_draft_vocab
from eyas.cache_format.writer import ShardWriter, complete_store, create_store

AUX_LAYERS = (1, 3, 4)
NUM_LAYERS = 8


def make_store(
    path: Path,
    *,
    num_samples: int = 12,
    heldout: int = 3,
    hidden_size: int = 16,
    vocab_size: int = 40,
    draft_vocab_size: int = 24,
    supervision: Sequence[Supervision] = ("hidden", "topk", "probs"),
    topk: int = 8,
    hidden_dtype: str = "float32",
    probs_dtype: str = "float32",
    lengths: Sequence[int] | None = None,
    quarantined: Sequence[int] = (),
    samples_per_shard: int = 5,
    container: Literal["zarr", "arrow"] = "zarr",
    softcap: float | None = None,
    seed: int = 0,
) -> Path:
    """Write a complete store of `num_samples` random chats, the last `heldout` of them held out, and return its path.

    `lengths` overrides the random lengths (8 to 30 tokens); `quarantined` are plan rows without tensors.
    """
    target = BigramTarget(vocab_size, hidden_size, hidden_dtype, softcap, np.random.default_rng(seed))
    lengths = lengths or target.rng.integers(8, 30, num_samples).tolist()
    samples = [
        target.chat(index, length, is_heldout=index >= len(lengths) - heldout) for index, length in enumerate(lengths)
    ]
    shards = [samples[start : start + samples_per_shard] for start in range(0, len(samples), samples_per_shard)]
    plan = build_plan(shards, {"rows_read": len(samples), "samples": len(samples)})
    counts = _token_counts(samples, vocab_size)
    vocab = choose_draft_vocab(counts, draft_vocab_size)
    fields = store_fields(
        aux_layer_outputs=AUX_LAYERS,
        hidden_size=hidden_size,
        hidden_dtype=hidden_dtype,
        supervision=supervision,
        topk=topk,
        topk_dtype="float32",
        draft_vocab_size=len(vocab),
        probs_dtype=probs_dtype,
    )
    target.write_frozen(path)
    manifest = Manifest(FORMAT_VERSION, _identity(target, plan, vocab, fields, supervision, topk, container), {})
    create_store(path, manifest=manifest, plan=plan, shards=shards, token_counts=counts, vocab=vocab)
    for shard, rows in enumerate(shards):
        _write_shard(
            path,
            shard,
            rows,
            first=plan.shard_slice(shard).start,
            target=target,
            vocab=vocab,
            fields=fields,
            quarantined=quarantined,
        )
    complete_store(path)
    return path


class BigramTarget:
    """The synthetic target: lm_head(last_hidden_state[x_t]) is the distribution of x[t+1]."""

    def __init__(
        self, vocab_size: int, hidden_size: int, dtype: str, softcap: float | None, rng: np.random.Generator
    ) -> None:
        self.rng = rng
        self.vocab_size, self.hidden_size, self.dtype, self.softcap = vocab_size, hidden_size, dtype, softcap
        self.lm_head = self._random(vocab_size, hidden_size)
        self.embed_tokens = self._random(vocab_size, hidden_size)
        self.states = self._random(vocab_size, hidden_size)
        self.mixers = [self._random(hidden_size, hidden_size) / hidden_size**0.5 for _ in AUX_LAYERS]

    def _random(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(numpy_dtype(self.dtype)).astype(np.float32)

    def logits(self, last_hidden: np.ndarray) -> np.ndarray:
        """Full-vocabulary logits in float32 of stored states."""
        logits = last_hidden.astype(np.float32) @ self.lm_head.T
        return logits if self.softcap is None else self.softcap * np.tanh(logits / self.softcap)

    def chat(self, index: int, length: int, *, is_heldout: bool) -> PlannedSample:
        """One chat: random user tokens, then an assistant turn that follows the bigram, one token in ten aside."""
        prompt = min(length - 1, max(1, length // 4))
        ids = self.rng.integers(0, self.vocab_size, length)
        for position in range(prompt, length):
            if self.rng.random() < 0.9:
                ids[position] = self.logits(self.states[ids[position - 1]]).argmax()
        spans = (Span("user", 0, 0, prompt), Span("assistant", 1, prompt, length))
        mask = (np.arange(length) >= prompt).astype(np.uint8)
        return PlannedSample(f"chat-{index}", "synthetic", index, is_heldout, ids.astype(np.uint32), mask, spans)

    def capture(self, sample: PlannedSample) -> dict[str, np.ndarray]:
        """All token fields of a sample, in the stored dtype."""
        last = self.states[sample.input_ids]
        noise = 0.1 * self.rng.standard_normal((len(AUX_LAYERS), *last.shape))
        arrays = {aux_field(i): last @ mix + part for i, mix, part in zip(AUX_LAYERS, self.mixers, noise, strict=True)}
        return {
            name: array.astype(numpy_dtype(self.dtype))
            for name, array in (*arrays.items(), ("last_hidden_state", last))
        }

    def config(self) -> dict[str, Any]:
        """Its config.json: a Llama's, as far as a draft reads it."""
        return {
            "model_type": "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": 2 * self.hidden_size,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_hidden_layers": NUM_LAYERS,
            "vocab_size": self.vocab_size,
            "rms_norm_eps": 1e-5,
            "hidden_act": "silu",
            "rope_theta": 10000.0,
            "max_position_embeddings": 512,
        }

    def write_frozen(self, path: Path) -> None:
        """Write target/ of the store."""
        dtype = numpy_dtype(self.dtype)
        write_frozen_target(
            path,
            config=self.config(),
            generation_config={"eos_token_id": 0},
            tensors={
                "embed_tokens.weight": self.embed_tokens.astype(dtype),
                "norm.weight": np.ones(self.hidden_size, dtype),
                "lm_head.weight": self.lm_head.astype(dtype),
            },
            token_bytes=[f"<{index}>".encode() for index in range(self.vocab_size)],
            special=[index == 0 for index in range(self.vocab_size)],
            copy_files={},
        )


def supervision_fields(
    logits: np.ndarray, *, vocab: VocabMap, topk: int, topk_dtype: np.dtype, probs_dtype: np.dtype
) -> dict[str, np.ndarray]:
    """Every supervision field of rows of full-vocabulary logits [R, V], as the contract defines them."""
    logz = _logsumexp(logits)
    draft_logz = _logsumexp(logits[:, vocab.ids])
    order = np.argsort(-logits, axis=1, kind="stable")[:, :topk]
    return {
        "target_argmax": order[:, 0].astype(np.uint32),
        "target_logz": logz,
        "target_topk_ids": order.astype(np.uint32),
        "target_topk_logprobs": (np.take_along_axis(logits, order, 1) - logz[:, None]).astype(topk_dtype),
        "target_draft_logz": draft_logz,
        "target_probs": np.exp(logits[:, vocab.ids] - draft_logz[:, None]).astype(probs_dtype),
    }


def _write_shard(
    path: Path,
    shard: int,
    samples: Sequence[PlannedSample],
    *,
    first: int,
    target: BigramTarget,
    vocab: VocabMap,
    fields: Sequence[FieldSpec],
    quarantined: Sequence[int],
) -> None:
    specs = {spec.name: spec for spec in fields}
    topk = specs["target_topk_ids"].width if "target_topk_ids" in specs else 1
    probs_dtype = specs["target_probs"].numpy_dtype if "target_probs" in specs else np.dtype(np.float32)
    with ShardWriter(path, shard) as writer:
        for row, sample in enumerate(samples):
            if first + row in quarantined:
                writer.quarantine(row, "asked for by the test")
                continue
            arrays = target.capture(sample)
            kept = kept_rows(sample.loss_mask)
            arrays |= supervision_fields(
                target.logits(arrays["last_hidden_state"][kept]),
                vocab=vocab,
                topk=topk or 1,
                topk_dtype=np.dtype(np.float32),
                probs_dtype=probs_dtype,
            )
            writer.append(row, {name: arrays[name] for name in specs})
        writer.commit({})


def _identity(
    target: BigramTarget,
    plan: Plan,
    vocab: VocabMap,
    fields: tuple[FieldSpec, ...],
    supervision: Sequence[Supervision],
    topk: int,
    container: Literal["zarr", "arrow"],
) -> Identity:
    return Identity(
        plan_digest=plan.digest,
        tokenizer_digest="synthetic",
        template_digest="synthetic",
        template_switches={},
        target=TargetIdentity(
            name="synthetic-bigram",
            revision="0",
            config_digest="0",
            weights_digest="0",
            dtype=target.dtype,
            quantization="none",
            num_layers=NUM_LAYERS,
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
        ),
        aux_layer_outputs=AUX_LAYERS,
        logit_transform=LogitTransform(softcap=target.softcap),
        embedding_multiplier=1.0,
        supervision=tuple(supervision),
        topk=topk,
        draft_vocab_size=len(vocab),
        draft_vocab_digest=vocab.digest,
        container=container,
        chunk_bytes=4096,
        fields=fields,
        max_length=512,
    )


def _token_counts(samples: Sequence[PlannedSample], vocab_size: int) -> np.ndarray:
    counts = np.zeros(vocab_size, np.int64)
    for sample in samples:
        if not sample.heldout:
            np.add.at(counts, sample.input_ids[sample.loss_mask.astype(bool)].astype(np.int64), 1)
    return counts


def _logsumexp(logits: np.ndarray) -> np.ndarray:
    top = logits.max(1)
    return (top + np.log(np.exp(logits - top[:, None]).sum(1))).astype(np.float32)
