"""The compiled pipeline: everything the engine needs to run a lane, independent of the process that runs it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from zephon.columns.damage import FAULT, Lost, split_damaged
from zephon.columns.lane_start import LaneStart
from zephon.columns.records import RecordBlock, RowBlock, RowPart
from zephon.config.options import FaultPolicy
from zephon.config.topology import Topology
from zephon.curriculum.mixture import Curriculum
from zephon.data.reader import JoinedDatasets, OpenDataset
from zephon.engine.pixels import PixelStage
from zephon.ops.base import Orderer, PackCounts, Packer
from zephon.ops.bins import BinPacker
from zephon.ops.documents import DocumentWorker
from zephon.ops.mixture import EnsureMixture, MixturePacker
from zephon.ops.pack import PackFlat, WrapPacker
from zephon.ops.shuffle import Passer, Shuffle, Shuffler
from zephon.ops.stateful import StatefulStage
from zephon.ops.trial import Sample
from zephon.ops.turns import TokenPlan, Turns

_LEAST_STRETCH = 64
# Rows that operators are tried on: the first 64, then the first 1,024, then some of groups all over the dataset.
_SAMPLE_ROWS = (64, 1024)
_SAMPLE_GROUPS, _SAMPLE_ROWS_OF_GROUP = 8, 512
_SAMPLE_BYTES = 32 << 20

Piece = tuple[np.ndarray, np.ndarray, int, int]
"""A piece of a chunk: datasets int32[n], rows int64[n], index of the chunk, position of the first row in the chunk."""

UNSHUFFLED_BUFFER = 1024
"""Records over all lanes between places where an unshuffled run can be entered."""


class Fetcher:
    """Reads the rows of a piece of a chunk: a stateless worker.

    Args:
        datasets: open datasets in the order of the curriculum.
        columns: for each dataset, by the name under which the operators know a column, its name in the files.
        alike: for each dataset, what is the same for those whose rows may come as one part; None where none may.
    """

    def __init__(
        self,
        datasets: Sequence[OpenDataset],
        columns: Sequence[Mapping[str, str]],
        alike: Sequence[Hashable] | None = None,
    ) -> None:
        self._datasets = list(datasets)
        self._columns = list(columns)
        together: dict[Hashable, list[int]] = {}
        for d, names in enumerate(columns):
            together.setdefault((tuple(names.items()), d if alike is None else alike[d]), []).append(d)
        self._first = np.arange(len(datasets))  # by dataset, the first of those that are read with it
        self._shift = np.zeros(len(datasets), dtype=np.int64)
        """By dataset, the first of its row ids where it is read with others."""
        self._readers: list[OpenDataset | JoinedDatasets] = list(datasets)
        for several in together.values():
            if len(several) > 1:
                joined = self._readers[several[0]] = JoinedDatasets([datasets[d] for d in several])
                self._first[several], self._shift[several] = several[0], joined.first_rows[:-1]

    def joining(self, alike: Sequence[Hashable]) -> Fetcher:
        """The same, rows of datasets that are alike coming as one part."""
        return Fetcher(self._datasets, self._columns, alike)

    def __call__(self, dataset: np.ndarray, row: np.ndarray, chunk: int, first_position: int) -> RowBlock:
        """The rows `row` int64[n] of the datasets `dataset` int32[n], in that order."""
        first, wanted = self._first[dataset], row + self._shift[dataset]
        present = np.unique(first)
        if len(present) == 1:
            parts = [self._read(int(present[0]), wanted, np.arange(len(row), dtype=np.int64))]
        else:
            by_part = np.argsort(first, kind="stable")
            edges = [*np.searchsorted(first[by_part], present, side="left").tolist(), len(first)]
            parts = [
                self._read(int(d), wanted[by_part[low:high]], by_part[low:high])
                for d, low, high in zip(present, edges[:-1], edges[1:], strict=True)
            ]
        position = np.arange(first_position, first_position + len(row), dtype=np.int64)
        lost: tuple[tuple[int, Lost], ...] = ()
        if any(FAULT in part.table.column_names for part in parts):
            parts, lost = self._without_lost(parts)
        return RowBlock(parts=parts, dataset=dataset, row=row, chunk=chunk, position=position, lost=lost)

    def announce(self, dataset: np.ndarray, row: np.ndarray) -> None:
        """Prefetch rows of remote datasets that will be read soon; never waits."""
        for d in np.unique(dataset).tolist():
            if self._datasets[d].remote:
                self._datasets[d].announce(row[dataset == d])

    def samples(self, dataset: int) -> Iterator[Sample]:
        """Rows of a dataset to try operators on: the first 64, more of the start, and some from all over it.

        Damaged rows are left out. If the first 64 are all damaged, the first sample is of the first group with sound
        rows. Each step reads at most 32 MiB more than one group.
        """
        opened = self._datasets[dataset]
        catalog = opened.catalog
        first = self._sound(dataset, np.arange(min(_SAMPLE_ROWS[0], catalog.rows), dtype=np.int64))
        groups = iter(range(catalog.n_groups))
        while not first.table.num_rows and (group := next(groups, None)) is not None:
            start = int(catalog.row_starts[group])
            table, kept, _ = split_damaged(opened.read_group(group))
            first = Sample(start + kept, self.named(dataset, table)).take(np.arange(min(_SAMPLE_ROWS[0], len(kept))))
        yield first
        rows = np.arange(_SAMPLE_ROWS[0], min(_SAMPLE_ROWS[1], catalog.rows), dtype=np.int64)
        per_row = first.table.nbytes / max(1, first.table.num_rows)
        rows = rows[: int(_SAMPLE_BYTES / max(1.0, per_row))]
        if len(rows):
            yield self._sound(dataset, rows)
        last = int(rows[-1]) if len(rows) else len(first.rows) - 1
        spread = np.unique(np.linspace(0, catalog.n_groups - 1, _SAMPLE_GROUPS).astype(np.int64))
        size, parts = 0, []
        for group in spread.tolist():
            low, high = catalog.row_starts[group : group + 2].tolist()
            some = np.unique(np.linspace(low, high - 1, _SAMPLE_ROWS_OF_GROUP).astype(np.int64))
            part = self._sound(dataset, some[some > last])
            size += part.table.nbytes
            parts.append(part)
            if size > _SAMPLE_BYTES:
                break
        yield Sample.joined(parts)

    def _sound(self, dataset: int, rows: np.ndarray) -> Sample:
        table, kept, _ = split_damaged(self._datasets[dataset].take(rows))
        return Sample(rows[kept], self.named(dataset, table))

    def named(self, dataset: int, table: pa.Table) -> pa.Table:
        """The table with its columns renamed from the names in the files to those that the operators use."""
        named = {name: table.column(source) for name, source in self._columns[dataset].items()}
        if FAULT in table.column_names:
            named[FAULT] = table.column(FAULT)
        return pa.table(named)

    def _read(self, dataset: int, rows: np.ndarray, places: np.ndarray) -> RowPart:
        return RowPart(dataset, self.named(dataset, self._readers[dataset].take(rows)), places)

    @staticmethod
    def _without_lost(parts: Sequence[RowPart]) -> tuple[list[RowPart], tuple[tuple[int, Lost], ...]]:
        """The sound rows, and (place, reason) of the others."""
        sound, lost = [], []
        for part in parts:
            table, kept, damaged = split_damaged(part.table)
            lost += [(int(part.places[row]), why) for row, why in damaged]
            # A part without a sound row has no column types for the operators.
            if len(kept):
                sound.append(RowPart(part.dataset, table, part.places[kept]))
        return sound, tuple(sorted(lost, key=lambda item: item[0]))


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run any lane.

    Attributes:
        topology: lanes and groups.
        curriculum: which rows, in which order.
        window_chunks: chunks per window.
        fetch, tokenize: stateless workers.
        fetch_apart: whether separate threads read ahead of tokenizing; else the tokenizing thread reads its rows.
        pack_apart: whether separate threads cut records and put them into their order; else the engine's thread does.
        chain: reads the rows of a piece of a lane elsewhere and works on them there, in place of `fetch` and what comes
            first after it; None where this process reads.
        pack, shuffle: operators with an accumulator per lane.
        pad_token: token of padding and filler records.
        finite: whether the lanes end.
        pad_last: whether the last record of a lane is padded rather than left out.
        dataset_names: by index.
        row_bytes: float64[n_datasets], bytes per row of all columns read; affects the size of blocks, not the data.
        record_bytes: of the tokens of a record and, about, the files of its images; bounds what waits, not the data.
        readahead_bytes: text to prefetch from stores beyond the look-ahead, over all lanes of this process; 0 where all
            data is local.
        lookahead_bytes: text in progress or ready, at most, over all lanes of this process.
        barren_limit: consecutive rows without a token after which a lane that repeats has seen every row.
        mixture: settings of ensure_mixture, or None.
        tokens_per_row: for each dataset, in units of 2**-16.
        kinds: int64[n_datasets], the kind of each dataset; a homogeneous record holds one kind only.
        faults: what happens to rows that cannot be used.
        stateful: the accumulator of a stateful transform, between `fetch` and `tokenize`.
        pixels: what decodes images; None where there are none.
        logged: the stretches of rows that cannot be used that this process has logged.
        remedy: advice for the error that no row has tokens.
    """

    topology: Topology
    curriculum: Curriculum
    window_chunks: int
    fetch: Fetcher
    tokenize: DocumentWorker
    fetch_apart: bool
    pack_apart: bool
    pack: PackFlat
    shuffle: Shuffle | None
    pad_token: int
    finite: bool
    pad_last: bool
    dataset_names: tuple[str, ...]
    row_bytes: np.ndarray
    record_bytes: int
    readahead_bytes: int
    lookahead_bytes: int
    barren_limit: int
    mixture: EnsureMixture | None
    tokens_per_row: tuple[int, ...]
    kinds: np.ndarray
    faults: FaultPolicy
    stateful: StatefulStage | None = None
    chain: Callable[[int, Piece], Any] | None = None
    pixels: PixelStage | None = None
    logged: set[Any] = field(default_factory=set)
    remedy: str = "name another column (text_field, field), or look at what the operators leave of the text"

    @property
    def first_start(self) -> LaneStart:
        """Where lanes begin at the start of the run."""
        return LaneStart(skips=(0,) * len(self.dataset_names) if self.mixture else ())

    def window_first(self, window: int) -> int:
        """The first chunk of a window."""
        return window * self.window_chunks

    def window_at(self, chunk: int) -> int:
        """The window that a chunk is in."""
        return chunk // self.window_chunks

    def packer(self, lane: int, start: LaneStart, counts: PackCounts) -> Packer:
        """A packer for a lane that begins at `start`, adding to `counts`."""
        pack = self.pack
        if self.mixture:
            return MixturePacker(
                pack.record_length,
                turns=Turns(lane, self.topology.feeds),
                start=start,
                window_first=self.window_first,
                plan=TokenPlan(
                    partial(self.curriculum.due_through, lane),
                    partial(self.curriculum.cut_at, lane),
                    self.tokens_per_row,
                ),
                through_windows=self.stateful is not None,
                hold=self.mixture.per_lane(self.topology.feeds, pack.record_length),
                stretch=max(_LEAST_STRETCH, 4 * self._buffer_size),
                pad_token=self.pad_token,
                pad_last=self.pad_last,
                order=sorted(range(len(self.dataset_names)), key=lambda d: self.dataset_names[d]),
                counts=counts,
            )
        if not pack.has_bins:
            pad_token = self.pad_token if self.pad_last else None
            return WrapPacker(pack.record_length, pad_token=pad_token, skip=start.token, counts=counts)
        return BinPacker(
            pack.record_length,
            algorithm=pack.algorithm,
            num_bins=pack.num_bins,
            max_documents=pack.max_documents_per_record,
            split=pack.oversized == "split",
            kinds=self.kinds,
            stretch=self.stretch,
            pad_token=self.pad_token,
            counts=counts,
            max_images=pack.max_images,
            max_patches=pack.max_patches,
            reserved=0 if self.pixels is None else self.pixels.reserved,
        )

    def filler(self, count: int) -> RecordBlock:
        """`count` records without a real token, as they are given out."""
        block = RecordBlock.filler(count, self.pack.record_length, self.pad_token)
        if self.pixels is None:
            return block
        records = [self.pixels.filled(block.slice(n, n + 1)) for n in range(count)]
        return RecordBlock.concat([self.pixels.decoded(record) for record in records])

    @property
    def stretch(self) -> int:
        """Records after which a lane that packs into bins should be drained.

        Long enough for the padding of a drain, about a third of a record for each kind of dataset, and the shuffle
        buffer that it cuts short not to matter; short enough for a lane to be entered quickly.
        """
        kinds = len(np.unique(self.kinds))
        return max(_LEAST_STRETCH, 4 * self.pack.num_bins, 4 * self._buffer_size) * kinds

    @property
    def _buffer_size(self) -> int:
        """Records of a lane that are shuffled together; 1 where they keep their order."""
        return max(1, self.shuffle.buffer_size // self.topology.feeds) if self.shuffle else 1

    def orderer(self, lane: int, start: LaneStart) -> Orderer:
        """The operator that puts the records of `lane` into their final order."""
        lanes = self.topology.feeds
        if self.shuffle is None or self._buffer_size == 1:
            return Passer(size=max(1, UNSHUFFLED_BUFFER // lanes), buffer=start.buffer)
        return Shuffler(
            self.shuffle,
            lane=lane,
            lanes=lanes,
            window=start.window,
            buffer=start.buffer,
            keep_datasets=self.dataset_names if self.mixture else None,
        )
