"""HTTP servers on this machine that speak what model sources speak: a package index and a Hugging Face hub.

Both can misbehave on request: cut a transfer short, slow it down, give wrong bytes.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar
from urllib.parse import unquote, urlsplit


@dataclass
class Faults:
    """How a server misbehaves."""

    cuts: list[int] = field(default_factory=list)
    """Bytes after which the next transfers of large files are cut; one is used up by each."""
    bytes_per_s: float | None = None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    faults: ClassVar[Faults]
    requests: ClassVar[Counter[str]]

    def log_message(self, *args: Any) -> None:
        """Keep the tests' output clean."""

    def answer(
        self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, size: int | None = None
    ) -> None:
        """Send a whole answer; HEAD requests get only the head, with the length of `size` or the body."""
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body) if size is None else size))
        self.end_headers()
        if self.command == "GET":
            self._transfer(body)

    def _transfer(self, body: bytes) -> None:
        is_large = len(body) > 4096
        cut = self.faults.cuts.pop(0) if is_large and self.faults.cuts else None
        end = len(body) if cut is None else min(cut, len(body))
        if self.faults.bytes_per_s is None or not is_large:
            self.wfile.write(body[:end])
        else:
            step = max(1, int(self.faults.bytes_per_s * 0.02))
            for start in range(0, end, step):
                self.wfile.write(body[start : min(start + step, end)])
                self.wfile.flush()
                time.sleep(0.02)
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True


@contextmanager
def _serving(handler: type[_Handler]) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def build_wheel(package: str, version: str, files: dict[str, bytes], *, tamper: str | None = None) -> bytes:
    """A wheel with `files`, its RECORD right but for the file `tamper`."""
    info = f"{package.replace('-', '_')}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    members = files | {f"{info}/METADATA": metadata.encode(), f"{info}/WHEEL": wheel.encode()}
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    for name, content in members.items():
        hashed = content + b"!" if name == tamper else content
        digest = base64.urlsafe_b64encode(hashlib.sha256(hashed).digest()).rstrip(b"=").decode()
        rows.writerow([name, f"sha256={digest}", len(content)])
    rows.writerow([f"{info}/RECORD", "", ""])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for name, content in (members | {f"{info}/RECORD": record.getvalue().encode()}).items():
            archive.writestr(name, content)
    return out.getvalue()


@dataclass
class PackageIndex:
    """A simple index (PEP 503) of wheels."""

    url: str = ""
    wheels: dict[str, dict[str, bytes]] = field(default_factory=dict)
    """Package -> file name -> wheel."""
    promised_hashes: dict[str, str] = field(default_factory=dict)
    """File name -> SHA-256 to announce instead of the true one."""
    faults: Faults = field(default_factory=Faults)
    requests: Counter[str] = field(default_factory=Counter)

    def add(self, package: str, version: str, files: dict[str, bytes], *, tamper: str | None = None) -> str:
        """Offer a wheel; gives its file name."""
        name = f"{package.replace('-', '_')}-{version}-py3-none-any.whl"
        self.wheels.setdefault(package, {})[name] = build_wheel(package, version, files, tamper=tamper)
        return name

    def page(self, package: str) -> bytes:
        """The index page of a package."""
        links = []
        for name, content in self.wheels[package].items():
            digest = self.promised_hashes.get(name, hashlib.sha256(content).hexdigest())
            links.append(f'<a href="/files/{name}#sha256={digest}">{name}</a>')
        return ("<!DOCTYPE html><html><body>" + "\n".join(links) + "</body></html>").encode()


@contextmanager
def package_index() -> Iterator[PackageIndex]:
    """A running package index, to fill with wheels."""
    index = PackageIndex()

    class Handler(_Handler):
        faults = index.faults
        requests = index.requests

        def do_GET(self) -> None:
            parts = unquote(urlsplit(self.path).path).strip("/").split("/")
            self.requests[f"{self.command} {parts[-1]}"] += 1
            if parts[0] == "simple" and parts[-1] in index.wheels:
                self.answer(200, index.page(parts[-1]), {"Content-Type": "text/html"})
                return
            found = [wheels[parts[-1]] for wheels in index.wheels.values() if parts[-1] in wheels]
            if parts[0] == "files" and found:
                self.answer(200, found[0], {"Content-Type": "application/octet-stream"})
            else:
                self.answer(404)

        do_HEAD = do_GET  # noqa: N815

    with _serving(Handler) as url:
        index.url = f"{url}/simple"
        yield index


@dataclass
class Repository:
    """A model repository: commit -> file name -> content; branches and tags point to commits."""

    commits: dict[str, dict[str, bytes]]
    refs: dict[str, str]
    gated: bool = False
    large: tuple[str, ...] = (".safetensors", ".gguf")
    """Endings of files in large file storage, which are listed with a SHA-256."""


@dataclass
class Hub:
    """A Hugging Face hub."""

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    listed_instead: dict[str, bytes] = field(default_factory=dict)
    """File name -> content whose hash and size are listed instead of the true one's."""
    faults: Faults = field(default_factory=Faults)
    requests: Counter[str] = field(default_factory=Counter)

    def add(self, name: str, files: dict[str, bytes], *, revision: str = "main") -> str:
        """Commit files to a branch; gives the commit."""
        commit = hashlib.sha1(repr(sorted(files.items())).encode(), usedforsecurity=False).hexdigest()
        repository = self.repositories.setdefault(name, Repository({}, {}))
        repository.commits[commit] = files
        repository.refs[revision] = commit
        return commit

    def info(self, name: str, commit: str) -> dict[str, Any]:
        """What /api/models answers with blobs=true."""
        repository = self.repositories[name]
        siblings = []
        for file_name, content in repository.commits[commit].items():
            content = self.listed_instead.get(file_name, content)
            sibling: dict[str, Any] = {
                "rfilename": file_name,
                "size": len(content),
                "blobId": git_hash(content),
            }
            if file_name.endswith(repository.large):
                digest = hashlib.sha256(content).hexdigest()
                sibling["lfs"] = {"sha256": digest, "size": len(content), "pointerSize": 130}
            siblings.append(sibling)
        return {
            "_id": "1",
            "id": name,
            "modelId": name,
            "sha": commit,
            "private": False,
            "siblings": siblings,
            "tags": [],
        }


def git_hash(content: bytes) -> str:
    """Git's object id of a blob."""
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


@contextmanager
def model_hub() -> Iterator[Hub]:
    """A running hub, to fill with repositories. Point HF_ENDPOINT to its `url`."""
    hub = Hub()

    class Handler(_HubHandler):
        faults = hub.faults
        requests = hub.requests

    Handler.hub = hub
    with _serving(Handler) as url:
        hub.url = url
        yield hub


class _HubHandler(_Handler):
    hub: ClassVar[Hub]

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            self.requests["info"] += 1
            self._info("/".join(parts[2:4]), "/".join(parts[5:]) or "main")
        elif len(parts) > 4 and parts[2] == "resolve":
            self.requests[f"{self.command} {parts[-1]}"] += 1
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        else:
            self.answer(404)

    do_HEAD = do_GET  # noqa: N815

    def _commit(self, name: str, revision: str) -> str | None:
        """The commit, or None after an error has been sent."""
        repository = self.hub.repositories.get(name)
        if repository is None:
            self.answer(
                404, headers={"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            )
            return None
        if repository.gated:
            self.answer(403, headers={"X-Error-Code": "GatedRepo", "X-Error-Message": "Access is restricted"})
            return None
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            self.answer(
                404, headers={"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"}
            )
            return None
        return commit

    def _info(self, name: str, revision: str) -> None:
        commit = self._commit(name, revision)
        if commit is not None:
            body = json.dumps(self.hub.info(name, commit)).encode()
            self.answer(200, body, {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, file_name: str) -> None:
        commit = self._commit(name, revision)
        if commit is None:
            return
        repository = self.hub.repositories[name]
        content = repository.commits[commit].get(file_name)
        if content is None:
            self.answer(404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        is_large = file_name.endswith(repository.large)
        etag = hashlib.sha256(content).hexdigest() if is_large else git_hash(content)
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        wanted = self.headers.get("Range", "")
        if self.command == "GET" and wanted.startswith("bytes="):
            self.requests["resumed"] += 1
            start = int(wanted.removeprefix("bytes=").split("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.answer(206, content[start:], headers)
        else:
            self.answer(200, content, headers)
