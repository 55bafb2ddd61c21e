"""Reading a rotary embedding from either spelling of a config.json, and refusing what would be trained wrongly.

transformers 4 writes `rope_theta` and `rope_scaling`, transformers 5 one `rope_parameters`. A type that is unknown,
or whose frequencies depend on the length of the sequence in the batch (dynamic, longrope), is an error rather than a
fallback: with packed documents there is no such length, and a wrong frequency only shows as a lower acceptance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eyas.cache_format.errors import ConfigError

_DEFAULT_THETA = 10000.0  # transformers' value for a config.json that names none
_YARN_OPTIONS = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
_SCALING_KEYS: dict[str, tuple[set[str], set[str]]] = {
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}, set()),
    "yarn": ({"factor", "original_max_position_embeddings"}, _YARN_OPTIONS),
}
_ADVICE = "give the draft its own rope_parameters, for example {rope_type = 'default', rope_theta = 10000.0}"


def read_rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` from the text part of a config.json in either spelling; checked.

    ConfigError when the two spellings disagree, on an unknown type, and on per-layer-type tables.
    """
    v5 = config.get("rope_parameters")
    if v5 is not None and any(isinstance(value, Mapping) for value in v5.values()):
        raise ConfigError(f"the target has several rotary embeddings ({', '.join(v5)}); {_ADVICE}")
    v4 = config.get("rope_scaling")
    source = dict(v5 if v5 is not None else v4 or {})
    theta = _agreed_theta(source.pop("rope_theta", None), config.get("rope_theta"))
    rope_type = source.pop("rope_type", None) or source.pop("type", None) or "default"
    source.pop("type", None)
    parameters = {"rope_type": rope_type, "rope_theta": theta, **source}
    if parameters.get("partial_rotary_factor") == 1:
        del parameters["partial_rotary_factor"]
    if rope_type == "yarn":
        parameters.setdefault("original_max_position_embeddings", config.get("max_position_embeddings"))
    check_rope_parameters(parameters)
    if v5 is not None and v4:
        _check_same_scaling(parameters, v4)
    return parameters


def check_rope_parameters(parameters: Mapping[str, Any]) -> None:
    """Raise ConfigError unless the type is supported and has exactly the keys it needs, with a positive theta."""
    rope_type = parameters.get("rope_type")
    if rope_type not in _SCALING_KEYS:
        raise ConfigError(f"rope type {rope_type!r} is not supported (only {', '.join(_SCALING_KEYS)}); {_ADVICE}")
    theta = parameters.get("rope_theta")
    if not isinstance(theta, (int, float)) or not theta > 0:
        raise ConfigError(f"rope_theta must be a positive number, got {theta!r}")
    required, optional = _SCALING_KEYS[rope_type]
    given = set(parameters) - {"rope_type", "rope_theta"}
    if missing := sorted(key for key in required if parameters.get(key) is None):
        raise ConfigError(f"rope type {rope_type!r} lacks {', '.join(missing)}")
    if unknown := sorted(given - required - optional):
        raise ConfigError(f"rope type {rope_type!r} does not know {', '.join(unknown)}; {_ADVICE}")


def _agreed_theta(nested: float | int | None, top_level: float | int | None) -> float:
    if nested is not None and top_level is not None and nested != top_level:
        raise ConfigError(f"the config.json names two rotary bases: rope_theta {top_level} and {nested} in its table")
    given = top_level if nested is None else nested
    return _DEFAULT_THETA if given is None else float(given)


def _check_same_scaling(parameters: Mapping[str, Any], scaling: Mapping[str, Any]) -> None:
    old_type = scaling.get("rope_type") or scaling.get("type")
    if old_type != parameters["rope_type"]:
        raise ConfigError(
            f"the config.json names two rotary embeddings: rope_parameters {parameters['rope_type']!r} and "
            f"rope_scaling {old_type!r}"
        )
