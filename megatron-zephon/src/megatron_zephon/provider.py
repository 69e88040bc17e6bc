"""`zephon_train_valid_test_datasets_provider`: what Megatron calls, on every rank, to have its loaders built."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from megatron.core import mpu
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.training import get_args, get_tokenizer, print_rank_0
from megatron.training.checkpointing import get_loaded_iteration
from megatron.training.utils import is_first_or_last_pipeline_stage

from zephon import DataRecipe, Pipeline, PipelineError, ZephonError
from zephon.loader import FINGERPRINT_NAMES, Tokenizer, Topology, check_allowed, check_ranks_agree

from . import metrics
from .batches import BatchForm
from .checks import (
    allowed_changes,
    check_options,
    check_tokenizer,
    eval_topology,
    read_recipe,
    tokenizer_path,
    train_topology,
)
from .history import Entry, check_count, read_history, with_entry, write_history
from .loaders import EvalLoader, TrainLoader
from .options import STATE_FOLDER
from .states import FORMAT, find_state, prune_states
from .training import predicts_more

__all__ = ["stage_takes_batches", "zephon_train_valid_test_datasets_provider"]

_T = TypeVar("_T")
_log = logging.getLogger("zephon")


class _Rank(NamedTuple):
    """This process among the ranks, as far as data are concerned."""

    dp_size: int
    dp_rank: int
    takes: bool
    """Whether it holds a training loader."""
    saves: bool
    """Whether it speaks for its lanes: its peers have the same."""


def zephon_train_valid_test_datasets_provider(
    train_valid_test_num_samples: Any, vp_stage: int | None = None
) -> tuple[Any, Any, Any]:
    """The training, validation and test loaders of this rank, in place of Megatron's dataset provider.

    Ranks that take no batches get None. The loaders stand where the run stands: the model has been loaded before.

    Args:
        train_valid_test_num_samples: how many samples Megatron will ask for; not needed.
        vp_stage: the virtual pipeline stage that the loaders are for.

    Raises:
        ZephonError: the run is misconfigured, or its state does not fit; one sentence says how, on every rank.
    """
    args = get_args()
    if not hasattr(args, "zephon_data_config"):
        raise PipelineError(
            "Megatron's arguments lack those of Zephon; have them parsed by "
            "megatron_zephon.pretrain_gpt_zephon.parse(), or as it does."
        )
    rank = _this_rank(args, vp_stage)
    recipe, topology, tokenizer = _together(lambda: _checked(args, rank))
    train = _together(lambda: _train_pipeline(args, rank, recipe, topology) if _trains(args, rank) else None)
    _check_same_data([] if train is None else [train])
    if not args.skip_train:
        said = _go_to_place(args, train)
        if said and not vp_stage:
            print_rank_0(f"zephon: {said}")
    form = BatchForm.of(args, tokenizer.eos_id)
    loader = None
    if train is not None:
        loader = TrainLoader(train, form, (lambda: _describe(args, rank)) if rank.saves else None)
    metrics.watch(loader, [source.name for source in recipe.sources])
    valid, test = _together(lambda: _eval_loaders(args, rank, form, vp_stage))
    evaluates = [*(valid if isinstance(valid, list) else [valid]), test]
    _check_same_data([loader.pipeline for loader in evaluates if loader is not None])
    return loader, valid, test


zephon_train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def stage_takes_batches(args: Namespace, vp_stage: int | None) -> bool:
    """Whether a pipeline stage asks for batches: the first and the last, those with layers for multi-token prediction,
    and all of them where documents are kept apart as packed sequences."""
    packed = args.sft or args.dataloader_inter_document_masking
    return bool(packed or is_first_or_last_pipeline_stage(vp_stage) or predicts_more(vp_stage))


def _this_rank(args: Namespace, vp_stage: int | None) -> _Rank:
    first_of_tensor = mpu.get_tensor_model_parallel_rank() == 0
    # To skip an iteration, Megatron draws its batches on every pipeline stage.
    takes = first_of_tensor and (stage_takes_batches(args, vp_stage) or bool(args.iterations_to_skip))
    saves = mpu.is_pipeline_first_stage(ignore_virtual=True) and mpu.get_context_parallel_rank() == 0
    return _Rank(mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank(), takes, takes and saves)


def _trains(args: Namespace, rank: _Rank) -> bool:
    return rank.takes and not args.skip_train


def _checked(args: Namespace, rank: _Rank) -> tuple[DataRecipe, Topology, Tokenizer]:
    """Everything that can be seen to be wrong without opening the data."""
    check_options(args)
    recipe = read_recipe(args.zephon_data_config, args)
    topology = train_topology(recipe, args, dp_size=rank.dp_size, dp_rank=rank.dp_rank)
    for path in _eval_recipes(args):
        eval_topology(_eval_recipe(path, args), args, dp_size=rank.dp_size, dp_rank=rank.dp_rank)
    tokenizer = check_tokenizer(args, get_tokenizer())
    if args.eod_mask_loss and tokenizer.eos_id is None:
        raise PipelineError(
            f"--eod-mask-loss needs a token that ends documents, and the tokenizer in {tokenizer_path(args)!r} has "
            "none; leave the option out."
        )
    args.zephon_data_folder = args.dataloader_save
    for option, folder in (
        ("--dataloader-save", args.dataloader_save),
        ("--zephon-ledger", args.zephon_ledger),
        ("--zephon-flush-index", args.zephon_flush_index),
    ):
        if folder:
            _check_writable(option, folder)
    if args.virtual_pipeline_model_parallel_size is not None and args.dataloader_save:
        # Its save_checkpoint takes one loader, not a list.
        print_rank_0(
            "zephon: with virtual pipeline stages this version of Megatron cannot save the state of a data loader; a "
            "resumed run finds its place by the number of consumed samples."
        )
        args.dataloader_save = None
    return recipe, topology, tokenizer


def _check_writable(option: str, folder: str) -> None:
    """Refuse a folder that cannot be written to, which would come to light after hours."""
    try:
        os.makedirs(folder, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise PipelineError(
            f"{option} {folder!r} cannot be written to: {error.strerror or error}; name another folder, or make room."
        ) from None


def _train_pipeline(args: Namespace, rank: _Rank, recipe: DataRecipe, topology: Topology) -> Pipeline:
    pipeline = Pipeline.from_recipe(
        recipe,
        tokenizer=tokenizer_path(args),
        seq_len=args.seq_length,
        microbatch_size=args.micro_batch_size,
        dp_degree=rank.dp_size,
        dp_group_id=rank.dp_rank,
        global_batch=topology.global_batch,
        canonical_replicas=topology.lanes,
        combine_flag=_any_rank(args),
        ledger=args.zephon_ledger,
        flush_index=args.zephon_flush_index,
    )
    pipeline.explain()  # opens the data, so that what is wrong with it shows now
    return pipeline


# The place to go on from


def _go_to_place(args: Namespace, pipeline: Pipeline | None) -> str:
    """Put the stream where the model stands, and say how; "" for a new run: nothing loaded, a model of iteration 0, or
    --finetune. Every rank takes part; `pipeline` is None where there is none."""
    consumed = args.consumed_train_samples
    if not consumed:
        _keep_account(args, pipeline, [], by_state=False)
        return ""
    by_state = args.virtual_pipeline_model_parallel_size is None and not args.zephon_seek
    states = _on_first_rank(lambda: _find(args, pipeline)) if by_state else None
    history = _on_first_rank(lambda: read_history(_state_folders(args)))
    history = [entry for entry in history if entry.consumed <= consumed]
    first = states[0] if states else None
    saved = first and first["rounds"] * first["lanes_total"]
    here = first is not None and saved == consumed and not first["extra"]

    def go() -> None:
        if pipeline is None:
            return
        told = [pipeline.fingerprint(), *(state["fingerprint"] for state in states or ())]
        known = [*told, *(entry.fingerprint for entry in history)]
        check_allowed(allowed_changes(args), known, "--zephon-allow-changes")
        if states:
            _restore(args, pipeline, states)
        if not here:
            for difference in check_count(history, pipeline.fingerprint(), allowed_changes(args)):
                _log.warning("the data differ from those read so far, as --zephon-allow-changes says: %s", difference)
            pipeline.seek(sequence_number=consumed)

    _together(go)
    _keep_account(args, pipeline, history, by_state=here)
    if here:
        return f"the data go on from their saved state, at record {consumed}."
    why = (
        "virtual pipeline stages save no state of the data"
        if args.virtual_pipeline_model_parallel_size is not None
        else "--zephon-seek is given"
        if first is None
        else f"the saved state is at record {saved}, which is not where the model stands (as with a checkpoint made to "
        "rerun an iteration)"
    )
    return f"{why}; the data go on by the number of consumed samples, {consumed}."


def _keep_account(args: Namespace, pipeline: Pipeline | None, history: list[Entry], *, by_state: bool) -> None:
    """Have rank 0 write which data the run reads from here on."""

    def write() -> None:
        if args.zephon_data_folder and pipeline is not None:
            now = Entry(args.consumed_train_samples, pipeline.fingerprint(), by_state)
            write_history(args.zephon_data_folder, with_entry(history, now))

    _on_first_rank(write)


def _state_folders(args: Namespace) -> list[Path]:
    """Where the states of the run that goes on may lie."""
    folders = [args.dataloader_load]
    if not args.dataloader_load:
        folders = [args.load and str(Path(args.load) / STATE_FOLDER), args.load, args.zephon_data_folder]
    return [Path(folder) for folder in dict.fromkeys(folders) if folder]


def _restore(args: Namespace, pipeline: Pipeline, states: list[Mapping[str, Any]]) -> None:
    # A dataset that only the account of the run knows is none that these states could differ in.
    here = {
        *FINGERPRINT_NAMES,
        *pipeline.fingerprint(),
        *(name for state in states for name in state["fingerprint"]),
    }
    pipeline.restore(states, allow_changes=here.intersection(allowed_changes(args)), remedy="--zephon-allow-changes")


def _find(args: Namespace, pipeline: Pipeline | None) -> list[Mapping[str, Any]]:
    assert pipeline is not None  # global rank 0 trains
    # --override-ckpt-iteration gives a model another number than that of the iteration it was saved at.
    loaded = get_loaded_iteration() if getattr(args, "override_ckpt_iteration", None) is not None else None
    return find_state(
        _state_folders(args),
        iteration=args.iteration if loaded is None else loaded,
        consumed=args.consumed_train_samples,
        fingerprint={name: value for name, value in pipeline.fingerprint().items() if name != "tokens_per_row"},
    )


def _describe(args: Namespace, rank: _Rank) -> dict[str, Any]:
    """What a saved state says besides the lanes."""
    if rank.dp_rank == 0 and (args.zephon_prune_state or args.save_retain_interval is not None):
        try:
            prune_states(args.dataloader_save, args.save)
        except OSError as error:  # nothing that other ranks should be left waiting for
            _log.warning("old states of the data in %s cannot be deleted: %s", args.dataloader_save, error)
    machine = get_rerun_state_machine()
    # Told to rerun an iteration elsewhere, Megatron saves the state of before it after its batches have been used.
    again = machine.state == RerunState.WILL_RERUN_FROM_CHECKPOINT
    return {
        "megatron_zephon": FORMAT,
        "iteration": int(machine.current_iteration) - again,
        "consumed_train_samples": int(args.consumed_train_samples),
        "dp_size": rank.dp_size,
        "dp_rank": rank.dp_rank,
        "time": time.time_ns(),
    }


# Validation and test


def _eval_recipes(args: Namespace) -> list[str]:
    test = [args.zephon_test_data_config] if args.zephon_test_data_config else []
    return [*(args.zephon_valid_data_config or []), *test]


def _eval_recipe(path: str, args: Namespace) -> DataRecipe:
    """A recipe whose documents come once per pass, as they stand."""
    return read_recipe(path, args, option="--zephon-valid-data-config or --zephon-test-data-config").replace(
        repeat=False, shuffle_shards=False, shuffle_within_shard=False, shuffle_after_pack=False
    )


def _eval_loaders(args: Namespace, rank: _Rank, form: BatchForm, vp_stage: int | None) -> tuple[Any, EvalLoader | None]:
    # For a full validation Megatron asks every pipeline stage how long its loaders are.
    first_of_tensor = mpu.get_tensor_model_parallel_rank() == 0
    takes = first_of_tensor and (stage_takes_batches(args, vp_stage) or args.full_validation)
    calls = args.eval_global_batch_size // (args.eval_micro_batch_size * rank.dp_size)

    def loader(path: str, consumed: int) -> EvalLoader | None:
        if not takes or not (args.eval_iters or args.full_validation):
            return None
        recipe = _eval_recipe(path, args)
        topology = eval_topology(recipe, args, dp_size=rank.dp_size, dp_rank=rank.dp_rank)
        pipeline = Pipeline.from_recipe(
            recipe,
            tokenizer=tokenizer_path(args),
            seq_len=args.seq_length,
            microbatch_size=args.eval_micro_batch_size,
            dp_degree=rank.dp_size,
            dp_group_id=rank.dp_rank,
            global_batch=topology.global_batch,
            canonical_replicas=topology.lanes,
            drop_last=False,
            combine_flag=_any_rank(args),
        )
        pipeline.explain()
        steps = consumed // args.eval_global_batch_size
        return EvalLoader(pipeline, form, calls_per_step=calls, steps_before=steps)

    consumed = 0 if args.skip_train or args.full_validation else args.consumed_valid_samples
    valid: Any = [loader(path, consumed) for path in args.zephon_valid_data_config or []]
    if not args.multiple_validation_sets:
        valid = valid[0] if valid else None
    test = loader(args.zephon_test_data_config, 0) if args.zephon_test_data_config else None
    return valid, test


# Ranks among each other


def _any_rank(args: Namespace) -> Callable[[bool], bool]:
    """A function that says whether any data-parallel rank calls it with True."""
    if mpu.get_data_parallel_world_size() == 1:
        return bool
    # Of the CPUs if there is a group of them, since it is asked in the midst of what the GPUs do.
    gloo = args.use_gloo_process_groups
    group = mpu.get_data_parallel_group_gloo() if gloo else mpu.get_data_parallel_group()
    device = torch.device("cpu") if gloo else torch.cuda.current_device()

    def combine(flag: bool) -> bool:
        value = torch.tensor(int(flag), device=device)
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
        return bool(value.item())

    return combine


def _together(make: Callable[[], _T]) -> _T:
    """What `make` gives on this rank; where it fails on any, the error of the first such rank is raised on all.

    A rank that failed alone would leave the others waiting for it.
    """
    made: Any = None
    error: Exception | None = None
    try:
        made = make()
    except Exception as caught:
        error = caught
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, _told(error))
    if error is not None:
        raise error
    for other in told:
        if other is not None:
            raise other[0](other[1])
    return made


def _check_same_data(pipelines: list[Pipeline]) -> None:
    """Refuse to go on where ranks would read different data. Ranks without data call it with nothing."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, [pipeline.fingerprint() for pipeline in pipelines])
    known = {rank: fingerprints for rank, fingerprints in enumerate(told) if fingerprints}
    for nth in range(max(map(len, known.values()), default=0)):
        check_ranks_agree({rank: fingerprints[nth] for rank, fingerprints in known.items()})


def _told(error: Exception | None) -> tuple[type[ZephonError], str] | None:
    """An error as other ranks are told of it."""
    if error is None:
        return None
    if isinstance(error, ZephonError):
        return type(error), str(error)
    return ZephonError, f"another rank failed: {type(error).__name__}: {error}"


def _on_first_rank(make: Callable[[], _T]) -> _T:
    """What `make` gives on global rank 0, on every rank; its error likewise."""
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            told = [(make(), None)]
        except Exception as error:
            told = [(None, _told(error))]
    dist.broadcast_object_list(told, src=0)
    made, failed = told[0]
    if failed is not None:
        raise failed[0](failed[1])
    return made
