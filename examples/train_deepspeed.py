"""DeepSpeed (ZeRO 1) with the data of a recipe, started by torchrun; docs/pytorch.md."""

import os

import deepspeed
import torch
import torch.distributed as dist

from examples.tiny import Tiny, parse_options
from zephon.loader import JobLoader, gather


def main() -> None:
    """Train; with `--resume OUT/step-3`, from a checkpoint."""
    options = parse_options(main.__doc__ or "")
    if not torch.cuda.is_available():  # else a C++ extension is compiled first, which takes minutes
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo")
    loader = JobLoader(
        options.recipe,
        tokenizer=options.tokenizer,
        seq_len=options.seq_len,
        microbatch_size=options.microbatch_size,
        global_batch=options.global_batch,
        ledger=f"{options.out}/ledger",
    )
    model = Tiny(options.tokenizer)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        config={
            "train_micro_batch_size_per_gpu": options.microbatch_size,
            "gradient_accumulation_steps": loader.batches_per_step,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
        },
    )
    done = 0
    if options.resume:
        folder, tag = os.path.split(options.resume)
        _, client = engine.load_checkpoint(folder, tag)
        loader.load_state_dict(client["data"])  # refuses other data
        done = client["step"]
    batches = iter(loader)
    for step in range(done + 1, options.steps + 1):
        losses = []
        for _ in range(loader.batches_per_step):
            fields = {name: field.to(engine.device) for name, field in next(batches).items()}
            loss = engine(**fields)
            engine.backward(loss)  # divided by the number of batches of a step
            engine.step()
            losses.append(loss.item())
        losses = [loss for each in gather(losses) for loss in each]
        if dist.get_rank() == 0:
            print(f"step {step}: loss {sum(losses) / len(losses):.6f}", flush=True)
        if step % options.save_every == 0:
            # Every process passes the state, since taking it is collective.
            engine.save_checkpoint(
                options.out, f"step-{step}", client_state={"step": step, "data": loader.state_dict()}
            )
    loader.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
