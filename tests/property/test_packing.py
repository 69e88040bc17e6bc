"""Wrap packing and record shuffling against a plain Python account of what they must do."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support import block_of, described
from zephon.columns.records import Pointer, RecordBlock
from zephon.ops.pack import WrapPacker
from zephon.ops.shuffle import Passer, Shuffle, Shuffler

documents = st.lists(st.integers(0, 40), min_size=0, max_size=40)  # lengths in tokens; 0 can happen


def run(jobs):
    return [job.run() for job in jobs]


def pack(lengths, cuts, record_length, **kwargs):
    """Feed documents in blocks cut at `cuts`; gives the packer and all its records."""
    packer = WrapPacker(record_length, **kwargs)
    out = []
    edges = sorted({0, len(lengths), *[cut for cut in cuts if cut <= len(lengths)]})
    for low, high in itertools.pairwise(edges):
        out += run(packer.push(block_of(lengths[low:high], low)))
    return packer, RecordBlock.concat([RecordBlock.empty(record_length), *out])


@given(documents, st.lists(st.integers(0, 40), max_size=6), st.integers(2, 33))
def test_wrap_puts_every_token_in_one_record_in_order(lengths, cuts, record_length):
    packer, records = pack(lengths, cuts, record_length)
    flat = [i * 1000 + t for i, n in enumerate(lengths) for t in range(n)]
    whole = len(flat) // record_length
    assert records.tokens.reshape(-1).tolist() == flat[: whole * record_length]
    assert packer.records == len(records) == whole
    spans = []
    for record in range(whole):
        for place, token in enumerate(flat[record * record_length : (record + 1) * record_length]):
            if place == 0 or token % 1000 == 0:
                spans.append([record, place, token // 1000 * 10, token % 1000, 0])
            spans[-1][4] += 1
    assert described(records) == [tuple(span) for span in spans]
    assert records.span_dataset.tolist() == [row // 10 % 3 for _, _, row, _, _ in spans]


@given(documents, st.integers(2, 33), st.data())
def test_packing_goes_on_from_a_carry_as_if_it_had_never_stopped(lengths, record_length, data):
    cut = data.draw(st.integers(0, len(lengths)))
    packer, head = pack(lengths[:cut], [], record_length)
    pointer = packer.carry() or Pointer(0, cut, 0)
    resumed = WrapPacker(record_length, skip=pointer.token)
    tail = run(resumed.push(block_of(lengths[pointer.position :], pointer.position)))
    both = RecordBlock.concat([head, *tail])
    _, whole = pack(lengths, [], record_length)
    assert both.tokens.tolist() == whole.tokens.tolist()
    assert described(both) == described(whole)


@given(documents, st.integers(2, 33), st.booleans())
def test_at_the_end_what_is_held_is_padded_or_counted(lengths, record_length, pad):
    packer, records = pack(lengths, [], record_length, pad_token=7 if pad else None)
    last = run(packer.finish())
    left = sum(lengths) % record_length
    if not pad:
        assert not last and packer.tokens_left_out == left
    elif left:
        (block,) = last
        assert block.lengths.tolist() == [left]
        assert (block.tokens[0, left:] == 7).all()
        assert sum(block.span_lengths()) == left
    assert packer.carry() is None or not pad
    assert len(records) == sum(lengths) // record_length


def ordered(orderer, records, origins, cuts):
    """Records through an orderer in pieces cut at `cuts`; gives them, and where each buffer can be started from."""
    made, start = [], 0
    for stop in sorted({*[cut for cut in cuts if cut < len(records)], len(records)}):
        if start < stop:
            made += orderer.push(records.slice(start, stop), origins[start:stop])
            start = stop
    made += orderer.flush()
    starts, before = [], 0
    for one in made:
        starts += [(before + first, buffer, *line) for first, buffer, line in one.begins]
        before += one.records
    return RecordBlock.concat([RecordBlock.empty(3), *[one.run() for one in made]]), starts


@given(documents, st.integers(1, 40), st.integers(1, 4), st.lists(st.integers(0, 90)), st.integers(0, 9))
def test_shuffling_moves_records_within_their_buffer_only_and_does_not_depend_on_blocks(
    lengths, buffer_size, lanes, cuts, window
):
    _, records = pack(lengths, [], 3)
    origins = np.arange(3 * len(records)).reshape(-1, 3)

    def shuffler(buffer=0):
        return Shuffler(Shuffle(buffer_size, 5), lane=0, lanes=lanes, window=window, buffer=buffer)

    once, starts = ordered(shuffler(), records, origins, [])
    again, starts_again = ordered(shuffler(), records, origins, cuts)
    assert described(once) == described(again) and once.tokens.tolist() == again.tokens.tolist()
    per_lane = max(1, buffer_size // lanes)
    expected = range(0, len(records), per_lane)
    assert starts == starts_again == [(k, n, *origins[k].tolist()) for n, k in enumerate(expected)]
    for number, start in enumerate(expected):
        moved = once.tokens[start : start + per_lane].tolist()
        assert sorted(moved) == sorted(records.tokens[start : start + per_lane].tolist())
        rest, _ = ordered(shuffler(number), records.slice(start, len(records)), origins[start:], [])
        assert rest.tokens.tolist() == once.tokens[start:].tolist()


@given(documents, st.integers(1, 9), st.lists(st.integers(0, 90)))
def test_without_shuffling_records_go_through_and_buffers_begin_at_the_same_records(lengths, size, cuts):
    _, records = pack(lengths, [], 3)
    origins = np.arange(3 * len(records)).reshape(-1, 3)
    passed, starts = ordered(Passer(size=size), records, origins, cuts)
    assert passed.tokens.tolist() == records.tokens.tolist() and described(passed) == described(records)
    assert starts == [(k, n, *origins[k].tolist()) for n, k in enumerate(range(0, len(records), size))]


@given(documents, st.integers(2, 9), st.data())
def test_slicing_joining_and_arranging_records_keeps_their_spans(lengths, record_length, data):
    _, records = pack(lengths, [], record_length)
    cut = data.draw(st.integers(0, len(records)))
    parts = [records.slice(0, cut), records.slice(cut, len(records))]
    again = RecordBlock.concat(parts)
    assert described(again) == described(records) and again.tokens.tolist() == records.tokens.tolist()
    order = data.draw(st.permutations(range(len(records))))
    arranged = RecordBlock.arrange(parts, np.array(order, dtype=np.int64))
    by_record = {}
    for record, *rest in described(records):
        by_record.setdefault(record, []).append(rest)
    assert [rest for _, *rest in described(arranged)] == [rest for i in order for rest in by_record[i]]
    assert arranged.tokens.tolist() == records.tokens[order].tolist()
