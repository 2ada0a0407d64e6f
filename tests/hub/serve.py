#!/usr/bin/env python3
"""A stand-in for the Hugging Face hub on loopback, good enough for huggingface_hub's own client.

Serves the model folders ROOT/<owner>/<name>/. Each has one commit, computed from its content, so the same folder always
has the same revision; `main` names it too. Answers, as the hub does:

    GET      /api/models/<repo>                        id, sha, siblings
    GET      /api/models/<repo>/revision/<rev>         the same
    GET      /api/models/<repo>/tree/<rev>[?recursive] path, size, oid, lfs; in pages, with a Link header
    GET HEAD /<repo>/resolve/<rev>/<file>              Content-Length, ETag, X-Repo-Commit, X-Linked-*, Range

Errors carry the hub's X-Error-Code (RepoNotFound, RevisionNotFound, EntryNotFound, GatedRepo). A repo folder with a
file `.gated` asks for the token that is written in it. Faults on request: --cut-after closes the connection after so
many bytes of each file, --stall-after goes silent instead and keeps it open.

The first line on stdout is JSON: {"port": int, "endpoint": str, "repos": {repo: commit}}. --log appends one JSON line
per request: {"method", "path", "range", "status", "sent"}. Ends at SIGTERM or SIGINT. Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import signal
import sys
import threading
import urllib.parse
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

# The hub keeps larger files in LFS: their ETag is the SHA-256 of the content, not git's blob hash.
LFS_FROM_BYTES = 4096
CHUNK_BYTES = 64 * 1024
TREE = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)/tree/(?P<revision>[^/]+)(?:/.*)?")
INFO = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>[^/]+))?")
FILE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")


class Refusal(Exception):
    """An answer other than 200: `status`, and the hub's error code if it has one."""

    def __init__(self, status: HTTPStatus, code: str = "", message: str = "") -> None:
        super().__init__(message or code or status.phrase)
        self.status, self.code = status, code


class Blob(NamedTuple):
    """One file of a repo: `sha256` of the content and git's `oid`, both hex; size in bytes."""

    size: int
    oid: str
    sha256: str

    @property
    def lfs(self) -> bool:
        return self.size >= LFS_FROM_BYTES

    @property
    def etag(self) -> str:
        return f'"{self.sha256 if self.lfs else self.oid}"'


class Repo(NamedTuple):
    """One model repo: where it lies, its commit (40 hex digits), its files, the token it asks for or None."""

    folder: Path
    commit: str
    blobs: dict[str, Blob]
    token: str | None


def read_blob(path: Path) -> Blob:
    """Hash one file both ways."""
    size = path.stat().st_size
    oid, sha256 = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False), hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            oid.update(chunk)
            sha256.update(chunk)
    return Blob(size, oid.hexdigest(), sha256.hexdigest())


def read_repo(folder: Path) -> Repo:
    """Read a repo's folder; its commit follows from the content alone."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    gate = folder / ".gated"
    blobs = {name: read_blob(folder / name) for name in names if name != gate.name}
    rows = json.dumps([[name, blob.sha256] for name, blob in blobs.items()]).encode()
    commit = hashlib.sha1(rows, usedforsecurity=False).hexdigest()
    return Repo(folder, commit, blobs, gate.read_text("utf-8").strip() if gate.is_file() else None)


def tree_entry(name: str, blob: Blob) -> dict[str, Any]:
    """One file as the tree listing shows it."""
    entry: dict[str, Any] = {"type": "file", "path": name, "size": blob.size, "oid": blob.oid}
    if blob.lfs:
        entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": 134}
    return entry


def byte_range(header: str | None, size: int) -> tuple[int, int] | None:
    """(first, last) byte of a Range header, or None for the whole file; Refusal 416 outside the file."""
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", header or "")
    if match is None:
        return None
    first, last = int(match[1]), int(match[2]) if match[2] else size - 1
    if first >= size or last < first:
        raise Refusal(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
    return first, min(last, size - 1)


class Hub(ThreadingHTTPServer):
    """The server: the repos and the faults that it was asked for."""

    daemon_threads = True

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(("127.0.0.1", options.port), Handler)
        self.options = options
        folders = sorted(path for path in options.root.glob("*/*") if path.is_dir())
        self.repos = {path.relative_to(options.root).as_posix(): read_repo(path) for path in folders}
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.stopped = threading.Event()
        self._lock = threading.Lock()

    def record(self, entry: dict[str, Any]) -> None:
        """Append one request to the log."""
        if self.options.log is not None:
            with self._lock, self.options.log.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(entry) + "\n")


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Hub
    protocol_version = "HTTP/1.1"
    status, sent = 0, 0

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr: what was asked for is in the log."""

    def answer(self) -> None:
        """Route one request and record it."""
        self.status, self.sent = 0, 0
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path)
        try:
            if match := TREE.fullmatch(path):
                self.tree(self.repo(**match.groupdict()), url)
            elif match := FILE.fullmatch(path):
                self.file(self.repo(match["repo"], match["revision"]), match["file"])
            elif match := INFO.fullmatch(path):
                self.info(match["repo"], self.repo(match["repo"], match["revision"] or "main"))
            else:
                raise Refusal(HTTPStatus.NOT_FOUND, "", "no such page")
        except Refusal as refusal:
            headers = {"X-Error-Code": refusal.code, "X-Error-Message": str(refusal)} if refusal.code else {}
            self.json({"error": str(refusal)}, headers, refusal.status)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True
        finally:
            entry = {"method": self.command, "path": path, "range": self.headers.get("Range")}
            self.server.record({**entry, "status": int(self.status), "sent": self.sent})

    def repo(self, repo: str, revision: str) -> Repo:
        """The repo at the revision, or the Refusal that the hub would give to this client."""
        found = self.server.repos.get(repo)
        if found is None:
            raise Refusal(HTTPStatus.NOT_FOUND, "RepoNotFound", "Repository not found")
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if found.token is not None and token != found.token:
            status = HTTPStatus.FORBIDDEN if token else HTTPStatus.UNAUTHORIZED
            raise Refusal(status, "GatedRepo", f"Access to model {repo} is restricted")
        if revision not in ("main", found.commit):
            raise Refusal(HTTPStatus.NOT_FOUND, "RevisionNotFound", f"Invalid rev id: {revision}")
        return found

    def json(self, content: object, headers: dict[str, str], status: HTTPStatus = HTTPStatus.OK) -> None:
        """Send a JSON answer."""
        body = json.dumps(content).encode()
        self.start(status, {"Content-Type": "application/json", "Content-Length": str(len(body)), **headers})
        if self.command == "GET":
            self.wfile.write(body)
            self.sent = len(body)

    def start(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        """Send the status line and the headers."""
        self.status = status
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def info(self, name: str, repo: Repo) -> None:
        """What the hub tells of a model."""
        siblings = [{"rfilename": file, "size": blob.size, "blobId": blob.oid} for file, blob in repo.blobs.items()]
        gated = "manual" if repo.token else False
        content = {"id": name, "modelId": name, "sha": repo.commit, "private": False, "gated": gated}
        self.json({**content, "siblings": siblings, "tags": [], "downloads": 0}, {})

    def tree(self, repo: Repo, url: urllib.parse.SplitResult) -> None:
        """One page of the recursive listing."""
        query = urllib.parse.parse_qs(url.query)
        start = int(query.get("cursor", ["0"])[0])
        end = start + self.server.options.page
        entries = [tree_entry(name, blob) for name, blob in repo.blobs.items()]
        headers = {}
        if end < len(entries):
            following = f"{self.server.endpoint}{url.path}?recursive=true&cursor={end}"
            headers["Link"] = f'<{following}>; rel="next"'
        self.json(entries[start:end], headers)

    def file(self, repo: Repo, name: str) -> None:
        """A file's content, or the part of it that was asked for, with the fault that was asked for."""
        blob = repo.blobs.get(name)
        if blob is None:
            raise Refusal(HTTPStatus.NOT_FOUND, "EntryNotFound", "Entry not found")
        part = byte_range(self.headers.get("Range"), blob.size)
        first, last = part or (0, blob.size - 1)
        count = last - first + 1
        headers = {"ETag": blob.etag, "X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        headers |= {"Content-Length": str(count), "Content-Type": "application/octet-stream"}
        if blob.lfs:
            headers |= {"X-Linked-Size": str(blob.size), "X-Linked-ETag": blob.etag}
        if part is not None:
            headers["Content-Range"] = f"bytes {first}-{last}/{blob.size}"
        self.start(HTTPStatus.OK if part is None else HTTPStatus.PARTIAL_CONTENT, headers)
        if self.command == "GET":
            self.send(repo.folder / name, first, count)

    def send(self, path: Path, first: int, count: int) -> None:
        """Send `count` bytes from `first` on, up to the point where a fault is due."""
        options = self.server.options
        limits = [limit for limit in (options.cut_after, options.stall_after) if limit is not None]
        whole = min([count, *limits])
        with path.open("rb") as stream:
            stream.seek(first)
            while self.sent < whole:
                self.sent += self.wfile.write(stream.read(min(CHUNK_BYTES, whole - self.sent)))
        if whole < count:
            self.close_connection = True
            if options.stall_after == whole:
                self.server.stopped.wait()


def options_from(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="on 127.0.0.1; 0 (the default) takes a free one")
    parser.add_argument("--root", type=Path, required=True, help="folder of <owner>/<name>/ model folders")
    parser.add_argument("--cut-after", type=int, metavar="BYTES", help="close after BYTES of each file's answer")
    parser.add_argument("--stall-after", type=int, metavar="BYTES", help="go silent after BYTES of each file's answer")
    parser.add_argument("--page", type=int, default=1000, help="entries in one page of a listing")
    parser.add_argument("--log", type=Path, help="append one JSON line per request to this file")
    options = parser.parse_args(arguments)
    if not options.root.is_dir():
        parser.error(f"--root {options.root}: no such folder, expected one with <owner>/<name>/ in it")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Serve until told to stop."""
    hub = Hub(options_from(arguments))
    repos = {name: repo.commit for name, repo in hub.repos.items()}
    print(json.dumps({"port": hub.server_address[1], "endpoint": hub.endpoint, "repos": repos}), flush=True)

    def stop(_number: int, _frame: object) -> None:
        hub.stopped.set()
        # shutdown() waits for serve_forever(), which runs in this thread: another one has to ask for it.
        threading.Thread(target=hub.shutdown).start()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    hub.serve_forever(poll_interval=0.1)
    hub.server_close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
