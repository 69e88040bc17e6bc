"""The compiled pipeline: everything the engine needs to run a lane, and nothing that depends on who runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from ..faults import FaultPolicy
from ..io import OpenDataset
from ..ops import DocumentWorker, Orderer, PackFlat, Passer, Shuffle, Shuffler, StatefulStage, WrapPacker
from ..records import RowBlock, RowPart
from ..state import LaneStart
from ..topology import Topology
from ..work import Curriculum

__all__ = ["Fetcher", "Plan"]

UNSHUFFLED_BUFFER = 1024
"""Records over all lanes between places where an unshuffled run can be entered."""


class Fetcher:
    """Reads the rows of a piece of a chunk: a stateless worker.

    Args:
        datasets: open datasets in the order of the curriculum.
        columns: for each dataset, by the name under which the operators know a column, its name in the files.
    """

    def __init__(self, datasets: Sequence[OpenDataset], columns: Sequence[Mapping[str, str]]) -> None:
        self._datasets = list(datasets)
        self._columns = list(columns)

    def __call__(self, dataset: np.ndarray, row: np.ndarray, chunk: int, first_position: int) -> RowBlock:
        """The rows `row` int64[n] of the datasets `dataset` int32[n], in that order."""
        present = np.unique(dataset)
        if len(present) == 1:
            parts = [self._read(int(present[0]), row, np.arange(len(row), dtype=np.int64))]
        else:
            # One read per dataset.
            by_dataset = np.argsort(dataset, kind="stable")
            edges = [*np.searchsorted(dataset[by_dataset], present, side="left").tolist(), len(dataset)]
            parts = [
                self._read(int(d), row[by_dataset[low:high]], by_dataset[low:high])
                for d, low, high in zip(present, edges[:-1], edges[1:], strict=True)
            ]
        position = np.arange(first_position, first_position + len(row), dtype=np.int64)
        return RowBlock(parts=parts, dataset=dataset, row=row, chunk=chunk, position=position)

    def table(self, dataset: int, rows: np.ndarray) -> pa.Table:
        """Rows `rows` int64[n] of one dataset, with the columns that the operators need."""
        table = self._datasets[dataset].take(rows)
        return self.named(dataset, table)

    def named(self, dataset: int, table: pa.Table) -> pa.Table:
        """A table of a dataset as read, with its columns under the names that the operators know."""
        return pa.table({name: table.column(source) for name, source in self._columns[dataset].items()})

    def _read(self, dataset: int, rows: np.ndarray, places: np.ndarray) -> RowPart:
        return RowPart(dataset, self.table(dataset, rows), places)


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run any lane.

    Attributes:
        topology: lanes and groups.
        curriculum: which rows, in which order.
        window_chunks: chunks per window.
        fetch, tokenize: stateless workers.
        fetch_apart: read in threads of its own, ahead of tokenizing; else whoever tokenizes rows reads them first.
        pack, shuffle: operators with an accumulator per lane.
        pad_token: what padding and filler records hold.
        finite: whether the lanes end.
        pad_last: whether the last record of a lane is padded rather than left out.
        dataset_names: by index.
        row_bytes: float64[n_datasets], bytes of text per row by the catalogs; sizes blocks of work, decides no data.
        lookahead_bytes: text that may be under way or ready, over all lanes of this process.
        barren_limit: rows without any token after which a lane that repeats can be sure that there are none.
        faults: what happens to rows that cannot be used.
        stateful: the accumulator of a stateful transform, between `fetch` and `tokenize`.
    """

    topology: Topology
    curriculum: Curriculum
    window_chunks: int
    fetch: Fetcher
    tokenize: DocumentWorker
    fetch_apart: bool
    pack: PackFlat
    shuffle: Shuffle | None
    pad_token: int
    finite: bool
    pad_last: bool
    dataset_names: tuple[str, ...]
    row_bytes: np.ndarray
    lookahead_bytes: int
    barren_limit: int
    faults: FaultPolicy
    stateful: StatefulStage | None = None

    def packer(self, start: LaneStart) -> WrapPacker:
        """A packer for a lane that begins at `start`."""
        return WrapPacker(
            self.pack.record_length, pad_token=self.pad_token if self.pad_last else None, skip=start.token
        )

    def orderer(self, lane: int, start: LaneStart) -> Orderer:
        """What puts the records of `lane` into their final order."""
        lanes = self.topology.lanes
        if self.shuffle is None or self.shuffle.buffer_size // lanes <= 1:
            return Passer(size=max(1, UNSHUFFLED_BUFFER // lanes), buffer=start.buffer)
        return Shuffler(self.shuffle, lane=lane, lanes=lanes, window=start.window, buffer=start.buffer)
