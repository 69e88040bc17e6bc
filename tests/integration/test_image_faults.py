"""Every fault of images in the files of one run: the same result, and the same report, whatever runs it."""

import json
import os
import struct
import zlib

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from support.vision_data import file_of, image_tokenizer, picture
from zephon import DataError, DataRecipe, Pipeline
from zephon.columns.faults import read_report
from zephon.vision.geometry import VisionSettings

VISION = VisionSettings(patch_size=8, min_pixels=256, max_pixels=4096)
LANES = 4


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_header(width, height):
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))


def flipped(data, place):
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


def turned(kind, orientation):
    image = picture(60, 40)
    image.getexif()[0x0112] = orientation
    return file_of(image, kind, exif=image.getexif())


JPEG, PNG, WEBP = (file_of(picture(90, 60, seed=1), kind) for kind in ("JPEG", "PNG", "WEBP"))
GIF = file_of(picture(90, 60, "P"), "GIF")
FRAMES = [picture(40, 30, seed=n) for n in range(3)]
MANY = {"save_all": True, "append_images": FRAMES[1:]}
CLEAR = picture(40, 30).convert("RGBA")
CLEAR.putalpha(0)

LEFT_OUT = {
    "web page": (b"<!DOCTYPE html><html>", "expected those of a JPEG, PNG, WebP or GIF"),
    "empty": (b"", "the first bytes are b''"),
    "TIFF": (file_of(picture(40, 30), "TIFF"), "expected those of a JPEG, PNG, WebP or GIF"),
    "cut JPEG header": (JPEG[:30], "ends within its header"),
    "cut PNG header": (PNG[:20], "ends within its header"),
    "cut WebP header": (WEBP[:24], "the WebP has no key frame"),
    "bad JPEG header": (JPEG[:2] + b"no marker" + JPEG[2:], "the first bytes are"),
    "bad PNG header": (PNG[:12] + b"IDAT" + PNG[16:], "does not begin with its header"),
    "no pixels": (b"GIF89a" + bytes([0, 0, 9, 0]) + GIF[10:], "0 x 9 pixels"),
    "bomb": (png_header(60_000, 60_000) + PNG[33:], "claims 60000 x 60000 pixels; expected at most 178,956,970"),
    "ribbon": (file_of(picture(2100, 10), "PNG"), "aspect ratio of at most 200"),
    "animated WebP": (file_of(FRAMES[0], "WEBP", **MANY), "is an animation"),
}
GREY = {
    "truncated JPEG": (JPEG[: len(JPEG) // 2], "the jpeg cannot be decoded"),
    "truncated PNG": (PNG[: len(PNG) // 2], "the png cannot be decoded"),
    "truncated WebP": (WEBP[: len(WEBP) // 2], "the webp cannot be decoded"),
    "truncated GIF": (GIF[: len(GIF) // 2], "the gif cannot be decoded"),
    "damaged PNG": (flipped(PNG, 300), "the png cannot be decoded"),
    "JPEG without picture": (JPEG[: JPEG.index(b"\xff\xda")] + b"\xff\xd9", "the jpeg cannot be decoded"),
    "two sizes": (png_header(80, 60) + PNG[8:], "its header says 80 x 60"),
}
SHOWN = {
    "JPEG": (JPEG, (90, 60)),
    "CMYK": (file_of(picture(40, 30, "CMYK")), (40, 30)),
    "grey JPEG": (file_of(picture(40, 30, "L")), (40, 30)),
    "16 bit": (file_of(Image.fromarray(np.arange(1200, dtype=np.uint16).reshape(30, 40)), "PNG"), (40, 30)),
    "palette": (file_of(picture(40, 30, "P"), "PNG"), (40, 30)),
    "alpha": (file_of(CLEAR, "PNG"), (40, 30)),
    "alpha of WebP": (file_of(CLEAR, "WEBP", lossless=True), (40, 30)),
    "animated GIF": (file_of(FRAMES[0].quantize(32), "GIF", save_all=True, append_images=FRAMES[1:]), (40, 30)),
    "animated PNG": (file_of(FRAMES[0], "PNG", **MANY), (40, 30)),
    "turned JPEG": (turned("JPEG", 6), (40, 60)),
    "turned PNG": (turned("PNG", 8), (40, 60)),
    "turned WebP": (turned("WEBP", 5), (40, 60)),
    "mirrored PNG": (turned("PNG", 2), (60, 40)),
}
PATHS = {
    "missing": ("none.jpg", "cannot be read (No such file or directory)"),
    "folder": ("sub", "is no file"),
    "pipe": ("pipe", "is no file"),
    "below a file": ("page.jpg/a.jpg", "cannot be read (Not a directory)"),
    "long": ("a" * 5000, "cannot be read (File name too long)"),
    "circle": ("circle", "cannot be read (Too many levels of symbolic links)"),
    "up": ("../secret.jpg", "leads out of media_root"),
    "up and down": ("sub/../../secret.jpg", "leads out of media_root"),
    "absolute": (None, "leads out of media_root"),
    "link": ("link.jpg", "leads out of media_root"),
    "linked folder": ("away/secret.jpg", "leads out of media_root"),
    "URL": ("https://host/a.jpg", "nothing is fetched"),
    "file URL": ("file:///etc/hostname", "nothing is fetched"),
    "data URL": ("data:image/png;base64,iVBO", "nothing is fetched"),
    "NUL": ("a\0b", "the path"),
    "large": ("large.jpg", "is larger than 67,108,864 bytes"),
    "web page": ("page.jpg", "expected those of a JPEG, PNG, WebP or GIF"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A recipe whose rows have every fault, and (shard, row): (name, result, reason) of what is not shown as it is."""
    folder = tmp_path_factory.mktemp("faults")
    files, media = folder / "bytes.parquet", folder / "media"
    named = [(name, *each, result) for result, kinds in RESULTS.items() for name, each in kinds.items()]
    pq.write_table(pa.table({"image": [each[1] for each in named], "text": [each[0] for each in named]}), files)
    expected = {("bytes.parquet", row): (result, reason) for row, (_, _, reason, result) in enumerate(named)}
    (media / "sub").mkdir(parents=True)
    (folder / "secret.jpg").write_bytes(JPEG)
    (media / "link.jpg").symlink_to(folder / "secret.jpg")
    (media / "away").symlink_to(folder)
    (media / "circle").symlink_to(media / "circle")
    os.mkfifo(media / "pipe")
    (media / "sound.jpg").symlink_to(media / "sub" / "sound.webp")
    (media / "sub" / "sound.webp").write_bytes(PNG)  # neither name is its kind
    (media / "page.jpg").write_bytes(b"<html>")
    with open(media / "large.jpg", "wb") as file:
        file.write(JPEG)
        file.truncate((64 << 20) + 1)
    rows = [{"image": path or str(folder / "secret.jpg"), "text": name} for name, (path, _) in PATHS.items()]
    rows += [{"image": "sound.jpg", "text": "wrong extension"}, {"image": "sub/../sound.jpg", "text": "roundabout"}]
    (folder / "paths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    expected |= {("paths.jsonl", row): ("left out", reason) for row, (_, reason) in enumerate(PATHS.values())}
    expected |= {("paths.jsonl", len(PATHS) + n): ("shown", (90, 60)) for n in range(2)}
    recipe = {
        "documents": "images",
        "repeat": False,
        "canonical_replicas": LANES,
        "chunk_size": 8,
        "on_error": "quarantine",
        "error_budget": 1.0,
        "cache_dir": str(folder / "cache"),
        "sources": [
            {"name": "bytes", "path": str(files)},
            {"name": "paths", "path": str(folder / "paths.jsonl"), "media_root": str(media)},
        ],
    }
    return recipe, image_tokenizer(folder / "tokenizer"), expected


RESULTS = {"left out": LEFT_OUT, "grey": GREY, "shown": SHOWN}


def groups_of(data, groups, report, changes=None, **options):
    recipe, tokenizer, _ = data
    return [
        Pipeline.from_recipe(
            DataRecipe.from_dict({**recipe, "error_report": str(report), **(changes or {})}),
            tokenizer=tokenizer,
            seq_len=256,
            microbatch_size=1,
            dp_degree=groups,
            dp_group_id=group,
            global_batch=LANES,
            vision=VISION,
            combine_flag=bool,
            **options,
        )
        for group in range(groups)
    ]


def results_of(pipelines):
    """By (shard, row): size, whether the image is grey, and whether a token of the document is trained on."""
    found = {}
    for pipeline in pipelines:
        for batch in pipeline:
            labels = batch.to_training()["labels"]
            for line in batch.provenance().to_pylist():
                (image,) = line["images"]
                trained = labels[0, line["start"] : line["start"] + line["token_end"] - line["token_begin"] - 1] != -100
                size = image["width"], image["height"]
                found[line["shard"], line["row"]] = (size, image["grey"], bool(trained.any()))
        pipeline.close()
    return found


@pytest.mark.parametrize(
    ("groups", "options"),
    [
        (1, {"runner": "inline"}),
        (2, {"runner": "threads"}),
        (1, {"isolate": True}),
        pytest.param(2, {"isolate": True}, marks=pytest.mark.deep),
        pytest.param(4, {"runner": "threads"}, marks=pytest.mark.deep),
        pytest.param(2, {"runner": "process"}, marks=pytest.mark.deep),
    ],
    ids=["inline", "2 groups", "isolate", "2 groups, isolate", "4 groups", "2 groups, process"],
)
def test_every_fault_has_the_result_that_is_documented(data, tmp_path, groups, options):
    expected = data[2]
    found = results_of(groups_of(data, groups, tmp_path / "report", **options))
    reports = {(entry["shard"], entry["row"]): entry for entry in read_report(tmp_path / "report")}
    assert found.keys() == {row for row, (result, _) in expected.items() if result != "left out"}
    for row, (result, told) in expected.items():
        if result == "shown":
            assert found[row] == (told, False, True)
            assert row not in reports
            continue
        entry = reports.pop(row)
        assert told in entry["reason"]
        assert entry["dataset"] + (".parquet" if entry["dataset"] == "bytes" else ".jsonl") == entry["shard"]
        assert entry["content"]
        if result == "grey":
            assert found[row][1:] == (True, False)
            assert entry["record"] % LANES == entry["lane"]
    assert not reports


def test_the_first_fault_ends_the_run_by_default(data, tmp_path):
    (pipeline,) = groups_of(data, 1, tmp_path, {"on_error": "raise", "error_report": None})
    with pytest.raises(DataError, match=r'tokenize_images failed on dataset "(bytes|paths)", shard \S+, row \d+: '):
        for _ in pipeline:
            pass
