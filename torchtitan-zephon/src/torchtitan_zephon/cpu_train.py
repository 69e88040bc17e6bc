"""TorchTitan's own training on machines without a GPU, over gloo: for tests and trials.

    torchrun --nproc_per_node=2 -m torchtitan_zephon.cpu_train --module torchtitan_zephon --config ...

It takes the arguments of `torchtitan.train` and runs it with the CPU as device. In this process only, it replaces what
has no CPU version: FlexAttention (by scaled dot product attention, which lets tokens see earlier documents of their
record), CUDA graphs, FSDP's reduction by a premultiplied sum, and parameters in bfloat16 (by float32). Models with
variable-length attention are refused. For TorchTitan 0.3 and its main branch of August
2026; no module of the package imports it.
"""

from __future__ import annotations

import collections
import inspect
import os
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any


def _device_is_cpu() -> None:
    """Add to torch.cpu what TorchTitan needs of a device module, before torchtitan is imported."""
    import torch
    import torch._utils

    vars(torch._utils)["_get_available_device_type"] = lambda: "cpu"
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    vars(torch.cpu).update(
        get_device_name=lambda device=None: "cpu",
        get_device_properties=lambda device=None: SimpleNamespace(name="cpu", total_memory=total),
        memory_stats=lambda device=None: collections.defaultdict(int),
        reset_peak_memory_stats=lambda device=None: None,
        empty_cache=lambda: None,
        # torch says "cpu" here; TorchTitan expects the index of a device.
        current_device=lambda: 0,
    )


def _adapt(config: Any) -> Any:
    """Replace what has no CPU version in a config; command-line overrides come after."""
    import torch
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention

    config.training.disable_cuda_graphs = True
    config.training.mixed_precision_param = "float32"  # CPUs emulate bfloat16, at seven times the time
    spec = config.model_spec
    if any(True for _ in spec.model.traverse(VarlenAttention.Config)):
        raise SystemExit(
            f"error: {spec.name} {spec.flavor} has variable-length attention, which has no CPU version. Choose a model "
            "with FlexAttention, such as llama3."
        )
    if getattr(spec.model, "vision_encoder", None) is not None:
        FlexAttention.forward = _dense_forward  # their masks are not only causal
        torch.compiler.set_stance("force_eager")  # compiling what makes the masks takes minutes
    else:
        attention = _attention(FlexAttention)
        for _, _, parent, name in list(spec.model.traverse(FlexAttention.Config)):
            if isinstance(parent, list):
                parent[name] = attention.Config()
            else:
                setattr(parent, name, attention.Config())
    stock = spec.parallelize_fn

    def parallelize(*args: Any, **kwargs: Any) -> Any:
        model = stock(*args, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    spec.parallelize_fn = parallelize
    return config


def _dense_forward(
    self: Any,
    q_BLNH: Any,
    k_BLNH: Any,
    v_BLNH: Any,
    *,
    attention_masks: Any,
    score_mod: Any = None,
    scale: Any = None,
    enable_gqa: bool = False,
    out_transform: Any = None,
    **_: Any,
) -> Any:
    """FlexAttention with its mask written out. TorchTitan checks the names of the parameters."""
    import torch

    q, k, v = (part.transpose(1, 2) for part in (q_BLNH, k_BLNH, v_BLNH))
    batch, head, row, column = (
        torch.arange(size).view([-1 if axis == place else 1 for axis in range(4)])
        for place, size in enumerate((len(q), 1, q.shape[2], k.shape[2]))
    )
    mask = attention_masks.mask_mod(batch, head, row, column)
    mask = mask | ~mask.any(-1, keepdim=True)  # rows that see nothing are padding
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out.transpose(1, 2)


def _attention(flex: Any) -> Any:
    """Causal attention that has a backward on the CPU, with the arguments of `flex`."""
    if "q_TNH" not in inspect.signature(flex.forward).parameters:
        from torchtitan.models.common.attention import ScaledDotProductAttention

        return ScaledDotProductAttention

    import torch
    from torchtitan.protocols.module import Module

    class FlatAttention(Module):
        """For the flat sequences [T, N, H] of TorchTitan's main branch."""

        @dataclass(kw_only=True, slots=True)
        class Config(Module.Config):
            pass

        def __init__(self, config: Config) -> None:
            super().__init__()

        def forward(self, q_TNH: Any, k_TNH: Any, v_TNH: Any, **how: Any) -> Any:
            q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (q_TNH, k_TNH, v_TNH))
            out = torch.nn.functional.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=how.get("scale"), enable_gqa=how.get("enable_gqa", False)
            )
            return out.squeeze(0).transpose(0, 1)

    return FlatAttention


def prepare() -> Any:
    """Adapt TorchTitan to the CPU, in this process; returns its module `torchtitan.train`."""
    if sys.version_info < (3, 12):
        raise SystemExit("TorchTitan 0.3 needs Python 3.12 or later.")
    _device_is_cpu()
    import torchtitan.train
    from torchtitan.config.manager import ConfigManager
    from torchtitan.distributed import utils

    class CpuConfigManager(ConfigManager):
        def _load_config(self, args: list[str]) -> tuple[object, list[str]]:
            config, rest = super()._load_config(args)
            return _adapt(config), rest

    # Sets timeouts behind a barrier that gloo does not know; the defaults do.
    utils.set_pg_timeouts = lambda *args, **kwargs: None
    torchtitan.train.ConfigManager = CpuConfigManager
    return torchtitan.train


def main() -> None:
    """Run `torchtitan.train` on the CPU."""
    prepare().main()


if __name__ == "__main__":
    main()
