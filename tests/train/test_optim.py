"""Schedule, parameter groups, clipping, and the list of skipped steps."""

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from eyas.train.config import TrainConfig
from eyas.train.optim import build_optimizer, clipped_gradient_norm, learning_rate, quarantine_step, set_learning_rate


def config(**settings):
    return TrainConfig(store=Path("store"), out=Path("run"), **settings)


def test_the_rate_rises_linearly_and_falls_by_a_cosine_to_the_floor():
    settings = config(lr=1.0, warmup=0.1, lr_floor=0.1)
    rates = [learning_rate(step, total_steps=100, config=settings) for step in range(101)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[55] == pytest.approx(0.55)
    assert rates[100] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in pairwise(rates[10:]))


def test_the_rate_stays_at_the_floor_behind_the_end_and_starts_above_zero():
    assert learning_rate(500, total_steps=100, config=config(lr=1.0, lr_floor=0.2)) == pytest.approx(0.2)
    assert learning_rate(0, total_steps=1, config=config(lr=1.0)) > 0


def test_norms_never_decay_and_frozen_parameters_are_left_out():
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.RMSNorm(4), nn.Embedding(5, 4))
    model[2].weight.requires_grad_(False)
    groups = build_optimizer(model, config(weight_decay=0.3)).param_groups
    assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [(1, 0.3), (1, 0.0)]
    assert groups[1]["params"][0] is model[1].weight


def test_moments_and_weights_are_fp32():
    model = nn.Linear(3, 3)
    optimizer = build_optimizer(model, config())
    model(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state[model.weight]
    assert {model.weight.dtype, state["exp_avg"].dtype, state["exp_avg_sq"].dtype} == {torch.float32}


def test_the_gradient_is_clipped_over_all_groups_together():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.RMSNorm(2))
    optimizer = build_optimizer(model, config())
    model[0].weight.grad = torch.full((2, 2), 2.0)
    model[1].weight.grad = torch.full((2,), 3.0)
    norm = clipped_gradient_norm(optimizer, 1.0)
    assert float(norm) == pytest.approx(math.sqrt(4 * 4 + 2 * 9))
    left = math.sqrt(sum(float(p.grad.square().sum()) for p in model.parameters()))
    assert left == pytest.approx(1.0, rel=1e-5)  # torch divides by norm + 1e-6


def test_setting_the_rate_reaches_every_group():
    optimizer = build_optimizer(nn.Sequential(nn.Linear(2, 2), nn.RMSNorm(2)), config())
    set_learning_rate(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]


def test_a_skipped_step_is_named_with_its_samples(tmp_path):
    path = tmp_path / "quarantine.jsonl"
    for step in (3, 9):
        quarantine_step(path, epoch=0, step=step, sample_ids=["ab", "cd"], loss=float("nan"), norm=float("inf"))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [3, 9]
    assert lines[0] == {"epoch": 0, "step": 3, "loss": "nan", "grad_norm": "inf", "sample_ids": ["ab", "cd"]}


@pytest.mark.parametrize(
    ("name", "value"),
    [("ttt_steps", 0), ("lr", 0.0), ("warmup", 1.5), ("beta2", 1.0), ("grad_clip", -1.0), ("max_steps", 0)],
)
def test_values_outside_their_range_are_refused_by_flag_name(name, value):
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is {value}"):
        config(**{name: value})
