"""The loaders of a job. Its ranks are threads here; the trainers' tests have processes."""

import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from zephon import CheckpointError, PipelineError, TopologyError
from zephon.loader import EvaluationLoader, JobLoader, data_parallel

BATCH = 8
RECIPE = """seed = 5
chunk_size = 40
shuffle_buffer_size = 16
canonical_replicas = 4
{more}
[[sources]]
name = "a"
path = "a.jsonl"
weight = 2.0
[[sources]]
name = "b"
path = "b.jsonl"
"""


@pytest.fixture
def recipe(tmp_path):
    for name, count in (("a", 60), ("b", 30)):
        texts = (f"{name} {i} " + "some words to fill the document " * (1 + i % 7) for i in range(count))
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.format(more=""))
    return path


class Job:
    """Ranks as threads; each function of a rank runs on all of them at the same time."""

    def __init__(self, size):
        self.size, self._values = size, [None] * size
        self._barrier = threading.Barrier(size, timeout=60)
        self._pool = ThreadPoolExecutor(size)

    def ranks(self, function):
        """The results of `function(rank, gather)` by rank."""

        def gather_as(rank):
            def gather(value):
                self._values[rank] = value
                self._barrier.wait()
                values = list(self._values)
                self._barrier.wait()
                return values

            return gather

        return list(self._pool.map(lambda rank: function(rank, gather_as(rank)), range(self.size)))


def loader_of(recipe, tokenizer, rank=0, size=1, microbatch=2, **options):
    sizes = {"seq_len": 32, "microbatch_size": microbatch, "global_batch": BATCH}
    return JobLoader(
        recipe, tokenizer=str(tokenizer), ranks=(rank, size), shape=lambda batch: batch, **sizes, **options
    )


def take(loader, batches):
    """The digests of records by sequence number."""
    found = {}
    for _, batch in zip(range(batches), loader, strict=False):  # in this order, which takes no batch too many
        found |= zip(batch.sequence_numbers.tolist(), batch.digests, strict=True)
    return found


def test_one_state_of_the_job_restores_any_number_of_ranks(recipe, tiny_tokenizer):
    expected = take(loader_of(recipe, tiny_tokenizer), 6 * 4)
    state = None
    for size, first in ((2, 0), (1, 2), (4, 4)):

        def run(rank, gather, size=size, state=state):
            loader = loader_of(recipe, tiny_tokenizer, rank, size, 1, gather=gather)
            if state is not None:
                loader.load_state_dict(state)
            records = take(loader, 2 * BATCH // size)
            after = loader.state_dict()
            loader.close()
            return records, after

        results = Job(size).ranks(run)
        records = {number: digest for each, _ in results for number, digest in each.items()}
        assert records == {n: expected[n] for n in range(first * BATCH, (first + 2) * BATCH)}
        state, *others = [json.loads(json.dumps(after)) for _, after in results]
        assert all(other == state for other in others) and len(state["lanes"]) == 4


@pytest.mark.parametrize("ahead", [0, 1, 3, 6])
def test_a_state_is_of_the_batches_consumed_and_others_are_given_again(recipe, tiny_tokenizer, ahead):
    whole = loader_of(recipe, tiny_tokenizer)
    expected, states = {}, []
    for _ in range(6):
        states.append(whole.state_dict())
        expected |= take(whole, 4)
    consumed = 1000  # the framework counts from anywhere
    loader = loader_of(recipe, tiny_tokenizer, consumed=lambda: consumed)
    assert loader.state_dict() == states[0]
    given = []
    for batch in loader:
        given.append(batch.sequence_numbers[0])
        consumed = 1000 + max(0, len(given) - ahead)
        assert loader.state_dict() == states[(consumed - 1000) // 4]
        if len(given) == 15:
            break
    after = 15 - ahead
    next(iter(loader))
    assert loader.state_dict() == states[after // 4]
    rest = take(loader, 24 - after)
    assert sorted(rest) == list(range(2 * after, 48)) and rest.items() <= expected.items()


def test_a_count_of_other_batches_is_refused(recipe, tiny_tokenizer):
    consumed = 0
    loader = loader_of(recipe, tiny_tokenizer, consumed=lambda: consumed)
    take(loader, 4)
    for consumed in (-1, 8):
        with pytest.raises(PipelineError, match=rf"consumed is {consumed} batches .* at most the 4 batches given"):
            loader.state_dict()


def test_other_data_and_foreign_states_are_refused_by_name(recipe, tiny_tokenizer, tmp_path):
    loader = loader_of(recipe, tiny_tokenizer, ledger=str(tmp_path / "ledger"))
    take(loader, 4)
    state = loader.state_dict()
    recipe.write_text(RECIPE.format(more="").replace("weight = 2.0", "weight = 3.0").replace("seed = 5", "seed = 6"))
    changed = loader_of(recipe, tiny_tokenizer)
    with pytest.raises(CheckpointError, match=r"seed: was 5, is 6") as refused:
        changed.load_state_dict(state, remedy="--allow")
    assert {"seed", "shuffle"} <= {change.name for change in refused.value.changes}
    for wrong in (None, {}, {"epoch": 1}, {**state, "rounds": 1}):
        with pytest.raises(CheckpointError, match=r"a state is a dict|this is a NoneType|the state is damaged"):
            changed.load_state_dict(wrong)


def test_the_end_of_the_data_is_an_end(recipe, tiny_tokenizer):
    recipe.write_text(RECIPE.format(more="repeat = false"))
    loader = loader_of(recipe, tiny_tokenizer)
    batches = len(list(loader))
    assert batches and batches % loader.batches_per_step == 0
    end = loader.state_dict()
    assert list(loader) == [] and loader.state_dict() == end
    again = loader_of(recipe, tiny_tokenizer)
    again.load_state_dict(end)
    assert list(again) == []


def test_sizes_that_do_not_divide_are_refused_on_all_ranks(recipe, tiny_tokenizer):
    def build(rank, gather):
        with pytest.raises(TopologyError, match="does not divide by 2 data-parallel groups x 3 records"):
            loader_of(recipe, tiny_tokenizer, rank, 2, 3, gather=gather)

    Job(2).ranks(build)


def test_ranks_with_other_data_are_told_apart(recipe, tiny_tokenizer):
    other = recipe.with_name("other.toml")
    other.write_text(RECIPE.format(more="").replace("seed = 5", "seed = 6"))

    def build(rank, gather):
        with pytest.raises(PipelineError, match="ranks 1 would read other data than rank 0: seed is 5"):
            loader_of([recipe, other][rank], tiny_tokenizer, rank, 2, gather=gather)

    Job(2).ranks(build)


@pytest.mark.parametrize("records", [16, None])
def test_an_evaluation_is_of_the_same_records_on_any_number_of_ranks(recipe, tiny_tokenizer, records):
    seen = []
    for size in (1, 4):

        def run(rank, gather, size=size):
            sizes = {"seq_len": 32, "microbatch_size": 2, "records": records}
            loader = EvaluationLoader(
                recipe, tokenizer=str(tiny_tokenizer), ranks=(rank, size), shape=lambda b: b, gather=gather, **sizes
            )
            first, again = take(loader, 1000), take(loader, 1000)
            assert first == again
            return first

        found = {}
        for each in Job(size).ranks(run):
            found |= each
        seen.append(found)
    if records:
        assert sorted(seen[0]) == list(range(records))
    assert seen[0].items() <= seen[1].items()


def test_the_records_of_an_evaluation_have_to_divide(recipe, tiny_tokenizer):
    for records, advice in ((10, "8 or 16"), (3, "8 or 16"), (0, "8 or 16")):
        with pytest.raises(TopologyError, match=f"are {records}; expected a multiple of 8, .* Use {advice}"):
            EvaluationLoader(
                recipe, tokenizer=str(tiny_tokenizer), seq_len=32, microbatch_size=8, records=records, ranks=(0, 1)
            )


def mesh(names, shape, place):
    return SimpleNamespace(
        mesh_dim_names=names, ndim=len(shape), size=lambda i: shape[i], get_coordinate=lambda: list(place)
    )


@pytest.mark.parametrize(
    ("names", "shape", "place", "expected"),
    [
        (("dp_replicate", "dp_shard", "tp"), (2, 3, 4), (1, 2, 3), (5, 6)),
        (("pp", "data_parallel", "tensor_parallel"), (2, 3, 4), (1, 2, 0), (2, 3)),
        (("tp",), (4,), (3,), (0, 1)),
        (("replicate", "shard"), (2, 2), (1, 0), (2, 4)),
        (None, (4,), (3,), (3, 4)),
    ],
)
def test_a_mesh_tells_data_parallel_ranks(names, shape, place, expected):
    assert data_parallel(mesh(names, shape, place)) == expected


def test_ranks_come_from_numbers_the_process_group_or_the_environment(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert data_parallel() == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert data_parallel() == (3, 8)
    group = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: 1, get_world_size=lambda: 2
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", group)
    assert data_parallel() == (1, 2)
    assert data_parallel((5, 6)) == (5, 6)


@pytest.mark.parametrize("ranks", [(2, 2), (-1, 2), (0, 0), ("a", 2), 3, mesh(("x", "tp"), (2, 2), (0, 0))])
def test_what_is_no_rank_is_refused(ranks):
    with pytest.raises(TopologyError, match=r"expected (two integers|names of data parallelism)"):
        data_parallel(ranks)
