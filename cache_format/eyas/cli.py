"""The front door: `eyas VERB`, its flags, its exit codes.

The only module that prints, sets up logging or turns a signal into an exit code, and the only one that
knows every part. It knows them as strings, imported on use: `eyas --help` loads no part at all, `eyas VERB --help` the
module of that verb's config, so that nobody waits for torch to read a flag.

Exit codes: 0 done, 1 failed, 2 bad flags or config, 130 interrupted, 143 terminated.
"""

import argparse
import difflib
import importlib
import logging
import os
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from eyas.cache_format.errors import ConfigError, EyasError

__all__ = ["VERBS", "Verb", "main"]


class Verb(NamedTuple):
    """One command: its config class and run function as `module:name`, and the extra that installs its libraries."""

    config: str
    run: str
    extra: str | None
    summary: str


VERBS: dict[str, Verb] = {
    "precompute": Verb(
        "eyas.pipeline.config:PrecomputeConfig",
        "eyas.pipeline.precompute:precompute",
        "pipeline",
        "run the target over chats once and store what a draft learns from it",
    ),
    "train-from-cache": Verb(
        "eyas.train.config:TrainConfig",
        "eyas.train.train_from_cache:train_from_cache",
        "train",
        "train a draft from a store, without the target",
    ),
    "inspect": Verb(
        "eyas.cache_format.config:InspectConfig",
        "eyas.cache_format.inspection:inspect_store",
        None,
        "see what is in a store: sizes, masks, probabilities, faults",
    ),
    "estimate": Verb(
        "eyas.cache_format.config:EstimateConfig",
        "eyas.cache_format.estimate:estimate",
        None,
        "say how large a store will be before anything runs",
    ),
    "export": Verb(
        "eyas.train.config:ExportConfig",
        "eyas.train.export:export_draft",
        "train",
        "write a trained draft as a directory that serving engines load",
    ),
    "evaluate": Verb(
        "eyas.evaluate.config:EvaluateConfig",
        "eyas.evaluate.evaluate:evaluate",
        "evaluate",
        "decode with target and draft and measure the acceptance length",
    ),
}

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class Terminated(BaseException):
    """SIGTERM arrived. Not an Exception, so that no handler of ordinary faults swallows it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; never raises for a fault that the user can act on."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(overview(), file=sys.stdout if words else sys.stderr)
        return 0 if words else 2
    if words[0] == "--version":
        print(f"eyas {metadata.version('eyas')}")
        return 0
    if words[0] not in VERBS:
        close = difflib.get_close_matches(words[0], VERBS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "see eyas --help"
        return _fail(f"no command {words[0]!r}; {hint}", 2)
    return _guarded(words[0], words[1:])


def overview() -> str:
    """The text of `eyas --help`."""
    width = max(map(len, VERBS))
    lines = [f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items()]
    return "\n".join(
        [
            "usage: eyas VERB [flags]      (eyas VERB --help lists a verb's flags)",
            "",
            "Train speculative-decoding drafts from a cache of what the frozen target computed.",
            "",
            *lines,
            "",
            "every verb takes --config FILE.toml (flags replace its values), -v/--verbose and -q/--quiet;",
            "EYAS_LOG_LEVEL=DEBUG|INFO|WARNING|ERROR sets what is logged to standard error",
        ]
    )


def _guarded(name: str, words: list[str]) -> int:
    """Run a verb; turn faults and signals into one line on standard error and an exit code."""
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        return _run(name, VERBS[name], words)
    except EyasError as error:
        return _fail(str(error), 2 if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except Terminated:
        return _fail("terminated", 143)
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough. Python would complain once more while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        # A wrong path, a missing right, a full or read-only disk. Where the code could say more, it raised EyasError.
        logging.getLogger(__name__).debug("the operating system refused", exc_info=True)
        return _fail(f"{error.strerror or error}: {error.filename}" if error.filename else str(error), 1)
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated


def _fail(message: str, code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return code


def _run(name: str, verb: Verb, words: list[str]) -> int:
    common, words = _common_flags().parse_known_args(words)
    _set_up_logging(common.verbose, common.quiet)
    from eyas.flags import parse_flags  # on use: the parser and its libraries are no part of `eyas --help`

    config = parse_flags(_load(verb.config, name, verb), words, prog=f"eyas {name}", file=common.config)
    report = _load(verb.run, name, verb)(config)
    if report.text:
        print(report.text, flush=True)
    return int(report.exit_code)


def _common_flags() -> argparse.ArgumentParser:
    """Flags of every verb. No abbreviations: `--conf` must reach the verb's own flags and be refused there."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path)
    parser.add_argument("-v", "--verbose", action="store_true")
    parser.add_argument("-q", "--quiet", action="store_true")
    return parser


def _set_up_logging(verbose: bool, quiet: bool) -> None:
    """Log eyas at the chosen level and other libraries' warnings, to standard error."""
    level = "DEBUG" if verbose else "WARNING" if quiet else os.environ.get("EYAS_LOG_LEVEL", "INFO").upper()
    if level not in LOG_LEVELS:
        raise ConfigError(f"EYAS_LOG_LEVEL={level}: expected one of {', '.join(LOG_LEVELS)}")
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname).1s %(name)s: %(message)s")
    logging.getLogger("eyas").setLevel(level)


def _load(path: str, name: str, verb: Verb) -> Any:
    """Import `module:name`; a library that is not installed becomes one message with the command that installs it."""
    module, _, attribute = path.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        absent = (error.name or "").partition(".")[0]
        if absent in ("", "eyas"):
            raise
        package = f"eyas[{verb.extra}]" if verb.extra else "eyas"
        raise EyasError(f"eyas {name} needs the library {absent!r}: pip install '{package}'") from error


if __name__ == "__main__":
    sys.exit(main())
