"""Words of -e as texts: through the real command, for every option of every spec."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from ansible_collections.swapgate.core.plugins.callback import typed_words

REPO = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
OPTIONS = typed_words.options()
BOOLS = sorted(name for name, option in OPTIONS.items() if option["type"] == "bool")
NUMBERS = sorted(name for name, option in OPTIONS.items() if option["type"] in ("int", "float"))
TEXTS = {"true": True, "yes": True, "false": False, "no": False}


def play(folder, *words):
    """Run a play that has the callback beside it as playbooks/ has; returns (what it saw of the words, the result)."""
    (folder / "callback_plugins").symlink_to(REPO / "playbooks/callback_plugins")
    out = folder / "seen.json"
    seen = {name: "{{ " + name + " }}" for name in (word.split("=")[0] for word in words)}
    task = {"ansible.builtin.copy": {"content": "{{ seen | to_json }}", "dest": str(out), "mode": "0600"}}
    variables = {"ansible_python_interpreter": sys.executable, "seen": seen}
    book = {"hosts": "localhost", "connection": "local", "gather_facts": False, "vars": variables, "tasks": [task]}
    (folder / "play.yml").write_text(yaml.safe_dump([book]))
    options = [part for word in words for part in ("-e", word)]
    done = subprocess.run(
        [str(BIN / "ansible-playbook"), "-i", "localhost,", str(folder / "play.yml"), *options],
        cwd=REPO,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return (json.loads(out.read_text()) if out.exists() else None), done


def test_a_value_of_several_words_is_not_cut_in_silence(tmp_path):
    seen, done = play(tmp_path, "because=too slow")
    assert seen is None and done.returncode == 2
    said = " ".join((done.stdout + done.stderr).split())
    assert "-e: found the words 'slow' without a name" in said and "because='two words'" in said
    (tmp_path / "callback_plugins").unlink()
    seen, done = play(tmp_path, "because='too slow'")
    assert seen == {"because": "too slow"}, done.stdout + done.stderr


@pytest.mark.parametrize("text", TEXTS)
def test_every_switch_is_one_and_every_number_is_one(tmp_path, text):
    assert len(BOOLS) > 15 and len(NUMBERS) > 10
    words = [f"{name}={text}" for name in BOOLS] + [f"{name}=7" for name in NUMBERS]
    seen, done = play(tmp_path, *words)
    assert seen == {**dict.fromkeys(BOOLS, TEXTS[text]), **dict.fromkeys(NUMBERS, 7)}, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("concurrency=[1,4]", [1, 4]),
        ("concurrency=1,4", [1, 4]),
        ("concurrency=4", [4]),
        ("nvidia_stack_gpus=[0,1]", [0, 1]),
        ("nvidia_stack_kernel_parameters=iommu=pt", ["iommu=pt"]),
        ('model_cache_source={"repo":"a/b","revision":"c"}', {"repo": "a/b", "revision": "c", "endpoint": None}),
        ("vllm_service_api_key=true", "true"),
        ("variant=1", "1"),
        ("not_ours=true", "true"),
    ],
)
def test_lists_and_maps_as_json_and_what_stays_a_text(word, value):
    name, _, text = word.partition("=")
    option = OPTIONS.get(name, {"type": "raw"})
    assert typed_words.typed(name, text, option) == value


def test_a_wrong_word_is_one_line_with_name_value_and_what_was_expected(tmp_path):
    seen, done = play(tmp_path, "allow_disruption=maybe", "repeats=x", "cache=hot", "concurrency=[1,a")
    assert done.returncode == 2 and seen is None
    for line in (
        "-e allow_disruption=maybe: expected true or false.",
        "-e repeats=x: expected a whole number.",
        "-e cache=hot: expected one of cold, warm.",
        "-e concurrency=[1,a: expected a list as JSON, such as concurrency=[1,4].",
    ):
        assert (done.stdout + done.stderr).count(line) == 1
    assert "TASK" not in done.stdout


def test_every_word_that_the_playbooks_print_has_a_type():
    missing = {
        f"{file.name}: {name}"
        for file in (REPO / "playbooks").glob("*.yml")
        for name in re.findall(r"-e ([a-z_]+)=", file.read_text(encoding="utf-8"))
        if name not in OPTIONS
    }
    assert missing == set()
