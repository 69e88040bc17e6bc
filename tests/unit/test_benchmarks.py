"""The benchmarks: each can be run by its name, and loaders are measured as the protocol says."""

import importlib
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks.compare import ENTRIES, medians, ratios
from benchmarks.peers import protocol, report
from benchmarks.peers.environments import REQUIREMENTS
from benchmarks.peers.mixture import Corpus
from benchmarks.peers.process import PeerError, PeerNotOffered, Process
from benchmarks.peers.zephon_here import ZephonHere
from benchmarks.run import BENCHMARKS
from support.chat_data import CHATML, write_chat_tokenizer
from zephon.tokenizer.tokenizer import load_tokenizer


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_benchmark_has_something_to_run(name):
    assert callable(importlib.import_module(f"benchmarks.{name}").bench)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    random = np.random.default_rng(0)
    sources = {}
    for name, words in (("first", ["some", "plain", "words"]), ("second", ["quite", "other", "things"])):
        texts = [" ".join(f"{random.choice(words)} {random.integers(1e6)}" for _ in range(60)) for _ in range(200)]
        (folder / name).mkdir()
        pq.write_table(pa.table({"text": pa.array(texts, pa.large_string())}), folder / name / "0.parquet")
        sources[name] = str(folder / name)
    write_chat_tokenizer(folder / "tokenizer", CHATML)
    tokenizer = str(folder / "tokenizer")
    corpus = Corpus(sources, tokenizer)
    return {
        "sources": sources,
        "tokenizer": tokenizer,
        "eos": load_tokenizer(tokenizer).eos_id,
        "bytes_per_token": corpus.bytes_per_token,
        "epoch_tokens": sum(corpus.tokens.values()),
        "cache": str(folder / "cache"),
        "folder": str(folder / "prepared"),
        "threads": 1,
        "lanes": 8,
        "seq_len": 64,
        "microbatch": 8,
    }


def test_ours_answers_every_request_of_the_protocol(job, tmp_path):
    server = protocol._Server(ZephonHere)
    assert server.prepare(job)["bytes"] == 0
    assert server.open({**job, "cold": True})["first_batch_s"] > 0
    turn = server.turn({**job, "seconds": 0.1})
    assert turn["tokens"] % (8 * 64) == 0 < turn["tokens"] and turn["seconds"] >= 0.1
    assert server.state(job)["bytes"] > 100
    answer = server.records({**job, "tokens": 50_000, "to": str(tmp_path / "records.npy"), "seconds": 60})
    assert answer == {"shape": [8, 65], "pad_id": None}
    shares = Corpus(job["sources"], job["tokenizer"]).shares(tmp_path / "records.npy", job["eos"], None)
    assert shares["known"] > 0.95 and shares["fill"] == 1 and abs(shares["first_share"] - 0.5) < 0.1
    server.peer.close()
    restored = server.restore(job)
    assert list(restored) == ["10%", "50%", "90%"] and all(each["same"] for each in restored.values())
    assert server.elastic(job) == {"outcome": "same"}


def test_a_loader_in_a_process_is_asked_stopped_and_ended(job, tmp_path):
    """The bare loop, whose environment is that of the tests."""
    log = tmp_path / "log.txt"
    with Process(sys.executable, "", "limits", {**job, "limit": "tokenize"}, log) as process:
        process.ask("open", 60)
        process.pause()
        first, second = (process.ask("turn", 60, seconds=0.1) for _ in range(2))
        assert process.peak_mb > 10 and medians([first, second])["cpu_ms_per_million"] > 0
        assert ratios([first, second], [first, second])["speed"] == pytest.approx([1, 1, 1])
        with pytest.raises(PeerNotOffered, match="no state"):
            process.ask("state", 60)
        with pytest.raises(PeerError, match="no answer within 0 s"):
            process.ask("turn", 0, seconds=5)
        with pytest.raises(PeerError, match="ended"):
            process.ask("turn", 1, seconds=1)


def test_every_peer_has_its_environment_and_none_shares_ours():
    for entry in ENTRIES:
        ours = entry.module in ("zephon_here", "limits")
        assert ours == (entry.environment == "") and (ours or entry.environment in REQUIREMENTS)
    assert len({entry.key for entry in ENTRIES}) == len(ENTRIES)


def test_the_table_tells_what_failed_and_what_is_not_offered():
    turns = [{"tokens": 2e6, "seconds": 1.0, "cpu_seconds": 0.1}] * 5
    batch = {"first_batch_s": 1.5}
    document = {
        "date": "today", "machine": "2 cores", "bytes_per_token": 3.8, "rounds": 5, "seconds": 10,
        "small_epoch_tokens": 2e6,
        "corpus": {"code": {"megabytes": 1, "documents": 2, "distinct words": 0.5, "compression": 3.0}},
        "results": {
            "Fast": {
                "limit": False, "before": "an index", "prepare": {"cpu_seconds": 4}, "turns": turns, **medians(turns),
                "ratios": ratios(turns, turns), "cold": batch, "warm": batch, "peak_mb": 900,
                "state": {"not_offered": "no state"},
                "restore": {"10%": {"seconds": 1, "same": False}}, "quality": {"first_share": 0.47, "fill": 0.99},
                "elastic": {"outcome": "refused", "at": 2},
            },
            "Missing": {"limit": False, "before": "", "turns": [], "cold": {"error": "no such package"}},
            "Limit": {"limit": True, "before": "", "turns": turns, **medians(turns)},
        },
    }  # fmt: skip
    lines = report.markdown(document).splitlines()
    assert "| Fast | 2 (2..2) | 50 | 1 (1..1) | 1 (1..1) | 10.0 |" in lines
    assert (
        "| Fast | an index, 4 s of CPU | 1.50 | 1.50 | 900 | not offered | 1.00 (other data) | 3.0 | 99.0% | "
        "no: refused at 2 ranks |" in lines
    )
    assert "| Missing | failed: no such package |  |  |  |  |" in lines
    assert [line.startswith("| Limit") for line in lines].count(True) == 1
