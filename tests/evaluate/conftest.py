"""A tiny random target, drafts exported for it, and prompts; everything is a function of a seed."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

from eyas.evaluate.decoder import Stop, decode_plain
from eyas.evaluate.target import DecodingTarget, load_target
from eyas.pipeline.target_folder import TargetFolder, open_target
from eyas.pipeline.testing import make_tiny_target
from eyas.train.batch import PackedLayout, shift_left
from eyas.train.drafts.config import Eagle3Config
from eyas.train.drafts.eagle3 import Eagle3Draft
from eyas.train.export import serving_tensors

LAYERS = (1, 3, 4)
DRAFT_VOCAB = 200
ANSWER = 28
SWITCHES = {"eagle3": {}, "eagle3.1": {"fc_norm": True, "norm_output": True}}


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> TargetFolder:
    return open_target(str(make_tiny_target(tmp_path_factory.mktemp("tiny") / "target")))


@pytest.fixture(scope="session")
def load(target_folder) -> Callable[..., DecodingTarget]:
    def _load(dtype: str = "float32") -> DecodingTarget:
        return load_target(
            target_folder, aux_layer_outputs=LAYERS, dtype=dtype, device="cpu", attention="sdpa", threads=1
        )

    return _load


@pytest.fixture(scope="session")
def target(load) -> DecodingTarget:
    return load()


@pytest.fixture(scope="session")
def prompts() -> list[Tensor]:
    """Random prompts of 1, 2 and more tokens."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 288, (length,), generator=generator) for length in (1, 2, 9, 20)]


@pytest.fixture(scope="session")
def answers(target, prompts) -> list[list[int]]:
    """Plain greedy answers that nothing ends."""
    return [decode_plain(target, prompt, Stop(frozenset(), ANSWER)) for prompt in prompts]


@pytest.fixture(scope="session")
def overfit(target, target_folder, prompts, answers) -> Callable[[str], Eagle3Draft]:
    """A draft that was trained on the answers for a moment, so that chains of every length are accepted."""
    trained: dict[str, Eagle3Draft] = {}

    def _overfit(family: str = "eagle3") -> Eagle3Draft:
        if family not in trained:
            draft = random_draft(target, target_folder, answers, **SWITCHES[family])
            train_briefly(draft, target, prompts, answers)
            trained[family] = draft
        return trained[family]

    return _overfit


@pytest.fixture(scope="session")
def export() -> Callable[..., Path]:
    """Write a draft as the folder that engines load."""

    def _export(folder: Path, draft: Eagle3Draft, *, with_embeddings: bool = False, **changes: object) -> Path:
        folder.mkdir(parents=True)
        config = draft.config.to_serving_dict(aux_layer_outputs=LAYERS, dtype="float32") | changes
        (folder / "config.json").write_text(json.dumps(config))
        weights = {n: t for n, t in draft.state_dict().items() if with_embeddings or n != "embed_tokens.weight"}
        save_file(serving_tensors(weights, "float32"), folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return _export


def random_draft(target: DecodingTarget, folder: TargetFolder, answers: Sequence[Sequence[int]], **switches: bool):
    """An untrained draft over 200 of the 300 ids: those of most answers, then the lowest."""
    said = [token for answer in answers[:-1] for token in answer]
    ids = sorted(list(dict.fromkeys([*said, *range(300)]))[:DRAFT_VOCAB])
    config = Eagle3Config.from_target(folder.config_json, num_aux=3, draft_vocab_size=DRAFT_VOCAB, **switches)
    draft = Eagle3Draft(config, draft_vocab_ids=torch.tensor(ids))
    draft.initialize(5)
    draft.load_target_embeddings(target.embeddings.weight)
    draft.freeze_embeddings()
    return draft


def train_briefly(
    draft: Eagle3Draft, target: DecodingTarget, prompts: Sequence[Tensor], answers: Sequence[Sequence[int]]
) -> None:
    """Cross-entropy of TTT steps 0 to 2 on the target's own answers."""
    texts = [torch.cat((prompt, torch.tensor(answer))) for prompt, answer in zip(prompts, answers, strict=True)]
    ids, layout = torch.cat(texts), PackedLayout.from_lengths([len(text) for text in texts])
    aux = torch.cat([torch.cat(target.capture([text.numpy()])[0].aux, dim=-1) for text in texts]).clone()
    to_draft = torch.full((draft.config.vocab_size,), -100)
    to_draft[draft.draft_vocab_ids] = torch.arange(DRAFT_VOCAB)
    optimizer = torch.optim.Adam([p for p in draft.parameters() if p.requires_grad], lr=3e-3)
    fed = [shift_left(ids, layout.doc_remaining, k) for k in range(1, 5)]
    for _ in range(30):
        hidden, state = draft.first_step(draft.project_hidden_states(aux), fed[0], layout.offsets, layout)
        loss = torch.zeros(())
        for k in range(3):
            hidden = draft.next_step(hidden, fed[k], state) if k else hidden
            labels = torch.where(layout.doc_remaining > k + 1, to_draft[fed[k + 1]], -100)
            loss = loss + functional.cross_entropy(draft.compute_logits(hidden), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    draft.requires_grad_(False)
