"""What files hold that are not what their names say, told by their first bytes.

Such a file is not damaged: all of its rows may be good, so it is refused and never left out as a bad row or file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress

from zephon.columns.damage import shown_value
from zephon.data.formats.sequential import codec_of
from zephon.data.storage import StoredFile
from zephon.errors import DataError, ZephonError

LFS_POINTER = b"version https://git-lfs"
_ZSTD = b"\x28\xb5\x2f\xfd"
# The first bytes of files that are not what their name says, the endings that say it, what they are, and the remedy.
_CONTENTS = (
    (LFS_POINTER, (), "a pointer of Git LFS to the file", "get the file itself with: git lfs pull"),
    (b"\x1f\x8b", (".gz", ".tgz"), "compressed with gzip", "rename it to end with .gz"),
    (_ZSTD, (".zst",), "compressed with zstd", "rename it to end with .zst"),
    (b"BZh", (".bz2",), "compressed with bz2", "rename it to end with .bz2"),
    (b"\xfd7zXZ", (), "compressed with xz", "compress it with gzip or zstd instead"),
    (b"PK\x03\x04", (), "a zip archive", "unpack it"),
    (b"\xff\xfe\0\0", (), "text in UTF-32", "convert it to UTF-8"),
    (b"\0\0\xfe\xff", (), "text in UTF-32", "convert it to UTF-8"),
    (b"\xff\xfe", (), "text in UTF-16", "convert it to UTF-8"),
    (b"\xfe\xff", (), "text in UTF-16", "convert it to UTF-8"),
    (b"/annex/objects/", (), "a pointer of git-annex to the file", "get the file itself with: git annex get"),
    (b"<!DOCTYPE", (), "a web page", "download the file itself"),
    (b"<!doctype", (), "a web page", "download the file itself"),
    (b"<html", (), "a web page", "download the file itself"),
)
# All values of the first key in one array, or by row number in one object, as pandas writes them.
_COLUMNS = re.compile(rb'\{\s*"(?:[^"\\]|\\.)*"\s*:\s*[\[{]', re.DOTALL)
_WIDE = re.compile(rb"(?:[\t\r\n -~](\0\0)?\0|\0(\0\0)?[\t\r\n -~]){2}")
_OPENED = re.compile(rb"[\[{]|\[.*,|\{.*[\[{]")
_BEGUN = re.compile(rb'\{\s*"(?!.*\}\s*\{\s*")', re.DOTALL)


def content_by_mark(head: bytes, path: str, is_unpacked: bool = False) -> str:
    """What a file is by its first bytes, for messages, where its name does not say it; else "".

    `is_unpacked` says that these bytes came out of a decompressor: what is compressed is so twice.
    """
    for mark, endings, what, remedy in _CONTENTS:
        if head.startswith(mark) and (is_unpacked or not any(ending in path.lower() for ending in endings)):
            if is_unpacked:
                return f"'{path}' is {what}, inside of its compression; decompress it and {remedy}"
            return f"'{path}' is {what}, which its name does not say; {remedy}"
    return ""


def other_content(file: StoredFile) -> str:
    """What a file holds by its first bytes, for messages, where its name promises something else; else ""."""
    with suppress(ZephonError), file.open() as handle:
        head, codec = bytes(handle.read_at(min(file.size, 64), 0)), codec_of(file.path)
        if other := content_by_mark(head, file.path):
            return other
        if head.startswith(_ZSTD) and len(head) > 5 and not head[4] & 0x20:  # RFC 8878, 3.1.1.1
            window = (8 + (head[5] & 7)) << (7 + (head[5] >> 3))
            if window > 128 << 20:  # which decompressors do not take on without being asked to
                return f"'{file.path}' has zstd windows of {window >> 20:,} MiB; expected at most 128. Use --long=27"
        if codec is not None and head[:1] in (b"{", b"["):
            return f"'{file.path}' is not compressed, though its name says {codec}; rename it"
    return ""


def require_json_lines(file: StoredFile, lines: Sequence[bytes], is_object: Callable[[bytes], bool]) -> None:
    """Refuses a file that is no JSON lines, by its first lines.

    Raises:
        DataError: none of the lines is an object, or the only one holds the values of all rows by column.
    """
    path, text = file.path, b"\n".join(lines).removeprefix(b"\xef\xbb\xbf").lstrip()
    rows = [line for line in text.split(b"\n") if line.strip()]
    n_objects = sum(map(is_object, rows))
    if not rows:
        return
    head = rows[0].rstrip()
    is_columns = n_objects == len(rows) == 1 and _COLUMNS.match(text)
    # The last element of an array is an object on its line where each has one; the others end with a comma.
    if n_objects and not is_columns and (2 * n_objects > len(rows) or not _OPENED.fullmatch(head)):
        return
    if is_columns:
        what = "one JSON object with all values of a column under its key; expected a line per row"
        remedy = "Write a line per row, for example with pandas: to_json(FILE, orient='records', lines=True)"
    elif other := content_by_mark(head, path, codec_of(path) is not None):
        raise DataError(other)
    elif wide := _WIDE.match(head):
        what, remedy = f"text in UTF-{32 if wide[1] or wide[2] else 16}; expected UTF-8", "Convert it with iconv"
    elif not any(row.strip(b"\0\r") for row in rows) or (len(rows) == 1 and b"\r" not in head and _BEGUN.match(head)):
        return  # zeros of a file system, or an object that is cut off: these are damage
    elif b"\r" in head:
        what, remedy = "text with CR alone at the ends of lines; expected LF", "Convert it with tr '\\r' '\\n'"
    elif head.startswith(b"["):
        what, remedy = "one JSON value; expected a line per row", "Write them with jq -c '.[]' FILE"
    elif head.startswith(b"{"):
        what = "JSON without a line per object; expected a line per row"
        remedy = "Write each object on a line with jq -c . FILE, or what one KEY lists with jq -c '.KEY[]' FILE"
    else:
        what = f"no JSON lines, but begins with {shown_value(head[:40])!r}; expected a JSON object on each line"
        remedy = "Convert it, name its format with fmt, or take it away"
    raise DataError(f"'{path}' is {what}. {remedy}")
