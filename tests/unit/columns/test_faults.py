"""The policy for rows that cannot be used: budgets in words, the report, and what is no damage."""

import errno
import gzip
import json
import logging
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zephon import CheckpointError, DataError, DataRecipe, Pipeline
from zephon.columns.damage import CONTENT_LIMIT, Damaged, is_damage, split_damaged
from zephon.columns.faults import FaultReport, RowFault, read_report
from zephon.errors import RecipeError
from zephon.io import Dataset, DecodeCache
from zephon.ops.stateful import Stateful
from zephon.work import StaticMixtureWorkSource


def write_lines(path, count, bad=(), compress=bytes):
    lines = [json.dumps({"text": f"document {n} of some words", "n": n}).encode() for n in range(count)]
    for row in bad:
        lines[row] = b"{nothing"
    path.write_bytes(compress(b"\n".join(lines) + b"\n"))


def write_shards(folder, count, cut_off=None):
    folder.mkdir(exist_ok=True)
    for shard in range(count):
        pq.write_table(pa.table({"text": [f"{shard} {n}" for n in range(30)]}), folder / f"{shard}.parquet")
    if cut_off is not None:
        path = folder / f"{cut_off}.parquet"
        path.write_bytes(path.read_bytes()[:-1])


def source_of(folder, **given):
    return StaticMixtureWorkSource([Dataset.from_path("web", folder)], repeat=False, **given)


def options_of(pipeline, **given):
    cache = {"cache": {"enabled": False}}
    return pipeline.options(**{"canonical_replicas": 1, "on_error": "skip", "io_options": cache, **given})


def build(folder, tokenizer, **options):
    pipeline = options_of(Pipeline(source_of(folder, chunk_size=50)), **options)
    return pipeline.tokenize(tokenizer).pack_flat(15).batch(2)


def opened(path, *columns):
    columns = columns or ("text",)
    return Dataset.from_path("web", path).open(list(columns), size_column=columns[0], cache=DecodeCache(0), skips=True)


def rows_of(pipeline):
    return {(line["shard"], line["row"]) for batch in pipeline for line in batch.provenance().to_pylist()}


class TestBudget:
    def test_more_bad_rows_than_allowed_stop_the_run_with_their_number_and_place(self, tiny_tokenizer, tmp_path):
        write_lines(tmp_path / "a.jsonl", 50, bad=range(10, 15))
        pipeline = build(tmp_path, tiny_tokenizer, error_budget=0.0, error_budget_rows=5)
        assert not rows_of(pipeline) & {("a.jsonl", row) for row in range(10, 15)}
        assert pipeline.mixture()["web"].failed == 5
        with pytest.raises(DataError) as caught:
            list(build(tmp_path, tiny_tokenizer, error_budget=0.0, error_budget_rows=4))
        assert "chunk of 50: 5; error_budget 0.0 or error_budget_rows 4 allows 4" in str(caught.value)
        assert 'dataset "web", shard a.jsonl, row 1' in str(caught.value) and "\n" not in str(caught.value)

    def test_a_row_group_that_cannot_be_decoded_counts_as_all_its_rows(self, tiny_tokenizer, tmp_path, caplog):
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"text": [f"document {n}" for n in range(40)]}), path, row_group_size=10)
        chunk = pq.ParquetFile(path).metadata.row_group(2).column(0)
        start, size = chunk.dictionary_page_offset, chunk.total_compressed_size
        raw = bytearray(path.read_bytes())
        raw[start : start + size] = bytes(size)
        path.write_bytes(raw)
        with caplog.at_level(logging.WARNING, "zephon"):
            pipeline = build(tmp_path, tiny_tokenizer, error_budget=0.25)
            list(pipeline)
        assert pipeline.mixture()["web"].failed == 10
        (logged,) = [record.message for record in caplog.records if "row left out" in record.message]
        assert "with all 10 rows from row 20 on" in logged
        with pytest.raises(DataError, match=r"chunk of 40: 9; error_budget 0\.2 allows 8"):
            list(build(tmp_path, tiny_tokenizer, error_budget=0.2))

    def test_shards_that_cannot_be_read_are_judged_before_the_first_batch(self, tiny_tokenizer, tmp_path):
        write_shards(tmp_path, 4, cut_off=2)
        with pytest.raises(
            DataError, match="1 of 4 shards cannot be read, by their size about 30 of 120 rows, and error_"
        ):
            build(tmp_path, tiny_tokenizer, error_budget=0.2).explain()
        pipeline = build(tmp_path, tiny_tokenizer, error_budget=0.3)
        assert "left out as damaged: 1 of the shards" in pipeline.explain()
        assert {shard for shard, _ in rows_of(pipeline)} == {"0.parquet", "1.parquet", "3.parquet"}

    def test_a_first_file_and_first_rows_that_are_damaged_do_not_stop_the_checks_before_the_run(
        self, tiny_tokenizer, tmp_path
    ):
        write_lines(tmp_path / "0.jsonl.gz", 30, compress=lambda content: gzip.compress(content)[:-5])
        write_lines(tmp_path / "1.jsonl", 80, bad=range(40))
        pipeline = options_of(Pipeline(source_of(tmp_path)), error_budget=1.0).filter("n > 72")
        pipeline = pipeline.tokenize(tiny_tokenizer).pack_flat(15).batch(1, drop_last=False)
        assert {row for _, row in rows_of(pipeline)} == set(range(73, 80))

    def test_a_damaged_shard_is_not_remembered_as_empty_and_a_repaired_one_refuses_the_state(
        self, tiny_tokenizer, tmp_path
    ):
        folder = tmp_path / "data"
        write_shards(folder, 3)
        whole = (folder / "1.parquet").read_bytes()
        write_shards(folder, 3, cut_off=1)
        options = {"io_options": {"cache": {"dir": tmp_path / "cache"}}, "error_budget": 0.5}
        for _ in range(2):
            pipeline = build(folder, tiny_tokenizer, **options)
            assert "60 rows" in pipeline.explain()
        with pytest.raises(DataError, match=r"1\.parquet"):
            build(folder, tiny_tokenizer, **options, on_error="raise").explain()
        next(iter(pipeline))
        state = pipeline.checkpoint()
        (folder / "1.parquet").write_bytes(whole)
        with pytest.raises(CheckpointError, match="dataset web"):
            build(folder, tiny_tokenizer, **options).restore(state)


class TestRows:
    def test_a_value_of_the_wrong_type_is_a_bad_row(self, tmp_path):
        path = tmp_path / "a.jsonl"
        write_lines(path, 100)
        path.write_bytes(path.read_bytes() + b'{"text": "x", "n": "many"}\n{"text": "y", "n": 5}\n')
        table, _, [(place, lost)] = split_damaged(opened(path, "text", "n").take(np.arange(102)))
        assert place == 100 and "holds a string in 'n'" in lost.reason
        assert lost.content == '{"text": "x", "n": "many"}'
        assert table["n"].to_pylist() == [*range(100), 5]

    def test_a_number_that_does_not_fit_the_type_of_the_other_files_is_a_bad_row(self, tmp_path):
        pq.write_table(pa.table({"text": ["a", "b"], "n": pa.array([1, 2], pa.int32())}), tmp_path / "0.parquet")
        huge = pa.table({"text": ["c", "d", "e"], "n": pa.array([3, 2**63, 4], pa.uint64())})
        pq.write_table(huge, tmp_path / "1.parquet")
        table, _, bad = split_damaged(opened(tmp_path, "text", "n").take(np.arange(5)))
        assert table["n"].to_pylist() == [1, 2, 3, 4] and [place for place, _ in bad] == [3]

    def test_bytes_that_are_no_text_are_shown_shortened(self, tmp_path):
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"text": pa.array([b"good", b"\xff" * 9000], pa.binary())}), path)
        table, _, [(_, lost)] = split_damaged(opened(path).take(np.arange(2)))
        assert table["text"].to_pylist() == ["good"]
        assert lost.content.startswith("text: \\xff") and len(lost.content) <= CONTENT_LIMIT

    def test_lost_rows_do_not_reach_operators_or_a_stateful_transform(self, tiny_tokenizer, tmp_path):
        write_lines(tmp_path / "a.jsonl", 60, bad=[0, 7, 8, 9, 59])
        numbers = []

        class Noted(Stateful):
            def push(self, state, row):
                numbers.append(row["n"])
                return {"text": row["text"]}

        source = source_of(tmp_path, chunk_size=20, shuffle_block_size="none")
        pipeline = options_of(Pipeline(source), runner="inline", error_budget=0.3, check_operators=False)
        pipeline = pipeline.filter("n != 30").stateful_transform(Noted()).tokenize(tiny_tokenizer)
        pipeline = pipeline.pack_flat(15).batch(1, drop_last=False)
        pipeline.explain()
        numbers.clear()
        list(pipeline)
        assert sorted(numbers) == [n for n in range(60) if n not in (0, 7, 8, 9, 30, 59)]
        part = pipeline.mixture()["web"]
        assert (part.rows, part.failed, part.dropped) == (60, 5, 1)


class TestReport:
    def test_quarantine_keeps_what_operators_refused_once(self, tiny_tokenizer, tmp_path):
        def refuse(row):
            if row["n"] % 10 == 3:
                raise ValueError("no threes")
            return row

        write_lines(tmp_path / "a.jsonl", 40)
        source = StaticMixtureWorkSource([Dataset.from_path("web", tmp_path)], chunk_size=40, repeat=True)
        given = {"on_error": "quarantine", "error_budget": 0.5, "error_report": tmp_path / "r"}
        pipeline = options_of(Pipeline(source), **given).map_transform(refuse)
        pipeline = pipeline.tokenize(tiny_tokenizer).pack_flat(15).batch(2)
        for _ in zip(range(100), pipeline, strict=False):  # some passes
            pass
        pipeline.close()
        entries = list(read_report(tmp_path / "r"))
        assert sorted(entry["row"] for entry in entries) == [3, 13, 23, 33]
        assert all("no threes" in entry["reason"] and "document" in entry["content"] for entry in entries)
        (file,) = (tmp_path / "r").iterdir()
        assert len(file.read_text().splitlines()) == 4

    def test_a_line_cut_off_by_a_kill_is_passed_over(self, tmp_path):
        report = FaultReport(tmp_path, "dp1-0")
        for row in range(3):
            report.add(0, 0, RowFault("read", "web", "a", row, "bad", row, 1, "\ud800"))
        report.close()
        (file,) = tmp_path.iterdir()
        file.write_bytes(file.read_bytes()[:-9])
        assert [entry["row"] for entry in read_report(tmp_path)] == [0, 1]

    def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(DataError, match=r"error_report is .*expected a folder"):
            FaultReport(tmp_path / "file" / "below", "dp1-0")

    def test_a_report_that_cannot_be_written_any_longer_does_not_end_the_run(self, tmp_path, caplog, monkeypatch):
        report = FaultReport(tmp_path, "dp1-0")

        def full(*_args):
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("zephon.columns.faults.append_whole", full)
        for row in range(3):
            report.add(0, 0, RowFault("read", "web", "a", row, "bad", row, 1, ""))
        assert [record.getMessage().count("No space left") for record in caplog.records] == [1]

    def test_a_recipe_names_the_folder_beside_itself(self, tmp_path):
        text = 'on_error = "quarantine"\n{}[[sources]]\nname = "a"\npath = "data"\n'
        (tmp_path / "good.toml").write_text(text.format('error_report = "faults"\n'))
        assert DataRecipe.from_toml(tmp_path / "good.toml").error_report == str(tmp_path / "faults")
        (tmp_path / "bad.toml").write_text(text.format(""))
        with pytest.raises(RecipeError, match="set error_report to a folder"):
            DataRecipe.from_toml(tmp_path / "bad.toml")


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (ValueError("it ends early"), True),
        (OSError("Corrupt snappy compressed data."), True),
        (OSError(errno.EINVAL, "cannot seek there"), True),
        (OSError(errno.EIO, "the disk fails"), False),
        (OSError(errno.EMFILE, "too many open files"), False),
        (MemoryError("no room"), False),
    ],
)
def test_damage_is_not_a_machine_that_fails(error, wanted):
    assert is_damage(error) == wanted


def test_damage_travels_between_processes():
    assert str(pickle.loads(pickle.dumps(Damaged("broken", rest=lambda: None)))) == "broken"
