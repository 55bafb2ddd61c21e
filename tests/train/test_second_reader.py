"""A second reader of the export: written from the engines' documented block, sharing no code with the trainer.

It reads config.json and model.safetensors alone and runs the draft as an engine does: one slot a target token, then a
chain on the draft's own states with a growing key and value cache. Its logits must equal the trainer's.
"""

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open

STEPS = 3


class SecondReader:
    """EAGLE-3 and 3.1 as vLLM documents them (llama_eagle3.py): numpy, float64, one sequence, a list as cache."""

    def __init__(self, folder, embed_tokens):
        self.config = json.loads((folder / "config.json").read_text())
        with safe_open(folder / "model.safetensors", framework="np") as file:
            self.weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        self.embed_tokens = self.weights.get("embed_tokens.weight", embed_tokens)
        self.keys, self.values = [], []

    def norm(self, name, x):
        return x / np.sqrt((x**2).mean() + self.config["rms_norm_eps"]) * self.weights[name].astype(np.float64)

    def linear(self, name, x):
        return self.weights[f"{name}.weight"].astype(np.float64) @ x

    def fuse(self, aux):
        """Captured layers of one position -> the draft's input state."""
        if self.config["fc_norm"]:
            parts = np.split(aux, self.config["num_aux_hidden_states"])
            aux = np.concatenate([self.norm(f"fc_norm.{i}.weight", part) for i, part in enumerate(parts)])
        return self.linear("fc", aux)

    def rotate(self, head, position):
        half = len(head) // 2
        theta = self.config["rope_parameters"]["rope_theta"]
        angle = position / theta ** (np.arange(half) * 2 / len(head))
        a, b = head[:half], head[half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])

    def heads(self, name, x, count, position=None):
        flat = self.linear(f"midlayer.self_attn.{name}_proj", x).reshape(count, self.config["head_dim"])
        return flat if position is None else np.stack([self.rotate(head, position) for head in flat])

    def attend(self, x, position):
        queries, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.keys.append(self.heads("k", x, groups, position))
        self.values.append(self.heads("v", x, groups))
        outputs = []
        for index, query in enumerate(self.heads("q", x, queries, position)):
            group = index // (queries // groups)
            scores = np.array([key[group] @ query for key in self.keys]) / np.sqrt(self.config["head_dim"])
            weights = np.exp(scores - scores.max())
            outputs.append((weights / weights.sum()) @ np.array([value[group] for value in self.values]))
        return self.linear("midlayer.self_attn.o_proj", np.concatenate(outputs))

    def step(self, state, token, position):
        """Append one slot and return (recurrent state, logits over the draft vocabulary)."""
        embedding = self.embed_tokens[token].astype(np.float64)
        x = np.concatenate(
            [self.norm("midlayer.input_layernorm.weight", embedding), self.norm("midlayer.hidden_norm.weight", state)]
        )
        hidden = state + self.attend(x, position)
        x = self.norm("midlayer.post_attention_layernorm.weight", hidden)
        gate = self.linear("midlayer.mlp.gate_proj", x)
        gated = gate / (1 + np.exp(-gate)) * self.linear("midlayer.mlp.up_proj", x)
        hidden = hidden + self.linear("midlayer.mlp.down_proj", gated)
        normed = self.norm("norm.weight", hidden)
        return (normed if self.config["norm_output"] else hidden), self.linear("lm_head", normed)

    def target_ids(self, draft_ids):
        offsets = self.weights.get("d2t")
        return draft_ids if offsets is None else draft_ids + offsets[draft_ids]


@pytest.mark.parametrize("family", ["eagle3", "eagle3.1"])
@pytest.mark.parametrize("draft_vocab_size", [24, 40], ids=["reduced", "full"])
def test_the_second_reader_computes_the_trainers_logits(tmp_path, family, draft_vocab_size):
    from eyas.train.config import TrainConfig
    from eyas.train.run import Run
    from eyas.train.testing import make_store
    from eyas.train.train_from_cache import train_from_cache

    store = make_store(tmp_path / "store", draft_vocab_size=draft_vocab_size)
    settings = {"family": family, "ttt_steps": STEPS, "lr": 1e-2, "epochs": 6, "export_dtype": "float32"}
    config = TrainConfig(store=store, out=tmp_path / "run", **settings)
    train_from_cache(config)

    run = Run.open(config)
    weights = {name: torch.from_numpy(array) for name, array in numpy_tensors(config.out / "export").items()}
    run.draft.load_state_dict(weights, strict=False)
    row = 0
    sample = run.reader.read(row, ["input_ids", "aux_hidden_states"])
    ids, aux = sample["input_ids"].astype(np.int64), sample["aux_hidden_states"]
    reader = SecondReader(config.out / "export", np.array(run.reader.target.embed_tokens()))
    for anchor in range(2, len(ids) - STEPS):
        theirs = engine_chain(reader, ids, aux, anchor)
        ours = trainer_chain(run.draft, ids, aux, anchor)
        # float64 there, float32 here.
        np.testing.assert_allclose(np.stack(theirs), ours, rtol=1e-4, atol=1e-4)
    draft_ids = np.arange(draft_vocab_size)
    assert reader.target_ids(draft_ids).tolist() == run.vocab.ids.tolist()


def engine_chain(reader, ids, aux, anchor):
    """Slots 0..anchor from target features, then the chain; slot t reads token t + 1, at position t."""
    reader.keys, reader.values = [], []
    for slot in range(anchor + 1):
        state, logits = reader.step(reader.fuse(aux[slot].astype(np.float64)), ids[slot + 1], slot)
    chain = [logits]
    for step in range(1, STEPS):
        state, logits = reader.step(state, ids[anchor + 1 + step], anchor + step)
        chain.append(logits)
    return chain


def trainer_chain(draft, ids, aux, anchor):
    """The same slots through the trainer's TTT unroll, teacher-forced with the same tokens."""
    from eyas.train.batch import PackedLayout

    layout = PackedLayout.from_lengths([len(ids)])
    shifted = torch.from_numpy(np.append(ids[1:], 0))
    rows = torch.tensor([anchor])
    with torch.no_grad():
        projected = draft.project_hidden_states(torch.from_numpy(aux))
        hidden, state = draft.first_step(projected, shifted, layout.offsets, layout, rows)
        logits = [draft.compute_logits(hidden)[0]]
        for step in range(1, STEPS):
            hidden = draft.next_step(hidden, shifted[rows + step], state)
            logits.append(draft.compute_logits(hidden)[0])
    return torch.stack(logits).numpy()


def numpy_tensors(folder):
    with safe_open(folder / "model.safetensors", framework="np") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
