"""Missing, torn, swapped or flipped bytes are named by shard and field, by verify and by a plain read; never zeros."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from eyas.cache_format.config import InspectConfig
from eyas.cache_format.errors import CorruptStoreError, IncompleteStoreError, StoreError
from eyas.cache_format.inspection import inspect_store
from eyas.cache_format.reader import StoreReader
from eyas.cache_format.testing import make_store
from eyas.cache_format.verify import verify_store

FIELDS = (
    "aux_hidden_states/1",
    "aux_hidden_states/3",
    "aux_hidden_states/4",
    "last_hidden_state",
    "target_argmax",
    "target_logz",
    "target_topk_ids",
    "target_topk_logprobs",
    "target_draft_logz",
)


def array_file(root: Path, shard: int, field: str) -> Path:
    attempt = next(p for p in (root / "shards" / f"{shard:06d}").iterdir() if p.is_dir())
    arrow = attempt / f"{field}.arrow"
    if arrow.exists():
        return arrow
    return next(p for p in (attempt / field / "c").rglob("*") if p.is_file())


def flip_bit(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def assert_named(root: Path, shard: int, field: str) -> None:
    """Verify names exactly this fault, and reading the field raises it."""
    faults = verify_store(root)
    assert [(f.shard, f.field) for f in faults] == [(shard, field)]
    reader = StoreReader(root)
    samples = range(*reader.plan.shard_slice(shard).indices(len(reader)))
    with pytest.raises(CorruptStoreError) as caught:
        _ = [reader.read(index, [field]) for index in samples]
    assert (caught.value.shard, caught.value.field) == (shard, field)
    assert f"shard {shard:06d}" in str(caught.value)
    assert "sample " in str(caught.value)


@pytest.mark.parametrize("container", ["zarr", "arrow"])
@pytest.mark.parametrize("field", FIELDS)
def test_one_flipped_bit_in_any_array_is_named(tmp_path: Path, container: str, field: str) -> None:
    root = make_store(tmp_path, container=container)
    reader = StoreReader(root)
    values = reader.read(reader.plan.shard_slice(1).start, [field])[field].tobytes()
    path = array_file(root, 1, field)
    flip_bit(path, path.read_bytes().index(values[:24]) + 3, bit=1)
    assert_named(root, 1, field)


@pytest.mark.parametrize("container", ["zarr", "arrow"])
@pytest.mark.parametrize("damage", ["missing", "half", "one byte short", "empty"])
def test_a_missing_or_cut_file_is_named(tmp_path: Path, container: str, damage: str) -> None:
    root = make_store(tmp_path, container=container)
    path = array_file(root, 0, "last_hidden_state")
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"half": data[: len(data) // 2], "one byte short": data[:-1], "empty": b""}[damage])
    assert_named(root, 0, "last_hidden_state")


def test_a_chunk_that_the_index_calls_absent_is_an_error_not_zeros(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    path = array_file(root, 0, "last_hidden_state")
    reader = StoreReader(root)
    layout = next(a.layout for a in reader.receipts[0].content.arrays if a.field == "last_hidden_state")
    data = bytearray(path.read_bytes())
    start = len(data) - 16 * layout.chunks_per_file
    data[start : start + 16] = b"\xff" * 16
    path.write_bytes(data)
    assert_named(root, 0, "last_hidden_state")


def test_two_swapped_chunks_are_named(tmp_path: Path) -> None:
    root = make_store(tmp_path, chunk_bytes=256)
    path = array_file(root, 0, "last_hidden_state")
    layout = next(a.layout for a in StoreReader(root).receipts[0].content.arrays if a.field == "last_hidden_state")
    data = bytearray(path.read_bytes())
    start = len(data) - 16 * layout.chunks_per_file
    assert layout.num_chunks >= 2
    data[start : start + 16], data[start + 16 : start + 32] = data[start + 16 : start + 32], data[start : start + 16]
    path.write_bytes(data)
    assert_named(root, 0, "last_hidden_state")


def swap(a: Path, b: Path) -> None:
    parked = a.with_name(a.name + ".parked")
    a.rename(parked)
    b.rename(a)
    parked.rename(b)


def faulty_shards(root: Path) -> set[int | None]:
    return {fault.shard for fault in verify_store(root)}


@pytest.mark.parametrize("what", ["shard folders", "receipts", "both"])
def test_two_swapped_shards_are_named(tmp_path: Path, what: str) -> None:
    root = make_store(tmp_path, samples_per_shard=(4, 4))
    if what in ("shard folders", "both"):
        swap(root / "shards" / "000000", root / "shards" / "000001")
    if what in ("receipts", "both"):
        swap(root / "receipts" / "000000.json", root / "receipts" / "000001.json")
    assert faulty_shards(root) == {0, 1}
    with pytest.raises(CorruptStoreError, match=r"shard 00000[01]"):
        _ = [StoreReader(root).read(index, ["input_ids", "last_hidden_state"]) for index in range(8)]


def test_a_shard_that_is_a_copy_of_another_is_named(tmp_path: Path) -> None:
    root = make_store(tmp_path, samples_per_shard=(4, 4))
    shutil.rmtree(root / "shards" / "000001")
    shutil.copytree(root / "shards" / "000000", root / "shards" / "000001")
    assert faulty_shards(root) == {1}


def test_flipped_token_ids_are_named(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    path = root / "shards" / "000001" / "samples.arrow"
    ids = StoreReader(root).input_ids(int(StoreReader(root).plan.shard_slice(1).start)).tobytes()
    flip_bit(path, path.read_bytes().index(ids[:16]))
    assert [(f.shard, f.field) for f in verify_store(root)] == [(1, "samples")]
    reader = StoreReader(root)
    with pytest.raises(CorruptStoreError, match="shard 000001"):
        _ = [reader.loss_mask(index) for index in range(len(reader))]


DAMAGE: dict[str, Callable[[Path], None]] = {
    "receipt cut": lambda root: (root / "receipts" / "000001.json").write_bytes(b'{"content":'),
    "receipt lost": lambda root: (root / "receipts" / "000001.json").unlink(),
    "receipt edited": lambda root: (root / "receipts" / "000001.json").write_text(
        (root / "receipts" / "000001.json").read_text().replace('"rows": 4', '"rows": 5')
    ),
    "receipt beyond the plan": lambda root: shutil.copy(
        root / "receipts" / "000001.json", root / "receipts" / "000002.json"
    ),
    "plan cut": lambda root: (root / "plan.arrow").write_bytes((root / "plan.arrow").read_bytes()[:100]),
    "complete.json with fewer receipts": lambda root: (root / "complete.json").write_text(
        json.dumps({**(done := json.loads((root / "complete.json").read_text())), "receipts": done["receipts"][:1]})
    ),
    "complete.json cut": lambda root: (root / "complete.json").write_text("{"),
    "manifest with an unknown field": lambda root: (root / "manifest.json").write_text(
        (root / "manifest.json").read_text().replace('"provenance"', '"provenience"')
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_bookkeeping_is_refused_on_open(tmp_path: Path, damage: str) -> None:
    root = make_store(tmp_path)
    DAMAGE[damage](root)
    with pytest.raises(StoreError):
        StoreReader(root)


def test_a_changed_lm_head_is_named_by_verify(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    path = root / "target" / "frozen.safetensors"
    flip_bit(path, len(path.read_bytes()) - 1)
    assert [(f.shard, f.field) for f in verify_store(root)] == [(None, "target")]


@pytest.mark.parametrize(
    ("field", "name"),
    [("vocab", "vocab.safetensors"), ("target", "target/frozen.safetensors"), ("target", "target/tokens.arrow")],
)
def test_frozen_parts_are_checked_before_anything_is_trained_on_them(tmp_path: Path, field: str, name: str) -> None:
    root = make_store(tmp_path)
    StoreReader(root).verify_frozen_parts()
    flip_bit(root / name, (root / name).stat().st_size // 2)
    with pytest.raises(CorruptStoreError, match=r"complete\.json names") as caught:
        StoreReader(root).verify_frozen_parts()
    assert caught.value.field == field


def test_a_changed_draft_vocabulary_is_refused(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    path = root / "vocab.safetensors"
    flip_bit(path, path.read_bytes().index(StoreReader(root).vocab.ids.tobytes()), bit=7)
    assert [(f.shard, f.field) for f in verify_store(root)] == [(None, "vocab")]
    with pytest.raises(CorruptStoreError, match="vocab"):
        _ = StoreReader(root).vocab


def test_changed_token_counts_are_named_by_verify(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    path = root / "vocab.safetensors"
    flip_bit(path, path.read_bytes().index(StoreReader(root).token_counts.tobytes()))
    assert [(f.shard, f.field) for f in verify_store(root)] == [(None, "vocab")]


def test_inspect_verify_exits_1_and_names_shard_and_field(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    assert inspect_store(InspectConfig(store=root, verify=True)).exit_code == 0
    flip_bit(array_file(root, 1, "target_logz"), 0)
    report = inspect_store(InspectConfig(store=root, verify=True))
    assert report.exit_code == 1
    assert "FAULT shard 000001, target_logz" in report.text


def test_faults_in_several_places_are_all_listed(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    flip_bit(array_file(root, 0, "target_logz"), 0)
    flip_bit(array_file(root, 1, "last_hidden_state"), 5)
    assert [(f.shard, f.field) for f in verify_store(root)] == [(0, "target_logz"), (1, "last_hidden_state")]


def test_an_unfinished_store_opens_only_when_asked(tmp_path: Path) -> None:
    root = make_store(tmp_path, complete=False)
    (root / "receipts" / "000001.json").unlink()
    with pytest.raises(IncompleteStoreError, match="1 of 2 shards are missing"):
        StoreReader(root)
    reader = StoreReader(root, allow_incomplete=True)
    assert reader.available.tolist() == [True] * 3 + [False] * 4
    with pytest.raises(IncompleteStoreError, match="shard 000001 is not captured"):
        reader.read(3, ["target_logz"])
