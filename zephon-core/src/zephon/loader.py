"""What the data loader of a training framework needs besides `import zephon`; an integration imports these two alone.

An integration takes sequence length, tokenizer, batch sizes and ranks from its framework, has `Pipeline.from_recipe`
make the batches, and carries the state in the framework's own checkpoints.

The keys of a recipe
    `keys_of` a `DataRecipe` or a `SourceRecipe`: name, type, default and documentation, as `Key`.
Lanes and ranks
    `resolve_lanes`, `Topology`.
The tokenizer of the framework
    `load_tokenizer`, `Tokenizer`.
States
    `RunState` (a state, checked), `LaneStart` (one lane of it), `merge_checkpoints`.
Whether data are those of before, and of other ranks
    `Pipeline.fingerprint`, `check_fingerprint`, `check_allowed`, `check_ranks_agree`; `Change` in
    `CheckpointError.changes`.
Metrics
    `Progress`, `Mixture`, `loader_metrics`.
"""

from __future__ import annotations

from zephon.columns.lane_start import LaneStart
from zephon.config.keys import Key, keys_of
from zephon.config.recipe import SourceRecipe
from zephon.config.topology import Topology, resolve_lanes
from zephon.errors import Change
from zephon.run.fingerprint import FINGERPRINT_NAMES, check_allowed, check_fingerprint, check_ranks_agree
from zephon.run.report import Mixture, Progress, loader_metrics
from zephon.run.state import RunState, merge_checkpoints
from zephon.tokenizer.tokenizer import Tokenizer, load_tokenizer

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
    "check_allowed",
    "check_fingerprint",
    "check_ranks_agree",
    "keys_of",
    "load_tokenizer",
    "loader_metrics",
    "merge_checkpoints",
    "resolve_lanes",
]
