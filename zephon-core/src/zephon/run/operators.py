"""The operators of a pipeline, each at its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zephon.errors import PipelineError
from zephon.ops.batch import Batch
from zephon.ops.chat import TokenizeChat
from zephon.ops.filter import Filter
from zephon.ops.functions import MapBatches, MapTransform
from zephon.ops.mixture import EnsureMixture
from zephon.ops.pack import PackFlat, PackSequences
from zephon.ops.pretokenized import Pretokenized
from zephon.ops.rows import RowOperator
from zephon.ops.shuffle import Shuffle
from zephon.ops.stateful import StatefulTransform
from zephon.ops.text import DecodeText, TextTemplate
from zephon.ops.tokenize import Tokenize

__all__ = ["Operators"]

_NAMES: dict[type, str] = {
    EnsureMixture: "ensure_mixture",
    PackFlat: "pack_flat",
    PackSequences: "pack_sequences",
    Shuffle: "shuffle",
    Batch: "batch",
}
# The order of operators; of the first two kinds there may be several.
_ORDER: tuple[tuple[type, ...], ...] = (
    (Filter, MapTransform, MapBatches, DecodeText, TextTemplate, StatefulTransform),
    (Tokenize, TokenizeChat, Pretokenized),
    (EnsureMixture,),
    (PackFlat, PackSequences),
    (Shuffle,),
    (Batch,),
)


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators of a pipeline.

    Attributes:
        rows: what happens to rows before they become tokens, in order.
        encode: what makes tokens of rows; several only where each is for datasets of its own.
    """

    rows: tuple[RowOperator, ...]
    encode: tuple[Tokenize | TokenizeChat | Pretokenized, ...]
    mixture: EnsureMixture | None
    pack: PackFlat
    shuffle: Shuffle | None
    batch: Batch

    @staticmethod
    def from_list(operators: Sequence[Any]) -> Operators:
        """Row operators, one that makes tokens, ensure_mixture or not, one that packs, shuffle or not, batch.

        Raises:
            PipelineError: an operator is missing, double or out of place.
        """
        names = [_NAMES.get(type(operator)) or operator.kind for operator in operators]
        described = ", ".join(names) or "none"
        stages = [next(n for n, kinds in enumerate(_ORDER) if isinstance(op, kinds)) for op in operators]
        rows, encode, mixture, pack, shuffle, batch = (
            [operator for operator, at in zip(operators, stages, strict=True) if at == stage]
            for stage in range(len(_ORDER))
        )
        if len(encode) > 1 and not all(operator.datasets for operator in encode):
            raise PipelineError(
                f"the pipeline makes tokens in several ways ({described}); say with datasets=[...] which datasets "
                "each operator is for."
            )
        for several in (mixture, pack, shuffle, batch):
            if len(several) > 1:
                name = _NAMES[type(several[0])]
                raise PipelineError(f"the pipeline has {name} twice (its operators: {described}); one is needed.")
        if stages != sorted(stages):
            raise PipelineError(
                f"the operators come in the order {described}; they must come as {'row operators, ' if rows else ''}"
                f"tokenize, {'ensure_mixture, ' if mixture else ''}pack_flat, shuffle, batch."
            )
        if sum(isinstance(operator, StatefulTransform) for operator in rows) > 1:
            raise PipelineError("the pipeline has stateful_transform twice; put both into one object.")
        for needed, name in ((encode, "tokenize"), (pack, "pack_flat"), (batch, "batch")):
            if not needed:
                raise PipelineError(f"the pipeline lacks {name} (its operators: {described}); add .{name}(...).")
        if mixture and pack[0].has_bins:
            raise PipelineError(
                f'ensure_mixture cuts the documents of each dataset into records as "wrap" does, but {pack[0].name} '
                f"has the algorithm {pack[0].algorithm!r}; take one or the other."
            )
        return Operators(
            rows=tuple(rows),
            encode=tuple(encode),
            mixture=mixture[0] if mixture else None,
            pack=pack[0],
            shuffle=shuffle[0] if shuffle else None,
            batch=batch[0],
        )

    @property
    def is_plain(self) -> bool:
        """Whether text goes into the tokenizer as it is read, and no further."""
        first = self.encode[0]
        return not self.rows and len(self.encode) == 1 and isinstance(first, Tokenize) and first.max_length is None

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
