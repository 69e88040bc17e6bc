"""TorchTitan's real Trainer with a model that sees images, on the CPU."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from zephon.run.ledger import compare

pytest.importorskip("torchtitan")
pytest.importorskip("torchvision")
from support.torchtitan import Titan
from support.vision_data import file_of, image_tokenizer, picture

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(600)]
STEPS, SAVED = 4, 2
RECIPE = """
seed = 5
canonical_replicas = "auto"
chunk_size = 64
shuffle_buffer_size = 64
documents = "images"
max_images = 2
sources = [{ name = "pairs", path = "pairs.parquet" }]
"""


@pytest.fixture(scope="module")
def titan(tmp_path_factory):
    titan = Titan(tmp_path_factory.mktemp("titan"))
    choose = random.Random(0)
    images = [file_of(picture(choose.randint(20, 90), choose.randint(20, 90), seed=n)) for n in range(90)]
    captions = [f"picture {n} <|image_pad|> of " + "a thing " * choose.randint(1, 9) for n in range(90)]
    pq.write_table(pa.table({"image": images, "text": captions}), titan.folder / "pairs.parquet")
    titan.recipe.write_text(RECIPE)
    titan.validation[0].write_text("repeat = false\n" + RECIPE.replace("pairs.parquet", "held.parquet"))
    pq.write_table(pa.table({"image": images[:8], "text": captions[:8]}), titan.folder / "held.parquet")
    titan.tokenizer = image_tokenizer(titan.folder / "image-tokenizer")
    yield titan
    titan.close()


def run(titan, name, ranks, *more, **options):
    sizes = [f"--training.steps={STEPS}", f"--checkpoint.interval={SAVED}", "--training.local_batch_size=4"]
    config = "muse_glimmer_debugmodel_mm_zephon"
    return titan.run(name, ranks, *sizes, *more, config=config, **options)


def test_a_run_of_two_ranks_goes_on_at_one_with_the_same_images_and_losses(titan):
    base = run(titan, "base", 2, f"--validator.freq={STEPS}", validate=True)
    assert base.ok, base.logs[0]
    assert sorted(base.losses) == list(range(1, STEPS + 1))
    titan.copy_checkpoint("base", SAVED, "again")
    again = run(titan, "again", 1, f"--validator.freq={STEPS}", validate=True)
    assert again.ok, again.logs[0]
    assert sorted(again.losses) == list(range(SAVED + 1, STEPS + 1))
    expected = titan.digests("base")
    assert titan.digests("again") == {step: expected[step] for step in range(SAVED, STEPS)}
    assert compare(titan.ledger("base"), titan.ledger("again")) is None
    for step, loss in again.losses.items():
        assert loss == pytest.approx(base.losses[step], rel=1e-4)
    assert again.validation[STEPS] == pytest.approx(base.validation[STEPS], rel=1e-4)


def test_more_images_than_the_trainers_limit_end_the_run_before_its_first_step(titan):
    more = titan.folder / "more.toml"
    more.write_text(RECIPE.replace("max_images = 2", "max_images = 3"))
    refused = run(titan, "refused", 1, recipe=more)
    assert refused.codes == [1] and "max_images is 3; expected at most 2" in refused.logs[0]
    assert "Training starts" not in refused.logs[0]
