"""TorchTitan's view of the data loader: config, batches, checks and state, without a trainer's run."""

import json
import pickle
import sys
import threading
from dataclasses import replace
from importlib import import_module
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest

from support import train_tiny_tokenizer
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
from zephon.loader import Progress, keys_of
from zephon.tokenizer.tokenizer import load_tokenizer
from zephon.work import StaticMixtureWorkSource

pytest.importorskip("torchtitan")
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.loss import IGNORE_INDEX

from torchtitan_zephon import Source, ZephonDataLoader
from torchtitan_zephon.checkpointing import from_keys, look_ahead, state_left_out
from torchtitan_zephon.forms import Form
from torchtitan_zephon.metrics import loader_metrics
from torchtitan_zephon.trainer_view import TrainerView

pytestmark = pytest.mark.frameworks
SEQ, BATCH = 32, 8


@pytest.fixture
def tokenizer(tiny_tokenizer):
    known = load_tokenizer(tiny_tokenizer)
    return SimpleNamespace(tokenizer_path=str(tiny_tokenizer), bos_id=known.bos_id, eos_id=known.eos_id)


class Trainer:
    """Builds its data loader as TorchTitan's does."""

    def __init__(self, dataloader, tokenizer, *, ranks=1, rank=0, local=2, batch=BATCH, vocab=400, **more):
        self.config = SimpleNamespace(
            training=SimpleNamespace(global_batch_size=batch, local_batch_size=local),
            dataloader=dataloader,
            model_spec=SimpleNamespace(model=SimpleNamespace(vocab_size=vocab)),
            **more,
        )
        self.dataloader = self.config.dataloader.build(
            dp_world_size=ranks,
            dp_rank=rank,
            tokenizer=tokenizer,
            seq_len=SEQ,
            local_batch_size=local,
            snapshot_every_n_steps=None,
        )


def config(recipe, **overrides):
    return ZephonDataLoader.Config.from_toml(recipe, **overrides)


def build(config, tokenizer, **sizes):
    """A loader without a trainer."""
    sizes = sizes or {"seq_len": SEQ, "local_batch_size": 2}
    return config.build(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, global_batch_size=BATCH, **sizes)


def ranks_of(config, tokenizer, ranks, local, keys=None):
    """The loaders of all ranks, gone on from the keys of a checkpoint."""
    loaders = [Trainer(config, tokenizer, ranks=ranks, rank=rank, local=local).dataloader for rank in range(ranks)]
    for loader in loaders if keys else ():
        loader.load_state_dict({key: keys[key] for key in loader.state_dict()})
    return loaders


def take(loader, count):
    iterator = iter(loader)
    return [next(iterator) for _ in range(count)], iterator


def in_one_job(loaders):
    """What ranks of one job tell each other of their tokens."""
    groups = [(rank, np.broadcast_to(loader.progress.tokens, 2).tolist()) for rank, loader in enumerate(loaders)]
    return mock.patch("torchtitan_zephon.loader.gather", lambda mine: groups)


def step(loaders, local):
    """One global batch, as rows of all ranks in the order of their lanes."""
    rows = []
    for iterator in loaders:
        for _ in range(BATCH // len(loaders) // local):
            inputs, labels = next(iterator)
            rows += torch.stack([inputs["input"], inputs["positions"], labels], dim=1).tolist()
    return sorted(map(str, rows))


class TestConfig:
    def test_from_toml_takes_overrides_and_gives_the_recipe_back(self, recipe):
        assert config(recipe, seed=9).to_recipe() == DataRecipe.from_toml(recipe).replace(seed=9)

    def test_is_plain_data_that_json_can_hold(self, recipe):
        plain = json.loads(json.dumps(config(recipe).to_dict()))
        assert plain["seed"] == 5 and plain["sources"][1]["name"] == "b"

    def test_every_field_can_be_overridden_on_the_command_line(self, recipe, monkeypatch, tiny_tokenizer, capsys):
        from torchtitan.config import ConfigManager

        monkeypatch.setenv("ZEPHON_RECIPE", str(recipe))
        args = ["--module=torchtitan_zephon", "--config=llama3_debugmodel_zephon", f"--hf_assets_path={tiny_tokenizer}"]
        more = ["--dataloader.seed=7", "--dataloader.sources.1.weight=9", "--dataloader.canonical_replicas=4"]
        more += ["--dataloader.allow_changes=seed,dataset a", "--dataloader.shuffle_block_size=global"]
        loader = ConfigManager().parse_args(args + more).dataloader
        assert type(loader) is ZephonDataLoader.Config
        assert (loader.seed, loader.sources[1].weight, loader.canonical_replicas) == (7, 9.0, 4)
        assert (loader.allow_changes, loader.shuffle_block_size) == (["seed", "dataset a"], "global")
        with pytest.raises(SystemExit):
            ConfigManager().parse_args([*args, "--help"])
        shown = capsys.readouterr().out
        for name in {*keys_of(DataRecipe)} | {"ledger", "flush_index", "allow_changes", "skip_steps", "start_afresh"}:
            assert f"--dataloader.{name.replace('_', '-')}" in shown

    def test_in_python_alone_makes_the_batches_of_the_same_recipe(self, recipe, tokenizer):
        sources = [
            Source(name=name, path=str(recipe.with_name(name)), weight=weight)
            for name, weight in (("a", 2.0), ("b", 1.0))
        ]
        alone = ZephonDataLoader.Config(sources=sources, seed=5, chunk_size=40, shuffle_buffer_size=16)
        (here, _), (there, _) = (take(build(each, tokenizer), 2) for each in (alone, config(recipe)))
        assert all(torch.equal(a["input"], b["input"]) for (a, _), (b, _) in zip(here, there, strict=True))

    @pytest.mark.parametrize(
        "place, content, missing, message",
        [
            ("components.dataloader", {"BaseDataLoader": object}, None, "data loaders have no Config; expected 0.3"),
            ("components.loss", {}, None, "data loaders have no Config; expected 0.3"),
            ("components.loss", None, None, "data loaders have no Config; expected 0.3"),
            ("components.loss", {}, "what_torchtitan_needs", "^No module named 'what_torchtitan_needs'$"),
        ],
    )
    def test_with_an_older_torchtitan_the_import_says_what_to_install(
        self, monkeypatch, place, content, missing, message
    ):
        def lacks(name):
            raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

        old = None if content is None else ModuleType(f"torchtitan.{place}")  # None: there is no such module
        if old is not None:
            vars(old).update(content | ({"__getattr__": lacks} if missing else {}))
        monkeypatch.setitem(sys.modules, f"torchtitan.{place}", old)
        monkeypatch.delitem(sys.modules, "torchtitan_zephon.forms")
        with pytest.raises(ImportError, match=message):
            import_module("torchtitan_zephon.forms")

    def test_of_models_with_variable_length_attention_is_refused_on_the_cpu(self):
        from torchtitan.models.gpt_oss.config_registry import _gpt_oss_debugmodel
        from torchtitan.models.llama3.config_registry import llama3_debugmodel

        from torchtitan_zephon import cpu_train

        with pytest.raises(SystemExit, match="gpt_oss debugmodel has variable-length attention, which has no CPU"):
            cpu_train._adapt(_gpt_oss_debugmodel())
        assert cpu_train._adapt(llama3_debugmodel()).training.mixed_precision_param == "float32"
        sys.modules.pop("torchtitan_zephon.cpu_train")

    def test_nothing_of_the_trainers_is_taken_from_a_recipe(self, recipe):
        recipe.write_text("seq_len = 512\n" + recipe.read_text())
        with pytest.raises(RecipeError, match="sequence length belongs to the training framework"):
            config(recipe)

    @pytest.mark.parametrize(
        "override, message",
        [
            ({"sead": 1}, "'sead'; expected a field"),
            ({"chunk_size": 0}, "chunk_size is 0"),
            ({"sources": []}, "sources is empty"),
            ({"dataset": "c4"}, "fields of TorchTitan's own data loaders"),
        ],
    )
    def test_what_is_wrong_is_said_when_the_config_is_made(self, recipe, override, message):
        with pytest.raises(RecipeError, match=message):
            config(recipe, **override)

    def test_config_functions_read_the_recipe_that_the_environment_names(self, monkeypatch, recipe):
        from torchtitan_zephon.config_registry import llama3_8b_zephon

        monkeypatch.delenv("ZEPHON_RECIPE", raising=False)
        with pytest.raises(RecipeError, match="ZEPHON_RECIPE is not set"):
            llama3_8b_zephon()
        monkeypatch.setenv("ZEPHON_RECIPE", str(recipe))
        monkeypatch.setenv("ZEPHON_VALIDATION_RECIPE", str(recipe))
        large = llama3_8b_zephon()
        assert large.training.global_batch_size == 512 and large.dataloader.seed == 5
        assert large.validator.enable and large.validator.steps == -1


class TestBatches:
    def test_are_rows_of_tokens_positions_and_labels(self, recipe, tokenizer):
        loader = Trainer(config(recipe), tokenizer).dataloader
        ((inputs, labels),), _ = take(loader, 1)
        assert set(inputs) == {"input", "positions"}
        for tensor in (*inputs.values(), labels):
            assert tensor.dtype == torch.int64 and tensor.shape == (2, SEQ)
        known = labels[:, :-1] != IGNORE_INDEX
        assert torch.equal(inputs["input"][:, 1:][known], labels[:, :-1][known])
        # Positions begin again after the token that ends a document.
        starts = torch.nonzero(inputs["input"][:, :-1] == tokenizer.eos_id)
        assert len(starts) and all(inputs["positions"][row, at + 1] == 0 for row, at in starts.tolist())
        assert inputs["positions"].max() < SEQ and (inputs["positions"][:, 0] == 0).all()

    def test_flat_ones_hold_the_same_tokens(self, recipe, tokenizer):
        def first(**sizes):
            return take(build(config(recipe), tokenizer, **sizes), 1)[0][0]

        rows, labels = first(seq_len=SEQ, local_batch_size=2)
        flat, flat_labels = first(max_context_length=SEQ, num_tokens_per_batch=2 * SEQ)
        assert set(flat) == {"input", "positions"}
        assert torch.equal(flat["input"], rows["input"].flatten())
        assert torch.equal(flat["positions"], rows["positions"].flatten())
        assert torch.equal(flat_labels, labels.flatten())
        counted, _ = first(max_context_length=SEQ, num_tokens_per_microbatch=2 * SEQ)
        assert counted["num_valid_tokens"] == int((labels != IGNORE_INDEX).sum()) and not counted["padding_mask"].any()
        assert counted["padding_mask"].shape == (2 * SEQ,)

    @pytest.mark.parametrize(
        "sizes, message",
        [
            (
                {"max_context_length": SEQ, "num_tokens_per_batch": SEQ + 1},
                "is 33; expected a multiple",
            ),
            ({"rows": 3}, "builds its data loader with"),
        ],
    )
    def test_sizes_that_do_not_fit_are_refused(self, recipe, tokenizer, sizes, message):
        with pytest.raises(PipelineError, match=message):
            build(config(recipe), tokenizer, **sizes)

    @pytest.mark.parametrize("ranks, local", [(2, 2), (4, 1), (8, 1)])
    def test_make_the_same_global_batches_on_any_number_of_ranks(self, recipe, tokenizer, ranks, local):
        alone = [iter(Trainer(config(recipe), tokenizer, local=8).dataloader)]
        many = [iter(loader) for loader in ranks_of(config(recipe), tokenizer, ranks, local)]
        for _ in range(3):
            assert step(alone, 8) == step(many, local)

    def test_are_equal_for_peers_of_a_data_parallel_rank(self, recipe, tokenizer):
        peers = [Trainer(config(recipe), tokenizer, ranks=2, rank=1).dataloader for _ in range(2)]
        (here, _), (there, _) = (take(peer, 4) for peer in peers)
        for (inputs, labels), (others, other_labels) in zip(here, there, strict=True):
            assert torch.equal(inputs["input"], others["input"]) and torch.equal(labels, other_labels)


def test_positions_of_the_data_restart_where_documents_are_cut(tiny_tokenizer):
    lengths = [4 + n % 9 for n in range(80)]
    columns = {"input_ids": [[100 + n] * k for n, k in enumerate(lengths)], "positions": [[*range(k)] for k in lengths]}
    source = StaticMixtureWorkSource(datasets=[Dataset.from_dict("d", columns)])
    pipeline = Pipeline(source).pretokenized(positions="positions").pack_flat(8, "best_fit", num_bins=4).batch(2)
    cut = 0
    for _, batch in zip(range(30), pipeline, strict=False):
        rows, flat = (Form(8, 2, flat=flat).shape(batch)[0]["positions"].view(2, 8) for flat in (False, True))
        assert rows.tolist() == flat.tolist() == batch.block.counted_positions()[:, :8].tolist()
        cut += int((batch.to_training()["position_ids"] != rows).any())
    assert cut
    pipeline.close()


class TestDocuments:
    """The stock loader gives the label of a document's last token to no other document (pytorch/torchtitan#4075)."""

    @staticmethod
    def stock(folder, texts, monkeypatch):
        """(inputs, labels) of every document of TorchTitan's own loader."""
        import datasets
        from torchtitan.components.tokenizer import HuggingFaceTokenizer
        from torchtitan.hf_datasets import DatasetConfig, text_datasets

        data = datasets.Dataset.from_dict({"text": texts})
        rows = DatasetConfig(path="", loader=lambda path: data, sample_processor=lambda row: row["text"])
        monkeypatch.setitem(text_datasets.DATASETS, "zephon", rows)
        theirs = HuggingFaceTokenizer(tokenizer_path=str(folder))
        places = sum(len(theirs.encode(text, add_bos=True, add_eos=True)) - 1 for text in texts)
        ((inputs, labels),) = text_datasets.HuggingFaceTextDataset("zephon", None, theirs, places)
        bounds = [*torch.nonzero(inputs["positions"] == 0).flatten().tolist(), places]
        return theirs, sorted((inputs["input"][a:b].tolist(), labels[a:b].tolist()) for a, b in pairwise(bounds))

    @staticmethod
    def ours(config, tokenizer):
        """The same of this loader, places without a loss left out; documents lie whole in records of a flat batch."""
        loader = build(replace(config, infinite=False), tokenizer, seq_len=256, local_batch_size=1)
        found = []
        for inputs, labels in loader:
            tokens, positions, labels = (each[0] for each in (inputs["input"], inputs["positions"], labels))
            bounds = [*torch.nonzero(positions == 0).flatten().tolist(), len(tokens)]
            parts = [(tokens[a:b], labels[a:b], labels[a:b] != IGNORE_INDEX) for a, b in pairwise(bounds)]
            found += [(part[kept].tolist(), label[kept].tolist()) for part, label, kept in parts if kept.any()]
        return sorted(found)

    @pytest.mark.parametrize(
        "bos, eos, policy",
        [
            ("<|bos|>", "<|eos|>", "auto"),
            (None, "<|eos|>", "auto"),
            (None, None, "none"),
            ("<|eos|>", "<|eos|>", "bos_eos"),  # GPT-2, where "auto" adds EOS alone
        ],
    )
    def test_are_trained_on_as_by_torchtitans_own_loader(self, recipe, tmp_path, monkeypatch, bos, eos, policy):
        folder = train_tiny_tokenizer(tmp_path / "tokenizer", bos=bos, eos=eos)
        texts = [row for name in "ab" for row in pq.read_table(recipe.with_name(name))["text"].to_pylist()]
        theirs, expected = self.stock(folder, texts, monkeypatch)
        whole = config(recipe, special_tokens=policy, pack_algorithm="best_fit", num_bins=4)
        assert self.ours(whole, theirs) == expected

    def test_where_bos_is_eos_the_first_token_is_no_label_unless_asked_for(self, recipe, tmp_path, monkeypatch):
        folder = train_tiny_tokenizer(tmp_path / "tokenizer", bos="<|eos|>", eos="<|eos|>")
        texts = [row for name in "ab" for row in pq.read_table(recipe.with_name(name))["text"].to_pylist()]
        theirs, expected = self.stock(folder, texts, monkeypatch)
        whole = config(recipe, pack_algorithm="best_fit", num_bins=4)
        assert self.ours(whole, theirs) == [(inputs[1:], labels[1:]) for inputs, labels in expected]

    @pytest.mark.parametrize("flat", [False, True])
    def test_wrapped_over_records_have_no_label_of_another_document_either(self, recipe, tokenizer, flat):
        sizes = {"max_context_length": SEQ, "num_tokens_per_batch": 2 * SEQ} if flat else {}
        batches, _ = take(build(config(recipe, special_tokens="none"), tokenizer, **sizes), 20)
        seen = 0
        for inputs, labels in batches:
            positions, labels = inputs["positions"].reshape(-1, SEQ), labels.reshape(-1, SEQ)
            restarts = positions[:, 1:] == 0
            assert torch.equal(labels[:, :-1] == IGNORE_INDEX, restarts)
            seen += int(restarts.sum())
        assert seen > 10


class TestChecks:
    def test_lanes_come_from_the_trainers_global_batch(self, recipe, tokenizer):
        loader = Trainer(config(recipe), tokenizer, ranks=2).dataloader
        assert sum(key.startswith("lane_") for key in loader.state_dict()) == BATCH // 2

    def test_lanes_are_never_guessed_from_the_number_of_ranks(self, recipe, tokenizer):
        with pytest.raises(TopologyError, match=r"Set --training.global_batch_size 4, or canonical_replicas"):
            Trainer(config(recipe), tokenizer, ranks=2, batch=-1)
        with pytest.raises(TopologyError, match="there is no trainer to take it from"):
            config(recipe).build(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, seq_len=SEQ, local_batch_size=1)
        Trainer(config(recipe, canonical_replicas=4), tokenizer, ranks=2, batch=-1)

    @pytest.mark.parametrize(
        "lanes, ranks, local, message",
        [
            (
                6,
                2,
                1,
                r"8 records \(--training.global_batch_size\) .*_replicas 2 or 4 or 8, or .* 6 or 12",
            ),
            (6, 2, 2, r"canonical_replicas 2 or 4 or 8, or a global batch of 12 or 24"),
            (8, 3, 1, "8 lanes .* do not divide among 3"),
            (8, 2, 3, "2 data-parallel groups x 3 records at once. Use a global batch of 24"),
        ],
    )
    def test_what_does_not_divide_is_refused(self, recipe, tokenizer, lanes, ranks, local, message):
        with pytest.raises(TopologyError, match=message):
            Trainer(config(recipe, canonical_replicas=lanes), tokenizer, ranks=ranks, local=local)

    @pytest.mark.parametrize("sizes, degree", [((2, 4, 1, 1, 1), 8), ((2, -1, 1, 2, 2), 4), ((1, -1, 2, 1, 1), 8)])
    def test_ranks_are_counted_as_torchtitan_does(self, monkeypatch, sizes, degree):
        names = ("data_parallel_replicate", "data_parallel_shard", "context_parallel", "tensor_parallel")
        fields = dict(zip((f"{name}_degree" for name in (*names, "pipeline_parallel")), sizes, strict=True))
        monkeypatch.setattr("torchtitan_zephon.trainer_view.is_distributed", lambda: True)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: 16)
        assert TrainerView(SimpleNamespace(parallelism=SimpleNamespace(**fields))).dp_degree == degree

    @pytest.mark.parametrize(
        "override, message",
        [
            ({}, None),
            ({"feeds": 4}, None),
            ({"canonical_replicas": 3}, "Use canonical_replicas 1 or 2 or 4 or 8"),
            ({"text_field": "nothing"}, "no column 'nothing'"),
            ({"sources": "gone"}, "does not exist"),
        ],
    )
    def test_the_data_are_opened_before_the_model_is_built(self, recipe, tokenizer, override, message):
        """A trainer takes its config as plain data for the metrics, before parameters exist."""

        class Starting:
            def __init__(self, dataloader):
                training = SimpleNamespace(seq_len=SEQ, global_batch_size=BATCH, local_batch_size=1)
                self.config = SimpleNamespace(
                    training=training, dataloader=dataloader, hf_assets_path=tokenizer.tokenizer_path
                )
                self.plain = self.config.dataloader.to_dict()

        if override.get("sources"):
            override = {"sources": [Source(name="a", path=str(recipe.with_name("gone")))]}
        wrong = config(recipe, **override)
        assert wrong.to_dict()["seed"] == 5  # not a trainer
        if message is None:
            assert Starting(wrong).plain["seed"] == 5
        else:
            with pytest.raises(ZephonError, match=message):
                Starting(wrong)

    @pytest.mark.parametrize("name", ["ledger", "flush_index"])
    def test_folders_that_cannot_be_written_to_are_refused_by_path(self, recipe, tokenizer, tmp_path, name):
        (tmp_path / "file").touch()
        with pytest.raises(PipelineError, match=rf"dataloader\.{name} is '{tmp_path}/file/x'; expected a folder"):
            Trainer(config(recipe, **{name: str(tmp_path / "file" / "x")}), tokenizer)

    def test_the_ledger_of_another_run_is_refused_before_the_first_step(self, recipe, tokenizer, tmp_path):
        folder = str(tmp_path / "ledger")
        _, iterator = take(Trainer(config(recipe, ledger=folder), tokenizer).dataloader, 1)
        iterator.close()
        Trainer(config(recipe, ledger=folder), tokenizer)  # the same data
        other = config(recipe, ledger=folder, seed=6)
        with pytest.raises(DataError, match=r"^dataloader.ledger is .*which holds the ledger of a run with other data"):
            Trainer(other, tokenizer)
        state = Trainer(config(recipe, seed=6), tokenizer).dataloader.state_dict()
        with mock.patch("torchtitan_zephon.loader.begins", lambda view: False):
            loader = Trainer(other, tokenizer).dataloader
        with pytest.raises(DataError, match=r"^dataloader.ledger is "):
            loader.load_state_dict(state)

    def test_a_validation_that_cannot_work_is_refused_before_training(self, recipe, tokenizer):
        validator = SimpleNamespace(enable=True, dataloader=config(recipe))
        validator.dataloader.sources[0].path = "nowhere"
        with pytest.raises(DataError, match="nowhere"):
            Trainer(config(recipe), tokenizer, ranks=2, validator=validator)

    def test_tokens_per_step_are_counted_in_records(self):
        training = SimpleNamespace(
            num_tokens_per_train_step=8 * SEQ, max_context_length=SEQ, num_tokens_per_microbatch_per_dp_rank=2 * SEQ
        )
        view = TrainerView(SimpleNamespace(training=training))
        assert (view.global_batch(4).records, view.global_batch(4).fixed) == (8, True)
        training.num_tokens_per_train_step = -1
        assert (view.global_batch(4).records, view.global_batch(4).fixed) == (8, False)
        training.num_tokens_per_train_step = 100
        with pytest.raises(TopologyError, match="is 100; expected a multiple of 32"):
            view.global_batch(4)

    def test_the_tokenizer_has_to_be_the_models(self, recipe, tokenizer, tmp_path):
        with pytest.raises(TokenizerError, match="has 400 tokens; expected at most 300, the vocabulary"):
            Trainer(config(recipe), tokenizer, vocab=300)
        tokenizer.eos_id += 1
        with pytest.raises(TokenizerError, match=r"eos_id is \d+ in the .*; expected \d+, as in the trainer"):
            Trainer(config(recipe), tokenizer)
        with pytest.raises(TokenizerError, match=r"has no tokenizer\.json"):
            Trainer(config(recipe), SimpleNamespace(tokenizer_path=str(tmp_path)))
        with pytest.raises(TokenizerError, match="without tokenizer_path"):
            Trainer(config(recipe), object())


HELD = "ensure_mixture = true\nensure_mixture_buffer_size = 40\n"


class TestState:
    def saved(self, recipe, tokenizer, ranks, local, steps=2):
        """The keys that all ranks write together, and the next global batch."""
        loaders = ranks_of(config(recipe), tokenizer, ranks, local)
        iterators = [iter(loader) for loader in loaders]
        for _ in range(steps):
            step(iterators, local)
        with in_one_job(loaders):
            states = [loader.state_dict() for loader in loaders]
        assert all(torch.equal(state["run"], states[0]["run"]) for state in states)
        together = {key: value for state in states for key, value in state.items()}
        return together, step(iterators, local)

    @pytest.mark.parametrize("ranks, local, more", [(1, 4, ""), (4, 2, HELD), (8, 1, "")])
    def test_of_two_ranks_is_loaded_by_any_number(self, recipe, tokenizer, ranks, local, more):
        recipe.write_text(more + recipe.read_text())
        keys, following = self.saved(recipe, tokenizer, 2, 2)
        resumed = ranks_of(config(recipe), tokenizer, ranks, local, keys)
        # Tokens are counted on from those of both ranks.
        assert sum(np.sum(loader.progress.tokens) for loader in resumed) == 2 * BATCH * (SEQ + 1)
        loaders = [iter(loader) for loader in resumed]
        assert step(loaders, local) == following
        assert sum(np.sum(loader.progress.tokens) for loader in resumed) == 3 * BATCH * (SEQ + 1)

    def test_of_other_data_is_refused_and_accepted_on_purpose(self, recipe, tokenizer):
        keys, _ = self.saved(recipe, tokenizer, 1, 8)
        loader = Trainer(config(recipe, seed=6), tokenizer).dataloader
        with pytest.raises(CheckpointError, match=r"seed: was 5, is 6[\s\S]*seed cannot be accepted"):
            loader.load_state_dict(keys)
        loader = Trainer(config(recipe, shuffle_buffer_size=24), tokenizer).dataloader
        with pytest.raises(CheckpointError, match=r"shuffle: was .*[\s\S]*pass --dataloader.allow_changes shuffle"):
            loader.load_state_dict(keys)
        loader = Trainer(config(recipe, shuffle_buffer_size=24, allow_changes=["shuffle"]), tokenizer).dataloader
        loader.load_state_dict(keys)
        take(loader, 1)

    def test_names_of_no_difference_are_refused(self, recipe, tokenizer):
        with pytest.raises(CheckpointError, match=r'in dataloader.allow_changes "shufle"\. Did you mean "shuffle"'):
            Trainer(config(recipe, allow_changes=["shufle"]), tokenizer)
        keys, _ = self.saved(recipe, tokenizer, 1, 8)
        loader = Trainer(config(recipe, allow_changes=["dataset none"]), tokenizer).dataloader
        with pytest.raises(CheckpointError, match=r'dataloader.allow_changes "dataset none"'):
            loader.load_state_dict(keys)

    def test_damage_is_found(self, recipe, tokenizer):
        keys, _ = self.saved(recipe, tokenizer, 1, 8)
        keys["lane_3"][1] += 1
        with pytest.raises(CheckpointError, match="lane 3 does not match its checksum"):
            from_keys(keys)
        with pytest.raises(CheckpointError, match="damaged or of another loader"):
            from_keys({"world_size": 2, "dp_rank_0": b""})

    @pytest.mark.parametrize("more", ["", HELD])
    def test_of_a_run_that_took_over_from_another_goes_to_any_number_of_ranks(
        self, recipe, tokenizer, monkeypatch, more
    ):
        recipe.write_text(more + recipe.read_text())
        keys, _ = self.saved(recipe, tokenizer, 1, 8)
        later = recipe.with_name("later.toml")
        later.write_text(
            recipe.read_text()
            .replace("weight = 2.0", "weight = 0.5")
            .replace("seed", 'continue_from = "recipe.toml"\nseed')
        )

        loaders = ranks_of(config(later), tokenizer, 2, 4, keys)
        iterators = [iter(loader) for loader in loaders]
        for _ in range(3):
            step(iterators, 4)
        gathered = []  # from each rank, of its own lanes
        gather = "torchtitan_zephon.checkpointing.gather"
        monkeypatch.setattr(gather, lambda mine: [gathered.append(mine) or mine])
        with in_one_job(loaders):
            assert len([loader.state_dict() for loader in loaders]) == len(gathered) == 2
            monkeypatch.setattr(gather, lambda mine: gathered)
            states = [loader.state_dict() for loader in loaders]
        monkeypatch.undo()
        assert torch.equal(states[0]["run"], states[1]["run"])
        following = step(iterators, 4)
        for ranks in (1, 4):
            again = ranks_of(config(later), tokenizer, ranks, 8 // ranks, {**states[0], **states[1]})
            assert step([iter(loader) for loader in again], 8 // ranks) == following

    def test_has_a_key_of_256_kb_for_the_run_however_many_sources_it_has(self, recipe, tokenizer):
        sources = "".join(f'[[sources]]\nname = "s{n}"\npath = "{recipe.parent}/a"\n' for n in range(60))
        for text in (recipe.read_text(), "chunk_size = 99\n" + sources):
            recipe.write_text(text)
            (loader,) = ranks_of(config(recipe), tokenizer, 1, 4)
            assert loader.state_dict()["run"].numel() == 256 << 10

    def test_may_be_missing_where_every_rank_kept_a_flush_index(self, recipe, tokenizer, tmp_path):
        loaders = ranks_of(config(recipe, flush_index=str(tmp_path), chunk_size=4), tokenizer, 2, 2)
        iterators = [iter(loader) for loader in loaders]
        wanted = [step(iterators, 2) for _ in range(40)]
        for loader in loaders:
            loader.close()
        assert len([*tmp_path.glob("*.flush")]) == 2
        rows = []
        for folder in (None, str(tmp_path)):
            (loader,) = ranks_of(config(recipe, flush_index=folder, chunk_size=4), tokenizer, 1, 2)
            loader._pipeline.seek(step=38)
            assert step([iter(loader)], 2) == wanted[38]
            rows.append(sum(each.rows for each in loader.mixture().values()))
            loader.close()
        assert rows[1] < rows[0] / 2

    def test_inside_a_step_is_not_for_saving(self, recipe, tokenizer):
        loader = Trainer(config(recipe), tokenizer).dataloader
        _, iterator = take(loader, 1)
        with pytest.raises(CheckpointError, match="only at the end of a step"):
            loader.state_dict()
        iterator.close()

    def test_of_stock_torchtitan_does_not_go_to_another_number_of_ranks(self):
        class Numbers(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(range(100))

        saved = ParallelAwareDataloader(Numbers(), 0, 2).state_dict()
        with pytest.raises(AssertionError, match="dp_degree is inconsistent"):
            ParallelAwareDataloader(Numbers(), 0, 1).load_state_dict(saved)

    @pytest.mark.parametrize("prefix", ["", "file://"])
    def test_is_looked_for_where_the_trainer_will_load(self, tmp_path, prefix):
        checkpoint = SimpleNamespace(
            enable=True,
            folder=f"{prefix}{tmp_path}/checkpoint",
            load_step=-1,
            exclude_from_loading=[],
            initial_load_path=None,
            initial_load_model_only=True,
        )
        view = TrainerView(SimpleNamespace(dump_folder="elsewhere", checkpoint=checkpoint))
        assert look_ahead(view, 8) is None  # a fresh start
        for name, state in (
            ("step-2", {"dataloader": {"dp_rank_0": "x"}, "train_state": {"step": 1}}),
            ("step-9", {"norm.weight": torch.ones(2)}),  # TorchTitan writes the last checkpoint of a run so by default
            ("step-10", {"train_state": {"step": 1}}),
        ):
            dcp.save(state, checkpoint_id=tmp_path / "checkpoint" / name, no_dist=True)
        assert "step-10 holds no data loader's state" in look_ahead(view, 8).refusal
        checkpoint.load_step = 9
        assert "step-9 holds only a model" in look_ahead(view, 8).refusal and not look_ahead(view, 8).absent
        checkpoint.load_step = 2
        assert "step-2 holds the state of another data loader" in look_ahead(view, 8).refusal
        assert state_left_out(view) is None
        checkpoint.exclude_from_loading = ["dataloader"]
        assert look_ahead(view, 8) is None and state_left_out(view).endswith("checkpoint/step-2")
        checkpoint.exclude_from_loading, checkpoint.folder, checkpoint.load_step = [], "none", -1
        checkpoint.initial_load_path = f"{prefix}{tmp_path}/checkpoint/step-2"
        assert look_ahead(view, 8) is None  # the model alone
        checkpoint.initial_load_model_only = False
        assert look_ahead(view, 8).absent

    def test_says_how_many_lanes_a_run_has_that_goes_on(self, recipe, tokenizer, tmp_path):
        first = Trainer(config(recipe, canonical_replicas=4), tokenizer).dataloader
        dcp.save({"dataloader": first.state_dict()}, checkpoint_id=tmp_path / "checkpoint" / "step-2", no_dist=True)
        checkpoint = SimpleNamespace(enable=True, folder="checkpoint", load_step=-1, exclude_from_loading=[])
        second = Trainer(config(recipe), tokenizer, checkpoint=checkpoint, dump_folder=str(tmp_path)).dataloader
        assert sum(key.startswith("lane_") for key in second.state_dict()) == 4

    @pytest.mark.parametrize("more", ["", HELD])
    def test_is_read_by_the_command_from_a_checkpoint(self, recipe, tokenizer, tmp_path, more):
        recipe.write_text(more + recipe.read_text())
        saved, _ = self.saved(recipe, tokenizer, 2, 2)
        dcp.save({"dataloader": saved, "norm.weight": torch.ones(3), "step": 3}, checkpoint_id=tmp_path, no_dist=True)
        (state,) = read_states(tmp_path)
        assert state == from_keys(saved)[0]

    def test_is_not_looked_for_in_code_or_damage(self, recipe, tokenizer, tmp_path):
        dcp.save({"norm.weight": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
        with pytest.raises(CheckpointError, match="holds no state of Zephon"):
            read_states(tmp_path)

        class Code:
            def __reduce__(self):
                return pytest.fail, ("unpickled",)

        for content in (
            pickle.dumps(Code()),
            pickle.dumps([torch.load]),
            (tmp_path / ".metadata").read_bytes()[:90],
            b"",
        ):
            (tmp_path / ".metadata").write_bytes(content)
            with pytest.raises(CheckpointError, match="is no checkpoint that can be read"):
                read_states(tmp_path)

    def test_without_the_package_says_what_is_missing(self, monkeypatch, tmp_path):
        (tmp_path / ".metadata").touch()
        monkeypatch.setitem(sys.modules, "torchtitan_zephon", None)
        with pytest.raises(CheckpointError, match="expected torchtitan_zephon and what it needs to be installed here"):
            read_states(tmp_path)


class TestSkippedSteps:
    def test_are_left_out_and_stay_so_in_the_checkpoint(self, recipe, tokenizer):
        def rows(loader, count):
            return [row for inputs, _ in take(loader, count)[0] for row in inputs["input"].tolist()]

        whole = rows(Trainer(config(recipe), tokenizer).dataloader, 4 * 6)
        skipping = config(recipe, skip_steps=["2-3", "5"])
        first = Trainer(skipping, tokenizer).dataloader
        got = rows(first, 4)
        saved = first.state_dict()
        for again in (skipping, config(recipe)):  # a range that the checkpoint has may be named again, or not
            second = Trainer(again, tokenizer).dataloader
            second.load_state_dict(saved)
            assert got + rows(second, 2 * 4) == whole[:8] + whole[24:32] + whole[40:48]

    def test_that_are_used_already_are_refused(self, recipe, tokenizer):
        first = Trainer(config(recipe), tokenizer).dataloader
        take(first, 4 * 2)
        second = Trainer(config(recipe, skip_steps=["2-3"]), tokenizer).dataloader
        second.load_state_dict(first.state_dict())
        with pytest.raises(PipelineError, match="holds 2-3; expected steps after 2, whose data are used already"):
            take(second, 1)

    @pytest.mark.parametrize("text", ["0-4", "7-3", "1:2", "", "x"])
    def test_that_are_no_range_are_refused_when_built(self, recipe, tokenizer, text):
        with pytest.raises(RecipeError, match="a range such as 1000-1010"):
            Trainer(config(recipe, skip_steps=[text]), tokenizer)


class TestValidation:
    def test_counts_every_document_once_and_ends(self, recipe, tokenizer):
        # As TorchTitan's validator does for steps = -1; the recipe itself would repeat.
        batches = list(build(replace(config(recipe), infinite=False), tokenizer))
        for inputs, labels in batches:
            assert inputs["input"].shape == labels.shape == (2, SEQ)
        # The first token of a record is input only.
        tokens = [torch.cat([inputs["input"][:, :1], labels], dim=1) for inputs, labels in batches]
        real = [rows[labels.ne(IGNORE_INDEX).any(dim=1)] for rows, (_, labels) in zip(tokens, batches, strict=True)]
        assert sum(int((rows == tokenizer.eos_id).sum()) for rows in real) == 60 + 30
        assert any((labels == IGNORE_INDEX).any() for _, labels in batches)

    def test_is_known_by_the_validator_that_builds_the_loader(self, recipe, tokenizer):
        class Validator:
            """As on TorchTitan's main branch, where `repeat` is set for a bounded validation."""

            def __init__(self, config):
                self.dl_config = replace(config, repeat=True)

            def validate(self):
                sizes = {"max_context_length": SEQ, "num_tokens_per_batch": SEQ}
                return list(build(self.dl_config, tokenizer, **sizes))

        assert Validator(config(recipe)).validate()  # and it ends

    @pytest.mark.parametrize("steps", [3, 40])  # 40: more than a pass
    def test_of_some_steps_has_the_same_records_every_time_and_all_places_filled(self, recipe, tokenizer, steps):
        def rows(ranks):
            sizes = {"tokenizer": tokenizer, "seq_len": SEQ, "local_batch_size": 4 // ranks}
            bounded = replace(config(recipe), infinite=True)
            loaders = [bounded.build(dp_world_size=ranks, dp_rank=rank, **sizes) for rank in range(ranks)]
            taken = [take(loader, steps)[0] for loader in loaders]
            assert all(labels.ne(IGNORE_INDEX).any(dim=1).all() for batches in taken for _, labels in batches)
            return [row for step in zip(*taken, strict=True) for inputs, _ in step for row in inputs["input"].tolist()]

        assert rows(1) == rows(1) == rows(2)

    def test_leaves_no_threads_behind_when_it_stops_early(self, recipe, tokenizer):
        before = set(threading.enumerate())
        _, iterator = take(build(replace(config(recipe), infinite=True), tokenizer), 2)
        del iterator
        for thread in set(threading.enumerate()) - before:
            thread.join(5)
            assert not thread.is_alive()


def test_metrics_have_the_values_of_rows_left_out(faulty_recipe, tokenizer):
    loader = build(config(faulty_recipe, canonical_replicas=BATCH), tokenizer)
    used = sum(int(labels.shape[0]) for _, labels in loader)
    found = loader_metrics(loader, Progress())
    assert (found["zephon/skipped_rows/faulty"], found["zephon/failed_rows/faulty"]) == (20, 10)
    assert (found["zephon/skipped_rows/sound"], found["zephon/failed_rows/sound"]) == (0, 0)
    tokens = found["zephon/tokens/faulty"] + found["zephon/tokens/sound"]
    assert found["zephon/cursor"] == used
    assert found["zephon/padding(%)"] == pytest.approx(100 * (1 - tokens / (used * (SEQ + 1))))


def test_metrics_say_what_the_loader_did(recipe, tokenizer):
    loader = Trainer(config(recipe), tokenizer).dataloader
    _, iterator = take(loader, 3 * BATCH // 2)
    since, wait = replace(loader.progress), loader.progress.wait
    for _ in range(BATCH // 2 * 2):
        next(iterator)
    metrics = loader_metrics(loader, since)
    assert metrics["zephon/cursor"] == 5 * BATCH
    assert metrics["zephon/padding(%)"] == 0
    assert metrics["zephon/data_wait(s)"] == pytest.approx((loader.progress.wait - wait) / 2)  # of two steps
    assert metrics["zephon/mixture_target/a"] == pytest.approx(2 / 3)
    tokens = [metrics[f"zephon/tokens/{name}"] for name in ("a", "b")]
    assert sum(tokens) == 5 * BATCH * (SEQ + 1)  # what was used, not what lies ready
    assert metrics["zephon/mixture/a"] == tokens[0] / sum(tokens)
    assert metrics["zephon/skipped_rows/b"] == 0
    iterator.close()


def test_the_cpu_launcher_is_never_imported_on_its_own():
    assert "torchtitan_zephon.cpu_train" not in sys.modules
