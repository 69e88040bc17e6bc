"""Start-up checks: what Megatron's arguments mean for the data. A misconfigured run fails here, with one sentence."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

from zephon import DataRecipe, PipelineError, RecipeError, TokenizerError, TopologyError
from zephon.loader import Tokenizer, Topology, check_allowed, load_tokenizer, resolve_lanes

__all__ = ["check_options", "check_tokenizer", "eval_topology", "read_recipe", "tokenizer_path", "train_topology"]


def allowed_changes(args: Namespace) -> list[str]:
    """Names of differences between data that are to be accepted."""
    return [name.strip() for name in args.zephon_allow_changes.split(",") if name.strip()]


def check_options(args: Namespace) -> None:
    """Refuse options that contradict each other, or that an external loader or Megatron 0.19 cannot honour.

    Raises:
        PipelineError: there are such.
        CheckpointError: --zephon-allow-changes names what is no difference.
    """
    check_allowed(allowed_changes(args), None, "--zephon-allow-changes")
    vpp = args.virtual_pipeline_model_parallel_size is not None
    packed = "--sft" if args.sft else "--dataloader-inter-document-masking" if _packs(args) else None
    makes_mask = args.create_attention_mask_in_dataloader
    evaluates = bool(args.full_validation or args.eval_iters)
    valid = args.zephon_valid_data_config or []
    paths = ("data_path", "train_data_path", "valid_data_path", "test_data_path", "data_args_path")
    other_data = next((name for name in (*paths, "per_split_data_args_path") if getattr(args, name)), None)
    for wrong, text in (
        (not args.zephon_data_config, "--zephon-data-config is missing; name the data recipe to train on."),
        (
            args.dataloader_type != "external",
            f"--dataloader-type is {args.dataloader_type}, but Zephon is an external loader; leave the option out.",
        ),
        (
            other_data,
            f"--{(other_data or '').replace('_', '-')} and --zephon-data-config both name the data; leave out one.",
        ),
        (args.mock_data, "--mock-data and --zephon-data-config both name the data; leave out one."),
        (
            getattr(args, "rampup_batch_size", None) is not None,
            "--rampup-batch-size is ignored by this version of Megatron, so the batches would not be what it says; use "
            '--step-batch-size-schedule, for example "0:64 1M:128".',
        ),
        (
            getattr(args, "fim_data", False),
            "--fim-data changes samples in Megatron's own dataset, which is not used here; leave it out.",
        ),
        (
            getattr(args, "hybrid_context_parallel", False),
            "--hybrid-context-parallel works with Megatron's own loader only; leave it out.",
        ),
        (
            args.decoder_seq_length is not None and args.decoder_seq_length != args.seq_length,
            f"--decoder-seq-length is {args.decoder_seq_length} and --seq-length {args.seq_length}; records have one "
            "length, so make them equal.",
        ),
        (
            makes_mask and packed,
            f"{packed} keeps documents apart by their bounds (cu_seqlens), and an attention mask would say it again; "
            "leave out --create-attention-mask-in-dataloader.",
        ),
        (
            args.reset_attention_mask and not makes_mask,
            "--reset-attention-mask needs an attention mask, but "
            + (
                f"{packed} makes none (it keeps documents apart by cu_seqlens); leave out --reset-attention-mask."
                if packed
                else "--no-create-attention-mask-in-dataloader is given; leave out one of them."
            ),
        ),
        (
            args.sft and args.context_parallel_size > 1,
            "with --sft, context parallelism cuts every document into 2 x context-parallel-size parts of equal length, "
            "which packed records do not come in; use --dataloader-inter-document-masking, which cuts records, or "
            "--context-parallel-size 1.",
        ),
        (
            args.iterations_to_skip and vpp,
            "--iterations-to-skip does not work with virtual pipeline stages in Megatron 0.19; leave out one.",
        ),
        (
            args.iterations_to_skip and packed and args.context_parallel_size > 1,
            f"--iterations-to-skip cuts the batches it skips at documents, which packed records ({packed}) with "
            "--context-parallel-size do not allow in Megatron 0.19; leave one out.",
        ),
        (
            args.full_validation and not args.multiple_validation_sets,
            "--full-validation of one set does not work in this version of Megatron; add --multiple-validation-sets, "
            "which takes one recipe as well.",
        ),
        (
            args.full_validation and args.zephon_test_data_config,
            "--full-validation does not work together with test data in this version of Megatron; leave out "
            "--zephon-test-data-config.",
        ),
        (
            packed and getattr(args, "overlap_moe_expert_parallel_comm", False),
            f"--overlap-moe-expert-parallel-comm would let tokens see other documents with {packed}; leave out one.",
        ),
        (
            args.multiple_validation_sets and not args.full_validation,
            "--multiple-validation-sets works with --full-validation only in this version of Megatron; add it.",
        ),
        (
            args.multiple_validation_sets and vpp,
            "--multiple-validation-sets does not work with virtual pipeline stages in this version of Megatron.",
        ),
        (
            len(valid) > 1 and not args.multiple_validation_sets,
            f"--zephon-valid-data-config names {len(valid)} recipes; name one, or add --multiple-validation-sets and "
            "--full-validation.",
        ),
        (
            evaluates and not valid,
            f"evaluation is asked for (--eval-iters {args.eval_iters}"
            f"{', as --zephon-test-data-config is given' if args.zephon_test_data_config else ''}), which Megatron "
            "does during training too, but --zephon-valid-data-config is missing; name a recipe, or set --eval-iters "
            "0.",
        ),
        (
            args.dataloader_save and not args.save,
            "--dataloader-save is given without --save, so nothing would ever be saved; add --save.",
        ),
        (
            args.zephon_prune_state and not args.save,
            "--zephon-prune-state is given without --save, which tells the states to keep; add --save.",
        ),
    ):
        if wrong:
            raise PipelineError(text)


def _packs(args: Namespace) -> bool:
    return bool(args.sft or args.dataloader_inter_document_masking)


def read_recipe(path: str, args: Namespace, *, option: str = "--zephon-data-config") -> DataRecipe:
    """The recipe, with the seed that the run asks for.

    Raises:
        RecipeError: it cannot be used.
    """
    try:
        recipe = DataRecipe.from_toml(path)
    except RecipeError as error:
        raise RecipeError(f"{option}: {error}") from None
    seed = str(args.zephon_seed)
    if seed == "recipe":
        return recipe
    if seed == "megatron":
        return recipe.replace(seed=int(args.seed))
    if not seed.isdecimal():
        raise RecipeError(f'--zephon-seed is {seed!r}; "recipe", "megatron" or a whole number is needed.')
    return recipe.replace(seed=int(seed))


def train_topology(recipe: DataRecipe, args: Namespace, *, dp_size: int, dp_rank: int) -> Topology:
    """Lanes of the training data and who owns which. `global_batch` is None where batches change in size.

    Lanes are the same on any number of ranks, or an error: where they are to follow from the batch, it is the batch
    that the command line fixes.

    Raises:
        TopologyError: lanes, ranks and a global batch of the run do not divide as they must.
    """
    wanted = recipe.canonical_replicas if args.zephon_canonical_replicas is None else args.zephon_canonical_replicas
    sizes, running = _batch_sizes(args, dp_size)
    if (
        wanted == "auto"
        and args.step_batch_size_schedule is None
        and not getattr(args, "_is_global_batch_size_explicitly_specified", True)
    ):
        raise TopologyError(
            'canonical_replicas is "auto", which takes the number of lanes from the global batch, but '
            f"--global-batch-size is not set, so it ({args.global_batch_size} here) would change with the number of "
            f"ranks; set --global-batch-size {args.global_batch_size}, or --zephon-canonical-replicas."
        )
    lanes = resolve_lanes(wanted, global_batch=math.gcd(*sizes), dp_degree=dp_size)
    Topology(lanes, dp_size, dp_rank)
    at_once = args.micro_batch_size * dp_size
    unit = math.lcm(at_once, lanes)
    for size in running:
        if size % lanes or size % at_once:
            why = (
                "--decrease-batch-size-if-needed makes it "
                if args.decrease_batch_size_if_needed
                else "--step-batch-size-schedule asks for "
                if args.step_batch_size_schedule is not None
                else "the global batch is "
            )
            around = [n for n in (size // unit * unit, (size // unit + 1) * unit) if n]
            raise TopologyError(
                f"{why}{size} records, which does not divide by {lanes} lanes (canonical_replicas) and by "
                f"--micro-batch-size {args.micro_batch_size} x {dp_size} data-parallel ranks; sizes that work are "
                f"{' and '.join(map(str, around))}, and every multiple of {unit}."
            )
    # Of the whole run, so that it is told the same before and after a batch has grown.
    steps = {*sizes} if args.step_batch_size_schedule is not None else {*running}
    return Topology(lanes, dp_size, dp_rank, steps.pop() if len(steps) == 1 else None)


def _batch_sizes(args: Namespace, dp_size: int) -> tuple[list[int], list[int]]:
    """Global batches that the command line asks for over the whole run, and those that will be from here on."""
    if args.step_batch_size_schedule is not None:
        schedule = StepBatchsizeNumMicroBatchesCalculator(
            args.micro_batch_size, dp_size, False, 1, args.step_batch_size_schedule, args.seq_length
        ).schedule
        sizes = [size for _, size in schedule]
        # Sizes of the past need not suit the ranks of today.
        now = sum(start <= args.consumed_train_samples for start, _ in schedule) - 1
        return sizes, sizes[now:]
    size = args.global_batch_size
    at_once = args.micro_batch_size * dp_size
    return [size], [size // at_once * at_once if args.decrease_batch_size_if_needed else size]


def eval_topology(recipe: DataRecipe, args: Namespace, *, dp_size: int, dp_rank: int) -> Topology:
    """Lanes of a validation or test set and who owns which.

    Raises:
        TopologyError: they do not divide as they must.
    """
    batch = args.eval_global_batch_size
    lanes = resolve_lanes(recipe.canonical_replicas, global_batch=batch, dp_degree=dp_size)
    try:
        return Topology(lanes, dp_size, dp_rank, batch)
    except TopologyError as error:
        raise TopologyError(f"evaluation (--eval-global-batch-size {batch}): {error}") from None


def tokenizer_path(args: Namespace) -> str:
    """Where the tokenizer is that makes the tokens.

    Raises:
        TokenizerError: nothing says so.
    """
    path = args.zephon_tokenizer
    if not path and args.tokenizer_type in ("HuggingFaceTokenizer", "SFTTokenizer"):
        path = args.tokenizer_model
    if not path:
        raise TokenizerError(
            f"Zephon tokenizes with a tokenizer.json, which --tokenizer-type {args.tokenizer_type} does not name; set "
            "--zephon-tokenizer to a folder that has one, or use --tokenizer-type HuggingFaceTokenizer with "
            "--tokenizer-model."
        )
    return str(path)


def check_tokenizer(args: Namespace, megatron_tokenizer: Any) -> Tokenizer:
    """The tokenizer, after seeing that it fits Megatron's own and the model's vocabulary.

    Raises:
        TokenizerError: it does not.
    """
    path = tokenizer_path(args)
    ours = load_tokenizer(path)
    padded = args.padded_vocab_size
    rows = padded if padded is not None else args.vocab_size
    if rows is not None and ours.vocab_size > rows:
        raise TokenizerError(
            f"the tokenizer in {path!r} has ids up to {ours.vocab_size - 1}, the model has a vocabulary of {rows}"
            f"{' (with its padding)' if padded is not None else ''}; use the tokenizer that belongs to the model, or "
            f"set {'--padded-vocab-size' if padded is not None else '--vocab-size'} to {ours.vocab_size} at least."
        )
    if args.tokenizer_type == "NullTokenizer":
        return ours  # it knows no tokens, only how many there are
    theirs = getattr(megatron_tokenizer, "vocab_size", None)
    if isinstance(theirs, int) and ours.vocab_size > theirs:
        raise TokenizerError(
            f"the tokenizer in {path!r} has {ours.vocab_size} tokens, Megatron's (--tokenizer-model "
            f"{args.tokenizer_model}) has {theirs}; name the same one for both."
        )
    eod = getattr(megatron_tokenizer, "eod", None)
    if eod is not None and ours.eos_id is not None and eod != ours.eos_id:
        raise TokenizerError(
            f"the end of a document is token {eod} for Megatron's tokenizer and {ours.eos_id} for the one in {path!r}; "
            "its tokenizer_config.json and tokenizer.json do not agree, so put one of them right."
        )
    return ours
