"""Packing as a user meets it: reports, efficiency, groups, resuming inside a window, and what is refused."""

import json

import numpy as np
import pytest

from support import step_digests
from zephon import DataError, DataRecipe, Pipeline, PipelineError
from zephon.columns.records import TokenBlock
from zephon.io import Dataset
from zephon.ops.base import PackCounts
from zephon.ops.bins import BinPacker
from zephon.ops.pack import PackFlat, PackSequences
from zephon.work import StaticMixtureWorkSource

# Lengths of 20 to 400 characters, now and then far more.
PAGES = ["page of words " * (2 + i * 7919 % 27) + "end " * (400 * (i % 97 == 0)) for i in range(3000)]


def pipeline_over(tokenizer, *, datasets=None, lanes=1, batch=8, groups=1, group=0, repeat=True, chunk=3000, **options):
    source = StaticMixtureWorkSource(
        datasets=datasets or [Dataset.from_dict("pages", {"text": PAGES})], chunk_size=chunk, seed=4, repeat=repeat
    )
    options = {"runner": "inline", "canonical_replicas": lanes, "global_batch": batch, **options}
    return Pipeline(source).options(dp_degree=groups, dp_group_id=group, **options).tokenize(tokenizer)


def test_best_fit_fills_995_of_1000_places_on_web_like_lengths():
    """At 4,096 with 64 bins, the padding of drains and of the end of a window included."""
    seq_len = 4096
    draw = np.random.default_rng(1)
    counts = {}
    for algorithm in ("first_fit", "best_fit", "best_fit_wrap"):
        counts[algorithm] = PackCounts()
        packer = BinPacker(
            seq_len + 1,
            algorithm=algorithm,
            num_bins=64,
            max_documents=None,
            split=True,
            kinds=np.zeros(1, dtype=np.int64),
            stretch=256,
            pad_token=0,
            counts=counts[algorithm],
        )
        for chunk in range(16):
            lengths = np.exp(draw.normal(np.log(420), 1.05, size=1024)).astype(np.int64) + 1
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            n = np.arange(1024)
            zero = np.zeros(1, dtype=np.int64)
            tokens = np.zeros(offsets[-1], dtype=np.uint32)
            packer.push(TokenBlock(tokens, offsets, np.zeros(1024, dtype=np.int32), n, n, chunk, zero, zero))
        packer.flush()  # as at the end of a window
    efficiency = {name: c.tokens / (c.records * (seq_len + 1)) for name, c in counts.items()}
    assert efficiency["best_fit"] >= 0.995 and efficiency["first_fit"] >= 0.99
    assert efficiency["best_fit_wrap"] >= 0.999


@pytest.mark.parametrize("how", ["pack_flat", "pack_sequences"])
@pytest.mark.parametrize("lanes", [1, 4])
def test_a_run_is_entered_inside_a_window_where_nothing_was_held(tiny_tokenizer, how, lanes):
    """One window holds all 3,000 pages, some hundreds of records per lane."""

    def build(**options):
        pipeline = pipeline_over(tiny_tokenizer, lanes=lanes, batch=4 * lanes, **options)
        return getattr(pipeline, how)(511, "best_fit", num_bins=4).shuffle(8 * lanes, seed=1).batch(lanes)

    wanted = step_digests([build()], 80 // lanes + 4, 4 * lanes)
    first = build()
    step_digests([first], 80 // lanes, 4 * lanes)
    state = json.loads(json.dumps(first.checkpoint()))
    entered = [start for start in state["lanes"].values() if start[2] == 0 and start[3] > 0]
    assert entered if lanes == 1 else state["lanes"], "a lane is entered after the start of the window"
    for start in state["lanes"].values():
        assert len(start) == 6 and start[4] == 0
    groups = [build(groups=lanes, group=g).restore(state) for g in range(lanes)]
    assert step_digests(groups, 4, 4 * lanes) == wanted[-4:]
    if lanes == 1:
        rows = build().restore(state)
        next(iter(rows))
        assert rows.mixture()["pages"].rows < 0.75 * first.mixture()["pages"].rows


def test_seeking_uses_the_windows_of_the_index(tmp_path, tiny_tokenizer):
    def build(**options):
        pipeline = pipeline_over(tiny_tokenizer, lanes=2, batch=4, chunk=100, **options)
        return pipeline.pack_flat(255, "best_fit", num_bins=8).shuffle(8).batch(2)

    whole = step_digests([build(flush_index=tmp_path)], 63, 4)
    sought = build(flush_index=tmp_path).seek(step=60)
    assert step_digests([sought], 3, 4) == whole[60:]
    assert sought.mixture()["pages"].rows < 0.5 * 60 * 4 * 256 / 40
    assert step_digests([build().seek(step=60)], 3, 4) == whole[60:]


@pytest.mark.parametrize("algorithm", ["wrap", "first_fit", "best_fit", "best_fit_wrap"])
def test_the_report_adds_up(tiny_tokenizer, algorithm):
    pipeline = pipeline_over(tiny_tokenizer, repeat=False, global_batch=None).pack_flat(255, algorithm, num_bins=8)
    pipeline = pipeline.batch(1, drop_last=False)
    assert pipeline.packing().records == 0 and pipeline.packing().efficiency == 1
    lengths, parts = [], {}
    for batch in pipeline:
        lengths += batch.lengths.tolist()
        for line in batch.provenance().to_pylist():
            parts.setdefault(line["row"], []).append(line["token_end"] - line["token_begin"])
    report = pipeline.packing()
    assert (report.records, report.slots) == (len(lengths), len(lengths) * 256)
    assert report.tokens == sum(lengths) == pipeline.mixture()["pages"].tokens
    assert report.efficiency == report.tokens / report.slots == pytest.approx(1 - report.padding)
    assert report.documents == len(parts) == len(PAGES)
    assert report.oversized == sum(sum(sizes) > 256 for sizes in parts.values()) > 0
    assert report.split == sum(len(sizes) > 1 for sizes in parts.values()) >= report.oversized
    assert report.dropped == report.dropped_tokens == 0
    assert pipeline.left_over.tokens == 0


def test_long_documents_are_left_out_and_counted_where_asked(tiny_tokenizer):
    pipeline = pipeline_over(tiny_tokenizer, repeat=False, global_batch=None).pack_sequences(255).batch(1)
    seen = [line for batch in pipeline for line in batch.provenance().to_pylist()]
    report = pipeline.packing()
    assert all(line["token_begin"] == 0 for line in seen) and report.split == 0
    assert report.dropped == report.oversized == len(PAGES) - len({line["row"] for line in seen}) > 0
    assert report.dropped_tokens == pipeline.mixture()["pages"].tokens - report.tokens


def test_records_hold_one_dataset_or_one_group_where_asked(tiny_tokenizer):
    datasets = [
        Dataset.from_dict("a", {"text": PAGES[:500]}, group="text"),
        Dataset.from_dict("b", {"text": PAGES[500:1000]}, group="text"),
        Dataset.from_dict("c", {"text": PAGES[1000:1500]}),
    ]
    for homogeneity, kinds in (("full", ["a", "b", "c"]), ("group", ["ab", "ab", "c"])):
        pipeline = pipeline_over(tiny_tokenizer, datasets=datasets, repeat=False, global_batch=None)
        pipeline = pipeline.pack_flat(255, "best_fit", homogeneity=homogeneity).batch(1)
        together = {frozenset(batch.block.span_dataset.tolist()) for batch in pipeline}
        assert all(len({kinds[d] for d in datasets_of_record}) == 1 for datasets_of_record in together)
        assert frozenset([0, 1]) in together or homogeneity == "full"
        fingerprint = pipeline.checkpoint()["fingerprint"]
        assert f"homogeneity={homogeneity}" in fingerprint["pack_algorithm"]
        assert fingerprint.get("groups") == ({"a": "text", "b": "text"} if homogeneity == "group" else None)
    mixed = pipeline_over(tiny_tokenizer, datasets=datasets, repeat=False, global_batch=None).pack_flat(255, "best_fit")
    assert any(len(set(batch.block.span_dataset.tolist())) == 3 for batch in mixed.batch(1))


@pytest.mark.parametrize("how", ["pack_flat", "pack_sequences"])
def test_a_run_of_nothing_but_oversized_documents_is_refused(tiny_tokenizer, how):
    pipeline = pipeline_over(tiny_tokenizer, datasets=[Dataset.from_dict("d", {"text": ["word " * 50] * 5})])
    options = {"oversized": "drop"} if how == "pack_flat" else {}
    with pytest.raises(DataError, match=r"no row of d has tokens to pack: all .* longer than a record of 9 tokens"):
        next(iter(getattr(pipeline, how)(8, "best_fit", **options).batch(1)))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_bins": 0}, "pack_flat num_bins is 0; expected an integer from 1 to 65536"),
        ({"num_bins": 1 << 20}, "pack_flat num_bins is 1048576"),
        ({"num_bins": "many"}, 'pack_flat num_bins is "many"'),
        ({"max_documents_per_record": 0}, "max_documents_per_record is 0; expected an integer of at least 1"),
        ({"max_documents_per_record": True}, "max_documents_per_record is true"),
        ({"homogeneity": "some"}, 'homogeneity is "some"; expected "none", "group" or "full"'),
        ({"oversized": "keep"}, 'oversized is "keep"; expected "split" or "drop"'),
        ({"algorithm": ["best_fit"]}, "algorithm is \\['best_fit'\\]"),
        ({"algorithm": "wrap", "homogeneity": "full"}, 'but algorithm "wrap" fills every record'),
        ({"algorithm": "wrap", "oversized": "drop"}, 'but algorithm "wrap" fills every record'),
        ({"algorithm": "wrap", "max_documents_per_record": 3}, 'but algorithm "wrap" fills every record'),
    ],
)
def test_what_cannot_be_meant_is_refused(options, text):
    with pytest.raises(PipelineError, match=text):
        PackFlat(**{"max_length": 8, "algorithm": "best_fit", **options})


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"algorithm": "wrap"}, 'pack_sequences algorithm is "wrap"; expected .* sequences are never cut'),
        ({"algorithm": "best_fit_wrap"}, "pack_flat cuts"),
        ({"algorithm": "tetris"}, 'pack_sequences algorithm is "tetris"; expected "first_fit" or "best_fit"'),
        ({"oversized": "split"}, "sequences are never cut"),
        ({"max_length": 0}, "pack_sequences max_length is 0"),
    ],
)
def test_sequences_are_never_cut(options, text):
    with pytest.raises(PipelineError, match=text):
        PackSequences(**{"max_length": 8, **options})


def test_groups_and_bins_must_go_together(tiny_tokenizer):
    datasets = [Dataset.from_dict(name, {"text": PAGES[:9]}) for name in "abc"]
    pipeline = pipeline_over(tiny_tokenizer, datasets=datasets)
    with pytest.raises(PipelineError, match='homogeneity is "group", but no dataset has a group; give some of a, b, c'):
        pipeline.pack_flat(8, "best_fit", homogeneity="group").batch(1).explain()
    with pytest.raises(PipelineError, match="num_bins 2, and records of 3 kinds"):
        pipeline.pack_flat(8, "best_fit", homogeneity="full", num_bins=2).batch(1).explain()
    told = pipeline.pack_flat(8, "best_fit", homogeneity="full", num_bins=3).batch(1).explain()
    assert "pack_flat: best_fit num_bins=3" in told and "3 bins per lane" in told and "drained every 192" in told


def test_a_recipe_says_it_all(tmp_path, tiny_tokenizer):
    (tmp_path / "pages.jsonl").write_text("".join(json.dumps({"text": page}) + "\n" for page in PAGES[:200]))
    recipe = {"sources": [{"name": "pages", "path": str(tmp_path / "pages.jsonl"), "group": "web"}], "cache_dir": None}

    def packed(**keys):
        made = DataRecipe.from_dict({**recipe, **keys})
        pipeline = Pipeline.from_recipe(made, tokenizer=tiny_tokenizer, seq_len=255, microbatch_size=1, runner="inline")
        return pipeline.checkpoint()["fingerprint"]["pack_algorithm"]

    assert packed() == packed(pack_algorithm="wrap") == "wrap"
    every = "max_documents_per_record=3 homogeneity=group oversized=drop"
    keys = {"num_bins": 7, "max_documents_per_record": 3, "homogeneity": "group"}
    assert packed(pack_algorithm="first_fit", oversized="drop", **keys) == f"first_fit num_bins=7 {every}"
    assert packed(pack_mode="sequences", **keys) == f"sequences best_fit num_bins=7 {every}"
    with pytest.raises(PipelineError, match="never cut"):
        packed(pack_mode="sequences", oversized="split")
