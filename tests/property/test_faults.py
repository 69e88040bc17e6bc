"""Damaged data under on_error = "skip": all sound rows, the same on any topology and after any resume."""

import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support import step_digests
from support.examples import few
from zephon import DataError, Pipeline, merge_checkpoints
from zephon.columns.faults import read_report
from zephon.config.topology import divisors
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

SETTINGS = few(5, deadline=None)
ROWS = 60  # per shard
GROUP = 12
SHARDS = 3


def text_of(shard, row):
    return f"shard {shard} row {row} " + "word " * ((shard + row) % 9)


# What becomes of one shard: each writes it to `path` with the rows `bad` damaged, and gives the rows that are lost.

BROKEN_LINES = {
    "cut": b'{"text": "cut of',
    "number": b'{"text": 7}',
    "list": b"[1, 2]",
    "latin-1": b'{"text": "caf\xe9"}',
    "surrogate": b'{"text": "\\ud800"}',
}


def jsonl_lines(shard, bad, kinds):
    """Lines, the bad ones each broken in one of several ways."""
    sound = [json.dumps({"text": text_of(shard, row)}).encode() for row in range(ROWS)]
    lines = [BROKEN_LINES[kinds[row % len(kinds)]] if row in bad else line for row, line in enumerate(sound)]
    return b"\n".join(lines) + b"\n"


def write_jsonl(path, shard, bad, kinds):
    path.write_bytes(jsonl_lines(shard, bad, kinds))
    return set(bad)


def write_jsonl_gz(path, shard, bad, kinds):
    path.write_bytes(gzip.compress(jsonl_lines(shard, bad, kinds), mtime=0))
    return set(bad)


def table_of(shard, bad, kind):
    """A table whose bad rows are no UTF-8."""
    texts = [b"\xff\xfe bad" if row in bad else text_of(shard, row).encode() for row in range(ROWS)]
    array = pa.array(texts, pa.binary())
    return pa.table({"text": array.view(pa.string()) if kind == "string" else array})


def write_parquet(path, shard, bad, kinds):
    """Bad rows, and one row group whose pages are overwritten."""
    pq.write_table(table_of(shard, bad, "binary"), path, row_group_size=GROUP, compression="zstd")
    lost = set(bad)
    if bad:
        group = min(bad) // GROUP
        chunk = pq.ParquetFile(path).metadata.row_group(group).column(0)
        start = chunk.dictionary_page_offset or chunk.data_page_offset
        raw = bytearray(path.read_bytes())
        raw[start : start + chunk.total_compressed_size] = b"\xa5" * chunk.total_compressed_size
        path.write_bytes(raw)
        lost |= set(range(group * GROUP, (group + 1) * GROUP))
    return lost


def write_arrow(path, shard, bad, kinds):
    with pa.ipc.new_file(path, pa.schema({"text": pa.string()})) as writer:
        writer.write_table(table_of(shard, bad, "string"), max_chunksize=GROUP)
    return set(bad)


FORMATS = {
    "parquet": write_parquet,
    "jsonl": write_jsonl,
    "jsonl.gz": write_jsonl_gz,
    "arrow": write_arrow,
}
KINDS = tuple(BROKEN_LINES)


@st.composite
def corpora(draw):
    """Format, damaged rows by shard, kinds of damage, and a shard that cannot be read at all, or None."""
    shards = [draw(st.sets(st.integers(0, ROWS - 1), max_size=5)) for _ in range(SHARDS)]
    return {
        "format": draw(st.sampled_from(list(FORMATS))),
        "bad": shards,
        "kinds": draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)),
        "cut_off": draw(st.sampled_from([None, 1])),
        "lanes": draw(st.sampled_from([1, 2, 4])),
        "chunk": draw(st.integers(3, 40)),
        "block": draw(st.sampled_from(["auto", "none", "global"])),
        "algorithm": draw(st.sampled_from(["wrap", "best_fit"])),
    }


def write(folder, corpus):
    """The files, and what is lost of each."""
    lost = []
    for shard, bad in enumerate(corpus["bad"]):
        path = folder / f"part-{shard}.{corpus['format']}"
        lost.append(FORMATS[corpus["format"]](path, shard, bad, corpus["kinds"]))
        if shard == corpus["cut_off"] and corpus["format"] != "jsonl":
            path.write_bytes(path.read_bytes()[:-20])
            lost[-1] = set(range(ROWS))
    return lost


def build(folder, corpus, tokenizer, *, groups=1, group=0, runner="inline", repeat=True, **options):
    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_path("web", folder)],
        seed=3,
        chunk_size=corpus["chunk"],
        shuffle_block_size=corpus["block"],
        repeat=repeat,
    )
    given = {"on_error": "skip", "error_budget": 1.0, "io_options": {"cache": {"enabled": False}}, **options}
    lanes = corpus["lanes"]
    return (
        Pipeline(source)
        .options(
            runner=runner,
            canonical_replicas=lanes,
            global_batch=lanes * 2,
            dp_degree=groups,
            dp_group_id=group,
            **given,
        )
        .tokenize(tokenizer)
        .pack_flat(15, corpus["algorithm"])
        .shuffle(5, seed=1)
        .batch(1, drop_last=False)
    )


@SETTINGS
@given(corpora())
def test_all_sound_rows_come_and_the_report_tells_the_others(tiny_tokenizer, tmp_path_factory, corpus):
    folder, report = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("report")
    lost = write(folder, corpus)
    pipeline = build(folder, corpus, tiny_tokenizer, repeat=False, on_error="quarantine", error_report=report)
    seen = {(line["shard"], line["row"]) for batch in pipeline for line in batch.provenance().to_pylist()}
    name = "part-{}." + corpus["format"]
    assert seen == {(name.format(s), row) for s in range(SHARDS) for row in range(ROWS) if row not in lost[s]}
    reported = {s: set() for s in range(SHARDS)}
    for entry in read_report(report):
        shard = int(entry["shard"].split("-")[1].split(".")[0])
        assert entry["dataset"] == "web" and entry["operator"] == "read" and entry["reason"]
        if entry["rows"] is None:
            reported[shard] |= set(range(ROWS))
            continue
        reported[shard] |= set(range(entry["row"], entry["row"] + entry["rows"]))
        assert entry["rows"] > 1 or entry["content"]
    assert [reported[s] for s in range(SHARDS)] == lost
    whole = {s for s in range(SHARDS) if s == corpus["cut_off"] and corpus["format"] != "jsonl"}
    assert pipeline.mixture()["web"].failed == sum(len(lost[s]) for s in range(SHARDS) if s not in whole)


@SETTINGS
@given(corpora(), st.data())
def test_batches_do_not_depend_on_topology_and_resumes(tiny_tokenizer, tmp_path_factory, corpus, data):
    folder = tmp_path_factory.mktemp("data")
    write(folder, corpus)
    batch = corpus["lanes"] * 2
    steps = [data.draw(st.integers(1, 5)) for _ in range(3)]
    wanted = step_digests([build(folder, corpus, tiny_tokenizer)], sum(steps), batch)
    got, states = [], None
    for count in steps:
        groups = data.draw(st.sampled_from(divisors(corpus["lanes"])))
        runner = data.draw(st.sampled_from(["inline", "threads"]))
        memory = data.draw(st.sampled_from([1, 1 << 20]))
        pipelines = [
            build(
                folder,
                corpus,
                tiny_tokenizer,
                groups=groups,
                group=group,
                runner=runner,
                prefetch_buffer_size=data.draw(st.sampled_from([None, 1, 300])),
                io_options={"cache": {"enabled": False, "memory_bytes": memory}},
            )
            for group in range(groups)
        ]
        for pipeline in pipelines if states else []:
            pipeline.restore(states)
        got += step_digests(pipelines, count, batch)
        states = [json.loads(json.dumps(pipeline.checkpoint())) for pipeline in pipelines]
        states = [merge_checkpoints(states)]
        for pipeline in pipelines:
            pipeline.close()
    assert got == wanted


@pytest.mark.deep
@SETTINGS
@given(corpora(), st.integers(0, 6))
def test_a_run_can_be_entered_at_any_step(tiny_tokenizer, tmp_path_factory, corpus, step):
    folder = tmp_path_factory.mktemp("data")
    write(folder, corpus)
    batch = corpus["lanes"] * 2
    wanted = step_digests([build(folder, corpus, tiny_tokenizer)], step + 2, batch)
    assert step_digests([build(folder, corpus, tiny_tokenizer).seek(step=step)], 2, batch) == wanted[step:]


@SETTINGS
@given(corpora())
def test_a_budget_that_is_too_small_stops_every_topology_with_the_same_verdict(
    tiny_tokenizer, tmp_path_factory, corpus
):
    """Per chunk: the worst of them decides, whoever reads it and from wherever."""
    folder = tmp_path_factory.mktemp("data")
    write(folder, {**corpus, "cut_off": None})
    verdicts = set()
    options = {"error_budget": 0.0, "error_budget_rows": 2, "repeat": False, "combine_flag": bool}
    for groups in divisors(corpus["lanes"]):
        stopped = False
        for group in range(groups):
            try:
                for _ in build(folder, corpus, tiny_tokenizer, groups=groups, group=group, **options):
                    pass
            except DataError as error:
                assert "error_budget_rows 2 allows 2" in str(error) and "\n" not in str(error)
                stopped = True
        verdicts.add(stopped)
    assert len(verdicts) == 1


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-30])


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [*((name, cut_short, "has changed") for name in FORMATS), ("parquet", os.unlink, "cannot open")],
)
def test_a_dataset_that_changes_under_the_run_is_never_skipped(tiny_tokenizer, tmp_path, name, change, message):
    corpus = {"format": name, "lanes": 1, "chunk": 40, "block": "none", "algorithm": "wrap"}
    for shard in range(SHARDS):
        FORMATS[name](tmp_path / f"part-{shard}.{name}", shard, set(), KINDS)
    pipeline = build(tmp_path, corpus, tiny_tokenizer, io_options={"cache": {"enabled": False, "memory_bytes": 1}})
    pipeline.explain()  # the last shard has been listed and scanned, and is not open
    stream = iter(pipeline)
    for path in sorted(tmp_path.iterdir()):
        change(path)
    with pytest.raises(DataError, match=message):
        for _ in range(300):
            next(stream)
