"""What a batch gives a model, field by field."""

import hashlib

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import zephon.batch
from zephon import Pipeline, PipelineError
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

BOS, EOS = 0, 1  # ids in the tiny tokenizer


def batches_of(texts, tokenizer, *, max_length, microbatch_size=1, drop_last=True, **tokenize):
    order = {"shuffle_shards": False, "shuffle_within_shard": False, "repeat": False}
    source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("d", {"text": texts})], **order)
    pipeline = Pipeline(source).options(runner="inline").tokenize(tokenizer, **tokenize).pack_flat(max_length)
    return list(pipeline.batch(microbatch_size, drop_last=drop_last))


def ids_of(tokenizer, text):
    return Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode(text).ids


@pytest.fixture
def two_documents(tiny_tokenizer):
    """One record: BOS a1 a2 EOS, BOS b1 b2 EOS."""
    a, b = ids_of(tiny_tokenizer, "xy"), ids_of(tiny_tokenizer, "!?")
    assert len(a) == len(b) == 2
    (batch,) = batches_of(["xy", "!?"], tiny_tokenizer, max_length=7)
    return batch, a, b


def test_two_documents_in_a_record(two_documents):
    batch, (a1, a2), (b1, b2) = two_documents
    assert batch.tokens.tolist() == [[BOS, a1, a2, EOS, BOS, b1, b2, EOS]]
    fields = batch.to_training(return_cu_seqlens=True, return_num_valid_tokens=True)
    assert fields["input_ids"].tolist() == [[BOS, a1, a2, EOS, BOS, b1, b2]]
    assert fields["labels"].tolist() == [[a1, a2, EOS, BOS, b1, b2, EOS]]
    assert fields["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert fields["cu_seqlens"].tolist() == [[0, 4, 7]]
    assert fields["max_seqlen"].tolist() == [4]
    assert fields["num_valid_tokens"] == 7
    masked = batch.to_training(eos_mask_loss=True, return_loss_mask=True, return_num_valid_tokens=True)
    assert masked["labels"].tolist() == [[a1, a2, EOS, -100, b1, b2, EOS]]
    assert masked["loss_mask"].tolist() == [[1, 1, 1, 0, 1, 1, 1]]
    assert masked["num_valid_tokens"] == 6
    assert batch.to_training(boundary_mask_loss=True)["labels"].tolist() == masked["labels"].tolist()


def test_labels_that_are_not_shifted_are_the_inputs_themselves(two_documents):
    batch, (a1, a2), (b1, b2) = two_documents
    options = {"shift_labels": False, "return_loss_mask": True, "return_num_valid_tokens": True}
    fields = batch.to_training(return_cu_seqlens=True, return_padding_mask=True, **options)
    assert fields["input_ids"].tolist() == batch.tokens.tolist()
    assert fields["labels"].tolist() == [[-100, a1, a2, EOS, BOS, b1, b2, EOS]]
    assert fields["loss_mask"].tolist() == [[0, 1, 1, 1, 1, 1, 1, 1]]
    assert fields["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]]
    assert fields["padding_mask"].tolist() == [[False] * 8]
    assert (fields["num_valid_tokens"], fields["cu_seqlens"].tolist()) == (7, [[0, 4, 8]])
    masked = batch.to_training(boundary_mask_loss=True, flatten=True, **options)
    assert masked["labels"].tolist() == [-100, a1, a2, EOS, -100, b1, b2, EOS]
    with pytest.raises(PipelineError, match="does not fit"):
        batch.to_training(shift_labels=False, dtype="uint32", as_numpy=True)


@pytest.mark.frameworks
def test_a_model_of_transformers_has_the_loss_of_shifted_labels(tiny_tokenizer, caplog):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=400, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    zephon.batch._warn_of_shift.cache_clear()
    batches = batches_of(["abc de fgh"] * 9, tiny_tokenizer, max_length=31, microbatch_size=2, drop_last=False)
    for batch in batches:
        fields = batch.to_training(boundary_mask_loss=True)
        labels = fields.pop("labels")
        wanted = torch.nn.functional.cross_entropy(model(**fields).logits.flatten(0, 1), labels.flatten())
        unshifted = batch.to_training(shift_labels=False, boundary_mask_loss=True)
        torch.testing.assert_close(model(**unshifted).loss, wanted)
    warned = [record.message for record in caplog.records if "for them pass shift_labels=False" in record.message]
    assert len(batches) > 1 and len(warned) == 1
    caplog.clear()
    zephon.batch._warn_of_shift.cache_clear()
    batches[0].to_training(shift_labels=True)
    batches[0].to_training(rename_fields={"input_ids": "tokens"})
    assert not caplog.records


def test_torch_tensors_by_default_and_numpy_on_request(two_documents):
    batch, _, _ = two_documents
    fields = batch.to_training()
    assert {name: (type(value), value.dtype) for name, value in fields.items()} == dict.fromkeys(
        ["input_ids", "labels", "position_ids"], (torch.Tensor, torch.int64)
    )
    assert batch.to_training(dtype=torch.int32)["labels"].dtype == torch.int32
    arrays = batch.to_training(as_numpy=True, dtype="uint32")
    assert np.shares_memory(arrays["input_ids"], batch.tokens) and np.shares_memory(arrays["labels"], batch.tokens)


def test_a_tensor_may_be_written_to_without_touching_the_batch(two_documents):
    batch, _, _ = two_documents
    before = batch.digests
    for dtype in ("int64", "uint32"):
        for value in batch.to_training(dtype=dtype).values():
            value.zero_()
    assert batch.digests == before


def test_options_for_positions_names_fields_and_shape(two_documents):
    batch, _, _ = two_documents
    assert batch.to_training(position_mode="sequence")["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 6]]
    assert "position_ids" not in batch.to_training(position_mode=None)
    renamed = batch.to_training(rename_fields={"input_ids": "tokens"})
    assert set(renamed) == {"tokens", "labels", "position_ids"}
    flat = batch.to_training(flatten=True, return_cu_seqlens=True, return_padding_mask=True)
    assert flat["input_ids"].shape == flat["labels"].shape == flat["padding_mask"].shape == (7,)
    assert flat["cu_seqlens"].tolist() == [0, 4, 7] and flat["max_seqlen"] == 4


def test_flat_document_bounds_run_over_all_records(tiny_tokenizer):
    texts = ["xy", "!?", "abc", "x"] * 5
    batches = batches_of(texts, tiny_tokenizer, max_length=9, microbatch_size=3)
    for batch in batches:
        wide = batch.to_training(as_numpy=True, return_cu_seqlens=True)
        flat = batch.to_training(as_numpy=True, return_cu_seqlens=True, flatten=True)
        bounds = [r * 9 + b for r, row in enumerate(wide["cu_seqlens"]) for b in sorted(set(row.tolist()) - {9})] + [27]
        assert flat["cu_seqlens"].tolist() == bounds
        starts = np.flatnonzero(flat["position_ids"] == 0)
        assert flat["cu_seqlens"][:-1].tolist() == starts.tolist()
        assert flat["max_seqlen"] == wide["max_seqlen"].max() == np.diff(bounds).max()


def test_padding_is_masked_everywhere(tiny_tokenizer):
    (a1, a2) = ids_of(tiny_tokenizer, "xy")
    batch, *rest = batches_of(["xy"], tiny_tokenizer, max_length=7, drop_last=False)
    assert not rest and batch.lengths.tolist() == [4]
    fields = batch.to_training(
        return_loss_mask=True, return_padding_mask=True, return_num_valid_tokens=True, return_cu_seqlens=True
    )
    assert fields["input_ids"].tolist() == [[BOS, a1, a2, EOS, EOS, EOS, EOS]]
    assert fields["labels"].tolist() == [[a1, a2, EOS, -100, -100, -100, -100]]
    assert fields["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 2]]
    assert fields["loss_mask"].tolist() == [[1, 1, 1, 0, 0, 0, 0]]
    assert fields["padding_mask"].tolist() == [[False] * 4 + [True] * 3]
    assert fields["cu_seqlens"].tolist() == [[0, 4, 7]]
    assert fields["num_valid_tokens"] == 3
    assert batch.to_training(ignore_index=-1)["labels"].tolist() == [[a1, a2, EOS, -1, -1, -1, -1]]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"dtype": "float32"}, "an integer type of at least 32 bits"),
        ({"dtype": "int8"}, "an integer type of at least 32 bits"),
        ({"dtype": "nonsense"}, "an integer type of at least 32 bits"),
        ({"position_mode": "relative"}, 'position_mode is "relative"; expected "preserve" or "sequence"'),
        ({"rename_fields": {"token": "x"}}, 'unknown field in rename_fields "token"'),
        ({"rename_fields": {"input_ids": "labels"}}, "one name to two fields"),
        ({"dtype": "uint32", "eos_mask_loss": True}, "ignore_index -100 does not fit"),
        ({"ignore_index": 1.5}, "ignore_index is 1.5; expected an integer"),
        ({"shift_labels": 0}, "shift_labels is 0; expected true or false"),
        ({"eos_mask_loss": True, "eos_token_id": -5}, "eos_token_id is -5; expected the id of a token"),
    ],
)
def test_options_that_do_not_fit_are_refused(two_documents, options, text):
    with pytest.raises(PipelineError, match=text):
        two_documents[0].to_training(**options)


def test_eos_mask_loss_needs_an_eos(tiny_tokenizer):
    batch = batches_of(["xy" * 9], tiny_tokenizer, max_length=3, special_tokens="none")[0]
    with pytest.raises(PipelineError, match="eos_mask_loss needs eos_token_id"):
        batch.to_training(eos_mask_loss=True)
    batch.to_training(eos_mask_loss=True, eos_token_id=5)


def test_provenance_names_every_document_of_every_record(tiny_tokenizer):
    texts = ["xy", None, "  ", "!?" * 5, "abc"]
    batches = batches_of(texts, tiny_tokenizer, max_length=4, microbatch_size=2, drop_last=False)
    lines = [line for batch in batches for line in batch.provenance().to_pylist()]
    used = {}
    for line in lines:
        assert line["dataset"] == "d" and line["token_begin"] == used.get(line["row"], 0)
        used[line["row"]] = line["token_end"]
    assert used == {row: len(ids_of(tiny_tokenizer, texts[row])) + 2 for row in (0, 3, 4)}
    assert [n for batch in batches for n in batch.sequence_numbers.tolist()] == list(
        range(sum(len(batch) for batch in batches))
    )


def test_digests_are_over_tokens_and_document_starts(two_documents):
    batch, _, _ = two_documents
    content = batch.tokens[0].astype("<u4").tobytes() + np.array([0, 4], dtype="<u4").tobytes()
    assert batch.digests == [hashlib.sha256(content).digest()]
