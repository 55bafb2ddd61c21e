"""Receipts: the commit of a shard, created once, and complete.json, created last.

A receipt has a content part, which is equal for equal captures whoever made them, and the name of the attempt with
its provenance. Digests are taken over the content alone.
"""

from pathlib import Path

import msgspec

from eyas.cache_format.containers.base import ArrayLayout
from eyas.cache_format.digests import content_digest
from eyas.cache_format.errors import CorruptStoreError
from eyas.cache_format.layout import StorePaths
from eyas.cache_format.manifest import decode_json, encode_json

__all__ = [
    "ArrayRecord",
    "Completion",
    "QuarantinedRow",
    "Receipt",
    "ReceiptContent",
    "committed_shards",
    "load_completion",
    "load_receipt",
]


class ArrayRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One array of a committed shard."""

    field: str
    layout: ArrayLayout
    stored_bytes: int
    """Encoded bytes of all chunks."""
    chunks_digest: str
    """xxh3-128 over the xxh3-64 digests of the encoded chunks, as little-endian uint64 in chunk order."""
    content_digest: str
    """xxh3-128 of the decoded rows: equal in every container and codec that keeps the bits."""
    abs_max: float | None
    """Largest magnitude; None for fields of ids."""


class QuarantinedRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row that could not be captured; it keeps its place with zero tokens."""

    row: int
    sample_id: str
    source: str
    source_row: int
    reason: str


class ReceiptContent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What was committed."""

    shard: int
    samples_digest: str
    """Digest of the shard's samples.arrow."""
    rows: int
    tokens: int
    """Stored tokens: quarantined rows count zero."""
    kept_rows: int
    quarantined: tuple[QuarantinedRow, ...]
    arrays: tuple[ArrayRecord, ...]


class Receipt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of receipts/NNNNNN.json."""

    content: ReceiptContent
    attempt: str
    """Folder of the arrays inside the shard."""
    provenance: dict[str, str]
    """Versions, device, attention kernel, threads, batch budget, incidents: informative, never compared."""

    @property
    def digest(self) -> str:
        """xxh3-128 of the content's canonical JSON."""
        return content_digest(encode_json(self.content))


class Completion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of complete.json."""

    format_version: int
    manifest: str
    plan: str
    vocab: str
    target: str
    receipts: tuple[str, ...]
    """Digest of every receipt's content, by shard."""


def committed_shards(paths: StorePaths) -> list[int]:
    """Return the shards that have a receipt on disk, ascending."""
    if not paths.receipts.is_dir():
        return []
    return sorted(int(p.stem) for p in paths.receipts.glob("[0-9]*.json"))


def load_receipt(paths: StorePaths, shard: int) -> Receipt:
    """Read one receipt and check that it is this shard's."""
    path: Path = paths.receipt(shard)
    try:
        receipt = decode_json(path.read_bytes(), Receipt, path)
    except OSError as error:
        raise CorruptStoreError(
            f"shard {shard:06d}: {path} cannot be read ({error.strerror}); run `eyas precompute` again to capture it",
            shard=shard,
            field="receipt",
        ) from error
    except CorruptStoreError as error:
        raise CorruptStoreError(f"shard {shard:06d}: {error}", shard=shard, field="receipt") from error
    if receipt.content.shard != shard:
        raise CorruptStoreError(
            f"shard {shard:06d}: {path} is the receipt of shard {receipt.content.shard:06d}; restore it from a copy",
            shard=shard,
            field="receipt",
        )
    return receipt


def load_completion(paths: StorePaths, num_shards: int) -> Completion | None:
    """Read complete.json, or return None when the store is not complete."""
    try:
        completion = decode_json(paths.complete.read_bytes(), Completion, paths.complete)
    except FileNotFoundError:
        return None
    if len(completion.receipts) != num_shards:
        raise CorruptStoreError(
            f"{paths.complete} names {len(completion.receipts)} receipts, the plan has {num_shards} shards; restore it "
            "from a copy"
        )
    return completion
