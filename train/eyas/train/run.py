"""Everything a run is made of, built once from its configuration and its store, and never changed afterwards."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas.cache_format.errors import ConfigError
from eyas.cache_format.reader import StoreReader
from eyas.cache_format.schema import Supervision as Encoding
from eyas.cache_format.vocab import VocabMap
from eyas.train.batch import PackedBatch
from eyas.train.config import FREE_ON_RESUME, TrainConfig
from eyas.train.drafts import DRAFTS
from eyas.train.drafts.config import Eagle3Config
from eyas.train.drafts.eagle3 import Eagle3Draft
from eyas.train.errors import TrainError
from eyas.train.loader import Buffers, GlobalBatches, Loader, PackReader, Position, to_torch
from eyas.train.objectives.eagle3 import Eagle3StepConfig, count_supervised
from eyas.train.order import EpochOrder, epoch_order, sequential_packs
from eyas.train.supervision import (
    FIELDS,
    BuildSupervision,
    choose_encoding,
    choose_vocabulary,
    supervision_builder,
)


@dataclass(frozen=True)
class Run:
    """A configured run over an open store."""

    config: TrainConfig
    reader: StoreReader
    encoding: Encoding
    vocab: VocabMap
    device: torch.device
    draft: Eagle3Draft
    build_supervision: BuildSupervision

    @classmethod
    def open(cls, config: TrainConfig) -> "Run":
        """Open the store and build the draft: embeddings from the frozen target, the rest seeded.

        Raises:
            StoreError: no store, an incomplete one, or one that this version does not read.
            TrainError: the store cannot serve this configuration.
        """
        reader = StoreReader(config.store, allow_incomplete=config.allow_incomplete)
        reader.verify_frozen_parts()
        encoding = choose_encoding(reader.identity, config.supervision)
        vocab = choose_vocabulary(reader, encoding, config.draft_vocab_size)
        device = find_device(config.device)
        draft = build_draft(reader, vocab, config).to(device)
        run = cls(config, reader, encoding, vocab, device, draft, supervision_builder(reader, encoding, vocab, device))
        if not run.order(0).num_packs:
            raise TrainError(f"{config.store} has no training rows: every row is held out; nothing can be learnt")
        return run

    @cached_property
    def step_config(self) -> Eagle3StepConfig:
        """How the objective unrolls."""
        return Eagle3StepConfig(ttt_steps=self.config.ttt_steps)

    @cached_property
    def schedule_steps(self) -> int:
        """Optimizer steps that the learning rate is laid over.

        Epochs pack into nearly, not always exactly, the same number of steps; the first one stands for all.
        """
        steps = self.config.epochs * self.order(0).num_steps
        return steps if self.config.max_steps is None else min(steps, self.config.max_steps)

    @cached_property
    def _orders(self) -> dict[int, EpochOrder]:
        return {}

    def order(self, epoch: int) -> EpochOrder:
        """Return the order of one epoch (computed once; a pure function of plan, seed, budget)."""
        if epoch not in self._orders:
            plan = self.reader.plan
            self._orders[epoch] = epoch_order(
                plan_digests=(plan.digest,),
                lengths=plan.length,
                heldout=plan.heldout,
                available=self.reader.available,
                seed=self.config.seed,
                epoch=epoch,
                tokens=self.config.tokens_per_micro_batch,
                micro_batches=self.config.micro_batches,
            )
        return self._orders[epoch]

    def train_batches(self, *, epoch: int, step: int, done_steps: int) -> GlobalBatches:
        """Global batches from (epoch, step) to the end of the run, which max_steps may bring forward."""
        left = None if self.config.max_steps is None else self.config.max_steps - done_steps
        for number in range(epoch, self.config.epochs):
            order = self.order(number)
            for index in range(step if number == epoch else 0, order.num_steps):
                if left == 0:
                    return
                left = None if left is None else left - 1
                yield Position(number, index, order.num_steps), order.deal(index, rank=0, world_size=1)

    def heldout_batches(self) -> GlobalBatches:
        """Held-out packs in plan order, each a global batch of its own."""
        plan = self.reader.plan
        rows = np.flatnonzero(plan.heldout & self.reader.available)
        packs = sequential_packs(rows, plan.length, self.config.tokens_per_micro_batch)
        for index, pack in enumerate(packs):
            yield Position(0, index, len(packs)), [pack]

    def loader(self, batches: GlobalBatches) -> Loader:
        """A loader that reads what this run's supervision needs."""
        packs = PackReader(self.reader, vocab=self.vocab, fields=FIELDS[self.encoding], mask=self.config.mask)
        return Loader(
            packs,
            batches,
            count=self.count,
            make_buffers=lambda: Buffers.of_store(self.reader),
            prefetch=self.config.prefetch,
        )

    def count(self, headers: Sequence[PackedBatch]) -> Tensor:
        """n_k over the micro-batches of a global batch, int64 [ttt_steps]."""
        total = torch.zeros(self.config.ttt_steps, dtype=torch.int64)
        for header in headers:
            total += count_supervised(header, self.config.ttt_steps)
        return total

    def autocast(self) -> AbstractContextManager[None]:
        """bf16 autocast when asked for; weights, moments, softmax and loss stay fp32."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")

    @property
    def identity(self) -> dict[str, str]:
        """What the store and the derived choices must still be when the run is resumed."""
        return {
            "identity": self.reader.manifest.digest,
            "draft vocabulary": self.vocab.digest,
            "supervision": self.encoding,
        }

    @property
    def frozen_config(self) -> dict[str, Any]:
        """The configuration that a resumed run must share, as plain values."""
        return {name: value for name, value in plain(self.config).items() if name not in FREE_ON_RESUME}

    def trained_weights(self) -> dict[str, Tensor]:
        """The draft's state dict without the target's frozen embeddings."""
        weights = self.draft.state_dict()
        if self.config.freeze_embeddings:
            del weights["embed_tokens.weight"]
        return weights

    def serving_config(self) -> dict[str, Any]:
        """The draft's config.json as engines read it."""
        target = self.reader.target.config
        return self.draft.config.to_serving_dict(
            aux_layer_outputs=self.reader.identity.aux_layer_outputs,
            dtype="float32",
            target_model_type=str(target.get("model_type", "llama")),
        )

    def provenance(self) -> dict[str, Any]:
        """Where the draft comes from, for eyas.json of the export."""
        identity = self.reader.identity
        return {
            "target": {
                "name": identity.target.name,
                "revision": identity.target.revision,
                "num_layers": identity.target.num_layers,
                "dtype": identity.target.dtype,
            },
            "store": {
                "manifest": self.reader.manifest.digest,
                "plan": identity.plan_digest,
                "tokenizer": identity.tokenizer_digest,
                "template": identity.template_digest,
            },
            "aux_layer_outputs": list(identity.aux_layer_outputs),
            "supervision": self.encoding,
            "draft_vocabulary": self.vocab.digest,
            "trained_embeddings": not self.config.freeze_embeddings,
        }


def build_draft(reader: StoreReader, vocab: VocabMap, config: TrainConfig) -> Eagle3Draft:
    """Return the untrained draft on the CPU, a function of the store, the draft vocabulary and the seed."""
    network, switches = DRAFTS[config.family]
    shape = Eagle3Config.from_target(
        reader.target.config,
        num_aux=len(reader.identity.aux_layer_outputs),
        draft_vocab_size=len(vocab),
        **switches,
    )
    ids = None if vocab.is_identity else torch.from_numpy(vocab.ids)
    draft = network(shape, draft_vocab_ids=ids, attention=config.attention)
    draft.initialize(config.seed)
    draft.load_target_embeddings(_float32(reader.target.embed_tokens()))
    if config.lm_head_init == "target":
        load_scaled_head(draft, _float32(reader.target.lm_head()))
    if config.freeze_embeddings:
        draft.freeze_embeddings()
    return draft


@torch.no_grad()
def load_scaled_head(draft: Eagle3Draft, lm_head: Tensor) -> None:
    """Start lm_head from the target's rows of the draft vocabulary, scaled to the spread of any other initial matrix.

    The directions are worth having, the size is not: behind an untrained network the target's own scale gives sharp,
    wrong logits (SmolLM2, 30,000 tokens: initial loss 13 instead of 9, final held-out loss 5.35 instead of 5.10).
    """
    draft.load_target_head(lm_head)
    weight = draft.lm_head.weight
    weight.mul_(draft.config.initializer_range / weight.square().mean().sqrt())


def find_device(name: str) -> torch.device:
    """Return the named device once it has held a tensor; auto is cuda when there is one, else the CPU.

    Raises:
        ConfigError: torch knows no such device, or this machine has none.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(1, device=name).device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ConfigError(f"--device {name} cannot be used: {str(error).splitlines()[0]}") from error


def plain(config: TrainConfig) -> dict[str, Any]:
    """Return a configuration as plain values, paths as text."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(config).items()}


def _float32(array: np.ndarray) -> Tensor:
    # A copy: the store's map is read-only and its dtype is the target's.
    return to_torch(np.array(array)).to(torch.float32)
