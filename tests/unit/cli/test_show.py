"""`zephon show`: the documents of a step, where they came from, and their text."""

import json
import re
from itertools import count

import pytest

from examples.corpus import write_recipe
from zephon import Pipeline, merge_checkpoints
from zephon.run import ledger as ledger_module


def stream_of(corpus, name="recipe.toml", seq_len=32):
    return corpus / name, "--tokenizer", corpus / "tokenizer", "--seq-len", str(seq_len)


def test_show_prints_documents_with_place_and_text(zephon, corpus):
    code, out, err = zephon("show", *stream_of(corpus), "--global-batch", "4", "--step", "3", "--chars", "20")
    assert code == 0 and err.startswith("warning: this is what recipe, data and tokenizer give now.")
    heads = re.findall(r"^step 3, record (\d+), lane (\d): 33 tokens of \d+ documents?$", out, flags=re.M)
    assert heads == [("8", "0"), ("9", "1"), ("10", "2"), ("11", "3")]
    places = re.findall(r"^  ([ab]), (\S+), row (\d+), tokens (\d+) to (\d+)\n    \| (.*)$", out, flags=re.M)
    assert {(name, shard) for name, shard, *_ in places} == {("a", "a.jsonl"), ("b", "b.jsonl.gz")}
    whole = [(name, int(row), text) for name, _, row, begin, end, text in places if begin == "0" and int(end) > 12]
    assert whole
    for name, row, text in whole:
        assert text.startswith(f"<|bos|>{'apple' if name == 'a' else 'bear'} {row}:")


def test_show_of_one_record_and_of_a_range_of_steps(zephon, corpus):
    code, out, _ = zephon("show", *stream_of(corpus), "--global-batch", "4", "--step", "3", "--record", "10")
    assert code == 0
    assert re.findall(r"record (\d+)", out) == ["10"]
    _, out, _ = zephon("show", *stream_of(corpus), "--global-batch", "4", "--step", "2-4", "--chars", "0")
    assert re.findall(r"step (\d)", out) == [step for step in "234" for _ in range(4)]
    for step in ("0", "4-3", "x", "1-"):
        code, _, err = zephon("show", *stream_of(corpus), "--global-batch", "4", "--step", step)
        assert code == 2 and f"--step is {step}; expected a step, counted from 1" in err


@pytest.fixture
def trained(corpus, tmp_path):
    """A recipe over a copy of the corpus, and ledger and state of a run of two ranks that has left out step 3."""
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.jsonl").write_bytes((corpus / "a.jsonl").read_bytes())
    write_recipe(tmp_path / "recipe.toml", {"a": data}, keys={"chunk_size": 16, "cache_dir": "cache"})
    states = []
    for rank in range(2):
        options = {"global_batch": 4, "dp_degree": 2, "dp_group_id": rank, "canonical_replicas": 2}
        pipeline = Pipeline.from_recipe(
            tmp_path / "recipe.toml",
            tokenizer=corpus / "tokenizer",
            seq_len=32,
            microbatch_size=1,
            ledger=tmp_path / "ledger",
            **options,
        )
        pipeline.skip(2, 3)
        assert len([*zip(range(8), pipeline, strict=False)]) == 8
        states.append(pipeline.checkpoint())
        pipeline.close()
    (tmp_path / "state.json").write_text(json.dumps(merge_checkpoints(states)))
    common = [
        "--tokenizer",
        corpus / "tokenizer",
        "--seq-len",
        "32",
        "--global-batch",
        "4",
        "--canonical-replicas",
        "2",
    ]
    return tmp_path, [tmp_path / "recipe.toml", *common]


@pytest.mark.parametrize("proof", ["ledger", "state.json", ""])
def test_show_after_the_dataset_has_grown_does_not_show_other_documents_as_trained(zephon, trained, proof):
    folder, common = trained
    options = ["--ledger" if proof == "ledger" else "--state", folder / proof] if proof else []
    code, out, err = zephon("show", *common, "--step", "2", *options)
    assert code == 0 and ("warning: " in err) == (not proof)
    (folder / "data" / "b.jsonl").write_text("".join(json.dumps({"text": f"new {n}"}) + "\n" for n in range(300)))
    code, other, err = zephon("show", *common, "--step", "2", *options)
    if proof:
        words = (
            "record 4 of step 2 is not what .* has: " if proof == "ledger" else "with other data: dataset a: has grown"
        )
        assert code == 2 and re.search(words, err) and err.count("\n") == 1
    else:
        assert code == 0 and other != out and err.startswith("warning: ")


def test_show_names_rank_and_microbatch_by_the_ledger_and_what_was_left_out(zephon, trained):
    folder, common = trained
    code, out, err = zephon("show", *common, "--step", "2-6", "--ledger", folder / "ledger", "--json")
    assert code == 0 and not err
    lines = [json.loads(line) for line in out.splitlines()]
    assert [(line["step"], line["record"]) for line in lines] == [(n // 4 + 1, n) for n in range(4, 24)]
    assert [line["record"] for line in lines if not line["trained"]] == [8, 9, 10, 11, 20, 21, 22, 23]
    assert [(line["rank"], line["microbatch"]) for line in lines[:4]] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert all(
        sum(each["token_end"] - each["token_begin"] for each in line["documents"]) == line["tokens"] for line in lines
    )
    assert max(len(each["text"]) for line in lines for each in line["documents"]) > 30
    code, out, err = zephon("show", *common, "--step", "2-4", "--state", folder / "state.json", "--full")
    assert code == 0 and err == "step 3 is left out by the run\n"
    assert set(re.findall(r"^step (\d)", out, re.M)) == {"2", "4"} and "more character" not in out
    code, _, err = zephon("show", *common[:-3], "8", "--step", "2", "--ledger", folder / "ledger")
    assert code == 2 and "--global-batch is 8; expected 4, as in " in err


def test_show_of_a_run_that_took_over_needs_its_state(zephon, trained, corpus):
    folder, (_, *common) = trained
    write_recipe(folder / "next.toml", {"a": folder / "data", "b": corpus / "b.jsonl.gz"}, keys={"chunk_size": 16})
    (folder / "next.toml").write_text('continue_from = "recipe.toml"\n' + (folder / "next.toml").read_text())
    code, _, err = zephon("show", folder / "next.toml", *common, "--step", "9", "--ledger", folder / "ledger")
    assert code == 2 and "takes over from another run (continue_from); pass --state of a later step" in err
    steps = [
        "--microbatch-size",
        "4",
        "--steps",
        "20",
        "--ledger",
        folder / "ledger",
        "--checkpoint",
        folder / "states",
    ]
    assert zephon("stream", folder / "next.toml", *common, *steps, "--restore", folder / "state.json")[0] == 0
    proof = ["--ledger", folder / "ledger", "--state", folder / "states", "--json"]
    code, out, _ = zephon("show", folder / "next.toml", *common, "--step", "1-24", *proof)
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and all(line["trained"] for line in lines) and len(lines) == 23 * 4
    assert {each["dataset"] for line in lines for each in line["documents"]} == {"a", "b"}


@pytest.fixture
def start(trained, monkeypatch):
    """The folder of a run, arguments of `show`, and a function that goes on with it for some steps."""
    folder, (_, *common) = trained
    numbers = count()

    def go(steps, batch, *, recipe="recipe.toml", state="state.json", **changes):
        monkeypatch.setattr(ledger_module, "_job", lambda: f"job {next(numbers)}")
        options = {"global_batch": batch, "canonical_replicas": 2, "ledger": folder / "ledger"}
        pipeline = Pipeline.from_recipe(
            folder / recipe, tokenizer=common[1], seq_len=32, microbatch_size=2, **options
        ).restore(json.loads((folder / state).read_text()), **changes)
        seen = [batch for _, batch in zip(range(steps * batch // 2), pipeline, strict=False)]
        (folder / "later.json").write_text(json.dumps(pipeline.checkpoint()))
        pipeline.close()
        return seen

    return folder, common[:4], go


def test_show_counts_steps_as_the_trainer_did_when_the_global_batch_changed(zephon, start):
    folder, common, go = start  # five steps of four records, of which the third was left out
    seen = go(3, 8)
    for proof in (["--ledger", folder / "ledger"], ["--ledger", folder / "ledger", "--state", folder / "later.json"]):
        arguments = folder / "recipe.toml", *common, *proof, "--json", "--step"  # lanes are those of the ledger
        code, out, err = zephon("show", *arguments, "6-8", "--global-batch", "8")
        lines = [json.loads(line) for line in out.splitlines()]
        assert code == 0 and not err
        assert [(line["step"], line["record"]) for line in lines] == [(6 + i // 8, 20 + i) for i in range(24)]
        assert [line["microbatch"] for line in lines] == [i // 2 % 4 for i in range(24)]
        assert all(line["trained"] for line in lines)
        assert [line["documents"][0]["row"] for line in lines] == [
            batch.provenance().to_pylist()[int(batch.block.span_offsets[i])]["row"] for batch in seen for i in range(2)
        ]
        code, out, _ = zephon("show", *arguments, "5", "--global-batch", "4")
        assert [json.loads(line)["record"] for line in out.splitlines()] == [16, 17, 18, 19]
        for step, batch, words in (
            ("5", "8", "--global-batch is 8; expected 4, as in step 5 of "),
            ("6", "4", "--global-batch is 4; expected 8, as in step 6 of "),
            ("5-6", "4", "a range in which the global batch, 4 up to step 5, stays: it is 8 from there on"),
        ):
            code, _, err = zephon("show", *arguments, step, "--global-batch", batch)
            assert code == 2 and words in err


def test_show_after_an_accepted_change_goes_on_from_a_state(zephon, start):
    folder, common, go = start
    (folder / "other.toml").write_text("shuffle_buffer_size = 6\n" + (folder / "recipe.toml").read_text())
    go(2, 4, recipe="other.toml", allow_changes=["shuffle"])
    (folder / "seventh.json").write_text((folder / "later.json").read_text())
    go(2, 4, recipe="other.toml", state="seventh.json")
    arguments = folder / "other.toml", *common, "--global-batch", "4", "--ledger", folder / "ledger", "--json", "--step"
    code, out, _ = zephon("show", *arguments, "8-9", "--state", folder / "seventh.json")
    assert code == 0 and [json.loads(line)["trained"] for line in out.splitlines()] == [True] * 8
    code, _, err = zephon("show", *arguments, "9", "--state", folder / "later.json")
    assert (
        code == 2 and "accepted a change of its records, and was taken after step 9; expected a state before it" in err
    )
    code, _, err = zephon("show", *arguments, "8")
    assert code == 2 and "It changed them on the way: give the recipe of that step, and a --state." in err


def test_show_of_a_run_that_took_over_refuses_the_state_of_the_run_before(zephon, start, corpus):
    """It would take over at that state, and show what no run was trained on."""
    folder, common, _ = start
    write_recipe(folder / "next.toml", {"a": folder / "data", "b": corpus / "b.jsonl.gz"}, keys={"chunk_size": 16})
    (folder / "next.toml").write_text('continue_from = "recipe.toml"\n' + (folder / "next.toml").read_text())
    arguments = folder / "next.toml", *common, "--global-batch", "4", "--canonical-replicas", "2", "--step", "9"
    code, out, err = zephon("show", *arguments, "--state", folder / "state.json")
    assert code == 2 and not out and "is of the run that" in err and "pass a state of a later step" in err
    code, out, err = zephon("verify", folder / "next.toml", *common, "--global-batch", "4", "--dp", "1,2")
    assert (
        code == 2 and not out and "next.toml takes over from another run (continue_from); expected a recipe that" in err
    )


def test_show_by_a_flush_index_shows_the_same_and_leaves_the_index_alone(zephon, corpus, tmp_path):
    options = ["--microbatch-size", "4", "--global-batch", "4", "--steps", "60", "--flush-index", tmp_path]
    assert zephon("stream", *stream_of(corpus), *options)[0] == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    arguments = *stream_of(corpus), "--global-batch", "4", "--step", "56"
    _, counted, _ = zephon("show", *arguments)
    code, found, _ = zephon("show", *arguments, "--flush-index", tmp_path)
    assert (code, found) == (0, counted)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    code, _, err = zephon("show", *stream_of(corpus, seq_len=48), *arguments[5:], "--flush-index", tmp_path)
    assert code == 2
    assert "was written by a run with other data" in err
    _, _, err = zephon("show", *arguments, "--flush-index", tmp_path / "nope")
    assert "nope; expected the existing folder" in err


def test_show_refuses_a_record_of_another_step(zephon, corpus):
    code, _, err = zephon("show", *stream_of(corpus), "--global-batch", "4", "--step", "3", "--record", "3")
    assert code == 2
    assert err == "error: --record is 3; expected a record of step 3, from 8 to 11.\n"


def test_show_beyond_the_end_of_the_data_says_so(zephon, corpus):
    code, _, err = zephon("show", *stream_of(corpus, "finite.toml"), "--global-batch", "4", "--step", "5000")
    assert code == 2
    assert "the data ends before step 5000" in err


def test_text_of_documents_cannot_steer_the_terminal(zephon, corpus):
    code, out, _ = zephon("show", *stream_of(corpus), "--global-batch", "32", "--step", "1", "--chars", "999")
    assert code == 0
    assert "\\x1b[31mred" in out
    assert "\x1b" not in out
