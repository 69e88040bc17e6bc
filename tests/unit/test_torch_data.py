"""A pipeline inside PyTorch's data loaders."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from support.operator_data import shout
from zephon import Pipeline, PipelineError
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

PROCESS, ISOLATED = {"runner": "process"}, {"isolate": True}
CONTEXTS = ["fork", pytest.param("spawn", marks=pytest.mark.deep)]


def build(tokenizer, *, repeat=True, **options):
    data = Dataset.from_dict("d", {"text": [f"text number {n} " * (n % 9) or "none" for n in range(200)]})
    source = StaticMixtureWorkSource(datasets=[data], repeat=repeat, chunk_size=20)
    pipeline = Pipeline(source).options(canonical_replicas=2, **options).map_transform(shout)
    return pipeline.tokenize(tokenizer, parallelism=1).pack_flat(31).shuffle(16).batch(2)


def wanted(tokenizer, count, **options):
    pipeline = build(tokenizer, **options)
    made = [batch.to_training() for _, batch in zip(range(count), pipeline, strict=False)]
    pipeline.close()
    return made


def taken(loader, count):
    return [fields for _, fields in zip(range(count), loader, strict=False)]


def same(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("workers", "options"),
    [
        (1, {}),
        (0, ISOLATED),
        *(pytest.param(*each, marks=pytest.mark.deep) for each in [(0, {}), (1, PROCESS), (0, PROCESS), (1, ISOLATED)]),
    ],
)
def test_loaders_give_the_batches_of_the_pipeline(tiny_tokenizer, workers, options):
    loader = DataLoader(build(tiny_tokenizer, **options).torch_dataset(), batch_size=None, num_workers=workers)
    same(taken(loader, 6), wanted(tiny_tokenizer, 6))
    other = build(tiny_tokenizer, **options).torch_dataset(return_loss_mask=True, position_mode=None)
    (fields,) = taken(DataLoader(other, batch_size=None, num_workers=workers), 1)
    assert sorted(fields) == ["input_ids", "labels", "loss_mask"]


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_stateful_loader_goes_on_from_its_state_with_or_without_a_worker(tiny_tokenizer, context):
    batches = wanted(tiny_tokenizer, 12)
    loader = StatefulDataLoader(
        build(tiny_tokenizer).torch_dataset(), batch_size=None, num_workers=1, multiprocessing_context=context
    )
    got, stream = [], iter(loader)
    for _ in range(5):
        got.append(next(stream))
    state = loader.state_dict()
    del stream
    again = StatefulDataLoader(
        build(tiny_tokenizer).torch_dataset(), batch_size=None, num_workers=1, multiprocessing_context=context
    )
    again.load_state_dict(state)
    got += taken(again, 3)
    same(got, batches[:8])
    alone = StatefulDataLoader(build(tiny_tokenizer, isolate=True).torch_dataset(), batch_size=None)
    more = taken(alone, 4)
    state = alone.state_dict()
    further = StatefulDataLoader(build(tiny_tokenizer).torch_dataset(), batch_size=None)
    further.load_state_dict(state)
    same([*more, *taken(further, 3)], batches[:7])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_finite_pipeline_ends_and_starts_over(tiny_tokenizer, workers):
    batches = wanted(tiny_tokenizer, 10**6, repeat=False)
    loader = DataLoader(build(tiny_tokenizer, repeat=False).torch_dataset(), batch_size=None, num_workers=workers)
    same(taken(loader, 10**6), batches)
    same(taken(loader, 10**6), batches)


def test_state_of_a_plain_loader_without_workers_is_that_of_the_pipeline(tiny_tokenizer):
    pipeline = build(tiny_tokenizer)
    dataset = pipeline.torch_dataset()
    taken(DataLoader(dataset, batch_size=None), 3)
    assert dataset.state_dict() == pipeline.checkpoint()
    other = build(tiny_tokenizer).torch_dataset()
    other.load_state_dict(dataset.state_dict())
    same(taken(DataLoader(other, batch_size=None), 2), wanted(tiny_tokenizer, 5)[3:])


@pytest.mark.parametrize("context", CONTEXTS)
def test_asking_here_for_the_state_of_a_worker_is_refused(tiny_tokenizer, context):
    dataset = build(tiny_tokenizer).torch_dataset()
    dataset.state_dict()  # of the start
    taken(DataLoader(dataset, batch_size=None, num_workers=1, multiprocessing_context=context), 2)
    with pytest.raises(PipelineError, match=r"runs in a worker process of the DataLoader.*StatefulDataLoader"):
        dataset.state_dict()


def test_several_workers_are_refused_with_the_reason(tiny_tokenizer, monkeypatch):
    monkeypatch.setattr("zephon.torch_data.get_worker_info", lambda: SimpleNamespace(num_workers=2))
    with pytest.raises(PipelineError, match="num_workers is 2; expected 0 or 1, since every worker would yield all"):
        iter(build(tiny_tokenizer).torch_dataset())


def test_an_option_that_is_none_is_refused_at_once(tiny_tokenizer):
    with pytest.raises(PipelineError, match='unknown option of torch_dataset "batch_size"'):
        build(tiny_tokenizer).torch_dataset(batch_size=3)


@pytest.mark.parametrize("size", [{}, {"batch_size": 3}])
def test_batches_of_batches_and_a_bare_pipeline_are_refused_with_the_remedy(tiny_tokenizer, size):
    for loader in (DataLoader, StatefulDataLoader):
        with pytest.raises(
            PipelineError, match=r"batch_size is \d or more; expected batch_size=None in the DataLoader"
        ):
            next(iter(loader(build(tiny_tokenizer).torch_dataset(), **size)))
        with pytest.raises(TypeError, match=r"takes pipeline.torch_dataset\(\) and batch_size=None"):
            next(iter(loader(build(tiny_tokenizer), **size)))
    assert build(tiny_tokenizer) and len([*zip(range(2), build(tiny_tokenizer), strict=False)]) == 2
    assert len(list(build(tiny_tokenizer, repeat=False))) > 2
