"""Very long documents are cut where a new word begins, by their own bytes alone."""

import itertools
import random
import re
import string
import time

import numpy as np
import pyarrow as pa
import pytest

from support.tokenizer_data import FAMILIES, column, families, loaded, reference_ids, rows, sources
from zephon.tokenizer import cutting
from zephon.tokenizer import tokenizer as tokenizer_module


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_module, "MAX_DOCUMENT_BYTES", 4096)
    monkeypatch.setattr(cutting, "MAX_DOCUMENT_BYTES", 4096)
    monkeypatch.setattr(cutting, "PIECE_BYTES", 1024)
    monkeypatch.setattr(cutting, "SEARCH_BYTES", 512)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("family", families())
def test_a_cut_between_words_does_not_change_the_ids(family: str) -> None:
    prose = [" ".join(re.findall(r"[A-Za-z]{1,20}|[-=]{1,20}|\d|\n+", source)) for source in sources()[:4]]
    texts, tree = ["short", *prose, "tail"], FAMILIES[family]()
    tokenizer = loaded(family)
    assert rows(tokenizer.encode(column(texts))) == reference_ids(tree, texts)
    assert rows(tokenizer.encode(pa.array(texts, pa.string()).slice(2))) == reference_ids(tree, texts[2:])


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("family", families())
def test_a_cut_where_there_is_no_word_loses_no_text(family: str) -> None:
    tokenizer = loaded(family)
    for word in ("a" * 9000, "é" * 4500, "漢" * 3001, "👍" * 2500, " " * 9000, "\n" * 9000, "-a1" * 3000):
        text = tokenizer.decode(tokenizer.encode(column([word]))[0])
        # Metaspace families put a space in front of each piece, which can only be seen at a forced cut.
        spaces = family in ("llama2", "gemma", "metaspace")
        assert text.replace(" ", "") == word.replace(" ", "") if spaces else text == word


@pytest.mark.usefixtures("small_pieces")
def test_a_long_document_has_the_same_tokens_alone_and_among_others() -> None:
    document = sources()[0] + "漢" * 5000
    tokenizer = loaded("gpt2")
    (alone,) = rows(tokenizer.encode(column([document])))
    assert rows(tokenizer.encode(column(["x", document, "", document])))[1:] == [alone, [], alone]
    assert tokenizer.decode(alone) == document


def test_pieces_cover_the_document() -> None:
    document = ("word " * 900_000 + "漢" * 900_000).encode()
    assert b"".join(cutting.cut(document, keeps_space=True)) == document
    pieces = list(cutting.cut(document, keeps_space=False))
    assert all(0 < len(piece) <= cutting.PIECE_BYTES and piece.decode() for piece in pieces)
    words = [piece for piece in pieces if piece.startswith(b"w")]
    assert b" ".join(words) + b"".join(pieces[len(words) :]) == document


@pytest.mark.parametrize(
    "backend", ["fastokens", *(pytest.param(name, marks=pytest.mark.deep) for name in ("gigatoken", "tokenizers"))]
)
def test_one_endless_word_does_not_stall(backend: str) -> None:
    rng = random.Random(1)
    word = "".join(rng.choices(string.ascii_lowercase, k=1 << 16)) * 96
    tokenizer, started = loaded("gpt2", backend), time.perf_counter()
    ids = rows(tokenizer.encode(column([word])))[0]
    assert time.perf_counter() - started < 30
    assert tokenizer.decode(ids) == word


@pytest.mark.deep
def test_one_word_of_20_mb_does_not_stall() -> None:
    tokenizer, word = loaded("gpt2"), "a" * 20_000_000
    started = time.perf_counter()
    first, _ = tokenizer.encode(column([word]))
    assert time.perf_counter() - started < 60
    assert np.array_equal(tokenizer.encode(column(["b", word]))[0][-len(first) :], first)


@pytest.mark.deep
@pytest.mark.parametrize("backend", ["fastokens", "gigatoken", "tokenizers"])
def test_ten_megabytes_of_one_document_keep_their_text(backend: str) -> None:
    document = "".join(itertools.islice(itertools.cycle(sources()), 160))[:10_000_000]
    tokenizer = loaded("gpt2", backend)
    assert tokenizer.decode(tokenizer.encode(column([document]))[0]) == document
