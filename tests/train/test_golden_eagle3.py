"""EAGLE-3 and 3.1 against tensors made by NeMo AutoModel 0.5.0 (tests/golden), within the tolerances of that set.

Scalar losses 1e-5, tensors atol 5e-5 and rtol 1e-5, gradients 1e-4 of the tensor's largest entry + 1e-6, counters
exact: the float32 noise of an independent implementation, measured by the makers against float64.
"""

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from eyas.train.batch import PackedBatch, make_batch, shift_left
from eyas.train.drafts.config import Eagle3Config
from eyas.train.drafts.eagle3 import Eagle3Draft
from eyas.train.metrics import simulated_accept_length
from eyas.train.objectives.eagle3 import Eagle3StepConfig, count_supervised, eagle3_step
from eyas.train.objectives.supervision import DenseSupervision

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = ["eagle3_ttt1", "eagle3_ttt3", "eagle3_ttt7", "eagle3_logits", "eagle3_packed", "eagle3_full_vocab"]
CASES += ["eagle31", "eagle3_bias_rope_llama3"]
ATTENTIONS = ["eager", "fused"]


class Case(NamedTuple):
    meta: dict
    tensors: dict[str, Tensor]
    draft: Eagle3Draft
    batch: PackedBatch
    probs: Tensor
    slots: Tensor  # bool [B, T]: the slots of the golden rows that hold a token of a document

    @property
    def ttt_steps(self) -> int:
        return self.meta["args"]["ttt_steps"]


def our_name(key: str) -> str:
    return key.replace("model.layers.0.", "midlayer.").removeprefix("model.")


def load_case(name: str, attention: str = "auto") -> Case:
    with safe_open(GOLDEN / f"{name}.safetensors", "pt") as file:
        meta = json.loads(file.metadata()["meta"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - the file is no mapping
    weights = {our_name(key.removeprefix("param/")): t for key, t in tensors.items() if key.startswith("param/")}
    draft = Eagle3Draft.from_tensors(draft_config(meta["effective_config"]), weights, attention=attention)
    batch, probs, slots = pack_rows(tensors)
    return Case(meta, tensors, draft, batch, probs, slots)


def draft_config(golden: dict) -> Eagle3Config:
    names = Eagle3Config.__dataclass_fields__
    return Eagle3Config(**{name: golden[name] for name in names if name in golden})


def document_lengths(tensors: dict[str, Tensor]) -> list[int]:
    """Real tokens of every document, padding stripped; a packed row says how many tokens follow each slot."""
    if "input/doc_remaining" not in tensors:
        return tensors["input/attention_mask"].sum(-1).tolist()
    lengths = []
    for remaining, real in zip(tensors["input/doc_remaining"], tensors["input/attention_mask"], strict=True):
        slot = 0
        while slot < int(real.sum()):
            lengths.append(int(remaining[slot]) + 1)
            slot += lengths[-1]
    return lengths


def pack_rows(tensors: dict[str, Tensor]) -> tuple[PackedBatch, Tensor, Tensor]:
    """(batch from the raw arrays, target probabilities of its stored rows, slots that hold a document token)."""
    slots = tensors["input/attention_mask"].bool()
    lengths = document_lengths(tensors)
    probs, argmax = slot_supervision(tensors)
    # Every raw position but a document's first has a slot that asks for it, so these are the stored rows.
    kept = torch.cat([torch.arange(length) > 0 for length in lengths])
    has_next = torch.cat([torch.arange(length) < length - 1 for length in lengths])
    batch = make_batch(
        document_lengths=lengths,
        input_ids=tensors["input/raw_input_ids"][slots],
        span_ids=tensors["input/raw_loss_mask"][slots],
        aux_hidden_states=tensors["input/aux_hidden_states"][slots],
        kept=kept,
        target_draft_ids=argmax[slots][has_next],
        preset="nemo",
    )
    return batch, probs[slots][has_next], slots


def slot_supervision(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(target probabilities [B, T, W], draft id of the target's argmax or -1 [B, T]) in the slot frame."""
    if "input/target_probs" in tensors:
        probs = tensors["input/target_probs"]
        return probs, torch.where(tensors["input/position_mask"][..., 0], probs.argmax(-1), -1)
    selected, logits = tensors["input/selected_token_ids"], tensors["input/target_logits"]
    to_draft = torch.full((logits.shape[-1],), -1)
    to_draft[selected] = torch.arange(selected.shape[0])
    return logits[..., selected].softmax(-1), to_draft[logits.argmax(-1)]


def run(case: Case):
    counts = count_supervised(case.batch, case.ttt_steps)
    # A chunk smaller than the batch, so that the chunk borders are part of the comparison.
    config = Eagle3StepConfig(ttt_steps=case.ttt_steps, head_chunk_rows=16)
    return eagle3_step(case.draft, case.batch, DenseSupervision(probs=case.probs), config, counts)


@pytest.mark.parametrize("name", CASES)
def test_slot_frame_equals_the_reference(name):
    case = load_case(name)
    inside = case.batch.layout.doc_remaining > 0
    for ours, key in ((case.batch.input_ids, "input_ids"), (case.batch.loss_mask.long(), "loss_mask")):
        assert torch.equal(ours[inside], case.tensors[f"input/{key}"][case.slots][inside])
    if "expect/position_mask" in case.tensors:
        theirs = case.tensors["expect/position_mask"][..., 0][case.slots]
        assert torch.equal(case.batch.position_mask[inside], theirs[inside])
    if "input/position_ids" in case.tensors:
        assert torch.equal(case.batch.position_ids, case.tensors["input/position_ids"][case.slots])


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", CASES)
def test_loss_and_counters_equal_the_reference(name, attention):
    case = load_case(name, attention)
    output = run(case)
    expected = {key.removeprefix("expect/"): t for key, t in case.tensors.items() if key.startswith("expect/")}
    assert float(output.loss.detach()) == pytest.approx(float(expected["loss"]), abs=1e-5)
    counters = output.counters
    for step in range(case.ttt_steps):
        assert float(counters.step_losses()[step]) == pytest.approx(float(expected[f"step{step}/soft_ce"]), abs=1e-5)
        assert int(counters.supervised[step]) == int(expected[f"step{step}/valid"])
    assert torch.equal(counters.hits, expected["step_prefix_hits"])
    assert torch.equal(counters.valid, expected["step_valid"])
    assert counters.accuracy() == pytest.approx(float(expected["accuracy"]), abs=1e-6)
    assert counters.accept_length() == pytest.approx(float(expected["simulated_accept_length"]), abs=1e-6)
    assert int(counters.supervised.sum()) == int(expected["valid_tokens"])


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_the_reference(name, attention):
    case = load_case(name, attention)
    run(case).loss.backward()
    expected = {our_name(k.removeprefix("grad/")): t for k, t in case.tensors.items() if k.startswith("grad/")}
    ours = {key: p.grad for key, p in case.draft.named_parameters() if p.grad is not None}
    assert ours.keys() == expected.keys()
    for key, theirs in expected.items():
        limit = 1e-4 * float(theirs.abs().max()) + 1e-6
        assert float((ours[key] - theirs).abs().max()) <= limit, key


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", CASES)
def test_states_and_logits_equal_the_reference_wherever_the_fed_token_exists(name, attention):
    case = load_case(name, attention)
    batch = case.batch
    projected = case.draft.project_hidden_states(batch.aux_hidden_states)
    close(projected, case.tensors["expect/projected_hidden"][case.slots])
    hidden, state = case.draft.first_step(projected, batch.input_ids, batch.position_ids, batch.layout)
    for step in range(case.ttt_steps):
        if step:
            fed = shift_left(batch.input_ids, batch.layout.doc_remaining, step)
            hidden = case.draft.next_step(hidden, fed, state)
        inside = batch.layout.doc_remaining > step
        close(hidden[inside], case.tensors[f"expect/step{step}/hidden"][case.slots][inside])
        logits = case.draft.compute_logits(hidden)
        close(logits[inside], case.tensors[f"expect/step{step}/logits"][case.slots][inside])


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours.detach(), theirs, atol=5e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["eagle3_logits", "eagle3_packed", "eagle3_full_vocab"])
def test_probabilities_derived_from_logits_equal_the_reference(name):
    case = load_case(name)
    inside = case.batch.layout.doc_remaining > 0
    theirs = case.tensors["expect/target_probs"][case.slots][inside]
    close(case.probs, theirs)


@pytest.mark.parametrize("name", ["eagle3_logits", "eagle3_packed", "eagle3_full_vocab"])
def test_nothing_supervised_costs_nothing_and_reaches_every_parameter(name):
    case = load_case(name)
    silent = {key: t.clone() for key, t in case.tensors.items()}
    silent["input/raw_loss_mask"].zero_()
    batch, probs, _ = pack_rows(silent)
    output = run(case._replace(batch=batch, probs=probs))
    assert float(output.loss.detach()) == float(case.tensors["expect/unsupervised/loss"]) == 0.0
    assert output.counters.accept_length() == float(case.tensors["expect/unsupervised/simulated_accept_length"])
    assert torch.equal(output.counters.valid, case.tensors["expect/unsupervised/step_valid"])
    output.loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in case.draft.parameters())


def test_simulated_accept_length_equals_the_reference():
    with safe_open(GOLDEN / "simulated_accept_length.safetensors", "pt") as file:
        names = json.loads(file.metadata()["meta"])["subcases"]
        assert len(names) == 7
        for name in names:
            hits, valid = (file.get_tensor(f"input/{name}/{key}") for key in ("step_prefix_hits", "step_valid"))
            expected = file.get_tensor(f"expect/{name}/simulated_accept_length")
            assert float(simulated_accept_length(hits, valid)) == pytest.approx(float(expected), abs=1e-6)
