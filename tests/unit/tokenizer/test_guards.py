"""Which library may run which tokenizer, and that whatever runs gives the ids of `tokenizers`."""

import itertools
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from support.tokenizer_data import (
    END,
    FAMILIES,
    LLAMA_3,
    SPACE_TO_METASPACE,
    Tree,
    add_token,
    byte_level_step,
    column,
    families,
    gpt2,
    llama2,
    llama3,
    loaded,
    metaspace,
    qwen,
    reference_ids,
    rows,
    save,
    sources,
    split_step,
    split_then,
)
from zephon.errors import TokenizerError
from zephon.tokenizer import backends
from zephon.tokenizer.choice import choose
from zephon.tokenizer.guards import byte_alphabet, refusal, regex_refusal
from zephon.tokenizer.tokenizer import load_tokenizer

CHOICE = {
    "gpt2": ("fastokens", "gigatoken"),
    "llama3": ("fastokens", "gigatoken"),
    "o200k": ("fastokens", "gigatoken"),
    "qwen": ("fastokens",),
    "starcoder": ("fastokens",),
    "llama2": ("fastokens", "gigatoken"),
    "gemma": ("fastokens", "gigatoken"),
    "metaspace": ("gigatoken",),
}

TEXTS = [
    *(source[:4000] for source in sources()),
    "Hello, world! It's 12345 o'clock; I'LL we've 2024-01-02\n\n   \t x\r\n",
    "tool TOOL <tool></tool> <tool>x y<tool> a<tool>b e\u0301 é \u212b \u00a0\u3000 1234567 ١٢٣ 今天天气 👩‍👧 ﬁ ½",
    f"{END}<s></s><unk> <|im_start|>",
    "",
    " ",
]


def gap_in_ids(tree: Tree) -> Tree:
    vocab = tree["model"]["vocab"]
    vocab[max(vocab, key=vocab.get)] += 100
    return tree


def without_byte(tree: Tree) -> Tree:
    model = tree["model"]
    model["merges"] = [pair for pair in model["merges"] if "Ã" not in "".join(pair)]
    tokens = sorted((token for token in model["vocab"] if "Ã" not in token), key=model["vocab"].get)
    model["vocab"] = {token: i for i, token in enumerate(tokens)}
    return tree


def changed(tree: Tree, section: str, value: object) -> Tree:
    return {**tree, section: value}


def pre_tokenized(*steps: Tree) -> Tree:
    return changed(llama3(), "pre_tokenizer", split_then(*steps))


def padded(tree: Tree) -> Tree:
    tokenizer = Tokenizer.from_str(json.dumps(tree))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=9, pad_token="x")
    return json.loads(tokenizer.to_str())


def with_model(tree: Tree, **keys: object) -> Tree:
    return {**tree, "model": {**tree["model"], **keys}}


# What fastokens or gigatoken, or both, accept and encode otherwise, or were not tried on enough text.
ODD: dict[str, Callable[[], Tree]] = {
    "split without ByteLevel": lambda: changed(llama3(), "pre_tokenizer", split_step()),
    "ByteLevel with add_prefix_space": lambda: pre_tokenized(split_step(), byte_level_step(add_prefix_space=True)),
    "ByteLevel that splits again": lambda: pre_tokenized(split_step(), byte_level_step(use_regex=True)),
    "split contiguous": lambda: pre_tokenized(split_step(behavior="Contiguous"), byte_level_step()),
    "split removed": lambda: pre_tokenized(split_step(behavior="Removed"), byte_level_step()),
    "extra split": lambda: pre_tokenized(
        split_step(), {"type": "Punctuation", "behavior": "Isolated"}, byte_level_step()
    ),
    "ByteLevel that does not split": lambda: changed(gpt2(), "pre_tokenizer", byte_level_step()),
    "no pre_tokenizer": lambda: changed(gpt2(), "pre_tokenizer", None),
    "possessive repeat": lambda: llama3(LLAMA_3.replace("{1,3}", "{1,3}+")),
    "end of line": lambda: llama3(r"\s+$|\S+|\s+"),
    "hexadecimal digits": lambda: llama3(r"\h+|\H+"),
    "end_of_word_suffix": lambda: with_model(gpt2(), end_of_word_suffix="</w>"),
    "full dropout": lambda: with_model(gpt2(), dropout=1.0),
    "unknown token": lambda: with_model(gpt2(), unk_token=END),
    "ids with a gap": lambda: gap_in_ids(gpt2()),
    "byte missing": lambda: without_byte(gpt2()),
    "merges repeated": lambda: with_model(gpt2(), merges=[gpt2()["model"]["merges"][300], *gpt2()["model"]["merges"]]),
    "NFKC": lambda: changed(gpt2(), "normalizer", {"type": "NFKC"}),
    "Lowercase": lambda: changed(gpt2(), "normalizer", {"type": "Lowercase"}),
    "single_word added token": lambda: add_token(llama3(), "tool", single_word=True),
    "added token matched after NFC": lambda: add_token(qwen(), "<tool>", normalized=True),
    "added token not in NFC": lambda: add_token(qwen(), "e\u0301x"),
    "byte token missing": lambda: with_model(
        llama2(), vocab={k: v for k, v in llama2()["model"]["vocab"].items() if k != "<0xE4>"}
    ),
    "no byte_fallback": lambda: with_model(metaspace(), byte_fallback=False),
    "Metaspace after NFKC": lambda: changed(metaspace(), "normalizer", {"type": "NFKC"}),
    "Prepend of another character": lambda: changed(
        llama2(),
        "normalizer",
        {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "_"}, SPACE_TO_METASPACE]},
    ),
    "model other than BPE": lambda: {
        **gpt2(),
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {"tool": 0, "Hello": 1, "<unk>": 2, END: 3}, "unk_token": "<unk>"},
        "added_tokens": [],
    },
}

# Configurations on which a library is right although another one, or a cousin of the configuration, is not.
SOUND: dict[str, tuple[Callable[[], Tree], str]] = {
    "prefix space": (
        lambda: changed(gpt2(), "pre_tokenizer", byte_level_step(use_regex=True, add_prefix_space=True)),
        "fastokens",
    ),
    "inverted removal": (
        lambda: pre_tokenized(split_step(behavior="Removed", invert=True), byte_level_step()),
        "fastokens",
    ),
    "ignore_merges": (lambda: with_model(llama3(), ignore_merges=True), "fastokens"),
    "added tokens": (lambda: add_token(add_token(llama3(), "<tool>"), "</tool>"), "fastokens"),
    "added token that eats spaces": (lambda: add_token(llama3(), "<tool>", lstrip=True, rstrip=True), "fastokens"),
    "added token that spells a special one": (lambda: add_token(llama3(), "endoftext|>x"), "fastokens"),
    "added tokens and Metaspace": (lambda: add_token(metaspace(), "<tool>"), "gigatoken"),
    "runs of spaces": (lambda: add_token(add_token(llama2(), "▁" * 40), "\n" * 40), "fastokens"),
    "Metaspace always": (lambda: metaspace("always", split=True), "gigatoken"),
    "Metaspace never": (lambda: metaspace("never"), "gigatoken"),
    "truncation and padding sections": (lambda: padded(gpt2()), "fastokens"),
}


def some(configurations: dict[str, object], *everyday: str) -> list[object]:
    return [name if name in everyday else pytest.param(name, marks=pytest.mark.deep) for name in configurations]


@pytest.mark.parametrize("family", families())
def test_the_first_fit_library_runs_and_agrees_with_tokenizers(family: str) -> None:
    assert loaded(family).backend == CHOICE[family][0]
    for backend in (*CHOICE[family], "tokenizers"):
        tokenizer = loaded(family, backend)
        assert tokenizer.backend == backend
        assert rows(tokenizer.encode(column(TEXTS))) == reference_ids(FAMILIES[family](), TEXTS)


def test_only_configurations_known_to_be_right_are_trusted() -> None:
    for name, build in ODD.items():
        assert refusal(build(), "fastokens") and refusal(build(), "gigatoken"), name
    for name, (build, backend) in SOUND.items():
        assert refusal({"normalizer": None, **build()}, backend) is None, name


@pytest.mark.parametrize("odd", some(ODD, "split contiguous", "ids with a gap", "model other than BPE"))
def test_odd_configurations_fall_through_to_a_library_that_is_right(odd: str, tmp_path: Path) -> None:
    tree = ODD[odd]()
    tokenizer = load_tokenizer(save(tmp_path, tree))
    assert tokenizer.backend == "tokenizers"
    assert rows(tokenizer.encode(column(TEXTS))) == reference_ids(tree, TEXTS)


@pytest.mark.parametrize("name", some(SOUND, "added tokens and Metaspace", "truncation and padding sections"))
def test_sound_configurations_stay_fast(name: str, tmp_path: Path) -> None:
    build, backend = SOUND[name]
    tokenizer = load_tokenizer(save(tmp_path, build()))
    assert tokenizer.backend == backend
    assert rows(tokenizer.encode(column(TEXTS))) == reference_ids(build(), TEXTS)


def test_a_library_insisted_on_that_is_not_fit_is_an_error() -> None:
    for family, backend, reason in (("metaspace", "fastokens", "Metaspace"), ("qwen", "gigatoken", "NFC")):
        with pytest.raises(TokenizerError, match=rf"'{backend}' is not fit .* {reason}"):
            loaded(family, backend)


def test_a_difference_on_the_probes_alone_is_enough(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Engines disagree whether this character of old Unicode versions is white space; the structure looks harmless.
    tree = llama3(r"\p{L}+|\p{N}|[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    with caplog.at_level(logging.INFO, "zephon.tokenizer"):
        tokenizer = load_tokenizer(save(tmp_path, tree))
    assert tokenizer.backend == "tokenizers"
    (message,) = caplog.messages
    assert "probe texts differ" in message
    assert rows(tokenizer.encode(column(["a \u180e b"]))) == reference_ids(tree, ["a \u180e b"])


def test_a_missing_library_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, gpt2())
    for missing, remaining in (("fastokens", "gigatoken"), ("gigatoken.gigatoken_rs", "tokenizers")):
        choose.cache_clear()
        backends._loaded.cache_clear()
        monkeypatch.setitem(sys.modules, missing, None)
        assert load_tokenizer(tmp_path, index_dir=tmp_path / "index").backend == remaining
    # A library that does not load may be mended by the next start, so the choice without it is not kept.
    monkeypatch.undo()
    choose.cache_clear()
    assert load_tokenizer(tmp_path, index_dir=tmp_path / "index").backend == "fastokens"
    monkeypatch.setitem(sys.modules, "fastokens", None)
    choose.cache_clear()
    backends._loaded.cache_clear()
    with pytest.raises(TokenizerError, match="'fastokens' is not fit"):
        load_tokenizer(tmp_path, backend="fastokens")
    choose.cache_clear()


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("added", ["x>", *(pytest.param(each, marks=pytest.mark.deep) for each in ("<|end", "><"))])
def test_text_that_spells_a_special_token_stays_text(family: str, added: str, tmp_path: Path) -> None:
    tree = add_token(FAMILIES[family](), "<|sep|>", special=True)
    tree = add_token(tree, added)  # overlaps with special tokens: the spelling of one must not hide the other
    special = {token["content"]: token["id"] for token in tree["added_tokens"] if token["special"]}
    texts = [
        f"{a}{middle}{b}" for a, b in itertools.product([*special, "x", ""], repeat=2) for middle in ("", " ", added)
    ]
    folder = save(tmp_path, tree)
    expected = reference_ids(tree, texts)
    for backend in ("auto", "tokenizers"):
        ids = rows(load_tokenizer(folder, backend=backend).encode(column(texts)))
        assert ids == expected
        assert not set(special.values()) & set(itertools.chain(*ids))


def test_a_token_with_a_role_is_special_even_if_the_file_forgot(tmp_path: Path) -> None:
    tree = add_token(gpt2(), "<stop>")
    stop = tree["added_tokens"][-1]["id"]
    for name, config in {
        "role": {"eos_token": "<stop>"},
        "list": {"additional_special_tokens": [{"content": "<stop>"}]},
        "decoder": {"added_tokens_decoder": {str(stop): {"content": "<stop>", "special": True}}},
    }.items():
        for backend in ("fastokens", "gigatoken", "tokenizers"):
            tokenizer = load_tokenizer(save(tmp_path / name, tree, tokenizer_config=config), backend=backend)
            assert stop not in tokenizer.encode(column(["a <stop> b"]))[0]


@pytest.mark.parametrize("model", ["Unigram", "WordLevel"])
def test_models_that_look_words_up_do_not_find_special_tokens_in_text(model: str, tmp_path: Path) -> None:
    words = ["<unk>", "</s>", "▁hello", "▁", *"</s>helo"]
    words = list(dict.fromkeys(words))
    vocabularies = {
        "Unigram": {"vocab": [[word, 0.0 if i < 2 else -5.0] for i, word in enumerate(words)], "unk_id": 0},
        "WordLevel": {"vocab": {word: i for i, word in enumerate(words)}, "unk_token": "<unk>"},
    }
    tree = add_token(metaspace(split=True), "<more>")
    tree["model"] = {"type": model, **vocabularies[model]}
    entry = tree["added_tokens"][0]
    tree["added_tokens"] = [
        entry | {"id": 0, "content": "<unk>"},
        entry | {"id": 1, "content": "</s>"},
        entry | {"id": len(words), "content": "<more>", "special": False},
    ]
    tokenizer = load_tokenizer(save(tmp_path, tree))
    assert (tokenizer.backend, tokenizer.eos_id) == ("tokenizers", 1)
    texts = ["hello</s>", "</s>", "hello </s> hello", "hello<more>"]
    ids = rows(tokenizer.encode(column(texts)))
    assert not any(1 in row for row in ids)
    assert ids[-1] == reference_ids(tree, texts)[-1]
    assert ids[-1][-1] == len(words)
    assert tokenizer.decode([2, 1]).endswith("hello</s>" if model == "Unigram" else "</s>")


def test_a_tokenizer_in_which_text_can_end_a_document_is_refused(tmp_path: Path) -> None:
    tree = with_model(gpt2(), ignore_merges=True)
    tree["pre_tokenizer"] = split_then({"type": "WhitespaceSplit"}, byte_level_step())
    with pytest.raises(TokenizerError, match="a document could end itself"):
        load_tokenizer(save(tmp_path, tree))


def test_the_byte_alphabet_is_that_of_gpt2() -> None:
    assert sorted(byte_alphabet()) == sorted(pre_tokenizers.ByteLevel.alphabet())


def test_plain_regexes_are_trusted() -> None:
    wild = r"\p{N}{1,3}|[^\r\n\p{L}]?+\p{L}++| ?[^\s]+[\r\n/]*|(?:a|b)*?(?<!x)"
    assert [regex_refusal(regex) for regex in (LLAMA_3, wild, "[一-龥]+", r"[\]^$.]")] == [None] * 4


READ_DIFFERENTLY = [
    r"\d{1,3}+", "a{,3}", "^a", "a$", "a.b", r"\h", r"\b", r"\x41", r"[[:alpha:]]", "[a[b]]", "[a&&b]", "[]a]", "[^]a]",
    "(?P<n>a)", "(?m)a", "\\",
]  # fmt: skip


@pytest.mark.parametrize("regex", READ_DIFFERENTLY)
def test_regexes_that_engines_read_differently_are_not_trusted(regex: str) -> None:
    assert regex_refusal(regex)
