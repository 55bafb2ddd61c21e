"""The slot frame: the one shift, the presets of the mask and the rows that a slot asks for."""

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas.cache_format.errors import ConfigError
from eyas.train.batch import BatchError, PackedLayout, make_batch, shift_left, slot_loss_mask

# x0..x5: a user token, an assistant span of two, a user token, an assistant span of two.
SPANS = [0, 1, 1, 0, 2, 2]
MASKS = {
    "serving": [1, 0, 0, 1, 0, 0],
    "nemo": [1, 1, 0, 1, 1, 0],
    "eagle": [0, 1, 1, 0, 1, 0],
}


def six_tokens(preset, spans=SPANS):
    return make_batch(
        document_lengths=[6],
        input_ids=torch.arange(10, 16),
        span_ids=torch.tensor(spans),
        aux_hidden_states=torch.arange(6.0)[:, None],
        kept=torch.ones(6, dtype=torch.bool),
        target_draft_ids=torch.tensor([100, 101, -1, 103, 104, 105]),
        preset=preset,
    )


@pytest.mark.parametrize("preset", MASKS)
def test_six_tokens_pin_every_column(preset):
    batch = six_tokens(preset)
    assert batch.input_ids.tolist() == [11, 12, 13, 14, 15, 0]
    assert batch.aux_hidden_states[:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.layout.doc_remaining.tolist() == [5, 4, 3, 2, 1, 0]
    assert batch.layout.cu_seqlens.tolist() == [0, 6]
    # Slot t asks for the distribution produced at position t + 1, which is that of x[t+2].
    assert batch.supervision_rows.tolist() == [1, 2, 3, 4, 5, -1]
    assert batch.target_draft_ids.tolist() == [101, -1, 103, 104, 105, -1]
    assert batch.loss_mask.int().tolist() == MASKS[preset]


@pytest.mark.parametrize(
    ("preset", "expected"),
    [("serving", [1, 0, 1, 0, 0, 0]), ("nemo", [1, 1, 1, 1, 0, 0]), ("eagle", [0, 1, 1, 1, 1, 0])],
)
def test_touching_assistant_turns_stay_apart_in_serving(preset, expected):
    assert six_tokens(preset, [0, 1, 1, 2, 2, 0]).loss_mask.int().tolist() == expected


def test_position_mask_leaves_out_targets_outside_the_draft_vocabulary():
    batch = six_tokens("nemo")
    assert batch.position_mask.int().tolist() == [1, 0, 0, 1, 1, 0]


def test_rows_skip_positions_that_are_not_stored_and_documents_do_not_mix():
    batch = make_batch(
        document_lengths=[4, 3],
        input_ids=torch.tensor([1, 2, 3, 4, 5, 6, 7]),
        span_ids=torch.tensor([0, 0, 0, 1, 1, 1, 0]),
        aux_hidden_states=torch.zeros(7, 2),
        kept=torch.tensor([0, 0, 1, 1, 1, 1, 1], dtype=torch.bool),
        target_draft_ids=torch.tensor([20, 21, 22, 23, 24]),
        preset="nemo",
    )
    assert batch.input_ids.tolist() == [2, 3, 4, 0, 6, 7, 0]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert batch.loss_mask.int().tolist() == [0, 0, 1, 0, 1, 0, 0]
    assert batch.supervision_rows.tolist() == [-1, 0, 1, -1, 3, 4, -1]
    assert batch.target_draft_ids.tolist() == [-1, 20, 21, -1, 23, 24, -1]


def test_supervised_slot_without_a_stored_row_is_refused():
    with pytest.raises(BatchError, match="1 supervised slots"):
        make_batch(
            document_lengths=[3],
            input_ids=torch.arange(3),
            span_ids=torch.tensor([0, 1, 1]),
            aux_hidden_states=torch.zeros(3, 2),
            kept=torch.tensor([True, False, True]),
            target_draft_ids=torch.tensor([1, 2]),
        )


@pytest.mark.parametrize("name", ["input_ids", "span_ids", "aux_hidden_states", "kept", "target_draft_ids"])
def test_arrays_of_the_wrong_length_are_named(name):
    arrays = {
        "input_ids": torch.arange(3),
        "span_ids": torch.ones(3, dtype=torch.int64),
        "aux_hidden_states": torch.zeros(3, 2),
        "kept": torch.ones(3, dtype=torch.bool),
        "target_draft_ids": torch.arange(3),
    }
    batch = make_batch(document_lengths=[1, 2], **arrays)
    assert batch.layout.num_slots == 3
    arrays[name] = torch.cat((arrays[name], arrays[name][:1]))
    # The shapes in the signature refuse it too; the message is for callers that run without those checks.
    with pytest.raises(BatchError, match=name):
        inspect.unwrap(make_batch)(document_lengths=[1, 2], **arrays)


@pytest.mark.parametrize("lengths", [[], [3, 0]])
def test_empty_documents_are_refused(lengths):
    with pytest.raises(BatchError, match="at least one token"):
        PackedLayout.from_lengths(lengths)


def test_unknown_preset_is_refused():
    layout = PackedLayout.from_lengths([2])
    with pytest.raises(ConfigError, match="serving, nemo, eagle"):
        slot_loss_mask(torch.ones(2, dtype=torch.int64), layout.doc_remaining, "everything")


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), steps=st.integers(0, 10), width=st.integers(0, 2))
def test_shift_is_the_global_shift_where_the_document_still_goes_on(lengths, steps, width):
    layout = PackedLayout.from_lengths(lengths)
    values = 1 + torch.arange(layout.num_slots * max(width, 1)).reshape(layout.num_slots, *[width][: width > 0])
    shifted = shift_left(values, layout.doc_remaining, steps)
    for (start, end), length in zip(layout.bounds, lengths, strict=True):
        assert torch.equal(shifted[start : end - min(steps, length)], values[start + min(steps, length) : end])
        assert not shifted[end - min(steps, length) : end].any()


@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4), first=st.integers(0, 4), second=st.integers(0, 4))
def test_two_shifts_add_up(lengths, first, second):
    layout = PackedLayout.from_lengths(lengths)
    values = 1 + torch.arange(layout.num_slots)
    twice = shift_left(shift_left(values, layout.doc_remaining, first), layout.doc_remaining, second)
    assert torch.equal(twice, shift_left(values, layout.doc_remaining, first + second))
