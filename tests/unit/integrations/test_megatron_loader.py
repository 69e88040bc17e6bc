"""Megatron's view of the data loader: options, checks, batches, states and loaders, without a trainer's run."""

import argparse
import contextlib
import copy
import io
import json
import re
import subprocess
import sys
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest

from zephon import (
    CheckpointError,
    DataError,
    DataRecipe,
    Pipeline,
    PipelineError,
    RecipeError,
    TokenizerError,
    TopologyError,
    ZephonError,
)
from zephon.cli.stream import read_states
from zephon.io import Dataset
from zephon.loader import evaluation_recipe
from zephon.tokenizer.tokenizer import load_tokenizer
from zephon.work import StaticMixtureWorkSource

pytest.importorskip("megatron.training")
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.training.arguments import add_megatron_arguments

from megatron_zephon import metrics
from megatron_zephon.batches import BatchForm
from megatron_zephon.blend import main as blend_main
from megatron_zephon.checks import (
    _DATASET_OPTIONS,
    _OTHER_DATA,
    check_data,
    check_folders,
    check_lanes,
    check_options,
    check_program,
    check_special_tokens,
    eval_topology,
    read_recipe,
    remarks,
    train_topology,
)
from megatron_zephon.history import Entry, check_count, read_history, with_entry, write_history
from megatron_zephon.loaders import EvalLoader, TrainLoader
from megatron_zephon.options import _OPTIONS, add_options, defaults_for
from megatron_zephon.resume import saved_lanes
from megatron_zephon.states import FORMAT, find_state, prune_states

pytestmark = pytest.mark.frameworks
SEQ, BATCH = 32, 8


def pipeline_of(recipe, tokenizer, *, ranks=1, rank=0, micro=2, seed=5, finite=False, evaluated=False, lanes=BATCH):
    recipe = DataRecipe.from_toml(recipe).replace(seed=seed)
    if finite or evaluated:
        recipe = evaluation_recipe(recipe, repeat=not finite)
    return Pipeline.from_recipe(
        recipe,
        tokenizer=tokenizer,
        seq_len=SEQ,
        microbatch_size=micro,
        dp_degree=ranks,
        dp_group_id=rank,
        global_batch=lanes,
        canonical_replicas=lanes,
        drop_last=not finite,
        combine_flag=bool,
    )


_PARSER = add_options(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))
_STOCK = _PARSER.parse_args([])


def args_of(*line, **changes):
    """Megatron's arguments as they are once validated, as far as they matter here."""
    args = _PARSER.parse_args(["--zephon-data-config=recipe.toml", *line]) if line else copy.copy(_STOCK)
    args.zephon_data_config = args.zephon_data_config or "recipe.toml"
    args._is_global_batch_size_explicitly_specified = args.global_batch_size is not None
    for key, value in defaults_for(args).items():
        if getattr(args, key, None) is None:
            setattr(args, key, value)
    defaults = {
        "seq_length": SEQ,
        "micro_batch_size": 1,
        "global_batch_size": BATCH,
        "consumed_train_samples": 0,
        "virtual_pipeline_model_parallel_size": None,
        "padded_vocab_size": None,
        "iteration": 0,
        "data_parallel_size": 1,
        "zephon_data_folder": args.dataloader_save,
    }
    for key, value in defaults.items():
        if getattr(args, key, None) is None:
            setattr(args, key, value)
    if args.eval_global_batch_size is None:
        args.eval_global_batch_size = args.global_batch_size
    for key, value in changes.items():
        assert hasattr(args, key), key
        setattr(args, key, value)
    return args


class TestOptions:
    def test_are_a_group_of_their_own_in_the_help(self):
        shown = _PARSER.format_help()
        group = shown[shown.index("\nzephon:") :]
        for name in _OPTIONS:
            assert name in group

    def test_go_with_an_external_loader_that_makes_no_masks_and_does_not_evaluate(self):
        args = args_of("--save=out", "--save-interval=5")
        assert args.dataloader_type == "external" and not args.create_attention_mask_in_dataloader
        assert args.eval_iters == 0 and args.eval_interval
        assert args.dataloader_save == "out/dataloader" and args.zephon_flush_index == "out/dataloader/zephon-windows"
        check_options(args)

    def test_leave_alone_what_the_command_line_says(self):
        args = args_of("--save=out", "--dataloader-save=states", "--reset-attention-mask", "--eval-iters=7")
        assert args.dataloader_save == "states" and args.create_attention_mask_in_dataloader and args.eval_iters == 7
        assert not args_of("--reset-attention-mask", "--sft").create_attention_mask_in_dataloader
        assert args_of("--step-batch-size-schedule=0:8 1M:16").eval_global_batch_size == 16

    @pytest.mark.parametrize(
        "line, message",
        [
            (["--dataloader-type=single"], "expected external"),
            (["--data-path", "x"], "--data-path and --zephon-data-config both name the data"),
            (["--mock-data"], "both name the data"),
            (["--rampup-batch-size", "1", "2", "3"], "--rampup-batch-size is ignored"),
            (["--decoder-seq-length=16"], "expected 32, as --seq-length"),
            (["--sft", "--create-attention-mask-in-dataloader"], "does not go with --sft"),
            (["--dataloader-inter-document-masking", "--reset-attention-mask"], "does not go with --dataloader-inter"),
            (["--reset-attention-mask", "--no-create-attention-mask-in-dataloader"], "Leave out one"),
            (["--sft", "--context-parallel-size=2"], "Use --dataloader-inter-document-masking"),
            (["--full-validation"], "Add --multiple-validation-sets"),
            (["--multiple-validation-sets"], "works with --full-validation only"),
            (["--eval-iters=5"], "--zephon-valid-data-config is missing"),
            (["--zephon-valid-data-config", "a", "b"], "has 2 recipes"),
            (["--dataloader-save=x"], "needs --save"),
            (["--zephon-prune-state"], "needs --save"),
            (["--eval-interval=5"], "--eval-iters is 100, and --zephon-valid-data-config is missing"),
            (["--split=99,1,0"], "--split applies to Megatron's own datasets only. Leave it out"),
            (
                ["--no-mmap-bin-files", "--data-cache-path=x"],
                "--no-mmap-bin-files apply to .* Leave them out",
            ),
            (["--perform-rl-step"], "makes its own data"),
        ],
    )
    def test_that_contradict_each_other_are_refused(self, line, message):
        with pytest.raises(PipelineError, match=message):
            check_options(args_of(*line))

    def test_of_megatrons_datasets_and_program_are_all_obeyed_or_refused(self):
        """Every option that Megatron's GPTDatasetConfig is made of."""
        shared = {"random_seed", "sequence_length", "tokenizer", "context_parallel_size", "data_parallel_size"}
        obeyed = {"reset_position_ids", "reset_attention_mask", "eod_mask_loss", "create_attention_mask"}
        obeyed |= {"multiple_validation_sets", "full_validation", "inter_document_masking"}
        renamed = {"path_to_cache": "data_cache_path", "fast_cache_load": "dataloader_fast_cache_load"}
        renamed |= {"defer_npy_index_mmap": "dataloader_defer_npy_index_mmap"}
        renamed |= {"sequences_per_dataset": "per_dataset_sequences_path", "blend": "data_path"}
        renamed |= {"blend_per_split": "train_data_path", "hybrid_context_parallel": "hybrid_context_parallel"}
        refused = {*_DATASET_OPTIONS, *_OTHER_DATA, "hybrid_context_parallel"}
        inner = {"mock", "split_matrix", "drop_last_partial_validation_sequence", "add_extra_token_to_sequence"}
        inner |= {"sequence_parallel_size", "token_dtype_code", "global_batch_size"}
        for field in fields(GPTDatasetConfig):
            assert field.name in shared | obeyed | inner or renamed.get(field.name, field.name) in refused, field.name
        with pytest.raises(PipelineError, match=r"--logits-load-dir is x; .*Megatron's own pretrain_gpt.py"):
            check_program(args_of("--logits-load-dir=x"))

    @pytest.mark.parametrize(
        "line, message",
        [
            (["--zephon-data-config=nowhere.toml"], "--zephon-data-config: nowhere.toml"),
            (["--split=99,1,0"], "--split applies to"),
            (["--zephon-canonical-replicas=3"], "Use canonical_replicas 1 or 2 or 4 or 8"),
            (["--mine=3"], None),
        ],
    )
    def test_are_checked_and_joined_by_the_programs_own_when_parsed(
        self, recipe, tiny_tokenizer, monkeypatch, line, message
    ):
        from megatron_zephon import pretrain_gpt_zephon as program

        def parse(extra_args_provider, args_defaults=None):
            data = f"--zephon-data-config={recipe}", f"--tokenizer-model={tiny_tokenizer}", "--global-batch-size=8"
            args = args_of(*data, *[each for each in line if "mine" not in each])
            extra_args_provider(parser := argparse.ArgumentParser())
            return argparse.Namespace(**vars(args), mine=parser.get_default("mine"))

        def add_mine(parser):
            parser.add_argument("--mine", default=7)
            return parser

        monkeypatch.setattr(program, "parse_args", parse)
        monkeypatch.setattr(program, "parse_and_validate_args", parse)
        if message is None:
            assert program.parse(extra_args_provider=add_mine).mine == 7
        else:
            with pytest.raises(ZephonError, match=message):
                program.parse(extra_args_provider=add_mine)

    @pytest.mark.parametrize(
        "source, message",
        [
            ("path = 'nowhere'", "does not exist"),
            ("path = 'a.jsonl'\ntext_field = 'body'", "no column 'body'"),
            ("path = 'a.jsonl'\nfilter = 'lang == \"en\"'", 'needs the column "lang"'),
        ],
    )
    def test_of_data_that_cannot_be_read_are_refused_before_the_model_is_built(
        self, tmp_path, monkeypatch, tiny_tokenizer, source, message
    ):
        (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(f"[[sources]]\nname = 'a'\n{source}\n")
        args = args_of(f"--zephon-data-config={recipe}", f"--zephon-tokenizer={tiny_tokenizer}")
        with pytest.raises(PipelineError, match=rf"--zephon-data-config .*recipe.toml: .*{message}"):
            check_data(args)
        monkeypatch.setenv("LOCAL_RANK", "1")
        check_data(args)

    @pytest.mark.parametrize(
        "line, message",
        [
            ("--save=FILE/a", r"^--save is 'FILE/a'; expected a folder that can be written to"),
            ("--save=OK --dataloader-save=FILE/b", "^--dataloader-save is 'FILE/b'"),
            ("--save=OK --zephon-flush-index=FILE/c", "^--zephon-flush-index is 'FILE/c'"),
            ("--zephon-ledger=FILE/d", "^--zephon-ledger is 'FILE/d'"),
            ("--save=OK", None),
        ],
    )
    def test_of_folders_that_cannot_be_written_to_are_named_as_given(self, tmp_path, line, message):
        (tmp_path / "file").touch()
        here = {"FILE": str(tmp_path / "file"), "OK": str(tmp_path / "ok")}
        args = args_of(*re.sub("FILE|OK", lambda match: here[match[0]], line).split())
        with (
            pytest.raises(PipelineError, match=message.replace("FILE", here["FILE"]))
            if message
            else contextlib.nullcontext()
        ):
            check_folders(args)

    def test_that_name_no_difference_of_data_are_refused(self):
        words = 'unknown name of a change in --zephon-allow-changes "shufle". Did you mean "shuffle"'
        with pytest.raises(CheckpointError, match=words):
            check_options(args_of("--zephon-allow-changes=seed, shufle"))
        check_options(args_of("--zephon-allow-changes=seed, dataset web ,tokens_per_row"))

    def test_that_megatron_cannot_do_with_virtual_stages_are_refused(self):
        for line, message in (
            (["--iterations-to-skip", "3"], "--iterations-to-skip does not work with virtual"),
            (
                ["--multiple-validation-sets", "--full-validation", "--zephon-valid-data-config", "a"],
                "does not work with virtual",
            ),
        ):
            with pytest.raises(PipelineError, match=message):
                check_options(args_of(*line, virtual_pipeline_model_parallel_size=2))

    @pytest.mark.parametrize(
        "path, remedy",
        [("x", "megatron_zephon.blend` makes one"), ("a.toml", "Name a.toml there, instead of --data-path")],
    )
    def test_without_a_recipe_say_what_is_missing(self, path, remedy):
        with pytest.raises(PipelineError, match=f"--zephon-data-config is missing; .*{remedy}"):
            check_options(args_of("--data-path", path, zephon_data_config=None))

    def test_choose_the_seed(self, recipe):
        assert read_recipe(recipe, args_of()).seed == 5
        assert read_recipe(recipe, args_of("--zephon-seed=megatron", "--seed=9")).seed == 9
        assert read_recipe(recipe, args_of("--zephon-seed=11")).seed == 11
        with pytest.raises(RecipeError, match="--zephon-seed is 'x'"):
            read_recipe(recipe, args_of("--zephon-seed=x"))
        with pytest.raises(RecipeError, match=r"--zephon-data-config: .*none\.toml"):
            read_recipe("none.toml", args_of())

    def test_of_a_takeover_are_refused_with_virtual_stages_which_save_no_state(self, recipe):
        later = recipe.with_name("later.toml")
        later.write_text(f'continue_from = "{recipe}"\n{recipe.read_text()}')
        assert read_recipe(later, args_of()).continue_from
        for stages in ({"virtual_pipeline_model_parallel_size": 2}, {"num_layers_per_virtual_pipeline_stage": 1}):
            with pytest.raises(RecipeError, match=r"continue_from needs .* Leave out --num-layers-per-virtual-"):
                read_recipe(later, args_of(**stages))

    @pytest.mark.parametrize(
        "settings, line, expected",
        [
            ("", (), []),
            ("", ("--num-workers=2",), []),
            ("", ("--num-workers=8",), ["--num-workers is 8 and has no effect"]),
            ("repeat = false", (), ["(the data end), and Megatron weighs all microbatches alike"]),
            ("repeat = false", ("--calculate-per-token-loss",), []),
            ('pack_algorithm = "best_fit"\nrepeat = false', (), ["(the data end and records are padded)"]),
            ("", ("--eod-mask-loss",), ["(labels are masked), and Megatron weighs"]),
            ("", ("--eod-mask-loss", "--calculate-per-token-loss"), []),
        ],
    )
    def test_without_effect_and_losses_that_depend_on_microbatches_are_told(
        self, recipe, tiny_tokenizer, settings, line, expected
    ):
        recipe.write_text(f"{settings}\n{recipe.read_text()}")
        pipeline = Pipeline.from_recipe(recipe, tokenizer=tiny_tokenizer, seq_len=SEQ, microbatch_size=1)
        found = remarks(args_of(*line), DataRecipe.from_toml(recipe), pipeline.fingerprint())
        assert len(found) == len(expected) and all(part in text for part, text in zip(expected, found, strict=True))

    @pytest.mark.parametrize(
        "settings, told",
        [
            ('documents = "chat"', True),
            ('documents = "chat"\nchat_loss = "all"', False),
            ('documents = "tokens"\nloss_field = "trained"', True),
            ('documents = "tokens"\nlabels_field = "labels"', True),
            ('documents = "tokens"', False),
        ],
    )
    def test_labels_that_are_masked_are_told_by_source(self, recipe, settings, told):
        ends = {"end": "repeat", "pack_algorithm": "wrap"}
        for text in (f"{settings}\n{recipe.read_text()}", f"{recipe.read_text()}\n{settings}\n"):
            recipe.write_text(text)
            assert bool(remarks(args_of(), DataRecipe.from_toml(recipe), ends)) is told


class TestLanes:
    def of(self, recipe, dp_size, *line, lanes=None, **changes):
        recipe = DataRecipe.from_toml(recipe)
        args = args_of(*line, zephon_canonical_replicas=lanes, **changes)
        return train_topology(recipe, args, dp_size=dp_size, dp_rank=0)

    def test_come_from_the_global_batch_and_never_from_the_number_of_ranks(self, recipe):
        for ranks in (1, 2, 4, 8):
            topology = self.of(recipe, ranks, "--global-batch-size=8")
            assert (topology.lanes, topology.global_batch, topology.dp_degree) == (8, 8, ranks)
        with pytest.raises(TopologyError, match=r"Set --global-batch-size 8, or --zephon-canonical-replicas"):
            self.of(recipe, 2, "--seed=1")
        assert self.of(recipe, 2, "--seed=1", lanes=4).lanes == 4

    @pytest.mark.parametrize(
        "lanes, ranks, micro, message",
        [
            (
                6,
                2,
                1,
                r"8 records \(--global-batch-size\).* 6 lanes .*_replicas 2 or 4 or 8, or a .* 6 or 12",
            ),
            (6, 2, 2, "replicas 2 or 4 or 8, or a global batch of 12 or 24"),
            (8, 3, 1, "8 lanes .* do not divide among 3"),
            (6, 4, 1, "6 lanes .* do not divide among 4 data-parallel groups. Use canonical_replicas 4 or 8"),
            (8, 2, 3, "8 records .* does not divide by 2 data-parallel groups x 3 records at once. Use a global batch"),
        ],
    )
    def test_that_do_not_divide_are_refused_with_what_would(self, recipe, lanes, ranks, micro, message):
        with pytest.raises(TopologyError, match=message):
            self.of(recipe, ranks, "--global-batch-size=8", lanes=lanes, micro_batch_size=micro)

    def test_divide_every_size_of_a_schedule(self, recipe):
        line = "--step-batch-size-schedule=0:8 1K:24 2K:32"
        topology = self.of(recipe, 2, line)
        assert (topology.lanes, topology.global_batch) == (8, None)
        with pytest.raises(TopologyError, match=r"of 24 records \(--step-batch-.* a global batch of 16 or 32"):
            self.of(recipe, 2, line, lanes=16, consumed_train_samples=40)
        resumed = args_of(line, "--load=out", zephon_canonical_replicas=16, data_parallel_size=16)
        resumed.zephon_data_config = str(recipe)
        check_lanes(resumed)  # before the checkpoint says where it is
        # What lies in the past need not suit the ranks of today.
        assert self.of(recipe, 16, line, lanes=16, consumed_train_samples=100).lanes == 16

    def test_divide_a_batch_that_is_decreased(self, recipe):
        line = ("--global-batch-size=100", "--decrease-batch-size-if-needed")
        with pytest.raises(TopologyError, match=r"of 96 records \(--decrease-batch-size-if-needed\).* 100 lanes"):
            self.of(recipe, 4, *line, micro_batch_size=8)
        topology = self.of(recipe, 4, *line, lanes=32, micro_batch_size=8)
        assert (topology.lanes, topology.global_batch) == (32, 96)

    def test_of_evaluations_are_checked_too(self, recipe):
        recipe = DataRecipe.from_toml(recipe).replace(canonical_replicas=3)
        with pytest.raises(TopologyError, match=r"evaluation \(--eval-global-batch-size 8\)"):
            eval_topology(args_of("--global-batch-size=8"), dp_size=3, dp_rank=0)


class TestTokenizer:
    def test_has_to_fit_the_vocabulary_its_padding_included(self, tiny_tokenizer):
        args = args_of("--tokenizer-type=HuggingFaceTokenizer", f"--tokenizer-model={tiny_tokenizer}")
        theirs = SimpleNamespace(vocab_size=400, eod=load_tokenizer(tiny_tokenizer).eos_id)
        assert check_special_tokens(args, theirs).vocab_size == 400
        args.padded_vocab_size = 512
        assert check_special_tokens(args, theirs).vocab_size == 400
        args.padded_vocab_size = 384
        with pytest.raises(
            TokenizerError, match=r"has 400 tokens; expected at most 384, the voc.* raise --padded-vocab-size"
        ):
            check_special_tokens(args, theirs)
        args.padded_vocab_size = 512
        theirs.eod += 1
        with pytest.raises(TokenizerError, match=r"eos_id is \d+ in the .*; expected \d+, as in the trainer"):
            check_special_tokens(args, theirs)
        theirs.eod, theirs.vocab_size = theirs.eod - 1, 300
        with pytest.raises(TokenizerError, match=r"has 400 tokens; expected at most 300, as Megatron's"):
            check_special_tokens(args, theirs)

    def test_has_to_be_named(self, tiny_tokenizer):
        args = args_of("--tokenizer-type=NullTokenizer", "--vocab-size=400")
        with pytest.raises(TokenizerError, match="Set --zephon-tokenizer"):
            check_special_tokens(args, None)
        args.zephon_tokenizer = str(tiny_tokenizer)
        assert check_special_tokens(args, SimpleNamespace(eod=1)).vocab_size == 400


class TestBatches:
    def shaped(self, recipe, tokenizer, *line, finite=False):
        """All batches (or the first) of a form, and the records behind them."""
        eos = load_tokenizer(tokenizer).eos_id
        form = BatchForm.of(args_of(*line), eos)
        records = list(pipeline_of(recipe, tokenizer, finite=True)) if finite else None
        if records is None:
            records = [next(iter(pipeline_of(recipe, tokenizer)))]
        return [form.shape(batch) for batch in records], records, eos

    def test_are_fresh_dicts_of_what_megatron_knows(self, recipe, tiny_tokenizer):
        (batch,), (record,), _ = self.shaped(recipe, tiny_tokenizer)
        assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids"}
        for name in ("tokens", "labels", "position_ids"):
            assert batch[name].dtype == torch.int64 and batch[name].shape == (2, SEQ) and batch[name].is_contiguous()
        assert batch["loss_mask"].dtype == torch.float32 and (batch["loss_mask"] == 1).all()
        tokens = torch.from_numpy(record.tokens.astype(np.int64))
        assert torch.equal(batch["tokens"], tokens[:, :-1]) and torch.equal(batch["labels"], tokens[:, 1:])
        assert torch.equal(batch["position_ids"], torch.arange(SEQ).repeat(2, 1))

    def test_begin_positions_again_after_the_end_of_a_document(self, recipe, tiny_tokenizer):
        (batch,), _, eos = self.shaped(recipe, tiny_tokenizer, "--reset-position-ids")
        expected = torch.zeros_like(batch["tokens"])
        for row, tokens in enumerate(batch["tokens"].tolist()):
            place = 0
            for i, token in enumerate(tokens):
                expected[row, i] = place
                place = 0 if token == eos else place + 1
        assert (expected[:, 1:] == 0).any() and torch.equal(batch["position_ids"], expected)

    @pytest.mark.parametrize("positions", [(), ("--reset-position-ids",)])
    def test_mask_attention_to_other_documents(self, recipe, tiny_tokenizer, positions):
        (batch,), _, eos = self.shaped(recipe, tiny_tokenizer, "--reset-attention-mask", *positions)
        mask = batch["attention_mask"]
        assert mask.dtype == torch.bool and mask.shape == (2, 1, SEQ, SEQ)
        for row, tokens in enumerate(batch["tokens"].tolist()):
            document = np.cumsum([0, *(token == eos for token in tokens[:-1])])
            may_look = (document[:, None] == document[None, :]) & np.tri(SEQ, dtype=bool)
            assert np.array_equal(~mask[row, 0].numpy(), may_look)
        assert bool((batch["position_ids"][:, -1] == SEQ - 1).all()) is not bool(positions)

    def test_mask_attention_to_what_comes_later(self, recipe, tiny_tokenizer):
        (batch,), _, _ = self.shaped(recipe, tiny_tokenizer, "--create-attention-mask-in-dataloader")
        assert torch.equal(batch["attention_mask"][1, 0], ~torch.ones(SEQ, SEQ, dtype=torch.bool).tril())

    def test_count_no_loss_after_the_end_of_a_document(self, recipe, tiny_tokenizer):
        (batch,), (record,), eos = self.shaped(recipe, tiny_tokenizer, "--eod-mask-loss")
        ends = batch["tokens"] == eos
        assert ends.any() and torch.equal(batch["loss_mask"] == 0, ends)
        labels = torch.from_numpy(record.tokens[:, 1:].astype(np.int64))
        assert torch.equal(batch["labels"][~ends], labels[~ends])

    @pytest.mark.parametrize("option", ["--sft", "--dataloader-inter-document-masking"])
    def test_carry_the_bounds_of_documents(self, recipe, tiny_tokenizer, option):
        batches, records, _ = self.shaped(recipe, tiny_tokenizer, option, finite=True)
        for batch, record in zip(batches, records, strict=True):
            bounds, longest = batch["cu_seqlens"], batch["max_seqlen"]
            assert bounds.dtype == longest.dtype == torch.int32
            assert bounds.shape == (2, SEQ + 1) and longest.shape == (2,)
            for row, starts in enumerate(record.document_starts):
                inside = {int(start) for start in starts if start < SEQ} | {0}
                if record.lengths[row] < SEQ:
                    inside.add(int(record.lengths[row]))  # padding is a document of its own
                expected = [*sorted(inside), SEQ]
                assert bounds[row, : len(expected)].tolist() == expected and (bounds[row, len(expected) :] == SEQ).all()
                assert longest[row] == max(np.diff(expected))
                places = torch.cat([torch.arange(length) for length in np.diff(expected)])
                assert torch.equal(batch["position_ids"][row], places)

    def test_count_no_loss_where_labels_are_masked_and_have_labels_that_models_know(self, recipe, tiny_tokenizer):
        batches, records, _ = self.shaped(recipe, tiny_tokenizer, "--sft", finite=True)
        masked = 0
        for batch, record in zip(batches, records, strict=True):
            ignored = record.to_training()["labels"] == -100
            masked += int(ignored.sum())
            assert torch.equal(batch["loss_mask"] == 0, ignored)
            assert batch["labels"].min() >= 0 and batch["labels"].max() < 400
        assert masked

    def test_count_loss_on_what_the_assistant_says_in_conversations(self, tmp_path, tiny_tokenizer):
        (tmp_path / "chat.jsonl").write_text(
            "".join(
                json.dumps(
                    {
                        "messages": [
                            {"role": "user", "content": f"question {i}"},
                            {"role": "assistant", "content": f"answer {i} words"},
                        ]
                    }
                )
                + "\n"
                for i in range(40)
            )
        )
        path = tmp_path / "chat.toml"
        path.write_text(
            'documents = "chat"\npack_mode = "sequences"\nrepeat = false\ncanonical_replicas = 2\n'
            'chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\\n{% endfor %}"\n'
            '[[sources]]\nname = "chat"\npath = "chat.jsonl"\n'
        )
        tokenizer = load_tokenizer(tiny_tokenizer)
        pipeline = Pipeline.from_recipe(path, tokenizer=tiny_tokenizer, seq_len=128, microbatch_size=2, drop_last=False)
        form = BatchForm.of(args_of("--sft", "--seq-length=128"), tokenizer.eos_id)
        trained_on = set()
        for batch in map(form.shape, pipeline):
            for labels, mask in zip(batch["labels"], batch["loss_mask"], strict=True):
                trained_on |= set(tokenizer.decode(labels[mask == 1].numpy()).replace("answer", "\nanswer").split("\n"))
        assert {f"answer {i} words" for i in range(40)} <= trained_on
        assert not any("question" in text or "user" in text for text in trained_on)


class TestTrainLoader:
    def test_saves_its_lanes_as_plain_data_on_one_of_its_peers(self, recipe, tiny_tokenizer):
        described = TrainLoader(
            pipeline_of(recipe, tiny_tokenizer, ranks=2, rank=1), BatchForm(SEQ, 1, 1), lambda: {"iteration": 1}
        )
        for _ in range(BATCH // 2 // 2):
            next(described)
        state = described.save_state()
        assert state["iteration"] == 1 and state["cursor"] == BATCH and sorted(state["zephon"]["lanes"]) == list("4567")
        assert TrainLoader(pipeline_of(recipe, tiny_tokenizer), BatchForm(SEQ, 1, 1)).save_state() is None

    def test_says_so_when_the_data_have_ended(self, recipe, tiny_tokenizer):
        loader = TrainLoader(pipeline_of(recipe, tiny_tokenizer, finite=True), BatchForm(SEQ, 1, 1))
        with pytest.raises(DataError, match=r"the training data have ended after \d+ records"):
            for _ in range(1000):
                next(loader)


class TestEvalLoader:
    def rows(self, batches):
        return [batch["tokens"].tolist() for batch in batches]

    def loader(self, recipe, tokenizer, *, steps=None, **more):
        pipeline = pipeline_of(recipe, tokenizer, finite=steps is None, evaluated=True, **more)
        return EvalLoader(
            pipeline, BatchForm(SEQ, 1, 1), calls_per_step=BATCH // 2 // more.get("ranks", 1), steps=steps
        )

    def test_makes_full_passes_of_all_documents(self, recipe, tiny_tokenizer):
        loader = self.loader(recipe, tiny_tokenizer)
        one = list(loader)
        assert len(loader) * (BATCH // 2) == len(one)
        eos = load_tokenizer(tiny_tokenizer).eos_id
        # The last label of a record is the first input of the next, so every end is a label once, or padding.
        ends = sum(int(((batch["labels"] == eos) & (batch["loss_mask"] == 1)).sum()) for batch in one)
        firsts = sum(int((batch["tokens"][:, 0] == eos).sum()) for batch in one)
        assert ends <= 90 <= ends + firsts
        assert self.rows(loader) == self.rows(one)
        # No more steps than the records fill: all but the last are full.
        assert all((batch["loss_mask"] == 1).all() for batch in one[: -BATCH // 2])

    @pytest.mark.parametrize("steps", [1, 8, 40])  # 40: more than a pass
    def test_every_evaluation_has_the_same_records_and_all_places_filled(self, recipe, tiny_tokenizer, steps):
        loader = self.loader(recipe, tiny_tokenizer, steps=steps)
        evaluations = [[next(loader) for _ in range(steps * BATCH // 2)] for _ in range(3)]
        assert self.rows(evaluations[0]) == self.rows(evaluations[1]) == self.rows(evaluations[2])
        assert all((batch["loss_mask"] == 1).all() for batch in evaluations[0])
        ranks = [self.loader(recipe, tiny_tokenizer, steps=steps, ranks=4, rank=rank) for rank in range(4)]
        for step in range(steps):
            alone = [
                row for batch in evaluations[0][step * BATCH // 2 :][: BATCH // 2] for row in batch["tokens"].tolist()
            ]
            assert [row for rank in ranks for row in next(rank)["tokens"].tolist()] == alone

    def test_data_are_shuffled_as_the_recipe_says(self, recipe, tiny_tokenizer):
        first, other = (
            next(EvalLoader(pipeline, BatchForm(SEQ, 1, 1), calls_per_step=4, steps=1))["tokens"].tolist()
            for pipeline in (pipeline_of(recipe, tiny_tokenizer, evaluated=True, seed=seed) for seed in (1, 2))
        )
        assert first != other


class TestStates:
    def save(self, folder, recipe, tokenizer, ranks, *, steps=2, name="mp_rank_00", seed=None):
        """What Megatron would write at iteration 2 of a run on `ranks` ranks; gives the folder."""
        target = folder / "iter_0000002" / name
        target.mkdir(parents=True, exist_ok=True)
        for rank in range(ranks):
            pipeline = pipeline_of(recipe, tokenizer, ranks=ranks, rank=rank, micro=1, seed=seed)
            described = {
                "megatron_zephon": FORMAT,
                "iteration": 2,
                "consumed_train_samples": steps * BATCH,
                "dp_size": ranks,
                "dp_rank": rank,
                "time": rank,
            }
            loader = TrainLoader(pipeline, BatchForm(SEQ, 1, 1), lambda described=described: described)
            for _ in range(steps * BATCH // ranks):
                next(loader)
            state = {"dataloader_state_dict": loader.save_state()}
            torch.save(state, target / f"train_dataloader_dprank{rank:03d}.pt")
            loader.close()
        return target

    def find(self, recipe, tokenizer, *folders, iteration=2, consumed=16):
        fingerprint = pipeline_of(recipe, tokenizer).checkpoint()["fingerprint"]
        return find_state(list(folders), iteration=iteration, consumed=consumed, fingerprint=fingerprint)[0]

    def lanes(self, states):
        return sorted(lane for state in states for lane in state.lanes)

    def test_are_put_together_from_any_number_of_files(self, recipe, tiny_tokenizer, tmp_path):
        for ranks, name in ((1, "mp_rank_00"), (4, "mp_rank_00_000")):
            folder = tmp_path / str(ranks)
            self.save(folder, recipe, tiny_tokenizer, ranks, name=name)
            states = self.find(recipe, tiny_tokenizer, tmp_path / "none", folder)
            assert len(states) == ranks and self.lanes(states) == list(range(BATCH))
            found = find_state([folder], iteration=2, consumed=16, fingerprint={})
            assert found[1] == 0 and sum(found[2].values()) == 2 * BATCH * (SEQ + 1)
            loader = TrainLoader(pipeline_of(recipe, tiny_tokenizer), BatchForm(SEQ, 1, 1), dict)
            loader.count_from(found[2])
            next(loader)
            assert sum(loader.save_state()["tokens"].values()) == (2 * BATCH + 2) * (SEQ + 1)
            loader.close()

    def test_or_the_history_say_how_many_lanes_a_run_has_that_goes_on(self, recipe, tiny_tokenizer, tmp_path):
        load = str(tmp_path)
        fresh = args_of("--load", load, zephon_data_folder=load)
        resumed = args_of("--load", load, consumed_train_samples=16, iteration=2, zephon_data_folder=load)
        assert saved_lanes(resumed) is None
        write_history(
            tmp_path, [Entry(0, {"canonical_replicas": 4}, False), Entry(99, {"canonical_replicas": 6}, False)]
        )
        assert saved_lanes(resumed) == 4 and saved_lanes(fresh) is None
        self.save(tmp_path, recipe, tiny_tokenizer, 1)
        assert saved_lanes(resumed) == BATCH
        topology = train_topology(DataRecipe.from_toml(recipe), resumed, dp_size=1, dp_rank=0, saved=4)
        assert (topology.lanes, topology.global_batch) == (4, BATCH)

    def test_of_other_moments_runs_and_ranks_are_passed_over(self, recipe, tiny_tokenizer, tmp_path):
        # Four ranks, then two that overwrote two of their files at another place, with other data.
        self.save(tmp_path, recipe, tiny_tokenizer, 4, steps=3)
        self.save(tmp_path, recipe, tiny_tokenizer, 2)
        states = self.find(recipe, tiny_tokenizer, tmp_path)
        assert len(states) == 2 and {state.rounds for state in states} == {2}
        # Both folder names: a whole state of other data beside it is not taken.
        self.save(tmp_path, recipe, tiny_tokenizer, 1, name="mp_rank_00_000", seed=99)
        assert len(self.find(recipe, tiny_tokenizer, tmp_path)) == 2

    def test_complete_each_other_where_a_save_of_other_ranks_was_interrupted(self, recipe, tiny_tokenizer, tmp_path):
        whole = self.save(tmp_path, recipe, tiny_tokenizer, 4)
        first = (self.save(tmp_path / "two", recipe, tiny_tokenizer, 2) / "train_dataloader_dprank000.pt").read_bytes()
        (whole / "train_dataloader_dprank000.pt").write_bytes(first)
        assert set(self.lanes(self.find(recipe, tiny_tokenizer, tmp_path))) == set(range(BATCH))

    def test_that_are_not_whole_are_refused_and_say_why(self, recipe, tiny_tokenizer, tmp_path):
        target = self.save(tmp_path, recipe, tiny_tokenizer, 2)
        with pytest.raises(CheckpointError, match=r"the saved state of the data for iteration 3.*is missing"):
            self.find(recipe, tiny_tokenizer, tmp_path, iteration=3)
        second = target / "train_dataloader_dprank001.pt"
        content = second.read_bytes()
        second.unlink()
        with pytest.raises(CheckpointError, match=r"is incomplete \(1 file of a run on 2 ranks lack 4 of 8 lanes\)"):
            self.find(recipe, tiny_tokenizer, tmp_path)
        for damage in (content[:-200], b"", b"nonsense"):
            second.write_bytes(damage)
            with pytest.raises(CheckpointError, match=r"dprank001.pt is damaged or cut short"):
                self.find(recipe, tiny_tokenizer, tmp_path)
        torch.save({"dataloader_state_dict": {"position": 3}}, second)
        with pytest.raises(CheckpointError, match="holds the state of another data loader"):
            self.find(recipe, tiny_tokenizer, tmp_path)

    def test_that_were_edited_or_hold_code_are_not_believed(self, recipe, tiny_tokenizer, tmp_path):
        target = self.save(tmp_path, recipe, tiny_tokenizer, 1) / "train_dataloader_dprank000.pt"
        saved = torch.load(target, weights_only=True)
        saved["dataloader_state_dict"]["zephon"]["rounds"] += 1
        torch.save(saved, target)
        with pytest.raises(CheckpointError, match="does not match its checksum"):
            self.find(recipe, tiny_tokenizer, tmp_path)

        class Code:
            def __reduce__(self):
                return pytest.fail, ("unpickled",)

        torch.save({"dataloader_state_dict": Code()}, target)
        with pytest.raises(CheckpointError, match="is damaged or cut short"):
            self.find(recipe, tiny_tokenizer, tmp_path)

    def test_of_256_lanes_take_what_the_readme_says(self, recipe, tiny_tokenizer):
        pipeline = pipeline_of(recipe, tiny_tokenizer, lanes=256, micro=256)
        loader = TrainLoader(pipeline, BatchForm(SEQ, 1, 1), lambda: {"megatron_zephon": FORMAT})
        sizes = []
        for place in (None, [10**6, 10**9, 10**6, 16383, 10**5, 99]):
            next(loader)
            state = loader.save_state()
            lanes = state["zephon"]["lanes"]
            state["zephon"]["lanes"] = {lane: [*(place or numbers)] for lane, numbers in lanes.items()}
            torch.save({"dataloader_state_dict": state}, file := io.BytesIO())
            sizes.append(len(file.getvalue()))
        assert 8_000 < sizes[0] < 11_000 and sizes[0] < sizes[1] < 15_000

    def test_are_read_by_the_command_from_the_folder_of_an_iteration(self, recipe, tiny_tokenizer, tmp_path):
        folder = self.save(tmp_path, recipe, tiny_tokenizer, 2)
        for path in (folder, folder.parent, folder / "train_dataloader_dprank001.pt"):
            assert self.lanes(read_states(path)) == [*range(BATCH)]
        with pytest.raises(CheckpointError, match="name the folder of one, such as iter_"):
            read_states(tmp_path)

    def test_are_pruned_where_their_model_is_gone(self, tmp_path):
        states, models = tmp_path / "states", tmp_path / "models"
        for iteration in (1, 2, 3, 4):
            folder = states / f"iter_{iteration:07d}" / "mp_rank_00"
            folder.mkdir(parents=True)
            (folder / "train_dataloader_dprank000.pt").write_bytes(b"")
        for iteration in (2, 3):
            (models / f"iter_{iteration:07d}").mkdir(parents=True)
            (models / f"iter_{iteration:07d}" / "common.pt").write_bytes(b"")
        (states / "iter_0000001" / "mine.txt").write_text("not a state")
        assert prune_states(states, models) == []  # no model yet: nothing is older than it
        (models / "latest_checkpointed_iteration.txt").write_text("3")
        assert prune_states(states, models) == [1]
        assert [path.name for path in (states / "iter_0000001").iterdir()] == ["mine.txt"]
        assert {path.name for path in states.iterdir()} == {f"iter_000000{i}" for i in (1, 2, 3, 4)}


class TestIndexedDatasets:
    @pytest.fixture
    def prefixes(self, tmp_path):
        """Two datasets as Megatron's preprocess_data.py writes them: 90 tokens and 30."""
        found = []
        for name, count in (("web", 9), ("code", 3)):
            builder = IndexedDatasetBuilder(str(tmp_path / f"{name}_text_document.bin"), dtype=np.int32)
            for row in range(count):
                builder.add_document(torch.arange(10) + 10 * row, [10])
            builder.finalize(str(tmp_path / f"{name}_text_document.idx"))
            found.append(str(tmp_path / f"{name}_text_document"))
        return found

    @pytest.mark.parametrize("form", ["{0}", "{0}.bin", "{0}.idx", "{1}/web*.bin", "{1}/web*.idx", "file://{0}"])
    def test_are_named_as_megatron_users_do_and_read_by_their_only_column(self, prefixes, tmp_path, form):
        path = form.format(prefixes[0], tmp_path)
        source = StaticMixtureWorkSource(datasets=[Dataset.from_path("web", path)], shuffle_shards=False)
        pipeline = Pipeline(source).options(runner="inline").pretokenized(special_tokens="none").pack_flat(9).batch(9)
        assert sorted(next(iter(pipeline)).tokens[:, 0].tolist()) == list(range(0, 90, 10))
        assert pipeline.compiled.datasets[0].catalog.fmt == "megatron"

    @pytest.mark.parametrize(
        "blend, weights",
        [(["0.3", "0", "0.7", "1"], [0.3, 0.7]), (["0", "1"], [360.0, 120.0]), (["0"], [360.0])],
    )
    def test_of_a_data_path_make_a_recipe(self, prefixes, tmp_path, tiny_tokenizer, capsys, blend, weights):
        path = tmp_path / "recipe.toml"
        blend_main(["--data-path", *(prefixes[int(part)] if part in "01" else part for part in blend)])
        path.write_text(capsys.readouterr().out)
        recipe = DataRecipe.from_toml(path)
        assert [source.weight for source in recipe.sources] == weights and recipe.seed == 1234
        pipeline = Pipeline.from_recipe(recipe, tokenizer=tiny_tokenizer, seq_len=9, microbatch_size=1, runner="inline")
        assert next(iter(pipeline)).tokens.shape == (1, 10)

    @pytest.mark.parametrize(
        "path, message",
        [
            ("nowhere", r"has 'nowhere'; expected the prefix of a .bin and an .idx file.$"),
            ("1 nowhere", "has 'nowhere'"),
            ("0.3 {0} 0.7 {0}x", "web_text_documentx'; expected"),
            ("{0}.bin", "Leave out the ending"),
            ("a.toml", "a recipe already: pass it to --zephon-data-config"),
            ("lost", "has 'lost'"),
        ],
    )
    def test_that_are_not_there_are_named(self, prefixes, tmp_path, monkeypatch, path, message):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "lost.bin").touch()  # without its .idx
        with pytest.raises(SystemExit, match=message):
            blend_main(["--data-path", *path.format(*prefixes).split()])


class TestMetrics:
    @pytest.mark.parametrize("whole", [False, True])
    def test_have_the_values_of_what_was_used(self, faulty_recipe, tiny_tokenizer, monkeypatch, whole):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
        pipeline = Pipeline.from_recipe(
            faulty_recipe, tokenizer=tiny_tokenizer, seq_len=SEQ, microbatch_size=2, global_batch=2, drop_last=False
        )
        loader = TrainLoader(pipeline, BatchForm(SEQ, 1, 1), dict)
        metrics.watch(loader, ["faulty", "sound"])
        with pytest.raises(DataError, match="have ended") if whole else contextlib.nullcontext():
            for _ in range(10**6 if whole else 3):
                next(loader)
        found, mixture = metrics.gathered_metrics("line"), pipeline.mixture()
        tokens = found["zephon/tokens/faulty"] + found["zephon/tokens/sound"]
        assert found["zephon/cursor"] == pipeline.cursor == 2 * loader.progress.batches
        assert found["zephon/padding(%)"] == pytest.approx(100 * (1 - tokens / (found["zephon/cursor"] * (SEQ + 1))))
        assert found["zephon/mixture/sound"] == found["zephon/tokens/sound"] / tokens == mixture["sound"].achieved
        assert found["zephon/mixture_target/sound"] == mixture["sound"].target == 0.5
        if whole:
            assert (found["zephon/skipped_rows/faulty"], found["zephon/failed_rows/faulty"]) == (20, 10)
            assert (found["zephon/skipped_rows/sound"], found["zephon/failed_rows/sound"]) == (0, 0)
            assert (mixture["faulty"].rows, mixture["sound"].rows) == (200, 60)
        else:  # what lies ready is not counted
            assert tokens == 3 * 2 * (SEQ + 1) < mixture["faulty"].tokens + mixture["sound"].tokens

    def test_reach_the_log_line_tensorboard_and_wandb(self, monkeypatch):
        import megatron.training

        values = {"zephon/cursor": 24.0, "zephon/tokens/a": 7.0, "zephon/mixture/a": 1.0}
        written, logged, seen = {}, {}, {}

        class Writer:
            def add_scalar(self, name, value, iteration):
                written[name, iteration] = value

        class Wandb:
            def log(self, values, iteration):
                logged[iteration] = values

        def stock(loss_dict, total_loss_dict, learning_rate, iteration, skipped_iter, is_first_iteration=False):
            # Megatron counts the iteration, then prints each total over the iterations that advanced.
            total_loss_dict["advanced iterations"] = total_loss_dict.get("advanced iterations", 0) + 1
            for name, total in total_loss_dict.items():
                if name != "advanced iterations":
                    seen[name] = total.item() / total_loss_dict["advanced iterations"]

        options = SimpleNamespace(log_interval=2, tensorboard_log_interval=2)
        monkeypatch.setattr(metrics, "gathered_metrics", lambda reader: dict(values))
        monkeypatch.setattr(metrics, "_any_rank_writes", lambda here: here)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
        monkeypatch.setattr(megatron.training, "get_args", lambda: options)
        monkeypatch.setattr(megatron.training, "get_tensorboard_writer", Writer)
        monkeypatch.setattr(megatron.training, "get_wandb_writer", Wandb)
        training_log, totals = metrics._with_zephon(stock), {}
        for iteration in (1, 2):
            training_log({}, totals, 0.1, iteration, 0)
        assert seen == {"zephon/cursor": 24.0, "zephon/tokens/a": 7.0}
        assert written == {(name, 2): value for name, value in values.items()} and logged == {2: values}
        assert set(totals) == {"advanced iterations"}  # nothing of ours stays in Megatron's totals


class TestHistory:
    def test_of_the_data_tells_where_counting_would_give_others(self, tmp_path):
        first, second = Entry(0, {"seed": 5, "mixture": 1}, False), Entry(64, {"seed": 5, "mixture": 2}, True)
        write_history(tmp_path / "states", with_entry([first], second))
        entries = read_history([tmp_path / "none", tmp_path / "states"])
        assert entries == [first, second]
        assert check_count(entries[:1], first.fingerprint, ()) == []
        with pytest.raises(CheckpointError, match=r"changed at record 64 \(mixture\)"):
            check_count(entries, second.fingerprint, ())
        with pytest.raises(CheckpointError, match=r"this run has read other data so far[\s\S]*seed: was 5, is 7"):
            check_count([first], {"seed": 7, "mixture": 1}, ())
        with pytest.raises(CheckpointError, match=r"seed cannot be accepted. Records are counted from the start"):
            check_count([first], {"seed": 7, "mixture": 1}, ("seed",))
        backend = "tokenizer_backend"  # another version of the library gives the same tokens
        assert len(check_count([Entry(0, {backend: 5}, False)], {backend: 7}, (backend,))) == 1
        counted = Entry(64, {"seed": 7, "mixture": 1}, False)  # accepted while counting: it counts again
        assert check_count([first, counted], counted.fingerprint, ()) == []
        # A run that goes on from an earlier place forgets what came after it.
        assert with_entry(entries, Entry(8, {"seed": 6}, False)) == [first, Entry(8, {"seed": 6}, False)]
        assert with_entry([first], Entry(8, dict(first.fingerprint), True)) == [first]

    @pytest.mark.parametrize("content", ["", "[", "{}", '[{"consumed": 1}]', "[[[" * 9000, '[{"consumed": -1}]', "[1]"])
    def test_that_is_damaged_is_refused(self, tmp_path, content):
        (tmp_path / "zephon-data.json").write_text(content)
        with pytest.raises(CheckpointError, match="is damaged"):
            read_history([tmp_path])


@pytest.mark.deep
def test_the_launchers_print_their_help_and_refuse_recipes_that_are_not_there():
    def run(launcher, *args):
        command = [sys.executable, "-m", f"megatron_zephon.{launcher}", *args]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)

    for launcher in ("pretrain_gpt_zephon", "cpu_train"):
        shown = run(launcher, "--help")
        assert shown.returncode == 0, shown.stderr
        assert "zephon:" in shown.stdout and "--zephon-data-config" in shown.stdout
    refused = run("pretrain_gpt_zephon", "--zephon-data-config=nowhere.toml")
    assert refused.returncode == 1
    assert "error: --zephon-data-config: nowhere.toml: the recipe cannot be read: No such file" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_the_cpu_launcher_is_never_imported_on_its_own():
    assert "megatron_zephon.cpu_train" not in sys.modules
