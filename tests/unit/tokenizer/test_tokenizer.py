"""Encoding columns: shapes, long documents, threads, processes."""

import itertools
import logging
import multiprocessing
import pickle
import random
import re
import string
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from support.tokenizer_data import FAMILIES, column, gpt2, llama2, metaspace, reference_ids, rows, save, sources
from zephon.errors import TokenizerError
from zephon.tokenizer import backends, cutting
from zephon.tokenizer import tokenizer as tokenizer_module
from zephon.tokenizer.backends import BackendFailure
from zephon.tokenizer.tokenizer import Tokenizer, load_tokenizer

BACKENDS = ("fastokens", "gigatoken", "tokenizers")
TEXTS = ["Hello world", "", "  ", "naïve café 今日は 👍🏽", *(source[:2000] for source in sources())]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("gpt2"), gpt2())


@pytest.fixture(scope="module", params=BACKENDS)
def tokenizer(folder: Path, request: pytest.FixtureRequest) -> Tokenizer:
    return load_tokenizer(folder, backend=request.param)


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


@pytest.mark.parametrize("family", FAMILIES)
def test_invalid_text_is_an_error_and_not_a_crash(family: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, FAMILIES[family]()))
    bad = pa.LargeStringArray.from_buffers(
        2, pa.py_buffer(np.array([0, 2, 4], dtype=np.int64)), pa.py_buffer(b"ok\xff\xfe")
    )
    with pytest.raises(TokenizerError, match="UTF-8"):
        tokenizer.encode(bad)
    assert len(rows(tokenizer.encode(column(["fine"])))) == 1


@pytest.mark.parametrize("bad", [pa.array(["a", None]), pa.array([1]), pa.array([b"a"]), ["a"], None])
def test_what_is_no_column_of_text_is_refused(tokenizer: Tokenizer, bad: object) -> None:
    with pytest.raises(TokenizerError, match=r"expected an Arrow array of strings|drop them first"):
        tokenizer.encode(bad)


def test_decode_spells_everything_out(tokenizer: Tokenizer) -> None:
    text = "A café, 今日は <|endoftext|>"
    ids, _ = tokenizer.encode(column([text]))
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == text
    assert tokenizer.decode([*ids.tolist(), tokenizer.eos_id]) == text + "<|endoftext|>"
    assert tokenizer.decode([]) == ""
    for bad in ([-1], [tokenizer.vocab_size], [2**40], [[1]], ["a"], [0.5]):
        with pytest.raises(TokenizerError, match="expected"):
            tokenizer.decode(bad)


def test_describe_is_plain_data_without_paths(tokenizer: Tokenizer, folder: Path, tmp_path: Path) -> None:
    elsewhere = load_tokenizer(save(tmp_path, gpt2()), backend=tokenizer.backend).describe()
    assert tokenizer.describe() == elsewhere
    assert elsewhere["backend"] == tokenizer.backend
    assert elsewhere["backend_version"] == tokenizer.backend_version
    assert (elsewhere["vocab_size"], elsewhere["bos_id"], elsewhere["eos_id"]) == (1500, None, 0)
    assert all(value is None or isinstance(value, str | int) for value in elsewhere.values())


def test_a_pickle_encodes_the_same_without_a_new_check(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "examine", lambda *_: pytest.fail("checked again"))
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert rows(copy.encode(column(TEXTS))) == rows(tokenizer.encode(column(TEXTS)))
    assert copy.describe() == tokenizer.describe()
    assert copy.decode([1, 2]) == tokenizer.decode([1, 2])


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("family", ["gpt2", "metaspace"])
def test_a_forked_child_encodes_while_the_parent_does(family: str, tmp_path: Path) -> None:
    tree = FAMILIES[family]()
    text = column([sources()[0]])
    expected = reference_ids(tree, [sources()[0]])
    context = multiprocessing.get_context("fork")
    folder = save(tmp_path, tree)
    for backend in ("auto", "tokenizers"):
        tokenizer = load_tokenizer(folder, backend=backend)
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


@pytest.mark.parametrize("family", ["gpt2", "llama2", "metaspace"])
def test_many_threads_get_the_ids_of_one(family: str, tmp_path: Path) -> None:
    tokenizer = pickle.loads(pickle.dumps(load_tokenizer(save(tmp_path, FAMILIES[family]()))))  # not built yet
    columns = [column([source[n : n + 3000] for source in sources()]) for n in range(0, 24_000, 3000)]
    results: list[list] = [[] for _ in range(8)]
    threads = [
        threading.Thread(target=lambda out=out: out.extend(rows(tokenizer.encode(c)) for c in columns))
        for out in results
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [rows(tokenizer.encode(c)) for c in columns]
    assert all(result == expected for result in results)


def test_fastokens_starts_no_threads_and_leaves_the_environment_alone(folder: Path) -> None:
    code = (
        "import os, sys, threading, pyarrow as pa\n"
        "from zephon.tokenizer import load_tokenizer\n"
        "t = load_tokenizer(sys.argv[1], backend='fastokens')\n"
        "before = len(os.listdir('/proc/self/task')) if os.path.exists('/proc/self/task') else 0\n"
        "t.encode(pa.array(['some words ' * 1000] * 500))\n"
        "after = len(os.listdir('/proc/self/task')) if os.path.exists('/proc/self/task') else 0\n"
        "print(max(0, after - before), 'FASTOKENS_BPE_THREADS' in os.environ)\n"  # one of loading may just end
    )
    import os
    import subprocess
    import sys

    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, folder], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "0 False\n"


def test_a_gigatoken_instance_under_which_memory_grows_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    resident = itertools.count(0, 300 << 20)
    monkeypatch.setattr(backends, "resident_bytes", lambda: next(resident))
    tokenizer = load_tokenizer(folder, backend="gigatoken")
    monkeypatch.setattr(backends.GigatokenBackend, "CHECK_EVERY_BYTES", 1)
    live = tokenizer._live().backend
    load = live._load
    monkeypatch.setattr(live, "_load", lambda json: made.append(1) or load(json))
    expected = reference_ids(gpt2(), TEXTS)
    for _ in range(9):
        assert rows(tokenizer.encode(column(TEXTS))) == expected
    assert 2 <= len(made) <= 4


# Long documents


def test_a_long_document_is_cut_by_its_own_bytes_alone(tokenizer: Tokenizer) -> None:
    size = 5_000_000 if tokenizer.backend == "tokenizers" else 10_000_000
    once = "".join(sources())
    document = once * (size // len(once) + 1)
    alone = rows(tokenizer.encode(column([document])))[0]
    assert rows(tokenizer.encode(column(["x", document, "", document]))) == [
        *rows(tokenizer.encode(column(["x"]))),
        alone,
        [],
        alone,
    ]
    assert tokenizer.decode(alone) == document


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_endless_word_does_not_stall(backend: str, folder: Path) -> None:
    tokenizer = load_tokenizer(folder, backend=backend)
    rng = random.Random(1)
    word = "".join(rng.choices(string.ascii_lowercase, k=1 << 16)) * 96
    started = time.perf_counter()
    ids = rows(tokenizer.encode(column([word])))[0]
    assert time.perf_counter() - started < 30
    assert tokenizer.decode(ids) == word


@pytest.mark.deep
def test_one_word_of_20_mb_does_not_stall(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    word = "a" * 20_000_000
    started = time.perf_counter()
    first = tokenizer.encode(column([word]))
    assert time.perf_counter() - started < 60
    assert np.array_equal(tokenizer.encode(column(["b", word]))[0][-len(first[0]) :], first[0])


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_DOCUMENT_BYTES", 4096)
    monkeypatch.setattr(cutting, "PIECE_BYTES", 1024)
    monkeypatch.setattr(cutting, "SEARCH_BYTES", 512)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_between_words_does_not_change_the_ids(family: str, tmp_path: Path) -> None:
    tree = FAMILIES[family]()
    prose = [" ".join(re.findall(r"[A-Za-z]{1,20}|[-=]{1,20}|\d|\n+", source)) for source in sources()]
    texts = ["short", *prose, "tail"]
    tokenizer = load_tokenizer(save(tmp_path, tree))
    assert rows(tokenizer.encode(column(texts))) == reference_ids(tree, texts)
    assert rows(tokenizer.encode(pa.array(texts, pa.string()).slice(2))) == reference_ids(tree, texts[2:])


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "word", ["a" * 9000, "é" * 4500, "漢" * 3001, "👍" * 2500, " " * 9000, "\n" * 9000, "-a1" * 3000]
)
def test_a_cut_where_there_is_no_word_loses_no_text(family: str, word: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, FAMILIES[family]()))
    ids, _ = tokenizer.encode(column([word]))
    text = tokenizer.decode(ids)
    # Metaspace families put a space in front of each piece, which can only be seen at a forced cut.
    assert text.replace(" ", "") == word.replace(" ", "")
    if family in ("gpt2", "llama3", "o200k", "qwen", "starcoder"):
        assert text == word


def test_pieces_cover_the_document() -> None:
    text = np.frombuffer(("word " * 900_000 + "漢" * 900_000).encode(), dtype=np.uint8)
    for skip_space in (False, True):
        pieces = cutting.cut(text, skip_space)
        assert pieces[0][0] == 0
        assert pieces[-1][1] == len(text)
        assert all(0 < stop - start <= cutting.PIECE_BYTES for start, stop in pieces)
        gaps = [text[a[1] : b[0]].tobytes() for a, b in itertools.pairwise(pieces)]
        assert set(gaps) <= ({b"", b" "} if skip_space else {b""})
        for start, stop in pieces:
            text[start:stop].tobytes().decode("utf-8")


# When a library turns out to be wrong after all


class Wrong:
    """A backend that is off by one token on texts with a z."""

    name, version = "fastokens", "0"

    def __init__(self, right: backends.Backend) -> None:
        self._right = right

    def encode(self, texts: pa.Array) -> backends.Encoded:
        values, offsets = self._right.encode(texts)
        if any("z" in text for text in texts.to_pylist()):
            values = values + np.uint32(1)
        return values, offsets


class Broken(Wrong):
    def encode(self, texts: pa.Array) -> backends.Encoded:
        raise BackendFailure("cannot encode: panic")


def replace_backend(tokenizer: Tokenizer, kind: type[Wrong]) -> None:
    runtime = tokenizer._live()
    runtime.backend = kind(runtime.backend)


def test_a_difference_on_the_users_documents_moves_to_the_next_library(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(folder)
    replace_backend(tokenizer, Wrong)
    tokenizer.selfcheck([])
    tokenizer.selfcheck(["abc", ""])
    assert tokenizer.backend == "fastokens"
    with caplog.at_level(logging.WARNING, "zephon.tokenizer"):
        tokenizer.selfcheck(["abc", "xyz", "z" * 10_000_000])
    assert tokenizer.backend == "gigatoken"
    assert tokenizer.describe()["backend"] == "gigatoken"
    assert len(caplog.messages) == 1
    assert rows(tokenizer.encode(column(["xyz"]))) == reference_ids(gpt2(), ["xyz"])


def test_a_difference_under_a_library_insisted_on_is_an_error(folder: Path) -> None:
    tokenizer = load_tokenizer(folder, backend="fastokens")
    replace_backend(tokenizer, Wrong)
    with pytest.raises(TokenizerError, match=r"2 of 2 documents differ from tokenizers, the first is 'abc'"):
        tokenizer.selfcheck(["abc", "xyz"])


@pytest.mark.parametrize("family", ["llama2", "metaspace"])
def test_selfcheck_ends_at_tokenizers(family: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, {"llama2": llama2, "metaspace": metaspace}[family]()))
    for _ in range(2):
        if tokenizer.backend != "tokenizers":
            replace_backend(tokenizer, Wrong)
            tokenizer.selfcheck(["xyz"])
    assert tokenizer.backend == "tokenizers"
    tokenizer.selfcheck(["xyz"])


def test_a_library_that_breaks_on_a_column_is_helped_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_tokenizer(folder)
    replace_backend(tokenizer, Broken)
    with caplog.at_level(logging.WARNING, "zephon.tokenizer"):
        for _ in range(3):
            assert rows(tokenizer.encode(column(TEXTS))) == reference_ids(gpt2(), TEXTS)
    assert len(caplog.messages) == 1
    insisted = load_tokenizer(folder, backend="fastokens")
    replace_backend(insisted, Broken)
    with pytest.raises(TokenizerError, match="panic"):
        insisted.encode(column(TEXTS))
