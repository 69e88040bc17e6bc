"""Recipes with images in the commands: how the model sees them is an option."""

import json
import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.vision_data import file_of, image_tokenizer, picture
from zephon import Pipeline
from zephon.cli.options import vision_settings
from zephon.errors import PipelineError
from zephon.vision.geometry import VisionSettings

FILES = [file_of(picture(30 + n, 40, seed=n)) for n in range(24)]
VISION = "patch_size=8,merge_size=2,min_pixels=256,max_pixels=4096"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pairs")
    image_tokenizer(folder / "tokenizer")
    pq.write_table(pa.table({"image": FILES, "text": [f"picture {n}" for n in range(24)]}), folder / "pairs.parquet")
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


def test_show_names_images_and_writes_them(zephon, pairs, tmp_path):
    options = *stream_of(pairs), "--step", "2", "--images", tmp_path / "images"
    code, out, err = zephon("show", *options)
    assert code == 0, err
    found = re.findall(r"    image 0: jpeg of (\d+) x 40 pixels, ([\d,]+) bytes, \d+ x \d+ patches: (.*)\n", out)
    rows = [int(row) for row in re.findall(r"row (\d+)", out)]
    assert len(found) == len(rows) >= 4
    written = {str(path) for path in (tmp_path / "images").iterdir()}
    assert written == {path for *_, path in found}
    for row, (width, nbytes, path) in zip(rows, found, strict=True):
        data = Path(path).read_bytes()
        assert (int(width), int(nbytes.replace(",", "")), data) == (30 + row, len(data), FILES[row])
    assert "| <|bos|><|vision_start|><|image_pad|><|vision_end|>picture" in out
    _, out, _ = zephon("show", *stream_of(pairs), "--step", "2", "--json")
    images = [
        image for line in map(json.loads, out.splitlines()) for each in line["documents"] for image in each["images"]
    ]
    assert [image["width"] for image in images] == [30 + row for row in rows]
    assert not any(image["grey"] for image in images)


def test_digests_may_be_over_pixels(zephon, pairs, tmp_path):
    options = *stream_of(pairs), "--microbatch-size", "4", "--steps", "1", "--digests"
    for name, more in (("a", ()), ("b", ("--pixels",)), ("c", ("--pixels",))):
        assert zephon("stream", *options, tmp_path / name, *more)[0] == 0
    without, first, second = ((tmp_path / name).read_text() for name in "abc")
    assert without != first == second


def test_ledgers_say_whether_their_digests_are_over_pixels(zephon, pairs, tmp_path):
    recipe, *others = stream_of(pairs)
    stream = "stream", recipe, *others, "--microbatch-size", "4", "--steps", "2", "--ledger"
    assert zephon(*stream, tmp_path / "without")[0] == 0
    assert zephon(*stream, tmp_path / "with", "--pixels")[0] == 0
    shows = "show", recipe, *others, "--step", "2", "--ledger"
    for name in ("without", "with"):
        code, _, err = zephon(*shows, tmp_path / name)
        assert code == 0, err
    code, out, _ = zephon("verify", tmp_path / "with", tmp_path / "without")
    assert code == 1
    assert re.search("digests of .*with are over the pixels of images .*, those of .*without are not: make both", out)
    code, _, err = zephon(*stream, tmp_path / "with")
    assert code == 2
    assert "digest_pixels is false; expected true, as in the ledger" in err
