"""Which columns of a dataset a pipeline reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zephon.columns.template import text_name
from zephon.data.columns import has_column, physical_columns
from zephon.data.dataset import Dataset
from zephon.data.fetch import Spans
from zephon.errors import PipelineError
from zephon.ops.chat import TokenizeChat
from zephon.ops.encode import PartsOptions
from zephon.ops.images import TokenizeImages
from zephon.ops.pretokenized import Pretokenized
from zephon.ops.rows import RowOperator, missing_column
from zephon.ops.text import DecodeText, TextTemplate
from zephon.ops.tokenize import Tokenize
from zephon.ops.unused import RefuseUnused


@dataclass(frozen=True, slots=True)
class Needs:
    """What to read of one dataset.

    Attributes:
        columns: by the name that operators know, the name in the files.
        size_column: the column of the files whose bytes stand for the size of a row.
        is_text: whether that column must hold text.
        optional: columns of the files that need not be there, and what they hold in JSON lines, as far as is known.
        encode: the tokenizing operator, with "auto" columns found.
        operators: the row operators, with what the columns tell them.
        encoded: columns of the files whose bytes are decoded before anything else looks at them.
    """

    columns: dict[str, str]
    size_column: str
    is_text: bool
    encode: Any
    operators: Sequence[RowOperator] = ()
    optional: Mapping[str, str | None] = field(default_factory=dict)
    encoded: frozenset[str] = frozenset()


def columns_needed(
    dataset: Dataset,
    operators: Sequence[RowOperator],
    encode: Any,
    index_dir: Path | None = None,
    skips: bool = False,
    spans: Spans | None = None,
) -> Needs:
    """Walk through the operators for a dataset; for `index_dir`, `skips` and `spans` see `Dataset.columns`.

    Columns read before any function of the user's has run must be there. What is read after one may be of its making,
    so it is read where it is there; what is missing then comes to light when the operators are tried, before the run.

    Raises:
        PipelineError: an operator needs a column that is not there.
    """
    renamed: dict[str, str] = {}
    if isinstance(encode, Tokenize):
        document = dataset.text_field or encode.field
        if not operators:
            return Needs({encode.field: document}, document, True, encode)
        renamed = {encode.field: document}
    present: Mapping[str, str | None] = dataset.columns(index_dir, skips=skips, spans=spans)
    written, finds = encode, isinstance(encode, TokenizeChat)
    if isinstance(encode, TokenizeImages):
        encode = encode.found(present)
    if not renamed:
        document = encode.found([*present]).field if finds else encode.field
    named = [renamed.get(name, name) for name in _named_columns(operators, encode)]
    present = dataset.columns_of_all(present, document, named, index_dir, skips=skips, spans=spans)
    if isinstance(written, TokenizeImages):
        encode = written.found(present)  # what the first file lacks, other files may have
    if renamed and not _may_hold(document, present) and any(_may_make(document, operator) for operator in operators):
        encode, renamed = replace(encode, field=document), {}
    if (
        isinstance(encode, Pretokenized)
        and not any(has_column(name, present) for name in (Pretokenized.field, encode.field))
        and [*present.values()] in ([None], ["json"])
    ):
        renamed = {Pretokenized.field: next(iter(present))}
    is_loose = any(kind is not None for kind in present.values())
    has_parts = isinstance(encode, PartsOptions) and not renamed
    if has_parts:
        used = {name for each in operators for name in (present if each.columns is None else each.columns)}
        made_later = [name for name in encode.named_columns if any(_may_make(name, operator) for operator in operators)]
        encode = encode.resolved([*present, *made_later], dataset.name, used)
    required: dict[str, bool] = {}
    made: set[str] = set()
    unknown = False
    steps = [(operator.label, operator.columns, operator.makes) for operator in operators]
    steps.append((encode.kind, (encode.field, *encode.extra_columns), ()))
    for label, columns, makes in steps:
        for name in present if columns is None else columns:
            if name in made:
                continue
            source = renamed.get(name, name)
            if _may_hold(source, present):
                required.setdefault(name, not unknown and columns is not None)
            elif not unknown:
                raise PipelineError(f'dataset "{dataset.name}": {label} {missing_column(name, list(present))}')
        if columns is None:
            for name, source in renamed.items():
                if _may_hold(source, present):
                    required.setdefault(name, False)
        if makes is None:
            unknown = True
        else:
            made.update(makes)
    for name in encode.optional_columns:
        if name not in made and (is_loose or has_column(name, present)):
            required.setdefault(name, False)
    if has_parts:  # what is known of files alone is refused by now
        late = [name for name in encode.unused_columns if is_loose or ("." in name and has_column(name, present))]
        if late := [name for name in late if name not in required]:
            operators = [RefuseUnused(tuple(late), tuple(map(encode.refusal, late)), encode.kind), *operators]
            required |= dict.fromkeys(late, False)
    first = next(iter(present))
    read = {name: renamed.get(name, name) for name in required} or {first: first}
    sized = read.get(encode.field) or next(iter(read.values()))
    loose = [read[name] for name, needed in required.items() if is_loose or not needed]
    optional = {name: present.get(name) for name in loose}
    printed, operators = _with_templates(operators, present)
    exact = {name: text_name(renamed.get(name, name)) for name in printed}
    read |= {text_name(name): source for name, source in exact.items()}
    optional |= dict.fromkeys(exact.values())
    encoded = frozenset(renamed.get(name, name) for name in _encoded_columns(operators))
    return Needs(read, sized, False, encode, operators, optional, encoded)


def _encoded_columns(operators: Sequence[RowOperator]) -> list[str]:
    """Columns that operators decode before others read them."""
    encoded, seen = list[str](), set[str]()
    for operator in operators:
        if isinstance(operator, DecodeText) and operator.field not in seen:
            encoded.append(operator.field)
        if operator.columns is None or operator.makes is None:
            break
        seen.update(operator.columns, operator.makes)
    return encoded


def _named_columns(operators: Sequence[RowOperator], encode: Any) -> list[str]:
    """Columns of files that operators name, as far as none of them is made by another."""
    named, made = list[str](), set[str]()
    for operator in operators:
        named += [name for name in operator.columns or () if name not in made]
        if operator.makes is None:
            return named
        made.update(operator.makes)
    columns = encode.named_columns if isinstance(encode, PartsOptions) else (encode.field, *encode.extra_columns)
    made |= {Pretokenized.field} if isinstance(encode, Pretokenized) else set()  # files of one column may name it so
    return named + [name for name in columns if name not in made]


def _with_templates(
    operators: Sequence[RowOperator], present: Mapping[str, str | None]
) -> tuple[set[str], list[RowOperator]]:
    """Columns of JSON that text templates print as their files have them, and the operators, with templates that learn
    that numbers of JSON reach them as floats, behind a function."""
    printed, made = set[str](), set[str]()
    is_loose = any(kind is not None for kind in present.values())
    chain, before = list(operators), list[int]()
    for n, operator in enumerate(operators):
        if isinstance(operator, TextTemplate):
            before.append(n)
            kinds = {name: present.get(name) for name in operator.columns if name not in made}
            printed.update(name for name, kind in kinds.items() if kind in ("number", "json"))
        if operator.columns is None or operator.makes is None:
            break
        made.update(operator.makes)
    for n in range(len(chain)):
        if isinstance(operator := chain[n], TextTemplate):
            chain[n] = replace(operator, floats=is_loose and n not in before, last=n not in before[:-1])
    return printed, chain


def _may_hold(name: str, present: Iterable[str]) -> bool:
    """Whether a dataset whose first file has the columns `present` may hold `name`.

    Other files may have what a template is made of and the first one lacks; opening refuses what none has.
    """
    held = set(present)
    return any(has_column(part, held) for part in physical_columns([name]))


def _may_make(column: str, operator: RowOperator) -> bool:
    return operator.makes is None or column in operator.makes
