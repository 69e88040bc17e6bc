"""Batches: a few records with their origin, and what a model wants of them."""

from __future__ import annotations

import functools
import hashlib
import itertools
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pyarrow as pa
from msgspec import Meta

from zephon.columns.arrow import int32_array, int64_array, string_array
from zephon.columns.fields import FieldForm, FieldsAhead
from zephon.columns.images import Images, PixelForm, PixelsAhead
from zephon.columns.records import RecordBlock
from zephon.config.keys import check, refuse_unknown
from zephon.data.catalog import Catalog
from zephon.errors import DataError, PipelineError
from zephon.vision.geometry import VisionSettings
from zephon.vision.headers import read_header
from zephon.vision.mrope import mrope_positions

__all__ = ["BatchInfo", "SampleBatch"]

_log = logging.getLogger("zephon")
DEFAULT_IGNORE_INDEX = -100
_PositionMode = Literal["preserve", "sequence"]
_VisionForm = Literal["packed", "padded"]
_PixelType = Literal["float32", "uint8"]
_Label = Annotated[int, Meta(title="an integer")]
_TokenId = Annotated[int, Meta(ge=0, lt=1 << 32, title="the id of a token")]
_NUMBERS = ("width", "height", "bytes", "patches_wide", "patches_high")
_IMAGES = pa.list_(
    pa.struct([("format", pa.string()), *((name, pa.int64()) for name in _NUMBERS), ("grey", pa.bool_())])
)
FIELDS: tuple[str, ...] = ("input_ids", "labels", "position_ids", "loss_mask", "padding_mask")
FIELDS += ("num_valid_tokens", "cu_seqlens", "max_seqlen", "pixel_values", "grid_thw", "mrope_positions")


@dataclass(frozen=True, slots=True)
class BatchInfo:
    """What all batches of a run share: datasets and catalogs by index, the EOS of each document, or None, and, where
    there are images, how the model sees them, their placeholder, whether digests are over their pixels too, and what
    makes pixels and fields ahead."""

    datasets: tuple[str, ...]
    catalogs: tuple[Catalog, ...]
    eos_id: int | None
    vision: VisionSettings | None = None
    image_id: int = -1
    digest_pixels: bool = False
    pixels_ahead: PixelsAhead | None = None
    fields_ahead: FieldsAhead | None = None


class SampleBatch:
    """A microbatch of n records of S + 1 tokens, S being the sequence length.

    Arrays given out may share memory with the batch; do not write to them.
    """

    def __init__(
        self, block: RecordBlock, sequence_numbers: Callable[[], np.ndarray], info: BatchInfo, tokens: np.ndarray
    ) -> None:
        self._block = block
        self._info = info
        self._sequence_numbers = sequence_numbers
        self._tokens = tokens
        # Whether what was made ahead is given out, and may have been written to.
        self._pixels_given = self._fields_given = False

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

    @functools.cached_property
    def sequence_numbers(self) -> np.ndarray:
        """int64[n]: place of each record in the run, the same on every topology."""
        return self._sequence_numbers()

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
        return self._tokens.copy()

    def provenance(self) -> pa.Table:
        """Where every token came from: one line per document, or part of one, in order of record and place.

        Columns: sequence_number int64; dataset, shard (dictionary-coded strings); row int64, within the shard;
        start int32, the first place in the record; token_begin and token_end int64, the tokens of the document
        (special tokens counted) that the record holds; where a run has images, those of the document, each with
        format, width, height and bytes of its file, patches_wide and patches_high, and grey, which says that it could
        not be decoded. With `always_image` a record that only fills a place has a line without tokens.
        """
        block, info = self._block, self._info
        shard = np.empty(len(block.span_row), dtype=object)
        row = np.empty(len(block.span_row), dtype=np.int64)
        for d in np.unique(block.span_dataset).tolist():
            catalog, here = info.catalogs[d], block.span_dataset == d
            shards, row[here] = catalog.locate(block.span_row[here])
            shard[here] = [str(catalog.shard_names[s]) for s in shards.tolist()]
        dataset = [info.datasets[d] for d in block.span_dataset.tolist()]
        images = {} if info.vision is None else {"images": pa.array(self._described_images(), _IMAGES)}
        return pa.table(
            {
                "sequence_number": int64_array(np.repeat(self.sequence_numbers, np.diff(block.span_offsets))),
                "dataset": string_array(dataset).dictionary_encode(),
                "shard": string_array(shard.tolist()).dictionary_encode(),
                "row": int64_array(row),
                "start": int32_array(block.span_start),
                "token_begin": int64_array(block.span_token),
                "token_end": int64_array(block.span_token + block.span_lengths()),
                **images,
            }
        )

    def _described_images(self) -> list[list[dict[str, Any]]]:
        images = self._block.images or Images.none(len(self._block.span_row))
        lines, is_grey = list[dict[str, Any]](), images.is_grey
        for n, (file, grid) in enumerate(zip(images.files.to_pylist(), images.grids.tolist(), strict=True)):
            header = read_header(file)
            size = {"format": header.format, "width": header.width, "height": header.height, "bytes": len(file)}
            lines.append({**size, "patches_wide": grid[1], "patches_high": grid[0], "grey": bool(is_grey[n])})
        return [lines[a:b] for a, b in itertools.pairwise(images.offsets.tolist())]

    @property
    def digests(self) -> list[bytes]:
        """One SHA-256 per record, over its tokens and then its document starts, both as little-endian uint32.

        Where a record shows images, "images", their grids as little-endian int32 and the SHA-256 of their files follow,
        with the option digest_pixels of each also that of its patches.
        Where a real token of the record is not trained on, "loss" and one bit per real token follow; where positions
        are not those counted from the document starts, "positions" and one little-endian uint32 per real token.
        """
        tokens = np.ascontiguousarray(self.tokens, dtype="<u4")
        starts = np.ascontiguousarray(self._block.span_start, dtype="<u4")
        edges = self._block.span_offsets.tolist()
        loss, positions = self._block.loss, self._block.positions
        counted = None if positions is None else self._block.counted_positions()
        lengths = self._block.lengths.tolist()
        images = self._block.images and self._block.images.digests(pixels=self._info.digest_pixels)
        out = []
        for i in range(len(tokens)):
            digest = hashlib.sha256(tokens[i])
            digest.update(starts[edges[i] : edges[i + 1]])
            if images and (shown := b"".join(images[edges[i] : edges[i + 1]])):
                digest.update(b"images" + shown)
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
        ignore_index: int = DEFAULT_IGNORE_INDEX,
        eos_mask_loss: bool = False,
        boundary_mask_loss: bool = False,
        eos_token_id: int | None = None,
        shift_labels: bool | None = None,
        return_loss_mask: bool = False,
        return_padding_mask: bool = False,
        return_num_valid_tokens: bool = False,
        return_cu_seqlens: bool = False,
        position_mode: Literal["preserve", "sequence"] | None = "preserve",
        rename_fields: Mapping[str, str] | None = None,
        flatten: bool = False,
        as_numpy: bool = False,
        vision: _VisionForm = "packed",
        pixel_dtype: _PixelType = "float32",
        return_mrope_positions: bool = False,
    ) -> dict[str, Any]:
        """The batch as a model takes it: a fresh dict of torch tensors (NumPy arrays with `as_numpy`).

        With n records of S + 1 tokens, fields are [n, S], or [n * S] with `flatten`. With `shift_labels=False`, for
        models that shift labels themselves, as those of transformers do, they are [n, S + 1], and the loss is the same.

        input_ids
            The first S tokens of each record; all S + 1 with `shift_labels=False`.
        labels
            The token that follows each input; with `shift_labels=False` the input itself, the first one ignored.
            `ignore_index` where the label is padding or is not trained on (chat turns of others, say); with
            `eos_mask_loss` also where it follows EOS, and with `boundary_mask_loss` where it is the first token of
            another document (its position is 0).
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

        pixel_values, grid_thw
            Where documents have images: their patches in the order of the placeholders, normalized float32
            [patches, 3 * temporal_patch_size * patch_size**2], or, as "uint8", values of one frame
            [patches, 3 * patch_size**2]; with "padded" [images, most patches, values], filled up with zeros. grid_thw,
            int64[images, 3], are frames, and patches high and wide.
        mrope_positions
            [3, n, S]: time, row and column of each token as models of the Qwen family take them, from 0 at every
            start of a document.

        Args:
            dtype: of input_ids, labels and position_ids: a NumPy or torch dtype or its name. With "uint32" and
                `as_numpy`, tokens are given without a copy.
            eos_token_id: EOS for `eos_mask_loss`; by default the one the pipeline adds.
            rename_fields: other names for fields.

        Raises:
            PipelineError: an option is invalid.
        """
        names = dict(rename_fields or {})
        integers = _integer_dtype(dtype)
        # Ten microseconds each, so the defaults are not checked.
        if position_mode not in ("preserve", None):
            check(_PositionMode, position_mode, "position_mode", PipelineError)
        if ignore_index != DEFAULT_IGNORE_INDEX:
            check(_Label, ignore_index, "ignore_index", PipelineError)
        if eos_token_id is not None:
            check(_TokenId, eos_token_id, "eos_token_id", PipelineError)
        if vision != "packed":
            check(_VisionForm, vision, "vision", PipelineError)
        if pixel_dtype != "float32":
            check(_PixelType, pixel_dtype, "pixel_dtype", PipelineError)
        if shift_labels is not None:
            check(bool, shift_labels, "shift_labels", PipelineError)
        refuse_unknown(names, FIELDS, "field in rename_fields", PipelineError)
        if shift_labels is None and "transformers.modeling_utils" in sys.modules and "input_ids" not in names:
            _warn_of_shift()
        block = self._block
        n, seq_len = len(block), block.tokens.shape[1] - 1
        width = seq_len + (shift_labels is False)
        ignored = self._ignored(eos_mask_loss, eos_token_id, boundary_mask_loss)
        if width > seq_len:
            ignored = np.insert(np.zeros((n, seq_len), dtype=bool) if ignored is None else ignored, 0, True, axis=1)
        fields = self._token_fields(FieldForm(integers, width == seq_len, position_mode))
        if ignored is not None:
            limits = np.iinfo(integers)
            if not limits.min <= ignore_index <= limits.max:
                raise PipelineError(f"ignore_index {ignore_index} does not fit dtype {integers}.")
            if np.may_share_memory(fields["labels"], block.tokens):
                fields["labels"] = fields["labels"].copy()
            np.copyto(fields["labels"], ignore_index, where=ignored)
        if return_mrope_positions:
            fields["mrope_positions"] = self._mrope_positions(width).astype(integers, copy=False)
        if return_loss_mask:
            fields["loss_mask"] = np.ones((n, width), dtype=np.float32)
            if ignored is not None:
                fields["loss_mask"][ignored] = 0
        if return_padding_mask:
            fields["padding_mask"] = np.arange(width) >= block.lengths[:, None]
        if flatten:
            fields = {n: np.ascontiguousarray(v).reshape(*v.shape[:-2], -1) for n, v in fields.items()}
        if return_cu_seqlens:
            fields["cu_seqlens"], fields["max_seqlen"] = _bounds(self._starts, n, width, flatten)
        if return_num_valid_tokens:
            fields["num_valid_tokens"] = n * width - (0 if ignored is None else int(ignored.sum()))
        if self._info.vision is not None:
            fields |= self._visual(self._info.vision, PixelForm(vision, pixel_dtype))
        renamed = {names.get(name, name): value for name, value in fields.items()}
        if len(renamed) < len(fields):
            raise PipelineError(f"rename_fields {names} gives one name to two fields.")
        return renamed if as_numpy else _to_torch(renamed, block.tokens)

    @functools.cached_property
    def _starts(self) -> tuple[np.ndarray, np.ndarray]:
        return self._block.starts()

    def _token_fields(self, form: FieldForm) -> dict[str, Any]:
        """input_ids, labels and position_ids, made ahead where the last batch was asked for the same."""
        ahead, ready = self._info.fields_ahead, self._block.fields
        if ahead:
            ahead.form = form
        if ready is None or ready.form != form or self._fields_given:
            return dict(self._block.fields_in(form).arrays)
        self._fields_given = True
        return dict(ready.arrays)

    def _ignored(self, eos_mask_loss: bool, eos_token_id: int | None, boundaries: bool) -> np.ndarray | None:
        """bool[n, S]: labels that are not trained on; None where all are."""
        block, masks = self._block, []
        seq_len = block.tokens.shape[1] - 1
        if (block.lengths <= seq_len).any():
            masks.append(np.arange(seq_len) >= block.lengths[:, None] - 1)
        if block.loss is not None:
            masks.append(~block.loss[:, 1:])
        if eos_mask_loss:
            eos = self._info.eos_id if eos_token_id is None else eos_token_id
            if eos is None:
                raise PipelineError("eos_mask_loss needs eos_token_id, since this pipeline adds no EOS of its own.")
            masks.append(block.tokens[:, :-1] == eos)
        if boundaries:
            record, place = self._starts
            record, place = record[place > 0], place[place > 0]
            masks.append(np.zeros((len(block), seq_len), dtype=bool))
            masks[-1][record, place - 1] = True
            if block.positions is not None:
                masks.append(block.positions[:, 1:] == 0)
        return functools.reduce(np.logical_or, masks) if masks else None

    @functools.cached_property
    def _grids(self) -> np.ndarray:
        """int32[images, 2]: patches high and wide; DataError where the placeholders are not those of the images."""
        images, vision = self._block.images, self._info.vision
        grids = np.zeros((0, 2), dtype=np.int32) if images is None else images.grids[:, :2]
        if vision is not None:
            expected = int(grids.prod(axis=1).sum()) // vision.merge_size**2
            if (count := np.count_nonzero(self.tokens == self._info.image_id)) != expected:
                raise DataError(
                    f"{self!r} has {count} tokens {vision.image_token}; expected {expected}, those of its images. "
                    "Leave that token out of rows that are given as token ids."
                )
        return grids

    def _mrope_positions(self, width: int) -> np.ndarray:
        merge = 1 if self._info.vision is None else self._info.vision.merge_size
        return mrope_positions(self.tokens, self._starts, self._info.image_id, self._grids // merge)[:, :, :width]

    def _visual(self, vision: VisionSettings, form: PixelForm) -> dict[str, Any]:
        """pixel_values and grid_thw of the images of a batch."""
        from zephon.vision.pixels import put, values_shape

        images = self._block.images or Images.none(0)
        grids = np.ones((len(images.grids), 3), dtype=np.int64)
        grids[:, 1:] = self._grids
        values = None if self._pixels_given else images.ready_values(form)
        if ahead := self._info.pixels_ahead:
            ahead.form = form
        if values is None:
            patches, counts = images.patches or (), images.patch_counts.tolist()
            values, first = np.empty(values_shape(form, counts, vision), dtype=form.dtype), 0
            for number, (each, count) in enumerate(zip(patches, counts, strict=True)):
                put(values, form, number, first, each, vision)
                first += count
        else:
            self._pixels_given = True
        return {"pixel_values": values, "grid_thw": grids}


@functools.cache
def _warn_of_shift() -> None:
    _log.warning(
        "to_training shifts labels, and so do the models of transformers, which are loaded: for them pass "
        "shift_labels=False, or they learn the token after the next one; for others shift_labels=True"
    )


def _bounds(starts: tuple[np.ndarray, np.ndarray], n: int, width: int, flatten: bool) -> tuple[np.ndarray, Any]:
    """cu_seqlens and max_seqlen of the documents that start at `starts`, of which place 0 of each record is one."""
    within = starts[1] < width
    record, place = starts[0][within], starts[1][within]
    flat = np.append(record * width + place, n * width).astype(np.int32)
    lengths = np.diff(flat)
    if flatten:
        return flat, int(lengths.max())
    first = np.searchsorted(record, np.arange(n))
    bounds = np.full((n, int(np.bincount(record).max()) + 1), width, dtype=np.int32)
    bounds[record, np.arange(len(record)) - first[record]] = place
    return bounds, np.maximum.reduceat(lengths, first)


@functools.cache
def _integer_dtype(dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype of a NumPy or torch dtype or its name."""
    try:
        integers = np.dtype(dtype if isinstance(dtype, type | np.dtype) else str(dtype).removeprefix("torch."))
    except TypeError:
        integers = np.dtype(object)
    if integers.kind not in "iu" or integers.itemsize < 4 or not integers.isnative:
        raise PipelineError(f"dtype is {dtype!r}; expected an integer type of at least 32 bits.")
    return integers


def _to_torch(fields: dict[str, Any], tokens: np.ndarray) -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        raise PipelineError(
            "to_training makes torch tensors, and torch is not installed; pass as_numpy=True."
        ) from None
    return {
        # A tensor may be written to, so what looks into the batch is copied.
        name: torch.from_numpy(
            np.array(value) if value.dtype == tokens.dtype and np.may_share_memory(value, tokens) else value
        )
        if isinstance(value, np.ndarray)
        else value
        for name, value in fields.items()
    }
