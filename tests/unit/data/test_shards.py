"""Shards of one dataset that lack what others have."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.chat_data import CHATML, chat_tokenizer
from zephon import Pipeline
from zephon.errors import DataError, PipelineError
from zephon.io import Dataset, DecodeCache
from zephon.tokenizer.tokenizer import load_tokenizer
from zephon.work import StaticMixtureWorkSource


def write_parquet(path: Path, table: pa.Table) -> None:
    pq.write_table(table, path.with_suffix(".parquet"))


def write_arrow(path: Path, table: pa.Table) -> None:
    with pa.ipc.new_file(path.with_suffix(".arrow"), table.schema) as writer:
        writer.write_table(table)


def write_vortex(path: Path, table: pa.Table) -> None:
    import vortex

    vortex.io.write(table, str(path.with_suffix(".vortex")))


WRITERS = {"parquet": write_parquet, "arrow": write_arrow, "vortex": write_vortex}
FORMATS = pytest.mark.parametrize("fmt", WRITERS)


def rows_of(folder: Path, column: str, index: Path | None = None, extra: tuple[str, ...] = ()) -> list[str | None]:
    dataset = Dataset.from_path("shards", folder).open(
        [column, *extra], size_column=column, cache=DecodeCache(1 << 20), index_dir=index
    )
    return dataset.take(np.arange(dataset.catalog.rows))[column].to_pylist()


def shards(folder: Path, fmt: str, *tables: dict[str, object]) -> Path:
    folder.mkdir()
    for number, columns in enumerate(tables):
        WRITERS[fmt](folder / str(number), pa.table(columns))
    return folder


@FORMATS
@pytest.mark.parametrize("turn", [1, -1])
def test_a_template_is_empty_where_a_shard_lacks_a_column_of_it(tmp_path, fmt, turn):
    tables = [{"text": ["a"], "title": ["T"]}, {"text": ["b", "c"]}, {"text": ["d"], "title": pa.nulls(1)}][::turn]
    folder = shards(tmp_path / "data", fmt, *tables)
    expected = [["T:a"], [":b", ":c"], [":d"]][::turn]
    for _ in range(2):  # scanned, and from the index
        assert rows_of(folder, "{title}:{text}", tmp_path / "index") == [row for part in expected for row in part]
    assert rows_of(folder, "{title}") == [row for part in [["T"], [None, None], [None]][::turn] for row in part]
    assert len(rows_of(folder, "{title}:{text}", extra=("text", "title"))) == 4


@FORMATS
@pytest.mark.parametrize("turn", [1, -1])
def test_fields_of_structs_may_be_missing_with_the_struct(tmp_path, fmt, turn):
    tables = [{"text": ["a"], "m": [{"t": "T"}]}, {"text": ["b"], "m": pa.nulls(1)}]
    if fmt != "vortex":  # which knows no column without a type
        folder = shards(tmp_path / "null", fmt, *tables[::turn])
        for _ in range(2):
            assert rows_of(folder, "m.t", tmp_path / "index") == ["T", None][::turn]
    tables += [{"text": ["c"]}, {"text": ["d"], "m": [{"other": 1}]}]
    tables = tables if fmt != "vortex" else [tables[0], *tables[2:]]
    folder = shards(tmp_path / "data", fmt, *tables[::turn])
    expected = ["T:a", *[f":{table['text'][0]}" for table in tables[1:]]]
    for _ in range(2):
        assert rows_of(folder, "{m.t}:{text}", tmp_path / "index") == expected[::turn]
    # A document that is no template must be in each.
    with pytest.raises(DataError, match=r"no column 'm.t' in '.*"):
        rows_of(folder, "m.t")


@FORMATS
def test_a_column_that_no_shard_has_is_refused(tmp_path, fmt):
    folder = shards(tmp_path / "data", fmt, {"text": ["a"], "m": [{"other": 1}]}, {"text": ["b"]})
    for column, missing in (
        ("{titel}:{text}", "titel"),
        ("{m.t}:{text}", "m.t"),
        ("m.t", "m.t"),
        ("{text.x}", "text.x"),
    ):
        for _ in range(2):
            with pytest.raises(DataError, match=f"no column '{missing}' in"):
                rows_of(folder, column, tmp_path / "index")
    if fmt != "vortex":
        nulls = shards(tmp_path / "null", fmt, {"text": ["b"], "m": pa.nulls(1)})
        with pytest.raises(DataError, match=r"no column 'm.t' in"):
            rows_of(nulls, "m.t")


def test_members_of_a_template_may_be_missing_in_an_archive(tmp_path):
    def archive(name: str, *extensions: str) -> None:
        with tarfile.open(tmp_path / name, "w") as tar:
            for extension in extensions:
                member = tarfile.TarInfo(f"0.{extension}")
                member.size = 1
                tar.addfile(member, io.BytesIO(b"x"))

    archive("a.tar", "txt", "title.txt")
    archive("b.tar", "txt")
    assert rows_of(tmp_path, "{title.txt}:{txt}") == ["x:x", ":x"]
    with pytest.raises(DataError, match=r"no column 'cls' in"):
        rows_of(tmp_path, "{cls}:{txt}")
    with pytest.raises(DataError, match=r"no column 'title.txt' in '.*b.tar"):
        rows_of(tmp_path, "title.txt")


@pytest.mark.parametrize("fmt", ["parquet", "jsonl"])
class TestColumnsThatOnlyLaterFilesHave:
    """They count like those of the first file: a dataset has the columns of all its files."""

    def folder(self, tmp_path: Path, fmt: str, *tables: dict[str, list[object]]) -> Path:
        for number, columns in enumerate(tables):
            table = pa.table(columns)
            (tmp_path / "data").mkdir(exist_ok=True)
            if fmt == "parquet":
                write_parquet(tmp_path / f"data/{number}", table)
            else:
                lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
                (tmp_path / f"data/{number}.jsonl").write_text(lines)
        return tmp_path / "data"

    def texts(self, pipeline: Pipeline, tokenizer: Path) -> str:
        packed = pipeline.pack_flat(63).batch(1)
        return load_tokenizer(tokenizer).decode(np.concatenate([next(iter(packed)).tokens.ravel() for _ in range(20)]))

    def test_in_maps_and_filters(self, tmp_path: Path, fmt: str, tiny_tokenizer: Path) -> None:
        folder = self.folder(tmp_path, fmt, {"text": ["one"] * 9}, {"text": ["two"] * 9, "lang": ["en"] * 9})
        source = StaticMixtureWorkSource([Dataset.from_path("web", folder)])
        mapped = Pipeline(source).map_transform(lambda row: {"text": f"{row['text']} {row['lang']}"})
        text = self.texts(mapped.tokenize(tiny_tokenizer), tiny_tokenizer)
        assert "one None" in text and "two en" in text
        filtered = Pipeline(source).filter("lang == 'en'").tokenize(tiny_tokenizer)
        assert "two" in (text := self.texts(filtered, tiny_tokenizer)) and "one" not in text

    def test_in_conversations(self, tmp_path: Path, fmt: str) -> None:
        talk = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
        first, second = {"messages": [talk] * 9}, {"messages": [talk] * 9, "tools": ['[{"name": "TOOL"}]'] * 9}
        folder = self.folder(tmp_path, fmt, first, second)
        source = StaticMixtureWorkSource([Dataset.from_path("chat", folder)])
        template = "{% for t in tools or [] %}{{ t['name'] }}{% endfor %}" + CHATML
        pipeline = Pipeline(source).tokenize_chat(chat_tokenizer(), chat_template=template, loss="all")
        assert "TOOL" in self.texts(pipeline, chat_tokenizer())
        third = self.folder(tmp_path, fmt, first, {**second, "system": ["be kind"] * 9})
        source = StaticMixtureWorkSource([Dataset.from_path("chat", third)])
        with pytest.raises(PipelineError, match='does not use column "system"'):
            next(iter(Pipeline(source).tokenize_chat(chat_tokenizer(), chat_template=CHATML).pack_flat(63).batch(1)))
