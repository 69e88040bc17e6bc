"""Checkpoints of a pipeline: plain data, versioned, checked before use.

A state is a dict of JSON types. Its size does not grow with the run: the fingerprint, how many records have been used,
and six whole numbers per lane (with ensure_mixture, one more per dataset; with images that may be grey, two more).
States of several ranks merge; a restore takes the lanes that it owns, so the number of groups may change wherever all
groups stand at the same round.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from zephon.columns.lane_start import LaneStart
from zephon.config.keys import Limit
from zephon.config.topology import Topology
from zephon.engine.plan import Plan
from zephon.errors import CheckpointError
from zephon.ops.stateful import StatefulTransform
from zephon.run.fingerprint import check_fingerprint, number_ranges

SCHEMA_VERSION = 1
"""Layout of a state. A state of another version is refused."""

_Count = Annotated[int, Meta(ge=0, le=1 << 62)]
_Range = tuple[_Count, _Count]
_Ratios = dict[str, Annotated[float, Meta(gt=0, le=sys.float_info.max)]]
_STATEFUL = f"{StatefulTransform.kind} "
_T = TypeVar("_T")


class _Lanes(msgspec.Struct):
    """Layout of the lanes of a state; see `LaneStart.as_list`."""

    lanes: dict[int, Annotated[list[_Count], Meta(min_length=6)]]


@dataclass(frozen=True)
class Earlier:
    """A run that another one took over from.

    Attributes:
        tokens_per_row: of that run, by dataset name.
        cuts: by lane, the chunk in which its curriculum ends, and how many of the chunk's rows come before the end.
    """

    tokens_per_row: _Ratios
    cuts: dict[int, _Range]


@dataclass(frozen=True)
class RunState:
    """The state of a run as one group, or all groups together, see it. The fields are the layout of the dict.

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
        history: digest of the data before changes that were accepted and made other records of them; "" where none was.
        global_batch: records per step, of a state inside a step where ranges are left out; else 0.
        images: by lane, images since the last verdict on them, and how many of them are grey, where grey ones may be.
    """

    fingerprint: dict[str, Any]
    tokens_per_row: _Ratios
    lanes_total: Limit
    lanes: dict[int, LaneStart]
    rounds: _Count
    extra: _Count
    dp_degree: _Count
    dp_group_id: _Count
    skipped: tuple[_Range, ...]
    earlier: tuple[Earlier, ...] = ()
    history: str = ""
    global_batch: _Count = 0
    images: dict[int, _Range] = field(default_factory=dict)

    @property
    def data(self) -> str:
        """One SHA-256 over the fingerprint, the measured ratios, also of the runs taken over, and the history."""
        parts = [*(run.tokens_per_row for run in self.earlier), *filter(None, [self.history])]
        text = json.dumps([self.fingerprint, self.tokens_per_row, *parts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """As JSON types, with a checksum over all of them."""
        lanes = {lane: start.as_list() for lane, start in sorted(self.lanes.items())}
        content = {"zephon": SCHEMA_VERSION, **self.__dict__, "lanes": lanes}
        for name in ("earlier", "history", "global_batch", "images"):  # which most states do not have
            if not content[name]:
                del content[name]
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(content))
        return {**plain, "checksum": checksum(plain)}

    @staticmethod
    def from_dict(data: Any) -> RunState:
        """Read a state, trusting nothing in it: a `CheckpointError` unless it is whole, sound and of this version."""
        if not isinstance(data, Mapping) or "zephon" not in data:
            raise CheckpointError(
                f"a state is a dict made by Pipeline.checkpoint(); this is a {type(data).__name__}"
                f"{' without the version' if isinstance(data, Mapping) else ''}."
            )
        content = dict(data)
        version, sealed = content.pop("zephon"), content.pop("checksum", None)
        if type(version) is not int or version != SCHEMA_VERSION:
            raise CheckpointError(
                f"the state has version {version!r}, this library reads version {SCHEMA_VERSION}; "
                "restore it with the version of zephon-core that wrote it."
            )
        if not isinstance(sealed, str) or sealed != checksum({"zephon": version, **content}):
            raise CheckpointError(
                "the state is damaged or was edited: its content does not match its checksum; take another one."
            )
        try:
            numbers = msgspec.convert(content, _Lanes, str_keys=True).lanes
            state = msgspec.convert({**content, "lanes": {}}, RunState, str_keys=True)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"the state is damaged: {error}; take another one.") from None
        lanes = {lane: LaneStart.of(start) for lane, start in numbers.items()}
        feeds = state.feeds
        if type(feeds) is not int or feeds < 1 or state.lanes_total % feeds:
            raise CheckpointError(f"the state is damaged: it has {feeds!r} feeds; take another one.")
        for lane, start in lanes.items():
            if start.records_before > state.rounds * (state.lanes_total // feeds):
                raise CheckpointError(
                    f"the state is damaged: lane {lane} starts at its record {start.records_before}, after the "
                    f"{state.rounds} rounds used; take another one."
                )
        return replace(state, lanes=lanes)

    @property
    def feeds(self) -> int:
        """Feeds that the lanes share."""
        feeds: int = self.fingerprint.get("feeds", self.lanes_total)
        return feeds

    def starts(self, topology: Topology) -> tuple[dict[int, LaneStart], int, dict[int, _Range]]:
        """The starts of the feeds of a group, how many of its records have been used, and its lanes' `images`."""
        missing = [lane for lane in topology.owned if lane not in self.lanes]
        if missing:
            raise CheckpointError(
                f"the state does not hold lane{'s' if len(missing) > 1 else ''} {number_ranges(missing)}, which group "
                f"{topology.dp_group_id} of {topology.dp_degree} owns; pass the states of all ranks that took it."
            )
        if self.extra and (self.dp_degree, self.dp_group_id) != (topology.dp_degree, topology.dp_group_id):
            where = f"group {self.dp_group_id} of {self.dp_degree}" if self.dp_degree else "several groups"
            raise CheckpointError(
                f"the state was taken by {where} inside a round ({self.extra} records after round {self.rounds}), so "
                "only the same group of the same dp_degree can go on from it; take states at step ends to change "
                "dp_degree."
            )
        starts = {lane // topology.lanes_per_feed: self.lanes[lane] for lane in topology.owned}
        images = {lane: counts for lane, counts in self.images.items() if lane in topology.owned}
        return starts, self.rounds * topology.width + self.extra, images

    @property
    def repeated(self) -> int:
        """Records, about, whose rows come again where lanes go back to where they can be entered."""
        per_feed = self.lanes_total // self.feeds
        starts = {lane // per_feed: start for lane, start in self.lanes.items()}.values()
        skipped = sum(sum(start.skips) for start in starts) // (self.fingerprint.get("seq_len", 0) + 1)
        return skipped + sum(self.rounds * per_feed - start.records_before for start in starts)

    def with_other_tokens(self, plan: Plan) -> RunState:
        """For a plan that makes other records of the same rows: the state with lanes where they can be entered."""
        if self.extra:
            raise CheckpointError(
                f"the state was taken inside a round ({self.extra} records after round {self.rounds}), where a change "
                "that makes other records cannot be accepted; take one at a step end."
            )
        # Places behind a stateful transform are no rows, so there a lane begins with the window.
        operators = self.fingerprint.get("row_operators", ())
        by_window = plan.stateful or any(str(each).startswith(_STATEFUL) for each in operators)
        skips = (0,) * len(plan.first_start.skips)
        lanes, used = {}, self.rounds * (self.lanes_total // self.feeds)
        for lane, start in self.lanes.items():
            window = plan.window_at(start.chunk)
            chunk, position = (plan.window_first(window), 0) if by_window else (start.chunk, start.position)
            token = chunk << 32 | position if skips else 0
            lanes[lane] = LaneStart(window, used, chunk, position, token, start.buffer, skips)
        history = checksum({"before": self.history, "data": self.fingerprint, "rounds": self.rounds})
        return replace(self, lanes=lanes, history=history)

    def skips_of(self, start: LaneStart, datasets: Collection[str]) -> LaneStart:
        """A start with the skips, one per dataset by name, of these datasets."""
        skips = dict(zip(sorted(self.tokens_per_row), start.skips, strict=True)) if start.skips else {}
        return replace(start, skips=tuple(skips.get(name, 0) for name in sorted(datasets)))


def read_states(states: Any) -> list[RunState]:
    """One state, or a list of them, read; what is read already stays as it is."""
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
    return _merged(read_states(states)).to_dict()


def merge_for_group(states: Sequence[RunState], dp_degree: int, dp_group_id: int) -> RunState:
    """One state for a group to go on from: all of them, or, inside a round, its own."""
    own = [state for state in states if (state.dp_degree, state.dp_group_id) == (dp_degree, dp_group_id)]
    if own and own[0].extra and len({(state.dp_degree, state.extra) for state in states}) == 1:
        _merged([replace(state, extra=0) for state in states])
        return _merged(own)
    return _merged(states)


def _merged(states: Sequence[RunState]) -> RunState:
    if not states:
        raise CheckpointError("there is no state to merge; pass at least one.")
    first = states[0]
    groups = {(state.dp_degree, state.dp_group_id, state.extra) for state in states}
    for nth, other in enumerate(states[1:], start=2):
        where = f"state {nth} is not of the same run as state 1"
        check_fingerprint(first.fingerprint, other.fingerprint, where=where, remedy="")
        for name, value in (
            ("number of lanes", lambda state: state.lanes_total),
            ("tokens per row", lambda state: state.tokens_per_row),
            ("skipped rounds", lambda state: state.skipped),
            ("tokens per row of the runs taken over", lambda state: [run.tokens_per_row for run in state.earlier]),
            ("history", lambda state: state.history),
            ("number of rounds used", lambda state: state.rounds),
        ):
            if (a := value(first)) != (b := value(other)):
                raise CheckpointError(
                    f"states 1 and {nth} do not belong together: the {name} is {a} in one and {b} in the other."
                )
    if len(groups) > 1 and any(state.extra for state in states):
        raise CheckpointError(
            f"states of several groups, one of them taken inside a round (after round {first.rounds}), cannot be "
            "merged; take states at step ends."
        )
    lanes = _union([state.lanes for state in states])
    earlier = [
        Earlier(runs[0].tokens_per_row, _union([run.cuts for run in runs]))
        for runs in zip(*(state.earlier for state in states), strict=True)
    ]
    images = _union([state.images for state in states])
    merged = replace(first, lanes=lanes, earlier=tuple(earlier), images=images)
    return merged if len(groups) == 1 else replace(merged, dp_degree=0, dp_group_id=0)


def _union(by_lane: Sequence[Mapping[int, _T]]) -> dict[int, _T]:
    """What several states say of lanes, put together."""
    union: dict[int, _T] = {}
    for each in by_lane:
        for lane, value in each.items():
            if union.setdefault(lane, value) != value:
                raise CheckpointError(
                    f"one state says lane {lane} is at {value}, an earlier one says {union[lane]}; "
                    "states of one step agree, so these are of different steps or runs."
                )
    return union


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
