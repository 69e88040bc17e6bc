"""Stores by URI: what a path means there, what is asked of the servers, and how long we are patient with them."""

import gzip
import os
import signal
import threading
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import known_implementations
from hypothesis import given
from hypothesis import strategies as st

from support.io_data import write_shard
from support.servers import web
from support.servers.hub import Hub, Repository
from support.servers.web import Response, Server, ranged
from zephon.data.clients import FsspecStore, ObjectStore, store_of
from zephon.data.index import job_of
from zephon.data.patterns import select_names, split_pattern
from zephon.data.storage import list_files
from zephon.data.store import shown
from zephon.errors import DataError
from zephon.io import Dataset, DecodeCache

ROWS = [f"text number {n}" for n in range(20)]


@pytest.fixture
def shard(tmp_path):
    """(name, bytes) of a small Parquet file."""
    return write_shard(tmp_path / "made" / "a.parquet", ROWS).read_bytes()


@pytest.fixture
def other(tmp_path):
    """The bytes of another one."""
    return write_shard(tmp_path / "made" / "b.parquet", ["other"]).read_bytes()


def texts(uri: str, **options) -> list[str]:
    opened = Dataset.from_path("d", uri, **options).open(["text"], size_column="text", cache=DecodeCache(1 << 20))
    return opened.take(np.arange(opened.catalog.rows)).column("text").to_pylist()


@pytest.fixture
def files():
    """A web server over a dict of files: `.files`, `.server`, `.url`."""
    held: dict[str, bytes] = {}

    def route(request):
        name = request.path.lstrip("/")
        return ranged(request, held[name], f'"{hash(held[name])}"') if name in held else Response(404)

    with Server(route) as server:
        yield SimpleNamespace(files=held, server=server, url=server.url)


# Names


_PARTS = st.sampled_from(["a", "b", "ab", ".a", "_b", "a.x", "b1", "x[y"])
_PATTERNS = st.sampled_from(["*", "**", "a*", "?", "[ab]", "[!a]*", "*.x", "a", ".*", "b[0-9]", "_*", "x[[]y"])


@given(
    st.lists(st.lists(_PARTS, min_size=1, max_size=3).map("/".join), min_size=1, max_size=8),
    st.lists(_PATTERNS, min_size=1, max_size=3).map("/".join),
)
def test_patterns_mean_in_a_store_what_they_mean_in_a_folder(tmp_path_factory, paths, pattern):
    root = tmp_path_factory.mktemp("tree")
    placed = set()
    for path in paths:
        if not any(other.startswith(path + "/") or path.startswith(other + "/") for other in placed):
            placed.add(path)
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(b"x")
    in_store = sorted(select_names(placed, *split_pattern(pattern)))
    try:
        in_folder = list_files(f"{root}/{pattern}").names
    except DataError:
        in_folder = []
    if any(sign in pattern for sign in "*?["):
        assert in_store == in_folder


S3_PATHS = {
    "s3://corpus/names": ["a.jsonl", "sub/b.jsonl"],
    "s3://corpus/names/": ["a.jsonl", "sub/b.jsonl"],
    "s3a://corpus/names/a.jsonl": ["a.jsonl"],
    "s3://corpus/names/*.jsonl": ["a.jsonl"],
    "s3://corpus/names/**/*.jsonl": ["a.jsonl", "sub/b.jsonl"],
    "s3://corpus/nam*/sub": ["names/sub/b.jsonl"],
}


@pytest.fixture(params=[ObjectStore, FsspecStore])
def client(request, monkeypatch) -> type:
    """Each client that S3 is read through, the other one not being there."""
    monkeypatch.setattr("zephon.data.clients._stores", {})
    if request.param is FsspecStore:
        monkeypatch.setattr("zephon.data.clients.find_spec", lambda _name: None)
    return request.param


def test_objects_folders_and_patterns_of_s3(s3, client):
    for name in ("a.jsonl", "sub/b.jsonl", "_temporary/c.jsonl", "sub/.d.jsonl"):
        s3.put(f"names/{name}", b'{"text": "x"}\n')
    s3.put("names2/z.jsonl", b'{"text": "x"}\n')
    for path, names in S3_PATHS.items():
        listing = list_files(path)
        assert isinstance(listing.sources[0].store, client)
        assert listing.names == names, path


@pytest.mark.usefixtures("client")
def test_rows_come_from_s3_through_obstore_and_through_fsspec(s3, shard):
    s3.put("rows/a.parquet", shard)
    assert texts("s3://corpus/rows") == ROWS


def test_rows_come_from_memory(shard):
    fsspec.filesystem("memory").pipe_file("/corpus/a.parquet", shard)
    assert texts("memory://corpus") == ROWS
    assert texts("memory://corpus/*.parquet") == ROWS
    fsspec.filesystem("memory").rm("/corpus", recursive=True)


@pytest.mark.usefixtures("impatient")
def test_an_empty_folder_and_a_missing_bucket_are_named(s3):
    with pytest.raises(DataError, match="'s3://corpus/nothing-here' holds no files"):
        list_files("s3://corpus/nothing-here")
    with pytest.raises(DataError, match="'s3://no-such-bucket/x'"):
        list_files("s3://no-such-bucket/x")


# Web servers


def test_files_of_a_web_server_one_or_numbered(files, shard):
    files.files.update({f"data/{n:03}.parquet": shard for n in range(3)})
    assert texts(f"{files.url}/data/001.parquet") == ROWS
    assert texts(f"{files.url}/data/{{000..002}}.parquet") == ROWS * 3
    with pytest.raises(DataError, match=r"no such thing.*404"):
        texts(f"{files.url}/data/{{000..003}}.parquet")


def test_a_server_without_ranges_is_refused(files, shard):
    files.files["a.parquet"] = shard
    files.server.fault = lambda request, response: Response(200, shard, {"ETag": '"x"'})
    with pytest.raises(DataError, match=r"a\.parquet'.*Range request not supported"):
        texts(f"{files.url}/a.parquet")


def test_passwords_and_signatures_are_not_shown():
    assert shown("https://me:secret@host/a/b.parquet?X-Amz-Signature=abc") == "https://host/a/b.parquet"
    assert shown("s3://bucket/what?") == "s3://bucket/what?"


@pytest.mark.usefixtures("impatient")
def test_each_file_of_a_long_list_is_asked_for_again_by_itself(files):
    files.files.update({f"{n:03}.jsonl": b'{"text": "x"}\n' for n in range(200)})
    seen, lock = set(), threading.Lock()

    def fault(request, response):
        with lock:
            first = request.path not in seen
            seen.add(request.path)
        return Response(503) if first and request.path.endswith("7.jsonl") else response

    files.server.fault = fault
    assert len(list_files(f"{files.url}/{{000..199}}.jsonl").names) == 200
    assert len(files.server.log) == 220


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (Response(409), "409"),
        (Response(412), "412"),
        (Response(404), "no such thing"),
        (Response(302, b"", {"Location": "http://[::bad/"}), "in . tries"),
    ],
)
def test_odd_answers_to_the_first_request_are_errors_that_name_the_file(files, answer, said):
    files.server.fault = lambda request, response: answer
    with pytest.raises(DataError, match=rf"a\.jsonl'.*{said}"):
        list_files(f"{files.url}/a.jsonl")


@pytest.mark.usefixtures("impatient")
def test_s3_that_refuses_the_listing_is_an_error_at_once(s3):
    for status, code, said in (
        (409, "Conflict", "409|Conflict"),
        (412, "PreconditionFailed", "412|recondition"),
        (301, "PermanentRedirect", "incorrectly configured region"),
    ):
        s3.server.fault = web.answered(status, code)
        with pytest.raises(DataError, match=said):
            list_files("s3://corpus/refused")


class Hosted(MemoryFileSystem):
    """A filesystem of several hosts, such as HDFS; without a library for one of them."""

    protocol = "hosted"

    def __init__(self, host, **options):
        super().__init__(**options)
        self.host = host
        if host == "broken":
            raise OSError("Unable to load libjvm\ndlopen(/a.so) failed\ndlopen(/b.so) failed")

    @staticmethod
    def _get_kwargs_from_urls(path):
        return {"host": path.partition("://")[2].partition("/")[0]}


def test_the_host_in_a_path_is_asked_and_a_client_that_cannot_be_made_is_one_sentence(monkeypatch):
    monkeypatch.setitem(known_implementations, "hosted", {})
    fsspec.register_implementation("hosted", Hosted, clobber=True)
    assert store_of("hosted://one/data")[0]._client().host == "one"
    assert store_of("hosted://two/data")[0]._client().host == "two"
    with pytest.raises(DataError, match=r"hosted:// here \(OSError: Unable to load libjvm\); set up") as error:
        list_files("hosted://broken/data")
    assert "dlopen" not in str(error.value)


# The Hub


def commit(hub: Hub, name: str, files: dict[str, bytes], **options) -> Repository:
    """A repository with one commit."""
    repo = hub.repositories[name] = Repository(**options)
    repo.commit(files)
    return repo


def test_the_split_of_a_dataset_is_found_by_its_files(hub: Hub, shard, other):
    files = {"data/train-00000.parquet": shard, "data/train-00001.parquet": shard, "data/test.parquet": other}
    commit(hub, "org/name", {"README.md": b"x", **files})
    assert texts("hf://org/name/train") == ROWS * 2
    assert texts("hf://org/name/test") == ["other"]
    assert texts("hf://datasets/org/name/data/train-*.parquet") == ROWS * 2
    with pytest.raises(DataError, match=r"no split 'dev'; its files make the splits \['test', 'train'\]"):
        texts("hf://org/name/dev")


@pytest.mark.parametrize("log", ["_delta_log/00000.json", "metadata/v1.metadata.json"])
def test_the_folder_of_a_table_with_a_log_on_the_hub_is_refused(hub: Hub, shard, log):
    commit(hub, "org/table", {f"web/{log}": b"{}", "web/data/a.parquet": shard})
    with pytest.raises(DataError, match=r"a table of (Delta Lake|Iceberg), whose log \(web/"):
        texts("hf://datasets/org/table/web")
    assert texts("hf://datasets/org/table/web/data/*.parquet") == ROWS


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("data/*", ["data/a.parquet"]),
        ("./data/*", ["data/a.parquet"]),
        ("data/**", ["data/a.parquet", "data/raw/b.parquet"]),
        ("d*/raw/*", ["data/raw/b.parquet"]),
        (".w/*", [".w/c.parquet"]),
        ("__v/*", ["__v/d.parquet"]),
        ("**", ["data/a.parquet", "data/raw/b.parquet"]),
    ],
)
def test_patterns_of_a_card_mean_files_as_datasets_reads_them(hub, shard, pattern, found):
    repo = hub.repositories["org/name"] = Repository()
    repo.commit(dict.fromkeys(["data/a.parquet", "data/raw/b.parquet", ".w/c.parquet", "__v/d.parquet"], shard))
    repo.card = {"configs": [{"config_name": "default", "data_files": pattern}]}
    assert list_files("hf://org/name/train").names == found


def test_the_card_says_which_files_a_split_has(hub: Hub, shard, other):
    english = {"config_name": "en", "data_files": [{"split": "train", "path": "en/*.parquet"}]}
    german = {"config_name": "de", "data_files": [{"split": "train", "path": ["de/a.parquet"]}]}
    files = {"en/1.parquet": shard, "de/a.parquet": other, "de/b.parquet": shard}
    commit(hub, "org/name", files, card={"configs": [english, german]})
    assert texts("hf://org/name/en/train") == ROWS
    assert texts("hf://org/name/de/train") == ["other"]
    with pytest.raises(DataError, match=r"needs one of its configurations in the path: \['de', 'en'\]"):
        texts("hf://org/name/train")


def test_json_of_the_hub_is_json_lines_where_the_card_or_a_name_says_that_it_is_data(hub: Hub, shard):
    lines = b'{"text": "own"}\n'
    repo = commit(hub, "org/json", {"train.json": lines, "dataset_infos.json": b"{}"})
    repo.commit({"default/train/0000.parquet": shard}, "refs/convert/parquet")
    assert texts("hf://org/json/train") == ["own"]
    english = {"config_name": "en", "data_files": [{"split": "train", "path": "en/c4-train.*.json.gz"}]}
    files = {f"en/c4-train.{n}.json.gz": gzip.compress(lines) for n in range(2)} | {"de/c4-train.0.json.gz": b""}
    commit(hub, "org/c4", files, card={"configs": [english]})
    assert texts("hf://org/c4/en/train") == ["own"] * 2


def test_a_card_may_name_a_folder_alone_and_what_it_says_in_vain_is_an_error(hub: Hub, shard, other):
    repo = commit(hub, "org/name", {"train-x/a.parquet": shard, "train-x/test.parquet": other, "y/a.parquet": shard})
    repo.card = {"configs": [{"config_name": "c", "data_dir": "train-x"}, {"config_name": "d", "data_dir": "none"}]}
    assert texts("hf://org/name/c/test") == ["other"]
    with pytest.raises(DataError, match="names the folder 'none', which has no files"):
        texts("hf://org/name/d/train")
    repo.card = {"configs": [{"config_name": "c", "data_dir": "y"}]}
    assert texts("hf://org/name/c/train") == ROWS
    repo.card = {"configs": [{"config_name": "c", "data_files": {"train": "y/*.parquet"}}]}
    assert texts("hf://org/name/train") == ROWS
    repo.card = {"configs": [{"config_name": "c", "data_files": [{"split": "train", "path": 5}]}]}
    with pytest.raises(DataError, match="gives 5 as a path"):
        texts("hf://org/name/train")


@pytest.mark.parametrize(
    ("path", "card", "found"),
    [
        ("default/train", None, ["train.parquet", "default/train.parquet", "x/train.parquet"]),
        ("x/train", None, ["x/train.parquet"]),
        ("train", ".", ["train.parquet", "default/train.parquet", "x/train.parquet"]),
        ("train", "./.", ["train.parquet", "default/train.parquet", "x/train.parquet"]),
        ("default/train", "./x/.", ["x/train.parquet"]),
        ("train", "y/../x", ["x/train.parquet"]),
    ],
)
def test_the_configuration_of_a_repository_without_a_card_is_called_default(hub: Hub, shard, path, card, found):
    names = ["train.parquet", "default/train.parquet", "x/train.parquet"]
    repo = commit(hub, "org/name", dict.fromkeys(names, shard))
    repo.card = {"configs": [{"config_name": "default", "data_dir": card}]} if card else None
    listed = list_files(f"hf://org/name/{path}")
    assert sorted(listed.names) == sorted(found)


def test_what_the_hub_converted_serves_where_there_are_no_files_to_read(hub: Hub, shard):
    repo = commit(hub, "org/scripted", {"scripted.py": b"print()", "README.md": b"x"})
    with pytest.raises(DataError, match="the Hub has not converted it"):
        texts("hf://org/scripted/train")
    repo.commit({"default/train/0000.parquet": shard, "default/partial-test/0.parquet": shard}, "refs/convert/parquet")
    assert texts("hf://org/scripted/train") == ROWS
    with pytest.raises(DataError, match=r"the Hub converted .*default/partial-test"):
        texts("hf://org/scripted/test")


def test_a_revision_is_pinned_though_the_branch_moves_on(hub: Hub, shard, other):
    repo = hub.repositories["org/name"] = Repository()
    first = repo.commit({"train.parquet": shard})
    opened = Dataset.from_path("d", "hf://org/name/train").open(["text"], size_column="text", cache=DecodeCache(0))
    second = repo.commit({"train.parquet": other})
    hub.generation += 1  # links that lapse are asked for anew
    assert opened.take(np.arange(20)).column("text").to_pylist() == ROWS
    assert opened.catalog.pin == first != second
    assert texts("hf://org/name/train") == ["other"]
    assert texts(f"hf://org/name@{first}/train") == ROWS


def test_long_listings_come_in_pages(hub: Hub, shard):
    commit(hub, "org/many", {f"data/train-{n:05}.parquet": shard for n in range(230)})
    assert len(list_files("hf://org/many/train").names) == 230


def test_private_datasets_need_the_token_which_goes_to_the_hub_alone(hub: Hub, shard, monkeypatch):
    commit(hub, "org/private", {"train.parquet": shard}, token="hf_secret")
    with pytest.raises(DataError, match=r"hf://org/private/train.*HF_TOKEN"):
        texts("hf://org/private/train")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert texts("hf://org/private/train") == ROWS  # links answer 400 to a request with a token


@pytest.mark.parametrize("path", ["hf://org", "hf://org/name", "hf://org/name/a/b/c"])
def test_paths_that_name_no_split_say_how_they_are_written(hub: Hub, path):
    with pytest.raises(DataError, match="ORG/NAME"):
        list_files(path)


# Jobs


def test_ranks_of_a_job_have_one_name_and_others_none():
    torchrun = {"RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "8"}
    assert job_of({}, "1/2") is None
    assert job_of({"SLURM_JOB_ID": "5"}, "1/2") is None
    assert job_of(torchrun, "1/2") == job_of({**torchrun, "RANK": "3", "LOCAL_RANK": "3"}, "1/2")
    assert job_of(torchrun, "1/2") != job_of(torchrun, "1/3")
    assert job_of(torchrun, "1/2") != job_of({**torchrun, "MASTER_PORT": "2"}, "1/2")


def test_a_process_forked_from_one_that_read_from_s3_is_told_so(s3, shard):
    s3.put("forked/a.parquet", shard)
    assert texts("s3://corpus/forked") == ROWS
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            texts("s3://corpus/forked")
        except DataError as error:
            os._exit(0 if "'spawn' or 'forkserver'" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
