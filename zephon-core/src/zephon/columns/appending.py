"""Files that no fault may spoil: those that only grow, by whole entries, and space that is taken before it is used."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from io import FileIO
from pathlib import Path
from weakref import WeakSet

from zephon.errors import DataError

_held: WeakSet[FileIO] = WeakSet()


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


def hold(file: FileIO) -> None:
    """Lock a file until it is closed or its process ends, however it ends, where the file system has locks."""
    _held.add(file)
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _let_go() -> None:
    """A fork may outlive its parent, and must not hold what the parent held."""
    for file in [*_held]:
        file.close()


os.register_at_fork(after_in_child=_let_go)


def is_held(path: Path) -> bool:
    """Whether a live process, this one included, holds a file."""
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
    return False


def allocate(fd: int, nbytes: int) -> None:
    """Give an empty file its space on disk: writing to a hole of a mapped one on a full disk would be fatal."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, nbytes)
    else:
        written = 0
        while written < nbytes:
            written += os.pwrite(fd, bytes(min(nbytes - written, 1 << 20)), written)
