"""The order within a dataset, over random datasets and lane counts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from support import catalog_of
from zephon.curriculum.order import DatasetOrder, OrderOptions, segment_starts
from zephon.curriculum.permute import feistel, shuffled_indices

catalogs = st.builds(
    catalog_of,
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.integers(1, 4),
    row_bytes=st.sampled_from([1, 100, 1 << 20, 1 << 26]),
    sequential=st.booleans(),
)
options = st.builds(
    OrderOptions,
    shuffle_shards=st.booleans(),
    shuffle_within_shard=st.booleans(),
    block_size=st.one_of(st.integers(1, 200), st.sampled_from(["auto", "global", "none"])),
    reshuffle=st.booleans(),
)


@given(catalogs, st.integers(1, 64), options, st.integers(0, 2**32), st.integers(0, 3))
def test_each_row_is_read_once_per_epoch_by_some_lane(catalog, lanes, order_options, seed, epoch):
    order = DatasetOrder("d", catalog, lanes=lanes, seed=seed, options=order_options)
    rows = []
    for lane in range(lanes):
        rows += order.rows(lane, order.rows_of_lane(lane, epoch), order.rows_of_lane(lane, epoch + 1)).tolist()
    assert sorted(rows) == list(range(catalog.rows))


@given(catalogs, st.integers(1, 8), options, st.data())
def test_any_stretch_of_a_lane_is_the_same_however_it_is_asked_for(catalog, lanes, order_options, data):
    def fresh():
        return DatasetOrder("d", catalog, lanes=lanes, seed=1, options=order_options)

    lane = data.draw(st.integers(0, lanes - 1))
    length = 2 * catalog.rows + 3
    whole = fresh().rows(lane, 0, length)
    start = data.draw(st.integers(0, length - 1))
    stop = data.draw(st.integers(start + 1, length))
    assert fresh().rows(lane, start, stop).tolist() == whole[start:stop].tolist()
    assert fresh().rows(lane, start, start + 1).tolist() == whole[start : start + 1].tolist()


@given(catalogs, st.integers(1, 64))
def test_segments_tile_the_rows_and_never_cross_what_the_format_reads_at_once(catalog, lanes):
    starts = segment_starts(catalog, lanes)
    assert starts[0] == 0 and starts[-1] == catalog.rows
    assert (np.diff(starts) > 0).all()
    edges = catalog.row_starts
    if catalog.sequential:
        edges = np.append(edges[:-1][np.diff(catalog.group_shard, prepend=-1) > 0], catalog.rows)
    assert set(edges.tolist()) <= set(starts.tolist())


def test_without_shuffling_rows_come_as_they_stand():
    catalog = catalog_of([5, 7, 3], 2)
    plain = OrderOptions(shuffle_shards=False, shuffle_within_shard=False)
    order = DatasetOrder("d", catalog, lanes=3, seed=9, options=plain)
    assert np.concatenate([order.rows(lane, 0, 5) for lane in range(3)]).tolist() == list(range(15))


def test_epochs_and_seeds_and_names_give_different_orders():
    catalog = catalog_of([50] * 10, 2)

    def rows(name="d", seed=0, start=0, **kwargs):
        return (
            DatasetOrder(name, catalog, lanes=1, seed=seed, options=OrderOptions(**kwargs))
            .rows(0, start, start + 500)
            .tolist()
        )

    orders = [rows(), rows(seed=1), rows(name="e"), rows(start=500)]
    assert all(a != b for i, a in enumerate(orders) for b in orders[i + 1 :])
    assert rows(reshuffle=False) == rows(start=500, reshuffle=False)


@given(st.integers(0, 2**64 - 1), st.integers(1, 3000))
def test_permutations_are_permutations(key, n):
    assert sorted(feistel(key, n, np.arange(n)).tolist()) == list(range(n))
    assert sorted(shuffled_indices(key, n).tolist()) == list(range(n))


def test_a_feistel_permutation_of_a_huge_domain_needs_no_array_of_it():
    image = feistel(7, 10**13, np.arange(1000))
    assert len(set(image.tolist())) == 1000
    assert 0.4 < image.mean() / 10**13 < 0.6


@given(st.lists(st.tuples(catalogs, options), min_size=1, max_size=6), st.integers(1, 64), st.data())
def test_rows_of_several_datasets_are_those_of_each(several, lanes, data):
    orders = [
        DatasetOrder(f"d{d}", catalog, lanes=lanes, seed=1, options=order_options)
        for d, (catalog, order_options) in enumerate(several)
    ]
    lane = data.draw(st.integers(0, lanes - 1))
    starts = data.draw(st.lists(st.integers(0, 500), min_size=len(orders), max_size=len(orders)))
    counts = data.draw(st.lists(st.integers(1, 80), min_size=len(orders), max_size=len(orders)))
    apart = [order.rows(lane, begin, begin + count) for order, begin, count in zip(orders, starts, counts, strict=True)]
    assert DatasetOrder.rows_of(orders, lane, starts, counts).tolist() == np.concatenate(apart).tolist()


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(1, 2**45), st.integers(0)), min_size=2, max_size=9))
def test_each_index_goes_through_a_feistel_permutation_of_its_own(each):
    keys, sizes, indices = zip(*[(key, n, index % n) for key, n, index in each], strict=True)
    together = feistel(np.array(keys, np.uint64), np.array(sizes), np.array(indices))
    assert together.tolist() == [
        int(feistel(k, n, np.array([i]))[0]) for k, n, i in zip(keys, sizes, indices, strict=True)
    ]
