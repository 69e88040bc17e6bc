"""Shards of one dataset that lack what others have."""

import io
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zephon.errors import DataError
from zephon.io import Dataset, DecodeCache


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
