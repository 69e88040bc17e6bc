"""Checkpoints of a pipeline: plain data, versioned, checked before use.

A state is a dict of JSON types. What it holds does not grow with the run: who made the data (the fingerprint), how many
records have been used, and six whole numbers per lane (with ensure_mixture, one more per dataset). States taken by
several ranks merge; a restore takes the lanes that it owns, so the number of groups may change wherever all groups
stand at the same round.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zephon.columns.lane_start import LaneStart
from zephon.config.topology import MAX_LANES, Topology
from zephon.errors import Change, CheckpointError, PipelineError

__all__ = [
    "SCHEMA_VERSION",
    "STREAM_VERSION",
    "Earlier",
    "RunState",
    "check_fingerprint",
    "check_ranks_agree",
    "merge_checkpoints",
    "read_states",
]

SCHEMA_VERSION = 1
"""Layout of a state. A state of another version is refused."""

STREAM_VERSION = 2
"""Raised by every change that alters any stream of records for the same recipe, seed and data."""

_MAX = 1 << 62
_MAX_FINGERPRINT = 100_000
_MOST_EARLIER = 1000


@dataclass(frozen=True)
class Earlier:
    """What a run that was taken over from another has to know of it.

    Attributes:
        tokens_per_row: of the earlier run, by dataset name.
        cuts: by lane, the chunk in which the earlier curriculum ends, and how many of its rows come before the end.
    """

    tokens_per_row: Mapping[str, float]
    cuts: Mapping[int, tuple[int, int]]

    def to_dict(self) -> dict[str, Any]:
        """As JSON types."""
        cuts = {str(lane): list(cut) for lane, cut in sorted(self.cuts.items())}
        return {"tokens_per_row": dict(self.tokens_per_row), "cuts": cuts}

    @staticmethod
    def from_dict(data: Any, known: Collection[str]) -> Earlier:
        """Read what `to_dict` made; `known` are the names of lanes."""
        cuts = data.get("cuts") if isinstance(data, Mapping) else None
        if not isinstance(cuts, Mapping) or not all(
            lane in known and isinstance(cut, Sequence) and len(cut) == 2 and all(_is_count(v) for v in cut)
            for lane, cut in cuts.items()
        ):
            raise CheckpointError('the state is damaged: "earlier" does not tell where lanes were taken over.')
        return Earlier(_ratios(data), {int(lane): (int(cut[0]), int(cut[1])) for lane, cut in cuts.items()})


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
    skipped: Sequence[tuple[int, int]] = field(default_factory=tuple)
    earlier: Sequence[Earlier] = field(default_factory=tuple)

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
            content["earlier"] = [run.to_dict() for run in self.earlier]
        return {**content, "checksum": _checksum(content)}

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
        if not _is_count(data["zephon"]) or data["zephon"] != SCHEMA_VERSION:
            raise CheckpointError(
                f"the state has version {data['zephon']!r}, this library reads version {SCHEMA_VERSION}; "
                "restore it with the version of zephon-core that wrote it."
            )
        if not isinstance(data.get("checksum"), str) or data["checksum"] != _checksum(
            {key: value for key, value in data.items() if key != "checksum"}
        ):
            raise CheckpointError(
                "the state is damaged or was edited: its content does not match its checksum; take another one."
            )
        lanes_total = _number(data, "lanes_total", 1, MAX_LANES)
        lanes_data = data.get("lanes")
        if not isinstance(lanes_data, Mapping):
            raise CheckpointError('the state is damaged: "lanes" is missing or no dict.')
        lanes = {}
        ratios = _ratios(data)
        known = {str(lane) for lane in range(lanes_total)}
        for key, value in lanes_data.items():
            if key not in known:
                raise CheckpointError(f"the state is damaged: {str(key)[:20]!r} is no lane of 0 to {lanes_total - 1}.")
            whole = isinstance(value, Sequence) and all(_is_count(v) for v in value)
            if not (whole and len(value) in (6, 6 + len(ratios))):
                raise CheckpointError(
                    f"the state is damaged: lane {key} does not hold six whole numbers, or six and one per dataset."
                )
            lanes[int(key)] = LaneStart.of(value)
        fingerprint = data.get("fingerprint")
        if not isinstance(fingerprint, Mapping) or len(fingerprint) > _MAX_FINGERPRINT:
            raise CheckpointError('the state is damaged: "fingerprint" is missing or no dict.')
        skipped = data.get("skipped")
        if not isinstance(skipped, Sequence) or not all(
            isinstance(pair, Sequence) and len(pair) == 2 and all(_is_count(v) for v in pair) and pair[0] < pair[1]
            for pair in skipped
        ):
            raise CheckpointError('the state is damaged: "skipped" is not a list of ranges of rounds.')
        earlier = data.get("earlier", [])
        if not isinstance(earlier, Sequence) or isinstance(earlier, str) or len(earlier) > _MOST_EARLIER:
            raise CheckpointError('the state is damaged: "earlier" is no list of runs.')
        state = RunState(
            fingerprint=dict(fingerprint),
            tokens_per_row=ratios,
            lanes_total=lanes_total,
            lanes=lanes,
            rounds=_number(data, "rounds", 0, _MAX),
            extra=_number(data, "extra", 0, lanes_total - 1),
            dp_degree=_number(data, "dp_degree", 0, lanes_total),
            dp_group_id=_number(data, "dp_group_id", 0, max(0, lanes_total - 1)),
            skipped=tuple((int(a), int(b)) for a, b in skipped),
            earlier=tuple(Earlier.from_dict(run, known) for run in earlier),
        )
        for lane, start in lanes.items():
            if start.records_before > state.rounds:
                raise CheckpointError(
                    f"the state is damaged: lane {lane} starts at its record {start.records_before}, "
                    f"after the {state.rounds} rounds that the state says were used."
                )
        return state

    def starts(self, topology: Topology) -> tuple[dict[int, LaneStart], int]:
        """What the group of `topology` needs: the starts of its lanes, and how many of its records have been used.

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
                f"the state does not hold lane{'s' if len(missing) > 1 else ''} {_ranges(missing)}, which group "
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


def merge_checkpoints(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state from those of several ranks, taken at the same step.

    States may overlap (ranks of one data-parallel group take equal ones) and need not hold every lane.

    Raises:
        CheckpointError: they are not of one run and one moment.
    """
    read = read_states(states)
    if not read:
        raise CheckpointError("there is no state to merge; pass at least one.")
    first, lanes = read[0], dict(read[0].lanes)
    for nth, other in enumerate(read[1:], start=2):
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
        if (first.extra or other.extra) and (first.dp_degree, first.dp_group_id, first.extra) != (
            other.dp_degree,
            other.dp_group_id,
            other.extra,
        ):
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
    earlier = _merged_earlier([state.earlier for state in read])
    alone = all((s.dp_degree, s.dp_group_id) == (first.dp_degree, first.dp_group_id) for s in read)
    merged = first if alone else replace(first, dp_degree=0, dp_group_id=0)
    return replace(merged, lanes=lanes, earlier=earlier).to_dict()


def _merged_earlier(states: Sequence[Sequence[Earlier]]) -> list[Earlier]:
    """What several states say of the runs they took over, put together."""
    merged = []
    for same in zip(*states, strict=True):
        cuts: dict[int, tuple[int, int]] = {}
        for run in same:
            if run.tokens_per_row != same[0].tokens_per_row:
                raise CheckpointError("the states do not belong together: they took over from different runs.")
            for lane, cut in run.cuts.items():
                if cuts.setdefault(lane, cut) != cut:
                    raise CheckpointError(
                        f"the states do not belong together: one took lane {lane} over at {cut}, another at "
                        f"{cuts[lane]}."
                    )
        merged.append(Earlier(same[0].tokens_per_row, cuts))
    return merged


def read_states(states: Any) -> list[RunState]:
    """One state, or a list of them, read.

    Raises:
        CheckpointError: it is neither, or one of them is damaged.
    """
    if isinstance(states, Mapping):
        return [RunState.from_dict(states)]
    if isinstance(states, str | bytes) or not isinstance(states, Iterable):
        raise CheckpointError(f"a state, or a list of states, is needed; this is a {type(states).__name__}.")
    return [RunState.from_dict(state) for state in states]


FINGERPRINT_NAMES = (
    "canonical_replicas",
    "chunk_size",
    "continues",
    "datasets",
    "documents",
    "end",
    "endings",
    "ensure_mixture",
    "flush_every_k_chunks",
    "groups",
    "order",
    "orders",
    "pack_algorithm",
    "reshuffle_on_repeat",
    "row_operators",
    "schedule",
    "seed",
    "seq_len",
    "shuffle",
    "special_tokens",
    "stream_version",
    "token_estimation",
    "tokenizer",
    "tokenizer_backend",
    "tokens_per_row",
)
"""What a fingerprint can name, besides "dataset NAME" for every dataset."""
_NAMES_TOLD = 60


def check_allowed(
    allow: Collection[str], fingerprints: Iterable[Mapping[str, Any]] | None, remedy: str = "allow_changes"
) -> None:
    """Refuse names of changes that cannot occur, such as misspelt ones.

    Args:
        allow: the names.
        fingerprints: those that may differ; None where no state is known yet, so that any dataset may be meant.
        remedy: the option that has the names.

    Raises:
        CheckpointError: the first unknown name, and the known ones.
    """
    known = sorted({*FINGERPRINT_NAMES, *(name for each in fingerprints or () for name in each)})
    for name in sorted(allow):
        if name in known or (fingerprints is None and name.startswith("dataset ")):
            continue
        near = difflib.get_close_matches(name, known, n=1)
        hint = f' (did you mean "{near[0]}"?)' if near else ""
        more = f" and {len(known) - _NAMES_TOLD} more" if len(known) > _NAMES_TOLD else ""
        dataset = ' or "dataset NAME"' if fingerprints is None else ""
        raise CheckpointError(
            f"{remedy} names {name[:80]!r}, which is no difference that data can have{hint}; it may name "
            f"{', '.join(known[:_NAMES_TOLD])}{more}{dataset}."
        )


def check_fingerprint(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    allow: Collection[str] = (),
    where: str,
    remedy: str = "allow_changes",
    explain: Callable[[str, Any], str] = lambda name, before: "",
) -> list[Change]:
    """Refuse two fingerprints that differ in anything not allowed.

    Args:
        allow: names of changes to accept.
        where: how the message begins.
        remedy: the option that accepts changes, for the message.
        explain: words for a change, given its name and its value before; "" where the values say enough.

    Returns:
        The changes that are allowed.

    Raises:
        CheckpointError: the data would differ; `changes` has the differences that are not allowed.
    """
    changes = [
        Change(name, value, now.get(name, "absent"), explain(name, value))
        for name in sorted({*before, *now})
        if (value := before.get(name, "absent")) != now.get(name, "absent")
    ]
    if refused := [change for change in changes if change.name not in allow]:
        raise CheckpointError(where, refused, remedy)
    return changes


def check_ranks_agree(fingerprints: Mapping[int, Mapping[str, Any]]) -> None:
    """Refuse to train where ranks would read different data.

    Args:
        fingerprints: by rank, of all ranks that read data; at least one.

    Raises:
        PipelineError: which ranks differ from the first, and in what.
    """
    lowest = min(fingerprints)
    first = fingerprints[lowest]
    others = sorted(rank for rank, fingerprint in fingerprints.items() if fingerprint != first)
    if others:
        other = fingerprints[others[0]]
        names = [name for name in sorted({*first, *other}) if first.get(name) != other.get(name)]
        told = "; ".join(
            f"{name} is {str(first.get(name, 'absent'))[:200]} on rank {lowest} and "
            f"{str(other.get(name, 'absent'))[:200]} on rank {others[0]}"
            for name in names[:3]
        )
        raise PipelineError(
            f"ranks {_ranges(others)} would read other data than rank {lowest}: {told}; give all ranks the same files, "
            "tokenizer and settings."
        )


def _ratios(data: Mapping[str, Any]) -> dict[str, float]:
    ratios = data.get("tokens_per_row")
    if not isinstance(ratios, Mapping) or not all(
        isinstance(value, float) and 0 < value < float("inf") for value in ratios.values()
    ):
        raise CheckpointError('the state is damaged: "tokens_per_row" is not a dict of numbers above 0.')
    return dict(ratios)


def _ranges(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as "0-2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _checksum(content: Mapping[str, Any]) -> str:
    """SHA-256 of JSON types, shortened; anything else has a checksum that no state has."""
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError):
        return "none"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX


def _number(data: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value: Any = data.get(name)
    if not _is_count(value) or not least <= value <= most:
        raise CheckpointError(
            f'the state is damaged: "{name}" is {str(value)[:40]}, not a whole number from {least} to {most}.'
        )
    return int(value)
