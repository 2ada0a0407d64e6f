"""What the documents print as commands can be typed. A command that nobody decided how to try fails the test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS += sorted((ROOT / "roles").glob("*/README.md"))
NAMED = re.compile(r"(?<![\w/])scripts/([a-z_]+\.py)")
STARTS = (". ", "ansible", "python", "pytest ", "make ", "nice ", "scripts/", "swapgate ", "journalctl ", "kubectl ")
COMMAND = re.compile(rf"(?:[A-Z_]+=\S+ )?(?:{'|'.join(map(re.escape, STARTS))})")
# How a command of the documents is tried here: the first pattern that fits decides; none is a failure of the test.
HELP, SYNTAX, TARGETS, SOURCE = "--help", "--syntax-check", "make -n", "source"
AS_IT_IS = "as it is"
VERB, EXISTS, ELSEWHERE = "the host program has the verb", "its file is there", "not this repository's"
DECISIONS = (
    (r"^\. \.venv/bin/activate$", SOURCE),
    (r"^ansible-playbook ", SYNTAX),
    (r"^ansible-doc ", AS_IT_IS),
    (r"^(?:SWAPGATE_SLOW=1 )?make ", TARGETS),
    # Modules of the host, and programs that want a GPU or an engine as soon as they are imported.
    (r"python3? (?:plugins|benchmarks|tests)/", EXISTS),
    (r"^(?:\S.* \| )?(?:python3? )?scripts/", HELP),
    (r"^swapgate ", VERB),
    (r"^journalctl -u \S+$|^python3 \.\.\. ", ELSEWHERE),
    (r"^pytest .* tests/", EXISTS),
)


def commands() -> list[tuple[str, str]]:
    """(document:line, command) of each indented or fenced command line, and of each inline one with words after it."""
    found = []
    for document in DOCUMENTS:
        for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
            where = f"{document.relative_to(ROOT)}:{number}"
            # A program's name alone, in running text, is no command line.
            inline = [one for one in re.findall(r"`([^`]+)`", line) if " " in one]
            code = [line.strip()] if re.match(r" {4,}\S", line) else inline
            found += [(where, one) for one in code if COMMAND.match(one)]
    return found


def without_notes(command: str) -> str:
    """The command without its trailing remark and without [optional] words."""
    command = re.sub(r"\[([^\]=]* [^\]]*)\]", "", command)
    return re.sub(r"\s+#.*|\s{4,}\S.*", "", command).rstrip("\\ ").strip()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.name)
def test_a_program_can_be_started_by_its_path_and_a_module_cannot(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    program = '__name__ == "__main__"' in text
    assert text.startswith("#!/usr/bin/env python3\n") == program
    assert os.access(script, os.X_OK) == program


def test_every_script_that_is_named_as_a_command_is_a_program() -> None:
    texts = [*DOCUMENTS, *SCRIPTS, *(ROOT / "playbooks").rglob("*.yml"), *(ROOT / "roles").rglob("*.yml")]
    texts += (ROOT / "plugins").rglob("*.py")
    named = {name for file in texts for name in NAMED.findall(file.read_text(encoding="utf-8"))}
    assert {"deploy.py", "diagnose.py", "verdict.py", "report.py", "predict.py", "experiment.py", "bench.py"} <= named
    assert not [name for name in named if not (ROOT / "scripts" / name).exists()]


def shell(line: str) -> subprocess.CompletedProcess[str]:
    """A line typed into a login shell in the checkout, with the virtualenv activated."""
    return subprocess.run(
        ["bash", "-lc", f"cd {ROOT} && . {Path(sys.prefix)}/bin/activate && {line}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")},
    )


def test_every_command_of_the_documents_has_a_way_to_be_tried_and_works() -> None:
    tried: dict[str, str] = {}
    undecided: list[str] = []
    for where, command in commands():
        typed = without_notes(command)
        way = next((way for pattern, way in DECISIONS if re.search(pattern, typed)), None)
        if not way:
            undecided.append(f"{where}: no decision on how to try `{typed}`; add one to DECISIONS")
            continue
        tried.setdefault(line_to_try(typed, way), f"{where}: {command}")
    assert not undecided, "\n".join(undecided)
    assert len(tried) > 15, tried
    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(shell, tried))
    wrong = [
        f"{said}\n  `{line}`: {done.returncode}: {(done.stdout + done.stderr)[-400:]}"
        for (line, said), done in zip(tried.items(), ended)
        if done.returncode != 0
    ]
    assert not wrong, "\n".join(wrong)


def line_to_try(typed: str, way: str) -> str:
    """The shell line that tries a command."""
    if way in (SOURCE, ELSEWHERE):
        return "true"  # every line is run after the first
    if way == AS_IT_IS:
        return typed
    if way == VERB:
        return f"grep -q '\"{typed.split()[1]}\"' plugins/host_program/main.py"
    if way == EXISTS:
        return "test -f " + next(word for word in typed.split() if word.endswith(".py"))
    if way == TARGETS:
        targets = re.sub(r".*?make ", "", typed).replace("|", " ")
        return f"make -n -o .venv/.done {targets}"
    if way == SYNTAX:
        typed = typed.replace("-i inventory/mine", "-i inventory/example-8gpu-pcie")
        return f"{typed} --syntax-check"
    words = typed.split()
    at = next(number for number, word in enumerate(words) if word.startswith("scripts/"))
    return " ".join([*words[max(0, at - 1) if words[at - 1].startswith("python") else at : at + 1], "--help"])
