"""From chats to a served draft on a real target: what `make demo` runs.

    python examples/demo.py --config examples/demo.toml --runs runs

Every phase is one `eyas` command, printed as a user would type it, and its seconds. Run again, the store and the
training run resume from disk; export and evaluation run again. The last line is the held-out acceptance length.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def main() -> int:
    """Run the phases in order and sum up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=HERE / "demo.toml", help="flags of every verb")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder that everything goes into")
    args = parser.parse_args()
    os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bars for loading weights; eyas shows its own progress
    settings = tomllib.loads(args.config.read_text())
    demo = settings["demo"]
    runs = args.runs / args.config.stem
    target, store = args.runs / f"target-{os.environ.get('TARGET', 'wheel')}", runs / "store"
    clock = Clock()

    clock.run("target", [sys.executable, str(HERE / "smollm2_target.py"), str(target)])
    chats = [demo["chats"], "--target", str(target), "--out", str(store)]
    clock.eyas("precompute", *chats, *flags(settings["precompute"]))
    clock.eyas("inspect", str(store), "--verify")
    clock.eyas("inspect", str(store), "--sample", "0", "--max-tokens", "110")
    for supervision in demo["supervision"]:
        run = runs / f"draft-{supervision}"
        where = [str(store), "--out", str(run), "--supervision", supervision]
        clock.eyas("train-from-cache", *where, *flags(settings["train-from-cache"]))
        clock.eyas("export", str(run / "checkpoints" / "best"), "--out", str(run / "serve"))
    measured = {}
    for supervision in demo["supervision"]:
        draft, result = runs / f"draft-{supervision}" / "serve", runs / f"draft-{supervision}" / "evaluation.json"
        pair = ["--target", str(target), "--draft", str(draft), "--prompts", demo["heldout"], "--out", str(result)]
        clock.eyas("evaluate", *pair, *flags(settings["evaluate"]))
        measured[supervision] = json.loads(result.read_text())
    print(summary(clock, runs, target, measured, settings["evaluate"]["depth"]))
    return 0


class Clock:
    """Runs commands, one after the other, and keeps the seconds of each phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def eyas(self, verb: str, *words: str) -> None:
        """Run `eyas VERB WORDS`."""
        self.run(verb, [str(Path(sys.executable).parent / "eyas"), verb, *words])

    def run(self, phase: str, command: list[str]) -> None:
        """Run one command; its failure ends the demo with its exit code, its message being on screen already."""
        shown = [Path(command[0]).name, *command[1:]]
        print(f"\n$ {shlex.join(shown)}", flush=True)
        start = time.monotonic()
        code = subprocess.run(command, check=False).returncode
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.monotonic() - start
        if code:
            print(f"error: {shlex.join(shown)} ended with exit code {code}", file=sys.stderr)
            raise SystemExit(code)


def flags(table: dict[str, Any]) -> list[str]:
    """Spell a table of settings as flags: {"max_length": 512} is --max-length 512."""
    words = []
    for key, value in table.items():
        flag = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        else:
            words += [flag, *(map(str, value) if isinstance(value, list) else [str(value)])]
    return words


def summary(clock: Clock, runs: Path, target: Path, measured: dict[str, dict[str, Any]], depth: int) -> str:
    """What was measured, how long it took and where everything lies; the last line is the acceptance length."""
    first = next(iter(measured))
    lines = ["", "seconds per phase"]
    lines += [f"  {phase:<18}{seconds:8.0f}" for phase, seconds in clock.seconds.items()]
    lines += ["", "held-out acceptance length, by what the draft was trained from"]
    for name, result in measured.items():
        same = "equal to" if result["equal_to_plain"]["holds"] else "DIFFERENT from"
        speed = f"{result['speedup']:.2f} times the speed of plain decoding"
        lines.append(f"  {name:<18}{result['acceptance_length']:8.2f}   tokens {same} plain greedy decoding, {speed}")
    lines += ["  (on a CPU a pass over four tokens costs more than one over one: evaluate/README.md)"]
    lines += ["", "where everything lies"]
    places = {
        "target": target,
        "store": runs / "store",
        "draft to serve": runs / f"draft-{first}" / "serve",
        "training run": runs / f"draft-{first}",
        "evaluation": runs / f"draft-{first}" / "evaluation.json",
    }
    lines += [f"  {name:<18}{path}" for name, path in places.items()]
    lines += ["", f"acceptance length: {measured[first]['acceptance_length']:.2f} (chain, greedy, depth {depth})"]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
