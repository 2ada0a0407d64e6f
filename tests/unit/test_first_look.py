"""What the looking playbooks say on a host that has nothing of swapgate, and who is recorded as asking for a swap."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.swapgate.core.plugins.lookup import asker

REPO = Path(__file__).resolve().parents[2]
PROGRAM = Path("/usr/local/bin/swapgate")


@pytest.mark.skipif(PROGRAM.exists(), reason="swapgate is installed on this machine")
@pytest.mark.parametrize(
    ("playbook", "code"), [("status", 0), ("history", 0), ("rollback", 2), ("confirm", 2)], ids=lambda value: str(value)
)
def test_a_host_that_has_nothing_is_one_sentence_with_the_next_command(playbook, code):
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "ansible-playbook"),
            *("-i", "bare,", f"playbooks/{playbook}.yml", "-e", "target=bare", "-e", "ansible_become=false"),
            *("-e", "ansible_connection=local", "-e", f"ansible_python_interpreter={sys.executable}"),
        ],
        cwd=REPO,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == code, said
    assert "bare: nothing of swapgate is installed; next: ansible-playbook playbooks/deploy.yml -e variant=NAME" in said
    assert "Errno" not in said


@pytest.mark.parametrize(
    ("environment", "who"),
    [
        ({"USER": "ann"}, "ann"),
        ({"USER": "root", "SUDO_USER": "ann"}, "ann"),
        ({"USER": "runner", "GITHUB_ACTOR": "bob"}, "bob (CI)"),
        ({"USER": " ", "LOGNAME": "eve"}, "eve"),
        ({}, "root"),
    ],
)
def test_who_asks_is_known_where_the_system_knows(environment, who):
    assert asker.asker(environment, 0) == who


def test_a_user_without_a_name_is_at_least_a_number():
    assert asker.asker({}, 2**31 - 7) == f"uid {2**31 - 7}"
