"""TOML in and out of config dataclasses: nothing coerced, strangers refused, every value back as it went."""

import dataclasses
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas.cache_format.errors import ConfigError
from eyas.configuration import overlay, read_config, read_table, settle, to_toml


class Shape(Enum):
    CHAIN = 1
    TREE = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    path: Path
    weight: float = 1.0

    def __post_init__(self):
        if self.weight < 0:
            raise ConfigError(f"weight is {self.weight}; expected 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    vocab_size: int | None = None
    family: Literal["eagle3", "peagle"] = "eagle3"
    source: Source = field(default_factory=lambda: Source(path=Path("draft")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    out: Path
    chats: tuple[Path, ...] = ()
    betas: tuple[float, float] = (0.9, 0.95)
    steps: int = 10
    lr: float = 1e-4
    name: str = "run"
    note: str | None = None
    revision: int | str = 0
    dry_run: bool = False
    shape: Shape = Shape.CHAIN
    switches: dict[str, bool] = field(default_factory=dict)
    mixture: tuple[Source, ...] = ()
    draft: Draft = field(default_factory=lambda: Draft(vocab_size=64))


def read(tmp_path, text: str) -> Run:
    (tmp_path / "run.toml").write_text(text, encoding="utf-8")
    return read_config(Run, tmp_path / "run.toml")


def test_values_of_every_type_are_read(tmp_path):
    text = """
        out = "runs/a"
        chats = ["a.jsonl", "b.jsonl"]
        betas = [0.8, 1]
        steps = 3
        lr = 1
        note = "kept"
        revision = "main"
        dry_run = true
        shape = "TREE"
        switches = {enable_thinking = false}
        mixture = [{path = "x", weight = 2}, {path = "y"}]
        [draft]
        family = "peagle"
        source.weight = 0.5
    """
    assert read(tmp_path, text) == Run(
        out=Path("runs/a"),
        chats=(Path("a.jsonl"), Path("b.jsonl")),
        betas=(0.8, 1.0),
        steps=3,
        lr=1.0,
        note="kept",
        revision="main",
        dry_run=True,
        shape=Shape.TREE,
        switches={"enable_thinking": False},
        mixture=(Source(path=Path("x"), weight=2.0), Source(path=Path("y"))),
        draft=Draft(vocab_size=64, family="peagle", source=Source(path=Path("draft"), weight=0.5)),
    )


def test_a_table_is_laid_over_the_default_of_its_field_not_over_its_class(tmp_path):
    assert read(tmp_path, 'out = "o"\n[draft]\nfamily = "peagle"').draft.vocab_size == 64


def test_none_is_spelled_and_replaces_a_default(tmp_path):
    assert read(tmp_path, 'out = "o"\ndraft.vocab_size = "none"').draft.vocab_size is None


def test_a_whole_number_for_a_float_becomes_a_float(tmp_path):
    assert type(read(tmp_path, 'out = "o"\nlr = 1').lr) is float


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("stesp = 3", "unknown key 'stesp'; did you mean 'steps'?"),
        ("zzz = 3", "unknown key 'zzz'; known keys: betas, chats, "),
        ("draft.vocab-size = 3", "draft: unknown key 'vocab-size'; did you mean 'vocab_size'?"),
        ('steps = "3"', "steps: expected a whole number, found '3' (str)"),
        ("steps = true", "steps: expected a whole number, found True (bool)"),
        ("steps = 3.0", "steps: expected a whole number, found 3.0 (float)"),
        ("lr = true", "lr: expected a number, found True (bool)"),
        ('lr = "1e-4"', "lr: expected a number, found '1e-4' (str)"),
        ("dry_run = 1", "dry_run: expected true or false, found 1 (int)"),
        ("name = 1", "name: expected a string, found 1 (int)"),
        ('chats = "a"', "chats: expected an array, found 'a' (str)"),
        ("chats = [1]", "chats[0]: expected a path as a string, found 1 (int)"),
        ("betas = [0.1]", "betas: expected an array of 2, found [0.1] (list)"),
        ('shape = "chain"', "shape: expected 'CHAIN' or 'TREE', found 'chain' (str)"),
        ("switches = {a = 1}", "switches.a: expected true or false, found 1 (int)"),
        ("switches = 1", "switches: expected a table, found 1 (int)"),
        ("revision = 1.5", "revision: expected int or str, found 1.5 (float)"),
        ("draft = 1", "draft: expected a table, found 1 (int)"),
        ('draft.family = "eagle4"', "draft: family: expected 'eagle3' or 'peagle', found 'eagle4' (str)"),
        ("mixture = [{}]", "mixture[0]: no value for path, and there is no default"),
        ('mixture = [{path = "x", weight = -1}]', "mixture[0]: weight is -1.0; expected 0 or more"),
        ("draft.source.weight = -1", "draft: source: weight is -1.0; expected 0 or more"),
        ("steps = ", "not a TOML file"),
    ],
)
def test_a_fault_names_the_file_and_the_place(tmp_path, line, message):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, f'{line}\nout = "o"')
    assert str(error.value).startswith(f"{tmp_path / 'run.toml'}: ")
    assert message in str(error.value)


def test_a_field_without_default_or_value_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.toml: no value for out, and there is no default"):
        read(tmp_path, "steps = 3")


def test_an_absent_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file"):
        read_table(tmp_path / "absent.toml")


def test_a_file_that_is_not_text_is_named(tmp_path):
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"run\.toml: not a TOML file"):
        read_table(tmp_path / "run.toml")


def test_checks_wait_until_flags_have_had_their_say():
    laid = overlay(Source, {"path": "x", "weight": -1}, "flags")
    assert laid.weight == -1
    with pytest.raises(ConfigError, match="weight is -1"):
        settle(laid, "flags")


def test_a_field_type_that_toml_cannot_hold_is_the_programmers_error():
    @dataclass(frozen=True)
    class Odd:
        numbers: set[int] = frozenset()

    with pytest.raises(TypeError, match="numbers: a config field cannot be of type"):
        overlay(Odd, {"numbers": [1]}, "odd.toml")


def test_optional_text_that_would_read_back_as_none_is_refused():
    with pytest.raises(ConfigError, match="note: the text 'none' cannot be stored"):
        to_toml(Run(out=Path("o"), note="none"))
    assert 'name = "none"' in to_toml(Run(out=Path("o"), name="none"))


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
PATHS = TEXT.filter(lambda text: "\x00" not in text).map(Path)
NUMBERS = st.floats(allow_nan=False)
SOURCES = st.builds(Source, path=PATHS, weight=st.floats(min_value=0))
RUNS = st.builds(
    Run,
    out=PATHS,
    chats=st.lists(PATHS, max_size=3).map(tuple),
    betas=st.tuples(NUMBERS, NUMBERS),
    steps=st.integers(),
    lr=NUMBERS,
    name=TEXT,
    note=st.none() | TEXT.filter(lambda text: text != "none"),
    revision=st.integers() | TEXT,
    dry_run=st.booleans(),
    shape=st.sampled_from(Shape),
    switches=st.dictionaries(TEXT, st.booleans(), max_size=3),
    mixture=st.lists(SOURCES, max_size=2).map(tuple),
    draft=st.builds(Draft, vocab_size=st.none() | st.integers(), source=SOURCES),
)


@given(RUNS)
def test_every_config_comes_back_from_its_toml(tmp_path_factory, run):
    file = tmp_path_factory.mktemp("toml") / "run.toml"
    file.write_bytes(to_toml(run).encode())
    assert read_config(Run, file) == run


def test_the_written_file_reads_well():
    text = to_toml(Run(out=Path("o"), chats=(Path("a"),), mixture=(Source(path=Path("x")),)))
    assert text.splitlines()[:3] == ['out = "o"', 'chats = ["a"]', "betas = [0.9, 0.95]"]
    assert text.splitlines()[-9:] == [
        'mixture = [{"path" = "x", "weight" = 1.0}]',
        "",
        "[draft]",
        "vocab_size = 64",
        'family = "eagle3"',
        "",
        "[draft.source]",
        'path = "draft"',
        "weight = 1.0",
    ]
    assert {line.split(" = ")[0] for line in text.splitlines() if " = " in line} >= {
        entry.name for entry in dataclasses.fields(Run) if entry.name != "draft"
    }
