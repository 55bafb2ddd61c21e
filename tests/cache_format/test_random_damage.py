"""Whatever single thing happens to a file of a store: its data reads back exactly, or an error says so."""

import random
import shutil
from pathlib import Path

import pytest

from eyas.cache_format.errors import StoreError
from eyas.cache_format.reader import StoreReader
from eyas.cache_format.testing import make_store
from eyas.cache_format.verify import verify_store

KINDS = ("flip", "cut", "delete", "zero", "swap", "append")


def contents(root: Path) -> list[bytes]:
    """Everything a trainer can get from a store, as bytes."""
    reader = StoreReader(root)
    names = ["input_ids", "loss_mask", *(spec.name for spec in reader.identity.fields)]
    arrays = [reader.read(i, names)[name].tobytes() for i in range(len(reader)) for name in names]
    spans = [repr(reader.spans(i)).encode() for i in range(len(reader))]
    heads = [reader.vocab.ids.tobytes(), reader.plan.heldout.tobytes(), reader.available.tobytes()]
    return [*arrays, *spans, *heads]


def damage(root: Path, chance: random.Random, kind: str) -> str:
    """Do one thing to one file; return what, for the message of a failing test."""
    files = sorted(p for p in root.rglob("*") if p.is_file() and p.name != "lock" and "target" not in p.parts)
    path = chance.choice(files)
    data = bytearray(path.read_bytes())
    if kind == "flip":
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del data[chance.randrange(len(data)) :]
    elif kind == "zero":
        start = chance.randrange(len(data))
        data[start : start + 64] = bytes(len(data[start : start + 64]))
    elif kind == "append":
        data += bytes(chance.randrange(1, 64))
    elif kind == "swap":
        other = chance.choice([p for p in files if p.suffix == path.suffix and p != path] or files)
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
        return f"swapped {path} and {other}"
    if kind == "delete":
        path.unlink()
    else:
        path.write_bytes(data)
    return f"{kind} {path}"


def check(pristine: Path, work: Path, seed: int) -> None:
    chance = random.Random(seed)
    shutil.copytree(pristine, work)
    what = damage(work, chance, KINDS[seed % len(KINDS)])
    expected = contents(pristine)
    try:
        found = contents(work)
    except StoreError:
        found = None
    if found is None:
        assert _refused(work), f"{what}: a read raised, verify found nothing"
    else:
        assert [i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b] == [], what


def _refused(root: Path) -> bool:
    """What makes `eyas inspect --verify` exit 1."""
    try:
        return bool(verify_store(root)) or not (root / "complete.json").exists()
    except StoreError:
        return True


@pytest.fixture(params=["zarr", "arrow"])
def pristine(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_store(tmp_path / "pristine", container=request.param, quarantine=[(1, 1)], chunk_bytes=512)


def test_one_damaged_file_is_an_error_or_harmless(pristine: Path, tmp_path: Path) -> None:
    for seed in range(30):
        check(pristine, tmp_path / f"work-{seed}", seed)


@pytest.mark.soak
def test_a_hundred_damaged_files_are_errors_or_harmless(pristine: Path, tmp_path: Path) -> None:
    for seed in range(1000, 1100):
        check(pristine, tmp_path / f"work-{seed}", seed)
