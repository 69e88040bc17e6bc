"""Checkpoints of a pipeline: plain data, versioned, checked before use.

A state is a dict of JSON types. Its size does not grow with the run: the fingerprint, how many records have been used,
and six whole numbers per lane (with ensure_mixture, one more per dataset). States of several ranks merge; a restore
takes the lanes that it owns, so the number of groups may change wherever all groups stand at the same round.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from zephon.columns.lane_start import LaneStart
from zephon.config.keys import Limit
from zephon.config.topology import Topology
from zephon.errors import CheckpointError
from zephon.run.fingerprint import check_fingerprint, number_ranges

__all__ = [
    "SCHEMA_VERSION",
    "Earlier",
    "RunState",
    "merge_checkpoints",
    "merge_for_group",
    "merge_states",
    "read_states",
]

SCHEMA_VERSION = 1
"""Layout of a state. A state of another version is refused."""

_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Ratios = dict[str, Annotated[float, Meta(gt=0, le=sys.float_info.max)]]


class _StoredEarlier(msgspec.Struct):
    """Layout of `Earlier`; cuts by lane."""

    tokens_per_row: _Ratios
    cuts: dict[str, tuple[_Count, _Count]]


class _Stored(msgspec.Struct):
    """Layout of a state."""

    fingerprint: Annotated[dict[str, Any], Meta(max_length=100_000)]
    tokens_per_row: _Ratios
    lanes_total: Limit
    lanes: dict[str, Annotated[list[_Count], Meta(min_length=6)]]
    rounds: _Count
    extra: _Count
    dp_degree: _Count
    dp_group_id: _Count
    skipped: list[tuple[_Count, _Count]]
    earlier: Annotated[list[_StoredEarlier], Meta(max_length=1000)] = []


@dataclass(frozen=True)
class Earlier:
    """A run that another one took over from.

    Attributes:
        tokens_per_row: of that run, by dataset name.
        cuts: by lane, the chunk in which its curriculum ends, and how many of the chunk's rows come before the end.
    """

    tokens_per_row: Mapping[str, float]
    cuts: Mapping[int, tuple[int, int]]


@dataclass(frozen=True)
class RunState:
    """The state of a run as one group, or all groups together, see it.

    Attributes:
        fingerprint: what decides the data, by name.
        tokens_per_row: measured once, at the start of the run, by dataset name.
        lanes_total: L.
        lanes: the lanes this state speaks for.
        rounds: whole rounds used.
        extra: records used of the round after them, 0 at a round end; counted in lane order within one group.
        dp_degree, dp_group_id: of the group that took the state; dp_degree is 0 where states were merged.
        skipped: ranges of rounds [first, last) that the run leaves out, ascending.
        earlier: the runs that this one took over from, the earliest first.
    """

    fingerprint: Mapping[str, Any]
    tokens_per_row: Mapping[str, float]
    lanes_total: int
    lanes: Mapping[int, LaneStart]
    rounds: int
    extra: int
    dp_degree: int
    dp_group_id: int
    skipped: Sequence[tuple[int, int]] = ()
    earlier: Sequence[Earlier] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, with a checksum over all of them."""
        content: dict[str, Any] = {
            "zephon": SCHEMA_VERSION,
            "fingerprint": dict(self.fingerprint),
            "tokens_per_row": dict(self.tokens_per_row),
            "lanes_total": self.lanes_total,
            "rounds": self.rounds,
            "extra": self.extra,
            "dp_degree": self.dp_degree,
            "dp_group_id": self.dp_group_id,
            "skipped": [list(pair) for pair in self.skipped],
            "lanes": {str(lane): start.as_list() for lane, start in sorted(self.lanes.items())},
        }
        if self.earlier:
            content["earlier"] = [
                {
                    "tokens_per_row": dict(run.tokens_per_row),
                    "cuts": {str(lane): list(cut) for lane, cut in sorted(run.cuts.items())},
                }
                for run in self.earlier
            ]
        return {**content, "checksum": checksum(content)}

    @staticmethod
    def from_dict(data: Any) -> RunState:
        """Read a state, trusting nothing in it.

        Raises:
            CheckpointError: it is not a whole, undamaged state of this version.
        """
        if not isinstance(data, Mapping):
            raise CheckpointError(f"a state is a dict made by Pipeline.checkpoint(); this is a {type(data).__name__}.")
        if "zephon" not in data:
            raise CheckpointError('this dict is no state of a pipeline: it lacks the key "zephon" with the version.')
        if type(data["zephon"]) is not int or data["zephon"] != SCHEMA_VERSION:
            raise CheckpointError(
                f"the state has version {data['zephon']!r}, this library reads version {SCHEMA_VERSION}; "
                "restore it with the version of zephon-core that wrote it."
            )
        sealed = data.get("checksum")
        content = {key: value for key, value in data.items() if key != "checksum"}
        if not isinstance(sealed, str) or sealed != checksum(content):
            raise CheckpointError(
                "the state is damaged or was edited: its content does not match its checksum; take another one."
            )
        try:
            return _checked(msgspec.convert(content, _Stored))
        except (msgspec.ValidationError, ValueError) as error:
            raise CheckpointError(f"the state is damaged: {error}; take another one.") from None

    @property
    def cursor(self) -> int:
        """Records that all groups together have used, as far as this state knows."""
        return self.rounds * self.lanes_total + self.extra * self.dp_degree

    def starts(self, topology: Topology) -> tuple[dict[int, LaneStart], int]:
        """The starts of the lanes of a group, and how many of its records have been used.

        Raises:
            CheckpointError: lanes are missing, or the state was taken inside a round on another topology.
        """
        if self.lanes_total != topology.lanes:
            raise CheckpointError(
                f"the state is of a run with {self.lanes_total} lanes (canonical_replicas), this pipeline has "
                f"{topology.lanes}; the number of lanes is fixed for the life of a run."
            )
        missing = [lane for lane in topology.owned if lane not in self.lanes]
        if missing:
            raise CheckpointError(
                f"the state does not hold lane{'s' if len(missing) > 1 else ''} {number_ranges(missing)}, which group "
                f"{topology.dp_group_id} of {topology.dp_degree} owns; pass the states of all ranks that took it."
            )
        same = (self.dp_degree, self.dp_group_id) == (topology.dp_degree, topology.dp_group_id)
        if self.extra and not same:
            where = f"group {self.dp_group_id} of {self.dp_degree}" if self.dp_degree else "several groups"
            raise CheckpointError(
                f"the state was taken by {where} inside a round ({self.extra} records after round {self.rounds}), so "
                "only the same group of the same dp_degree can go on from it; take states at step ends to change "
                "dp_degree."
            )
        return {lane: self.lanes[lane] for lane in topology.owned}, self.rounds * topology.width + self.extra

    def skips_of(self, start: LaneStart, datasets: Collection[str]) -> LaneStart:
        """A start with the skips, one per dataset by name, of these datasets."""
        skips = dict(zip(sorted(self.tokens_per_row), start.skips, strict=True)) if start.skips else {}
        return replace(start, skips=tuple(skips.get(name, 0) for name in sorted(datasets)))


def _checked(stored: _Stored) -> RunState:
    """The state that was stored, once its numbers agree with each other.

    Raises:
        ValueError: they do not.
    """
    total, rounds = stored.lanes_total, stored.rounds
    known = {str(lane): lane for lane in range(total)}
    for lane in [*stored.lanes, *(lane for run in stored.earlier for lane in run.cuts)]:
        if lane not in known:
            raise ValueError(f"{lane[:20]!r} is no lane of 0 to {total - 1}")
    for lane, numbers in stored.lanes.items():
        if len(numbers) not in (6, 6 + len(stored.tokens_per_row)):
            raise ValueError(f"lane {lane} does not hold six whole numbers, or six and one per dataset")
        if numbers[1] > rounds:
            raise ValueError(f"lane {lane} starts at its record {numbers[1]}, after the {rounds} rounds used")
    if max(stored.extra, stored.dp_group_id) >= total or stored.dp_degree > total:
        raise ValueError(f"extra, dp_group_id or dp_degree does not fit {total} lanes")
    if any(first >= last for first, last in stored.skipped):
        raise ValueError('"skipped" has a range that ends before it begins')
    return RunState(
        fingerprint=stored.fingerprint,
        tokens_per_row=stored.tokens_per_row,
        lanes_total=total,
        lanes={known[lane]: LaneStart.of(numbers) for lane, numbers in stored.lanes.items()},
        rounds=rounds,
        extra=stored.extra,
        dp_degree=stored.dp_degree,
        dp_group_id=stored.dp_group_id,
        skipped=tuple(stored.skipped),
        earlier=tuple(
            Earlier(run.tokens_per_row, {known[lane]: cut for lane, cut in run.cuts.items()}) for run in stored.earlier
        ),
    )


def read_states(states: Any) -> list[RunState]:
    """One state, or a list of them, read; what is read already stays as it is.

    Raises:
        CheckpointError: it is neither, or one of them is damaged.
    """
    if isinstance(states, Mapping | RunState):
        states = [states]
    if isinstance(states, str | bytes) or not isinstance(states, Iterable):
        raise CheckpointError(f"a state, or a list of states, is needed; this is a {type(states).__name__}.")
    return [state if isinstance(state, RunState) else RunState.from_dict(state) for state in states]


def merge_checkpoints(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state from those of several ranks, taken at the same step.

    States may overlap (ranks of one data-parallel group take equal ones) and need not hold every lane.

    Raises:
        CheckpointError: they are damaged, or not of one run and one moment.
    """
    return merge_states(read_states(states)).to_dict()


def merge_states(states: Sequence[RunState]) -> RunState:
    """`merge_checkpoints` of states that are read already."""
    if not states:
        raise CheckpointError("there is no state to merge; pass at least one.")
    first, lanes = states[0], dict(states[0].lanes)
    for nth, other in enumerate(states[1:], start=2):
        check_fingerprint(first.fingerprint, other.fingerprint, where=f"state {nth} is not of the same run as state 1")
        for name, a, b in (
            ("number of lanes", first.lanes_total, other.lanes_total),
            ("tokens per row", first.tokens_per_row, other.tokens_per_row),
            ("skipped rounds", list(first.skipped), list(other.skipped)),
            ("number of runs taken over", len(first.earlier), len(other.earlier)),
            ("number of rounds used", first.rounds, other.rounds),
        ):
            if a != b:
                raise CheckpointError(
                    f"states 1 and {nth} do not belong together: the {name} is {a} in one and {b} in the other."
                )
        if (first.extra or other.extra) and _group(first) != _group(other):
            raise CheckpointError(
                f"states 1 and {nth} cannot be merged: one was taken inside a round "
                f"({first.extra or other.extra} records after round {first.rounds}); take states at step ends."
            )
        for lane, start in other.lanes.items():
            if lanes.setdefault(lane, start) != start:
                raise CheckpointError(
                    f"state {nth} says lane {lane} is at {start}, an earlier one says {lanes[lane]}; "
                    "states of one step agree, so these are of different steps or runs."
                )
    earlier = [_merge_earlier(runs) for runs in zip(*(state.earlier for state in states), strict=True)]
    merged = first if len({_group(state) for state in states}) == 1 else replace(first, dp_degree=0, dp_group_id=0)
    return replace(merged, lanes=lanes, earlier=earlier)


def merge_for_group(states: Sequence[RunState], dp_degree: int, dp_group_id: int) -> RunState:
    """One state for a group to go on from: all of them, or, inside a round, its own.

    Raises:
        CheckpointError: they are not of one run and one moment.
    """
    own = [state for state in states if (state.dp_degree, state.dp_group_id) == (dp_degree, dp_group_id)]
    if own and own[0].extra and len({(state.dp_degree, state.extra) for state in states}) == 1:
        merge_states([replace(state, extra=0) for state in states])
        return merge_states(own)
    return merge_states(states)


def _group(state: RunState) -> tuple[int, int, int]:
    return state.dp_degree, state.dp_group_id, state.extra


def _merge_earlier(runs: Sequence[Earlier]) -> Earlier:
    """One run taken over from, as several states know it."""
    cuts: dict[int, tuple[int, int]] = {}
    for run in runs:
        if run.tokens_per_row != runs[0].tokens_per_row:
            raise CheckpointError("the states do not belong together: they took over from different runs.")
        for lane, cut in run.cuts.items():
            if cuts.setdefault(lane, cut) != cut:
                raise CheckpointError(
                    f"the states do not belong together: one took lane {lane} over at {cut}, another at {cuts[lane]}."
                )
    return Earlier(runs[0].tokens_per_row, cuts)


def join_ranges(ranges: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same numbers in as few ranges [first, last) as possible, ascending."""
    joined: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(last, joined[-1][1])
        else:
            joined.append((first, last))
    return tuple(joined)


def checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of JSON types, shortened; anything else has a checksum that no state has."""
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        return "none"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
