"""What Lightning does with the data module: batches fetched ahead, restores early and late, validation, refusals."""

import pytest

pytest.importorskip("lightning")
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy

from examples.tiny import Tiny
from zephon import CheckpointError, TopologyError
from zephon.integrations.lightning import ZephonDataModule

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]


class Module(LightningModule):
    """Notes the records of every batch."""

    def __init__(self, tokenizer, asks_for_steps=False):
        super().__init__()
        self.model, self.asks = Tiny(str(tokenizer)), asks_for_steps
        self.seen, self.validated = [], []

    def training_step(self, batch, batch_idx):
        self.seen.append(batch["numbers"])
        if self.trainer.global_step == getattr(self, "fails_at", None):
            raise KeyboardInterrupt
        return self.model(batch["input_ids"], batch["labels"])

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch["numbers"])

    def configure_optimizers(self):
        if self.asks:  # which asks for the loader before a checkpoint is restored
            assert self.trainer.estimated_stepping_batches > 0
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Saves(Callback):
    """Saves after some steps, in the hook that ModelCheckpoint uses."""

    def __init__(self, folder, steps):
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step in self.steps and len(module.seen) % trainer.accumulate_grad_batches == 0:
            trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


class LateStrategy(SingleDeviceStrategy):
    """Restores after the set-up of the model, as FSDP and DeepSpeed do."""

    restore_checkpoint_after_setup = True


def flat(lists):
    return [number for each in lists for number in each]


def numbered(batch):
    return {**batch.to_training(), "numbers": batch.sequence_numbers.tolist()}


def data_of(recipe, tokenizer, **options):
    sizes = {"seq_len": 32, "microbatch_size": 2, "global_batch": 8}
    return ZephonDataModule(recipe, tokenizer=str(tokenizer), shape=numbered, **{**sizes, **options})


def trainer_of(steps, *callbacks, strategy="auto", **options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet["enable_checkpointing"] = False
    if strategy != "auto":
        strategy = strategy(device=torch.device("cpu"))
    return Trainer(accelerator="cpu", max_steps=steps, callbacks=[*callbacks], strategy=strategy, **quiet, **options)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, tiny_tokenizer, write_recipe):
    """Checkpoints of steps 2 and 3 in a folder, and the records of five steps."""
    folder = tmp_path_factory.mktemp("saved")
    recipe = write_recipe(folder)
    recipe.write_text('cache_dir = "cache"\n' + recipe.read_text())
    module = Module(tiny_tokenizer)
    trainer_of(5, Saves(folder, (2, 3))).fit(module, data_of(recipe, tiny_tokenizer))
    assert flat(module.seen) == list(range(40))
    return folder, module.seen


@pytest.mark.parametrize("strategy", ["auto", LateStrategy], ids=["early", "late"])
def test_a_run_goes_on_after_the_batch_processed(saved, recipe, tiny_tokenizer, strategy):
    """Also where the set-up asks for the number of steps, and so for the loader, before a state is restored."""
    folder, seen = saved
    module = Module(tiny_tokenizer, asks_for_steps=True)
    trainer = trainer_of(5, strategy=strategy)
    trainer.fit(module, data_of(recipe, tiny_tokenizer), ckpt_path=folder / "3.ckpt")
    assert module.seen == seen[12:]


def test_steps_are_of_the_global_batch_after_a_resume_with_another_accumulation(saved, recipe, tiny_tokenizer):
    folder, seen = saved
    module, data = Module(tiny_tokenizer), data_of(recipe, tiny_tokenizer, microbatch_size=1)
    trainer = trainer_of(5)
    trainer.fit(module, data, ckpt_path=folder / "3.ckpt")
    assert trainer.accumulate_grad_batches == 8 and flat(module.seen) == flat(seen[12:])


@pytest.mark.deep
def test_fit_goes_on_where_the_last_one_of_the_trainer_ended(saved, recipe, tiny_tokenizer):
    module, data, trainer = Module(tiny_tokenizer), data_of(recipe, tiny_tokenizer), trainer_of(2)
    trainer.fit(module, data)
    trainer.fit_loop.epoch_loop.max_steps = 5
    trainer.fit(module, data)
    assert module.seen == saved[1]
    again = Module(tiny_tokenizer)
    trainer_of(1).fit(again, data)  # of another trainer
    assert again.seen == saved[1][:4]


def test_a_step_that_failed_is_not_in_the_state(recipe, tiny_tokenizer, tmp_path):
    module, data = Module(tiny_tokenizer), data_of(recipe, tiny_tokenizer)
    module.fails_at = 2

    class OnFailure(Callback):
        def on_exception(self, trainer, module, exception):
            trainer.save_checkpoint(tmp_path / "failed.ckpt")

    with pytest.raises(SystemExit):
        trainer_of(5, OnFailure()).fit(module, data)
    state = torch.load(tmp_path / "failed.ckpt", weights_only=True)["ZephonDataModule"]
    assert state["rounds"] * state["lanes_total"] == 16


@pytest.mark.parametrize("records", [16, pytest.param(None, marks=pytest.mark.deep)])
def test_every_validation_is_of_the_same_records(recipe, tiny_tokenizer, records):
    module = Module(tiny_tokenizer)
    data = data_of(recipe, tiny_tokenizer, eval_recipe=recipe, eval_records=records)
    trainer_of(4, val_check_interval=8, check_val_every_n_epoch=None, num_sanity_val_steps=1).fit(module, data)
    first, *rest = module.validated
    half = len(rest) // 2
    assert first == [0, 1] and rest[:half] == rest[half:] and rest[0] == first
    assert flat(module.seen) == list(range(32))
    if records:
        assert flat(rest[:half]) == list(range(records))


@pytest.mark.deep
def test_what_the_trainer_does_to_data_loaders_leaves_the_batches_alone(recipe, tiny_tokenizer, saved):
    module = Module(tiny_tokenizer)
    trainer_of(5, use_distributed_sampler=True, reload_dataloaders_every_n_epochs=1).fit(
        module, data_of(recipe, tiny_tokenizer)
    )
    assert module.seen == saved[1]


def test_a_checkpoint_without_a_state_of_the_data_is_refused(saved, recipe, tiny_tokenizer, tmp_path):
    content = torch.load(saved[0] / "3.ckpt", weights_only=True)
    del content["ZephonDataModule"]
    torch.save(content, tmp_path / "other.ckpt")
    module = Module(tiny_tokenizer)
    with pytest.raises(CheckpointError, match=r"other.ckpt has no state of ZephonDataModule"):
        trainer_of(5).fit(module, data_of(recipe, tiny_tokenizer), ckpt_path=tmp_path / "other.ckpt")
    assert not module.seen


def test_changes_are_refused_by_name_and_accepted_on_purpose(saved, recipe, tiny_tokenizer):
    recipe.write_text(recipe.read_text().replace("shuffle_buffer_size = 16", "shuffle_buffer_size = 8"))
    path = saved[0] / "3.ckpt"
    with pytest.raises(CheckpointError, match="shuffle: was"):
        trainer_of(5).fit(Module(tiny_tokenizer), data_of(recipe, tiny_tokenizer), ckpt_path=path)
    module = Module(tiny_tokenizer)
    data = data_of(recipe, tiny_tokenizer, allow_changes=["shuffle"])
    trainer_of(5).fit(module, data, ckpt_path=path)
    assert module.seen == saved[1][12:]  # other records in these places


@pytest.mark.parametrize(
    ("options", "trainer", "message"),
    [
        ({"global_batch": 7}, {}, "global_batch is 7; expected a multiple of 2"),
        ({}, {"accumulate_grad_batches": 3}, "accumulate_grad_batches is 3; expected 4"),
    ],
    ids=["batch", "accumulation"],
)
def test_sizes_that_do_not_fit_are_refused(recipe, tiny_tokenizer, options, trainer, message):
    with pytest.raises(TopologyError, match=message):
        trainer_of(1, **trainer).fit(Module(tiny_tokenizer), data_of(recipe, tiny_tokenizer, **options))


def test_an_accumulation_that_changes_is_refused(recipe, tiny_tokenizer):
    with pytest.raises(TopologyError, match="accumulate_grad_batches is changed by"):
        trainer_of(1, GradientAccumulationScheduler({0: 4})).fit(
            Module(tiny_tokenizer), data_of(recipe, tiny_tokenizer)
        )
