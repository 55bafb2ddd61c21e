"""What every test shares: small thread pools, and shapes in signatures that are checked."""

import json
import os
import subprocess
import time
from pathlib import Path

# Before torch or Ray start their pools: test processes share few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import hypothesis
from jaxtyping import install_import_hook

# In the test run alone, jaxtyping shapes and dtypes in the torch parts are checked at every call.
install_import_hook(["eyas.pipeline", "eyas.train", "eyas.evaluate"], "beartype.beartype")

ROOT = Path(__file__).resolve().parents[1]

# Machines under load are slow, not wrong; a failing example is printed so that it can become a plain test.
hypothesis.settings.register_profile("eyas", deadline=None, max_examples=50, print_blob=True)
hypothesis.settings.load_profile("eyas")


def pytest_terminal_summary(terminalreporter, config):
    """After a soak that ran every soak test, leave its figures beside the benchmarks'."""
    chosen = config.getoption("keyword") or config.args_source != config.ArgsSource.TESTPATHS
    whole = config.getoption("markexpr") == "soak" and not chosen
    if not whole:
        return
    outcomes = {name: terminalreporter.stats.get(name, []) for name in ("passed", "failed", "error")}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False)
    record = {
        "soak": {name: len(reports) for name, reports in outcomes.items()},
        "seconds": {r.nodeid: round(r.duration, 1) for r in outcomes["passed"]},
        "seeds": "in the names and bodies of the tests",
        "commit": commit.stdout.strip() or "unknown",
        "date": time.strftime("%Y-%m-%d"),
    }
    (ROOT / "benchmarks" / "results" / "soak.json").write_text(json.dumps(record, indent=1) + "\n")
