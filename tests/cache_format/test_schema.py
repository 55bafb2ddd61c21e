"""Fields, kept rows, captured layers, sample ids and the draft vocabulary."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.cache_format.errors import ConfigError
from eyas.cache_format.estimate import estimate_fields
from eyas.cache_format.schema import (
    check_aux_layer_outputs,
    default_aux_layer_outputs,
    kept_rows,
    sample_id,
    store_fields,
)
from eyas.cache_format.vocab import VocabMap, choose_draft_vocab, read_vocab, write_vocab


def names(supervision: tuple[str, ...]) -> list[str]:
    fields = store_fields(
        aux_layer_outputs=(1, 3, 4),
        hidden_size=8,
        hidden_dtype="bfloat16",
        supervision=supervision,
        topk=4,
        draft_vocab_size=16,
    )
    return [f.name for f in fields]


def test_each_supervision_adds_its_own_fields_and_argmax_and_logz_are_always_there() -> None:
    always = ["aux_hidden_states/1", "aux_hidden_states/3", "aux_hidden_states/4", "target_argmax", "target_logz"]
    assert names(("probs",)) == [*always, "target_probs"]
    assert names(("topk",)) == [*always, "target_topk_ids", "target_topk_logprobs", "target_draft_logz"]
    assert names(("hidden",)) == [*always[:3], "last_hidden_state", *always[3:]]


@pytest.mark.parametrize("supervision", [(), ("hiden",)])
def test_unknown_or_no_supervision_is_refused(supervision: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="hidden, topk, probs"):
        names(supervision)


@given(st.lists(st.integers(0, 1), max_size=12))
def test_kept_rows_are_assistant_tokens_and_their_neighbours(mask: list[int]) -> None:
    n = len(mask)
    expected = [any(mask[j] for j in (t - 1, t, t + 1) if 0 <= j < n) for t in range(n)]
    assert kept_rows(np.array(mask, np.uint8)).tolist() == expected


@pytest.mark.parametrize("layers", [(1, 3, 7), (3, 1), (1, 1, 2), (-1, 2), ()])
def test_captured_layers_are_ascending_unique_and_before_the_last(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="between 0 and 6"):
        check_aux_layer_outputs(layers, 8)


def test_the_default_layers_given_by_hand_are_accepted() -> None:
    assert check_aux_layer_outputs(default_aux_layer_outputs(32), 32) == (1, 15, 28)


def test_a_sample_id_changes_with_any_id_or_mask_bit_and_not_with_memory_layout() -> None:
    ids, mask = np.arange(6, dtype=np.uint32), np.array([0, 1, 1, 0, 0, 1], np.uint8)
    base = sample_id(ids, mask)
    assert sample_id(ids.astype(np.int64), mask.astype(bool)) == base
    assert sample_id(ids[::-1], mask) != base
    changed = mask.copy()
    changed[0] = 1
    assert sample_id(ids, changed) != base


@given(
    counts=st.lists(st.integers(0, 5), min_size=1, max_size=40),
    size=st.integers(1, 40),
    keep=st.lists(st.integers(-2, 45), max_size=4),
)
def test_draft_vocabulary_invariants(counts: list[int], size: int, keep: list[int]) -> None:
    size = min(size, len(counts))
    vocab = choose_draft_vocab(np.array(counts), size, keep)
    ids = vocab.ids
    assert len(ids) == size
    assert (np.diff(ids) > 0).all()
    assert np.array_equal(np.arange(size) + vocab.d2t, ids)
    assert vocab.t2d.sum() == size
    assert vocab.t2d[ids].all()
    assert np.array_equal(vocab.to_draft(ids), np.arange(size))
    outside = np.setdiff1d(np.arange(len(counts)), ids)
    assert (vocab.to_draft(outside) == -1).all()
    valid = [i for i in dict.fromkeys(keep) if 0 <= i < len(counts)]
    assert set(valid[:size]) <= set(ids.tolist())
    unforced_in = [counts[i] for i in ids if i not in valid]
    unforced_out = [counts[i] for i in outside if i not in valid]
    assert not unforced_in or not unforced_out or min(unforced_in) >= max(unforced_out)


def test_ties_at_the_cut_go_to_the_lower_id() -> None:
    assert choose_draft_vocab(np.full(10, 7), 4).ids.tolist() == [0, 1, 2, 3]


def test_unseen_ids_fill_a_vocabulary_larger_than_the_tokens_seen() -> None:
    counts = np.zeros(10, np.int64)
    counts[[4, 8]] = 3
    assert choose_draft_vocab(counts, 5).ids.tolist() == [0, 1, 2, 4, 8]


@pytest.mark.parametrize("size", [0, -3, 11])
def test_a_draft_vocabulary_larger_than_the_target_or_empty_is_refused(size: int) -> None:
    with pytest.raises(ConfigError, match="between 1 and the target's 10"):
        choose_draft_vocab(np.ones(10, np.int64), size)


def test_the_identity_vocabulary_has_zero_offsets() -> None:
    vocab = choose_draft_vocab(np.ones(10, np.int64), None)
    assert vocab.is_identity
    assert not vocab.d2t.any()


def test_absolute_ids_in_place_of_ascending_ones_are_refused() -> None:
    with pytest.raises(ConfigError, match="ascending"):
        VocabMap(np.array([3, 1, 2]), 8)


def test_the_vocabulary_file_round_trips(tmp_path) -> None:
    counts = np.arange(50, dtype=np.int64)
    vocab = choose_draft_vocab(counts, 20, (0,))
    write_vocab(tmp_path / "vocab.safetensors", counts, vocab)
    found_counts, found = read_vocab(tmp_path / "vocab.safetensors", vocab.digest)
    assert np.array_equal(found_counts, counts)
    assert np.array_equal(found.ids, vocab.ids)


def test_the_estimate_counts_layers_width_and_kept_share() -> None:
    fields = store_fields(
        aux_layer_outputs=(1, 2, 3, 4, 5), hidden_size=100, hidden_dtype="bfloat16", supervision=("hidden", "topk"),
        topk=10, draft_vocab_size=50,
    )  # fmt: skip
    sizes = {s.name: s.bytes_per_token for s in estimate_fields(fields, kept_share=0.5)}
    assert sum(v for k, v in sizes.items() if k.startswith("aux")) == 5 * 100 * 2
    assert sizes["target_topk_ids"] == 10 * 4 * 0.5
    assert sizes["target_topk_logprobs"] == 10 * 2 * 0.5
    assert sizes["input_ids, loss_mask"] == 5
