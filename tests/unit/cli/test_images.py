"""Recipes with images in the commands: how the model sees them is an option."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.vision_data import file_of, image_tokenizer, picture
from zephon import Pipeline
from zephon.cli.options import vision_settings
from zephon.errors import PipelineError
from zephon.vision.geometry import VisionSettings

VISION = "patch_size=8,merge_size=2,min_pixels=256,max_pixels=4096"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    image_tokenizer(folder / "tokenizer")
    files = [file_of(picture(30 + n, 40, seed=n)) for n in range(24)]
    pq.write_table(pa.table({"image": files, "text": [f"picture {n}" for n in range(24)]}), folder / "pairs.parquet")
    (folder / "recipe.toml").write_text(
        'documents = "images"\nmax_images = 2\ncache_dir = "cache"\n'
        '[[sources]]\nname = "pairs"\npath = "pairs.parquet"\n'
    )
    return folder


def stream_of(folder, vision=VISION):
    options = folder / "recipe.toml", "--tokenizer", folder / "tokenizer", "--seq-len", "128", "--global-batch", "4"
    return (*options, "--vision", vision) if vision else options


def test_a_recipe_with_images_works_without_a_framework(zephon, pairs, tmp_path):
    digests = tmp_path / "digests"
    code, _, err = zephon("stream", *stream_of(pairs), "--microbatch-size", "4", "--steps", "3", "--digests", digests)
    assert code == 0, err
    pipeline = Pipeline.from_recipe(
        pairs / "recipe.toml",
        tokenizer=pairs / "tokenizer",
        seq_len=128,
        microbatch_size=4,
        global_batch=4,
        vision=VisionSettings(patch_size=8, merge_size=2, min_pixels=256, max_pixels=4096),
    )
    expected = [digest.hex() for _, batch in zip(range(3), pipeline, strict=False) for digest in batch.digests]
    pipeline.close()
    assert [line.split()[1] for line in digests.read_text().splitlines()] == expected
    assert zephon("plan", *stream_of(pairs), "--steps", "9")[0] == 0
    code, _, err = zephon("stream", *stream_of(pairs, None), "--microbatch-size", "4")
    assert code == 2 and "zephon stream --vision patch_size=16,merge_size=2" in err


def test_vision_settings_are_read_from_text():
    text = "patch_size=14, mean=[0.48, 0.45, 0.4], budget=patches, image_token=<|media_pad|>, vision_end_token="
    assert vision_settings(text) == VisionSettings(
        patch_size=14, mean=(0.48, 0.45, 0.4), budget="patches", image_token="<|media_pad|>", vision_end_token=""
    )
    assert vision_settings(None) is None
    for wrong, message in [
        ("patch=14", r'unknown setting in --vision "patch". Did you mean "patch_size"'),
        ("14", r"--vision is '14'; expected settings as in patch_size=16,merge_size=2"),
        ("patch_size=x", r'vision patch_size is "x"; expected an integer from 1 to 65536'),
    ]:
        with pytest.raises(PipelineError, match=message):
            vision_settings(wrong)
