"""TorchTitan's real Trainer, with FSDP and its distributed checkpoint, on the CPU over gloo."""

import pickle
from pathlib import Path

import pytest

from zephon.run.ledger import compare

pytest.importorskip("torchtitan")
from support.forks import BATCH
from support.torchtitan import SAVED, STEPS, Titan

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(600)]
METRICS = (b"data_wait(s)", b"padding(%)", b"cursor", b"tokens/a", b"mixture/b", b"skipped_rows/a")
PIPELINE = (
    "--parallelism.pipeline_parallel_degree=2",
    "--parallelism.pipeline_parallel_schedule=1F1B",
    "--training.local_batch_size=4",  # in microbatches of one
)


@pytest.fixture(scope="module")
def titan(tmp_path_factory):
    titan = Titan(tmp_path_factory.mktemp("titan"))
    yield titan
    titan.close()


@pytest.fixture(scope="module")
def uninterrupted(titan):
    """Six steps on two ranks, saved at the third, validated at the last."""
    run = titan.run("base", 2, "--metrics.enable_tensorboard", f"--validator.freq={STEPS}", validate=True)
    assert run.ok, run.logs[0]
    assert sorted(run.losses) == list(range(1, STEPS + 1))
    assert sorted(titan.digests("base")) == list(range(STEPS))
    return run


def assert_goes_on(titan, uninterrupted, name: str, run, first: int = SAVED + 1) -> None:
    """`run` made the steps from `first` on as the uninterrupted run did: records and losses."""
    assert run.ok, run.logs[0]
    assert sorted(run.losses) == list(range(first, STEPS + 1))
    expected = titan.digests("base")
    assert titan.digests(name) == {step: expected[step] for step in range(first - 1, STEPS)}
    assert compare(titan.ledger("base"), titan.ledger(name)) is None
    for step, loss in run.losses.items():
        assert loss == pytest.approx(uninterrupted.losses[step], rel=1e-4)


def test_the_loaders_metrics_are_among_torchtitans_own(titan, uninterrupted):
    (events,) = (titan.folder / "base" / "tb").rglob("events.*")
    for name in METRICS:
        assert b"zephon/" + name in events.read_bytes()


def test_the_command_takes_the_state_from_torchtitans_checkpoint(titan, uninterrupted):
    checkpoint = titan.folder / "base" / "checkpoint" / f"step-{SAVED}"
    shown = titan.show(f"1-{STEPS}", "--state", checkpoint, "--ledger", titan.folder / "base" / "ledger")
    assert len(shown) == STEPS * BATCH and all(record["trained"] for record in shown)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_run_of_two_ranks_goes_on_and_validates_alike_on_other_numbers_of_ranks(titan, uninterrupted, ranks):
    if ranks == 1:  # a run of its own, from the other's checkpoint
        path = titan.folder / "base" / "checkpoint" / f"step-{SAVED}"
        more = [f"--checkpoint.initial_load_path={path}", "--checkpoint.no-initial_load_model_only"]
    else:
        titan.copy_checkpoint("base", SAVED, f"at{ranks}")
        more = ["--checkpoint.interval=4"]
    run = titan.run(f"at{ranks}", ranks, f"--validator.freq={STEPS}", *more, validate=True)
    assert_goes_on(titan, uninterrupted, f"at{ranks}", run)
    # Every document of the validation counts once, and all ranks end at the same step.
    assert run.validation[STEPS] == pytest.approx(uninterrupted.validation[STEPS], rel=1e-4)


@pytest.mark.deep
def test_a_resumed_run_can_be_resumed(titan, uninterrupted):
    titan.copy_checkpoint("base", SAVED, "first")
    assert titan.run("first", 4, "--checkpoint.interval=4").ok
    titan.copy_checkpoint("first", 4, "again")
    assert_goes_on(titan, uninterrupted, "again", titan.run("again", 1, "--checkpoint.async_mode=async"), 5)


@pytest.mark.deep
def test_on_as_many_ranks_as_before_with_old_checkpoints_pruned_and_wandb(titan, uninterrupted):
    titan.copy_checkpoint("base", SAVED, "at2")
    more = ["--checkpoint.interval=1", "--checkpoint.keep_latest_k=2", "--metrics.enable_wandb"]
    run = titan.run("at2", 2, *more, env={"WANDB_MODE": "offline", "WANDB_SILENT": "true"})
    assert_goes_on(titan, uninterrupted, "at2", run)
    kept = {path.name for path in (titan.folder / "at2" / "checkpoint").iterdir()}
    assert {"step-5", "step-6"} <= kept and "step-3" not in kept  # step-4 goes, or the process first
    (log,) = (titan.folder / "at2").rglob("run-*.wandb")
    for name in METRICS:
        assert b"zephon/" + name in log.read_bytes()


def test_killed_between_saves_the_same_command_goes_on(titan, uninterrupted):
    killed = titan.run("killed", 2, "--checkpoint.interval=2", kill_at=3)
    assert killed.codes == [-9, -9]
    assert not (titan.folder / "killed" / "checkpoint" / "step-4" / ".metadata").exists()
    again = titan.run("killed", 2, "--checkpoint.interval=2")
    assert again.ok, again.logs[0]
    # The ledger of both processes: records consumed twice must have been the same, or reading it raises.
    assert titan.digests("killed") == titan.digests("base")
    assert again.losses[STEPS] == pytest.approx(uninterrupted.losses[STEPS], rel=1e-4)


def test_changed_data_are_refused_and_accepted_on_purpose(titan, uninterrupted):
    titan.copy_checkpoint("base", SAVED, "changed")
    refused = titan.run("changed", 1, "--dataloader.seed=7")
    assert refused.codes == [1] and "seed: was 5, is 7" in refused.logs[0]
    more = ["--dataloader.shuffle_buffer_size=16", "--dataloader.allow_changes=shuffle"]
    accepted = titan.run("changed", 1, *more)
    assert accepted.ok and sorted(accepted.losses) == [4, 5, 6]
    assert titan.digests("changed")[3] != titan.digests("base")[3]


@pytest.mark.deep
def test_another_number_of_lanes_is_refused(titan, uninterrupted):
    titan.copy_checkpoint("base", SAVED, "lanes")
    refused = titan.run("lanes", 2, "--dataloader.canonical_replicas=4")
    assert any(refused.codes)
    for log in refused.logs:
        assert "is of a run with 8 lanes (canonical_replicas), this run has 4" in log


@pytest.mark.deep
def test_a_checkpoint_without_the_loaders_state_is_refused_until_the_data_are_to_start_afresh(titan, uninterrupted):
    titan.copy_checkpoint("base", SAVED, "foreign")
    _rename_keys(titan.folder / "foreign" / "checkpoint" / f"step-{SAVED}", "dataloader.", "other.")
    refused = titan.run("foreign", 2)
    assert all(refused.codes)
    assert "holds no data loader's state" in refused.logs[0] and "--dataloader.start_afresh" in refused.logs[0]
    afresh = titan.run("foreign", 1, "--dataloader.start_afresh")
    assert afresh.ok, afresh.logs[0]
    assert sorted(afresh.losses) == [4, 5, 6]
    base = titan.digests("base")
    assert titan.digests("foreign") == {step: base[step] for step in range(3)}


def _rename_keys(path: Path, old: str, new: str) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    for part in (metadata.state_dict_metadata, metadata.planner_data):
        for key in [key for key in part if key.startswith(old)]:
            part[new + key.removeprefix(old)] = part.pop(key)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "more, validate, message",
    [
        (
            "--dataloader.canonical_replicas=6",
            False,
            "Use canonical_replicas 2 or 4 or 8, or a global batch of 6 or 12",
        ),
        pytest.param("--training.global_batch_size=-1", False, 'canonical_replicas is "auto"', marks=pytest.mark.deep),
        ("--validator.dataloader.sources.0.path=nowhere", True, "nowhere' does not exist"),
    ],
)
def test_misconfigured_runs_end_on_every_rank_before_the_model_is_built(titan, more, validate, message):
    run = titan.run("misconfigured", 2, more, validate=validate)
    assert run.codes == [1, 1]
    for log in run.logs:
        assert message in log and "total parameters" not in log


@pytest.mark.deep
def test_the_ledger_of_another_run_is_refused_before_the_first_step(titan, uninterrupted):
    refused = titan.run("foreign-ledger", 2, "--dataloader.seed=7", f"--dataloader.ledger={titan.folder}/base/ledger")
    assert refused.codes == [1, 1]
    for log in refused.logs:
        assert "dataloader.ledger is '" in log and "Training starts" not in log


@pytest.mark.deep
def test_ranks_that_would_read_different_data_are_refused(titan):
    other = titan.folder / "other.toml"
    other.write_text(titan.recipe.read_text().replace('path = "a"', 'path = "b"'))
    run = titan.run("apart", 2, last_env={"ZEPHON_RECIPE": str(other)})
    assert run.codes == [1, 1]
    for log in run.logs:
        assert "ranks 1 would read other data than rank 0: dataset a is" in log


@pytest.mark.parametrize(
    "name, ranks, more",
    [
        pytest.param(
            "hsdp",
            4,
            ("--parallelism.data_parallel_replicate_degree=2", "--parallelism.data_parallel_shard_degree=2"),
            marks=pytest.mark.deep,
        ),
        ("tensor-parallel", 2, ("--parallelism.tensor_parallel_degree=2",)),
        ("pipeline-parallel", 2, PIPELINE),
    ],
)
def test_other_parallelisms_see_the_same_global_batches(titan, uninterrupted, name, ranks, more):
    titan.copy_checkpoint("base", SAVED, name)
    assert_goes_on(titan, uninterrupted, name, titan.run(name, ranks, *more))


@pytest.mark.deep
def test_a_validation_whose_records_fill_no_whole_steps_of_pipeline_parallelism_counts_them_all(titan, uninterrupted):
    losses = []
    for ranks, more in ((1, ()), (2, PIPELINE)):
        titan.copy_checkpoint("base", SAVED, f"uneven{ranks}")
        more = [*more, "--training.steps=4", "--validator.freq=4", "--validator.dataloader.canonical_replicas=1"]
        run = titan.run(f"uneven{ranks}", ranks, *more, validate=True)
        assert run.ok, run.logs[0]
        losses.append(run.validation[4])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.deep
def test_a_finite_run_ends_at_the_same_step_and_loss_on_any_number_of_ranks(titan):
    ends, losses = [], []
    for ranks, local in ((1, 8), (1, 1), (4, 1)):
        more = ["--training.steps=99", f"--training.local_batch_size={local}", "--checkpoint.interval=99"]
        more.append("--dataloader.feeds=8")  # lanes end apart, so that many places of the last steps are empty
        run = titan.run(f"finite{ranks}{local}", ranks, *more, recipe=titan.validation[0])
        assert run.ok and "Ran out of data" in run.logs[0], run.logs[0]
        ends.append((max(run.losses), titan.digests(f"finite{ranks}{local}")))
        losses.append(run.losses)
    assert ends[0] == ends[1] == ends[2] and len(ends[0][1]) == ends[0][0] < 50
    # By valid tokens, whatever the microbatch; fresh weights depend on the number of ranks.
    assert losses[0] == pytest.approx(losses[1], rel=2e-5)
