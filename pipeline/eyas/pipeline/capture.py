"""Capture one shard: run the target over its rows, project, write, commit. This runs inside an actor.

The story of a shard is `_attempt`. Rows are captured in plan order; a row that cannot be captured is quarantined with
its reason and the rest goes on. Nothing here raises to Ray: the caller gets a small record, and tensors stay in this
process.
"""

import logging
import platform
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np
import torch
import transformers
from torch import Tensor

from eyas.cache_format.errors import EyasError, NonFiniteError
from eyas.cache_format.frozen import FrozenTarget
from eyas.cache_format.layout import StorePaths
from eyas.cache_format.manifest import Identity, load_manifest
from eyas.cache_format.plan import Plan, read_plan
from eyas.cache_format.receipt import Receipt
from eyas.cache_format.samples import SampleTable
from eyas.cache_format.schema import aux_field, kept_rows
from eyas.cache_format.vocab import VocabMap, read_vocab
from eyas.cache_format.writer import ShardWriter
from eyas.pipeline.engine import CapturedRow, Engine, EngineConfig, load_engine
from eyas.pipeline.errors import TargetError
from eyas.pipeline.journal import MAX_DEATHS, AttemptJournal, RunFolder
from eyas.pipeline.projection import project

__all__ = ["CaptureTask", "ShardCapture", "batches", "known_provenance", "to_numpy"]

_log = logging.getLogger(__name__)
MAX_PADDING = 0.05
"""Largest share of padding in a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptureTask:
    """What every actor of a run is told; plain values."""

    store: str
    engine: EngineConfig
    batch_tokens: int
    """Token budget of a batch, padding included; 0 runs every row alone."""
    run_folder: str


@dataclass(frozen=True, slots=True)
class _Outcome:
    """One row: its states, or why there are none."""

    row: int
    states: CapturedRow | None
    reason: str = ""


class _Stopped(Exception):
    """The run was asked to end: the attempt is dropped and its shard stays pending."""


class ShardCapture:
    """Holds one target and captures the shards it is called with."""

    def __init__(self, task: CaptureTask) -> None:
        self.task = task
        self.paths = StorePaths(task.store)
        self.run = RunFolder(task.run_folder)

    def __call__(self, item: dict[str, Any]) -> dict[str, Any]:
        """Capture the shard `item["shard"]` and return {shard, status, error, rows, tokens, quarantined, seconds}.

        `status` is "committed", "stopped" (the run was asked to end) or "failed" (with `error`).
        """
        shard = int(item["shard"])
        record = {"shard": shard, "status": "", "error": "", "rows": 0, "tokens": 0, "quarantined": 0}
        start = time.monotonic()
        try:
            self._go_on()
            content = self._capture(shard).content
            record |= {"status": "committed", "rows": content.rows, "tokens": content.tokens}
            record["quarantined"] = len(content.quarantined)
        except _Stopped:
            record["status"] = "stopped"
        except Exception as error:  # Ray must never see it: a raising map function restarts actors and hides the cause
            _log.debug("shard %06d failed", shard, exc_info=True)
            text = str(error) if isinstance(error, EyasError) else f"{type(error).__name__}: {error}"
            record |= {"status": "failed", "error": text}
        return record | {"seconds": time.monotonic() - start}

    def _go_on(self) -> None:
        if self.run.stop_requested:
            raise _Stopped

    # -- what an actor holds ---------------------------------------------------------------------------------------

    @cached_property
    def identity(self) -> Identity:
        """The identity of the store."""
        return load_manifest(self.paths.root).identity

    @cached_property
    def plan(self) -> Plan:
        """The plan of the store."""
        return read_plan(self.paths.plan)

    @cached_property
    def vocab(self) -> VocabMap:
        """The default draft vocabulary."""
        return read_vocab(self.paths.vocab, self.identity.draft_vocab_digest)[1]

    @cached_property
    def engine(self) -> Engine:
        """The target, loaded at the first shard and compared with the store's frozen parts."""
        engine = load_engine(self.task.engine)
        stored = FrozenTarget(self.paths.root)
        tables = {
            "embed_tokens.weight": stored.embed_tokens(),
            "norm.weight": stored.final_norm(),
            "lm_head.weight": stored.lm_head(),
            "lm_head.bias": stored.lm_head_bias(),
        }
        # The head also when the model ties it: the store may hold one of its own.
        for name, tensor in (engine.frozen_tensors() | {"lm_head.weight": engine.head.weight}).items():
            table = tables[name]
            if table is None or not np.array_equal(_bits(table), _bits(to_numpy(tensor))):
                raise TargetError(
                    f"{name} of the loaded target differs from {stored.folder}/frozen.safetensors; the weights changed "
                    "since the store was made"
                )
        return engine

    @cached_property
    def draft_ids(self) -> Tensor:
        """int64 [W] on the device of the head."""
        return torch.from_numpy(self.vocab.ids).to(self.engine.head.weight.device)

    # -- one shard -------------------------------------------------------------------------------------------------

    def _capture(self, shard: int) -> Receipt:
        """Capture one shard, with half the batch budget again whenever memory runs out."""
        table = self._samples(shard)
        journal = AttemptJournal(self.run, shard)
        if journal.early_deaths >= MAX_DEATHS:
            raise TargetError(f"the process died {MAX_DEATHS} times before the first row of shard {shard:06d}")
        budget, restarts = self.task.batch_tokens, 0
        while True:
            journal.begin()  # before the engine is touched: loading it may be what kills the process
            try:
                return self._attempt(shard, table, journal, budget, restarts)
            except (MemoryError, RuntimeError) as error:
                longest = len(table.input_ids(0))
                if not _is_out_of_memory(error) or budget == 0:
                    raise
                budget, restarts = (budget // 2 if budget // 2 >= 2 * longest else 0), restarts + 1
                _log.warning("shard %06d: out of memory; starting it again with %d tokens a batch", shard, budget)
            finally:
                journal.end()
            torch.cuda.empty_cache()  # only here: inside the handler the traceback still holds the tensors

    def _samples(self, shard: int) -> SampleTable:
        """Return the shard's rows, each checked against the plan: a damaged one would be captured and sealed."""
        table = SampleTable(self.paths.samples(shard), shard)
        for row, planned in enumerate(self.plan.sample_ids[self.plan.shard_slice(shard)]):
            table.check_row(row, planned.tobytes())
        return table

    def _attempt(self, shard: int, table: SampleTable, journal: AttemptJournal, budget: int, restarts: int) -> Receipt:
        """Forward, project and write every row; writing one batch overlaps the forward of the next."""
        engine, checked = self.engine, False
        with ShardWriter(self.paths.root, shard, plan=self.plan) as writer, _Background() as background:
            for outcomes in self._outcomes(table, journal, budget):
                good = [o for o in outcomes if o.states is not None]
                if good and not checked:
                    engine.check(table.input_ids(good[0].row))
                    checked = True
                background.submit(_write, writer, outcomes, self._arrays(table, good))
            background.wait()
            return writer.commit(self._provenance(budget, restarts))

    def _outcomes(self, table: SampleTable, journal: AttemptJournal, budget: int) -> Iterator[list[_Outcome]]:
        lengths = [len(table.input_ids(row)) for row in range(len(table))]
        for rows in batches(lengths, budget, alone=journal.deaths):
            self._go_on()
            if journal.deaths[rows[0]] >= MAX_DEATHS:
                yield [_Outcome(rows[0], None, f"its capture ended the process {MAX_DEATHS} times")]
                continue
            journal.rows(rows)
            yield self._forward(table, rows, last_resort=budget == 0)

    def _forward(self, table: SampleTable, rows: Sequence[int], *, last_resort: bool) -> list[_Outcome]:
        """Run one batch; when it fails or holds NaN or Inf, run its rows alone to find the one to blame."""
        try:
            states = self.engine.capture([table.input_ids(row) for row in rows])
            outcomes = [_judge(row, state, self.identity) for row, state in zip(rows, states, strict=True)]
        except (TargetError, torch.AcceleratorError):
            raise  # a device that failed, as after a device-side assert, says nothing about the rows that follow
        except Exception as error:
            if _is_out_of_memory(error) and not last_resort:
                raise
            outcomes = [_Outcome(row, None, f"the target raised {type(error).__name__}: {error}") for row in rows]
        if len(rows) == 1 or all(o.states is not None for o in outcomes):
            return outcomes
        return [outcome for row in rows for outcome in self._forward(table, [row], last_resort=last_resort)]

    def _arrays(self, table: SampleTable, good: Sequence[_Outcome]) -> dict[int, dict[str, np.ndarray]]:
        """Return every field of the manifest for each captured row, on the host, in the store's dtypes."""
        if not good:
            return {}
        states = [o.states for o in good if o.states is not None]
        kept = [torch.from_numpy(np.flatnonzero(kept_rows(table.loss_mask(o.row)))) for o in good]
        hidden = torch.cat([s.last[k.to(s.last.device)] for s, k in zip(states, kept, strict=True)])
        names = [spec.name for spec in self.identity.fields]
        projected = project(hidden, self.engine.head, self.draft_ids, names, self.identity.topk)
        offsets = np.cumsum([0, *map(len, kept)])
        arrays = {}
        for index, outcome in enumerate(good):
            own = {name: rows[offsets[index] : offsets[index + 1]] for name, rows in projected.items()}
            arrays[outcome.row] = own | self._token_arrays(states[index])
        dtypes = {spec.name: spec.numpy_dtype for spec in self.identity.fields}
        return {row: {n: own[n].astype(d, copy=False) for n, d in dtypes.items()} for row, own in arrays.items()}

    def _token_arrays(self, states: CapturedRow) -> dict[str, np.ndarray]:
        layers = self.identity.aux_layer_outputs
        arrays = {aux_field(layer): to_numpy(state) for layer, state in zip(layers, states.aux, strict=True)}
        return arrays | {"last_hidden_state": to_numpy(states.last)}

    def _provenance(self, budget: int, restarts: int) -> dict[str, str]:
        device = torch.device(self.task.engine.device)
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
        incidents = {"restarts_after_out_of_memory": str(restarts)} if restarts else {}
        settings = known_provenance(self.task) | {"batch_tokens": str(budget)}
        return settings | {"device": f"{device.type} {name} {torch.backends.cpu.get_cpu_capability()}"} | incidents


def known_provenance(task: CaptureTask) -> dict[str, str]:
    """Return what is known before capture of the things that move bits without changing a store's identity."""
    return {
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "engine": task.engine.engine,
        "attention": task.engine.attention,
        "threads": str(task.engine.threads),
        "batch_tokens": str(task.batch_tokens),
    }


def batches(lengths: Sequence[int], budget: int, *, alone: Any = ()) -> Iterator[list[int]]:
    """Yield runs of neighbouring rows: padded size within the budget, padding within 5 %; budget 0 yields single rows.

    Args:
        lengths: tokens of each row, long to short.
        budget: tokens of a batch, padding included.
        alone: rows that share a batch with nobody.
    """
    batch: list[int] = []
    for row, length in enumerate(lengths):
        if batch and not _fits(lengths, batch, length, budget, lone=row in alone or batch[0] in alone):
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def _fits(lengths: Sequence[int], batch: Sequence[int], length: int, budget: int, *, lone: bool) -> bool:
    padded = lengths[batch[0]] * (len(batch) + 1)
    real = sum(lengths[row] for row in batch) + length
    return not lone and padded <= budget and padded - real <= MAX_PADDING * padded


def to_numpy(tensor: Tensor) -> np.ndarray:
    """Return a host array of the same bits; bf16 through ml_dtypes, which numpy lacks."""
    host = tensor.detach().cpu().contiguous()
    if host.dtype == torch.bfloat16:
        return host.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return host.numpy()


def _bits(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).view(np.uint8)


def _judge(row: int, states: CapturedRow, identity: Identity) -> _Outcome:
    """Refuse states that hold NaN or Inf, naming the field."""
    names = [*(aux_field(layer) for layer in identity.aux_layer_outputs), "last_hidden_state"]
    for name, state in zip(names, (*states.aux, states.last), strict=True):
        if not bool(torch.isfinite(state).all()):
            return _Outcome(row, None, f"{name} holds NaN or Inf")
    return _Outcome(row, states)


def _is_out_of_memory(error: BaseException) -> bool:
    """CUDA has an error of its own; the CPU allocator raises a RuntimeError that only its text tells apart."""
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    return known or (isinstance(error, RuntimeError) and "not enough memory" in str(error))


def _write(writer: ShardWriter, outcomes: Sequence[_Outcome], arrays: dict[int, dict[str, np.ndarray]]) -> None:
    for outcome in outcomes:
        if outcome.states is None:
            writer.quarantine(outcome.row, outcome.reason)
            continue
        try:
            writer.append(outcome.row, arrays[outcome.row])
        except NonFiniteError as error:  # finite states can still give an infinite fp16 value
            writer.quarantine(outcome.row, f"{error.field} holds NaN or Inf")


@dataclass
class _Background:
    """One thread with at most one job waiting; a job's error surfaces at the next call."""

    _pool: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="writer"))
    _job: Future[None] | None = None

    def __enter__(self) -> "_Background":
        return self

    def __exit__(self, *_error: object) -> None:
        self._pool.shutdown(wait=True)

    def submit(self, work: Any, *args: Any) -> None:
        self.wait()
        self._job = self._pool.submit(work, *args)

    def wait(self) -> None:
        if self._job is not None:
            self._job.result()
