"""Zephon beside every other loader: the same files, tokenizer, record length and batch, taken in turns.

Each loader runs in an environment and a process of its own (`benchmarks.peers`); while one has its turn the others are
stopped. What comes out lies in FOLDER/compare: results.json, results.md, results.png.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import text
from benchmarks.common import MICROBATCH, SEQ_LEN, Setup, corpus
from benchmarks.peers import environments, report
from benchmarks.peers.mixture import Corpus
from benchmarks.peers.process import PeerError, PeerNotOffered, Process
from zephon.tokenizer.tokenizer import load_tokenizer

SMALL_MB = 4  # of each source, where restores and numbers of ranks are tried
OPEN_LIMIT, TURN_LIMIT, TRIAL_LIMIT, PREPARE_LIMIT = 300.0, 60.0, 90.0, 1200.0  # seconds


@dataclass(frozen=True)
class Entry:
    """A line of the table.

    Attributes:
        environment: of `environments.REQUIREMENTS`; "" is that of the project.
        options: what the module asks of its job.
        elastic: options in place of these where numbers of ranks are tried.
        limit: no loader, but what none can beat.
        before: what it does before the run, outside of the figures; "" where it reads the Parquet files.
    """

    name: str
    module: str
    environment: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    elastic: dict[str, Any] = field(default_factory=dict)
    limit: bool = False
    before: str = ""

    @property
    def key(self) -> str:
        return "".join(letter if letter.isalnum() else "-" for letter in self.name.lower()).strip("-")


ENTRIES = (
    Entry("Zephon", "zephon_here", options={"lanes": 1}, elastic={"lanes": MICROBATCH}),
    Entry("Zephon, 64 lanes", "zephon_here", options={"lanes": 64}, elastic={"lanes": MICROBATCH}),
    Entry("Zephon, processes", "zephon_here", options={"lanes": 1, "runner": "process"}, elastic={"lanes": MICROBATCH}),
    *(
        Entry(
            f"zephon 0.2.0, {runner}", "zephon_0_2", "zephon-0.2.0",
            {"lanes": 1, "runner": runner}, {"lanes": MICROBATCH},
        )
        for runner in ("threads", "process")
    ),
    Entry("grain 0.2.18, tokenizers", "grain", "grain", {"tokenizers": "tokenizers"}),
    Entry("grain 0.2.18, gigatoken", "grain", "grain", {"tokenizers": "gigatoken"}),
    Entry("TorchTitan 0.3.0", "torchtitan", "torchtitan", {"workers": 0}),
    Entry("HF datasets 4.7.0", "datasets", "datasets", {"workers": 0}),
    Entry("MosaicML Streaming 0.13.0", "mosaicml", "mosaicml-streaming", {"workers": 2, "prepared": False},
          before="text to MDS"),
    Entry("MosaicML Streaming, tokens", "mosaicml", "mosaicml-streaming", {"workers": 2, "prepared": True},
          before="packed tokens to MDS"),
    Entry("LitData 0.2.76", "litdata", "litdata", {"workers": 2, "prepared": False}, before="an index"),
    Entry("LitData, tokens", "litdata", "litdata", {"workers": 0, "prepared": True}, before="tokens to chunks"),
    Entry("LanceDB 0.40.0", "lance", "lancedb", {"splits": MICROBATCH, "prepared": False}, before="text to a table"),
    Entry("LanceDB, tokens", "lance", "lancedb", {"splits": MICROBATCH, "prepared": True}, before="tokens to a table"),
    Entry("Megatron-Core 0.19.2", "megatron", "megatron", {"workers": 2}, before="tokens to .bin and .idx"),
    Entry("read and tokenize (bare loop)", "limits", options={"limit": "tokenize"}, limit=True),
    Entry("read only", "limits", options={"limit": "read"}, limit=True),
    Entry("copy int64 tokens", "limits", options={"limit": "copy"}, limit=True),
)  # fmt: skip


class Comparison:
    """The figures of all entries, as they come in."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.folder = setup.folder / "compare"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.base = {"seq_len": SEQ_LEN, "microbatch": MICROBATCH, **corpus(setup)}
        loaded = load_tokenizer(self.base["tokenizer"])
        self.base |= {"eos": loaded.eos_id, "vocabulary": loaded.vocab_size}
        self.corpus = Corpus(self.base["sources"], self.base["tokenizer"])
        self.base["bytes_per_token"] = self.corpus.bytes_per_token
        self.small = {**self.base, "sources": self._small_sources()}
        small = Corpus(self.small["sources"], self.base["tokenizer"])
        self.small["epoch_tokens"] = sum(small.tokens.values())
        self.results: dict[str, dict[str, Any]] = {}
        shutil.rmtree(self.folder / "logs", ignore_errors=True)
        (self.folder / "logs").mkdir()

    def _small_sources(self) -> dict[str, str]:
        """A few megabytes of each source in four shards, so that an epoch ends in reasonable time."""
        import pyarrow.parquet as pq

        found = {}
        for name, path in self.base["sources"].items():
            folder = self.folder / f"small-{SMALL_MB}" / name
            if not folder.exists():
                rows = pq.ParquetFile(min(Path(path).glob("*.parquet"))).read_row_group(0, columns=["text"])
                folder.mkdir(parents=True)
                wanted = min(1.0, SMALL_MB * 1e6 / rows.nbytes) * len(rows)
                for shard in range(4):
                    part = rows.slice(int(wanted * shard / 4), int(wanted / 4))
                    pq.write_table(part, folder / f"{shard}.parquet", row_group_size=max(1, len(part) // 4))
            found[name] = str(folder)
        return found

    def start(self, entry: Entry, base: dict[str, Any], **more: Any) -> Process:
        """A process of a loader, its data prepared.

        Raises: `environments.NotInstalled`, `PeerError`.
        """
        interpreter = sys.executable
        if entry.environment:
            interpreter = environments.python(self.setup.folder / "peers", entry.environment)
        kind = "small" if base is self.small else f"{self.setup.source_mb}"
        job = {
            **base,
            **entry.options,
            "folder": str(self.folder / "prepared" / f"{entry.key}-{kind}"),
            "cache": str(self.folder / "caches" / f"{entry.key}-{kind}"),
            **more,
        }
        process = Process(interpreter, entry.environment, entry.module, job, self.folder / "logs" / f"{entry.key}.txt")
        prepared = process.ask("prepare", PREPARE_LIMIT)
        if base is self.base:
            self.results[entry.name]["prepare"] = prepared if entry.before else None
        return process

    def note(self, entry: Entry, what: str, call: Callable[[], Any]) -> bool:
        """Keep what a call gives, or why it gives nothing; whether it gave something."""
        try:
            self.results[entry.name][what] = call()
        except PeerNotOffered as missing:
            self.results[entry.name][what] = {"not_offered": str(missing)}
        except (PeerError, environments.NotInstalled) as error:
            self.results[entry.name][what] = {"error": str(error)}
            print(f"{entry.name}: {what}: {error}", flush=True)
            return False
        return True

    def cold(self, entry: Entry) -> dict[str, Any]:
        """The first batch with an empty cache of the loader's own, and files that the system has not in memory."""
        with self.start(entry, self.base) as process:
            shutil.rmtree(process.job["cache"], ignore_errors=True)
            return process.ask("open", OPEN_LIMIT, cold=True)

    def trial(self, entry: Entry, do: str) -> dict[str, Any]:
        """A request on the small sources, in a process of its own."""
        with self.start(entry, self.small, **(entry.elastic if do == "elastic" else {})) as process:
            return process.ask(do, TRIAL_LIMIT)

    def quality(self, entry: Entry, process: Process) -> dict[str, float]:
        """Mixture and fill of the next four million tokens."""
        path = self.folder / "records.npy"
        answer = process.ask("records", TRIAL_LIMIT, to=str(path), tokens=4e6, seconds=TRIAL_LIMIT / 6)
        found = self.corpus.shares(path, self.base["eos"], answer["pad_id"])
        path.unlink()
        return found

    def run(self, entries: tuple[Entry, ...], save: Callable[[], None]) -> None:
        """All figures of all entries."""
        with ExitStack() as stack:
            processes: dict[str, Process] = {}
            for entry in entries:
                self.results[entry.name] = {"limit": entry.limit, "before": entry.before, "turns": []}
                print(f"{entry.name} ...", flush=True)
                if not entry.limit and not self.note(entry, "cold", lambda entry=entry: self.cold(entry)):
                    continue

                def opened(entry: Entry = entry) -> Any:
                    process = processes[entry.name] = stack.enter_context(self.start(entry, self.base))
                    return process.ask("open", OPEN_LIMIT)

                if not self.note(entry, "warm", opened):
                    processes.pop(entry.name, None)
                    continue
                processes[entry.name].pause()
            for number in range(self.setup.rounds):
                print(f"round {number + 1} of {self.setup.rounds} ...", flush=True)
                for entry in entries:
                    if entry.name in processes:
                        self._turn(entry, processes)
            for entry in entries:
                if process := processes.get(entry.name):
                    self.results[entry.name]["peak_mb"] = process.peak_mb
                    if not entry.limit:
                        self.note(entry, "state", lambda process=process: process.ask("state", TURN_LIMIT))
                        self.note(entry, "quality", lambda entry=entry, p=process: self.quality(entry, p))
                    process.end()
            save()
        for entry in entries:
            if entry.name in processes and not entry.limit:
                print(f"{entry.name}: restores and ranks ...", flush=True)
                for do in ("restore", "elastic"):
                    self.note(entry, do, lambda entry=entry, do=do: self.trial(entry, do))
                save()

    def _turn(self, entry: Entry, processes: dict[str, Process]) -> None:
        process, seconds = processes[entry.name], self.setup.seconds / self.setup.rounds
        try:
            self.results[entry.name]["turns"].append(process.ask("turn", TURN_LIMIT, seconds=seconds))
            process.pause()
        except (PeerError, PeerNotOffered) as error:
            self.results[entry.name]["warm"] = {"error": str(error)}
            print(f"{entry.name}: {error}", flush=True)
            processes.pop(entry.name).end()


def described(comparison: Comparison) -> dict[str, Any]:
    """Machine and corpus."""
    cache = comparison.folder / f"corpus-{comparison.setup.source_mb}.json"
    if not cache.exists():
        cache.write_text(
            json.dumps({name: text.described(Path(path)) for name, path in comparison.base["sources"].items()})
        )
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{comparison.base['threads']} cores, {cpu}, {memory:.0f} GiB, Python {platform.python_version()}",
        "corpus": json.loads(cache.read_text()),
        "bytes_per_token": comparison.corpus.bytes_per_token,
        "seq_len": SEQ_LEN,
        "microbatch": MICROBATCH,
        "rounds": comparison.setup.rounds,
        "seconds": comparison.setup.seconds,
        "small_epoch_tokens": comparison.small["epoch_tokens"],
        "requirements": environments.REQUIREMENTS,
    }


def medians(turns: list[dict[str, float]]) -> dict[str, float]:
    """Medians over the turns of an entry, in millions of tokens per second and ms of CPU per million."""
    return {
        "million_tokens_per_s": statistics.median(each["tokens"] / each["seconds"] / 1e6 for each in turns),
        "cpu_ms_per_million": statistics.median(each["cpu_seconds"] * 1e9 / max(1, each["tokens"]) for each in turns),
    }


def ratios(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, list[float]]:
    """How many times as fast as another we are, and how many times the CPU it needs, round by round: median, least,
    most."""
    speeds, costs = [], []
    for mine, other in zip(ours, theirs, strict=False):
        speeds.append(mine["tokens"] / mine["seconds"] / max(1, other["tokens"]) * other["seconds"])
        costs.append(other["cpu_seconds"] / max(1, other["tokens"]) / (mine["cpu_seconds"] / max(1, mine["tokens"])))
    return {name: [statistics.median(each), min(each), max(each)] for name, each in (("speed", speeds), ("cpu", costs))}


def bench(setup: Setup) -> None:
    wanted = tuple(
        entry for entry in ENTRIES if not setup.only or entry.key in setup.only or entry.module in setup.only
    )
    began = time.perf_counter()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that no loader is left running
    comparison = Comparison(setup)
    setting = described(comparison)

    def save() -> None:
        results = comparison.results
        ours = results.get(ENTRIES[0].name, {}).get("turns", [])
        for found in results.values():
            if found["turns"]:
                found.update(medians(found["turns"]))
                if ours:
                    found["ratios"] = ratios(ours, found["turns"])
        document = {**setting, "took_s": time.perf_counter() - began, "results": results}
        (comparison.folder / "results.json").write_text(json.dumps(document, indent=1) + "\n")
        (comparison.folder / "results.md").write_text(report.markdown(document))

    comparison.run(wanted, save)
    print((comparison.folder / "results.md").read_text())
    try:
        report.plot(environments.python(setup.folder / "peers", "plot"), comparison.folder)
    except environments.NotInstalled as error:
        print(f"no picture: {error}")
    print(f"in {comparison.folder}: results.json, results.md, results.png; {time.perf_counter() - began:.0f} s")
