"""How many bytes a store takes, from its fields alone."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from eyas.cache_format.config import EstimateConfig
from eyas.cache_format.report import Report
from eyas.cache_format.schema import FieldSpec, store_fields
from eyas.cache_format.tables import bytes_text, render, table

__all__ = ["BOOKKEEPING_BYTES", "FieldSize", "estimate", "estimate_fields"]

BOOKKEEPING_BYTES = 5
"""Bytes a token beside the arrays: input id (4) and loss mask (1)."""

TARGETS = {
    "SmolLM2-135M": 576,
    "Llama-3.2-1B": 2048,
    "Llama-3.1-8B": 4096,
    "Qwen3-32B": 5120,
    "Llama-3.3-70B": 8192,
}
"""Hidden sizes of well-known targets, from their published config.json."""


@dataclass(frozen=True)
class FieldSize:
    """Estimated size of one field."""

    name: str
    bytes_per_token: float
    """Averaged over all tokens of the data."""


def estimate_fields(fields: Sequence[FieldSpec], kept_share: float) -> list[FieldSize]:
    """Return the bytes per token of every field, and of ids and mask.

    Args:
        fields: what is stored.
        kept_share: kept rows over tokens.
    """
    sizes = [FieldSize(f.name, f.row_bytes * (1.0 if f.rows == "token" else kept_share)) for f in fields]
    return [FieldSize("input_ids, loss_mask", BOOKKEEPING_BYTES), *sizes]


def _fields(config: EstimateConfig) -> tuple[FieldSpec, ...]:
    return store_fields(
        aux_layer_outputs=range(config.num_aux_layers),
        hidden_size=config.hidden_size,
        hidden_dtype=config.hidden_dtype,
        supervision=config.supervision,
        topk=config.topk,
        draft_vocab_size=config.draft_vocab_size,
    )


def _total(config: EstimateConfig) -> float:
    return sum(size.bytes_per_token for size in estimate_fields(_fields(config), config.kept_share))


def estimate(config: EstimateConfig) -> Report:
    """Return the sizing tables: this configuration by field, and well-known targets by supervision."""
    by_field = table("Bytes per token", "field", "bytes/token", "total")
    sizes = estimate_fields(_fields(config), config.kept_share)
    for size in [*sizes, FieldSize("sum", sum(s.bytes_per_token for s in sizes))]:
        total = bytes_text(size.bytes_per_token * config.tokens)
        by_field.add_row(size.name, f"{size.bytes_per_token:,.0f}", total)
    known = table(
        f"Well-known targets: bytes per token, and {config.tokens:,} tokens",
        "target",
        "hidden",
        "topk",
        "hidden + topk",
    )
    for name, hidden_size in TARGETS.items():
        row = []
        for supervision in (("hidden",), ("topk",), ("hidden", "topk")):
            per_token = _total(replace(config, hidden_size=hidden_size, supervision=supervision))
            row.append(f"{per_token:,.0f} ({bytes_text(per_token * config.tokens)})")
        known.add_row(f"{name} (H = {hidden_size})", *row)
    return Report(f"{render(by_field)}\n{render(known)}")
