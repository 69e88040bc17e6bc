"""The interface for integrations: what the data loader of a training framework needs besides `import zephon`.

An integration imports `zephon` and `zephon.loader` only. It takes sequence length, tokenizer, batch sizes and ranks
from its framework, gets batches from `Pipeline.from_recipe`, and stores the state in the framework's own checkpoints.
Here are keys of a recipe, lanes and ranks, the tokenizer, states, comparisons with data of an earlier run or of other
ranks, collective calls, evaluation and metrics.
"""

from __future__ import annotations

from zephon.columns.lane_start import LaneStart
from zephon.config.keys import Key, keys_of
from zephon.config.recipe import DataRecipe, SourceRecipe
from zephon.config.topology import Topology, check_division, resolve_lanes
from zephon.errors import Change
from zephon.pipeline import Pipeline
from zephon.run.fingerprint import FINGERPRINT_NAMES, check_allowed, check_fingerprint
from zephon.run.index import compact_index
from zephon.run.job import (
    Progress,
    any_rank,
    check_same_data,
    check_tokenizer,
    check_writable,
    evaluation_recipe,
    gather,
    is_distributed,
    job_metrics,
    on_all_ranks,
    on_first_rank,
)
from zephon.run.ledger import check_ledger
from zephon.run.report import Mixture
from zephon.run.state import RunState, merge_checkpoints
from zephon.tokenizer.tokenizer import Tokenizer
from zephon.vision.geometry import VisionSettings

__all__ = [
    "FINGERPRINT_NAMES",
    "Change",
    "Key",
    "LaneStart",
    "Mixture",
    "Progress",
    "RunState",
    "SourceRecipe",
    "Tokenizer",
    "Topology",
    "VisionSettings",
    "any_rank",
    "check_allowed",
    "check_division",
    "check_fingerprint",
    "check_ledger",
    "check_same_data",
    "check_tokenizer",
    "check_writable",
    "compact_index",
    "evaluation_recipe",
    "gather",
    "is_distributed",
    "job_metrics",
    "keys_of",
    "merge_checkpoints",
    "on_all_ranks",
    "on_first_rank",
    "open_once",
    "resolve_lanes",
]


def open_once(recipe: DataRecipe, *, tokenizer: str, seq_len: int, vision: VisionSettings | None = None) -> None:
    """Open the data of a recipe and close them, before the framework builds its model; lanes and batch are not checked.

    Raises:
        ZephonError: a path, column, filter or the tokenizer is wrong.
    """
    alone = recipe.replace(canonical_replicas=1, feeds="auto")
    pipeline = Pipeline.from_recipe(
        alone, tokenizer=tokenizer, seq_len=seq_len, microbatch_size=1, global_batch=1, vision=vision
    )
    pipeline.fingerprint()
