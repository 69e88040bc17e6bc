"""Zephon: raw documents in, training batches out, the same on any number of GPUs.

from zephon import Pipeline
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource, TokenEstimation

source = StaticMixtureWorkSource(
    datasets=[Dataset.from_path("wiki", "data/wiki"), Dataset.from_path("news", "data/news")],
    mixture={"wiki": 0.5, "news": 0.5},
    token_estimation=TokenEstimation(),
    seed=42,
)
pipeline = (
    Pipeline(source)
    .tokenize(tokenizer_id="gpt2", field="text", parallelism=4)
    .pack_flat(max_length=2048, algorithm="wrap")
    .shuffle(buffer_size=1024, seed=42)
    .batch(microbatch_size=8)
)
for batch in pipeline:
    train_step(batch.to_training())
"""

import sys

try:
    from zephon.batch import SampleBatch
    from zephon.config.recipe import DataRecipe
    from zephon.errors import (
        CheckpointError,
        DataError,
        PipelineError,
        RecipeError,
        TokenizerError,
        TopologyError,
        WorkerError,
        ZephonError,
    )
    from zephon.pipeline import Pipeline
    from zephon.run.state import merge_checkpoints
    from zephon.vision.geometry import VisionSettings
except KeyboardInterrupt:
    if sys.argv[0] == "-m" or sys.argv[0].endswith("zephon"):  # the command, which takes a moment to start
        sys.exit(130)
    raise

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "DataError",
    "DataRecipe",
    "Pipeline",
    "PipelineError",
    "RecipeError",
    "SampleBatch",
    "TokenizerError",
    "TopologyError",
    "VisionSettings",
    "WorkerError",
    "ZephonError",
    "__version__",
    "merge_checkpoints",
]
