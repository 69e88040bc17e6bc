"""Where another run can take over: in each lane, at the first place after the used records where it can be entered."""

from __future__ import annotations

from collections.abc import Mapping

from zephon.columns.lane_start import LaneStart
from zephon.engine.lane import LaneStream
from zephon.engine.plan import Plan
from zephon.engine.runners import InlineRunner
from zephon.engine.totals import Totals
from zephon.errors import CheckpointError
from zephon.ops.shuffle import Passer


def cuts_of(plan: Plan, starts: Mapping[int, LaneStart], cursor: int) -> dict[int, tuple[int, int]]:
    """By feed: (chunk, rows). Earlier chunks and the first `rows` rows of this one belong to the earlier run.

    Args:
        plan: of the earlier run.
        starts: where the feeds of this group are entered.
        cursor: records of this group that have been used.

    Raises:
        CheckpointError: a lane has read all its data, and what it gives then would be other records in a run that goes
            on, or a round of a shared feed is not used up.
    """
    if plan.topology.lanes_per_feed > 1 and cursor % plan.topology.width:
        raise CheckpointError(
            "the state of the run to take over was taken inside a round; expected one of the end of a step."
        )
    totals = Totals(len(plan.dataset_names))
    runner = InlineRunner()
    cuts, too_late = {}, dict[int, int]()
    for number, start in starts.items():
        lane = LaneStream(plan, number, start, 0, runner, totals, 0)
        used = plan.topology.records_of_feed(cursor, number)
        records = start.records_before
        while lane.starts[-1].records_before < used and not lane.ended:
            lane.advance()
            if lane.ready:  # a run that goes on fills a padded record up
                records += int((lane.take(lane.ready).lengths == plan.pack.record_length).sum())
        entry = next((each for each in lane.starts if each.records_before >= used), None)
        in_order = isinstance(plan.orderer(number, start), Passer) and not plan.pack.has_bins and not plan.mixture
        if entry is None and not (in_order and used <= records):
            too_late[number] = lane.starts[-1].records_before
        elif entry is None:  # the lane ends before it can be entered again
            chunks = plan.curriculum.chunks_of(number)
            assert chunks is not None
            cuts[number] = chunks, 0
        elif plan.mixture:  # the stock holds earlier rows; `token` is the first row not in it
            cuts[number] = entry.token >> 32, entry.token & 0xFFFFFFFF
        elif entry.window and not entry.buffer:
            # A window begins: all earlier rows are packed, except for the tokens carried into it.
            last = plan.window_first(entry.window) - 1
            chunk = plan.curriculum.chunk(number, last)
            assert chunk is not None
            cuts[number] = last, len(chunk)
        else:
            cuts[number] = entry.chunk, entry.position + (entry.token > 0)
    if too_late:
        raise CheckpointError(
            f"lane {min(too_late)} of the earlier run has read all its data, and gives out what it holds (last record, "
            "shuffle buffer, bins, stock) otherwise than a run that goes on. Continue from a state of at most "
            f"{min(too_late.values()) * plan.topology.feeds} records; or begin the new recipe at record 0, without "
            "continue_from."
        )
    return cuts
