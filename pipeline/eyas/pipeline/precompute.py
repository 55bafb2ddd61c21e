"""`eyas precompute`: from chats to a complete store, readable top to bottom.

    plan -> identity -> estimate -> frozen parts -> capture pending shards -> check the books -> complete

Everything before the capture costs seconds to minutes and needs no weights in memory. A second run with the same
arguments goes on where the first stopped, whatever ended it; a run with other arguments is refused.
"""

import logging
import os
import platform
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eyas.cache_format.digests import digest_parts
from eyas.cache_format.errors import ConfigError
from eyas.cache_format.frozen import write_frozen_target
from eyas.cache_format.layout import StorePaths, remove_tree
from eyas.cache_format.manifest import Identity, Manifest, require_same_identity
from eyas.cache_format.plan import Plan
from eyas.cache_format.receipt import load_completion, load_receipt
from eyas.cache_format.report import Report
from eyas.cache_format.schema import FORMAT_VERSION, check_aux_layer_outputs, default_aux_layer_outputs, store_fields
from eyas.cache_format.writer import StoreLock, complete_store, create_store, open_for_resume, pending_shards
from eyas.pipeline.books import Tally, check_books, outcome_text
from eyas.pipeline.capture import CaptureTask, known_provenance
from eyas.pipeline.chat import ChatEncoder
from eyas.pipeline.cluster import capture_on_ray
from eyas.pipeline.config import PrecomputeConfig, parse_switches
from eyas.pipeline.engine import EngineConfig
from eyas.pipeline.errors import CaptureError, TargetError
from eyas.pipeline.journal import RunFolder
from eyas.pipeline.plan import PlannedData, plan_capture
from eyas.pipeline.progress import Progress
from eyas.pipeline.sizing import estimate_text, plan_text, require_space
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
    identity = _identity(config, target, encoder, data)
    estimate = estimate_text(identity.fields, data)
    if config.dry_run:
        return Report(f"{plan_text(data)}\n{estimate}\ndry run: nothing was written")
    root = Path(config.out)
    _is_begun(root, identity)  # before the lock, which would leave its file in a folder of something else
    _log.info("what the store will hold:\n%s", estimate)
    with StoreLock(root):
        if not _is_begun(root, identity):
            require_space(root, identity.fields, data)
            _create(root, target, identity, encoder, data)
        if load_completion(StorePaths(root), data.plan.num_shards) is not None:
            return Report(f"{root} is complete already: {len(data.plan)} samples in {data.plan.num_shards} shards")
        stopped = _capture(root, config, target, identity, data, capture)
        if stopped is not None:
            return stopped
        check_books(root, data.plan, config.max_quarantine)
        _sweep(root, data.plan)
        complete_store(root)
    return Report(f"{plan_text(data)}\n{outcome_text(root, data.plan)}")


# -- plan and identity -------------------------------------------------------------------------------------------------


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


def _identity(config: PrecomputeConfig, target: TargetFolder, encoder: ChatEncoder, data: PlannedData) -> Identity:
    """Return everything that changes a stored byte."""
    num_layers, dtype = int(target.config.num_hidden_layers), target.dtype(config.dtype)
    if config.aux_layer_outputs is None:
        layers: tuple[int, ...] = default_aux_layer_outputs(num_layers)
    else:
        layers = check_aux_layer_outputs(config.aux_layer_outputs, num_layers)
    topk = min(config.topk, data.vocab.vocab_size)
    return Identity(
        plan_digest=data.plan.digest,
        tokenizer_digest=target.tokenizer_digest(),
        template_digest=digest_parts([encoder.template]),
        template_switches=encoder.switches,
        target=target.identity(dtype),
        aux_layer_outputs=layers,
        logit_transform=target.logit_transform,
        embedding_multiplier=target.embedding_multiplier,
        supervision=config.supervision,
        topk=topk,
        draft_vocab_size=len(data.vocab),
        draft_vocab_digest=data.vocab.digest,
        container=config.container,
        chunk_bytes=config.chunk_bytes,
        fields=store_fields(
            aux_layer_outputs=layers,
            hidden_size=int(target.config.hidden_size),
            hidden_dtype=dtype,
            supervision=config.supervision,
            topk=topk,
            topk_dtype=config.topk_dtype,
            draft_vocab_size=len(data.vocab),
            probs_dtype=config.probs_dtype,
        ),
        max_length=config.max_length,
    )


def _is_begun(root: Path, identity: Identity) -> bool:
    """Whether the folder holds a store of this identity; one of another identity, or anything else, is refused."""
    stored = open_for_resume(root)
    if stored is not None:
        require_same_identity(root, stored.identity, identity)
    return stored is not None


# -- frozen parts ------------------------------------------------------------------------------------------------------


def _create(root: Path, target: TargetFolder, identity: Identity, encoder: ChatEncoder, data: PlannedData) -> None:
    """Write the frozen parts, then the plan stage; the manifest comes last and makes the folder a store."""
    for leftover in (StorePaths(root).target, StorePaths(root).shards):
        remove_tree(leftover)  # of a run that was cut while it planned, perhaps for another target or other data
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


def _capture(
    root: Path,
    config: PrecomputeConfig,
    target: TargetFolder,
    identity: Identity,
    data: PlannedData,
    capture: CaptureShards,
) -> Report | None:
    """Capture every shard without a receipt; return what to say when a signal ended it before."""
    pending = pending_shards(root)
    if not pending:
        return None
    running = StorePaths(root).root / "running"
    remove_tree(running)  # left behind by a killed run; we hold the lock
    run = RunFolder(running / f"run-{os.urandom(4).hex()}")
    run.path.mkdir(parents=True)
    task = _task(root, config, target, identity, run)
    _warn_about_provenance(root, task, set(range(data.plan.num_shards)) - set(pending))
    tally = Tally(root, data.plan, config.max_quarantine, set(pending))
    records = capture(
        task, pending, num_actors=config.num_actors, address=config.ray_address, stall_timeout=config.stall_timeout
    )
    try:
        with Progress(total=sum(map(tally.tokens, pending)), interval=config.progress_interval) as progress:
            for record in records:
                if record is not None:
                    tally.add(record)
                progress.update(tally.tokens_by_now(run))
    finally:
        signal_number = run.stop_signal
        remove_tree(running)  # which also ends actors that outlive this process
    if not tally.pending:
        return None
    text = f"{len(tally.pending)} shards pending; run the same command again to go on"
    if signal_number is None:
        raise CaptureError(f"stopped with {text}")
    return Report(f"stopped by {signal.Signals(signal_number).name} with {text}", exit_code=128 + signal_number)


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
    device = _device(config)
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


def _device(config: PrecomputeConfig) -> str:
    import torch

    here = torch.cuda.is_available()
    if config.device == "cuda" and config.ray_address is None and not here:
        raise ConfigError("--device is cuda, but torch finds no CUDA device on this machine; use cpu, or --ray-address")
    if config.device == "auto" and config.ray_address is not None and not here:
        _log.warning(
            "--device auto looks at this machine, which has no CUDA device: the cluster's actors will use CPUs"
        )
    return ("cuda" if here else "cpu") if config.device == "auto" else config.device


def _sweep(root: Path, plan: Plan) -> None:
    """Delete attempts that no receipt names: what a process killed in mid-shard, or just after its commit, left."""
    paths = StorePaths(root)
    for shard in range(plan.num_shards):
        attempt = load_receipt(paths, shard).attempt
        for folder in paths.shard(shard).iterdir():
            if folder.is_dir() and folder.name != attempt:
                remove_tree(folder)
