"""`load_tokenizer` and what it gives."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from zephon.columns.arrow import int64_array
from zephon.errors import TokenizerError
from zephon.tokenizer.backends import BACKENDS, Backend, BackendFailure, Encoded, TokenizersBackend
from zephon.tokenizer.cutting import MAX_DOCUMENT_BYTES, cut
from zephon.tokenizer.definition import TokenizerDefinition, Tree, read_definition
from zephon.tokenizer.load import find_tokenizer
from zephon.tokenizer.selfcheck import FAST, Answers, Examined, examine, first_fit, load_reference

SAMPLE_BYTES = 128 << 10  # of the user's documents; the reference needs about 20 ms for them

_log = logging.getLogger("zephon.tokenizer")


def load_tokenizer(tokenizer_id: str | os.PathLike[str], *, backend: str = "auto") -> Tokenizer:
    """Load a tokenizer and choose the library that runs it.

    Args:
        tokenizer_id: a folder with a tokenizer.json, the path of one, or a hub name ("gpt2", "org/name@revision").
        backend: "auto" takes the first of fastokens, gigatoken and tokenizers that is trusted with this kind of
            tokenizer and gives the ids of `tokenizers` on some 2,000 probe texts, and logs which; a name insists.

    Raises:
        TokenizerError: it cannot be found, read or used, or the backend insisted on is not fit for it.
    """
    if backend not in ("auto", *BACKENDS):
        raise TokenizerError(f"tokenizer backend is {backend!r}; expected 'auto', {', '.join(map(repr, BACKENDS))}")
    started = time.perf_counter()
    definition, tree = read_definition(find_tokenizer(tokenizer_id))
    names = FAST if backend == "auto" else [name for name in FAST if name == backend]
    chosen, refusals, known = _chosen(definition, tree, names)
    if chosen is None and names and backend != "auto":
        raise TokenizerError(
            f"tokenizer backend {backend!r} is not fit for {definition.label!r} ({refusals[0]}); use backend 'auto'"
        )
    runtime = _Runtime(os.getpid(), chosen or known.reference, known.reference)
    slow = backend == "auto" and chosen is None  # by a factor of 50
    _log.log(
        logging.WARNING if slow else logging.INFO,
        "%s: tokenizing with %s %s (%d probe texts, %.2f s)%s",
        definition.label,
        runtime.backend.name,
        runtime.backend.version,
        len(known.probes.texts),
        time.perf_counter() - started,
        f"; passed over {'; '.join(refusals)}" if refusals else "",
    )
    return Tokenizer(definition, insisted=backend != "auto", keep_space=known.keep_space, runtime=runtime)


_Choice = tuple[Backend | None, list[str], Examined]

# A training job builds a pipeline to train and others to validate, with one tokenizer: the checks need not run again.
_choices: OrderedDict[tuple[object, ...], _Choice] = OrderedDict()
_CHOICES_KEPT = 2


def _chosen(definition: TokenizerDefinition, tree: Tree, names: Sequence[str]) -> _Choice:
    """The first library of `names` that is fit, why those before it are not, and what the reference says."""
    key = (os.getpid(), definition.json, definition.encoder_json, definition.bos_id, definition.eos_id, *names)
    with _building:
        if key in _choices:
            _choices.move_to_end(key)
            return _choices[key]
    # The reference answers the probes while the first candidate loads, most of which is outside the GIL.
    with ThreadPoolExecutor(1, thread_name_prefix="zephon-tokenizer") as helper:
        examined = helper.submit(examine, definition, tree)
        chosen, refusals = first_fit(definition, tree, names, lambda: [examined.result().probes])
        known = examined.result()
    with _building:
        _choices[key] = chosen, refusals, known
        while len(_choices) > _CHOICES_KEPT:
            _choices.popitem(last=False)
    return chosen, refusals, known


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token with a role.

    Attributes:
        text: how it is written.
        id: its id.
        lstrip, rstrip: whether it takes the white space before or after it along.
    """

    text: str
    id: int
    lstrip: bool
    rstrip: bool


@dataclass
class _Runtime:
    """The live library objects; they belong to one process."""

    pid: int
    backend: Backend
    reference: TokenizersBackend | None = None


# Guards the building of runtimes, not their use. A fork may happen while it is held, so a child gets a new one.
_building = threading.Lock()


def _renew_lock() -> None:
    global _building
    _building = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)


class Tokenizer:
    """Text to token ids, a column at a time. Made by `load_tokenizer`.

    Any number of threads may use it at once. It pickles as plain data (its checked tokenizer.json and the name of its
    backend), and builds its library objects again where it arrives, as it does after a fork.

    Attributes:
        bos_token, eos_token: the tokens that begin and end a document, or None where it declares none.
        bos_id, eos_id: their ids, or None.
        vocab_size: largest id + 1, added tokens included.
        content_hash: sha256 (hex) of all that decides ids, and of the choice of BOS and EOS.
        backend: "fastokens", "gigatoken" or "tokenizers".
        backend_version: the version of that library.
    """

    def __init__(self, definition: TokenizerDefinition, *, insisted: bool, keep_space: bool, runtime: _Runtime) -> None:
        self._definition = definition
        self._insisted = insisted
        self._keep_space = keep_space
        self._runtime: _Runtime | None = runtime
        self._warned = False
        self.bos_token, self.eos_token = definition.bos_token, definition.eos_token
        self.bos_id, self.eos_id = definition.bos_id, definition.eos_id
        self.vocab_size = definition.vocab_size
        self.content_hash = definition.content_hash
        self.backend, self.backend_version = runtime.backend.name, runtime.backend.version

    def encode(self, column: pa.Array) -> Encoded:
        """Token ids of every document of a column.

        No special tokens are added, and text that spells one stays text. The ids are those of `tokenizers`, except
        that a document of more than 4 MiB is cut first (see `cutting`).

        Args:
            column: string or large_string array, without nulls.

        Returns:
            (values uint32[n_tokens], offsets int64[n_docs + 1]): document i is values[offsets[i]:offsets[i + 1]]. The
            arrays may be views of the library's own memory and not writable.

        Raises:
            TokenizerError: another type, nulls, invalid UTF-8, or the backend insisted on breaks.
        """
        column = _checked(column)
        bounds = _bounds(column)
        lengths = np.diff(bounds)
        if not len(lengths) or lengths.max() <= MAX_DOCUMENT_BYTES:
            return self._encode(column)
        pieces, first_piece = _cut_long(column, bounds, skip_space=not self._keep_space)
        values, offsets = self._encode(pieces)
        return values, offsets[first_piece]

    def decode(self, ids: Iterable[int] | np.ndarray) -> str:
        """The text of token ids, special tokens spelled out.

        Raises:
            TokenizerError: an id that is negative or not of this tokenizer.
        """
        array = np.asarray(ids if isinstance(ids, np.ndarray | Sequence) else list(ids))
        if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
            raise TokenizerError(f"decode got {array.dtype} of shape {array.shape}; expected a row of token ids")
        if array.size and not 0 <= int(array.min()) <= int(array.max()) < self.vocab_size:
            raise TokenizerError(
                f"decode got ids from {array.min()} to {array.max()}; expected ids from 0 to {self.vocab_size - 1}"
            )
        try:
            return self._reference().decode(array.tolist())
        except BackendFailure as failure:
            raise TokenizerError(f"{array.size} token ids cannot be decoded ({failure}); check the tokenizer") from None

    @cached_property
    def special_tokens(self) -> list[SpecialToken]:
        """The tokens that text never becomes, in the order of their ids."""
        added = self._definition.tree()["added_tokens"]
        found = [SpecialToken(t["content"], t["id"], t["lstrip"], t["rstrip"]) for t in added if t["special"]]
        return sorted(found, key=lambda token: token.id)

    @cached_property
    def token_bytes(self) -> np.ndarray | None:
        """int32[vocab_size]: how many bytes of text each token stands for; None where tokens do not say.

        Tokens of a byte-level BPE spell their bytes, one character each. A normalizer may still change the text before,
        so the sum over a text is to be compared with its length.
        """
        tree = self._definition.tree()
        model = tree["model"]
        if model.get("type") != "BPE" or model.get("byte_fallback") or not _is_byte_level(tree):
            return None
        lengths = np.zeros(self.vocab_size, dtype=np.int32)
        for token, number in model["vocab"].items():
            lengths[number] = len(token)
        for token in tree["added_tokens"]:
            lengths[token["id"]] = len(token["content"].encode())
        return lengths

    @cached_property
    def inner(self) -> Tokenizer:
        """The tokenizer for a piece of text that something comes before: itself, but where the first word of a text is
        treated as no other is (Metaspace with prepend_scheme "first")."""
        tree = self._definition.tree()
        encoder = msgspec.json.decode(self._definition.encoder_json)
        if not (_without_prefix(tree) | _without_prefix(encoder)):
            return self
        definition = replace(
            self._definition,
            json=msgspec.json.encode(tree).decode(),
            encoder_json=msgspec.json.encode(encoder).decode(),
        )
        chosen, _, known = _chosen(definition, tree, FAST)
        runtime = _Runtime(os.getpid(), chosen or known.reference, known.reference)
        return Tokenizer(definition, insisted=False, keep_space=known.keep_space, runtime=runtime)

    def token_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Ids of a text as `encode` gives them, and the characters (first, end) of each; slow.

        Raises:
            TokenizerError: the reference library breaks.
        """
        try:
            return self._reference().token_spans(text)
        except BackendFailure as failure:
            raise TokenizerError(f"a text of {len(text)} characters cannot be tokenized ({failure})") from None

    def describe(self) -> dict[str, str | int | None]:
        """What runs and what decides its ids, as plain data for fingerprints, logs and explain()."""
        return {
            "backend": self.backend,
            "backend_version": self.backend_version,
            "vocab_size": self.vocab_size,
            "bos_token": self.bos_token,
            "bos_id": self.bos_id,
            "eos_token": self.eos_token,
            "eos_id": self.eos_id,
            "content_hash": self.content_hash,
        }

    def selfcheck(self, texts: Sequence[str]) -> None:
        """Compare the backend with `tokenizers` on a sample of the documents that it is going to encode.

        On a difference the next fit backend takes over, and the log says so. Only about the first SAMPLE_BYTES of the
        texts are used. Call it before the first encode, not during it.

        Raises:
            TokenizerError: they differ and the backend was insisted on.
        """
        runtime = self._live()
        if runtime.backend.name == "tokenizers":
            return
        sample = _sample(texts)
        if not sample:
            return
        reference = self._reference()
        try:
            answers = Answers.of("documents", sample, reference)
        except BackendFailure as failure:
            raise TokenizerError(f"tokenizers cannot encode a sample of the documents ({failure})") from None
        try:
            difference = answers.difference(runtime.backend)
        except BackendFailure as failure:
            difference = str(failure)
        if difference is None:
            return
        if self._insisted:
            raise TokenizerError(f"tokenizer backend {self.backend!r} is not fit for these documents ({difference})")
        tree = self._definition.tree()
        following = FAST[FAST.index(self.backend) + 1 :]
        probes = examine(self._definition, tree).probes
        chosen, _ = first_fit(self._definition, tree, following, lambda: [probes, answers])
        replacement: Backend = chosen or reference
        _log.warning("%s: tokenizing with %s from now on, because %s", self.backend, replacement.name, difference)
        self._runtime = _Runtime(os.getpid(), replacement, reference)
        self.backend, self.backend_version = replacement.name, replacement.version

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runtime": None}

    def __repr__(self) -> str:
        return f"Tokenizer({self._definition.label!r}, {self.backend} {self.backend_version}, {self.vocab_size} ids)"

    def _encode(self, column: pa.Array) -> Encoded:
        try:
            return self._live().backend.encode(column)
        except BackendFailure as failure:
            if self._insisted or self.backend == "tokenizers":
                raise TokenizerError(
                    f"{self.backend} {self.backend_version} broke on a column of {len(column)} documents ({failure}); "
                    "use another tokenizer backend"
                ) from None
            # The ids are the same, so one column by the reference changes nothing but the time it takes.
            if not self._warned:
                self._warned = True
                _log.warning("%s broke on some documents (%s); tokenizers encodes those", self.backend, failure)
            try:
                return self._reference().encode(column)
            except BackendFailure as second:
                raise TokenizerError(f"a column of {len(column)} documents cannot be tokenized ({second})") from None

    def _live(self) -> _Runtime:
        runtime = self._runtime
        if runtime is not None and runtime.pid == os.getpid():
            return runtime
        with _building:
            runtime = self._runtime
            if runtime is None or runtime.pid != os.getpid():
                try:
                    runtime = _Runtime(os.getpid(), BACKENDS[self.backend](self._definition))
                except BackendFailure as failure:
                    raise TokenizerError(
                        f"tokenizer backend {self.backend!r} does not load in this process ({failure}); install the "
                        "same packages for all workers"
                    ) from None
                self._runtime = runtime
        return runtime

    def _reference(self) -> TokenizersBackend:
        runtime = self._live()
        with _building:
            if runtime.reference is None:
                live = runtime.backend
                runtime.reference = live if isinstance(live, TokenizersBackend) else load_reference(self._definition)
        return runtime.reference


def _without_prefix(tree: Tree) -> bool:
    """Take the prefix of the first word out of the pre-tokenizer, in place; whether there was one."""
    step = tree.get("pre_tokenizer") or {}
    found = False
    for inner in [step, *(step.get("pretokenizers") or [])]:
        if isinstance(inner, dict) and inner.get("type") == "Metaspace" and inner.get("prepend_scheme") == "first":
            inner["prepend_scheme"], found = "never", True
    return found


def _is_byte_level(tree: Tree) -> bool:
    decoder = tree.get("decoder") or {}
    steps = decoder.get("decoders", [decoder]) if isinstance(decoder, dict) else []
    return any(isinstance(step, dict) and step.get("type") == "ByteLevel" for step in steps)


def _checked(column: pa.Array) -> pa.Array:
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if not isinstance(column, pa.Array) or not (
        pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    ):
        kind = getattr(column, "type", type(column).__name__)
        raise TokenizerError(f"encode got {kind}; expected an Arrow array of strings")
    if column.null_count:
        raise TokenizerError(f"encode got {column.null_count} nulls in {len(column)} documents; drop them first")
    try:
        column.validate(full=True)  # 0.04 ms per MB
    except pa.ArrowInvalid as error:
        raise TokenizerError(f"encode got a column with invalid text ({error}); it must be UTF-8") from None
    return column


def _bounds(column: pa.Array) -> np.ndarray:
    """Where the documents are in the column's text buffer: int64[n_docs + 1]."""
    if not len(column):
        return np.zeros(1, dtype=np.int64)
    dtype = np.int64 if pa.types.is_large_string(column.type) else np.int32
    offsets = np.frombuffer(column.buffers()[1], dtype=dtype)[column.offset : column.offset + len(column) + 1]
    return offsets.astype(np.int64, copy=False)


def _cut_long(column: pa.Array, bounds: np.ndarray, *, skip_space: bool) -> tuple[pa.Array, np.ndarray]:
    """The column with its long documents cut.

    Returns:
        (large_string array of pieces, int64[n_docs + 1]: which piece each document begins with).
    """
    data = column.buffers()[2]
    text = np.frombuffer(data, dtype=np.uint8)
    # Pieces, and the spaces between them, follow each other in the text buffer: one array over it holds them all.
    edges, is_piece = [int(bounds[0])], []
    first_piece = np.zeros(len(bounds), dtype=np.int64)
    for i, (start, stop) in enumerate(pairwise(bounds.tolist())):
        whole = stop - start <= MAX_DOCUMENT_BYTES
        pieces = [(0, stop - start)] if whole else cut(text[start:stop], skip_space)
        for a, b in pieces:
            if start + a != edges[-1]:
                edges.append(start + a)
                is_piece.append(False)
            edges.append(start + b)
            is_piece.append(True)
        first_piece[i + 1] = first_piece[i] + len(pieces)
    offsets = pa.py_buffer(np.array(edges, dtype=np.int64))
    array = pa.LargeStringArray.from_buffers(len(is_piece), offsets, data)
    return (array if all(is_piece) else array.take(int64_array(np.flatnonzero(is_piece)))), first_piece


def _sample(texts: Sequence[str]) -> list[str]:
    """The first texts, cut short, of about SAMPLE_BYTES together."""
    sample, left = [], SAMPLE_BYTES
    for text in texts:
        sample.append(text[: min(left, SAMPLE_BYTES // 4)])
        left -= len(sample[-1].encode("utf-8", "replace"))
        if left <= 0:
            break
    return [text for text in sample if text]
