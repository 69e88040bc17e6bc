"""Operators: what a pipeline does between rows and records."""

from .base import Job, Ordered, Orderer, PackCounts, Packer
from .batch import Batch
from .bins import BinPacker
from .chat import TokenizeChat
from .checks import Finding, check_operators
from .documents import DocumentWorker, Emitted, Encoder
from .expression import Expression
from .mixture import EnsureMixture, MixturePacker, TokenPlan, Turns
from .needs import Needs, columns_needed
from .pack import PackFlat, PackSequences, WrapPacker
from .pretokenized import Pretokenized
from .probe import Probed, Sample, probe
from .rows import (
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
from .shuffle import Passer, Shuffle, Shuffler
from .stateful import Stateful, StatefulStage, StatefulTransform, Window
from .tokenize import Tokenize, add_special_tokens

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
