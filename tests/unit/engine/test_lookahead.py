"""What is made ahead of the consumer is bounded, however slow the consumer is."""

from itertools import islice

import pytest

from zephon import Pipeline
from zephon.columns.lane_start import LaneStart
from zephon.engine.lane import LaneStream
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

LANES = 4


@pytest.mark.parametrize("algorithm", ["wrap", "best_fit"])
def test_a_slow_consumer_does_not_pile_up_records(tiny_tokenizer, algorithm):
    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_dict("d", {"text": [f"document {i} " * 40 for i in range(2000)]})], chunk_size=500
    )
    pipeline = (
        Pipeline(source)
        .options(
            canonical_replicas=LANES,
            prefetch_buffer_size=LANES << 18,
            prefetch_batches=2,
            io_options={"cache": {"enabled": False}},
        )
        .tokenize(tiny_tokenizer)
        .pack_flat(31, algorithm)
        .batch(LANES)
    )
    compiled = pipeline.compiled
    engine = compiled.engine({lane: (LaneStart(), 0) for lane in range(LANES)})
    rounds = engine.rounds()
    most = 0
    for _ in range(60):
        next(rounds)
        for lane in engine.lanes.values():  # the workers are done with everything whenever the next round is asked for
            for task in list(lane._documents):
                if hasattr(task, "result"):
                    task.result()
        most = max(most, *(lane.ready * compiled.record_bytes for lane in engine.lanes.values()))
    engine.close()
    # The look-ahead of a lane, and tokens (of 4 bytes, about one per byte of text) of the blocks under way besides.
    assert most <= (1 << 18) + 4 * 2 * (1 << 18)


def test_a_lane_reads_any_number_of_chunks(tiny_tokenizer):
    source = StaticMixtureWorkSource([Dataset.from_dict("d", {"text": ["a few words"] * 50})], chunk_size=2)
    pipeline = Pipeline(source).options(runner="inline").tokenize(tiny_tokenizer).pack_flat(7).batch(100)
    assert sum(len(batch) for batch in islice(pipeline, 20)) == 2000
    assert pipeline.checkpoint()["lanes"]["0"][2] > 600


def test_the_first_round_waits_for_no_second_piece_of_any_lane(tiny_tokenizer, monkeypatch):
    source = StaticMixtureWorkSource([Dataset.from_dict("d", {"text": ["a few words " * 30] * 2000})], chunk_size=500)
    pipeline = Pipeline(source).options(canonical_replicas=LANES, global_batch=LANES)
    pipeline = pipeline.tokenize(tiny_tokenizer).pack_flat(31).shuffle(64).batch(LANES)
    handed, hand_out = [], LaneStream._hand_out
    monkeypatch.setattr(LaneStream, "_hand_out", lambda lane: handed.append(lane._lane) or hand_out(lane))
    engine = pipeline.compiled.engine({lane: (LaneStart(), 0) for lane in range(LANES)})
    next(engine.rounds())
    engine.close()
    assert handed == [*range(LANES)]
