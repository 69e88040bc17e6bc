"""`zephon inspect`: what it tells is true of the files, and the recipe that it prints runs."""

import gzip
import io
import json
import re
import tarfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from support.chat_data import CHATML, write_chat_tokenizer
from support.vision_data import file_of, image_tokenizer, picture
from zephon.cli.guess import guess
from zephon.errors import DataError

TEXTS = [f"Row {n} says " + "some words " * (n * 7 % 60) for n in range(500)]
TALKS = [
    [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"It is {n}. " * 5}]
    for n in range(60)
]
VISION = "patch_size=8,merge_size=2,min_pixels=256,max_pixels=4096"


def lines_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_tar(path, samples):
    with tarfile.open(path, "w") as archive:
        for n, sample in enumerate(samples):
            for suffix, content in sample.items():
                member = tarfile.TarInfo(f"{n:04}.{suffix}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A dataset of each kind."""
    folder = tmp_path_factory.mktemp("kinds")
    table = pa.table({"id": range(500), "body": TEXTS, "lang": ["en"] * 500})
    pq.write_table(table, folder / "parquet.parquet", row_group_size=25)
    feather.write_feather(table, folder / "arrow.arrow")
    (folder / "jsonl.jsonl").write_text(lines_of({"text": text, "n": 1} for text in TEXTS))
    (folder / "gz.jsonl.gz").write_bytes(gzip.compress(lines_of({"meta": {"text": text}} for text in TEXTS).encode()))
    write_tar(folder / "tar.tar", [{"txt": text.encode(), "json": b'{"a": 1}'} for text in TEXTS[:80]])
    (folder / "txt").mkdir()
    for n in range(30):
        (folder / "txt" / f"{n}.txt").write_text(TEXTS[n])
    np.save(folder / "npy.npy", np.arange(60 * 20, dtype=np.uint16).reshape(60, 20) % 390)
    pq.write_table(
        pa.table({"ids": [[1, 2, 3 + n % 5] * 9 for n in range(200)], "source": ["x"] * 200}), folder / "ids.parquet"
    )
    (folder / "chat.jsonl").write_text(lines_of({"messages": talk, "id": "x"} for talk in TALKS))
    pq.write_table(pa.table({"talk": TALKS}), folder / "talk.parquet")
    pairs = [{"instruction": f"Say {n}", "output": f"{n} " * 30, "input": ""} for n in range(60)]
    (folder / "pairs.jsonl").write_text(lines_of(pairs))
    pictures = [file_of(picture(30 + n % 7, 40, seed=n)) for n in range(24)]
    write_tar(folder / "pictures.tar", [{"jpg": each, "txt": b"a picture"} for each in pictures])
    pq.write_table(pa.table({"image": pictures, "label": [f"of {n}" for n in range(24)]}), folder / "images.parquet")
    (folder / "paths" / "files").mkdir(parents=True)
    for n, each in enumerate(pictures):
        (folder / "paths" / "files" / f"{n}.jpg").write_bytes(each)
    rows = [{"image": f"files/{n}.jpg", "label": f"picture {n}"} for n in range(24)]
    (folder / "paths" / "rows.jsonl").write_text(lines_of(rows))
    write_chat_tokenizer(folder / "tokenizer", CHATML)
    image_tokenizer(folder / "vision")
    return folder


KINDS = {
    "parquet.parquet": ("parquet", 500, {"text_field": "body"}),
    "arrow.arrow": ("arrow", 500, {"text_field": "body"}),
    "jsonl.jsonl": ("jsonl", 500, {}),
    "gz.jsonl.gz": ("jsonl", 500, {"text_field": "meta.text"}),
    "tar.tar": ("webdataset", 80, {"text_field": "txt"}),
    "txt": ("text", 30, {}),
    "npy.npy": ("numpy", 60, {"documents": "tokens", "tokens_field": "tokens"}),
    "ids.parquet": ("parquet", 200, {"documents": "tokens", "tokens_field": "ids"}),
    "chat.jsonl": ("jsonl", 60, {"documents": "chat"}),
    "talk.parquet": ("parquet", 60, {"documents": "chat", "messages_field": "talk"}),
    "pairs.jsonl": ("jsonl", 60, {"documents": "chat"}),
    "pictures.tar": ("webdataset", 24, {"documents": "images"}),
    "paths": ("jsonl", 24, {"documents": "images", "text_field": "label"}),
    "images.parquet": ("parquet", 24, {"documents": "images", "text_field": "label"}),
}


OFTEN = ("parquet.parquet", "gz.jsonl.gz", "npy.npy", "chat.jsonl", "pairs.jsonl", "paths")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in OFTEN else [pytest.mark.deep]) for n in KINDS])
def test_the_recipe_that_is_printed_runs_on_every_kind_of_data(zephon, data, tmp_path, name):
    code, out, err = zephon("inspect", data / name)
    assert code == 0, err
    fmt, rows, keys = KINDS[name]
    assert re.match(rf"\S+: {fmt}, \d+ shards?, \d+ groups?, {rows} rows, ", out)
    recipe = out[out.index("[[sources]]") :]
    for key, value in keys.items():
        assert f'{key} = "{value}"\n' in f"{recipe}\n"
    (tmp_path / "recipe.toml").write_text(f'cache_dir = "cache"\n{recipe}')
    shows_images = keys.get("documents") == "images"
    options = ["--tokenizer", data / ("vision" if shows_images else "tokenizer"), "--seq-len", "128"]
    options += ["--vision", VISION] if shows_images else []
    code, _, err = zephon("stream", tmp_path / "recipe.toml", *options, "--microbatch-size", "2", "--steps", "2")
    assert code == 0, err
    # With the tokenizer of the run, the same lines are inspected, and tokens counted.
    code, out, err = zephon("inspect", tmp_path / "recipe.toml", *options[:2], *options[4:], "--json")
    (source,) = json.loads(out)["sources"]
    assert code == 0 and source["sample"]["unit"] == "tokens" and source["sample"]["length"]["mean"]["value"] > 1
    assert source["sample"]["unusable"] == 0


def inspected(zephon, *arguments):
    code, out, err = zephon("inspect", *arguments, "--json")
    assert code == 0, err
    return json.loads(out)["sources"]


def test_a_whole_dataset_is_told_exactly(zephon, tmp_path):
    texts = ["same", "same", "same", "", " \n", None, *(f"other {n}" for n in range(94))]
    pq.write_table(pa.table({"text": texts, "score": [0.5] * 100}), tmp_path / "a.parquet")
    (told,) = inspected(zephon, tmp_path, "--show", "2")
    assert (told["rows"], told["shards"], told["bytes"]) == (100, 1, (tmp_path / "a.parquet").stat().st_size)
    assert told["columns"] == {"text": "string", "score": "double"}
    sample = told["sample"]
    assert (sample["rows"], sample["blank"], sample["duplicates"], sample["unusable"]) == (100, 3, 2, 0)
    lengths = [len(text) for text in texts if text and text.strip()]
    assert sample["length"]["mean"] == {"value": round(np.mean(lengths), 1), "error": 0.0}
    assert sample["length"]["50%"]["value"] == np.median(lengths) and sample["length"]["longest"] == max(lengths)
    assert sum(n for *_, n in sample["length"]["histogram"]) == 97
    assert [each["text"] for each in told["examples"]] == ["same", "other 93"]
    assert [(each["shard"], each["row"]) for each in told["examples"]] == [("a.parquet", 0), ("a.parquet", 99)]


def test_error_bars_hold_what_they_say(zephon, tmp_path):
    """Lengths differ from row group to row group, so that a sample of a few groups is uncertain."""
    chance = np.random.default_rng(0)
    sizes = np.concatenate([chance.integers(1, 40, 50) * (1 + group % 9) for group in range(120)])
    table = pa.table({"text": ["x" * n for n in sizes.tolist()]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=50)
    hits = 0
    for seed in range(20):
        (told,) = inspected(zephon, tmp_path, "--rows", "400", "--seed", seed)
        mean = told["sample"]["length"]["mean"]
        assert 0 < mean["error"] < sizes.mean()
        hits += abs(mean["value"] - sizes.mean()) <= mean["error"]
    assert hits >= 15


def test_tokens_are_those_of_the_run(zephon, data, tiny_tokenizer):
    from zephon.tokenizer.tokenizer import load_tokenizer

    (told,) = inspected(zephon, data / "jsonl.jsonl", "--tokenizer", tiny_tokenizer)
    _, offsets = load_tokenizer(tiny_tokenizer).encode(pa.array(TEXTS, pa.large_string()))
    lengths = np.diff(offsets) + 2  # BOS and EOS
    assert told["sample"]["length"]["mean"]["value"] == round(float(lengths.mean()), 1)
    assert told["sample"]["unit"] == "tokens"


def test_images_are_told_by_their_headers(zephon, data):
    (told,) = inspected(zephon, data / "pictures.tar")
    assert told["sample"]["image_formats"] == {"jpeg": 24} and told["sample"]["images_per_row"] == 1
    assert told["sample"]["images"]["width"] == [30, 32, 36] and told["sample"]["images"]["height"] == [40, 40, 40]


def test_rows_that_cannot_be_used_are_counted_with_their_reason(zephon, tmp_path, data):
    rows = [{"messages": talk} for talk in TALKS]
    rows[50] = {"messages": [{"role": "user"}]}
    (tmp_path / "a.jsonl").write_text(lines_of(rows[:59]) + '{"messages": [broken\n')
    (told,) = inspected(zephon, tmp_path / "a.jsonl", "--tokenizer", data / "tokenizer")
    assert told["sample"]["unusable"] == 2 and "the content of message 0 is null" in " ".join(told["sample"]["reasons"])


def test_a_recipe_is_inspected_source_by_source(zephon, corpus):
    told = inspected(zephon, corpus / "recipe.toml")
    assert [(each["name"], each["rows"]) for each in told] == [("a", 200), ("b", 60)]
    assert told[1]["sample"]["blank"] == 2 and "recipe" not in told[0]


def test_a_store_is_inspected_like_a_folder(zephon, s3, tmp_path):
    pq.write_table(pa.table({"text": TEXTS}), tmp_path / "a.parquet", row_group_size=50)
    s3.put("web/a.parquet", (tmp_path / "a.parquet").read_bytes())
    (told,) = inspected(zephon, "s3://corpus/web")
    assert told["rows"] == 500 and told["recipe"].splitlines()[1:] == ['name = "web"', 'path = "s3://corpus/web"']


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ({}, "holds no"),
        ({"a.parquet": b"PAR1 this is none"}, "a.parquet"),
        ({"a.jsonl": b"[1, 2]\n[3]\n"}, "a.jsonl"),
        ({"a.jsonl": b'{"n": 1}\n'}, "no column of n looks like text, conversations, token ids or images"),
    ],
    ids=["missing", "empty", "damaged", "no objects", "no documents"],
)
def test_bad_data_gets_one_clear_sentence(zephon, tmp_path, content, message):
    folder = tmp_path / "data"
    for name, each in (content or {}).items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(each)
    if content == {}:
        folder.mkdir()
    code, out, err = zephon("inspect", folder)
    assert code == 2 and not out and err.startswith("error: ") and err.count("\n") == 1
    assert message in err


def test_text_of_documents_cannot_steer_the_terminal(zephon, tmp_path):
    (tmp_path / "a.jsonl").write_text(lines_of([{"text": "\x1b[31mred\x1b[0m"}]))
    _, out, _ = zephon("inspect", tmp_path)
    assert "\\x1b[31mred" in out and "\x1b" not in out


def test_guesses_by_what_rows_hold():
    assert guess([{"a": "x", "b": "long text"}], ["a", "b"]).keys == {"text_field": "b"}
    assert guess([{"text": "x", "b": "long text"}], ["text", "b"]).keys == {}
    assert guess([{"input_ids": [1]}], ["input_ids"]).keys == {"documents": "tokens"}
    shown = {"conversations": [{"from": "human", "value": "<image> what?"}], "image": "a.jpg"}
    assert guess([shown], list(shown)).keys == {"documents": "chat", "images_field": "auto"}
    with pytest.raises(DataError, match="no column of n, m looks like"):
        guess([{"n": 1, "m": None}], ["n", "m"])
