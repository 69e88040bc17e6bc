"""A training loop of plain PyTorch with the data of a recipe, on any number of processes; docs/pytorch.md."""

import contextlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from examples.tiny import Tiny, parse_options
from zephon.loader import JobLoader, gather


def main() -> None:
    """Train; started by torchrun, or alone."""
    options = parse_options(main.__doc__ or "")
    is_distributed = "RANK" in os.environ
    if is_distributed:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if is_distributed else 0
    loader = JobLoader(
        options.recipe,
        tokenizer=options.tokenizer,
        seq_len=options.seq_len,
        microbatch_size=options.microbatch_size,
        global_batch=options.global_batch,
        ledger=f"{options.out}/ledger",
    )
    plain = Tiny(options.tokenizer)
    model = DistributedDataParallel(plain) if is_distributed else plain
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    done = 0
    if options.resume:
        saved = torch.load(options.resume, weights_only=True)
        plain.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])  # refuses other data
        done = saved["step"]
    batches, n = iter(loader), loader.batches_per_step
    for step in range(done + 1, options.steps + 1):
        losses = []
        for microbatch in range(n):
            wait = is_distributed and microbatch < n - 1
            with model.no_sync() if wait else contextlib.nullcontext():
                loss = model(**next(batches)) / n
                loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses = gather(sum(losses))
        if rank == 0:
            print(f"step {step}: loss {sum(losses) / len(losses):.6f}", flush=True)
        if step % options.save_every == 0:
            data = loader.state_dict()  # of all ranks, so every rank calls it
            if rank == 0:
                content = {"model": plain.state_dict(), "optimizer": optimizer.state_dict(), "step": step, "data": data}
                path = Path(options.out, f"step-{step}.pt")
                torch.save(content, path.with_suffix(".new"))
                path.with_suffix(".new").replace(path)  # whole or not at all
    loader.close()
    if is_distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
