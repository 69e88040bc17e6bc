"""The compiled pipeline: everything the engine needs to run a lane, and nothing that depends on who runs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from .._arrow import int64_array
from ..io import OpenDataset
from ..ops import Orderer, PackFlat, Passer, Shuffle, Shuffler, TokenizeWorker, WrapPacker
from ..records import RowBlock
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
        columns: the text column of each dataset.
        field: the name under which the operators know it.
    """

    def __init__(self, datasets: Sequence[OpenDataset], columns: Sequence[str], field: str) -> None:
        self._datasets = list(datasets)
        self._columns = list(columns)
        self._field = field

    def __call__(self, dataset: np.ndarray, row: np.ndarray, chunk: int, first_position: int) -> RowBlock:
        """The rows `row` int64[n] of the datasets `dataset` int32[n], in that order."""
        present = np.unique(dataset)
        if len(present) == 1:
            table = self._read(int(present[0]), row)
        else:
            # One read per dataset, then one gather to put the rows in the order of the chunk.
            by_dataset = np.argsort(dataset, kind="stable")
            edges = [*np.searchsorted(dataset[by_dataset], present, side="left").tolist(), len(dataset)]
            tables = [
                self._read(int(d), row[by_dataset[low:high]])
                for d, low, high in zip(present, edges[:-1], edges[1:], strict=True)
            ]
            back = np.empty(len(row), dtype=np.int64)
            back[by_dataset] = np.arange(len(row), dtype=np.int64)
            table = pa.concat_tables(tables).combine_chunks().take(int64_array(back))
        position = np.arange(first_position, first_position + len(row), dtype=np.int64)
        return RowBlock(table=table, dataset=dataset, row=row, chunk=chunk, position=position)

    def announce(self, dataset: np.ndarray, row: np.ndarray) -> None:
        """Have fetched what lies in stores of the rows that will be asked for soon; never waits."""
        for d in np.unique(dataset).tolist():
            if self._datasets[d].remote:
                self._datasets[d].announce(row[dataset == d])

    def _read(self, dataset: int, rows: np.ndarray) -> pa.Table:
        table = self._datasets[dataset].take(rows)
        return pa.table({self._field: table.column(self._columns[dataset])})


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
        readahead_bytes: text, over all lanes of this process, for which stores are asked ahead of the look-ahead; 0
            where all data is local.
        lookahead_bytes: text that may be under way or ready, over all lanes of this process.
        barren_limit: rows without any token after which a lane that repeats can be sure that there are none.
    """

    topology: Topology
    curriculum: Curriculum
    window_chunks: int
    fetch: Fetcher
    tokenize: TokenizeWorker
    fetch_apart: bool
    pack: PackFlat
    shuffle: Shuffle | None
    pad_token: int
    finite: bool
    pad_last: bool
    dataset_names: tuple[str, ...]
    row_bytes: np.ndarray
    readahead_bytes: int
    lookahead_bytes: int
    barren_limit: int

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
