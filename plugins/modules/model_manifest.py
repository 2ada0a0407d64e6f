#!/usr/bin/python
"""Checks a model folder on the host and keeps its manifest (sizes and SHA-256) current."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_manifest
short_description: Check a model folder and keep its manifest current
description:
  - Lists the files of a model folder, checks every safetensors header, the index, C(config.json), the names (pickled
    weights are refused) and that the service user can really read everything, then writes sizes, times and SHA-256 of
    all files to C(<manifest_dir>/<name>.json).
  - A file whose size and mtime are as in the manifest is not read again.
  - Weights whose content differs from the manifest, or from what was fetched, are a problem, never silently accepted.
options:
  name:
    description: The model's name, which names the manifest.
    type: str
    required: true
  path:
    description: The model's folder, absolute.
    type: path
    required: true
  user:
    description: The service user who must be able to read every file.
    type: str
    required: true
  manifest_dir:
    description: The folder of the manifests. Created if it is not there.
    type: path
    default: /var/lib/swapgate/manifests
  trust_remote_code:
    description: Whether the engine runs Python code of the folder; a change of such code is then a problem.
    type: bool
    default: false
  fetched:
    description:
      - Whether the folder was fetched in this very run. Only then are the hashes that the fetch wrote beside the files
        taken for theirs; the record may as well have come with a copied folder.
    type: bool
    default: false
  rehash:
    description: Read every file again, even if its size and mtime are unchanged.
    type: bool
    default: false
author:
  - swapgate contributors
attributes:
  check_mode:
    description: Everything is checked and hashed, nothing is written.
    support: full
  diff_mode:
    description: Shows the content before and after, one line per file.
    support: full
"""

EXAMPLES = r"""
- name: Ensure the model is whole and its manifest is current
  swapgate.core.model_manifest:
    name: smollm2
    path: /srv/models/smollm2-135m-instruct
    user: vllm
"""

RETURN = r"""
id:
  description: SHA-256 that names the model's content.
  type: str
  returned: success
manifest:
  description: Path of the manifest.
  type: str
  returned: success
files:
  description: Number of files of the model.
  type: int
  returned: success
size_mib:
  description: Size of the model in MiB.
  type: int
  returned: success
hashed_files:
  description: Files that were read in this run.
  type: list
  elements: str
  returned: success
differences:
  description: Files whose content was added, removed or changed since the last manifest.
  type: list
  elements: str
  returned: success
problems:
  description: One line for each thing that is wrong with the folder.
  type: list
  elements: str
  returned: always
"""

import json  # noqa: E402
import os  # noqa: E402
import pwd  # noqa: E402
import stat  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any, NamedTuple  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible_collections.swapgate.core.plugins.module_utils import model_manifest  # noqa: E402
from ansible_collections.swapgate.core.plugins.module_utils.safetensors import problem_line  # noqa: E402


class Gathered(NamedTuple):
    """What was read of the host: the manifest now and before, the fetch's record, the files read, the problems."""

    after: model_manifest.Manifest
    before: model_manifest.Manifest | None
    hashed: list[str]
    problems: list[str]


def read_failures(user: str, root: str, paths: list[str]) -> list[tuple[str, str]]:
    """What `user` cannot enter, list or read of `root`, tried as that user in a child process.

    KeyError if there is no such user; OSError if this process may not become that user.
    """
    account = pwd.getpwnam(user)
    if os.geteuid() == account.pw_uid:
        return model_manifest.access_failures(root, paths)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        answer: dict[str, Any]
        try:
            os.initgroups(user, account.pw_gid)
            os.setgid(account.pw_gid)
            os.setuid(account.pw_uid)
            answer = {"failures": model_manifest.access_failures(root, paths)}
        except OSError as error:
            answer = {"error": str(error)}
        with os.fdopen(writer, "w") as stream:
            json.dump(answer, stream)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    answer = json.loads(text or '{"error": "the checking process died"}')
    if "error" in answer:
        raise OSError(answer["error"])
    return [(path, reason) for path, reason in answer["failures"]]


def describe_mode(path: str) -> str:
    """Kind, owner and mode of `path`, as a message shows them."""
    status = Path(path).stat()
    try:
        owner = pwd.getpwuid(status.st_uid).pw_name
    except KeyError:
        owner = str(status.st_uid)
    kind = "folder" if stat.S_ISDIR(status.st_mode) else "file"
    return f"{kind} of {owner}, mode {stat.S_IMODE(status.st_mode):04o}"


def reading_problems(user: str, root: str, paths: list[str]) -> list[str]:
    """One line for each path that the service user cannot read, or the reason why that could not be tried."""
    try:
        failures = read_failures(user, root, paths)
    except KeyError:
        command = f"useradd --system {user}, or deploy with the role that makes it"
        return [problem_line("service user", user, "no such user", "the user who reads the model", command)]
    except OSError as error:
        return [problem_line("service user", user, f"cannot become that user ({error})", "root", "run with become")]
    return model_manifest.access_problems(user, failures, {path: describe_mode(path) for path, _reason in failures})


def read_json(path: Path) -> str | None:
    """The text of a file of ours, or None if there is none."""
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return None


def writing_problems(user: str, root: str) -> list[str]:
    """Whether the service user, or everybody, may change the model; none for a user who is not there yet."""
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        return []
    below = [
        str(Path(folder, name).relative_to(root))
        for folder, folders, files in os.walk(root)
        for name in folders + files
    ]
    gids = os.getgrouplist(user, account.pw_gid)
    return model_manifest.write_problems("model folder", root, account.pw_uid, gids, below)


def gather(params: dict[str, Any], user: str, path: str, manifest_file: Path) -> Gathered:
    """Look at the folder and hash what is new in it; ValueError with one line if the manifest there is damaged."""
    problems = model_manifest.verify_headers(path)
    found, _listed_by_verify = model_manifest.list_files(path)
    problems += reading_problems(user, path, [entry.path for entry in found])
    problems += writing_problems(user, path)
    runs_code = params["trust_remote_code"]
    if runs_code:
        config = Path(path, "config.json")
        problems += model_manifest.foreign_code_problems(str(config), read_json(config) or "")
    text = read_json(manifest_file)
    before = None if text is None else model_manifest.load(text, str(manifest_file))
    record = Path(path, model_manifest.SOURCE_FILE)
    source_text = read_json(record)
    source = None if source_text is None else model_manifest.load_source(source_text, str(record))
    if problems:  # hashing takes minutes for a large model: not worth it for a folder that is refused anyway
        return Gathered({}, before, [], problems)
    known = model_manifest.known_hashes(path, [source if params["fetched"] else None, before])
    # The record of a fetch has no "path": its hashes were taken before the folder was moved in place.
    kept, to_hash = model_manifest.plan_hashes(found, known, params["rehash"])
    for entry in to_hash:
        kept[entry.path] = model_manifest.hash_file(f"{path}/{entry.path}")
    after = model_manifest.build(params["name"], path, found, kept)
    if source is not None:
        problems += model_manifest.source_problems(path, after, source, runs_code)
    else:
        differences = model_manifest.changes(before, after)
        problems += model_manifest.change_problems(path, differences, str(manifest_file), runs_code)
    return Gathered(after, before, [entry.path for entry in to_hash], problems)


def write(module: AnsibleModule, manifest_file: Path, text: str) -> None:
    """Write the manifest in one move, so that a reader never sees half of it."""
    manifest_file.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    temporary = manifest_file.with_name(f".{manifest_file.name}.{os.getpid()}")
    temporary.write_text(text, "utf-8")
    temporary.chmod(0o644)
    module.atomic_move(str(temporary), str(manifest_file))


def listing(manifest: model_manifest.Manifest | None) -> str:
    """A manifest as lines for a diff."""
    files = manifest["files"] if manifest else []
    return "".join(f"{entry['sha256'][:16]} {entry['size']:>14} {entry['path']}\n" for entry in files)


def main() -> None:
    """Run the module."""
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "path": {"type": "path", "required": True},
            "user": {"type": "str", "required": True},
            "manifest_dir": {"type": "path", "default": "/var/lib/swapgate/manifests"},
            "trust_remote_code": {"type": "bool", "default": False},
            "fetched": {"type": "bool", "default": False},
            "rehash": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    name, path = module.params["name"], module.params["path"].rstrip("/") or "/"
    manifest_file = Path(module.params["manifest_dir"], f"{name}.json")
    if not Path(path).is_dir():
        found = "no such folder" if not Path(path).exists() else "no folder"
        command = f"ls -ld {path}; copy it there, correct `path` or `drafts` of the model, or give the model a `source`"
        problem = problem_line(f"model {name}", path, found, "the model's folder", command)
        module.fail_json(msg=problem, problems=[problem])
    user = module.params["user"]
    if module.check_mode and all(entry.pw_name != user for entry in pwd.getpwall()):
        module.warn(f"user {user} is not there yet: whether it can read the model is seen in the real run")
        user = pwd.getpwuid(os.geteuid()).pw_name
    try:
        gathered = gather(module.params, user, path, manifest_file)
    except (OSError, ValueError) as error:
        module.fail_json(msg=str(error), problems=[str(error)])
    if gathered.problems:
        module.fail_json(msg="\n".join(gathered.problems), problems=gathered.problems)
    changed = gathered.before != gathered.after
    if changed and not module.check_mode:
        write(module, manifest_file, model_manifest.dump(gathered.after))
    differences = model_manifest.changes(gathered.before, gathered.after)
    for notice in model_manifest.change_notices(path, differences):
        module.warn(notice)
    module.exit_json(
        changed=changed,
        id=gathered.after["id"],
        manifest=str(manifest_file),
        files=len(gathered.after["files"]),
        size_mib=sum(entry["size"] for entry in gathered.after["files"]) // 2**20,
        hashed_files=gathered.hashed,
        differences=[f"{change.kind} {change.path}" for change in differences],
        problems=[],
        diff={
            "before": listing(gathered.before),
            "after": listing(gathered.after),
            "before_header": str(manifest_file),
        },
    )


if __name__ == "__main__":
    main()
