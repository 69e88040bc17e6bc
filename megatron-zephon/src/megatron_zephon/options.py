"""Command-line options, and the defaults of Megatron's own that go with an external loader."""

from __future__ import annotations

from argparse import Action, ArgumentParser, HelpFormatter, Namespace
from pathlib import Path
from typing import Any

__all__ = ["STATE_FOLDER", "add_options", "defaults_for"]

STATE_FOLDER = "dataloader"
"""Where states lie in the folder of --save unless --dataloader-save says otherwise. Not in the iteration's own folder,
which Megatron takes for a broken checkpoint when something is in it already."""

_UNSET = ("create_attention_mask_in_dataloader", "eval_iters")
"""Options of Megatron with a default that does not fit here: unset unless the command line has them."""


class _Help(HelpFormatter):
    """Prints help texts of Megatron's that have a bare "%" in them, for which argparse fails."""

    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        try:
            text % {**vars(action), "prog": self._prog}
        except (KeyError, TypeError, ValueError):
            return text.replace("%", "%%")
        return text


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
        help="At each save, delete the saved states of iterations whose model in --save is gone (on by itself with "
        "--save-retain-interval).",
    )
    add(
        "--dataloader-save",
        metavar="FOLDER",
        help=f"Where the state of the data is saved with each checkpoint; by default {STATE_FOLDER} in the folder of "
        "--save.",
    )
    add(
        "--dataloader-load",
        metavar="FOLDER",
        help=f"Where a resumed run finds that state; by default {STATE_FOLDER} in the folder of --load, that folder, "
        "or the folder of --dataloader-save, whichever has the iteration.",
    )
    add(
        "--create-attention-mask-in-dataloader",
        dest="create_attention_mask_in_dataloader",
        action="store_true",
        help="Have the loader make attention masks (default: only with --reset-attention-mask).",
    )
    parser.set_defaults(**dict.fromkeys(_UNSET))
    parser.formatter_class = _Help
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
    folder = given.dataloader_save
    if not folder and given.save:
        folder = defaults["dataloader_save"] = str(Path(given.save) / STATE_FOLDER)
    if folder:
        defaults["zephon_flush_index"] = str(Path(folder) / "zephon-windows")
    if given.step_batch_size_schedule and given.eval_global_batch_size is None:
        # Megatron would take one that grows with the number of ranks.
        defaults["eval_global_batch_size"] = _last_size(given.step_batch_size_schedule)
    return defaults


def _last_size(schedule: str) -> int | None:
    """The batch size that a schedule ends with, such as 128 of "0:64 1M:128"; None where it is none."""
    size = schedule.replace(",", " ").split()[-1:]
    number = size[0].rpartition(":")[2] if size else ""
    return int(number) if number.isdecimal() else None
