"""`zephon_train_valid_test_datasets_provider`: Megatron calls it on every rank to build the loaders."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import mpu
from megatron.training import get_args, get_tokenizer, print_rank_0
from megatron.training.utils import is_first_or_last_pipeline_stage

from megatron_zephon import metrics
from megatron_zephon.batches import BatchForm, packs
from megatron_zephon.checks import (
    check_folders,
    check_options,
    check_special_tokens,
    eval_topology,
    read_recipe,
    remarks,
    tokenizer_path,
    train_topology,
)
from megatron_zephon.loaders import EvalLoader, TrainLoader
from megatron_zephon.options import folders_for
from megatron_zephon.resume import describe, go_to_place, saved_lanes
from megatron_zephon.training import predicts_more
from zephon import DataRecipe, Pipeline, PipelineError
from zephon.loader import (
    Tokenizer,
    Topology,
    any_rank,
    check_ledger,
    check_same_data,
    compact_index,
    evaluation_recipe,
    on_all_ranks,
    on_first_rank,
)


class _Rank(NamedTuple):
    """The role of this process in the job.

    Attributes:
        trains: whether it holds a training loader.
        evaluates: whether it holds loaders for validation and test.
        saves: whether it is the one of its peers that saves their lanes.
    """

    dp_size: int
    dp_rank: int
    trains: bool
    evaluates: bool
    saves: bool


def zephon_train_valid_test_datasets_provider(
    train_valid_test_num_samples: Any, vp_stage: int | None = None
) -> tuple[Any, Any, Any]:
    """The training, validation and test loaders of this rank, in place of Megatron's dataset provider.

    Ranks that take no batches get None. The model is loaded already, and the loaders are positioned to match it.

    Args:
        train_valid_test_num_samples: how many samples Megatron will ask for; not needed.
        vp_stage: the virtual pipeline stage that the loaders are for.

    Raises:
        ZephonError: the run is misconfigured, or its state does not match; the same on every rank.
    """
    args = get_args()
    if not hasattr(args, "zephon_data_config"):
        raise PipelineError(
            "Megatron's arguments have no Zephon options; parse them with "
            "megatron_zephon.pretrain_gpt_zephon.parse(extra_args_provider)."
        )
    rank = _this_rank(args, vp_stage)
    if not hasattr(args, "zephon_data_folder"):
        for name, value in folders_for(args).items():  # set already by `parse`, if the program uses it
            if not getattr(args, name):
                setattr(args, name, value)
        args.zephon_data_folder = args.dataloader_save
    saved = on_first_rank(lambda: saved_lanes(args))
    recipe, topology, tokenizer = on_all_ranks(lambda: _checked(args, rank, saved))
    form = BatchForm.of(args, tokenizer.eos_id)
    train = on_all_ranks(lambda: _train_pipeline(args, recipe, topology) if rank.trains else None)
    check_same_data([] if train is None else [train.fingerprint()])
    for remark in remarks(args, recipe, train.fingerprint()) if train is not None and not vp_stage else ():
        print_rank_0(f"zephon: {remark}")
    if not args.skip_train:
        on_first_rank(lambda: None if train is None else compact_index(args.zephon_flush_index, train.compiled))
        place, after = go_to_place(args, train)
        if args.zephon_ledger:
            on_all_ranks(
                lambda: (
                    None
                    if train is None
                    else check_ledger("--zephon-ledger", args.zephon_ledger, train.compiled, after)
                )
            )
        if place and not vp_stage:
            print_rank_0(f"zephon: {place}")
    loader = None
    if train is not None:
        loader = TrainLoader(train, form, partial(describe, args, rank.dp_size, rank.dp_rank) if rank.saves else None)
        if rank.saves and rank.dp_rank == 0:  # metrics sum over ranks
            loader.count_from(getattr(args, "zephon_tokens", {}))
    metrics.watch(loader, [source.name for source in recipe.sources])
    valid, test = on_all_ranks(lambda: _eval_loaders(args, rank, form))
    check_same_data([each.pipeline.fingerprint() for each in (*valid, test) if each is not None])
    return loader, valid if args.multiple_validation_sets else next(iter(valid), None), test


zephon_train_valid_test_datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def stage_takes_batches(args: Namespace, vp_stage: int | None) -> bool:
    """Whether a pipeline stage takes batches: the first and the last, those with layers for multi-token prediction, and
    all of them with packed sequences."""
    return bool(packs(args) or is_first_or_last_pipeline_stage(vp_stage) or predicts_more(vp_stage))


def _this_rank(args: Namespace, vp_stage: int | None) -> _Rank:
    first_of_tensor, takes = mpu.get_tensor_model_parallel_rank() == 0, stage_takes_batches(args, vp_stage)
    # To skip an iteration, Megatron draws its batches on every pipeline stage; for a full validation, it asks every
    # pipeline stage for the length of its loaders.
    trains = first_of_tensor and not args.skip_train and (takes or bool(args.iterations_to_skip))
    evaluates = bool(first_of_tensor and (args.full_validation or (takes and args.eval_iters)))
    saves = mpu.is_pipeline_first_stage(ignore_virtual=True) and mpu.get_context_parallel_rank() == 0
    return _Rank(mpu.get_data_parallel_world_size(), mpu.get_data_parallel_rank(), trains, evaluates, trains and saves)


def _checked(args: Namespace, rank: _Rank, saved: int | None) -> tuple[DataRecipe, Topology, Tokenizer]:
    """Every check that does not open the data."""
    check_options(args)
    recipe = read_recipe(args.zephon_data_config, args)
    topology = train_topology(recipe, args, dp_size=rank.dp_size, dp_rank=rank.dp_rank, saved=saved)
    for path in (*(args.zephon_valid_data_config or ()), args.zephon_test_data_config):
        if path:
            _eval_recipe(path, args)
            eval_topology(args, dp_size=rank.dp_size, dp_rank=rank.dp_rank)
    tokenizer = check_special_tokens(args, get_tokenizer())
    check_folders(args)
    if args.virtual_pipeline_model_parallel_size is not None and args.dataloader_save:
        # Megatron's save_checkpoint takes one loader, not a list.
        print_rank_0(
            "zephon: with virtual pipeline stages this version of Megatron cannot save the state of a data loader; a "
            "resumed run continues by the number of consumed samples."
        )
        args.dataloader_save = None
    return recipe, topology, tokenizer


def _pipeline(args: Namespace, recipe: DataRecipe, topology: Topology, microbatch: int, **options: Any) -> Pipeline:
    pipeline = Pipeline.from_recipe(
        recipe,
        tokenizer=tokenizer_path(args),
        seq_len=args.seq_length,
        microbatch_size=microbatch,
        dp_degree=topology.dp_degree,
        dp_group_id=topology.dp_group_id,
        global_batch=topology.global_batch,
        canonical_replicas=topology.lanes,
        **options,
    )
    pipeline.fingerprint()  # opens the data, so that errors show now
    return pipeline


def _train_pipeline(args: Namespace, recipe: DataRecipe, topology: Topology) -> Pipeline:
    folders = {"ledger": args.zephon_ledger, "flush_index": args.zephon_flush_index}
    agreed = _any_data_parallel_rank(args)
    return _pipeline(args, recipe, topology, args.micro_batch_size, combine_flag=agreed, **folders)


def _any_data_parallel_rank(args: Namespace) -> Callable[[bool], bool]:
    """A function that returns whether any data-parallel rank calls it with True."""
    if mpu.get_data_parallel_world_size() == 1:
        return bool
    # On CPUs if they have a process group, so that it does not wait for the GPUs.
    if args.use_gloo_process_groups:
        return partial(any_rank, group=mpu.get_data_parallel_group_gloo())
    return partial(any_rank, device=torch.cuda.current_device(), group=mpu.get_data_parallel_group())


def _eval_recipe(path: str, args: Namespace) -> DataRecipe:
    recipe = read_recipe(path, args, option="--zephon-valid-data-config or --zephon-test-data-config")
    return evaluation_recipe(recipe, repeat=not args.full_validation)


def _eval_loaders(args: Namespace, rank: _Rank, form: BatchForm) -> tuple[list[EvalLoader | None], EvalLoader | None]:
    """The loaders of the validation sets, and that of the test set."""

    def loader(path: str) -> EvalLoader | None:
        if not rank.evaluates:
            return None
        recipe = _eval_recipe(path, args)
        topology = eval_topology(args, dp_size=rank.dp_size, dp_rank=rank.dp_rank)
        return EvalLoader(
            _pipeline(args, recipe, topology, args.eval_micro_batch_size, drop_last=False),
            form,
            calls_per_step=args.eval_global_batch_size // (args.eval_micro_batch_size * rank.dp_size),
            steps=None if args.full_validation else args.eval_iters,
        )

    valid = [loader(path) for path in args.zephon_valid_data_config or []]
    return valid, loader(args.zephon_test_data_config) if args.zephon_test_data_config else None
