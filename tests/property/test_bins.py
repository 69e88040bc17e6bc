"""Packing into bins, against what its rules promise."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support import block_of, described
from zephon.columns.records import RecordBlock
from zephon.ops.base import PackCounts
from zephon.ops.bins import BinPacker

DATASETS = 3  # of block_of
documents = st.lists(st.one_of(st.integers(0, 12), st.integers(0, 70)), max_size=60)  # lengths in tokens
cutting = st.lists(st.integers(0, 60), max_size=6)


@st.composite
def rules(draw):
    return {
        "record_length": draw(st.integers(2, 33)),
        "algorithm": draw(st.sampled_from(["first_fit", "best_fit", "best_fit_wrap"])),
        "num_bins": draw(st.integers(DATASETS, 9)),
        "max_documents": draw(st.sampled_from([None, None, 1, 2, 5])),
        "split": draw(st.booleans()),
        "kinds": draw(st.sampled_from([[0, 0, 0], [0, 1, 0], [0, 1, 2]])),
        "stretch": draw(st.integers(1, 12)),
    }


def packer_of(rules, counts=None):
    given_rules = {**rules, "kinds": np.array(rules["kinds"])}
    return BinPacker(given_rules.pop("record_length"), **given_rules, pad_token=9_999_999, counts=counts)


def pack(lengths, rules, cuts=(), first=0):
    """All records of the documents, the first being number `first`; where the lane can be entered; what was counted."""
    counts = PackCounts()
    packer = packer_of(rules, counts)
    jobs = []
    edges = sorted({0, len(lengths), *[cut for cut in cuts if cut <= len(lengths)]})
    for low, high in itertools.pairwise(edges):
        jobs += packer.push(block_of(lengths[low:high], first + low))
        held = [piece for bins in packer._open.values() for one in bins for piece in one.pieces]
        assert sum(p[2] for p in held) == sum(packer._held.values()) < rules["num_bins"] * rules["record_length"]
        assert len(held) <= sum(len(one.pieces) for bins in packer._open.values() for one in bins)
        assert all(p[3].tokens.base is None and len(p[3]) == p[2] for p in held)  # no block is kept alive
    jobs += packer.flush()
    assert packer.flush() == [] and packer.carry() is None
    entries, before = [], 0
    for job in jobs:
        known = [i for i, line in enumerate(job.origins.tolist()) if line != [-1, -1, -1]]
        assert known == ([0] if job.fresh else [])
        if job.fresh:
            chunk, position, token = job.origins[0].tolist()
            assert (chunk, token) == (0, 0)
            entries.append((before, position))
        before += len(job.origins)
    records = RecordBlock.concat([RecordBlock.empty(rules["record_length"]), *[job.run() for job in jobs]])
    assert packer.records == counts.records == len(records) == before
    return records, entries, counts


def by_record(records):
    spans = {i: [] for i in range(len(records))}
    for record, start, row, token, size in described(records):
        spans[record].append((start, row // 10, token, size))
    return spans


@given(documents, rules(), cutting)
def test_every_token_is_in_one_record_and_every_rule_is_kept(lengths, rules, cuts):
    length, limit = rules["record_length"], rules["max_documents"]
    records, _, counts = pack(lengths, rules, cuts)
    seen = {}
    for i, spans in by_record(records).items():
        assert spans, "a record without a document"
        place = 0
        for start, document, token, size in spans:
            assert start == place and size > 0
            expected = np.arange(token, token + size) + document * 1000
            assert records.tokens[i, start : start + size].tolist() == expected.tolist()
            seen.setdefault(document, []).append((token, size))
            place += size
        assert records.lengths[i] == place
        assert (records.tokens[i, place:] == 9_999_999).all()
        order = [document for _, document, _, _ in spans]
        assert order == sorted(set(order)), "documents stand in the order of the lane, each once"
        assert limit is None or len(spans) <= limit
        assert len({rules["kinds"][document % DATASETS] for document in order}) == 1
    cut = 0
    for document, size in enumerate(lengths):
        pieces = sorted(seen.pop(document, []))
        if not size or (size > length and not rules["split"]):
            assert not pieces
            continue
        assert [token for token, _ in pieces] == [0, *np.cumsum([s for _, s in pieces])[:-1].tolist()]
        assert sum(s for _, s in pieces) == size
        cut += len(pieces) > 1
        if rules["algorithm"] != "best_fit_wrap":
            assert len(pieces) == -(-size // length), "cut only where it is longer than a record"
    assert not seen
    long = [n for n in lengths if n > length]
    assert counts.documents == sum(n > 0 for n in lengths) and counts.oversized == len(long)
    assert counts.split == cut
    assert (counts.dropped, counts.dropped_tokens) == ((0, 0) if rules["split"] else (len(long), sum(long)))
    assert counts.tokens == records.lengths.sum() == sum(lengths) - counts.dropped_tokens


@given(documents, rules(), cutting)
def test_where_blocks_are_cut_never_shows(lengths, rules, cuts):
    one, entries, counts = pack(lengths, rules)
    other, same_entries, same_counts = pack(lengths, rules, cuts)
    assert one.tokens.tolist() == other.tokens.tolist() and described(one) == described(other)
    assert entries == same_entries and counts == same_counts


@given(documents, rules(), cutting)
def test_a_lane_can_be_entered_wherever_nothing_is_held(lengths, rules, cuts):
    records, entries, _ = pack(lengths, rules)
    if len(records):
        assert entries[0][0] == 0
    for before, position in entries:
        rest, _, _ = pack(lengths[position:], rules, cuts, first=position)
        assert rest.tokens.tolist() == records.tokens[before:].tolist()
        assert described(rest) == described(records.slice(before, len(records)))


@given(documents, rules())
def test_entries_are_never_far_apart(lengths, rules):
    records, entries, _ = pack(lengths, rules)
    longest = 1 + max(lengths, default=0) // rules["record_length"]  # records that one document can close at once
    bound = 2 * rules["stretch"] + rules["num_bins"] + longest
    for (a, _), (b, _) in itertools.pairwise([*entries, (len(records), None)]):
        assert b - a <= bound


@given(documents, rules())
def test_best_fit_wrap_pads_less_than_a_record_between_entries(lengths, rules):
    rules = {**rules, "algorithm": "best_fit_wrap", "max_documents": None, "kinds": [0, 0, 0]}
    records, entries, _ = pack(lengths, rules)
    for (a, _), (b, _) in itertools.pairwise([*entries, (len(records), None)]):
        assert 0 <= (rules["record_length"] - records.lengths[a:b]).sum() < rules["record_length"]


@given(documents, rules())
def test_no_two_records_would_fit_into_one(lengths, rules):
    """So more than half of the places hold tokens, whatever the documents, where there are bins enough."""
    rules = {**rules, "max_documents": None, "algorithm": "best_fit", "num_bins": 1000, "kinds": [0, 0, 0]}
    records, _, _ = pack(lengths, {**rules, "stretch": 1000})
    sizes = sorted(records.lengths.tolist())
    assert all(a + b > rules["record_length"] for a, b in itertools.pairwise(sizes))


def test_a_row_of_several_documents_is_never_entered_in_the_middle():
    rules = {
        "record_length": 4,
        "algorithm": "best_fit",
        "num_bins": 3,
        "max_documents": 1,
        "split": True,
        "kinds": [0, 0, 0],
        "stretch": 1,
    }
    packer = packer_of(rules)
    block = block_of([4] * 12, 0)
    block.position = np.arange(12) // 4
    jobs = [*packer.push(block), *packer.flush()]
    assert [job.origins[0].tolist() for job in jobs if job.fresh] == [[0, 0, 0], [0, 1, 0], [0, 2, 0]]
    assert [len(job.origins) for job in jobs] == [4, 4, 4]
