"""The walls of the house: who may import whom, what may lie where, and what every config owes its reader."""

import ast
import dataclasses
import importlib
import itertools
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import get_type_hints

import pytest

from eyas import cli

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("cache_format", "pipeline", "train", "evaluate")
SOURCES = sorted(path for part in PARTS for path in (ROOT / part).rglob("*.py"))
MODELS = {"torch", "ray", "transformers", "datasets", "tokenizers", "jaxtyping"}

# What must not be in memory after every module of a part has been imported, and cannot be imported meanwhile.
FORBIDDEN = {
    "cache_format": {*MODELS, "tyro", "eyas.pipeline", "eyas.train", "eyas.evaluate"},
    "pipeline": {"tyro", "eyas.train", "eyas.evaluate"},
    "train": {"ray", "datasets", "tokenizers", "tyro", "transformers.models", "eyas.pipeline", "eyas.evaluate"},
    "evaluate": {"tyro"},
}

IMPORT_ALL = '''
import importlib, importlib.abc, importlib.machinery, pkgutil, sys

part, forbidden = sys.argv[1], tuple(sys.argv[2].split(","))

class Wall(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds what is forbidden, since libraries may ask whether each other exist, and refuses to load it."""

    def find_spec(self, name, path=None, target=None):
        if any(name == wall or name.startswith(wall + ".") for wall in forbidden):
            return importlib.machinery.ModuleSpec(name, self)

    def exec_module(self, module):
        raise ImportError(f"eyas.{part} reaches for {module.__name__}")

sys.meta_path.insert(0, Wall())
package = importlib.import_module(f"eyas.{part}")
names = [f"eyas.{part}", *(module.name for module in pkgutil.walk_packages(package.__path__, f"eyas.{part}."))]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
'''


def git_files() -> list[str]:
    """Files that are checked in or would be: what git neither tracks nor ignores counts too."""
    command = ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def source_roots() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in PARTS)}


def imports_of(path: Path) -> list[tuple[int, str]]:
    """Every module that a file names in an import, wherever in the file, with its line."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return found


def test_no_part_hides_the_others():
    strays = [path for path in ROOT.rglob("eyas/__init__.py") if not path.is_relative_to(ROOT / ".venv")]
    assert not strays, (
        f"{strays}: eyas is a PEP 420 namespace with one portion in each part's folder. An eyas/__init__.py makes its "
        "folder the whole of eyas, and the other parts stop importing (ModuleNotFoundError). Delete it."
    )


def test_the_top_level_holds_the_house_and_nothing_else():
    allowed = {"LICENSE", "Makefile", "README.md", "constraints.txt", "pyproject.toml"}
    allowed |= {*PARTS, "tests", "benchmarks", "examples"}
    found = {name.partition("/")[0] for name in git_files()}
    assert {name for name in found if not name.startswith(".")} <= allowed


def test_each_source_root_holds_its_part_and_only_the_contract_holds_the_front_door():
    for part in PARTS:
        inside = {path.name for path in (ROOT / part / "eyas").iterdir() if path.name != "__pycache__"}
        door = {"__main__.py", "cli.py", "configuration.py", "flags.py"} if part == "cache_format" else set()
        assert inside == {part, *door}
        assert (ROOT / part / "eyas" / part / "py.typed").exists()


def test_the_import_contracts_hold():
    code = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())"
    command = [sys.executable, "-c", code, "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, env=source_roots(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_with_everything_it_may_not_know_walled_off(part):
    command = [sys.executable, "-c", IMPORT_ALL, part, ",".join(sorted(FORBIDDEN[part]))]
    done = subprocess.run(command, env=source_roots(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) >= 5


def test_the_trainer_takes_of_transformers_two_modules_that_hold_no_model():
    allowed = ("transformers.modeling_rope_utils.", "transformers.activations.")
    for path in sorted((ROOT / "train").rglob("*.py")):
        for line, name in imports_of(path):
            ours = not name.startswith("transformers") or name.startswith(allowed)
            assert ours, f"{path}:{line}: imports {name}: the target is not resident in training"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_source_is_ascii_with_absolute_imports_and_telling_names(path):
    assert path.read_bytes().isascii(), f"{path}: only ASCII in code and comments"
    relative = [f"{path}:{line}" for line, name in imports_of(path) if name.startswith(".")]
    assert not relative, f"{relative}: imports are absolute"
    assert path.stem not in {"utils", "util", "common", "helpers", "misc"}, f"{path}: a name that holds anything"


def test_no_module_is_named_like_one_that_people_run_beside_it():
    names = {path.stem for path in SOURCES} - {"__init__", "__main__", "config"}
    clash = names & {"inspect", "types", "io", "copy", "random", "profile", "token", "tokenize", "select", "queue"}
    assert not clash, f"{clash}: a script that is started in that folder would import ours instead of Python's"


def config_classes() -> list[type]:
    """The config class of every verb, and those nested in them."""
    found: list[type] = []
    waiting = [cli._load(verb.config, name, verb) for name, verb in cli.VERBS.items()]
    while waiting:
        cls = waiting.pop()
        if cls not in found:
            found.append(cls)
            waiting += [hint for hint in get_type_hints(cls).values() if dataclasses.is_dataclass(hint)]
    return found


def documented_fields(cls: type) -> set[str]:
    """Names in a class body that are followed by a docstring: what `--help` shows."""
    module = importlib.import_module(cls.__module__)
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    body = next(node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == cls.__name__)
    return {
        entry.target.id
        for entry, after in itertools.pairwise(body)
        if isinstance(entry, ast.AnnAssign)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
        and isinstance(after.value.value, str)
    }


def test_every_config_field_has_a_docstring_and_every_config_is_frozen():
    for cls in config_classes():
        assert cls.__dataclass_params__.frozen, cls
        assert cls.__doc__, cls
        missing = {field.name for field in dataclasses.fields(cls)} - documented_fields(cls)
        assert not missing, f"{cls.__name__}: a docstring under each field becomes its --help; none under {missing}"


def test_positional_words_are_fields():
    for cls in config_classes():
        assert set(getattr(cls, "POSITIONAL", ())) <= {field.name for field in dataclasses.fields(cls)}


def test_the_wheel_holds_every_module_under_one_name(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("eyas-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    roots = {name.partition("/")[0] for name in names}
    assert {root for root in roots if not root.endswith(".dist-info")} == {"eyas"}
    expected = {str(path.relative_to(ROOT / path.relative_to(ROOT).parts[0])) for path in SOURCES}
    assert expected <= names
    assert {f"eyas/{part}/py.typed" for part in PARTS} <= names


def test_shapes_in_signatures_are_checked_while_tests_run():
    torch = importlib.import_module("torch")
    metrics = importlib.import_module("eyas.train.metrics")
    with pytest.raises(Exception, match="Type-check error"):
        metrics.simulated_accept_length(torch.zeros(2, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))
