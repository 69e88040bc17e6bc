"""WebDataset: tar archives of samples, plain or compressed; a group is a run of neighbouring samples.

A sample is a run of members whose names are alike up to the first dot of the last part: "a/000.txt", "a/000.meta.json".
That much of the name is the sample's key, column "__key__"; what follows the dot names a column: "txt", "meta.json".
Members are read in place: nothing is ever extracted, so where their names point to does not matter.

A scan hops from header to header with `tarfile`. Headers have checksums, what is in a member has none. The first block
of zeros ends the archive, and nothing but zeros may follow: members behind it are lost to a reader that stops there,
and whether they are a second archive or the rest of a damaged one cannot be told. Offsets and lengths of groups count
bytes of the (uncompressed) archive. Layout: https://github.com/webdataset/webdataset.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import pyarrow as pa

from zephon.columns.damage import Damaged
from zephon.columns.template import template_of
from zephon.data.columns import missing_column, physical_columns
from zephon.data.formats import base
from zephon.data.formats.base import (
    Format,
    Group,
    Shard,
    ShardReader,
    ShardScan,
    corrupt_data_errors,
    run_bounds,
)
from zephon.data.formats.sequential import CODECS, codec_of, open_stream
from zephon.data.storage import StoredFile
from zephon.errors import DataError

__all__ = ["KEY", "WebDataset"]

KEY = "__key__"

_BLOCK = tarfile.BLOCKSIZE
_EXTENDED = (tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK)
_PLAIN = (tarfile.REGTYPE, *_EXTENDED)
_OCTAL = re.compile(rb"[0-7]+")
# Names and extended headers are a few hundred bytes; more is no archive.
_MAX_HEADER_BYTES = 1 << 20
_MAX_COLUMNS = 4096
# By the last part of the name; whatever else stays bytes.
_TEXT = frozenset(
    "txt text transcript md html htm xml csv tsv json jsn jsonl cls cls2 class count index inx id py srt vtt".split()  # noqa: SIM905
)
_JSON = frozenset(["json", "jsn"])
_PICKLED = frozenset(["pyd", "pickle", "pkl", "pth", "pt"])


class WebDataset(Format):
    """Tar archives in WebDataset's layout."""

    name = "webdataset"
    suffixes = (".tar", *(f".tar{packed}" for packed in CODECS), ".tgz")
    describing = frozenset(["wids.json", "index.json"])

    def is_sequential(self, name: str) -> bool:
        return _codec(name) is not None

    def scan(self, file: StoredFile, size_column: str, is_text: bool = True) -> ShardScan:
        columns = {KEY: "large_string"}
        sizes, starts, ends = [], [], []
        wanted = physical_columns([size_column])
        _refuse_pickled(wanted, file)
        with corrupt_data_errors(file, self.name), _archive(file) as archive:
            for sample in _samples(archive):
                for extension in sample.members:
                    columns[extension] = _type_of(extension)
                if len(columns) > _MAX_COLUMNS:
                    raise DataError(
                        f"'{file.path}' has more than {_MAX_COLUMNS} kinds of members up to '{sample.key}', which is "
                        "no WebDataset archive: names must be alike up to their first dot"
                    )
                starts.append(sample.start)
                ends.append(sample.end)
                sizes.append(sum(_size_in(sample, name) for name in wanted))
            archive.check_end()
        existing = sorted(columns)
        for name in wanted if starts and template_of(size_column) is None else ():
            if _extension_for(name, columns) is None:
                raise missing_column(name, existing, file.path)
            if is_text and columns.get(name) == "large_binary":
                raise DataError(
                    f"column '{name}' of '{file.path}' is binary by its name, and documents must be text; name a text "
                    f"column with text_field: {', '.join(c for c in existing if columns[c] == 'large_string')}"
                )
        groups = []
        bounds = run_bounds(np.array(ends, np.int64) - np.array(starts, np.int64))
        for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            start, end = starts[first], ends[last - 1]
            groups.append((last - first, sum(sizes[first:last]), start, end - start))
        return ShardScan.of(archive.digest.hexdigest()[:32], {name: columns[name] for name in existing}, groups)

    def columns_of(self, file: StoredFile) -> dict[str, str | None]:
        found = {KEY}
        with corrupt_data_errors(file, self.name), _archive(file) as archive:
            for count, sample in enumerate(_samples(archive)):
                found.update(sample.members)
                if count == 16 or sample.end > base.RUN_BYTES:
                    break
        return dict.fromkeys(sorted(found))

    def open(
        self,
        file: StoredFile,
        columns: Sequence[str],
        text_column: str | None,
        kinds: Mapping[str, str | None] | None = None,
    ) -> ShardReader:
        _refuse_pickled(physical_columns(columns), file)
        return ShardReader(self.name, _TarShard(file, _codec(file.path)), columns, text_column)


class _TarShard(Shard):
    def read(self, group: Group, columns: Sequence[str]) -> pa.Table:
        values: dict[str, list[bytes | None]] = {name: [] for name in columns}
        data = self.content(group)
        samples = list(_samples(_Archive(pa.BufferReader(data))))
        if len(samples) != group.rows or samples[-1].end != group.length:
            raise ValueError(f"{len(samples)} samples, where {group.rows} were listed")
        content = memoryview(data)
        for row, sample in enumerate(samples, group.first_row):
            for name, column in values.items():
                column.append(_value(content, sample, name, self.file, row))
        return pa.table({name: _array(name, column) for name, column in values.items()})


@dataclass(slots=True)
class _Sample:
    """Positions are bytes in the archive; `members` are (start, size) of the content by extension."""

    key: str
    start: int
    end: int = 0
    members: dict[str, tuple[int, int]] = field(default_factory=dict)


class _Header(tarfile.TarInfo):
    """A member whose header, if it is a plain one, is read in a fifth of the time, which is what archives cost."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> Self:
        digits, noted = buf[124:136].strip(b" \0"), buf[148:156].strip(b" \0")
        # The checksum counts itself as spaces.
        total = sum(buf) - sum(buf[148:156]) + 8 * ord(" ")
        is_plain = buf[156:157] in _PLAIN and _OCTAL.fullmatch(digits) and _OCTAL.fullmatch(noted)
        if is_plain and int(noted, 8) == total:
            name = buf[:100].partition(b"\0")[0]
            if buf[257:263] == b"ustar\0" and buf[345]:
                name = buf[345:500].partition(b"\0")[0] + b"/" + name
            header = cls(name.decode(encoding, errors))
            header.size, header.type = int(digits, 8), bytes(buf[156:157])
            return header
        return super().frombuf(buf, encoding, errors)


class _Archive:
    """The members of an archive, or of a run of whole members, from a stream that need only go forward.

    To `tarfile` it is the file; it keeps the headers that are read, of which the digest is, for `tarfile` takes
    whatever is no header for the end of the archive and says nothing.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._position = self._start = 0
        self._headers = bytearray()  # of the next member, from `_start` on
        self.digest = hashlib.sha256()

    def tell(self) -> int:
        return self._position

    def seek(self, position: int) -> None:
        if position < self._position:
            raise ValueError("its members overlap")
        if self._stream.seekable():
            self._stream.seek(position)
            self._position = position
        while self._position < position and (passed := self._stream.read(min(base.RUN_BYTES, position - self.tell()))):
            self._position += len(passed)

    def read(self, length: int) -> bytes:
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"the extended header at byte {self._start} has {length} bytes")
        data: bytes = self._stream.read(length)
        if self._position >= self._start:  # else `tarfile` sees whether the last member is all there
            self._headers += data
        self._position += len(data)
        return data

    def members(self) -> Iterator[tuple[tarfile.TarInfo, int]]:
        """Each member, and where it ends."""
        with tarfile.open(fileobj=self, mode="r:", tarinfo=_Header, encoding="utf-8") as archive:  # type: ignore[call-overload]
            while (member := archive.next()) is not None:
                archive.members = []  # which would grow to be all of them
                if member.sparse is not None or member.type == tarfile.GNUTYPE_SPARSE:
                    raise ValueError(f"the member at byte {member.offset} is stored as a sparse file; write it whole")
                if member.size < 0:
                    raise ValueError(f"the header at byte {member.offset} gives a size of {member.size} bytes")
                self._take_headers()
                self._start = archive.offset
                yield member, archive.offset

    def _take_headers(self) -> None:
        """Adds the blocks of headers to the digest, and what extended ones hold, without what fills up their blocks."""
        at = 0
        while at < len(self._headers):
            block = self._headers[at : at + _BLOCK]
            self.digest.update(block)
            at += _BLOCK
            if bytes(block[156:157]) in _EXTENDED:
                size = tarfile.nti(block[124:136])  # type: ignore[attr-defined]
                self.digest.update(self._headers[at : at + size])
                at += -(-size // _BLOCK) * _BLOCK
        self._headers.clear()

    def check_end(self) -> None:
        """ValueError unless the archive ends here with a block of zeros, and then zeros alone."""
        ends, end = self._headers, self._start
        if len(ends) != _BLOCK:
            raise ValueError(f"it ends at byte {end + len(ends)}, without the block of zeros that ends an archive")
        if any(ends):
            raise ValueError(f"the header at byte {end} is damaged")
        self._take_headers()
        while block := self._stream.read(base.RUN_BYTES):
            if rest := block.lstrip(b"\0"):
                raise ValueError(
                    f"byte {end} ends the archive with a block of zeros, and more follows at byte "
                    f"{self._position + len(block) - len(rest)}: zeros have taken the place of a header, or archives "
                    "were put one behind the other, which must be written as one or as files of their own"
                )
            self._position += len(block)


@contextmanager
def _archive(file: StoredFile) -> Iterator[_Archive]:
    with open_stream(file, _codec(file.path)) as stream:
        yield _Archive(stream)


def _codec(name: str) -> str | None:
    return "gzip" if name.lower().endswith(".tgz") else codec_of(name)


def _samples(archive: _Archive) -> Iterator[_Sample]:
    """The samples of an archive."""
    sample: _Sample | None = None
    begin = 0
    for member, end in archive.members():
        start, begin = begin, end
        if not member.isreg():
            continue
        folder, slash, last = member.name.rpartition("/")
        stem, dot, extension = last.partition(".")
        if not stem or not dot or not extension or (last.startswith("__") and last.endswith("__")):
            continue  # hidden, without a dot, or about the archive: not part of a sample, as in webdataset itself
        key, extension = folder + slash + stem, extension.lower()
        try:
            member.name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the member at byte {start} has a name that is not UTF-8") from None
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = _Sample(key, start)
        if extension in sample.members or extension == KEY:
            raise ValueError(f"sample '{key}' has two members called '{extension}'")
        sample.members[extension] = (member.offset_data, member.size)
        sample.end = end
    if sample is not None:
        yield sample


def _extension_for(name: str, extensions: Mapping[str, Any]) -> str | None:
    """The member that a column name stands for: its own, or a JSON member with the path into it after a dot."""
    if name in extensions:
        return name
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        if ".".join(parts[:cut]) in extensions and parts[cut - 1] in _JSON:
            return ".".join(parts[:cut])
    return None


def _size_in(sample: _Sample, name: str) -> int:
    extension = _extension_for(name, sample.members)
    return sample.members[extension][1] if extension is not None else len(sample.key) if name == KEY else 0


def _type_of(extension: str) -> str:
    return "large_string" if extension.rpartition(".")[2] in _TEXT else "large_binary"


def _refuse_pickled(names: Sequence[str], file: StoredFile) -> None:
    for name in names:
        if name.rpartition(".")[2] in _PICKLED:
            raise DataError(
                f"column '{name}' of '{file.path}' holds pickled Python objects, which can run code when read and are "
                "refused; write it as JSON or text"
            )


def _value(content: memoryview, sample: _Sample, name: str, file: StoredFile, row: int) -> bytes | None:
    if name == KEY:
        return sample.key.encode()
    extension = _extension_for(name, sample.members)
    if extension is None:
        return None
    start, size = sample.members[extension]
    data = bytes(content[start : start + size])
    if extension == name:
        return data
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(
            f"'{file.path}' row {row} (sample '{sample.key}') has no valid JSON in '{extension}' "
            f"({str(error)[:100]}); repair or drop that sample"
        ) from error
    for part in name[len(extension) + 1 :].split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")


def _array(name: str, values: list[bytes | None]) -> pa.Array:
    array = pa.array(values, pa.large_binary())
    parts = name.split(".")
    # A path into JSON has text at its end, whatever its last part is called.
    is_text = name == KEY or parts[-1] in _TEXT or any(part in _JSON for part in parts[:-1])
    return array.view(pa.large_string()) if is_text else array
