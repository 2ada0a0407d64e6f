"""What an operator types after -e is a text: each word behaves as the type that its spec declares."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.swapgate.core.plugins.callback import typed_words

REPO = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
OPTIONS = typed_words.options()
OF_TYPE = {
    kind: sorted(name for name, one in OPTIONS.items() if one["type"] == kind) for kind in ("bool", "int", "float")
}
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}


def test_the_specs_are_walked():
    assert len(OF_TYPE["bool"]) >= 12 and len(OF_TYPE["int"]) >= 10, OF_TYPE
    assert {"python_env_allow_unpinned", "nvidia_stack_install", "preflight_only", "keep_if_faster"} <= set(
        OF_TYPE["bool"]
    )
    declared = {
        name
        for file in REPO.glob("roles/*/meta/argument_specs.yml")
        for name in yaml.safe_load(file.read_text())["argument_specs"]["main"]["options"]
    }
    assert declared <= set(OPTIONS) or declared - set(OPTIONS) == {"vllm_service_variant"}


@pytest.mark.parametrize("name", OF_TYPE["bool"])
@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("false", False), ("yes", True), ("no", False), ("0", False)]
)
def test_every_boolean(name, text, value):
    assert typed_words.typed(name, text, OPTIONS[name]) is value


@pytest.mark.parametrize("name", [*OF_TYPE["int"], *OF_TYPE["float"]])
def test_every_number(name):
    found = typed_words.typed(name, "7", OPTIONS[name])
    assert found == 7 and not isinstance(found, (str, bool))


@pytest.mark.parametrize("name", [name for kind in OF_TYPE.values() for name in kind])
def test_another_word_is_one_error_that_names_variable_value_and_type(name):
    with pytest.raises(ValueError, match=rf"-e {name}=maybe: expected (true or false|a whole number|a number)\."):
        typed_words.typed(name, "maybe", OPTIONS[name])


@pytest.mark.parametrize(("text", "value"), [("[1,4]", [1, 4]), ("1,4", [1, 4]), ("8", [8])])
def test_a_list(text, value):
    assert typed_words.typed("concurrency", text, OPTIONS["concurrency"]) == value


def test_a_template_and_a_value_that_has_its_type_are_left_alone():
    assert typed_words.typed("repeats", "{{ x }}", OPTIONS["repeats"]) == "{{ x }}"
    assert typed_words.typed("preflight_only", False, OPTIONS["preflight_only"]) is False


# --- with the real ansible-playbook ----------------------------------------------------------------------------------


def run(tmp_path, *words):
    """A play beside playbooks/callback_plugins' twin that prints what conditions and roles see."""
    (tmp_path / "callback_plugins").symlink_to(REPO / "plugins/callback")
    task = {"ansible.builtin.debug": {"msg": "seen {{ [python_env_allow_unpinned, repeats, concurrency] | to_json }}"}}
    bare = {"ansible.builtin.debug": {"msg": "the condition held"}, "when": "python_env_allow_unpinned"}
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": [task, bare]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    argv = [str(BIN / "ansible-playbook"), "-i", "localhost,", str(tmp_path / "play.yml")]
    return subprocess.run(
        [*argv, *(word for one in words for word in ("-e", one))],
        cwd=REPO,
        env={**CLEAN, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_CONFIG": str(REPO / "ansible.cfg")},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.mark.parametrize("text", ["true", "false"])
def test_a_bare_condition_takes_a_boolean_as_typed(tmp_path, text):
    done = run(tmp_path, f"python_env_allow_unpinned={text}", "repeats=2", "concurrency=[1,4]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seen " + json.dumps([text == "true", 2, [1, 4]]) in done.stdout
    assert ("the condition held" in done.stdout) is (text == "true")


def test_a_wrong_word_ends_the_run_before_its_first_task(tmp_path):
    done = run(tmp_path, "python_env_allow_unpinned=maybe", "repeats=two", "concurrency=1")
    assert done.returncode == 2
    said = " ".join((done.stdout + done.stderr).split())
    assert "-e python_env_allow_unpinned=maybe: expected true or false." in said
    assert "-e repeats=two: expected a whole number." in said
    assert "TASK [" not in said and "Nothing was touched" in said
