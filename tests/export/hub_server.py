"""A local Hub server with the routes that huggingface_hub calls, in memory, over real HTTP.

It implements tokens, private repositories, large files by LFS, and atomic commits.
"""

import base64
import hashlib
import json
import re
import socket
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any, ClassVar, Self
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
import yaml
from huggingface_hub import constants

OWNER, STRANGER = "ada", "eve"
REPO = r"(?P<repo>[^/]+/[^/]+)"
REVISION = r"(?P<revision>[^/]+)"


@dataclass(frozen=True)
class Blob:
    data: bytes
    large: bool

    @property
    def oid(self) -> str:
        if self.large:
            return hashlib.sha256(self.data).hexdigest()
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()


@dataclass
class Repository:
    private: bool
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: dict[str, Blob]) -> str:
        sha = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        return sha


@dataclass
class Reply:
    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)


class RefusedError(Exception):
    """Answer to a request that is refused."""

    def __init__(self, status: int, message: str, code: str = "") -> None:
        super().__init__(message)
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.reply = Reply(status, json.dumps({"error": message}).encode(), headers)


@dataclass
class Call:
    """One request with its user."""

    user: str | None
    body: bytes
    path: str
    parts: dict[str, str]

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class HubServer:
    """A Hub server that runs inside a `with` block.

    Files of at least `large_bytes` go by LFS.
    """

    def __init__(self, large_bytes: int = 10_000) -> None:
        self.large_bytes = large_bytes
        self.token, self.stranger = "hf_ownerOwnerOwner", "hf_strangerStranger"
        self.users = {self.token: OWNER, self.stranger: STRANGER}
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fail_at: int | None = None
        """Number of the first request, from 1, whose connection is lost; all later ones too."""
        self.loses_replies = False
        """Whether requests are executed and only their replies are lost."""
        self.lock = Lock()
        handler = type("HubHandler", (Handler,), {"hub": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        # another host for the client, which must not get its token
        self.cdn = f"http://localhost:{self.http.server_port}"
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> Self:
        Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def files(self, repo: str, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a repository by path; empty if it does not exist."""
        if repo not in self.repositories:
            return {}
        found = _snapshot(self.repositories[repo], revision)[1]
        return {path: blob.data for path, blob in found.items()}

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """Return environment variables that make another process use this Hub only."""
        secret = {"HF_TOKEN": token} if token else {}
        # hf_xet has its own protocol; without it the client uses LFS
        return secret | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_XET": "1",
        }

    def connect(self, patch: pytest.MonkeyPatch, home: Path, token: str | None = None) -> None:
        """Make huggingface_hub of this process use this Hub only, without waiting for retries."""
        template = f"{self.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr(constants, "ENDPOINT", self.url)
        # for calls without an HfApi object
        patch.setattr(huggingface_hub.hf_api.api, "endpoint", self.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr("huggingface_hub.utils._http.time", SimpleNamespace(sleep=lambda _: None))
        patch.delenv("HF_TOKEN", raising=False)
        if token:
            patch.setenv("HF_TOKEN", token)
        # huggingface_hub 2.4 passes files to its client in a deprecated way
        warnings.filterwarnings("ignore", "Use 'content=", DeprecationWarning)
        # an open session may be offline or connected to another server
        huggingface_hub.close_session()

    def loses(self, line: str) -> bool:
        """Count a request; return whether it is lost."""
        if line.endswith("/agent-harnesses"):
            # sent once per process, and optional
            return False
        with self.lock:
            self.requests.append(line)
            number = len(self.requests)
        return self.fail_at is not None and number >= self.fail_at

    def answer(self, method: str, path: str, user: str | None, body: bytes) -> Reply:
        """Find the route and call it."""
        for verb, pattern, route in ROUTES:
            if verb == method and (match := re.fullmatch(pattern, path)):
                parts = {name: unquote(value or "") for name, value in match.groupdict().items()}
                try:
                    with self.lock:
                        return route(self, Call(user, body, path, parts))
                except RefusedError as refusal:
                    return refusal.reply
        return RefusedError(404, f"no route {method} {path}").reply


def _snapshot(repository: Repository, revision: str) -> tuple[str, dict[str, Blob]]:
    sha = repository.branches.get(revision, revision)
    if sha not in repository.commits:
        raise RefusedError(404, f"no revision {revision}", "RevisionNotFound")
    return sha, repository.commits[sha]


def _open(hub: HubServer, call: Call, *, write: bool = False) -> Repository:
    """Return the repository of a request; refuse a user without the right to use it."""
    repository = hub.repositories.get(call.parts["repo"])
    if repository is None or (repository.private and call.user != OWNER):
        raise RefusedError(404 if call.user else 401, "Repository not found", "RepoNotFound")
    if write and call.user != OWNER:
        raise RefusedError(403 if call.user else 401, "no write access to this repository")
    return repository


def _reply(value: Any, status: int = 200, **headers: str) -> Reply:
    return Reply(status, json.dumps(value).encode(), {"Content-Type": "application/json"} | headers)


def _whoami(hub: HubServer, call: Call) -> Reply:
    del hub
    if call.user is None:
        raise RefusedError(401, "Invalid username or password.")
    return _reply({"type": "user", "name": call.user, "orgs": [], "auth": {"type": "access_token"}})


def _create(hub: HubServer, call: Call) -> Reply:
    if call.user is None:
        raise RefusedError(401, "Invalid username or password.")
    asked = call.json
    owner = asked.get("organization") or call.user
    if owner != call.user:
        raise RefusedError(403, f"You don't have the rights to create a model under {owner}")
    repo = f"{owner}/{asked['name']}"
    url = {"url": f"{hub.url}/{repo}", "id": repo}
    if repo in hub.repositories:
        return _reply({"error": "You already created this model repo", **url}, 409)
    private = asked.get("visibility") == "private" or bool(asked.get("private"))
    hub.repositories[repo] = Repository(private)
    hub.repositories[repo].commit("main", {})
    return _reply(url)


def _validate(hub: HubServer, call: Call) -> Reply:
    del hub
    _, front, _ = call.json["content"].split("---\n", 2)
    found, errors = yaml.safe_load(front), []
    if not re.fullmatch(r"[a-z0-9.+-]+", str(found.get("license"))):
        errors.append({"message": f'"license" must be one of the known ones: {found}'})
    return _reply({"errors": errors, "warnings": []}, 400 if errors else 200)


def _settings(hub: HubServer, call: Call) -> Reply:
    repository, asked = _open(hub, call, write=True), call.json
    if "visibility" in asked:
        repository.private = asked["visibility"] == "private"
    return _reply({})


def _preupload(hub: HubServer, call: Call) -> Reply:
    there = _snapshot(_open(hub, call, write=True), call.parts["revision"])[1]
    files = [
        {
            "path": file["path"],
            "uploadMode": "lfs" if file["size"] >= hub.large_bytes else "regular",
            "shouldIgnore": False,
            "oid": there[file["path"]].oid if file["path"] in there else None,
        }
        for file in call.json["files"]
    ]
    return _reply({"files": files})


def _batch(hub: HubServer, call: Call) -> Reply:
    _open(hub, call, write=True)
    objects = [_upload_actions(hub, **asked) for asked in call.json["objects"]]
    return _reply({"transfer": "basic", "objects": objects})


def _upload_actions(hub: HubServer, oid: str, size: int) -> dict[str, Any]:
    known: dict[str, Any] = {"oid": oid, "size": size}
    if oid in hub.objects:
        return known
    upload, verify = {"href": f"{hub.url}/_lfs/{oid}"}, {"href": f"{hub.url}/_lfs/verify"}
    return known | {"actions": {"upload": upload, "verify": verify}}


def _put(hub: HubServer, call: Call) -> Reply:
    if hashlib.sha256(call.body).hexdigest() != call.parts["oid"]:
        raise RefusedError(400, "The checksum of the upload is wrong")
    hub.objects[call.parts["oid"]] = call.body
    return _reply({})


def _verify(hub: HubServer, call: Call) -> Reply:
    if call.user is None or len(hub.objects.get(call.json["oid"], b"")) != call.json["size"]:
        raise RefusedError(404, "Object not found")
    return _reply({})


def _commit(hub: HubServer, call: Call) -> Reply:
    repository, branch = _open(hub, call, write=True), call.parts["revision"]
    sha, files = _snapshot(repository, branch)
    files = dict(files)
    for line in call.body.splitlines():
        item = json.loads(line)
        key, value = item["key"], item["value"]
        if key == "header" and value.get("parentCommit", sha) != sha:
            raise RefusedError(412, "A commit has happened since. Please refresh and try again.")
        if key == "file":
            files[value["path"]] = Blob(base64.b64decode(value["content"]), large=False)
        elif key == "lfsFile":
            if value["oid"] not in hub.objects:
                raise RefusedError(400, f"LFS object {value['oid']} was not uploaded")
            files[value["path"]] = Blob(hub.objects[value["oid"]], large=True)
        elif key == "deletedFile":
            del files[value["path"]]
        elif key == "deletedFolder":
            files = {name: files[name] for name in files if not name.startswith(value["path"])}
    made = repository.commit(branch, files)
    url = f"{hub.url}/{call.parts['repo']}/commit/{made}"
    return _reply({"commitUrl": url, "commitOid": made, "success": True})


def _info(hub: HubServer, call: Call) -> Reply:
    repository, repo = _open(hub, call), call.parts["repo"]
    sha, files = _snapshot(repository, call.parts.get("revision") or "main")
    state = {"private": repository.private, "gated": False, "downloads": 0, "likes": 0}
    siblings = [{"rfilename": path} for path in files]
    return _reply(
        {"id": repo, "modelId": repo, "sha": sha, "tags": [], "siblings": siblings, **state}
    )


def _tree(hub: HubServer, call: Call) -> Reply:
    _, files = _snapshot(_open(hub, call), call.parts["revision"])
    return _reply([_entry(path, blob) for path, blob in files.items()])


def _entry(path: str, blob: Blob) -> dict[str, Any]:
    size = len(blob.data)
    entry = {"type": "file", "path": path, "size": size, "oid": blob.oid}
    return entry | (
        {"lfs": {"oid": blob.oid, "size": size, "pointerSize": 134}} if blob.large else {}
    )


def _resolve(hub: HubServer, call: Call) -> Reply:
    repository = _open(hub, call)
    sha, files = _snapshot(repository, call.parts["revision"])
    headers = {"X-Repo-Commit": sha}
    if (blob := files.get(call.parts["file"])) is None:
        reply = RefusedError(404, "Entry not found", "EntryNotFound").reply
        return Reply(reply.status, reply.body, reply.headers | headers)
    if not blob.large:
        return Reply(200, blob.data, headers | {"ETag": f'"{blob.oid}"'})
    # the Hub also redirects large files to another host
    linked = {"X-Linked-Size": str(len(blob.data)), "X-Linked-Etag": f'"{blob.oid}"'}
    return Reply(302, b"", headers | linked | {"Location": f"{hub.cdn}/_cdn/{blob.oid}"})


def _cdn(hub: HubServer, call: Call) -> Reply:
    assert call.user is None, "a token was sent to the store of large files"
    oid = call.parts["oid"]
    return Reply(200, hub.objects[oid], {"ETag": f'"{oid}"'})


Route = Callable[[HubServer, Call], Reply]
ROUTES: list[tuple[str, str, Route]] = [
    ("GET", "/api/whoami-v2", _whoami),
    ("POST", "/api/repos/create", _create),
    ("POST", "/api/validate-yaml", _validate),
    ("PUT", f"/api/models/{REPO}/settings", _settings),
    ("POST", f"/api/models/{REPO}/preupload/{REVISION}", _preupload),
    ("POST", f"/api/models/{REPO}/commit/{REVISION}", _commit),
    ("GET", f"/api/models/{REPO}", _info),
    ("GET", f"/api/models/{REPO}/revision/{REVISION}", _info),
    ("GET", f"/api/models/{REPO}/tree/{REVISION}(?:/.*)?", _tree),
    ("POST", f"/{REPO}\\.git/info/lfs/objects/batch", _batch),
    ("PUT", r"/_lfs/(?P<oid>\w+)", _put),
    ("POST", r"/_lfs/verify", _verify),
    ("GET", f"/{REPO}/resolve/{REVISION}/(?P<file>.+)", _resolve),
    ("GET", r"/_cdn/(?P<oid>\w+)", _cdn),
]


class Handler(BaseHTTPRequestHandler):
    """Answers a request to its Hub, or drops the connection."""

    hub: ClassVar[HubServer]
    protocol_version = "HTTP/1.1"
    # headers and body are two writes; the second would wait for the acknowledgement of the first
    disable_nagle_algorithm = True

    def answer(self) -> None:
        path = urlsplit(self.path).path
        lost = self.hub.loses(f"{self.command} {path}")
        if lost and not self.hub.loses_replies:
            self.hang_up()
            return
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        user = self.hub.users.get(token) if scheme == "Bearer" else None
        method = "GET" if self.command == "HEAD" else self.command
        reply = self.hub.answer(method, path, user, b"".join(self.body()))
        if lost:
            self.hang_up()
        else:
            self.send(reply)

    do_GET = do_HEAD = do_POST = do_PUT = answer  # noqa: N815

    def body(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding") != "chunked":
            yield self.rfile.read(int(self.headers.get("Content-Length", 0)))
            return
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    def hang_up(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""
