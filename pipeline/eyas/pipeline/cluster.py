"""Everything about Ray: feed shard numbers to a fixed pool of actors, get small records back.

Ray Data is used for its actor pool alone. No dataset is read by it and no tensor enters its object store; what is
pending was decided from disk, and what was done lies on disk. Settings here are the ones that were measured to matter.
"""

import importlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from typing import Any

from eyas.pipeline.capture import CaptureTask, ShardCapture
from eyas.pipeline.errors import CaptureError
from eyas.pipeline.journal import RunFolder

__all__ = ["capture_in_process", "capture_on_ray"]

_log = logging.getLogger(__name__)
OBJECT_STORE_BYTES = 100 << 20
"""Records of a few hundred bytes pass through it; Ray's smallest permitted store is enough."""
POLL_SECONDS = 0.5


def capture_in_process(task: CaptureTask, shards: Sequence[int], **_ray: Any) -> Iterator[dict[str, Any] | None]:
    """Yield the record of every shard, captured one after another in this process: for tests and debuggers."""
    capture = ShardCapture(task)
    for shard in shards:
        yield capture({"shard": shard})


def capture_on_ray(
    task: CaptureTask, shards: Sequence[int], *, num_actors: int, address: str | None, stall_timeout: float
) -> Iterator[dict[str, Any] | None]:
    """Yield the record of every shard as it ends, and None twice a second in between; end early when asked to stop.

    Args:
        task: what each actor is told.
        shards: pending shards.
        num_actors: processes with one target each.
        address: a cluster to join, or None for a local Ray that lives as long as this call.
        stall_timeout: seconds without any captured batch after which the run is given up.

    Raises:
        CaptureError: nothing moves any more, or Ray itself failed; names the pending shards.
    """
    ray = importlib.import_module("ray")
    num_actors = min(num_actors, len(shards))
    _log.info(
        "starting Ray and loading the target into %d actor(s); Ray's own line about max_restarts (its issue 53727) is "
        "harmless here",
        num_actors,
    )  # what would silence that line would silence Ray's true errors too; Ray Data keeps the arguments alive
    # Ray puts the working directory first on every worker's path, where an eyas.py or json.py of the user's would be
    # imported for ours and end each actor as it starts.
    with chdir(task.run_folder):
        _start(ray, task, num_actors, address)
    run = RunFolder(task.run_folder)
    try:
        with _stop_on_signals(run):
            yield from _consume(_Feed(_dataset(task, shards, num_actors)), set(shards), run, stall_timeout)
    finally:
        ray.shutdown()


def _start(ray: Any, task: CaptureTask, num_actors: int, address: str | None) -> None:
    """Join the named cluster or start a local Ray; an inherited RAY_ADDRESS is not asked."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is not None:
        ray.init(address=address, runtime_env={"env_vars": {"PYTHONPATH": _python_path()}}, **quiet)
        return
    # Workers of a local Ray inherit our environment; a runtime_env would throw away its prestarted processes.
    environment = {"PYTHONPATH": _python_path(), "RAY_USAGE_STATS_ENABLED": "0"}
    with _environment(environment | {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}):
        ray.init(
            address="local",
            # One CPU more than the actors declare: a local Ray with exactly their number can wait forever.
            num_cpus=num_actors * task.engine.threads + 1,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            **quiet,
        )


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _python_path() -> str:
    """Return the source roots of the eyas namespace before the inherited path, so that workers import the same code."""
    import eyas

    roots = [os.path.dirname(os.path.abspath(folder)) for folder in eyas.__path__]
    return os.pathsep.join([*dict.fromkeys(roots), *filter(None, [os.environ.get("PYTHONPATH")])])


def _dataset(task: CaptureTask, shards: Sequence[int], num_actors: int) -> Any:
    """Return the lazy dataset of shard records: one block, hence one task, per shard."""
    import ray.data

    context = ray.data.DataContext.get_current()  # before from_items, which copies it
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.verbose_stats_logs = False
    context.execution_options.preserve_order = False
    context.wait_for_min_actors_s = -1
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    items = ray.data.from_items([{"shard": shard} for shard in shards], override_num_blocks=len(shards))
    actor: Any = ShardCapture  # Ray's signature knows functions only
    return items.map(
        actor,
        fn_constructor_args=(task,),
        compute=ray.data.ActorPoolStrategy(size=num_actors, max_tasks_in_flight_per_actor=1),
        num_cpus=task.engine.threads,
        num_gpus=1 if task.engine.device.startswith("cuda") else 0,
    )  # Ray restarts a dead actor without end; the attempt journal is what gives up a row or a shard


class _Feed:
    """Runs the dataset in a thread, so that the driver can look at the clock while it waits."""

    def __init__(self, dataset: Any) -> None:
        self.records: queue.Queue[dict[str, Any] | Exception | None] = queue.Queue()
        threading.Thread(target=self._run, args=(dataset,), daemon=True, name="ray-records").start()

    def _run(self, dataset: Any) -> None:
        try:
            for batch in dataset.iter_batches(batch_size=None, prefetch_batches=0, batch_format="pyarrow"):
                for record in batch.to_pylist():
                    self.records.put(record)
            self.records.put(None)
        except Exception as error:  # handed to the driver's thread, which turns it into a message
            self.records.put(error)


def _consume(feed: _Feed, pending: set[int], run: RunFolder, stall_timeout: float) -> Iterator[dict[str, Any] | None]:
    active, done = time.monotonic(), run.rows_done(pending)
    while pending:
        try:
            record = feed.records.get(timeout=POLL_SECONDS)
        except queue.Empty:
            before, done = done, run.rows_done(pending)
            if run.stop_requested and not done:
                return  # nothing is in flight, and nothing will be begun: Ray need not deal out the rest
            if done != before:
                active = time.monotonic()
            if time.monotonic() - active > stall_timeout:
                raise CaptureError(
                    f"no batch was captured for {stall_timeout:g} s; pending: {_names(pending)}. Look at free memory "
                    "and at the actors' logs in Ray's session folder, then run the same command again"
                ) from None
            yield None
            continue
        if isinstance(record, Exception):
            raise CaptureError(f"Ray failed ({_first_line(record)}); pending: {_names(pending)}") from record
        if record is None:
            raise CaptureError(f"Ray ended without a record of every shard; pending: {_names(pending)}")
        active = time.monotonic()
        pending.discard(record["shard"])
        yield record


def _names(shards: set[int]) -> str:
    shown = ", ".join(f"{shard:06d}" for shard in sorted(shards)[:8])
    return f"{len(shards)} shards ({shown}{', ...' if len(shards) > 8 else ''})"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"


@contextmanager
def _stop_on_signals(run: RunFolder) -> Iterator[None]:
    """Turn SIGTERM and the first Ctrl-C into the stop flag that actors read; a second Ctrl-C ends at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: Any) -> None:
        _log.warning(
            "%s: stopping behind the batches in flight; their shards stay pending", signal.Signals(number).name
        )
        run.request_stop(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
