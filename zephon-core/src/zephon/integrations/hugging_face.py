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

import torch
from transformers import Trainer

from zephon import CheckpointError, DataRecipe, PipelineError, SampleBatch, TopologyError
from zephon.loader import EvaluationLoader, JobLoader, check_tokenizer, data_parallel, on_all_ranks, on_first_rank

__all__ = ["STATE_NAME", "ZephonMixin", "ZephonTrainer", "read_state"]

STATE_NAME = "zephon_state.json"
"""The file with the state of the data in a checkpoint."""

_TRAINER_STATE = "trainer_state.json"  # what the Trainer writes last
_OF_DATASETS = ("assistant_only_loss", "completion_only_loss", "padding_free", "formatting_func", "data_collator")
"""What would decide how a dataset is learnt; of a recipe its own keys do."""
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
        for theirs, ours, given in (("train_dataset", "recipe", recipe), ("eval_dataset", "eval_recipe", eval_recipe)):
            if kwargs.get(theirs) is not None and given is not None:
                raise PipelineError(f"{theirs} and {ours} are both given; expected one of them. Leave out {theirs}.")
        config = kwargs.get("args", args[1] if len(args) > 1 else None)
        for name in _OF_DATASETS:
            if getattr(config, name, None) or (kwargs.get(name) and not kwargs.get("eval_dataset")):
                raise PipelineError(
                    f"{name} is given, which has no effect on the data of a recipe; expected it left out. Keys of the "
                    "recipe say what is packed and learnt, and how: chat_loss, pack_mode, pack_algorithm."
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
        self._folder: str | os.PathLike[str] = ""  # that it is from
        self._eval_loaders: dict[str, EvaluationLoader] = {}
        self._taken: set[str] = set()  # arguments of the model's forward
        self._checked = False
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
            model_vocab_size=_rows_of_embedding(trainer.model),
            special={},
            remedy="Use the tokenizer that belongs to the model, or resize its embeddings.",
        )
        places = getattr(getattr(trainer.model, "config", None), "max_position_embeddings", None) or self._seq_len
        if places < self._seq_len:
            _log.warning(
                "seq_len is %d, and the model has %d positions (max_position_embeddings)", self._seq_len, places
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
            resume_from_checkpoint = on_first_rank(lambda: _last_checkpoint(trainer.args.output_dir))
        self._state = None
        if isinstance(resume_from_checkpoint, str | os.PathLike):
            folder = self._folder = resume_from_checkpoint
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
        if args.eval_strategy != "no" or args.eval_on_start:
            for name in self._evaluations:  # so that what is wrong with them shows now
                self.get_eval_dataloader(name)
        self.job_loader = loader = _TrainLoader(
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
            loader.load_state_dict(self._state, allow_changes=self._allow_changes)
            steps = json.loads(Path(self._folder, _TRAINER_STATE).read_text(encoding="utf-8"))["global_step"]
            records = self._state["rounds"] * self._state["lanes_total"]
            batch = microbatch * ranks[1] * loader.batches_per_step
            if records != steps * batch and not self._state.get("earlier"):  # of runs before, it counts no records
                _log.warning(
                    "a step had %g records so far, and has %d from here on; set global_batch to keep it",
                    records / steps,
                    batch,
                )
        loader.batches_of_run = args.max_steps * loader.batches_per_step
        return loader

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
                (folder / _TRAINER_STATE).unlink(missing_ok=True)  # of an earlier run, it would vouch for this one
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
        if not self._checked:
            self._checked = True
            self._check_documents()
        if not self._takes_bounds():
            return self._fields(batch.to_training(shift_labels=False, boundary_mask_loss=True))
        return self._fields(
            batch.to_training(shift_labels=False, boundary_mask_loss=True, flatten=True, return_cu_seqlens=True)
        )

    def _takes_bounds(self) -> bool:
        trainer: Any = self
        config = getattr(trainer.model, "config", None)
        return "flash" in (getattr(config, "_attn_implementation", None) or "")

    def _fields(self, fields: dict[str, Any]) -> dict[str, Any]:
        """What the model takes of input_ids, labels and position_ids, and of cu_seqlens and max_seqlen for flash."""
        if "cu_seqlens" in fields:
            bounds, longest = fields.pop("cu_seqlens"), fields.pop("max_seqlen")
            fields = {name: value.unsqueeze(0) for name, value in fields.items()}
            fields |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds)
            fields |= dict.fromkeys(("max_length_q", "max_length_k"), longest)
        if not self._taken:
            trainer: Any = self
            model = trainer.accelerator.unwrap_model(trainer.model)
            model = model.get_base_model() if hasattr(model, "get_base_model") else model
            self._taken = set(inspect.signature(model.forward).parameters)
        if "position_ids" not in self._taken:
            positions = fields.pop("position_ids")
            fields |= {"attention_mask": torch.ones_like(positions)} if "attention_mask" in self._taken else {}
        # With a cache transformers makes no mask of the positions.
        return fields | ({"use_cache": False} if "use_cache" in self._taken else {})

    def _check_documents(self) -> None:
        """Warn if the model lets documents of a record see each other, as layers with a recurrent state do.

        Two records differ in their first document only: what the model says of the second one has to be the same.
        """
        trainer: Any = self
        model = getattr(trainer.model, "_orig_mod", trainer.model)
        first, training = torch.arange(16), model.training
        ids = torch.stack([torch.cat([first, first]), torch.cat([first.flip(0), first])])
        fields: dict[str, Any] = {"input_ids": ids, "position_ids": first.repeat(2, 2)}
        if self._takes_bounds():
            fields = {name: value.flatten() for name, value in fields.items()}
            fields |= {"cu_seqlens": torch.arange(0, 65, 16, dtype=torch.int32), "max_seqlen": 16}
        try:
            with torch.no_grad():
                logits = model.eval()(**trainer._prepare_inputs(self._fields(fields))).logits.float()
        except Exception as error:
            _log.warning("whether documents of a record see each other could not be checked: %s", error)
            return
        finally:
            model.train(training)
        one, other = logits.reshape(2, 32, -1)[:, 16:]
        if (one - other).abs().max() > 1e-5 * one.abs().max():
            _log.warning(
                "documents of a record see each other in %s; records of one document each avoid that: pack_mode "
                "'sequences' and max_documents_per_record 1",
                type(model).__name__,
            )


class _TrainLoader(JobLoader):
    """With a length, that of the whole run. Without one the Trainer takes one step more when a finished run resumes."""

    batches_of_run = 0

    def __len__(self) -> int:
        return self.batches_of_run


class ZephonTrainer(ZephonMixin, Trainer):
    """`Trainer` of transformers with the data of a recipe; see `ZephonMixin`."""


def read_state(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """The state of the data in a checkpoint of the Trainer, for `Pipeline.restore`.

    Raises:
        CheckpointError: the checkpoint is unfinished, or has no state of the data.
    """
    path = Path(folder, STATE_NAME)
    if not _is_whole(Path(folder)):
        raise CheckpointError(
            f"{os.fspath(folder)} has no {_TRAINER_STATE} that can be read; expected a checkpoint of the Trainer that "
            "was written wholly. Name an earlier one, or pass resume_from_checkpoint=True, which finds it."
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


def _is_whole(checkpoint: Path) -> bool:
    try:
        return isinstance(json.loads((checkpoint / _TRAINER_STATE).read_text(encoding="utf-8")), dict)
    except (OSError, ValueError):
        return False


def _last_checkpoint(folder: str) -> str:
    """The latest checkpoint in `folder` that was written wholly; raises a CheckpointError if there is none."""
    found = [path for path in Path(folder).glob("checkpoint-*") if path.name.removeprefix("checkpoint-").isdigit()]
    for path in sorted(found, key=lambda path: int(path.name.removeprefix("checkpoint-")), reverse=True):
        if _is_whole(path):
            return str(path)
        _log.warning("%s has no whole %s: a process was killed while writing it; passed over", path, _TRAINER_STATE)
    raise CheckpointError(
        f"output_dir is {folder!r}, where no checkpoint was written wholly; expected one to resume from. Name another "
        "folder, or train without resume_from_checkpoint."
    )


def _rows_of_embedding(model: Any) -> int | None:
    """None of a module that is not of transformers."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    return getattr(embedding, "num_embeddings", None)


def _placeholder() -> Any:
    """For Trainers that look at their dataset when they are built."""
    row = {"input_ids": [[0]], "labels": [[0]]}
    try:
        from datasets import Dataset
    except ImportError:
        return [{name: value[0] for name, value in row.items()}]
    return Dataset.from_dict(row)
