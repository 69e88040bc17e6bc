"""Fields made ahead by the engine's thread are those of `to_training` itself, whatever is asked for in between."""

from itertools import islice
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import zephon.engine.engine
from support.examples import few
from zephon import Pipeline
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

ASKED = [
    {},
    {"dtype": "int32"},
    {"shift_labels": False},
    {"position_mode": "sequence"},
    {"position_mode": None, "flatten": True},
    {"as_numpy": True, "dtype": "uint32", "ignore_index": 0},
    {"boundary_mask_loss": True, "return_loss_mask": True, "return_cu_seqlens": True},
    {"eos_mask_loss": True, "eos_token_id": 1, "return_num_valid_tokens": True},
]


def build(tokenizer, runner, lanes=1, microbatch=2, algorithm="wrap", **options):
    texts = [f"document {n} " * (1 + n % 7) for n in range(60)]
    source = StaticMixtureWorkSource([Dataset.from_dict("d", {"text": texts})], chunk_size=20)
    pipeline = Pipeline(source).options(runner=runner, canonical_replicas=lanes, prefetch_batches=4, **options)
    return pipeline.tokenize(tokenizer).pack_flat(15, algorithm).shuffle(8).batch(microbatch)


@few(25)
@given(
    lanes=st.integers(1, 3),
    microbatch=st.integers(1, 5),
    algorithm=st.sampled_from(["wrap", "best_fit"]),
    part=st.integers(1, 400),
    start=st.integers(0, 9),
    asked=st.lists(st.tuples(st.sampled_from(ASKED), st.booleans()), min_size=1, max_size=30),
)
def test_are_those_that_a_batch_makes_itself(tiny_tokenizer, lanes, microbatch, algorithm, part, start, asked):
    with patch.object(zephon.engine.engine, "_PART_TOKENS", part):
        ahead = build(tiny_tokenizer, "threads", lanes, microbatch, algorithm)
        itself = build(tiny_tokenizer, "inline", lanes, microbatch, algorithm)
        list(islice(itself, start))
        ahead.restore(itself.checkpoint())
        for batch, expected, (options, twice) in zip(ahead, itself, asked * 3, strict=False):
            for _ in range(1 + twice):
                fields, wanted = batch.to_training(**options), expected.to_training(**options)
                assert fields.keys() == wanted.keys()
                for name, value in fields.items():
                    assert np.array_equal(value, wanted[name]), (name, options)
                if not options.get("as_numpy"):
                    fields["input_ids"].fill_(7)  # the fields are the caller's, who may write to them
                    fields["labels"].fill_(7)
            assert batch.digests == expected.digests
        ahead.close()


@pytest.mark.parametrize("isolate", [False, True])
def test_are_made_once_it_is_known_in_which_form(tiny_tokenizer, isolate):
    pipeline = build(tiny_tokenizer, "threads", isolate=isolate)
    stream = iter(pipeline)
    first = next(stream).to_training(dtype="int32")
    batches = list(islice(stream, 40))
    assert batches[0].block.fields is None or batches[0].block.fields.form.dtype == "int32"
    last = batches[-1].block.fields
    assert last is not None and last.form == (np.dtype("int32"), True, "preserve")
    given, again = (batches[-1].to_training(dtype="int32")["labels"] for _ in range(2))
    assert given.data_ptr() == last.arrays["labels"].ctypes.data != again.data_ptr()
    assert (first["labels"] >= 0).all() and (given == again).all()
    for batch, expected in zip(batches, islice(build(tiny_tokenizer, "inline"), 1, None), strict=False):
        for name, value in batch.to_training().items():
            assert (value == expected.to_training()[name]).all()
    pipeline.close()
