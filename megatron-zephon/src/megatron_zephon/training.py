"""The batch function, the loss and the forward step of a GPT model, on the public helpers of megatron.core."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import (
    StragglerDetector,
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers
from megatron.training.arguments import core_transformer_config_from_args
from megatron.training.training import update_seqlen_stats_from_cu_seqlens
from megatron.training.utils import is_first_or_last_pipeline_stage

from megatron_zephon.batches import packs

_FIELDS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")
_BOUNDS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
_SPIKE = 10
"""With --check-for-spiky-loss, a loss of this many times the largest before is a spike."""

_straggler = StragglerDetector()


@cache
def predicts_more(vp_stage: int | None) -> bool:
    """Whether this rank has layers for multi-token prediction on a (virtual) pipeline stage."""
    args = get_args()
    if args.mtp_num_layers is None:
        return False
    layout = core_transformer_config_from_args(args).pipeline_model_parallel_layout
    return bool(mtp_on_this_rank(layout, args.mtp_num_layers, ignore_virtual=False, vp_stage=vp_stage))


def get_batch(data_iterator: Iterator[dict[str, Any]] | None, vp_stage: int | None = None) -> dict[str, Any]:
    """The microbatch for this rank: broadcast over TP, flattened if packed, cut for CP.

    Args:
        data_iterator: on tensor-parallel rank 0 of the stages that take batches.

    Returns:
        tokens, labels, loss_mask, position_ids, attention_mask, cu_seqlens, cu_seqlens_padded, max_seqlen; None if the
        stage does not need it.
    """
    args = get_args()
    packed = packs(args)
    at_an_end, mtp = is_first_or_last_pipeline_stage(vp_stage), predicts_more(vp_stage)
    batch: dict[str, Any] = dict.fromkeys((*_FIELDS, *_BOUNDS))
    if not (at_an_end or mtp or packed):
        return batch
    tp_rank = mpu.get_tensor_model_parallel_rank()
    if tp_rank == 0:
        assert data_iterator is not None
        fields = next(data_iterator)
        batch.update((name, value.cuda(non_blocking=True)) for name, value in fields.items() if value is not None)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        # Evaluation may have a size of its own.
        micro_batch_size=args.micro_batch_size if torch.is_grad_enabled() else args.eval_micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(ignore_virtual=vp_stage is None, vp_stage=vp_stage),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    if at_an_end or mtp:
        batch = get_batch_on_this_cp_rank(
            batch,
            is_hybrid_cp=False,
            cp_group=mpu.get_context_parallel_group(),
            use_per_sequence_balancing=bool(args.dataloader_inter_document_masking and not args.sft),
        )
    return {name: batch.get(name) for name in (*_FIELDS, *_BOUNDS)}


def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The sum of unmasked losses, their number, and both for the report.

    Args:
        loss_mask: float32[mbs, S] (of this context-parallel rank), 0 where the loss is masked.
        losses: float32[mbs, S], likewise.
    """
    args = get_args()
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(losses.reshape(-1).float() * mask)
    tokens = mask.sum().to(torch.int).detach()
    machine = get_rerun_state_machine()
    if args.check_for_nan_in_loss_and_grad:
        for reject, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
            machine.validate_result(
                result=loss,
                rejection_func=reject,
                message=f"found {what} in the loss of a forward pass",
                tolerance=0.0,
                fatal=True,
            )
    if args.check_for_spiky_loss:
        machine.validate_result(
            result=loss,
            rejection_func=partial(machine.is_unexpectedly_large, threshold=_SPIKE, context="loss"),
            message="the loss of a forward pass is a spike",
            tolerance=0.0,
            fatal=False,
        )
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    """One microbatch through this rank's part of the model (Megatron's `forward_step_func`).

    Returns:
        the output, and the function that computes its loss.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    with _straggler(bdata=True):
        batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    packing = _packing(batch)
    timers("batch-generator").stop()
    inputs = (batch["tokens"], batch["position_ids"], batch["attention_mask"])
    with _straggler:
        if return_schedule_plan:
            output = model.build_schedule_plan(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"])
        else:
            output = model(*inputs, labels=batch["labels"], loss_mask=batch["loss_mask"], packed_seq_params=packing)
    return output, partial(loss_func, batch["loss_mask"])


def _packing(batch: dict[str, Any]) -> PackedSeqParams | None:
    """The bounds of documents for attention over a packed sequence; None where batches are not packed."""
    if batch["cu_seqlens"] is None:
        return None
    bounds, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"].item())
    update_seqlen_stats_from_cu_seqlens(bounds)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        tokens_per_sample=get_args().seq_length,
    )
