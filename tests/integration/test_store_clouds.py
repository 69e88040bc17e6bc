"""gs:// and az:// through their real clients, against servers on loopback that speak Google's and Azure's APIs."""

import os
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support import step_digests
from support.servers import web
from support.servers.clouds import Amazon, Azure, Bucket, Google
from zephon import DataRecipe, Pipeline
from zephon.data.storage import list_files
from zephon.errors import DataError
from zephon.io import Dataset, DecodeCache

BATCH, STEPS, SHARDS = 8, 8, 60
KINDS = {"gs": Google, "az": Azure}


@pytest.fixture(params=KINDS)
def cloud(request, monkeypatch) -> Iterator[tuple[str, Bucket]]:
    """(URI of a bucket, the bucket), named in the environment as these clouds' own tools have it."""
    bucket = KINDS[request.param]()
    with bucket.server:
        for key, value in bucket.environment.items():
            monkeypatch.setenv(key, value)
        monkeypatch.setattr("zephon.data.clients._stores", {})
        yield f"{request.param}://corpus", bucket


@pytest.fixture
def corpus(tmp_path, cloud) -> tuple[str, str]:
    """The same shards in (a local folder, the bucket): more than one page of a listing, and much of it junk."""
    uri, bucket = cloud
    words = np.random.default_rng(5).integers(0, 10**6, (SHARDS, 40, 12))
    for shard in range(SHARDS):
        texts = [" ".join(map(str, row)) for row in words[shard].tolist()]
        path = tmp_path / "web" / f"part {shard:02}.parquet"
        path.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"text": texts, "junk": ["x" * 3000] * 40}), path, compression="none")
        bucket.put(f"web/{path.name}", path.read_bytes())
    return str(tmp_path / "web"), f"{uri}/web"


def pipeline(path: str, tokenizer, dp_degree: int = 1, group: int = 0) -> Pipeline:
    recipe = {"canonical_replicas": 4, "chunk_size": 32, "sources": [{"name": "web", "path": path}]}
    options = {"dp_degree": dp_degree, "dp_group_id": group, "global_batch": BATCH}
    return Pipeline.from_recipe(
        DataRecipe.from_dict(recipe), tokenizer=tokenizer, seq_len=128, microbatch_size=2, **options
    )


def test_objects_folders_and_patterns_are_listed_over_pages(cloud):
    uri, bucket = cloud
    for n in range(130):
        bucket.put(f"folder/é {n:03}.txt", bytes(n))
    bucket.put("folder/_hidden.txt", b"")
    bucket.put("folder-2/other.txt", b"")
    found = list_files(f"{uri}/folder")
    assert found.names == [f"é {n:03}.txt" for n in range(130)] and found.sizes.tolist() == list(range(130))
    assert list_files(f"{uri}/folder/é 007.txt").names == ["é 007.txt"]
    assert list_files(f"{uri}/fold*/*1.txt").names == [f"folder/é {n:03}.txt" for n in range(1, 130, 10)]
    with pytest.raises(DataError, match="holds no files"):
        list_files(f"{uri}/nothing")
    assert bytes(found.file(100).fetch(10, 20)) == bytes(20)


def test_a_run_is_the_local_one_and_reads_little_more_than_its_column(cloud, corpus, tiny_tokenizer):
    local, remote = corpus
    expected = step_digests([pipeline(local, tiny_tokenizer)], STEPS, BATCH)
    for dp_degree in (1, 2):
        runs = [pipeline(remote, tiny_tokenizer, dp_degree, group) for group in range(dp_degree)]
        assert step_digests(runs, STEPS, BATCH) == expected
    assert max(line.sent for line in cloud[1].server.data("part")) < 20_000  # of 130,000


@pytest.mark.usefixtures("impatient")
def test_a_run_is_the_local_one_whatever_passing_faults_it_meets(cloud, corpus, tiny_tokenizer, monkeypatch):
    local, remote = corpus
    faults = {
        "latency": web.slow(0.01),
        "429": web.answered(429, "TooManyRequests"),
        "429 and when to come back": web.answered(429, "TooManyRequests", Retry_After="0.05"),
        "500": web.answered(500),
        "503": web.answered(503, "ServerBusy"),
        "connection cut": web.cut,
        "fewer bytes than asked for": web.short,
        "fewer bytes than promised": web.long,
    }
    met: dict[str, int] = {}
    cloud[1].server.fault = web.in_turn(faults, met)
    run = pipeline(remote, tiny_tokenizer)
    assert step_digests([run], STEPS, BATCH) == step_digests([pipeline(local, tiny_tokenizer)], STEPS, BATCH)
    assert met.keys() == faults.keys()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (web.answered(403, "AuthenticationFailed"), "renew the credentials"),
        (web.answered(401, "InvalidAuthenticationToken"), "renew the credentials"),
        (web.answered(404, "NoSuchKey"), "is gone"),
        (web.answered(503, "ServerBusy"), r"in \d+ tries over"),
    ],
)
def test_a_fault_that_lasts_is_a_sentence(cloud, corpus, monkeypatch, fault, sentence):
    monkeypatch.setattr("zephon.data.store.DEADLINE_SECONDS", 0.1)
    dataset = Dataset.from_path("d", corpus[1]).open(["text"], size_column="text", cache=DecodeCache(0))
    cloud[1].server.fault = web.on(lambda request: request.is_data, fault)
    with pytest.raises(DataError, match=sentence) as caught:
        dataset.take(np.arange(50))
    assert corpus[1] in str(caught.value)


def test_keys_that_azure_does_not_know_are_a_sentence(monkeypatch):
    with Azure().server as server:
        monkeypatch.setattr("zephon.data.clients._stores", {})
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", server.url)
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "other")
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "b3RoZXI=")
        with pytest.raises(DataError, match=r"az://corpus/web'.*renew the credentials"):
            list_files("az://corpus/web")


@pytest.mark.parametrize(
    ("account", "uri", "sentence"),
    [
        (None, "abfss://corpus@mine.dfs.core.windows.net/web", 'is not set; expected "mine", the account of'),
        ("other", "abfss://corpus@mine.dfs.core.windows.net/web", 'is "other"; expected "mine", the account of'),
        (None, "az://corpus/web", "the account of Azure is missing; set AZURE_STORAGE_ACCOUNT_NAME"),
    ],
)
def test_an_account_of_azure_that_is_missing_or_another_one_is_a_sentence(monkeypatch, account, uri, sentence):
    monkeypatch.setattr("zephon.data.clients._stores", {})
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    if account:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", account)
    with pytest.raises(DataError, match=sentence):
        list_files(uri)


def test_a_path_may_name_the_account_of_azure_that_is_in_use(monkeypatch):
    held = Azure()
    held.put("web/a.txt", b"text")
    with held.server:
        monkeypatch.setattr("zephon.data.clients._stores", {})
        for key, value in held.environment.items():
            monkeypatch.setenv(key, value)
        assert list_files("abfss://corpus@zephon.dfs.core.windows.net/web").names == ["a.txt"]


class OpenBucket(Amazon):
    """A public bucket, which knows no keys."""

    def _route(self, request: web.Request) -> web.Response:
        return web.Response(403) if "Authorization" in request.headers else super()._route(request)


class SharedContainer(Azure):
    """A container that is shared by links."""

    def _route(self, request: web.Request) -> web.Response:
        return Bucket._route(self, request) if request.query.get("sig") == ["c2lnbmVk"] else web.Response(403)


@pytest.mark.parametrize(
    ("bucket", "uri", "keys"),
    [
        (OpenBucket, "s3://corpus", {"AWS_SKIP_SIGNATURE": "true"}),
        (SharedContainer, "az://corpus", {"AZURE_STORAGE_SAS_TOKEN": "sv=2024-11-04&sig=c2lnbmVk"}),
    ],
)
def test_public_buckets_are_read_without_keys_and_shared_containers_by_their_link(bucket, uri, keys, monkeypatch):
    held = bucket()
    held.put("web/a.txt", b"text")
    with held.server:
        monkeypatch.setattr("zephon.data.clients._stores", {})
        named = {key: value for key, value in held.environment.items() if "KEY" not in key}
        for key, value in {**named, **keys}.items():
            monkeypatch.setenv(key, value)
        listing = list_files(f"{uri}/web")
        assert listing.names == ["a.txt"] and bytes(listing.file(0).fetch(0, 4)) == b"text"
