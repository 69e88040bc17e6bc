"""Appending to files that must stay readable whatever happens to the writer."""

from __future__ import annotations

from io import FileIO

__all__ = ["append_whole"]


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
