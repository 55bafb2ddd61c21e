"""Draft networks by the name a user gives; a new one is a file here and a line below."""

from collections.abc import Mapping
from typing import Any

from eyas.train.drafts.eagle3 import Eagle3Draft

DRAFTS: Mapping[str, tuple[type[Eagle3Draft], Mapping[str, Any]]] = {
    "eagle3": (Eagle3Draft, {"fc_norm": False, "norm_output": False}),
    "eagle3.1": (Eagle3Draft, {"fc_norm": True, "norm_output": True}),
}
"""Name -> (network, the switches of `Eagle3Config.from_target` that make it this draft)."""
