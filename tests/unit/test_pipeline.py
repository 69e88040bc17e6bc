"""Building and using a pipeline: what it offers, and what it says to those who get it wrong."""

import contextlib
import gc
import hashlib
import json
import logging
import multiprocessing
import os
import pickle
import subprocess
import sys
import threading
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import train_tiny_tokenizer
from zephon import DataError, DataRecipe, Pipeline, PipelineError, TokenizerError, TopologyError
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource, TokenEstimation

WORDS = [f"document {i} has some words in it" for i in range(200)]


def source_of(*texts, **arguments):
    datasets = [Dataset.from_dict(f"d{i}", {"text": rows}) for i, rows in enumerate(texts or [WORDS])]
    return StaticMixtureWorkSource(datasets=datasets, **arguments)


def pipeline_of(
    tokenizer, *texts, seq_len=16, microbatch=2, runner="inline", options=None, drop_last=True, **arguments
):
    return (
        Pipeline(source_of(*texts, **arguments))
        .options(**{"runner": runner, **(options or {})})
        .tokenize(tokenizer)
        .pack_flat(seq_len)
        .batch(microbatch, drop_last=drop_last)
    )


def test_the_example_of_the_documentation_runs(tmp_path, tiny_tokenizer):
    for name in ("wiki", "news"):
        (tmp_path / name).mkdir()
        pq.write_table(pa.table({"text": [f"{name} {text}" for text in WORDS]}), tmp_path / name / "0.parquet")
    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_path("wiki", tmp_path / "wiki"), Dataset.from_path("news", tmp_path / "news")],
        mixture={"wiki": 0.5, "news": 0.5},
        token_estimation=TokenEstimation(),
        seed=42,
    )
    pipeline = (
        Pipeline(source)
        .options(io_options={"cache": {"enabled": True}})
        .tokenize(tokenizer_id=str(tiny_tokenizer), field="text", parallelism=4)
        .pack_flat(max_length=64, algorithm="wrap")
        .shuffle(buffer_size=32, seed=42)
        .batch(microbatch_size=8)
    )
    for n, batch in enumerate(pipeline):
        fields = batch.to_training()
        assert fields["input_ids"].shape == fields["labels"].shape == (8, 64)
        if n == 20:
            break
    shares = pipeline.mixture()
    assert set(shares) == {"wiki", "news"} and abs(shares["wiki"].achieved - 0.5) < 0.05
    plan = pipeline.explain()
    words = ("wiki", "news", "tokenize", "fastokens", "pack_flat", "shuffle", "workers", "lanes", "window", "bound")
    assert [word for word in words if word not in plan] == []


def test_every_method_gives_a_new_pipeline_and_leaves_the_old_one_alone(tiny_tokenizer):
    base = Pipeline(source_of()).options(runner="inline").tokenize(tiny_tokenizer)
    short, long = base.pack_flat(8).batch(1), base.pack_flat(32).batch(1)
    assert next(iter(short)).tokens.shape == (1, 9)
    assert next(iter(long)).tokens.shape == (1, 33)


def test_iterating_goes_on_where_it_stopped_and_starts_over_after_the_end(tiny_tokenizer):
    pipeline = pipeline_of(tiny_tokenizer, repeat=False)
    numbers = [next(iter(pipeline)).sequence_numbers[0] for _ in range(3)]
    assert numbers == [0, 2, 4]
    rest = [batch.sequence_numbers[0] for batch in pipeline]
    assert rest[0] == 6
    assert [batch.sequence_numbers[0] for batch in pipeline] == [*numbers, *rest]


def test_closing_after_the_end_starts_over_too(tiny_tokenizer):
    pipeline = pipeline_of(tiny_tokenizer, repeat=False, runner="threads")
    counts = []
    for _ in range(2):
        counts.append(sum(1 for _ in pipeline))
        pipeline.close()
    assert counts[0] == counts[1] > 0


def test_several_groups_over_data_that_ends_need_a_word_between_them(tiny_tokenizer):
    options = {"canonical_replicas": 4, "dp_degree": 2}
    assert list(pipeline_of(tiny_tokenizer, repeat=False, options=options)), "of one feed all groups see the end"
    options["feeds"] = 2
    with pytest.raises(PipelineError, match=r"2 data-parallel groups.*combine_flag"):
        next(iter(pipeline_of(tiny_tokenizer, repeat=False, options=options)))
    assert list(pipeline_of(tiny_tokenizer, repeat=False, options={**options, "combine_flag": bool}))


def test_at_the_end_what_is_left_out_is_reported(tiny_tokenizer, caplog):
    with caplog.at_level(logging.INFO, logger="zephon"):
        batches = list(pipeline_of(tiny_tokenizer, repeat=False, microbatch=7))
    assert {len(batch) for batch in batches} == {7}
    (line,) = [record.message for record in caplog.records if "the data has ended" in record.message]
    assert f"after {7 * len(batches)} records" in line and "left out" in line
    pipeline = pipeline_of(tiny_tokenizer, repeat=False, microbatch=7)
    assert pipeline.left_over is None
    handed_out = sum(int(batch.lengths.sum()) for batch in pipeline)
    left = pipeline.left_over
    assert handed_out + left.tokens + 17 * left.records == pipeline.mixture()["d0"].tokens
    kept = list(pipeline_of(tiny_tokenizer, repeat=False, microbatch=7, drop_last=False))
    assert 0 < len(kept[-1]) <= 7 and sum(len(batch) for batch in kept) > 7 * len(batches)


def test_rows_without_text_are_skipped_and_counted(tiny_tokenizer):
    rows = ["some text", None, "", " \n\t", "more text", "\u3000"] * 10
    pipeline = pipeline_of(tiny_tokenizer, rows, repeat=False, drop_last=False)
    assert sum(len(batch) for batch in pipeline)
    counts = pipeline.mixture()["d0"]
    assert (counts.rows, counts.skipped) == (60, 40)


@pytest.mark.parametrize("runner", ["inline", "threads"])
@pytest.mark.parametrize("estimation", [None, TokenEstimation()])
def test_datasets_without_any_text_are_an_error_and_no_hang(tiny_tokenizer, runner, estimation):
    blank = pipeline_of(tiny_tokenizer, [None, " "] * 50, runner=runner)
    with pytest.raises(DataError, match="null, empty or only white space"):
        next(iter(blank))
    two = pipeline_of(tiny_tokenizer, WORDS, [""], runner=runner, token_estimation=estimation)
    if estimation:
        with pytest.raises(DataError, match='"d1": no row gives tokens'):
            next(iter(two))
    else:
        assert len(next(iter(two)))
    two.close()


def test_text_that_spells_a_special_token_stays_text(tiny_tokenizer):
    pipeline = pipeline_of(tiny_tokenizer, ["a <|eos|> b <|bos|> c"], repeat=False, drop_last=False, seq_len=40)
    (batch,) = pipeline
    tokens = batch.tokens[0, : batch.lengths[0]].tolist()
    assert tokens.count(0) == 1 and tokens.count(1) == 1 and (tokens[0], tokens[-1]) == (0, 1)


@pytest.mark.parametrize(
    ("policy", "ends"), [("auto", (0, 1)), ("bos_eos", (0, 1)), ("bos", (0, None)), ("eos", (None, 1)), ("none", ())]
)
def test_special_token_policies(tiny_tokenizer, policy, ends):
    source = source_of(["xy"], repeat=False)
    pipeline = Pipeline(source).options(runner="inline").tokenize(tiny_tokenizer, special_tokens=policy)
    (batch,) = pipeline.pack_flat(20).batch(1, drop_last=False)
    tokens = batch.tokens[0, : batch.lengths[0]].tolist()
    bos, eos = ends or (None, None)
    assert (tokens[0] == 0) == (bos == 0) and (tokens[-1] == 1) == (eos == 1)


def test_a_policy_that_needs_a_token_the_tokenizer_lacks_is_refused(tmp_path):
    bare = train_tiny_tokenizer(tmp_path, eos=None)
    with pytest.raises(TokenizerError, match=r"EOS|end"):
        next(iter(pipeline_of(bare)))


def test_a_document_of_ten_megabytes_streams_like_any_other(tiny_tokenizer):
    word = hashlib.sha256(b"x").hexdigest()
    huge = " ".join(word[i % 60 : i % 60 + 7] for i in range(1_400_000))
    pipeline = pipeline_of(
        tiny_tokenizer, ["first", huge, "last"], repeat=False, shuffle_within_shard=False, shuffle_shards=False,
        seq_len=2047, microbatch=1, drop_last=False, runner="threads",
    )  # fmt: skip
    tokens = sum(int(batch.lengths.sum()) for batch in pipeline)
    assert tokens == pipeline.mixture()["d0"].tokens > 1_400_000


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"dp_degre": 2}, PipelineError, r'unknown option "dp_degre"\. Did you mean "dp_degree"\?'),
        ({"runner": "fibers"}, PipelineError, 'runner is "fibers"'),
        ({"flush_every_k_chunks": 0}, PipelineError, "flush_every_k_chunks is 0"),
        ({"canonical_replicas": 2**21}, PipelineError, "canonical_replicas is 2097152; expected an integer from 1 to"),
        ({"canonical_replicas": 6, "dp_degree": 4}, TopologyError, "6 lanes"),
        ({"dp_degree": 2}, TopologyError, "neither canonical_replicas"),
        ({"canonical_replicas": 4, "global_batch": 6}, TopologyError, "global batch of 6"),
    ],
)
def test_wrong_options_are_refused_before_the_first_batch(tiny_tokenizer, options, error, text):
    with pytest.raises(error, match=text):
        next(iter(pipeline_of(tiny_tokenizer, options=options)))


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda p, t: p.batch(1), "lacks tokenize"),
        (lambda p, t: p.tokenize(t).batch(1), "lacks pack_flat"),
        (lambda p, t: p.tokenize(t).pack_flat(8), "lacks batch"),
        (
            lambda p, t: p.pack_flat(8).tokenize(t).batch(1),
            "in the order pack_flat, tokenize, batch; they must come as",
        ),
        (lambda p, t: p.tokenize(t).pack_flat(8).pack_flat(8).batch(1), "pack_flat twice"),
        (lambda p, t: p.tokenize(t).pack_flat(0), "max_length is 0"),
        (lambda p, t: p.tokenize(t).pack_flat(8, "tetris"), 'algorithm is "tetris"'),
        (lambda p, t: p.shuffle(0), "buffer_size is 0"),
        (lambda p, t: p.batch(2.5), "microbatch_size is 2.5"),
        (lambda p, t: p.tokenize(t, field=""), 'field is ""'),
        (lambda p, t: p.tokenize(t, parallelism="4"), 'parallelism is "4"'),
        (lambda p, t: p.tokenize(t, parallelism=0), "parallelism is 0"),
        (lambda p, t: p.pack_flat(8, parallelism=-1), "parallelism is -1"),
        (lambda p, t: p.batch(1, drop_last=5), "drop_last is 5"),
    ],
)
def test_operators_that_do_not_fit_are_refused(tiny_tokenizer, build, text):
    with pytest.raises(PipelineError, match=text):
        next(iter(build(Pipeline(source_of()), tiny_tokenizer)))


def test_a_dataset_may_name_its_own_text_column(tiny_tokenizer):
    source = StaticMixtureWorkSource(
        datasets=[
            Dataset.from_dict("a", {"text": WORDS}),
            Dataset.from_dict("b", {"body": WORDS}, text_field="body"),
        ]
    )
    pipeline = Pipeline(source).options(runner="inline").tokenize(tiny_tokenizer).pack_flat(64).batch(50)
    batch = next(iter(pipeline))
    assert set(batch.provenance().column("dataset").to_pylist()) == {"a", "b"}


def test_an_error_in_the_middle_comes_after_the_batches_before_it_and_the_pipeline_can_go_on(tmp_path, tiny_tokenizer):
    folder = tmp_path / "d"
    folder.mkdir()
    for n in range(3):
        pq.write_table(pa.table({"text": WORDS}), folder / f"{n}.parquet", row_group_size=50)
    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_path("d", folder)], shuffle_shards=False, shuffle_within_shard=False, repeat=False
    )
    pipeline = Pipeline(source).options(
        prefetch_buffer_size=1, prefetch_batches=1, io_options={"cache": {"memory_bytes": 1}}
    )
    pipeline = pipeline.tokenize(tiny_tokenizer).pack_flat(64).batch(1)
    whole = [batch.digests[0] for batch in pipeline]
    good = (folder / "2.parquet").read_bytes()
    (folder / "2.parquet").write_bytes(good[:100])
    broken = pipeline.options()
    seen = []
    with pytest.raises(DataError, match=r"2\.parquet"):
        seen += [batch.digests[0] for batch in broken]
    assert not seen  # told before the first batch, since the catalog has to look at it again
    (folder / "2.parquet").write_bytes(good)
    assert [batch.digests[0] for batch in broken] == whole


def test_threads_end_when_a_stream_is_dropped_closed_or_used_up(tiny_tokenizer):
    def running():
        return {thread for thread in threading.enumerate() if thread.name.startswith("zephon-") and thread.is_alive()}

    before = running()
    dropped = pipeline_of(tiny_tokenizer, runner="threads")
    next(iter(dropped))
    closed = pipeline_of(tiny_tokenizer, runner="threads")
    next(iter(closed))
    closed.close()
    assert list(pipeline_of(tiny_tokenizer, runner="threads", repeat=False))
    del dropped
    gc.collect()
    deadline = time.monotonic() + 20
    while running() - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running() - before


def test_closing_a_stream_does_not_lose_its_place(tiny_tokenizer):
    pipeline = pipeline_of(tiny_tokenizer, runner="threads")
    other = pipeline_of(tiny_tokenizer)
    for n in range(5):
        if n in (2, 3):
            pipeline.close()
        assert next(iter(pipeline)).digests == next(iter(other)).digests
    pipeline.close()


def test_from_recipe_gives_the_same_stream_as_spelling_it_out(tmp_path, tiny_tokenizer):
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"text": WORDS}), tmp_path / "data" / "a.parquet")
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(
        "seed = 5\nchunk_size = 64\nshuffle_buffer_size = 8\ncanonical_replicas = 2\n"
        '[[sources]]\nname = "a"\npath = "data"\nweight = 2.0\n'
    )
    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_path("a", tmp_path / "data")], mixture={"a": 1.0}, seed=5, chunk_size=64
    )
    spelled = (
        Pipeline(source)
        .options(canonical_replicas=2, runner="inline")
        .tokenize(tiny_tokenizer)
        .pack_flat(16)
        .shuffle(8, seed=5)
        .batch(4)
    )
    for form in (recipe, str(recipe), DataRecipe.from_toml(recipe)):
        made = Pipeline.from_recipe(form, tokenizer=tiny_tokenizer, seq_len=16, microbatch_size=4)
        for n, (a, b) in enumerate(zip(made, spelled.options(), strict=False)):
            assert a.digests == b.digests
            if n == 5:
                break
        made.close()


def test_a_first_batch_imports_neither_pandas_nor_torch(tmp_path, tiny_tokenizer):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        lines = "".join(json.dumps({"text": text}) + "\n" for text in [*WORDS, ""])
        (tmp_path / name / "0.jsonl").write_text(lines)
        pq.write_table(pa.table({"text": [*WORDS, None]}), tmp_path / f"{name}.parquet")
    program = """
import sys
from zephon import Pipeline
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource
folder, tokenizer = sys.argv[1:]
datasets = [Dataset.from_path(n, f"{folder}/{n}") for n in ("a", "b", "a.parquet", "b.parquet")]
source = StaticMixtureWorkSource(datasets=datasets)
for _ in range(2):  # without an index, and with one
    batch = next(iter(Pipeline(source).tokenize(tokenizer).pack_flat(64).shuffle(8).batch(4)))
    batch.to_training(as_numpy=True), batch.digests, batch.provenance()
print(sorted({"pandas", "torch"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path, tiny_tokenizer], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_failure_inside_a_batch_loses_no_record(tmp_path, tiny_tokenizer):
    calls = []

    def flag(has_record):
        calls.append(has_record)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return has_record

    def build(**options):
        return pipeline_of(tiny_tokenizer, repeat=False, microbatch=6, options={"canonical_replicas": 2, **options})

    wanted = [batch.digests for batch in build(global_batch=4)]
    interrupted = build(global_batch=4, combine_flag=flag)  # microbatches of 6 records span steps of 4
    got = []
    for _ in range(2):
        with contextlib.suppress(KeyboardInterrupt):
            for batch in interrupted:
                got.append(batch.digests)
    assert got == wanted and len(calls) > 4


def test_a_pipeline_goes_on_in_a_forked_process_and_travels_by_pickle(tiny_tokenizer):
    pipeline = pipeline_of(tiny_tokenizer, runner="threads")
    stream = iter(pipeline)
    for _ in range(3):
        next(stream)
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)

    def child():
        send.send([next(stream).digests, next(iter(pipeline)).digests])
        os._exit(0)

    process = context.Process(target=child)
    process.start()
    assert receive.poll(60)
    in_child = receive.recv()
    process.join()
    pickled = iter(pickle.loads(pickle.dumps(pipeline)))
    assert [next(pickled).digests for _ in range(2)] == in_child == [next(stream).digests for _ in range(2)]
    pipeline.close()
