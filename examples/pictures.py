"""The corpus of `demo --vision`: pictures drawn at run time, with what they show in words.

Three sources: ``captions``, a picture and its caption; ``stories``, texts and pictures in turn; ``notes``, text alone.
Pictures are JPEG, PNG and WebP of many sizes, drawn with Pillow from a seed; nothing is downloaded.
"""

from __future__ import annotations

import io
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import PIL
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw, ImageFont, ImageOps

from examples.corpus import build_folder, train_tokenizer

__all__ = ["VISION_TOKENS", "PictureCorpus", "build_pictures", "draw_picture", "encode_picture"]

VISION_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>")
CAPTIONS, STORIES, NOTES = 480, 120, 240
_FORMAT = 1  # raise it when the corpus would come out differently, so that older folders are built anew
_FINE = 2  # pictures are drawn this much larger, and scaled down, for smooth edges
_IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

_COLOURS = {
    "red": "#d1495b", "orange": "#ee964b", "yellow": "#f4d35e", "green": "#4c956c", "blue": "#2e6f95",
    "purple": "#7b4b94", "white": "#ffffff", "black": "#2b2d42",
}  # fmt: skip
_PAPERS = {"cream": "#fdf6e3", "grey": "#c9ccd5", "pale blue": "#d7e9f7", "pale green": "#dff0d8"}
_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
_FRUITS = ("apples", "pears", "plums", "figs", "limes", "cherries")
_HOURS = {
    "at dawn": ("#f7b267", "#fde2c4", "#8d9f5d"), "at noon": ("#5fa8d3", "#cae9ff", "#6a994e"),
    "at dusk": ("#5b3a6b", "#f4845f", "#4f6d3a"), "at night": ("#0b132b", "#3a506b", "#22333b"),
}  # fmt: skip
_Scene = Callable[[random.Random, ImageDraw.ImageDraw, int, int], str]


@dataclass(frozen=True)
class PictureCorpus:
    """What `build_pictures` has made."""

    sources: dict[str, Path]
    """Folder of each source's Parquet shards, by name."""
    tokenizer: Path
    """Folder of a tokenizer trained on the words, with `VISION_TOKENS`."""


def build_pictures(folder: str | os.PathLike[str]) -> PictureCorpus:
    """Corpus and tokenizer under `folder`, made now unless they are there already.

    Raises: `DataError` where `folder` cannot be written.
    """
    folder = Path(folder).absolute()
    made_from = {"format": _FORMAT, "pillow": PIL.__version__, "rows": [CAPTIONS, STORIES, NOTES]}
    build_folder(folder / "pictures", made_from, _build)
    sources = {name: folder / "pictures" / name for name in ("captions", "stories", "notes")}
    return PictureCorpus(sources=sources, tokenizer=folder / "pictures" / "tokenizer")


def _build(target: Path) -> None:
    from tokenizers import Tokenizer

    rng = random.Random(0)
    pairs = [_drawn(rng) for _ in range(CAPTIONS)]
    stories = [rng.choice((_day, _count, _voyage))(rng) for _ in range(STORIES)]
    notes = [_note(rng) for _ in range(NOTES)]
    captions = [caption for _, caption in pairs]
    _write(target / "captions", {"image": pa.array([_file(image) for image, _ in pairs], _IMAGE), "text": captions})
    shown = [[None if isinstance(part, str) else _file(part) for part in story] for story in stories]
    told = [[part if isinstance(part, str) else None for part in story] for story in stories]
    _write(target / "stories", {"images": pa.array(shown, pa.list_(_IMAGE)), "texts": told})
    _write(target / "notes", {"text": notes})
    words = [*captions, *notes, *(text for texts in told for text in texts if text)]
    file = str(train_tokenizer(words, target / "tokenizer", 1024) / "tokenizer.json")
    tokenizer = Tokenizer.from_file(file)
    tokenizer.add_special_tokens(list(VISION_TOKENS))
    tokenizer.save(file)


def _write(folder: Path, columns: dict[str, object], shards: int = 2) -> None:
    folder.mkdir()
    table = pa.table(columns)
    each = -(-len(table) // shards)
    for shard in range(shards):
        pq.write_table(table.slice(shard * each, each), folder / f"{folder.name}-{shard}.parquet", row_group_size=64)


def _file(data: bytes) -> dict[str, bytes | None]:
    return {"bytes": data, "path": None}


def encode_picture(picture: Image.Image, kind: str, **options: object) -> bytes:
    """A picture as a file."""
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)  # type: ignore[arg-type]
    return buffer.getvalue()


def _drawn(rng: random.Random, scene: _Scene | None = None) -> tuple[bytes, str]:
    """A picture file and its caption; a few lie on their side, as cameras write them."""
    width, height = rng.choice(((480, 320), (320, 320), (320, 480), (400, 300), (640, 280), (256, 384)))
    picture, caption = draw_picture(rng, width, height, scene)
    if rng.random() < 0.1:
        exif = picture.getexif()
        exif[0x0112] = 6  # turn it right to see it
        return encode_picture(picture.transpose(Image.Transpose.ROTATE_90), "JPEG", quality=90, exif=exif), caption
    kind = rng.choices(("JPEG", "PNG", "WEBP"), (6, 2, 2))[0]
    return encode_picture(picture, kind, **({} if kind == "PNG" else {"quality": 90})), caption


def draw_picture(rng: random.Random, width: int, height: int, scene: _Scene | None = None) -> tuple[Image.Image, str]:
    """A picture of that size, and what it shows."""
    big = Image.new("RGB", (width * _FINE, height * _FINE))
    caption = (scene or rng.choice(_SCENES))(rng, ImageDraw.Draw(big), *big.size)
    return ImageOps.fit(big, (width, height), Image.Resampling.LANCZOS), caption


def _shapes(rng: random.Random, draw: ImageDraw.ImageDraw, width: int, height: int) -> str:
    paper = rng.choice(list(_PAPERS))
    draw.rectangle((0, 0, width, height), _PAPERS[paper])
    columns, rows = (4, 3) if width > height else (3, 4)
    places = rng.sample(range(columns * rows), 9)
    said = []
    for form, colour in zip(
        rng.sample(("circle", "square", "triangle"), 2), rng.sample(list(_COLOURS)[:6], 2), strict=True
    ):
        count = rng.randint(1, 4)
        for _ in range(count):
            place = places.pop()
            cell = min(width / columns, height / rows)
            x, y = (place % columns + 0.5) * width / columns, (place // columns + 0.5) * height / rows
            r = cell * rng.uniform(0.25, 0.42)
            if form == "circle":
                draw.ellipse((x - r, y - r, x + r, y + r), _COLOURS[colour])
            elif form == "square":
                draw.rectangle((x - r, y - r, x + r, y + r), _COLOURS[colour])
            else:
                draw.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], _COLOURS[colour])
        said.append(f"{_WORDS[count]} {colour} {form}{'s' if count > 1 else ''}")
    return f"{' and '.join(said).capitalize()} on {paper} paper."


def _landscape(rng: random.Random, draw: ImageDraw.ImageDraw, width: int, height: int, hour: str = "") -> str:
    hour = hour or rng.choice(list(_HOURS))
    _sky(draw, width, int(height * 0.7), *_HOURS[hour][:2])
    x, y, r = width * rng.uniform(0.15, 0.85), height * (0.5 if "d" in hour[3] else 0.18), min(width, height) * 0.07
    draw.ellipse((x - r, y - r, x + r, y + r), "#f8f9fa" if "night" in hour else "#ffe066")
    ground = _HOURS[hour][2]
    for level in range(3):
        base, swing, phase = height * (0.55 + 0.12 * level), height * 0.06, rng.uniform(0, 6)
        edge = [(at, base + swing * math.sin(phase + at / width * (5 - level))) for at in range(0, width + 9, 8)]
        draw.polygon([(0, height), *edge, (width, height)], _darker(ground, 1 - 0.16 * level))
    trees, colour = rng.randint(0, 4), rng.choice(("red", "blue", "orange"))
    for n in range(trees):
        x, y, size = width * (0.1 + 0.2 * n), height * rng.uniform(0.78, 0.9), height * rng.uniform(0.14, 0.22)
        draw.rectangle((x - size * 0.06, y - size * 0.3, x + size * 0.06, y), "#5c4033")
        for n_th in range(3):
            top = y - size * (1.1 - 0.25 * n_th)
            half = size * (0.2 + 0.08 * n_th)
            draw.polygon([(x, top), (x - half, top + size * 0.42), (x + half, top + size * 0.42)], "#1b4332")
    x, y, size = width * 0.86, height * 0.88, height * 0.2
    draw.rectangle((x - size * 0.5, y - size * 0.6, x + size * 0.5, y), "#f1e9da")
    roof = [(x - size * 0.62, y - size * 0.58), (x, y - size * 1.05), (x + size * 0.62, y - size * 0.58)]
    draw.polygon(roof, _COLOURS[colour])
    lit = "#ffd166" if hour in ("at night", "at dusk") else "#6c8ebf"
    draw.rectangle((x - size * 0.3, y - size * 0.4, x - size * 0.05, y - size * 0.15), lit)
    near = f"beside {_WORDS[trees]} tree{'s' if trees > 1 else ''}" if trees else "without a tree in sight"
    article = "an" if colour == "orange" else "a"
    return f"A house with {article} {colour} roof {near}, {hour}."


def _boat(rng: random.Random, draw: ImageDraw.ImageDraw, width: int, height: int, hour: str = "") -> str:
    hour = hour or rng.choice(list(_HOURS))
    _sky(draw, width, height, *_HOURS[hour][:2])
    clouds = rng.randint(0, 3)
    for n in range(clouds):
        x, y = width * (0.2 + 0.3 * n), height * rng.uniform(0.1, 0.25)
        for dx, r in ((-0.06, 0.035), (0, 0.055), (0.07, 0.04)):
            half = r * min(width, height) * 1.5
            at = x + dx * width
            draw.ellipse((at - half, y - half * 0.7, at + half, y + half * 0.7), "#f8f9fa")
    for level in range(4):
        base = height * (0.68 + 0.08 * level)
        edge = [(at, base + height * 0.012 * math.sin(at / width * 30 + level)) for at in range(0, width + 9, 8)]
        draw.polygon([(0, height), *edge, (width, height)], _darker("#2a6f97", 1 - 0.12 * level))
        if level == 1:
            colour, x, y, size = rng.choice(list(_COLOURS)[:6]), width * 0.5, base, min(width, height) * 0.34
            hull = [(x - size * 0.6, y - size * 0.12), (x + size * 0.6, y - size * 0.12)]
            draw.polygon([*hull, (x + size * 0.4, y + size * 0.1), (x - size * 0.42, y + size * 0.1)], "#5c4033")
            draw.rectangle((x - size * 0.015, y - size, x + size * 0.015, y - size * 0.1), "#3d2b1f")
            right, sail = x + size * 0.05, _COLOURS[colour]
            draw.polygon([(right, y - size), (right, y - size * 0.18), (x + size * 0.55, y - size * 0.18)], sail)
            draw.polygon(
                [
                    (x - size * 0.05, y - size * 0.9),
                    (x - size * 0.05, y - size * 0.18),
                    (x - size * 0.4, y - size * 0.18),
                ],
                _COLOURS[colour],
            )
    sky = f"under {_WORDS[clouds]} cloud{'s' if clouds > 1 else ''}" if clouds else "under a clear sky"
    return f"A boat with {colour} sails, {sky}, {hour}."


def _clock(rng: random.Random, draw: ImageDraw.ImageDraw, width: int, height: int) -> str:
    paper = rng.choice(list(_PAPERS))
    draw.rectangle((0, 0, width, height), _PAPERS[paper])
    hour, minute = rng.randint(1, 12), rng.randrange(0, 60, 5)
    x, y, r = width / 2, height / 2, min(width, height) * 0.42
    draw.ellipse((x - r, y - r, x + r, y + r), "#ffffff", _COLOURS["black"], max(2, int(r / 25)))
    font = ImageFont.load_default(r * 0.17)
    for n in range(1, 13):
        angle = n * math.pi / 6
        draw.text((x + r * 0.8 * math.sin(angle), y - r * 0.8 * math.cos(angle)), str(n), "#2b2d42", font, "mm")
    for turn, length, colour, thick in (
        ((hour + minute / 60) / 12, 0.48, "#2b2d42", 18),
        (minute / 60, 0.68, "#d1495b", 26),
    ):
        angle = turn * 2 * math.pi
        tip = (x + r * length * math.sin(angle), y - r * length * math.cos(angle))
        draw.line((x, y, *tip), colour, max(2, int(r / thick)))
    return f"A clock on {paper} paper that shows {hour}:{minute:02d}."


def _bars(rng: random.Random, draw: ImageDraw.ImageDraw, width: int, height: int) -> str:
    draw.rectangle((0, 0, width, height), "#ffffff")
    fruits = rng.sample(_FRUITS, 4)
    counts = rng.sample(range(1, 13), 4)
    left, base, top = width * 0.08, height * 0.86, height * 0.1
    font = ImageFont.load_default(min(width, height) * 0.055)
    for n in range(0, 13, 3):
        y = base - (base - top) * n / 12
        draw.line((left, y, width * 0.97, y), "#c9ccd5", 2)
        draw.text((left * 0.8, y), str(n), "#2b2d42", font, "rm")
    for n, (fruit, count, colour) in enumerate(zip(fruits, counts, rng.sample(list(_COLOURS)[:6], 4), strict=True)):
        x, half = left + (width * 0.9) * (n + 0.5) / 4, width * 0.08
        draw.rectangle((x - half, base - (base - top) * count / 12, x + half, base), _COLOURS[colour])
        draw.text((x, base + height * 0.06), fruit, "#2b2d42", font, "mm")
    said = ", ".join(f"{count} {fruit}" for fruit, count in zip(fruits, counts, strict=True))
    return f"A bar chart of {said}; {fruits[counts.index(max(counts))]} lead."


def _curve(rng: random.Random, draw: ImageDraw.ImageDraw, width: int, height: int) -> str:
    draw.rectangle((0, 0, width, height), "#ffffff")
    name, function = rng.choice(
        (
            ("a sine wave", math.sin),
            ("a parabola", lambda x: x * x / 5 - 1),
            ("a bell", lambda x: 2 * math.exp(-x * x) - 1),
        )
    )
    colour = rng.choice(list(_COLOURS)[:6])
    draw.line((0, height / 2, width, height / 2), "#8d99ae", 3)
    draw.line((width / 2, 0, width / 2, height), "#8d99ae", 3)
    for n in range(1, 8):
        draw.line((width * n / 8, height * 0.49, width * n / 8, height * 0.51), "#8d99ae", 3)
    points = [(at, height / 2 - function((at / width - 0.5) * 6.5) * height * 0.36) for at in range(0, width, 4)]
    draw.line(points, _COLOURS[colour], max(4, height // 70), "curve")
    return f"The graph of {name} in {colour}, with both axes."


def _dice(rng: random.Random, draw: ImageDraw.ImageDraw, width: int, height: int, shown: Sequence[int] = ()) -> str:
    table = rng.choice(list(_COLOURS)[:6])
    draw.rectangle((0, 0, width, height), _darker(_COLOURS[table], 0.75))
    shown = shown or [rng.randint(1, 6) for _ in range(2)]
    size = min(width / len(shown), height) * 0.62
    for n, value in enumerate(shown):
        x, y = width * (n + 0.5) / len(shown), height / 2
        box = (x - size / 2, y - size / 2, x + size / 2, y + size / 2)
        draw.rounded_rectangle(box, size * 0.14, "#fdfdfd", "#c9ccd5", 4)
        spots = {1: "c", 2: "ai", 3: "aci", 4: "agbi", 5: "agbic", 6: "adgbfi"}[value]
        where = {"a": (-1, -1), "b": (1, -1), "c": (0, 0), "d": (-1, 0), "f": (1, 0), "g": (-1, 1), "i": (1, 1)}
        for spot in spots:
            dx, dy = where[spot]
            sx, sy, r = x + dx * size * 0.27, y + dy * size * 0.27, size * 0.085
            draw.ellipse((sx - r, sy - r, sx + r, sy + r), "#2b2d42")
    if len(shown) == 1:
        return f"A die on a {table} table shows {_WORDS[shown[0]]}."
    return f"Dice on a {table} table show {' and '.join(_WORDS[n] for n in shown)}, {_WORDS[sum(shown)]} in all."


_SCENES: tuple[_Scene, ...] = (_shapes, _landscape, _boat, _clock, _bars, _curve, _dice)


def _day(rng: random.Random) -> list[bytes | str]:
    """The same place from dawn to night."""
    place = rng.random()
    story: list[bytes | str] = ["A day in the country, hour by hour."]
    for hour in list(_HOURS)[: rng.randint(2, 4)]:
        same = random.Random(place)
        picture, caption = draw_picture(same, 320, 240, lambda *a, hour=hour: _landscape(*a, hour=hour))  # type: ignore[misc]
        story += [encode_picture(picture, "JPEG", quality=88), caption]
    return story


def _count(rng: random.Random) -> list[bytes | str]:
    """Dice thrown until a six comes."""
    story: list[bytes | str] = ["Throw a die until it shows six."]
    for throw in range(1, 5):
        value = rng.randint(1, 6)
        picture, caption = draw_picture(rng, 192, 192, lambda *a, value=value: _dice(*a, shown=[value]))  # type: ignore[misc]
        story += [encode_picture(picture, "PNG"), f"Throw {throw}. {caption}"]
        if value == 6:
            return [*story, " That is the end of the game."]
    return [*story, " No six in four throws."]


def _voyage(rng: random.Random) -> list[bytes | str]:
    """Text before and after two boats."""
    story: list[bytes | str] = [rng.choice(("Two boats met off the cape.", "The race was between two boats."))]
    for _ in range(2):
        picture, caption = draw_picture(rng, 384, 256, _boat)
        story += [encode_picture(picture, "WEBP", quality=85), caption]
    return [*story, rng.choice((" They kept company until the harbour.", " The first came home an hour ahead."))]


def _note(rng: random.Random) -> str:
    return " ".join(_note_sentences(rng, rng.randint(1, 6)))


def _note_sentences(rng: random.Random, count: int) -> Iterator[str]:
    for _ in range(count):
        a, b = rng.randint(1, 6), rng.randint(1, 6)
        yield rng.choice(
            (
                f"A {rng.choice(list(_COLOURS))} sail is seen from far off {rng.choice(list(_HOURS))}.",
                f"{_WORDS[a].capitalize()} and {_WORDS[b]} make {_WORDS[a + b]}.",
                f"When {rng.choice(_FRUITS)} are ripe, the bars of the chart grow.",
                f"A triangle has three sides, and a square of {_WORDS[a]} by {_WORDS[a]} has four.",
                f"The hand of the clock goes round once in {rng.choice(('an hour', 'half a day'))}.",
            )
        )


def _sky(draw: ImageDraw.ImageDraw, width: int, height: int, top: str, bottom: str) -> None:
    high, low = _rgb(top), _rgb(bottom)
    for y in range(height):
        mixed = tuple(int(a + (b - a) * y / height) for a, b in zip(high, low, strict=True))
        draw.line((0, y, width, y), mixed)


def _darker(colour: str, share: float) -> tuple[int, ...]:
    return tuple(int(value * share) for value in _rgb(colour))


def _rgb(colour: str) -> tuple[int, ...]:
    return tuple(int(colour[at : at + 2], 16) for at in (1, 3, 5))
