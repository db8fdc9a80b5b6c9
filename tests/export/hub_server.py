"""A local Hub server with the routes that huggingface_hub calls, in memory, over real HTTP.

It has one user and one branch, large files by LFS, and atomic commits.
"""

import base64
import hashlib
import json
import re
import socket
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock, Thread
from types import SimpleNamespace
from typing import Any, ClassVar, Self
from urllib.parse import unquote, urlsplit

import huggingface_hub
import pytest
from huggingface_hub import constants

OWNER = "ada"
TOKEN = "hf_ownerOwnerOwner"
LARGE_BYTES = 10_000
"""Files of at least this size go by LFS."""


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
    head: str = ""

    def commit(self, files: dict[str, Blob]) -> str:
        self.head = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[self.head] = files
        return self.head


class HubServer:
    """A Hub server that runs inside a `with` block."""

    def __init__(self) -> None:
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
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self) -> Self:
        Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.http.shutdown()
        self.http.server_close()

    def files(self, repo: str) -> dict[str, bytes]:
        """Return the files of a repository by path; empty if it does not exist."""
        repository = self.repositories.get(repo)
        return (
            {path: blob.data for path, blob in repository.commits[repository.head].items()}
            if repository
            else {}
        )

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

    def connect(self, patch: pytest.MonkeyPatch, home: Path) -> None:
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
        patch.setenv("HF_TOKEN", TOKEN)
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

    def answer(self, method: str, path: str, body: bytes) -> "Reply":
        """Find the route and call it."""
        for verb, pattern, route in ROUTES:
            if verb == method and (match := re.fullmatch(pattern, path)):
                groups = {name: unquote(value or "") for name, value in match.groupdict().items()}
                with self.lock:
                    return route(self, body, **groups)
        return _refused(404, f"no route {method} {path}")


@dataclass
class Reply:
    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = field(default_factory=dict)


def _refused(status: int, message: str, code: str = "RepoNotFound", **headers: str) -> Reply:
    headers |= {"X-Error-Message": message, "X-Error-Code": code}
    return Reply(status, json.dumps({"error": message}).encode(), headers)


def _reply(value: Any, status: int = 200) -> Reply:
    return Reply(status, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _create(hub: HubServer, body: bytes) -> Reply:
    request = json.loads(body)
    owner = request.get("organization") or OWNER
    if owner != OWNER:
        return _refused(403, f"You don't have the rights to create a model under {owner}", "")
    repo = f"{owner}/{request['name']}"
    url = {"url": f"{hub.url}/{repo}", "id": repo}
    if repo in hub.repositories:
        return _reply({"error": "You already created this model repo", **url}, 409)
    private = request.get("visibility") == "private" or bool(request.get("private"))
    hub.repositories[repo] = Repository(private)
    hub.repositories[repo].commit({})
    return _reply(url)


def _validate(hub: HubServer, body: bytes) -> Reply:
    del hub, body
    return _reply({"errors": [], "warnings": []})


def _settings(hub: HubServer, body: bytes, repo: str) -> Reply:
    repository, request = hub.repositories[repo], json.loads(body)
    if "visibility" in request:
        repository.private = request["visibility"] == "private"
    return _reply({})


def _preupload(hub: HubServer, body: bytes, repo: str) -> Reply:
    repository = hub.repositories[repo]
    stored = repository.commits[repository.head]
    files = [
        {
            "path": file["path"],
            "uploadMode": "lfs" if file["size"] >= LARGE_BYTES else "regular",
            "shouldIgnore": False,
            "oid": stored[file["path"]].oid if file["path"] in stored else None,
        }
        for file in json.loads(body)["files"]
    ]
    return _reply({"files": files})


def _batch(hub: HubServer, body: bytes, repo: str) -> Reply:
    del repo
    actions = {
        pointer["oid"]: {
            "upload": {"href": f"{hub.url}/_lfs/{pointer['oid']}"},
            "verify": {"href": f"{hub.url}/_lfs/verify"},
        }
        for pointer in json.loads(body)["objects"]
    }
    objects = [
        pointer | ({} if pointer["oid"] in hub.objects else {"actions": actions[pointer["oid"]]})
        for pointer in json.loads(body)["objects"]
    ]
    return _reply({"transfer": "basic", "objects": objects})


def _put(hub: HubServer, body: bytes, oid: str) -> Reply:
    assert hashlib.sha256(body).hexdigest() == oid
    hub.objects[oid] = body
    return _reply({})


def _verify(hub: HubServer, body: bytes) -> Reply:
    request = json.loads(body)
    assert len(hub.objects[request["oid"]]) == request["size"]
    return _reply({})


def _commit(hub: HubServer, body: bytes, repo: str) -> Reply:
    repository = hub.repositories[repo]
    files = dict(repository.commits[repository.head])
    for line in body.splitlines():
        item = json.loads(line)
        key, value = item["key"], item["value"]
        if key == "file":
            files[value["path"]] = Blob(base64.b64decode(value["content"]), large=False)
        elif key == "lfsFile":
            files[value["path"]] = Blob(hub.objects[value["oid"]], large=True)
        elif key == "deletedFile":
            del files[value["path"]]
    sha = repository.commit(files)
    return _reply(
        {"commitUrl": f"{hub.url}/{repo}/commit/{sha}", "commitOid": sha, "success": True}
    )


def _info(hub: HubServer, body: bytes, repo: str) -> Reply:
    del body
    if repo not in hub.repositories:
        return _refused(404, "Repository not found")
    repository = hub.repositories[repo]
    state = {"private": repository.private, "gated": False, "downloads": 0, "likes": 0}
    siblings = [{"rfilename": path} for path in hub.files(repo)]
    info = {"id": repo, "modelId": repo, "sha": repository.head, "tags": []}
    return _reply({**info, "siblings": siblings, **state})


def _tree(hub: HubServer, body: bytes, repo: str) -> Reply:
    del body
    return _reply(
        [
            {"type": "file", "path": path, "size": len(data), "oid": path}
            for path, data in hub.files(repo).items()
        ]
    )


def _resolve(hub: HubServer, body: bytes, repo: str, revision: str, file: str) -> Reply:
    del body
    repository = hub.repositories[repo]
    sha = repository.head if revision == "main" else revision
    headers = {"X-Repo-Commit": sha}
    if (blob := repository.commits[sha].get(file)) is None:
        return _refused(404, "Entry not found", "EntryNotFound", **headers)
    return Reply(200, blob.data, headers | {"ETag": f'"{blob.oid}"'})


MODEL = "/api/models/(?P<repo>[^/]+/[^/]+)"
ROUTES: list[tuple[str, str, Callable[..., Reply]]] = [
    ("POST", "/api/repos/create", _create),
    ("POST", "/api/validate-yaml", _validate),
    ("PUT", f"{MODEL}/settings", _settings),
    ("POST", f"{MODEL}/preupload/main", _preupload),
    ("POST", f"{MODEL}/commit/main", _commit),
    ("GET", f"{MODEL}(?:/revision/[^/]+)?", _info),
    ("GET", f"{MODEL}/tree/[^/]+(?:/.*)?", _tree),
    ("POST", r"/(?P<repo>[^/]+/[^/]+)\.git/info/lfs/objects/batch", _batch),
    ("POST", r"/_lfs/verify", _verify),
    ("PUT", r"/_lfs/(?P<oid>\w+)", _put),
    ("GET", "/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)", _resolve),
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
        method = "GET" if self.command == "HEAD" else self.command
        executed = not lost or self.hub.loses_replies
        reply = self.hub.answer(method, path, self.body()) if executed else Reply()
        if lost:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(reply.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(reply.body)

    do_GET = do_HEAD = do_POST = do_PUT = answer  # noqa: N815

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        segments = []
        while size := int(self.rfile.readline(), 16):
            segments.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(segments)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""
