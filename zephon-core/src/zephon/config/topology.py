"""Lanes, data-parallel groups and step alignment: the one place with this arithmetic and its errors.

Words used here:

lane
    One of L ordered streams of records, fixed for the life of a run (`canonical_replicas`).
group
    One data-parallel group: the ranks that must see the same data. G of them, each owning L/G neighbouring lanes.
feed
    What lanes take their records from, in turn: consecutive lanes share a feed in a run that ends, so that they end
    together. In a run without end every lane is a feed of its own.
round
    One record from every lane. A group emits one record per owned lane and round, in lane order.
sequence number
    `round * L + lane`: every record of the run has one, whatever the topology.
step
    B records (the global batch), that is B/L rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from zephon.config.keys import Limit, Positive, Whole, check
from zephon.errors import PipelineError, TopologyError

MAX_AUTO_LANES = 256
FEED_BYTES = 1 << 30
"""Least data of a feed: every group reads all of its feeds, and lanes end together where feeds are few."""


def divisors(n: int) -> list[int]:
    """All positive divisors of `n`, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def _nearest(value: int, candidates: Iterable[int]) -> str:
    """The two candidates nearest to `value` on either side."""
    below, above = ([c for c in candidates if wanted(c)] for wanted in (value.__ge__, value.__lt__))
    return " or ".join(map(str, below[-2:] + above[:2]))


def check_division(
    lanes: int, groups: int, batches: Sequence[int] = (), *, at_once: int = 1, where: str = "global_batch"
) -> None:
    """Check that lanes divide among groups, and global batches by lanes.

    Args:
        batches: records per step, all sizes that the run has.
        at_once: records that a framework makes each group take at once; those of all groups divide global batches too.
        where: the option that names the global batch.

    Raises:
        TopologyError: they do not; names the numbers nearest to each of them that would do with the others.
    """
    common, unit = math.gcd(*batches), math.lcm(lanes, groups * at_once)  # 0 without batches, which all numbers divide
    wrong = next((batch for batch in batches if batch % unit), common)
    if lanes % groups == 0 and wrong % unit == 0:
        return
    if lanes % groups:
        problem = f"{lanes} lanes (canonical_replicas) do not divide among {groups} data-parallel groups"
    elif wrong % lanes:
        problem = f"a global batch of {wrong} records ({where}) does not divide by {lanes} lanes (canonical_replicas)"
    else:
        taken = f"{groups} data-parallel groups x {at_once} records at once"
        problem = f"a global batch of {wrong} records ({where}) does not divide by {taken}"
    fitting = [] if common % (groups * at_once) else divisors(common) or range(groups, lanes + 2 * groups + 1, groups)
    degrees = [] if common % lanes else [d for d in divisors(lanes)[1:] if common % (d * at_once) == 0]
    remedies = {
        "canonical_replicas {}": _nearest(lanes, [n for n in fitting if n % groups == 0]),
        "a global batch of {}": "" if lanes % groups else _nearest(wrong, range(unit, wrong + 2 * unit + 1, unit)),
        "{} data-parallel groups": _nearest(groups, degrees),
    }
    text = ", or ".join(remedy.format(numbers) for remedy, numbers in remedies.items() if numbers)
    both = range(groups * at_once, wrong + 2 * groups * at_once + 1, groups * at_once)
    raise TopologyError(
        f"{problem}. Use {text or f'canonical_replicas {groups} and a global batch of {_nearest(wrong, both)}'}."
    )


def resolve_lanes(canonical_replicas: int | str, *, global_batch: int | None, dp_degree: int) -> int:
    """The number of lanes L of a new run; one that goes on has those of its state.

    "auto" is the global batch where that is at most 256, else its divisor up to 256 that has the most divisors itself,
    so that many numbers of groups can go on with the run. Only where `dp_degree` does not divide it, and the run could
    not start, does it count: then they are the best such divisor that it divides, above 256 the smallest.
    Where "auto" has no global batch to go by, one group gets one lane, and several groups are an error.

    Raises:
        TopologyError: the value is not usable.
    """
    if canonical_replicas != "auto":
        return int(check(Limit, canonical_replicas, "canonical_replicas", TopologyError))
    groups = check(Positive, dp_degree, "dp_degree", TopologyError)
    if global_batch is not None:
        batch = check(Positive, global_batch, "global_batch", TopologyError)
        if batch <= MAX_AUTO_LANES:
            return batch

        def rank(d: int) -> tuple[int, int]:
            return (len(divisors(d)), d) if d <= MAX_AUTO_LANES else (0, -d)

        best = max(divisors(batch), key=rank)
        fitting = [d for d in divisors(batch) if d % groups == 0]
        return best if best in fitting else max(fitting, key=rank, default=best)
    if groups > 1:
        raise TopologyError(
            f"dp_degree is {dp_degree}, and neither canonical_replicas (lanes) nor a global batch is given; set "
            f"canonical_replicas to a number that every dp_degree you may use divides, such as {max(64, dp_degree)}."
        )
    return 1


def resolve_feeds(feeds: int | str, *, lanes: int, nbytes: int | None) -> int:
    """The number of feeds of a run.

    Args:
        feeds: the option; "auto" gives every lane a feed of its own, or, in a run that ends, one for each GiB of data.
        lanes: L.
        nbytes: bytes of the data of a run that ends, else None.

    Raises:
        TopologyError: they do not divide the lanes.
    """
    if feeds == "auto":
        return lanes if nbytes is None else max(d for d in divisors(lanes) if d == 1 or d * FEED_BYTES <= nbytes)
    number = int(check(Limit, feeds, "feeds", TopologyError))
    if lanes % number:
        raise TopologyError(
            f"{lanes} lanes (canonical_replicas) do not divide among {number} feeds. Use feeds "
            f"{_nearest(number, divisors(lanes))}."
        )
    return number


@dataclass(frozen=True, slots=True)
class Topology:
    """Who owns which lanes, and how records are numbered.

    Attributes:
        lanes: L, the number of lanes of the run.
        dp_degree: G, the number of data-parallel groups.
        dp_group_id: this group, 0 to G - 1.
        global_batch: B, records per optimizer step, or None where the caller does not count steps.
        lanes_per_feed: consecutive lanes that share a feed.
    """

    lanes: int = 1
    dp_degree: int = 1
    dp_group_id: int = 0
    global_batch: int | None = None
    lanes_per_feed: int = 1

    def __post_init__(self) -> None:
        check(Limit, self.lanes, "canonical_replicas", TopologyError)
        check(Positive, self.dp_degree, "dp_degree", TopologyError)
        if check(Whole, self.dp_group_id, "dp_group_id", TopologyError) >= self.dp_degree:
            raise TopologyError(
                f"dp_group_id is {self.dp_group_id} with dp_degree {self.dp_degree}; expected an integer from 0 to "
                f"{self.dp_degree - 1}."
            )
        batches = (
            () if self.global_batch is None else (check(Positive, self.global_batch, "global_batch", TopologyError),)
        )
        check_division(self.lanes, self.dp_degree, batches)

    @property
    def width(self) -> int:
        """Lanes owned by each group, which is the number of records a group emits per round."""
        return self.lanes // self.dp_degree

    @property
    def owned(self) -> range:
        """The lanes of this group."""
        return range(self.dp_group_id * self.width, (self.dp_group_id + 1) * self.width)

    @property
    def rounds_per_step(self) -> int | None:
        """B / L, or None where the global batch is unknown."""
        return None if self.global_batch is None else self.global_batch // self.lanes

    @property
    def feeds(self) -> int:
        """Feeds of the run."""
        return self.lanes // self.lanes_per_feed

    @property
    def owned_feeds(self) -> range:
        """The feeds of the lanes of this group."""
        return range(self.owned.start // self.lanes_per_feed, -(-self.owned.stop // self.lanes_per_feed))

    def check_skipped(self, used: int, skipped: Iterable[tuple[int, int]]) -> None:
        """Refuse ranges of rounds to come that a step would straddle, in a run that goes on after `used` local records.

        Steps are `global_batch` records from there on, and are counted from record 0: so both must agree.
        """
        place, batch = used * self.dp_degree, self.global_batch
        ahead = [(first * self.lanes, last * self.lanes) for first, last in skipped if last * self.lanes > place]
        wrong = [each for each in ahead if batch and any(record % batch for record in (place, *each))]
        if wrong:
            first, last = wrong[0]
            raise TopologyError(
                f"global_batch is {batch}; expected a divisor of {place}, the record where the run goes on, and of "
                f"{first} and {last}, between which records are left out (skip): a step would hold records of both "
                f"sides. Keep the global batch until record {last}, and go on from the end of a step."
            )

    def records_of_feed(self, local_records: int, feed: int) -> int:
        """Records that `feed` has given when this group has used `local_records`; of a shared feed in whole rounds."""
        full, part = divmod(local_records, self.width)
        return full * self.lanes_per_feed + (self.lanes_per_feed == 1 and feed - self.owned.start < part)

    def round_at(self, number: int, name: str) -> int:
        """The round whose first record has this sequence number, which messages call `name`."""
        if number % self.lanes:
            raise PipelineError(f"{name} is {number}; expected a multiple of {self.lanes} (lanes).")
        return number // self.lanes

    def sequence_numbers(self, start: int, count: int) -> np.ndarray:
        """Sequence numbers int64[count] of this group's records `start` to `start + count`."""
        local = np.arange(start, start + count, dtype=np.int64)
        rounds, offset = np.divmod(local, self.width)
        return rounds * self.lanes + self.owned.start + offset
