"""What ranks tell each other, in tensors, as few times as possible."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

__all__ = ["any_rank", "gathered", "is_distributed", "sums_and_maxima"]


def any_rank(flag: bool) -> bool:
    """Whether any rank calls this with True. All ranks must call it."""
    # Of all ranks: peers of a data-parallel rank ask as often as it does.
    value = torch.tensor(int(flag), device=_device())
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return bool(value.item())


def gathered(mine: bytes) -> list[bytes]:
    """What every rank calls this with, by rank. All ranks must call it."""
    if not is_distributed():
        return [mine]
    device, ranks = _device(), dist.get_world_size()
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(mine)], dtype=torch.int64, device=device))
    counts = [int(size.item()) for size in sizes]
    padded = torch.zeros(max(1, *counts), dtype=torch.uint8)
    padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8) if mine else padded[:0]
    texts = [torch.empty(len(padded), dtype=torch.uint8, device=device) for _ in range(ranks)]
    dist.all_gather(texts, padded.to(device))
    return [text[:count].cpu().numpy().tobytes() for text, count in zip(texts, counts, strict=True)]


def sums_and_maxima(values: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    """Over all ranks, float64[n] each. All ranks must call it, with equally many values."""
    if not is_distributed():
        return np.array(values), np.array(values)
    both = [torch.tensor(values, dtype=torch.float64, device=_device()) for _ in range(2)]
    dist.all_reduce(both[0])
    dist.all_reduce(both[1], op=dist.ReduceOp.MAX)
    return both[0].cpu().numpy(), both[1].cpu().numpy()


def is_distributed() -> bool:
    """Whether there are other ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _device() -> str:
    from torchtitan.tools.utils import device_type

    return str(device_type)
