"""The operators of a pipeline, each at its place."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from zephon.errors import PipelineError
from zephon.ops.batch import Batch
from zephon.ops.chat import TokenizeChat
from zephon.ops.encode import EncodeOptions
from zephon.ops.images import TokenizeImages
from zephon.ops.mixture import EnsureMixture
from zephon.ops.pack import PackFlat
from zephon.ops.pretokenized import Pretokenized
from zephon.ops.rows import RowOperator
from zephon.ops.shuffle import Shuffle
from zephon.ops.stateful import StatefulTransform
from zephon.ops.tokenize import Tokenize

# In their order; of the first two kinds there may be several.
_PLACES: tuple[tuple[type, ...], ...] = (
    (RowOperator,),
    (Tokenize, TokenizeChat, TokenizeImages, Pretokenized),
    (EnsureMixture,),
    (PackFlat,),
    (Shuffle,),
    (Batch,),
)


def operators_for(operators: Sequence[Any], names: Sequence[str]) -> tuple[Any, ...]:
    """The operators as a pipeline over these datasets alone would name and order them."""

    def of(operator: Any) -> Sequence[str]:
        return getattr(operator, "datasets", None) or names

    kept, ordered = list[Any](), list[Any]()
    for operator in operators:
        here = tuple(name for name in names if name in of(operator))
        kept += [copy(operator)] if here else []  # with what is known of its code
        if here and of(operator) is not names:
            object.__setattr__(kept[-1], "datasets", here if len(here) < len(names) else None)
    for _, kind in groupby(kept, lambda each: isinstance(each, EncodeOptions) or type(each)):
        group = list(kind)
        apart = len({name for each in group for name in of(each)}) == sum(len(of(each)) for each in group)
        ordered += sorted(group, key=lambda each: names.index(of(each)[0])) if apart else group
    return tuple(ordered)


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators of a pipeline.

    Attributes:
        rows: what happens to rows before they become tokens, in order.
        encode: what makes tokens of rows; several only where each is for datasets of its own.
    """

    rows: tuple[RowOperator, ...]
    encode: tuple[Tokenize | TokenizeChat | TokenizeImages | Pretokenized, ...]
    mixture: EnsureMixture | None
    pack: PackFlat
    shuffle: Shuffle | None
    batch: Batch

    @staticmethod
    def from_list(operators: Sequence[Any]) -> Operators:
        """Row operators, one that makes tokens, ensure_mixture or not, one that packs, shuffle or not, batch."""
        kinds = ", ".join(operator.kind for operator in operators) or "none"
        places = [next(n for n, types in enumerate(_PLACES) if isinstance(each, types)) for each in operators]
        if places != sorted(places):
            raise PipelineError(
                f"the operators come in the order {kinds}; they must come as row operators, tokenize, ensure_mixture, "
                "pack_flat, shuffle, batch."
            )
        rows, encode, *others = (
            [operator for operator, at in zip(operators, places, strict=True) if at == place]
            for place in range(len(_PLACES))
        )
        for needed, method in ((encode, "tokenize"), (others[1], "pack_flat"), (others[3], "batch")):
            if not needed:
                raise PipelineError(f"the pipeline lacks {method} (its operators: {kinds}); add .{method}(...).")
        stateful = [operator for operator in rows if isinstance(operator, StatefulTransform)]
        for several in (stateful, *others):
            if len(several) > 1:
                raise PipelineError(
                    f"the pipeline has {several[0].kind} twice (its operators: {kinds}); at most one is possible."
                )
        mixture, shuffle = (next(iter(several), None) for several in (others[0], others[2]))
        pack, batch = others[1][0], others[3][0]
        if mixture and pack.has_bins:
            raise PipelineError(
                f'ensure_mixture cuts the documents of each dataset into records as "wrap" does, but {pack.kind} '
                f"has the algorithm {pack.algorithm!r}; take one or the other."
            )
        built = Operators(tuple(rows), tuple(encode), mixture, pack, shuffle, batch)
        if built.shows_images and pack.algorithm not in ("best_fit", "first_fit"):
            raise PipelineError(
                f'{pack.kind} algorithm is "{pack.algorithm}", which cuts documents, and an image cannot be cut; '
                'take "best_fit" or "first_fit".'
            )
        if pack.always_image and not built.shows_images:
            raise PipelineError(f"{pack.kind} always_image is True, but no operator shows images; leave it out.")
        return built

    @property
    def shows_images(self) -> bool:
        """Whether documents may have images."""
        return any(getattr(operator, "vision", None) is not None for operator in self.encode)

    @property
    def is_plain(self) -> bool:
        """Whether text goes into the tokenizer as it is read, and no further."""
        first = self.encode[0]
        return not self.rows and len(self.encode) == 1 and replace(first, datasets=None).identity() == "text all"

    @property
    def stateful(self) -> StatefulTransform | None:
        """The operator with a memory."""
        return next((operator for operator in self.rows if isinstance(operator, StatefulTransform)), None)

    def encode_for(self, dataset: str) -> Any:
        """The operator that makes tokens of a dataset's rows."""
        candidates = [operator for operator in self.encode if operator.datasets is None or dataset in operator.datasets]
        if len(candidates) != 1:
            how = "several operators make" if candidates else "no operator makes"
            raise PipelineError(f'{how} tokens of dataset "{dataset}"; exactly one has to name it in datasets=[...].')
        return candidates[0]

    def check_datasets(self, names: Sequence[str]) -> None:
        """Refuse operators for unknown datasets."""
        for operator in (*self.rows, *self.encode):
            for name in operator.datasets or ():
                if name not in names:
                    raise PipelineError(
                        f'{operator.kind} is for dataset "{name}", which is not among {", ".join(names)}.'
                    )
