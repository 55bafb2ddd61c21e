"""The flags of `eyas train-from-cache` and `eyas export`. Imports no torch, so that `--help` answers at once.

A default lives here and nowhere else. Range checks raise ConfigError with the flag's name.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from eyas.cache_format.errors import ConfigError
from eyas.cache_format.schema import Supervision

Family = Literal["eagle3", "eagle3.1"]
MaskPreset = Literal["serving", "nemo", "eagle"]
ExportDtype = Literal["bfloat16", "float16", "float32"]

# What may differ between a run and its resumption: where and how it runs and reports, never what it computes.
FREE_ON_RESUME = frozenset(
    {
        "out",
        "device",
        "prefetch",
        "checkpoint_every",
        "keep_checkpoints",
        "log_every",
        "export_dtype",
        "store",
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Train a draft from a store, without the target. Run again with the same --out to resume."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("store",)

    store: Path
    """The store that `eyas precompute` wrote."""

    out: Path
    """Folder of the run: config.toml, metrics.jsonl, tensorboard/, checkpoints/, export/. An existing run resumes."""

    family: Family = "eagle3"
    """Draft to train. eagle3.1 adds a norm per captured layer and feeds back the normed state."""

    supervision: Supervision | None = None
    """What the draft learns from. Default: the most exact that the store holds (hidden, then topk, then probs)."""

    mask: MaskPreset = "serving"
    """Supervised slots. serving: exactly the slots that serving drafts (x[t+1] and x[t+2] in one assistant span);
    nemo: x[t+1] is an assistant token; eagle: x[t] is."""

    ttt_steps: int = 7
    """Training-time-test steps: how many tokens ahead the draft learns to run on its own states."""

    draft_vocab_size: int | None = None
    """Draft vocabulary. Default: the store's. Another size needs `hidden` supervision."""

    lm_head_init: Literal["target", "random"] = "target"
    """Start the draft's lm_head from the target's rows, scaled to initializer_range, or at random."""

    freeze_embeddings: bool = True
    """Keep the target's input embeddings. Trained embeddings are served by vLLM alone: SGLang overwrites them and
    TensorRT-LLM ignores them."""

    tokens_per_micro_batch: int = 2048
    """Token budget of one packed forward. A longer document gets a micro-batch of its own, uncut."""

    micro_batches: int = 1
    """Micro-batches in one optimizer step."""

    epochs: int = 1
    """Passes over the training split."""

    max_steps: int | None = None
    """Stop after this many optimizer steps, if `--epochs` hold as many (the schedule ends there too). Default: all
    epochs."""

    lr: float = 2e-3
    """Peak learning rate."""

    warmup: float = 0.05
    """Share of the steps over which the learning rate rises linearly."""

    lr_floor: float = 0.1
    """The cosine ends at this share of the peak."""

    beta1: float = 0.9
    """AdamW: decay of the first moment."""

    beta2: float = 0.99
    """AdamW: decay of the second moment."""

    weight_decay: float = 0.0
    """AdamW: decoupled decay of matrices; norms never decay."""

    grad_clip: float = 1.0
    """Largest global gradient norm."""

    seed: int = 0
    """Of the draft's initial weights and of the order of the samples."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs the forward in bf16 autocast. Weights, moments, softmax and loss are fp32 either way."""

    attention: Literal["auto", "eager", "fused"] = "auto"
    """Kernel of the draft's attention. auto: fused where the device has it. eager is the oracle, with more memory."""

    device: str = "auto"
    """auto (cuda when there is one), cpu, cuda, cuda:1, mps."""

    prefetch: int = 2
    """Micro-batches that are read ahead of the one in training. Bounds the loader's memory, changes no number."""

    checkpoint_every: int = 0
    """Optimizer steps between checkpoints. 0: at each evaluation and at the end only."""

    keep_checkpoints: int = 2
    """Newest checkpoints to keep, besides the best."""

    evaluate_every: int = 0
    """Optimizer steps between evaluations on the held-out split. 0: at the end of each epoch only."""

    log_every: int = 10
    """Optimizer steps between progress lines. metrics.jsonl gets every step."""

    allow_incomplete: bool = False
    """Train from a store whose capture is not finished: absent rows are left out of the order."""

    export_dtype: ExportDtype = "bfloat16"
    """Dtype of the weights in OUT/export."""

    def __post_init__(self) -> None:
        for name in ("lr", "warmup", "lr_floor", "beta1", "beta2", "weight_decay", "grad_clip"):
            _require(math.isfinite(getattr(self, name)), name, getattr(self, name), "a finite number")
        _require(self.seed < 2**63, "seed", self.seed, "less than 2**63")
        for name in ("ttt_steps", "tokens_per_micro_batch", "micro_batches", "epochs", "prefetch", "log_every"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("checkpoint_every", "evaluate_every", "weight_decay", "seed"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("max_steps", "draft_vocab_size"):
            _require(getattr(self, name) is None or getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("lr", "grad_clip"):
            _require(getattr(self, name) > 0, name, getattr(self, name), "more than 0")
        for name in ("warmup", "lr_floor"):
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "between 0 and 1")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, name, getattr(self, name), "in [0, 1)")
        _require(self.keep_checkpoints >= 1, "keep_checkpoints", self.keep_checkpoints, "1 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportConfig:
    """Write the directory that TensorRT-LLM, vLLM and SGLang load, from a checkpoint of `eyas train-from-cache`."""

    POSITIONAL: ClassVar[tuple[str, ...]] = ("checkpoint",)

    checkpoint: Path
    """A checkpoint folder, such as RUN/checkpoints/best."""

    out: Path
    """Folder to write. An earlier export is replaced; any other folder with files in it is refused."""

    dtype: ExportDtype = "bfloat16"
    """Dtype of the weights."""

    max_draft_len: int | None = None
    """Draft tokens a step in the TensorRT-LLM options. Default: the ttt_steps it was trained with."""

    def __post_init__(self) -> None:
        value = self.max_draft_len
        _require(value is None or value >= 1, "max_draft_len", value, "1 or more")


def _require(holds: bool, name: str, value: object, expected: str) -> None:
    if not holds:
        raise ConfigError(f"--{name.replace('_', '-')} is {value}; expected {expected}")
