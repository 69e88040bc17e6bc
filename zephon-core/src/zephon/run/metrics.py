"""Metrics of a run beside its ledger: for each step of a rank one line, in NAME.steps.

The first line of a file is a `Begin`, the others are `Step`s, all of them JSON, and only ever appended whole. A line
has at most some 150 bytes and 15 for each source with tokens in the step; wanted shares and rows left out are written
where they have changed. What a killed process had written counts; a line that it cut off does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from zephon.batch import SampleBatch
from zephon.columns.appending import append_whole, new_file
from zephon.engine.totals import Totals
from zephon.run.compile import Compiled

REASONS = {
    "blank": "no content: null, empty or white space",
    "filtered": "left out by operators, such as a filter",
    "unusable": "cannot be used (on_error)",
    "too long": "longer than a record, and not split",
}
"""Why rows, or documents of them, are left out, as `Step.left` names it; of those too long the source is not known."""
_T = TypeVar("_T")


class Begin(msgspec.Struct, kw_only=True):
    """Attributes:
    places: places for tokens in a record.
    rows: by source, the rows of its files.
    """

    places: int
    rows: dict[str, int]


class Step(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Attributes:
    until: records of the group used, those of this step included.
    records: of the group in this step, or in the part of it that this process has handed out.
    wait: seconds that the trainer waited for them.
    tokens: by source.
    wanted: by source, the planned share of tokens; None where it is that of the line before.
    left: by reason and source, rows left out since this process began; None where none came to it.
    read: by source, rows read in that time; None as for `left`.
    """

    until: int
    records: int
    wait: float
    tokens: dict[str, int]
    wanted: dict[str, float] | None = None
    left: dict[str, dict[str, int]] | None = None
    read: dict[str, int] | None = None


class StepsWriter:
    """Writes the metrics of one rank.

    Args:
        folder, name: of the ledger.
        compiled: the pipeline.
        begun: records of the group used before.
    """

    def __init__(self, folder: str | os.PathLike[str], name: str, compiled: Compiled, begun: int) -> None:
        topology = compiled.topology
        self._compiled, self._names = compiled, compiled.plan.dataset_names
        batch = topology.global_batch
        self._unit = batch // topology.dp_degree if batch else compiled.operators.batch.microbatch_size
        places = compiled.operators.pack.record_length
        begin = Begin(places=places, rows={each.name: int(each.catalog.rows) for each in compiled.datasets})
        self.file = new_file(folder, f"{name}.steps", "the ledger", msgspec.json.encode(begin) + b"\n")
        self._begun = self._until = begun
        self._records, self._wait, self._tokens = 0, 0.0, np.zeros(len(self._names), dtype=np.int64)
        self._last: dict[str, Any] = {}  # what lines have said of wanted shares and rows left out
        self._totals: Totals | None = None

    def add(self, batch: SampleBatch, until: int, wait: float, totals: Totals) -> None:
        """Count a batch that ends at record `until` of the group, and write the line of a step that is complete.

        Raises:
            OSError: the line cannot be written.
        """
        self._until, self._totals = until, totals
        self._records += len(batch)
        self._wait += wait
        self._tokens += batch.tokens_by_dataset()
        if (until - self._begun) % self._unit == 0:
            self.flush()

    def flush(self) -> None:
        """Write what there is of a step."""
        totals = self._totals
        if not self._records or totals is None:
            return
        counts = map(self._by_name, (totals.skipped, totals.dropped, totals.failed))
        long = {"": totals.packing.dropped} if totals.packing.dropped else {}
        left = {reason: rows for reason, rows in zip(REASONS, (*counts, long), strict=True) if rows}
        now: dict[str, Any] = {"wanted": self._wanted(), "left": left}
        changed = {key: value for key, value in now.items() if self._last.get(key, {}) != value}
        if "left" in changed:
            changed["read"] = self._by_name(totals.rows)
        self._last = now
        wait, tokens = round(self._wait, 6), self._by_name(self._tokens)
        line = Step(until=self._until, records=self._records, wait=wait, tokens=tokens, **changed)
        append_whole(self.file, msgspec.json.encode(line) + b"\n")
        self._records, self._wait = 0, 0.0
        self._tokens[:] = 0

    def _by_name(self, values: np.ndarray) -> dict[str, int]:
        return {name: value for name, value in zip(self._names, values.tolist(), strict=True) if value}

    def _wanted(self) -> dict[str, float]:
        """Planned shares of the step."""
        if not self._compiled.source.schedule and self._last:
            wanted: dict[str, float] = self._last["wanted"]
            return wanted
        per_record = self._compiled.topology.dp_degree * self._compiled.operators.pack.record_length
        ends = ((self._until - self._records) * per_record, self._until * per_record)
        shares = self._compiled.source.shares_between(*ends, self._compiled.tokens_per_step)
        return {name: round(share, 6) for name, share in shares.items() if share}


@dataclass(slots=True)
class StepMetrics:
    """Metrics of a step of a run, of all its ranks.

    Attributes:
        records: of the step.
        tokens, wanted: by source, tokens and planned share.
        waits: by data-parallel group, seconds.
    """

    records: int = 0
    tokens: dict[str, int] = field(default_factory=dict)
    wanted: dict[str, float] = field(default_factory=dict)
    waits: dict[int, float] = field(default_factory=dict)


@dataclass(slots=True)
class Metrics:
    """Metrics of a run.

    Attributes:
        places: places for tokens in a record; 0 where nothing is known.
        rows: by source, the rows of its files.
        steps: by number, from 1.
        left: by reason and source, rows left out. They are counted when read, which is ahead of the steps, and once
            more where a start goes over them again.
        read: by source, rows read, up to the last line that says so.
    """

    places: int = 0
    rows: dict[str, int] = field(default_factory=dict)
    steps: dict[int, StepMetrics] = field(default_factory=dict)
    left: dict[str, dict[str, int]] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)

    def add(
        self, path: Path, degree: int, group: int, step_of: Callable[[int], int], limit: float, first: bool
    ) -> None:
        """Add the lines of a file up to record `limit` of the run; nothing where it does not exist.

        Args:
            path: of the file.
            degree, group: data-parallel groups, and that of the rank.
            step_of: the step of a record.
            limit: where later starts begin.
            first: whether no other rank of the group has been added; of others the waits alone count.
        """
        if not path.exists():
            return
        last: Step | None = None
        wanted: dict[str, float] = {}
        with open(path, "rb") as file:
            if (begin := _decoded(file.readline(), Begin)) is None:
                return
            self.places, self.rows = self.places or begin.places, begin.rows | self.rows
            for line in file:
                step = _decoded(line, Step)
                if step is None or step.until * degree > limit:
                    break
                wanted = step.wanted or wanted
                last = step if step.left is not None else last
                each = self.steps.setdefault(step_of(step.until * degree - 1), StepMetrics())
                each.wanted = each.wanted or wanted
                each.waits[group] = max(each.waits.get(group, 0.0), step.wait)
                if first:
                    each.records += step.records
                    _add(each.tokens, step.tokens)
        if last is not None and first:
            for reason, rows in (last.left or {}).items():
                _add(self.left.setdefault(reason, {}), rows)
            _add(self.read, last.read or {})


def _add(to: dict[str, int], more: Mapping[str, int]) -> None:
    for name, value in more.items():
        to[name] = to.get(name, 0) + value


def _decoded(line: bytes, kind: type[_T]) -> _T | None:
    """A line of a file, or None where a killed process has cut it off."""
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
