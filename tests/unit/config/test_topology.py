"""Lanes, groups and steps: the arithmetic and what it says when it does not come out even."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zephon import TopologyError
from zephon.config.topology import Topology, check_division, divisors, resolve_feeds, resolve_lanes


@pytest.mark.parametrize(
    ("global_batch", "groups", "lanes"),
    [
        (1, 1, 1),
        (64, 8, 64),
        (256, 16, 256),
        (768, 24, 192),
        (1536, 48, 192),
        (1536, 96, 192),
        (2304, 24, 144),
        (1000, 8, 200),
        (1024, 8, 256),
        (3840, 1, 240),
        # Numbers of groups that do not divide the best number of lanes.
        (4096, 512, 512),
        (514, 257, 257),
        (768, 256, 256),
        (4093, 1, 1),
    ],
)
def test_auto_lanes_are_a_divisor_of_the_global_batch_that_many_numbers_of_groups_divide(global_batch, groups, lanes):
    assert resolve_lanes("auto", global_batch=global_batch, dp_degree=groups) == lanes
    Topology(lanes, groups, 0, global_batch)


@pytest.mark.parametrize(
    ("feeds", "gib", "expected"), [("auto", None, 12), ("auto", 0, 1), ("auto", 5.5, 4), ("auto", 99, 12), (6, 0, 6)]
)
def test_a_run_that_ends_has_a_feed_for_each_gib_and_any_other_one_for_each_lane(feeds, gib, expected):
    nbytes = None if gib is None else int(gib * (1 << 30))
    assert resolve_feeds(feeds, lanes=12, nbytes=nbytes) == expected
    with pytest.raises(TopologyError, match=r"12 lanes .* do not divide among 5 feeds\. Use feeds 3 or 4 or 6 or 12"):
        resolve_feeds(5, lanes=12, nbytes=nbytes)


@given(st.integers(1, 5000), st.data())
def test_auto_lanes_start_wherever_groups_divide_the_global_batch_and_are_alike_where_they_can_be(batch, data):
    usual = resolve_lanes("auto", global_batch=batch, dp_degree=1)
    groups = data.draw(st.sampled_from(divisors(batch)))
    lanes = resolve_lanes("auto", global_batch=batch, dp_degree=groups)
    Topology(lanes, groups, 0, batch)
    assert lanes == usual or usual % groups


def test_auto_lanes_are_never_guessed_from_the_number_of_groups():
    assert resolve_lanes("auto", global_batch=None, dp_degree=1) == 1
    with pytest.raises(TopologyError, match=r"dp_degree is 8.*set canonical_replicas .* such as 64"):
        resolve_lanes("auto", global_batch=None, dp_degree=8)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"lanes": 12, "dp_degree": 8},
            [
                "12 lanes",
                "8 data-parallel groups. Use canonical_replicas 8 or 16",
                "or 4 or 6 or 12 data-parallel groups",
            ],
        ),
        (
            {"lanes": 16, "global_batch": 24},
            ["24 records", "16 lanes", "Use canonical_replicas 8 or 12 or 24, or a global batch of 16 or 32"],
        ),
        ({"lanes": 0}, ["canonical_replicas is 0", "from 1 to 65536"]),
        ({"lanes": True}, ["canonical_replicas is true"]),
        ({"lanes": 4, "dp_degree": 2, "dp_group_id": 2}, ["dp_group_id is 2", "from 0 to 1"]),
        ({"lanes": 4, "dp_group_id": "x"}, ['dp_group_id is "x"']),
        ({"global_batch": 1.5}, ["global_batch is 1.5"]),
    ],
)
def test_what_does_not_divide_is_refused_with_numbers_that_would(arguments, words):
    with pytest.raises(TopologyError) as caught:
        Topology(**arguments)
    assert all(word in str(caught.value) for word in words), caught.value


@given(
    st.integers(1, 60), st.integers(1, 12), st.lists(st.integers(1, 100), max_size=2, unique=True), st.integers(1, 6)
)
def test_every_number_of_a_refusal_would_do(lanes, groups, batches, at_once):
    def refusal(*numbers):
        try:
            check_division(*numbers, at_once=at_once)
        except TopologyError as error:
            return str(error).partition(". Use ")[2].rstrip(".")
        return ""

    text = refusal(lanes, groups, batches)
    if not text:
        assert lanes % groups == 0 and not any(b % lanes or b % (groups * at_once) for b in batches)
    elif match := re.fullmatch(r"canonical_replicas (\d+) and a global batch of (.*)", text):
        assert all(not refusal(int(match[1]), groups, [int(n)]) for n in match[2].split(" or "))
    for remedy in text.split(", or ") if text and " and " not in text else ():
        for n in map(int, re.findall(r"\d+", remedy)):
            if remedy.startswith("canonical"):
                assert not refusal(n, groups, batches)
            elif remedy.startswith("a global"):
                assert not refusal(lanes, groups, [n])
            else:
                assert not refusal(lanes, n, batches)


def test_a_wrong_canonical_replicas_is_refused():
    with pytest.raises(TopologyError, match='is "many"; expected an integer from 1 to 65536'):
        resolve_lanes("many", global_batch=8, dp_degree=1)


@given(st.integers(1, 64), st.integers(1, 5), st.data())
def test_groups_together_number_every_record_once(lanes, rounds, data):
    groups = data.draw(st.sampled_from(divisors(lanes)))
    numbers = []
    for group in range(groups):
        topology = Topology(lanes, groups, group)
        shared = replace(topology, lanes_per_feed=data.draw(st.sampled_from(divisors(lanes))))
        assert {lane // shared.lanes_per_feed for lane in topology.owned} == set(shared.owned_feeds)
        mine = topology.sequence_numbers(0, rounds * topology.width)
        assert set((mine % lanes).tolist()) == set(topology.owned)
        cut = data.draw(st.integers(0, len(mine)))
        assert np.array_equal(topology.sequence_numbers(cut, len(mine) - cut), mine[cut:])
        for lane in topology.owned:
            assert topology.records_of_feed(cut, lane) == (mine[:cut] % lanes == lane).sum()
        numbers += mine.tolist()
    assert sorted(numbers) == list(range(rounds * lanes))


@given(st.integers(1, 5000))
def test_divisors(n):
    assert divisors(n) == [d for d in range(1, n + 1) if n % d == 0]
