"""Files that no fault may spoil: those that only grow, by whole entries, and space that is taken before it is used."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

from zephon.errors import DataError


def new_file(folder: str | os.PathLike[str], name: str, what: str, header: bytes = b"") -> FileIO:
    """A new file for `append_whole`, unbuffered: what a killed process had written is on record.

    Args:
        folder: made if it does not exist.
        what: what the file is, for the message.
        header: how it begins.

    Raises:
        DataError: it cannot be written.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        file = open(Path(folder) / name, "xb", buffering=0)  # noqa: SIM115
        append_whole(file, header)
    except OSError as error:
        raise DataError(f"{what} cannot be written to {folder}: {error.strerror}; give a folder that can.") from None
    return file


def append_whole(file: FileIO, content: bytes) -> None:
    """Write all of `content` at the end of an unbuffered file, or none of it.

    Raises:
        OSError: the write failed; a part already written was truncated.
    """
    end = file.tell()
    done = 0
    try:
        while done < len(content):
            done += file.write(content[done:]) or 0
    except OSError:
        file.truncate(end)
        file.seek(end)
        raise


def allocate(fd: int, nbytes: int) -> None:
    """Give an empty file its space on disk: writing to a hole of a mapped one on a full disk would be fatal."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
    else:
        written = 0
        while written < nbytes:
            written += os.pwrite(fd, bytes(min(nbytes - written, 1 << 20)), written)
