"""What a capture process was doing when it died, told by files that outlive it.

One run of the driver owns one folder, `<store>/running/<run>`: an attempt file per shard, and the stop flag. Before
every batch the attempt file names the rows in flight. A process that dies leaves them behind, so that the next attempt
runs these rows alone and, after three deaths on one row, gives that row up: a row that always kills its process would
otherwise be retried forever. Deaths of other runs do not count: a killed driver says nothing about a row.
"""

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path

__all__ = ["MAX_DEATHS", "AttemptJournal", "RunFolder"]

MAX_DEATHS = 3
"""Deaths of a process on one row, or on one shard before its first row, after which it is given up."""


class RunFolder:
    """The folder of one run of the driver."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def stop_requested(self) -> bool:
        """Whether the run should end at the next batch: it was asked to, or its driver is gone and swept it away."""
        return (self.path / "stop").exists() or not self.path.is_dir()

    def request_stop(self, signal_number: int) -> None:
        """Ask every process of the run to end before its next batch, because of this signal."""
        (self.path / "stop").write_text(str(signal_number))

    @property
    def stop_signal(self) -> int | None:
        """The signal that asked the run to end, or None."""
        stop = self.path / "stop"
        return int(stop.read_text()) if stop.exists() else None

    def rows_done(self, shards: Collection[int]) -> dict[int, int]:
        """Return, for those of `shards` that are in flight, how many rows lie behind the batch in flight."""
        begun = {int(path.stem): path for path in self.path.glob("*.jsonl")}  # one listing, however many are pending
        found = {shard: _rows_done(path.read_text()) for shard, path in begun.items() if shard in shards}
        return {shard: rows for shard, rows in found.items() if rows is not None}

    def journal(self, shard: int) -> Path:
        """Return the attempt file of a shard."""
        return self.path / f"{shard:06d}.jsonl"


def _rows_done(text: str) -> int | None:
    """Return the first row of the last batch that an attempt file names, 0 before any; None when it is closed."""
    for entry in map(_decode, reversed(text.splitlines())):
        if entry in ("begin", "end"):
            return 0 if entry == "begin" else None
        if isinstance(entry, list) and entry:
            return entry[0]
    return None


class AttemptJournal:
    """The attempt file of one shard in one run."""

    def __init__(self, folder: RunFolder, shard: int) -> None:
        self._path = folder.journal(shard)
        self.deaths: Counter[int] = Counter()
        """Row -> deaths of earlier attempts while the row was in flight."""
        self.early_deaths = 0
        """Deaths of earlier attempts before their first row."""
        self._read()

    def _read(self) -> None:
        if not self._path.exists():
            return
        in_flight: list[int] | None = None  # None while no attempt is open
        for entry in [*map(_decode, self._path.read_text().splitlines()), "begin"]:
            if entry == "begin" and in_flight is not None:
                self.deaths.update(in_flight)
                self.early_deaths += not in_flight
            if entry in ("begin", "end"):
                in_flight = [] if entry == "begin" else None
            elif isinstance(entry, list):
                in_flight = entry

    def begin(self) -> None:
        """Open an attempt."""
        self._write("begin")

    def rows(self, rows: list[int]) -> None:
        """Name the rows that are in flight from now on."""
        self._write(rows)

    def end(self) -> None:
        """Close an attempt: whatever happened, the process lived to tell."""
        self._write("end")

    def _write(self, entry: str | list[int]) -> None:
        # Not synced: the file has to outlive the process, not the machine.
        with self._path.open("a") as file:
            file.write("\n" + json.dumps(entry))  # the newline comes first: it ends a line that a death tore


def _decode(line: str) -> str | list[int] | None:
    try:
        return json.loads(line)
    except json.JSONDecodeError:  # the process died while writing this line
        return None
