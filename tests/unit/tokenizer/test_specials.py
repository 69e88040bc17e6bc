"""Tokens that only the files beside tokenizer.json declare: those of AutoTokenizer in transformers, or a refusal."""

import functools
import itertools
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from support.tokenizer_data import END, FAMILIES, add_token, gpt2, llama2, save
from zephon.errors import PipelineError, TokenizerError, ZephonError
from zephon.ops.chat import TokenizeChat
from zephon.ops.chat_template import chat_templates
from zephon.ops.rows import Rows
from zephon.tokenizer.definition import read_definition
from zephon.tokenizer.load import find_tokenizer
from zephon.tokenizer.specials import declared_tokens
from zephon.tokenizer.tokenizer import load_tokenizer

FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
NAMES = ["<|im_start|>", "<|im_end|>", "<pad>", "<img>", "the"]
TEXT = f"a<|im_start|>b <|im_end|>\n<pad><img> the {END}"


CHATML = """{% for m in messages %}<|im_start|>{{ m.role + (bos_token or '') + m.content }}<|im_end|>{% endfor %}
{{ eos_token or '' }}"""
TALK = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi you"}]


def entry(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": content, **plain, **flags}


def typed(content: str) -> dict[str, Any]:
    return {**entry(content), "__type": "AddedToken"}


def assert_as_in_transformers(folder: Path) -> None:
    """Ids of tokens, of text that spells them, and of a template with them."""
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    files = find_tokenizer(folder)
    ours = read_definition(files)
    library = Tokenizer.from_str(ours.json)
    assert library.get_vocab() == theirs.get_vocab()
    assert ours.vocab_size == len(theirs)
    assert library.encode(TEXT, add_special_tokens=False).ids == theirs.encode(TEXT, add_special_tokens=False)
    library.encode_special_tokens = True
    special = {token.content for token in theirs.added_tokens_decoder.values() if token.special}
    if special == {token["content"] for token in ours.tree()["added_tokens"] if token["special"]}:
        # Else a word of tokenizer.json has a role, which here makes it a token that text never becomes.
        split = theirs.encode(TEXT, add_special_tokens=False, split_special_tokens=True)
        assert library.encode(TEXT, add_special_tokens=False).ids == split
    texts = {name: token for name, token in theirs.special_tokens_map.items() if token}
    assert declared_tokens(files.config).texts == texts
    for role in ("bos_token", "eos_token"):
        if role in texts:
            assert getattr(ours, role) == texts[role]
            assert getattr(ours, role.replace("token", "id")) == theirs.convert_tokens_to_ids(texts[role])


DECLARED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # in tokenizer_config.json, in other files
    "roles": ({"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}, {}),
    "roles with flags": ({"eos_token": typed("</s>")}, {}),
    "a token of the vocabulary": ({"eos_token": "the", "pad_token": "q"}, {}),
    "empty": ({"bos_token": "", "eos_token": None}, {}),
    "decoder": ({"added_tokens_decoder": {"1501": entry("<img>"), "1500": entry("<|im_start|>")}}, {}),
    "decoder, words": ({"added_tokens_decoder": {"1500": entry("<img>", special=False, normalized=True)}}, {}),
    "decoder, other flags": ({"added_tokens_decoder": {"0": entry(END, lstrip=True)}}, {}),
    "decoder, roles": ({"added_tokens_decoder": {"1500": entry("<pad>")}, "pad_token": "<pad>", "eos_token": "zz"}, {}),
    "additional": ({"additional_special_tokens": ["<|im_start|>", typed("<|im_end|>")]}, {}),
    "extra": ({"extra_special_tokens": ["<|im_start|>"]}, {}),
    "extra by name": ({"extra_special_tokens": {"image_token": "<img>"}, "additional_special_tokens": ["<pad>"]}, {}),
    "none extra": ({"extra_special_tokens": {}, "additional_special_tokens": ["<pad>"]}, {}),
    "a role of its own": ({"image_token": "<img>", "pad_token": "<pad>"}, {}),
    "added_tokens.json": ({"pad_token": "<pad>"}, {"added_tokens": {"<img>": 1501, "<pad>": 1500}}),
    "map": ({}, {"special_tokens_map": {"bos_token": entry("<|im_start|>"), "eos_token": END}}),
    "map before config": ({"eos_token": "</s>"}, {"special_tokens_map": {"eos_token": END}}),
    "no map beside a decoder": (
        {"eos_token": END, "added_tokens_decoder": {}},
        {"special_tokens_map": {"eos_token": "</s>"}, "added_tokens": {"<img>": 1500}},
    ),
    "additional of the map": ({"eos_token": END}, {"special_tokens_map": {"additional_special_tokens": ["<img>"]}}),
    "all": (
        {"eos_token": "<|im_end|>", "extra_special_tokens": ["<img>"], "image_token": "<img>"},
        {"special_tokens_map": {"pad_token": "<pad>"}, "added_tokens": {"<tool>": 1500, "<img>": 1501}},
    ),
}  # fmt: skip


@pytest.mark.frameworks
@pytest.mark.parametrize(("config", "files"), DECLARED.values(), ids=DECLARED)
def test_declared_tokens_are_those_of_transformers(tmp_path: Path, config: dict, files: dict) -> None:
    folder = save(tmp_path, gpt2(), tokenizer_config=FAST | {"bos_token": None, "eos_token": None} | config, **files)
    assert_as_in_transformers(folder)
    encoder = TokenizeChat(folder, "messages", chat_template=CHATML).encoder(load_tokenizer(folder), None, None)
    ids = encoder.encode(Rows(pa.table({"messages": [TALK]}), np.arange(1), False)).tokens
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    assert ids.tolist() == theirs.apply_chat_template(TALK, chat_template=CHATML, return_dict=True)["input_ids"]


LEFT_OUT: dict[str, tuple[dict[str, Any], dict[str, Any] | None]] = {
    # tokenizer_config.json, config.json
    "both": (FAST, None),
    "BOS": (FAST | {"eos_token": "</s>"}, None),
    "EOS": (FAST | {"bos_token": "</s>"}, None),
    "class too": ({"eos_token": "</s>"}, None),
    "saved": (FAST | {"added_tokens_decoder": {}}, None),
    "all but a template": ({"chat_template": CHATML}, None),
    "of a class": ({"tokenizer_class": "GPT2Tokenizer", "eos_token": END}, None),
    "of a kind of model": ({"model_max_length": 1024}, {"model_type": "gpt2"}),
    "some, of a kind of model": ({"bos_token": "<s>"}, {"model_type": "gpt2"}),
}


@pytest.mark.frameworks
@pytest.mark.parametrize(("config", "model"), LEFT_OUT.values(), ids=LEFT_OUT)
@pytest.mark.parametrize("name", ["<s>", "plain"])
def test_what_no_file_declares_is_none_as_in_transformers_or_refused(
    tmp_path: Path, config: dict, model: dict | None, name: str
) -> None:
    tree = gpt2()
    add_token(tree, name, special=True)
    files = {} if model is None else {"config": model}
    folder = save(tmp_path, tree, tokenizer_config=config, **files)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    for source in (folder, theirs):
        try:
            ours = read_definition(find_tokenizer(source))
        except TokenizerError as error:
            assert re.search("is left out in tokenizer_config.json, where |is declared without an id", str(error))
            assert source is folder
            assert theirs.bos_token or theirs.eos_token
        else:
            assert ours.eos_token == theirs.eos_token
            # A BOS that is EOS is put nowhere.
            assert ours.bos_token in (
                theirs.bos_token,
                None if theirs.bos_token == ours.eos_token else theirs.bos_token,
            )


ALMOST: dict[str, tuple[dict[str, Any], str]] = {
    "split": ({"split_special_tokens": True}, "split_special_tokens in tokenizer_config.json of .* is true"),
    "whole words": ({"eos_token": {**typed("<e>"), "single_word": True}}, '"<e>" .* is single_word, and transformers'),
    "after tokens of a class": (
        {"tokenizer_class": "GPTNeoXTokenizerFast", "eos_token": END, "image_token": "<e>"},
        "'<e>' is declared without an id beside GPTNeoXTokenizerFast",
    ),
    "role and role": ({"image_token": {**typed("<e>"), "lstrip": True}}, "'<e>' is declared twice, with different"),
    "role and list": (
        {"additional_special_tokens": [{**typed("<e>"), "rstrip": True}]}, "'<e>' is declared twice, with different"
    ),
}  # fmt: skip


@pytest.mark.frameworks
@pytest.mark.parametrize(("config", "message"), ALMOST.values(), ids=ALMOST)
def test_tokens_that_transformers_finds_elsewhere_are_refused_in_templates(
    tmp_path: Path, config: dict, message: str
) -> None:
    template = "{% for m in messages %}x<e>y {{ m.content }} <e> {% endfor %}"
    plain = FAST | {"bos_token": None, "eos_token": "<e>"}
    ids = []
    for name, each in (("plain", plain), ("other", plain | config)):
        folder = save(tmp_path / name, gpt2(), tokenizer_config=each)
        theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
        ids.append(theirs.apply_chat_template(TALK, chat_template=template, return_dict=True)["input_ids"])
    assert ids[0] != ids[1]
    with pytest.raises(ZephonError, match=message):
        TokenizeChat(folder, "messages", chat_template=template).encoder(load_tokenizer(folder), None, None)


@functools.cache
def tree_with(names: tuple[str, ...]) -> dict[str, Any]:
    tree = llama2()
    for name in names:
        add_token(tree, name, special=name != "the")
    return tree


def generated_folder(folder: Path, rng: random.Random) -> Path:
    """A tokenizer some of whose tokens are declared anywhere but in tokenizer.json."""
    inside = tuple(rng.sample(NAMES, rng.randrange(3)))
    outside = [name for name in NAMES if name not in inside]
    ids = {name: 1500 + n for n, name in enumerate([*inside, *outside])}
    some = outside[: rng.randrange(len(outside))]
    config: dict[str, Any] = dict(FAST)
    special_map: dict[str, Any] = {}
    files = {"tokenizer_config": config, "special_tokens_map": special_map}
    if rng.random() < 0.5:
        config["added_tokens_decoder"] = {
            str(ids[name] + (rng.random() < 0.1)): entry(name, special=rng.random() < 0.7) for name in some
        }
    elif rng.random() < 0.5:
        files["added_tokens"] = {name: ids[name] for name in rng.sample(some, len(some))}
    for role in rng.sample(["bos_token", "eos_token", "pad_token", "image_token"], rng.randrange(4)):
        config[role] = rng.choice([*NAMES, "</s>", typed("<s>")])
    if rng.random() < 0.3:
        special_map["eos_token"] = rng.choice([*NAMES, entry("</s>")])
    for where, key in itertools.product((config, special_map), ("additional_special_tokens", "extra_special_tokens")):
        if rng.random() < 0.3:
            where[key] = rng.sample(NAMES, rng.randrange(3))
    return save(folder, tree_with(inside), **files)


@pytest.mark.frameworks
@pytest.mark.parametrize("count", [20, pytest.param(300, marks=pytest.mark.deep)])
def test_generated_folders_are_those_of_transformers_or_refused(tmp_path: Path, count: int) -> None:
    rng, refused = random.Random(0), 0
    for n in range(count):
        folder = generated_folder(tmp_path / str(n), rng)
        try:
            read_definition(find_tokenizer(folder))
        except TokenizerError as error:
            assert "is declared " in str(error), str(error)
            refused += 1
        else:
            assert_as_in_transformers(folder)
    assert refused < count / 3


REFUSED = {
    "other id": (
        {"added_tokens_decoder": {"1600": entry("<img>")}},
        "token '<img>' is declared with id 1600, and has, or would get, 1500",
    ),
    "id of another": ({"added_tokens_decoder": {"5": entry("<img>")}}, "declared with id 5"),
    "list that is overruled": (
        {"extra_special_tokens": ["<img>"], "additional_special_tokens": ["<pad>"]},
        "'<pad>' is declared in a list that another list overrules",
    ),
    "number": ({"bos_token": 5}, "bos_token is [5]; expected tokens (Expected `str | object | null`, got `int`"),
    "list of numbers": ({"extra_special_tokens": [5]}, "extra_special_tokens is [5]; expected tokens"),
    "no list": ({"additional_special_tokens": "<x>"}, "additional_special_tokens is '<x>'; expected tokens"),
    "no object": ({"added_tokens_decoder": ["<x>"]}, "added_tokens_decoder is ['<x>']; expected tokens"),
    "no content": ({"added_tokens_decoder": {"1500": {}}}, "missing required field `content`"),
}


@pytest.mark.parametrize(("config", "message"), REFUSED.values(), ids=REFUSED)
def test_a_token_that_cannot_be_taken_is_refused_in_one_sentence(tmp_path: Path, config: dict, message: str) -> None:
    with pytest.raises(TokenizerError) as info:
        load_tokenizer(save(tmp_path, gpt2(), tokenizer_config=config))
    assert message in str(info.value) and "\n" not in str(info.value)


@pytest.mark.frameworks
def test_a_role_that_a_class_of_transformers_may_have_by_default_is_asked_for(tmp_path: Path) -> None:
    plain = save(tmp_path / "plain", gpt2(), tokenizer_config={"tokenizer_class": "GPT2Tokenizer", "bos_token": END})
    with pytest.raises(PipelineError, match="the chat template uses eos_token, which no file of the tokenizer"):
        chat_templates(plain, CHATML, None)
    theirs = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(plain)
    theirs.save_pretrained(tmp_path / "saved")
    for source in (theirs, tmp_path / "saved"):
        template, _ = chat_templates(source, CHATML, None)
        assert template.render(TALK)[0] == theirs.apply_chat_template(TALK, chat_template=CHATML, tokenize=False)
        assert template.tokens["eos_token"] == END
    chat_templates(plain, "{{ bos_token }}", None)


@pytest.mark.parametrize(("family", "refused"), [("llama2", True), ("gemma", False)])
def test_a_special_token_that_a_normalizer_hides_is_refused(tmp_path: Path, family: str, refused: bool) -> None:
    tree = FAMILIES[family]()
    for token in tree["added_tokens"]:
        token["normalized"] = True
    folder = save(tmp_path, tree, tokenizer_config={"bos_token": "<s>", "eos_token": "</s>"})
    for template in ("{{ bos_token }}", "<s>{{ messages }}"):
        operator = TokenizeChat(folder, chat_template=template)
        if refused:
            with pytest.raises(PipelineError, match=r'"<s>" .* is normalized, and transformers finds it in'):
                operator.encoder(load_tokenizer(folder), None, None)
        else:
            operator.encoder(load_tokenizer(folder), None, None)


def test_every_library_finds_declared_tokens_and_text_never_becomes_one(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "added_tokens_decoder": {"1500": entry("<word>", special=False)}}
    tokenizer = load_tokenizer(save(tmp_path, gpt2(), tokenizer_config=config))
    assert (tokenizer.bos_id, tokenizer.vocab_size, tokenizer.backend) == (1501, 1502, "fastokens")
    assert [token.content for token in tokenizer.special_tokens] == [END, "<s>"]


TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
NAMED = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": "tools" + CHATML}]
TEMPLATES = {
    "text in the config": ({"chat_template": CHATML}, {}),
    "list in the config": ({"chat_template": NAMED}, {}),
    "file": ({}, {"chat_template.jinja": CHATML}),
    "files": ({}, {"chat_template.jinja": CHATML, "additional_chat_templates/tool_use.jinja": "more" + CHATML}),
    "files before the config": ({"chat_template": NAMED}, {"chat_template.jinja": "file" + CHATML}),
    "default among others": ({}, {f"additional_chat_templates/{n}.jinja": n + CHATML for n in ("default", "rag")}),
    "no default": ({"chat_template": CHATML}, {"additional_chat_templates/tool_use.jinja": CHATML}),
}


@pytest.mark.frameworks
@pytest.mark.parametrize(("config", "files"), TEMPLATES.values(), ids=TEMPLATES)
def test_chat_templates_are_those_of_transformers_or_refused(tmp_path: Path, config: dict, files: dict) -> None:
    transformers = pytest.importorskip("transformers")
    config = FAST | {"bos_token": "<s>", "eos_token": None, "additional_special_tokens": NAMES[:2]} | config
    folder = save(tmp_path, gpt2(), tokenizer_config=config)
    (folder / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (folder / name).write_text(text)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    try:
        wanted = [theirs.apply_chat_template(TALK, tools=tools, tokenize=False) for tools in (None, TOOLS)]
    except ValueError:
        with pytest.raises(ZephonError, match=r'no default .*, only tool_use; pass chat_template, such as "tool_use"'):
            chat_templates(folder, None, None)
        return
    for source in (folder, theirs):
        templates = chat_templates(source, None, None)
        pairs = zip(templates, (None, TOOLS), strict=True)
        assert [template.render(TALK, tools)[0] for template, tools in pairs] == wanted
