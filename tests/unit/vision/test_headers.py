"""Sizes from the first bytes of image files, against Pillow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.vision_data import file_of, picture
from zephon.vision.headers import BadImage, read_header

KINDS = [
    ("JPEG", "RGB", {}),
    ("JPEG", "RGB", {"progressive": True}),
    ("JPEG", "L", {}),
    ("JPEG", "CMYK", {}),
    ("JPEG", "RGB", {"comment": b"x" * 60_000, "icc_profile": b"y" * 200_000}),
    ("PNG", "RGB", {}),
    ("PNG", "P", {}),
    ("PNG", "I;16", {}),
    ("WEBP", "RGB", {}),
    ("WEBP", "RGBA", {"lossless": True}),
    ("WEBP", "RGB", {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0"}),
    ("GIF", "P", {}),
]


@pytest.mark.parametrize(("kind", "mode", "options"), KINDS)
@pytest.mark.parametrize("size", [(1, 1), (640, 48), (31, 1000)])
def test_the_size_is_that_of_the_picture(kind, mode, options, size):
    image = picture(*size, "L" if mode == "I;16" else mode)
    data = file_of(image.convert("I;16") if mode == "I;16" else image, kind, **options)
    header = read_header(data)
    assert (header.format, header.width, header.height) == (kind.lower(), *size)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_the_size(kind, orientation):
    image = picture(60, 40)
    image.getexif()[0x0112] = orientation
    header = read_header(file_of(image, kind, exif=image.getexif()))
    assert (header.width, header.height) == ((40, 60) if orientation > 4 else (60, 40))
    assert header.orientation == orientation


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "the first bytes are b''"),
        (b"<html>", "expected those of a JPEG, PNG, WebP or GIF"),
        (file_of(picture(9, 9))[:30], "ends within its header"),
        (file_of(picture(9, 9), "PNG")[:20], "ends within its header"),
        (b"GIF89a" + bytes([0, 0, 9, 0]), "0 x 9 pixels"),
        (b"\x89PNG\r\n\x1a\n" + b"\0\0\0\rIHDR" + b"\0\x01\0\0" * 2, "claims 65536 x 65536 pixels"),
        (b"\xff\xd8\xff\xda\0\0", "no size before its picture"),
    ],
)
def test_what_is_no_image_says_why(data, reason):
    with pytest.raises(BadImage, match=reason):
        read_header(data)


def test_an_animated_webp_is_refused():
    frames = [picture(8, 8, seed=n) for n in range(2)]
    with pytest.raises(BadImage, match="animation"):
        read_header(file_of(frames[0], "WEBP", save_all=True, append_images=frames[1:]))


@given(
    st.sampled_from(
        [file_of(picture(20, 30, mode), kind, **options) for kind, mode, options in KINDS[:4] + KINDS[5:7]]
    ),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=5),
    st.integers(0, 400),
)
def test_damaged_headers_are_refused_or_read(data, changes, length):
    damaged = bytearray(data[:length])
    for place, value in changes:
        if place < len(damaged):
            damaged[place] = value
    try:
        header = read_header(bytes(damaged))
    except BadImage:
        return
    assert header.width > 0
    assert header.height > 0
