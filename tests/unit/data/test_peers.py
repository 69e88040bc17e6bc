"""What other libraries write, our readers read: every row, any row, and what they refuse of it."""

import json
import shutil
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from peers.rows import LABELS, TEXTS, TOKENS
from support import step_digests
from zephon import DataRecipe, Pipeline
from zephon.data.formats import lance as lance_format
from zephon.errors import DataError
from zephon.io import Dataset, DecodeCache

N = len(TEXTS)
ORDER = np.random.default_rng(0).permutation(N)


def opened(path: Path, columns, size_column=None, *, is_text=True, **options):
    size_column = size_column or columns[0]
    dataset = Dataset.from_path("peer", path, **options)
    return dataset.open(columns, size_column=size_column, cache=DecodeCache(1 << 20), is_text=is_text)


def check_rows(dataset, expected):
    """`expected` values by column, in file order and in any other."""
    rows = len(next(iter(expected.values())))
    assert dataset.catalog.rows == rows
    for order in (np.arange(rows), ORDER[rows > ORDER]):
        taken = dataset.take(order)
        for name, values in expected.items():
            assert taken[name].to_pylist() == [values[row] for row in order], name


# datasets: save_to_disk


def test_a_saved_dataset_is_read_without_what_map_has_left_beside_it(peer_data):
    assert list((peer_data / "saved/plain").glob("cache-*.arrow"))
    dataset = opened(peer_data / "saved/plain", ["text", "label", "meta.text"])
    assert dataset.catalog.n_shards == 3
    check_rows(dataset, {"text": TEXTS, "label": LABELS, "meta.text": TEXTS})


def test_a_saved_filter_gives_the_rows_that_were_kept(peer_data):
    kept = [text for text, label in zip(TEXTS, LABELS, strict=True) if label % 2 == 0]
    check_rows(opened(peer_data / "saved/filtered", ["text"]), {"text": kept})


def test_splits_are_read_one_at_a_time(peer_data):
    with pytest.raises(DataError, match=r"several splits \(test, train\); append the one to read"):
        opened(peer_data / "saved/splits", ["text"])
    check_rows(opened(peer_data / "saved/splits/train", ["text"]), {"text": TEXTS})


def test_a_saved_dataset_that_lacks_a_file_is_refused(peer_data, tmp_path):
    shutil.copytree(peer_data / "saved/plain", tmp_path / "copy")
    (tmp_path / "copy/data-00001-of-00003.arrow").unlink()
    with pytest.raises(DataError, match=r"state.json' names 'data-00001-of-00003.arrow', which is not there"):
        opened(tmp_path / "copy", ["text"])
    (tmp_path / "copy/state.json").write_text("[]")
    with pytest.raises(DataError, match=r"state.json' cannot be read"):
        opened(tmp_path / "copy", ["text"])


# WebDataset


@pytest.mark.parametrize("folder", ["plain", "packed"])
def test_webdataset_gives_a_column_per_extension_and_paths_into_json(peer_data, folder):
    dataset = opened(
        peer_data / "webdataset" / folder, ["txt", "__key__", "json", "json.label", "json.t", "jpg", "seg.cls"]
    )
    assert dataset.catalog.fmt == "webdataset" and dataset.catalog.n_shards == 2
    assert dataset.catalog.sequential == (folder == "packed")
    check_rows(
        dataset,
        {
            "txt": TEXTS,
            "__key__": [f"part{n // 100}/{n:06}" for n in range(N)],
            "json.label": [str(label) for label in LABELS],
            "json.t": TEXTS,
            "jpg": [bytes([n % 256]) * 40 if n % 3 == 0 else None for n in range(N)],
            "seg.cls": [str(LABELS[n]) if n % 5 == 0 else None for n in range(N)],
        },
    )
    assert [json.loads(text) for text in dataset.take(np.arange(3))["json"].to_pylist()] == [
        {"label": LABELS[n], "t": TEXTS[n]} for n in range(3)
    ]
    assert dataset.catalog.bytes == sum(len(text.encode()) for text in TEXTS)


def test_webdataset_refuses_pickles_and_bytes_as_documents(peer_data):
    folder = peer_data / "webdataset/plain"
    with pytest.raises(DataError, match=r"column 'state.pyd' .* pickled Python objects, which can run code"):
        opened(folder, ["state.pyd"])
    with pytest.raises(DataError, match=r"column 'state.pyd' .* pickled Python objects"):
        opened(folder, ["txt", "state.pyd"]).take(np.arange(3))
    with pytest.raises(DataError, match=r"column 'jpg' .* is binary by its name.*txt"):
        opened(folder, ["jpg"])
    with pytest.raises(DataError, match=r"no column 'text' in '.*', which has '__key__', 'jpg', 'json'"):
        opened(folder, ["text"])


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_tar_archives_of_every_kind_are_read_and_nothing_is_written(peer_data, kind):
    dataset = opened(peer_data / f"webdataset/kinds/kind{kind}.tar", ["txt", "__key__"])
    folder = "é" * 60 if kind != 0 else "e" * 90
    # The last one's name points out of the folder; it is a key like any other.
    keys = [f"{folder}/{'x' * 90}{n}" for n in range(10)] + ["../../outside"]
    check_rows(dataset, {"txt": [*TEXTS[:10], "outside"], "__key__": keys})


# Mosaic MDS


@pytest.mark.parametrize("folder", ["plain", "zstd", "gz", "bz2", "br", "snappy"])
def test_mds_shards_give_their_columns(peer_data, folder):
    columns = ["text", "tokens", "open", "fixed", "n", "small", "score", "raw", "meta", "meta.text"]
    dataset = opened(peer_data / "mds" / folder, columns[:-1])
    assert dataset.catalog.fmt == "mds" and dataset.catalog.n_shards > 1
    assert dataset.catalog.sequential == (folder != "plain")
    check_rows(
        dataset,
        {
            "text": TEXTS,
            "tokens": [ids.tolist() for ids in TOKENS],
            "open": [ids.tolist() for ids in TOKENS],
            "fixed": [list(range(n, n + 4)) for n in range(N)],
            "n": list(range(N)),
            "small": list(range(N)),
            "score": [n / 4 for n in range(N)],
            "raw": [bytes([n % 256]) * (n % 5) for n in range(N)],
        },
    )
    assert dataset.take(np.array([3])).schema.field("tokens").type == pa.large_list(pa.uint32())
    assert json.loads(dataset.take(np.array([3]))["meta"][0].as_py()) == {"text": TEXTS[3]}


def test_mds_refuses_pickles_and_token_ids_as_text(peer_data):
    with pytest.raises(DataError, match=r"column 'anything' .* pickled Python objects"):
        opened(peer_data / "mds/plain", ["text", "anything"]).take(np.arange(2))
    with pytest.raises(DataError, match=r"large_list<.*uint32>.*read by the operator pretokenized"):
        opened(peer_data / "mds/plain", ["tokens"])
    check_rows(opened(peer_data / "mds/plain", ["tokens"], is_text=False), {"tokens": [t.tolist() for t in TOKENS]})


# LitData


@pytest.mark.parametrize("folder", ["fields", "frames", "items", "whole"])
def test_litdata_chunks_of_fields_give_their_columns(peer_data, folder):
    dataset = opened(peer_data / "litdata" / folder, ["text", "ids", "n", "score", "even", "raw"])
    assert dataset.catalog.fmt == "litdata" and dataset.catalog.n_shards == 4
    assert dataset.catalog.sequential == (folder == "whole")
    check_rows(
        dataset,
        {
            "text": TEXTS,
            "ids": [ids.tolist() for ids in TOKENS],
            "n": list(range(N)),
            "score": [n / 4 for n in range(N)],
            "even": [n % 2 == 0 for n in range(N)],
            "raw": [b"x" * (n % 3) for n in range(N)],
        },
    )


@pytest.mark.parametrize("folder", ["arrow", "arrow-zstd"])
def test_litdata_chunks_of_nested_rows_give_their_columns(peer_data, folder):
    dataset = opened(peer_data / "litdata" / folder, ["text", "n", "meta.text", "meta"])
    check_rows(
        dataset,
        {
            "text": TEXTS,
            "n": list(range(N)),
            "meta.text": TEXTS,
            "meta": [{"text": text, "tags": ["a"] * (n % 3)} for n, text in enumerate(TEXTS)],
        },
    )


def test_litdata_items_that_are_one_text_or_one_array_have_a_column(peer_data):
    check_rows(opened(peer_data / "litdata/texts", ["text"]), {"text": TEXTS})
    tokens = opened(peer_data / "litdata/tokens", ["tokens"], is_text=False)
    check_rows(tokens, {"tokens": [ids.tolist() for ids in TOKENS]})


def test_litdata_refuses_pickles(peer_data):
    with pytest.raises(DataError, match=r"column 'what' .* pickled Python objects"):
        opened(peer_data / "litdata/pickled", ["text", "what"]).take(np.arange(2))
    check_rows(opened(peer_data / "litdata/pickled", ["text"]), {"text": TEXTS})


# Megatron


@pytest.mark.parametrize("folder", ["uint16", "int32", "sentences"])
def test_megatron_gives_documents_as_token_ids(peer_data, folder):
    dataset = opened(peer_data / "megatron" / folder, ["tokens"], is_text=False)
    assert dataset.catalog.fmt == "megatron" and dataset.catalog.n_shards == 1
    check_rows(dataset, {"tokens": [ids.tolist() for ids in TOKENS]})
    assert dataset.take(np.array([3])).schema.field("tokens").type == pa.large_list(pa.uint32())
    with pytest.raises(DataError, match="pretokenized"):
        opened(peer_data / "megatron" / folder, ["tokens"])


def test_megatron_without_its_index_is_explained(peer_data, tmp_path):
    shutil.copy(peer_data / "megatron/uint16/web_text_document.bin", tmp_path)
    with pytest.raises(DataError, match=r"a .bin file needs its .idx file \(Megatron\) or index.json \(LitData\)"):
        opened(tmp_path, ["tokens"], is_text=False)
    with pytest.raises(DataError, match=r"web_text_document.idx"):
        opened(tmp_path, ["tokens"], is_text=False, fmt="megatron")


# Lance and Vortex, read by their libraries


def table_of(first: int, count: int) -> pa.Table:
    numbers = list(range(first, first + count))
    texts = [f"document {n} é" for n in numbers]
    return pa.table({"text": texts, "n": numbers, "meta": [{"text": text} for text in texts]})


def test_vortex_files_give_their_columns(tmp_path):
    import vortex

    for shard in range(2):
        vortex.io.write(table_of(shard * 20_000, 20_000), str(tmp_path / f"{shard}.vortex"))
    dataset = opened(tmp_path, ["text", "n", "meta.text"])
    assert dataset.catalog.fmt == "vortex" and dataset.catalog.n_shards == 2
    texts = table_of(0, 40_000)["text"].to_pylist()
    check_rows(dataset, {"text": texts, "n": list(range(40_000)), "meta.text": texts})
    with pytest.raises(DataError, match=r"column 'n' .* documents must be text"):
        opened(tmp_path, ["n"])
    (tmp_path / "1.vortex").write_bytes((tmp_path / "1.vortex").read_bytes()[:-100])
    with pytest.raises(DataError, match=r"1\.vortex' cannot be read as vortex"):
        opened(tmp_path, ["text"])


def test_a_lance_dataset_is_read_at_its_newest_version(tmp_path):
    import lance

    folder = tmp_path / "docs.lance"
    lance.write_dataset(table_of(0, 1000), folder, max_rows_per_file=300)
    lance.dataset(folder).delete("n % 7 = 0")
    lance.write_dataset(table_of(1000, 10), folder, mode="append")
    # Arrow files of Arrow's Rust library, whose messages begin elsewhere.
    deleted = [
        sorted(opened(path, ["row_id"], is_text=False).take(np.arange(43))["row_id"].to_pylist())
        for path in (folder / "_deletions").glob("[0-2]-*.arrow")
    ]
    assert all(b - a == 7 for rows in deleted for a, b in pairwise(rows)) and len(deleted) == 3
    kept = [n for n in range(1000) if n % 7] + list(range(1000, 1010))
    dataset = opened(folder, ["n", "text", "meta.text"], "text")
    assert dataset.catalog.fmt == "lance" and dataset.catalog.n_shards == 5
    rows = dataset.take(np.arange(dataset.catalog.rows)).to_pylist()
    assert sorted(row["n"] for row in rows) == kept
    assert all(row["text"] == row["meta.text"] == f"document {row['n']} é" for row in rows)
    # What is written meanwhile is for the next run.
    lance.dataset(folder).delete("n >= 0")
    assert dataset.take(np.arange(dataset.catalog.rows)).to_pylist() == rows
    with pytest.raises(DataError, match="has no rows"):
        opened(folder, ["text"])


def test_an_index_of_a_lance_dataset_holds_until_its_next_version(tmp_path):
    import lance

    folder = tmp_path / "docs.lance"
    lance.write_dataset(table_of(0, 100), folder)
    dataset = Dataset.from_path("x", folder)
    assert dataset.scan("text", index_dir=tmp_path / "index").rows == 100
    lance.dataset(folder).delete("n < 10")
    assert dataset.scan("text", index_dir=tmp_path / "index").rows == 90
    shutil.rmtree(folder / "_versions")
    with pytest.raises(DataError, match="no part of a local Lance dataset"):
        dataset.scan("text", index_dir=tmp_path / "index")


def test_the_process_of_lances_library_may_end_and_a_run_goes_on(tmp_path):
    import lance

    lance.write_dataset(table_of(0, 100), tmp_path / "docs.lance")
    dataset = opened(tmp_path / "docs.lance", ["n"], "text")
    lance_format._child.kill()
    assert dataset.take(np.arange(100))["n"].to_pylist() == list(range(100))


# In a pipeline


@pytest.mark.parametrize(
    ("folder", "text_field"),
    [
        ("webdataset/packed", "{__key__}: {txt}"),
        ("mds/zstd", "text"),
        ("litdata/arrow", "meta.text"),
        ("saved/plain", "{label} {meta.text}"),
    ],
)
def test_global_batches_of_any_format_do_not_depend_on_dp_degree(peer_data, tiny_tokenizer, folder, text_field):
    recipe = DataRecipe.from_dict(
        {
            "canonical_replicas": 4,
            "sources": [
                {"name": "peer", "path": str(peer_data / folder), "text_field": text_field},
                {"name": "text", "path": str(peer_data / "litdata/texts")},
            ],
        }
    )

    def digests(dp_degree: int) -> list[bytes]:
        pipelines = [
            Pipeline.from_recipe(
                recipe,
                tokenizer=tiny_tokenizer,
                seq_len=32,
                microbatch_size=2,
                dp_degree=dp_degree,
                dp_group_id=group,
                global_batch=8,
            )
            for group in range(dp_degree)
        ]
        return step_digests(pipelines, 12, 8)

    one = digests(1)
    assert len(set(one)) == 12
    assert digests(2) == digests(4) == one
