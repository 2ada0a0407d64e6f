"""The manifest of a model folder: which files it has, their sizes and SHA-256, and what is wrong with the folder.

Shape of a manifest (also the file /var/lib/swapgate/manifests/<model>.json):

    {"name": str, "path": str, "id": str,
     "files": [{"path": str, "size": bytes, "mtime_ns": int, "sha256": hex}, ...]}

`files` is sorted by path, which is relative to the model's. `id` is a SHA-256 over paths, sizes and hashes: it names
the content and does not change when files are only touched or moved. Names that begin with a dot (.cache,
.gitattributes, .swapgate-source.json) are no part of the model.

A hash is computed once. Later a file whose size and mtime are unchanged keeps its hash, so that a deploy does not read
600 GB again; damage that leaves size and mtime alone shows only in a full re-hash (`plan_hashes`, everything).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Callable, NamedTuple, Protocol

from . import safetensors
from .safetensors import problem_line

# Weights that are pickles run code when they are loaded; the engine is never shown a folder that has one.
# A name may lie, so the first bytes count as well (pickled_by).
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".dill")
_TEXT_PICKLE = re.compile(rb"\(?c[\w.]+\n[\w.]+\n|\([dl]p0\n")
HEAD_BYTES = 64
CODE_SUFFIX = ".py"
WEIGHTS_SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
# Left in a fetched folder by the fetch: {"repo", "revision", "files": [as in a manifest]}.
SOURCE_FILE = ".swapgate-source.json"
CHUNK_BYTES = 4 * 2**20
SHOWN_UNREADABLE = 5
CANNOT_ENTER = "cannot be entered"

Manifest = dict[str, Any]


class Stat(Protocol):
    """The part of os.stat_result that a check needs."""

    @property
    def st_size(self) -> int: ...

    @property
    def st_mtime_ns(self) -> int: ...


class Found(NamedTuple):
    """One file of a model folder: path relative to the folder, size in bytes, mtime in nanoseconds."""

    path: str
    size: int
    mtime_ns: int


class Change(NamedTuple):
    """How one file differs between two manifests: `kind` is added, removed or content."""

    kind: str
    path: str
    before: str
    after: str


def manifest_id(files: Iterable[Mapping[str, Any]]) -> str:
    """The SHA-256 (hex) that names the content of `files`, whatever their order and times."""
    rows = sorted((str(entry["path"]), int(entry["size"]), str(entry["sha256"])) for entry in files)
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def build(name: str, path: str, found: Iterable[Found], hashes: Mapping[str, str]) -> Manifest:
    """The manifest of the files `found`, whose SHA-256 by relative path is in `hashes` (KeyError if one lacks)."""
    files = [
        {"path": entry.path, "size": entry.size, "mtime_ns": entry.mtime_ns, "sha256": hashes[entry.path]}
        for entry in sorted(found)
    ]
    return {"name": name, "path": path, "id": manifest_id(files), "files": files}


def dump(manifest: Manifest) -> str:
    """The text of a manifest file: the same for the same manifest."""
    return json.dumps(manifest, indent=1, sort_keys=True) + "\n"


def load(text: str, where: str) -> Manifest:
    """Parse a manifest file's `text`; ValueError with one line if it is none (also: no longer of one piece)."""
    command = f"rm {where}, then deploy again (every file is hashed again)"
    try:
        manifest = json.loads(text)
    except ValueError as error:
        raise ValueError(problem_line("manifest", where, f"no JSON ({error})", "a JSON object", command)) from error
    try:
        same = manifest["id"] == manifest_id(manifest["files"])
        shape = isinstance(manifest["name"], str) and isinstance(manifest["path"], str)
        shape = shape and all(isinstance(entry["mtime_ns"], int) for entry in manifest["files"])
    except (KeyError, TypeError, ValueError) as error:
        found = f"{error.__class__.__name__} {error}"
        raise ValueError(problem_line("manifest", where, found, "name, path, id and files", command)) from error
    if not (same and shape):
        found = "an id that its files do not give" if shape else "a field of a wrong type"
        raise ValueError(problem_line("manifest", where, found, "a manifest as it was written", command))
    return dict(manifest)


def load_source(text: str, where: str) -> dict[str, Any]:
    """Parse the record that a fetch left in a model's folder; ValueError with one line if it is none."""
    try:
        record = json.loads(text)
        if not (isinstance(record["repo"], str) and isinstance(record["revision"], str)):
            raise TypeError("repo and revision are no texts")
        manifest_id(record["files"])  # fails on a file without path, size or hash
        if not all(isinstance(entry["mtime_ns"], int) for entry in record["files"]):
            raise TypeError("a file's mtime_ns is no number")
        return {"repo": record["repo"], "revision": record["revision"], "files": record["files"]}
    except (KeyError, TypeError, ValueError) as error:
        found = f"{error.__class__.__name__}: {error}"
        command = f"rm {where}, then deploy again (the model then counts as copied by hand)"
        raise ValueError(problem_line("fetch record", where, found, "repo, revision and files", command)) from error


def known_hashes(path: str, manifests: Iterable[Mapping[str, Any] | None]) -> dict[Found, str]:
    """SHA-256 by file, from earlier `manifests` of the folder `path` (the later ones win)."""
    known: dict[Found, str] = {}
    for manifest in manifests:
        if manifest is None or manifest.get("path", path) != path:
            continue
        for entry in manifest["files"]:
            known[Found(entry["path"], entry["size"], entry["mtime_ns"])] = entry["sha256"]
    return known


def plan_hashes(
    found: Iterable[Found], known: Mapping[Found, str], everything: bool = False
) -> tuple[dict[str, str], list[Found]]:
    """Split the files `found` into hashes that still hold (by path) and files to be read."""
    kept: dict[str, str] = {}
    to_hash = []
    for entry in found:
        if not everything and entry in known:
            kept[entry.path] = known[entry]
        else:
            to_hash.append(entry)
    return kept, to_hash


def changes(before: Manifest | None, after: Manifest) -> list[Change]:
    """How the content of `after` differs from `before` (touched files do not show); none without a `before`."""
    if before is None:
        return []
    old = {entry["path"]: entry["sha256"] for entry in before["files"]}
    new = {entry["path"]: entry["sha256"] for entry in after["files"]}
    listed = []
    for path in sorted(set(old) | set(new)):
        if path not in old:
            listed.append(Change("added", path, "", new[path]))
        elif path not in new:
            listed.append(Change("removed", path, old[path], ""))
        elif old[path] != new[path]:
            listed.append(Change("content", path, old[path], new[path]))
    return listed


def change_problems(root: str, differences: Iterable[Change], manifest_file: str, runs_code: bool) -> list[str]:
    """Weights that changed or vanished under a manifest are a problem, other changed files are not.

    A chat template or a tokenizer setting is edited on purpose (change_notices names it); weights of the same name with
    other bytes are damage, or another model, which deserves another name or at least one deliberate act. So does
    Python code of a model whose code is run (`runs_code`: trust_remote_code), also where it is new.
    """
    command = f"restore the file, or if the new content is meant: rm {manifest_file} and deploy again"
    problems = []
    for change in differences:
        code = runs_code and change.path.endswith(CODE_SUFFIX)
        if not code and (change.kind == "added" or not change.path.endswith(WEIGHTS_SUFFIX)):
            continue
        what = "model code (trust_remote_code runs it)" if code else "model weights"
        found = "no file" if change.kind == "removed" else f"sha256 {change.after[:12]}"
        expected = f"sha256 {change.before[:12]} as in {manifest_file}" if change.before else "no such file"
        problems.append(problem_line(what, f"{root}/{change.path}", found, expected, command))
    return problems


def change_notices(root: str, differences: Iterable[Change]) -> list[str]:
    """Changed files that change what the model says or does, though they are no weights: one line for each."""
    return [
        f"{root}/{change.path}: {change.kind} since the last manifest; it is part of what the model says. Was it you?"
        for change in differences
        if not change.path.endswith((WEIGHTS_SUFFIX, ".md", "LICENSE"))
    ]


def code_problems(manifest: Manifest, hash_of: Callable[[str], str]) -> list[str]:
    """What the Python code of a model folder is now, against its manifest. For a preflight: code is small."""
    root = manifest["path"]
    found, problems = list_files(root)
    now = {entry.path for entry in found if entry.path.endswith(CODE_SUFFIX)}
    before = {entry["path"]: entry["sha256"] for entry in manifest["files"] if entry["path"].endswith(CODE_SUFFIX)}
    after = {path: hash_of(f"{root}/{path}") for path in now}
    differences = [
        Change("content" if path in before else "added", path, before.get(path, ""), digest)
        for path, digest in sorted(after.items())
        if before.get(path) != digest
    ]
    return problems + change_problems(root, differences, f"the manifest of {manifest['name']}", True)


def source_problems(root: str, manifest: Manifest, source: Mapping[str, Any], runs_code: bool) -> list[str]:
    """Fetched files that are no longer what the hub had, by the record that the fetch left."""
    now = {entry["path"]: entry for entry in manifest["files"]}
    origin = f"{source['repo']} at {source['revision'][:12]}"
    command = f"mv {root} {root}.damaged and deploy again (fetches it anew)"
    problems = []
    for entry in source["files"]:
        if not entry["path"].endswith((WEIGHTS_SUFFIX, CODE_SUFFIX) if runs_code else WEIGHTS_SUFFIX):
            continue
        here = now.get(entry["path"])
        if here is None or here["sha256"] != entry["sha256"]:
            found = "no file" if here is None else f"sha256 {here['sha256'][:12]}"
            expected = f"sha256 {entry['sha256'][:12]} as fetched from {origin}"
            problems.append(problem_line("model file", f"{root}/{entry['path']}", found, expected, command))
    return problems


def file_list_problems(root: str, paths: Iterable[str]) -> list[str]:
    """Problems that the names alone show: pickled weights, no weights, no config.json."""
    names = sorted(paths)
    problems = []
    for name in names:
        if name.lower().endswith(PICKLE_SUFFIXES):
            where = f"{root}/{name}"
            command = f"mv {where} out of the model's folder"
            problems.append(
                problem_line("model file", where, "pickled weights (run code when loaded)", "safetensors only", command)
            )
    if not any(name.endswith(WEIGHTS_SUFFIX) for name in names):
        command = f"ls -l {root}; convert or fetch the model as safetensors"
        problems.append(problem_line("model folder", root, f"{len(names)} files", "a *.safetensors file", command))
    if "config.json" not in names:
        command = f"ls -l {root}; point the model's path at the folder that holds config.json"
        problems.append(problem_line("model folder", root, "no config.json", "config.json", command))
    return problems


def config_problems(where: str, text: str) -> list[str]:
    """Problems of the `text` of a config.json: it must be a JSON object that says which model it is."""
    command = f"python3 -m json.tool {where}"
    try:
        config = json.loads(text)
    except ValueError as error:
        return [problem_line("model config", where, f"no JSON ({error})", "a JSON object", command)]
    if not isinstance(config, dict):
        return [problem_line("model config", where, f"a JSON {type(config).__name__}", "a JSON object", command)]
    if not any(config.get(key) for key in ("architectures", "model_type")):
        expected = "architectures or model_type"
        return [problem_line("model config", where, f"only {sorted(config)[:6]}", expected, command)]
    return []


def foreign_code_problems(where: str, text: str) -> list[str]:
    """Code that the config.json of a model takes from another repo: no manifest of this folder can pin it."""
    try:
        config = json.loads(text)
        named = [
            name for value in config["auto_map"].values() for name in (value if isinstance(value, list) else [value])
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return []
    command = "copy that code into the model's folder and name it without the repo"
    return [
        problem_line(
            "model code (trust_remote_code runs it)", where, f"auto_map {name}", "code of this folder", command
        )
        for name in named
        if isinstance(name, str) and "--" in name
    ]


def draft_name(model: str, path: str) -> str:
    """The name of a draft folder's manifest; no model can have such a name."""
    return f"{model}--draft-{hashlib.sha256(path.encode()).hexdigest()[:8]}"


def quick_check(manifest: Manifest, stat_of: Callable[[str], Stat]) -> list[str]:
    """Compare sizes and times of a manifest's files with those on the disk; reads no content.

    `stat_of` is os.stat, or anything that raises OSError like it. For a preflight: milliseconds for any model.
    """
    command = "deploy again (hashes what changed); damaged or cut short: fetch or copy it again first"
    problems = []
    for entry in manifest["files"]:
        where = f"{manifest['path']}/{entry['path']}"
        try:
            now = stat_of(where)
        except OSError as error:
            found = error.strerror or str(error)
            problems.append(problem_line("model file", where, found, f"{entry['size']} bytes", command))
            continue
        if now.st_size != entry["size"]:
            expected = f"{entry['size']} as in the manifest of {manifest['name']}"
            problems.append(problem_line("model file", where, f"{now.st_size} bytes", expected, command))
        elif now.st_mtime_ns != entry["mtime_ns"]:
            found = f"modified since the manifest (mtime_ns {now.st_mtime_ns})"
            problems.append(problem_line("model file", where, found, f"mtime_ns {entry['mtime_ns']}", command))
    return problems


def pickled_by(head: bytes) -> str | None:
    """What the first bytes of a file say that runs code when it is loaded: a pickle, or an archive of pickles."""
    if head.startswith(b"PK\x03\x04"):
        return "an archive as torch.save writes it"
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        return f"a pickle of protocol {head[1]}"
    return "a pickle of protocol 0" if _TEXT_PICKLE.match(head) else None


def content_problems(root: str) -> list[str]:
    """Files of any name, also in folders that begin with a dot, which begin as pickles do."""
    problems = []
    for entry in list_files(root, hidden=True)[0]:
        where = f"{root}/{entry.path}"
        try:
            with Path(where).open("rb", buffering=0) as stream:
                kind = pickled_by(stream.read(HEAD_BYTES) or b"")
        except OSError:
            continue  # what cannot be read is reported by the check of access
        if kind or (entry.path.lower().endswith(PICKLE_SUFFIXES) and "/." in f"/{entry.path}"):
            kind = kind or "pickled weights by its name"
            command = f"mv {where} out of the model's folder"
            problems.append(problem_line("model file", where, f"{kind} (runs code when loaded)", "no pickle", command))
    return problems


class Owned(Protocol):
    """The part of os.stat_result that says who may write."""

    @property
    def st_uid(self) -> int: ...

    @property
    def st_gid(self) -> int: ...

    @property
    def st_mode(self) -> int: ...


def writer(status: Owned, uid: int, gids: Collection[int]) -> str | None:
    """Who else than root and a person may write what `status` describes: the service's user, its group, or all."""
    if uid == 0:
        return None  # a service that runs as root may write everything; no mode can help
    if status.st_uid == uid:
        return "its owner, the service's user"
    if status.st_gid in gids and status.st_mode & stat.S_IWGRP:
        return "the service's group"
    return "everybody" if status.st_mode & stat.S_IWOTH else None


def write_problems(what: str, root: str, uid: int, gids: Collection[int], below: Iterable[str]) -> list[str]:
    """One line if the service's user or everybody may change `root`, a folder on the way to it, or a path `below` it.

    Who may write them decides what the engine runs, whatever a manifest says, and sets their times as well.
    """
    on_the_way = [step for place in (root, os.path.realpath(root)) for step in way_to(place)[:-1]]
    paths = [*dict.fromkeys(on_the_way), root, *(f"{root}/{path}" for path in below)]
    for path in paths:
        try:
            status = os.stat(path)
        except OSError:
            continue
        if path in on_the_way and status.st_mode & stat.S_ISVTX and status.st_uid != uid:
            continue  # as /tmp: others' entries cannot be replaced
        who = writer(status, uid, gids)
        if who:
            found = f"writable by {who} (mode {stat.S_IMODE(status.st_mode):04o})"
            recursive = "-R " if path not in on_the_way else ""
            place = root if recursive else path
            command = f"chown {recursive}root:root {place}; chmod {recursive}go-w {place}"
            return [problem_line(what, path, found, "writable by root alone", command)]
    return []


def list_files(root: str, hidden: bool = False) -> tuple[list[Found], list[str]]:
    """The files of the model folder `root`, links followed, and one problem for each that cannot be looked at.

    With `hidden` also those whose name, or folder's name, begins with a dot.
    """
    found: list[Found] = []
    problems: list[str] = []

    def failed(error: OSError) -> None:
        reason = error.strerror or str(error)
        where = str(error.filename)
        problems.append(problem_line("model folder", where, reason, "a readable folder", f"ls -ld {where}"))

    for folder, folders, names in os.walk(root, onerror=failed):
        folders[:] = sorted(name for name in folders if hidden or not name.startswith("."))
        for name in sorted(names):
            if name.startswith(".") and not hidden:
                continue
            path = Path(folder, name)
            try:
                status = path.stat()
            except OSError as error:
                reason = f"{error.strerror or error} (a link to {os.path.realpath(path)})"
                problems.append(problem_line("model file", str(path), reason, "a file", f"ls -lL {path}"))
                continue
            if not stat.S_ISREG(status.st_mode):
                problems.append(problem_line("model file", str(path), "no regular file", "a file", f"ls -l {path}"))
                continue
            found.append(Found(path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns))
    return sorted(found), problems


def hash_file(path: str) -> str:
    """SHA-256 (hex) of the file's content; OSError if it cannot be read."""
    digest = hashlib.sha256()
    buffer = bytearray(CHUNK_BYTES)
    view = memoryview(buffer)
    with Path(path).open("rb", buffering=0) as stream:
        while True:
            count = stream.readinto(buffer)
            if not count:
                return digest.hexdigest()
            digest.update(view[:count])


def verify_headers(path: str) -> list[str]:
    """Problems of the model folder at `path` that names, headers, index and config show; reads no weights."""
    found, problems = list_files(path)
    names = [entry.path for entry in found]
    problems += file_list_problems(path, names)
    named = {line.split(": found ")[0] for line in problems}
    problems += [line for line in content_problems(path) if line.split(": found ")[0] not in named]
    tensors_of: dict[str, tuple[str, ...]] = {}
    for name in names:
        if name.endswith(WEIGHTS_SUFFIX):
            header = safetensors.read_header(f"{path}/{name}")
            problems += header.problems
            if not header.problems:
                tensors_of[name] = header.tensors
    for name in names:
        where = Path(path, name)
        try:
            if name.endswith(INDEX_SUFFIX):
                problems += _index_file_problems(where, name, tensors_of, set(names))
            elif name == "config.json":
                problems += config_problems(str(where), where.read_text("utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = f"{error.__class__.__name__}: {error}"
            problems.append(problem_line("model file", str(where), reason, "readable text", f"ls -l {where}"))
    return problems


def _index_file_problems(
    where: Path, name: str, tensors_of: Mapping[str, tuple[str, ...]], names: set[str]
) -> list[str]:
    """Problems of the index file `name` (relative to the model's folder) at `where`; it names files beside itself."""
    try:
        index = json.loads(where.read_text("utf-8"))
    except ValueError as error:
        command = f"python3 -m json.tool {where}"
        return [problem_line("safetensors index", str(where), f"no JSON ({error})", "a JSON object", command)]
    prefix = name[: name.rfind("/") + 1]
    beside = {other[len(prefix) :]: tensors for other, tensors in tensors_of.items() if other.startswith(prefix)}
    return safetensors.index_problems(str(where), index, beside, lambda other: prefix + other in names)


def way_to(path: str) -> list[str]:
    """Every folder from / down to `path` itself: each must let the reader through."""
    last = Path(path).absolute()
    return [str(step) for step in [*reversed(last.parents), last]]


def access_failures(root: str, paths: Iterable[str]) -> list[tuple[str, str]]:
    """(path, reason) for whatever the CURRENT user cannot enter, list or read; only the first on the way to `root`.

    Really opens the files: mode bits do not tell of ACLs, of root-squashed NFS, or of a capability.
    """
    for step in dict.fromkeys(way_to(root) + way_to(os.path.realpath(root))):
        if not os.access(step, os.X_OK):
            return [(step, CANNOT_ENTER)]
    failures = []
    for folder in sorted({str(Path(root, path).parent) for path in paths} | {root}):
        try:
            list(Path(folder).iterdir())
        except OSError as error:
            failures.append((folder, error.strerror or str(error)))
    for path in sorted(paths):
        where = f"{root}/{path}"
        try:
            with Path(where).open("rb", buffering=0) as stream:
                stream.read(1)
        except OSError as error:
            failures.append((where, error.strerror or str(error)))
    return failures


def access_problems(user: str, failures: Iterable[tuple[str, str]], modes: Mapping[str, str]) -> list[str]:
    """One line for each of the first few `failures` of the service `user`.

    `modes` describes owner and mode by path; a folder's description begins with "folder".
    """
    listed = list(failures)
    problems = []
    for path, reason in listed[:SHOWN_UNREADABLE]:
        mode = modes.get(path, "mode unknown")
        wanted = "o+rx" if mode.startswith("folder") else "o+r"
        found = f"{reason} for user {user} ({mode})"
        problems.append(problem_line("model access", path, found, f"readable by {user}", f"chmod {wanted} {path}"))
    rest = len(listed) - SHOWN_UNREADABLE
    if rest > 0:
        folder = str(Path(listed[-1][0]).parent)
        command = f"chmod -R o+rX {folder}"
        problems.append(problem_line("model access", folder, f"{rest} more such paths", "none", command))
    return problems
