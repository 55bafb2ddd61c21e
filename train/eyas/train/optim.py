"""AdamW on fp32 master weights, linear warm-up and cosine, and what to do with a step that is not finite.

The learning rate is a pure function of the optimizer step, so the schedule has no state of its own to save.
"""

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from eyas.train.config import TrainConfig


def build_optimizer(draft: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters; one-dimensional ones (norms) never decay."""
    trainable = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    # foreach groups tensors by dtype and device and is the same arithmetic on each; fused differs by device.
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), foreach=True)


def learning_rate(step: int, *, total_steps: int, config: TrainConfig) -> float:
    """Return the rate of optimizer step `step` (0-based): linear to the peak, then cosine to lr_floor * peak.

    Source: NVIDIA-NeMo/Automodel's EAGLE recipes (warm-up of (s + 1) / w, cosine to a floor, clamped after the end).
    """
    warmup = max(1, round(config.warmup * total_steps))
    if step < warmup:
        return config.lr * (step + 1) / warmup
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.lr_floor + (1 - config.lr_floor) * cosine)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Give every group the rate of this step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clipped_gradient_norm(optimizer: torch.optim.Optimizer, limit: float) -> Tensor:
    """Scale all gradients to a global norm of at most `limit` and return the norm before, a scalar on the device."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return nn.utils.clip_grad_norm_(parameters, limit)


def quarantine_step(path: Path, *, epoch: int, step: int, sample_ids: Sequence[str], loss: float, norm: float) -> None:
    """Append the samples of a skipped step to a JSONL file, one line a step.

    Nothing is hidden: the step is counted, its samples are named, the weights stay as they were.
    """
    line = {"epoch": epoch, "step": step, "loss": str(loss), "grad_norm": str(norm), "sample_ids": list(sample_ids)}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())
