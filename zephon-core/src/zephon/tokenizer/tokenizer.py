"""`load_tokenizer` and `Tokenizer`."""

from __future__ import annotations

import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np
import pyarrow as pa

from zephon.columns.arrow import byte_lengths, one_chunk, string_array
from zephon.errors import TokenizerError
from zephon.tokenizer.backends import (
    BACKENDS,
    Backend,
    BackendFailure,
    Encoded,
    TokenizersBackend,
    load_library,
    version_of,
)
from zephon.tokenizer.choice import FAST, Answers, Choice, choose, first_fit, probe_answers
from zephon.tokenizer.cutting import MAX_DOCUMENT_BYTES, cut_documents
from zephon.tokenizer.definition import AddedToken, TokenizerDefinition, read_definition
from zephon.tokenizer.load import TokenizerId, find_tokenizer
from zephon.tokenizer.probes import probe_texts

SAMPLE_BYTES = 128 << 10  # of the user's documents; the reference needs about 20 ms for them

_log = logging.getLogger("zephon.tokenizer")


def load_tokenizer(tokenizer_id: TokenizerId, *, backend: str = "auto", index_dir: Path | None = None) -> Tokenizer:
    """Load a tokenizer and choose the library that runs it.

    Args:
        tokenizer_id: a folder with a tokenizer.json, the path of one, a hub name ("gpt2", "org/name@revision"), or a
            fast tokenizer of transformers or a `tokenizers.Tokenizer`, of which a copy is taken.
        backend: "auto" takes the first of fastokens, gigatoken and tokenizers that is trusted with this kind of
            tokenizer and gives the ids of `tokenizers` on some 2,000 probe texts, and logs which; a name insists.
        index_dir: folder that keeps the choice for later starts; None chooses anew.

    Raises:
        TokenizerError: it cannot be found, read or used, or the backend insisted on is not fit for it.
    """
    if backend not in ("auto", *BACKENDS):
        raise TokenizerError(f"tokenizer backend is {backend!r}; expected 'auto', {', '.join(map(repr, BACKENDS))}.")
    if backend in FAST and not version_of(backend):
        raise TokenizerError(
            f"tokenizer backend is {backend!r}; expected an installed library. Install it with: "
            "pip install 'zephon-core[fast]'."
        )
    started = time.perf_counter()
    definition = read_definition(find_tokenizer(tokenizer_id))
    choice = choose(os.getpid(), definition, tuple(name for name in FAST if backend in ("auto", name)), index_dir)
    if backend not in ("auto", choice.name):
        raise TokenizerError(
            f"tokenizer backend {backend!r} is not fit for {definition.label!r} ({choice.refusals[0]}); use backend "
            "'auto'."
        )
    tokenizer = Tokenizer(definition, choice, insisted=backend != "auto")
    # Beside what comes next: libraries load outside the GIL.
    threading.Thread(target=tokenizer.load_library, name="zephon-tokenizer").start()
    slow = backend == "auto" and choice.name == "tokenizers"  # by a factor of 50
    took, reasons = time.perf_counter() - started, "".join(f"; not with {reason}" for reason in choice.refusals)
    message = f"{definition.label}: tokenizing with {choice.name} {tokenizer.backend_version} ({took:.2f} s){reasons}"
    if slow and not any(map(version_of, FAST)):
        message += ". Libraries that encode 50 times as fast come with: pip install 'zephon-core[fast]'"
    _log.log(logging.WARNING if slow else logging.INFO, "%s", message)
    return tokenizer


class Tokenizer:
    """Text to token ids, a column at a time. Made by `load_tokenizer`.

    Any number of threads may use it at once. It pickles as plain data (its checked tokenizer.json and the name of its
    backend), and loads its libraries again where it arrives, as it does after a fork. BOS and EOS are those that it
    declares, or None; `vocab_size` is the largest id + 1, added tokens included; `content_hash` a sha256 (hex) of all
    that decides ids, and of the choice of BOS and EOS.
    """

    def __init__(self, definition: TokenizerDefinition, choice: Choice, *, insisted: bool) -> None:
        self._definition = definition
        self._insisted = insisted
        self._keeps_space = choice.keeps_space
        self._warned = False
        self.bos_token, self.eos_token = definition.bos_token, definition.eos_token
        self.bos_id, self.eos_id = definition.bos_id, definition.eos_id
        self.vocab_size = definition.vocab_size
        self.content_hash = definition.content_hash
        self._libraries: dict[tuple[int, str], Backend] = {}
        self._checking = threading.Lock()
        self.backend, self.backend_version = choice.name, version_of(choice.name)

    def load_library(self) -> None:
        """Load the library that encodes, which the first call of `encode` would wait for."""
        with suppress(TokenizerError):  # which that call raises
            self._library(self.backend)

    def encode(self, column: pa.Array) -> Encoded:
        """Token ids of every document of a column of text without nulls.

        No special tokens are added, and text that spells one stays text. The ids are those of `tokenizers`, except that
        a document of more than 4 MiB is cut first (see `cutting`).

        Returns:
            (values uint32[n_tokens], offsets int64[n_docs + 1]), which may be views of the library's own memory.

        Raises:
            TokenizerError: another type, nulls, invalid UTF-8, or the backend insisted on breaks.
        """
        column = _checked(column)
        if byte_lengths(column).max(initial=0) <= MAX_DOCUMENT_BYTES:
            return self._encode(column)
        _validate(column)
        pieces, first_piece = cut_documents(column, keeps_space=self._keeps_space)
        values, offsets = self._encode(pieces)
        return values, offsets[first_piece]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of token ids, special tokens spelled out, or TokenizerError for what are none of this tokenizer."""
        array = np.asarray(ids if isinstance(ids, np.ndarray | Sequence) else list(ids))
        whole = array.ndim == 1 and array.dtype.kind in "iu"
        if array.size and not (whole and 0 <= int(array.min()) <= int(array.max()) < self.vocab_size):
            raise TokenizerError(
                f"decode got {str(ids)[:80]}; expected a row of token ids from 0 to {self.vocab_size - 1}."
            )
        try:
            return self._reference.decode(array.tolist())
        except BackendFailure as failure:
            raise TokenizerError(f"{array.size} token ids cannot be decoded ({failure}).") from None

    @cached_property
    def special_tokens(self) -> list[AddedToken]:
        """The tokens that text never becomes, in the order of their ids."""
        added = msgspec.convert(self._definition.tree()["added_tokens"], list[AddedToken])
        return sorted((token for token in added if token.special), key=attrgetter("id"))

    def is_hidden(self, token: AddedToken) -> bool:
        """Whether `tokenizers` looks for a token in normalized text, and there in another spelling than its own."""
        return token.normalized and self._reference.normalized(token.content) != token.content

    @cached_property
    def token_bytes(self) -> np.ndarray | None:
        """int32[vocab_size]: the bytes of text that each token stands for; None where tokens do not say.

        Tokens of a byte-level BPE spell their bytes, one character each. A normalizer may still change the text before,
        so the sum over a text is to be compared with its length.
        """
        tree = self._definition.tree()
        model, decoder = tree["model"], tree["decoder"] or {}
        byte_level = any(step.get("type") == "ByteLevel" for step in decoder.get("decoders", [decoder]))
        if model.get("type") != "BPE" or model.get("byte_fallback") or not byte_level:
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int32)
        for token, number in model["vocab"].items():
            lengths[number] = len(token)
        for token in tree["added_tokens"]:
            lengths[token["id"]] = len(token["content"].encode())
        return lengths

    @cached_property
    def inner(self) -> Tokenizer:
        """The tokenizer for a piece of text that something comes before; nearly always itself."""
        definition = self._definition.inner()
        if definition is self._definition:
            return self
        return Tokenizer(definition, choose(os.getpid(), definition, FAST), insisted=False)

    def token_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a text as `encode` gives them, and the characters (first, end) of each; slow."""
        try:
            return self._reference.token_spans(text)
        except BackendFailure as failure:
            raise TokenizerError(f"a text of {len(text)} characters cannot be tokenized ({failure}).") from None

    def selfcheck(self, texts: Sequence[str], nbytes: int = SAMPLE_BYTES) -> bool:
        """Compare the backend with `tokenizers` on the first `nbytes` of documents, before the first encode.

        On a difference the next fit backend takes over, and the log says so; TokenizerError if it was insisted on.

        Returns:
            Whether they agree.
        """
        with self._checking:
            return self._agrees(_sample(texts, nbytes))

    def _agrees(self, sample: Sequence[str]) -> bool:
        if self.backend == "tokenizers" or not sample:
            return True
        try:
            answers = Answers.of("documents", sample, self._reference)
        except BackendFailure as failure:
            raise TokenizerError(f"tokenizers cannot encode a sample of the documents ({failure}).") from None
        try:
            difference = answers.difference(self._library(self.backend))
        except BackendFailure as failure:
            difference = str(failure)
        if difference is None:
            return True
        if self._insisted:
            raise TokenizerError(f"tokenizer backend {self.backend!r} is not fit for these documents ({difference}).")
        tree = self._definition.tree()
        probes = probe_answers(tree, self._reference)
        later = FAST[FAST.index(self.backend) + 1 :]
        chosen, _, _ = first_fit(self._definition, tree, later, lambda: [probes, answers])
        before = self.backend
        self._use(self._library(chosen))
        _log.warning("%s: tokenizing with %s from now on, because %s", before, self.backend, difference)
        return False

    def probe(self) -> str:
        """SHA-256 over the ids of the probe texts, as this process gives them."""
        probes = string_array(probe_texts(self._definition.tree()), pa.large_string())
        digest = hashlib.sha256()
        for tokenizer in dict.fromkeys([self, self.inner]):
            for part in tokenizer.encode(probes):
                digest.update(np.ascontiguousarray(part, np.int64).tobytes())
        return digest.hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_libraries", "_checking")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _libraries={}, _checking=threading.Lock())

    def __repr__(self) -> str:
        return f"Tokenizer({self._definition.label!r}, {self.backend} {self.backend_version}, {self.vocab_size} ids)"

    def _encode(self, column: pa.Array) -> Encoded:
        try:
            return self._library(self.backend).encode(column)
        except BackendFailure as failure:
            _validate(column)
            broken = f"{self.backend} {self.backend_version} broke on a column of {len(column)} documents ({failure})"
        if self._insisted or self.backend == "tokenizers":
            raise TokenizerError(f"{broken}; use another tokenizer backend.")
        # The ids are the same, so one column by the reference changes nothing but the time it takes.
        if not self._warned:
            self._warned = True
            _log.warning("%s; tokenizers encodes such columns", broken)
        try:
            return self._reference.encode(column)
        except BackendFailure as failure:
            raise TokenizerError(f"{broken}, and tokenizers did too ({failure}).") from None

    def _use(self, backend: Backend) -> None:
        self._libraries[os.getpid(), backend.name] = backend
        self.backend, self.backend_version = backend.name, backend.version

    @property
    def _reference(self) -> TokenizersBackend:
        return cast(TokenizersBackend, self._library("tokenizers"))

    def _library(self, name: str) -> Backend:
        """A library as it is loaded in this process."""
        key = os.getpid(), name
        if key not in self._libraries:
            try:
                self._libraries[key] = load_library(self._definition, name)
            except BackendFailure as failure:
                raise TokenizerError(
                    f"tokenizer backend {name!r} does not load in this process ({failure}); install the same "
                    "packages for all workers."
                ) from None
        return self._libraries[key]


def _checked(column: Any) -> pa.Array:
    """The column as a large_string array."""
    kind = getattr(column, "type", None)
    if kind is None or not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise TokenizerError(f"encode got {kind or type(column).__name__}; expected an Arrow array of strings.")
    if column.null_count:
        raise TokenizerError(f"encode got {column.null_count} nulls in {len(column)} documents; drop them first.")
    return one_chunk(column).cast(pa.large_string())


def _validate(column: pa.Array) -> None:
    """Raises TokenizerError for invalid UTF-8, which backends refuse in words of their own."""
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        raise TokenizerError(f"encode got a column with invalid text ({error}); expected UTF-8.") from None


def _sample(texts: Sequence[str], nbytes: int) -> list[str]:
    """The first texts, cut short, of about `nbytes` together."""
    sample, left = [], nbytes
    for text in texts:
        sample.append(text[: min(left, nbytes // 4)])
        left -= len(sample[-1].encode("utf-8", "replace"))
        if left <= 0:
            break
    return [text for text in sample if text]
