"""Files that stay readable whatever happens to their writer: they only grow, by whole entries."""

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
