"""Batches: a few records with their origin, and what a model wants of them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from zephon.columns.arrow import int32_array, int64_array, string_array
from zephon.columns.records import RecordBlock
from zephon.data.catalog import Catalog
from zephon.errors import PipelineError

__all__ = ["BatchInfo", "SampleBatch"]

DEFAULT_IGNORE_INDEX = -100
FIELDS = (
    "input_ids",
    "labels",
    "position_ids",
    "loss_mask",
    "padding_mask",
    "num_valid_tokens",
    "cu_seqlens",
    "max_seqlen",
)


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """What all batches of a run share.

    Attributes:
        datasets: names by index.
        catalogs: by index.
        eos_id: id of the token that ends each document, or None.
    """

    datasets: tuple[str, ...]
    catalogs: tuple[Catalog, ...]
    eos_id: int | None


class SampleBatch:
    """A microbatch of n records of S + 1 tokens, S being the sequence length.

    Arrays given out may share memory with the batch; do not write to them.

    Args:
        block: the records.
        sequence_numbers: int64[n], `round * L + lane` of each record.
        info: names and catalogs.
    """

    def __init__(self, block: RecordBlock, sequence_numbers: np.ndarray, info: BatchInfo) -> None:
        self._block = block
        self._info = info
        self.sequence_numbers = sequence_numbers
        """int64[n]: place of each record in the run, the same on every topology."""

    def __len__(self) -> int:
        return len(self._block)

    def __repr__(self) -> str:
        if not len(self):
            return "SampleBatch(empty)"
        return f"SampleBatch({len(self)} records of {self.tokens.shape[1]} tokens, from {self.sequence_numbers[0]})"

    @property
    def block(self) -> RecordBlock:
        """The columns behind this batch."""
        return self._block

    @property
    def tokens(self) -> np.ndarray:
        """uint32[n, S + 1]: the records, padding included."""
        return self._block.tokens

    @property
    def lengths(self) -> np.ndarray:
        """int32[n]: how many tokens of each record are real; 0 for a record that only fills a place."""
        return self._block.lengths

    @property
    def document_starts(self) -> list[np.ndarray]:
        """int32 arrays, one per record: where in the record a document, or the rest of one, starts."""
        edges = self._block.span_offsets
        return [self._block.span_start[a:b] for a, b in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)]

    def tokens_by_dataset(self) -> np.ndarray:
        """int64[n_datasets]: real tokens of each dataset."""
        block = self._block
        counts = np.bincount(block.span_dataset, weights=block.span_lengths(), minlength=len(self._info.datasets))
        return counts.astype(np.int64)

    def blank(self) -> SampleBatch:
        """As many records without a real token, in the same places of the run."""
        pad_token = self._info.eos_id or 0
        count, length = self.tokens.shape
        return SampleBatch(RecordBlock.filler(count, length, pad_token), self.sequence_numbers, self._info)

    def provenance(self) -> pa.Table:
        """Where every token came from: one line per document, or part of one, in order of record and place.

        Columns: sequence_number int64; dataset, shard (dictionary-coded strings); row int64, within the shard;
        start int32, the first place in the record; token_begin and token_end int64, the tokens of the document
        (special tokens counted) that the record holds.
        """
        block = self._block
        counts = np.diff(block.span_offsets)
        lengths = block.span_lengths()
        shard = np.empty(len(block.span_row), dtype=np.int64)
        row = np.empty(len(block.span_row), dtype=np.int64)
        # One numbering of shards over all datasets, so that names are stored once.
        shard_names: list[str] = []
        for d in np.unique(block.span_dataset).tolist():
            catalog = self._info.catalogs[d]
            here = block.span_dataset == d
            in_catalog, row[here] = catalog.locate(block.span_row[here])
            used, index = np.unique(in_catalog, return_inverse=True)
            shard[here] = index + len(shard_names)
            shard_names += [str(catalog.shard_names[s]) for s in used.tolist()]
        return pa.table(
            {
                "sequence_number": int64_array(np.repeat(self.sequence_numbers, counts)),
                "dataset": pa.DictionaryArray.from_arrays(
                    int32_array(block.span_dataset), string_array(self._info.datasets)
                ),
                "shard": pa.DictionaryArray.from_arrays(int32_array(shard), string_array(shard_names)),
                "row": int64_array(row),
                "start": int32_array(block.span_start),
                "token_begin": int64_array(block.span_token),
                "token_end": int64_array(block.span_token + lengths),
            }
        )

    @property
    def digests(self) -> list[bytes]:
        """One SHA-256 per record, over its tokens and then its document starts, both as little-endian uint32.

        Where a real token of the record is not trained on, "loss" and one bit per real token follow; where positions
        are not those counted from the document starts, "positions" and one little-endian uint32 per real token.
        """
        tokens = np.ascontiguousarray(self.tokens, dtype="<u4")
        starts = np.ascontiguousarray(self._block.span_start, dtype="<u4")
        edges = self._block.span_offsets.tolist()
        loss, positions = self._block.loss, self._block.positions
        counted = None if positions is None else self._block.counted_positions()
        lengths = self._block.lengths.tolist()
        out = []
        for i in range(len(tokens)):
            digest = hashlib.sha256(tokens[i])
            digest.update(starts[edges[i] : edges[i + 1]])
            # By what they say and not by whether they are there, which depends on what a record travelled with.
            if loss is not None and not loss[i, : lengths[i]].all():
                digest.update(b"loss" + np.packbits(loss[i, : lengths[i]]).tobytes())
            if positions is not None and counted is not None:
                given = positions[i, : lengths[i]]
                if (given != counted[i, : lengths[i]]).any():
                    digest.update(b"positions" + given.astype("<u4").tobytes())
            out.append(digest.digest())
        return out

    def to_training(
        self,
        *,
        dtype: Any = "int64",
        return_labels: bool = True,
        ignore_index: int = DEFAULT_IGNORE_INDEX,
        eos_mask_loss: bool = False,
        eos_token_id: int | None = None,
        return_loss_mask: bool = False,
        return_padding_mask: bool = False,
        return_num_valid_tokens: bool = False,
        return_cu_seqlens: bool = False,
        position_mode: Literal["preserve", "sequence"] | None = "preserve",
        rename_fields: Mapping[str, str] | None = None,
        exclude_fields: Collection[str] = (),
        flatten: bool = False,
        as_numpy: bool = False,
    ) -> dict[str, Any]:
        """The batch as a model takes it: a fresh dict of torch tensors (NumPy arrays with `as_numpy`).

        With n records of S + 1 tokens, fields are [n, S], or [n * S] with `flatten`:

        input_ids
            The first S tokens of each record.
        labels
            The last S tokens: the token that follows each input. `ignore_index` where the label is padding or is not
            trained on (chat turns of others, say), and, with `eos_mask_loss`, where the input is EOS, since what
            follows is another document.
        position_ids
            "preserve": the positions given with the data, else the place within the document, from 0 at every start of
            a document or record (and of padding); "sequence": place within the record; None leaves the field out.
        loss_mask
            float32, 0 where the label is ignored, else 1.
        padding_mask
            bool, True where the input is padding.
        num_valid_tokens
            int, labels that are not ignored.
        cu_seqlens, max_seqlen
            int32, the bounds of documents among the inputs, from 0 to S, and the longest document. [n, most + 1] padded
            on the right with S, and [n]; with `flatten` one array of bounds over n * S inputs without padding, and one
            number.

        Args:
            dtype: of input_ids, labels and position_ids: a NumPy or torch dtype or its name. With "uint32" and
                `as_numpy`, tokens are given without a copy.
            eos_token_id: EOS for `eos_mask_loss`; by default the one the pipeline adds.
            rename_fields: other names for fields.
            exclude_fields: fields to leave out.

        Raises:
            PipelineError: an option does not fit.
        """
        numpy_dtype = _numpy_dtype(dtype)
        if position_mode not in ("preserve", "sequence", None):
            raise PipelineError(f'position_mode is {position_mode!r}; "preserve", "sequence" or None is needed.')
        exclude_fields = () if exclude_fields is None else exclude_fields
        if isinstance(exclude_fields, str) or not isinstance(exclude_fields, Collection):
            raise PipelineError(f"exclude_fields is {exclude_fields!r}; a list of names of fields is needed.")
        if rename_fields is not None and not isinstance(rename_fields, Mapping):
            raise PipelineError(f"rename_fields is {rename_fields!r}; new names by name of field are needed.")
        for what, value in (("ignore_index", ignore_index), ("eos_token_id", eos_token_id)):
            if (what, value) != ("eos_token_id", None) and (isinstance(value, bool) or not isinstance(value, int)):
                raise PipelineError(f"{what} is {value!r}; a whole number is needed.")
        if eos_token_id is not None and not 0 <= eos_token_id < 1 << 32:
            raise PipelineError(f"eos_token_id is {eos_token_id}; the id of a token is needed.")
        for name in [*(rename_fields or ()), *exclude_fields]:
            if name not in FIELDS:
                raise PipelineError(f"there is no field {name!r} to rename or exclude; the fields are {list(FIELDS)}.")
        block = self._block
        n, seq_len = len(block), block.tokens.shape[1] - 1
        inputs, labels = block.tokens[:, :-1], block.tokens[:, 1:]
        places = np.arange(seq_len, dtype=np.int32)
        padded = bool((block.lengths <= seq_len).any())
        ignored = places >= block.lengths[:, None] - 1 if padded else None
        if block.loss is not None:
            ignored = ~block.loss[:, 1:] if ignored is None else ignored | ~block.loss[:, 1:]
        if eos_mask_loss:
            eos = self._info.eos_id if eos_token_id is None else eos_token_id
            if eos is None:
                raise PipelineError("eos_mask_loss needs eos_token_id, since this pipeline adds no EOS of its own.")
            after_eos = inputs == eos
            ignored = after_eos if ignored is None else ignored | after_eos

        fields: dict[str, Any] = {"input_ids": inputs.astype(numpy_dtype, copy=False)}
        if return_labels:
            fields["labels"] = labels.astype(numpy_dtype, copy=ignored is not None)
            limits = np.iinfo(numpy_dtype)
            needed = ignored is not None or ignore_index != DEFAULT_IGNORE_INDEX
            if needed and not limits.min <= ignore_index <= limits.max:
                raise PipelineError(f"ignore_index {ignore_index} does not fit dtype {numpy_dtype}.")
            if ignored is not None:
                fields["labels"][ignored] = ignore_index
        if position_mode == "sequence":
            fields["position_ids"] = np.tile(places.astype(numpy_dtype), (n, 1))
        elif position_mode == "preserve":
            given = block.positions
            fields["position_ids"] = (
                self._positions(seq_len, numpy_dtype) if given is None else given[:, :-1].astype(numpy_dtype)
            )
        if return_loss_mask:
            mask = np.ones((n, seq_len), dtype=np.float32)
            if ignored is not None:
                mask[ignored] = 0
            fields["loss_mask"] = mask
        if return_padding_mask:
            fields["padding_mask"] = places >= block.lengths[:, None]
        if flatten:
            fields = {name: np.ascontiguousarray(value).reshape(-1) for name, value in fields.items()}
        if return_cu_seqlens:
            fields["cu_seqlens"], fields["max_seqlen"] = self._bounds(seq_len, flatten)
        if return_num_valid_tokens:
            fields["num_valid_tokens"] = n * seq_len - (0 if ignored is None else int(ignored.sum()))
        names = {name: (rename_fields or {}).get(name, name) for name in fields if name not in exclude_fields}
        if len({*names.values()}) < len(names):
            raise PipelineError(f"rename_fields {dict(rename_fields or {})} gives one name to two fields.")
        renamed = {new: fields[name] for name, new in names.items()}
        return renamed if as_numpy else _to_torch(renamed, block.tokens)

    def _starts(self, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Record and place of every start among the inputs, padding counted as a document: int64[m], int32[m]."""
        block = self._block
        record = np.repeat(np.arange(len(block)), np.diff(block.span_offsets))
        place = block.span_start
        short = np.flatnonzero(block.lengths < seq_len)
        if len(short):
            record, place = np.concatenate([record, short]), np.concatenate([place, block.lengths[short]])
            order = np.lexsort((place, record))
            record, place = record[order], place[order]
        inside = place < seq_len
        return record[inside], place[inside]

    def _positions(self, seq_len: int, dtype: np.dtype[Any]) -> np.ndarray:
        """[n, S]: how far each input is from the start of its document."""
        record, place = self._starts(seq_len)
        flat = record * seq_len + place
        total = len(self) * seq_len
        positions = np.arange(total, dtype=dtype)
        positions -= np.repeat(flat.astype(dtype), np.diff(flat, append=total))
        return positions.reshape(len(self), seq_len)

    def _bounds(self, seq_len: int, flatten: bool) -> tuple[np.ndarray, Any]:
        record, place = self._starts(seq_len)
        flat = np.append(record * seq_len + place, len(self) * seq_len).astype(np.int32)
        lengths = np.diff(flat)
        if flatten:
            return flat, int(lengths.max(initial=0))
        counts = np.bincount(record, minlength=len(self))
        nth = np.arange(len(record)) - np.repeat(np.cumsum(counts) - counts, counts)
        bounds = np.full((len(self), int(counts.max(initial=0)) + 1), seq_len, dtype=np.int32)
        bounds[record, nth] = place
        # Every record has a start at place 0, so its documents are one run of `lengths`.
        longest = np.maximum.reduceat(lengths, np.cumsum(counts) - counts) if len(self) else lengths
        return bounds, longest


def _numpy_dtype(dtype: Any) -> np.dtype[Any]:
    name = str(dtype).removeprefix("torch.")
    try:
        found = np.dtype(name if not isinstance(dtype, type | np.dtype) else dtype)
    except TypeError:
        found = np.dtype(object)
    if found.kind not in "iu" or found.itemsize < 4 or not found.isnative:
        raise PipelineError(f"dtype is {dtype!r}; an integer type of at least 32 bits is needed.")
    return found


def _to_torch(fields: dict[str, Any], tokens: np.ndarray) -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        raise PipelineError(
            "to_training makes torch tensors, and torch is not installed; pass as_numpy=True."
        ) from None
    out = {}
    for name, value in fields.items():
        if isinstance(value, np.ndarray):
            # A tensor may be written to, so what looks into the batch is copied.
            out[name] = torch.from_numpy(np.array(value) if np.may_share_memory(value, tokens) else value)
        else:
            out[name] = value
    return out
