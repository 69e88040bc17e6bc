"""Megatron's real pretrain(), with its checkpoints, on the CPU over gloo."""

import pytest
import torch

from zephon import Pipeline
from zephon.run.ledger import compare

pytest.importorskip("megatron.training")
from support.megatron import BATCH, SAVED, SEQ, STEPS, Megatron

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(600)]
PIPELINE = "--pipeline-model-parallel-size=2"
VIRTUAL = "--num-layers-per-virtual-pipeline-stage=1"


@pytest.fixture(scope="module")
def megatron(tmp_path_factory):
    megatron = Megatron(tmp_path_factory.mktemp("megatron"))
    yield megatron
    megatron.close()


@pytest.fixture(scope="module")
def uninterrupted(megatron):
    """Six steps on two ranks, saved at every second, in Megatron's format torch_dist; evaluated at every third."""
    run = megatron.run("base", 2, f"--tensorboard-dir={megatron.folder / 'tensorboard'}", *evaluation(megatron))
    assert run.ok, run.log
    assert sorted(run.losses) == list(range(1, STEPS + 1))
    assert sorted(megatron.digests("base")) == list(range(STEPS))
    return run


def evaluation(megatron) -> list[str]:
    # 20 documents make about four evaluation batches.
    return [f"--zephon-valid-data-config={megatron.validation[0]}", "--eval-iters=2", "--eval-interval=3"]


def assert_as_uninterrupted(megatron, uninterrupted, name: str, run, first: int = 1, without: int = 0) -> None:
    """`run` made the steps from `first` on as the uninterrupted run did: records and losses."""
    assert run.ok, run.log
    assert sorted(run.losses) == [step for step in range(first, STEPS + 1) if step != without]
    expected = megatron.digests("base")
    assert megatron.digests(name) == {step: expected[step] for step in range(first - 1, STEPS)}
    assert compare(megatron.ledger("base"), megatron.ledger(name)) is None
    for step, loss in run.losses.items():
        assert loss == pytest.approx(uninterrupted.losses[step], rel=1e-5)


def test_a_run_goes_on_and_evaluates_alike_at_other_numbers_of_ranks_and_again(megatron, uninterrupted):
    states = megatron.folder / "states"
    megatron.copy_checkpoint("base", "at1", SAVED)
    retain = ("--save-retain-interval=2", f"--dataloader-save={states}")
    run = megatron.run("at1", 1, *retain, *evaluation(megatron), save=1)
    assert_as_uninterrupted(megatron, uninterrupted, "at1", run, SAVED + 1)
    assert "the data go on from their saved state, at record 16" in run.log
    assert run.validation == pytest.approx(uninterrupted.validation, rel=1e-5)
    # The states of models that were not to be kept went with them.
    kept = sorted(path.name for path in states.glob("iter_*"))
    assert "iter_0000003" not in kept and {"iter_0000004", "iter_0000006"} <= set(kept)

    megatron.copy_checkpoint("at1", "at4", 4)
    again = megatron.run("at4", 4, f"--dataloader-load={states}", *evaluation(megatron), micro=1, save=None)
    assert_as_uninterrupted(megatron, uninterrupted, "at4", again, 5)
    for key, loss in again.validation.items():
        assert loss == pytest.approx(uninterrupted.validation[key], rel=1e-5)


def test_the_command_takes_the_state_from_the_folder_of_an_iteration(megatron, uninterrupted):
    states = megatron.folder / "base" / "model" / "dataloader" / f"iter_{SAVED:07d}"
    shown = megatron.show(f"1-{STEPS}", "--state", states, "--ledger", megatron.folder / "base" / "ledger")
    assert len(shown) == STEPS * BATCH and all(record["trained"] for record in shown)


def test_the_flush_index_of_a_run_makes_places_be_found_without_reading_what_lies_before(megatron):
    recipe = megatron.folder / "small-windows.toml"
    recipe.write_text(megatron.recipe.read_text().replace("chunk_size = 200", "chunk_size = 2"))
    assert megatron.run("indexed", 2, f"--zephon-data-config={recipe}").ok
    index = megatron.folder / "indexed" / "model" / "dataloader" / "zephon-windows"
    records, rows = [], []
    for folder in (None, index):
        options = {"tokenizer": megatron.tokenizer, "seq_len": SEQ, "microbatch_size": BATCH, "global_batch": BATCH}
        pipeline = Pipeline.from_recipe(recipe, **options, flush_index=folder).options(runner="inline").seek(step=5)
        records.append(next(iter(pipeline)).digests)
        rows.append(sum(each.rows for each in pipeline.mixture().values()))
        pipeline.close()
    assert records[0] == records[1] and rows[1] < rows[0]


@pytest.mark.parametrize(
    "name, ranks, more",
    [
        ("tensor", 2, ("--tensor-model-parallel-size=2",)),
        ("pipeline", 2, (PIPELINE,)),
        pytest.param(
            "tensor-mask",
            2,
            ("--tensor-model-parallel-size=2", "--create-attention-mask-in-dataloader"),
            marks=pytest.mark.deep,
        ),
        pytest.param("data-pipeline", 4, (PIPELINE,), marks=pytest.mark.deep),
    ],
)
def test_a_run_goes_on_in_every_parallelism(megatron, uninterrupted, name, ranks, more):
    # From a checkpoint of two data-parallel ranks, since fresh weights depend on how the model is cut.
    megatron.copy_checkpoint("base", name, SAVED)
    run = megatron.run(name, ranks, *more, save=4 if name == "pipeline" else None)
    assert_as_uninterrupted(megatron, uninterrupted, name, run, SAVED + 1)
    if name == "pipeline":  # its states lie in a folder of another name
        megatron.copy_checkpoint(name, "without-pipeline", 4)
        run = megatron.run("without-pipeline", 1, save=None)
        assert_as_uninterrupted(megatron, uninterrupted, "without-pipeline", run, 5)
        assert "from their saved state" in run.log


@pytest.mark.deep
def test_virtual_pipeline_stages_go_on_by_the_number_of_consumed_samples(megatron, uninterrupted):
    megatron.copy_checkpoint("base", "virtual", SAVED)
    run = megatron.run("virtual", 2, PIPELINE, VIRTUAL, save=4)
    assert_as_uninterrupted(megatron, uninterrupted, "virtual", run, SAVED + 1)
    assert "from their saved state" in run.log, "that of a run without virtual stages"
    # This version of Megatron saves no state there.
    assert not list((megatron.folder / "virtual" / "model" / "dataloader").glob("iter_0000004/*"))
    megatron.copy_checkpoint("virtual", "virtual-again", 4)
    run = megatron.run("virtual-again", 2, PIPELINE, VIRTUAL, save=None)
    assert_as_uninterrupted(megatron, uninterrupted, "virtual-again", run, 5)
    assert "virtual pipeline stages save no state of the data" in run.log
    refused = megatron.run("virtual-again", 2, PIPELINE, VIRTUAL, "--zephon-seed=7", save=None)
    assert refused.codes == [1, 1]
    assert "this run has read other data so far" in refused.log and "seed: was 5, is 7" in refused.log


@pytest.mark.deep
def test_legacy_checkpoints_do_as_well(megatron, uninterrupted):
    run = megatron.run("legacy", 2, ckpt="torch", steps=3)
    assert run.ok, run.log
    run = megatron.run("legacy", 1, ckpt="torch", save=None)
    assert run.ok and sorted(run.losses) == [4, 5, 6]
    assert megatron.digests("legacy") == megatron.digests("base")
    for step, loss in run.losses.items():
        assert loss == pytest.approx(uninterrupted.losses[step], rel=1e-5)


@pytest.mark.deep
def test_checkpoints_written_in_the_background_do_as_well(megatron, uninterrupted):
    megatron.copy_checkpoint("base", "async", SAVED)
    run = megatron.run("async", 2, "--async-save", steps=5)
    assert run.ok, run.log
    again = megatron.run("async", 1, save=None)
    assert again.ok, again.log
    assert "from their saved state, at record 40" in again.log
    assert again.losses[STEPS] == pytest.approx(uninterrupted.losses[STEPS], rel=1e-5)
    base = megatron.digests("base")
    assert megatron.digests("async") == {step: base[step] for step in range(SAVED, STEPS)}


def test_killed_between_saves_the_same_command_goes_on(megatron, uninterrupted):
    killed = megatron.run("killed", 2, ckpt="torch", kill_at=3)
    assert killed.codes == [-9, -9]
    again = megatron.run("killed", 2, ckpt="torch")
    assert again.ok, again.log
    assert "from their saved state, at record 16" in again.log
    # The ledger of both processes: records consumed twice must have been the same, or reading it raises.
    assert megatron.digests("killed") == megatron.digests("base")
    for step, loss in again.losses.items():
        assert loss == pytest.approx(uninterrupted.losses[step], rel=1e-5)


@pytest.mark.deep
def test_an_iteration_can_be_skipped(megatron, uninterrupted):
    megatron.copy_checkpoint("base", "skipped", SAVED)
    run = megatron.run("skipped", 2, "--iterations-to-skip", "4", save=5)
    assert run.ok, run.log
    assert sorted(run.losses) == [3, 5, 6]
    expected = megatron.digests("base")
    assert megatron.digests("skipped") == {step: expected[step] for step in range(SAVED, STEPS)}
    megatron.copy_checkpoint("skipped", "skipped-again", 5)
    again = megatron.run("skipped-again", 1, save=None)
    assert again.ok and "from their saved state, at record 40" in again.log
    assert again.losses[6] == pytest.approx(run.losses[6], rel=1e-5)
    assert megatron.digests("skipped-again") == {5: expected[5]}


@pytest.mark.deep
def test_an_iteration_to_be_rerun_elsewhere_has_its_own_batches(megatron, uninterrupted):
    # An injected error makes Megatron save before the second step, after that step's batches have been used.
    injected = megatron.run("rerun", 2, "--error-injection-rate=1", "--error-injection-type=persistent_error")
    assert set(injected.codes) == {16} and sorted(injected.losses) == [1]
    run = megatron.run("rerun", 1, "--rerun-mode=disabled", save=5)
    assert run.ok, run.log
    assert "the saved state is at record 16, the model is not" in run.log
    assert sorted(run.losses) == [2, 3, 4, 5, 6]
    assert megatron.digests("rerun") == megatron.digests("base")
    for step, loss in run.losses.items():
        assert loss == pytest.approx(uninterrupted.losses[step], rel=1e-5)
    assert saved_state(megatron, "rerun", 5)["iteration"] == 5


def saved_state(megatron, name: str, iteration: int, rank: int = 0):
    folder = megatron.folder / name / "model" / "dataloader" / f"iter_{iteration:07d}" / "mp_rank_00"
    file = folder / f"train_dataloader_dprank{rank:03d}.pt"
    return torch.load(file, weights_only=True)["dataloader_state_dict"]


def test_a_run_with_other_data_is_moved_over_with_its_iteration_and_optimizer(megatron, uninterrupted):
    states = megatron.copy_checkpoint("base", "moved", SAVED)
    for path in (*states.iterdir(), states.parents[1] / "zephon-data.json"):
        path.unlink()
    run = megatron.run("moved", 2, "--zephon-start-afresh", save=4, steps=4)
    assert run.ok, run.log
    assert "the data begin at record 0" in run.log and sorted(run.losses) == [3, 4]
    saved = saved_state(megatron, "moved", 4)
    assert (saved["consumed_train_samples"], saved["cursor"], saved["data_start"]) == (32, 16, 16)
    run = megatron.run("moved", 1, "--zephon-start-afresh", save=None)  # the option may stay
    assert run.ok, run.log
    assert "the data go on from their saved state, at record 16" in run.log and sorted(run.losses) == [5, 6]
    expected = megatron.digests("base")
    assert megatron.digests("moved") == {step: expected[step] for step in range(4)}
    counted = megatron.run("moved", 1, "--zephon-seek", save=None)
    assert counted.ok and "by the number of consumed samples, 16" in counted.log
    assert megatron.digests("moved") == {step: expected[step] for step in range(4)}


class TestStates:
    @pytest.mark.deep
    def test_of_former_ranks_and_damaged_ones_beside_a_whole_one_are_passed_over(self, megatron, uninterrupted):
        states = megatron.copy_checkpoint("base", "stale", SAVED)
        older = megatron.folder / "base" / "model" / "dataloader" / "iter_0000004" / "mp_rank_00"
        (states / "train_dataloader_dprank002.pt").write_bytes((older / "train_dataloader_dprank001.pt").read_bytes())
        (states / "train_dataloader_dprank003.pt").write_bytes(b"cut short")
        run = megatron.run("stale", 1, save=None)
        assert_as_uninterrupted(megatron, uninterrupted, "stale", run, SAVED + 1)

    @pytest.mark.parametrize(
        "what, message",
        [
            pytest.param("missing", "the saved state of the data for iteration 2", marks=pytest.mark.deep),
            pytest.param(
                "truncated",
                "is incomplete (*dprank001.pt is damaged or cut short; 1 file of a run on 2 ranks lack 4",
                marks=pytest.mark.deep,
            ),
            ("foreign", "the state was taken with other data; the data would differ:"),
        ],
    )
    def test_that_are_missing_or_do_not_fit_are_refused_on_all_ranks(self, megatron, uninterrupted, what, message):
        states = megatron.copy_checkpoint("base", what, SAVED)
        second = states / "train_dataloader_dprank001.pt"
        if what == "missing":
            for path in states.iterdir():
                path.unlink()
        if what == "truncated":
            second.write_bytes(second.read_bytes()[:-100])
        more = ["--zephon-seed=7"] if what == "foreign" else []
        refused = megatron.run(what, 2, *more, save=None)
        assert refused.codes == [1, 1]
        for log in refused.logs:
            for part in message.split("*"):
                assert part in log
            assert "loss of step" not in log
        if what == "missing":  # the way on that the message names
            assert "--zephon-seek" in refused.log
            run = megatron.run(what, 1, "--zephon-seek", save=None)
            assert_as_uninterrupted(megatron, uninterrupted, what, run, SAVED + 1)
        if what == "foreign":
            assert "seed: was 5, is 7" in refused.log
            run = megatron.run(what, 1, *more, "--zephon-allow-changes=seed,shuffle", save=None)
            assert run.codes == [1] and "seed cannot be accepted" in run.log

    def test_load_safely_and_say_where_the_run_is(self, megatron, uninterrupted):
        saved = saved_state(megatron, "base", 4, rank=1)
        assert (saved["iteration"], saved["consumed_train_samples"], saved["cursor"]) == (4, 32, 32)
        assert (saved["dp_size"], saved["dp_rank"]) == (2, 1)
        assert sorted(saved["zephon"]["lanes"]) == ["4", "5", "6", "7"] and saved["zephon"]["fingerprint"]

    @pytest.mark.deep
    def test_are_not_looked_for_by_a_fine_tuning(self, megatron, uninterrupted):
        megatron.copy_checkpoint("base", "finetune", SAVED)
        run = megatron.run("finetune", 1, "--finetune", save=None, steps=2)
        assert run.ok, run.log
        base = megatron.digests("base")
        assert megatron.digests("finetune") == {0: base[0], 1: base[1]}


@pytest.mark.deep
class TestEvaluation:
    def test_takes_the_same_records_every_time_and_includes_the_test_set(self, megatron):
        # Six evaluation batches: more than a pass.
        frozen = ("--lr=1e-12", f"--zephon-valid-data-config={megatron.validation[0]}", "--eval-iters=6")
        losses = megatron.run("frozen", 1, *frozen, "--eval-interval=1", save=None).validation
        assert len(losses) == STEPS and max(losses.values()) == pytest.approx(min(losses.values()), rel=1e-6)
        more = (
            f"--zephon-valid-data-config={megatron.validation[0]}",
            f"--zephon-test-data-config={megatron.validation[1]}",
            "--eval-iters=2",
            "--eval-interval=1",
        )
        whole = megatron.run("evaluated", 2, *more, save=3, steps=99)
        assert whole.ok, whole.log
        assert len(whole.validation) == STEPS + 2  # after training once more, and the test
        for ranks, micro in ((1, 2), (4, 1)):
            name = f"evaluated-{ranks}"
            megatron.copy_checkpoint("evaluated", name, 3)
            run = megatron.run(name, ranks, *more, save=None, steps=99, micro=micro)
            assert run.ok, run.log
            assert sorted(run.validation) == [key for key in sorted(whole.validation) if key[0] not in "123"]
            for key, loss in run.validation.items():
                assert loss == pytest.approx(whole.validation[key], rel=1e-5)

    def test_of_several_whole_sets_counts_every_document_once(self, megatron):
        more = (
            "--zephon-valid-data-config",
            *map(str, megatron.validation),
            "--multiple-validation-sets",
            "--full-validation",
            "--eval-interval=1",
        )
        losses = {}
        for ranks in (1, 2):
            run = megatron.run(f"sets{ranks}", ranks, *more, save=None, steps=1)
            assert run.ok, run.log
            losses[ranks] = run.validation
        assert sorted(losses[1]) == ["1-0", "1-1"]
        assert losses[1] == pytest.approx(losses[2], rel=1e-5)


@pytest.mark.deep
class TestBatchSizes:
    def test_may_grow_by_a_schedule(self, megatron):
        # From record 16 on (1,024 tokens) steps have 16 records: 8, 8, 16, 16, ...
        sizes = (f"--step-batch-size-schedule=0:8 {16 * SEQ}:16", "--train-samples=64", "--lr-decay-samples=999")
        whole = megatron.run("schedule", 2, save=None, sizes=sizes, steps=99)
        assert whole.ok and sorted(whole.losses) == [1, 2, 3, 4, 5], whole.log
        first = megatron.run("scheduled", 2, save=3, sizes=sizes, steps=3)
        assert first.ok, first.log
        rest = megatron.run("scheduled", 1, save=None, sizes=sizes, steps=99)
        assert rest.ok and "from their saved state, at record 32" in rest.log
        for step, loss in {**first.losses, **rest.losses}.items():
            assert loss == pytest.approx(whole.losses[step], rel=1e-5)
        assert compare(megatron.ledger("schedule"), megatron.ledger("scheduled")) is None
        assert megatron.digests("schedule") == megatron.digests("scheduled")

    def test_may_be_decreased_to_what_lanes_and_ranks_divide(self, megatron, uninterrupted):
        sizes = ("--global-batch-size=10", "--train-iters=6", "--lr-decay-iters=80", "--decrease-batch-size-if-needed")
        run = megatron.run(
            "decreased", 2, "--zephon-canonical-replicas=8", "--eval-global-batch-size=8", save=None, sizes=sizes
        )
        assert run.ok, run.log
        assert megatron.digests("decreased") == megatron.digests("base")

    def test_that_do_not_divide_are_refused_before_the_model_is_built_on_all_ranks(self, megatron):
        refused = megatron.run("refused", 2, "--zephon-canonical-replicas=6", save=None)
        assert refused.codes == [1, 1]
        for log in refused.logs:
            assert "Use canonical_replicas 2 or 4 or 8, or a global batch of 12 or 24" in log
            assert "number of parameters" not in log


@pytest.mark.deep
def test_the_ledger_of_another_run_is_refused_before_the_first_step(megatron, uninterrupted):
    ledger = f"--zephon-ledger={megatron.folder}/base/ledger"
    refused = megatron.run("foreign-ledger", 2, "--zephon-seed=7", ledger, save=None)
    assert refused.codes == [1, 1]
    for log in refused.logs:
        assert "--zephon-ledger is '" in log and "loss of step" not in log


@pytest.mark.deep
def test_options_of_megatrons_own_dataset_are_honoured(megatron, uninterrupted):
    more = ("--reset-position-ids", "--reset-attention-mask", "--eod-mask-loss")
    alone = megatron.run("honoured", 1, *more, save=None, steps=2)
    cut = megatron.run("honoured-2", 2, *more, save=None, steps=2)
    assert alone.ok and cut.ok, alone.log
    assert cut.losses == pytest.approx(alone.losses, rel=1e-5)
    assert abs(alone.losses[1] / uninterrupted.losses[1] - 1) > 1e-4


@pytest.mark.deep
def test_losses_that_depend_on_microbatches_are_logged_once_and_do_not_with_per_token_loss(megatron):
    more = ("--position-embedding-type=rope", "--no-rope-fusion", "--eod-mask-loss", "--num-workers=8")
    run = megatron.run("weighed", 2, *more, save=None, steps=1)
    assert run.ok, run.log
    for text in ("zephon: --num-workers is 8 and has no effect", "training depends on --micro-batch-size"):
        assert sorted(log.count(text) for log in run.logs) == [0, 1]
    losses = []
    for micro in (1, 4):
        run = megatron.run(f"by-token{micro}", 1, *more, "--calculate-per-token-loss", micro=micro, save=None, steps=3)
        assert run.ok and "training depends" not in run.log, run.log
        losses.append(run.losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.deep
def test_layers_for_multi_token_prediction_get_batches_on_their_stage(megatron):
    more = ("--mtp-num-layers=1", "--position-embedding-type=rope", "--no-rope-fusion", PIPELINE)
    run = megatron.run("mtp", 2, *more, save=None, steps=2)
    assert run.ok, run.log
    assert megatron.digests("mtp").keys() == {0, 1}


def test_the_loaders_metrics_are_in_the_log_line_and_tensorboard(megatron, uninterrupted):
    lines = [line for line in uninterrupted.logs[-1].splitlines() if " iteration " in line and "lm loss:" in line]
    assert len(lines) == STEPS
    for step, line in enumerate(lines, start=1):
        assert f"zephon/cursor: {step * BATCH:.6E} |" in line
        for name in ("data_wait(s)", "padding(%)", "tokens/a", "tokens/b"):
            assert f"zephon/{name}: " in line
    (events,) = (megatron.folder / "tensorboard").rglob("events.*")
    content = events.read_bytes()
    for name in (b"data_wait(s)", b"padding(%)", b"cursor", b"tokens/a", b"mixture/b", b"skipped_rows/a"):
        assert b"zephon/" + name in content


@pytest.mark.deep
def test_torchtitan_and_megatron_train_on_the_same_global_batches(megatron, uninterrupted, tmp_path):
    pytest.importorskip("torchtitan")
    from support.torchtitan import Titan

    titan = Titan(tmp_path)
    try:
        run = titan.run("base", 1, "--training.steps=3", recipe=megatron.recipe)
        assert run.ok, run.logs[0]
        assert compare(titan.ledger("base"), megatron.ledger("base")) is None
        base = megatron.digests("base")
        assert titan.digests("base") == {step: base[step] for step in range(3)}
    finally:
        titan.close()


@pytest.fixture(scope="module")
def whole(megatron):
    """Two microbatches as one rank alone gets them."""
    (made,) = megatron.batches("whole", 1)
    return made


@pytest.mark.deep
class TestBatchesOfARank:
    """`get_batch` with real process groups, where a model would need Transformer Engine."""

    def test_context_parallel_peers_hold_the_parts_of_the_same_samples(self, megatron, whole):
        for name, more in (("cp", ()), ("cp-packed", ("--dataloader-inter-document-masking",))):
            peers = megatron.batches(name, 2, "--context-parallel-size=2", *more)
            assert [peer[-1]["saves"] for peer in peers] == [True, False]  # one file for both
            for nth, batch in enumerate(whole):
                for field in ("tokens", "labels", "loss_mask"):
                    # Of four parts, the first rank has the first and the last, the second those between.
                    rows = batch[field] if name == "cp" else batch[field].reshape(1, -1)
                    quarter = rows.shape[1] // 4
                    first, second = (peer[nth][field] for peer in peers)
                    together = torch.cat([first[:, :quarter], second, first[:, quarter:]], dim=1)
                    assert torch.equal(together, rows)
                bounds = [peer[nth]["cu_seqlens"] for peer in peers]
                if name == "cp":
                    assert bounds == [None, None]
                else:  # the whole samples' on both
                    assert torch.equal(*bounds) and bounds[0][0, -1] == 2 * SEQ

    def test_packed_sequences_carry_the_bounds_of_documents(self, megatron, whole):
        for name, option in (("packed", "--dataloader-inter-document-masking"), ("sft", "--sft")):
            (made,) = megatron.batches(name, 1, option)
            for batch, plain in zip(made, whole, strict=True):
                assert torch.equal(batch["tokens"], plain["tokens"].reshape(1, -1))
                bounds = batch["cu_seqlens"][0]
                assert bounds.dtype == torch.int32 and bounds[0] == 0 and bounds[-1] == 2 * SEQ
                lengths = bounds.diff()
                assert (lengths > 0).all() and batch["max_seqlen"].tolist() == [lengths.max()]
                restarts = torch.cat([torch.arange(length) for length in lengths.tolist()])
                assert torch.equal(batch["position_ids"][0], restarts)

    def test_tensor_parallel_peers_get_packed_batches_by_broadcast(self, megatron, whole):
        first, second = megatron.batches(
            "packed-tp", 2, "--tensor-model-parallel-size=2", "--dataloader-inter-document-masking"
        )
        for a, b in zip(first, second, strict=True):
            for field in ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "max_seqlen"):
                assert torch.equal(a[field], b[field])

    def test_stages_inside_a_pipeline_get_the_bounds_only(self, megatron):
        stages = megatron.batches(
            "packed-pp", 3, "--pipeline-model-parallel-size=3", "--num-layers=3", "--dataloader-inter-document-masking"
        )
        for first, inside, last in zip(*stages, strict=True):
            assert inside["tokens"] is None and inside["labels"] is None
            assert first["tokens"] is not None and first["labels"] is None
            assert last["tokens"] is None and last["labels"] is not None
            assert torch.equal(first["cu_seqlens"], inside["cu_seqlens"])
            assert torch.equal(last["cu_seqlens"], inside["cu_seqlens"])
