"""Random samples out of a store against an np.memmap of the same bytes: the limit is the memory itself.

Both sides copy the same rows of `last_hidden_state` of the same samples, in the same random order, into one reused
buffer. `first_touch` is the first pass of a process, in which every chunk is checked against its digest.
"""

import statistics
import tempfile
from pathlib import Path

import numpy as np
from measuring import interleaved, median_ratio, parse, report, seconds

from eyas.cache_format.reader import StoreReader
from eyas.cache_format.testing import make_store

FIELD = "last_hidden_state"


def build(folder: Path, container: str, *, hidden_size: int, shards: int, samples: int) -> StoreReader:
    """Write a store of random bf16 rows of the shapes of a real target."""
    root = make_store(
        folder / container,
        samples_per_shard=[samples] * shards,
        container=container,
        hidden_size=hidden_size,
        longest=600,
        chunk_bytes=512 << 10,
        supervision=("hidden",),
    )
    return StoreReader(root)


def main() -> None:
    """Measure both containers."""
    flags = parse(__doc__ or "", hidden_size=2048)
    sizes = {"shards": 2, "samples": 6} if flags.quick else {"shards": 4, "samples": 60}
    random = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        readers = {c: build(folder, c, hidden_size=flags.hidden_size, **sizes) for c in ("zarr", "arrow")}
        reader = readers["zarr"]
        lengths = reader.plan.length.astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        raw = np.memmap(folder / "raw.bin", np.uint16, "w+", shape=(int(starts[-1]), flags.hidden_size))
        for index in range(len(reader)):
            raw[starts[index] : starts[index + 1]] = reader.read(index, [FIELD])[FIELD].view(np.uint16)
        raw.flush()
        copy = np.memmap(folder / "raw.bin", np.uint16, "r", shape=raw.shape)
        order = random.permutation(len(reader))
        buffer = np.empty((int(lengths.max()), flags.hidden_size), np.uint16)

        def through_memmap() -> None:
            for index in order:
                buffer[: lengths[index]] = copy[starts[index] : starts[index + 1]]

        def through(store: StoreReader) -> None:
            out = buffer.view(store.field_spec(FIELD).numpy_dtype)
            for index in order:
                store.read_into(int(index), FIELD, out[: lengths[index]])

        for store in readers.values():
            index = int(order[0])
            assert store.read(index, [FIELD])[FIELD].tobytes() == copy[starts[index] : starts[index + 1]].tobytes()
        first = {c: seconds(lambda c=c: through(StoreReader(readers[c].root))) for c in readers}
        for run in (through_memmap, *(lambda r=r: through(r) for r in readers.values())):
            run()
        times = interleaved(
            {"memmap": through_memmap, **{c: (lambda r=r: through(r)) for c, r in readers.items()}},
            2 if flags.quick else 15,
        )
        gigabytes = copy.nbytes / 1e9
        medians = {k: gigabytes / statistics.median(v) for k, v in times.items()}
        ratios = {f"{c}_raw": median_ratio(times["memmap"], times[c]) for c in readers}
        print(f"{len(reader)} samples, {gigabytes:.2f} GB of {FIELD}, H = {flags.hidden_size}, random order")
        print(f"limit    np.memmap     {medians['memmap']:6.2f} GB/s")
        for c in readers:
            print(f"measured {c:5} raw     {medians[c]:6.2f} GB/s  ratio {ratios[f'{c}_raw']:.2f} (reach >= 0.8)")
            print(f"         {c:5} 1st pass {gigabytes / first[c]:5.2f} GB/s, checking every chunk's digest")
        measured = {f"{k}_gbps": round(v, 2) for k, v in medians.items()}
        measured |= {f"{c}_first_touch_gbps": round(gigabytes / first[c], 2) for c in readers}
        report("store_read", ratios, measured, quick=flags.quick, save=flags.save)


if __name__ == "__main__":
    main()
