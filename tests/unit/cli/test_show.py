"""`zephon show`: the documents of a step, where they came from, and their text."""

import re


def stream_of(corpus, name="recipe.toml", seq_len=32):
    return corpus / name, "--tokenizer", corpus / "tokenizer", "--seq-len", str(seq_len)


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
    assert "nope; expected the existing folder" in err


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
