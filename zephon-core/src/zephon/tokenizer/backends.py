"""One class per tokenizer library, all behind the same narrow interface.

Everything a library can do wrong is turned into `BackendFailure` here: missing wheels, refusals, Rust panics (which
are not even `Exception`s).

Measured on two cores with a GPT-2-like vocabulary, columns of 1 MB, MB/s with one and two calling threads:
fastokens 390 and 700 on the calling thread alone (380 on two threads when it also has its own pool), gigatoken 350
and 670 with an instance per caller (340 on two threads that share one, because of a lock inside).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
import pyarrow as pa

from zephon.tokenizer import guards
from zephon.tokenizer.definition import TokenizerDefinition, Tree

Encoded = tuple[np.ndarray, np.ndarray]  # values uint32[n_tokens], offsets int64[n_docs + 1]

_T = TypeVar("_T")


class BackendFailure(Exception):
    """A library is missing, refuses a tokenizer, or breaks on a text. Never leaves this package."""


class Backend(Protocol):
    """What a library must offer; building one from a definition may raise BackendFailure."""

    name: str
    version: str

    def encode(self, column: pa.Array) -> Encoded:
        """Ids of every document, without special tokens, text that spells a special token as text.

        Called by many threads at once, with a string or large_string array that holds valid UTF-8 and no nulls.
        Raises BackendFailure.
        """
        ...


class TokenizersBackend:
    """Hugging Face `tokenizers`: the reference, 4 to 8 MB/s per core. Spreads each call over all cores by itself."""

    name = "tokenizers"

    def __init__(self, definition: TokenizerDefinition) -> None:
        with _Guard("load"):
            from tokenizers import Tokenizer

            self.version = metadata.version("tokenizers")
            self._tokenizer = Tokenizer.from_str(definition.encoder_json)
            self._tokenizer.encode_special_tokens = True
            # With the special tokens under their own names, for everything but encoding.
            same = definition.encoder_json == definition.json
            self._named = self._tokenizer if same else Tokenizer.from_str(definition.json)

    def encode(self, column: pa.Array) -> Encoded:
        ids = self.encode_texts(column.to_pylist())
        return _flat([np.array(row, dtype=np.uint32) for row in ids])

    def encode_texts(self, texts: list[str]) -> list[list[int]]:
        with _Guard("encode"):
            return [row.ids for row in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def token_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids, and the characters (first, end) of the text that each stands for."""
        with _Guard("encode"):
            row = self._tokenizer.encode(text, add_special_tokens=False)
            return row.ids, row.offsets

    def decode(self, ids: list[int]) -> str:
        with _Guard("decode"):
            text: str = self._named.decode(ids, skip_special_tokens=False)
            return text

    def token_to_id(self, token: str) -> int | None:
        with _Guard("look up a token"):
            token_id: int | None = self._named.token_to_id(token)
            return token_id


class FastokensBackend:
    """fastokens: one instance for all threads, each call on the thread that makes it."""

    name = "fastokens"

    def __init__(self, definition: TokenizerDefinition) -> None:
        with _Guard("load"):
            import fastokens

            self.version = metadata.version("fastokens")
            self._tokenizer = fastokens.Tokenizer.from_json_str(definition.json)
            _encode_on_calling_thread(lambda: self._tokenizer.encode_batch_flat(["a"], False, True))

    def encode(self, column: pa.Array) -> Encoded:
        with _Guard("encode"):
            values, offsets = self._tokenizer.encode_batch_flat(column.to_pylist(), False, True)
        return np.frombuffer(values, dtype="<u4"), np.frombuffer(offsets, dtype="<u8").view(np.int64)


_fastokens_threads = threading.Lock()


def _encode_on_calling_thread(first_encode: Callable[[], object]) -> None:
    """Keep fastokens from starting a pool of its own, which costs more than it gives when several threads encode.

    It reads the variable once per process, at the first encode.
    """
    name = "FASTOKENS_BPE_THREADS"
    with _fastokens_threads:
        if name in os.environ:  # the user decides
            first_encode()
            return
        os.environ[name] = "1"
        try:
            first_encode()
        finally:
            os.environ.pop(name, None)


class GigatokenBackend:
    """gigatoken: an instance per calling thread, because there is a lock inside, and text in and ids out as buffers.

    Each instance remembers every word it has seen, without bound (12 GB after 2 GB of random words), so one under
    which the process has grown by MAX_GROWTH_BYTES is replaced by a fresh one.
    """

    name = "gigatoken"

    MAX_GROWTH_BYTES = 512 << 20
    CHECK_EVERY_BYTES = 16 << 20  # of text

    def __init__(self, definition: TokenizerDefinition) -> None:
        with _Guard("load"):
            # Loaded now because gigatoken loads it at its first encode, which takes a quarter of a second.
            import awkward  # type: ignore[import-untyped]
            from gigatoken.gigatoken_rs import load_hf_json

            self.version = metadata.version("gigatoken")
            self._ak = awkward
            self._load = load_hf_json
        tree = definition.tree()
        # It has no switch for them: text spells a special token only if the library has never heard of it.
        tree["added_tokens"] = [token for token in tree["added_tokens"] if not token["special"]]
        self._json = msgspec.json.encode(tree)
        self._idle: deque[_GigatokenInstance] = deque([self._new()])

    def encode(self, column: pa.Array) -> Encoded:
        if not len(column):
            return _flat([])
        column = column.cast(pa.large_string())
        # Invalid UTF-8 crashes the interpreter in here; `Tokenizer.encode` has validated the column.
        _, offsets, data = column.buffers()
        bounds = np.frombuffer(offsets, dtype=np.int64)[column.offset : column.offset + len(column) + 1]
        instance = self._take()
        with _Guard("encode"):
            ids = instance.tokenizer.encode_batch(self._awkward(bounds, data), parallel=False).layout
            ids = ids.to_ListOffsetArray64()
        instance.encoded_bytes += int(bounds[-1] - bounds[0])
        self._give(instance)
        starts = np.asarray(ids.offsets.data)
        return np.asarray(ids.content.data)[: int(starts[-1])], starts

    def _awkward(self, bounds: np.ndarray, data: pa.Buffer | None) -> Any:
        """An awkward array of strings over Arrow's buffers."""
        contents = self._ak.contents
        text = np.frombuffer(data, dtype=np.uint8) if data is not None else np.zeros(0, np.uint8)
        return self._ak.Array(
            contents.ListOffsetArray(
                self._ak.index.Index64(bounds),
                contents.NumpyArray(text, parameters={"__array__": "char"}),
                parameters={"__array__": "string"},
            )
        )

    def _new(self) -> _GigatokenInstance:
        with _Guard("load"):
            return _GigatokenInstance(self._load(self._json), resident_bytes())

    def _take(self) -> _GigatokenInstance:
        try:
            return self._idle.pop()
        except IndexError:
            return self._new()

    def _give(self, instance: _GigatokenInstance) -> None:
        if instance.encoded_bytes >= self.CHECK_EVERY_BYTES:
            instance.encoded_bytes = 0
            if resident_bytes() - instance.resident_at_start > self.MAX_GROWTH_BYTES:
                del instance
                _return_free_memory()
                return  # whoever finds none idle makes a new one
        self._idle.append(instance)


class _GigatokenInstance:
    def __init__(self, tokenizer: Any, resident_at_start: int) -> None:
        self.tokenizer = tokenizer
        self.resident_at_start = resident_at_start
        self.encoded_bytes = 0  # since its memory was last looked at


def resident_bytes() -> int:
    """Memory of this process, or its highest value so far where the system does not tell the present one."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        import resource
        import sys

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10


def _return_free_memory() -> None:
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)


def _flat(rows: Sequence[np.ndarray]) -> Encoded:
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return (np.concatenate(rows) if rows else np.zeros(0, dtype=np.uint32)), offsets


class _Guard:
    """Turns whatever a library raises into one BackendFailure with a reason of one line."""

    def __init__(self, action: str) -> None:
        self._action = action

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is None or isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit | BackendFailure):
            return
        lines = str(error).strip().splitlines()
        reason = lines[0][:200].rstrip(".") if lines else type(error).__name__
        raise BackendFailure(f"cannot {self._action}: {reason}") from None


BACKENDS: dict[str, type[FastokensBackend] | type[GigatokenBackend] | type[TokenizersBackend]] = {
    "fastokens": FastokensBackend,
    "gigatoken": GigatokenBackend,
    "tokenizers": TokenizersBackend,
}

REFUSALS: dict[str, Callable[[Tree], str | None]] = {
    "fastokens": guards.fastokens_refusal,
    "gigatoken": guards.gigatoken_refusal,
}
