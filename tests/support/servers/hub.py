"""The part of the Hub's API that datasets are found and read through, over repositories in memory."""

import hashlib
import json
from dataclasses import dataclass, field
from urllib.parse import quote

from support.servers.web import Request, Response, Server, ranged


@dataclass
class Repository:
    """Commits are {path: content}; branches name the newest commit of each."""

    token: str | None = None
    card: dict[str, object] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """A new commit of exactly `files`, at the tip of `branch`."""
        digest = hashlib.sha1(branch.encode())
        for path, content in sorted(files.items()):
            digest.update(path.encode() + b"\0" + content)
        sha = digest.hexdigest()
        self.commits[sha] = dict(files)
        self.branches[branch] = sha
        return sha


class Hub:
    """`repositories` by "org/name". Files are served after a redirect, as the Hub does, from links that lapse."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.generation = 0  # links of an earlier generation have lapsed
        self.server = Server(self._route)

    def __enter__(self) -> "Hub":
        self.server.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.__exit__(*error)

    def _route(self, request: Request) -> Response:
        parts = request.path.strip("/").split("/")
        if parts[:1] == ["cdn"]:
            if "Authorization" in request.headers:
                return Response(400, b"a link takes no token")
            if int(parts[1]) != self.generation:
                return Response(403, b"link lapsed")
            files = self.repositories[f"{parts[2]}/{parts[3]}"].commits[parts[4]]
            content = files["/".join(parts[5:])]
            return ranged(request, content, f'"{len(content)}"')
        if parts[:2] == ["api", "datasets"]:
            return self._api(request, f"{parts[2]}/{parts[3]}", parts[4:])
        if parts[:1] == ["datasets"] and parts[3:4] == ["resolve"]:
            name, repo = f"{parts[1]}/{parts[2]}", self.repositories.get(f"{parts[1]}/{parts[2]}")
            refused = _refused(request, repo)
            if refused:
                return refused
            commit, path = parts[4], "/".join(parts[5:])
            if path not in repo.commits.get(commit, {}):
                return _error(404, "EntryNotFound")
            host = request.headers["Host"].replace("127.0.0.1", "localhost")
            link = f"http://{host}/cdn/{self.generation}/{name}/{commit}/{quote(path)}"
            size = str(len(repo.commits[commit][path]))
            return Response(302, b"", {"Location": link, "X-Repo-Commit": commit, "X-Linked-Size": size})
        return _error(404, "RepoNotFound")

    def _api(self, request: Request, name: str, rest: list[str]) -> Response:
        repo = self.repositories.get(name)
        refused = _refused(request, repo)
        if refused:
            return refused
        kind = rest[0] if rest else "revision"
        revision = "/".join(rest[1:]) or "main"
        commit = repo.branches.get(revision, revision)
        if commit not in repo.commits:
            return _error(404, "RevisionNotFound")
        if kind == "revision":
            info = {
                "_id": "1", "id": name, "sha": commit, "private": repo.token is not None, "tags": [], "siblings": [],
                "cardData": repo.card if revision != "refs/convert/parquet" else {}, "downloads": 0, "likes": 0,
            }  # fmt: skip
            return Response(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
        entries = []
        for path, content in repo.commits[commit].items():
            entry = {"type": "file", "oid": hashlib.sha1(content).hexdigest(), "size": len(content), "path": path}
            if path.endswith((".parquet", ".gz", ".zst")):
                sha = hashlib.sha256(content).hexdigest()
                entry["lfs"] = {"oid": sha, "size": len(content), "pointerSize": 134}
            entries.append(entry)
        first = int(request.query.get("cursor", ["0"])[0])
        headers = {"Content-Type": "application/json"}
        if first + 100 < len(entries):
            page = request.path + f"?recursive=True&cursor={first + 100}"
            headers["Link"] = f'<http://{request.headers["Host"]}{page}>; rel="next"'
        return Response(200, json.dumps(entries[first : first + 100]).encode(), headers)


def _refused(request: Request, repo: Repository | None) -> Response | None:
    if repo is None or (repo.token and request.headers.get("Authorization") != f"Bearer {repo.token}"):
        return _error(401 if repo is not None else 404, "RepoNotFound")
    return None


def _error(status: int, code: str) -> Response:
    return Response(status, json.dumps({"error": code}).encode(), {"X-Error-Code": code, "X-Error-Message": code})
