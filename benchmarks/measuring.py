"""What every benchmark shares: interleaved repetitions, medians, and one way to report.

A benchmark prints the limit, the measurement and the ratio for people, and last one line of JSON:
{"benchmark": NAME, "ratios": {KEY: number}, ...}. With --save it also writes that line to results/.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def parse(description: str, **extra: Any) -> argparse.Namespace:
    """Return the flags every benchmark takes: --quick and --save, plus `extra` as {flag: default}."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="toy sizes: proves that the benchmark runs")
    parser.add_argument("--save", action="store_true", help="write the result beside the others in results/")
    for flag, default in extra.items():
        parser.add_argument(f"--{flag.replace('_', '-')}", default=default, type=type(default))
    return parser.parse_args()


def seconds(run: Callable[[], object]) -> float:
    """Return the wall time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def interleaved(runs: Mapping[str, Callable[[], object]], repetitions: int) -> dict[str, list[float]]:
    """Return seconds of every run, taken in turns so that a noisy minute hits all of them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repetitions):
        for name, run in runs.items():
            times[name].append(seconds(run))
    return times


def median_ratio(limit: list[float], measured: list[float]) -> float:
    """Return the median of limit / measured over paired repetitions: 1.0 means as fast as the limit."""
    return statistics.median(a / b for a, b in zip(limit, measured, strict=True))


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent, check=False
    )
    return found.stdout.strip() or "unknown"


def report(name: str, ratios: Mapping[str, float], measured: Mapping[str, Any], *, quick: bool, save: bool) -> None:
    """Print the closing JSON line and, when asked, save it with commit and machine."""
    line = {"benchmark": name, "ratios": {k: round(v, 4) for k, v in ratios.items()}, "measured": measured}
    if save and not quick:
        machine = {"cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        saved = {**line, "date": time.strftime("%Y-%m-%d"), "commit": _commit(), "machine": machine}
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(saved, indent=1) + "\n")
    print(json.dumps(line))
