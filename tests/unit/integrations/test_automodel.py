"""The datasets in torchdata's StatefulDataLoader, as NeMo AutoModel uses them; test_automodel.py of the integration
tests runs AutoModel itself."""

import pytest

pytest.importorskip("torchdata")
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from zephon import CheckpointError, PipelineError
from zephon.integrations.automodel import ZephonDataset, ZephonEvaluationDataset

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]


def loader_of(recipe, tokenizer, **options):
    sizes = {"seq_len": 32, "microbatch_size": 2, "global_batch": 8}
    dataset = ZephonDataset(str(recipe), tokenizer=tokenizer and str(tokenizer), **{**sizes, **options})
    return StatefulDataLoader(dataset.shard(1, 0), batch_size=None)


def tokens(batches, count):
    """The tokens of the next `count` records."""
    rows = []
    while len(rows) < count:
        rows += next(batches)["input_ids"].tolist()
    return rows


def test_a_run_goes_on_after_the_batch_taken(recipe, tiny_tokenizer):
    """Also with other batches, and from a state that went through a file, as AutoModel loads it."""
    loader = loader_of(recipe, tiny_tokenizer)
    batches = iter(loader)
    first = next(batches)
    assert first["input_ids"].shape == (2, 32) and first["labels"][:, :-1].equal(first["input_ids"][:, 1:])
    assert tokens(batches, 14)
    torch.save(loader.state_dict(), recipe.parent / "state.pt")
    expected = tokens(batches, 16)
    again = loader_of(recipe, tiny_tokenizer, microbatch_size=1)
    again.load_state_dict(torch.load(recipe.parent / "state.pt", weights_only=True))
    assert tokens(iter(again), 16) == expected


def test_changes_are_refused_by_name_and_accepted_on_purpose(recipe, tiny_tokenizer):
    loader = loader_of(recipe, tiny_tokenizer)
    tokens(iter(loader), 8)
    state = loader.state_dict()
    recipe.write_text(recipe.read_text().replace("shuffle_buffer_size = 16", "shuffle_buffer_size = 8"))
    other = loader_of(recipe, tiny_tokenizer)
    other.load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"(?s)shuffle: was.*dataset\.allow_changes"):
        iter(other)
    accepted = loader_of(recipe, tiny_tokenizer, allow_changes=["shuffle"])
    accepted.load_state_dict(state)
    assert tokens(iter(accepted), 8)


def test_what_cannot_work_is_refused(recipe, tiny_tokenizer):
    with pytest.raises(PipelineError, match=r"tokenizer is None.*pretrained_model_name_or_path"):
        loader_of(recipe, None)
    dataset = loader_of(recipe, tiny_tokenizer).dataset
    with pytest.raises(PipelineError, match="num_workers is above 0; expected 0"):
        next(iter(StatefulDataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context="spawn")))


def test_every_validation_is_of_the_same_records(recipe, tiny_tokenizer):
    sizes = {"seq_len": 32, "microbatch_size": 2, "records": 6}
    dataset = ZephonEvaluationDataset(str(recipe), tokenizer=str(tiny_tokenizer), **sizes)
    loader = StatefulDataLoader(dataset.shard(1, 0), batch_size=None)
    first, second = ([batch["input_ids"].tolist() for batch in loader] for _ in range(2))
    assert len(first) == 3 and first == second
