"""`zephon stream`: what it prints, what it writes, and what it refuses."""

import re
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from zephon import Pipeline


def stream_of(corpus, name="recipe.toml"):
    return corpus / name, "--tokenizer", corpus / "tokenizer", "--seq-len", "32"


def digests_of(file: Path) -> list[tuple[int, str]]:
    lines = [line.split(" ") for line in file.read_text().splitlines()]
    return [(int(number), digest) for number, digest in lines]


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
    assert out.startswith("5 steps: 20 records of 32 + 1 tokens, 660 tokens in ")


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


def test_stream_starts_at_the_step_it_is_told_to(zephon, corpus, tmp_path):
    options = ["--microbatch-size", "4", "--global-batch", "8"]
    zephon("stream", *stream_of(corpus), *options, "--steps", "9", "--digests", tmp_path / "whole")
    zephon("stream", *stream_of(corpus), *options, "--seek-step", "7", "--steps", "3", "--digests", tmp_path / "part")
    whole, part = digests_of(tmp_path / "whole"), digests_of(tmp_path / "part")
    assert part == whole[-len(part) :]
    assert len(part) == len(whole) // 3


def test_stream_goes_on_where_the_states_of_other_ranks_were_taken(zephon, corpus, tmp_path):
    common = [*stream_of(corpus), "--microbatch-size", "2", "--global-batch", "8"]
    zephon("stream", *common, "--steps", "6", "--digests", tmp_path / "whole")
    for rank in "01":
        ranks = ["--dp-degree", "2", "--dp-rank", rank]
        assert zephon("stream", *common, *ranks, "--steps", "4", "--checkpoint", tmp_path / "states")[0] == 0
    code, _, err = zephon(
        "stream", *common, "--restore", tmp_path / "states", "--steps", "2", "--digests", tmp_path / "part"
    )
    assert (code, err) == (0, "")
    assert digests_of(tmp_path / "part") == digests_of(tmp_path / "whole")[32:]
    (tmp_path / "states" / "rank-0-of-2.json").write_text('{"zephon": 1')
    code, out, err = zephon("stream", *common, "--restore", tmp_path / "states", "--steps", "2")
    assert (code, out) == (2, "")
    assert re.match(r"error: \S+rank-0-of-2.json: the state cannot be read: it is not JSON\.\n$", err)


def test_a_checkpoint_after_the_end_of_the_data_is_refused(zephon, corpus, tmp_path):
    options = ["--microbatch-size", "8", "--steps", "4000", "--checkpoint", tmp_path / "states"]
    code, _, err = zephon("stream", *stream_of(corpus, "finite.toml"), *options)
    assert code == 2
    assert re.match(r"error: the data ended after \d+ steps, before the checkpoint after step 4000", err)


def test_stream_of_a_finite_recipe_ends_and_says_what_is_left_out(zephon, corpus):
    code, out, _ = zephon("stream", *stream_of(corpus, "finite.toml"), "--microbatch-size", "1")
    records, tokens = (
        int(n.replace(",", "")) for n in re.search(r"([\d,]+) records of 32 \+ 1 tokens, ([\d,]+) tokens", out).groups()
    )
    assert (code, tokens) == (0, 33 * records)
    left_out = int(re.search(r"left over: (\d+) tokens", out).group(1))
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


BAD_STREAMS = {
    "--microbatch-size 3 --global-batch 8": r"--microbatch-size is 3; expected a divisor of the 8 rec.* 1, 2, 4, 8",
    "--microbatch-size 2 --global-batch 8 --dp-degree 3": r"--global-batch is 8; expected a multiple of the 3 groups",
    "--microbatch-size 4 --canonical-replicas 8 --dp-degree 3": r"8 lanes .* do not divide among 3",
    "--microbatch-size 4 --canonical-replicas 8 --dp-degree 2 --dp-rank 2": r"dp_group_id is 2",
    "--microbatch-size 4 --dp-degree 2": r"canonical_replicas",
    "--microbatch-size 4 --steps 1 --digests /dev/null/x": r"/dev/null/x: the digests cannot be written",
    "--microbatch-size 2 --canonical-replicas 8 --seek-step 2": "--seek-step counts global batches; pass",
}


@pytest.mark.parametrize("options", BAD_STREAMS)
def test_stream_refuses_what_does_not_fit_in_one_sentence(zephon, corpus, options):
    code, out, err = zephon("stream", *stream_of(corpus), *options.split())
    assert (code, out) == (2, "")
    assert re.match(f"error: .*{BAD_STREAMS[options]}", err)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [
        "--microbatch-size 0",
        "--microbatch-size x",
        "--microbatch-size 1 --steps -1",
        "",
        "--seq-lenn 3",
        "--microbatch-size 1 --runner fast",
    ],
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
    assert err.startswith(f"error: tokenizer_id is '{corpus / 'nope'}', which does not exist")


def test_an_unknown_key_is_refused_with_the_nearest_known(zephon, corpus, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('sed = 3\n[[sources]]\nname = "a"\npath = "a.jsonl"\n')
    code, _, err = zephon(
        "stream", recipe, "--tokenizer", corpus / "tokenizer", "--seq-len", "8", "--microbatch-size", "1"
    )
    assert code == 2
    assert re.match(r'error: .*recipe.toml: unknown key "sed"\. Did you mean "seed"\?\n$', err)


def test_help_and_version_are_short(zephon):
    code, out, _ = zephon("--help")
    assert code == 0
    assert [command for command in ("stream", "plan", "show", "index", "verify") if f"\n  {command}" not in out] == []
    assert zephon("--version")[1].startswith("zephon 0.")


@pytest.mark.parametrize(("ready", "words"), [(1, r"\(([\d.]+)(k|M|) tokens/s\)$"), (1 << 20, r"filling included\)$")])
def test_the_speed_counts_from_behind_what_was_ready_with_the_first_batch(zephon, corpus, monkeypatch, ready, words):
    monkeypatch.setattr("zephon.config.options._READY_BYTES", ready)
    recipe = corpus / "unshuffled.toml"
    recipe.write_text("shuffle_after_pack = false\n" + (corpus / "recipe.toml").read_text())
    begun, real = [], time.perf_counter

    def perf_counter():
        begun.append(real())
        return real() + (100 if len(begun) > 3 else 0)  # as if the first batch had taken that long

    monkeypatch.setattr("zephon.cli.stream.time", SimpleNamespace(perf_counter=perf_counter))
    _, out, _ = zephon("stream", *stream_of(corpus, "unshuffled.toml"), "--microbatch-size", "2", "--steps", "40")
    match = re.search(words, out.splitlines()[0])
    assert match and " tokens in 10" in out
    # 26 tokens/s, had the seconds before the first batch counted.
    assert ready > 1 or float(match[1]) * {"": 1, "k": 1e3, "M": 1e6}[match[2]] > 2 * 40 * 2 * 33 / 100


@pytest.mark.parametrize("option", ["--ledger", "--flush-index", "--checkpoint", "--restore"])
def test_a_store_is_no_folder_of_the_command(zephon, corpus, tmp_path, monkeypatch, option):
    monkeypatch.chdir(tmp_path)
    sizes = ["--tokenizer", corpus / "tokenizer", "--seq-len", 32, "--microbatch-size", 2, "--steps", 1]
    code, _, err = zephon("stream", corpus / "recipe.toml", *sizes, option, "s3://bucket/run")
    assert code == 2
    assert f"{option[2:]} is 's3://bucket/run'; expected a path on this machine, not a store" in err
    assert not any(tmp_path.iterdir())
