"""One class per tokenizer library, all behind the same narrow interface.

Everything a library can do wrong is turned into `BackendFailure` here: missing wheels, refusals, Rust panics (which
are not even `Exception`s).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from zephon.columns.faults import reason_of
from zephon.tokenizer.definition import TokenizerDefinition

Encoded = tuple[np.ndarray, np.ndarray]  # values uint32[n_tokens], offsets int64[n_docs + 1]


class BackendFailure(Exception):
    """A library is missing, refuses a tokenizer, or breaks on a text. Never leaves this package."""


@contextlib.contextmanager
def _guarded(action: str) -> Iterator[None]:
    """Turns whatever a library raises into one BackendFailure with a reason of one line."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise BackendFailure(f"cannot {action}: {reason_of(error)}") from None


class Backend(Protocol):
    """A library; building one from a definition may raise BackendFailure."""

    name: str
    version: str

    def encode(self, column: pa.Array) -> Encoded:
        """Ids of every document, without special tokens, text that spells a special token as text.

        Called by many threads at once, with a large_string array without nulls.
        Raises BackendFailure, also for invalid UTF-8.
        """
        ...


class TokenizersBackend:
    """Hugging Face `tokenizers`: the reference, 4 to 8 MB/s per core. Spreads each call over all cores by itself."""

    name = "tokenizers"

    def __init__(self, definition: TokenizerDefinition) -> None:
        with _guarded("load"):
            from tokenizers import Tokenizer

            self.version = metadata.version("tokenizers")
            self._tokenizer = Tokenizer.from_str(definition.encoder_json)
            self._tokenizer.encode_special_tokens = True
            # With the special tokens under their own names, for everything but encoding.
            same = definition.encoder_json == definition.json
            self._named = self._tokenizer if same else Tokenizer.from_str(definition.json)

    def encode(self, column: pa.Array) -> Encoded:
        rows = self.encode_texts(column.to_pylist())
        values = [np.array(row, dtype=np.uint32) for row in rows]
        return np.concatenate([np.zeros(0, np.uint32), *values]), np.cumsum([0, *map(len, rows)], dtype=np.int64)

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        with _guarded("encode"):
            return [row.ids for row in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def token_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and the characters (first, end) of the text that each stands for."""
        with _guarded("encode"):
            row = self._tokenizer.encode(text, add_special_tokens=False)
            return row.ids, row.offsets

    def decode(self, ids: list[int]) -> str:
        with _guarded("decode"):
            text: str = self._named.decode(ids, skip_special_tokens=False)
            return text

    def normalized(self, text: str) -> str:
        normalizer = self._named.normalizer
        return str(normalizer.normalize_str(text)) if normalizer else text

    def token_to_id(self, token: str) -> int | None:
        with _guarded("look up a token"):
            token_id: int | None = self._named.token_to_id(token)
            return token_id


class FastokensBackend:
    """fastokens: one instance for all threads, each call on the thread that makes it."""

    name = "fastokens"

    def __init__(self, definition: TokenizerDefinition) -> None:
        with _guarded("load"):
            import fastokens

            self.version = metadata.version("fastokens")
            # A pool of its own costs more than it gives when several threads encode. Read at its first encode.
            os.environ.setdefault("FASTOKENS_BPE_THREADS", "1")
            self._tokenizer = fastokens.Tokenizer.from_json_str(definition.json)

    def encode(self, column: pa.Array) -> Encoded:
        with _guarded("encode"):
            values, offsets = self._tokenizer.encode_batch_flat(column.to_pylist(), False, True)
        return np.frombuffer(values, dtype="<u4"), np.frombuffer(offsets, dtype="<u8").view(np.int64)


class GigatokenBackend:
    """gigatoken: an instance per calling thread, because there is a lock inside, and text in and ids out as buffers.

    Each instance remembers every word it has seen, without bound (12 GB after 2 GB of random words), so one under
    which the process has grown by MAX_GROWTH_BYTES is replaced by a fresh one.
    """

    name = "gigatoken"

    MAX_GROWTH_BYTES = 512 << 20
    CHECK_EVERY_BYTES = 16 << 20  # of text

    def __init__(self, definition: TokenizerDefinition) -> None:
        with _guarded("load"):
            # Loaded now because gigatoken loads it at its first encode, which takes a quarter of a second.
            import awkward  # type: ignore[import-untyped]
            from gigatoken.gigatoken_rs import load_hf_json

            self.version = metadata.version("gigatoken")
            self._ak, self._load = awkward, load_hf_json
        tree = definition.tree()
        # It has no switch for them: text spells a special token only if the library has never heard of it.
        tree["added_tokens"] = [token for token in tree["added_tokens"] if not token["special"]]
        self._json = msgspec.json.encode(tree)
        self._idle = deque([self._new()])

    def encode(self, column: pa.Array) -> Encoded:
        if not len(column):
            return np.zeros(0, np.uint32), np.zeros(1, np.int64)
        with _guarded("encode"):
            column.validate(full=True)  # invalid UTF-8 would crash the interpreter; other libraries get Python's text
        _, offsets, data = column.buffers()
        bounds = np.frombuffer(offsets, dtype=np.int64)[column.offset : column.offset + len(column) + 1]
        try:
            instance = self._idle.pop()
        except IndexError:
            instance = self._new()
        with _guarded("encode"):
            ids = instance.tokenizer.encode_batch(self._awkward(bounds, data), parallel=False).layout
            ids = ids.to_ListOffsetArray64()
        instance.encoded_bytes += int(bounds[-1] - bounds[0])
        if not self._has_outgrown(instance):
            self._idle.append(instance)  # else whoever finds none idle makes a new one
        starts = np.asarray(ids.offsets.data)
        return np.asarray(ids.content.data)[: int(starts[-1])], starts

    def _awkward(self, bounds: np.ndarray, data: pa.Buffer | None) -> Any:
        """An awkward array of strings over Arrow's buffers."""
        contents = self._ak.contents
        text = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, np.uint8)
        characters = contents.NumpyArray(text, parameters={"__array__": "char"})
        strings = contents.ListOffsetArray(
            self._ak.index.Index64(bounds), characters, parameters={"__array__": "string"}
        )
        return self._ak.Array(strings)

    def _new(self) -> _Instance:
        with _guarded("load"):
            return _Instance(self._load(self._json), resident_bytes())

    def _has_outgrown(self, instance: _Instance) -> bool:
        if instance.encoded_bytes < self.CHECK_EVERY_BYTES:
            return False
        instance.encoded_bytes = 0
        if resident_bytes() - instance.resident_at_start <= self.MAX_GROWTH_BYTES:
            return False
        instance.tokenizer = None
        with contextlib.suppress(AttributeError, OSError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)
        return True


@dataclass
class _Instance:
    tokenizer: Any
    resident_at_start: int
    encoded_bytes: int = 0  # since the memory was last looked at


def resident_bytes() -> int:
    """Memory of this process, or its peak where the system does not give the present value."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # in bytes on macOS


BACKENDS: dict[str, type[FastokensBackend] | type[GigatokenBackend] | type[TokenizersBackend]] = {
    "fastokens": FastokensBackend,
    "gigatoken": GigatokenBackend,
    "tokenizers": TokenizersBackend,
}

# By process, since a fork may happen meanwhile, and library: held while it loads, so that threads load one together.
_loading: dict[tuple[int, str], threading.Lock] = {}


def load_library(definition: TokenizerDefinition, name: str) -> Backend:
    """A library with a tokenizer, one for all who ask for it in this process; libraries do not survive a fork."""
    key = os.getpid(), name
    with _loading.setdefault(key, threading.Lock()):
        return _loaded(definition, *key)


@lru_cache(maxsize=6)
def _loaded(definition: TokenizerDefinition, _pid: int, name: str) -> Backend:
    return BACKENDS[name](definition)


def version_of(name: str) -> str:
    """The version of a library, "" where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
