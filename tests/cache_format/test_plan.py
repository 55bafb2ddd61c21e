"""Plan, samples and identity: pure functions of the data, self-certifying, refused by name when they differ."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from eyas.cache_format.errors import CorruptStoreError, FormatVersionError, IdentityMismatchError
from eyas.cache_format.manifest import Identity, differences, encode_json, load_manifest, require_same_identity
from eyas.cache_format.plan import build_plan, read_plan, write_plan
from eyas.cache_format.samples import SampleTable, Span, write_samples
from eyas.cache_format.testing import make_samples, make_store


def plan_of(seed: int = 0, **changes: int):
    samples = make_samples(6, seed=seed)
    if changes:
        samples[2] = replace(samples[2], **changes)
    return build_plan([samples[:4], samples[4:]], {"rows_read": 6})


def test_equal_data_gives_equal_bytes_and_digest(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_plan(tmp_path / name, plan_of())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert read_plan(tmp_path / "a").digest == plan_of().digest


@pytest.mark.parametrize(
    "change", [{"source_row": 77}, {"source": "other"}, {"conversation_id": "x"}, {"heldout": True}]
)
def test_the_digest_sees_every_column(change) -> None:
    assert plan_of(**change).digest != plan_of().digest


def test_the_digest_sees_the_books_and_the_order() -> None:
    samples = make_samples(6)
    base = build_plan([samples], {"rows_read": 6}).digest
    assert build_plan([samples], {"rows_read": 7}).digest != base
    assert build_plan([samples[::-1]], {"rows_read": 6}).digest != base
    assert build_plan([samples[:3], samples[3:]], {"rows_read": 6}).digest != base


def test_columns_describe_the_samples(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.arrow", plan_of())
    plan, samples = read_plan(tmp_path / "plan.arrow"), make_samples(6)
    assert plan.num_shards == 2
    assert plan.shard_slice(1) == slice(4, 6)
    assert plan.row.tolist() == [0, 1, 2, 3, 0, 1]
    assert plan.length.tolist() == [len(s.input_ids) for s in samples]
    assert plan.supervised.tolist() == [int(s.loss_mask.sum()) for s in samples]
    assert plan.heldout.tolist() == [s.heldout for s in samples]
    assert [row.tobytes() for row in plan.sample_ids] == [s.sample_id for s in samples]
    assert plan.find(samples[3].sample_id.hex()[:10]) == 3
    assert plan.find("5") == 5
    with pytest.raises(KeyError, match="0 samples"):
        plan.find("zz")


def test_an_empty_plan_is_a_plan(tmp_path: Path) -> None:
    write_plan(tmp_path / "plan.arrow", build_plan([], {"rows_read": 0}))
    assert read_plan(tmp_path / "plan.arrow").num_shards == 0


def test_samples_round_trip_with_their_spans(tmp_path: Path) -> None:
    samples = make_samples(5)
    write_samples(tmp_path / "samples.arrow", samples)
    table = SampleTable(tmp_path / "samples.arrow", 0)
    for row, sample in enumerate(samples):
        table.check_row(row, sample.sample_id)
        assert np.array_equal(table.input_ids(row), sample.input_ids)
        assert np.array_equal(table.loss_mask(row), sample.loss_mask)
        assert table.spans(row) == sample.spans


def test_span_ids_tell_two_touching_assistant_turns_apart(tmp_path: Path) -> None:
    sample = replace(
        make_samples(1)[0],
        input_ids=np.arange(6, dtype=np.uint32),
        loss_mask=np.array([0, 1, 1, 1, 1, 0], np.uint8),
        spans=(Span("user", 0, 0, 1), Span("assistant", 1, 1, 3), Span("assistant", 2, 3, 6)),
    )
    write_samples(tmp_path / "samples.arrow", [sample])
    assert SampleTable(tmp_path / "samples.arrow", 0).span_ids(0).tolist() == [0, 2, 2, 3, 3, 0]


def test_a_row_that_hashes_to_another_id_is_refused(tmp_path: Path) -> None:
    samples = make_samples(2)
    write_samples(tmp_path / "samples.arrow", samples)
    with pytest.raises(CorruptStoreError, match="row 0 hashes to"):
        SampleTable(tmp_path / "samples.arrow", 7).check_row(0, samples[1].sample_id)


def changed(identity: Identity, path: str, value: object) -> Identity:
    data = msgspec.to_builtins(identity)
    *parents, leaf = path.split(".")
    place = data
    for parent in parents:
        place = place[parent]
    place[leaf] = value
    return msgspec.convert(data, Identity)


CHANGES = {
    "plan_digest": "other",
    "tokenizer_digest": "other",
    "template_digest": "other",
    "template_switches.enable_thinking": True,
    "target.weights_digest": "other",
    "target.dtype": "float32",
    "target.quantization": "fp8",
    "aux_layer_outputs": [1, 2, 4],
    "logit_transform.softcap": 30.0,
    "supervision": ["hidden"],
    "topk": 16,
    "draft_vocab_digest": "other",
    "container": "arrow",
    "max_length": 7,
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_change_of_identity_is_refused_by_name_with_both_values(tmp_path: Path, field: str) -> None:
    old = load_manifest(make_store(tmp_path)).identity
    new = changed(old, field, CHANGES[field])
    assert [d[0] for d in differences(old, new)] == [field]
    with pytest.raises(IdentityMismatchError) as caught:
        require_same_identity(tmp_path, old, new)
    assert field in str(caught.value)
    value = CHANGES[field]
    assert repr(tuple(value) if isinstance(value, list) else value) in str(caught.value)


def test_an_equal_identity_passes_and_json_is_canonical(tmp_path: Path) -> None:
    manifest = load_manifest(make_store(tmp_path))
    require_same_identity(tmp_path, manifest.identity, manifest.identity)
    assert encode_json(manifest) == (tmp_path / "manifest.json").read_bytes()


def test_another_format_version_is_refused_before_anything_else(tmp_path: Path) -> None:
    path = make_store(tmp_path) / "manifest.json"
    path.write_text('{"format_version": 99, "future": true}')
    with pytest.raises(FormatVersionError, match="version 99"):
        load_manifest(tmp_path)
