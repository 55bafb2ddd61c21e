"""From a store's fields to what a draft is taught: which encoding, which draft vocabulary, which tensors.

hidden   last_hidden_state projected by the stored lm_head, restricted to W, in fp32: exact, any draft vocabulary
topk     the target's top-k with the tail inside W as one class, needs no lm_head
probs    dense probabilities over the store's own draft vocabulary, upcast to fp32 and renormalised
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from eyas.cache_format.manifest import Identity
from eyas.cache_format.reader import StoreReader
from eyas.cache_format.schema import Supervision as Encoding
from eyas.cache_format.vocab import VocabMap, choose_draft_vocab
from eyas.train.errors import SupervisionError
from eyas.train.loader import to_torch
from eyas.train.objectives.supervision import (
    DenseSupervision,
    HiddenSupervision,
    Supervision,
    TargetHead,
    TopKSupervision,
)

FIELDS: Mapping[Encoding, tuple[str, ...]] = {
    "hidden": ("last_hidden_state",),
    "topk": ("target_topk_ids", "target_topk_logprobs", "target_logz", "target_draft_logz"),
    "probs": ("target_probs",),
}
"""Stored fields that each encoding reads; best first: exact, then tail-aware, then rounded."""

BuildSupervision = Callable[[Mapping[str, Tensor]], Supervision]
"""Fields of one micro-batch, on the device -> its supervision."""


def choose_encoding(identity: Identity, asked: Encoding | None) -> Encoding:
    """Return the encoding to train from: the one asked for, or the best that the store holds.

    Raises:
        SupervisionError: the store does not hold what was asked for.
    """
    if asked is None:
        return next(encoding for encoding in FIELDS if encoding in identity.supervision)
    if asked not in identity.supervision:
        raise SupervisionError(
            f"--supervision {asked} is not in this store, which holds {', '.join(identity.supervision)}; choose one of "
            f"these, or capture again with `eyas precompute --supervision {asked}`"
        )
    return asked


def choose_vocabulary(reader: StoreReader, encoding: Encoding, size: int | None) -> VocabMap:
    """Return the draft vocabulary: the store's own, or with `hidden` one of another size from the stored counts.

    Raises:
        SupervisionError: another size than the store's with `topk` or `probs`.
        ConfigError: larger than the target's vocabulary.
    """
    stored = reader.vocab
    if size is None or size == len(stored):
        return stored
    if encoding != "hidden":
        raise SupervisionError(
            f"--draft-vocab-size {size} differs from the store's {len(stored)}, and {encoding} supervision was "
            f"normalised on the store's: train with --supervision hidden, leave --draft-vocab-size out, or capture "
            f"again with `eyas precompute --draft-vocab-size {size}`"
        )
    special = [index for index in range(len(reader.target.tokens)) if reader.target.tokens.is_special(index)]
    return choose_draft_vocab(reader.token_counts, size, [*end_ids(reader), *special])


def end_ids(reader: StoreReader) -> list[int]:
    """Return the ids that end an answer: a draft that cannot say them could never propose the end of a turn."""
    found = reader.target.generation_config.get("eos_token_id", reader.target.config.get("eos_token_id"))
    return found if isinstance(found, list) else [] if found is None else [found]


def supervision_builder(
    reader: StoreReader, encoding: Encoding, vocab: VocabMap, device: torch.device
) -> BuildSupervision:
    """Return the function that turns a micro-batch's fields into its supervision."""
    builders: dict[Encoding, Callable[[], BuildSupervision]] = {
        "hidden": lambda: _hidden(target_head(reader, vocab, device)),
        "topk": lambda: _topk(vocab, device),
        "probs": lambda: _probs,
    }
    return builders[encoding]()


def target_head(reader: StoreReader, vocab: VocabMap, device: torch.device) -> TargetHead:
    """Return the stored lm_head restricted to the draft vocabulary, in fp32, with the target's logit transform."""
    transform = reader.identity.logit_transform
    bias = reader.target.lm_head_bias()
    if transform.bias and bias is None:
        raise SupervisionError(f"{reader.root}: the manifest names an lm_head bias that target/ does not hold")
    return TargetHead(
        weight=_float32(reader.target.lm_head(), vocab.ids).to(device),
        bias=None if bias is None else _float32(bias, vocab.ids).to(device),
        scale=transform.scale,
        softcap=transform.softcap,
    )


def _float32(array: np.ndarray, ids: np.ndarray) -> Tensor:
    return to_torch(np.ascontiguousarray(array[ids])).to(torch.float32)


def _hidden(head: TargetHead) -> BuildSupervision:
    def build(fields: Mapping[str, Tensor]) -> Supervision:
        return HiddenSupervision(last_hidden_state=fields["last_hidden_state"], head=head)

    return build


def _topk(vocab: VocabMap, device: torch.device) -> BuildSupervision:
    to_draft = torch.from_numpy(vocab.to_draft(np.arange(vocab.vocab_size))).to(device)

    def build(fields: Mapping[str, Tensor]) -> Supervision:
        return TopKSupervision.from_store(
            draft_ids=to_draft[fields["target_topk_ids"]],
            topk_logprobs=fields["target_topk_logprobs"],
            target_logz=fields["target_logz"],
            target_draft_logz=fields["target_draft_logz"],
        )

    return build


def _probs(fields: Mapping[str, Tensor]) -> Supervision:
    # fp16 rounds thousands of small probabilities to zero, so a stored row sums to 0.9999 or so (F13).
    probs = fields["target_probs"].to(torch.float32)
    return DenseSupervision(probs=probs / probs.sum(-1, keepdim=True))
