"""Size and orientation of an image from the first bytes of its file, without decoding it.

JPEG, PNG, WebP and GIF (the first picture of an animated one) are known by what they begin with, whatever the file is
called.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

MAX_PIXELS = 178_956_970
"""Most pixels of an image: what claims more is a bomb for the decoder. Pillow has the same limit."""
_MAX_SEGMENTS = 4096  # of a file before what is looked for
_EXIF = b"Exif\x00\x00"


class BadImage(Exception):
    """Why a file is no image that can be used."""


class Header(NamedTuple):
    """What the head of an image file says.

    `width` and `height` are those of the picture as it is to be seen: `orientation` (EXIF, 1 to 8) is applied.
    """

    format: str
    width: int
    height: int
    orientation: int = 1


def read_header(data: bytes | memoryview) -> Header:
    """The header of an image file, or `BadImage`."""
    data = memoryview(data)
    start = bytes(data[:12])
    try:
        if start[:3] == b"\xff\xd8\xff":
            header = _jpeg(data)
        elif start[:8] == b"\x89PNG\r\n\x1a\n":
            header = _png(data)
        elif start[:4] == b"RIFF" and start[8:] == b"WEBP":
            header = _webp(data)
        elif start[:6] in (b"GIF87a", b"GIF89a"):
            header = Header("gif", *struct.unpack_from("<HH", data, 6))
        else:
            raise BadImage(f"the first bytes are {start[:8]!r}; expected those of a JPEG, PNG, WebP or GIF")
    except (struct.error, IndexError):
        raise BadImage("the file ends within its header") from None
    if not header.width or not header.height:
        raise BadImage(f"the {header.format} is {header.width} x {header.height} pixels; expected at least one")
    if header.width * header.height > MAX_PIXELS:
        raise BadImage(
            f"the {header.format} claims {header.width} x {header.height} pixels; expected at most {MAX_PIXELS:,}"
        )
    return header


def _oriented(kind: str, width: int, height: int, orientation: int) -> Header:
    # 5 to 8 lie on their side.
    return Header(kind, height, width, orientation) if orientation > 4 else Header(kind, width, height, orientation)


def _jpeg(data: memoryview) -> Header:
    at, orientation = 2, 0
    for _ in range(_MAX_SEGMENTS):
        if data[at] != 0xFF:
            raise BadImage(f"the JPEG has no marker at byte {at}")
        while (marker := data[at + 1]) == 0xFF:  # fill bytes
            at += 1
        at += 2
        if marker == 0x00:  # libjpeg would look for the next marker, and find another size than this would
            raise BadImage(f"the JPEG has no marker at byte {at - 1}")
        if marker == 0x01 or 0xD0 <= marker <= 0xD7:  # markers without a segment
            continue
        if marker in (0xD9, 0xDA):
            raise BadImage("the JPEG has no size before its picture")
        (length,) = struct.unpack_from(">H", data, at)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 3)
            return _oriented("jpeg", width, height, orientation or 1)
        if marker == 0xE1 and not orientation and bytes(data[at + 2 : at + 8]) == _EXIF:
            orientation = _orientation(data[at + 8 : at + length])
        if length < 2:
            raise BadImage(f"the JPEG has a segment of {length} bytes at byte {at}")
        at += length
    raise BadImage(f"the JPEG has more than {_MAX_SEGMENTS} segments before its size")


def _orientation(tiff: memoryview) -> int:
    """The orientation in EXIF data; 1 where they do not give a valid one."""
    try:
        order = {b"II": "<", b"MM": ">"}.get(bytes(tiff[:2]))
        if order is None:
            return 1
        (at,) = struct.unpack_from(f"{order}I", tiff, 4)
        (count,) = struct.unpack_from(f"{order}H", tiff, at)
        for entry in range(at + 2, at + 2 + 12 * count, 12):
            tag, kind, values, value = struct.unpack_from(f"{order}HHIH", tiff, entry)
            if tag == 0x0112:
                return value if kind == 3 and values == 1 and 1 <= value <= 8 else 1
    except struct.error:
        pass
    return 1


def _png(data: memoryview) -> Header:
    length, kind, width, height = struct.unpack_from(">I4sII", data, 8)
    if kind != b"IHDR" or length != 13:
        raise BadImage("the PNG does not begin with its header")
    at = 33
    for _ in range(_MAX_SEGMENTS):
        length, kind = struct.unpack(">I4s", data[at : at + 8]) if len(data) >= at + 8 else (0, b"IEND")
        if kind == b"eXIf":
            return _oriented("png", width, height, _orientation(data[at + 8 : at + 8 + length]))
        if kind in (b"IDAT", b"IEND"):
            break
        at += 12 + length
    return Header("png", width, height)


def _webp(data: memoryview) -> Header:
    kind = bytes(data[12:16])
    if kind == b"VP8X":
        flags, width, height = data[20], _three_bytes(data, 24) + 1, _three_bytes(data, 27) + 1
        if flags & 0x02:
            raise BadImage("the WebP is an animation; expected a still picture")
        return _oriented("webp", width, height, _exif_of_webp(data) if flags & 0x08 else 1)
    if kind == b"VP8L":
        if data[20] != 0x2F:
            raise BadImage("the WebP has no lossless header")
        (bits,) = struct.unpack_from("<I", data, 21)
        return Header("webp", (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1)
    if kind == b"VP8 ":
        if bytes(data[23:26]) != b"\x9d\x01\x2a":
            raise BadImage("the WebP has no key frame")
        width, height = struct.unpack_from("<HH", data, 26)
        return Header("webp", width & 0x3FFF, height & 0x3FFF)
    raise BadImage(f"the WebP begins with the chunk {kind!r}; expected VP8, VP8L or VP8X")


def _exif_of_webp(data: memoryview) -> int:
    """The orientation in the chunk EXIF, which follows the picture."""
    at = 12
    for _ in range(_MAX_SEGMENTS):
        if len(data) < at + 8:
            break
        kind, length = struct.unpack_from("<4sI", data, at)
        if kind == b"EXIF":
            exif = data[at + 8 : at + 8 + length]
            return _orientation(exif[6:] if bytes(exif[:6]) == _EXIF else exif)
        at += 8 + length + length % 2
    return 1


def _three_bytes(data: memoryview, at: int) -> int:
    return int.from_bytes(data[at : at + 3], "little")
