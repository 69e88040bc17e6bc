"""Batches with images in the form of TorchTitan's multimodal collator."""

import tomllib
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torchtitan")
pytest.importorskip("torchvision")
import torch
from torchtitan.components.tokenizer import MultiModalTokenizer
from torchtitan.hf_datasets.multimodal import mm_datasets
from torchtitan.hf_datasets.multimodal.mm_collator import MultiModalCollator
from torchtitan.hf_datasets.multimodal.utils.image import resize_to_patch_budget

from support.vision_data import file_of, image_tokenizer, picture
from torchtitan_zephon import ZephonDataLoader
from torchtitan_zephon.forms import _with_images
from torchtitan_zephon.vision import check_images, vision_settings
from zephon import DataError, DataRecipe, PipelineError
from zephon.loader import VisionSettings

pytestmark = pytest.mark.frameworks
SEQ, LOCAL = 96, 3
RECIPE = """
documents = "images"
special_tokens = "eos"
canonical_replicas = 1
shuffle_after_pack = false
max_documents_per_record = 1
{more}
sources = [{{ name = "pairs", path = "pairs.parquet" }}]
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    files = [file_of(picture(30 + 7 * n, 90 - 6 * n, seed=n)) for n in range(9)]
    table = pa.table({"image": files, "text": [f"picture {n} of things" for n in range(9)]})
    pq.write_table(table, folder / "pairs.parquet")
    image_tokenizer(folder / "tokenizer")
    names = {f"{name}_token": f"<|{name}|>" for name in ("vision_start", "vision_end")}
    names |= {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "pad_token": "<|endoftext|>"}
    tokenizer = MultiModalTokenizer.Config(**names).build(tokenizer_path=str(folder / "tokenizer"))
    return folder, files, tokenizer


def stock(**changes):
    """The config of TorchTitan's own loader."""
    settings = {"max_images_per_batch": 99, "patch_size": 14, "temporal_patch_size": 2, "spatial_merge_size": 2}
    settings |= {"min_pixels": 784, "max_pixels": 7840, "image_mean": (0.5, 0.4, 0.3), "image_std": (0.5, 0.3, 0.2)}
    return mm_datasets.MMDataLoader.Config(**settings | changes)


def loader(data, vision, more="", **sizes):
    folder, _, tokenizer = data
    (folder / "recipe.toml").write_text(RECIPE.format(more=more))
    config = ZephonDataLoader.Config.from_toml(folder / "recipe.toml", vision=vision)
    sizes = sizes or {"seq_len": SEQ, "local_batch_size": LOCAL}
    return config.build(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, global_batch_size=LOCAL, **sizes)


@pytest.mark.parametrize(
    "vision",
    [
        stock(build_mrope_positions=True),
        stock(patch_order="raster", resize_fn=resize_to_patch_budget, max_patches=20, temporal_patch_size=1),
    ],
    ids=["qwen", "kimi"],
)
def test_batches_are_those_of_torchtitans_collator(data, vision):
    _, files, tokenizer = data
    ours = loader(data, vision)
    batches = iter(ours._pipeline)
    for _ in range(3):
        batch = next(batches)
        fields, labels = ours._form.shape(batch)
        names = "patch_size temporal_patch_size spatial_merge_size min_pixels max_pixels image_mean image_std resize_fn"
        settings = {name: getattr(vision, name) for name in f"{names} max_patches max_patches_per_side".split()}
        samples = [
            mm_datasets._process_mm_sample(
                [None, f"picture {row} of things"], [files[row], None], tokenizer=tokenizer, **settings
            )
            for row in batch.provenance()["row"].to_pylist()
        ]
        collator = MultiModalCollator(
            LOCAL, SEQ, 99, 14, vision.temporal_patch_size, 2, tokenizer, vision.build_mrope_positions
        )
        collator.patch_order = vision.patch_order
        theirs, their_labels = collator(samples)
        assert fields.keys() == theirs.keys()
        for name in ("input", "pixel_values", "grid_thw"):
            assert torch.equal(fields[name], theirs[name]) and fields[name].dtype == theirs[name].dtype
        assert torch.equal(labels, their_labels)
        real = theirs["input"] != tokenizer.pad_id
        for name in {"positions", "mrope_positions"} & fields.keys():
            assert torch.equal(fields[name][real], theirs[name][real])
        assert fields["special_tokens"] == theirs["special_tokens"]
        assert fields["pixel_values_videos"] is fields["grid_thw_videos"] is None
    ours.close()


def test_the_flat_form_has_the_patches_of_all_images(data):
    rows = loader(data, stock(build_mrope_positions=True))
    flat = loader(
        data, stock(build_mrope_positions=True), max_context_length=SEQ, num_tokens_per_microbatch=LOCAL * SEQ
    )
    (expected, labels), (fields, flat_labels) = next(iter(rows)), next(iter(flat))
    patches = expected["grid_thw"].prod(dim=1)
    assert torch.equal(flat_labels, labels.reshape(-1))
    assert torch.equal(fields["input"], expected["input"].reshape(-1))
    assert torch.equal(fields["mrope_positions"], expected["mrope_positions"].reshape(-1, 3))
    assert fields["pixel_values"].shape == (patches.sum(), 2 * 3 * 14**2)
    cut = [image[:count] for image, count in zip(expected["pixel_values"], patches.tolist(), strict=True)]
    assert torch.equal(fields["pixel_values"], torch.cat(cut))
    assert fields["padding_mask"].shape == (LOCAL * SEQ,)
    rows.close()
    flat.close()


def test_records_without_images_show_that_of_always_image(data):
    folder, _, _ = data
    pq.write_table(pa.table({"text": ["spells <|image_pad|> and more"] * 50}), folder / "words.parquet")
    more = "always_image = true"
    words = RECIPE.replace("}}]", '}}, {{ name = "words", path = "words.parquet", documents = "text", weight = 9 }}]')
    with mock.patch(f"{__name__}.RECIPE", words):
        ours = loader(data, stock(), more)
    for _, (fields, labels) in zip(range(5), ours, strict=False):
        images = fields["input"] == fields["special_tokens"]["image_id"]
        assert images.any(dim=1).all() and images.sum() == fields["grid_thw"].prod(dim=1).sum() // 4
        assert not torch.isin(labels, fields["input"][images]).any()
    ours.close()


def test_a_batch_without_an_image_ends_the_run_where_other_ranks_would_wait(data):
    form = replace(loader(data, stock())._form.vision, required=True)
    with pytest.raises(DataError, match="a batch has no image"):
        _with_images({"pixel_values": torch.zeros(0, 0, 1176), "grid_thw": torch.zeros(0, 3)}, form)


@pytest.mark.parametrize(
    ("vision", "more", "message"),
    [
        (None, "", "the recipe has images, and vision is missing"),
        (stock(max_images_per_batch=3), "max_images = 2", "max_images is 2; expected at most 1"),
        (stock(max_images_per_batch=3), "", "max_images is None; expected at most 1"),
        (stock(), "max_patches = 3", "max_patches is 3; expected at least 4, that of the smallest image"),
        (stock(min_pixels=100_000, max_pixels=400_000), "", "max_length is 96; expected at least 129"),
        (stock(resize_fn=max), "", "resize_fn is max; expected resize_to_pixel_budget or resize_to_patch_budget"),
    ],
)
def test_settings_that_do_not_fit_are_refused(data, vision, more, message):
    with pytest.raises(Exception, match=message):
        loader(data, vision, more)


def test_text_alone_needs_always_image_on_several_ranks(data):
    folder, _, tokenizer = data
    pq.write_table(pa.table({"text": ["some words"] * 50}), folder / "words.parquet")
    words = RECIPE.replace("}}]", '}}, {{ name = "words", path = "words.parquet", documents = "text" }}]')
    settings = vision_settings(stock(), tokenizer)
    for more, ranks, message in (
        ("", 2, "always_image is false; expected true on 2 ranks, as words has no"),
        ("", 1, ""),
    ):
        recipe = DataRecipe.from_dict(tomllib.loads(words.format(more=more)))
        with pytest.raises(PipelineError, match=message) if message else nullcontext():
            check_images(stock(), settings, recipe, records=LOCAL, seq_len=SEQ, ranks=ranks)
    recipe = DataRecipe.from_dict(tomllib.loads(words.format(more="always_image = true")))
    check_images(stock(), settings, recipe, records=LOCAL, seq_len=SEQ, ranks=2)


def test_settings_must_be_those_of_the_models_encoder(data):
    encoder = SimpleNamespace(patch_size=14, patch_temporal=2, downsample_factor=4)
    with pytest.raises(PipelineError, match="merge_size is 2; expected 4, that of the model's vision encoder"):
        vision_settings(stock(), data[2], SimpleNamespace(vision_encoder=encoder))
    with pytest.raises(PipelineError, match="without image_token; expected a MultiModalTokenizer"):
        vision_settings(VisionSettings(), SimpleNamespace())
