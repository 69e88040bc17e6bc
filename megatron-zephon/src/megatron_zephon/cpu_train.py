"""Megatron's own training on machines without a GPU, over gloo: for tests and trials.

    torchrun --nproc_per_node=2 -m megatron_zephon.cpu_train --zephon-data-config recipe.toml ...

NOT FOR TRAINING. It takes the arguments of `megatron_zephon.pretrain_gpt_zephon` and runs it with torch.cuda replaced,
in this process only, by the CPU. Models with context parallelism and packed sequences need Transformer Engine, which
has no CPU version. For megatron-core 0.19; no module of the package imports it.
"""

from __future__ import annotations

import functools
import os
import sys
from types import SimpleNamespace
from typing import Any

FLAGS = (
    "--transformer-impl",
    "local",
    "--distributed-backend",
    "gloo",
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
)
"""Options without which Megatron requires CUDA; `main` adds them to the command line."""


class _Idle:
    """A CUDA stream that has nothing to do: takes any call."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _cuda_is_cpu() -> None:
    """Put the CPU in place of CUDA in torch; torch.cuda.is_available() stays False."""
    import torch
    from torch.overrides import TorchFunctionMode

    cpu, idle = torch.device("cpu"), _Idle()

    class _OnCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = dict(kwargs or {})
            # Some ninety calls such as torch.tensor(..., device="cuda").
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = cpu
            result = func(*args, **kwargs)
            # Optimizers and the clipping of gradients require tensors of CUDA types.
            if func is torch.Tensor.type and isinstance(result, str):
                return result.replace("torch.", "torch.cuda.", 1)
            return result

    vars(torch.cuda).update(
        # Where Lightning has set PYTORCH_NVML_BASED_CUDA_CHECK, torch would go by the number of devices.
        is_available=lambda: False,
        # Without a device, groups and seeds of model parallelism are silently left out.
        device_count=lambda: 1,
        set_device=lambda device: None,
        current_device=lambda: cpu,
        synchronize=lambda device=None: None,
        Stream=_Idle,
        current_stream=lambda device=None: idle,
        # Before this generation Megatron requires CUDA_DEVICE_MAX_CONNECTIONS for tensor parallelism.
        get_device_properties=lambda device=None: SimpleNamespace(major=10, minor=0),
        # The CPU's generator is the only one. Left alone, seeding would wait for CUDA for ever.
        get_rng_state=lambda device=None: torch.get_rng_state(),
        manual_seed=torch.manual_seed,
    )
    vars(torch.cuda.random)["get_rng_state"] = torch.cuda.get_rng_state
    setattr(torch.Tensor, "cuda", lambda self, *args, **kwargs: self)  # noqa: B010 (mypy rejects an assignment)
    mode: Any = _OnCpu()
    mode.__enter__()


def _megatron_on_cpu() -> None:
    """Replace the parts of Megatron that need CUDA."""
    import megatron.core.datasets.utils
    import megatron.core.tensor_parallel.random
    import megatron.training.training
    import torch

    vars(megatron.core.tensor_parallel.random)["_set_cuda_rng_state"] = lambda new_state, device=-1, graph_safe=False: (
        torch.set_rng_state(new_state)
    )
    # Would compile helpers of Megatron's own datasets in the installed package.
    vars(megatron.core.datasets.utils)["compile_helpers"] = lambda: None
    training = megatron.training.training
    training.initialize_megatron = functools.partial(training.initialize_megatron, allow_no_cuda=True)


def prepare() -> Any:
    """Adapt torch and Megatron to the CPU, in this process; returns `megatron_zephon.pretrain_gpt_zephon`."""
    if sys.version_info < (3, 12):
        raise SystemExit("megatron.training needs Python 3.12 or later.")
    # Megatron compiles small functions at its start, which takes seconds and gains nothing here.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _cuda_is_cpu()
    _megatron_on_cpu()
    from megatron_zephon import pretrain_gpt_zephon

    return pretrain_gpt_zephon


def main() -> None:
    """Run `megatron_zephon.pretrain_gpt_zephon` on the CPU."""
    program = prepare()
    sys.argv[1:] = [*FLAGS, *sys.argv[1:]]
    program.main()


if __name__ == "__main__":
    main()
