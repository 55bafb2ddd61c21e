"""What a store holds, in numbers: identity, sizes, counts, lengths and masks. From plan and receipts alone."""

from collections import Counter
from typing import Any

import msgspec
import numpy as np

from eyas.cache_format.errors import StoreError
from eyas.cache_format.reader import StoreReader
from eyas.cache_format.receipt import ArrayRecord
from eyas.cache_format.tables import bytes_text, render, shown, table

__all__ = ["Distribution", "FieldSummary", "Summary", "summarise", "summary_text"]


class Distribution(msgspec.Struct, frozen=True):
    """Five numbers and the mean of a column."""

    mean: float
    minimum: float
    p10: float
    median: float
    p90: float
    maximum: float


class FieldSummary(msgspec.Struct, frozen=True):
    """One field over all committed shards."""

    name: str
    dtype: str
    width: int | None
    rows: str
    codec: str
    stored_bytes: int
    bytes_per_token: float
    abs_max: float | None


class Summary(msgspec.Struct, frozen=True):
    """Everything `eyas inspect STORE` shows."""

    store: str
    format_version: int
    complete: bool
    identity: dict[str, Any]
    provenance: dict[str, str]
    shards: int
    committed_shards: int
    samples: int
    heldout_samples: int
    available_samples: int
    tokens: int
    supervised_tokens: int
    kept_rows: int
    quarantined: dict[str, int]
    books: dict[str, Any]
    samples_by_source: dict[str, int]
    length: Distribution | None
    supervised_share: Distribution | None
    draft_vocab_size: int | None
    draft_vocab_coverage: float | None
    """Share of supervised training tokens that lie in the draft vocabulary."""
    fields: list[FieldSummary]
    bytes_per_token: float
    notes: list[str]


def _distribution(values: np.ndarray) -> Distribution | None:
    if not len(values):
        return None
    p10, median, p90 = np.percentile(values, (10, 50, 90))
    return Distribution(*(float(v) for v in (values.mean(), values.min(), p10, median, p90, values.max())))


def _vocabulary(reader: StoreReader, notes: list[str]) -> tuple[int | None, float | None]:
    try:
        counts = reader.token_counts
        total = int(counts.sum())
        return len(reader.vocab), float(counts[reader.vocab.ids].sum() / total) if total else None
    except StoreError as error:
        notes.append(str(error))
        return None, None


def _fields(reader: StoreReader, tokens: int) -> list[FieldSummary]:
    summaries = []
    for spec in reader.identity.fields:
        records: list[ArrayRecord] = [
            a for r in reader.receipts.values() for a in r.content.arrays if a.field == spec.name
        ]
        stored = sum(a.stored_bytes for a in records)
        largest = [a.abs_max for a in records if a.abs_max is not None]
        summaries.append(
            FieldSummary(
                name=spec.name,
                dtype=spec.dtype,
                width=spec.width,
                rows=spec.rows,
                codec=str(spec.codec["id"]),
                stored_bytes=stored,
                bytes_per_token=stored / max(1, tokens),
                abs_max=max(largest) if largest else None,
            )
        )
    return summaries


def summarise(reader: StoreReader) -> Summary:
    """Return the summary of an open store."""
    plan, here = reader.plan, reader.available
    notes: list[str] = []
    tokens = int(plan.length[here].sum(dtype=np.int64))
    fields = _fields(reader, tokens)
    vocab_size, coverage = _vocabulary(reader, notes)
    reasons = Counter(q.reason for r in reader.receipts.values() for q in r.content.quarantined)
    sources = Counter(plan.table.column("source").to_pylist())
    with np.errstate(invalid="ignore"):
        share = plan.supervised[here] / plan.length[here]
    return Summary(
        store=str(reader.root),
        format_version=reader.manifest.format_version,
        complete=reader.completion is not None,
        identity=msgspec.to_builtins(reader.identity),
        provenance=reader.manifest.provenance,
        shards=plan.num_shards,
        committed_shards=len(reader.receipts),
        samples=len(plan),
        heldout_samples=int(plan.heldout.sum()),
        available_samples=int(here.sum()),
        tokens=tokens,
        supervised_tokens=int(plan.supervised[here].sum(dtype=np.int64)),
        kept_rows=int(plan.kept[here].sum(dtype=np.int64)),
        quarantined=dict(reasons),
        books=plan.books,
        samples_by_source=dict(sources),
        length=_distribution(plan.length[here]),
        supervised_share=_distribution(share),
        draft_vocab_size=vocab_size,
        draft_vocab_coverage=coverage,
        fields=fields,
        bytes_per_token=sum(f.bytes_per_token for f in fields),
        notes=notes,
    )


def _identity_table(summary: Summary) -> str:
    identity, target = summary.identity, summary.identity["target"]
    rows = table("Identity", "", "value")
    rows.columns[1].justify = "left"
    head = identity["logit_transform"]
    for name, value in (
        (
            "target",
            f"{target['name']} ({target['num_layers']} layers, H {target['hidden_size']}, V {target['vocab_size']})",
        ),
        ("dtype, quantisation", f"{target['dtype']}, {target['quantization']}"),
        ("aux_layer_outputs", ", ".join(map(str, identity["aux_layer_outputs"])) + " (0-based, output of the layer)"),
        ("supervision", ", ".join(identity["supervision"])),
        ("draft vocabulary", _vocab_text(summary)),
        ("logit transform", f"bias {head['bias']}, scale {head['scale']}, softcap {head['softcap']}"),
        ("container", f"{identity['container']}, chunks of at most {bytes_text(identity['chunk_bytes'])}"),
        ("digests", f"plan {identity['plan_digest'][:16]}, weights {target['weights_digest'][:16]}"),
    ):
        rows.add_row(name, shown(str(value)))
    return render(rows)


def _vocab_text(summary: Summary) -> str:
    if summary.draft_vocab_size is None:
        return "unreadable"
    covers = (
        ""
        if summary.draft_vocab_coverage is None
        else f", covers {summary.draft_vocab_coverage:.2%} of the supervised tokens"
    )
    return f"{summary.draft_vocab_size} of {summary.identity['target']['vocab_size']}{covers}"


def _counts_table(summary: Summary) -> str:
    rows = table("Counts", "", "value")
    train = summary.samples - summary.heldout_samples
    for name, value in (
        ("shards committed", f"{summary.committed_shards} of {summary.shards}"),
        ("samples", f"{summary.samples:,} ({train:,} train, {summary.heldout_samples:,} held out)"),
        ("samples available", f"{summary.available_samples:,}"),
        ("tokens", f"{summary.tokens:,}"),
        ("supervised tokens", f"{summary.supervised_tokens:,}"),
        ("kept rows", f"{summary.kept_rows:,}"),
    ):
        rows.add_row(name, value)
    for reason, count in summary.quarantined.items():
        rows.add_row(f"quarantined: {shown(reason)}", f"{count:,}")
    for name, count in _flat(summary.books):
        rows.add_row(f"books: {shown(name)}", f"{count:,}" if isinstance(count, int) else shown(str(count)))
    return render(rows)


def _flat(books: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in books.items():
        rows += _flat(value, f"{prefix}{name}, ") if isinstance(value, dict) else [(prefix + name, value)]
    return rows


def _statistics_table(summary: Summary) -> str:
    rows = table("Lengths and masks", "", "mean", "min", "p10", "median", "p90", "max")
    for name, d, form in (
        ("tokens a sample", summary.length, "{:,.0f}"),
        ("supervised share", summary.supervised_share, "{:.2f}"),
    ):
        if d is not None:
            values = (d.mean, d.minimum, d.p10, d.median, d.p90, d.maximum)
            rows.add_row(name, *(form.format(v) for v in values))
    return render(rows)


def _fields_table(summary: Summary) -> str:
    rows = table("Fields", "field", "dtype", "width", "rows", "codec", "stored", "bytes/token", "abs max")
    for f in summary.fields:
        width = "-" if f.width is None else str(f.width)
        largest = "-" if f.abs_max is None else f"{f.abs_max:,.5g}"
        stored = bytes_text(f.stored_bytes)
        rows.add_row(f.name, f.dtype, width, f.rows, f.codec, stored, f"{f.bytes_per_token:,.1f}", largest)
    total = sum(f.stored_bytes for f in summary.fields)
    rows.add_row("sum", "", "", "", "", bytes_text(total), f"{summary.bytes_per_token:,.1f}", "")
    return render(rows)


def summary_text(summary: Summary) -> str:
    """Return the summary as tables."""
    state = "complete" if summary.complete else "NOT COMPLETE"
    head = f"{shown(summary.store)}: store of format version {summary.format_version}, {state}\n"
    tables = (_identity_table, _counts_table, _statistics_table, _fields_table)
    notes = "".join(f"note: {shown(note)}\n" for note in summary.notes)
    return "\n".join([head, *(make(summary) for make in tables)]) + notes
