"""Small random drafts and batches for the tests of the training maths; everything is a function of a seed."""

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from eyas.train.batch import MaskPreset, PackedBatch, make_batch
from eyas.train.drafts.config import Eagle3Config
from eyas.train.drafts.eagle3 import Eagle3Draft


def _config(**changes: object) -> Eagle3Config:
    values: dict = {
        "hidden_size": 32,
        "target_hidden_size": 24,
        "num_aux_hidden_states": 3,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 60,
        "draft_vocab_size": 20,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 64,
        "initializer_range": 0.2,  # large enough that the attention and the loss are far from uniform
    }
    return Eagle3Config(**values | changes)


def _draft(*, attention: str = "auto", seed: int = 3, **changes: object) -> Eagle3Draft:
    config = _config(**changes)
    ids = torch.arange(config.draft_vocab_size) * 3 if config.maps_vocabulary else None
    draft = Eagle3Draft(config, draft_vocab_ids=ids, attention=attention)
    draft.initialize(seed)
    return draft


def _document(length: int, seed: int, config: Eagle3Config) -> dict[str, Tensor]:
    """Raw arrays of one document: half of its tokens belong to assistant spans of three, every row is stored."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.arange(length)
    spans = torch.where(positions % 6 < 4, 0, 1 + positions // 6)
    if length < 6:
        spans = torch.ones_like(positions)
    return {
        "input_ids": torch.randint(config.vocab_size, (length,), generator=generator),
        "span_ids": spans,
        "aux_hidden_states": torch.randn(length, config.fc_width, generator=generator),
        "kept": torch.ones(length, dtype=torch.bool),
        "target_draft_ids": torch.randint(-1, config.draft_vocab_size, (length,), generator=generator),
        "probs": torch.randn(length, config.draft_vocab_size, generator=generator).softmax(-1),
    }


def _batch(documents: Sequence[dict[str, Tensor]], preset: MaskPreset = "nemo") -> tuple[PackedBatch, Tensor]:
    """(batch, target probabilities of its stored rows)."""
    packed = {name: torch.cat([document[name] for document in documents]) for name in documents[0]}
    probs = packed.pop("probs")
    lengths = [document["input_ids"].shape[0] for document in documents]
    return make_batch(document_lengths=lengths, preset=preset, **packed), probs


@pytest.fixture
def make_config() -> Callable[..., Eagle3Config]:
    return _config


@pytest.fixture
def make_draft() -> Callable[..., Eagle3Draft]:
    return _draft


@pytest.fixture
def make_document() -> Callable[..., dict[str, Tensor]]:
    return _document


@pytest.fixture
def pack() -> Callable[..., tuple[PackedBatch, Tensor]]:
    return _batch
