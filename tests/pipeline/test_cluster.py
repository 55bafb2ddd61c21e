"""Ray: the same store as one process makes, whatever the actors, the working directory, the environment and the kills.

Field reports D4, D5, D13, D15, G2, G4, G6, G10.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

import eyas
from eyas.cache_format.layout import StorePaths
from eyas.cache_format.receipt import load_receipt
from eyas.cache_format.verify import verify_store
from eyas.pipeline import cluster
from eyas.pipeline.cluster import capture_in_process
from eyas.pipeline.config import PrecomputeConfig
from eyas.pipeline.errors import CaptureError
from eyas.pipeline.journal import AttemptJournal, RunFolder
from eyas.pipeline.precompute import precompute
from eyas.pipeline.testing import make_chats

KILL_SEED = 20240611
PRECOMPUTE = """
import json, logging, sys
from eyas.cache_format.errors import EyasError
from eyas.pipeline.config import PrecomputeConfig
from eyas.pipeline.precompute import precompute
logging.basicConfig(level=logging.INFO)
try:
    values = json.loads(sys.argv[1])
    report = precompute(PrecomputeConfig(**values | {"chats": tuple(values["chats"])}))
    print(report.text)
    sys.exit(report.exit_code)
except EyasError as error:
    sys.exit(f"ERROR: {error}")
"""


def settings(folder, target, **changes):
    return {
        "chats": [str(folder / "chats.jsonl")],
        "target": str(target),
        "out": str(folder / "store"),
        "shard_tokens": 1024,
        "topk": 8,
        "draft_vocab_size": 128,
    } | changes


def start(values, *, cwd=None, **environment):
    """Start precompute in a process group of its own."""
    roots = [os.path.dirname(os.path.abspath(folder)) for folder in eyas.__path__]
    return subprocess.Popen(
        [sys.executable, "-P", "-c", PRECOMPUTE, json.dumps(values)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(roots), **environment},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def straight_run(folder, target, **changes):
    """Capture the same chats in this process, uninterrupted, and return the digests of the store."""
    values = settings(folder, target, **changes) | {"out": str(folder / "straight")}
    precompute(PrecomputeConfig(**values | {"chats": tuple(values["chats"])}), capture=capture_in_process)
    return digests(folder / "straight")


def digests(root):
    paths = StorePaths(root)
    shards = sorted(int(p.stem) for p in paths.receipts.iterdir())
    return [paths.complete.read_bytes(), *(load_receipt(paths, shard).digest for shard in shards)]


@pytest.mark.ray
def test_two_actors_give_the_bytes_of_one_process_in_a_hostile_working_directory(tmp_path, tiny_target):
    make_chats(tmp_path / "chats.jsonl", 12, 0)
    work = tmp_path / "work"
    work.mkdir()
    for name in ("eyas.py", "pipeline.py", "train.py", "types.py"):  # the user's; Ray would put their folder first
        (work / name).write_text("raise RuntimeError('the wrong module')\n")
    process = start(settings(tmp_path, tiny_target, num_actors=2), cwd=work, RAY_ADDRESS="10.255.255.1:6379")
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    assert "is complete" in output
    assert digests(tmp_path / "store") == straight_run(tmp_path, tiny_target)
    assert verify_store(tmp_path / "store") == []


def test_no_progress_ends_the_run_naming_what_is_pending(tmp_path):
    class Silent:
        def iter_batches(self, **_options):
            time.sleep(60)
            return iter(())

    feed = cluster._Feed(Silent())
    with pytest.raises(CaptureError, match=r"no batch was captured for 1 s; pending: 2 shards \(000003, 000007\)"):
        list(cluster._consume(feed, {3, 7}, RunFolder(tmp_path), 1.0))


def test_batches_written_by_actors_count_as_progress(tmp_path):
    class Slow:
        def iter_batches(self, **_options):
            journal = AttemptJournal(RunFolder(tmp_path), 3)
            journal.begin()
            for row in range(6):
                time.sleep(0.5)
                journal.rows([row])
            import pyarrow as pa

            yield pa.Table.from_pylist([{"shard": 3, "status": "committed"}])

    records = [r for r in cluster._consume(cluster._Feed(Slow()), {3}, RunFolder(tmp_path), 2.0) if r is not None]
    assert records == [{"shard": 3, "status": "committed"}]


def test_an_actor_that_writes_without_capturing_a_batch_is_no_progress(tmp_path):
    class Restless:
        def iter_batches(self, **_options):
            journal = AttemptJournal(RunFolder(tmp_path), 3)
            for _ in range(30):
                journal.begin()
                time.sleep(0.2)
            return iter(())

    with pytest.raises(CaptureError, match="no batch was captured for 1 s"):
        list(cluster._consume(cluster._Feed(Restless()), {3}, RunFolder(tmp_path), 1.0))


def test_a_stopped_run_waits_for_what_is_in_flight_alone(tmp_path):
    run, ended = RunFolder(tmp_path), []
    journal = AttemptJournal(run, 3)
    journal.begin()
    journal.rows([0])
    run.request_stop(signal.SIGTERM)

    class Slow:
        def iter_batches(self, **_options):
            time.sleep(1.2)
            ended.append(3)
            journal.end()
            time.sleep(60)
            return iter(())

    assert set(cluster._consume(cluster._Feed(Slow()), {3, 7}, run, 30.0)) == {None}
    assert ended == [3]


def test_failure_of_ray_is_one_message(tmp_path):
    class Broken:
        def iter_batches(self, **_options):
            raise RuntimeError("raylet is gone\nwith a long story")

    with pytest.raises(
        CaptureError, match=r"^Ray failed \(RuntimeError: raylet is gone\); pending: 1 shards \(000001\)$"
    ):
        list(cluster._consume(cluster._Feed(Broken()), {1}, RunFolder(tmp_path), 30.0))


def test_sigterm_sets_the_stop_flag(tmp_path):
    run = RunFolder(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    with cluster._stop_on_signals(run):
        assert not run.stop_requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert run.stop_requested
    assert signal.getsignal(signal.SIGTERM) is before


class KillingCapture(cluster.ShardCapture):
    """Ends its process whenever the letter Z is about to be read."""

    def _forward(self, table, rows, *, last_resort):
        if any(bool((table.input_ids(row) == 60).any()) for row in rows):
            os._exit(1)
        return super()._forward(table, rows, last_resort=last_resort)


@pytest.mark.ray
@pytest.mark.slow
def test_row_that_kills_its_actor_is_quarantined_and_the_run_ends(tmp_path, tiny_target, monkeypatch):
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    monkeypatch.setattr(cluster, "ShardCapture", KillingCapture)
    chats = make_chats(tmp_path / "chats.jsonl", 6, 0)
    with chats.open("a") as file:
        messages = [{"role": "user", "content": "Z"}, {"role": "assistant", "content": "the owl sleeps"}]
        file.write(json.dumps({"id": "fatal", "messages": messages}) + "\n")
    values = settings(tmp_path, tiny_target)
    report = precompute(PrecomputeConfig(**values | {"chats": tuple(values["chats"])}))
    assert "1 rows quarantined" in report.text
    assert verify_store(tmp_path / "store") == []


@pytest.mark.ray
@pytest.mark.slow
def test_sigterm_stops_the_run_and_the_next_one_completes(tmp_path, tiny_target):
    make_chats(tmp_path / "chats.jsonl", 120, 0)
    values = settings(tmp_path, tiny_target)
    process = start(values)
    _wait_for_receipt(tmp_path / "store", process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 143, output
    assert "stopped by SIGTERM with" in output
    assert "shards pending; run the same command again" in output
    again, _ = start(values).communicate(timeout=240)
    assert "is complete" in again
    assert digests(tmp_path / "store") == straight_run(tmp_path, tiny_target)


def _wait_for_receipt(root, process, more_than=0, patience=120.0):
    end = time.monotonic() + patience
    receipts = root / "receipts"
    while time.monotonic() < end and process.poll() is None:
        if receipts.is_dir() and len(list(receipts.glob("*.json"))) > more_than:
            return
        time.sleep(0.02)


def kill_somewhere(process, root, draw):
    """Kill the process group at a random moment: while starting and planning, or inside the capture."""
    receipts = root / "receipts"
    if draw.random() < 0.3:
        time.sleep(draw.uniform(0.5, 12.0))
    else:
        wanted = (len(list(receipts.glob("*.json"))) if receipts.is_dir() else 0) + draw.randint(1, 6)
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end:
            if receipts.is_dir() and len(list(receipts.glob("*.json"))) >= wanted:
                break
            time.sleep(0.005)
        time.sleep(draw.uniform(0.0, 0.1))
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)


def kill_and_resume(tmp_path, target, kills):
    make_chats(tmp_path / "chats.jsonl", 150, 0)
    expected = straight_run(tmp_path, target)
    draw = random.Random(KILL_SEED)
    for number in range(kills):
        kill_somewhere(start(settings(tmp_path, target, num_actors=1 + number % 2)), tmp_path / "store", draw)
    process = start(settings(tmp_path, target, num_actors=2 - kills % 2))
    try:
        output, _ = process.communicate(timeout=400)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode == 0, output
    assert digests(tmp_path / "store") == expected
    assert verify_store(tmp_path / "store") == []
    _nothing_is_left_over(tmp_path / "store")


def _nothing_is_left_over(root):
    assert not (root / "running").exists()
    for shard in (root / "shards").iterdir():
        assert sum(p.is_dir() for p in shard.iterdir()) == 1, sorted(shard.iterdir())


@pytest.mark.ray
@pytest.mark.slow
def test_three_kills_end_with_the_bytes_of_a_straight_run(tmp_path, tiny_target):
    kill_and_resume(tmp_path, tiny_target, 3)


@pytest.mark.ray
@pytest.mark.soak
def test_ten_kills_end_with_the_bytes_of_a_straight_run(tmp_path, tiny_target):
    kill_and_resume(tmp_path, tiny_target, 10)
