# ruff: noqa: RUF001 (characters that look like others are the point)
"""Whatever the text, every accepted library gives the ids of `tokenizers`."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.tokenizer_data import FAMILIES, add_token, column, families, reference_ids, rows, save
from zephon.errors import TokenizerError
from zephon.tokenizer.tokenizer import Tokenizer, load_tokenizer

# fmt: off
FRAGMENTS = [
    "the", " the", "self.", "    ", "\n\n", "\r\n", "\t", "'s", "'RE", "’ll", "123", "1234567", "://", "▁",
    "▁▁", "<0x41>", "<|endoftext|>", "<s>", "</s>", "<unk>", "<tool>", "<tool", "tool>", "\u0301", "e\u0301",
    "\u212b", "\u200d", "\ufeff", "\u00a0", "\u3000", "\u2028", "\x85", "\x00", "👩‍👧", "漢字", "ﬁ", "½", "İ",
    "ſ", "\u1112\u1161\u11ab", "\U0010ffff",
]
# fmt: on
texts = st.one_of(
    st.text(max_size=40),
    st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.text(max_size=3)), max_size=20).map("".join),
)


@pytest.fixture(scope="module", params=families())
def libraries(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, list[Tokenizer]]:
    tree = add_token(FAMILIES[request.param](), "<tool>")
    folder = save(tmp_path_factory.mktemp(request.param), tree)
    accepted = []
    for backend in ("fastokens", "gigatoken", "tokenizers"):
        try:
            accepted.append(load_tokenizer(folder, backend=backend))
        except TokenizerError as error:
            assert "not trusted with" in str(error)
    assert len(accepted) > 1
    return tree, accepted


@given(documents=st.lists(texts, max_size=12), cut=st.integers(0, 12))
def test_all_libraries_agree_wherever_a_column_is_cut(
    libraries: tuple[dict, list[Tokenizer]], documents: list[str], cut: int
) -> None:
    tree, accepted = libraries
    expected = reference_ids(tree, documents)
    for tokenizer in accepted:
        assert rows(tokenizer.encode(column(documents))) == expected, tokenizer
        halves = [rows(tokenizer.encode(column(documents).slice(*part))) for part in ((0, cut), (cut,))]
        assert list(itertools.chain(*halves)) == expected


@given(text=texts)
def test_special_ids_never_come_from_text(libraries: tuple[dict, list[Tokenizer]], text: str) -> None:
    tree, accepted = libraries
    special = {t["id"] for t in tree["added_tokens"] if t["special"] and t["content"] != "<unk>"}
    for tokenizer in accepted:
        assert not special & set(tokenizer.encode(column([text]))[0].tolist())
