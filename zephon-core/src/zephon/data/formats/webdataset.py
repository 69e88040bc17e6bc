"""WebDataset: tar archives of samples, plain or compressed; a group is a run of neighbouring samples.

A sample is a run of members whose names are alike up to the first dot of the last part: "a/000.txt", "a/000.meta.json".
That much of the name is the sample's key, column "__key__"; what follows the dot names a column: "txt", "meta.json".
Members are read in place: nothing is ever extracted, so where their names point to does not matter.

A scan of a plain archive hops from header to header. Headers have checksums, what is in a member has none. The first
block of zeros ends the archive, and nothing but zeros may follow: members behind it are lost to a reader that stops
there, and whether they are a second archive or the rest of a damaged one cannot be told. Offsets and lengths of groups
count bytes of the (uncompressed) archive.
Layouts: https://github.com/webdataset/webdataset, pax in https://pubs.opengroup.org/onlinepubs/9799919799/.
"""

import hashlib
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.columns.damage import Damaged
from zephon.columns.template import template_of
from zephon.data.columns import missing_column, physical_columns, sound_table
from zephon.data.formats import base
from zephon.data.formats.base import Group, ShardReader, ShardScan, corrupt_data_errors, run_bounds
from zephon.data.formats.sequential import CODECS, SequentialBytes, codec_of, open_stream
from zephon.data.storage import StoredFile
from zephon.errors import DataError

__all__ = ["KEY", "WebDataset"]

KEY = "__key__"

_BLOCK = 512
_READ_BYTES = 16 << 10
# Names and extended headers are a few hundred bytes; more is no archive.
_MAX_HEADER_BYTES = 1 << 20
_MAX_COLUMNS = 4096
# By the last part of the name; whatever else stays bytes.
_TEXT = frozenset(
    "txt text transcript md html htm xml csv tsv json jsn jsonl cls cls2 class count index inx id py srt vtt".split()  # noqa: SIM905
)
_JSON = frozenset(["json", "jsn"])
_PICKLED = frozenset(["pyd", "pickle", "pkl", "pth", "pt"])


class WebDataset:
    """The `Format` of tar archives in WebDataset's layout."""

    name = "webdataset"
    suffixes = (".tar", *(f".tar{packed}" for packed in CODECS), ".tgz")

    def is_sequential(self, name: str) -> bool:
        return _codec(name) is not None

    def scan(self, file: StoredFile, size_column: str, is_text: bool = True) -> ShardScan:
        digest, columns = hashlib.sha256(), {KEY: "large_string"}
        sizes, starts, ends = [], [], []
        wanted = physical_columns([size_column])
        _refuse_pickled(wanted, file)
        with corrupt_data_errors(file, self.name), _source(file, None) as source:
            for sample in _samples(source, 0, None, digest):
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
        existing = sorted(columns)
        for name in wanted:
            if starts and template_of(size_column) is None and _extension_for(name, columns) is None:
                raise missing_column(name, existing, file.path)
            if is_text and template_of(size_column) is None and starts and columns.get(name) == "large_binary":
                raise DataError(
                    f"column '{name}' of '{file.path}' is binary by its name, and documents must be text; name a text "
                    f"column with text_field: {', '.join(c for c in existing if columns[c] == 'large_string')}"
                )
        groups = []
        bounds = run_bounds(np.array(ends, np.int64) - np.array(starts, np.int64))
        for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            start, end = starts[first], ends[last - 1]
            groups.append((last - first, sum(sizes[first:last]), start, end - start))
        return ShardScan.of(digest.hexdigest()[:32], {name: columns[name] for name in existing}, groups)

    def columns_of(self, file: StoredFile) -> dict[str, str | None]:
        found: dict[str, str | None] = {KEY: None}
        with corrupt_data_errors(file, self.name), _source(file, None) as source:
            for count, sample in enumerate(_samples(source, 0, None)):
                found.update(dict.fromkeys(sample.members))
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
        return _WebDatasetReader(file, columns, text_column)


class _WebDatasetReader:
    def __init__(self, file: StoredFile, columns: Sequence[str], text_column: str | None) -> None:
        self._file, self._columns, self._text_column = file, list(columns), text_column
        self._physical = physical_columns(columns)
        _refuse_pickled(self._physical, file)
        codec = _codec(file.path)
        self._packed = SequentialBytes(file, codec) if codec else None

    def ranges(self, group: Group) -> list[tuple[int, int]]:
        """(start, length) of the bytes that `read` will fetch."""
        return [] if self._packed is not None else [(group.offset, group.length)]

    def read(self, group: Group) -> pa.Table:
        file = self._file
        values: dict[str, list[Any]] = {name: [] for name in self._physical}
        with corrupt_data_errors(file, WebDataset.name, f" (samples from byte {group.offset})"):
            with _source(file, self._packed, group) as source:
                for row, sample in enumerate(_samples(source, group.offset, group.offset + group.length)):
                    for name, column in values.items():
                        column.append(_value(source, sample, name, file, group.first_row + row))
            table = pa.table({name: _array(name, column) for name, column in values.items()})
            if table.num_rows != group.rows:
                raise ValueError(f"{table.num_rows} samples, where {group.rows} were listed")
            return sound_table(table, self._columns, self._text_column, file.path, group.first_row)

    def close(self) -> None:
        if self._packed is not None:
            self._packed.close()


@dataclass(slots=True)
class _Sample:
    """Positions are bytes in the archive; `members` are (start, size) of the content by extension."""

    key: str
    start: int
    end: int = 0
    members: dict[str, tuple[int, int]] = field(default_factory=dict)


class _Archive:
    """The bytes of an archive by position, ascending, as far as `end`; reads ahead a little."""

    def __init__(self, read: Any, end: int | None) -> None:
        self._read, self._end = read, end
        self._data, self._start = b"", 0

    def get(self, position: int, length: int) -> bytes:
        """Exactly so many bytes; ValueError where they end early. `length` may come from a damaged file."""
        at = position - self._start
        if not 0 <= at <= at + length <= len(self._data):
            if self._end is not None and position + length > self._end:
                raise ValueError(f"it ends at byte {self._end}, before what is listed at {position}")
            self._data, self._start = self._read(position, max(length, _READ_BYTES)), position
            at = 0
        if at + length > len(self._data):
            raise ValueError(f"it ends at byte {self._start + len(self._data)}, before what is listed at {position}")
        return self._data[at : at + length]

    def first_content(self, position: int) -> int | None:
        """Where the first byte from `position` on is that is not zero; None where there is none up to the end."""
        data = self._data[position - self._start :]
        while data or (data := self._read(position, base.RUN_BYTES)):
            if rest := data.lstrip(b"\0"):
                return position + len(data) - len(rest)
            position, data = position + len(data), b""
        return None

    def check(self, position: int) -> None:
        """ValueError where the archive ends before `position`, as far as that is known without reading."""
        if self._end is not None and position > self._end:
            raise ValueError(f"it ends at byte {self._end}, inside of the member that ends at {position}")


@contextmanager
def _source(file: StoredFile, packed: SequentialBytes | None, group: Group | None = None) -> Iterator[_Archive]:
    """The archive for one pass over it, or over one group."""
    codec = _codec(file.path)
    if codec is None:
        with file.open() as handle:
            yield _Archive(
                lambda position, length: handle.read_at(min(length, file.size - position), position), file.size
            )
    elif packed is not None and group is not None:
        # One read per group, of the whole: the decompressor goes forward only, and others may be using it.
        data = packed.read(group.offset, group.length).to_pybytes()
        end = group.offset + len(data)

        def inside(position: int, length: int) -> bytes:
            return data[position - group.offset : position - group.offset + length]

        yield _Archive(inside, end)
    else:
        with open_stream(file, codec) as stream:
            yield _Archive(_forward(stream), None)


def _forward(stream: Any) -> Any:
    """Reads of a stream at ascending positions; what lies between is passed over."""
    place = 0
    last: tuple[int, bytes] = (0, b"")

    def read(position: int, length: int) -> bytes:
        nonlocal place, last
        start, data = last
        kept = data[position - start :] if start <= position < start + len(data) else b""
        while not kept and place < position:
            passed = len(stream.read(min(base.RUN_BYTES, position - place)))
            if not passed:
                raise ValueError(f"it ends at byte {place}, before what is listed at {position}")
            place += passed
        if not kept and place > position:
            raise ValueError("its members overlap")
        parts, have = [kept], len(kept)
        while have < length:
            more = stream.read(min(base.RUN_BYTES, length - have))
            if not more:
                break
            parts.append(more)
            have += len(more)
            place += len(more)
        last = (position, b"".join(parts))
        return last[1]

    return read


def _codec(name: str) -> str | None:
    return "gzip" if name.lower().endswith(".tgz") else codec_of(name)


def _samples(source: _Archive, start: int, end: int | None, digest: Any = None) -> Iterator[_Sample]:
    """The samples of an archive, or of those bytes of it; an archive must end with its end mark."""
    sample: _Sample | None = None
    for name, begin, content, size, after in _members(source, start, end, digest):
        folder, slash, last = name.rpartition("/")
        stem, dot, extension = last.partition(".")
        if not stem or not dot or not extension or (last.startswith("__") and last.endswith("__")):
            continue  # hidden, without a dot, or about the archive: not part of a sample, as in webdataset itself
        key, extension = folder + slash + stem, extension.lower()
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = _Sample(key, begin)
        if extension in sample.members or extension == KEY:
            raise ValueError(f"sample '{key}' has two members called '{extension}'")
        sample.members[extension] = (content, size)
        sample.end = after
    if sample is not None:
        yield sample


def _members(source: _Archive, position: int, end: int | None, digest: Any) -> Iterator[tuple[str, int, int, int, int]]:
    """(name, start of its headers, start and bytes of its content, end) of each regular file in the archive."""
    begin, given_name, given_size = position, None, None
    while end is None or position < end:
        block = source.get(position, _BLOCK)
        if digest is not None:
            digest.update(block)
        if not block[0] and not block.strip(b"\0"):
            if end is not None:
                raise ValueError("the archive ends inside of the group")
            if (more := source.first_content(position + _BLOCK)) is not None:
                raise ValueError(
                    f"byte {position} ends the archive with a block of zeros, and more follows at byte {more}: zeros "
                    "have taken the place of a header, or archives were put one behind the other, which must be "
                    "written as one or as files of their own"
                )
            return
        kind, size, full_name = _header(block, position)
        content = position + _BLOCK
        if size < 0:
            raise ValueError(f"the header at byte {position} gives a size of {size} bytes")
        if kind in (b"x", b"g", b"L", b"K"):
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"the extended header at byte {position} has {size} bytes")
            data = source.get(content, size)
            if digest is not None:
                digest.update(data)
            if kind == b"L":
                given_name = data.rstrip(b"\0").decode("utf-8", "surrogateescape")
            elif kind == b"x":
                name, given_size = _pax(data, position)
                given_name = name if name is not None else given_name
            position = content + -(-size // _BLOCK) * _BLOCK
            continue
        if kind == b"S":
            raise ValueError(f"the member at byte {position} is stored as a sparse file; write the archive without")
        is_file = kind in (b"0", b"\0", b"7")
        if is_file and given_size is not None:
            size = given_size
        elif kind in (b"1", b"2", b"3", b"4", b"5", b"6"):
            size = 0  # links, devices, folders
        after = content + -(-size // _BLOCK) * _BLOCK
        source.check(after)
        if end is not None and after > end:
            raise ValueError(f"the member at byte {position} ends outside of its group")
        if is_file:
            name = given_name if given_name is not None else full_name
            if not name.isascii():
                try:
                    name.encode()
                except UnicodeEncodeError:
                    raise ValueError(f"the member at byte {position} has a name that is not UTF-8") from None
            yield name, begin, content, size, after
        position = begin = after
        given_name = given_size = None


def _header(block: bytes, position: int) -> tuple[bytes, int, str]:
    """(type, bytes of content, name) of a member.

    Nearly all headers are plain ones, read here in a sixth of the time that `tarfile` takes: it is per member what this
    format costs.
    """
    digits, noted = block[124:136].strip(b" \0"), block[148:156].strip(b" \0")
    plain = digits.isdigit() and noted.isdigit() and b"8" not in (both := digits + noted) and b"9" not in both
    if plain and int(noted, 8) == sum(block) - sum(block[148:156]) + 8 * 32:
        name = block[:100].partition(b"\0")[0]
        if block[257:263] == b"ustar\0" and block[345]:
            name = block[345:500].partition(b"\0")[0] + b"/" + name
        kind = b"5" if block[156:157] == b"\0" and name.endswith(b"/") else block[156:157]
        return kind, int(digits, 8), name.decode("utf-8", "surrogateescape")
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise ValueError(f"the header at byte {position} is damaged: {error}") from error
    return header.type, header.size, header.name


def _pax(data: bytes, position: int) -> tuple[str | None, int | None]:
    """Name and size in an extended header: lines of "length key=value"."""
    name = size = None
    while data.strip(b"\0"):
        digits, space, _ = data.partition(b" ")
        length = int(digits) if digits.isdigit() and len(digits) < 8 and space else 0
        key, equals, value = data[len(digits) + 1 : length - 1].partition(b"=")
        if not equals or length > len(data) or data[length - 1 : length] != b"\n":
            raise ValueError(f"the extended header at byte {position} is damaged")
        if key == b"path":
            name = value.decode("utf-8", "surrogateescape")
        elif key == b"size":
            if not value.isdigit() or len(value) > 18:
                raise ValueError(f"the extended header at byte {position} is damaged")
            size = int(value)
        elif key.startswith(b"GNU.sparse"):
            raise ValueError(f"the member at byte {position} is stored as a sparse file; write the archive without")
        data = data[length:]
    return name, size


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


def _value(source: _Archive, sample: _Sample, name: str, file: StoredFile, row: int) -> Any:
    if name == KEY:
        return sample.key.encode()
    extension = _extension_for(name, sample.members)
    if extension is None:
        return None
    content = source.get(*sample.members[extension])
    if extension == name:
        return content
    try:
        value = json.loads(content)
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
