"""The seed recipe, web text on S3 and code on the Hub: the same global batches from stores as from local files."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import step_digests
from support.servers import web
from support.servers.hub import Hub, Repository
from zephon import Pipeline
from zephon.errors import CheckpointError
from zephon.io import Dataset
from zephon.work import StaticMixtureWorkSource

BATCH, STEPS = 8, 6
RECIPE = """
seed = 42
canonical_replicas = 8
chunk_size = 64

[[sources]]
name = "web"
path = "{web}"
weight = 3.0

[[sources]]
name = "code"
path = "{code}"
weight = 1.0
text_field = "content"
"""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, s3_session) -> SimpleNamespace:
    """The two datasets as local files; the web text is in the store too. Much of it is junk."""
    root = tmp_path_factory.mktemp("corpus")
    random = np.random.default_rng(11)
    (root / "web").mkdir()
    (root / "code/data").mkdir(parents=True)
    for shard in range(4):
        texts = [" ".join(map(str, row)) for row in random.integers(0, 10**9, (600, 40)).tolist()]
        junk = [random.bytes(400) for _ in texts]
        pq.write_table(pa.table({"text": texts, "junk": junk}), root / f"web/{shard}.parquet", row_group_size=150)
    for shard in range(2):
        lines = [json.dumps({"content": f"def f{n}():\n    return {n * shard}\n" * 9}) + "\n" for n in range(300)]
        (root / f"code/data/train-{shard}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode(), mtime=0))
    s3_session.upload(root / "web", "recipe/web")
    files = {f"data/{path.name}": path.read_bytes() for path in (root / "code/data").iterdir()}
    return SimpleNamespace(root=root, code=files)


@pytest.fixture
def stored(corpus, s3, hub: Hub, tmp_path) -> SimpleNamespace:
    """Recipes: `local` over the files, `remote` over the stores."""
    hub.repositories["org/code"] = Repository()
    commit = hub.repositories["org/code"].commit({**corpus.code, "README.md": b"Code."})
    local, remote = tmp_path / "local.toml", tmp_path / "remote.toml"
    local.write_text(RECIPE.format(web=corpus.root / "web", code=corpus.root / "code"))
    remote.write_text(RECIPE.format(web="s3://corpus/recipe/web", code="hf://org/code/train"))
    return SimpleNamespace(local=local, remote=remote, s3=s3, hub=hub, commit=commit, corpus=corpus)


def run(recipe: Path, tokenizer: Path, ranks: int, isolate: bool = False, **cache) -> list[bytes]:
    options = {"isolate": isolate, **({"io_options": {"cache": cache}} if cache else {})}
    made = [
        Pipeline.from_recipe(
            recipe, tokenizer=tokenizer, seq_len=128, microbatch_size=BATCH // ranks, global_batch=BATCH,
            dp_degree=ranks, dp_group_id=rank, **options,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        return step_digests(made, STEPS, BATCH)
    finally:
        for pipeline in made:
            pipeline.close()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("faults", [pytest.param(False, marks=pytest.mark.deep), True])
def test_global_batches_are_the_same_from_stores_and_files_on_1_2_and_4_ranks(stored, tiny_tokenizer, faults):
    expected = run(stored.local, tiny_tokenizer, 1)
    for ranks in (1, 2, 4):
        if faults:
            bad = [web.answered(503, "SlowDown"), web.cut, web.answered(500), web.short, web.slow(0.05)]
            turns = [web.every(5 + n, fault) for n, fault in enumerate(bad)]

            def spoil(request, response, turns=turns):
                for fault in turns:
                    response = fault(request, response)
                return response

            stored.s3.server.fault = stored.hub.server.fault = spoil
        assert run(stored.remote, tiny_tokenizer, ranks) == expected, ranks
    assert not faults or {line.status for line in stored.s3.server.log} >= {500, 503}


def test_an_engine_in_a_process_of_its_own_reads_stores(stored, tiny_tokenizer, tmp_path):
    cache = str(tmp_path / "cache")
    assert run(stored.remote, tiny_tokenizer, 1, isolate=True, dir=cache) == run(stored.local, tiny_tokenizer, 1)


RANK = """
import json, sys
from zephon import Pipeline
recipe, tokenizer, rank, ranks, cache_dir = sys.argv[1:]
pipeline = Pipeline.from_recipe(
    recipe, tokenizer=tokenizer, seq_len=128, microbatch_size=8, global_batch=8, dp_degree=int(ranks),
    dp_group_id=int(rank), io_options={"cache": {"dir": cache_dir}},
)
stream, records = iter(pipeline), {}
while len(records) < 16:
    batch = next(stream)
    records.update(zip(map(str, batch.sequence_numbers.tolist()), (digest.hex() for digest in batch.digests)))
print(json.dumps(records))
pipeline.close()
"""


def start_rank(stored, tokenizer: Path, rank: int, ranks: int, cache: Path, job: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "RANK": str(rank), "ZEPHON_JOB_ID": job}
    command = [sys.executable, "-c", RANK, str(stored.remote), str(tokenizer), str(rank), str(ranks), str(cache)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)


def records_of(process: subprocess.Popen[str]) -> dict[str, str]:
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    return json.loads(out)


def column_bytes(folder: Path) -> int:
    total = 0
    for path in folder.glob("*.parquet"):
        metadata = pq.ParquetFile(path).metadata
        total += sum(metadata.row_group(i).column(0).total_compressed_size for i in range(metadata.num_row_groups))
    return total


def test_ranks_of_a_node_list_once_and_share_every_download(stored, tiny_tokenizer, tmp_path):
    processes = [start_rank(stored, tiny_tokenizer, rank, 2, tmp_path / "node", "job 1") for rank in range(2)]
    assert len({number for process in processes for number in records_of(process)}) >= 32
    lists = [line for line in stored.s3.server.log if line.method == "GET" and line.range is None]
    assert len(lists) == 1
    assert sum("/tree/" in line.path for line in stored.hub.server.log) == 1
    # Column chunks leave the store once for both ranks; the end of each file twice, for the index and for a reader.
    columns = column_bytes(stored.corpus.root / "web")
    sizes = {f"/corpus/recipe/web/{path.name}": path.stat().st_size for path in (stored.corpus.root / "web").iterdir()}
    served = stored.s3.server.data("recipe/web")
    ends = [line for line in served if line.range[1] == sizes[line.path]]
    assert sum(line.sent for line in served) - sum(line.sent for line in ends) <= 1.1 * columns
    assert len(ends) <= 2 * len(sizes)

    # The next rank of the job on this node asks the stores for nothing at all.
    stored.s3.server.forget()
    stored.hub.server.forget()
    again = start_rank(stored, tiny_tokenizer, 0, 2, tmp_path / "node", "job 1")
    assert records_of(again)
    assert stored.s3.server.log == []
    assert stored.hub.server.log == []


def test_all_that_ranks_fetch_is_at_most_a_tenth_more_than_the_column(s3, tiny_tokenizer, tmp_path):
    random = np.random.default_rng(2)
    for shard in range(3):
        texts = [random.bytes(2000).hex() for _ in range(1500)]
        junk = [random.bytes(2000) for _ in texts]
        path = tmp_path / f"web/{shard}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": texts, "junk": junk}), path, row_group_size=300)
        s3.put(f"tenth/{path.name}", path.read_bytes())
    source = StaticMixtureWorkSource([Dataset.from_path("web", "s3://corpus/tenth")], token_estimation=False)

    def rank(group: int) -> Pipeline:
        options = {"canonical_replicas": 2, "global_batch": 8, "dp_degree": 2, "dp_group_id": group}
        return (
            Pipeline(source)
            .options(io_options={"cache": {"dir": tmp_path / "cache"}}, **options)
            .tokenize(tokenizer_id=str(tiny_tokenizer))
            .pack_flat(max_length=1024)
            .batch(microbatch_size=4)
        )

    ranks = [rank(0), rank(1)]
    assert len(set(step_digests(ranks, 200, 8))) == 200
    for made in ranks:
        made.close()
    column = column_bytes(tmp_path / "web")
    fetched = sum(line.sent for line in s3.server.data("tenth"))  # footers too
    assert 0.5 * column < fetched <= 1.1 * column < 0.8 * sum(path.stat().st_size for path in path.parent.iterdir())


def test_a_restore_onto_another_revision_is_refused_and_says_which(stored, tiny_tokenizer):
    options = {"tokenizer": tiny_tokenizer, "seq_len": 128, "microbatch_size": 8}
    made = Pipeline.from_recipe(stored.remote, **options)
    next(iter(made))
    state = made.checkpoint()
    made.close()
    stored.hub.repositories["org/code"].commit({**stored.corpus.code, "README.md": b"Code, revised."})
    with pytest.raises(CheckpointError, match=stored.commit):
        Pipeline.from_recipe(stored.remote, **options).restore(state)
    pinned = stored.remote.with_name("pinned.toml")
    pinned.write_text(stored.remote.read_text().replace("org/code/", f"org/code@{stored.commit}/"))
    again = Pipeline.from_recipe(pinned, **options).restore(state)
    next(iter(again))
    again.close()
