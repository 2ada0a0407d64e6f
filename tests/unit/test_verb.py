"""Verbs of the host are run in one way, which fails with their own sentence: action `swapgate.core.verb`."""

import re
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
# What these do with a failed verb is their own matter: a unit's command, and a plan for hosts that have nothing yet.
OWN_WAY = {"playbooks/tasks/ask.yml", "roles/vllm_benchmark/tasks/measure.yml", "roles/vllm_swap/tasks/under_way.yml"}


def test_every_playbook_and_role_runs_verbs_by_it():
    files = [*REPO.glob("playbooks/**/*.yml"), *REPO.glob("roles/*/tasks/*.yml"), *REPO.glob("roles/*/vars/*.yml")]
    assert len(files) > 50
    calls = re.compile(r"(?<!dest: )(?<!validate: )/usr/local/bin/swapgate")
    bare = {str(file.relative_to(REPO)) for file in files if calls.search(file.read_text())}
    assert bare == OWN_WAY
