"""What the Trainer's models get of a recipe, and what is refused. Whole runs: tests/integration."""

import logging
from functools import partial
from itertools import pairwise

import pytest

pytest.importorskip("transformers")
pytest.importorskip("trl")
import torch
from transformers import AttentionInterface, AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainingArguments
from trl import SFTConfig

from zephon import CheckpointError, PipelineError, RecipeError, TokenizerError, TopologyError
from zephon.integrations.hugging_face import ZephonTrainer, read_state
from zephon.integrations.trl import ZephonSFTTrainer

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]
SEQ = 48


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tests run side by side
    yield
    torch.set_num_threads(threads)


def varlen(module, query, key, value, attention_mask, cu_seq_lens_q=None, max_length_q=None, **kwargs):
    """FlashAttention as far as its arguments go: documents by their bounds, whatever the positions say."""
    assert attention_mask is None and cu_seq_lens_q[-1] == query.shape[2] and query.shape[0] == 1
    bounds = cu_seq_lens_q.tolist()
    assert max_length_q == max(b - a for a, b in pairwise(bounds))
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    attend = partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    parts = [attend(*(each[:, :, a:b] for each in (query, key, value))) for a, b in pairwise(bounds)]
    return torch.cat(parts, dim=2).transpose(1, 2).contiguous(), None


def model_of(attention="sdpa", vocab=512):
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocab, max_position_embeddings=SEQ, **sizes))
    model.config._attn_implementation = attention  # afterwards, since FlashAttention is not installed
    return model


def trainer_of(recipe, tokenizer, folder, *, model=None, kind=ZephonTrainer, args=None, **more):
    settings = {
        "output_dir": str(folder / "out"),
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        **(args or {}),
    }
    config = TrainingArguments(**settings) if kind is ZephonTrainer else SFTConfig(max_length=SEQ, **settings)
    if kind is ZephonTrainer:
        more.setdefault("seq_len", SEQ)
    return kind(
        model or model_of(), config, processing_class=AutoTokenizer.from_pretrained(tokenizer), recipe=recipe, **more
    )


def test_documents_of_a_record_do_not_see_each_other(recipe, tiny_tokenizer, tmp_path, monkeypatch):
    """Logits are those of each document alone; with the bounds of documents as FlashAttention takes them too."""
    monkeypatch.setitem(AttentionInterface._global_mapping, "flash_attention_2", varlen)
    found = {}
    for attention in ("sdpa", "eager", "flash_attention_2"):
        trainer = trainer_of(recipe, tiny_tokenizer, tmp_path, model=model_of(attention))
        fields = next(iter(trainer.get_train_dataloader()))
        with torch.no_grad():
            found[attention] = fields, trainer.model.eval()(**fields)
        trainer.job_loader.close()
    fields, outputs = found["sdpa"]
    assert fields.pop("use_cache") is False  # with a cache transformers makes no mask
    assert {name: tuple(each.shape) for name, each in fields.items()} == dict.fromkeys(fields, (2, SEQ))
    model, ids, positions = model_of("sdpa").eval(), fields["input_ids"], fields["position_ids"]
    starts = (positions == 0).nonzero().tolist()
    assert len(starts) > 2
    for (row, start), (next_row, next_start) in zip(starts, [*starts[1:], [2, 0]], strict=True):
        end = next_start if next_row == row else SEQ
        with torch.no_grad():
            alone = model(input_ids=ids[row : row + 1, start:end]).logits
        assert torch.allclose(outputs.logits[row, start:end], alone[0], atol=1e-4)
        assert fields["labels"][row, start] == -100  # is not predicted by the document before
    assert (fields["labels"] == torch.where(positions == 0, -100, ids)).all()
    for attention, (other, others) in found.items():
        assert torch.allclose(others.logits.reshape(-1), outputs.logits.reshape(-1), atol=1e-4), attention
        assert others.loss.item() == pytest.approx(outputs.loss.item(), rel=1e-5)
        assert (other["labels"].reshape(-1) == fields["labels"].reshape(-1)).all()
    flat = found["flash_attention_2"][0]
    assert flat["cu_seq_lens_q"].dtype == torch.int32 and isinstance(flat["max_length_k"], int)


def test_a_cache_does_not_let_documents_see_each_other(recipe, tiny_tokenizer, tmp_path):
    losses = []
    for use_cache in (False, True):
        args = {"max_steps": 1, "use_cache": use_cache}
        trainer = trainer_of(recipe, tiny_tokenizer, tmp_path, args=args, eval_recipe=recipe, eval_records=4)
        assert trainer.model.config.use_cache is use_cache
        trainer.train()
        losses.append((trainer.state.log_history[0]["loss"], trainer.evaluate()["eval_loss"]))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("attention", ["sdpa", "flash_attention_2"])
def test_a_model_whose_documents_see_each_other_is_told(
    recipe, tiny_tokenizer, tmp_path, monkeypatch, caplog, attention
):
    """By what it computes, not by its class: here attention forgets the bounds that it is given."""

    def forgetful(module, query, key, value, attention_mask, **kwargs):
        groups = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.transpose(1, 2).contiguous(), None

    for attend, told in ((None, False), (forgetful, True)):
        attend = attend or (varlen if "flash" in attention else AttentionInterface._global_mapping["sdpa"])
        monkeypatch.setitem(AttentionInterface._global_mapping, attention, attend)
        trainer = trainer_of(recipe, tiny_tokenizer, tmp_path, model=model_of(attention))
        with caplog.at_level(logging.WARNING, logger="zephon"):
            next(iter(trainer.get_train_dataloader()))
        trainer.job_loader.close()
        assert ("documents of a record see each other in LlamaForCausalLM" in caplog.text) is told
        assert "could not be checked" not in caplog.text and trainer.model.training


@pytest.mark.parametrize("kind", [ZephonTrainer, ZephonSFTTrainer])
def test_sizes_come_from_the_trainers_arguments(recipe, tiny_tokenizer, tmp_path, kind):
    trainer = trainer_of(recipe, tiny_tokenizer, tmp_path, kind=kind, args={"gradient_accumulation_steps": 3})
    loader = trainer.get_train_dataloader()
    assert loader.pipeline.compiled.topology.global_batch == 6 and loader.batches_per_step == 3
    trainer = trainer_of(recipe, tiny_tokenizer, tmp_path, kind=kind, global_batch=8)
    assert trainer.get_train_dataloader().batches_per_step == trainer.args.gradient_accumulation_steps == 4


def test_an_evaluation_is_the_same_each_time_and_several_have_names(recipe, tiny_tokenizer, tmp_path):
    trainer = trainer_of(recipe, tiny_tokenizer, tmp_path, eval_recipe={"x": recipe, "y": recipe}, eval_records=8)
    first, again = trainer.evaluate(), trainer.evaluate()
    assert first["eval_x_loss"] == again["eval_x_loss"] == again["eval_y_loss"] > 0
    batches = list(trainer.get_eval_dataloader("x"))
    assert len(batches) == 4
    trainer = trainer_of(recipe, tiny_tokenizer, tmp_path, eval_recipe=recipe, eval_records=8)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(first["eval_x_loss"])


def test_more_tokens_than_the_model_has_positions_are_told(recipe, tiny_tokenizer, tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="zephon"):
        trainer_of(recipe, tiny_tokenizer, tmp_path)
        assert not caplog.records
        trainer_of(recipe, tiny_tokenizer, tmp_path, seq_len=SEQ + 1)
    assert f"seq_len is {SEQ + 1}, and the model has {SEQ} positions" in caplog.text


def test_training_again_begins_at_the_start(recipe, tiny_tokenizer, tmp_path):
    trainer = trainer_of(recipe, tiny_tokenizer, tmp_path, args={"learning_rate": 0.0})
    trainer.train()
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert len(losses) == 2
    again = trainer_of(recipe, tiny_tokenizer, tmp_path, args={"learning_rate": 0.0})
    again.train()
    assert losses == [log["loss"] for log in again.state.log_history if "loss" in log]


@pytest.mark.parametrize(
    ("more", "args", "error", "message"),
    [
        ({}, {"max_steps": -1}, PipelineError, "max_steps is -1; expected the number of optimizer steps"),
        ({"global_batch": 7}, {}, TopologyError, "global_batch is 7; expected a multiple of 2"),
        ({"global_batch": 8}, {"gradient_accumulation_steps": 3}, TopologyError, "steps is 3; expected 4"),
        ({"eval_recipe": "x.toml"}, {}, PipelineError, "eval_records is missing"),
        ({"eval_recipe": "x.toml", "eval_records": 2}, {"eval_strategy": "steps"}, RecipeError, "x.toml"),
        ({"train_dataset": [1]}, {}, PipelineError, "train_dataset and recipe are both given"),
        ({"eval_dataset": [1], "eval_recipe": "x.toml"}, {}, PipelineError, "eval_dataset and eval_recipe are both"),
        ({"data_collator": print}, {}, PipelineError, "data_collator is given, which has no effect"),
        ({"kind": ZephonSFTTrainer}, {"assistant_only_loss": True}, PipelineError, "assistant_only_loss is given"),
        ({"seq_len": None}, {}, PipelineError, "seq_len is missing"),
        ({"model": 100}, {}, TokenizerError, "has 400 tokens; expected at most 100"),
        ({"ranks": (0, 2)}, {}, TopologyError, "the job has 2 data-parallel ranks; expected 1"),
    ],
)
def test_what_does_not_fit_is_refused(recipe, tiny_tokenizer, tmp_path, more, args, error, message):
    if "model" in more:
        more = {**more, "model": model_of(vocab=more["model"])}
    with pytest.raises(error, match=message):
        trainer_of(recipe, tiny_tokenizer, tmp_path, args=args, **more).get_train_dataloader()


def test_checkpoints_that_cannot_be_gone_on_from_are_named(recipe, tiny_tokenizer, tmp_path, caplog):
    saving = {"save_strategy": "steps", "save_steps": 1}
    trainer_of(recipe, tiny_tokenizer, tmp_path, args=saving).train()
    first, last = (tmp_path / "out" / f"checkpoint-{step}" for step in (1, 2))
    assert read_state(first)["rounds"] < read_state(last)["rounds"]
    again = trainer_of(recipe, tiny_tokenizer, tmp_path, args=saving)
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 2 and len(list((tmp_path / "out").iterdir())) == 2  # it was finished
    whole = (last / "trainer_state.json").read_text()
    (last / "trainer_state.json").write_text(whole[: len(whole) // 2])
    with caplog.at_level(logging.WARNING, logger="zephon"):
        again = trainer_of(recipe, tiny_tokenizer, tmp_path, args=saving)
        again.train(resume_from_checkpoint=True)
    assert "checkpoint-2 has no whole trainer_state.json" in caplog.text and again.state.global_step == 2
    (first / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"checkpoint-1 has no trainer_state.json that can be read; expected"):
        again.train(resume_from_checkpoint=str(first))
    (last / "zephon_state.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"zephon_state.json cannot be read"):
        again.train(resume_from_checkpoint=str(last))
    (last / "zephon_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"has no zephon_state.json, so the data cannot go on"):
        again.train(resume_from_checkpoint=True)
    (last / "trainer_state.json").unlink()
    with pytest.raises(CheckpointError, match=r"where no checkpoint was written wholly; expected one"):
        again.train(resume_from_checkpoint=True)


def test_another_global_batch_from_a_resume_on_is_told(recipe, tiny_tokenizer, tmp_path, caplog):
    saving = {"save_strategy": "steps", "save_steps": 1}
    trainer_of(recipe, tiny_tokenizer, tmp_path, args=saving | {"max_steps": 1}).train()
    for size, told in (({"per_device_train_batch_size": 1}, False), ({"per_device_train_batch_size": 2}, True)):
        again = trainer_of(recipe, tiny_tokenizer, tmp_path, args=saving | size, global_batch=4 if told else 2)
        with caplog.at_level(logging.WARNING, logger="zephon"):
            again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
        assert ("a step had 2 records so far, and has 4 from here on" in caplog.text) is told


def test_a_checkpoint_is_unfinished_while_it_is_written_again(recipe, tiny_tokenizer, tmp_path, monkeypatch):
    """A process killed there leaves no state of the data beside an older model."""
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    trainer_of(recipe, tiny_tokenizer, tmp_path, args=saving).train()
    again = trainer_of(recipe, tiny_tokenizer, tmp_path, args=saving)
    monkeypatch.setattr(again, "save_model", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        again.train()
    with pytest.raises(CheckpointError, match=r"checkpoint-1 has no trainer_state.json"):
        read_state(tmp_path / "out" / "checkpoint-1")
