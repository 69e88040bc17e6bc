"""Operators: what a pipeline does between rows and records."""

from zephon.ops.base import Job, Ordered, Orderer, PackCounts, Packer
from zephon.ops.batch import Batch
from zephon.ops.bins import BinPacker
from zephon.ops.chat import TokenizeChat
from zephon.ops.checks import Finding, check_operators
from zephon.ops.documents import DocumentWorker, Emitted, Encoder
from zephon.ops.encode import add_special_tokens
from zephon.ops.expression import Expression
from zephon.ops.mixture import EnsureMixture, MixturePacker, TokenPlan, Turns
from zephon.ops.needs import Needs, columns_needed
from zephon.ops.pack import PackFlat, PackSequences, WrapPacker
from zephon.ops.pretokenized import Pretokenized
from zephon.ops.probe import Probed, Sample, probe
from zephon.ops.rows import (
    AddOp,
    DecodeText,
    Filter,
    MapBatches,
    MapTransform,
    Operator,
    RowOperator,
    TextTemplate,
    types_of,
)
from zephon.ops.shuffle import Passer, Shuffle, Shuffler
from zephon.ops.stateful import Stateful, StatefulStage, StatefulTransform, Window
from zephon.ops.tokenize import Tokenize

__all__ = [
    "AddOp",
    "Batch",
    "BinPacker",
    "DecodeText",
    "DocumentWorker",
    "Emitted",
    "Encoder",
    "EnsureMixture",
    "Expression",
    "Filter",
    "Finding",
    "Job",
    "MapBatches",
    "MapTransform",
    "MixturePacker",
    "Needs",
    "Operator",
    "Ordered",
    "Orderer",
    "PackCounts",
    "PackFlat",
    "PackSequences",
    "Packer",
    "Passer",
    "Pretokenized",
    "Probed",
    "RowOperator",
    "Sample",
    "Shuffle",
    "Shuffler",
    "Stateful",
    "StatefulStage",
    "StatefulTransform",
    "TextTemplate",
    "TokenPlan",
    "Tokenize",
    "TokenizeChat",
    "Turns",
    "Window",
    "WrapPacker",
    "add_special_tokens",
    "check_operators",
    "columns_needed",
    "probe",
    "types_of",
]
