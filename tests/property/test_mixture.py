"""Quotas and chunks of the curriculum, over random datasets, weights and lane counts."""

from functools import partial

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support import catalog_of
from support.examples import few
from zephon.curriculum.mixture import Curriculum, Ending
from zephon.curriculum.order import DatasetOrder, OrderOptions
from zephon.curriculum.rates import constant_curve, row_weights


def curriculum(sizes, weights, *, lanes, chunk_size, repeat, seed=0):
    orders = [
        DatasetOrder(f"d{i}", catalog_of([n], 1), lanes=lanes, seed=seed, options=OrderOptions())
        for i, n in enumerate(sizes)
    ]
    stretch = partial(constant_curve, row_weights(weights, [1.0] * len(sizes)), chunk_size)
    endings = [Ending(None if repeat else 1)] * len(sizes)
    return Curriculum(orders, [stretch], lanes=lanes, seed=seed, endings=endings)


shapes = st.integers(1, 5).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 400), min_size=n, max_size=n),
        st.lists(st.floats(1e-3, 1e3), min_size=n, max_size=n),
    )
)


@few(30)
@given(shapes, st.integers(1, 64), st.integers(1, 300))
def test_a_run_that_does_not_repeat_uses_every_row_exactly_once(shape, lanes, chunk_size):
    sizes, weights = shape
    made = curriculum(sizes, weights, lanes=lanes, chunk_size=chunk_size, repeat=False)
    used = []
    for lane in range(lanes):
        index = 0
        while (chunk := made.chunk(lane, index)) is not None:
            used += list(zip(chunk.dataset.tolist(), chunk.row.tolist(), strict=True))
            index += 1
        assert index == made.chunks_of(lane)
    assert sorted(used) == [(d, row) for d, n in enumerate(sizes) for row in range(n)]


@given(shapes, st.integers(1, 16), st.integers(1, 300), st.integers(0, 10**12))
def test_quotas_stay_within_a_row_of_the_target_per_lane_and_over_all_lanes(shape, lanes, chunk_size, index):
    sizes, weights = shape
    made = curriculum(sizes, weights, lanes=lanes, chunk_size=chunk_size, repeat=True)
    before = np.array([made.rows_before(lane, index) for lane in range(lanes)], dtype=object)
    target = [index * chunk_size * w / sum(weights) for w in weights]
    slack = 1 + 1e-9 * index * chunk_size
    for d, wanted in enumerate(target):
        assert all(abs(count - wanted) <= slack for count in before[:, d])
        assert abs(before[:, d].sum() - lanes * wanted) <= 1 + lanes * (slack - 1)


def test_datasets_stand_evenly_in_a_chunk():
    made = curriculum([10_000, 10_000], [3.0, 1.0], lanes=1, chunk_size=4000, repeat=True)
    chunk = made.chunk(0, 5)
    for start in range(0, 4000, 100):
        assert 20 <= (chunk.dataset[start : start + 100] == 1).sum() <= 30


def test_a_dataset_that_ends_is_not_thinned_out_but_ends_early():
    made = curriculum([100, 10_000], [1.0, 1.0], lanes=1, chunk_size=16384, repeat=False)
    chunk = made.chunk(0, 0)
    assert (chunk.dataset[:190] == 0).sum() > 85
    assert (chunk.dataset[210:] == 0).sum() == 0


def test_a_rare_dataset_does_not_come_in_every_lane_at_once():
    made = curriculum([100, 100], [1.0, 1e-4], lanes=64, chunk_size=100, repeat=True)
    total = [sum(made.rows_before(lane, index)[1] for lane in range(64)) for index in range(0, 101, 10)]
    assert np.abs(np.array(total) - np.arange(0, 101, 10) * 100 * 64 * 1e-4).max() <= 1.01
