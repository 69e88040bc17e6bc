"""Runs of Hugging Face's real Trainer and TRL's SFTTrainer; see `support.forks`."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.forks import BATCH, SEQ, STEPS, Outcome, Runs

SAVED = 2
_LOSS = re.compile(r"^(eval_)?step: (\d+) loss: (\S+)$", re.M)


@dataclass
class TrainerOutcome(Outcome):
    """With losses by step, of training and evaluation."""

    losses: dict[int, float] = field(default_factory=dict)
    evaluations: dict[int, list[float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for evaluated, step, loss in _LOSS.findall(self.logs[0]):
            if evaluated:
                self.evaluations.setdefault(int(step), []).append(float(loss))
            else:
                self.losses[int(step)] = float(loss)


class Trainers(Runs):
    """A corpus, and runs of both trainers on it."""

    framework, held_out, outcome = "hugging_face", {"held-out": 16}, TrainerOutcome

    def run(
        self,
        name: str,
        ranks: int,
        *,
        trainer: str = "Trainer",
        resume: bool | str = False,
        kill_at: int | None = None,
        recipe: Path | None = None,
        **arguments: Any,
    ) -> TrainerOutcome:
        """Train in the folder `name`; `arguments` are the trainer's own."""
        order = {
            "folder": str(self.folder / name),
            "tokenizer": str(self.tokenizer),
            "recipe": str(recipe or self.recipe),
            "evaluation": str(self.validation[0]),
            "trainer": trainer,
            "resume": resume,
            "arguments": arguments,
        }
        kill = None if kill_at is None else f"step: {kill_at} loss"
        return self.order(ranks, [json.dumps(order)], kill_at=kill)


# In the server


def prepare() -> None:
    import zephon.integrations.trl  # noqa: F401


def train(order: dict[str, Any], rank: int) -> None:
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments
    from trl import SFTConfig

    from zephon.integrations.hugging_face import ZephonTrainer
    from zephon.integrations.trl import ZephonSFTTrainer

    class Print(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            for name in ("loss", "eval_loss"):
                if state.is_world_process_zero and logs and name in logs:
                    print(f"{name.removesuffix('loss')}step: {state.global_step} loss: {logs[name]}", flush=True)

    given = json.loads(order["args"][0])
    tuning = given["trainer"] == "SFTTrainer"
    arguments = {
        "output_dir": given["folder"],
        "max_steps": STEPS,
        "save_steps": SAVED,
        "logging_steps": 1,
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        **given["arguments"],
    }
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=512, max_position_embeddings=SEQ, **sizes))
    data = {
        "recipe": given["recipe"],
        "global_batch": BATCH,
        "eval_recipe": given["evaluation"],
        "eval_records": 8,
        "ledger": Path(given["folder"], "ledger"),
    }
    kind: Any = ZephonTrainer
    if tuning:
        kind = ZephonSFTTrainer
        args = SFTConfig(max_length=SEQ, dataset_kwargs={"skip_prepare_dataset": True}, **arguments)
    else:
        data["seq_len"] = SEQ
        args = TrainingArguments(**arguments)
    trainer = kind(
        model, args, processing_class=AutoTokenizer.from_pretrained(given["tokenizer"]), callbacks=[Print()], **data
    )
    trainer.train(resume_from_checkpoint=given["resume"] or None)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.stdout.flush()
