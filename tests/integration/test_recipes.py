"""The recipes that come with the project run as they stand, on any number of groups."""

import shutil
from pathlib import Path

import pytest

from examples.corpus import build_demo
from support import step_digests
from zephon import Pipeline
from zephon.config.recipe import DataRecipe
from zephon.run.build import source_of

RECIPES = Path(__file__).parents[2] / "recipes"
BATCH, STEPS = 32, 3

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the recipes and what the demo builds."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(RECIPES, folder / "recipes")
    build_demo(folder / ".zephon" / "demo", vocab_size=2048)
    return folder


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.toml")))
def test_a_recipe_gives_the_same_global_batches_on_any_number_of_groups(place, name):
    path = place / "recipes" / f"{name}.toml"
    finite = source_of(DataRecipe.from_toml(path)).finite

    def steps(groups):
        pipelines = [
            Pipeline.from_recipe(
                path,
                tokenizer=place / ".zephon" / "demo" / "tokenizer",
                seq_len=256,
                microbatch_size=4,
                dp_degree=groups,
                dp_group_id=group,
                global_batch=BATCH,
                combine_flag=bool if finite else None,
            )
            for group in range(groups)
        ]
        made = step_digests(pipelines, STEPS, BATCH)
        for pipeline in pipelines:
            pipeline.close()
        return made

    assert steps(1) == steps(4)
