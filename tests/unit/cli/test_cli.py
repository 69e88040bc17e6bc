"""The command `zephon`, in process: what it prints, what it writes, and what it refuses."""

import gzip
import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from examples.corpus import train_tokenizer, write_recipe
from support import setup_of
from zephon import DataError, DataRecipe, Pipeline, PipelineError, RecipeError
from zephon.cli import app as cli_app
from zephon.cli.console import print_table, printable
from zephon.cli.matrix import Leg, Matrix, Run, microbatch_for
from zephon.cli.plan import Forecast, percents
from zephon.cli.source import count, plural
from zephon.cli.verify import judge_runs, parse_numbers, plan_runs, steps_text
from zephon.io import Dataset
from zephon.run.build import chain_of, source_of
from zephon.run.ledger import compare, read_ledger
from zephon.work import ScheduledMixtureWorkSource, Stage, StaticMixtureWorkSource

ESCAPE = "\x1b[31mred\x1b[0m"
WORDS = ["lane", "shard", "record", "round", "step", "token", "cursor", "window", "chunk", "rank", "group", "epoch"]


def document(number: int, word: str) -> str:
    middle = " ".join(WORDS[(number * 7 + i * i) % len(WORDS)] for i in range(number % 40 + 5))
    return f"{word} {number}: {middle}."


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Two sources, a tokenizer, a recipe that repeats and one that does not."""
    folder = tmp_path_factory.mktemp("corpus")
    a = [document(i, "apple") for i in range(200)]
    b = [document(i, "bear") for i in range(60)]
    b[3], b[7] = "", " \n\t "
    b[10:] = [f"{text} {ESCAPE}" for text in b[10:]]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in a))
    (folder / "b.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in b).encode())
    )
    sources = {"a": folder / "a.jsonl", "b": folder / "b.jsonl.gz"}
    train_tokenizer(a + b, folder / "tokenizer", 400)
    keys = {"chunk_size": 16, "seed": 5, "cache_dir": "cache"}
    write_recipe(folder / "recipe.toml", sources, keys=keys)
    write_recipe(folder / "finite.toml", sources, keys={**keys, "repeat": False})
    return folder


@pytest.fixture
def zephon(corpus):
    """Calls the command on the corpus: gives exit code, stdout and stderr."""

    def call(command: str, *arguments: str | Path):
        result = CliRunner().invoke(cli_app.app, [command, *map(str, arguments)])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, result.stderr

    return call


def stream_of(corpus, name="recipe.toml", seq_len=32):
    return corpus / name, "--tokenizer", corpus / "tokenizer", "--seq-len", str(seq_len)


def digests_of(file: Path) -> list[tuple[int, str]]:
    lines = [line.split(" ") for line in file.read_text().splitlines()]
    return [(int(number), digest) for number, digest in lines]


# stream


def test_stream_writes_the_digest_of_every_record(zephon, corpus, tmp_path):
    file = tmp_path / "digests.txt"
    code, out, _ = zephon("stream", *stream_of(corpus), "--microbatch-size", "4", "--steps", "5", "--digests", file)
    pipeline = Pipeline.from_recipe(
        corpus / "recipe.toml", tokenizer=corpus / "tokenizer", seq_len=32, microbatch_size=4
    )
    expected = []
    for batch in pipeline:
        expected += zip(batch.sequence_numbers.tolist(), (d.hex() for d in batch.digests), strict=True)
        if len(expected) == 20:
            break
    assert (code, digests_of(file)) == (0, expected)
    assert out.startswith("5 steps: 20 records, 660 tokens in ")


def test_stream_prints_the_mixture_and_rows_without_text(zephon, corpus):
    code, out, _ = zephon("stream", *stream_of(corpus), "--microbatch-size", "8", "--steps", "40")
    assert code == 0
    table = {line.split()[0]: line.split() for line in out.splitlines() if line[:2] in ("a ", "b ")}
    assert table["a"][1] == table["b"][1] == "50.0%"
    assert all(45 < float(row[2].rstrip("%")) < 55 for row in table.values())
    assert int(table["a"][5]) == 0 < int(table["b"][5])


def test_a_step_of_stream_is_the_share_of_a_global_batch(zephon, corpus, tmp_path):
    file = tmp_path / "digests.txt"
    options = ["--microbatch-size", "2", "--global-batch", "8", "--dp-degree", "2", "--dp-rank", "1", "--steps", "3"]
    code, out, _ = zephon("stream", *stream_of(corpus), *options, "--digests", file)
    assert (code, out.split(":")[0]) == (0, "3 steps")
    assert [number for number, _ in digests_of(file)] == [4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23]


@pytest.mark.parametrize("options", ["--global-batch 8", "--canonical-replicas 2"])
def test_stream_starts_at_the_step_it_is_told_to(zephon, corpus, tmp_path, options):
    options = ["--microbatch-size", "4", *options.split()]
    zephon("stream", *stream_of(corpus), *options, "--steps", "9", "--digests", tmp_path / "whole")
    zephon("stream", *stream_of(corpus), *options, "--seek-step", "6", "--steps", "3", "--digests", tmp_path / "part")
    whole, part = digests_of(tmp_path / "whole"), digests_of(tmp_path / "part")
    assert part == whole[-len(part) :]
    assert len(part) == len(whole) // 3


def test_stream_of_a_finite_recipe_ends_and_says_what_is_left_out(zephon, corpus):
    code, out, _ = zephon("stream", *stream_of(corpus, "finite.toml"), "--microbatch-size", "1")
    records, tokens = (int(n.replace(",", "")) for n in re.search(r"([\d,]+) records, ([\d,]+) tokens", out).groups())
    assert (code, tokens) == (0, 33 * records)
    left_out = int(re.search(r"left out: (\d+) tokens", out).group(1))
    assert 0 <= left_out < 33
    split, documents = re.search(
        r"packing: 100.00% of places hold tokens, (\d+) of (\d+) documents split", out
    ).groups()
    assert 0 < int(split) < int(documents) <= 260
    rows = [int(line.split()[4]) for line in out.splitlines() if line[:2] in ("a ", "b ")]
    assert rows == [200, 60]


def test_output_that_is_no_terminal_has_plain_lines(zephon, corpus):
    _, out, err = zephon("stream", *stream_of(corpus), "--microbatch-size", "4", "--steps", "5")
    assert (out + err).isascii()
    assert (out + err).replace("\n", "").isprintable()
    assert all(line == line.rstrip() for line in out.splitlines())


# show


def test_show_prints_documents_with_place_and_text(zephon, corpus):
    code, out, _ = zephon("show", *stream_of(corpus), "--global-batch", "4", "--step", "2", "--chars", "20")
    assert code == 0
    heads = re.findall(r"^record (\d+), lane (\d): 33 tokens of \d+ documents?$", out, flags=re.M)
    assert heads == [("8", "0"), ("9", "1"), ("10", "2"), ("11", "3")]
    places = re.findall(r"^  ([ab]), (\S+), row (\d+), tokens (\d+) to (\d+)\n    \| (.*)$", out, flags=re.M)
    assert {(name, shard) for name, shard, *_ in places} == {("a", "a.jsonl"), ("b", "b.jsonl.gz")}
    whole = [(name, int(row), text) for name, _, row, begin, end, text in places if begin == "0" and int(end) > 12]
    assert whole
    for name, row, text in whole:
        assert text.startswith(f"<|bos|>{'apple' if name == 'a' else 'bear'} {row}:")


def test_show_of_one_record_prints_that_record(zephon, corpus):
    code, out, _ = zephon("show", *stream_of(corpus), "--global-batch", "4", "--step", "2", "--record", "10")
    assert code == 0
    assert re.findall(r"^record (\d+)", out, flags=re.M) == ["10"]


def test_show_by_a_flush_index_shows_the_same_and_leaves_the_index_alone(zephon, corpus, tmp_path):
    options = ["--microbatch-size", "4", "--global-batch", "4", "--steps", "60", "--flush-index", tmp_path]
    assert zephon("stream", *stream_of(corpus), *options)[0] == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    arguments = *stream_of(corpus), "--global-batch", "4", "--step", "55"
    _, counted, _ = zephon("show", *arguments)
    code, found, _ = zephon("show", *arguments, "--flush-index", tmp_path)
    assert (code, found) == (0, counted)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    code, _, err = zephon("show", *stream_of(corpus, seq_len=48), *arguments[5:], "--flush-index", tmp_path)
    assert code == 2
    assert "was written by a run with other data" in err
    _, _, err = zephon("show", *arguments, "--flush-index", tmp_path / "nope")
    assert "nope: there is no such folder" in err


def test_show_refuses_a_record_of_another_step(zephon, corpus):
    code, _, err = zephon("show", *stream_of(corpus), "--global-batch", "4", "--step", "2", "--record", "3")
    assert code == 2
    assert err == "error: record 3 is not in step 2, which holds records 8 to 11; it is in step 0.\n"


def test_show_beyond_the_end_of_the_data_says_so(zephon, corpus):
    code, _, err = zephon("show", *stream_of(corpus, "finite.toml"), "--global-batch", "4", "--step", "5000")
    assert code == 2
    assert "the data ends before step 5000" in err


def test_text_of_documents_cannot_steer_the_terminal(zephon, corpus):
    code, out, _ = zephon("show", *stream_of(corpus), "--global-batch", "32", "--step", "0", "--chars", "999")
    assert code == 0
    assert "\\x1b[31mred" in out
    assert "\x1b" not in out


# verify, on ledgers


@pytest.fixture(scope="module")
def runs(corpus):
    """Ledgers of the same four steps at dp 1, dp 2, and of another seed."""

    def run(name, dp, steps=4, seed=5):
        recipe = corpus / f"seed-{seed}.toml"
        recipe.write_text((corpus / "recipe.toml").read_text().replace("seed = 5", f"seed = {seed}"))
        for rank in range(dp):
            pipeline = Pipeline.from_recipe(
                recipe,
                tokenizer=corpus / "tokenizer",
                seq_len=32,
                microbatch_size=2,
                global_batch=8,
                dp_degree=dp,
                dp_group_id=rank,
                ledger=corpus / name,
            )
            for n, _ in enumerate(pipeline, start=1):
                if n == steps * 8 // dp // 2:
                    break
            pipeline.close()
        return corpus / name

    return {"one": run("one", 1), "two": run("two", 2, steps=3), "other": run("other", 1, seed=6)}


def test_verify_of_equal_runs_exits_with_0(zephon, runs):
    code, out, _ = zephon("verify", runs["one"], runs["two"])
    assert code == 0
    assert out.splitlines()[-1] == "all 2 runs are identical over the 3 steps that they share"


def test_verify_of_different_runs_exits_with_1_and_names_step_and_documents(zephon, runs):
    code, out, _ = zephon("verify", runs["one"], runs["two"], runs["other"])
    assert code == 1
    assert re.search(
        r"^different: step 0, lane 0 \(record 0\): \S+one consumed [ab] row \d+.*\S+other consumed", out, re.M
    )
    assert [line.split()[-1] for line in out.splitlines()[1:4]] == ["first", "yes", "no"]


def test_verify_names_the_one_record_that_was_tampered_with(zephon, runs, tmp_path):
    for file in runs["one"].iterdir():
        content = bytearray(file.read_bytes())
        if file.suffix == ".ledger":
            content[512 + 40 * 21 + 20] ^= 1
        (tmp_path / file.name).write_bytes(content)
    code, out, _ = zephon("verify", runs["one"], tmp_path)
    assert code == 1
    assert "different: step 2, lane 5 (record 21): " in out


def test_verify_draws_the_barcode(zephon, runs, tmp_path):
    picture = tmp_path / "barcode.png"
    code, out, _ = zephon("verify", runs["one"], runs["other"], "--plot", picture)
    assert code == 1
    assert f"barcode: {picture}" in out
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_barcode_is_refused_in_one_sentence(zephon, runs, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    code, out, err = zephon("verify", runs["one"], runs["two"], "--plot", tmp_path / "barcode.png")
    assert (code, out) == (2, "")
    assert err == "error: the barcode needs matplotlib, which is not installed: pip install 'zephon-core[plot]'.\n"


def test_a_ledger_cut_off_by_a_kill_is_compared_as_far_as_it_goes(zephon, runs, tmp_path):
    for file in runs["one"].iterdir():
        content = file.read_bytes()
        (tmp_path / file.name).write_bytes(content[:-57])
    code, out, _ = zephon("verify", runs["one"], tmp_path)
    assert code == 0
    assert "over the 3 steps" in out


# What is refused

BAD_STREAMS = {
    "--microbatch-size 3 --global-batch 8": r"8 records for each of 1 group, .* can be 1, 2, 4, 8",
    "--microbatch-size 4 --global-batch 8 --dp-degree 3": r"8 records does not divide among 3 groups.* 1, 2, 4, 8",
    "--microbatch-size 4 --canonical-replicas 8 --dp-degree 3": r"8 lanes .* do not divide among 3",
    "--microbatch-size 4 --canonical-replicas 8 --dp-degree 2 --dp-rank 2": r"dp_group_id is 2",
    "--microbatch-size 4 --dp-degree 2": r"canonical_replicas",
    "--microbatch-size 4 --runner fast": 'runner is "fast"',
    "--microbatch-size 4 --steps 1 --digests /dev/null/x": r"/dev/null/x: the digests cannot be written here",
    "--microbatch-size 2 --canonical-replicas 8 --seek-step 1": r"microbatch 1 .* a round of the 8 lanes",
}


@pytest.mark.parametrize("options", BAD_STREAMS)
def test_stream_refuses_what_does_not_fit_in_one_sentence(zephon, corpus, options):
    code, out, err = zephon("stream", *stream_of(corpus), *options.split())
    assert (code, out) == (2, "")
    assert re.match(f"error: .*{BAD_STREAMS[options]}", err)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "options", ["--microbatch-size 0", "--microbatch-size x", "--microbatch-size 1 --steps -1", "", "--seq-lenn 3"]
)
def test_bad_numbers_and_options_are_usage_errors(zephon, corpus, options):
    code, out, err = zephon("stream", *stream_of(corpus), *options.split())
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert "--" in err


def test_recipe_and_tokenizer_that_do_not_exist_are_named(zephon, corpus):
    rest = ["--seq-len", "8", "--microbatch-size", "1"]
    _, _, err = zephon("stream", corpus / "nope.toml", "--tokenizer", corpus / "tokenizer", *rest)
    assert err.startswith(f"error: {corpus / 'nope.toml'}: the recipe cannot be read: No such file")
    _, _, err = zephon("stream", corpus, "--tokenizer", corpus / "tokenizer", *rest)
    assert err.startswith(f"error: {corpus}: the recipe cannot be read: Is a directory")
    _, _, err = zephon("stream", corpus / "recipe.toml", "--tokenizer", corpus / "nope", *rest)
    assert err.startswith(f"error: tokenizer '{corpus / 'nope'}' does not exist")


def test_an_unknown_key_is_refused_with_the_nearest_known(zephon, corpus, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('sed = 3\n[[sources]]\nname = "a"\npath = "a.jsonl"\n')
    code, _, err = zephon(
        "stream", recipe, "--tokenizer", corpus / "tokenizer", "--seq-len", "8", "--microbatch-size", "1"
    )
    assert code == 2
    assert re.match(r'error: .*recipe.toml: unknown key "sed"\. Did you mean "seed"\?\n$', err)


BAD_VERIFIES = {
    "{corpus}/nope": r"nope: there is no such file or folder",
    "{corpus}/one": r"only one folder is given",
    "{corpus}/one {corpus}/recipe.toml": r"recipe.toml is a file and \S+one a folder",
    "{corpus}/recipe.toml {corpus}/finite.toml": r"2 files are given",
    "{corpus}/recipe.toml --seq-len 8": r"add --tokenizer, --global-batch, --dp\.",
    "{corpus}/one {corpus}/two --dp 1,2": r"--dp goes with a recipe",
    "{corpus}/one {corpus}/tokenizer": r"tokenizer holds no ledger",
    "{corpus}/one {corpus}/two --plot barcode.bmp": r"barcode.bmp: a picture's name ends in .png",
    "{recipe} --dp 1,3": r"8 lanes .* do not divide among 3",
    "{recipe} --dp 1,,2": r"--dp is '1,,2'; whole numbers of at least 1",
    "{recipe} --dp 1,2 --resume-at 0": r"--resume-at is '0'; whole numbers of at least 1",
    "{recipe} --dp 1,2 --resume-at 3 --steps 3": r"--resume-at 3 is not before the last of 3 steps",
    "{recipe} --dp 1 --keep {corpus}": r"this is not an empty folder",
}


@pytest.mark.parametrize("arguments", BAD_VERIFIES)
def test_verify_refuses_what_does_not_fit_before_any_process_starts(zephon, corpus, runs, monkeypatch, arguments):
    monkeypatch.setattr(Matrix, "run", lambda *_: pytest.fail("processes were started"))
    recipe = f"{corpus}/recipe.toml --tokenizer {corpus}/tokenizer --seq-len 32 --global-batch 8"
    code, out, err = zephon("verify", *arguments.format(corpus=corpus, recipe=recipe).split())
    assert (code, out) == (2, "")
    assert re.match(f"error: .*{BAD_VERIFIES[arguments]}", err)
    assert err.count("\n") == 1


def test_help_and_version_are_short(zephon):
    code, out, _ = zephon("--help")
    assert code == 0
    assert [command for command in ("stream", "plan", "show", "index", "verify") if f"\n  {command}" not in out] == []
    assert zephon("--version")[1].startswith("zephon 0.")


# Parts


def test_a_matrix_has_every_degree_and_a_chain_from_each_with_kills(corpus, tmp_path):
    runs = plan_runs(setup_of(corpus), [1, 2, 8], [3, 7], 10, tmp_path)
    assert [run.title for run in runs] == ["dp 1", "dp 2", "dp 8", "dp 1 > 2 > 8", "dp 2 > 8 > 1", "dp 8 > 1 > 2"]
    assert [[(leg.dp, leg.last) for leg in run.legs] for run in runs[2:4]] == [[(8, 10)], [(1, 3), (2, 7), (8, 10)]]
    for run in runs[3:]:
        assert any(leg.doomed for leg in run.legs)
        assert not run.legs[-1].doomed
        for leg in run.legs:
            per_step = 8 // leg.dp // microbatch_for(8 // leg.dp, 2)
            assert all(0 <= rank < leg.dp and 1 <= n <= per_step * (10 - leg.last) for rank, n in leg.doomed.items())


def test_runs_just_made_must_have_all_steps_of_the_first(corpus, runs):
    class At(Run):
        """A run whose ledger lies elsewhere."""

        @property
        def ledger(self):
            return runs[self.title]

    one, two = At("one", corpus, [Leg(1, 4)]), At("two", corpus, [Leg(2, 4)])
    assert [verdict.difference for verdict in judge_runs(setup_of(corpus), [one, two])] == [None, "step 3 is missing."]
    killed = At("two", corpus, [Leg(2, 3, {0: 1})])
    assert judge_runs(setup_of(corpus), [one, killed])[1].difference is None
    assert judge_runs(setup_of(corpus), [two, one])[1].difference == "step 3 follows, where two had ended."
    other = At("other", corpus, [Leg(1, 4)])
    assert "step 0, lane 0 (record 0)" in judge_runs(setup_of(corpus), [one, other])[1].difference


def test_a_ledger_that_contradicts_itself_is_a_difference(corpus, runs, tmp_path):
    ledger = tmp_path / "ledger"
    ledger.mkdir()
    for name in ("one", "other"):
        for file in runs[name].iterdir():
            (ledger / f"{name}-{file.name}").write_bytes(file.read_bytes())
    with pytest.raises(DataError):
        read_ledger(ledger)
    mixed = Run("mixed", tmp_path, [Leg(1, 4)])
    one = Run("one", tmp_path / "one", [Leg(1, 4)])
    one.ledger.mkdir(parents=True)
    for file in runs["one"].iterdir():
        (one.ledger / file.name).write_bytes(file.read_bytes())
    assert "consumed twice with different content" in judge_runs(setup_of(corpus), [one, mixed])[1].difference


def test_numbers_with_commas_are_read_and_anything_else_refused():
    assert parse_numbers("1,2, 4,2", "--dp", least=1) == [1, 2, 4]
    for text in ("", "0", "-1", "1;2", "1.5", "x", "²", "9" * 5000):
        with pytest.raises(PipelineError, match="--dp is"):
            parse_numbers(text, "--dp", least=1)


def test_the_microbatch_of_a_share_divides_it():
    assert [microbatch_for(12, most) for most in (1, 5, 8, 100)] == [1, 4, 6, 12]


def test_numbers_are_worded_for_people():
    assert [count(n) for n in (0, 950, 12_345, 4_560_000, 7.89e9)] == ["0", "950", "12.3k", "4.56M", "7.89G"]
    assert (plural(1, "rank"), plural(2000, "rank")) == ("1 rank", "2,000 ranks")
    assert steps_text({}) == "none"
    assert steps_text(dict.fromkeys([0, 1, 2], b"")) == "0-2"
    assert steps_text(dict.fromkeys([4], b"")) == "4"
    assert steps_text(dict.fromkeys([0, 2], b"")) == "0-2 without 1"


def test_printable_text_keeps_letters_of_all_scripts_and_nothing_that_steers():
    assert printable("größer 漢字 \x1b]0;x\x07\u202e\n") == "größer 漢字 \\x1b]0;x\\x07\\u202e\\n"
    assert printable("a\n\tb\r", lines=True) == "a\n\tb\\r"


def test_a_wide_table_is_not_cut_where_nobody_has_a_terminal(capsys):
    from zephon.cli.console import make_console

    print_table(make_console(), ["step", "SHA-256"], [["1", "f" * 64], ["10", "[red]"]], right="r")
    assert capsys.readouterr().out == f"step  SHA-256\n   1  {'f' * 64}\n  10  [red]\n"


def test_ranks_killed_far_apart_are_no_difference_but_what_they_consumed_counts(corpus, runs, tmp_path):
    files = {path.name[:5] + path.suffix: path for path in runs["two"].iterdir()}
    for name, file in files.items():
        content = file.read_bytes()
        if name == "dp2-0.ledger":
            content = content[: 512 + 40 * 5]  # rank 0 died in its second step, rank 1 did not
        if name == "dp2-1.ledger":
            (tmp_path / "other").mkdir()
            (tmp_path / "other" / file.name).write_bytes(content[:-4] + b"\0" * 4)
        (tmp_path / file.name).write_bytes(content)
    one, cut = read_ledger(runs["one"]), read_ledger(tmp_path)
    assert compare(one, cut) is None
    (tmp_path / "other" / "dp2-0-x.ledger").write_bytes((tmp_path / files["dp2-0.ledger"].name).read_bytes())
    difference = compare(one, read_ledger(tmp_path / "other"))
    assert (difference.step, difference.lane) == (2, 7)


def test_plan_draws_the_mixture_and_warns_of_many_passes(zephon, corpus):
    sources = "".join(f'[[sources]]\nname = "{n}"\npath = "{p}"\n' for n, p in (("a", "a.jsonl"), ("b", "b.jsonl.gz")))
    stages = '[[schedule]]\nmixture = { a = 1 }\n[[schedule]]\nstart_steps = 50\nchange = "linear"\nend_steps = 80\n'
    path = corpus / "scheduled.toml"
    path.write_text(f"{sources}{stages}mixture = {{ a = 1, b = 1 }}\n")
    common = [path, "--tokenizer", corpus / "tokenizer", "--seq-len", 31, "--global-batch", 8]
    code, out, err = zephon("plan", *common, "--steps", 100, "--max-passes", 2)
    assert code == 0 and not err
    lines = out.splitlines()
    assert lines[0] == "25.6k planned tokens, 100 steps"
    assert lines[1].startswith("a |") and lines[1].endswith("100.0% to 50.0%")
    assert lines[2].startswith("b |" + 25 * " ") and lines[2].endswith("0.0% to 50.0%")
    assert re.search(r"^warning: [ab] is gone through [\d.]+ times, more than 2", out, re.MULTILINE)
    assert "warning" not in zephon("plan", *common, "--tokens", "1k")[1]
    for options, words in (([], "either --tokens or --steps"), (["--tokens", "x"], 'tokens is "x"')):
        code, _, err = zephon("plan", *common, *options)
        assert code == 2 and words in err and err.count("\n") == 1


@pytest.mark.parametrize("chain", [["one"], ["one", "two"], ["one", "two", "three", "two"]])
def test_plan_and_others_refuse_recipes_that_continue_each_other_in_a_circle(zephon, corpus, tmp_path, chain):
    source = f'[[sources]]\nname = "a"\npath = "{corpus / "a.jsonl"}"\n'
    for name, then in zip(chain, [*chain[1:], chain[0]], strict=True):
        if not (tmp_path / f"{name}.toml").exists():
            (tmp_path / f"{name}.toml").write_text(f'continue_from = "{then}.toml"\n{source}')
    path = tmp_path / "one.toml"
    common = [path, "--tokenizer", corpus / "tokenizer", "--seq-len", 31, "--global-batch", 8]
    code, _, err = zephon("plan", *common, "--steps", 10)
    assert code == 2 and "in a circle, " in err and f"{chain[-1]}.toml" in err and err.count("\n") == 1
    with pytest.raises(RecipeError, match="in a circle"):
        source_of(DataRecipe.from_toml(path))


def test_plan_of_a_takeover_reads_the_recipes_before_it(zephon, corpus, tmp_path):
    source = f'[[sources]]\nname = "a"\npath = "{corpus / "a.jsonl"}"\n'
    (tmp_path / "one.toml").write_text(source)
    (tmp_path / "two.toml").write_text(f'continue_from = "one.toml"\n{source}')
    common = ["--tokenizer", corpus / "tokenizer", "--seq-len", 31, "--global-batch", 8, "--steps", 10]
    assert "from the takeover on" in zephon("plan", tmp_path / "two.toml", *common)[1]
    changed = DataRecipe.from_toml(tmp_path / "one.toml").replace(
        continue_from=str(tmp_path / "one.toml"), chunk_size=7
    )
    assert len(chain_of(changed)) == 2
    (tmp_path / "one.toml").unlink()
    assert zephon("plan", tmp_path / "two.toml", *common)[0] == 2


@st.composite
def planned(draw):
    """A pipeline and the tokens of a run."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 60), st.sampled_from([1, 9, 80])), min_size=1, max_size=3))
    datasets = [
        Dataset.from_dict(f"d{d}", {"text": [f"{d} {n} " * words for n in range(rows)]})
        for d, (rows, words) in enumerate(sizes)
    ]
    weights = st.fixed_dictionaries({dataset.name: st.floats(0.01, 10) for dataset in datasets})
    stages, at = [Stage(draw(weights))], 0
    for change in draw(st.lists(st.sampled_from(["constant", "linear", "cosine"]), max_size=2)):
        at += draw(st.integers(10, 20_000))
        end = {} if change == "constant" else {"end_tokens": at + draw(st.integers(1, 9))}
        stages.append(Stage(draw(weights), start_tokens=at, change=change, **end))
    order = {"repeat": draw(st.booleans()), "chunk_size": draw(st.integers(1, 100)), "token_estimation": None}
    if draw(st.booleans()):
        source = ScheduledMixtureWorkSource(datasets=datasets, schedule=stages, **order)
    else:
        source = StaticMixtureWorkSource(datasets=datasets, mixture=draw(weights), **order)
    options = {"global_batch": 8, "canonical_replicas": draw(st.sampled_from([1, 8]))}
    return Pipeline(source).options(**options), draw(st.integers(1, 50_000))


@given(planned())
def test_shares_that_plan_draws_add_up_to_the_whole(corpus, made):
    pipeline, total = made
    compiled = pipeline.tokenize(corpus / "tokenizer").pack_flat(31).batch(1).compiled
    forecast = Forecast(compiled)
    total = min(total, forecast.tokens or total)
    ratios = list(compiled.tokens_per_row.values())
    for part in range(10):
        shares = forecast.shares(total * part / 10, total * (part + 1) / 10)
        assert math.isclose(sum(shares), 1) and min(shares) >= 0
        assert sum(round(float(each[:-1]) * 10) for each in percents(shares)) == 1000
    read = forecast.rows(total)
    assert math.isclose(sum(rows * ratio for rows, ratio in zip(read, ratios, strict=True)), total, rel_tol=1e-6)
    assert len(ratios) > 1 or percents(shares) == ["100.0%"]


def test_plan_of_data_that_ends_says_where(zephon, corpus):
    recipe = corpus / "finite.toml"
    common = [recipe, "--tokenizer", corpus / "tokenizer", "--seq-len", 31, "--global-batch", 8]
    code, out, _ = zephon("plan", *common, "--tokens", "1b")
    assert code == 0 and out.startswith("the data ends after ") and "1.00" in out
