"""Entering a run anywhere, leaving out steps of it, and the account of what was consumed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import combine_digests, step_digests
from support.examples import few
from support.runs import build_all
from zephon import CheckpointError, DataError, PipelineError, TopologyError
from zephon.config.topology import divisors
from zephon.io import Dataset
from zephon.loader import compact_index
from zephon.run.ledger import compare, read_ledger
from zephon.work import StaticMixtureWorkSource

SETTINGS = few(4)
WORDS = [f"document {i} " + "has some words in it " * (i % 7) for i in range(150)]
LANES, BATCH = 4, 8


def build(tokenizer, *, groups=1, group=0, seed=0, repeat=True, **options):
    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_dict("d", {"text": WORDS})], seed=seed, chunk_size=11, repeat=repeat
    )
    shape = {"lanes": LANES, "batch": BATCH, "seq_len": 19, "buffer": 40, "microbatch": 2}
    return build_all(source, tokenizer, groups=groups, **{**shape, **options})[group]


@SETTINGS
@given(st.integers(1, 30), st.sampled_from(divisors(LANES)), st.booleans())
def test_seeking_gives_what_streaming_there_gives_with_and_without_an_index(
    tmp_path_factory, tiny_tokenizer, step, groups, use
):
    index = tmp_path_factory.mktemp("index")
    whole = step_digests([build(tiny_tokenizer, flush_index=index)], 33, BATCH)
    options = {"flush_index": index} if use else {}
    sought = [build(tiny_tokenizer, groups=groups, group=g, **options).seek(step=step) for g in range(groups)]
    assert step_digests(sought, 3, BATCH) == whole[step : step + 3]
    state = [pipeline.checkpoint() for pipeline in sought]
    resumed = build(tiny_tokenizer).restore(state)
    assert step_digests([resumed], 2, BATCH) == step_digests(
        [build(tiny_tokenizer).seek(sequence_number=(step + 3) * BATCH)], 2, BATCH
    )


def test_an_index_saves_reading_what_lies_before(tmp_path, tiny_tokenizer):
    step_digests([build(tiny_tokenizer, flush_index=tmp_path)], 60, BATCH)

    def rows_read(pipeline):
        next(iter(pipeline))
        return pipeline.mixture()["d"].rows

    assert rows_read(build(tiny_tokenizer, flush_index=tmp_path).seek(step=50)) < 0.4 * rows_read(
        build(tiny_tokenizer).seek(step=50)
    )


def test_the_files_of_an_index_become_one_that_says_the_same(tmp_path, tiny_tokenizer):
    for steps in (10, 60, 60):
        whole = step_digests([build(tiny_tokenizer, flush_index=tmp_path)], steps, BATCH)
    step_digests([build(tiny_tokenizer, seed=1, flush_index=tmp_path)], 10, BATCH)
    sizes = [file.stat().st_size for file in tmp_path.glob("*.flush")]
    compact_index(tmp_path, build(tiny_tokenizer).compiled)
    files = list(tmp_path.glob("*.flush"))
    assert len(files) == 2 and sum(file.stat().st_size for file in files) < sum(sizes) / 2 + 512
    sought = build(tiny_tokenizer, flush_index=tmp_path).seek(step=50)
    assert step_digests([sought], 3, BATCH) == whole[50:53]


def test_a_damaged_index_entry_is_passed_over_and_a_foreign_index_refused(tmp_path, tiny_tokenizer):
    wanted = step_digests([build(tiny_tokenizer, flush_index=tmp_path)], 40, BATCH)
    (file,) = tmp_path.glob("*.flush")
    content = bytearray(file.read_bytes())
    for place in range(300, len(content), 77):
        content[place] ^= 0x41
    file.write_bytes(content[:-5])
    sought = build(tiny_tokenizer, flush_index=tmp_path).seek(step=36)
    assert step_digests([sought], 2, BATCH) == wanted[36:38]
    for other in tmp_path.glob("*.flush"):
        if other != file:
            other.unlink()
    with pytest.raises(CheckpointError, match="other data"):
        build(tiny_tokenizer, seed=5, flush_index=tmp_path).seek(step=3)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "either step or sequence_number"),
        ({"step": 1, "sequence_number": 8}, "either step or sequence_number"),
        ({"sequence_number": 6}, "multiple of 4"),
        ({"sequence_number": -4}, "expected an integer from 0"),
        ({"step": "one"}, 'step is "one"'),
    ],
)
def test_places_that_do_not_exist_are_refused(tiny_tokenizer, arguments, text):
    with pytest.raises(Exception, match=text) as caught:
        build(tiny_tokenizer).seek(**arguments)
    assert type(caught.value).__module__ == "zephon.errors"


@SETTINGS
@given(st.integers(0, 6), st.integers(1, 4), st.integers(0, 6), st.data())
def test_steps_left_out_keep_their_numbers_and_stay_out_after_a_resume(tiny_tokenizer, first, count, before, data):
    whole = step_digests([build(tiny_tokenizer)], 16, BATCH)
    wanted = whole[:first] + whole[first + count :]
    groups = data.draw(st.sampled_from(divisors(LANES)))
    pipelines = [build(tiny_tokenizer, groups=groups, group=g).skip(first, first + count) for g in range(groups)]
    numbers, got = [], []
    for steps in (before, 10 - before):
        if not steps:
            continue
        for _ in range(steps):
            records = {}
            for pipeline in pipelines:
                stream = iter(pipeline)
                for _ in range(BATCH // groups // 2):
                    batch = next(stream)
                    records.update(zip(batch.sequence_numbers.tolist(), batch.digests, strict=True))
            (step,) = {number // BATCH for number in records}
            numbers.append(step)
            got.append(records)
        states = [pipeline.checkpoint() for pipeline in pipelines]
        groups = data.draw(st.sampled_from(divisors(LANES)))
        pipelines = [build(tiny_tokenizer, groups=groups, group=g).restore(states) for g in range(groups)]
    assert numbers == [step for step in range(16) if not first <= step < first + count][:10]
    assert [combine_digests([r[n] for n in sorted(r)]) for r in got] == wanted[:10]


def test_skip_refuses_what_has_passed(tiny_tokenizer):
    pipeline = build(tiny_tokenizer)
    stream = iter(pipeline)
    for _ in range(BATCH // 2 * 3):
        next(stream)
    with pytest.raises(PipelineError, match=r"expected numbers from 3 \(steps done\) on"):
        pipeline.skip(2, 5)
    with pytest.raises(PipelineError, match=r"skip\(5, 5\)"):
        pipeline.skip(5, 5)
    with pytest.raises(PipelineError, match="global_batch"):
        build(tiny_tokenizer, batch=None).skip(5, 6)


@pytest.mark.parametrize(
    "move",
    [
        lambda pipeline: pipeline.seek(step=3),
        lambda pipeline: pipeline.skip(2, 3),
        lambda pipeline: pipeline.restore(pipeline.options().seek(step=3).checkpoint()),
    ],
)
def test_options_and_operators_after_the_place_are_refused_since_a_new_pipeline_would_begin_at_record_0(
    tiny_tokenizer, move
):
    pipeline = move(build(tiny_tokenizer))
    for change in (
        lambda: pipeline.options(prefetch_batches=2),
        lambda: pipeline.prefetch(2),
        lambda: pipeline.batch(1),
    ):
        with pytest.raises(PipelineError, match="options and operators come before restore, seek and skip"):
            change()


def consume(tokenizer, folder, groups, steps, state=None, **options):
    pipelines = [build(tokenizer, groups=groups, group=g, ledger=folder, **options) for g in range(groups)]
    if state:
        for pipeline in pipelines:
            pipeline.restore(state)
    step_digests(pipelines, steps, BATCH)
    states = [pipeline.checkpoint() for pipeline in pipelines]
    for pipeline in pipelines:
        pipeline.close()
    return states


def test_ledgers_of_one_run_on_any_topology_agree(tmp_path, tiny_tokenizer):
    consume(tiny_tokenizer, tmp_path / "a", 1, 8)
    state = consume(tiny_tokenizer, tmp_path / "b", 2, 3)
    consume(tiny_tokenizer, tmp_path / "b", 2, 2, state)  # killed here: its last two steps come again
    consume(tiny_tokenizer, tmp_path / "b", 4, 5, state)
    a, b = read_ledger(tmp_path / "a"), read_ledger(tmp_path / "b")
    assert compare(a, b) is None
    assert a.step_digests(BATCH) == b.step_digests(BATCH) and len(a.step_digests(BATCH)) == 8
    assert a.documents(0) == b.documents(0) and "d row " in a.documents(0)


def test_the_first_difference_of_two_runs_is_named(tmp_path, tiny_tokenizer):
    consume(tiny_tokenizer, tmp_path / "a", 1, 6)
    state = consume(tiny_tokenizer, tmp_path / "b", 1, 2)
    consume(tiny_tokenizer, tmp_path / "b", 2, 4, state)
    found = {file: file.read_bytes() for file in sorted((tmp_path / "b").glob("dp2-1-*.ledger"))}
    ((file, content),) = found.items()
    # The second record that group 1 consumed after the resume: step 2, record 2 * 8 + 3.
    broken = bytearray(content)
    broken[512 + 40 + 20] ^= 1
    file.write_bytes(broken)
    difference = compare(read_ledger(tmp_path / "a"), read_ledger(tmp_path / "b"))
    assert difference and (difference.step, difference.lane, difference.sequence) == (3, 3, 19)
    assert "step 3, lane 3" in difference.text and "d row" in difference.text
    file.write_bytes(content[: 512 + 40] + content[512 + 80 :])
    difference = compare(read_ledger(tmp_path / "a"), read_ledger(tmp_path / "b"))
    assert difference and difference.sequence == 19 and "only" in difference.text
    # Cut inside an entry, as a killed machine may leave it: only the steps that all ranks have finished are compared.
    file.write_bytes(content[: 512 + 80 + 13])
    assert compare(read_ledger(tmp_path / "a"), read_ledger(tmp_path / "b")) is None
    assert len(read_ledger(tmp_path / "b").step_digests(BATCH)) == 2


def test_ledgers_that_cannot_be_read_are_refused(tmp_path, tiny_tokenizer):
    with pytest.raises(DataError, match="holds no ledger"):
        read_ledger(tmp_path)
    (tmp_path / "x.ledger").write_bytes(b"")
    with pytest.raises(DataError, match="holds no ledger"):
        read_ledger(tmp_path)
    (tmp_path / "x.ledger").write_bytes(b"nonsense" * 100)
    with pytest.raises(DataError, match="header cannot be read"):
        read_ledger(tmp_path)
    consume(tiny_tokenizer, tmp_path / "a", 1, 2)
    (file,) = (tmp_path / "a").glob("*.ledger")
    file.with_name("other.ledger").write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match="contradicts itself"):
        read_ledger(tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        consume(tiny_tokenizer, tmp_path / "file", 1, 1)


def test_an_index_that_has_seen_another_takeover_serves_the_run_that_asks(tmp_path, tiny_tokenizer):
    """A takeover that is rolled back and done again elsewhere has the same data and other places."""

    def source(continues=None, **weights):
        datasets = [Dataset.from_dict(name, {"text": [f"{name} {text}" for text in WORDS]}) for name in weights]
        return StaticMixtureWorkSource(datasets, mixture=weights, chunk_size=11, continues=continues)

    old = source(a=1, b=1)
    new = source(old, b=1, c=3)

    def run(which, **options):
        return build_all(
            which, tiny_tokenizer, lanes=LANES, batch=BATCH, seq_len=19, buffer=40, microbatch=2, **options
        )

    states = []
    (first,) = run(old)
    for steps in (3, 4):
        step_digests([first], steps, BATCH)
        states.append(first.checkpoint())
    runs, after = [], []
    for state in states:
        (pipeline,) = run(new, flush_index=tmp_path)
        step_digests([pipeline.restore(state)], 20, BATCH)
        after.append(pipeline.checkpoint())
        (whole,) = run(new)
        runs.append(step_digests([whole.restore(state).seek(step=0)], 27, BATCH))
    for state, digests in zip(after, runs, strict=True):
        for step in range(0, 25, 3):
            (pipeline,) = run(new, flush_index=tmp_path)
            assert step_digests([pipeline.restore(state).seek(step=step)], 2, BATCH) == digests[step : step + 2]


def test_a_run_that_accepted_a_change_of_its_records_has_an_index_of_its_own(tmp_path, tiny_tokenizer):
    first = build(tiny_tokenizer, flush_index=tmp_path)
    step_digests([first], 9, BATCH)
    second = build(tiny_tokenizer, buffer=80, flush_index=tmp_path).restore(first.checkpoint(), allow_changes="shuffle")
    step_digests([second], 20, BATCH)
    with pytest.raises(CheckpointError, match="restore one of its states"):
        second.seek(step=15)
    with pytest.raises(CheckpointError, match="written by a run with other data"):
        build(tiny_tokenizer, buffer=80, flush_index=tmp_path).seek(step=15)
    wanted = step_digests([build(tiny_tokenizer)], 17, BATCH)
    sought = build(tiny_tokenizer, flush_index=tmp_path).seek(step=15)
    assert step_digests([sought], 2, BATCH) == wanted[15:17]


def test_steps_of_another_global_batch_are_not_left_out_by_halves(tiny_tokenizer):
    first = build(tiny_tokenizer)
    step_digests([first], 3, BATCH)
    state = first.checkpoint()
    assert build(tiny_tokenizer).restore(state).skip(3, 4).skipped == ((24, 32),)
    assert build(tiny_tokenizer, batch=12).restore(state).skip(2, 3).skipped == ((24, 36),)
    with pytest.raises(
        TopologyError, match="global_batch is 16; expected a divisor of 24, the record where the run goes"
    ):
        build(tiny_tokenizer, batch=16).restore(state).skip(3, 4)
    with pytest.raises(TopologyError, match="Keep the global batch until record 64"):
        build(tiny_tokenizer, batch=16).skip(3, 4).restore(state)
    with pytest.raises(TopologyError, match="expected a divisor of 12, "):
        build(tiny_tokenizer).seek(sequence_number=12).skip(2, 3)
    with pytest.raises(TopologyError, match="expected a divisor of 12, "):
        build(tiny_tokenizer).skip(2, 3).seek(sequence_number=12)


@pytest.mark.parametrize(
    ("steps", "skip", "fitting"),
    [(4, (5, 6), [4, 8]), (4, (4, 8), [4, 8, 16, 32]), (3, (4, 6), [4, 8]), (4, (1, 3), [4, 8, 12, 16, 24, 32])],
)
def test_a_range_that_is_still_to_come_is_left_out_by_whole_steps_or_refused(tiny_tokenizer, steps, skip, fitting):
    first = build(tiny_tokenizer).skip(*skip)
    stream, (begin, end) = iter(first), (number * BATCH for number in skip)
    while first.cursor < steps * BATCH:
        next(stream)
    state, taken = first.checkpoint(), []
    for batch in (4, 8, 12, 16, 24, 32):
        try:
            later = build(tiny_tokenizer, batch=batch).restore(state)
        except TopologyError:
            continue
        taken.append(batch)
        numbers = [
            number for _, each in zip(range(50), later, strict=False) for number in each.sequence_numbers.tolist()
        ]
        assert all(step[-1] - step[0] == batch - 1 for step in zip(*[iter(numbers)] * batch, strict=False))
        assert not {*numbers} & {*range(begin, end)}
    assert taken == fitting


def test_a_state_inside_a_step_with_a_range_to_come_is_taken_by_the_run_itself(tiny_tokenizer):
    pipeline = build(tiny_tokenizer).skip(3, 4)
    stream = iter(pipeline)
    for _ in range(6):
        next(stream)
    state = pipeline.checkpoint()
    resumed = iter(build(tiny_tokenizer).restore(state))
    assert all((next(resumed).sequence_numbers == next(stream).sequence_numbers).all() for _ in range(8))
    with pytest.raises(TopologyError, match="expected a divisor of 12"):
        build(tiny_tokenizer, batch=16).restore(state)
