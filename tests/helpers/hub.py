"""A local fake of the Hugging Face Hub, for the real client of huggingface_hub."""

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import huggingface_hub.constants
import pytest

TOKEN = "hf_of_a_test"
MAIN = "main"


@dataclass
class Repository:
    """Commits, the newest last, each with all of its files."""

    commits: list[tuple[str, dict[str, bytes]]] = field(default_factory=list)
    private: bool = False
    gated: bool = False
    sizes: dict[str, int] = field(default_factory=dict)
    """By path, the size that is reported in place of the true one."""
    tags: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], message: str = "") -> str:
        """Add a commit and return its id."""
        text = repr((len(self.commits), sorted(files.items())))
        oid = hashlib.sha1(text.encode()).hexdigest()
        self.commits.append((oid, files))
        self.messages.append(message)
        return oid

    @property
    def files(self) -> dict[str, bytes]:
        """The files of the newest commit."""
        return self.commits[-1][1]

    def at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """Return the commit id and files of a branch, a tag or a commit, if any."""
        if revision == MAIN:
            return self.commits[-1]
        oid = self.tags.get(revision, revision)
        return next((commit for commit in self.commits if commit[0] == oid), None)


@dataclass
class FakeHub:
    """Repositories behind the endpoints that a client needs."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""
    page: bytes = b""
    """If not empty, sent as HTML in place of every response."""

    def add(self, name: str, files: dict[str, bytes], **options: Any) -> Repository:
        """Add a repository with one commit."""
        repository = Repository(**options)
        repository.commit({".gitattributes": b"", **files})
        self.repositories[name] = repository
        return repository


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.page:
            self._send(200, self.hub.page, {"Content-Type": "text/html"})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif path == "/api/validate-yaml":
            self._json({"errors": [], "warnings": []})
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(.+))?", path):
            self._about(match[1], match[2] or f"revision/{MAIN}", body)
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(*match.groups())
        else:
            self._error(404, "EntryNotFound")

    def _about(self, name: str, rest: str, body: bytes) -> None:
        repository = self._readable(name)
        if repository is None:
            return
        verb, _, place = rest.partition("/")
        revision = place.partition("/")[0]
        if verb == "preupload":
            files = json.loads(body)["files"]
            modes = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False}
                for f in files
            ]
            self._json({"files": modes})
        elif verb == "commit":
            self._commit(name, repository, body)
        elif (commit := repository.at(revision)) is None:
            self._error(404, "RevisionNotFound")
        elif verb == "revision":
            oid, files = commit
            siblings = [{"rfilename": path} for path in files]
            info = {"id": name, "sha": oid, "private": repository.private}
            self._json({**info, "siblings": siblings, "tags": []})
        elif verb in ("tree", "paths-info"):
            form = parse_qs(body.decode()) if b"=" in body else {}
            paths = form.get("paths") or (json.loads(body or b"{}")).get("paths")
            oid, files = commit
            self._json(
                [
                    {
                        "type": "file",
                        "path": path,
                        "size": repository.sizes.get(path, len(content)),
                        "oid": hashlib.sha1(content).hexdigest(),
                    }
                    for path, content in files.items()
                    if paths is None or path in paths
                ]
            )
        else:
            self._error(404, "EntryNotFound")

    def _resolve(self, name: str, revision: str, path: str) -> None:
        repository = self._readable(name)
        if repository is None:
            return
        commit = repository.at(revision)
        if commit is None:
            self._error(404, "RevisionNotFound")
        elif path not in commit[1]:
            self._error(404, "EntryNotFound")
        else:
            content = commit[1][path]
            etag = f'"{hashlib.sha1(content).hexdigest()}"'
            self._send(200, content, {"X-Repo-Commit": commit[0], "ETag": etag})

    def _create(self, form: dict[str, Any]) -> None:
        if not self._is_authorised():
            self._error(401, "")
            return
        name = f"{form['organization']}/{form['name']}"
        is_private = bool(form.get("private")) or form.get("visibility") == "private"
        repository = self.hub.add(name, {}, private=is_private)
        assert repository.commits
        host = self.headers["Host"]
        self._json({"url": f"http://{host}/{name}", "name": name})

    def _commit(self, name: str, repository: Repository, body: bytes) -> None:
        if not self._is_authorised():
            self._error(403, "")
            return
        files, message = dict(repository.files), ""
        for line in body.splitlines():
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "header":
                message, parent = value["summary"], value.get("parentCommit")
                assert parent in (None, repository.commits[-1][0])
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                raise AssertionError(f"no such operation: {key}")
        oid = repository.commit(files, message)
        host = self.headers["Host"]
        url = f"http://{host}/{name}/commit/{oid}"
        self._json({"success": True, "commitUrl": url, "commitOid": oid})

    def _readable(self, name: str) -> Repository | None:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self._is_authorised()):
            # The hub answers 401 to clients without a valid token.
            self._error(404 if self._is_authorised() else 401, "RepoNotFound")
            return None
        if repository.gated:
            self._error(403, "GatedRepo")
            return None
        return repository

    def _is_authorised(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _json(self, content: Any) -> None:
        self._send(200, json.dumps(content).encode(), {})

    def _error(self, status: int, code: str) -> None:
        headers = {"X-Error-Code": code, "X-Error-Message": code or "no"}
        self._send(status, json.dumps({"error": code or "no"}).encode(), headers)

    def _send(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


@contextmanager
def serve(hub: FakeHub) -> Iterator[str]:
    """Serve a hub on this machine and yield its URL."""
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def connect(patch: pytest.MonkeyPatch, url: str, cache: object, token: str) -> None:
    """Point the client to ``url``, with the given cache and token."""
    constants = huggingface_hub.constants
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    path = template.removeprefix(constants.ENDPOINT)
    patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", f"{url}{path}")
    patch.setattr(constants, "ENDPOINT", url)
    patch.setattr(constants, "HF_HUB_CACHE", str(cache))
    patch.setattr(constants, "HF_TOKEN_PATH", f"{cache}/no-token")
    patch.setenv("HF_TOKEN", token)
    patch.setenv("NO_PROXY", "127.0.0.1")
