"""One sample, position by position: token, mask, role, whether it can be drafted, and what the target thought next.

Row t shows the distribution that the target computed AT position t, the one of token t + 1.
"""

from typing import Any

import numpy as np

from eyas.cache_format.reader import StoreReader
from eyas.cache_format.tables import render, shown, table

__all__ = ["sample_lines", "sample_record"]


def _next_tokens(reader: StoreReader, index: int, top: int) -> dict[int, list[tuple[int, float]]]:
    """Return {position: [(token id, probability)]}, most probable first, from whichever encoding is stored."""
    positions = reader.kept_positions(index)
    names = {spec.name for spec in reader.identity.fields}
    if "target_topk_ids" in names:
        arrays = reader.read(index, ("target_topk_ids", "target_topk_logprobs"))
        ids, probabilities = arrays["target_topk_ids"], np.exp(arrays["target_topk_logprobs"].astype(np.float32))
    elif "target_probs" in names:
        probs = reader.read(index, ("target_probs",))["target_probs"].astype(np.float32)
        order = np.argsort(-probs, axis=1, kind="stable")[:, :top]
        ids, probabilities = reader.vocab.ids[order], np.take_along_axis(probs, order, 1)
    else:
        argmax = reader.read(index, ("target_argmax",))["target_argmax"][:, None]
        ids, probabilities = argmax, np.full(argmax.shape, np.nan, np.float32)
    return {
        int(position): [(int(i), float(p)) for i, p in zip(row_ids[:top], row_probs[:top], strict=True)]
        for position, row_ids, row_probs in zip(positions, ids, probabilities, strict=True)
    }


def sample_record(reader: StoreReader, index: int, *, top: int) -> dict[str, Any]:
    """Return one sample as plain values; without next tokens where its shard is not captured yet.

    Args:
        index: plan row.
        top: next tokens at each kept position.

    Raises:
        CorruptStoreError: a stored byte is wrong.
    """
    tokens = reader.target.tokens
    ids, mask = reader.input_ids(index), reader.loss_mask(index)
    roles = np.full(len(ids), "", dtype=object)
    for span in reader.spans(index):
        roles[span.start : span.end] = span.role
    following = _next_tokens(reader, index, top) if reader.available[index] else {}
    drafted = reader.vocab.t2d
    return {
        "sample_id": reader.plan.sample_ids[index].tobytes().hex(),
        "plan_row": index,
        **{name: reader.plan.text(name, index) for name in ("conversation_id", "source", "source_row", "split")},
        "shard": int(reader.plan.shard[index]),
        "row": int(reader.plan.row[index]),
        "captured": bool(reader.available[index]),
        "text": tokens.decode(ids),
        "positions": [
            {
                "position": t,
                "id": int(ids[t]),
                "token": tokens.decode(ids[t : t + 1]),
                "role": roles[t],
                "loss_mask": int(mask[t]),
                "in_draft_vocab": bool(drafted[ids[t]]),
                "next": [
                    {"id": i, "token": tokens.decode([i]), "probability": None if np.isnan(p) else p}
                    for i, p in following.get(t, [])
                ],
            }
            for t in range(len(ids))
        ],
    }


def _token_text(text: str) -> str:
    return shown(text.replace("\n", "\\n").replace("\t", "\\t"))


def sample_lines(reader: StoreReader, index: int, *, top: int, max_tokens: int) -> str:
    """Return one sample as a table, at most `max_tokens` positions (0: all)."""
    record = sample_record(reader, index, top=top)
    head = (
        f"sample {record['sample_id']} (plan row {index}), {record['split']}, from {shown(str(record['source']))} "
        f"row {record['source_row']}, shard {record['shard']:06d} row {record['row']}"
        f"{'' if record['captured'] else ' -- NOT CAPTURED'}\n\n{_paragraph(record['text'])}\n"
    )
    positions = record["positions"][: max_tokens or None]
    rows = table("", "position", "id", "token", "role", "mask", "draft", f"next tokens (top {top})")
    for column in (2, 3, 6):
        rows.columns[column].justify = "left"
    for p in positions:
        following = "  ".join(f"{_token_text(n['token'])!s}{_probability(n['probability'])}" for n in p["next"])
        rows.add_row(
            str(p["position"]), str(p["id"]), _token_text(p["token"]), shown(p["role"]), str(p["loss_mask"]),
            "yes" if p["in_draft_vocab"] else "no", following,
        )  # fmt: skip
    more = len(record["positions"]) - len(positions)
    return head + "\n" + render(rows) + (f"... {more} more positions (--max-tokens 0 shows all)\n" if more else "")


def _paragraph(text: str) -> str:
    return "\n".join(shown(line) for line in text.split("\n"))


def _probability(probability: float | None) -> str:
    return "" if probability is None else f" {probability:.3f}"
