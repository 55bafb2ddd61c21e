"""THE STORY of `eyas inspect`: open what is there, summarise it, verify it, show one sample. Writes nothing.

A store that is still being captured, or damaged, is shown as far as it can be read; the exit code tells.
"""

import logging
from typing import Any

import msgspec

from eyas.cache_format.config import InspectConfig
from eyas.cache_format.errors import ConfigError
from eyas.cache_format.reader import StoreReader
from eyas.cache_format.report import Report
from eyas.cache_format.sample_view import sample_lines, sample_record
from eyas.cache_format.summary import summarise, summary_text
from eyas.cache_format.verify import Fault, verify_store

__all__ = ["inspect_store"]

_log = logging.getLogger(__name__)


def inspect_store(config: InspectConfig) -> Report:
    """Return what a store holds; exit code 1 when verification finds a fault or shards are missing under --verify."""
    reader = StoreReader(config.store, allow_incomplete=True)
    faults = _verify(config) if config.verify else []
    index = _find(reader, config.sample) if config.sample is not None else None
    text = _json(config, reader, faults, index) if config.json else _text(config, reader, faults, index)
    incomplete = config.verify and reader.completion is None
    return Report(text, exit_code=1 if faults or incomplete else 0)


def _find(reader: StoreReader, sample: str) -> int:
    try:
        return reader.plan.find(sample)
    except KeyError as error:
        raise ConfigError(
            f"--sample: {error.args[0]} in {reader.root}; give a plan row, 0 to {len(reader.plan) - 1}, or more "
            "digits of a hex id"
        ) from None


def _verify(config: InspectConfig) -> list[Fault]:
    return verify_store(config.store, lambda done, total: _log.info("verified shard %d of %d", done, total))


def _json(config: InspectConfig, reader: StoreReader, faults: list[Fault], index: int | None) -> str:
    report: dict[str, Any] = {"summary": msgspec.to_builtins(summarise(reader))}
    if config.verify:
        report["faults"] = msgspec.to_builtins(faults)
    if index is not None:
        report["sample"] = sample_record(reader, index, top=config.top)
    return msgspec.json.encode(report).decode() + "\n"


def _text(config: InspectConfig, reader: StoreReader, faults: list[Fault], index: int | None) -> str:
    if index is not None:
        text = sample_lines(reader, index, top=config.top, max_tokens=config.max_tokens)
    else:
        text = summary_text(summarise(reader))
    if not config.verify:
        return text
    for fault in faults:
        where = "store" if fault.shard is None else f"shard {fault.shard:06d}"
        text += f"FAULT {where}, {fault.field}: {fault.what}\n"
    verdict = f"{len(faults)} faults" if faults else "every stored byte matches its digest"
    missing = reader.plan.num_shards - len(reader.receipts)
    return text + f"verified: {verdict}{f'; {missing} shards are not captured yet' if missing else ''}\n"
