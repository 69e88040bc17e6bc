"""`zephon inspect`: what a dataset holds, and the recipe lines to train on it."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import typer

from zephon.cli.guess import USUAL_TEXT, Documents, guess, media_root, parsed
from zephon.cli.options import VISION, open_pipeline, vision_settings
from zephon.cli.output import LiveLine, count, plural, print_table, printable
from zephon.columns.damage import split_damaged
from zephon.config.options import CacheOptions
from zephon.config.recipe import DataRecipe, SourceRecipe
from zephon.data.cache import DecodeCache
from zephon.data.dataset import Dataset
from zephon.data.fetch import open_spans
from zephon.data.reader import OpenDataset
from zephon.errors import DataError, PipelineError
from zephon.ops.image_rows import Shown, from_json, pieces_of
from zephon.ops.media import BadRow, Media
from zephon.vision.geometry import VisionSettings
from zephon.vision.headers import BadImage, Header, read_header

_GROUPS = 16  # that rows are sampled from
_GROUP_BYTES = 64 << 20  # of the documents in them, about; at least one group is read
_LOOKED_AT = 64  # rows that tell what the documents are
_RESAMPLES = 200
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
_TOKEN_FORMATS = ("megatron", "numpy", "uint16", "uint32")
_SHOWN_CHARS = 200


@dataclass(kw_only=True)
class Sampled:
    """Documents of a sample.

    Attributes:
        rows: int64[n], ids of the rows, ascending.
        group: int64[n], the group of each.
        values: by row, the content of the columns of the documents.
        damaged: rows that cannot be read, and why.
    """

    rows: np.ndarray
    group: np.ndarray
    values: list[tuple[Any, ...]]
    damaged: list[str] = field(default_factory=list)


def inspect(
    target: Annotated[str, typer.Argument(metavar="PATH | RECIPE", help="A dataset, or a recipe (.toml).")],
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="T", help="Count tokens with it; else bytes.")
    ] = None,
    fmt: Annotated[
        str | None, typer.Option("--fmt", metavar="F", help="Format of the files, where file names do not tell.")
    ] = None,
    vision: Annotated[str | None, VISION] = None,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=1, max=1 << 20, help="Rows to sample.")] = 2000,
    show: Annotated[int, typer.Option("--show", metavar="N", min=0, help="Documents to show.")] = 3,
    seed: Annotated[int, typer.Option("--seed", metavar="S", min=0, help="Seed of the sample.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Print what a dataset holds, from a sample, and a recipe for it."""
    if is_recipe := target.endswith(".toml"):
        if fmt is not None:
            raise PipelineError(f"--fmt does not apply to a recipe, {target}; set fmt in it.")
        recipe = DataRecipe.from_toml(target)
    else:
        name = re.sub(r"\W+", "-", os.path.basename(re.sub(r"[/*?\[\]{}]+$", "", target))).strip("-") or "data"
        path = target if "://" in target else os.path.abspath(target)
        recipe = DataRecipe.from_dict({"sources": [{"name": name, "path": path, "fmt": fmt}]}, where=target)
    found = []
    for source in recipe.sources:
        each = _Source(recipe, source, guesses=not is_recipe)
        with LiveLine(lambda: f"reading {source.path}"):  # noqa: B023
            told = each.described(tokenizer, vision, rows, show, seed)
        found.append(told)
        if not as_json:
            _print(told)
    if as_json:
        print(json.dumps({"sources": found}))


class _Source:
    """A source of a recipe under inspection; where it `guesses`, the recipe says nothing of its documents."""

    def __init__(self, recipe: DataRecipe, source: SourceRecipe, *, guesses: bool) -> None:
        cache = CacheOptions(dir=recipe.cache_dir, limit_bytes=recipe.cache_limit_bytes)
        self._index_dir, self._spans = cache.index_dir, open_spans(cache)
        self._cache = DecodeCache(cache.memory_bytes)
        self._dataset = Dataset.from_path(source.name, source.path, source.fmt)
        self._recipe, self._source, self._guesses = recipe, source, guesses
        first = self._dataset.columns(self._index_dir, skips=True, spans=self._spans)
        if not first:
            raise DataError(f"'{source.path}' has no columns; expected files with rows.")
        # Files without a footer are scanned once for each column by which rows are measured: rather that of a run.
        usual = [str(self._setting("text_field")), *USUAL_TEXT, "messages", "input_ids"]
        self._sized = next((name for name in usual if name in first), next(iter(first)))
        self._columns = self._dataset.columns_of_all(
            first, self._sized, index_dir=self._index_dir, skips=True, spans=self._spans
        )

    def _open(self, columns: Sequence[str], sized: str) -> OpenDataset:
        return self._dataset.open(
            columns,
            size_column=sized,
            cache=self._cache,
            index_dir=self._index_dir,
            is_text=False,
            optional=self._columns,
            spans=self._spans,
            skips=True,
        )

    def described(self, tokenizer: str | None, vision: str | None, wanted: int, show: int, seed: int) -> dict[str, Any]:
        """All that is found, as JSON types."""
        types, looked_at = self._looked_at()
        documents = self._documents(looked_at)
        opened = self._open(documents.columns, documents.columns[0])
        catalog = opened.catalog
        told: dict[str, Any] = {
            "name": self._source.name,
            "path": self._source.path,
            "format": catalog.fmt,
            "shards": catalog.n_shards,
            "groups": catalog.n_groups,
            "rows": catalog.rows,
            "bytes": int(catalog.shard_sizes.sum()),
            "document_bytes": int(catalog.bytes),
            "columns": types,
            "documents": {"kind": documents.kind, "columns": documents.columns},
            "damaged_shards": [f"{shard.name}: {shard.reason}" for shard in opened.lost],
        }
        sample = _sample(opened, documents.columns, wanted, seed)
        media = _images(documents, sample, self._setting("media_root") or documents.keys.get("media_root"), vision)
        failed = Counter(sample.damaged) + Counter(media.pop("failures", ()))
        if documents.kind == "tokens":
            unit, sizes = "tokens", np.array([len(parsed(value[0]) or ()) for value in sample.values], dtype=np.int64)
        elif tokenizer is not None:
            unit = "tokens"
            sizes, faults = self._tokens(tokenizer, vision, documents, sample.rows)
            failed = Counter(sample.damaged) + faults
        else:
            unit, sizes = "bytes", np.array([_text_bytes(value) for value in sample.values], dtype=np.int64)
        blank = np.array([_is_blank(value) for value in sample.values], dtype=bool)
        seen = Counter(map(_identity, (value for value, no in zip(sample.values, blank, strict=True) if not no)))
        n = len(sample.rows) + len(sample.damaged)
        told["sample"] = {
            "rows": n,
            "of_groups": len(np.unique(sample.group)),
            "unit": unit,
            "length": _distribution(sizes[~blank], sample.group[~blank], len(sample.rows) / catalog.rows),
            "blank": int(blank.sum()),
            "unusable": sum(failed.values()),
            "reasons": [f"{reason} ({plural(times, 'row')})" for reason, times in failed.most_common(3)],
            "duplicates": sum(times - 1 for times in seen.values()),
            **media,
        }
        told["examples"] = list(_examples(opened, sample, blank, show))
        if self._guesses:
            told["recipe"] = self._lines(documents.keys)
        opened.close()
        return told

    def _looked_at(self) -> tuple[dict[str, str], list[dict[str, Any]]]:
        """Types of all columns, and some rows."""
        kinds, table = self._columns, pa.table({})
        opened = self._open(list(kinds), self._sized)
        for group in range(opened.catalog.n_groups):
            table, _, _ = split_damaged(opened.read_group(group))
            if table.num_rows:
                break
        opened.close()
        types = {each.name: kinds.get(each.name) or str(each.type).replace("large_", "") for each in table.schema}
        rows = table.slice(0, _LOOKED_AT).to_pylist()
        return types, [{k: parsed(v) if kinds.get(k) == "json" else v for k, v in row.items()} for row in rows]

    def _setting(self, key: str) -> Any:
        return self._recipe.setting(self._source, key)

    def _documents(self, rows: Sequence[Mapping[str, Any]]) -> Documents:
        """The documents that the recipe names, or those that the rows look like."""
        kind = self._setting("documents")
        if self._guesses:
            documents = guess(rows, list(self._columns), by_format=self._token_format())
            path = self._source.path
            folder = path if os.path.isdir(path) else os.path.dirname(path)
            if documents.shows_images and (root := media_root(rows, documents.columns[-1], folder)):
                documents.keys["media_root"] = root
            return documents
        if kind == "text":
            column = self._setting("text_template") or self._setting("text_field")
            return Documents(keys={}, columns=[column])
        guessed = guess(rows, list(self._columns), by_format=self._token_format(), kind=kind)
        named = [self._setting(key) for key in _FIELDS[kind]]
        columns = [name for name in named if name not in (None, "auto", "text")] or guessed.columns
        return Documents(keys={"documents": kind}, columns=columns)

    def _token_format(self) -> bool:
        return self._source.fmt in _TOKEN_FORMATS

    def _tokens(
        self, tokenizer: str, vision: str | None, documents: Documents, rows: np.ndarray
    ) -> tuple[np.ndarray, Counter[str]]:
        """int64[n]: tokens of rows as a run would make them, 0 for a row that gives none; and the unusable ones."""
        source = {**asdict(self._source), **(documents.keys if self._guesses else {})}
        recipe = self._recipe.replace(
            sources=[source], schedule=(), continue_from=None, on_error="skip", error_budget=1.0
        )
        compiled = open_pipeline(recipe, tokenizer, 2048, 1, vision, runner="inline").compiled
        block = compiled.plan.fetch(np.zeros(len(rows), dtype=np.int32), rows, 0, 0)
        made = compiled.plan.tokenize(block)
        sizes = np.zeros(len(rows), dtype=np.int64)
        np.add.at(sizes, made.position, np.diff(made.offsets))
        return sizes, Counter(fault.reason for _, faults in made.faults for fault in faults)

    def _lines(self, keys: Mapping[str, Any]) -> str:
        """A recipe of this source alone, as TOML."""
        table = {"name": self._source.name, "path": self._source.path, "fmt": self._source.fmt, **keys}
        lines = [
            f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items() if value is not None
        ]
        return "\n".join(["[[sources]]", *lines])


_FIELDS = {
    "tokens": ("tokens_field",),
    "chat": ("messages_field", "response_field"),
    "images": ("text_field", "images_field"),
}


def _sample(opened: OpenDataset, columns: Sequence[str], wanted: int, seed: int) -> Sampled:
    """Rows from groups all over a dataset, as many of each as it has a share of their rows."""
    catalog, chance = opened.catalog, np.random.default_rng(seed)
    groups = chance.permutation(catalog.n_groups)[:_GROUPS]
    sizes = np.cumsum(catalog.group_bytes[groups])
    groups = np.sort(groups[: max(1, int(np.searchsorted(sizes, _GROUP_BYTES)))])
    rows = catalog.group_rows[groups]
    shares = np.minimum(rows, np.ceil(wanted * rows / rows.sum()).astype(np.int64))
    opened.announce(catalog.row_starts[groups])
    parts, values, damaged = [], list[tuple[Any, ...]](), list[str]()
    for group, share in zip(groups.tolist(), shares.tolist(), strict=True):
        picked = np.sort(chance.choice(int(catalog.group_rows[group]), share, replace=False))
        table, kept, lost = split_damaged(opened.read_group(group).take(pa.array(picked)))
        damaged += [why.reason for _, why in lost]
        parts.append(catalog.row_starts[group] + picked[kept])
        values += zip(*(table.column(name).to_pylist() for name in columns), strict=True) if len(kept) else []
    ids = np.concatenate(parts).astype(np.int64)
    return Sampled(rows=ids, group=catalog.groups_at(ids), values=values, damaged=damaged)


def _text_bytes(value: Any) -> int:
    """Bytes of the texts in a value."""
    if isinstance(value, str):
        return len(value.encode(errors="surrogatepass"))
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_text_bytes, value.values()))
    return sum(map(_text_bytes, value)) if isinstance(value, list | tuple) else 0


def _is_blank(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_blank, value))
    return value is None or (isinstance(value, str | bytes) and not value.strip())


def _identity(value: Any) -> int:
    return hash(tuple(each if isinstance(each, str | bytes) else repr(each) for each in value))


def _images(documents: Documents, sample: Sampled, root: str | None, vision: str | None) -> dict[str, Any]:
    """Sizes and formats of the images of a sample, by their headers."""
    if documents.kind != "images":
        return {}
    media, failures = Media(vision_settings(vision) or VisionSettings(), root), list[str]()
    headers, nbytes, per_row = list[Header](), list[int](), list[int]()
    texts = len(documents.columns) > 1 and documents.columns[0] not in ("jpg", "jpeg", "png", "webp", "gif")
    for value in sample.values:
        text, shown = (value[0], value[1:]) if texts else (None, value)
        image = next((each for each in shown if each is not None), None)
        try:
            pieces = pieces_of(from_json(text, always=False), from_json(image, always=False))
            files = [media.image(piece.value).file for piece in pieces if isinstance(piece, Shown)]
            headers += map(read_header, files)
            nbytes += map(len, files)
            per_row.append(len(files))
        except (BadRow, BadImage) as error:
            failures.append(str(error))
    told: dict[str, Any] = {"failures": failures, "images_per_row": float(np.mean(per_row)) if per_row else 0.0}
    if headers:
        sides = {
            "width": [each.width for each in headers],
            "height": [each.height for each in headers],
            "bytes": nbytes,
        }
        told["image_formats"] = dict(Counter(each.format for each in headers).most_common())
        told["images"] = {name: [int(np.quantile(each, q)) for q in (0, 0.5, 1)] for name, each in sides.items()}
    return told


def _distribution(sizes: np.ndarray, group: np.ndarray, share: float) -> dict[str, Any]:
    """Mean and quantiles with half the width of their 95 % intervals, by drawing groups, or rows of the one, again.

    `share` of the rows of the dataset are in the sample; where all are, nothing is uncertain.
    """
    if not len(sizes):
        return {}
    chance, places = np.random.default_rng(0), [np.flatnonzero(group == g) for g in np.unique(group)]
    names = ["mean", *(f"{q:.0%}" for q in _QUANTILES)]

    def figures(of: np.ndarray) -> list[float]:
        return [float(of.mean()), *np.quantile(of, _QUANTILES).tolist()]

    drawn = []
    for _ in range(_RESAMPLES):
        if len(places) > 1:
            again = np.concatenate([places[i] for i in chance.integers(0, len(places), len(places))])
        else:
            again = chance.integers(0, len(sizes), len(sizes))
        drawn.append(figures(sizes[again]))
    error = 1.96 * np.std(drawn, axis=0) * np.sqrt(max(0.0, 1 - share))
    told: dict[str, Any] = {
        name: {"value": round(value, 1), "error": round(wide, 1)}
        for name, value, wide in zip(names, figures(sizes), error.tolist(), strict=True)
    }
    edges = [0, *(2**k for k in range(64) if 2**k <= int(sizes.max()) * 2)]
    counts = np.histogram(sizes, edges)[0] if len(edges) > 1 else np.array([len(sizes)])
    bars = [[low, high - 1, int(n)] for low, high, n in zip(edges, [*edges[1:], 2], counts, strict=False) if n]
    return {**told, "longest": int(sizes.max()), "histogram": bars}


def _examples(opened: OpenDataset, sample: Sampled, blank: np.ndarray, show: int) -> Iterator[dict[str, Any]]:
    """Some documents, from all over the sample."""
    full = np.flatnonzero(~blank)
    chosen = full[np.unique(np.linspace(0, len(full) - 1, show).astype(np.int64))] if len(full) and show else full[:0]
    shards, rows = opened.catalog.locate(sample.rows[chosen])
    for place, shard, row in zip(chosen.tolist(), shards.tolist(), rows.tolist(), strict=True):
        text = "\n".join(map(_shown, (value for value in sample.values[place] if value is not None)))
        text = text[:_SHOWN_CHARS] + " […]" * (len(text) > _SHOWN_CHARS)
        yield {"shard": str(opened.catalog.shard_names[shard]), "row": row, "text": text}


def _shown(value: Any) -> str:
    if isinstance(value, bytes):
        return f"[{len(value):,} bytes]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(each)}" for key, each in value.items() if each is not None) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_shown, value[:64])) + "]"
    return str(value)


def _print(told: Mapping[str, Any]) -> None:
    """The findings for people."""
    kind, columns, sample = told["documents"]["kind"], told["documents"]["columns"], told["sample"]
    print(
        f"{printable(told['name'])}: {told['format']}, {plural(told['shards'], 'shard')}, "
        f"{plural(told['groups'], 'group')}, {plural(told['rows'], 'row')}, {count(told['bytes'])}B on disk, "
        f"{count(told['document_bytes'])}B of documents"
    )
    for line in told["damaged_shards"]:
        print(f"damaged: {printable(line)}")
    print()
    marks = dict.fromkeys(columns, f"documents ({kind})")
    print_table(["column", "type", ""], [[n, t, marks.get(n, "")] for n, t in told["columns"].items()])
    print(f"\nsample: {plural(sample['rows'], 'row')} of {plural(sample['of_groups'], 'group')}")
    if lengths := sample["length"]:
        figures = {name: each for name, each in lengths.items() if isinstance(each, dict)}
        lines = [[name, f"{each['value']:,.0f}", f"± {each['error']:,.1f}"] for name, each in figures.items()]
        print_table(
            [f"length in {sample['unit']}", "", "95 %"],
            [*lines, ["longest", f"{lengths['longest']:,}", ""]],
            right=" rr",
        )
        most = max(n for *_, n in lengths["histogram"])
        for low, high, n in lengths["histogram"]:
            print(f"  {low:>9,} to {high:<9,} {n / sample['rows']:6.1%} {'#' * max(1, round(40 * n / most))}")
        some = sample["rows"] - sample["blank"] - sample["unusable"]
        factor = told["rows"] * max(0, some) / max(1, sample["rows"])
        mean = figures["mean"]
        print(f"in all about {count(mean['value'] * factor)} ± {count(mean['error'] * factor)} {sample['unit']}")
    if "images" in sample:
        formats = ", ".join(f"{name} {n}" for name, n in sample["image_formats"].items())
        print(f"images: {sample['images_per_row']:.2f} per row; {formats}; least, median and most of")
        print_table(
            ["", "least", "median", "most"],
            [[k, *(f"{v:,}" for v in vs)] for k, vs in sample["images"].items()],
            right=" rrr",
        )
    print(f"blank: {sample['blank']:,} of {sample['rows']:,}; duplicates in the sample: {sample['duplicates']:,}")
    if sample["unusable"]:
        print(f"unusable: {sample['unusable']:,}; {printable('; '.join(sample['reasons']))}")
    for each in told["examples"]:
        print(f"\n{printable(each['shard'])}, row {each['row']}")
        print("\n".join(f"  | {part}".rstrip() for part in printable(each["text"], lines=True).split("\n")))
    if "recipe" in told:
        print(f"\n# recipe\n{told['recipe']}")
