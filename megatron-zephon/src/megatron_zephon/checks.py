"""Start-up checks: Megatron's arguments against the data and each other. A misconfigured run fails here."""

from __future__ import annotations

import math
import os
import sys
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

from megatron_zephon.batches import packs
from megatron_zephon.options import index_folder, state_folder
from zephon import DataRecipe, PipelineError, RecipeError, TokenizerError, TopologyError, ZephonError
from zephon.loader import (
    SourceRecipe,
    Tokenizer,
    Topology,
    check_allowed,
    check_division,
    check_tokenizer,
    check_writable,
    open_once,
    resolve_lanes,
)

_OTHER_DATA = (
    "data_path",
    "train_data_path",
    "valid_data_path",
    "test_data_path",
    "data_args_path",
    "per_split_data_args_path",
    "mock_data",
)


_DATASET_OPTIONS = {
    "split": None,
    "per_dataset_sequences_path": None,
    "phase_transition_iterations": None,
    "allow_ambiguous_pad_tokens": False,
    "mid_level_dataset_surplus": 0.005,
    "object_storage_cache_path": None,
    "data_cache_path": None,
    "dataloader_fast_cache_load": False,
    "dataloader_defer_npy_index_mmap": False,
    "mmap_bin_files": True,
    "num_dataset_builder_threads": 1,
}
"""Options of Megatron's own datasets, which an external loader replaces, and their defaults."""
_NUM_WORKERS = 2
"""Megatron's default."""
_NAMES = {"mmap_bin_files": "--no-mmap-bin-files"}


def _option(name: str) -> str:
    return _NAMES.get(name, f"--{name.replace('_', '-')}")


def check_recipes(args: Namespace) -> None:
    """Check the recipes, before Megatron validates its own options.

    Raises:
        RecipeError: a recipe is missing or invalid.
    """
    for option, path in _recipes(args):
        read_recipe(path, args, option=option)


def _recipes(args: Namespace) -> list[tuple[str, str]]:
    """Options that name recipes, and the paths."""
    options = ("--zephon-data-config", "--zephon-valid-data-config", "--zephon-test-data-config")
    groups = ([args.zephon_data_config], args.zephon_valid_data_config or [], [args.zephon_test_data_config])
    return [(option, path) for option, paths in zip(options, groups, strict=True) for path in paths if path]


def check_data(args: Namespace) -> None:
    """Open the data of all recipes, on the first rank of every node, before the model is built.

    Raises:
        ZephonError: a path, column, filter or the tokenizer is wrong; names the option.
    """
    tokenizer = tokenizer_path(args)
    for option, path in _recipes(args) if os.environ.get("LOCAL_RANK", "0") == "0" else ():
        recipe = read_recipe(path, args, option=option)
        try:
            open_once(recipe, tokenizer=tokenizer, seq_len=args.seq_length)
        except ZephonError as error:
            raise PipelineError(f"{option} {path}: {error}") from error.__cause__


def check_lanes(args: Namespace) -> None:
    """Check lanes, ranks and batch sizes before the model is built.

    Of a schedule only the last size is sure to be used, since it is unknown yet where a resumed run is.

    Raises:
        TopologyError: they do not divide.
    """
    last = {**vars(args), "consumed_train_samples": sys.maxsize} if args.load else vars(args)
    train_topology(
        read_recipe(args.zephon_data_config, args), Namespace(**last), dp_size=args.data_parallel_size, dp_rank=0
    )


def check_folders(args: Namespace) -> None:
    """Check that the folders to write to can be written to.

    Raises:
        PipelineError: one of them cannot; names the option that it comes from.
    """
    folder, index_of = args.dataloader_save, args.zephon_flush_index
    states = "--save" if args.save and folder == state_folder(args.save) else "--dataloader-save"
    index = states if folder and index_of == index_folder(folder) else "--zephon-flush-index"
    for option, path in (
        ("--save", args.save),
        (states, folder),
        ("--zephon-ledger", args.zephon_ledger),
        (index, index_of),
    ):
        if path:
            check_writable(option, path)


def check_program(args: Namespace) -> None:
    """Refuse options that Megatron's pretrain_gpt.py obeys in its loss, and this package's program does not.

    Raises:
        PipelineError: such an option is set.
    """
    if getattr(args, "logits_load_dir", None) is not None:
        raise PipelineError(
            f"--logits-load-dir is {args.logits_load_dir}; expected none, since the loss of this program does not "
            "distil. Leave it out, or use Megatron's own pretrain_gpt.py with Zephon's provider (README)."
        )


def allowed_changes(args: Namespace) -> list[str]:
    """The differences between data to accept, by name."""
    return [name.strip() for name in args.zephon_allow_changes.split(",") if name.strip()]


def check_options(args: Namespace) -> None:
    """Refuse options that contradict each other, or that an external loader or Megatron 0.19 does not support.

    Raises:
        PipelineError: options are contradictory or unsupported.
        CheckpointError: --zephon-allow-changes has an unknown name.
    """
    check_allowed(allowed_changes(args), None, "--zephon-allow-changes")
    vpp = args.virtual_pipeline_model_parallel_size is not None
    packed = packs(args) and ("--sft" if args.sft else "--dataloader-inter-document-masking")
    other_data = next((_option(name) for name in _OTHER_DATA if getattr(args, name, None)), "")
    of_datasets = [
        _option(name) for name, default in _DATASET_OPTIONS.items() if getattr(args, name, default) != default
    ]
    recipe = next((path for path in args.data_path or () if path.endswith(".toml")), None)
    remedy = (
        f"Name {recipe} there, instead of --data-path."
        if recipe
        else "`python -m megatron_zephon.blend` makes one of a --data-path."
    )
    verb, them = ("applies", "it") if len(of_datasets) == 1 else ("apply", "them")
    valid, test = args.zephon_valid_data_config or [], args.zephon_test_data_config
    for wrong, text in (
        (
            not args.zephon_data_config,
            "--zephon-data-config is missing; expected the data recipe to train on. " + remedy,
        ),
        (
            args.dataloader_type != "external",
            f"--dataloader-type is {args.dataloader_type}; expected external, the default with Zephon.",
        ),
        (other_data, f"{other_data} and --zephon-data-config both name the data. Leave out one."),
        (
            of_datasets,
            f"{', '.join(of_datasets)} {verb} to Megatron's own datasets only. Leave {them} out.",
        ),
        (
            getattr(args, "perform_rl_step", False),
            "--perform-rl-step makes its own data. Leave it out.",
        ),
        (
            getattr(args, "rampup_batch_size", None) is not None,
            "--rampup-batch-size is ignored by this version of Megatron, so batches would have another size. Use "
            '--step-batch-size-schedule, for example "0:64 1M:128".',
        ),
        (
            getattr(args, "fim_data", False),
            "--fim-data changes samples in Megatron's own dataset only. Leave it out.",
        ),
        (
            getattr(args, "hybrid_context_parallel", False),
            "--hybrid-context-parallel works with Megatron's own loader only. Leave it out.",
        ),
        (
            args.decoder_seq_length is not None and args.decoder_seq_length != args.seq_length,
            f"--decoder-seq-length is {args.decoder_seq_length}; expected {args.seq_length}, as --seq-length, since "
            "records have one length.",
        ),
        (
            args.create_attention_mask_in_dataloader and packed,
            f"--create-attention-mask-in-dataloader does not go with {packed}, which separates documents by "
            "cu_seqlens. Leave it out.",
        ),
        (
            args.reset_attention_mask and packed,
            f"--reset-attention-mask does not go with {packed}, which separates documents by cu_seqlens. Leave it out.",
        ),
        (
            args.reset_attention_mask and not args.create_attention_mask_in_dataloader,
            "--reset-attention-mask contradicts --no-create-attention-mask-in-dataloader. Leave out one.",
        ),
        (
            args.sft and args.context_parallel_size > 1,
            "with --sft, context parallelism cuts every document into 2 x context-parallel-size equal parts, which "
            "packed records do not have. Use --dataloader-inter-document-masking, which cuts records, or "
            "--context-parallel-size 1.",
        ),
        (
            args.iterations_to_skip and vpp,
            "--iterations-to-skip does not work with virtual pipeline stages in Megatron 0.19. Leave out one.",
        ),
        (
            args.iterations_to_skip and packed and args.context_parallel_size > 1,
            f"--iterations-to-skip does not work with {packed} and --context-parallel-size in Megatron 0.19. Leave "
            "one out.",
        ),
        (
            args.full_validation and not args.multiple_validation_sets,
            "--full-validation of one set does not work in this version of Megatron. Add --multiple-validation-sets, "
            "which takes one recipe as well.",
        ),
        (
            args.full_validation and test,
            "--full-validation does not work with test data in this version of Megatron. Leave out "
            "--zephon-test-data-config.",
        ),
        (
            packed and getattr(args, "overlap_moe_expert_parallel_comm", False),
            f"--overlap-moe-expert-parallel-comm would let tokens see other documents with {packed}. Leave out one.",
        ),
        (
            args.multiple_validation_sets and not args.full_validation,
            "--multiple-validation-sets works with --full-validation only in this version of Megatron. Add it.",
        ),
        (
            args.multiple_validation_sets and vpp,
            "--multiple-validation-sets does not work with virtual pipeline stages in this version of Megatron.",
        ),
        (
            len(valid) > 1 and not args.multiple_validation_sets,
            f"--zephon-valid-data-config has {len(valid)} recipes; expected one, or --multiple-validation-sets and "
            "--full-validation.",
        ),
        (
            (args.full_validation or args.eval_iters) and not valid,
            f"--eval-iters is {args.eval_iters}, and --zephon-valid-data-config is missing. Name a recipe (Megatron "
            "evaluates during training, also with test data alone), or set --eval-iters 0.",
        ),
        (
            args.dataloader_save and not args.save,
            "--dataloader-save needs --save, since states are saved with the model. Add --save.",
        ),
        (
            args.zephon_prune_state and not args.save,
            "--zephon-prune-state needs --save, since it keeps the states of existing models. Add --save.",
        ),
    ):
        if wrong:
            raise PipelineError(text)


def remarks(args: Namespace, recipe: DataRecipe, fingerprint: Mapping[str, Any]) -> list[str]:
    """What a user may not expect of this run, to be logged once."""
    texts = []
    if args.num_workers != _NUM_WORKERS:
        texts.append(
            f"--num-workers is {args.num_workers} and has no effect: the loader works in threads of its own (runner, "
            "fetch_parallelism and pack_parallelism in the recipe)."
        )
    unequal = {
        "the data end": fingerprint["end"] != "repeat",
        "records are padded": fingerprint["pack_algorithm"] != "wrap",
        "labels are masked": bool(args.eod_mask_loss) or any(_masks_labels(recipe, each) for each in recipe.sources),
    }
    if any(unequal.values()) and not args.calculate_per_token_loss:
        reasons = " and ".join(reason for reason, holds in unequal.items() if holds)
        texts.append(
            f"records can differ in the number of places with a loss ({reasons}), and Megatron weighs all microbatches "
            "alike: training depends on --micro-batch-size. With --calculate-per-token-loss it does not."
        )
    return texts


def _masks_labels(recipe: DataRecipe, source: SourceRecipe) -> bool:
    """Whether some tokens of a source are not trained on."""
    kind, loss, *columns = (
        recipe.setting(source, key) for key in ("documents", "chat_loss", "loss_field", "labels_field")
    )
    return (kind == "chat" and loss != "all") or (kind == "tokens" and any(columns))


def read_recipe(path: str, args: Namespace, *, option: str = "--zephon-data-config") -> DataRecipe:
    """The recipe in `path`, with the seed of --zephon-seed.

    Raises:
        RecipeError: the recipe or the seed is invalid.
    """
    try:
        recipe = DataRecipe.from_toml(path)
    except RecipeError as error:
        raise RecipeError(f"{option}: {error}") from None
    if recipe.continue_from and option == "--zephon-data-config" and _virtual(args):
        raise RecipeError(
            f"{option}: continue_from needs the state of the data at every resume, and this version of Megatron saves "
            "none with virtual pipeline stages. Leave out --num-layers-per-virtual-pipeline-stage (or "
            "--num-virtual-stages-per-pipeline-rank), or begin the new recipe at record 0, without continue_from."
        )
    seed = str(args.zephon_seed)
    if seed == "recipe":
        return recipe
    if seed == "megatron":
        return recipe.replace(seed=int(args.seed))
    if not seed.isdecimal():
        raise RecipeError(f'--zephon-seed is {seed!r}; expected "recipe", "megatron" or a whole number.')
    return recipe.replace(seed=int(seed))


def _virtual(args: Namespace) -> bool:
    """Whether the run has virtual pipeline stages; also before Megatron has validated its arguments."""
    names = (
        "virtual_pipeline_model_parallel_size",
        "num_layers_per_virtual_pipeline_stage",
        "num_virtual_stages_per_pipeline_rank",
    )
    return any(getattr(args, name, None) for name in names)


def train_topology(
    recipe: DataRecipe, args: Namespace, *, dp_size: int, dp_rank: int, saved: int | None = None
) -> Topology:
    """The lanes of the training data and of this rank; `global_batch` is None if the batch size changes.

    "auto" takes lanes from the run that is resumed (`saved`), in a new run from the global batch of the command line.

    Raises:
        TopologyError: lanes, ranks and a global batch of the run do not divide.
    """
    replicas = recipe.canonical_replicas if args.zephon_canonical_replicas is None else args.zephon_canonical_replicas
    if replicas == "auto" and saved is not None:
        replicas = saved
    sizes, running = _batch_sizes(args, dp_size)
    if (
        replicas == "auto"
        and args.step_batch_size_schedule is None
        and not getattr(args, "_is_global_batch_size_explicitly_specified", True)
    ):
        raise TopologyError(
            'canonical_replicas is "auto", the number of lanes follows from the global batch, and --global-batch-size '
            f"is not set: it ({args.global_batch_size} here), and with it the data, would change with the number of "
            f"ranks. Set --global-batch-size {args.global_batch_size}, or --zephon-canonical-replicas."
        )
    lanes = resolve_lanes(replicas, global_batch=math.gcd(*sizes), dp_degree=dp_size)
    option = (
        "--decrease-batch-size-if-needed"
        if args.decrease_batch_size_if_needed
        else "--step-batch-size-schedule"
        if args.step_batch_size_schedule is not None
        else "--global-batch-size"
    )
    check_division(lanes, dp_size, running, at_once=args.micro_batch_size, where=option)
    # Over the whole run, so that it is the same before and after a change of size.
    steps = {*sizes} if args.step_batch_size_schedule is not None else {*running}
    return Topology(lanes, dp_size, dp_rank, steps.pop() if len(steps) == 1 else None)


def _batch_sizes(args: Namespace, dp_size: int) -> tuple[list[int], list[int]]:
    """The sizes of global batches: of the whole run, and the current and later ones."""
    if args.step_batch_size_schedule is not None:
        schedule = StepBatchsizeNumMicroBatchesCalculator(
            args.micro_batch_size, dp_size, False, 1, args.step_batch_size_schedule, args.seq_length
        ).schedule
        sizes = [size for _, size in schedule]
        # Past sizes need not divide by the present number of ranks.
        now = sum(start <= args.consumed_train_samples for start, _ in schedule) - 1
        return sizes, sizes[now:]
    size = args.global_batch_size
    at_once = args.micro_batch_size * dp_size
    return [size], [size // at_once * at_once if args.decrease_batch_size_if_needed else size]


def eval_topology(args: Namespace, *, dp_size: int, dp_rank: int) -> Topology:
    """The lanes of a validation or test set and of this rank: one for each record of the batch.

    Raises:
        TopologyError: ranks and batch do not divide.
    """
    batch = args.eval_global_batch_size
    try:
        return Topology(batch, dp_size, dp_rank, batch)
    except TopologyError as error:
        raise TopologyError(f"evaluation (--eval-global-batch-size {batch}): {error}") from None


def tokenizer_path(args: Namespace) -> str:
    """The folder of the tokenizer.

    Raises:
        TokenizerError: no option names it.
    """
    path = args.zephon_tokenizer
    if not path and args.tokenizer_type in ("HuggingFaceTokenizer", "SFTTokenizer"):
        path = args.tokenizer_model
    if not path:
        raise TokenizerError(
            f"--tokenizer-type is {args.tokenizer_type}, which names no tokenizer.json. Set --zephon-tokenizer to a "
            "folder that has one, or use --tokenizer-type HuggingFaceTokenizer with --tokenizer-model."
        )
    return str(path)


def check_special_tokens(args: Namespace, megatron_tokenizer: Any) -> Tokenizer:
    """Load the tokenizer and check it against Megatron's own, the model's vocabulary and the options.

    Raises:
        TokenizerError: a check failed.
    """
    path, known = tokenizer_path(args), args.tokenizer_type != "NullTokenizer"  # which has no tokens
    option = "vocab_size" if args.padded_vocab_size is None else "padded_vocab_size"
    tokenizer = check_tokenizer(
        path,
        model_vocab_size=getattr(args, option),
        special={"eos_id": getattr(megatron_tokenizer, "eod", None) if known else None},
        remedy=f"Use the tokenizer that belongs to the model, or raise --{option.replace('_', '-')}.",
    )
    theirs = getattr(megatron_tokenizer, "vocab_size", None)
    if known and isinstance(theirs, int) and tokenizer.vocab_size > theirs:
        raise TokenizerError(
            f"the tokenizer in {path!r} has {tokenizer.vocab_size} tokens; expected at most {theirs}, as Megatron's "
            f"(--tokenizer-model {args.tokenizer_model}). Use one tokenizer for both."
        )
    if args.eod_mask_loss and tokenizer.eos_id is None:
        raise TokenizerError(
            f"--eod-mask-loss needs a token that ends documents; the tokenizer in {path!r} has none. Leave it out."
        )
    return tokenizer
