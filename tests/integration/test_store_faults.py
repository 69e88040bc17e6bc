"""The fault matrix: each fault of a store x each format x each moment of a run.

A run either gives the very stream of an undisturbed run over local copies of the same files, or stops with a sentence
that names the file. Nothing is kept in memory or on disk here, so that faults meet reads all the time; the last tests
are about what is kept.
"""

import bz2
import functools
import io
import itertools
import shutil
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import step_digests
from support.io_data import json_lines, write_shard
from support.servers import web
from zephon import Pipeline
from zephon.data.fetch import Spans
from zephon.data.node_cache import NodeCache
from zephon.errors import DataError
from zephon.io import Dataset, DecodeCache
from zephon.work import StaticMixtureWorkSource

# What is in the store, and the column that is read; token ids where that is "tokens". Of the formats that other
# libraries write the files are theirs (tests/peers). Lance datasets are read from local folders only.
OURS = ("parquet", "jsonl", "jsonl.gz", "jsonl.zst", "jsonl.bz2", "arrow", "md", "npy", "u16", "vortex")
PEERS = {
    "saved/plain": "text",
    "webdataset/plain": "txt",
    "webdataset/packed": "txt",
    "mds/plain": "text",
    "mds/zstd": "text",
    "litdata/fields": "text",
    "litdata/whole": "text",
    "litdata/tokens": "tokens",
    "megatron/uint16": "tokens",
}
COLUMNS = {**dict.fromkeys(OURS, "text"), "npy": "tokens", "u16": "tokens", **PEERS}
FORMATS = tuple(COLUMNS)
# Those that stand for the rest where each fault has a run of its own: by range, from the start, with a file beside it.
FEW = ("parquet", "jsonl.gz", "megatron/uint16")
# Formats in which damage shows: Parquet with page checksums, gzip, bzip2; others have nothing to tell by.
CHECKED_FORMATS = ("parquet", "jsonl.gz", "jsonl.bz2", "webdataset/packed")
MOMENTS = ("first read", "middle", "after a resume")
# Every format in the middle of a run, the few at every moment; the rest of the matrix is deep.
MATRIX = [
    pytest.param(fmt, moment, marks=[] if moment == "middle" or fmt in FEW else pytest.mark.deep)
    for fmt, moment in itertools.product(FORMATS, MOMENTS)
]
BATCH = 4
SHARDS, ROWS, STEPS, MOST_STEPS = 8, 10, 8, 40
FAULTS = {
    "latency": web.slow(0.01),
    "429": web.answered(429, "TooManyRequests"),
    "429 and when to come back": web.answered(429, "TooManyRequests", Retry_After="0.05"),
    "500": web.answered(500),
    "503 slow down": web.answered(503, "SlowDown"),
    "connection cut": web.cut,
    "fewer bytes than asked for": web.short,
    "fewer bytes than promised": web.long,
}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory, s3_session, peer_data) -> SimpleNamespace:
    """Some shards of every format, in a local folder and in the store."""
    import vortex

    root = tmp_path_factory.mktemp("corpora")
    words = np.random.default_rng(7).integers(0, 10**6, (SHARDS, ROWS, 12))
    for fmt, shard in itertools.product(OURS, range(SHARDS)):
        texts = [" ".join(map(str, row)) for row in words[shard].tolist()]
        path = root / fmt / f"{shard:02}.{fmt}"
        path.parent.mkdir(exist_ok=True)
        if fmt == "parquet":
            table = pa.table({"text": texts, "junk": ["x" * 500] * ROWS})
            pq.write_table(table, path, row_group_size=5, write_page_checksum=True)
        elif fmt == "jsonl.bz2":
            path.write_bytes(bz2.compress(json_lines(texts)))
        elif fmt == "md":
            for half in range(2):
                path.with_name(f"{shard:02}-{half}.md").write_text(" ".join(texts[half::2]))
        elif fmt == "npy":
            np.save(path, (words[shard] % 1000).astype(np.uint16))
        elif fmt == "u16":
            (words[shard] % 1000).astype(np.uint16).tofile(path)
        elif fmt == "vortex":
            vortex.io.write(pa.table({"text": texts}), str(path))
        else:
            write_shard(path, texts, group_rows=5)
    for fmt in PEERS:
        shutil.copytree(peer_data / fmt, root / fmt)
    # Of one or two shards there would be little to read.
    more = {"megatron/uint16": ("bin", "idx"), "webdataset/packed": ("tar.gz",)}
    for fmt, shard in itertools.product(more, range(SHARDS)):
        for suffix in more[fmt]:
            shutil.copy(next((peer_data / fmt).glob(f"*.{suffix}")), root / fmt / f"{shard}.{suffix}")
    s3_session.upload(root, "matrix")
    return SimpleNamespace(local=root, remote="s3://corpus/matrix")


def dataset(folder: str, fmt: str) -> Dataset:
    text_field = COLUMNS[fmt] if COLUMNS[fmt] != "tokens" else None
    return Dataset.from_path("d", f"{folder}/{fmt}", "uint16" if fmt == "u16" else None, text_field)


def pipeline(folder: str, fmt: str, tokenizer, **more) -> Pipeline:
    source = StaticMixtureWorkSource([dataset(folder, fmt)], seed=3, token_estimation=False, chunk_size=16)
    options = {"canonical_replicas": 2, "global_batch": BATCH, "prefetch_buffer_size": 1 << 10, "prefetch_batches": 1}
    options |= {"io_options": {"cache": {"enabled": False, "memory_bytes": 1}}} | more
    begun = Pipeline(source).options(**options)
    is_tokens = COLUMNS[fmt] == "tokens"
    begun = begun.pretokenized("tokens") if is_tokens else begun.tokenize(tokenizer_id=str(tokenizer))
    return begun.pack_flat(max_length=256).shuffle(buffer_size=4, seed=1).batch(microbatch_size=2)


@pytest.fixture(scope="module")
def undisturbed(corpora, tiny_tokenizer):
    """Digests of the steps over local files, by format; as many as are asked for."""

    @functools.cache
    def digests(fmt: str) -> list[bytes]:
        made = pipeline(str(corpora.local), fmt, tiny_tokenizer)
        try:
            return step_digests([made], MOST_STEPS, BATCH)
        finally:
            made.close()

    return lambda fmt, steps=STEPS: digests(fmt)[:steps]


@pytest.fixture(autouse=True)
def _shards_are_opened_all_the_time(monkeypatch):
    monkeypatch.setattr("zephon.data.reader._MAX_OPEN_SHARDS", 1)


def disturbed(corpora, s3, fmt: str, moment: str, tokenizer, fault: web.Fault, enough=lambda: True) -> list[bytes]:
    """Digests of eight steps from the store, with `fault` from `moment` on; of more while it is not `enough`."""
    made = pipeline(corpora.remote, fmt, tokenizer)
    digests: list[bytes] = []
    try:
        if moment != "first read":
            digests = step_digests([made], 3, BATCH)
        if moment == "after a resume":
            state = made.checkpoint()
            made.close()
            made = pipeline(corpora.remote, fmt, tokenizer)
            s3.server.fault = fault
            made.restore(state)
        s3.server.fault = fault
        digests += step_digests([made], STEPS - len(digests), BATCH)
        while not enough() and len(digests) < MOST_STEPS:
            digests += step_digests([made], 4, BATCH)
        return digests
    finally:
        made.close()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(("fmt", "moment"), MATRIX)
def test_all_faults_that_pass_one_after_another_leave_the_stream_as_it_is(
    corpora, s3, undisturbed, tiny_tokenizer, fmt, moment
):
    met: dict[str, int] = {}
    spoilt = web.in_turn(FAULTS, met)
    digests = disturbed(corpora, s3, fmt, moment, tiny_tokenizer, spoilt, lambda: len(met) == len(FAULTS))
    assert digests == undisturbed(fmt, len(digests))
    assert met.keys() == FAULTS.keys()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("moment", ["middle", pytest.param("after a resume", marks=pytest.mark.deep)])
@pytest.mark.parametrize("fmt", CHECKED_FORMATS)
def test_bytes_damaged_on_their_way_are_fetched_again(corpora, s3, undisturbed, tiny_tokenizer, fmt, moment):
    fault = web.every(3, web.corrupt)
    assert disturbed(corpora, s3, fmt, moment, tiny_tokenizer, fault) == undisturbed(fmt)


@pytest.mark.usefixtures("impatient")
def test_a_footer_damaged_at_its_first_read_is_found_when_it_is_read_again(corpora, s3, undisturbed, tiny_tokenizer):
    try:
        digests = disturbed(corpora, s3, "parquet", "first read", tiny_tokenizer, web.every(3, web.corrupt))
        assert digests == undisturbed("parquet")
    except DataError as error:
        assert "s3://corpus/matrix" in str(error)


LASTING = {
    "credentials expired": (web.answered(403, "ExpiredToken"), "renew the credentials"),
    "object missing": (web.answered(404, "NoSuchKey"), "is gone"),
    "never well again": (web.answered(500), r"in \d+ tries over"),
    "throttled for ever": (web.answered(503, "SlowDown"), r"in \d+ tries over"),
    "always cut": (web.cut, r"in \d+ tries over"),
    "always short": (web.short, r"in \d+ tries over"),
}


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("name", ["credentials expired", "object missing", "throttled for ever"])
def test_a_fault_that_lasts_stops_the_run_with_a_sentence(corpora, s3, tiny_tokenizer, monkeypatch, name):
    monkeypatch.setattr("zephon.data.store.DEADLINE_SECONDS", 0.1)
    fault, expected = LASTING[name]
    with pytest.raises(DataError, match=expected) as caught:
        disturbed(corpora, s3, "parquet", "middle", tiny_tokenizer, web.on(lambda request: request.is_data, fault))
    assert "s3://corpus/matrix" in str(caught.value)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fmt", FORMATS)
def test_a_fault_that_lasts_is_a_sentence_at_any_read_and_never_taken_for_damage(
    corpora, s3, tmp_path, monkeypatch, fmt
):
    monkeypatch.setattr("zephon.data.store.DEADLINE_SECONDS", 0.05)
    column = COLUMNS[fmt]

    def opened(folder: str, index_dir=None):
        options = {"size_column": column, "is_text": column != "tokens", "cache": DecodeCache(0), "skips": True}
        return dataset(folder, fmt).open([column], index_dir=index_dir, spans=Spans(None, memory_bytes=1), **options)

    expected = opened(str(corpora.local)).take(np.arange(8))
    running = opened(corpora.remote, tmp_path)
    for fault, sentence in LASTING.values():
        spoilt = web.on(lambda request: request.is_data, fault)
        s3.server.fault = spoilt
        with pytest.raises(DataError, match=sentence):  # the first read
            opened(corpora.remote)
        running.close()  # lets go of what it holds; it is read on
        with pytest.raises(DataError, match=sentence):  # the middle of a run
            running.take(np.arange(8))
        with pytest.raises(DataError, match=sentence):  # after a resume, which knows the files from an index
            opened(corpora.remote, tmp_path).take(np.arange(8))
        s3.server.fault = None
        assert running.take(np.arange(8)).equals(expected)


def test_a_lance_dataset_in_a_store_is_refused_with_a_sentence(s3):
    for name in ("data/0.lance", "_versions/1.manifest"):
        s3.put(f"some.lance/{name}", b"anything")
    with pytest.raises(DataError, match=r"Lance datasets are read from local folders.*some.lance.*copy it"):
        Dataset.from_path("d", "s3://corpus/some.lance").open(["text"], size_column="text", cache=DecodeCache(0))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fmt", CHECKED_FORMATS)
def test_bytes_damaged_on_their_way_are_not_left_out_either(corpora, s3, undisturbed, tiny_tokenizer, fmt):
    made = pipeline(corpora.remote, fmt, tiny_tokenizer, on_error="skip", error_budget=1.0)
    digests = step_digests([made], 1, BATCH)
    s3.server.fault = web.every(3, web.corrupt)
    assert digests + step_digests([made], 7, BATCH) == undisturbed(fmt)
    made.close()


@pytest.mark.usefixtures("impatient")
def test_credentials_that_are_renewed_in_time_let_the_run_go_on(corpora, s3, undisturbed, tiny_tokenizer, monkeypatch):
    refused = []

    def only_new(request, response):
        if "old-key" in request.headers.get("Authorization", ""):
            refused.append(request.path)
            monkeypatch.setenv("AWS_ACCESS_KEY_ID", "new-key")
            return web.answered(400, "ExpiredToken")(request, response)
        return response

    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "old-key")
    monkeypatch.setattr("zephon.data.clients._stores", {})
    assert disturbed(corpora, s3, "parquet", "middle", tiny_tokenizer, only_new) == undisturbed("parquet")
    assert refused


@pytest.mark.parametrize("change", ["other bytes", "longer", "fewer rows", "gone"])
def test_an_object_changed_under_the_run_is_named(corpora, s3, tiny_tokenizer, tmp_path, change):
    original = (corpora.local / "parquet" / "00.parquet").read_bytes()
    table = pq.read_table(io.BytesIO(original))
    for shard in range(8):
        s3.put(f"changing/parquet/{shard}.parquet", original)
    made = pipeline("s3://corpus/changing", "parquet", tiny_tokenizer)
    next(iter(made))
    sink = io.BytesIO()
    # All of them, for one that is behind the run already need not be noticed.
    if change == "other bytes":
        pq.write_table(table.set_column(0, "text", pa.array(["other"] * ROWS)), sink, row_group_size=5)
    elif change == "longer":
        pq.write_table(pa.concat_tables([table, table]), sink, row_group_size=5)
    elif change == "fewer rows":
        pq.write_table(table.slice(0, 5), sink, row_group_size=5)
    for shard in range(8):
        if change == "gone":
            s3.delete(f"changing/parquet/{shard}.parquet")
        else:
            s3.put(f"changing/parquet/{shard}.parquet", sink.getvalue())
    with pytest.raises(DataError, match=r"'s3://corpus/changing/parquet/\d.parquet'.*(has changed|is gone)"):
        for _ in range(50):
            next(iter(made))
    made.close()


def test_an_object_uploaded_again_as_it_was_is_still_the_object(corpora, s3, undisturbed, tiny_tokenizer, monkeypatch):
    made = pipeline(corpora.remote, "arrow", tiny_tokenizer)
    digests = step_digests([made], 3, BATCH)
    for shard in range(SHARDS):
        s3.put(f"matrix/arrow/{shard:02}.arrow", (corpora.local / f"arrow/{shard:02}.arrow").read_bytes(), part="-1")
    assert digests + step_digests([made], 5, BATCH) == undisturbed("arrow")
    made.close()


def on_this_node(corpora, fmt: str, folder):
    """All rows of a dataset in the store, read by a rank of a node whose cache is below `folder`."""
    spans = Spans(NodeCache(folder / "cache", None))
    options = {"size_column": COLUMNS[fmt], "is_text": COLUMNS[fmt] != "tokens", "cache": DecodeCache(0)}
    opened = dataset(corpora.remote, fmt).open([COLUMNS[fmt]], index_dir=folder / "index", spans=spans, **options)
    table = opened.take(np.arange(opened.catalog.rows))
    opened.close()
    spans.close()
    return table


@pytest.mark.parametrize("fmt", FORMATS)
def test_what_one_rank_has_read_the_next_one_of_the_node_does_not_ask_the_store_for(corpora, s3, tmp_path, fmt):
    first = on_this_node(corpora, fmt, tmp_path)
    s3.server.forget()
    assert on_this_node(corpora, fmt, tmp_path).equals(first)
    assert not s3.server.data()


@pytest.mark.parametrize("fmt", ["parquet", "jsonl", "megatron/uint16"])
def test_a_small_shard_is_asked_for_once_however_it_is_announced_and_read(corpora, s3, tmp_path, tiny_tokenizer, fmt):
    on_this_node(corpora, fmt, tmp_path)  # leaves the index
    s3.server.forget()
    cache = {"dir": tmp_path / "other"}
    shutil.copytree(tmp_path / "index", tmp_path / "other/index")
    made = pipeline(corpora.remote, fmt, tiny_tokenizer, prefetch_buffer_size=1 << 20, io_options={"cache": cache})
    step_digests([made], STEPS, BATCH)
    made.close()
    asked = [line.path for line in s3.server.data()]
    assert asked and len(asked) == len(set(asked))


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fmt", [*CHECKED_FORMATS, "megatron/uint16"])
def test_bytes_damaged_on_their_way_do_not_stay_on_the_node(corpora, s3, tmp_path, fmt):
    expected = on_this_node(corpora, fmt, tmp_path / "sound")
    shutil.copytree(tmp_path / "sound/index", tmp_path / "damaged/index")
    wanted = ".idx" if fmt.startswith("megatron") else ""  # of the ids themselves nothing says what they were
    damage = web.on(lambda request: wanted in request.path, web.every(1, web.corrupt))
    s3.server.fault = damage
    assert on_this_node(corpora, fmt, tmp_path / "damaged").equals(expected)
