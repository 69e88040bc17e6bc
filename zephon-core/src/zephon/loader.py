"""The interface for integrations: what the data loader of a training framework needs besides `import zephon`.

An integration imports `zephon` and `zephon.loader` only. It takes sequence length, tokenizer, batch sizes and ranks
from its framework, gets batches from `Pipeline.from_recipe`, and stores the state in the framework's own checkpoints.

The keys of a recipe
    `keys_of` a `DataRecipe` or a `SourceRecipe`: name, type, default and documentation, as `Key`.
Lanes and ranks
    `resolve_lanes`, `Topology`.
The tokenizer of the framework
    `check_tokenizer`, `Tokenizer`.
States
    `RunState` (a validated state), `LaneStart` (the state of one lane), `merge_checkpoints`.
Comparing the data with those of an earlier run or of other ranks
    `Pipeline.fingerprint`, `check_fingerprint`, `check_allowed`, `check_same_data`; `Change` in
    `CheckpointError.changes`.
Collective calls
    `gather`, `on_all_ranks`, `on_first_rank`, `any_rank`, `is_distributed`.
Folders
    `check_writable`.
Evaluation
    `evaluation_recipe`.
Metrics
    `Progress`, `Mixture`, `job_metrics`.
"""

from __future__ import annotations

from zephon.columns.lane_start import LaneStart
from zephon.config.keys import Key, keys_of
from zephon.config.recipe import SourceRecipe
from zephon.config.topology import Topology, resolve_lanes
from zephon.errors import Change
from zephon.run.fingerprint import FINGERPRINT_NAMES, check_allowed, check_fingerprint
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
from zephon.run.report import Mixture
from zephon.run.state import RunState, merge_checkpoints
from zephon.tokenizer.tokenizer import Tokenizer

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
    "any_rank",
    "check_allowed",
    "check_fingerprint",
    "check_same_data",
    "check_tokenizer",
    "check_writable",
    "evaluation_recipe",
    "gather",
    "is_distributed",
    "job_metrics",
    "keys_of",
    "merge_checkpoints",
    "on_all_ranks",
    "on_first_rank",
    "resolve_lanes",
]
