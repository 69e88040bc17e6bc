"""Tokens per row: measured on a sample of each dataset with the pipeline's own operators, or taken as bytes of text."""

import json

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import Tokenizer

from zephon import DataError, Pipeline
from zephon.columns.arrow import byte_lengths
from zephon.io import Dataset, DecodeCache
from zephon.work import StaticMixtureWorkSource, TokenEstimation

TEXTS = ["a page of words " * n for n in range(1, 60)]


def test_the_sample_has_the_stated_size_comes_from_all_over_and_follows_the_seed():
    data = Dataset.from_dict("web", {"text": [f"{n:05d} " * 200 for n in range(5000)]})  # 1,200 bytes each
    opened = data.open(["text"], size_column="text", cache=DecodeCache(1 << 26))
    assert TokenEstimation() == TokenEstimation(16 << 20)

    def sample(seed):
        parts = []
        TokenEstimation(1 << 20).tokens_per_row(
            opened, "text", lambda table: parts.append(table.column("text")) or 1, seed=seed
        )
        return pa.concat_tables([pa.table({"text": part}) for part in parts])["text"]

    size = byte_lengths(sample(3)).sum()
    assert 1 << 20 <= size <= (1 << 20) + 16 * 1200
    assert sample(3) == sample(3) != sample(4)


ROWS_WITHOUT_TOKENS = {
    "no ids": ([[-1]], r'dataset "other", shard memory, row 0: token id -1; expected one from 0 to \d+'),
    "texts": (["a b"], r'dataset "other", shard memory, row 0: "input_ids" is no list of whole numbers'),
    "empty": (pa.array([[]], pa.list_(pa.int32())), '"other": no row gives tokens from column "input_ids"; expected'),
}


@pytest.mark.parametrize(("ids", "why"), ROWS_WITHOUT_TOKENS.values(), ids=ROWS_WITHOUT_TOKENS)
def test_rows_that_are_no_token_ids_are_named_before_the_run(ids, why):
    datasets = [Dataset.from_dict("ids", {"input_ids": [[1, 2]]}), Dataset.from_dict("other", {"input_ids": ids})]
    source = StaticMixtureWorkSource(datasets, {"ids": 1, "other": 1}, token_estimation=TokenEstimation())
    with pytest.raises(DataError, match=why):
        Pipeline(source).pretokenized().pack_flat(7).batch(1).checkpoint()


@pytest.mark.parametrize("estimation", [TokenEstimation(), None])
def test_tokens_per_row_are_those_after_the_operators_or_bytes_of_text(tiny_tokenizer, estimation):
    data = [Dataset.from_dict("web", {"text": TEXTS}), Dataset.from_dict("one", {"text": ["x"]})]
    source = StaticMixtureWorkSource(data, {"web": 1, "one": 1}, token_estimation=estimation)
    pipeline = Pipeline(source).options(canonical_replicas=1).map_transform(lambda row: {"text": row["text"] * 3})
    pipeline = pipeline.tokenize(tiny_tokenizer).pack_flat(31).batch(1)
    tokenizer = Tokenizer.from_file(str(tiny_tokenizer / "tokenizer.json"))
    tokens = np.mean([len(tokenizer.encode(text * 3, add_special_tokens=False).ids) + 2 for text in TEXTS])
    expected = tokens if estimation else np.mean([len(text) for text in TEXTS])
    assert pipeline.checkpoint()["tokens_per_row"]["web"] == pytest.approx(expected)


def test_ratios_are_kept_in_the_index_and_measured_anew_where_anything_is_other(tiny_tokenizer, tmp_path, monkeypatch):
    def ratios(texts=TEXTS, seed=1, transform=None, **tokenize):
        for name in ("web", "news"):
            (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        data = [Dataset.from_path(name, tmp_path / f"{name}.jsonl") for name in ("web", "news")]
        source = StaticMixtureWorkSource(data, {"web": 1, "news": 1}, seed=seed)
        pipeline = Pipeline(source).options(canonical_replicas=1, io_options={"cache": {"dir": str(tmp_path / "c")}})
        if transform:
            pipeline = pipeline.map_transform(transform)
        pipeline = pipeline.tokenize(tiny_tokenizer, **tokenize).pack_flat(31).batch(1)
        return pipeline.checkpoint()["tokens_per_row"]

    measured = []
    original = TokenEstimation.tokens_per_row
    monkeypatch.setattr(
        TokenEstimation, "tokens_per_row", lambda *args, **more: measured.append(1) or original(*args, **more)
    )
    first = ratios()
    assert ratios() == first and len(measured) == 2
    for number, other in enumerate(({"texts": TEXTS[:-1]}, {"seed": 2}, {"special_tokens": "none"}, {"max_length": 9})):
        ratios(**other)
        assert len(measured) == 4 + 2 * number
    for _ in range(2):  # functions are not described by their source alone
        ratios(transform=lambda row: {"text": row["text"] * 2})
    assert len(measured) == 14
    for kept in (tmp_path / "c/index").glob("*.result"):
        kept.write_bytes(kept.read_bytes()[:-1])
    assert ratios() == first and len(measured) == 16
