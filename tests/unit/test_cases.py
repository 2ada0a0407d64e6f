"""The public cases, as the command that CI runs counts them, and its way to fail."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.swapgate.core.plugins.module_utils import unit_text

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "cases"


def run(*arguments: str) -> subprocess.CompletedProcess:
    """The command with these arguments."""
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "cases.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.fixture(scope="module")
def rows():
    """The rows of a run over the repository's cases, without an engine."""
    return {row["what"]: row for row in json.loads(run("--json").stdout)}


def test_every_bar_but_the_engines_is_met(rows):
    """Causes, classes, false alarms, outputs; the speed depends on the machine and is only there."""
    missed = {what: row for what, row in rows.items() if row["ok"] is False and not what.startswith("speed")}
    assert missed == {}
    assert any(what.startswith("speed") for what in rows)


def test_without_an_engine_the_table_says_so(rows):
    """Nothing is claimed for what was not run."""
    told = [
        row["found"]
        for row in rows.values()
        if row["what"].startswith(("engine configs", "our preflight with the engine"))
    ]
    assert told == ["not run: no engine given"] * 2


def test_a_missed_bar_fails_the_command_and_names_the_case(tmp_path):
    """Cases whose expectation the product does not meet: exit code 1, the id and both answers in the table."""
    wrong = yaml.safe_load((CASES / "kv-one-request-does-not-fit.yml").read_text())
    wrong.update(id="wrong-cause", log=["the end", *wrong["log"]], root_cause_line="the end")
    quiet = yaml.safe_load((CASES / "xid-bus-drop-no-xid-line.yml").read_text())
    quiet.update(id="not-quiet", outcome="benign")
    (tmp_path / "wrong.yml").write_text(yaml.safe_dump(wrong))
    (tmp_path / "quiet.yml").write_text(yaml.safe_dump(quiet))
    shutil.copy(CASES / "topo-8x-h100-nv18.yml", tmp_path)
    done = run("--cases", str(tmp_path))
    assert done.returncode == 1
    assert "wrong-cause: fatal: " in done.stdout
    assert "not-quiet: fatal, expected alive or benign" in done.stdout


def test_a_folder_without_cases_is_an_error(tmp_path):
    """An empty folder must not look like a clean pass."""
    done = run("--cases", str(tmp_path))
    assert done.returncode == 1
    assert "no case found" in done.stderr
    (tmp_path / "x.yml").write_text("just: this\n")
    assert "expected a mapping with source and log or input" in run("--cases", str(tmp_path)).stderr


def test_a_wrong_engine_folder_is_an_error(tmp_path):
    """--engine names a virtualenv."""
    done = run("--cases", str(CASES), "--engine", str(tmp_path))
    assert done.returncode == 1
    assert "found no bin/python there" in done.stderr


def test_every_case_keeps_its_source():
    """112 cases, each with the place where it was published."""
    cases = [yaml.safe_load(path.read_text()) for path in CASES.glob("[!_]*.yml")]
    assert len(cases) == 112
    assert all(case["source"]["repo"] and case["source"]["ref"] for case in cases)


UNITS = [
    (
        "[Service]\nExecStart=/opt/v/bin/vllm serve x --speculative-config '{\"method\": ngram}'\n",
        "reject",
        "no JSON when it reaches",
    ),
    ("[Service]\nExecStart=/opt/v/bin/vllm serve 'x\n", "reject", "quotes do not close"),
    ("[Service]\nUser=vllm\n", "reject", "has no ExecStart="),
    (
        "[Service]\nExecStart=/bin/sh -c 'echo ${free}'\n",
        "accept-with-warning",
        "refers to $free, which the unit does not set",
    ),
    (
        "[Service]\nExecStart=/opt/v/bin/vllm serve x\nConflicts=y.service\n",
        "accept-with-warning",
        "Conflicts= stands under [Service]",
    ),
    (
        "[Service]\nExecStartPre=/bin/rm -f /dev/shm/psm_*\nExecStart=/opt/v/bin/vllm serve x\n",
        "accept-with-warning",
        "removes files in /dev/shm",
    ),
]


@pytest.mark.parametrize(("text", "verdict", "words"), UNITS, ids=[words for _text, _verdict, words in UNITS])
def test_units_written_by_hand(text, verdict, words):
    """What systemd accepts and an engine does not survive."""
    result = unit_text.lint(text)
    assert result["verdict"] == verdict
    assert any(words in line for line in result["errors"] + result["warnings"])


def test_a_careful_unit_has_no_warning():
    """The lint is not a litany: a unit that heeds it passes."""
    text = """\
[Unit]
StartLimitIntervalSec=3h
StartLimitBurst=3
[Service]
Type=notify
User=vllm
ExecStart=/usr/local/bin/swapgate supervise \\
    --unit %n
Restart=on-abnormal
TimeoutStopSec=180
KillMode=mixed
"""
    assert unit_text.lint(text) == {"verdict": "accept", "errors": [], "warnings": []}
