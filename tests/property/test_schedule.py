"""Schedules and endings: quotas in closed form, over random stages, sizes and lane counts."""

import math
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import catalog_of
from support.examples import few
from zephon.curriculum.mixture import Curriculum, Ending
from zephon.curriculum.order import DatasetOrder, OrderOptions
from zephon.curriculum.rates import constant_curve, scheduled_curve
from zephon.curriculum.schedule import SHARE_ONE, shares_between, spans_of
from zephon.errors import RecipeError
from zephon.io import Dataset
from zephon.work import ScheduledMixtureWorkSource, Stage


@st.composite
def schedules(draw, datasets: int):
    """Stages over datasets "d0", ..., each of which has weight in some stage."""
    names = [f"d{d}" for d in range(datasets)]
    count = draw(st.integers(1, 4))
    gaps = [draw(st.one_of(st.integers(1, 30), st.integers(1, 20_000))) for _ in range(count)]
    stages, start = [], 0
    for nth in range(count):
        weights = {name: draw(st.sampled_from([0, 0, 1, 2.5, 1e-4])) for name in names}
        weights[names[draw(st.integers(0, datasets - 1))]] = draw(st.floats(0.1, 5))
        if nth == count - 1:
            weights = {name: weight or 1.0 for name, weight in weights.items()}
        change = draw(st.sampled_from(["constant", "linear", "cosine"])) if nth else "constant"
        end = None
        if change != "constant" and (nth == count - 1 or draw(st.booleans())):
            end = start + draw(st.integers(1, gaps[nth]))
        stages.append(Stage(weights, start_tokens=start, change=change, end_tokens=end))
        start += gaps[nth]
    return stages


def curriculum(sizes, stages, *, lanes, chunk_size, endings=None, ratios=None, seed=0):
    orders = [
        DatasetOrder(f"d{i}", catalog_of([n], 1), lanes=lanes, seed=seed, options=OrderOptions())
        for i, n in enumerate(sizes)
    ]
    stretches = [partial(constant_curve, [1] * len(sizes), chunk_size)]
    if stages is not None:
        spans = spans_of(stages, [f"d{d}" for d in range(len(sizes))], 1)
        stretches = [partial(scheduled_curve, span, ratios or [3.0] * len(sizes), lanes, chunk_size) for span in spans]
    return Curriculum(orders, stretches, lanes=lanes, seed=seed, endings=endings)


@st.composite
def runs(draw, endings=False, static=False):
    """Sizes, stages (or none), lanes, chunk size, tokens per row and endings."""
    count = draw(st.integers(1, 4))
    return {
        "sizes": [draw(st.integers(1, 400)) for _ in range(count)],
        "stages": None if static and draw(st.booleans()) else draw(schedules(count)),
        "lanes": draw(st.sampled_from([1, 2, 3, 8, 16])),
        "chunk_size": draw(st.integers(1, 200)),
        "ratios": [draw(st.sampled_from([1.0, 2.5, 40.0, 1 / 3])) for _ in range(count)],
        "endings": [draw(st.builds(Ending, st.integers(1, 3), st.booleans())) for _ in range(count)]
        if endings
        else None,
    }


@given(runs(endings=True, static=True) | runs(static=True), st.data())
def test_chunks_follow_each_other_without_gap_or_overlap_and_do_not_depend_on_history(run, data):
    made = curriculum(**run)
    lane = data.draw(st.integers(0, run["lanes"] - 1))
    first = data.draw(st.sampled_from([0, 0, 3, 1000]))
    last = made.chunks_of(lane)
    for index in range(first, first + 6 if last is None else min(first + 6, last)):
        before, after = made.rows_before(lane, index), made.rows_before(lane, index + 1)
        chunk = made.chunk(lane, index)
        counts = np.bincount(chunk.dataset, minlength=len(before)).tolist()
        assert counts == [b - a for a, b in zip(before, after, strict=True)]
        again = curriculum(**run).chunk(lane, index)
        assert again.row.tolist() == chunk.row.tolist() and again.dataset.tolist() == chunk.dataset.tolist()
        most = data.draw(st.integers(1, 250))
        head = made.chunk(lane, index, most)
        assert head.row.tolist() == chunk.row[:most].tolist()
        assert head.dataset.tolist() == chunk.dataset[:most].tolist()


@given(runs())
def test_by_the_end_of_any_chunk_all_lanes_together_have_the_integral_of_the_shares(run):
    """Within a row per dataset, whatever the borders of the stages: the integral is made anew here, in fractions."""
    made = curriculum(**run)
    names = [f"d{d}" for d in range(len(run["sizes"]))]
    spans = spans_of(run["stages"], names, 1)
    route = made._route(0)
    for index in range(30):
        segment = [s for s in route if s.first <= index][-1]
        # Time at the start of the chunk: the segments are the spans.
        at = spans[route.index(segment)].start + segment.time(index)
        for d in range(len(names)):
            wanted = Fraction(0)
            for span in spans:
                knots = [*span.knots, *([max(at - span.start, 0) + 1] if span.length is None else [])]
                shares = [*span.shares, *([span.shares[-1]] if span.length is None else [])]
                for i in range(len(knots) - 1):
                    low, high = knots[i], min(knots[i + 1], at - span.start)
                    if high <= low:
                        continue
                    p, q = shares[i][d], shares[i + 1][d]
                    end = p + Fraction((q - p) * (high - low), knots[i + 1] - knots[i])
                    wanted += (p + end) * (high - low) / 2
            wanted = wanted / SHARE_ONE / Fraction(run["ratios"][d])
            got = sum(made.rows_before(lane, index)[d] for lane in range(run["lanes"]))
            assert abs(got - wanted) <= 1 + Fraction(1, 1000)


@few(40)
@given(runs(endings=True))
def test_with_endings_no_dataset_gives_more_than_its_passes_and_all_end(run):
    made = curriculum(**run)
    lanes, sizes = run["lanes"], run["sizes"]
    stops = [d for d, e in enumerate(run["endings"]) if e.ends_run]
    used = [[0] * size for size in sizes]
    for lane in range(lanes):
        for index in range(made.chunks_of(0)):
            chunk = made.chunk(lane, index)
            for d, row in zip(chunk.dataset.tolist(), chunk.row.tolist(), strict=True):
                used[d][row] += 1
        assert made.chunk(lane, made.chunks_of(0)) is None
    for d, ending in enumerate(run["endings"]):
        assert max(used[d]) <= ending.passes
    whole = [d for d, e in enumerate(run["endings"]) if min(used[d]) == max(used[d]) == e.passes]
    if stops:
        assert any(d in whole for d in stops)  # the one that ended the run has been used whole
    else:
        assert whole == list(range(len(sizes)))  # every dataset is in the last stage


@given(st.lists(st.integers(1, 300), min_size=1, max_size=4), st.integers(1, 8), st.integers(1, 100), st.data())
def test_endings_without_a_schedule(sizes, lanes, chunk_size, data):
    endings = [data.draw(st.builds(Ending, st.none() | st.integers(1, 3), st.booleans())) for _ in sizes]
    endings = [Ending(e.passes, e.ends_run and e.passes is not None) for e in endings]
    made = curriculum(sizes, None, lanes=lanes, chunk_size=chunk_size, endings=endings)
    if any(e.passes is None for e in endings) and not any(e.ends_run for e in endings):
        assert made.chunks_of(0) is None
        late = [np.array(made.rows_before(lane, 10**6)) for lane in range(lanes)]
        for d, ending in enumerate(endings):
            if ending.passes is not None:
                assert sum(rows[d] for rows in late) == ending.passes * sizes[d]
        return
    total = [sum(made.rows_before(lane, made.chunks_of(0))[d] for lane in range(lanes)) for d in range(len(sizes))]
    full = [total[d] == e.passes * sizes[d] for d, e in enumerate(endings) if e.passes is not None]
    assert any(full) if any(e.ends_run for e in endings) else all(full)


def test_a_change_moves_the_places_in_a_chunk_with_it():
    stages = [Stage({"d0": 1.0}), Stage({"d1": 1.0}, start_tokens=1, change="linear", end_tokens=300_001)]
    made = curriculum([10**6, 10**6], stages, lanes=1, chunk_size=200_000)
    chunk = made.chunk(0, 1)  # the whole change is one chunk
    assert len(chunk) == pytest.approx(100_000, abs=3)
    shares = [float((chunk.dataset[i : i + 10_000] == 1).mean()) for i in range(0, 100_000, 10_000)]
    assert shares == pytest.approx([(i + 0.5) / 10 for i in range(10)], abs=0.005)


def test_a_cosine_is_met_within_a_tenth_of_a_percent():
    stages = [Stage({"d0": 1.0}), Stage({"d1": 1.0}, start_tokens=10, change="cosine", end_tokens=1_000_010)]
    spans = spans_of(stages, ["d0", "d1"], 1)
    for part in range(1, 1000):
        at = 10 + part * 1000
        wanted = (1 - math.cos(math.pi * part / 1000)) / 2
        assert abs(shares_between(spans, at, at)[1] / SHARE_ONE - wanted) < 1.3e-3


def test_steps_are_tokens_per_step():
    by_steps = [Stage({"d0": 1}), Stage({"d0": 1, "d1": 1}, start_steps=3, change="linear", end_steps=7)]
    by_tokens = [Stage({"d0": 1}), Stage({"d0": 1, "d1": 1}, start_tokens=3000, change="linear", end_tokens=7000)]
    assert spans_of(by_steps, ["d0", "d1"], 1000) == spans_of(by_tokens, ["d0", "d1"], 1)


def test_where_every_dataset_of_a_stage_has_ended_the_next_stage_begins():
    stages = [Stage({"d0": 1.0}), Stage({"d1": 1.0}, start_tokens=10**9)]
    made = curriculum([50, 70], stages, lanes=2, chunk_size=10, endings=[Ending(1), Ending(1)])
    assert sum(len(made.chunk(lane, i)) for lane in (0, 1) for i in range(made.chunks_of(0))) == 120
    assert made.chunks_of(0) < 20


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        ([], "no stages"),
        ([Stage({"a": 1, "x": 1})], 'unknown source in stage 1 of the schedule "x". Expected one of a, b.'),
        ([Stage({"a": 1})], "no stage of the schedule gives ['b']"),
        ([Stage({"a": 1, "b": 1}, start_tokens=5)], 'starts at 5 with the change "constant"; expected a start at 0'),
        ([Stage({"a": 1, "b": 1}, change="linear", end_tokens=5)], "there is no mixture before it"),
        ([Stage({"a": 1}), Stage({"b": 1}, start_tokens=9, change="cosine")], "no end"),
        (
            [Stage({"a": 1}), Stage({"b": 1}, start_tokens=9), Stage({"b": 1}, start_tokens=3)],
            "expected more than 9",
        ),
        (
            [
                Stage({"a": 1}),
                Stage({"b": 1}, start_tokens=9, change="linear", end_tokens=20),
                Stage({"b": 1}, start_tokens=15),
            ],
            "expected an end after the start, and at most 15, where stage 3 starts",
        ),
        (
            [Stage({"a": 1}), Stage({"b": 1}, start_tokens=9, change="linear", end_tokens=9)],
            "expected an end after",
        ),
        (["later"], "expected a zephon.work.Stage"),
    ],
)
def test_stages_that_make_no_schedule_are_refused_in_a_sentence(stages, words):
    with pytest.raises(RecipeError) as caught:
        ScheduledMixtureWorkSource([Dataset.from_dict(name, {"text": ["x"]}) for name in "ab"], schedule=stages)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mixture": {}}, "expected a table of weights by source"),
        ({"mixture": {"a": 0, "b": 0.0}}, "at least one above 0"),
        ({"mixture": {"a": 1e308, "b": 1e308}}, "finite"),
        ({"mixture": {"a": -1}}, "at least 0"),
        ({"mixture": {"a": math.nan}}, "at least 0"),
        ({"mixture": {"a": 10**400}}, "at least 0"),
        ({"mixture": {"a": True}}, "at least 0"),
        ({"mixture": {"a": 1}, "change": "sudden"}, 'expected "constant", "linear" or "cosine"'),
        ({"mixture": {"a": 1}, "start_tokens": -1}, "start_tokens"),
        ({"mixture": {"a": 1}, "start_tokens": 1, "start_steps": 1}, "remove one of them"),
        ({"mixture": {"a": 1}, "end_tokens": 4}, "holds until the next stage"),
        ({"mixture": {"a": 1}, "change": "linear", "end_tokens": 4, "end_steps": 4}, "remove one of them"),
    ],
)
def test_a_stage_that_cannot_be_meant_is_refused_in_a_sentence(given, words):
    with pytest.raises(RecipeError) as caught:
        Stage(**given)
    assert words in str(caught.value) and "\n" not in str(caught.value)
