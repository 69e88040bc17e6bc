"""What becomes of a row depends on its values, and not on the rows that come with it."""

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from zephon.ops.filter import Filter
from zephon.ops.functions import MapBatches, MapTransform
from zephon.ops.rows import Rows, apply_all
from zephon.ops.text import TextTemplate
from zephon.ops.trial import Sample, probe

plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**53 + 1, 2**63, -(2**63)]),
    st.floats(width=32),
    st.text(max_size=2),
    st.just("\ud800"),
    st.binary(max_size=2),
)
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
)
rows = st.dictionaries(st.sampled_from(["x", "y", "number"]), values, max_size=3)
results = st.one_of(rows, st.none(), st.lists(rows, max_size=2), st.just(7))


def outcome(operators, table, cuts):
    """Rows with their places, and faults, of the table cut into blocks."""
    kept, failed, kinds = [], [], set()
    for start, stop in zip([0, *cuts], [*cuts, table.num_rows], strict=True):
        block = Rows(table.slice(start, stop - start), np.arange(start, stop), skips=True)
        apply_all(operators, block)
        kept += [(place, repr(row)) for place, row in zip(block.places.tolist(), block.as_dicts(), strict=True)]
        failed += {fault[0]: fault for fault in reversed(block.failed)}.values()
        if block.table.num_rows:
            kinds.add(str(block.table.schema))
    return kept, sorted(failed), kinds


@settings(max_examples=60)
@given(st.lists(results, min_size=1, max_size=12), st.data())
def test_what_maps_give_does_not_depend_on_where_blocks_are_cut(given_results, data):
    table = pa.table({"number": list(range(len(given_results)))})
    tried = data.draw(st.integers(1, len(given_results)))
    operator = MapTransform(lambda row: given_results[row["number"]])
    first = Sample(np.arange(tried), table.slice(0, tried))
    [typed] = probe([operator], iter([first]), "d")[0]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(given_results)), max_size=4)))
    whole = outcome([typed], table, [])
    cut = outcome([typed], table, cuts)
    assert cut[:2] == whole[:2]
    assert cut[2] <= whole[2]
    assert len({place for place, _, _ in whole[1]}) == len(whole[1])
    assert not {place for place, _ in whole[0]} & {place for place, _, _ in whole[1]}


numbers = st.one_of(st.none(), st.integers(-3, 3), st.sampled_from([2**62, 2**63 - 1, -(2**63)]))


@settings(max_examples=60)
@given(st.lists(st.tuples(numbers, st.sampled_from([None, b"a", b"\xff", b"b"])), min_size=1, max_size=12), st.data())
def test_faults_of_filters_templates_and_batches_do_not_depend_on_where_blocks_are_cut(given_rows, data):
    table = pa.table(
        {
            "number": pa.array([number for number, _ in given_rows], pa.int64()),
            "raw": pa.array([raw for _, raw in given_rows], pa.binary()),
        }
    )
    chain = [
        Filter("number * 4 != 8 or number is null"),
        TextTemplate("{raw} {number}"),
        MapBatches(lambda block: block.set_column(0, "number", pa.array(block.column("number").to_pylist()))),
        Filter("number in [1, 300, 2.5] or abs(number + 1) > 1 or number is null"),
    ]
    typed = probe(chain, iter([Sample(np.arange(1), table.slice(0, 1))]), "d")[0]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(given_rows)), max_size=4)))
    assert outcome(typed, table, cuts)[:2] == outcome(typed, table, [])[:2]
