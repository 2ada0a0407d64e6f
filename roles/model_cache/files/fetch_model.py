#!/usr/bin/env python3
"""Fetch one model from the Hugging Face hub at a pinned revision, so that an interrupted fetch goes on where it was.

Runs on the host under a Python that has huggingface_hub (the engine's virtualenv). Files grow in
<path>.<revision>.partial as <file>.incomplete and keep what they have when the fetch dies: huggingface_hub itself
starts such a file again, and for shards of 10 GB that is an hour. A file gets its name when its size and its SHA-256
(or git blob hash) are the hub's; the folder gets its name when every file is there, so a model folder that exists is
always a whole one. What was fetched is written into <path>/.swapgate-source.json, with hashes, so that the manifest
need not read the model again.

Only what a safetensors engine reads is fetched: pickled weights (which run code when loaded) never, weights of other
formats and dotfiles neither. The token of a gated repo is read from stdin (--token-stdin), so that it is in no command
line, or is in HF_TOKEN; it is never sent over http:// to another host. Proxies and certificates come from the usual
variables.

stdout: one JSON object {"state": "present" | "missing" | "fetched", "path", "revision", "files", "size_mib",
"needed_mib", "free_mib", "resumed_mib", "skipped": [name], "notices": [text]}. stderr: one line per problem.
Exit codes: 0 done (or, with --plan, could be done); 1 a problem that a person has to solve; 3 interrupted, run again.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import fcntl
import hashlib
import importlib
import importlib.util
import json
import os
import re
import shutil
import sys
import urllib.parse
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill")
# Other frameworks' copies of the same weights: often as large as the model itself.
FOREIGN_SUFFIXES = (".h5", ".msgpack", ".onnx", ".onnx_data", ".gguf", ".tflite", ".ot", ".mlmodel")
WEIGHTS_SUFFIX = ".safetensors"
SOURCE_FILE = ".swapgate-source.json"
WORKERS = 8
CHUNK_BYTES = 4 * 2**20
MIB = 2**20
EXIT_PROBLEM, EXIT_AGAIN = 1, 3


class Problem(Exception):
    """Something that a person has to solve; the text is one line: what, where, found, expected, next."""

    def __init__(self, what: str, where: str, found: str, expected: str, command: str) -> None:
        super().__init__(f"{what}: {where}: found {found}, expected {expected}; next: {command}")


class Interruption(Exception):
    """The fetch broke off; what it has is kept, and the next run goes on from there."""


class Remote(NamedTuple):
    """One file on the hub: `sha256` of an LFS file, else None and git's blob hash `oid`."""

    path: str
    size: int
    oid: str
    sha256: str | None


class Order(NamedTuple):
    """What to fetch, from where, to where."""

    repo: str
    revision: str
    endpoint: str | None
    path: Path
    min_free_mib: int

    @property
    def partial(self) -> Path:
        return self.path.with_name(f"{self.path.name}.{self.revision[:12]}.partial")

    @property
    def source(self) -> str:
        return f"{self.repo}@{self.revision}"


def choose(files: Iterable[Remote], source: str) -> tuple[list[Remote], list[str]]:
    """Split the hub's files into those to fetch and the names left out; Problem if that leaves no weights."""
    chosen, skipped = [], []
    for file in files:
        parts = PurePosixPath(file.path).parts
        if file.path.startswith("/") or ".." in parts:
            raise Problem(
                "hub file", f"{source} {file.path}", "a path out of the folder", "a relative path", "report it"
            )
        unwanted = file.path.lower().endswith(PICKLE_SUFFIXES + FOREIGN_SUFFIXES)
        if unwanted or any(part.startswith(".") for part in parts):
            skipped.append(file.path)
        else:
            chosen.append(file)
    if not any(file.path.endswith(WEIGHTS_SUFFIX) for file in chosen):
        pickles = [name for name in skipped if name.lower().endswith(PICKLE_SUFFIXES)]
        found = f"only pickled weights ({', '.join(pickles[:3])})" if pickles else "no weights"
        command = "choose a revision or repo with *.safetensors, or convert it and give the model a path"
        raise Problem("model source", source, found, "*.safetensors", command)
    return chosen, skipped


def bytes_here(partial: Path, file: Remote) -> int:
    """How much of a file the folder of an earlier attempt holds."""
    for path in (partial / file.path, partial / f"{file.path}.incomplete"):
        if path.is_file():
            return min(path.stat().st_size, file.size)
    return 0


def free_bytes(path: Path) -> int:
    """Free space where `path` is or will be."""
    there = next(folder for folder in [path, *path.parents] if folder.exists())
    return shutil.disk_usage(there).free


def check_present(order: Order) -> bool:
    """Whether the model is there as ordered; Problem if something else is there."""
    if not order.path.exists():
        return False
    marker = order.path / SOURCE_FILE
    command = f"mv {order.path} {order.path}.old, or give this model another path"
    if not marker.is_file():
        found = "a folder that was not fetched from a hub"
        raise Problem("model path", str(order.path), found, f"nothing, or {order.source}", f"{command}, or no source")
    record = json.loads(marker.read_text("utf-8"))
    if (record["repo"], record["revision"]) != (order.repo, order.revision):
        # Never replaced in place: an engine may be serving from it, and the way back needs it.
        found = f"{record['repo']}@{record['revision']}"
        raise Problem("model path", str(order.path), found, order.source, command)
    return True


def in_the_clear(order: Order) -> str | None:
    """The hub's address if what it sends, hashes included, can be changed on the way; None over TLS or loopback."""
    address = urllib.parse.urlsplit(order.endpoint or os.environ.get("HF_ENDPOINT") or "https://")
    if address.scheme == "https" or address.hostname in ("127.0.0.1", "::1", "localhost"):
        return None
    return f"{address.scheme}://{address.hostname}"


def check_transport(order: Order) -> list[str]:
    """Notices about the way to the hub; Problem if the token would go over it for everybody to read."""
    place = in_the_clear(order)
    if place is None:
        return []
    if os.environ.get("HF_TOKEN"):
        command = "give model_cache_source an https:// endpoint, or take model_cache_token away"
        raise Problem("model source", order.source, f"a token for {place}", "https, which keeps it secret", command)
    return [
        f"{order.source}: {place} is not encrypted: the files are checked against hashes that came the same way, so "
        "who sits on the way can change both. Use an https:// endpoint, or compare the manifest's hashes with the repo."
    ]


def hub_problem(order: Order, error: Exception) -> Problem:
    """The one line for an error of the hub's client, named by its class (the classes moved between releases)."""
    name = error.__class__.__name__
    where = order.endpoint or os.environ.get("HF_ENDPOINT") or "the hub"
    first = str(error).strip().splitlines()
    table = {
        "GatedRepoError": ("a gated repo", "access to it", "ask for access on its page, then set the hub token"),
        "RepositoryNotFoundError": ("no such repo, or a private one", "a repo", "check the name; set the hub token"),
        "RevisionNotFoundError": ("no such revision", "a commit of the repo", "copy the commit from its history"),
    }
    found, expected, command = table.get(
        name, (f"{name}: {first[0] if first else ''}", "an answer", "check the endpoint, the proxy and the network")
    )
    return Problem("model source", f"{order.source} on {where}", found, expected, command)


def client_errors() -> tuple[type[Exception], ...]:
    """What the hub's client raises: OSError for requests (before 1.0), HTTPError for its successors."""
    kinds: list[type[Exception]] = [OSError]
    for name in ("httpx", "httpx2"):
        if importlib.util.find_spec(name):
            kinds.append(importlib.import_module(name).HTTPError)
    return tuple(kinds)


def list_remote(order: Order) -> list[Remote]:
    """The files of the ordered revision; Problem if the hub does not give them."""
    hub = importlib.import_module("huggingface_hub")
    try:
        tree = hub.HfApi(endpoint=order.endpoint).list_repo_tree(order.repo, revision=order.revision, recursive=True)
        entries = [entry for entry in tree if hasattr(entry, "blob_id")]  # a folder has none
    except client_errors() as error:
        raise hub_problem(order, error) from error
    except ValueError as error:  # the client refuses the repo's name before it asks
        raise Problem("model source", order.repo, str(error), "OWNER/NAME", "correct the repo's name") from error
    return [Remote(e.path, e.size, e.blob_id, e.lfs.sha256 if e.lfs else None) for e in entries]


def digest(path: Path, file: Remote) -> tuple[str, bool]:
    """SHA-256 of a local file, and whether its content is the hub's."""
    sha256, blob = hashlib.sha256(), hashlib.sha1(f"blob {file.size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK_BYTES):
            sha256.update(chunk)
            if file.sha256 is None:
                blob.update(chunk)
    whole = sha256.hexdigest() == file.sha256 if file.sha256 else blob.hexdigest() == file.oid
    return sha256.hexdigest(), whole


def fetch_file(order: Order, file: Remote) -> dict[str, Any]:
    """Fetch what lacks of one file, check it, give it its name; its manifest entry."""
    hub = importlib.import_module("huggingface_hub")
    download = importlib.import_module("huggingface_hub.file_download")
    target = order.partial / file.path
    growing = target.with_name(target.name + ".incomplete")
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        growing.touch()
        have = growing.stat().st_size
        if have > file.size:
            growing.write_bytes(b"")
            have = 0
        with growing.open("r+b") as stream:
            stream.seek(have)
            if have < file.size:
                download.http_get(
                    hub.hf_hub_url(order.repo, file.path, revision=order.revision, endpoint=order.endpoint),
                    stream,
                    resume_size=have,
                    headers=hub.utils.build_hf_headers(library_name="swapgate"),
                    expected_size=file.size,
                )
            stream.flush()
            os.fsync(stream.fileno())
    else:
        growing = target  # complete from an earlier attempt; hashed again, since this attempt did not see it
    sha256, whole = digest(growing, file)
    if not whole:
        growing.unlink()
        expected = f"sha256 {file.sha256[:12]}" if file.sha256 else f"git blob {file.oid[:12]}"
        command = "deploy again (fetches this file anew); if it comes back, suspect the disk or a proxy"
        raise Problem("fetched file", str(target), f"other content (sha256 {sha256[:12]})", expected, command)
    growing.chmod(0o644)
    growing.rename(target)
    return {"path": file.path, "size": file.size, "mtime_ns": target.stat().st_mtime_ns, "sha256": sha256}


def fetch_all(order: Order, files: list[Remote]) -> list[dict[str, Any]]:
    """Fetch all files, several at once; the first error, once the files under way have ended."""
    # Small files first: a wrong token or a full disk shows in seconds.
    ordered = sorted(files, key=lambda file: file.size)
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        tasks = [pool.submit(fetch_file, order, file) for file in ordered]
        done, _waiting = concurrent.futures.wait(tasks, return_when=concurrent.futures.FIRST_EXCEPTION)
        if any(task.exception() for task in done):
            pool.shutdown(cancel_futures=True)
    return [task.result() for task in tasks if not task.cancelled()]


def move_in_place(order: Order, entries: list[dict[str, Any]]) -> None:
    """Write the record of the fetch and give the folder its name."""
    record = {"repo": order.repo, "revision": order.revision, "files": sorted(entries, key=lambda e: str(e["path"]))}
    marker = order.partial / SOURCE_FILE
    marker.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    marker.chmod(0o644)
    for folder in [order.partial, *(path for path in order.partial.rglob("*") if path.is_dir())]:
        folder.chmod(0o755)
    order.partial.rename(order.path)


def run(order: Order, plan: bool) -> dict[str, Any]:
    """Fetch, or with `plan` only find out whether that would work. The dict that main() prints."""
    report: dict[str, Any] = {"path": str(order.path), "revision": order.revision, "notices": []}
    if check_present(order):
        return {"state": "present", **report, "needed_mib": 0, "skipped": []}
    report["notices"] = check_transport(order)
    files, skipped = choose(list_remote(order), order.source)
    size = sum(file.size for file in files)
    resumed = sum(bytes_here(order.partial, file) for file in files)
    needed, free = size - resumed, free_bytes(order.path)
    report |= {"files": len(files), "size_mib": size // MIB, "needed_mib": -(-needed // MIB), "free_mib": free // MIB}
    report |= {"resumed_mib": resumed // MIB, "skipped": skipped}
    if needed + order.min_free_mib * MIB > free:
        expected = f"{-(-needed // MIB)} MiB for the model and {order.min_free_mib} MiB to stay free"
        stale = sorted(str(path) for path in order.path.parent.glob(f"{order.path.name}.*.partial"))
        stale = [path for path in stale if path != str(order.partial)]
        command = f"rm -r {' '.join(stale)} (of other revisions)" if stale else "free some, or choose another disk"
        command = f"df -h {order.path.parent}; {command}"
        raise Problem("disk space", str(order.path.parent), f"{free // MIB} MiB free", expected, command)
    if plan:
        return {"state": "missing", **report}
    try:
        order.partial.mkdir(parents=True, exist_ok=True)
        with locked(order.partial):
            move_in_place(order, fetch_all(order, files))
    except client_errors() as error:
        raise Interruption(f"{error.__class__.__name__}: {error}".splitlines()[0]) from error
    return {"state": "fetched", **report}


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder against a second fetch; Problem if there is one. The kernel lets go of it if this one dies."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        command = f"fuser {folder}; wait for it, then deploy again"
        raise Problem("model path", str(folder), "another fetch under way", "none", command) from error
    finally:
        os.close(handle)


def order_from(arguments: list[str] | None) -> tuple[Order, bool]:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", required=True, help="OWNER/NAME")
    parser.add_argument("--revision", required=True, help="full commit hash")
    parser.add_argument("--endpoint", help="of the hub (default: HF_ENDPOINT or the public one)")
    parser.add_argument("--path", required=True, type=Path, help="the model's folder")
    parser.add_argument("--min-free-mib", type=int, default=0, help="space that must stay free")
    parser.add_argument("--plan", action="store_true", help="fetch nothing: check source, space and what is there")
    parser.add_argument("--token-stdin", action="store_true", help="read the hub's token from the first line of stdin")
    options = parser.parse_args(arguments)
    if options.token_stdin:
        os.environ["HF_TOKEN"] = sys.stdin.readline().strip()
    if not re.fullmatch(r"[0-9a-f]{40}", options.revision):
        command = "copy the full commit hash from the repo's history (a branch or tag can move)"
        raise Problem("model source", options.repo, options.revision, "40 hexadecimal digits as revision", command)
    path = options.path.absolute()
    return Order(options.repo, options.revision, options.endpoint, path, options.min_free_mib), options.plan


def main(arguments: list[str] | None = None) -> int:
    """Fetch; see the module's text for the exit codes."""
    # The service is offline on purpose, this is the one program that is not; bars and the client's own tale of its
    # retries are of no use in a task's output, which ends in one line of ours.
    os.environ.update(HF_HUB_OFFLINE="0", HF_HUB_DISABLE_PROGRESS_BARS="1", HF_HUB_VERBOSITY="error")
    os.environ.update(HF_HUB_DISABLE_TELEMETRY="1")
    try:
        order, plan = order_from(arguments)
        if importlib.util.find_spec("huggingface_hub") is None:
            command = "set model_cache_python to the engine's interpreter"
            raise Problem("interpreter", sys.executable, "no huggingface_hub", "huggingface_hub", command)
        report = run(order, plan)
    except Problem as problem:
        print(problem, file=sys.stderr)
        return EXIT_PROBLEM
    except Interruption as error:
        command = "deploy again (goes on where it stopped)"
        print(Problem("model source", order.source, str(error), "the rest of the files", command), file=sys.stderr)
        return EXIT_AGAIN
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
