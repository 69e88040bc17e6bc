"""Tokens, labels and positions as a trainer takes them, made for many records at once before they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class FieldForm(NamedTuple):
    """How a batch gives its tokens; see `SampleBatch.to_training`."""

    dtype: np.dtype[Any]
    shift_labels: bool
    position_mode: str | None


class FieldsAhead:
    """The form that the last batch was asked for, in which the engine's thread makes the fields of the next ones."""

    form: FieldForm | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Fields:
    """input_ids, labels, of which none is ignored, and position_ids of n records; see `SampleBatch.to_training`."""

    form: FieldForm
    arrays: dict[str, np.ndarray]

    def slice(self, start: int, stop: int) -> Fields:
        """Those of records `start:stop`, as views."""
        return Fields(self.form, {name: array[start:stop] for name, array in self.arrays.items()})

    @staticmethod
    def concat(parts: Sequence[Fields | None]) -> Fields | None:
        """Those of all parts; None unless all have them in one form."""
        made = [part for part in parts if part is not None]
        if len(made) < len(parts) or len({part.form for part in made}) > 1:
            return None
        names = made[0].arrays
        return Fields(made[0].form, {name: np.concatenate([part.arrays[name] for part in made]) for name in names})
