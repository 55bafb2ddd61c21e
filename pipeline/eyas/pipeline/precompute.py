"""`eyas precompute`: from chats to a complete store, readable top to bottom.

    plan -> estimate -> identity -> frozen parts -> capture pending shards -> check the books -> complete

Everything before the capture costs seconds to minutes and needs no weights in memory. A second run with the same
arguments goes on where the first stopped, whatever ended it; a run with other arguments is refused.
"""

import logging
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas.cache_format.digests import digest_parts
from eyas.cache_format.errors import ConfigError, DiskFullError
from eyas.cache_format.estimate import estimate_fields
from eyas.cache_format.frozen import write_frozen_target
from eyas.cache_format.layout import StorePaths, remove_tree
from eyas.cache_format.manifest import Identity, Manifest, require_same_identity
from eyas.cache_format.receipt import load_completion, load_receipt
from eyas.cache_format.report import Report
from eyas.cache_format.schema import FORMAT_VERSION, check_aux_layer_outputs, default_aux_layer_outputs, store_fields
from eyas.cache_format.tables import bytes_text
from eyas.cache_format.writer import StoreLock, complete_store, create_store, open_for_resume, pending_shards
from eyas.pipeline.capture import CaptureTask, known_provenance
from eyas.pipeline.chat import ChatEncoder
from eyas.pipeline.cluster import capture_on_ray
from eyas.pipeline.config import PrecomputeConfig, parse_switches
from eyas.pipeline.engine import EngineConfig
from eyas.pipeline.errors import CaptureError, TargetError
from eyas.pipeline.journal import RunFolder
from eyas.pipeline.plan import PlannedData, plan_capture
from eyas.pipeline.progress import Progress
from eyas.pipeline.target_folder import TargetFolder, open_target
from eyas.pipeline.token_bytes import token_table

__all__ = ["precompute"]

_log = logging.getLogger(__name__)
CaptureShards = Callable[..., Iterator[dict[str, Any] | None]]
CUDA_BATCH_TOKENS = 16_384


def precompute(config: PrecomputeConfig, *, capture: CaptureShards = capture_on_ray) -> Report:
    """Run the frozen target over the chats and store what a draft has to learn from it.

    Args:
        config: the command's configuration.
        capture: runs the pending shards; Ray unless a test asks for this process.

    Raises:
        EyasError: any fault, with what failed, where, and what to do next.
    """
    target = open_target(config.target, config.revision)
    data, encoder = _plan(config, target)
    estimate = _estimate(config, target, data)
    identity = _identity(config, target, encoder, data)
    if config.dry_run:
        return Report(f"{_summary(data)}\n{estimate}\ndry run: nothing was written")
    root = Path(config.out)
    stored = open_for_resume(root)
    if stored is not None:
        require_same_identity(root, stored.identity, identity)
    _log.info("%s", estimate)
    with StoreLock(root):
        if stored is None:
            _check_free_space(root, config, target, data)
            _create(root, target, identity, encoder, data)
        if load_completion(StorePaths(root)) is not None:
            return Report(f"{root} is complete already: {len(data.plan)} samples in {data.plan.num_shards} shards")
        _capture(root, config, target, identity, data, capture)
        _check_books(root, config, data)
        _sweep(root, data)
        complete_store(root)
    return Report(f"{_summary(data)}\n{_outcome(root, data)}")


# -- plan and estimate -------------------------------------------------------------------------------------------------


def _plan(config: PrecomputeConfig, target: TargetFolder) -> tuple[PlannedData, ChatEncoder]:
    longest = getattr(target.config, "max_position_embeddings", None)
    if longest is not None and config.max_length > longest:
        raise ConfigError(f"max_length {config.max_length} exceeds the {longest} positions of {target.name}")
    encoder = ChatEncoder(target.tokenizer(), eos_ids=target.eos_ids, switches=parse_switches(config.template_switches))
    end_of_turn = encoder.probe()
    if not set(end_of_turn) & set(target.eos_ids):
        _log.warning(
            "no turn of the chat template ends with an eos of the generation config (%s); spans run to the end of what "
            "the template prints for the turn",
            list(target.eos_ids),
        )
    vocab_size = int(target.config.vocab_size)
    beyond = [i for i in target.eos_ids if i >= vocab_size]
    if beyond:
        raise TargetError(
            f"eos id {beyond[0]} of {target.path} is outside its vocabulary of {vocab_size}; repair the config"
        )
    return plan_capture(config, encoder, vocab_size=vocab_size, always_keep=[*target.eos_ids, *end_of_turn]), encoder


def _summary(data: PlannedData) -> str:
    books = data.plan.books
    dropped = ", ".join(f"{n} {reason}" for reason, n in {**books["dropped"], **books["dropped_samples"]}.items() if n)
    lines = [
        f"rows read {books['rows_read']:,}, kept {books['rows_kept']:,}; dropped: {dropped or 'none'}",
        f"samples {books['samples']:,} ({int(data.plan.heldout.sum()):,} held out, {books['duplicates']:,} duplicates "
        f"left out, {books['truncated']:,} truncated) in {data.plan.num_shards:,} shards",
        f"tokens {int(data.plan.length.sum(dtype=np.int64)):,}, supervised "
        f"{int(data.plan.supervised.sum(dtype=np.int64)):,}",
        f"draft vocabulary {len(data.vocab):,} of {data.vocab.vocab_size:,} ids covers {100 * data.coverage:.2f} % of "
        "the supervised training tokens",
    ]
    return "\n".join(lines)


def _fields(config: PrecomputeConfig, target: TargetFolder, data: PlannedData) -> dict[str, Any]:
    """Return what identity and estimate share: captured layers, K and the fields that follow."""
    num_layers = int(target.config.num_hidden_layers)
    if config.aux_layer_outputs is None:
        layers: tuple[int, ...] = default_aux_layer_outputs(num_layers)
    else:
        layers = check_aux_layer_outputs(config.aux_layer_outputs, num_layers)
    topk = min(config.topk, data.vocab.vocab_size)
    fields = store_fields(
        aux_layer_outputs=layers,
        hidden_size=int(target.config.hidden_size),
        hidden_dtype=target.dtype(config.dtype),
        supervision=config.supervision,
        topk=topk,
        topk_dtype=config.topk_dtype,
        draft_vocab_size=len(data.vocab),
        probs_dtype=config.probs_dtype,
    )
    return {"aux_layer_outputs": layers, "topk": topk, "fields": fields}


def _bytes_per_token(config: PrecomputeConfig, target: TargetFolder, data: PlannedData) -> list[tuple[str, float]]:
    kept_share = float(data.plan.kept.sum(dtype=np.int64) / data.plan.length.sum(dtype=np.int64))
    sizes = estimate_fields(_fields(config, target, data)["fields"], kept_share)
    return [(size.name, float(size.bytes_per_token)) for size in sizes]


def _estimate(config: PrecomputeConfig, target: TargetFolder, data: PlannedData) -> str:
    sizes = _bytes_per_token(config, target, data)
    per_token = sum(size for _, size in sizes)
    tokens = int(data.plan.length.sum(dtype=np.int64))
    lines = [f"  {name:<28} {size:>10,.1f} bytes/token" for name, size in sizes]
    total = f"estimate: {per_token:,.0f} bytes/token, {bytes_text(per_token * tokens)} for {tokens:,} tokens"
    return "\n".join([*lines, total])


def _check_free_space(root: Path, config: PrecomputeConfig, target: TargetFolder, data: PlannedData) -> None:
    needed = sum(s for _, s in _bytes_per_token(config, target, data)) * int(data.plan.length.sum(dtype=np.int64))
    free = shutil.disk_usage(root).free
    if needed > free:
        raise DiskFullError(
            f"{root} has {bytes_text(free)} free, the store needs about {bytes_text(needed)}; choose another disk, "
            "fewer chats (--limit), or a smaller --supervision"
        )


# -- identity and frozen parts -----------------------------------------------------------------------------------------


def _identity(config: PrecomputeConfig, target: TargetFolder, encoder: ChatEncoder, data: PlannedData) -> Identity:
    return Identity(
        plan_digest=data.plan.digest,
        tokenizer_digest=target.tokenizer_digest(),
        template_digest=digest_parts([encoder.template]),
        template_switches=parse_switches(config.template_switches),
        target=target.identity(target.dtype(config.dtype)),
        logit_transform=target.logit_transform,
        embedding_multiplier=target.embedding_multiplier,
        supervision=config.supervision,
        draft_vocab_size=len(data.vocab),
        draft_vocab_digest=data.vocab.digest,
        container=config.container,
        chunk_bytes=config.chunk_bytes,
        max_length=config.max_length,
        **_fields(config, target, data),
    )


def _create(root: Path, target: TargetFolder, identity: Identity, encoder: ChatEncoder, data: PlannedData) -> None:
    """Write the frozen parts, then the plan stage; the manifest comes last and makes the folder a store."""
    table, special = token_table(encoder.tokenizer)
    write_frozen_target(
        root,
        config=target.config_json,
        generation_config=target.generation_config,
        tensors=target.frozen_tensors(identity.target.dtype),
        token_bytes=table[: identity.target.vocab_size],
        special=special[: identity.target.vocab_size],
        copy_files=target.tokenizer_files(),
    )
    provenance = {"python": platform.python_version(), "target": str(target.path), "host_cpus": str(os.cpu_count())}
    create_store(
        root,
        manifest=Manifest(FORMAT_VERSION, identity, provenance),
        plan=data.plan,
        shards=data.shards,
        token_counts=data.token_counts,
        vocab=data.vocab,
    )


# -- capture -----------------------------------------------------------------------------------------------------------


@dataclass
class _Tally:
    """What the records of a run add up to."""

    rows: int = 0
    quarantined: int = 0
    stopped: int = 0


def _capture(
    root: Path,
    config: PrecomputeConfig,
    target: TargetFolder,
    identity: Identity,
    data: PlannedData,
    capture: CaptureShards,
) -> None:
    """Capture every shard without a receipt."""
    pending = pending_shards(root)
    if not pending:
        return
    running = StorePaths(root).root / "running"
    remove_tree(running)  # left behind by a killed run; we hold the lock
    run = RunFolder(running / f"run-{os.urandom(4).hex()}")
    run.path.mkdir(parents=True)
    task = _task(root, config, target, identity, run)
    _warn_about_provenance(root, task, set(range(data.plan.num_shards)) - set(pending))
    tokens = {shard: int(data.plan.length[data.plan.shard_slice(shard)].sum(dtype=np.int64)) for shard in pending}
    tally = _Tally()
    records = capture(
        task, pending, num_actors=config.num_actors, address=config.ray_address, stall_timeout=config.stall_timeout
    )
    try:
        with Progress(total=sum(tokens.values()), interval=config.progress_interval) as progress:
            for record in records:
                if record is not None:
                    _account(record, tally, config, len(data.plan))
                progress.update(tokens[record["shard"]] if record is not None else 0)
    finally:
        run.request_stop()  # for actors that outlive this process
        remove_tree(running)
    if tally.stopped:
        raise CaptureError(f"stopped with {tally.stopped} shards pending; run the same command again to go on")


def _warn_about_provenance(root: Path, task: CaptureTask, committed: set[int]) -> None:
    """Say what the new shards will be captured with that the committed ones were not."""
    if not committed:
        return
    old, new = load_receipt(StorePaths(root), min(committed)).provenance, known_provenance(task)
    found = ", ".join(
        f"{name} {old.get(name)} then, {value} now" for name, value in new.items() if old.get(name) != value
    )
    if found:
        _log.warning("committed shards were captured otherwise (%s): rows agree within rounding, not to the bit", found)


def _task(
    root: Path, config: PrecomputeConfig, target: TargetFolder, identity: Identity, run: RunFolder
) -> CaptureTask:
    device = config.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    batch_tokens = config.batch_tokens
    if batch_tokens is None:
        # A CPU gains nothing from batches of long rows, and a lone row equals a lone forward to the bit.
        batch_tokens = CUDA_BATCH_TOKENS if device == "cuda" else 0
    engine = EngineConfig.of(
        identity,
        folder=str(target.path.resolve()),
        device=device,
        attention=config.attention,
        threads=config.threads_per_actor,
    )
    return CaptureTask(
        store=str(root.resolve()), engine=engine, batch_tokens=batch_tokens, run_folder=str(run.path.resolve())
    )


def _account(record: dict[str, Any], tally: _Tally, config: PrecomputeConfig, planned_rows: int) -> None:
    """Add one record; stop the run on a failure or when the error budget is spent."""
    if record["status"] == "failed":
        raise CaptureError(f"shard {record['shard']:06d}: {record['error']}")
    tally.stopped += record["status"] == "stopped"
    tally.rows += record["rows"]
    tally.quarantined += record["quarantined"]
    _check_budget(tally.quarantined, planned_rows, config)


def _check_budget(quarantined: int, planned_rows: int, config: PrecomputeConfig) -> None:
    """One row is always allowed, so that a share means something for small data too."""
    if quarantined > max(1.0, config.max_quarantine * planned_rows):
        raise CaptureError(
            f"{quarantined} of {planned_rows} rows could not be captured, more than max_quarantine "
            f"{config.max_quarantine:g} allows; see {config.out}/quarantine for the reasons"
        )


def _check_books(root: Path, config: PrecomputeConfig, data: PlannedData) -> None:
    """Rows of the plan must equal rows committed plus rows quarantined, shard by shard, read from the receipts."""
    paths = StorePaths(root)
    quarantined = 0
    for shard in range(data.plan.num_shards):
        rows = data.plan.shard_slice(shard)
        content = load_receipt(paths, shard).content
        lost = {row.row for row in content.quarantined}
        planned = data.plan.length[rows]
        stored = sum(int(length) for row, length in enumerate(planned) if row not in lost)
        if content.rows != len(planned) or content.tokens != stored:
            raise CaptureError(
                f"shard {shard:06d}: its receipt counts {content.rows} rows and {content.tokens} tokens, the plan "
                f"{len(planned)} and {stored}; delete {paths.receipt(shard)} and run again"
            )
        quarantined += len(lost)
    _check_budget(quarantined, len(data.plan), config)


def _sweep(root: Path, data: PlannedData) -> None:
    """Delete attempts that no receipt names: what a process killed in mid-shard, or just after its commit, left."""
    paths = StorePaths(root)
    for shard in range(data.plan.num_shards):
        attempt = load_receipt(paths, shard).attempt
        for folder in paths.shard(shard).iterdir():
            if folder.is_dir() and folder.name != attempt:
                remove_tree(folder)


def _outcome(root: Path, data: PlannedData) -> str:
    contents = [load_receipt(StorePaths(root), shard).content for shard in range(data.plan.num_shards)]
    tokens = sum(content.tokens for content in contents)
    stored = sum(record.stored_bytes for content in contents for record in content.arrays)
    quarantined = sum(len(content.quarantined) for content in contents)
    return (
        f"{root} is complete: {tokens:,} tokens, {bytes_text(stored)} of arrays ({stored / max(1, tokens):,.0f} "
        f"bytes/token), {quarantined} rows quarantined"
    )
