"""The end of a run: lanes that end together, whatever their number."""

import logging
import random

import pytest

from zephon import Pipeline
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

SEQ_LEN, TOKENS = 15, 4_000


def finite(tokenizer, *, lanes, rows=120, batch=None, groups=1, group=0, feeds="auto", **options):
    """A pass over rows whose lengths are skewed, as those of documents are."""
    choose = random.Random(1)
    texts = ["x " * int(choose.lognormvariate(2.5, 1.2)) for _ in range(rows)]
    source = StaticMixtureWorkSource([Dataset.from_dict("d", {"text": texts})], repeat=False)
    options |= {"dp_degree": groups, "dp_group_id": group, "canonical_replicas": lanes, "global_batch": batch or lanes}
    pipeline = Pipeline(source).options(runner="inline", feeds=feeds, **options).tokenize(tokenizer)
    return pipeline.pack_flat(SEQ_LEN).batch((batch or lanes) // groups, drop_last=False)


@pytest.mark.parametrize(("lanes", "batch"), [(1, 4), (8, 16), (64, 64), (256, 256)])
def test_a_pass_takes_as_few_steps_as_its_records_fill(tiny_tokenizer, lanes, batch):
    one = list(finite(tiny_tokenizer, lanes=1, batch=batch))
    records = sum(int((each.lengths > 0).sum()) for each in one)
    steps = list(finite(tiny_tokenizer, lanes=lanes, batch=batch))
    assert len(steps) == -(-records // batch)
    lengths = [int(length) for each in steps for length in each.lengths]
    # Every place but those after the last record is filled.
    assert lengths[: records - 1] == [SEQ_LEN + 1] * (records - 1) and not any(lengths[records:])
    # Whoever gives every lane a feed of its own waits for the longest lane.
    apart = list(finite(tiny_tokenizer, lanes=lanes, batch=batch, feeds=lanes))
    assert len(apart) >= len(steps) and (lanes < 64 or len(apart) > 1.5 * len(steps))


def test_groups_of_one_feed_end_together_and_count_its_rows_once(tiny_tokenizer, caplog):
    pipelines = [finite(tiny_tokenizer, lanes=8, groups=4, group=group) for group in range(4)]
    with caplog.at_level(logging.INFO, "zephon"):
        batches = [list(pipeline) for pipeline in pipelines]
    assert len({len(each) for each in batches}) == 1
    assert "1, 2, 4, 8; from 1 feed(s)" in pipelines[1].explain()
    rows = [pipeline.mixture()["d"].rows for pipeline in pipelines]
    given = [pipeline.mixture()["d"].given for pipeline in pipelines]
    assert rows == [120, 0, 0, 0] and min(given) > 0
    assert sum(given) == pipelines[0].mixture()["d"].tokens
