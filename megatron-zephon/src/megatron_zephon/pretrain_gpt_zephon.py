"""Pre-train a GPT with Megatron on raw documents, tokenized and packed on the fly.

    torchrun --nproc_per_node=8 -m megatron_zephon.pretrain_gpt_zephon --zephon-data-config recipe.toml ...

It takes the options of Megatron's pretrain_gpt.py and those of the group "zephon" (--help).
"""

from __future__ import annotations

import time

_PROGRAM_START = time.time()

from argparse import ArgumentParser, Namespace  # noqa: E402
from collections.abc import Callable  # noqa: E402

from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks  # noqa: E402
from megatron.training import get_args, inprocess_restart, pretrain, set_startup_timestamps  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.arguments import (  # noqa: E402
    core_transformer_config_from_args,
    parse_and_validate_args,
    parse_args,
)

from megatron_zephon import metrics  # noqa: E402
from megatron_zephon.checks import check_data, check_folders, check_lanes, check_options, check_program, check_recipes  # noqa: E402
from megatron_zephon.options import add_options, defaults_for  # noqa: E402
from megatron_zephon.provider import zephon_train_valid_test_datasets_provider  # noqa: E402
from megatron_zephon.training import forward_step  # noqa: E402
from zephon import ZephonError  # noqa: E402


def _embedding_ranks(pipeline: list[int]) -> list[int]:
    """The ranks of a pipeline that hold word embeddings: the first, the last unless its weights are its own, and those
    with layers for multi-token prediction."""
    args = get_args()
    ranks = {pipeline[0]}
    if len(pipeline) > 1:
        if not args.untie_embeddings_and_output_weights:
            ranks.add(pipeline[-1])
        ranks.update(get_mtp_ranks(pipeline, core_transformer_config_from_args(args)))
    return sorted(ranks)


def parse(extra_args_provider: Callable[[ArgumentParser], ArgumentParser] | None = None) -> Namespace:
    """Parse the command line into Megatron's arguments, with Zephon's options and defaults, and check them.

    Args:
        extra_args_provider: adds options of the program's own.

    Raises:
        ZephonError: an option or a recipe is invalid.
    """

    def add(parser: ArgumentParser) -> ArgumentParser:
        return extra_args_provider(add_options(parser)) if extra_args_provider else add_options(parser)

    parsed = parse_args(add)
    check_recipes(parsed)
    args = parse_and_validate_args(extra_args_provider=add, args_defaults=defaults_for(parsed))
    check_options(args)
    check_lanes(args)
    check_folders(args)
    check_data(args)
    return args


def main() -> None:
    """Run Megatron's pretrain() with Zephon's loaders."""
    set_startup_timestamps(program_start=_PROGRAM_START, main_entry=time.time())
    try:
        check_recipes(parse_args(add_options))  # --help too, before Megatron parses the command line by itself
        run, store = inprocess_restart.maybe_wrap_for_inprocess_restart(pretrain)
        args = parse()
        check_program(args)
    except ZephonError as error:
        raise SystemExit(f"error: {error}") from None
    metrics.install()
    run(
        pretrain_cfg_container_from_args(args, gpt_config_from_args(args)),
        zephon_train_valid_test_datasets_provider,
        ModelType.encoder_or_decoder,
        forward_step,
        store=store,
        get_embedding_ranks=_embedding_ranks,
    )


if __name__ == "__main__":
    main()
