"""How another repository takes swapgate in: as a submodule, and in no other way."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
COLLECTION = "collections/ansible_collections/swapgate/core"
SENTENCE = "not to be built or installed; add the repository as a git submodule, as docs/submodule.md says"
OTHER = """
- name: Someone else's play
  hosts: localhost
  gather_facts: false
  tasks:
    - name: Look whether a filter is there
      ansible.builtin.debug:
        msg: "{{ {'A': 'b c'} | swapgate.core.quote_environment }}"
    - name: Look whether a role is there
      ansible.builtin.include_role:
        name: vllm_swap
        tasks_from: plan.yml
      when: false
"""


def run(folder, *words):
    environment = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    done = subprocess.run(
        words,
        cwd=folder,
        env={**environment, "PATH": f"{PROGRAMS}:{environment['PATH']}", "ANSIBLE_NOCOLOR": "1", "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.fixture
def checkout(tmp_path):
    """A git repository with this collection's folder as it lies here."""
    target = tmp_path / "swapgate"
    shutil.copytree(REPO / COLLECTION, target / COLLECTION, symlinks=True)
    shutil.copytree(REPO / "plugins/filter", target / "plugins/filter")
    for words in (("init", "-q"), ("add", "-A"), ("-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x")):
        assert run(target, "git", *words)[0] == 0
    return target


def test_building_the_collection_fails_with_the_way_that_works(checkout):
    code, said = run(checkout, "ansible-galaxy", "collection", "build", COLLECTION)
    assert code != 0 and SENTENCE in said
    assert not list(checkout.glob("*.tar.gz"))


def test_installing_it_from_git_fails_with_the_way_that_works(checkout, tmp_path):
    place = tmp_path / "installed"
    code, said = run(
        tmp_path, "ansible-galaxy", "collection", "install", "-p", str(place), f"git+file://{checkout}#/{COLLECTION}"
    )
    assert code != 0 and SENTENCE in said
    assert not (place / "ansible_collections/swapgate").exists(), "nothing is half installed"
    assert (REPO / "docs/submodule.md").exists()


def test_two_paths_are_all_that_a_submodule_needs(tmp_path):
    (tmp_path / "swapgate").symlink_to(REPO)
    (tmp_path / "ansible.cfg").write_text(
        "[defaults]\nroles_path = swapgate/roles\ncollections_path = swapgate/collections\n"
    )
    (tmp_path / "play.yml").write_text(OTHER)
    code, said = run(tmp_path, "ansible-playbook", "-i", "localhost,", "-c", "local", "play.yml")
    assert code == 0 and "failed=0" in said, said
    listed = run(tmp_path, "ansible-doc", "-t", "role", "-l")
    assert listed[0] == 0 and "vllm_swap" in listed[1]


def test_it_leaves_other_collections_alone(tmp_path):
    (tmp_path / "swapgate").symlink_to(REPO)
    (tmp_path / "ansible.cfg").write_text("[defaults]\ncollections_path = collections:swapgate/collections\n")
    other = tmp_path / "other"
    other.mkdir()
    (other / "galaxy.yml").write_text("{namespace: some, name: other, version: 1.0.0, readme: R, authors: [x]}\n")
    code, said = run(tmp_path, "ansible-galaxy", "collection", "install", "./other")
    assert code == 0 and "some.other:1.0.0 was installed" in said, said
    code, said = run(tmp_path, "ansible-galaxy", "collection", "list")
    assert code == 0 and "some.other" in said and "WARNING" not in said, said
