"""The Trainer of Hugging Face's transformers with the data of a recipe.

trainer = ZephonTrainer(
    model, TrainingArguments("out", max_steps=1000, per_device_train_batch_size=4), processing_class=tokenizer,
    recipe="recipe.toml", seq_len=1024, global_batch=64,
)
trainer.train(resume_from_checkpoint=True)

The batches are handed out as they are, not through accelerate, which would share them out among ranks once more; the
Trainer moves them to its device. The state of the data is a file in the checkpoint of the same step.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from transformers import Trainer

from zephon import CheckpointError, DataRecipe, PipelineError, SampleBatch, TopologyError
from zephon.loader import EvaluationLoader, JobLoader, check_tokenizer, data_parallel, on_all_ranks, on_first_rank

__all__ = ["STATE_NAME", "ZephonMixin", "ZephonTrainer", "read_state"]

STATE_NAME = "zephon_state.json"
"""The file with the state of the data in a checkpoint."""

_TRAINER_STATE = "trainer_state.json"  # what the Trainer writes last
_Recipe = DataRecipe | str | os.PathLike[str]
_log = logging.getLogger("zephon")


class ZephonMixin:
    """The data of a recipe for a `Trainer` or a subclass of it: `class Mine(ZephonMixin, TheirTrainer)`.

    Args:
        args, kwargs: of the Trainer, without train_dataset.
        recipe: of the training data: a `DataRecipe`, or the path of its TOML file.
        seq_len: tokens of a record, the width of input_ids; by default max_length of the Trainer's arguments.
        global_batch: records per optimizer step over all processes, on any number of them, from which
            gradient_accumulation_steps follows. By default it follows from gradient_accumulation_steps.
        eval_recipe: of the evaluation, or several by name; without it, eval_dataset is evaluated as ever.
        eval_records: records of an evaluation over all processes, the same ones each time.
        tokenizer: see `Pipeline.from_recipe`; by default that of processing_class.
        allow_changes: see `Pipeline.restore`.
        ledger: a folder for the ledger of the training data.
        ranks: see `data_parallel`; by default as the Trainer's parallelism says.
        options: further options of the training pipeline.

    Attributes:
        job_loader: the loader of the last call of `train`; None before.

    Raises:
        ZephonError: the arguments do not fit; wrong data are refused by `train`, before the first step.
    """

    def __init__(
        self,
        *args: Any,
        recipe: _Recipe,
        seq_len: int | None = None,
        global_batch: int | None = None,
        eval_recipe: _Recipe | Mapping[str, _Recipe] | None = None,
        eval_records: int | None = None,
        tokenizer: Any = None,
        allow_changes: Collection[str] = (),
        ledger: str | os.PathLike[str] | None = None,
        ranks: Any = None,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("train_dataset") is not None:
            raise PipelineError(
                "train_dataset and recipe are both given; expected one of them. Leave out train_dataset."
            )
        kwargs["train_dataset"] = _placeholder()
        several = isinstance(eval_recipe, Mapping)
        self._evaluations: dict[str, Any] = dict(eval_recipe) if several else {"": eval_recipe}  # type: ignore[arg-type]
        if eval_recipe is not None:
            if eval_records is None:
                raise PipelineError(
                    "eval_records is missing; expected the number of records of an evaluation, a multiple of "
                    "per_device_eval_batch_size times the number of processes."
                )
            kwargs["eval_dataset"] = {name: _placeholder() for name in self._evaluations} if several else _placeholder()
        else:
            self._evaluations = {}
        super().__init__(*args, **kwargs)
        trainer: Any = self
        self.job_loader: JobLoader | None = None
        self._recipe, self._global_batch, self._eval_records = recipe, global_batch, eval_records
        self._allow_changes, self._ranks = allow_changes, ranks
        self._options = {**(options or {}), **({"ledger": os.fspath(ledger)} if ledger else {})}
        self._state: dict[str, Any] | None = None
        self._eval_loaders: dict[str, EvaluationLoader] = {}
        length = getattr(trainer.args, "max_length", None) if seq_len is None else seq_len
        if length is None:
            raise PipelineError("seq_len is missing; expected the number of tokens of a record.")
        self._seq_len = int(length)
        processing = trainer.processing_class
        self._tokenizer_of_data = tokenizer or getattr(processing, "tokenizer", processing)
        if self._tokenizer_of_data is None:
            raise PipelineError("processing_class is missing; expected the tokenizer of the model.")
        check_tokenizer(
            self._tokenizer_of_data,
            model_vocab_size=getattr(trainer.model.get_input_embeddings(), "num_embeddings", None),
            special={},
            remedy="Use the tokenizer that belongs to the model, or resize its embeddings.",
        )
        self._accumulation = trainer.args.gradient_accumulation_steps
        # Else the Trainer would iterate over all batches before the checkpoint.
        trainer.args.ignore_data_skip = True

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """As `Trainer.train`. With True, a checkpoint that a killed process left unfinished is passed over.

        Raises:
            CheckpointError: the checkpoint has no state of the data, or the data would differ.
        """
        trainer: Any = self
        if resume_from_checkpoint is True:
            folder = on_first_rank(lambda: _last_checkpoint(trainer.args.output_dir))
            resume_from_checkpoint = folder or True  # which the Trainer refuses
        self._state = None
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            folder = resume_from_checkpoint
            self._state = on_all_ranks(lambda: read_state(folder))
        try:
            return super().train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)  # type: ignore[misc]
        finally:
            if self.job_loader is not None:
                self.job_loader.close()

    def get_train_dataloader(self) -> Any:
        """The batches of this process, from the state of the checkpoint on that `train` resumes from.

        Raises:
            ZephonError: the data cannot be read as configured.
        """
        trainer: Any = self
        args = trainer.args
        if args.max_steps <= 0:
            raise PipelineError(
                f"max_steps is {args.max_steps}; expected the number of optimizer steps, since a recipe has no length. "
                "Set it in TrainingArguments; data that end before it end the training."
            )
        if self.job_loader is not None:
            self.job_loader.close()
        ranks = self._data_parallel()
        microbatch = trainer._train_batch_size
        self.job_loader = JobLoader(
            self._recipe,
            tokenizer=self._tokenizer_of_data,
            seq_len=self._seq_len - 1,
            microbatch_size=microbatch,
            global_batch=self._resolve_batch(microbatch * ranks[1]),
            ranks=ranks,
            shape=self._shape,
            consumed=lambda: int(trainer.state.global_step * args.gradient_accumulation_steps),
            **self._options,
        )
        if self._state is not None:
            self.job_loader.load_state_dict(self._state, allow_changes=self._allow_changes)
        return self.job_loader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """The batches of `eval_recipe`, the same in every evaluation; for any other dataset as the Trainer has it."""
        name = eval_dataset if isinstance(eval_dataset, str) else ""
        trainer: Any = self
        given = not isinstance(eval_dataset, str) and eval_dataset is not None
        if name not in self._evaluations or (given and eval_dataset is not trainer.eval_dataset):
            return super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
        if name not in self._eval_loaders:
            self._eval_loaders[name] = EvaluationLoader(
                self._evaluations[name],
                tokenizer=self._tokenizer_of_data,
                seq_len=self._seq_len - 1,
                microbatch_size=trainer.args.eval_batch_size,
                records=self._eval_records,
                ranks=self._data_parallel(),
                shape=self._shape,
            )
        return self._eval_loaders[name]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        # Before all else, so that whatever has the Trainer's state, which is written last, has that of the data.
        trainer: Any = self
        if self.job_loader is not None:
            state = self.job_loader.state_dict()
            if trainer.args.should_save:
                folder = Path(trainer._get_output_dir(trial=trial), f"checkpoint-{trainer.state.global_step}")
                folder.mkdir(parents=True, exist_ok=True)
                new = folder / f".{STATE_NAME}"
                new.write_text(json.dumps(state), encoding="utf-8")
                new.replace(folder / STATE_NAME)
        super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def _data_parallel(self) -> tuple[int, int]:
        """The data-parallel rank of this process, and how many there are, as the Trainer counts them."""
        trainer: Any = self
        peers = trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size()
        expected = trainer.args.world_size // peers
        ranks = self._ranks
        if ranks is None and peers > 1:
            ranks = getattr(trainer.accelerator, "torch_device_mesh", None)
        rank, size = data_parallel((trainer.args.process_index, trainer.args.world_size) if ranks is None else ranks)
        if size != expected or trainer.get_sp_size() > 1:
            raise TopologyError(
                f"the job has {size} data-parallel ranks; expected {expected}, that is {trainer.args.world_size} "
                f"processes by {peers} with the same data, and no Ulysses parallelism. Pass ranks."
            )
        return rank, size

    def _resolve_batch(self, at_once: int) -> int:
        """The global batch, from which gradient_accumulation_steps follows, or the other way round."""
        trainer: Any = self
        if self._global_batch is None:
            return int(at_once * trainer.args.gradient_accumulation_steps)
        steps, rest = divmod(self._global_batch, at_once)
        if rest or not steps:
            raise TopologyError(
                f"global_batch is {self._global_batch}; expected a multiple of {at_once}, the records that all "
                "processes take at once. Change it, per_device_train_batch_size or the number of processes."
            )
        if self._accumulation not in {1, steps} or (trainer.is_deepspeed_enabled and self._accumulation != steps):
            raise TopologyError(
                f"gradient_accumulation_steps is {self._accumulation}; expected {steps}, so that a step has "
                f"global_batch {self._global_batch} records. Leave one of them out; for DeepSpeed set both."
            )
        trainer.args.gradient_accumulation_steps = steps
        return self._global_batch

    def _shape(self, batch: SampleBatch) -> dict[str, Any]:
        """The batch as the model takes it. Documents of a record do not see each other: by the bounds of documents for
        FlashAttention, else by positions that restart, of which transformers makes a mask."""
        trainer: Any = self
        if "flash" not in (getattr(trainer.model.config, "_attn_implementation", None) or ""):
            fields = batch.to_training(shift_labels=False, boundary_mask_loss=True)
            return fields if self._takes_positions() else {name: fields[name] for name in ("input_ids", "labels")}
        fields = batch.to_training(shift_labels=False, boundary_mask_loss=True, flatten=True, return_cu_seqlens=True)
        bounds, longest = fields.pop("cu_seqlens"), fields.pop("max_seqlen")
        fields = {name: value.unsqueeze(0) for name, value in fields.items()}
        fields |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds)
        return fields | dict.fromkeys(("max_length_q", "max_length_k"), longest)

    def _takes_positions(self) -> bool:
        if not hasattr(self, "_positions"):
            trainer: Any = self
            model = trainer.accelerator.unwrap_model(trainer.model)
            model = model.get_base_model() if hasattr(model, "get_base_model") else model
            self._positions = "position_ids" in inspect.signature(model.forward).parameters
            if not self._positions:
                _log.warning("the model takes no position_ids, so the documents of a record see each other")
        return self._positions


class ZephonTrainer(ZephonMixin, Trainer):
    """`Trainer` of transformers with the data of a recipe; see `ZephonMixin`."""


def read_state(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The state of the data in a checkpoint of the Trainer, for `Pipeline.restore`.

    Raises:
        CheckpointError: the checkpoint is unfinished, or has no state of the data.
    """
    path = Path(folder, STATE_NAME)
    if not Path(folder, _TRAINER_STATE).is_file():
        raise CheckpointError(
            f"{os.fspath(folder)} has no {_TRAINER_STATE}; expected a checkpoint of the Trainer that was written "
            "wholly. Name an earlier one, or pass resume_from_checkpoint=True, which finds it."
        )
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{os.fspath(folder)} has no {STATE_NAME}, so the data cannot go on from it; expected a checkpoint of a "
            "run with Zephon's data. Name another one, or begin a new run from its model (from_pretrained)."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; name another checkpoint.") from None
    return state


def _last_checkpoint(folder: str) -> str | None:
    """The latest checkpoint in `folder` that was written wholly; None if there is none."""
    found = [path for path in Path(folder).glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    for path in sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True):
        if (path / _TRAINER_STATE).is_file():
            return str(path)
        _log.warning("%s has no %s: a process was killed while writing it; passed over", path, _TRAINER_STATE)
    return None


def _placeholder() -> Any:
    """For Trainers that look at their dataset when they are built."""
    row = {"input_ids": [[0]], "labels": [[0]]}
    try:
        from datasets import Dataset
    except ImportError:
        return [{name: value[0] for name, value in row.items()}]
    return Dataset.from_dict(row)
