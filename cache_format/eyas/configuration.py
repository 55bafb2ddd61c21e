"""Config dataclasses to and from TOML, with the standard library alone.

A config is a frozen dataclass. Its fields are bool, int, float, str, Path, Literal, Enum, tuples and string-keyed dicts
of these, optional versions of these, and further config dataclasses. TOML keys are the field names. TOML has no null,
so `"none"` stands for None wherever a field may be None. Paths are relative to the working directory, as in flags.

A stranger among the keys is refused with the nearest known name, and a value of the wrong type is named by file and
field: nothing is coerced, because a coerced value is a wrong run that looks right.
"""

import dataclasses
import difflib
import re
import tomllib
import types
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from eyas.cache_format.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Config = TypeVar("Config", bound=DataclassInstance)
else:
    Config = TypeVar("Config")

NONE = "none"


def read_config(cls: type[Config], path: Path) -> Config:
    """Read a complete config from a TOML file.

    Raises:
        ConfigError: the file cannot be read, is not TOML, holds an unknown key or a value of the wrong type, leaves out
            a field that has no default, or fails the config's own checks.
    """
    return settle(overlay(cls, read_table(path), str(path)), str(path))


def read_table(path: Path) -> dict[str, Any]:
    """Read a TOML file; ConfigError names the file when it is absent or malformed."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from error


def overlay(
    cls: type[Config],
    table: dict[str, Any],
    where: str,
    *,
    base: Config | None = None,
    missing: object = dataclasses.MISSING,
) -> Config:
    """Lay a table over the defaults of a config, or over `base`, without running the config's checks.

    The checks wait because flags may still replace values: `settle` runs them.

    Args:
        where: what an error names, such as the file and the table's place in it.
        missing: what fields hold that have no default and are not in the table.

    Raises:
        ConfigError: an unknown key or a value of the wrong type.
    """
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in table:
        if key not in fields:
            raise ConfigError(f"{where}: unknown key {key!r}{_nearest(key, list(fields))}")
    hints = get_type_hints(cls)
    config = object.__new__(cls)
    for name, field in fields.items():
        value = _default(field, missing) if base is None else getattr(base, name)
        if name in table:
            value = _convert(table[name], hints[name], f"{where}: {name}", value, missing)
        object.__setattr__(config, name, value)
    return config


def settle(config: Config, where: str) -> Config:
    """Build the config that `overlay` laid out, running every check; ConfigError names fields left without a value."""
    values = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
    absent = [name for name, value in values.items() if value is dataclasses.MISSING]
    if absent:
        raise ConfigError(f"{where}: no value for {', '.join(absent)}, and there is no default")
    for name, value in values.items():
        if _is_config(value):
            values[name] = settle(value, f"{where}: {name}")
    try:
        return type(config)(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def to_toml(config: "DataclassInstance") -> str:
    """Write every field of a config as TOML that `read_config` reads back to an equal config.

    Raises:
        ConfigError: an optional text field holds the text "none", which TOML cannot tell from None.
    """
    return "\n".join(_section(config, "")).lstrip("\n") + "\n"


def _default(field: "dataclasses.Field[Any]", missing: object) -> object:
    if field.default is not dataclasses.MISSING:
        return field.default
    return missing if field.default_factory is dataclasses.MISSING else field.default_factory()


def _nearest(key: str, names: list[str]) -> str:
    close = difflib.get_close_matches(key.replace("-", "_"), names, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(sorted(names))}"


def _convert(value: Any, hint: Any, where: str, base: Any, missing: object) -> Any:
    """Turn one TOML value into what `hint` asks for; `base` is the config that a nested table is laid over."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return _convert_union(value, get_args(hint), where, base, missing)
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in get_args(hint)):
            return value
        raise _wrong(value, " or ".join(repr(choice) for choice in get_args(hint)), where)
    if origin is tuple:
        return _convert_tuple(value, get_args(hint), where)
    if origin is dict:
        _require(value, dict, "a table", where)
        return {key: _element(item, get_args(hint)[1], f"{where}.{key}") for key, item in value.items()}
    if dataclasses.is_dataclass(hint):
        _require(value, dict, "a table", where)
        of_that_class = base if type(base) is hint else None
        return overlay(cast("type[DataclassInstance]", hint), value, where, base=of_that_class, missing=missing)
    return _convert_scalar(value, hint, where)


def _convert_scalar(value: Any, hint: Any, where: str) -> Any:
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise _wrong(value, "a number", where)
        return float(value)
    if hint in (bool, int, str):
        if type(value) is not hint:
            raise _wrong(value, {bool: "true or false", int: "a whole number", str: "a string"}[hint], where)
        return value
    if hint is Path:
        _require(value, str, "a path as a string", where)
        return Path(value)
    if isinstance(hint, type) and issubclass(hint, Enum):
        if value not in hint.__members__:
            raise _wrong(value, " or ".join(repr(name) for name in hint.__members__), where)
        return hint[value]
    raise TypeError(f"{where}: a config field cannot be of type {hint}")


def _convert_union(value: Any, members: tuple[Any, ...], where: str, base: Any, missing: object) -> Any:
    if types.NoneType in members and value == NONE:
        return None
    members = tuple(member for member in members if member is not types.NoneType)
    if len(members) == 1:
        return _convert(value, members[0], where, base, missing)
    for member in members:
        try:
            return _convert(value, member, where, base, missing)
        except ConfigError:
            continue  # the next member may take it; when none does, the error below names them all
    raise _wrong(value, " or ".join(getattr(member, "__name__", str(member)) for member in members), where)


def _convert_tuple(value: Any, members: tuple[Any, ...], where: str) -> tuple[Any, ...]:
    _require(value, list, "an array", where)
    if members[-1] is Ellipsis:
        members = members[:1] * len(value)
    elif len(members) != len(value):
        raise _wrong(value, f"an array of {len(members)}", where)
    pairs = enumerate(zip(value, members, strict=True))
    return tuple(_element(item, member, f"{where}[{index}]") for index, (item, member) in pairs)


def _element(value: Any, hint: Any, where: str) -> Any:
    """Convert one element of an array or a dict: complete at once, since no flag can reach inside it."""
    converted = _convert(value, hint, where, None, dataclasses.MISSING)
    return settle(converted, where) if _is_config(converted) else converted


def _is_config(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _require(value: Any, kind: type, expected: str, where: str) -> None:
    if not isinstance(value, kind):
        raise _wrong(value, expected, where)


def _wrong(value: Any, expected: str, where: str) -> ConfigError:
    return ConfigError(f"{where}: expected {expected}, found {value!r} ({type(value).__name__})")


def _section(config: "DataclassInstance", prefix: str) -> list[str]:
    """Lines of one table: plain fields first, since in TOML whatever follows a header belongs to it."""
    lines, tables = [], []
    hints = get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if _is_config(value):
            tables += ["", f"[{prefix}{field.name}]", *_section(value, f"{prefix}{field.name}.")]
        elif value == NONE and types.NoneType in get_args(hints[field.name]):
            raise ConfigError(
                f"{prefix}{field.name}: the text {NONE!r} cannot be stored, because it stands for no value"
            )
        else:
            lines.append(f"{field.name} = {_value(value)}")
    return lines + tables


def _value(value: Any) -> str:
    if value is None:
        return _string(NONE)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return _string(value.name)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, Path)):
        return _string(str(value))
    if isinstance(value, tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, dict):
        return _inline(value)
    if _is_config(value):
        return _inline({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    raise TypeError(f"a config field cannot hold {type(value).__name__}")


def _inline(table: dict[str, Any]) -> str:
    return f"{{{', '.join(f'{_string(key)} = {_value(item)}' for key, item in table.items())}}}"


def _string(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda match: f"\\u{ord(match[0]):04x}", escaped) + '"'
