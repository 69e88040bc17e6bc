"""Loss masks and given positions stay with their tokens through packing, shuffling, slicing and into the batch."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from zephon.batch import BatchInfo, SampleBatch
from zephon.columns.records import RecordBlock, TokenBlock
from zephon.ops.pack import WrapPacker
from zephon.ops.shuffle import Shuffle, Shuffler

LENGTH = 7


@st.composite
def blocks(draw):
    """Documents of tokens 1, 2, 3, ... in blocks, some with a loss mask (odd tokens) and positions (100 + token)."""
    made, token = [], 1
    for nth in range(draw(st.integers(1, 5))):
        lengths = draw(st.lists(st.integers(0, 12), max_size=5))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        tokens = np.arange(token, token + offsets[-1], dtype=np.uint32)
        token += len(tokens)
        rows = np.arange(len(lengths), dtype=np.int64)
        zero = np.zeros(1, dtype=np.int64)
        made.append(
            TokenBlock(
                tokens,
                offsets,
                np.zeros(len(rows), dtype=np.int32),
                rows,
                rows,
                nth,
                zero,
                zero,
                loss=tokens % 2 == 1 if draw(st.booleans()) else None,
                positions=(100 + tokens).astype(np.int32) if draw(st.booleans()) else None,
            )
        )
    return made


def expected(made):
    """By token: whether it is trained on, and its given position or None."""
    loss, positions = {}, {}
    for block in made:
        for token in block.tokens.tolist():
            loss[token] = block.loss is None or token % 2 == 1
            positions[token] = None if block.positions is None else 100 + token
    return loss, positions


def packed(made, pad=0):
    packer = WrapPacker(LENGTH, pad_token=pad)
    return [job.run() for block in made for job in packer.push(block)] + [job.run() for job in packer.finish()]


def batch_of(records):
    return SampleBatch(records, lambda: np.arange(len(records)), BatchInfo(("d",), (None,), None), np.zeros(1))


@given(blocks(), st.integers(1, 9), st.data())
def test_columns_stay_with_their_tokens(made, buffer, data):
    loss, positions = expected(made)
    shuffler = Shuffler(Shuffle(buffer), lane=0, lanes=1, window=0)
    ordered = []
    for block in packed(made):
        ordered += shuffler.push(block, np.zeros((len(block), 3), dtype=np.int64))
    parts = [job.run() for job in [*ordered, *shuffler.flush()]]
    records = RecordBlock.concat([RecordBlock.empty(LENGTH), *parts, RecordBlock.filler(2, LENGTH, 0)])
    cut = data.draw(st.integers(0, len(records)))
    for half in (records.slice(0, cut), records.slice(cut, len(records))):
        counted = half.counted_positions()
        fields = batch_of(half).to_training(as_numpy=True, return_loss_mask=True, return_num_valid_tokens=True)
        for i, tokens in enumerate(half.tokens.tolist()):
            for t, token in enumerate(tokens):
                real = t < half.lengths[i]
                if t:
                    trained = real and loss[token]
                    assert fields["labels"][i, t - 1] == (token if trained else -100)
                    assert fields["loss_mask"][i, t - 1] == trained
                if t < LENGTH - 1:
                    given_position = positions[token] if real else None
                    wanted = counted[i, t] if given_position is None else given_position
                    assert fields["position_ids"][i, t] == wanted
        assert fields["num_valid_tokens"] == fields["loss_mask"].sum()


@given(blocks())
def test_digests_do_not_depend_on_what_a_record_travelled_with(made):
    records = RecordBlock.concat([RecordBlock.empty(LENGTH), *packed(made)])
    whole = batch_of(records).digests
    assert [batch_of(records.slice(i, i + 1)).digests[0] for i in range(len(records))] == whole
    n = len(records)
    said = dataclasses.replace(
        records,
        loss=np.ones((n, LENGTH), dtype=bool) if records.loss is None else records.loss,
        positions=records.counted_positions() if records.positions is None else records.positions,
    )
    assert batch_of(said).digests == whole
    plain = batch_of(dataclasses.replace(records, loss=None, positions=None)).digests
    for i in range(n):
        real = slice(0, records.lengths[i])
        masked = records.loss is not None and not records.loss[i, real].all()
        moved = records.positions is not None and (records.positions[i] != said.counted_positions()[i])[real].any()
        assert (plain[i] != whole[i]) == bool(masked or moved)
