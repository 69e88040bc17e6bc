"""`zephon verify`: runs compared by their ledgers, and the runs that it makes of a recipe."""

import re
import shutil

import pytest

from zephon import DataError, PipelineError
from zephon.cli.matrix import Leg, Matrix, Run, Setup, plan_runs
from zephon.cli.verify import judge, parse_numbers, steps_text
from zephon.run.ledger import compare, read_ledger


def setup_of(corpus):
    return Setup(corpus / "recipe.toml", str(corpus / "tokenizer"), 32, 8, 8, 2, None, 10, False)


def test_verify_of_equal_runs_exits_with_0(zephon, runs):
    code, out, _ = zephon("verify", runs["one"], runs["two"])
    assert code == 0
    assert out.splitlines()[-1] == "all 2 runs are identical over the 3 steps that they share"


def test_verify_of_different_runs_exits_with_1_and_names_step_and_documents(zephon, runs):
    code, out, _ = zephon("verify", runs["one"], runs["two"], runs["other"])
    assert code == 1
    assert re.search(
        r"^different: step 1, lane 0 \(record 0\): \S+one consumed [ab] row \d+.*\S+other consumed", out, re.M
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
    assert "different: step 3, lane 5 (record 21): " in out


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


BAD_VERIFIES = {
    "{corpus}/nope": r"nope does not exist",
    "{corpus}/one": r"1 ledger folder is given",
    "{corpus}/one {corpus}/recipe.toml": r"2 paths are given, some of them files",
    "{corpus}/recipe.toml {corpus}/finite.toml": r"2 paths are given, some of them files",
    "{corpus}/recipe.toml --seq-len 8": r"--tokenizer, --global-batch, --dp must be set",
    "{corpus}/one {corpus}/two --dp 1,2": r"--dp applies to a recipe",
    "{corpus}/one {corpus}/tokenizer": r"tokenizer holds no ledger",
    "{corpus}/one {corpus}/two --plot barcode.bmp": r"--plot is barcode.bmp; expected a name that ends in .png",
    "{recipe} --dp 1,3": r"8 lanes .* do not divide among 3",
    "{recipe} --dp 1,,2": r"--dp is '1,,2'; expected whole numbers above 0",
    "{recipe} --dp 1,2 --resume-at 0": r"--resume-at is '0'; expected whole numbers above 0",
    "{recipe} --dp 1,2 --resume-at 3 --steps 3": r"--resume-at is 3; expected less than --steps 3",
    "{recipe} --dp 1 --keep {corpus}": r"expected a new or empty folder",
}


@pytest.mark.parametrize("arguments", BAD_VERIFIES)
def test_verify_refuses_what_does_not_fit_before_any_process_starts(zephon, corpus, runs, monkeypatch, arguments):
    monkeypatch.setattr(Matrix, "run", lambda *_: pytest.fail("processes were started"))
    recipe = f"{corpus}/recipe.toml --tokenizer {corpus}/tokenizer --seq-len 32 --global-batch 8"
    code, out, err = zephon("verify", *arguments.format(corpus=corpus, recipe=recipe).split())
    assert (code, out) == (2, "")
    assert re.match(f"error: .*{BAD_VERIFIES[arguments]}", err)
    assert err.count("\n") == 1


def test_a_matrix_has_every_degree_and_a_chain_from_each_with_kills(corpus, tmp_path):
    runs = plan_runs(setup_of(corpus), [1, 2, 8], [3, 7], tmp_path)
    assert [run.title for run in runs] == ["dp 1", "dp 2", "dp 8", "dp 1 > 2 > 8", "dp 2 > 8 > 1", "dp 8 > 1 > 2"]
    assert [[(leg.dp, leg.last) for leg in run.legs] for run in runs[2:4]] == [[(8, 10)], [(1, 3), (2, 7), (8, 10)]]
    for run in runs[3:]:
        assert any(leg.doomed for leg in run.legs)
        assert not run.legs[-1].doomed
        for leg in run.legs:
            per_step = 8 // leg.dp // setup_of(corpus).microbatch(leg.dp)
            assert all(0 <= rank < leg.dp and 1 <= n <= per_step * (10 - leg.last) for rank, n in leg.doomed.items())


def test_runs_just_made_must_have_all_steps_of_the_first(corpus, runs):
    class At(Run):
        """A run whose ledger lies elsewhere."""

        @property
        def ledger(self):
            return runs[self.title]

    one, two = At("one", corpus, [Leg(1, 4)]), At("two", corpus, [Leg(2, 4)])
    assert judge([one, two], 8)[1] == [None, "step 4 is missing."]
    assert judge([two, one], 8)[1] == [None, "step 4 is after the end of two."]
    other = At("other", corpus, [Leg(1, 4)])
    assert "step 1, lane 0 (record 0)" in judge([one, other], 8)[1][1]


def test_a_ledger_that_contradicts_itself_is_a_difference(corpus, runs, tmp_path):
    mixed, one = (Run(name, tmp_path / name, [Leg(1, 4)]) for name in ("mixed", "one"))
    for run in (mixed, one):
        shutil.copytree(runs["one"], run.ledger)
    (file,) = mixed.ledger.glob("*.ledger")
    content = bytearray(file.read_bytes())
    content[512 + 40 * 9 + 20] ^= 1
    file.with_name(f"again-{file.name}").write_bytes(content)
    with pytest.raises(DataError, match="record 9 was consumed twice with different content"):
        read_ledger(mixed.ledger)
    assert "consumed twice with different content" in judge([one, mixed], 8)[1][1]


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
    assert (difference.step, difference.lane) == (3, 7)


def test_numbers_with_commas_are_read_and_anything_else_refused():
    assert parse_numbers("1,2, 4,2", "--dp") == [1, 2, 4]
    for text in ("", "0", "-1", "1;2", "1.5", "x", "²", "9" * 5000):
        with pytest.raises(PipelineError, match="--dp is"):
            parse_numbers(text, "--dp")


def test_the_microbatch_of_a_share_divides_it(corpus):
    assert [setup_of(corpus).microbatch(dp) for dp in (1, 2, 4, 8)] == [2, 2, 2, 1]


def test_steps_are_worded_as_a_range():
    steps = {(): "none", (0, 1, 2): "0-2", (4,): "4", (0, 2): "0-2, 1 missing"}
    assert {numbers: steps_text(dict.fromkeys(numbers, b"")) for numbers in steps} == steps
