"""roles/vllm_swap/tasks/consent.yml on two hosts, of which one has something to lose: one answer decides for both."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
NEW, OLD = "b" * 12, "a" * 12
PLAY = [
    {
        "hosts": "all",
        "connection": "local",
        "gather_facts": False,
        "vars": {"vllm_swap_release": NEW, "vllm_swap_variant_name": "ngram"},
        "tasks": [
            {"ansible.builtin.set_fact": {"__vllm_swap_compared": {"before": "{{ before }}", "records_why": True}}},
            {"ansible.builtin.include_role": {"name": "vllm_swap", "tasks_from": "consent.yml"}},
            {"ansible.builtin.debug": {"msg": "begins"}},
        ],
    }
]


@pytest.fixture
def play(tmp_path):
    unit = {"unit": "vllm-m.service", "model": "m", "variant": "baseline", "release": OLD, "active": "active"}
    units = {"busy": [unit], "idle": []}
    hosts = {name: {"before": {"units": found, "swap": None}} for name, found in units.items()}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    (tmp_path / "play.yml").write_text(yaml.safe_dump(PLAY))

    def run(runner: bool, **variables):
        words = ["-i", str(tmp_path / "hosts.yml"), str(tmp_path / "play.yml"), "-e", json.dumps(variables)]
        environment = {**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_NOCOLOR": "1"}
        environment.pop("AWX_ISOLATED_DATA_DIR", None)
        if runner:
            environment["AWX_ISOLATED_DATA_DIR"] = str(tmp_path)
        done = subprocess.run(
            [str(Path(sys.executable).parent / "ansible-playbook"), *words],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, " ".join((done.stdout + done.stderr).split()).replace("''", "'")

    return run


@pytest.mark.parametrize("runner", [True, False], ids=["ansible-runner", "no terminal"])
def test_without_an_answer_no_host_begins_and_nothing_waits(play, runner):
    code, said = play(runner)
    assert code == 2 and "msg: begins" not in said, said
    assert said.count("msg: 'The swap would stop baseline on busy and nobody agreed") == 2, said
    assert ("Ask before live traffic" in said) is not runner, said


@pytest.mark.parametrize(("agreed", "code"), [({"busy": [OLD]}, 0), ({"busy": ["c" * 12]}, 2), ({"idle": [OLD]}, 2)])
def test_consent_is_to_exactly_the_release_that_was_shown_on_that_host(play, agreed, code):
    found, said = play(True, vllm_swap_agreed_to_stop=agreed)
    assert found == code, said
    assert said.count("msg: begins") == (0 if code else 2), said


def test_allow_disruption_asks_nobody_also_as_a_word(play):
    code, said = play(False, vllm_swap_allow_disruption="true")
    assert code == 0 and "Ask before live traffic" not in said, said
