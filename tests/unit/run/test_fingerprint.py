"""Whatever decides data is in the fingerprint: every setting of every operator, dataset and source, changed in turn."""

import json
from copy import deepcopy
from dataclasses import fields, replace

import numpy as np
import pytest

from support import train_tiny_tokenizer
from support.operator_data import Doubled, Joined, every_other, reversed_texts, shout, two_of_each
from support.vision_data import file_of, image_tokenizer, picture
from zephon import CheckpointError, Pipeline
from zephon.config.keys import keys_of
from zephon.config.options import RunSettings
from zephon.io import Dataset
from zephon.ops.chat import TokenizeChat
from zephon.run import fingerprint
from zephon.run.fingerprint import check_fingerprint
from zephon.vision.geometry import VisionSettings
from zephon.work import ScheduledMixtureWorkSource, Stage, StaticMixtureWorkSource, TokenEstimation

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
IDS = [[3 + i, 4, 5, *range(6, 6 + i % 5)] for i in range(40)]
FLAGS = [[i % 2, *[1] * (len(row) - 1)] for i, row in enumerate(IDS)]
COLUMNS = {
    "number": list(range(40)),
    "text": [f"row {i} " + "word " * (i % 9) for i in range(40)],
    "other": [f"other {i}" for i in range(40)],
    "raw": [f"röw {i}".encode() for i in range(40)],
    "raw2": [f"råw {i}".encode() for i in range(40)],
    "messages": [
        [{"role": "user", "content": f"{i} <|eos|>?"}, {"role": "assistant", "content": f"<|eos|> {i}"}] * (1 + i % 2)
        for i in range(40)
    ],
    "talks": [[{"role": "user", "content": f"talk {i}"}, {"role": "assistant", "content": "yes"}] for i in range(40)],
    "answer": [f"answer {i}" for i in range(40)],
    "functions": [json.dumps([{"name": f"f{i}"}]) for i in range(40)],
    "ids": IDS,
    "ids2": [row[::-1] for row in IDS],
    "flags": FLAGS,
    "labels": [[t if f else -100 for t, f in zip(*row, strict=True)] for row in zip(IDS, FLAGS, strict=True)],
    "places": [[0] * len(row) for row in IDS],
    "picture": [file_of(picture(9, 9 + i % 3, seed=i), "PNG") for i in range(40)],
    "picture2": [file_of(picture(12, 9, seed=i), "PNG") for i in range(40)],
}
A, B = (Dataset.from_dict(name, COLUMNS) for name in "ab")


def is_long(row):
    return len(row["text"]) > 12


PAIR = {"field": "text", "response": "answer"}
VISION = VisionSettings(patch_size=4, min_pixels=1)
VISION_CHANGES = {
    "patch_size": 3,
    "merge_size": 1,
    "temporal_patch_size": 1,
    "patch_order": "raster",
    "budget": "patches",
    "min_pixels": 400,
    "max_pixels": 64,
    "max_patches": 2,
    "max_patches_per_side": 1,
    "mean": (0.4, 0.5, 0.5),
    "std": (0.4, 0.5, 0.5),
    "image_token": "<|vision_start|>",
    "vision_start_token": "",
    "vision_end_token": "",
}
CUT = {"max_length": 6}, {"max_length": 6, "split_long_samples": True}
# By method: other arguments than its own, and by setting another value, or the arguments of both sides.
OPERATORS = {
    "filter": (
        {"condition": "length(text) > 12"},
        {
            "condition": "length(text) > 20",
            "columns": ({"condition": is_long, "columns": ["text"]}, {"condition": is_long}),
            "datasets": ["a"],
        },
    ),
    "map_transform": (
        {"transform": shout},
        {"transform": two_of_each, "columns": ["text"], "datasets": ["a"], "types": {"text": "string"}},
    ),
    "map_batches": (
        {"transform": reversed_texts},
        {"transform": every_other, "columns": ["text", "number"], "datasets": ["a"]},
    ),
    "stateful_transform": ({"transform": Doubled()}, {"transform": Joined(), "columns": ["text"], "datasets": ["a"]}),
    "decode_text": (
        {"field": "raw", "encoding": "ascii"},
        {"field": "raw2", "encoding": "latin-1", "errors": "ignore", "datasets": ["a"]},
    ),
    "text_template": ({"template": "{other}"}, {"template": "{text}!", "into": "new", "datasets": ["a"]}),
    "tokenize": (
        {},
        {
            "tokenizer_id": "other",
            "special_tokens": "bos_eos",
            "max_length": 5,
            "split_long_samples": CUT,
            "datasets": ["a", "b"],
            "field": "other",
        },
    ),
    "tokenize_chat": (
        {"chat_template": TEMPLATE, "ignored": ["functions"]},
        {
            "tokenizer_id": "other",
            "special_tokens": "eos",
            "max_length": 9,
            "split_long_samples": CUT,
            "datasets": ["a", "b"],
            "field": "talks",
            "tools": "functions",
            "chat_template": TEMPLATE + "!",
            "loss": "all",
            "date": "2024-07-26",
            "response": (PAIR, {**PAIR, "response": "other"}),
            "input": (PAIR, {**PAIR, "input": "other"}),
            "system": "other",
            "assistant_tokens": "all",
            "images": ({}, {}),  # see test_images_in_conversations_are_seen
            "vision": ({}, {}),
        },
    ),
    "tokenize_images": (
        {"field": "text", "images": "picture", "vision": VISION},
        {
            "tokenizer_id": "other images",
            "special_tokens": "eos",
            "max_length": ({}, {}),  # refused
            "split_long_samples": ({}, {}),
            "datasets": ["a", "b"],
            "field": "other",
            "images": "picture2",
            "vision": replace(VISION, min_pixels=400),
        },
    ),
    "pretokenized": (
        {"field": "ids", "ignored": ["labels"]},
        {
            "tokenizer_id": None,
            "special_tokens": "eos",
            "max_length": 4,
            "split_long_samples": CUT,
            "datasets": ["a", "b"],
            "field": "ids2",
            "loss": "flags",
            "labels": "labels",
            "positions": "places",
        },
    ),
    "ensure_mixture": ({"buffer_size": 8}, {"buffer_size": 20}),
    "pack_flat": (
        {"max_length": 12, "algorithm": "best_fit"},
        {
            "max_length": 9,
            "algorithm": "best_fit_wrap",
            "num_bins": 3,
            "max_documents_per_record": 1,
            "max_images": 2,
            "max_patches": 9,
            "always_image": ({}, {}),  # refused without images
            "homogeneity": "full",
            "oversized": "drop",
        },
    ),
    "pack_sequences": (
        {"max_length": 40},
        {
            "max_length": 30,
            "algorithm": "first_fit",
            "num_bins": 3,
            "max_documents_per_record": 1,
            "max_images": 2,
            "max_patches": 9,
            "always_image": ({}, {}),  # refused without images
            "homogeneity": "full",
            "oversized": ({}, {}),
        },
    ),
    "shuffle": ({"buffer_size": 8}, {"buffer_size": 16, "seed": 4}),
    "batch": ({"microbatch_size": 1}, {"drop_last": False}),
}
ORDER = ["rows", "encode", "ensure_mixture", "pack", "shuffle", "batch"]
PLACES = {
    "pack_flat": "pack",
    "pack_sequences": "pack",
    **dict.fromkeys(["tokenize", "tokenize_chat", "tokenize_images", "pretokenized"], "encode"),
}


def source_of(*datasets, **changes):
    return StaticMixtureWorkSource(**{"datasets": datasets or [A, B], "chunk_size": 16, "seed": 3, **changes})


def pipeline_of(tokenizer, source=None, method="", arguments=(), **options):
    """A pipeline with one operator as asked for, among usual ones."""
    steps = {
        "encode": ("tokenize", {"field": "raw" if method == "decode_text" else "text", "tokenizer_id": tokenizer}),
        "pack": ("pack_flat", {"max_length": 12}),
        "batch": ("batch", {"microbatch_size": 1}),
    }
    if method == "tokenize_images":
        steps["pack"] = "pack_sequences", {"max_length": 60}
    if method:
        steps[PLACES.get(method, method if method in ORDER else "rows")] = method, dict(arguments)
    pipeline = Pipeline(source or source_of()).options(
        **{"runner": "inline", "canonical_replicas": 1, "on_error": "skip", "error_budget": 1.0, **options}
    )
    for place in ORDER:
        if place in steps:
            pipeline = getattr(pipeline, steps[place][0])(**steps[place][1])
    return pipeline


def batches(pipeline, count=40):
    given = []
    for _, batch in zip(range(count), pipeline, strict=False):
        fields = batch.to_training(as_numpy=True, return_loss_mask=True)
        given.append((batch.digests, fields["loss_mask"].tobytes(), fields["position_ids"].tobytes()))
    pipeline.close()
    assert given
    return given


def is_told(one, other):
    """Whether two pipelines have other fingerprints, or the same batches."""
    return one.compiled.fingerprint != other.compiled.fingerprint or batches(one) == batches(other)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory, tiny_tokenizer):
    def folder():
        return tmp_path_factory.mktemp("tokenizer")

    return {
        "": tiny_tokenizer,
        "other": train_tiny_tokenizer(folder(), bos="<|begin|>"),
        "images": image_tokenizer(folder()),
        "other images": image_tokenizer(folder(), bos="<|begin|>"),
    }


def operator_settings():
    built = {method: getattr(Pipeline(source_of()), method) for method in OPERATORS}
    for method, add in built.items():
        given = {**({"tokenizer_id": "x"} if method.startswith("tokenize") else {}), **OPERATORS[method][0]}
        (operator,) = add(**given)._operators
        for each in fields(operator):
            if each.metadata.get("decides_data", True):
                yield method, each.name


@pytest.mark.parametrize(("method", "setting"), [*operator_settings()])
def test_a_changed_setting_of_an_operator_is_seen(tokenizers, method, setting):
    given, others = OPERATORS[method]
    assert setting in others, f"{method} has a setting without another value here; add one, or exempt the setting"
    value = others[setting]
    sides = value if isinstance(value, tuple) else ({}, {setting: value})
    pipelines = []
    for changes in sides:
        arguments = {**given, **changes}
        if PLACES.get(method) == "encode":
            name = arguments.get("tokenizer_id", "images" if method == "tokenize_images" else "")
            arguments["tokenizer_id"] = None if name is None else tokenizers[name]
        pipelines.append(pipeline_of(tokenizers[""], None, method, arguments))
    assert is_told(*pipelines)


@pytest.mark.parametrize("setting", [each.name for each in fields(VisionSettings)])
def test_a_changed_setting_of_images_is_seen(tokenizers, setting):
    given = {"tokenizer_id": tokenizers["images"], "field": "text", "images": "picture"}
    one, other = (
        pipeline_of(tokenizers[""], source_of(A), "tokenize_images", {**given, "vision": vision})
        for vision in (VISION, replace(VISION, **{setting: VISION_CHANGES[setting]}))
    )
    assert one.compiled.fingerprint != other.compiled.fingerprint


def test_images_in_conversations_are_seen():
    given = {"tokenizer_id": "x", "vision": VISION, "images": "picture"}
    plain, *others = (
        TokenizeChat(**{**given, **changes}).identity()
        for changes in ({}, {"vision": replace(VISION, patch_size=3)}, {"images": "picture2"})
    )
    assert plain not in others
    assert TokenizeChat("x").identity() != plain


def test_other_pixels_of_the_same_files_are_refused_by_name(tokenizers, monkeypatch):
    def build():
        given = {"tokenizer_id": tokenizers["images"], "field": "text", "images": "picture", "vision": VISION}
        return pipeline_of(tokenizers[""], source_of(A), "tokenize_images", given)

    one = build()
    next(iter(one))
    state, expected = one.checkpoint(), batches(one, 3)
    monkeypatch.setattr(fingerprint, "image_pixels", lambda: "other")
    with pytest.raises(CheckpointError, match=r"image_pixels: was '[0-9a-f]{16}', is 'other' \(this machine's"):
        build().restore(state)
    assert batches(build().restore(state, allow_changes=["image_pixels"]), 3) == expected
    assert "image_pixels" not in pipeline_of(tokenizers[""]).compiled.fingerprint  # text alone


@pytest.mark.parametrize("method", OPERATORS)
def test_equal_settings_have_one_fingerprint(tokenizers, method):
    """Also those of other objects, as another process makes them."""
    given, _ = OPERATORS[method]
    name = "images" if method == "tokenize_images" else ""
    arguments = {"tokenizer_id": tokenizers[name]} if PLACES.get(method) == "encode" else {}
    pipelines = [pipeline_of(tokenizers[""], None, method, arguments | deepcopy(given)) for _ in range(2)]
    assert pipelines[0].compiled.fingerprint == pipelines[1].compiled.fingerprint


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"special_tokens": ["bos_eos", "eos"]}, {"special_tokens": ["eos", "bos_eos"]}),
        ({"fields": ["text", "other"]}, {"fields": ["other", "text"]}),
        ({"special_tokens": ["eos", "eos"]}, {"special_tokens": ["eos", "none"]}),
    ],
)
def test_settings_of_every_encoder_are_seen(tiny_tokenizer, one, other):
    """Also where those of the first one, or of all together, are the same."""

    def build(special_tokens=("auto", "auto"), fields=("text", "text")):
        pipeline = Pipeline(source_of()).options(runner="inline", canonical_replicas=1).map_transform(shout)
        for dataset, special, field in zip("ab", special_tokens, fields, strict=True):
            pipeline = pipeline.tokenize(tiny_tokenizer, field=field, special_tokens=special, datasets=[dataset])
        return pipeline.pack_flat(12).batch(1)

    first, second = build(**one), build(**other)
    assert first.compiled.fingerprint != second.compiled.fingerprint and batches(first) != batches(second)


def test_the_column_that_a_map_makes_is_seen(tiny_tokenizer):
    def build(field):
        pipeline = Pipeline(source_of(A)).options(runner="inline", canonical_replicas=1)
        pipeline = pipeline.map_transform(lambda row: {"one": row["text"], "two": row["other"]})
        return pipeline.tokenize(tiny_tokenizer, field=field).pack_flat(12).batch(1)

    one, two = build("one"), build("two")
    assert batches(one) != batches(two)
    with pytest.raises(CheckpointError, match=r"document_details: .*one.*two"):
        two.restore(one.checkpoint())


def test_a_newer_template_beside_the_tokenizer_is_seen(tmp_path, tiny_tokenizer):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for file in tiny_tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    states = []
    for template in (TEMPLATE, TEMPLATE.replace(":", " says:")):
        (folder / "chat_template.jinja").write_text(template)
        given = {"tokenizer_id": folder, "ignored": ["functions"]}
        pipeline = pipeline_of(folder, source_of(A), "tokenize_chat", given)
        next(iter(pipeline))
        states.append(pipeline.checkpoint())
    with pytest.raises(CheckpointError, match="document_details: a"):
        pipeline.restore(states[0])


def test_the_format_of_files_that_do_not_say_it_is_seen(tmp_path, tiny_tokenizer):
    names = ("ids", "elsewhere")
    for name in names:
        np.arange(2, 202, dtype="<u4").tofile(tmp_path / f"{name}.bin")
    pipelines = [
        pipeline_of(tiny_tokenizer, source_of(Dataset.from_path("d", tmp_path / "ids.bin", fmt)), "pretokenized", given)
        for fmt in ("uint16", "uint32")
        for given in [{"tokenizer_id": None, "field": "tokens"}]
    ]
    assert batches(pipelines[0]) != batches(pipelines[1])
    with pytest.raises(CheckpointError, match="formats: d was 'uint16', is 'uint32'"):
        pipelines[1].restore(pipelines[0].checkpoint())
    for pipeline in pipelines:  # also by what is kept of earlier measurements
        datasets = [Dataset.from_path(n, tmp_path / f"{n}.bin", pipeline._source.datasets[0].fmt) for n in names]
        pipeline._source = source_of(*datasets)
        pipeline._compiled = pipeline._ratios = None
    assert pipelines[0].fingerprint()["tokens_per_row"] != pipelines[1].fingerprint()["tokens_per_row"]
    (tmp_path / "d.jsonl").write_text('{"text": "some words"}\n' * 9)
    named, found = (
        pipeline_of(tiny_tokenizer, source_of(Dataset.from_path("d", tmp_path / "d.jsonl", fmt)))
        for fmt in ("jsonl", None)
    )
    assert named.compiled.fingerprint == found.compiled.fingerprint  # the names of the files say it


SOURCE = {
    "seed": 4,
    "chunk_size": 8,
    "shuffle_shards": False,
    "shuffle_within_shard": False,
    "shuffle_block_size": 3,
    "reshuffle_on_repeat": False,
    "exhausted_policy": "stop",
    "stop_after_passes": 2,
    "max_repeats": 2,
    "repeat": False,
    "datasets": [A, Dataset.from_dict("b", {**COLUMNS, "text": COLUMNS["other"]})],
    "mixture": {"a": 1, "b": 3},
    "token_estimation": TokenEstimation(1),
    "per_dataset": {"a": {"max_repeats": 1}},
    "continues": None,
}
DATASET = {"name": "c", "path": "copy", "fmt": "text", "text_field": "other", "group": "g"}
SETTINGS = {"canonical_replicas": 2, "flush_every_k_chunks": 2, "feeds": 1}


@pytest.mark.parametrize("setting", [f.name for f in fields(StaticMixtureWorkSource) if f.init])
def test_a_changed_setting_of_the_source_is_seen(tiny_tokenizer, setting):
    changed = {setting: SOURCE[setting]}
    assert is_told(*(pipeline_of(tiny_tokenizer, source_of(**changes)) for changes in ({}, changed)))
    if setting in keys_of(type(source_of())) and setting not in ("seed", "chunk_size", "repeat"):
        own = {"per_dataset": {"b": changed}}
        assert is_told(*(pipeline_of(tiny_tokenizer, source_of(**changes)) for changes in ({}, own)))


@pytest.mark.parametrize("setting", [f.name for f in fields(Dataset) if f.name != "table"])
def test_a_changed_setting_of_a_dataset_is_seen(tmp_path, tiny_tokenizer, setting):
    rows = "".join(
        json.dumps({"text": t, "other": o}) + "\n" for t, o in zip(COLUMNS["text"], COLUMNS["other"], strict=True)
    )
    for name in ("rows.jsonl", "copy.jsonl"):
        (tmp_path / name).write_text(rows)
    given = {"name": "a", "path": "rows", "fmt": None, "text_field": None}
    pipelines = []
    for settings in (given, {**given, setting: DATASET[setting]}):
        settings["path"] = tmp_path / f"{settings['path']}.jsonl"
        pipelines.append(pipeline_of(tiny_tokenizer, source_of(Dataset(**{**settings, "path": str(settings["path"])}))))
    assert is_told(*pipelines)


@pytest.mark.parametrize("setting", [each.name for each in keys_of(RunSettings).values() if each.decides_data])
def test_a_changed_option_that_decides_data_is_seen(tiny_tokenizer, setting):
    assert is_told(*(pipeline_of(tiny_tokenizer, **changes) for changes in ({}, {setting: SETTINGS[setting]})))


def test_a_changed_schedule_is_seen(tiny_tokenizer):
    def build(**changes):
        stages = [
            Stage({"a": 1}),
            Stage({"b": 1}, **{"start_tokens": 90, "change": "linear", "end_tokens": 200} | changes),
        ]
        return pipeline_of(tiny_tokenizer, ScheduledMixtureWorkSource([A, B], schedule=stages, chunk_size=16))

    for changes in ({"start_tokens": 60}, {"change": "cosine"}, {"end_tokens": 300}):
        assert build().compiled.fingerprint != build(**changes).compiled.fingerprint


def test_every_operator_is_tried():
    methods = {name for name in dir(Pipeline) if "see `zephon.ops" in (getattr(Pipeline, name).__doc__ or "")}
    assert methods - {"add_op"} <= set(OPERATORS)  # another name of map_batches


@pytest.mark.parametrize(
    ("name", "before", "now", "is_exact"),
    [
        ("tokenizer_backend", "a 1", "a 2", True),
        ("image_pixels", "one", "other", True),
        ("end", "drop_last=True", "drop_last=False", True),
        ("dataset d", {"content": "c", "revision": "1"}, {"content": "c", "revision": "2"}, True),
        ("formats", "absent", {"d": "uint16"}, True),
        ("document_details", "absent", {"d": {"chat_template": "1"}}, True),
        ("document_details", {"d": {"chat_template": "1"}}, {"d": {"chat_template": "2"}}, False),
        ("row_operators", ["map_transform one"], ["map_transform two"], False),
    ],
)
def test_of_an_accepted_difference_is_known_whether_records_stay(name, before, now, is_exact):
    sides = ({} if side == "absent" else {name: side} for side in (before, now))
    (change,) = check_fingerprint(*sides, allow=[name], where="")
    assert change.is_exact == is_exact
    sides = ({} if side == "absent" else {name: side} for side in (before, now))
    if not is_exact:
        with pytest.raises(CheckpointError, match="Records are counted from the start"):
            check_fingerprint(*sides, allow=[name], where="", counted=True)
