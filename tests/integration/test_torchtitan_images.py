"""TorchTitan's real Trainer with a model that sees images, on the CPU."""

import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.forks import BATCH
from zephon.run.ledger import compare

pytest.importorskip("torchtitan")
pytest.importorskip("torchvision")
from support.torchtitan import Titan
from support.vision_data import file_of, image_tokenizer, picture

pytestmark = [pytest.mark.frameworks, pytest.mark.slow, pytest.mark.timeout(600)]
STEPS, SAVED = 4, 2
BUILDS = "total parameters"  # the log of the trainer once it has its config, before it makes any weight
WORDS = '    { name = "words", path = "words.parquet", documents = "text" },\n'
RECIPE = f"""
seed = 5
canonical_replicas = "auto"
chunk_size = 64
shuffle_buffer_size = 64
documents = "images"
max_images = 2
always_image = true
on_error = "skip"
sources = [
    {{ name = "pairs", path = "pairs.parquet", weight = 2.0 }},
{WORDS}]
"""


@pytest.fixture(scope="module")
def titan(tmp_path_factory):
    titan = Titan(tmp_path_factory.mktemp("titan"))
    choose = random.Random(0)
    images = [file_of(picture(choose.randint(20, 90), choose.randint(20, 90), seed=n)) for n in range(90)]
    captions = [f"picture {n} <|image_pad|> of " + "a thing " * choose.randint(1, 9) for n in range(90)]
    held = images[:8]
    images[5] = images[5][:-100]  # cannot be decoded
    pq.write_table(pa.table({"image": images, "text": captions}), titan.folder / "pairs.parquet")
    pq.write_table(pa.table({"text": [f"text {n} " * (1 + n % 20) for n in range(90)]}), titan.folder / "words.parquet")
    titan.recipe.write_text(RECIPE)
    held_out = RECIPE.replace("pairs.parquet", "held.parquet").replace(WORDS, "")
    titan.validation[0].write_text(f"repeat = false\n{held_out}")
    pq.write_table(pa.table({"image": held, "text": captions[:8]}), titan.folder / "held.parquet")
    titan.tokenizer = image_tokenizer(titan.folder / "image-tokenizer")
    yield titan
    titan.close()


def run(titan, name, ranks, *more, **options):
    local = f"--training.local_batch_size={BATCH // max(2, ranks)}"
    sizes = [f"--training.steps={STEPS}", f"--checkpoint.interval={SAVED}", local]
    config = "muse_glimmer_debugmodel_mm_zephon"
    return titan.run(name, ranks, *sizes, *more, config=config, **options)


@pytest.fixture(scope="module")
def base(titan):
    base = run(titan, "base", 2, f"--validator.freq={STEPS}", validate=True)
    assert base.ok, base.logs[0]
    assert BUILDS in base.logs[0]
    assert sorted(base.losses) == list(range(1, STEPS + 1))
    return base


@pytest.mark.parametrize("ranks", [1, pytest.param(4, marks=pytest.mark.deep)])
def test_a_run_of_two_ranks_goes_on_at_others_with_the_same_images_and_losses(titan, base, ranks):
    name = f"again-{ranks}"
    titan.copy_checkpoint("base", SAVED, name)
    again = run(titan, name, ranks, f"--validator.freq={STEPS}", validate=True)
    assert again.ok, again.logs[0]
    assert sorted(again.losses) == list(range(SAVED + 1, STEPS + 1))
    expected = titan.digests("base")
    assert titan.digests(name) == {step: expected[step] for step in range(SAVED, STEPS)}
    assert compare(titan.ledger("base"), titan.ledger(name)) is None
    for step, loss in again.losses.items():
        assert loss == pytest.approx(base.losses[step], rel=1e-4)
    assert again.validation[STEPS] == pytest.approx(base.validation[STEPS], rel=1e-4)


def test_limits_and_images_that_do_not_fit_the_trainer_are_refused_before_its_model_is_built(titan, base):
    for ranks, key, value, message in (
        (1, "max_images = 2", "max_images = 3", "max_images is 3; expected at most 2"),
        (2, "always_image = true", "", "always_image is false; expected true on 2 ranks, as words has no images"),
        (1, "max_images = 2", "max_images = 2\nmax_patches = 2", "max_patches is 2; expected at least 4"),
    ):
        recipe = titan.folder / "refused.toml"
        recipe.write_text(RECIPE.replace(key, value))
        refused = run(titan, "refused", ranks, recipe=recipe)
        assert refused.codes == [1] * ranks
        assert message in refused.logs[0]
        assert BUILDS not in refused.logs[0]
