"""The forms of batches for Megatron's options.

A batch is a new dict with fields of Megatron only: tokens, labels, position_ids int64[mbs, S],
loss_mask float32[mbs, S]; with an attention mask, attention_mask bool[mbs, 1, S, S] (True where a token must not look);
with packed sequences, cu_seqlens int32[mbs, S + 1] and max_seqlen int32[mbs]. Its tensors are contiguous, for the
broadcasts of tensor parallelism, and must not be written to.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass, field
from typing import Any

import torch

from zephon import SampleBatch


def packs(args: Namespace) -> bool:
    """Whether documents are separated as packed sequences."""
    return bool(args.sft or args.dataloader_inter_document_masking)


@dataclass(frozen=True)
class BatchForm:
    """The form of batches.

    Attributes:
        seq_len: S, tokens of a record that the model sees.
        eos_id: the token that ends documents, if any.
        fill: the label where no loss is computed: a valid token, since not every cross entropy accepts other values.
        reset_positions: positions restart with every document.
        attention_mask: None, "causal", or "documents" to separate documents.
        packed: whether batches have the bounds of documents, for attention over packed sequences.
        mask_eos: no loss where the input is the end of a document.
    """

    seq_len: int
    eos_id: int | None
    fill: int
    reset_positions: bool = False
    attention_mask: str | None = None
    packed: bool = False
    mask_eos: bool = False
    _causal: dict[int, torch.Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def of(args: Namespace, eos_id: int | None) -> BatchForm:
        """The form for Megatron's arguments, once they are checked."""
        packed = packs(args)
        mask = None
        if args.create_attention_mask_in_dataloader:
            mask = "documents" if args.reset_attention_mask else "causal"
        return BatchForm(
            seq_len=args.seq_length,
            eos_id=eos_id,
            fill=0 if eos_id is None else eos_id,
            reset_positions=bool(args.reset_position_ids or packed),
            attention_mask=mask,
            packed=packed,
            mask_eos=bool(args.eod_mask_loss),
        )

    def shape(self, batch: SampleBatch) -> dict[str, Any]:
        """The batch as Megatron takes it."""
        apart = self.attention_mask == "documents"
        fields = batch.to_training(
            ignore_index=self.fill,
            eos_mask_loss=self.mask_eos,
            eos_token_id=self.eos_id if self.mask_eos else None,
            return_loss_mask=True,
            return_cu_seqlens=self.packed,
            position_mode="preserve" if self.reset_positions or apart else "sequence",
            rename_fields={"input_ids": "tokens"},
        )
        if self.packed:
            # Of fixed width, as Megatron's own.
            bounds = fields["cu_seqlens"]
            wide = torch.full((len(batch), self.seq_len + 1), self.seq_len, dtype=torch.int32)
            wide[:, : bounds.shape[1]] = bounds
            fields["cu_seqlens"] = wide
        if apart:
            fields["attention_mask"] = self._documents_mask(fields["position_ids"])
            if not self.reset_positions:
                fields["position_ids"] = torch.arange(self.seq_len).repeat(len(batch), 1)
        elif self.attention_mask:
            fields["attention_mask"] = self._causal_mask(len(batch))
        return fields

    def _causal_mask(self, rows: int) -> torch.Tensor:
        """bool[rows, 1, S, S], cached: building it takes far longer than the rest of a batch."""
        if rows not in self._causal:
            causal = torch.ones(self.seq_len, self.seq_len, dtype=torch.bool).triu_(1)
            self._causal[rows] = causal.repeat(rows, 1, 1, 1)
        return self._causal[rows]

    def _documents_mask(self, positions: torch.Tensor) -> torch.Tensor:
        """bool[rows, 1, S, S] for positions that restart with every document."""
        mask = self._causal_mask(len(positions)).clone()
        last = 0
        for row, start in (positions == 0).nonzero().tolist():
            # Tokens from here on must not see the previous document; earlier documents are masked already.
            mask[row, 0, start:, last if start else 0 : start] = True
            last = start
        return mask
