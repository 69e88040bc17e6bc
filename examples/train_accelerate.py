"""A training loop of accelerate with the data of a recipe, on any number of processes; docs/pytorch.md."""

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from examples.tiny import Tiny, parse_options
from zephon.loader import JobLoader


class Step:
    """The number of steps done, saved with the rest."""

    done = 0

    def state_dict(self) -> dict[str, int]:
        """For `Accelerator.save_state`."""
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """For `Accelerator.load_state`."""
        self.done = state["done"]


def main() -> None:
    """Train; started by accelerate launch, torchrun, or alone."""
    options = parse_options(main.__doc__ or "")
    accelerator = Accelerator()
    loader = JobLoader(
        options.recipe,
        tokenizer=options.tokenizer,
        seq_len=options.seq_len,
        microbatch_size=options.microbatch_size,
        global_batch=options.global_batch,
        ledger=f"{options.out}/ledger",
    )
    accelerator.gradient_accumulation_steps = loader.batches_per_step
    model = Tiny(options.tokenizer)
    # Not the loader: accelerate would share out its batches among the ranks once more.
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    step = Step()
    accelerator.register_for_checkpointing(loader, step)
    if options.resume:
        accelerator.load_state(options.resume)
        accelerator.step = 0  # it counts batches, and a step of another number of processes has other ones
    losses: list[float] = []
    for batch in loader if step.done < options.steps else ():
        with accelerator.accumulate(model):
            loss = model(**{name: tensor.to(accelerator.device) for name, tensor in batch.items()})
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        if not accelerator.sync_gradients:
            continue
        step.done += 1
        losses = gather_object(losses)
        accelerator.print(f"step {step.done}: loss {sum(losses) / len(losses):.6f}", flush=True)
        losses = []
        if step.done % options.save_every == 0:
            accelerator.save_state(f"{options.out}/step-{step.done}")
        if step.done == options.steps:
            break
    loader.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
