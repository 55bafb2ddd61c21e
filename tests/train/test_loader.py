"""The loader: what it reads, that reading ahead changes nothing, and that faults stop training with a name."""

import threading

import numpy as np
import pytest
import torch

from eyas.cache_format.errors import CorruptStoreError
from eyas.cache_format.reader import StoreReader
from eyas.train.config import TrainConfig
from eyas.train.loader import PackReader, Position, to_torch
from eyas.train.run import Run
from eyas.train.testing import make_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("loader") / "store", quarantined=(2,))


def open_run(store, **settings):
    settings = {"tokens_per_micro_batch": 48, "micro_batches": 2, "ttt_steps": 3, "epochs": 2, **settings}
    return Run.open(TrainConfig(store=store, out=store.parent / "run", **settings))


def drain(run, **where):
    with run.loader(run.train_batches(**{"epoch": 0, "step": 0, "done_steps": 0, **where})) as loader:
        for micro in loader:
            fields = {name: part.clone() for name, part in micro.fields.items()}
            yield micro, None if micro.batch is None else micro.batch.aux_hidden_states.clone(), fields


def test_a_packed_batch_holds_the_stored_rows_of_its_documents(store):
    run = open_run(store, supervision="topk")
    reader = StoreReader(store)
    for micro, aux, fields in drain(run):
        rows = micro.rows.tolist()
        assert torch.equal(
            aux,
            torch.from_numpy(
                np.concatenate([reader.read(r, ["aux_hidden_states"])["aux_hidden_states"] for r in rows])
            ),
        )
        logz = np.concatenate([reader.read(r, ["target_logz"])["target_logz"] for r in rows])
        assert torch.equal(fields["target_logz"], torch.from_numpy(logz))
        ids = [reader.input_ids(r) for r in rows]
        # Slot t carries the next token; the last slot of a document has none.
        expected = np.concatenate([np.append(document[1:], 0) for document in ids])
        assert micro.batch.input_ids.tolist() == expected.tolist()


def test_last_hidden_states_are_cut_to_the_kept_rows(store):
    run = open_run(store, supervision="hidden")
    reader = StoreReader(store)
    micro, _, fields = next(drain(run))
    expected = [
        reader.read(r, ["last_hidden_state"])["last_hidden_state"][reader.kept_positions(r)] for r in micro.rows
    ]
    assert torch.equal(fields["last_hidden_state"], torch.from_numpy(np.concatenate(expected)))


def test_an_epoch_reads_each_available_training_row_once(store):
    run = open_run(store, epochs=1)
    seen = [row for micro, _, _ in drain(run) for row in micro.rows.tolist()]
    plan = run.reader.plan
    assert sorted(seen) == np.flatnonzero(~plan.heldout & run.reader.available).tolist()
    assert 2 not in seen


@pytest.mark.parametrize("prefetch", [1, 5])
def test_reading_ahead_changes_nothing(store, prefetch):
    straight = [(micro.position, micro.rows.tolist(), aux) for micro, aux, _ in drain(open_run(store, prefetch=2))]
    other = [(micro.position, micro.rows.tolist(), aux) for micro, aux, _ in drain(open_run(store, prefetch=prefetch))]
    assert [item[:2] for item in straight] == [item[:2] for item in other]
    assert all(torch.equal(a[2], b[2]) for a, b in zip(straight, other, strict=True))


@pytest.mark.parametrize(("epoch", "step"), [(0, 2), (1, 0), (1, 1)])
def test_what_follows_a_position_is_what_was_not_trained_on_yet(store, epoch, step):
    everything = [(micro.position, micro.rows.tolist()) for micro, _, _ in drain(open_run(store))]
    rest = [(micro.position, micro.rows.tolist()) for micro, _, _ in drain(open_run(store), epoch=epoch, step=step)]
    assert rest == [item for item in everything if (item[0].epoch, item[0].step) >= (epoch, step)]
    assert rest


def test_counts_cover_the_whole_global_batch(store):
    run = open_run(store)
    by_step: dict[Position, list] = {}
    for micro, _, _ in drain(run):
        by_step.setdefault(micro.position, []).append(micro)
    for micros in by_step.values():
        assert micros[-1].is_last
        assert not any(micro.is_last for micro in micros[:-1])
        total = run.count([micro.batch for micro in micros])
        assert all(torch.equal(micro.counts, total) for micro in micros)


def test_max_steps_ends_the_batches(store):
    run = open_run(store, max_steps=3)
    positions = {(micro.position.epoch, micro.position.step) for micro, _, _ in drain(run)}
    assert len(positions) == 3
    assert not list(drain(run, epoch=0, step=3, done_steps=3))


def test_a_flipped_bit_stops_training_with_the_sample_and_field(tmp_path):
    store = make_store(tmp_path / "store", container="arrow")
    victim = max(
        store.glob("shards/000000/*/aux_hidden_states*/**/*"), key=lambda p: p.stat().st_size if p.is_file() else 0
    )
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    with pytest.raises(CorruptStoreError, match=r"sample .*aux_hidden_states"):
        list(drain(open_run(store)))


def test_leaving_early_stops_the_thread(store):
    before = threading.active_count()
    run = open_run(store)
    with run.loader(run.train_batches(epoch=0, step=0, done_steps=0)) as loader:
        next(iter(loader))
    assert threading.active_count() == before


def test_bf16_keeps_its_bits():
    import ml_dtypes

    patterns = np.array([0x7FC1, 0x8000, 0x0001, 0x3F80], np.uint16)
    tensor = to_torch(patterns.view(ml_dtypes.bfloat16))
    assert tensor.dtype == torch.bfloat16
    assert tensor.view(torch.uint16).numpy().tolist() == patterns.tolist()


def test_a_document_without_a_supervised_slot_counts_nothing(tmp_path):
    store = make_store(tmp_path / "store", lengths=[2, 3, 1, 9, 9], heldout=1)
    run = open_run(store)
    reader = PackReader(run.reader, vocab=run.vocab, fields=(), mask="serving")
    assert run.count([reader.header(np.array([2]))]).tolist() == [0, 0, 0]
