"""One packed micro-batch in the slot frame, the one shift, and the presets of the loss mask.

Frames. A *raw* array is indexed by token position: entry t belongs to token x[t]. A *slot* array is what a draft
sees at serving time: slot t holds the target's features of position t, the token x[t+1] that the target has just
emitted, and the target's distribution of x[t+2], which is the raw distribution at position t+1. Documents lie one
after the other on a single axis of N slots, without padding; nothing on disk is shifted, `shift_left` is the only
place where raw becomes slot. Alignment as in NeMo AutoModel `components/speculative/eagle/target.py` and in every
serving engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from eyas.cache_format.errors import ConfigError
from eyas.train.errors import TrainError

MaskPreset = Literal["serving", "nemo", "eagle"]


class BatchError(TrainError):
    """The arrays of a batch contradict each other (lengths, or supervised slots without a stored target row)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedLayout:
    """Where the documents of a packed axis begin and end."""

    document_lengths: tuple[int, ...]
    """Tokens of each document, in order; every length is at least 1."""
    cu_seqlens: Int[Tensor, "D1"]
    """int32 [D+1]: first slot of each document, then N (the layout of variable-length flash attention)."""
    offsets: Int[Tensor, "N"]
    """int64 [N]: position of the slot inside its document."""
    doc_remaining: Int[Tensor, "N"]
    """int64 [N]: tokens of the same document after this slot; 0 at the document's last slot."""

    @classmethod
    def from_lengths(cls, document_lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedLayout:
        """Lay out documents of the given lengths; BatchError when there is none or one is empty."""
        lengths = torch.tensor(list(document_lengths), dtype=torch.int64)
        if lengths.numel() == 0 or int(lengths.min()) < 1:
            raise BatchError(f"a packed batch needs documents of at least one token, got lengths {document_lengths}")
        ends = lengths.cumsum(0)
        starts = ends - lengths
        offsets = torch.arange(int(ends[-1])) - starts.repeat_interleave(lengths)
        return cls(
            document_lengths=tuple(int(n) for n in lengths),
            cu_seqlens=torch.cat((starts[:1], ends)).to(torch.int32).to(device),
            offsets=offsets.to(device),
            doc_remaining=(lengths.repeat_interleave(lengths) - 1 - offsets).to(device),
        )

    @property
    def num_slots(self) -> int:
        """N, the slots of all documents together."""
        return int(self.offsets.shape[0])

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """[start, end) of every document, as Python integers (no device synchronisation)."""
        bounds, start = [], 0
        for length in self.document_lengths:
            bounds.append((start, start + length))
            start += length
        return bounds

    def to(self, device: torch.device | str) -> PackedLayout:
        """The same layout with its tensors on `device`."""
        return replace(
            self,
            cu_seqlens=self.cu_seqlens.to(device),
            offsets=self.offsets.to(device),
            doc_remaining=self.doc_remaining.to(device),
        )


def shift_left(values: Shaped[Tensor, "N ..."], doc_remaining: Int[Tensor, "N"], steps: int = 1) -> Tensor:
    """Move every document `steps` slots to the left and fill its tail with zeros (False for booleans).

    Equal to a global shift whose result is kept only where `steps <= doc_remaining`, so nothing ever crosses into
    the neighbouring document.
    """
    keep = (doc_remaining >= steps).reshape(-1, *([1] * (values.dim() - 1)))
    return torch.where(keep, values.roll(-steps, dims=0), torch.zeros_like(values))


def _serving_mask(span_ids: Tensor, remaining: Tensor) -> Tensor:
    emitted = shift_left(span_ids, remaining)
    return (emitted > 0) & (emitted == shift_left(span_ids, remaining, 2))


def _nemo_mask(span_ids: Tensor, remaining: Tensor) -> Tensor:
    return shift_left(span_ids, remaining) > 0


def _eagle_mask(span_ids: Tensor, remaining: Tensor) -> Tensor:
    return (span_ids > 0) & (remaining > 0)


MASK_PRESETS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "serving": _serving_mask,
    "nemo": _nemo_mask,
    "eagle": _eagle_mask,
}


def slot_loss_mask(
    span_ids: Int[Tensor, "N"], doc_remaining: Int[Tensor, "N"], preset: str = "serving"
) -> Bool[Tensor, "N"]:
    """Which slots are supervised at TTT step 0, from raw span numbers (0: not assistant, else 1 + span index).

    - `serving`: x[t+1] and x[t+2] lie in the same assistant span, exactly the slots that serving drafts.
    - `nemo`: x[t+1] is an assistant token (NeMo AutoModel, speculators); also supervises what follows a span.
    - `eagle`: x[t] is an assistant token (original EAGLE, SpecForge); it starves the first drafted token. The last
      slot of a document is left out, for it has no next token.

    Span numbers are needed because two assistant turns may touch, where runs of ones cannot tell them apart.
    """
    if preset not in MASK_PRESETS:
        raise ConfigError(f"unknown mask preset {preset!r}; expected one of {', '.join(MASK_PRESETS)}")
    return MASK_PRESETS[preset](span_ids.to(torch.int64), doc_remaining)


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """One micro-batch of packed documents in the slot frame; built by `make_batch`."""

    layout: PackedLayout
    """Document boundaries of the N slots."""
    input_ids: Int[Tensor, "N"]
    """int64: slot t carries x[t+1]; 0 at the last slot of a document."""
    aux_hidden_states: Float[Tensor, "N AHt"]
    """Target features of position t, the captured layers side by side in the order of `aux_layer_outputs`."""
    position_ids: Int[Tensor, "N"]
    """int64: rotary position of slot t at TTT step 0."""
    loss_mask: Bool[Tensor, "N"]
    """Supervised by the mask preset, whether or not the target's argmax lies in the draft vocabulary."""
    target_draft_ids: Int[Tensor, "N"]
    """int64: draft id of the target's full-vocabulary argmax for x[t+2]; -1 outside W or where no row is stored."""
    supervision_rows: Int[Tensor, "N"]
    """int64: row of the compact supervision tensors that holds the distribution of x[t+2]; -1 where none is stored."""

    @property
    def position_mask(self) -> Bool[Tensor, "N"]:
        """Slots that enter the loss at TTT step 0: supervised, and the target's argmax is a draft token."""
        return self.loss_mask & (self.target_draft_ids >= 0)

    def to(self, device: torch.device | str) -> PackedBatch:
        """The same batch with every tensor on `device`."""
        return PackedBatch(
            layout=self.layout.to(device),
            input_ids=self.input_ids.to(device),
            aux_hidden_states=self.aux_hidden_states.to(device),
            position_ids=self.position_ids.to(device),
            loss_mask=self.loss_mask.to(device),
            target_draft_ids=self.target_draft_ids.to(device),
            supervision_rows=self.supervision_rows.to(device),
        )


def make_batch(
    *,
    document_lengths: Sequence[int],
    input_ids: Int[Tensor, "N"],
    span_ids: Int[Tensor, "N"],
    aux_hidden_states: Float[Tensor, "N AHt"],
    kept: Bool[Tensor, "N"],
    target_draft_ids: Int[Tensor, "R"],
    preset: str = "serving",
) -> PackedBatch:
    """Turn raw arrays of concatenated documents into a batch in the slot frame.

    `kept` marks the raw positions whose target distribution is stored; the compact arrays (`target_draft_ids`, and
    the tensors of the supervision) hold one row for each of them, in order, documents concatenated. A supervised
    slot whose target row is not stored raises BatchError.
    """
    layout = PackedLayout.from_lengths(document_lengths, input_ids.device)
    _check_lengths(layout.num_slots, input_ids, span_ids, aux_hidden_states, kept, target_draft_ids)
    remaining = layout.doc_remaining
    # One is added around the shift so that the zero fill means "no row".
    raw_rows = torch.where(kept, kept.cumsum(0), 0)
    rows = shift_left(raw_rows, remaining) - 1
    loss_mask = slot_loss_mask(span_ids, remaining, preset)
    uncovered = int((loss_mask & (rows < 0)).sum())
    if uncovered:
        raise BatchError(
            f"{uncovered} supervised slots (mask preset {preset!r}) have no stored target row: "
            "the kept rows of the store do not belong to these spans; verify the store with `eyas inspect --verify`"
        )
    draft_ids = torch.full_like(rows, -1)
    draft_ids[rows >= 0] = target_draft_ids.to(torch.int64)[rows[rows >= 0]]
    return PackedBatch(
        layout=layout,
        input_ids=shift_left(input_ids.to(torch.int64), remaining),
        aux_hidden_states=aux_hidden_states,
        position_ids=layout.offsets,
        loss_mask=loss_mask,
        target_draft_ids=draft_ids,
        supervision_rows=rows,
    )


def _check_lengths(
    num_slots: int, input_ids: Tensor, span_ids: Tensor, aux: Tensor, kept: Tensor, target_draft_ids: Tensor
) -> None:
    for name, tensor in (("input_ids", input_ids), ("span_ids", span_ids), ("aux_hidden_states", aux), ("kept", kept)):
        if tensor.shape[0] != num_slots:
            raise BatchError(f"{name} has {tensor.shape[0]} rows, the document lengths add up to {num_slots}")
    if target_draft_ids.shape[0] != int(kept.sum()):
        raise BatchError(f"target_draft_ids has {target_draft_ids.shape[0]} rows, kept marks {int(kept.sum())}")
