"""Committing: receipts are created once, attempts never meet, and nothing that cannot be read back is written."""

import errno
import multiprocessing
import shutil
from pathlib import Path

import numpy as np
import pytest

from eyas.cache_format.errors import (
    DiskFullError,
    IncompleteStoreError,
    NonFiniteError,
    StoreError,
    StoreLockedError,
    StoreNotFoundError,
)
from eyas.cache_format.layout import create_once, remove_tree, replace_file, translate_disk_full
from eyas.cache_format.manifest import load_manifest
from eyas.cache_format.plan import read_plan
from eyas.cache_format.reader import StoreReader
from eyas.cache_format.schema import FieldSpec
from eyas.cache_format.testing import make_store, random_rows
from eyas.cache_format.writer import ShardWriter, StoreLock, complete_store, open_for_resume, pending_shards


def uncommit(root: Path, shard: int) -> None:
    (root / "receipts" / f"{shard:06d}.json").unlink()
    (root / "complete.json").unlink(missing_ok=True)


def rows_for(root: Path, shard: int, row: int, seed: int = 0) -> dict[str, np.ndarray]:
    plan, fields = read_plan(root / "plan.arrow"), load_manifest(root).identity.fields
    index = plan.shard_slice(shard).start + row
    random = np.random.default_rng(seed)
    counts = {"token": int(plan.length[index]), "kept": int(plan.kept[index])}
    return {s.name: random_rows(s, counts[s.rows], random) for s in fields}


def write_shard(root: Path, shard: int, *, seed: int = 0, attempt: str | None = None) -> str:
    with ShardWriter(root, shard, attempt=attempt) as writer:
        for row in range(writer.num_rows):
            writer.append(row, rows_for(root, shard, row, seed + row))
        return writer.commit({}).attempt


def test_the_first_receipt_wins_and_the_loser_deletes_its_attempt(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    uncommit(root, 1)
    with ShardWriter(root, 1, attempt="slow") as slow:
        for row in range(slow.num_rows):
            slow.append(row, rows_for(root, 1, row, seed=row))
        assert write_shard(root, 1, seed=100, attempt="fast") == "fast"
        winner = slow.commit({})
    assert winner.attempt == "fast"
    assert [p.name for p in (root / "shards" / "000001").iterdir() if p.is_dir()] == ["fast"]
    complete_store(root)
    sample = StoreReader(root).read(int(slow._plan.shard_slice(1).start), ["last_hidden_state"])
    assert sample["last_hidden_state"].tobytes() == rows_for(root, 1, 0, seed=100)["last_hidden_state"].tobytes()


def test_leaving_without_commit_deletes_the_attempt(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    uncommit(root, 0)

    def stop_half_way() -> None:
        with ShardWriter(root, 0, attempt="gone") as writer:
            writer.append(0, rows_for(root, 0, 0))
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        stop_half_way()
    assert not (root / "shards" / "000000" / "gone").exists()
    assert pending_shards(root) == [0]


def test_a_stale_attempt_is_removed_once_another_commits(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    uncommit(root, 0)
    for stale in ("torn", "older"):
        (root / "shards" / "000000" / stale / "last_hidden_state").mkdir(parents=True)
    write_shard(root, 0, attempt="good")
    assert [p.name for p in (root / "shards" / "000000").iterdir() if p.is_dir()] == ["good"]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("field", ["aux_hidden_states/3", "target_logz", "target_topk_logprobs"])
def test_a_row_with_nan_or_inf_is_refused_whole_and_can_be_quarantined(
    tmp_path: Path, field: str, value: float
) -> None:
    root = make_store(tmp_path)
    uncommit(root, 0)
    with ShardWriter(root, 0) as writer:
        rows = rows_for(root, 0, 0)
        rows[field].reshape(-1)[-1] = value
        with pytest.raises(NonFiniteError) as caught:
            writer.append(0, rows)
        assert caught.value.field == field
        writer.quarantine(0, "NaN or Inf")
        for row in range(1, writer.num_rows):
            writer.append(row, rows_for(root, 0, row))
        receipt = writer.commit({})
    assert [(q.row, q.reason) for q in receipt.content.quarantined] == [(0, "NaN or Inf")]
    largest = {a.field: a.abs_max for a in receipt.content.arrays}
    assert all(v is None or np.isfinite(v) for v in largest.values())


def test_the_recorded_largest_magnitude_is_the_largest_stored(tmp_path: Path) -> None:
    def rows_of(spec: FieldSpec, num_rows: int, random: np.random.Generator) -> np.ndarray:
        rows = random_rows(spec, num_rows, random)
        if spec.name == "last_hidden_state":
            rows[0, 0] = -27000.0
        return rows

    reader = StoreReader(make_store(tmp_path, rows_of=rows_of))
    record = next(a for a in reader.receipts[0].content.arrays if a.field == "last_hidden_state")
    assert record.abs_max == float(
        np.abs(reader.read(0, ["last_hidden_state"])["last_hidden_state"].astype(np.float32)).max()
    )


def wrong_length(rows: dict[str, np.ndarray]) -> None:
    rows["last_hidden_state"] = rows["last_hidden_state"][:-1]


def wrong_dtype(rows: dict[str, np.ndarray]) -> None:
    rows["target_logz"] = rows["target_logz"].astype(np.float64)


def missing_field(rows: dict[str, np.ndarray]) -> None:
    del rows["target_argmax"]


def extra_field(rows: dict[str, np.ndarray]) -> None:
    rows["target_probs"] = rows["target_logz"]


@pytest.mark.parametrize("damage", [wrong_length, wrong_dtype, missing_field, extra_field])
def test_rows_that_do_not_fit_the_manifest_are_refused(tmp_path: Path, damage) -> None:
    root = make_store(tmp_path)
    uncommit(root, 0)
    with ShardWriter(root, 0) as writer:
        rows = rows_for(root, 0, 0)
        damage(rows)
        with pytest.raises(StoreError):
            writer.append(0, rows)
        writer.append(0, rows_for(root, 0, 0))  # the refused call wrote nothing


def test_rows_come_in_plan_order_and_all_of_them(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    uncommit(root, 0)
    with ShardWriter(root, 0) as writer:
        with pytest.raises(StoreError):
            writer.append(1, rows_for(root, 0, 1))
        writer.append(0, rows_for(root, 0, 0))
        with pytest.raises(StoreError, match="1 of 3 rows"):
            writer.commit({})
    assert not (root / "receipts" / "000000.json").exists()


def test_an_incomplete_store_cannot_be_completed(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    uncommit(root, 1)
    with pytest.raises(IncompleteStoreError, match="000001"):
        complete_store(root)
    write_shard(root, 1)
    complete_store(root)
    assert complete_store(root) == complete_store(root)


def test_a_complete_store_whose_shard_was_redone_differently_is_refused(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    (root / "receipts" / "000001.json").unlink()
    write_shard(root, 1, seed=9)
    with pytest.raises(StoreError, match="other bytes"):
        complete_store(root)


def _race(path: str, text: bytes, barrier, results) -> None:
    barrier.wait()
    results.put(create_once(Path(path), text))


def test_of_many_processes_creating_a_file_exactly_one_wins(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(6), context.Queue()
    path = tmp_path / "receipt.json"
    processes = [context.Process(target=_race, args=(str(path), b"%d" % i, barrier, results)) for i in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(results.get() for _ in processes) == [False] * 5 + [True]
    assert path.read_bytes() in {b"%d" % i for i in range(6)}
    assert list(tmp_path.iterdir()) == [path], "no temporary file stays"


def test_replace_file_leaves_the_old_content_when_the_write_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")
    monkeypatch.setattr("os.fsync", lambda fd: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(DiskFullError, match="free some space"):
        replace_file(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_system_without_hard_links_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_paths: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", refuse)
    with pytest.raises(StoreError, match="without hard links"):
        create_once(tmp_path / "receipt.json", b"{}")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_named_however_a_library_reports_it() -> None:
    over_the_cause = RuntimeError("unexpected pos 704 vs 598")  # torch
    over_the_cause.__context__ = OSError(errno.ENOSPC, "No space left on device")
    text_alone = RuntimeError("I/O error: No space left on device (os error 28)")  # safetensors
    for error in (over_the_cause, text_alone):
        with pytest.raises(DiskFullError, match="no space left while writing x"), translate_disk_full(Path("x")):
            raise error


def test_other_io_errors_keep_their_own_name() -> None:
    with pytest.raises(PermissionError), translate_disk_full(Path("x")):
        raise PermissionError(13, "Permission denied")


def test_the_lock_refuses_a_second_run_and_is_free_afterwards(tmp_path: Path) -> None:
    with (
        StoreLock(tmp_path / "store"),
        pytest.raises(StoreLockedError, match="another run"),
        StoreLock(tmp_path / "store"),
    ):
        pass
    with StoreLock(tmp_path / "store"):
        pass


def test_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    for root in (tmp_path / "file", tmp_path / "file" / "store"):
        with pytest.raises(StoreError, match=f"{root} cannot be written"), StoreLock(root):
            pass


def test_a_foreign_folder_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(StoreError, match=r"thesis\.txt"):
        open_for_resume(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_a_new_folder_and_a_plan_that_was_cut_short_can_be_written(tmp_path: Path) -> None:
    assert open_for_resume(tmp_path / "new") is None
    root = make_store(tmp_path / "cut", complete=False)
    for name in ("manifest.json", "receipts/000000.json", "receipts/000001.json"):
        (root / name).unlink()
    (root / "receipts").rmdir()
    with pytest.raises(StoreError, match=r"plan\.arrow"):  # no run was ever here: somebody else's folder
        open_for_resume(root)
    with StoreLock(root):
        assert open_for_resume(root) is None


def test_the_manifest_is_created_once(tmp_path: Path) -> None:
    root = make_store(tmp_path)
    assert open_for_resume(root) == load_manifest(root)
    with pytest.raises(StoreError, match="exists already"):
        make_store(root)


def test_opening_something_else_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFoundError, match="holds no store"):
        StoreReader(tmp_path)
    with pytest.raises(StoreNotFoundError, match="holds no store"):
        StoreReader(tmp_path / "nowhere")


def test_a_folder_that_a_writer_still_fills_is_deleted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "attempt").mkdir()
    rmtree, calls = shutil.rmtree, []

    def late_writer(folder: Path) -> None:
        calls.append(folder)
        if len(calls) < 3:
            raise OSError(errno.ENOTEMPTY if len(calls) == 1 else errno.ENOENT, "changed meanwhile", str(folder))
        rmtree(folder)

    monkeypatch.setattr(shutil, "rmtree", late_writer)
    remove_tree(tmp_path / "attempt")
    assert (len(calls), (tmp_path / "attempt").exists()) == (3, False)
    remove_tree(tmp_path / "never there")
