"""A draft that engines would misread, or that belongs to another target, is refused with its reason."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from eyas.evaluate.draft_folder import open_draft
from eyas.evaluate.errors import DraftError
from eyas.pipeline.target_folder import open_target
from eyas.pipeline.testing import make_tiny_target

CPU = torch.device("cpu")
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture
def folder(tmp_path, export, overfit):
    return export(tmp_path / "draft", overfit())


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder, target_folder, target, dtype=torch.float32):
    return open_draft(folder, target_folder).load(target.embeddings.weight, dtype=dtype, device=CPU)


@pytest.mark.parametrize("family", ["eagle3", "eagle3.1"])
def test_a_loaded_draft_is_the_exported_one(tmp_path, export, overfit, target_folder, target, family):
    path = export(tmp_path / "draft", overfit(family))
    opened = open_draft(path, target_folder)
    assert opened.aux_layer_outputs == (1, 3, 4)
    assert opened.config == overfit(family).config
    loaded = load(path, target_folder, target).state_dict()
    expected = overfit(family).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_embeddings_come_from_the_file_when_it_holds_some(tmp_path, export, overfit, target_folder, target):
    path = export(tmp_path / "draft", overfit(), with_embeddings=True)
    edit_weights(path, lambda tensors: tensors["embed_tokens.weight"].fill_(0.5))
    assert bool((load(path, target_folder, target).embed_tokens.weight == 0.5).all())


def test_narrow_dtypes_leave_the_rotary_frequencies_alone(folder, target_folder, target, overfit):
    draft = load(folder, target_folder, target, torch.bfloat16)
    assert draft.fc.weight.dtype == torch.bfloat16
    assert torch.equal(draft.rotary.inv_freq, overfit().rotary.inv_freq)
    assert torch.equal(draft.d2t, overfit().d2t)


def test_norm_output_decides_what_the_chain_feeds_back(tmp_path, export, overfit, target_folder, target):
    """The same weights with the flag turned: the first token is the same, the states after it are not."""
    states = []
    for name, flag in (("as", True), ("not", False)):
        path = export(tmp_path / name, overfit("eagle3.1"), norm_output=flag)
        draft = load(path, target_folder, target)
        features = draft.project_hidden_states(torch.ones(1, 96))
        cache = draft.new_cache()
        first = draft.extend(features, torch.tensor([10]), torch.tensor([0]), cache)
        second = draft.extend(first, torch.tensor([11]), torch.tensor([1]), cache)
        states.append((draft.compute_logits(first), draft.compute_logits(second)))
    torch.testing.assert_close(states[0][0], states[1][0])
    assert not torch.allclose(states[0][1], states[1][1], atol=1e-2)


def test_fc_norm_needs_its_tensors(tmp_path, export, overfit, target_folder):
    path = export(tmp_path / "draft", overfit(), fc_norm=True)
    with pytest.raises(DraftError, match=r"fc_norm\.0\.weight is missing"):
        open_draft(path, target_folder)


def test_layer_ids_in_one_spelling_for_both_readers_are_refused(folder, target_folder):
    """[2, 4, 5] twice: vLLM would feed the outputs of layers 1, 3, 4 and SGLang those of 2, 4, 5."""
    edit_config(folder, eagle_config={IDS: [2, 4, 5], "use_aux_hidden_state": True})
    with pytest.raises(DraftError, match=r"\[1, 3, 4\]; found \[2, 4, 5\]"):
        open_draft(folder, target_folder)


@pytest.mark.parametrize("nested", [[1, 3, 5], [1, 3]])
def test_nested_layer_ids_of_other_layers_are_refused(folder, target_folder, nested):
    edit_config(folder, eagle_config={IDS: nested, "use_aux_hidden_state": True})
    with pytest.raises(DraftError, match="V11"):
        open_draft(folder, target_folder)


def test_layers_that_the_target_lacks_are_refused(folder, target_folder):
    edit_config(folder, **{IDS: [2, 4, 12], "eagle_config": {IDS: [1, 3, 11], "use_aux_hidden_state": True}})
    with pytest.raises(DraftError, match="target of 8 layers"):
        open_draft(folder, target_folder)


@pytest.mark.parametrize(
    ("name", "settings"), [("vocab_size", {"vocab": 320}), ("target_hidden_size", {"hidden_size": 64})]
)
def test_a_draft_of_another_target_is_refused(tmp_path, folder, name, settings):
    other = open_target(str(make_tiny_target(tmp_path / "other", **settings)))
    with pytest.raises(DraftError, match=f"{name} .* made for another target"):
        open_draft(folder, other)


def test_misshapen_missing_and_unknown_tensors_are_named(folder, target_folder):
    def change(tensors):
        tensors["norm.weight"] = torch.ones(31)
        tensors["midlayer.mlp.up.weight"] = tensors.pop("midlayer.mlp.up_proj.weight")

    edit_weights(folder, change)
    with pytest.raises(DraftError) as caught:
        open_draft(folder, target_folder)
    message = str(caught.value)
    assert "norm.weight is [31]; expected [32]" in message
    assert "midlayer.mlp.up_proj.weight is missing" in message
    assert "midlayer.mlp.up.weight is not a tensor" in message


def test_an_absolute_vocabulary_map_is_refused(folder, target_folder):
    edit_weights(folder, lambda tensors: tensors["d2t"].add_(torch.arange(200)))
    with pytest.raises(DraftError, match="V05"):
        open_draft(folder, target_folder)


def test_another_architecture_is_refused(folder, target_folder):
    edit_config(folder, architectures=["LlamaForCausalLM"])
    with pytest.raises(DraftError, match="architectures"):
        open_draft(folder, target_folder)


def test_a_folder_without_a_draft_says_how_to_write_one(tmp_path, target_folder):
    with pytest.raises(DraftError, match="eyas export"):
        open_draft(tmp_path, target_folder)
