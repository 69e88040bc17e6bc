"""Images in the mix beside text alone: the same global batches on any topology, with any runner, after any resume."""

import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import ImageFile

from support import step_digests
from support.vision_data import file_of, image_tokenizer, picture
from zephon import Pipeline
from zephon.errors import CheckpointError, DataError, PipelineError
from zephon.io import Dataset
from zephon.vision.geometry import VisionSettings
from zephon.vision.probes import image_pixels
from zephon.work import StaticMixtureWorkSource

BATCH = 8
VISION = VisionSettings(min_pixels=1024, max_pixels=16_384)
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    choose = random.Random(0)
    files = [file_of(picture(choose.randint(20, 160), choose.randint(20, 160), seed=n)) for n in range(40)]
    pairs = [{"bytes": file, "path": None} for file in files]
    pairs[7]["bytes"] = files[7][: len(files[7]) // 2]  # its header is sound
    captions = [f"picture {n} <|image_pad|> " + "of a thing " * choose.randint(1, 9) for n in range(40)]
    pq.write_table(
        pa.table({"image": pa.array(pairs, IMAGE), "text": captions}), folder / "pairs.parquet", row_group_size=9
    )
    texts, images = [], []
    for n in range(30):
        count = choose.randint(1, 5)
        shown = [choose.random() < 0.4 for _ in range(count)]
        texts.append([None if each else f"part {n} of a page, with some words" for each in shown])
        images.append([{"bytes": files[(n + i) % 40], "path": None} if each else None for i, each in enumerate(shown)])
        if n % 40 == 7:
            images[-1] = [None for _ in images[-1]]
    images = [[image if image is None or image["bytes"] != files[7] else None for image in row] for row in images]
    pq.write_table(pa.table({"texts": texts, "images": pa.array(images, pa.list_(IMAGE))}), folder / "pages.parquet")
    return folder, image_tokenizer(folder / "tokenizer"), files


def pipeline(data, *, lanes=4, dp=1, group=0, pages=True, on_error="skip", pack=None, **options):
    folder, tokenizer, _ = data
    shown = ["pairs", "pages"] if pages else ["pairs"]
    datasets = [Dataset.from_path(name, folder / f"{name}.parquet") for name in shown]
    datasets.append(Dataset.from_dict("text", {"text": [f"document {n} " + "word " * (n % 40) for n in range(60)]}))
    source = StaticMixtureWorkSource(
        datasets=datasets, mixture={each.name: 1.0 for each in datasets}, seed=3, chunk_size=32
    )
    return (
        Pipeline(source)
        .options(
            canonical_replicas=lanes,
            dp_degree=dp,
            dp_group_id=group,
            global_batch=BATCH,
            **{
                "on_error": on_error,
                "error_budget": 0.5,
                "io_options": {"cache": {"enabled": False}},
                "prefetch_buffer_size": 1 << 18,
                **options,
            },
        )
        .tokenize_images(tokenizer, vision=VISION, datasets=shown)
        .tokenize(tokenizer, datasets=["text"])
        .pack_flat(256, "best_fit", **{"oversized": "drop", "max_images": 3, "max_patches": 200, **(pack or {})})
        .shuffle(16)
        .batch(2)
    )


@pytest.fixture(scope="module")
def expected(data):
    return step_digests([pipeline(data, runner="inline")], 8, BATCH)


@pytest.mark.parametrize(
    "options", [{}, {"runner": "process"}, {"isolate": True}], ids=["threads", "process", "isolate"]
)
def test_any_runner_gives_the_same_batches(data, expected, options):
    one = pipeline(data, **options)
    assert step_digests([one], 8, BATCH) == expected
    one.close()


@pytest.mark.parametrize("dp", [2, 4])
def test_any_topology_and_resume_gives_the_same_batches(data, expected, dp):
    groups = [pipeline(data, dp=dp, group=group) for group in range(dp)]
    assert step_digests(groups, 5, BATCH) == expected[:5]
    states = [each.checkpoint() for each in groups]
    for each in groups:
        each.close()
    again = 4 // dp
    resumed = [pipeline(data, dp=again, group=group).restore(states) for group in range(again)]
    assert step_digests(resumed, 3, BATCH) == expected[5:]
    for each in resumed:
        each.close()


def test_a_state_inside_a_round_goes_on_there(data):
    one = pipeline(data, runner="inline")
    stream = iter(one)
    next(stream)
    state = one.checkpoint()
    rest = [next(stream).digests for _ in range(4)]
    resumed = iter(pipeline(data, runner="inline").restore(state))
    assert [next(resumed).digests for _ in range(4)] == rest


def test_batches_hold_the_images_of_their_placeholders(data):
    _, _, files = data
    one = pipeline(data)
    tokenizer = one.compiled.tokenizer
    ids = {token.content: token.id for token in tokenizer.special_tokens}
    stream, grey, most = iter(one), 0, 0
    for _ in range(20):
        batch = next(stream)
        fields = batch.to_training()
        padded = batch.to_training(vision="padded", pixel_dtype="uint8")
        grids = fields["grid_thw"]
        runs = fields["input_ids"] == ids["<|image_pad|>"]
        # One more placeholder may be the label of a record's last place.
        assert runs.sum() <= grids.prod(dim=1).sum() // 4 <= runs.sum() + len(batch)
        assert (fields["labels"][fields["input_ids"] == ids["<|vision_start|>"]] == -100).all()
        assert not np.isin(fields["labels"].numpy(), list(ids.values())[2:]).any()
        assert fields["pixel_values"].shape == (grids.prod(dim=1).sum(), VISION.patch_dim)
        assert padded["pixel_values"].shape[0] == len(grids)
        images = batch.block.images
        per_record = np.diff(images.offsets[batch.block.span_offsets]) if images is not None else np.zeros(1)
        assert per_record.max() <= 3
        most = max(most, per_record.max())
        if images is not None:
            broken = [file == files[7][: len(files[7]) // 2] for file in images.files.to_pylist()]
            assert images.is_grey.tolist() == broken
            grey += sum(broken)
    assert grey
    assert most == 3
    one.close()


def test_an_image_that_cannot_be_decoded_ends_the_run_by_default(data):
    with pytest.raises(
        DataError, match=r'dataset "pairs", shard pairs.parquet, row 7: image 1: the jpeg cannot be decoded'
    ):
        for _, _batch in zip(range(40), pipeline(data, on_error="raise", pages=False), strict=False):
            pass


@pytest.mark.parametrize("change", ["truncated images pass", "another resize"])
def test_a_state_of_other_pixels_is_refused_by_name(data, monkeypatch, change):
    before = pipeline(data, runner="inline")
    stream = iter(before)
    next(stream)
    state = before.checkpoint()
    following = next(stream)
    pixels = state["fingerprint"]["image_pixels"]
    if change == "truncated images pass":
        monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    else:
        resize = torch.nn.functional.interpolate
        monkeypatch.setattr(
            torch.nn.functional,
            "interpolate",
            lambda picture, size, mode, antialias: resize(picture.float(), size, mode=mode).byte(),
        )
    image_pixels.cache_clear()
    try:
        after = pipeline(data, runner="inline")
        with pytest.raises(CheckpointError, match=f"image_pixels: was '{pixels}', is .* make other pixels"):
            after.restore(state)
        (changed,) = [name for name, value in after.compiled.fingerprint.items() if value != state["fingerprint"][name]]
        assert changed == "image_pixels"
        batch = next(iter(after.restore(state, allow_changes=["image_pixels"])))
        assert np.array_equal(batch.tokens, following.tokens)
    finally:
        image_pixels.cache_clear()


def test_documents_with_images_are_not_cut(data):
    folder, tokenizer, _ = data
    rows = Pipeline(
        StaticMixtureWorkSource(datasets=[Dataset.from_path("p", folder / "pairs.parquet")], mixture={"p": 1.0})
    )
    for algorithm in ("wrap", "best_fit_wrap"):
        with pytest.raises(PipelineError, match=f'algorithm is "{algorithm}", which cuts documents'):
            rows.tokenize_images(tokenizer).pack_flat(64, algorithm).batch(1).explain()
    with pytest.raises(PipelineError, match="tokenize_images max_length is 9, which would cut images"):
        rows.tokenize_images(tokenizer, max_length=9)
    other = VisionSettings(vision_end_token="<end>")
    with pytest.raises(PipelineError, match=r"vision_end_token is '<end>'; expected a special token of the tokenizer"):
        rows.tokenize_images(tokenizer, vision=other).pack_flat(64, "best_fit").batch(1).explain()


def test_every_record_shows_an_image_where_it_is_asked_for(data):
    """Also those that only fill a place at the end of the data; nothing of it is trained on."""
    folder, tokenizer, _ = data
    texts = Dataset.from_dict("text", {"text": [f"document {n} " + "word " * (n % 60) for n in range(45)]})
    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_path("pairs", folder / "pairs.parquet"), texts], repeat=False
    )
    one, plain = (
        Pipeline(source)
        .options(canonical_replicas=4, feeds=4, global_batch=12, on_error="skip", error_budget=0.5, runner="inline")
        .tokenize_images(tokenizer, vision=VISION, datasets=["pairs"])
        .tokenize(tokenizer, datasets=["text"])
        .pack_flat(length, "best_fit", oversized="drop", max_images=1, always_image=always)
        .batch(12)
        for always, length in ((True, 132), (False, 128))
    )
    ids = {token.content: token.id for token in one.compiled.tokenizer.special_tokens}
    fillers = 0
    for batch, other in zip(one, plain, strict=True):
        fields = batch.to_training(pixel_dtype="uint8")
        shown = (fields["input_ids"] == ids["<|image_pad|>"]).sum(dim=1)
        grids = fields["grid_thw"]
        assert len(grids) == len(batch)
        assert (shown == grids.prod(dim=1) // 4).all()
        assert fields["pixel_values"].shape[0] == grids.prod(dim=1).sum()
        dummies = grids.prod(dim=1) == 4
        assert (fields["pixel_values"][-4:] == 127).all() or not dummies[-1]
        # The same documents as without it, in records that are so much shorter.
        assert batch.lengths.tolist() == other.lengths.tolist()
        assert (batch.to_training()["labels"] != -100).sum() == (other.to_training()["labels"] != -100).sum()
        fillers += int((batch.lengths == 0).sum())
        assert (batch.provenance()["token_end"].to_numpy() >= 0).all()
    assert fillers
    state = one.checkpoint()
    with pytest.raises(CheckpointError, match="pack_algorithm"):
        plain.restore(state)
    with pytest.raises(PipelineError, match="pack_flat always_image is True, but no operator shows images"):
        Pipeline(source).tokenize(tokenizer).pack_flat(64, "best_fit", always_image=True).batch(1).explain()
