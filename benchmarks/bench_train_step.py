"""Training from the store against the same steps with their data already in memory.

`loader`  time of the steps alone over time of steps plus reading: 1.0 means the store costs nothing (limit 1)
`stall`   share of the run that the trainer waited for data (reach <= 0.02)

Both run the same micro-batches of the same store with the same threads. Without --store a synthetic store of the
shapes of SmolLM2-135M is written first.
"""

import statistics
import tempfile
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from measuring import interleaved, median_ratio, parse, report

from eyas.train.config import TrainConfig
from eyas.train.loader import MicroBatch
from eyas.train.optim import build_optimizer
from eyas.train.run import Run
from eyas.train.stepping import Accumulator, accumulate, apply_step
from eyas.train.testing import make_store

TOY: dict[str, Any] = {"lengths": [20, 30, 25, 18] * 6}
SMOLLM2: dict[str, Any] = {
    "lengths": [200, 300, 420, 260] * 30,
    "samples_per_shard": 40,
    "hidden_size": 576,
    "hidden_dtype": "bfloat16",
    "vocab_size": 8192,
    "draft_vocab_size": 4096,
    "topk": 64,
}


def copied(micro: MicroBatch) -> MicroBatch:
    """Return a micro-batch that no longer lives in the loader's buffers."""
    assert micro.batch is not None
    batch = replace(micro.batch, aux_hidden_states=micro.batch.aux_hidden_states.clone())
    return replace(micro, batch=batch, fields={name: field.clone() for name, field in micro.fields.items()})


def train(run: Run, micros: object, optimizer: torch.optim.Optimizer) -> int:
    """Train over micro-batches, one optimizer step each; return the tokens."""
    tokens = 0
    for step, micro in enumerate(micros):  # type: ignore[arg-type, var-annotated]
        work = Accumulator(ttt_steps=run.config.ttt_steps)
        accumulate(run, micro, work)
        apply_step(run, optimizer, step, work)
        tokens += micro.num_tokens
    return tokens


def main() -> None:
    """Measure one store."""
    flags = parse(__doc__ or "", store="", threads=2, ttt_steps=7, steps=4, repetitions=3)
    torch.set_num_threads(flags.threads)
    steps, ttt_steps = (2, 3) if flags.quick else (flags.steps, flags.ttt_steps)
    with tempfile.TemporaryDirectory() as name:
        store = Path(flags.store) if flags.store and not flags.quick else Path(name) / "store"
        if not store.exists():
            make_store(store, **(TOY if flags.quick else SMOLLM2))
        run = Run.open(
            TrainConfig(
                store=store,
                out=Path(name) / "run",
                ttt_steps=ttt_steps,
                tokens_per_micro_batch=64 if flags.quick else 2048,
            )
        )
        optimizer = build_optimizer(run.draft, run.config)
        with run.loader(run.train_batches(epoch=0, step=0, done_steps=0)) as loader:
            memory = [copied(micro) for micro in islice(loader, steps)]
        train(run, memory[:1], optimizer)  # kernels and optimizer state are made at the first step
        waits: list[float] = []

        def from_store() -> None:
            with run.loader(run.train_batches(epoch=0, step=0, done_steps=0)) as loader:
                train(run, islice(loader, steps), optimizer)
                waits.append(loader.waited_s)

        runs = {"memory": lambda: train(run, memory, optimizer), "store": from_store}
        times = interleaved(runs, 1 if flags.quick else flags.repetitions)
    tokens = sum(micro.num_tokens for micro in memory)
    alone, total = statistics.median(times["memory"]), statistics.median(times["store"])
    ratios = {"loader": median_ratio(times["memory"], times["store"]), "stall": sum(waits) / sum(times["store"])}
    print(
        f"{len(memory)} steps, {tokens:,} tokens, TTT {ttt_steps}, supervision {run.encoding}, {flags.threads} threads"
    )
    print(f"limit    data in memory   {tokens / alone:8,.0f} tokens/s")
    print(f"measured from the store   {tokens / total:8,.0f} tokens/s  ratio {ratios['loader']:.2f}")
    print(f"loader stall {ratios['stall']:.3f} of the step time (reach <= 0.02), the first batch included")
    measured = {"tokens_per_s": round(tokens / total, 1), "in_memory_tokens_per_s": round(tokens / alone, 1)}
    report("train_step", ratios, measured | {"ttt_steps": ttt_steps}, quick=flags.quick, save=flags.save)


if __name__ == "__main__":
    main()
