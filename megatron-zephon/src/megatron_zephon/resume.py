"""The place where a run continues: from its saved state, or by the number of consumed samples."""

from __future__ import annotations

import logging
import time
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.training.checkpointing import get_loaded_iteration

from megatron_zephon.checks import allowed_changes
from megatron_zephon.history import Entry, check_count, read_history, with_entry, write_history
from megatron_zephon.options import STATE_FOLDER
from megatron_zephon.states import FORMAT, find_state, first_state, prune_states
from zephon import CheckpointError, Pipeline
from zephon.loader import FINGERPRINT_NAMES, RunState, check_allowed, gather, on_all_ranks, on_first_rank

_log = logging.getLogger("zephon")


def go_to_place(args: Namespace, pipeline: Pipeline | None) -> tuple[str, str]:
    """Move the stream to the place of the model. Collective; `pipeline` is None on a rank without one.

    Returns:
        A description of the resume, "" for a new run (nothing loaded, a model of iteration 0, or --finetune); the
        digest of the data of the state that the run goes on from, "" without one.
    """
    consumed = args.consumed_train_samples
    args.zephon_data_start, args.zephon_tokens = 0, {}
    if not consumed:
        _record(args, pipeline, [], by_state=False)
        return "", ""
    history = on_first_rank(lambda: read_history(_folders(args)))
    history = [entry for entry in history if entry.consumed <= consumed]
    if args.zephon_start_afresh and on_first_rank(lambda: _is_without_data(args, history)):
        args.zephon_data_start = consumed
        _record(args, pipeline, [], by_state=False)
        start = f"the data begin at record 0, as --zephon-start-afresh says; the model has consumed {consumed} samples."
        return start, ""
    virtual = args.virtual_pipeline_model_parallel_size is not None
    # Not every rank has a pipeline on every virtual stage.
    now = next(filter(None, gather(None if pipeline is None else pipeline.fingerprint())), {})
    found = None if args.zephon_seek else on_first_rank(lambda: _find(args, now))
    unknown: tuple[list[RunState], int, dict[str, int]] = [], history[-1].start if history else 0, {}
    states, args.zephon_data_start, args.zephon_tokens = found or unknown
    history = [entry for entry in history if entry.start == args.zephon_data_start]
    place = consumed - args.zephon_data_start
    saved = states[0].rounds * states[0].lanes_total if states else None
    by_state = bool(states) and saved == place and not states[0].extra
    if pipeline is None:
        on_all_ranks(lambda: None)
    else:
        on_all_ranks(lambda: _move(args, pipeline, states, history, by_state=by_state))
    _record(args, pipeline, history, by_state=by_state)
    after = states[0].data if states else ""
    if by_state:
        return f"the data go on from their saved state, at record {place}.", after
    why = (
        "virtual pipeline stages save no state of the data"
        if virtual
        else "--zephon-seek is set"
        if saved is None
        else f"the saved state is at record {saved}, the model is not (as with a checkpoint to rerun an iteration)"
    )
    return f"{why}; the data go on by the number of consumed samples, {place}.", after


def _is_without_data(args: Namespace, history: list[Entry]) -> bool:
    """Whether no data of Zephon belong to the model that was loaded: no state, and no record used since they began."""
    if first_state(_folders(args), iteration=_iteration(args)) is not None:
        return False
    return not history or history[-1].start == args.consumed_train_samples


def saved_lanes(args: Namespace) -> int | None:
    """Lanes of the run that is resumed, as its states or its history say; None if unknown."""
    folders = _folders(args) if args.consumed_train_samples else []
    run = first_state(folders, iteration=_iteration(args))
    if run is not None:
        return run.lanes_total
    history = [entry for entry in read_history(folders) if entry.consumed <= args.consumed_train_samples]
    return history[-1].fingerprint.get("canonical_replicas") if history else None


def _iteration(args: Namespace) -> int:
    # --override-ckpt-iteration gives a model another number than that of the iteration it was saved at.
    loaded = get_loaded_iteration() if getattr(args, "override_ckpt_iteration", None) is not None else None
    return int(args.iteration if loaded is None else loaded)


def _find(args: Namespace, fingerprint: Mapping[str, Any]) -> tuple[list[RunState], int, dict[str, int]] | None:
    folders, iteration = _folders(args), _iteration(args)
    virtual = args.virtual_pipeline_model_parallel_size is not None
    if virtual and first_state(folders, iteration=iteration) is None:
        return None  # only a run without virtual stages has saved one
    return find_state(
        folders,
        iteration=iteration,
        consumed=args.consumed_train_samples,
        fingerprint={name: value for name, value in fingerprint.items() if name != "tokens_per_row"},
    )


def _folders(args: Namespace) -> list[Path]:
    """The folders to search for states of the run."""
    folders = [args.dataloader_load]
    if not args.dataloader_load:
        folders = [args.load and str(Path(args.load) / STATE_FOLDER), args.load, args.zephon_data_folder]
    return [Path(folder) for folder in dict.fromkeys(folders) if folder]


def _move(args: Namespace, pipeline: Pipeline, states: list[RunState], history: list[Entry], *, by_state: bool) -> None:
    allowed, now = allowed_changes(args), pipeline.fingerprint()
    known = [now, *(state.fingerprint for state in states)]
    check_allowed(allowed, [*known, *(entry.fingerprint for entry in history)], "--zephon-allow-changes")
    if states:
        # Names of datasets that are only in the history do not apply to these states.
        names = {*FINGERPRINT_NAMES, *(name for fingerprint in known for name in fingerprint)}
        pipeline.restore(states, allow_changes=names.intersection(allowed), remedy="--zephon-allow-changes")
        then, virtual = states[0].fingerprint, args.virtual_pipeline_model_parallel_size is not None
        if virtual and any(pipeline.fingerprint().get(name) != value for name, value in then.items()):
            raise CheckpointError(
                "--zephon-allow-changes accepts changes for a run with virtual pipeline stages, which this version of "
                "Megatron saves no state of the data for, so that its next resume could not count the records. Leave "
                "out --num-layers-per-virtual-pipeline-stage (or --num-virtual-stages-per-pipeline-rank), or the "
                "changes."
            )
    if not by_state:
        for change in check_count(history, now, allowed):
            _log.warning("the data differ from those read so far, accepted by --zephon-allow-changes: %s", change)
        pipeline.seek(sequence_number=args.consumed_train_samples - args.zephon_data_start)


def _record(args: Namespace, pipeline: Pipeline | None, history: list[Entry], *, by_state: bool) -> None:
    """Record the data that the run reads from here on; rank 0 writes."""

    def write() -> None:
        if args.zephon_data_folder and pipeline is not None:
            entry = Entry(args.consumed_train_samples, pipeline.fingerprint(), by_state, args.zephon_data_start)
            write_history(args.zephon_data_folder, with_entry(history, entry))

    on_first_rank(write)


def describe(args: Namespace, dp_size: int, dp_rank: int) -> dict[str, Any]:
    """The content of a saved state besides the lanes."""
    if dp_rank == 0 and (args.zephon_prune_state or args.save_retain_interval is not None):
        try:
            prune_states(args.dataloader_save, args.save)
        except OSError as error:  # no reason to fail while other ranks wait
            _log.warning("old states of the data in %s cannot be deleted: %s", args.dataloader_save, error)
    machine = get_rerun_state_machine()
    # To rerun an iteration elsewhere, Megatron saves the model before it, but after its batches have been used.
    again = machine.state == RerunState.WILL_RERUN_FROM_CHECKPOINT
    return {
        "megatron_zephon": FORMAT,
        "iteration": int(machine.current_iteration) - again,
        "consumed_train_samples": int(args.consumed_train_samples),
        "data_start": int(args.zephon_data_start),
        "dp_size": dp_size,
        "dp_rank": dp_rank,
        "time": time.time_ns(),
    }
