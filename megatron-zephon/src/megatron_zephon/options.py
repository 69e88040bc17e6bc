"""Command-line options, and the defaults of Megatron's own that go with an external loader."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

__all__ = ["STATE_FOLDER_NOTE", "add_options", "defaults_for"]

STATE_FOLDER_NOTE = "by default the folder of --save, so that the state lies, and goes, with the model's checkpoint"

_UNSET = ("create_attention_mask_in_dataloader", "eval_iters")
"""Options of Megatron with a default that does not fit here: unset unless the command line has them."""


def add_options(parser: ArgumentParser) -> ArgumentParser:
    """Add the group "zephon" to Megatron's parser (its `extra_args_provider`)."""
    group = parser.add_argument_group("zephon", "Data made on the fly from raw documents, as a data recipe says.")
    add = group.add_argument
    add("--zephon-data-config", metavar="RECIPE", help="Data recipe (a TOML file) of the training data.")
    add(
        "--zephon-valid-data-config",
        metavar="RECIPE",
        nargs="+",
        help="Data recipe of the validation data, each document once per pass; several with "
        "--multiple-validation-sets.",
    )
    add("--zephon-test-data-config", metavar="RECIPE", help="Data recipe of the test data.")
    add(
        "--zephon-canonical-replicas",
        type=int,
        metavar="LANES",
        help="Number of lanes of the training data, fixed for the life of a run; data-parallel sizes must divide it, "
        "and it must divide global batches. By default the recipe's.",
    )
    add(
        "--zephon-tokenizer",
        metavar="PATH",
        help="Folder with the tokenizer.json that makes the tokens; by default --tokenizer-model.",
    )
    add(
        "--zephon-seed",
        default="recipe",
        metavar="SEED",
        help='Seed of the order of the data: "recipe" for the recipe\'s own (default), "megatron" for --seed, or a '
        "number.",
    )
    add(
        "--zephon-ledger",
        metavar="FOLDER",
        help="Folder in which every rank keeps account of the records it consumed, for `zephon verify`.",
    )
    add(
        "--zephon-flush-index",
        metavar="FOLDER",
        help="Folder in which ranks write where windows begin, so that a place can be found without a state; by "
        "default zephon-windows in the folder of --dataloader-save.",
    )
    add(
        "--zephon-allow-changes",
        metavar="NAMES",
        default="",
        help="Names, with commas, of differences to accept when the state was taken with other data.",
    )
    add(
        "--zephon-seek",
        action="store_true",
        help="Find the place in the data by the number of consumed samples, without any saved state.",
    )
    add(
        "--zephon-prune-state",
        action="store_true",
        help="At each save, delete the saved states of iterations whose model in --save is gone.",
    )
    add(
        "--dataloader-save",
        metavar="FOLDER",
        help=f"Where the state of the data is saved with each checkpoint; {STATE_FOLDER_NOTE}.",
    )
    add(
        "--dataloader-load",
        metavar="FOLDER",
        help="Where a resumed run finds that state; by default the folder of --load, then that of --dataloader-save.",
    )
    add(
        "--create-attention-mask-in-dataloader",
        dest="create_attention_mask_in_dataloader",
        action="store_true",
        help="Have the loader make attention masks (default: only with --reset-attention-mask).",
    )
    parser.set_defaults(**dict.fromkeys(_UNSET))
    return parser


def defaults_for(given: Namespace) -> dict[str, Any]:
    """Values for what the command line leaves open: `args_defaults` of `parse_and_validate_args`.

    Args:
        given: the command line, parsed with `add_options`, not validated yet.
    """
    packed = given.sft or given.dataloader_inter_document_masking
    defaults: dict[str, Any] = {
        "tokenizer_type": "HuggingFaceTokenizer",
        "dataloader_type": "external",
        "create_attention_mask_in_dataloader": given.reset_attention_mask and not packed,
        # Megatron would evaluate 100 times, and fail without data to do so.
        "eval_iters": 100 if given.zephon_valid_data_config or given.zephon_test_data_config else 0,
        "eval_interval": given.train_iters or 1000,
    }
    if given.save:
        defaults["dataloader_save"] = given.save
    folder = given.dataloader_save or given.save
    if folder:
        defaults["zephon_flush_index"] = str(Path(folder) / "zephon-windows")
    return defaults
