"""Encoding columns: shapes, threads, processes, and libraries that turn out to be wrong."""

import itertools
import logging
import multiprocessing
import os
import pickle
import threading

import numpy as np
import pyarrow as pa
import pytest

from support.tokenizer_data import FAMILIES, column, families, folder_of, gpt2, loaded, reference_ids, rows, sources
from zephon.errors import TokenizerError
from zephon.tokenizer import backends
from zephon.tokenizer import tokenizer as tokenizer_module
from zephon.tokenizer.backends import BackendFailure
from zephon.tokenizer.tokenizer import Tokenizer, load_tokenizer

BACKENDS = ("fastokens", "gigatoken", "tokenizers")
TEXTS = ["Hello world", "", "  ", "naïve café 今日は 👍🏽", *(source[:2000] for source in sources())]


@pytest.fixture(scope="module", params=BACKENDS)
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    return loaded("gpt2", request.param)


def test_any_string_column_gives_values_and_offsets(tokenizer: Tokenizer) -> None:
    expected = reference_ids(gpt2(), TEXTS)
    assert rows(tokenizer.encode(column(TEXTS))) == expected
    assert rows(tokenizer.encode(pa.array(TEXTS, pa.string()))) == expected
    assert rows(tokenizer.encode(column(TEXTS).slice(3, 4))) == expected[3:7]
    assert rows(tokenizer.encode(pa.array(TEXTS, pa.string()).slice(1))) == expected[1:]
    assert rows(tokenizer.encode(pa.chunked_array([column(TEXTS[:2]), column(TEXTS[2:])]))) == expected


@pytest.mark.parametrize("texts", [[], [""], ["", "", ""]])
def test_no_text_gives_no_tokens(tokenizer: Tokenizer, texts: list[str]) -> None:
    for kind in (pa.string(), pa.large_string()):
        assert rows(tokenizer.encode(pa.array(texts, kind))) == [[]] * len(texts)
        assert rows(tokenizer.encode(pa.array(["x", *texts], kind).slice(1))) == [[]] * len(texts)


@pytest.mark.parametrize("family", families())
def test_invalid_text_is_an_error_and_not_a_crash(family: str) -> None:
    offsets = pa.py_buffer(np.array([0, 2, 4], dtype=np.int64))
    bad = pa.LargeStringArray.from_buffers(2, offsets, pa.py_buffer(b"ok\xff\xfe"))
    with pytest.raises(TokenizerError, match="UTF-8"):
        loaded(family).encode(bad)
    assert len(rows(loaded(family).encode(column(["fine"])))) == 1


@pytest.mark.parametrize("bad", [pa.array(["a", None]), pa.array([1]), pa.array([b"a"]), ["a"], None])
def test_what_is_no_column_of_text_is_refused(bad: object) -> None:
    with pytest.raises(TokenizerError, match=r"expected an Arrow array of strings|drop them first"):
        loaded("gpt2").encode(bad)


def test_decode_spells_everything_out() -> None:
    tokenizer, text = loaded("gpt2"), "A café, 今日は <|endoftext|>"
    ids, _ = tokenizer.encode(column([text]))
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text
    assert tokenizer.decode([*ids.tolist(), tokenizer.eos_id]) == text + "<|endoftext|>"
    assert tokenizer.decode([]) == ""
    for bad in ([-1], [tokenizer.vocab_size], [2**40], [[1]], ["a"], [0.5]):
        with pytest.raises(TokenizerError, match="expected"):
            tokenizer.decode(bad)


def test_a_pickle_encodes_the_same_without_a_new_check(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "choose", lambda *_: pytest.fail("checked again"))
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert rows(copy.encode(column(TEXTS))) == rows(tokenizer.encode(column(TEXTS)))
    assert (copy.backend, copy.content_hash) == (tokenizer.backend, tokenizer.content_hash)
    assert copy.decode([1, 2]) == tokenizer.decode([1, 2])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("family", ["metaspace", pytest.param("gpt2", marks=pytest.mark.deep)])
def test_a_forked_child_encodes_while_the_parent_does(family: str) -> None:
    text = column([sources()[0]])
    expected = reference_ids(FAMILIES[family](), [sources()[0]])
    context = multiprocessing.get_context("fork")
    for backend in ("auto", "tokenizers"):
        tokenizer = loaded(family, backend)
        stop = threading.Event()
        busy = threading.Thread(target=lambda t=tokenizer, s=stop: [t.encode(text) for _ in iter(s.is_set, True)])
        busy.start()
        try:
            for _ in range(3):
                answers = context.Queue()
                child = context.Process(target=lambda t=tokenizer, q=answers: q.put(rows(t.encode(text))))
                child.start()
                assert answers.get(timeout=60) == expected
                child.join(60)
                assert child.exitcode == 0
        finally:
            stop.set()
            busy.join()


@pytest.mark.parametrize("family", families())
def test_many_threads_get_the_ids_of_one(family: str) -> None:
    tokenizer = pickle.loads(pickle.dumps(loaded(family)))  # not built yet
    columns = [column([source[n : n + 3000] for source in sources()]) for n in range(0, 12_000, 3000)]
    results: list[list] = [[] for _ in range(8)]
    threads = [
        threading.Thread(target=lambda out=out: out.extend(rows(tokenizer.encode(c)) for c in columns))
        for out in results
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [rows(loaded(family).encode(c)) for c in columns]
    assert all(result == expected for result in results)


def test_fastokens_starts_no_threads() -> None:
    def threads() -> int:
        return len(os.listdir("/proc/self/task")) if os.path.exists("/proc/self/task") else 0

    tokenizer = loaded("gpt2", "fastokens")
    before = threads()
    tokenizer.encode(pa.array(["some words " * 1000] * 500))
    assert threads() <= before  # one of loading may just end


def test_a_gigatoken_instance_under_which_memory_grows_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    resident = itertools.count(0, 300 << 20)
    monkeypatch.setattr(backends, "resident_bytes", lambda: next(resident))
    monkeypatch.setattr(backends.GigatokenBackend, "CHECK_EVERY_BYTES", 1)
    backends._loaded.cache_clear()  # others may have used the library of this process
    tokenizer = pickle.loads(pickle.dumps(loaded("gpt2", "gigatoken")))
    tokenizer.encode(column(["first"]))
    live = tokenizer._library("gigatoken")
    builds, load = [], live._load
    monkeypatch.setattr(live, "_load", lambda json: builds.append(1) or load(json))
    expected = reference_ids(gpt2(), TEXTS)
    for _ in range(9):
        assert rows(tokenizer.encode(column(TEXTS))) == expected
    assert 2 <= len(builds) <= 5


class Wrong:
    """A backend that is off by one token on texts with a z."""

    def __init__(self, right: backends.Backend) -> None:
        self._right, self.name, self.version = right, right.name, "0"

    def encode(self, texts: pa.Array) -> backends.Encoded:
        values, offsets = self._right.encode(texts)
        if any("z" in text for text in texts.to_pylist()):
            values = values + np.uint32(1)
        return values, offsets


class Broken(Wrong):
    def encode(self, texts: pa.Array) -> backends.Encoded:
        raise BackendFailure("cannot encode: panic")


def with_backend(kind: type[Wrong], backend: str = "auto", family: str = "gpt2") -> Tokenizer:
    tokenizer = load_tokenizer(folder_of(family), backend=backend)
    tokenizer._use(kind(tokenizer._library(tokenizer.backend)))
    return tokenizer


def test_a_difference_on_the_users_documents_moves_to_the_next_library(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = with_backend(Wrong)
    tokenizer.selfcheck([])
    tokenizer.selfcheck(["abc", ""])
    assert tokenizer.backend == "fastokens"
    with caplog.at_level(logging.WARNING, "zephon.tokenizer"):
        tokenizer.selfcheck(["abc", "xyz", "z" * 10_000_000])
    assert (tokenizer.backend, len(caplog.messages)) == ("gigatoken", 1)
    assert rows(tokenizer.encode(column(["xyz"]))) == reference_ids(gpt2(), ["xyz"])


def test_a_difference_under_a_library_insisted_on_is_an_error() -> None:
    with pytest.raises(TokenizerError, match=r"2 of 2 documents differ from tokenizers, the first is 'abc'"):
        with_backend(Wrong, "fastokens").selfcheck(["abc", "xyz"])


@pytest.mark.parametrize("family", ["llama2", "metaspace"])
def test_selfcheck_ends_at_tokenizers(family: str) -> None:
    tokenizer = load_tokenizer(folder_of(family))
    while tokenizer.backend != "tokenizers":
        tokenizer._use(Wrong(tokenizer._library(tokenizer.backend)))
        tokenizer.selfcheck(["xyz"])
    tokenizer.selfcheck(["xyz"])


def test_a_library_that_breaks_on_a_column_is_helped_out(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = with_backend(Broken)
    with caplog.at_level(logging.WARNING, "zephon.tokenizer"):
        for _ in range(3):
            assert rows(tokenizer.encode(column(TEXTS))) == reference_ids(gpt2(), TEXTS)
    assert len(caplog.messages) == 1
    with pytest.raises(TokenizerError, match="panic"):
        with_backend(Broken, "fastokens").encode(column(TEXTS))
