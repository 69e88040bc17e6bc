"""`zephon report`: what is in the page is what is in the ledger; tests/integration/test_report_page.py loads it."""

import json
import re

import pytest

from zephon.run.ledger import read_ledger


def page_of(path):
    """The data in a page."""
    text = path.read_text(encoding="utf-8")
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    return json.loads(data)


def options_of(corpus):
    return "--tokenizer", corpus / "tokenizer", "--seq-len", "32"


def test_the_page_of_ledgers_has_sources_steps_and_the_barcode(zephon, runs, tmp_path):
    code, out, err = zephon("report", runs["one"], runs["two"], runs["other"], "-o", tmp_path / "a" / "page.html")
    assert code == 0 and not err and "page.html" in out
    page, ledger = page_of(tmp_path / "a" / "page.html"), read_ledger(runs["one"])
    assert page["records"] == 32 and page["steps"] == [1, 4, 4] and page["global_batch"] == [8]
    assert page["x"] == [[n, n] for n in (1, 2, 3, 4)]
    assert sum(each["tokens"] for each in page["sources"]) == 32 * 33 and page["fill"] == [1.0] * 4
    begun = ledger.spans[ledger.spans["token"] == 0]
    for d, each in enumerate(page["sources"]):
        rows = begun["row"][begun["dataset"] == d]
        assert (each["documents"], each["distinct"]) == (len(rows), len(set(rows.tolist())))
        assert each["passes"][-1] == pytest.approx(len(rows) / each["rows"], rel=0.1)
        assert each["wanted"] == [0.5] * 4 and sum(each["seen"]) / 4 == pytest.approx(0.5, abs=0.2)
    one, two, other = page["runs"]["runs"]
    assert [same for _, same in two["cells"]] == [True] * 4 and two["cells"][3][0] == "" and not two["different"]
    assert other["cells"][0][1] is False and other["different"].startswith("step 1, lane 0")
    assert [cell[0] for cell in one["cells"]] == [each.hex()[:12] for each in ledger.step_digests(8).values()]
    assert "viewer" not in page and page["metrics"]


def test_with_the_recipe_the_page_has_the_documents_of_steps(zephon, runs, corpus, tmp_path):
    page = tmp_path / "page.html"
    recipe = corpus / "seed-5.toml"
    options = *options_of(corpus), "--show", "2-3", "--records", "3", "--chars", "20", "-o", page
    code, _, err = zephon("report", runs["two"], recipe, *options)
    assert code == 0, err
    viewer = page_of(page)["viewer"]
    assert [(step["step"], len(step["records"]), step["of"]) for step in viewer["steps"]] == [(2, 3, 8), (3, 3, 8)]
    _, out, _ = zephon(
        "show", recipe, *options_of(corpus), "--global-batch", "8", "--step", "2", "--ledger", runs["two"], "--json"
    )
    for line, told in zip(out.splitlines(), viewer["steps"][0]["records"], strict=False):
        expected = json.loads(line)
        assert (told["record"], told["rank"], told["trained"]) == (expected["record"], expected["rank"], True)
        for mine, theirs in zip(told["documents"], expected["documents"], strict=True):
            assert mine["text"] + "x" * mine["more"] == theirs["text"][:20] + "x" * max(0, len(theirs["text"]) - 20)
            assert (mine["shard"], mine["row"]) == (theirs["shard"], theirs["row"])
    code, _, err = zephon("report", runs["other"], recipe, *options)
    assert code == 2 and "is not what" in err


def test_a_recipe_alone_is_run_first(zephon, corpus, tmp_path):
    page = tmp_path / "page.html"
    options = "--global-batch", "4", "--steps", "5", "-o", page
    code, _, err = zephon("report", corpus / "recipe.toml", *options_of(corpus), *options)
    assert code == 0, err
    told = page_of(page)
    assert told["steps"] == [1, 5, 5] and [each["step"] for each in told["viewer"]["steps"]] == [1, 2, 3, 4, 5]
    assert any(each["reason"].startswith("no content") and each["source"] == "b" for each in told["left"])


def test_by_a_flush_index_the_steps_are_the_same(zephon, corpus, tmp_path):
    options = "--microbatch-size", "4", "--global-batch", "4", "--steps", "60", "--ledger", tmp_path / "ledger"
    index = "--flush-index", tmp_path / "index"
    assert zephon("stream", corpus / "recipe.toml", *options_of(corpus), *options, *index)[0] == 0
    viewers = []
    for more in ((), index):
        options = *options_of(corpus), "--show", "2,30-31,57", *more, "-o", tmp_path / "page.html"
        code, _, err = zephon("report", tmp_path / "ledger", corpus / "recipe.toml", *options)
        assert code == 0, err
        viewers.append(page_of(tmp_path / "page.html")["viewer"])
    assert viewers[0] == viewers[1] and [each["step"] for each in viewers[0]["steps"]] == [2, 30, 31, 57]


def test_a_run_whose_global_batch_changed_has_its_last_steps_and_rounds_in_the_barcode(zephon, corpus, tmp_path):
    common = corpus / "recipe.toml", *options_of(corpus), "--microbatch-size", "2", "--ledger", tmp_path / "ledger"
    common += "--canonical-replicas", "2"
    saved = "--checkpoint", tmp_path / "states"
    assert zephon("stream", *common, "--global-batch", "2", "--steps", "6", *saved)[0] == 0
    code, _, err = zephon("stream", *common, "--global-batch", "4", "--steps", "4", "--restore", tmp_path / "states")
    assert code == 0, err
    options = *options_of(corpus), "-o", tmp_path / "page.html"
    code, _, err = zephon("report", tmp_path / "ledger", corpus / "recipe.toml", *options)
    assert code == 0, err
    page = page_of(tmp_path / "page.html")
    assert page["steps"] == [1, 10, 10] and page["global_batch"] == [2, 4]
    assert {each["step"] for each in page["viewer"]["steps"]} <= {7, 8, 9, 10}
    assert all(record["trained"] for each in page["viewer"]["steps"] for record in each["records"])
    assert page["runs"]["word"] == "round" and len(page["runs"]["bins"]) == 14


def test_a_long_run_is_drawn_in_stretches_of_steps(zephon, corpus, tmp_path):
    options = "--microbatch-size", "2", "--global-batch", "2", "--steps", "900", "--ledger", tmp_path / "ledger"
    assert zephon("stream", corpus / "recipe.toml", *options_of(corpus), *options)[0] == 0
    assert zephon("report", tmp_path / "ledger", "-o", tmp_path / "page.html")[0] == 0
    told = page_of(tmp_path / "page.html")
    assert told["x"][:2] == [[1, 3], [4, 6]] and told["x"][-1] == [898, 900] and len(told["runs"]["bins"]) == 225
    assert told["sources"][0]["repeats"] > 0 and told["sources"][0]["passes"][-1] > 1
    assert sum(each["tokens"] for each in told["sources"]) == 900 * 2 * 33
    assert (tmp_path / "page.html").stat().st_size < 200_000


def test_a_ledger_without_metrics_gives_a_page_that_says_so(zephon, runs, tmp_path):
    (tmp_path / "old").mkdir()
    for file in runs["one"].iterdir():
        if file.suffix != ".steps":
            (tmp_path / "old" / file.name).write_bytes(file.read_bytes())
    assert zephon("report", tmp_path / "old", "-o", tmp_path / "page.html")[0] == 0
    told = page_of(tmp_path / "page.html")
    assert told["metrics"] is False and told["sources"][0]["documents"] > 0 and told["fill"] == [None] * 4


def test_nothing_of_the_data_can_end_the_script_that_holds_it(zephon, corpus, tmp_path):
    (tmp_path / "a.jsonl").write_text(
        json.dumps({"text": "</script><script>alert(1)</script><!-- \u2028 /*DATA*/"}) + "\n"
    )
    (tmp_path / "recipe.toml").write_text('cache_dir = "cache"\n[[sources]]\nname = "</script>"\npath = "a.jsonl"\n')
    options = "--global-batch", "2", "--steps", "2", "-o", tmp_path / "page.html"
    code, _, err = zephon("report", tmp_path / "recipe.toml", *options_of(corpus), *options)
    assert code == 0, err
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.count("</script>") == 2 and "alert(1)</script>" not in text and "\u2028" not in text
    assert page_of(tmp_path / "page.html")["sources"][0]["name"] == "</script>"
    assert not re.search(
        r"(src|href)=[\"']?(http|//)|@import|url\((?!#)", text.split("/*DATA*/")[0].split('id="data"')[0]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{one}", "{corpus}/recipe.toml"], "recipe.toml needs --tokenizer and --seq-len"),
        (["{corpus}/recipe.toml", "--tokenizer", "t", "--seq-len", "8"], "expected --global-batch and --steps"),
        (["{one}", "--show", "1"], "are for the steps of a recipe"),
        (["{corpus}/nothing"], "does not exist; expected a recipe (TOML), or ledger folders"),
        (["{corpus}"], "holds no ledger"),
        (["{one}", "{corpus}/recipe.toml", "{corpus}/finite.toml"], "2 recipes are given"),
        (["{one}", "--error-report", "{corpus}/none"], "expected the existing folder"),
    ],
    ids=["no tokenizer", "no steps", "no recipe", "missing", "no ledger", "two recipes", "no faults"],
)
def test_what_is_missing_is_said(zephon, runs, corpus, tmp_path, arguments, message):
    given = [each.format(one=runs["one"], corpus=corpus) for each in arguments]
    code, out, err = zephon("report", *given, "-o", tmp_path / "page.html")
    assert code == 2 and not out and message in err and err.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_steps_that_are_not_there_are_refused(zephon, runs, corpus, tmp_path):
    for show, message in (("x", "expected steps, counted from 1"), ("40", "expected steps of the ledger, from 1 to 4")):
        options = *options_of(corpus), "--show", show, "-o", tmp_path / "page.html"
        code, _, err = zephon("report", runs["one"], corpus / "seed-5.toml", *options)
        assert code == 2 and message in err


def test_reasons_of_a_report_of_rows_left_out_are_in_the_page(zephon, runs, tmp_path):
    entry = {"dataset": "a", "shard": "x.jsonl", "row": 3, "rows": 2, "operator": "read", "reason": "no JSON"}
    (tmp_path / "faults").mkdir()
    (tmp_path / "faults" / "dp1-0.jsonl").write_text("".join(json.dumps({**entry, "row": n}) + "\n" for n in (3, 9)))
    options = "--error-report", tmp_path / "faults", "-o", tmp_path / "page.html"
    assert zephon("report", runs["one"], *options)[0] == 0
    expected = {"source": "a", "operator": "read", "reason": "no JSON", "rows": 4, "first": "x.jsonl, row 3"}
    assert page_of(tmp_path / "page.html")["faults"] == [expected]
