"""The fingerprint of a run: everything that decides its data, by name, as JSON types.

States carry it, and two runs with equal fingerprints read the same data. So its names and values never change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from typing import Any, NamedTuple

from zephon.config.keys import refuse_unknown, settings_of
from zephon.config.options import Options
from zephon.config.topology import Topology
from zephon.curriculum.mixture import Ending
from zephon.curriculum.source import ScheduledMixtureWorkSource, WorkSource
from zephon.data.catalog import Catalog
from zephon.data.formats.registry import names_say
from zephon.errors import Change, CheckpointError, PipelineError
from zephon.run.operators import Operators
from zephon.tokenizer.tokenizer import Tokenizer
from zephon.vision.probes import image_pixels

STREAM_VERSION = 2
"""Raised by every change that alters a stream of records for the same recipe, seed and data, and that no other field of
the fingerprint tells."""

# How a run can go on over a difference: at its place in the rows, with the same or with other tokens of them; with
# another recipe that takes over; or not at all.
_SAME, _OTHER_TOKENS, _TAKEOVER, _FIXED = range(4)

FINGERPRINT_NAMES = {
    "canonical_replicas": _FIXED,
    "chunk_size": _TAKEOVER,
    "continues": _TAKEOVER,
    "datasets": _TAKEOVER,
    "document_details": _OTHER_TOKENS,
    "documents": _OTHER_TOKENS,
    "end": _TAKEOVER,
    "endings": _TAKEOVER,
    "ensure_mixture": _OTHER_TOKENS,
    "feeds": _FIXED,
    "flush_every_k_chunks": _FIXED,
    "formats": _FIXED,
    "groups": _OTHER_TOKENS,
    "image_pixels": _SAME,
    "order": _FIXED,
    "orders": _FIXED,
    "pack_algorithm": _OTHER_TOKENS,
    "reshuffle_on_repeat": _FIXED,
    "row_operators": _OTHER_TOKENS,
    "schedule": _TAKEOVER,
    "seed": _FIXED,
    "seq_len": _OTHER_TOKENS,
    "shuffle": _OTHER_TOKENS,
    "special_tokens": _OTHER_TOKENS,
    "stream_version": _FIXED,
    "token_estimation": _TAKEOVER,
    "tokenizer": _OTHER_TOKENS,
    "tokenizer_backend": _SAME,
    "tokens_per_row": _FIXED,
}
"""Names that a fingerprint may have, besides "dataset NAME" for every dataset."""

_PLACES = "Places in the state would mean other rows: "
_TAKE_OVER = "in a recipe that takes over from that of the run (continue_from, or continues of a work source)."
_WAYS = {
    _TAKEOVER: f"{_PLACES}set it back, or change it {_TAKE_OVER}",
    _FIXED: f"{_PLACES}set it back; it is fixed for the life of a run.",
}
_WAYS_OF = {
    "continues": "A run that took over from another goes on with what it had then: set back what else differs.",
}
_FILES_WAY = f"{_PLACES}give the run the files and column that it had; others need a name of their own {_TAKE_OVER}"
_COUNTED_WAY = (
    "Records are counted from the start of the run, where the data were others: set it back, or resume from a state."
)
# Names that states of earlier versions lack although their runs had such settings.
_RECENT = ("document_details", "formats")

_DETAILED_DATASETS = 12  # with more of them a state would outgrow its 4 KB


class Content(NamedTuple):
    """What a dataset holds: its catalog, the column of its documents, and resolved settings of what encodes them."""

    catalog: Catalog
    column: str
    details: Mapping[str, str]


def fingerprint_of(
    source: WorkSource,
    operators: Operators,
    options: Options,
    topology: Topology,
    contents: Mapping[str, Content],
    tokenizer: Tokenizer | None,
    special: tuple[int | None, int | None],
) -> dict[str, Any]:
    """What decides the data of a run; `contents` by dataset name, `special` the ids of BOS and EOS."""
    shuffle, mixture, pack = operators.shuffle, operators.mixture, operators.pack
    fields: dict[str, Any] = {
        "stream_version": STREAM_VERSION,
        "canonical_replicas": topology.lanes,
        "seq_len": pack.max_length,
        "tokenizer": tokenizer.content_hash[:16] if tokenizer else "none",
        "tokenizer_backend": f"{tokenizer.backend} {tokenizer.backend_version}" if tokenizer else "none",
        "special_tokens": f"bos={special[0]} eos={special[1]}",
        "pack_algorithm": pack.described(),
        "shuffle": _settings(shuffle) if shuffle else "none",
        "seed": source.seed,
        "chunk_size": source.chunk_size,
        "flush_every_k_chunks": options.flush_every_k_chunks,
        "order": f"shards={source.shuffle_shards} rows={source.shuffle_within_shard} block={source.shuffle_block_size}",
        "end": _settings(operators.batch) if source.finite else "repeat",
        "token_estimation": _settings(source.estimation) if source.estimation else "none",
        "datasets": source.names,
    }
    if topology.lanes_per_feed > 1:
        fields["feeds"] = topology.feeds
    if operators.rows:
        fields["row_operators"] = [_shortened(operator.identity()) for operator in operators.rows]
    if not operators.is_plain:
        fields["documents"] = [_shortened(operator.identity()) for operator in operators.encode]
    if operators.shows_images:
        fields["image_pixels"] = image_pixels()
    if mixture:
        fields["ensure_mixture"] = _settings(mixture)
    if not source.reshuffle_on_repeat:
        fields["reshuffle_on_repeat"] = False
    endings = {name: source.ending(name) for name in source.names}
    usual = Ending(1 if source.finite else None)
    if any(ending != usual for ending in endings.values()):
        fields["endings"] = {name: [ending.passes, ending.ends_run] for name, ending in endings.items()}
    if orders := {name: asdict(source.order_options(name)) for name in source.names if name in source.per_dataset}:
        fields["orders"] = orders
    if isinstance(source, ScheduledMixtureWorkSource):
        fields["schedule"] = schedule_of(source, options, operators)
    if source.continues is not None:
        before = fingerprint_of(source.continues, operators, options, topology, contents, tokenizer, special)
        fields["continues"] = hashlib.sha256(json.dumps(before, sort_keys=True).encode()).hexdigest()[:16]
    brief = len(source.names) > _DETAILED_DATASETS
    if pack.homogeneity == "group":
        groups = {dataset.name: dataset.group for dataset in source.datasets if dataset.group}
        fields["groups"] = _digest(groups) if brief else groups
    for name, weight in source.relative_weights.items():
        catalog, column, _ = contents[name]
        fields[f"dataset {name}"] = _dataset_field(catalog, catalog.n_shards, column, weight, brief)
    given = {d.name: contents[d.name].catalog for d in source.datasets if d.fmt is not None}
    formats = {name: c.fmt for name, c in given.items() if not names_say(c.fmt, c.shard_names.to_pylist())}
    details = {name: dict(contents[name].details) for name in source.names if contents[name].details}
    for name, by_dataset in (("formats", formats), ("document_details", details)):
        if by_dataset:
            fields[name] = _digest(by_dataset) if brief else by_dataset
    return fields


def _settings(operator: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in settings_of(operator).items())


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:10]


def schedule_of(source: ScheduledMixtureWorkSource, options: Options, operators: Operators) -> list[list[Any]]:
    """The stages of a source: start in planned tokens, kind of change, end or None, and shares by dataset."""
    tokens_per_step = options.global_batch * operators.pack.record_length if options.global_batch else 1
    return [stage.to_plain(tokens_per_step) for stage in source.schedule]


def _shortened(identity: str) -> str:
    """An operator's identity in at most 80 characters; a state has room for no more."""
    if len(identity) <= 80:
        return identity
    return f"{identity[:60]}... {hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def _dataset_field(catalog: Catalog, n_shards: int, column: str, weight: float, brief: bool) -> dict[str, Any] | str:
    """The field of a dataset with its first `n_shards` shards, SHARDS/ROWS/WEIGHT/DIGEST where it is to be brief."""
    content = {
        "shards": n_shards,
        "rows": _rows(catalog, n_shards),
        "content": catalog.fingerprint_of(n_shards)[:16],
        "text_field": column,
        "weight": weight,
    }
    if catalog.pin:
        content["revision"] = catalog.pin
    if not brief:
        return content
    return f"{n_shards}/{content['rows']}/{weight:.6g}/{_digest(content)}"


def _rows(catalog: Catalog, n_shards: int) -> int:
    return int(catalog.group_rows[catalog.group_shard < n_shards].sum())


def describe_growth(catalog: Catalog, column: str, weight: float, field: Any) -> str:
    """Words for the change of a dataset that has only got new shards since `field` was written, else ""."""
    brief, now = isinstance(field, str), catalog.n_shards
    before = int(field.split("/")[0]) if brief else field["shards"]
    if not 0 < before < now or _dataset_field(catalog, before, column, weight, brief) != field:
        return ""
    new = ", ".join(str(shard) for shard in catalog.shard_names[before : before + 3])
    return (
        f"has grown from {before} shards ({_rows(catalog, before)} rows) to {now} ({catalog.rows} rows); "
        f"new: {new}{', ...' if now - before > 3 else ''}"
    )


# Comparing


def check_fingerprint(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    allow: Collection[str] = (),
    where: str,
    remedy: str = "allow_changes",
    cost: str = "",
    counted: bool = False,
    explain: Callable[[str, Any], str] = lambda name, before: "",
) -> list[Change]:
    """The changes that are allowed by name; refuses fingerprints that differ otherwise, or in what cannot be accepted.

    Args:
        where, remedy, cost: for the message: its beginning, the option that accepts changes ("" where nothing does),
            and what accepting costs where the data do not stay the same.
        counted: whether places are counted in records, from the start of the run.
        explain: words for a changed field, given its name and its value before; "" where the values say enough.
    """
    changes = []
    for change in _changes(before, now):
        known = replace(change, note=explain(change.name, change.before)) if change.name in before else change
        changes.append(_judged(known, counted=counted))
    if refused := [change for change in changes if change.name not in allow or change.way]:
        raise CheckpointError(where, refused, remedy, "" if all(change.is_exact for change in refused) else cost)
    return changes


def _judged(change: Change, *, counted: bool) -> Change:
    """The change, with whether and how a run can go on over it."""
    before, now = change.before, change.now
    kind, way = FINGERPRINT_NAMES.get(change.name), ""
    if change.name in _RECENT and before == "absent":
        kind = _SAME
        change = replace(change, note=f"the state does not have it, now it is {now!r}; accept it if this was so before")
    elif change.name == "image_pixels" and "absent" not in (before, now):
        kind = _SAME
        libraries = "this machine's torch, torchvision or Pillow make other pixels of the same images"
        change = replace(change, note=f"was {before!r}, is {now!r} ({libraries}; the tokens are the same)")
    elif change.name == "end" and "repeat" not in (before, now):
        kind = _SAME
    elif kind is None:  # of a dataset
        a, b = (each if isinstance(each, Mapping) else {} for each in (before, now))
        differing = {key for key in {*a, *b} if a.get(key) != b.get(key)} if a and b else {"weight"}
        kind = _SAME if differing == {"revision"} else _TAKEOVER
        way = "" if differing <= {"revision", "weight"} else _FILES_WAY
    if counted and kind != _SAME:
        way = _COUNTED_WAY
    return replace(change, way=way or _WAYS_OF.get(change.name) or _WAYS.get(kind, ""), is_exact=kind == _SAME)


def check_allowed(
    allow: Collection[str], fingerprints: Iterable[Mapping[str, Any]] | None, remedy: str = "allow_changes"
) -> None:
    """Refuse names of changes that cannot occur; without `fingerprints`, while no state is known, any dataset may."""
    known = sorted({*FINGERPRINT_NAMES, *(name for each in fingerprints or () for name in each)})
    names = [name for name in sorted(allow) if fingerprints is not None or not name.startswith("dataset ")]
    acceptable = [name for name in known if FINGERPRINT_NAMES.get(name, _OTHER_TOKENS) in (_SAME, _OTHER_TOKENS)]
    unknown = [name for name in names if name not in known]
    refuse_unknown(unknown, acceptable, f"name of a change in {remedy}", CheckpointError)


def check_ranks_agree(fingerprints: Mapping[int, Mapping[str, Any]]) -> None:
    """Refuse to train where ranks, of those that read data, would read different data."""
    lowest = min(fingerprints)
    others = sorted(rank for rank, fingerprint in fingerprints.items() if fingerprint != fingerprints[lowest])
    if others:
        differences = "; ".join(
            f"{change.name} is {str(change.before)[:200]} on rank {lowest} and {str(change.now)[:200]} on rank "
            f"{others[0]}"
            for change in _changes(fingerprints[lowest], fingerprints[others[0]])[:3]
        )
        raise PipelineError(
            f"ranks {number_ranges(others)} would read other data than rank {lowest}: {differences}; give all ranks "
            "the same files, tokenizer and settings."
        )


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    return [
        Change(name, before.get(name, "absent"), now.get(name, "absent"))
        for name in sorted({*before, *now})
        if before.get(name, "absent") != now.get(name, "absent")
    ]


def number_ranges(numbers: Sequence[int]) -> str:
    """`[0, 1, 2, 5]` as "0-2, 5"."""
    parts = []
    for _, neighbours in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in neighbours]
        parts.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]))
    return ", ".join(parts)
