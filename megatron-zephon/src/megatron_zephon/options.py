"""Command-line options, and defaults of Megatron's own for an external loader."""

from __future__ import annotations

from argparse import Action, ArgumentParser, HelpFormatter, Namespace
from pathlib import Path
from typing import Any

from megatron_zephon.batches import packs

STATE_FOLDER = "dataloader"
"""The folder of states in that of --save. Not the folder of the iteration, which Megatron would regard as a broken
checkpoint if it contained other files."""

_UNSET = ("create_attention_mask_in_dataloader", "eval_iters")
"""Options of Megatron whose default is unsuitable: None unless set on the command line."""


class _Help(HelpFormatter):
    """Prints help texts of Megatron's with a bare "%", on which argparse fails."""

    def _get_help_string(self, action: Action) -> str:
        text = action.help or ""
        try:
            text % {**vars(action), "prog": self._prog}
        except (KeyError, TypeError, ValueError):
            return text.replace("%", "%%")
        return text


_OPTIONS: dict[str, dict[str, Any]] = {
    "--zephon-data-config": {"metavar": "RECIPE", "help": "Data recipe (a TOML file) of the training data."},
    "--zephon-valid-data-config": {
        "metavar": "RECIPE",
        "nargs": "+",
        "help": "Data recipe of the validation data, of which every evaluation takes the same records; several with "
        "--multiple-validation-sets.",
    },
    "--zephon-test-data-config": {"metavar": "RECIPE", "help": "Data recipe of the test data."},
    "--zephon-canonical-replicas": {
        "type": int,
        "metavar": "LANES",
        "help": "Number of lanes of the training data, fixed for the life of a run; data-parallel sizes must divide "
        "it, and it must divide global batches. By default that of the recipe.",
    },
    "--zephon-tokenizer": {
        "metavar": "PATH",
        "help": "Folder with the tokenizer.json; by default --tokenizer-model.",
    },
    "--zephon-seed": {
        "default": "recipe",
        "metavar": "SEED",
        "help": 'Seed of the order of the data: "recipe" for the recipe\'s own (default), "megatron" for --seed, or a '
        "number.",
    },
    "--zephon-ledger": {
        "metavar": "FOLDER",
        "help": "Folder in which every rank records what it consumed, for `zephon verify`.",
    },
    "--zephon-flush-index": {
        "metavar": "FOLDER",
        "help": "Folder in which ranks write where windows begin, for fast seeks without a state; "
        "by default zephon-windows in the folder of --dataloader-save.",
    },
    "--zephon-allow-changes": {
        "metavar": "NAMES",
        "default": "",
        "help": "Differences to accept when the state was taken with other data: comma-separated names.",
    },
    "--zephon-seek": {
        "action": "store_true",
        "help": "Resume the data by the number of consumed samples, without a saved state.",
    },
    "--zephon-start-afresh": {
        "action": "store_true",
        "help": "Begin the data at record 0 if the checkpoint has no state of Zephon, and keep its iteration and "
        "optimizer: to move a run over. A restarted job may keep the option.",
    },
    "--zephon-prune-state": {
        "action": "store_true",
        "help": "At each save, delete the saved states of iterations whose model in --save is gone (the default with "
        "--save-retain-interval).",
    },
    "--dataloader-save": {
        "metavar": "FOLDER",
        "help": f"Folder of the data's saved states; by default {STATE_FOLDER} in the folder of --save.",
    },
    "--dataloader-load": {
        "metavar": "FOLDER",
        "help": f"Folder from which a resumed run reads them; by default {STATE_FOLDER} in the folder of --load, that "
        "folder, or the folder of --dataloader-save, whichever has the iteration.",
    },
    "--create-attention-mask-in-dataloader": {
        "action": "store_true",
        "help": "Create attention masks in the loader (default: only with --reset-attention-mask).",
    },
}


def add_options(parser: ArgumentParser) -> ArgumentParser:
    """Add the group "zephon" to Megatron's parser (its `extra_args_provider`)."""
    group = parser.add_argument_group("zephon", "Training data from raw documents, as described by a data recipe.")
    for name, settings in _OPTIONS.items():
        group.add_argument(name, **settings)
    parser.set_defaults(**dict.fromkeys(_UNSET))
    parser.formatter_class = _Help
    return parser


def defaults_for(parsed: Namespace) -> dict[str, Any]:
    """Defaults in place of Megatron's own: `args_defaults` of `parse_and_validate_args`.

    Args:
        parsed: the command line, parsed with `add_options`, not validated yet.
    """
    defaults: dict[str, Any] = {
        "tokenizer_type": "HuggingFaceTokenizer",
        "dataloader_type": "external",
        "create_attention_mask_in_dataloader": parsed.reset_attention_mask and not packs(parsed),
        # Megatron would evaluate 100 times, and fail without data; so it does where an interval asks for it.
        "eval_iters": 100
        if parsed.zephon_valid_data_config or parsed.zephon_test_data_config or parsed.eval_interval is not None
        else 0,
        "eval_interval": parsed.train_iters or 1000,
    }
    defaults |= folders_for(parsed)
    if parsed.step_batch_size_schedule and parsed.eval_global_batch_size is None:
        # Megatron's would grow with the number of ranks. The last size, such as 128 of "0:64 1M:128".
        last = parsed.step_batch_size_schedule.replace(",", " ").split()[-1].rpartition(":")[2]
        defaults["eval_global_batch_size"] = int(last) if last.isdecimal() else None
    return defaults


def folders_for(args: Namespace) -> dict[str, str]:
    """Defaults of the folders of states and of the flush index."""
    states = args.dataloader_save or (args.save and state_folder(args.save))
    return {"dataloader_save": states, "zephon_flush_index": index_folder(states)} if states else {}


def state_folder(save: str) -> str:
    """The folder of states in that of --save."""
    return str(Path(save) / STATE_FOLDER)


def index_folder(states: str) -> str:
    """The folder of the flush index in that of states."""
    return str(Path(states) / "zephon-windows")
