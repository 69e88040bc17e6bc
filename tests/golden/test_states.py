"""A state that an earlier version saved is restored by this one, and the run goes on with the same records.

states.json holds, for each case, the states that were saved and the SHA-256 of each of the steps after them. Its files
in binary formats are the ones that were read then: another version of a library may write the same rows otherwise.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from golden.streams import text_of, write_tokenizer
from zephon import CheckpointError, DataRecipe, Pipeline, merge_checkpoints
from zephon.io import Dataset
from zephon.work import ScheduledMixtureWorkSource, Stage, StaticMixtureWorkSource, TokenEstimation

EXPECTED = json.loads(Path(__file__).with_name("states.json").read_text(encoding="utf-8"))
LANES = 4
BACKEND = "tokenizer_backend"  # the library that encodes and its version, which need not be those of then
DETAILS = "document_details"  # templates, and special tokens of single sources, which states did not have then
GLOBAL_BATCH = 8
STEPS_BEFORE = 14
STEPS_AFTER = 3
CHAT_TEMPLATE = """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'assistant' %}{{ '> ' }}{% generation %}{{ message.content + eos_token }}{% endgeneration %}
{%- else %}{{ message.role + ': ' + message.content + '\\n' }}{% endif %}{% endfor %}"""

TOOLS_TEMPLATE = """{{ strftime_now('%Y-%m-%d') }} {{ tools[0].name }}
{% for message in messages %}{{ message.role + ': ' + message.content + eos_token + '\\n' }}{% endfor %}"""

Build = Callable[..., Pipeline]


@dataclass
class Case:
    """A run that is saved after `STEPS_BEFORE` steps by `groups` ranks, and restored on each of `restored_on`.

    Attributes:
        build: the pipeline of a rank, by `dp_degree` and `dp_group_id`.
        before: the pipeline that saved the state, where it is another one.
        records: records that each rank took before it saved, where these are no whole steps.
    """

    build: Build
    before: Build | None = None
    groups: int = 1
    restored_on: tuple[int, ...] = (1,)
    allow_changes: tuple[str, ...] = ()
    records: int | None = None


def step_digests(pipelines: list[Pipeline], steps: int) -> list[str]:
    """SHA-256 of `steps` steps: tokens, documents, labels, positions and loss mask of each of their records."""
    records: dict[int, bytes] = {}
    for pipeline in pipelines:
        stream = iter(pipeline)
        for _ in range(steps * GLOBAL_BATCH // len(pipelines) // 2):
            batch = next(stream)
            fields = batch.to_training(as_numpy=True, return_loss_mask=True)
            columns = [np.asarray(fields[name]).astype("<i8") for name in ("labels", "position_ids", "loss_mask")]
            for i, number in enumerate(batch.sequence_numbers.tolist()):
                assert number not in records
                of_record = [batch.digests[i], *(column[i].tobytes() for column in columns)]
                records[number] = f"{number}".encode() + hashlib.sha256(b"".join(of_record)).digest()
    ordered = [records[number] for number in sorted(records)]
    steps_of_records = [ordered[i : i + GLOBAL_BATCH] for i in range(0, len(ordered), GLOBAL_BATCH)]
    return [hashlib.sha256(b"".join(step)).hexdigest() for step in steps_of_records]


def group_of(build: Build, groups: int) -> list[Pipeline]:
    return [build(dp_degree=groups, dp_group_id=group) for group in range(groups)]


def saved_states(case: Case) -> list[dict[str, Any]]:
    """The states of all ranks of a fresh run."""
    pipelines = group_of(case.before or case.build, case.groups)
    for pipeline in pipelines:
        if case.records is None:
            step_digests([pipeline], STEPS_BEFORE // case.groups)
        else:
            for _, _ in zip(range(case.records // 2), pipeline, strict=False):
                pass
    states = [pipeline.checkpoint() for pipeline in pipelines]
    for pipeline in pipelines:
        pipeline.close()
    return json.loads(json.dumps(states))


def digests_after(case: Case, states: list[dict[str, Any]], groups: int) -> list[str]:
    """The steps of `groups` ranks that go on from `states`."""
    pipelines = group_of(case.build, groups)
    for pipeline in pipelines:
        allowed = [BACKEND, *case.allow_changes]
        if DETAILS in pipeline.fingerprint():
            with pytest.raises(CheckpointError, match=DETAILS):
                pipeline.restore(states, allow_changes=allowed)
            allowed.append(DETAILS)
        pipeline.restore(states if len(states) > 1 else states[0], allow_changes=allowed)
    digests = step_digests(pipelines, STEPS_AFTER)
    for pipeline in pipelines:
        pipeline.close()
    return digests


def library_of(state: dict[str, Any]) -> dict[str, str]:
    return {BACKEND: state["fingerprint"][BACKEND]}


def without(state: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key not in keys}


def options(pipeline: Pipeline, *, lanes: int = LANES, **changes: Any) -> Pipeline:
    return pipeline.options(runner="inline", canonical_replicas=lanes, global_batch=GLOBAL_BATCH, **changes)


def write_data(folder: Path) -> None:
    """The data of all cases, in `folder`."""
    write_tokenizer(folder)
    pages = [
        {"title": f"Page {i}", "text": text_of(f"page {i}", 10 + i * 7 % 60), "score": i % 10, "lang": "ab"[i % 3 > 0]}
        for i in range(240)
    ]
    talks = [
        {
            "messages": [
                {"role": "user", "content": text_of(f"question {i}", 3 + i % 9)},
                {"role": "assistant", "content": text_of(f"answer {i}", 5 + i % 20)},
                *([{"role": "user", "content": "more"}, {"role": "assistant", "content": f"no {i}"}] * (i % 4 == 0)),
            ]
        }
        for i in range(200)
    ]
    numbers = [[2 + (i * j) % 200 for j in range(5 + i % 40)] for i in range(150)]
    ids = [
        {
            "ids": row,
            "loss": [int(j % 3 > 0) for j in range(len(row))],
            "labels": [-100 if j % 5 == 0 else token for j, token in enumerate(row)],
            "positions": [j % 7 for j in range(len(row))],
        }
        for row in numbers
    ]
    answers = [
        {
            "question": text_of(f"question {i}", 4 + i % 7),
            "answer": "<|eos|>" * (i % 5 == 0) + text_of(f"answer {i}", 6 + i % 17),
            "functions": json.dumps([{"name": f"f{i % 3}"}]),
        }
        for i in range(160)
    ]
    for name, rows in {"pages": pages, "talks": talks, "ids": ids, "answers": answers}.items():
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")
    (folder / "damaged.jsonl").write_text(
        "".join(json.dumps(row) + "\n" if i % 29 else '{"text": "cut of\n' for i, row in enumerate(pages)),
        encoding="utf-8",
    )
    texts = folder / "texts"
    texts.mkdir()
    for i in range(6):
        (texts / f"{i}.txt").write_text(text_of(f"file {i}", 30 + i), encoding="utf-8")
    for name, content in EXPECTED["files"].items():
        (folder / name).write_bytes(base64.b64decode(content))


def cases(folder: Path) -> dict[str, Case]:
    """Every case by name; what decides the data, in as many combinations as there are cases."""
    tokenizer = folder
    pages = Dataset.from_path("pages", folder / "pages.jsonl")
    notes = Dataset.from_dict("notes", {"text": [text_of(f"note {i}", i % 9) if i % 11 else None for i in range(300)]})
    talks = Dataset.from_path("talks", folder / "talks.jsonl", text_field="messages")
    ids = Dataset.from_path("ids", folder / "ids.jsonl", text_field="ids")
    weights = {"pages": 3.0, "notes": 1.0}

    def mixed(**changes: Any) -> StaticMixtureWorkSource:
        given = {"datasets": [pages, notes], "mixture": weights, "seed": 5, "chunk_size": 120, **changes}
        return StaticMixtureWorkSource(**given)

    def packed(source: Any, seq_len: int, *, shuffle: int | None = None, lanes: int = LANES, **packing: Any) -> Build:
        how = packing.pop("how", "pack_flat")
        ensure = packing.pop("ensure_mixture", None)
        feeds = packing.pop("feeds", "auto")

        def build(**topology: int) -> Pipeline:
            pipeline = options(Pipeline(source), lanes=lanes, feeds=feeds, **topology).tokenize(tokenizer)
            if ensure:
                pipeline = pipeline.ensure_mixture(ensure)
            pipeline = getattr(pipeline, how)(seq_len, **packing)
            return (pipeline.shuffle(shuffle, seed=3) if shuffle else pipeline).batch(2)

        return build

    finite = mixed(repeat=False, shuffle_shards=False, shuffle_within_shard=False, token_estimation=None)

    def scheduled(**topology: int) -> Pipeline:
        source = ScheduledMixtureWorkSource(
            datasets=[pages, notes],
            seed=6,
            chunk_size=50,
            schedule=[
                Stage({"pages": 1}),
                Stage({"pages": 1, "notes": 2}, start_tokens=800, change="linear", end_tokens=2400),
                Stage({"notes": 1}, start_steps=9, change="cosine", end_steps=14),
            ],
            per_dataset={"notes": {"shuffle_block_size": "global"}},
        )
        return packed(source, 64, shuffle=16)(**topology)

    def conversations(**topology: int) -> Pipeline:
        pipeline = options(Pipeline(StaticMixtureWorkSource(datasets=[talks], seed=7, chunk_size=12)), **topology)
        pipeline = pipeline.tokenize_chat(tokenizer, chat_template=CHAT_TEMPLATE, max_length=200)
        return pipeline.pack_sequences(300, max_documents_per_record=4, num_bins=8).batch(2)

    def filtered(**topology: int) -> Pipeline:
        pipeline = options(Pipeline(StaticMixtureWorkSource(datasets=[pages], seed=8, chunk_size=60)), **topology)
        pipeline = pipeline.filter('score > 2 and lang == "b" and length(text) < 250 or starts_with(title, "Page 1")')
        pipeline = pipeline.text_template("# {title}\n\n{text}")
        return pipeline.tokenize(tokenizer, max_length=90, split_long_samples=True).pack_flat(80).shuffle(16).batch(2)

    def with_ids(**topology: int) -> Pipeline:
        source = StaticMixtureWorkSource(datasets=[ids, pages], mixture={"ids": 1, "pages": 1}, seed=9, chunk_size=12)
        pipeline = options(Pipeline(source), flush_every_k_chunks=2, **topology)
        # Written before columns beside token ids had to be named or left out by name.
        beside = ["labels", "positions"]
        pipeline = pipeline.pretokenized("ids", loss="loss", tokenizer_id=tokenizer, datasets=["ids"], ignored=beside)
        return pipeline.tokenize(tokenizer, datasets=["pages"], special_tokens="eos").pack_flat(50).batch(2)

    def damaged(**topology: int) -> Pipeline:
        source = StaticMixtureWorkSource(
            datasets=[Dataset.from_path("damaged", folder / "damaged.jsonl")], seed=10, chunk_size=30
        )
        pipeline = options(Pipeline(source), on_error="skip", error_budget=0.2, **topology)
        return pipeline.tokenize(tokenizer).pack_flat(60).shuffle(16).batch(2)

    def formats(**topology: int) -> Pipeline:
        names = {"parquet": "a.parquet", "arrow": "a.arrow", "gz": "a.jsonl.gz", "tar": "a.tar", "texts": "texts"}
        datasets = [
            Dataset.from_path(name, folder / path, text_field="txt" if name == "tar" else "text")
            for name, path in names.items()
        ]
        rows = Dataset.from_path("npy", folder / "a.npy", text_field="tokens")
        source = StaticMixtureWorkSource(
            datasets=[*datasets, rows], mixture=dict.fromkeys([*names, "npy"], 1), seed=11, chunk_size=12
        )
        pipeline = options(Pipeline(source), **topology).pretokenized("tokens", datasets=["npy"])
        pipeline = pipeline.tokenize(tokenizer, field="txt", datasets=["tar"])
        rest = [name for name in names if name != "tar"]
        return pipeline.tokenize(tokenizer, datasets=rest).pack_flat(40).shuffle(8).batch(2)

    def recipe(**topology: int) -> Pipeline:
        told = DataRecipe.from_dict(
            {
                "seed": 12,
                "canonical_replicas": LANES,
                "runner": "inline",
                "chunk_size": 12,
                "pack_algorithm": "best_fit",
                "num_bins": 8,
                "homogeneity": "group",
                "shuffle_buffer_size": 8,
                "exhausted_policy": "repeat",
                "special_tokens": "bos_eos",
                "sources": [
                    {"name": "pages", "path": "pages.jsonl", "weight": 2, "group": "prose", "filter": "score != 3"},
                    {
                        "name": "talks",
                        "path": "talks.jsonl",
                        "documents": "chat",
                        "chat_template": CHAT_TEMPLATE,
                        "chat_loss": "last_assistant",
                    },
                ],
            },
            base=folder,
        )
        return Pipeline.from_recipe(
            told, tokenizer=tokenizer, seq_len=200, microbatch_size=2, global_batch=GLOBAL_BATCH, **topology
        )

    def other_recipe(**topology: int) -> Pipeline:
        told = DataRecipe.from_dict(
            {
                "seed": 14,
                "canonical_replicas": LANES,
                "runner": "inline",
                "chunk_size": 12,
                "pack_mode": "sequences",
                "max_documents_per_record": 5,
                "num_bins": 8,
                "shuffle_after_pack": False,
                "flush_every_k_chunks": 2,
                "max_document_tokens": 120,
                "sources": [
                    {"name": "pages", "path": "pages.jsonl", "weight": 2, "split_long_documents": True},
                    {
                        "name": "answers",
                        "path": "answers.jsonl",
                        "documents": "chat",
                        "chat_template": TOOLS_TEMPLATE,
                        "messages_field": "question",
                        "response_field": "answer",
                        "tools_field": "functions",
                        "chat_date": "2024-07-26",
                        "chat_assistant_tokens": "all",
                    },
                    {
                        "name": "ids",
                        "path": "ids.jsonl",
                        "documents": "tokens",
                        "tokens_field": "ids",
                        "labels_field": "labels",
                        "positions_field": "positions",
                        "special_tokens": "none",
                    },
                ],
            },
            base=folder,
        )
        return Pipeline.from_recipe(
            told, tokenizer=tokenizer, seq_len=200, microbatch_size=2, global_batch=GLOBAL_BATCH, **topology
        )

    wrap = packed(mixed(token_estimation=TokenEstimation()), 100, shuffle=32)
    other_shuffle = packed(mixed(token_estimation=TokenEstimation()), 100, shuffle=16)
    more = Dataset.from_dict("more", {"text": [text_of(f"more {i}", 4 + i % 30) for i in range(90)]})
    later = packed(mixed(datasets=[pages, more], mixture={"pages": 1, "more": 2}, continues=mixed()), 100, shuffle=8)
    earlier = packed(mixed(), 100, shuffle=8)

    def taken_over(**topology: int) -> Pipeline:
        """The second run, some steps after it took over from the first."""
        return later(**topology).restore(EXPECTED["cases"]["takeover"]["states"], allow_changes=[BACKEND])

    def with_another_shuffle(**topology: int) -> Pipeline:
        states = EXPECTED["cases"]["accepted change"]["states"]
        return other_shuffle(**topology).restore(states, allow_changes=["shuffle", BACKEND])

    def skipping(**topology: int) -> Pipeline:
        return wrap(**topology).skip(2, 3).skip(16, 18)

    return {
        "wrap": Case(wrap, restored_on=(1, 4)),
        "two ranks": Case(wrap, groups=2, restored_on=(1, 4)),
        "inside a step": Case(packed(mixed(), 100, shuffle=32), records=90),
        "best fit": Case(packed(mixed(), 300, algorithm="best_fit", num_bins=6, homogeneity="full", shuffle=8)),
        "best fit, cut to fill": Case(packed(mixed(seed=13), 300, algorithm="best_fit_wrap", num_bins=8, lanes=2)),
        "sequences of chat": Case(conversations, restored_on=(2,)),
        "ensure mixture": Case(
            packed(mixed(chunk_size=25), 60, ensure_mixture=40, shuffle=16), groups=2, restored_on=(1, 4)
        ),
        "schedule": Case(scheduled, restored_on=(2,)),
        "filter and template": Case(filtered),
        "finite": Case(packed(finite, 70, shuffle=16), before=packed(finite, 70, shuffle=16, feeds=LANES)),
        "one feed": Case(
            packed(mixed(repeat=False, seed=14, chunk_size=30), 50, shuffle=16),
            groups=2,
            restored_on=(1, 4),
        ),
        "accepted change": Case(other_shuffle, before=wrap, allow_changes=("shuffle",)),
        "after an accepted change": Case(other_shuffle, before=with_another_shuffle),
        "takeover": Case(later, before=earlier, groups=2),
        "after a takeover": Case(later, before=taken_over, restored_on=(2,)),
        "skip": Case(wrap, before=skipping),
        "token ids": Case(with_ids),
        "damaged rows": Case(damaged),
        "formats": Case(formats),
        "recipe": Case(recipe, restored_on=(4,)),
        "recipe of sequences, answers and token ids": Case(other_recipe),
    }


@pytest.fixture(scope="module")
def all_cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    folder = tmp_path_factory.mktemp("states")
    write_data(folder)
    return cases(folder)


def test_every_case_is_tried(all_cases):
    assert set(all_cases) == set(EXPECTED["cases"])


@pytest.mark.parametrize("name", EXPECTED["cases"])
def test_a_saved_state_goes_on_with_the_same_records(all_cases, name):
    saved = EXPECTED["cases"][name]
    for groups, digests in saved["digests"].items():
        assert digests_after(all_cases[name], saved["states"], int(groups)) == digests


# Lanes went on inside their buffers then; now they go back to where they can be entered.
@pytest.mark.parametrize("name", [name for name in EXPECTED["cases"] if name != "after an accepted change"])
def test_the_same_run_saves_the_same_state(all_cases, name):
    for now, then in zip(saved_states(all_cases[name]), EXPECTED["cases"][name]["states"], strict=True):
        assert without(now["fingerprint"], DETAILS) == then["fingerprint"] | library_of(now)
        assert without(now, "fingerprint", "checksum") == without(then, "fingerprint", "checksum")


def test_states_of_two_ranks_merge_into_the_same_state():
    saved = EXPECTED["cases"]["two ranks"]
    assert merge_checkpoints(saved["states"]) == saved["merged"]
