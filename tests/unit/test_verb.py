"""Action `swapgate.core.verb`: what a playbook says when a verb of the host fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PLAYBOOK, HISTORY = Path(sys.executable).parent / "ansible-playbook", "playbooks/history.yml"
# What these do with a failed verb is their own matter: a unit's command, and a plan for hosts that have nothing yet.
OWN_WAY = {"playbooks/tasks/ask.yml", "roles/vllm_benchmark/tasks/measure.yml", "roles/vllm_swap/tasks/plan.yml"}


def test_a_host_without_swapgate_is_one_sentence_with_the_next_command():
    done = subprocess.run(
        [PLAYBOOK, "-i", "localhost,", "-c", "local", "-e", '{"ansible_become": false, "target": "all"}', HISTORY],
        cwd=REPO,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode != 0
    said = " ".join(done.stdout.split())
    assert "localhost: nothing of swapgate is installed on this host. Deploy a variant first" in said, said
    assert "Errno" not in said and "stderr" not in said


def test_every_playbook_and_role_runs_verbs_by_it():
    files = [*REPO.glob("playbooks/**/*.yml"), *REPO.glob("roles/*/tasks/*.yml"), *REPO.glob("roles/*/vars/*.yml")]
    assert len(files) > 50
    calls = re.compile(r"(?<!dest: )(?<!validate: )/usr/local/bin/swapgate")
    bare = {str(file.relative_to(REPO)) for file in files if calls.search(file.read_text())}
    assert bare == OWN_WAY
