"""Finding a tokenizer, checking its file, and its BOS and EOS."""

import json
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import Decoder
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from support.tokenizer_data import END, add_token, gpt2, llama2, save
from zephon.errors import TokenizerError
from zephon.ops.chat import TokenizeChat
from zephon.ops.tokenize import Tokenize
from zephon.tokenizer.load import _templates_on_hub, portable_tokenizer, read_chat_settings
from zephon.tokenizer.specials import resolve_special_tokens
from zephon.tokenizer.tokenizer import load_tokenizer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def error_of(tokenizer_id: object, **options: str) -> str:
    with pytest.raises(TokenizerError) as info:
        load_tokenizer(tokenizer_id, **options)
    text = str(info.value)
    assert "\n" not in text
    assert len(text) < 600
    return text


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's local cache, without a network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def hub_model(hub: Path, name: str, **files: object) -> None:
    """A model as the hub's local cache holds it."""
    model = hub / f"models--{name.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    save(model / "snapshots" / COMMIT, gpt2(), **files)


@pytest.mark.parametrize(
    ("tokenizer", "shown"),
    [(Tokenizer, "the class Tokenizer, no object"), ({"model": "x" * 9000}, "{'model': 'xxxxx"), (None, "None")],
)
def test_what_is_no_tokenizer_is_shown_in_short(tokenizer: object, shown: str) -> None:
    assert error_of(tokenizer).startswith(f"the tokenizer is {shown}")


def test_a_folder_and_its_tokenizer_json_are_the_same_tokenizer(tmp_path: Path) -> None:
    folder = save(tmp_path / "tok", gpt2())
    assert load_tokenizer(folder).content_hash == load_tokenizer(str(folder / "tokenizer.json")).content_hash


def test_an_existing_path_is_never_taken_for_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "gpt2", gpt2())
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer("gpt2").vocab_size == 1500
    assert "no tokenizer.json" in error_of("org/name")


PATHS = ["./gone", "../gone", "/gone/tok", "a/b/c", "gone.json", "~/gone-tok", "gone/", "c:\\t", Path("gone")]


@pytest.mark.parametrize("name", [*PATHS, "", "  ", "a b", "org/na:me", "name@", "x\0y", "https://example.com"])
def test_what_is_no_hub_name_and_does_not_exist_is_an_error_without_network(
    name: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *a, **k: pytest.fail("asked the hub"))
    assert "does not exist; expected" in error_of(name)


@pytest.mark.frameworks
def test_a_tokenizer_object_is_the_tokenizer_that_it_would_save(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    files = {"tokenizer_config": {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": END}}
    folder = save(tmp_path / "saved", gpt2(), **files)
    fast = transformers.AutoTokenizer.from_pretrained(folder)
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert load_tokenizer(fast).content_hash == load_tokenizer(folder).content_hash
    assert load_tokenizer(plain).content_hash == load_tokenizer(folder / "tokenizer.json").content_hash
    fast.add_special_tokens({"pad_token": "<pad>"})
    copied = portable_tokenizer(fast)
    assert pickle.loads(pickle.dumps(copied)) == copied == portable_tokenizer(fast) != portable_tokenizer(plain)
    assert load_tokenizer(copied).vocab_size == len(fast) == 1502
    assert str(copied).startswith("TokenizersBackend object ")
    assert Tokenize(fast) == Tokenize(fast) and TokenizeChat(plain) != TokenizeChat(fast)


@pytest.mark.parametrize("part", ["pre_tokenizer", "normalizer", "decoder"])
@pytest.mark.parametrize("wraps", [False, pytest.param(True, marks=pytest.mark.frameworks)])
def test_an_object_with_a_part_in_python_is_refused_in_one_sentence(tmp_path: Path, part: str, wraps: bool) -> None:
    folder = save(tmp_path / "saved", gpt2())
    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    if wraps:
        transformers = pytest.importorskip("transformers")
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    own = {"pre_tokenizer": PreTokenizer, "normalizer": Normalizer, "decoder": Decoder}[part].custom(object())
    setattr(getattr(tokenizer, "backend_tokenizer", tokenizer), part, own)
    assert re.search("cannot be saved .*cannot be serialized.*; expected one whose parts", error_of(tokenizer))


@pytest.mark.parametrize("other", [7, None, ["gpt2"], object(), SimpleNamespace(encode=len)])
def test_what_is_no_tokenizer_is_refused_with_what_to_pass(other: object) -> None:
    text = error_of(other)
    assert text.startswith("the tokenizer is ") and "expected a folder with a tokenizer.json" in text
    with pytest.raises(TokenizerError, match="or a fast tokenizer of transformers"):
        TokenizeChat([other])


def test_a_folder_without_tokenizer_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    assert "has no tokenizer.json" in error_of(tmp_path)


def test_a_hub_model_in_the_local_cache_needs_no_network(hub: Path) -> None:
    hub_model(hub, "org/name", tokenizer_config={"bos_token": END, "eos_token": {"content": END}})
    hub_model(hub, "plain")
    ends = {name: (load_tokenizer(name).bos_id, load_tokenizer(name).eos_id) for name in ("org/name", "plain")}
    assert ends == {"org/name": (0, 0), "plain": (None, 0)}


def test_additional_templates_of_a_hub_model_are_those_of_its_commit(
    hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub_model(hub, "org/name", tokenizer_config={"chat_template": "{{ 'config' }}"})
    folder = hub / "models--org--name" / "snapshots" / COMMIT / "additional_chat_templates"
    assert read_chat_settings("org/name")[0] == {"default": "{{ 'config' }}"}
    folder.mkdir()
    for name in ("default", "tool_use"):
        (folder / f"{name}.jinja").write_text(name)
    assert read_chat_settings("org/name")[0] == {"default": "default", "tool_use": "tool_use"}

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    entries = [SimpleNamespace(path=f"{folder.name}/{name}") for name in ("tool_use.jinja", "notes.md")]
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_tree", lambda *_, revision: {COMMIT: entries}[revision])
    assert _templates_on_hub("org/name", folder.parent) == [entry.path for entry in entries]
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_tree", lambda *_, **__: 1 / 0)
    with pytest.raises(TokenizerError, match="cannot list additional_chat_templates of hub model 'org/name'"):
        _templates_on_hub("org/name", folder.parent)


def test_a_hub_model_that_cannot_be_fetched_is_one_sentence(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot fetch tokenizer.json of hub model 'org/other'" in error_of("org/other")

    def fail(*_: object, **__: object) -> str:
        raise OSError("first line\nsecond line")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fail)
    assert "first line second line" in error_of("org/name")


def test_a_network_failure_after_tokenizer_json_does_not_hide_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / COMMIT, gpt2()) / "tokenizer.json"

    def download(repo: str, filename: str, revision: str | None) -> str:
        if filename == "tokenizer.json":
            assert revision == "v1"
            return str(path)
        assert revision == COMMIT  # the same commit as the first file
        raise TimeoutError("timed out")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert "cannot fetch tokenizer_config.json" in error_of("org/name@v1")


DAMAGED = {
    "empty": b"",
    "not JSON": b"{",
    "not UTF-8": b'{"model": "\xff"}',
    "NaN": b'{"model": NaN}',
    "half a surrogate": b'{"model": {"vocab": {"\\ud800": 0}}}',
    "a list": b"[]",
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep objects": b'{"a":' * 5_000 + b"1" + b"}" * 5_000,
}


@pytest.mark.parametrize("data", DAMAGED.values(), ids=DAMAGED.keys())
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_broken_json_is_one_sentence(tmp_path: Path, data: bytes, name: str) -> None:
    save(tmp_path, gpt2())
    (tmp_path / name).write_bytes(data)
    assert name in error_of(tmp_path)


def mutate(path: str, value: object) -> dict:
    tree = gpt2()
    *parents, last = path.split(".")
    at = tree
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at[part]
    if isinstance(at, list):
        at[int(last)] = value
    else:
        at[last] = value
    return tree


deep_sequence: dict = {"type": "NFC"}
for _ in range(200):
    deep_sequence = {"type": "Sequence", "normalizers": [deep_sequence]}

STRUCTURES = {
    "no model": ("model", None),
    "model is a list": ("model", []),
    "no vocabulary": ("model.vocab", None),
    "empty vocabulary": ("model.vocab", {}),
    "id near 2**32": ("model.vocab.a", 2**32 - 1),
    "id beyond 64 bits": ("model.vocab.a", 2**80),
    "id of 2**24": ("model.vocab.a", 2**24),
    "id far above all others": ("model.vocab.a", 2**20),
    "negative id": ("model.vocab.a", -1),
    "added id near 2**32": ("added_tokens.0.id", 2**32 - 1),
    "added id after a gap": ("added_tokens", [{**gpt2()["added_tokens"][0], "content": "<new>", "id": 1600}]),
    "added token without flags": ("added_tokens", [{"id": 0, "content": END}]),
    "added tokens is an object": ("added_tokens", {}),
    "endless added token": ("added_tokens.0.content", "x" * 100_000),
    "merges is a string": ("model.merges", "a b"),
    "merge of a number": ("model.merges.0", 5),
    "merge of unknown tokens": ("model.merges.0", ["☃", "☃"]),
    "model of unknown type": ("model.type", "Oracle"),
    "random dropout": ("model.dropout", 0.1),
    "dropout of text": ("model.dropout", "x"),
    "merges without the prefix": ("model.continuing_subword_prefix", "é"),
    "normalizer is a list": ("normalizer", []),
    "unknown normalizer": ("normalizer", {"type": "Magic"}),
    "endless normalizer string": ("normalizer", {"type": "Prepend", "prepend": "x" * 1_000_000}),
    "nested normalizers": ("normalizer", deep_sequence),
    "broken regex": (
        "pre_tokenizer",
        {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False},
    ),
}


@pytest.mark.parametrize(("path", "value"), STRUCTURES.values(), ids=STRUCTURES.keys())
def test_a_damaged_structure_is_one_sentence(tmp_path: Path, path: str, value: object) -> None:
    assert str(tmp_path) in error_of(save(tmp_path, mutate(path, value)))


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(200 << 20)
    assert "128 MiB" in error_of(tmp_path)


def test_small_gaps_in_the_vocabulary_are_left_to_tokenizers(tmp_path: Path) -> None:
    tree = gpt2()
    last = max(tree["model"]["vocab"], key=tree["model"]["vocab"].get)
    tree["model"]["vocab"][last] = 1700
    tokenizer = load_tokenizer(save(tmp_path, tree))
    assert (tokenizer.backend, tokenizer.vocab_size) == ("tokenizers", 1701)


def test_bos_and_eos_come_from_the_config_files(tmp_path: Path) -> None:
    config = {"bos_token": None, "eos_token": {"content": "</s>"}}
    named = load_tokenizer(save(tmp_path / "a", llama2(), tokenizer_config=config))
    assert (named.bos_token, named.bos_id, named.eos_token, named.eos_id) == (None, None, "</s>", 2)
    mapped = load_tokenizer(
        save(tmp_path / "b", llama2(), special_tokens_map={"bos_token": "</s>", "eos_token": "<s>"})
    )
    assert (mapped.bos_id, mapped.eos_id) == (2, 1)
    new = load_tokenizer(save(tmp_path / "c", llama2(), tokenizer_config={"eos_token": "<nowhere>"}))
    assert (new.bos_id, new.eos_id, new.vocab_size) == (None, 1500, 1501)


def test_bos_and_eos_of_a_lone_file_come_from_its_post_processor_or_well_known_names(tmp_path: Path) -> None:
    assert (load_tokenizer(save(tmp_path / "a", llama2())).bos_id, load_tokenizer(tmp_path / "a").eos_id) == (1, 2)
    lone = load_tokenizer(save(tmp_path / "b", gpt2()))
    assert (lone.bos_id, lone.eos_token) == (None, END)
    tree = add_token(add_token(gpt2(), "[GO]", special=True), "[STOP]", special=True)
    pieces = [{"SpecialToken": {"id": "[GO]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tree["post_processor"] = {"type": "TemplateProcessing", "single": pieces, "pair": [], "special_tokens": {}}
    template = load_tokenizer(save(tmp_path / "c", tree))
    assert (template.bos_token, template.eos_token) == ("[GO]", END)


def test_the_content_hash_is_of_what_decides_ids(tmp_path: Path) -> None:
    tree = gpt2()
    first = load_tokenizer(save(tmp_path / "a", tree)).content_hash
    tree["model"]["merges"] = [" ".join(pair) for pair in tree["model"]["merges"]]
    tree["decoder"] = None
    tree["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(dict(reversed(tree.items())), indent=3))
    assert load_tokenizer(tmp_path / "tokenizer.json").content_hash == first
    other_ends = load_tokenizer(save(tmp_path / "b", gpt2(), tokenizer_config={"bos_token": END, "eos_token": END}))
    fewer_merges = gpt2()
    fewer_merges["model"]["merges"].pop()
    assert len({first, other_ends.content_hash, load_tokenizer(save(tmp_path / "c", fewer_merges)).content_hash}) == 3


@pytest.mark.parametrize(
    ("policy", "ends", "expected"),
    [
        ("auto", (1, 2), (1, 2)),
        ("auto", (2, 2), (None, 2)),
        ("auto", (None, 2), (None, 2)),
        ("bos_eos", (1, 2), (1, 2)),
        ("bos_eos", (2, 2), (2, 2)),
        ("bos", (1, None), (1, None)),
        ("eos", (1, 2), (None, 2)),
        ("none", (1, 2), (None, None)),
        ("none", (None, None), (None, None)),
    ],
)
def test_special_token_policies(policy: str, ends: tuple, expected: tuple) -> None:
    assert resolve_special_tokens(policy, *ends) == expected


@pytest.mark.parametrize(
    ("policy", "ends", "missing"),
    [
        ("auto", (1, None), "EOS"),
        ("eos", (None, None), "EOS"),
        ("bos", (None, 2), "BOS"),
        ("bos_eos", (None, 2), "BOS"),
    ],
)
def test_a_policy_that_needs_a_missing_token_is_refused(policy: str, ends: tuple, missing: str) -> None:
    with pytest.raises(TokenizerError, match=f"needs {missing}"):
        resolve_special_tokens(policy, *ends)


def test_an_unknown_backend_is_refused(tmp_path: Path) -> None:
    assert "'fastokens'" in error_of(tmp_path, backend="tiktoken")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_pointer_of_git_lfs_is_refused_in_every_file_of_a_tokenizer(tmp_path, name):
    save(tmp_path, gpt2())
    (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(TokenizerError, match=f"{name}' is a pointer of Git LFS.*git lfs pull"):
        read_chat_settings(tmp_path)
