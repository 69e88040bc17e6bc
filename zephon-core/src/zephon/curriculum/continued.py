"""Taking over: a run that goes on under another curriculum from some place of each lane.

A lane follows the earlier curriculum up to its cut, so many rows into some chunk, and the new one from the next chunk
on. The new one begins every dataset at the row of its order that the lane has come to, so a dataset that stays loses no
row and repeats none. Chunks go on being counted, so every place of the run keeps its name.

The cut of a lane is decided once, when the run is taken over, and kept in its states: the first place after the records
already used at which the lane can be entered, since the records up to there are made of rows before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from zephon.curriculum.mixture import Chunk, Curriculum
from zephon.curriculum.source import WorkSource
from zephon.data.reader import OpenDataset
from zephon.errors import CheckpointError

__all__ = ["NO_CUT", "AnyCurriculum", "Continued", "Cuts", "curriculum_of"]

NO_CUT = (
    "this run takes over from an earlier one and does not know where: restore a state of the earlier run, or of this "
    "one, before taking batches or a checkpoint."
)
Cuts = Mapping[int, tuple[int, int]]
"""By lane: the chunk in which it is cut, and how many of its rows come before the cut."""


class Continued:
    """The `Curriculum` of a run that was taken over, see there.

    Args:
        before: the earlier curriculum.
        place: int64[n_datasets of `before`], their indices in the new one.
        cuts: where lanes are cut; a lane without a cut raises a `CheckpointError`.
        make_after: the new curriculum, given the rows of each of its datasets that a lane has had before its cut.
    """

    def __init__(
        self,
        before: AnyCurriculum,
        place: Sequence[int],
        cuts: Cuts,
        make_after: Callable[[Callable[[int], list[int]]], Curriculum],
    ) -> None:
        self._before, self._cuts = before, cuts
        self._place = np.asarray(place, dtype=np.int32)
        self._taken: dict[int, list[int]] = {}
        self._after = make_after(self.taken)

    def taken(self, lane: int) -> list[int]:
        """Rows of each dataset of the new curriculum that `lane` has had before its cut."""
        if lane not in self._taken:
            index, rows = self._cut(lane)
            counts = self.rows_before(lane, index)
            if rows:
                chunk = self.chunk(lane, index)
                assert chunk is not None
                part = np.bincount(chunk.dataset, minlength=len(counts)).tolist()
                counts = [had + more for had, more in zip(counts, part, strict=True)]
            self._taken[lane] = counts
        return self._taken[lane]

    def chunk(self, lane: int, index: int) -> Chunk | None:
        cut, rows = self._cut(lane)
        if index > cut:
            return self._after.chunk(lane, index - cut - 1)
        chunk = self._before.chunk(lane, index)
        if chunk is None:  # the earlier curriculum ended here
            return Chunk(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int64))
        end = rows if index == cut else len(chunk)
        return Chunk(self._place[chunk.dataset[:end]], chunk.row[:end])

    def rows_before(self, lane: int, index: int) -> list[int]:
        cut, _ = self._cut(lane)
        if index > cut:
            return self._after.rows_before(lane, index - cut - 1)
        return self._moved(self._before.rows_before(lane, index))

    def due_through(self, lane: int, index: int) -> list[list[int]]:
        """As in a `Curriculum`, but what is due in the chunk of the cut is of the whole chunk."""
        cut, _ = self._cut(lane)
        if index > cut:
            return self._after.due_through(lane, index - cut - 1)
        return [self._moved(due) for due in self._before.due_through(lane, index)]

    def cut_at(self, lane: int, index: int) -> int | None:
        cut, rows = self._cut(lane)
        return rows if index == cut else self._before.cut_at(lane, index) if index < cut else None

    def chunks_of(self, lane: int) -> int | None:
        chunks = self._after.chunks_of(lane)
        return None if chunks is None else self._cut(lane)[0] + 1 + chunks

    def _cut(self, lane: int) -> tuple[int, int]:
        if lane not in self._cuts:
            raise CheckpointError(NO_CUT)
        return self._cuts[lane]

    def _moved(self, counts: Sequence[int]) -> list[int]:
        """Counts by dataset of the earlier curriculum, by dataset of the new one."""
        moved = [0] * self._after.n_datasets
        for d, count in zip(self._place.tolist(), counts, strict=True):
            moved[d] = count
        return moved


AnyCurriculum = Curriculum | Continued


def curriculum_of(
    source: WorkSource,
    opened: Mapping[str, OpenDataset],
    tokens_per_row: Sequence[Mapping[str, float]],
    *,
    lanes: int,
    tokens_per_step: int | None,
    cuts: Sequence[Cuts] = (),
) -> AnyCurriculum:
    """The curriculum of a source, through all the sources that it continues.

    Args:
        source: the source.
        opened: open datasets by name.
        tokens_per_row: by dataset name, for each of the sources, the earliest first.
        lanes: L.
        tokens_per_step: for schedules in steps.
        cuts: for each of the sources that are continued, the earliest first.
    """
    datasets = [opened[name] for name in source.names]
    ratios = [tokens_per_row[-1][name] for name in source.names]
    curriculum = partial(source.curriculum, datasets, ratios, lanes, tokens_per_step)
    if source.continues is None:
        return curriculum()
    before = curriculum_of(
        source.continues,
        opened,
        tokens_per_row[:-1],
        lanes=lanes,
        tokens_per_step=tokens_per_step,
        cuts=cuts[:-1],
    )
    place = [source.names.index(name) for name in source.continues.names]
    return Continued(before, place, cuts[-1] if cuts else {}, curriculum)
