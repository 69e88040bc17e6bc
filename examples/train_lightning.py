"""Lightning with the data of a recipe, on any number of processes; docs/lightning.md."""

import os
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from examples.tiny import Tiny, parse_options
from zephon.integrations.lightning import ZephonDataModule


class Module(LightningModule):
    """The tiny model; prints the loss of every step over all processes."""

    def __init__(self, tokenizer: str) -> None:
        super().__init__()
        self.model = Tiny(tokenizer)
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        """The loss of a microbatch."""
        loss: torch.Tensor = self.model(**batch)
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Print, once the step is made."""
        if len(self.losses) == self.trainer.accumulate_grad_batches:
            loss = self.all_gather(torch.stack(self.losses)).mean().item()
            self.losses.clear()
            if self.trainer.is_global_zero:
                print(f"step {self.trainer.global_step}: loss {loss:.6f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    """Train; started by torchrun, or alone."""
    options = parse_options(main.__doc__ or "")
    data = ZephonDataModule(
        options.recipe,
        tokenizer=options.tokenizer,
        seq_len=options.seq_len,
        microbatch_size=options.microbatch_size,
        global_batch=options.global_batch,
        ledger=f"{options.out}/ledger",
    )
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    trainer = Trainer(
        accelerator="cpu",
        devices=processes,
        strategy=DDPStrategy(process_group_backend="gloo") if processes > 1 else "auto",
        max_steps=options.steps,
        callbacks=[ModelCheckpoint(options.out, "{step}", every_n_train_steps=options.save_every, save_top_k=-1)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(options.tokenizer), data, ckpt_path=options.resume)


if __name__ == "__main__":
    main()
