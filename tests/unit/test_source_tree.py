"""Module source_tree: a folder that holds exactly the given text files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.swapgate.core.plugins.modules import source_tree

REPO = Path(__file__).resolve().parents[2]


def run(path, files, check=False):
    """Run the module as Ansible does; returns its result."""
    arguments = {"path": str(path), "files": files, "_ansible_check_mode": check}
    done = subprocess.run(
        [sys.executable, "-m", "ansible_collections.swapgate.core.plugins.modules.source_tree"],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": arguments}),
        env={**os.environ, "PYTHONPATH": str(REPO / "collections"), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def tree(root):
    """Relative path to text of every file."""
    return {str(file.relative_to(root)): file.read_text() for file in root.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("have", "want", "write", "remove"),
    [
        ({}, {}, [], []),
        ({}, {"b": "1", "a": "2"}, ["a", "b"], []),
        ({"a": "1"}, {"a": "1"}, [], []),
        ({"a": "1"}, {"a": "2"}, ["a"], []),
        ({"a": None}, {"a": ""}, ["a"], []),
        ({"a": "1", "c": "1", "b": None}, {"a": "1"}, [], ["b", "c"]),
    ],
)
def test_plan(have, want, write, remove):
    assert source_tree.plan(have, want) == (write, remove)


def test_read_tree_passes_over_compiled_files_and_marks_what_is_no_text(tmp_path):
    for name in ("a.py", "sub/b.py", "sub/__pycache__/b.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert source_tree.read_tree(tmp_path) == {"a.py": "a.py", "sub/b.py": "sub/b.py", "binary": None}
    assert source_tree.read_tree(tmp_path / "none") == {}


def test_it_makes_keeps_changes_and_removes(tmp_path):
    root = tmp_path / "library/swapgate"
    first = run(root, {"__init__.py": "", "sub/a.py": "é\n"})
    assert (first["changed"], first["written"], first["removed"]) == (True, ["__init__.py", "sub/a.py"], [])
    assert tree(root) == {"__init__.py": "", "sub/a.py": "é\n"}
    assert (root / "sub/a.py").stat().st_mode & 0o777 == 0o644

    again = run(root, {"__init__.py": "", "sub/a.py": "é\n"})
    assert (again["changed"], again["written"], again["removed"]) == (False, [], [])

    (root / "stray.py").write_text("left over from an older release")
    (root / "sub/a.py").write_text("changed by hand")
    wanted = {"__init__.py": "", "sub/a.py": "é\n", "sub/b.py": "b"}
    planned = run(root, wanted, check=True)
    assert (planned["changed"], planned["written"], planned["removed"]) == (
        True,
        ["sub/a.py", "sub/b.py"],
        ["stray.py"],
    )
    assert tree(root)["sub/a.py"] == "changed by hand"
    done = run(root, wanted)
    assert {key: done[key] for key in ("changed", "written", "removed")} == {
        key: planned[key] for key in ("changed", "written", "removed")
    }
    assert tree(root) == wanted


@pytest.mark.parametrize("path", ["../outside", "/etc/outside", "sub/../../outside"])
def test_a_path_that_leads_out_is_refused_and_nothing_written(tmp_path, path):
    root = tmp_path / "root"
    result = run(root, {"inside": "x", path: "x"})
    assert result["failed"] and result["msg"] == f"files: {path!r} leads out of {root}; expected relative paths"
    assert not root.exists()
