"""The front door: help without heavy imports, flags over TOML, exit codes, signals, missing extras."""

import json
import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from eyas import cli
from eyas.cache_format.errors import ConfigError, EyasError
from eyas.configuration import overlay, read_table
from eyas.flags import parse_flags

ROOT = Path(__file__).resolve().parent.parent

HEAVY = ("torch", "ray", "transformers", "datasets", "tokenizers", "zarr", "pyarrow")

FAKE_VERB = '''
import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from eyas.cache_format.errors import ConfigError, EyasError
from eyas.cache_format.report import Report


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """The draft."""

    vocab_size: int = 8192
    """Ids of the draft."""

    name: str = "plain"
    """Of the draft."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Do something with chats."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("chats",)

    chats: tuple[Path, ...]
    """Chat files."""

    out: Path
    """Where it goes."""

    supervision: tuple[Literal["hidden", "topk"], ...] = ("hidden", "topk")
    """What is stored."""

    limit: int | None = 10
    """At most so many."""

    dry_run: bool = False
    """Only say."""

    draft: Draft = field(default_factory=lambda: Draft(name="default"))
    """The draft."""

    def __post_init__(self):
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"--limit is {self.limit}; expected 1 or more")


def run(config):
    assert type(config) is Config
    logging.getLogger("eyas.fake").info("an info line")
    if config.out.name == "fails":
        raise EyasError("shard 3 of fails: torn; remove it")
    if config.out.name == "missing":
        config.out.read_text()
    if config.out.name == "reports-failure":
        return Report("a fault", 1)
    if config.out.name == "waits":
        print("waiting", flush=True)
        time.sleep(60)
    return Report(repr(config))
'''


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A verb whose config and run function are the ones above, reached as every verb is: by strings."""
    (tmp_path / "fake_verb.py").write_text(FAKE_VERB)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(cli.VERBS, "fake", cli.Verb("fake_verb:Config", "fake_verb:run", "train", "a fake"))
    yield tmp_path
    sys.modules.pop("fake_verb", None)


def run_python(code: str, *args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env=uninstalled())


def uninstalled() -> dict[str, str]:
    """An environment in which the source roots are importable whether or not the project is installed."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def modules_loaded_by(*words: str) -> set[str]:
    """The modules in memory after `eyas WORDS`, as a fresh interpreter reports them."""
    code = """
        import json, sys
        from eyas.cli import main
        try:
            main(sys.argv[1:])
        except SystemExit:
            pass
        print(json.dumps(sorted(sys.modules)))
    """
    done = run_python(textwrap.dedent(code), *words)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_overview_names_every_verb_and_loads_no_part(capsys):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {verb} " in text for verb in cli.VERBS)
    loaded = modules_loaded_by("--help")
    assert not loaded & {*HEAVY, "numpy", "tyro", "rich", "msgspec"}, (
        "eyas --help must answer at once: eyas/cache_format/__init__.py may not import its modules eagerly"
    )


@pytest.mark.parametrize("verb", cli.VERBS)
def test_help_of_a_verb_loads_only_its_config(verb):
    loaded = modules_loaded_by(verb, "--help")
    assert cli.VERBS[verb].config.partition(":")[0] in loaded
    assert cli.VERBS[verb].run.partition(":")[0] not in loaded
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_has_a_config_and_a_run_function(verb):
    code = """
        import sys
        from eyas import cli
        verb = cli.VERBS[sys.argv[1]]
        assert callable(cli._load(verb.config, "", verb)) and callable(cli._load(verb.run, "", verb))
    """
    done = run_python(textwrap.dedent(code), verb)
    assert done.returncode == 0, done.stderr


def test_no_words_is_a_usage_error(capsys):
    assert cli.main([]) == 2
    assert "usage: eyas VERB" in capsys.readouterr().err


def test_unknown_verb_names_the_nearest(capsys):
    assert cli.main(["train-from-cahce"]) == 2
    assert capsys.readouterr().err == "error: no command 'train-from-cahce'; did you mean 'train-from-cache'?\n"


def test_version_is_the_distributions(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == "eyas 0.1.0\n"


def test_positional_words_and_nested_flags_reach_the_config(fake, capsys):
    assert cli.main(["fake", "a", "b", "--out", "o", "--draft.vocab-size", "7", "--dry-run", "--limit", "None"]) == 0
    assert capsys.readouterr().out == (
        "Config(chats=(PosixPath('a'), PosixPath('b')), out=PosixPath('o'), supervision=('hidden', 'topk'), "
        "limit=None, dry_run=True, draft=Draft(vocab_size=7, name='default'))\n"
    )


def test_flags_replace_the_values_of_a_toml_file(fake, capsys):
    file = fake / "run.toml"
    file.write_text('chats = ["c"]\nlimit = 3\nsupervision = ["topk"]\n[draft]\nvocab_size = 5\n')
    assert cli.main(["fake", "--config", str(file), "--out", "o", "--limit", "4"]) == 0
    assert capsys.readouterr().out == (
        "Config(chats=(PosixPath('c'),), out=PosixPath('o'), supervision=('topk',), limit=4, dry_run=False, "
        "draft=Draft(vocab_size=5, name='default'))\n"
    )


def test_positional_words_replace_those_of_a_toml_file(fake, capsys):
    file = fake / "run.toml"
    file.write_text('chats = ["c"]\nout = "o"\n')
    assert cli.main(["fake", "a", "b", "--config", str(file)]) == 0
    assert "chats=(PosixPath('a'), PosixPath('b'))" in capsys.readouterr().out


def test_a_value_missing_in_file_and_flags_is_a_usage_error(fake, capsys):
    file = fake / "run.toml"
    file.write_text('chats = ["c"]\n')
    with pytest.raises(SystemExit) as stop:
        cli.main(["fake", "--config", str(file)])
    assert stop.value.code == 2
    assert "--out" in capsys.readouterr().err


def test_a_positional_word_missing_in_file_and_flags_is_a_usage_error(fake, capsys):
    file = fake / "run.toml"
    file.write_text('out = "o"\n')
    assert cli.main(["fake", "--config", str(file)]) == 2
    assert cli.main(["fake", "--out", "o"]) == 2
    assert capsys.readouterr().err == "error: no value for chats; see eyas fake --help\n" * 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("limits = 3", "unknown key 'limits'; did you mean 'limit'?"),
        ("[draft]\nvocab-size = 3", "draft: unknown key 'vocab-size'; did you mean 'vocab_size'?"),
        ('limit = "3"', "limit: expected a whole number, found '3' (str)"),
        ("chats = ", "not a TOML file"),
    ],
)
def test_a_bad_toml_file_is_one_message_and_exit_code_2(fake, capsys, text, expected):
    file = fake / "run.toml"
    file.write_text(text)
    assert cli.main(["fake", "a", "--out", "o", "--config", str(file)]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {file}: ")
    assert expected in message
    assert message.count("\n") == 1


def test_a_value_out_of_range_is_one_message_and_exit_code_2(fake, capsys):
    assert cli.main(["fake", "a", "--out", "o", "--limit", "0"]) == 2
    assert capsys.readouterr().err == "error: --limit is 0; expected 1 or more\n"


def test_a_bad_choice_exits_2_and_names_the_choices(fake, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["fake", "a", "--out", "o", "--supervision", "logits"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "hidden" in message
    assert "topk" in message


def test_a_user_error_is_one_message_without_traceback_and_exit_code_1(fake, capsys):
    assert cli.main(["-h"]) == 0
    capsys.readouterr()
    assert cli.main(["fake", "a", "--out", "fails", "--quiet"]) == 1
    assert capsys.readouterr().err == "error: shard 3 of fails: torn; remove it\n"


def test_what_the_operating_system_refuses_is_one_message_that_names_the_path(fake, capsys):
    assert cli.main(["fake", "a", "--out", "missing", "--quiet"]) == 1
    assert capsys.readouterr().err == "error: No such file or directory: missing\n"


def test_a_report_sets_the_exit_code(fake, capsys):
    assert cli.main(["fake", "a", "--out", "reports-failure"]) == 1
    assert capsys.readouterr().out == "a fault\n"


def test_a_fault_of_the_code_keeps_its_traceback(fake, monkeypatch):
    monkeypatch.setitem(cli.VERBS, "fake", cli.Verb("fake_verb:Config", "fake_verb:absent", None, "a fake"))
    with pytest.raises(AttributeError):
        cli.main(["fake", "a", "--out", "o"])


def test_a_missing_library_names_the_extra_to_install(fake, monkeypatch, capsys):
    (fake / "needs_more.py").write_text("import a_library_nobody_has.part")
    monkeypatch.setitem(cli.VERBS, "fake", cli.Verb("fake_verb:Config", "needs_more:run", "pipeline", "a fake"))
    assert cli.main(["fake", "a", "--out", "o"]) == 1
    expected = "error: eyas fake needs the library 'a_library_nobody_has': pip install 'eyas[pipeline]'\n"
    assert capsys.readouterr().err == expected


def test_an_unknown_log_level_is_refused(fake, monkeypatch, capsys):
    monkeypatch.setenv("EYAS_LOG_LEVEL", "loud")
    assert cli.main(["fake", "a", "--out", "o"]) == 2
    assert "EYAS_LOG_LEVEL=LOUD" in capsys.readouterr().err


DRIVE = """
import sys
from eyas import cli
cli.VERBS["fake"] = cli.Verb("fake_verb:Config", "fake_verb:run", None, "a fake")
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("flag", "logged"), [((), True), (("--quiet",), False), (("-v",), True)])
def test_logging_goes_to_standard_error_at_the_chosen_level(fake, flag, logged):
    done = run_python(DRIVE, "fake", "a", "--out", "o", *flag)
    assert done.returncode == 0, done.stderr
    assert ("an info line" in done.stderr) is logged
    assert "an info line" not in done.stdout


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [(signal.SIGINT, 130, "error: interrupted\n"), (signal.SIGTERM, 143, "error: terminated\n")],
)
def test_a_signal_is_one_line_and_its_exit_code(fake, number, code, line):
    words = ["fake", "a", "--out", "waits", "--quiet"]
    with subprocess.Popen(
        [sys.executable, "-c", DRIVE, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=uninstalled(),
    ) as running:
        assert running.stdout.readline() == "waiting\n"
        time.sleep(0.1)
        running.send_signal(number)
        _, err = running.communicate(timeout=60)
    assert running.returncode == code
    assert err == line


def test_a_reader_that_closes_early_is_no_traceback(fake):
    command = f"'{sys.executable}' -c '{DRIVE}' fake a --out o --quiet | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=uninstalled())
    assert "Traceback" not in done.stderr


def test_python_m_eyas_is_the_same_door():
    done = subprocess.run([sys.executable, "-m", "eyas", "--help"], capture_output=True, text=True, env=uninstalled())
    assert done.returncode == 0
    assert done.stdout.rstrip("\n") == cli.overview()


def test_config_errors_are_user_errors():
    assert issubclass(ConfigError, EyasError)


def test_no_config_field_hides_a_common_flag():
    taken = {"config", "verbose", "quiet", "help"}
    for verb in cli.VERBS.values():
        fields = set(cli._load(verb.config, "x", verb).__dataclass_fields__)
        assert not fields & taken, verb.config


def documented_commands() -> list[list[str]]:
    """The `eyas VERB ...` lines of the documents, as words; a comment after two spaces is not part of a command."""
    lines = [line for name in ("README.md", "examples/README.md") for line in (ROOT / name).read_text().splitlines()]
    return [shlex.split(line.split("  #")[0])[1:] for line in map(str.strip, lines) if line.startswith("eyas ")]


@pytest.mark.parametrize("words", documented_commands(), ids=" ".join)
def test_a_documented_command_parses(words):
    verb = cli.VERBS[words[0]]
    config = parse_flags(cli._load(verb.config, words[0], verb), words[1:], prog="eyas")
    assert type(config).__name__ == verb.config.partition(":")[2]


@pytest.mark.parametrize("name", ["demo.toml", "demo-quick.toml"])
def test_the_settings_of_the_demo_are_fields_of_the_right_type(name):
    table = read_table(ROOT / "examples" / name)
    assert {"demo", "precompute", "train-from-cache", "evaluate"} == set(table)
    for verb_name in table.keys() - {"demo"}:
        verb = cli.VERBS[verb_name]
        laid = overlay(cli._load(verb.config, verb_name, verb), table[verb_name], f"{name}: {verb_name}")
        assert {key: getattr(laid, key) for key in table[verb_name]} == {
            key: tuple(value) if isinstance(value, list) else value for key, value in table[verb_name].items()
        }
