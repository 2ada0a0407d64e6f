"""What the documents print as commands can be typed. A command that nobody decided how to try fails the test."""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import documents
import pytest
from documents import ROOT

SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
NAMED = re.compile(r"(?<![\w/])scripts/([a-z_]+\.py)")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.name)
def test_a_program_can_be_started_by_its_path_and_a_module_cannot(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    program = '__name__ == "__main__"' in text
    assert text.startswith("#!/usr/bin/env python3\n") == program
    assert os.access(script, os.X_OK) == program


def test_every_script_that_is_named_as_a_command_is_a_program() -> None:
    texts = [*documents.PAGES, *SCRIPTS, *(ROOT / "playbooks").rglob("*.yml"), *(ROOT / "roles").rglob("*.yml")]
    texts += (ROOT / "plugins").rglob("*.py")
    named = {name for file in texts for name in NAMED.findall(file.read_text(encoding="utf-8"))}
    assert {"deploy.py", "diagnose.py", "verdict.py", "report.py", "predict.py", "experiment.py", "bench.py"} <= named
    assert not [name for name in named if not (ROOT / "scripts" / name).exists()]


@functools.cache
def shell(line: str) -> tuple[int, str]:
    """Exit code and output of a line typed into a login shell in the checkout, with the virtualenv activated."""
    done = subprocess.run(
        ["bash", "-lc", f"cd {ROOT} && . {Path(sys.prefix)}/bin/activate && {line}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
    )
    return done.returncode, done.stdout + done.stderr


def test_every_command_of_the_documents_has_a_decision() -> None:
    undecided = [
        f"{where}: nobody has decided how to try `{typed}`: add its pattern to DECISIONS in tests/documents.py"
        for typed, where in documents.commands().items()
        if documents.decision(typed) is None
    ]
    assert not undecided, "\n".join(undecided)


def test_every_command_of_the_documents_works_as_typed() -> None:
    tried = documents.commands()
    assert len(tried) > 60
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(problem, tried)
        wrong = [f"{where}: `{typed}`: {said}" for (typed, where), said in zip(tried.items(), found) if said]
    assert not wrong, "\n".join(wrong)


def problem(typed: str) -> str | None:
    """What is wrong with a command, as far as no host is needed for it."""
    way, words = documents.decision(typed), typed.split()
    if way == documents.AS_IT_IS:
        return failed(typed)
    if way == documents.PLAYBOOK:
        return unknown_variable(typed) or failed(
            # docs/submodule.md stands in a repository that holds this one as a folder.
            typed.replace("inventory/mine", "inventory/example-8gpu-pcie").replace(" swapgate/", " ")
            + " --syntax-check"
        )
    if way == documents.TARGETS:
        return failed("make -n -o .venv/.done " + " ".join(re.findall(r"\w+", typed)[1:]))
    if way == documents.VERB:
        return failed(f"grep -q '\"{words[1]}\"' plugins/host_program/main.py")
    if way == documents.EXISTS:
        return failed("test -f " + next(word for word in words if word.endswith(".py")))
    if way == documents.HELP:
        return unknown_option(typed)
    return None


def failed(line: str) -> str | None:
    """What a line said that did not succeed."""
    code, said = shell(line)
    return f"exit {code}: {said[-500:]}" if code else None


def unknown_variable(typed: str) -> str | None:
    """The first variable of -e that neither the playbook nor a role knows."""
    words = shlex.split(typed)
    names = [words[at + 1].split("=")[0] for at, word in enumerate(words) if word == "-e"]
    text = "\n".join(file.read_text() for top in ("playbooks", "roles") for file in (ROOT / top).rglob("*.yml"))
    unknown = [name for name in names if not re.search(rf"\b{name}\b", text)]
    return f"-e {unknown[0]}: no playbook and no role knows it" if unknown else None


def unknown_option(typed: str) -> str | None:
    """Why a script does not start as typed, or the first of its verbs and options that its --help does not have."""
    line = next(part.strip() for part in typed.split(" | ") if "scripts/" in part)
    start = re.match(r"(?:python3? )?\S+", line)
    assert start
    words = [word for part in shlex.split(line.removeprefix(start[0])) for word in part.split("=")[:1]]
    code, said = shell(f"{start[0]} --help")
    if code:
        return f"exit {code}: {said[-500:]}"
    if words and re.fullmatch(r"[a-z][a-z-]+", words[0]):
        said += shell(f"{start[0]} {words[0]} --help")[1]
    unknown = [word for word in words if re.fullmatch(r"--?[a-z][a-z-]*", word) and not re.search(rf"{word}\b", said)]
    return f"{unknown[0]}: not in its --help" if unknown else None
