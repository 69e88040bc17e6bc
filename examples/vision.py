"""Batches of text and pictures, equal on one and two groups of ranks and after a resume, and a contact sheet of one.

Called by `examples.demo --vision`. The contact sheet shows one global batch: what stands in every record, with the
pictures as the model gets them, put together again from its patches.
"""

from __future__ import annotations

import hashlib
import textwrap
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from examples.pictures import VISION_TOKENS, PictureCorpus, build_pictures
from zephon import Pipeline, SampleBatch, VisionSettings
from zephon.io import Dataset
from zephon.tokenizer.tokenizer import Tokenizer
from zephon.work import StaticMixtureWorkSource

SEQ_LEN, GLOBAL_BATCH, MICROBATCH, LANES = 1023, 6, 3, 6
MAX_IMAGES = 12
VISION = VisionSettings(min_pixels=64 * 64, max_pixels=320 * 320)
_DOCUMENTS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")


def pictures_pipeline(corpus: PictureCorpus, *, groups: int = 1, group: int = 0) -> Pipeline:
    """Captioned pictures, stories and notes, packed into records of whole documents."""
    source = StaticMixtureWorkSource(
        datasets=[Dataset.from_path(name, path) for name, path in corpus.sources.items()],
        mixture={"captions": 0.5, "stories": 0.4, "notes": 0.1},
        token_estimation=True,
        seed=42,
    )
    return (
        Pipeline(source)
        .options(canonical_replicas=LANES, global_batch=GLOBAL_BATCH, dp_degree=groups, dp_group_id=group)
        .tokenize_images(corpus.tokenizer, vision=VISION, datasets=["captions", "stories"])
        .tokenize(corpus.tokenizer, datasets=["notes"])
        .pack_flat(SEQ_LEN, "best_fit", oversized="drop", max_images=MAX_IMAGES)
        .shuffle(64, seed=42)
        .batch(MICROBATCH)
    )


def global_batches(pipelines: Sequence[Pipeline], steps: int) -> Iterator[list[SampleBatch]]:
    """The microbatches of each step, of all groups."""
    streams = [iter(pipeline) for pipeline in pipelines]
    for _ in range(steps):
        yield [next(stream) for stream in streams for _ in range(GLOBAL_BATCH // MICROBATCH // len(streams))]


def digest(step: Sequence[SampleBatch]) -> str:
    """SHA-256 of a global batch, over tokens, images and pixels of its records by sequence number."""
    found = {}
    for batch in step:
        for n, (number, of_record) in enumerate(zip(batch.sequence_numbers.tolist(), batch.digests, strict=True)):
            images = batch.block.slice(n, n + 1).images
            pixels = [] if images is None else images.patches or []
            found[number] = of_record + hashlib.sha256(b"".join(each.tobytes() for each in pixels)).digest()
    return hashlib.sha256(b"".join(found[number] for number in sorted(found))).hexdigest()


def main(folder: Path, steps: int = 6) -> None:
    """Build the pictures, stream from them on 1 and 2 groups of ranks and after a resume, and draw a global batch."""
    print("\n1. Pictures with captions, stories of texts and pictures, notes without any\n", flush=True)
    corpus = build_pictures(folder)
    for name, path in corpus.sources.items():
        print(f"    {name:10}{path}")
    print(f"\n2. The same global batches of {GLOBAL_BATCH} records on 1 and 2 groups of ranks, and after a resume\n")
    runs: dict[str, list[str]] = {}
    sheet: list[SampleBatch] = []
    with_one = pictures_pipeline(corpus)
    runs["1 group"] = []
    images = 0
    for step in global_batches([with_one], steps):
        sheet = sheet or step
        images += sum(len(batch.to_training()["grid_thw"]) for batch in step)
        runs["1 group"].append(digest(step))
    tokenizer = with_one.compiled.tokenizer
    assert tokenizer is not None
    with_one.close()
    with_two = [pictures_pipeline(corpus, groups=2, group=group) for group in range(2)]
    runs["2 groups"] = [digest(step) for step in global_batches(with_two, steps)]
    before = [pictures_pipeline(corpus, groups=2, group=group) for group in range(2)]
    half = [digest(step) for step in global_batches(before, steps // 2)]
    after = pictures_pipeline(corpus).restore([pipeline.checkpoint() for pipeline in before])
    name = f"2 groups, from step {steps // 2 + 1} on 1"
    runs[name] = half + [digest(step) for step in global_batches([after], steps - steps // 2)]
    for pipeline in [*with_two, *before, after]:
        pipeline.close()
    print("    step  " + "".join(f"{title:30}" for title in runs))
    for n, same in enumerate(zip(*runs.values(), strict=True)):
        print(f"    {n + 1:<6}" + "".join(f"{each[:24]:30}" for each in same))
    if len({tuple(run) for run in runs.values()}) > 1:
        raise SystemExit("the runs differ")
    print(f"\n    all equal, tokens and pixels, over {images} images")
    print("\n3. What the model sees in the first step\n")
    path = folder / "batch.png"
    contact_sheet(sheet, tokenizer, VISION).save(path)
    print(f"    {path}")


# ---------------------------------------------------------------------------------------------------------------------
# The contact sheet

_WIDE, _MARGIN, _GAP, _HIGH, _LINE = 1840, 28, 10, 100, 15


def contact_sheet(step: Sequence[SampleBatch], tokenizer: Tokenizer, vision: VisionSettings) -> Image.Image:
    """A picture of a global batch: for each record a bar of its tokens, and below it its documents.

    In the bar every document has a colour, strong where its tokens stand for images and pale where they are text, and
    grey is padding; documents below have the same colours and order.
    """
    big = Image.new("RGB", (_WIDE, 400 * sum(map(len, step)) * 3), "white")
    draw = ImageDraw.Draw(big)
    y = _MARGIN
    draw.text((_MARGIN, y), "One global batch", "#22223b", ImageFont.load_default(26))
    y += 36
    legend = "Bars are the tokens of a record: documents by colour, strong where tokens are images, pale where text; "
    draw.text((_MARGIN, y), legend + "grey is padding.", "#4a4e69", ImageFont.load_default(14))
    y += 36
    for batch in step:
        for n in range(len(batch)):
            y = _draw_record(big, draw, y, batch, n, tokenizer, vision)
    return big.crop((0, 0, _WIDE, y + _MARGIN - 16))


def _draw_record(
    sheet: Image.Image,
    draw: ImageDraw.ImageDraw,
    y: int,
    batch: SampleBatch,
    n: int,
    tokenizer: Tokenizer,
    vision: VisionSettings,
) -> int:
    """Draw a record; the place below it."""
    record = batch.block.slice(n, n + 1)
    length, places = int(record.lengths[0]), record.tokens.shape[1]
    special = {token.content: token.id for token in tokenizer.special_tokens}
    image_id = special[VISION_TOKENS[0]]
    tokens = record.tokens[0]
    edges = [*record.span_start[record.span_start < length].tolist(), length]
    documents = list(pairwise(edges))
    images = record.images
    shown = 0 if images is None else len(images.grids)
    title = f"Record {batch.sequence_numbers[n]}"
    draw.text((_MARGIN, y), title, "#22223b", ImageFont.load_default(17))
    says = f"{length:,} of {places:,} places filled, {len(documents)} documents, {shown} images"
    draw.text((_MARGIN + 110, y + 3), says, "#4a4e69", ImageFont.load_default(13))
    y += 26
    scale = (_WIDE - 2 * _MARGIN) / places
    draw.rectangle((_MARGIN, y, _WIDE - _MARGIN, y + 20), "#d9dbe0")
    for d, (start, stop) in enumerate(documents):
        colour = _DOCUMENTS[d % len(_DOCUMENTS)]
        draw.rectangle((_MARGIN + start * scale, y, _MARGIN + stop * scale - 2, y + 20), _pale(colour))
        for at in np.flatnonzero(tokens[start:stop] == image_id).tolist():
            x = _MARGIN + (start + at) * scale
            draw.rectangle((x, y, x + scale, y + 20), colour)
    y += 32
    x, lowest = _MARGIN, y
    for d, (start, stop) in enumerate(documents):
        pictures = [] if images is None else _pictures(batch, n, d, vision)
        ids = tokens[start:stop]
        pieces = np.split(ids, np.flatnonzero(np.isin(ids, list(special.values()))))
        texts = (tokenizer.decode(piece[~np.isin(piece, list(special.values()))]) for piece in pieces)
        text = " ".join(" ".join(texts).split())
        wide = max(168, sum(each.width + 4 for each in pictures))
        if x + wide > _WIDE - _MARGIN and x > _MARGIN:
            x, y = _MARGIN, lowest + _GAP
        bottom = _draw_document(sheet, draw, x, y, wide, pictures, text, _DOCUMENTS[d % len(_DOCUMENTS)])
        lowest = max(lowest, bottom)
        x += wide + _GAP
    draw.line((_MARGIN, lowest + 14, _WIDE - _MARGIN, lowest + 14), "#e9ecef", 2)
    return lowest + 30


def _draw_document(
    sheet: Image.Image,
    draw: ImageDraw.ImageDraw,
    x: int,
    y: int,
    wide: int,
    pictures: Sequence[Image.Image],
    text: str,
    colour: str,
) -> int:
    """Draw the pictures of a document in a row and its text below; the place below it."""
    draw.rectangle((x, y, x + wide, y + 4), colour)
    y += 9
    at = x
    for picture in pictures:
        sheet.paste(picture, (at, y))
        at += picture.width + 4
    y += _HIGH + 5 if pictures else 0
    font = ImageFont.load_default(12)
    lines = textwrap.wrap(text, max(24, int(wide / 6)), max_lines=5 if pictures else 8, placeholder=" ...")
    for line in lines:
        draw.text((x, y), line, "#22223b", font)
        y += _LINE
    return y


def _pictures(batch: SampleBatch, record: int, document: int, vision: VisionSettings) -> list[Image.Image]:
    """The images of a document of a record, as small pictures of their patches."""
    images = batch.block.slice(record, record + 1).images
    assert images is not None
    found = images.slice(document, document + 1)
    assert found.patches is not None
    shown = []
    for grid, patches in zip(found.grids.tolist(), found.patches, strict=True):
        picture = Image.fromarray(picture_of(patches, grid[0], grid[1], vision))
        shown.append(picture.resize((round(picture.width * _HIGH / picture.height), _HIGH), Image.Resampling.LANCZOS))
    return shown


def picture_of(patches: np.ndarray, high: int, wide: int, vision: VisionSettings) -> np.ndarray:
    """uint8[rows, columns, 3]: the picture that `high` x `wide` patches in block order were cut from."""
    merge, side = vision.merge_size, vision.patch_size
    parts = patches.reshape(high // merge, wide // merge, merge, merge, 3, side, side)
    return np.ascontiguousarray(parts.transpose(0, 2, 5, 1, 3, 6, 4).reshape(high * side, wide * side, 3))


def _pale(colour: str) -> tuple[int, ...]:
    return tuple(255 - int((255 - int(colour[at : at + 2], 16)) * 0.35) for at in (1, 3, 5))
