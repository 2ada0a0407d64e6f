"""Module `swapgate.core.source_tree`: a folder that holds exactly the given text files."""

from __future__ import annotations

DOCUMENTATION = r"""
module: source_tree
short_description: Make a folder hold exactly the given text files
description:
  - Writes each file that differs, atomically, and removes every other file below the folder.
  - One call instead of one a file, so that a second run costs a second.
options:
  path:
    description: The folder.
    type: path
    required: true
  files:
    description: Map of relative path to content.
    type: dict
    required: true
author:
  - The swapgate contributors (@swapgate)
attributes:
  check_mode:
    support: full
    description: Reports what would change.
"""

EXAMPLES = r"""
- name: Ensure the host program is current
  swapgate.core.source_tree:
    path: /usr/local/lib/swapgate/swapgate
    files: "{{ sources }}"
"""

RETURN = r"""
written:
  description: Relative paths that were written, or would be in check mode.
  type: list
  returned: always
removed:
  description: Relative paths that were removed.
  type: list
  returned: always
"""

from pathlib import Path  # noqa: E402 - Ansible wants the documentation first

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible_collections.swapgate.core.plugins.module_utils import records  # noqa: E402


def plan(have: dict[str, str | None], want: dict[str, str]) -> tuple[list[str], list[str]]:
    """(paths to write, paths to remove) that lead from one tree to the other."""
    return sorted(path for path, text in want.items() if have.get(path) != text), sorted(set(have) - set(want))


def read_tree(root: Path) -> dict[str, str | None]:
    """Relative path to text of all files below ``root``; None for what is no text. Compiled files are left out."""
    tree: dict[str, str | None] = {}
    for file in root.rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            try:
                tree[str(file.relative_to(root))] = file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                tree[str(file.relative_to(root))] = None
    return tree


def main() -> None:
    """Gather, plan, act."""
    module = AnsibleModule(
        argument_spec={"path": {"type": "path", "required": True}, "files": {"type": "dict", "required": True}},
        supports_check_mode=True,
    )
    root = Path(module.params["path"])
    outside = [path for path in module.params["files"] if Path(path).is_absolute() or ".." in Path(path).parts]
    if outside:
        module.fail_json(msg=f"files: {outside[0]!r} leads out of {root}; expected relative paths")
    write, remove = plan(read_tree(root), module.params["files"])
    if not module.check_mode:
        for path in write:
            records.write_atomic(root / path, module.params["files"][path])
        for path in remove:
            (root / path).unlink()
    module.exit_json(changed=bool(write or remove), written=write, removed=remove)


if __name__ == "__main__":
    main()
