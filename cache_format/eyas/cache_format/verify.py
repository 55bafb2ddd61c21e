"""Verification of a whole store: every file against every digest, one fault a line, nothing repaired."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from eyas.cache_format.digests import file_digest
from eyas.cache_format.errors import StoreError
from eyas.cache_format.frozen import target_digest
from eyas.cache_format.layout import StorePaths
from eyas.cache_format.manifest import Identity, load_manifest
from eyas.cache_format.plan import Plan, read_plan
from eyas.cache_format.receipt import Completion, committed_shards, load_completion, load_receipt
from eyas.cache_format.shard_reader import ShardReader
from eyas.cache_format.vocab import read_vocab

__all__ = ["Fault", "verify_store"]


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong."""

    shard: int | None
    """Shard number, or None when the fault is outside the shards."""
    field: str
    """Field or file."""
    what: str
    """What was expected, what was found, what to do."""


def verify_store(root: Path | str, on_shard: Callable[[int, int], None] = lambda done, total: None) -> list[Fault]:
    """Check every byte of a store against its digests.

    Args:
        root: folder of the store.
        on_shard: called with (shards done, shards in total) for progress.

    Raises:
        StoreError: manifest or plan cannot be read, so that nothing else can be judged.
    """
    paths = StorePaths(root)
    manifest = load_manifest(root)
    plan = read_plan(paths.plan)
    completion = load_completion(paths, plan.num_shards)
    faults = list(_store_faults(paths, manifest.identity, plan, completion))
    for shard in range(plan.num_shards):
        faults += _shard_faults(paths, manifest.identity, plan, completion, shard)
        on_shard(shard + 1, plan.num_shards)
    return faults


def _store_faults(paths: StorePaths, identity: Identity, plan: Plan, completion: Completion | None) -> Iterator[Fault]:
    if plan.digest != identity.plan_digest:
        yield Fault(None, "plan", f"{paths.plan} does not match the manifest; restore it from a copy")
    fault = _run(None, "vocab", lambda: read_vocab(paths.vocab, identity.draft_vocab_digest))
    if fault is None and completion is not None and file_digest(paths.vocab) != completion.vocab:
        fault = Fault(None, "vocab", f"{paths.vocab} does not match complete.json; restore it from a copy")
    if fault is not None:
        yield fault
    for shard in committed_shards(paths):
        if shard >= plan.num_shards:
            yield Fault(shard, "receipt", f"{paths.receipt(shard)} is not in the plan; remove it")
    if completion is None:
        return
    if completion.manifest != load_manifest(paths.root).digest:
        yield Fault(None, "manifest", f"{paths.manifest} does not match complete.json; restore it from a copy")
    if target_digest(paths.root) != completion.target:
        yield Fault(None, "target", f"{paths.target} does not match complete.json; restore it from a copy")


def _shard_faults(
    paths: StorePaths, identity: Identity, plan: Plan, completion: Completion | None, shard: int
) -> list[Fault]:
    try:
        receipt = load_receipt(paths, shard)
        if completion is not None and receipt.digest != completion.receipts[shard]:
            return [Fault(shard, "receipt", f"{paths.receipt(shard)} does not match complete.json")]
    except StoreError as error:
        missing = completion is None and not paths.receipt(shard).exists()
        return [] if missing else [Fault(shard, "receipt", str(error))]
    reader = ShardReader(paths, identity, plan, shard, receipt)
    checks: dict[str, Callable[[], object]] = {"samples": lambda: _check_samples(reader)}
    for spec in identity.fields:
        checks[spec.name] = lambda name=spec.name: reader.verify(name)  # type: ignore[misc]
    return [fault for field, check in checks.items() if (fault := _run(shard, field, check)) is not None]


def _check_samples(reader: ShardReader) -> None:
    for row in range(len(reader.samples)):
        reader.checked_samples(row)


def _run(shard: int | None, field: str, check: Callable[[], object]) -> Fault | None:
    try:
        check()
    except StoreError as error:
        return Fault(shard, field, str(error))
    return None
