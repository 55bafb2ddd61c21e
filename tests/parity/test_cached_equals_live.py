"""Training from the store equals training with the target resident, bit for bit: the cache changes nothing.

The live side below opens no tensor of the store. It holds the target, runs the batches that capture ran, and trains
with a loop of its own, in the order that the trainer follows. fp32 on the CPU, 20 steps, losses and final weights.
"""

from functools import lru_cache

import numpy as np
import pytest
import torch

from eyas.cache_format.layout import StorePaths
from eyas.cache_format.reader import StoreReader
from eyas.cache_format.samples import SampleTable
from eyas.cache_format.schema import kept_rows
from eyas.pipeline.capture import batches
from eyas.pipeline.engine import EngineConfig, load_engine
from eyas.pipeline.testing import make_tiny_store
from eyas.train.batch import make_batch
from eyas.train.checkpoint import find_latest, load_checkpoint
from eyas.train.config import TrainConfig
from eyas.train.drafts.config import Eagle3Config
from eyas.train.drafts.eagle3 import Eagle3Draft
from eyas.train.objectives.eagle3 import Eagle3StepConfig, count_supervised, eagle3_step
from eyas.train.objectives.supervision import HiddenSupervision, TargetHead
from eyas.train.order import epoch_order
from eyas.train.run import load_scaled_head
from eyas.train.train_from_cache import train_from_cache
from eyas.train.train_log import read_metrics

STEPS, TTT_STEPS, TOKENS, MICRO_BATCHES, LR, SEED = 20, 3, 128, 2, 1e-3, 5


class LiveTarget:
    """The resident target; every row's states come from a forward of the batch that capture ran it in."""

    def __init__(self, reader, folder):
        identity = reader.identity
        self.engine = load_engine(
            EngineConfig.of(identity, folder=str(folder), device="cpu", attention="sdpa", threads=1)
        )
        self.vocab, self.plan = reader.vocab, reader.plan
        self.frozen = {name: tensor.float() for name, tensor in self.engine.frozen_tensors().items()}
        self.lm_head = self.frozen.get("lm_head.weight", self.frozen["embed_tokens.weight"])
        self.tables = [SampleTable(StorePaths(reader.root).samples(s), s) for s in range(self.plan.num_shards)]
        self.budgets = [int(reader.receipts[s].provenance["batch_tokens"]) for s in range(self.plan.num_shards)]
        self.states = lru_cache(maxsize=4)(self._batch_states)
        self.num_forwards = 0

    def row(self, index):
        """(input ids, span ids, loss mask, features, last hidden states) of a plan row, from a live forward."""
        shard, row = int(self.plan.shard[index]), int(self.plan.row[index])
        table = self.tables[shard]
        lengths = [len(table.input_ids(r)) for r in range(len(table))]
        rows = next(tuple(b) for b in batches(lengths, self.budgets[shard]) if row in b)
        captured = self.states(shard, rows)[rows.index(row)]
        return (
            table.input_ids(row),
            table.span_ids(row),
            table.loss_mask(row),
            torch.cat(captured.aux, -1),
            captured.last,
        )

    def _batch_states(self, shard, rows):
        self.num_forwards += 1
        return self.engine.capture([self.tables[shard].input_ids(row) for row in rows])

    def micro_batch(self, rows):
        """(packed batch, supervision) with everything computed by the target just now."""
        ids, spans, masks, aux, last = zip(*(self.row(int(row)) for row in rows), strict=True)
        kept = np.concatenate([kept_rows(mask) for mask in masks])
        hidden = torch.cat(last)[torch.from_numpy(kept)]
        argmax = (hidden.float() @ self.lm_head.T).argmax(-1).numpy()
        batch = make_batch(
            document_lengths=[len(document) for document in ids],
            input_ids=torch.from_numpy(np.concatenate(ids).astype(np.int64)),
            span_ids=torch.from_numpy(np.concatenate(spans).astype(np.int64)),
            aux_hidden_states=torch.cat(aux),
            kept=torch.from_numpy(kept),
            target_draft_ids=torch.from_numpy(self.vocab.to_draft(argmax)),
        )
        head = TargetHead(weight=self.lm_head[torch.from_numpy(self.vocab.ids)])
        return batch, HiddenSupervision(last_hidden_state=hidden, head=head)


def train_live(reader, folder):
    """(losses, weights) of 20 steps with the target resident."""
    target = LiveTarget(reader, folder)
    shape = Eagle3Config.from_target(
        target.engine.model.config.to_dict(), num_aux=3, draft_vocab_size=len(reader.vocab)
    )
    draft = Eagle3Draft(shape, draft_vocab_ids=torch.from_numpy(reader.vocab.ids))
    draft.initialize(SEED)
    draft.load_target_embeddings(target.frozen["embed_tokens.weight"])
    load_scaled_head(draft, target.lm_head)
    draft.freeze_embeddings()
    parameters = [parameter for parameter in draft.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.99), weight_decay=0.0)
    losses = []
    for step, packs in enumerate(global_batches(reader)):
        micros = [target.micro_batch(rows) for rows in packs]
        counts = sum(count_supervised(batch, TTT_STEPS) for batch, _ in micros)
        total = torch.zeros((), dtype=torch.float64)
        for batch, supervision in micros:
            loss = eagle3_step(draft, batch, supervision, Eagle3StepConfig(ttt_steps=TTT_STEPS), counts).loss
            loss.backward()
            total += loss.detach().double()
        # The two groups of the trainer differ in decay alone, which is 0: the norm is over all, in its order.
        ordered = [p for p in parameters if p.ndim >= 2] + [p for p in parameters if p.ndim < 2]
        torch.nn.utils.clip_grad_norm_(ordered, 1.0)
        optimizer.param_groups[0]["lr"] = LR * (step + 1) / STEPS
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))
    assert target.num_forwards >= STEPS
    return losses, draft.state_dict()


def global_batches(reader):
    """The first 20 global batches, epoch after epoch."""
    batches_ = []
    for epoch in range(STEPS):
        order = epoch_order(
            plan_digests=(reader.plan.digest,),
            lengths=reader.plan.length,
            heldout=reader.plan.heldout,
            available=reader.available,
            seed=SEED,
            epoch=epoch,
            tokens=TOKENS,
            micro_batches=MICRO_BATCHES,
        )
        batches_ += [order.global_batch(step) for step in range(order.num_steps)]
    return batches_[:STEPS]


@pytest.mark.parametrize("container", ["zarr", "arrow"])
def test_training_from_the_store_equals_training_with_the_live_target(tmp_path, container):
    store = make_tiny_store(tmp_path, n=24, container=container)
    config = TrainConfig(
        store=store,
        out=tmp_path / "run",
        supervision="hidden",
        ttt_steps=TTT_STEPS,
        tokens_per_micro_batch=TOKENS,
        micro_batches=MICRO_BATCHES,
        epochs=STEPS,
        max_steps=STEPS,
        lr=LR,
        warmup=1.0,  # the rate rises over all 20 steps, so that the loop above can state it in one line
        seed=SEED,
        lm_head_init="target",
    )
    train_from_cache(config)
    cached = [record["loss"] for record in read_metrics(config.out, "train")]
    losses, weights = train_live(StoreReader(store), tmp_path / "target")
    assert cached == losses
    assert len(set(cached)) == STEPS
    trained = load_checkpoint(find_latest(config.out)).weights
    assert trained.keys() == weights.keys() - {"embed_tokens.weight"}
    assert all(torch.equal(trained[name], weights[name]) for name in trained)
