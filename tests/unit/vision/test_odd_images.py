"""Bad and odd images: each kind has one result, the same with either decoder."""

import struct
import sys
import zlib

import numpy as np
import pytest

from support.vision_data import file_of, picture
from zephon.errors import PipelineError
from zephon.vision import pixels
from zephon.vision.geometry import VisionSettings
from zephon.vision.headers import BadImage, read_header
from zephon.vision.pixels import image_patches
from zephon.vision.probes import image_pixels, probe_files

SETTINGS = VisionSettings(patch_size=4, merge_size=1, min_pixels=1)
WIDE, HIGH = 16, 12


def chunk(kind, content):
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(depth, color, values, *headers):
    """A PNG of values [height, width, ...], with other headers after the first."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", WIDE, HIGH, depth, color, 0, 0, 0))
    rows = zlib.compress(b"".join(b"\0" + row.tobytes() for row in values))
    return b"\x89PNG\r\n\x1a\n" + head + b"".join(headers) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def shown(data):
    """uint8[height, width, 3], the picture as it comes out of its patches."""
    header = read_header(data)
    patches = image_patches(data, SETTINGS.grid(header.width, header.height), SETTINGS)
    high, wide = header.height // 4, header.width // 4
    return patches.reshape(high, wide, 3, 4, 4).transpose(0, 3, 1, 4, 2).reshape(high * 4, wide * 4, 3)


@pytest.fixture(params=["torchvision", "Pillow alone"])
def decoder(request, monkeypatch):
    if request.param == "Pillow alone":
        monkeypatch.setitem(sys.modules, "torchvision.io", None)
    pixels._decoders.cache_clear()
    yield
    pixels._decoders.cache_clear()


RANDOM = np.random.default_rng(0).integers(0, 1 << 16, (HIGH, WIDE, 3), dtype=np.uint16)
LARGE = chunk(b"IHDR", struct.pack(">IIBBBBB", 1024, 1024, 8, 2, 0, 0, 0))
FRAMES = [picture(WIDE, HIGH, seed=n) for n in range(3)]
CLEAR = picture(WIDE, HIGH).convert("RGBA")
CLEAR.putalpha(0)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (png(16, 2, RANDOM.astype(">u2")), RANDOM >> 8),
        (png(16, 0, RANDOM[..., 0].astype(">u2")), np.repeat(RANDOM[..., :1] >> 8, 3, axis=2)),
        (file_of(picture(WIDE, HIGH, "L"), "PNG"), picture(WIDE, HIGH, "L").convert("RGB")),
        (file_of(picture(WIDE, HIGH, "P"), "PNG"), picture(WIDE, HIGH, "P").convert("RGB")),
        (file_of(CLEAR, "PNG"), CLEAR.convert("RGB")),  # the colours behind what is transparent
        (file_of(CLEAR, "WEBP", lossless=True, exact=True), CLEAR.convert("RGB")),
        (file_of(FRAMES[0], "PNG", save_all=True, append_images=FRAMES[1:]), FRAMES[0]),
        (
            file_of(FRAMES[0].quantize(32), "GIF", save_all=True, append_images=[f.quantize(32) for f in FRAMES[1:]]),
            FRAMES[0].quantize(32).convert("RGB"),
        ),
    ],
    ids=["16 bit", "16 bit grey", "grey", "palette", "alpha", "alpha of WebP", "animated PNG", "animated GIF"],
)
def test_odd_images_are_shown(decoder, data, expected):
    assert np.array_equal(shown(data), np.asarray(expected))


def gif_of_a_large_frame():
    data = bytearray(file_of(FRAMES[0].quantize(32), "GIF"))
    data[6:10] = struct.pack("<HH", 4, 4)
    return bytes(data)


def broken(kind, place):
    data = bytearray(file_of(picture(200, 100), kind))
    data[place] ^= 0xFF
    return bytes(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            png(8, 2, RANDOM.astype("u1"), chunk(b"IHDR", struct.pack(">IIBBBBB", 1024, 1024, 8, 2, 0, 0, 0))),
            "1024 x 1024",
        ),
        (gif_of_a_large_frame(), "the picture is 16 x 12 pixels, its header says 4 x 4"),
        (broken("PNG", 300), "the png cannot be decoded"),  # torchvision 0.29 dies of it
        (file_of(picture(90, 60))[:-2], "the jpeg cannot be decoded"),
        (file_of(picture(90, 60), "WEBP")[:-300], "the webp cannot be decoded"),
        (file_of(picture(90, 60, "P"), "GIF")[:-300], "the gif cannot be decoded"),
    ],
    ids=["two headers", "large frame", "damaged PNG", "JPEG without end", "cut WebP", "cut GIF"],
)
def test_what_cannot_be_decoded_is_refused(decoder, data, reason):
    header = read_header(data)
    with pytest.raises(BadImage, match=reason):
        image_patches(data, SETTINGS.grid(header.width, header.height), SETTINGS)


def test_a_jpeg_whose_size_libjpeg_would_find_elsewhere_is_refused():
    data = file_of(picture(9, 9))
    hidden = b"\xff\x00" + struct.pack(">H", 2)
    with pytest.raises(BadImage, match="has no marker at byte 3"):
        read_header(data[:2] + hidden + data[2:])


def test_both_decoders_make_the_same_pixels(monkeypatch):
    expected = image_pixels()
    monkeypatch.setitem(sys.modules, "torchvision.io", None)
    pixels._decoders.cache_clear()
    assert image_pixels.__wrapped__() == expected
    pixels._decoders.cache_clear()
    assert {read_header(data).format for data in probe_files().values()} == {"jpeg", "png", "webp", "gif"}


def test_settings_of_the_process_that_let_truncated_images_pass_are_seen(monkeypatch):
    from PIL import ImageFile

    expected = image_pixels()
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    assert image_pixels.__wrapped__() != expected


@pytest.mark.parametrize("name", ["torch", "PIL"])
def test_what_is_missing_is_named(monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    pixels._decoders.cache_clear()
    with pytest.raises(PipelineError, match=f"{name} is missing, and images need torch"):
        image_pixels.__wrapped__()
    pixels._decoders.cache_clear()


def test_lack_of_memory_and_warnings_as_errors_make_nothing_grey(monkeypatch):
    data = file_of(picture(8, 8), "PNG")

    def failing(error):
        def decode(*_):
            raise error

        return {"png": decode}

    for error, expected in (
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), MemoryError),
        (DeprecationWarning("old"), DeprecationWarning),
    ):
        monkeypatch.setattr(pixels, "_decoders", lambda error=error: failing(error))
        with pytest.raises(expected):
            image_patches(data, SETTINGS.grid(8, 8), SETTINGS)
