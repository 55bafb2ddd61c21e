"""Bytes per real token, field by field, against raw bf16 and against what padded caches of the field write.

`raw`        hidden-state fields as stored over raw bf16 rows of the real tokens (limit 1.0 with the raw codec)
`nemo`       whole store over NeMo AutoModel's EAGLE-3 cache of the same chats (dense bf16 probabilities over W 8192,
             three bf16 layers and int64 ids and masks, padded to 2048); `nemo_512` when padded to 512
`specforge`  whole store over padded hidden-state files (four bf16 states, int64 ids and masks, padded to 2048)

The peers' sizes are computed from their documented layouts, not measured; the store's are read from its files.
"""

import tempfile
from pathlib import Path

import numpy as np
from measuring import parse, report

from eyas.cache_format.reader import StoreReader
from eyas.cache_format.summary import summarise
from eyas.cache_format.testing import make_store

BOOKKEEPING = 3 * 8  # int64 ids, loss mask and attention mask of the padded caches


def padded_tokens(lengths: np.ndarray, width: int) -> int:
    """Tokens a cache writes that pads (or cuts) every sample to `width`."""
    return len(lengths) * width


def folder_bytes(folder: Path) -> int:
    """Bytes of every file of a folder, frozen target parts left out on both sides."""
    return sum(
        p.stat().st_size for p in folder.rglob("*") if p.is_file() and "target" not in p.relative_to(folder).parts
    )


def main() -> None:
    """Measure one store."""
    flags = parse(__doc__ or "", store="")
    with tempfile.TemporaryDirectory() as name:
        store = Path(flags.store) if flags.store and not flags.quick else make_store(Path(name) / "store")
        reader = StoreReader(store)
        summary, total = summarise(reader), folder_bytes(store)
    hidden = reader.identity.target.hidden_size
    lengths = reader.plan.length[reader.available]
    states = [f for f in summary.fields if f.name.startswith(("aux_hidden_states", "last_hidden_state"))]
    raw = 2 * hidden * len(states) * summary.tokens
    nemo = {w: padded_tokens(lengths, w) * (3 * hidden * 2 + 8192 * 2 + BOOKKEEPING) for w in (2048, 512)}
    specforge = padded_tokens(lengths, 2048) * (4 * hidden * 2 + BOOKKEEPING)
    ratios = {
        "raw": sum(f.stored_bytes for f in states) / raw,
        "nemo": total / nemo[2048],
        "nemo_512": total / nemo[512],
        "specforge": total / specforge,
    }
    for field in summary.fields:
        print(f"  {field.name:<24}{field.bytes_per_token:12,.1f} bytes/token")
    print(f"limit    raw bf16 states    {raw / summary.tokens:12,.1f} bytes/token")
    as_stored = ratios["raw"] * raw / summary.tokens
    print(f"measured states as stored   {as_stored:12,.1f} bytes/token  ratio {ratios['raw']:.3f}")
    print(f"measured whole store        {total / summary.tokens:12,.1f} bytes/token")
    print(f"over NeMo padded to 2048 {ratios['nemo']:.3f} (reach <= 0.125), to 512 {ratios['nemo_512']:.3f}")
    print(f"over padded hidden-state files {ratios['specforge']:.3f} (reach <= 0.5)")
    measured = {f.name: round(f.bytes_per_token, 1) for f in summary.fields}
    measured |= {"store_bytes_per_token": round(total / summary.tokens, 1), "tokens": summary.tokens}
    report("store_size", ratios, measured, quick=flags.quick, save=flags.save)


if __name__ == "__main__":
    main()
