"""Files that rows name: below a folder, in a tar archive, below the prefix of a store, and nowhere else."""

import io
import pickle
import tarfile
from contextlib import ExitStack

import pytest

from support.servers.clouds import Amazon
from support.servers.hub import Hub, Repository
from support.servers.web import Response, Server, answered, every, ranged
from zephon.data import clients, media
from zephon.data.media import NoFile, open_media
from zephon.errors import DataError, PipelineError

FILES = {"a.jpg": b"first", "x/b.jpg": b"second" * 1000, "x/ü ?#%2e.jpg": b"third", "empty.jpg": b""}
SECRET = b"of somebody else"


def tar_of(files):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in [("a.jpg", b"an older one"), *files.items()]:
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


class Roots:
    """The same files as each kind of root; beside the root lies secret.jpg."""

    def __init__(self, folder, monkeypatch, stack):
        self.server = None
        self._folder, self._monkeypatch, self._stack = folder, monkeypatch, stack
        monkeypatch.setattr(clients, "_stores", {})

    def folder(self):
        for name, content in FILES.items():
            (self._folder / "media" / name).parent.mkdir(parents=True, exist_ok=True)
            (self._folder / "media" / name).write_bytes(content)
        (self._folder / "secret.jpg").write_bytes(SECRET)
        (self._folder / "media" / "link.jpg").symlink_to(self._folder / "secret.jpg")
        return str(self._folder / "media")

    def tar(self):
        (self._folder / "secret.jpg").write_bytes(SECRET)
        (self._folder / "media.tar").write_bytes(tar_of(FILES))
        return str(self._folder / "media.tar")

    def s3(self):
        bucket = Amazon()
        for name, content in FILES.items():
            bucket.put(f"media/{name}", content)
        bucket.put("media.tar", tar_of(FILES))
        bucket.put("secret.jpg", SECRET)
        for name, value in bucket.environment.items():
            self._monkeypatch.setenv(name, value)
        self.server = self._stack.enter_context(bucket.server)
        return "s3://corpus/media/"

    def s3_tar(self):
        return self.s3().rstrip("/") + ".tar"

    def http(self):
        served = {**{f"/media/{name}": each for name, each in FILES.items()}, "/secret.jpg": SECRET}

        def route(request):
            content = served.get(request.path)
            return Response(404) if content is None else ranged(request, content, '"1"')

        self.server = self._stack.enter_context(Server(route))
        return f"{self.server.url}/media"

    def hf(self):
        hub = self._stack.enter_context(Hub())
        self._monkeypatch.setenv("HF_ENDPOINT", hub.server.url)
        hub.repositories["org/name"] = Repository()
        files = {**{f"media/{name}": content for name, content in FILES.items()}, "secret.jpg": SECRET}
        return f"hf://datasets/org/name@{hub.repositories['org/name'].commit(files)}/media"


KINDS = ["folder", "tar", "s3", "s3_tar", "http", "hf"]


@pytest.fixture
def roots(tmp_path, monkeypatch):
    with ExitStack() as stack:
        yield Roots(tmp_path, monkeypatch, stack)


@pytest.mark.parametrize("kind", KINDS)
def test_files_are_read_below_a_root_and_nowhere_else(roots, kind):
    root = getattr(roots, kind)()
    found = open_media(root)
    for files in (found, pickle.loads(pickle.dumps(found))):
        assert {name: files.read(name) for name in FILES} == FILES
        assert files.read("./x/../a.jpg") == b"first"
    assert found.is_slow == (kind in ("s3", "s3_tar", "http", "hf"))
    with pytest.raises(NoFile, match=r"'none\.jpg'"):
        found.read("none.jpg")
    for name in ("../secret.jpg", "x/../../secret.jpg", "..", "", ".", "/etc/hosts", "a\0b", "link.jpg", "../media"):
        with pytest.raises(NoFile):
            found.read(name)
    assert not roots.server or not any("secret" in line.path for line in roots.server.log)


@pytest.mark.parametrize("kind", KINDS)
def test_a_large_file_is_not_read(roots, kind, monkeypatch):
    monkeypatch.setattr(media, "MAX_FILE_BYTES", 5999)
    found = open_media(getattr(roots, kind)())
    with pytest.raises(NoFile, match=r"the file 'x/b\.jpg' is larger than 5,999 bytes"):
        found.read("x/b.jpg")
    assert not roots.server or all(line.sent < 3000 for line in roots.server.data("b.jpg"))


def test_a_store_that_fails_is_asked_again_and_one_that_refuses_ends_the_run(roots, monkeypatch):
    monkeypatch.setattr("zephon.data.store.FIRST_WAIT_SECONDS", 0.01)
    found = open_media(roots.s3())
    roots.server.fault = every(1, answered(503, "SlowDown"))
    assert found.read("x/b.jpg") == FILES["x/b.jpg"]
    roots.server.fault = answered(403, "AccessDenied")
    with pytest.raises(DataError, match=r"'s3://corpus/media/a\.jpg' cannot be read: access is refused"):
        found.read("a.jpg")


def test_a_root_that_is_none_is_refused(roots, tmp_path):
    with pytest.raises(PipelineError, match=r"media_root is .*nowhere; expected an existing folder, a tar"):
        open_media(str(tmp_path / "nowhere"))
    (tmp_path / "a.tar.gz").write_bytes(b"x")
    with pytest.raises(PipelineError, match=r"a\.tar\.gz; expected an existing folder, a tar archive that is not"):
        open_media(str(tmp_path / "a.tar.gz"))
    (tmp_path / "cut.tar").write_bytes(tar_of(FILES)[:3000])
    with pytest.raises(PipelineError, match=r"media_root is .*cut\.tar, which cannot be used: "):
        open_media(str(tmp_path / "cut.tar"))
    with pytest.raises(PipelineError, match="of kind nonsense://"):
        open_media("nonsense://a/b")
    with pytest.raises(PipelineError, match=r"names no folder; write hf://datasets/ORG/NAME\[@REVISION\]/PATH"):
        open_media("hf://org/name/train")


def test_an_archive_that_changes_ends_the_run(roots, tmp_path):
    found = open_media(roots.tar())
    (tmp_path / "media.tar").write_bytes(tar_of({**FILES, "a.jpg": b"other"}) + b"\0" * 512)
    with pytest.raises(DataError, match="has changed since the dataset was listed"):
        found.read("a.jpg")
