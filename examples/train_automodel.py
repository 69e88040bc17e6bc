"""NeMo AutoModel's recipe on a machine without a GPU, started by torchrun; docs/automodel.md.

AutoModel builds models on a GPU, so the model is built here. All else is its own: data loader, steps, checkpoints.
"""

from typing import Any

import torch
from nemo_automodel.components.config._arg_parser import parse_args_and_load_config
from nemo_automodel.recipes.llm import train_ft
from torch.nn.parallel import DistributedDataParallel


def build_model(config: Any, *_: Any, **__: Any) -> torch.nn.Module:
    """The model of the YAML file, the same on every process."""
    torch.manual_seed(1)
    return DistributedDataParallel(config.instantiate())


def main() -> None:
    """Train as the YAML file of `--config` says."""
    train_ft.build_model = build_model
    torch.cuda.reset_peak_memory_stats = lambda *_: None  # which fails without a GPU
    recipe = train_ft.TrainFinetuneRecipeForNextTokenPrediction(parse_args_and_load_config())
    recipe.setup()
    recipe.run_train_validation_loop()


if __name__ == "__main__":
    main()
