"""The documents' command lines on a real host, typed into a login shell, every variable as a text."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import documents
import pytest
from throwaway import Command, Host, Run

pytestmark = pytest.mark.host
WHOLE, CHECK, ELSEWHERE = "to its end", "--check", "not here"
# The first pattern that fits decides. One that none fits fails: add its pattern here.
DECISIONS = (
    # Minutes, an NVIDIA host, or a plan of somebody's own: tests/unit/test_as_typed.py checks syntax and variables.
    (r"/(benchmark|profile|predict|nccl_check|prepare_host)\.yml|playbooks/deploy\.yml$| swapgate/", ELSEWHERE),
    (r"keep_if_faster=true", CHECK),
    (r"/(status|history|preflight|deploy|rollback|confirm)\.yml", WHOLE),
)
# What a command says that has nothing to do on this host.
NOTHING = {"confirm.yml": "no swap waits to be confirmed"}
COMMANDS = documents.commands()
PLAYBOOKS = [typed for typed in COMMANDS if documents.decision(typed) == documents.PLAYBOOK]
VERBS = sorted({" ".join(typed.split()[:2]) for typed in COMMANDS if documents.decision(typed) == documents.VERB})
LOOKS = ("status", "history", "gpus", "topology", "way-back")


def typed_at(host: Host, line: str) -> Run:
    """The end of a line typed into a login shell of the checkout, with the tests' inventory as the usual one."""
    inventories = f"{host.sandbox['inventory']},{host.inventory}"
    words = f"cd {documents.ROOT} && . {Path(sys.prefix)}/bin/activate && {line}"
    return Command(["bash", "-lc", words], {"ANSIBLE_INVENTORY": inventories}).wait()


@pytest.mark.parametrize("typed", PLAYBOOKS)
def test_a_playbook_runs_as_the_documents_print_it(host: Host, typed: str) -> None:
    way = next((way for pattern, way in DECISIONS if re.search(pattern, typed)), None)
    assert way, f"{COMMANDS[typed]}: nobody has decided how to run `{typed}`: add its pattern to DECISIONS"
    if way == ELSEWHERE:
        pytest.skip("needs minutes or hardware; its syntax is checked in tests/unit/test_as_typed.py")
    line = typed.replace("NAME", "ngram").replace(" -i inventory/mine", "")
    run = typed_at(host, line + (" --check" if way == CHECK and "--check" not in line else ""))
    said = next((said for name, said in NOTHING.items() if name in typed), None)
    assert run.code == 0 or (said and said in run.flat), run.text[-3000:]


@pytest.mark.parametrize("typed", VERBS)
def test_a_verb_of_the_host_works_in_a_login_shell_there(host: Host, typed: str) -> None:
    line = typed if typed.split()[1] in LOOKS else typed + " --help"
    done = host.run(f"bash -lc '{line}'")
    assert done.returncode == 0 and done.stdout.strip(), done.stdout + done.stderr


def test_variables_come_as_texts_from_files_and_through_deploy_py(host: Host, tmp_path: Path) -> None:
    before = host.picture()
    file = tmp_path / "settings.yml"
    file.write_text("because: from a file\n")
    given = f"-e @{file} -e '{{\"allow_disruption\": true}}' -e confirm_within_s=60 -- --forks 2"
    run = typed_at(host, f"scripts/deploy.py ngram --check {given}")
    assert run.code == 0 and "stops 'baseline'" in run.flat, run.text[-3000:]
    assert host.picture() == before
