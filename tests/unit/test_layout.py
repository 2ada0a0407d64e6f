"""The repository's own shape: what loads what, and one place per fact."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

REPO = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
ROLES = sorted(path.parent.parent.name for path in (REPO / "roles").glob("*/meta/argument_specs.yml"))
SHARED = sorted((REPO / "plugins/module_utils").glob("*.py"))
HOST_PROGRAM = sorted(
    file for folder in ("host_program", "engine_extension") for file in (REPO / "plugins" / folder).glob("*.py")
)
TYPES = {"str": str, "path": str, "int": int, "bool": bool, "dict": dict, "list": list, "float": float}


def load(path):
    """A YAML file of the repository."""
    return yaml.safe_load((REPO / path).read_text(encoding="utf-8"))


def ansible(command, *words):
    """Run one of Ansible's commands in the repository; settings of this machine do not count."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith("ANSIBLE_")}
    done = subprocess.run(
        [str(BIN / command), *words],
        cwd=REPO,
        env={**clean, "ANSIBLE_NOCOLOR": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# --- variables and inventories ---------------------------------------------------------------------------------------


def test_a_playbook_of_playbooks_sees_group_vars(tmp_path):
    # Ansible looks beside the playbook: this one has beside it what playbooks/ has beside its own.
    (tmp_path / "group_vars").symlink_to(REPO / "playbooks/group_vars")
    out = tmp_path / "seen.json"
    task = {
        "ansible.builtin.copy": {
            "content": "{{ swapgate_shipped_variants.ngram | to_json }}",
            "dest": str(out),
            "mode": "0600",
        }
    }
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "tasks": [task],
        "vars": {"ansible_python_interpreter": sys.executable},
    }
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    ansible("ansible-playbook", "-i", "localhost,", str(tmp_path / "play.yml"))
    assert json.loads(out.read_text()) == load("group_vars/all/variants.yml")["swapgate_shipped_variants"]["ngram"]


@pytest.mark.parametrize("link", ["playbooks/group_vars", "tests/golden/group_vars"])
def test_the_links_to_group_vars_are_relative_and_lead_there(link):
    path = REPO / link
    assert path.is_symlink() and not Path(os.readlink(path)).is_absolute()
    assert path.resolve() == REPO / "group_vars"


def test_the_default_inventory_is_the_sandbox():
    known = json.loads(ansible("ansible-inventory", "--list"))
    assert known["vllm_hosts"]["hosts"] == ["sandbox"]
    host = known["_meta"]["hostvars"]["sandbox"]
    assert (host["ansible_host"], host["ansible_port"]) == ("127.0.0.1", 2222)
    assert host["swapgate_host"] == load("inventory/sandbox/group_vars/vllm_hosts.yml")["swapgate_host"]


@pytest.mark.parametrize("inventory", sorted(path.name for path in (REPO / "inventory").iterdir() if path.is_dir()))
def test_an_inventory_names_a_model_that_exists(inventory):
    given = load(f"inventory/{inventory}/group_vars/vllm_hosts.yml")
    assert given["swapgate_model"] in load("group_vars/all/models.yml")["swapgate_shipped_models"]


# --- roles -----------------------------------------------------------------------------------------------------------


def fits(value, option):
    """Whether a default is of its option's type; a text with a template in it is fine for any."""
    if isinstance(value, str) and "{{" in value:
        return True
    kind = TYPES[option["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return False
    return all(isinstance(item, TYPES[option["elements"]]) for item in value) if "elements" in option else True


def test_every_role_has_an_argument_spec():
    assert sorted(path.name for path in (REPO / "roles").iterdir() if (path / "tasks").is_dir()) == ROLES
    assert len(ROLES) >= 5


@pytest.mark.parametrize("role", ROLES)
def test_defaults_are_those_of_the_argument_spec(role):
    points = load(f"roles/{role}/meta/argument_specs.yml")["argument_specs"]
    # Entry points that are no file of tasks are shapes of an option's value.
    files = [name for name in points if (REPO / f"roles/{role}/tasks/{name}.yml").exists()]
    options = {name: option for point in files for name, option in points[point]["options"].items()}
    file = f"roles/{role}/defaults/main.yml"
    defaults = load(file) if (REPO / file).exists() else {}
    wanted = {name: option.get("default") for name, option in options.items() if not option.get("required")}
    assert defaults == wanted
    for name, option in options.items():
        assert not (option.get("required") and "default" in option), name
        if "default" in option:
            assert fits(option["default"], option), f"{role}: {name} is no {option['type']}"


@pytest.mark.parametrize("role", ROLES)
def test_public_and_private_variables_carry_the_role_in_their_names(role):
    options = load(f"roles/{role}/meta/argument_specs.yml")["argument_specs"]["main"]["options"]
    assert [name for name in options if not name.startswith(f"{role}_")] == []
    file = f"roles/{role}/vars/main.yml"
    private = load(file) if (REPO / file).exists() else {}
    assert [name for name in private if not name.startswith((f"__{role}_", f"{role}_"))] == []


def every_option(options, path=""):
    """(dotted name, option) of options and sub-options."""
    for name, option in options.items():
        yield path + name, option
        yield from every_option(option.get("options", {}), f"{path}{name}.")


@pytest.mark.parametrize("role", ROLES)
def test_every_option_has_a_known_type_and_a_description(role):
    for entry, spec in load(f"roles/{role}/meta/argument_specs.yml")["argument_specs"].items():
        assert spec["short_description"]
        for name, option in every_option(spec["options"]):
            # raw: a name or a map, which the resolved variant makes one map of.
            assert (option["type"] in TYPES or name == "nccl") and option["description"], f"{role} {entry}: {name}"
            assert "default" not in option or fits(option["default"], option), f"{role} {entry}: {name}"


def test_the_defaults_of_inputs_fit_what_the_resolved_variant_needs():
    spec = load("roles/vllm_service/meta/argument_specs.yml")["argument_specs"]
    resolved = spec["main"]["options"]["vllm_service_variant"]["options"]
    for place in ("variant", "host"):
        for name, option in spec[place]["options"].items():
            if name in resolved and name != "nccl":
                assert resolved[name]["type"] == option["type"], name


# --- the host's Python -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("file", SHARED + HOST_PROGRAM, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_what_runs_on_a_host_is_python_3_9_and_standard_library_only(file):
    tree = ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 9))
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        elif isinstance(node, ast.ImportFrom):
            assert file.parent.name == "host_program" or node.level == 1, f"{file.name}: {ast.unparse(node)}"
        for name in names:
            known = name.split(".")[0] in sys.stdlib_module_names
            assert known or (name == "vllm" and file.name == "engine_check.py"), f"{file.name} imports {name}"


@pytest.mark.parametrize("file", SHARED, ids=lambda file: file.name)
def test_shared_functions_print_nothing_and_take_the_clock_as_a_parameter(file):
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            clock = ("time.time", "time.monotonic", "datetime.now", "datetime.datetime.now")
            assert call not in ("print", "input", *clock), f"{file.name}:{node.lineno}: {call}"
