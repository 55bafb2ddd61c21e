"""A damaged target folder is named before anything is captured."""

import pytest

from eyas.pipeline.errors import TargetError
from eyas.pipeline.target_folder import open_target
from eyas.pipeline.testing import make_tiny_target


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_torn_weights_are_named(tmp_path, share):
    weights = make_tiny_target(tmp_path / "target") / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(TargetError, match=r"model\.safetensors cannot be read"):
        _ = open_target(str(tmp_path / "target")).logit_transform


def test_config_that_is_no_object_is_named(tmp_path):
    target = make_tiny_target(tmp_path / "target")
    (target / "generation_config.json").write_text("[1]")
    with pytest.raises(TargetError, match=r"generation_config\.json holds a JSON list, expected an object"):
        _ = open_target(str(target)).eos_ids
