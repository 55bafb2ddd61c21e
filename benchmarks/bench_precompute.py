"""Capture against the bare forward: what encoding, hashing and writing cost beside the target itself.

`forward`        limit: the same batches through the bare model, plus projection and top-k of the kept rows
`forward_strict` limit: the bare model alone

Shard by shard the limit and the real capture run one after the other in this process, first batch to commit, with
the same threads; Ray's start and the model load are outside both. Without --target a small random Llama is captured.
"""

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import parse, report, seconds

from eyas.cache_format.samples import SampleTable
from eyas.cache_format.schema import kept_rows
from eyas.pipeline.capture import CaptureTask, ShardCapture, batches
from eyas.pipeline.config import PrecomputeConfig
from eyas.pipeline.precompute import precompute
from eyas.pipeline.projection import project
from eyas.pipeline.testing import make_chats, make_tiny_target


class Timed:
    """Stands in for the Ray runner: captures every shard in this process, next to its limits."""

    def __init__(self) -> None:
        self.tokens = 0
        self.times: dict[str, list[float]] = {"forward_strict": [], "forward": [], "capture": []}

    def __call__(self, task: CaptureTask, pending: Sequence[int], **_: Any) -> Iterator[dict[str, Any]]:
        """Yield the record of every shard, as the Ray runner does."""
        capture = ShardCapture(task)
        for number, shard in enumerate(pending):
            table = SampleTable(capture.paths.samples(shard), shard)
            if number == 0:  # pages, kernels and the fp32 head are made at the first touch
                self.forward(capture, table, with_projection=True)
            strict = seconds(lambda: self.forward(capture, table, with_projection=False))  # noqa: B023
            forward = seconds(lambda: self.forward(capture, table, with_projection=True))  # noqa: B023
            record = capture({"shard": shard})
            self.tokens += record["tokens"]
            for name, value in (("forward_strict", strict), ("forward", forward), ("capture", record["seconds"])):
                self.times[name].append(value)
            yield record

    @torch.inference_mode()
    def forward(self, capture: ShardCapture, table: SampleTable, *, with_projection: bool) -> None:
        """Run the rows of a shard through the bare model, in the batches that the capture takes."""
        engine: Any = capture.engine
        names = [spec.name for spec in capture.identity.fields]
        for rows in batches([len(table.input_ids(r)) for r in range(len(table))], capture.task.batch_tokens):
            lengths = [len(table.input_ids(r)) for r in rows]
            ids = np.zeros((len(rows), max(lengths)), np.int64)
            for place, row in zip(ids, rows, strict=True):
                place[: len(table.input_ids(row))] = table.input_ids(row)
            last = engine.backbone(input_ids=torch.from_numpy(ids).to(engine.device), use_cache=False)[0]
            if with_projection:
                kept = [last[i, np.flatnonzero(kept_rows(table.loss_mask(r)))] for i, r in enumerate(rows)]
                project(torch.cat(kept), engine.head, capture.draft_ids, names, capture.identity.topk)


def main() -> None:
    """Measure one capture."""
    flags = parse(__doc__ or "", target="", chats="examples/chats.jsonl", limit=120, threads=2)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target, chats, limit = flags.target, flags.chats, flags.limit
        if not target or flags.quick:
            target = str(make_tiny_target(folder / "target"))
            make_chats(folder / "chats.jsonl", 30)
            chats, limit = str(folder / "chats.jsonl"), 30
        timed = Timed()
        config = PrecomputeConfig(
            chats=(chats,),
            target=target,
            out=str(folder / "store"),
            limit=limit,
            threads_per_actor=flags.threads,
            shard_tokens=512 if flags.quick else 8192,
            draft_vocab_size=64 if flags.quick else 8192,
            max_length=256 if flags.quick else 2048,
        )
        print(precompute(config, capture=timed).text)
    rate = {k: timed.tokens / sum(v) for k, v in timed.times.items()}
    ratios = {
        key: statistics.median(a / b for a, b in zip(timed.times[key], timed.times["capture"], strict=True))
        for key in ("forward", "forward_strict")
    }
    print(f"{timed.tokens:,} tokens, {len(timed.times['capture'])} shards, {flags.threads} threads")
    print(f"limit    bare forward                 {rate['forward_strict']:8,.0f} tokens/s")
    print(f"limit    forward, projection, top-k   {rate['forward']:8,.0f} tokens/s")
    print(f"measured capture, encode, commit      {rate['capture']:8,.0f} tokens/s")
    print(f"ratio forward {ratios['forward']:.2f} (reach >= 0.90), forward_strict {ratios['forward_strict']:.2f}")
    measured = {f"{k}_tokens_per_s": round(v, 1) for k, v in rate.items()} | {
        "tokens": timed.tokens,
        "target": flags.target and Path(flags.target).name,
    }
    report("precompute", ratios, measured, quick=flags.quick, save=flags.save)


if __name__ == "__main__":
    main()
