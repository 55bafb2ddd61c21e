"""Flags to config dataclasses: the one module that knows the flag parser, tyro.

Configs stay free of it. A field becomes `--field-name`, a field of a nested config `--outer.field-name`, its docstring
the help text; the fields that a class names in `POSITIONAL: ClassVar[tuple[str, ...]]` take words without a flag.
"""

import dataclasses
import inspect
from collections.abc import Sequence
from copy import copy
from functools import partial
from operator import getitem
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import tyro

from eyas import configuration
from eyas.cache_format.errors import ConfigError

__all__ = ["parse_flags"]


def parse_flags(cls: type[Any], words: Sequence[str], *, prog: str, file: Path | None = None) -> Any:
    """Turn flags, laid over a TOML file when one is named, into a checked config of class `cls`.

    Raises:
        ConfigError: from the TOML file or from the config's own checks.
        SystemExit: 0 after `--help`, 2 after bad flags, which are explained on standard error.
    """
    values: dict[str, Any] = {}
    if file is not None:
        table = configuration.read_table(file)
        laid = configuration.overlay(cls, table, str(file), missing=tyro.MISSING)
        values = {name: getattr(laid, name) for name in table}
    description = f"{inspect.cleandoc(cls.__doc__ or '')}\n\nAlso: --config FILE.toml, -v/--verbose, -q/--quiet."
    parsed = tyro.cli(_surface(cls, values), prog=prog, description=description, args=list(words))
    given = {field.name: getattr(parsed, field.name) for field in dataclasses.fields(cls) if field.init}
    for field in dataclasses.fields(cls):
        if given[field.name] == () and _is_required(field):  # the parser takes an empty tuple for a value
            raise ConfigError(f"no value for {field.name.replace('_', '-')}; see {prog} --help")
    return cls(**given)


def _surface(cls: type[Any], values: dict[str, Any]) -> type[Any]:
    """A subclass for the flag parser alone: `values` are its defaults, its positional fields carry the parser's marker.

    It runs no checks, so that the config's own messages reach the user as they are; what the parser makes of it goes
    into the real class at once.
    """
    hints = get_type_hints(cls)
    words = getattr(cls, "POSITIONAL", ())
    fields: list[tuple[str, Any, Any]] = []
    for field in dataclasses.fields(cls):
        hint = _positional(field, hints[field.name]) if field.name in words else hints[field.name]
        if field.name in values:
            # As a factory: dataclasses refuse unhashable defaults, and this value is never shared.
            fields.append((field.name, hint, dataclasses.field(default_factory=partial(getitem, values, field.name))))
        elif field.name in words:
            fields.append((field.name, hint, copy(field)))
    members = {"__doc__": cls.__doc__, "__module__": cls.__module__, "__post_init__": lambda self: None}
    return dataclasses.make_dataclass(cls.__name__, fields, bases=(cls,), namespace=members, frozen=True, kw_only=True)


def _positional(field: "dataclasses.Field[Any]", hint: Any) -> Any:
    name = field.name.upper().replace("_", "-") + ("..." if getattr(hint, "__origin__", None) is tuple else "")
    behavior = "(required)" if _is_required(field) else None
    return Annotated[hint, tyro.conf.Positional, tyro.conf.arg(metavar=name, help_behavior_hint=behavior)]


def _is_required(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
