"""Operators: what a pipeline does between rows and records."""

from zephon.ops.filter import Filter
from zephon.ops.functions import MapBatches, MapTransform, Operator
from zephon.ops.stateful import Stateful, StatefulTransform
from zephon.ops.text import DecodeText, TextTemplate

AddOp = MapBatches

__all__ = [
    "AddOp",
    "DecodeText",
    "Filter",
    "MapBatches",
    "MapTransform",
    "Operator",
    "Stateful",
    "StatefulTransform",
    "TextTemplate",
]
