"""What is written is what is read, bit for bit, in both containers."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas.cache_format.reader import StoreReader
from eyas.cache_format.schema import FieldSpec, kept_rows
from eyas.cache_format.testing import make_samples, make_store, random_rows

CONTAINERS = ("zarr", "arrow")


class Recorder:
    """Remembers every row it made, by field, so that a test can compare."""

    def __init__(self) -> None:
        self.rows: dict[str, list[np.ndarray]] = {}

    def __call__(self, spec: FieldSpec, num_rows: int, random: np.random.Generator) -> np.ndarray:
        rows = random_rows(spec, num_rows, random)
        self.rows.setdefault(spec.name, []).append(rows)
        return rows


def read_everything(reader: StoreReader) -> dict[str, list[np.ndarray]]:
    names = [spec.name for spec in reader.identity.fields]
    samples = [reader.read(i, names) for i in range(len(reader))]
    return {name: [sample[name] for sample in samples] for name in names}


def assert_same_bits(found: list[np.ndarray], written: list[np.ndarray]) -> None:
    assert [f.dtype for f in found] == [w.dtype for w in written]
    assert [f.tobytes() for f in found] == [w.tobytes() for w in written]


@pytest.mark.parametrize("container", CONTAINERS)
@settings(max_examples=12)
@given(
    shards=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    chunk_bytes=st.sampled_from([1, 33, 256, 4096, 1 << 20]),
    seed=st.integers(0, 1000),
)
def test_every_sample_of_a_ragged_store_reads_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, container: str, shards: list[int], chunk_bytes: int, seed: int
) -> None:
    recorder = Recorder()
    root = make_store(
        tmp_path_factory.mktemp("store"),
        samples_per_shard=shards,
        container=container,
        chunk_bytes=chunk_bytes,
        seed=seed,
        supervision=("hidden", "topk", "probs"),
        rows_of=recorder,
    )
    found = read_everything(StoreReader(root))
    for name, written in recorder.rows.items():
        assert_same_bits(found[name], written)


def test_both_containers_give_identical_samples_and_content_digests(tmp_path: Path) -> None:
    readers = [StoreReader(make_store(tmp_path / c, container=c, quarantine=[(1, 0)])) for c in CONTAINERS]
    everything = [read_everything(r) for r in readers]
    for name in everything[0]:
        assert_same_bits(everything[0][name], everything[1][name])
    digests = [[a.content_digest for r in reader.receipts.values() for a in r.content.arrays] for reader in readers]
    assert digests[0] == digests[1]


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_finite_16_bit_pattern_survives(tmp_path: Path, container: str, dtype: str) -> None:
    numpy_dtype = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}[dtype]
    patterns = np.arange(65536, dtype=np.uint16)
    patterns = patterns[np.isfinite(patterns.view(numpy_dtype).astype(np.float32))]  # -0 and subnormals included
    position = 0

    def rows_of(spec: FieldSpec, num_rows: int, random: np.random.Generator) -> np.ndarray:
        nonlocal position
        if spec.name != "last_hidden_state":
            return random_rows(spec, num_rows, random)
        taken = np.resize(np.roll(patterns, -position), num_rows * 16)
        position += num_rows * 16
        return taken.view(numpy_dtype).reshape(num_rows, 16)

    root = make_store(
        tmp_path,
        container=container,
        hidden_dtype=dtype,
        samples_per_shard=(150, 150),
        chunk_bytes=4096,
        rows_of=rows_of,
    )
    reader = StoreReader(root)
    found = np.concatenate([reader.read(i, ["last_hidden_state"])["last_hidden_state"].ravel() for i in range(300)])
    assert len(found) > len(patterns), "the store must be large enough to hold every pattern"
    assert np.array_equal(found.view(np.uint16)[: len(patterns)], patterns)


def test_aux_hidden_states_are_the_layers_side_by_side_in_manifest_order(tmp_path: Path) -> None:
    reader = StoreReader(make_store(tmp_path))
    for index in range(len(reader)):
        sample = reader.read(index, ["aux_hidden_states", *(f"aux_hidden_states/{i}" for i in (1, 3, 4))])
        layers = [sample[f"aux_hidden_states/{i}"] for i in (1, 3, 4)]
        assert np.array_equal(sample["aux_hidden_states"].view(np.uint16), np.concatenate(layers, 1).view(np.uint16))


def test_read_into_fills_a_slice_of_a_batch(tmp_path: Path) -> None:
    reader = StoreReader(make_store(tmp_path))
    lengths = reader.plan.length.tolist()
    batch = np.zeros((sum(lengths[:3]), 48), ml_dtypes.bfloat16)
    start = 0
    for index in range(3):
        reader.read_into(index, "aux_hidden_states", batch[start : start + lengths[index]])
        start += lengths[index]
    expected = np.concatenate([reader.read(i, ["aux_hidden_states"])["aux_hidden_states"] for i in range(3)])
    assert np.array_equal(batch.view(np.uint16), expected.view(np.uint16))


def test_read_into_refuses_a_slice_of_another_size(tmp_path: Path) -> None:
    reader = StoreReader(make_store(tmp_path))
    with pytest.raises(ValueError, match="last_hidden_state"):
        reader.read_into(0, "last_hidden_state", np.empty((int(reader.plan.length[0]) - 1, 16), ml_dtypes.bfloat16))


def test_returned_arrays_are_private_copies(tmp_path: Path) -> None:
    reader = StoreReader(make_store(tmp_path))
    first = reader.read(0, ["last_hidden_state", "input_ids"])
    for array in first.values():
        array[...] = 0
    assert reader.read(0, ["last_hidden_state"])["last_hidden_state"].any()
    assert reader.input_ids(0).any()


def test_plain_zarr_opens_an_attempt_and_sees_the_same_rows(tmp_path: Path) -> None:
    # zarr-python is the oracle of our own sharding reader and writer.
    reader = StoreReader(
        make_store(tmp_path, samples_per_shard=(9,), chunk_bytes=300, supervision=("hidden", "topk", "probs"))
    )
    attempt = reader.paths.attempt(0, reader.receipts[0].attempt)
    for spec in reader.identity.fields:
        array = zarr.open_array(attempt / spec.name, mode="r")
        ours = np.concatenate([reader.read(i, [spec.name])[spec.name] for i in range(len(reader))])
        assert array.shape == ours.shape
        assert np.asarray(array[:]).tobytes() == ours.tobytes()
        assert array.attrs["eyas_dtype"] == spec.dtype


def test_kept_positions_are_where_kept_rows_belong(tmp_path: Path) -> None:
    reader = StoreReader(make_store(tmp_path))
    for index, sample in enumerate(make_samples(len(reader))):
        assert np.array_equal(reader.kept_positions(index), np.flatnonzero(kept_rows(sample.loss_mask)))
        assert len(reader.kept_positions(index)) == len(reader.read(index, ["target_argmax"])["target_argmax"])


def test_a_quarantined_row_keeps_its_place_with_zero_tokens(tmp_path: Path) -> None:
    whole = StoreReader(make_store(tmp_path / "whole"))
    cut = StoreReader(make_store(tmp_path / "cut", quarantine=[(0, 1)]))
    assert cut.available.tolist() == [True, False, True, True, True, True, True]
    assert cut.read(1, ["last_hidden_state"])["last_hidden_state"].shape == (0, 16)
    for index in (0, 2, 5):
        same = [r.read(index, ["last_hidden_state"])["last_hidden_state"].tobytes() for r in (whole, cut)]
        assert same[0] == same[1]
    assert cut.paths.quarantine(0).read_text().count("made so by a test") == 1
    assert cut.receipts[0].content.tokens == whole.receipts[0].content.tokens - int(cut.plan.length[1])


def test_a_shard_whose_rows_are_all_quarantined_reads_as_empty(tmp_path: Path) -> None:
    for container in CONTAINERS:
        root = make_store(tmp_path / container, container=container, quarantine=[(0, 0), (0, 1), (0, 2)])
        reader = StoreReader(root)
        assert reader.read(0, ["target_logz"])["target_logz"].shape == (0,)
        assert reader.read(3, ["target_logz"])["target_logz"].shape == (int(reader.plan.kept[3]),)


def test_a_sample_larger_than_a_chunk_and_a_file_bound_of_chunks_reads_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The bound of a shard file is 128 MiB; a small one makes many files of one array without writing gigabytes.
    monkeypatch.setattr("eyas.cache_format.containers.base.MAX_FILE_BYTES", 700)
    recorder = Recorder()
    reader = StoreReader(make_store(tmp_path, samples_per_shard=(6,), chunk_bytes=200, rows_of=recorder))
    attempt = reader.paths.attempt(0, reader.receipts[0].attempt)
    assert len(list((attempt / "last_hidden_state" / "c").iterdir())) > 1
    assert_same_bits(read_everything(reader)["last_hidden_state"], recorder.rows["last_hidden_state"])
    ours = np.concatenate(read_everything(reader)["last_hidden_state"])
    assert np.asarray(zarr.open_array(attempt / "last_hidden_state", mode="r")[:]).tobytes() == ours.tobytes()


def test_a_store_can_be_moved_and_read_from_a_read_only_folder(tmp_path: Path) -> None:
    root = make_store(tmp_path / "here")
    moved = root.rename(tmp_path / "there")
    before = {p: p.stat().st_mtime_ns for p in moved.rglob("*")}
    reader = StoreReader(moved)
    read_everything(reader)
    assert {p: p.stat().st_mtime_ns for p in moved.rglob("*")} == before
