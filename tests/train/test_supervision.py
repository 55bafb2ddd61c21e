"""The three encodings teach the same thing where they should, and are refused where they cannot."""

import numpy as np
import pytest
import torch

from eyas.cache_format.errors import ConfigError
from eyas.cache_format.reader import StoreReader
from eyas.train.config import TrainConfig
from eyas.train.errors import SupervisionError
from eyas.train.run import Run
from eyas.train.stepping import forward
from eyas.train.supervision import choose_encoding, supervision_builder, target_head
from eyas.train.testing import make_store

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("supervision") / "store", topk=40)


def open_run(store, **settings):
    return Run.open(TrainConfig(store=store, out=store.parent / "run", ttt_steps=3, **settings))


def losses_of(run):
    with run.loader(run.train_batches(epoch=0, step=0, done_steps=0)) as loader:
        outputs = [forward(run, micro) for micro in loader]
    return [float(output.loss.detach()) for output in outputs], outputs


def gradients_of(run):
    _, outputs = losses_of(run)
    sum(output.loss for output in outputs).backward()
    return torch.cat([p.grad.flatten() for p in run.draft.parameters() if p.grad is not None])


@pytest.mark.parametrize("encoding", ["probs", "topk"])
@pytest.mark.parametrize("draft_vocab_size", [24, 40], ids=["reduced", "full"])
def test_complete_encodings_give_the_loss_and_gradient_of_hidden(tmp_path, encoding, draft_vocab_size):
    # topk with K = V stores every probability; probs are stored in fp32 here.
    store = make_store(tmp_path / "store", topk=40, draft_vocab_size=draft_vocab_size)
    hidden, other = open_run(store, supervision="hidden"), open_run(store, supervision=encoding)
    # fp32: the stored numbers are another rounding of the same softmax.
    assert losses_of(other)[0] == pytest.approx(losses_of(hidden)[0], rel=1e-5)
    torch.testing.assert_close(gradients_of(other), gradients_of(hidden), rtol=1e-4, atol=1e-6)


def test_topk_keeps_the_tail_so_that_its_loss_is_close_to_dense(tmp_path):
    store = make_store(tmp_path / "store", topk=8)
    dense, topk = (losses_of(open_run(store, supervision=s))[0] for s in ("hidden", "topk"))
    # One class for the tail can only lose information: the loss is a lower bound.
    assert all(t < d for t, d in zip(topk, dense, strict=True))


def test_probs_rounded_to_fp16_are_renormalised(tmp_path):
    store = make_store(tmp_path / "store", probs_dtype="float16")
    reader = StoreReader(store)
    stored = torch.from_numpy(reader.read(0, ["target_probs"])["target_probs"])
    built = supervision_builder(reader, "probs", reader.vocab, CPU)({"target_probs": stored})
    assert built.probs.dtype == torch.float32
    torch.testing.assert_close(built.probs.sum(-1), torch.ones(len(stored)), rtol=1e-6, atol=0)


def test_the_stored_head_gives_the_targets_own_argmax_and_softcap(tmp_path):
    store = make_store(tmp_path / "store", draft_vocab_size=40, softcap=5.0)
    reader = StoreReader(store)
    head = target_head(reader, reader.vocab, CPU)
    fields = reader.read(0, ["last_hidden_state", "target_argmax", "target_logz"])
    logits = head.logits(torch.from_numpy(fields["last_hidden_state"][reader.kept_positions(0)]))
    assert logits.abs().max() <= 5
    assert logits.argmax(-1).tolist() == fields["target_argmax"].tolist()
    # Another order of additions than numpy's.
    torch.testing.assert_close(logits.logsumexp(-1), torch.from_numpy(fields["target_logz"]), rtol=1e-5, atol=1e-5)


def test_the_best_stored_encoding_is_the_default_and_the_run_says_which(tmp_path):
    for held, expected in ((("hidden", "topk"), "hidden"), (("probs", "topk"), "topk"), (("probs",), "probs")):
        store = make_store(tmp_path / "-".join(held), supervision=held)
        assert choose_encoding(StoreReader(store).identity, None) == expected


def test_an_encoding_that_is_not_stored_is_refused_with_what_is(tmp_path):
    store = make_store(tmp_path / "store", supervision=("topk",))
    with pytest.raises(SupervisionError, match=r"--supervision hidden is not in this store, which holds topk"):
        open_run(store, supervision="hidden")


def test_another_draft_vocabulary_needs_hidden(store):
    assert len(open_run(store, supervision="hidden", draft_vocab_size=10).vocab) == 10
    assert open_run(store, supervision="hidden", draft_vocab_size=40).vocab.is_identity
    ends = StoreReader(store).target.generation_config["eos_token_id"]
    kept = set(open_run(store, supervision="hidden", draft_vocab_size=2).vocab.ids.tolist())
    assert kept >= ({ends} if isinstance(ends, int) else set(ends)), "a draft that cannot end an answer"
    with pytest.raises(SupervisionError, match=r"--draft-vocab-size 10 differs from the store's 24.*hidden"):
        open_run(store, supervision="topk", draft_vocab_size=10)
    with pytest.raises(ConfigError, match="41"):
        open_run(store, supervision="hidden", draft_vocab_size=41)


def test_targets_outside_a_small_draft_vocabulary_leave_the_loss_finite(store):
    run = open_run(store, supervision="hidden", draft_vocab_size=3)
    losses, outputs = losses_of(run)
    assert np.isfinite(losses).all()
    supervised = sum(int(output.counters.supervised[0]) for output in outputs)
    valid = sum(int(output.counters.valid[0]) for output in outputs)
    assert 0 < supervised < valid
