"""The command `predict.py replay`, run as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PROGRAM = REPO / "scripts/predict.py"
GRID = "k=5 min=4 max=4; k=2 min=1 max=4"
LINES = [
    {
        "id": "a",
        "class": "code [edit]",
        "prompt_token_ids": [1, 2, 3, 4, 5, 6, 7],
        "output_token_ids": [9, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2],
    },
    {"id": 2, "class": "story", "prompt_token_ids": [], "output_token_ids": [5, 5, 5, 5, 5, 5]},
    {"id": 3, "class": "story", "prompt_token_ids": [1], "output_token_ids": [5]},
]


def predict(*arguments, stdin="", folder=REPO):
    return subprocess.run(
        [sys.executable, str(PROGRAM), *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        cwd=folder,
    )


def printed(*arguments, **more):
    done = predict(*arguments, **more)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def row(name, cls, point, drafted, accepted, tokens_per_step):
    return {
        "id": name,
        "class": cls,
        "k": point[0],
        "min": point[1],
        "max": point[2],
        "steps": len(drafted),
        "drafted": drafted,
        "accepted": accepted,
        "tokens_per_step": tokens_per_step,
    }


A, B = (5, 4, 4), (2, 1, 4)
ROWS = {
    "v1": [
        row("a", "code [edit]", A, [0, 0, 0, 0, 5, 0, 0, 0], [0, 0, 0, 0, 3, 0, 0, 0], 11 / 8),
        row("a", "code [edit]", B, [0, 2, 2, 2, 0, 2], [0, 2, 2, 0, 0, 2], 11 / 6),
        row(2, "story", A, [0, 0, 0, 0, 1], [0, 0, 0, 0, 1], 1.0),
        row(2, "story", B, [0, 1, 1], [0, 1, 1], 5 / 3),
        row(3, "story", A, [], [], None),
        row(3, "story", B, [], [], None),
    ],
    "v2": [
        row("a", "code [edit]", A, [5] * 8, [0, 0, 0, 0, 3, 0, 0, 0], 11 / 8),
        row("a", "code [edit]", B, [2] * 6, [0, 2, 2, 0, 0, 2], 11 / 6),
        row(2, "story", A, [5], [5], 5.0),
        row(2, "story", B, [2, 2], [2, 2], 5 / 2),
        row(3, "story", A, [], [], None),
        row(3, "story", B, [], [], None),
    ],
}


@pytest.mark.parametrize("semantics", ["v1", "v2"])
def test_json_lists_every_request_under_every_setting(file, semantics):
    done = predict("replay", file, "--grid", GRID, "--semantics", semantics, "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout) == ROWS[semantics]
    assert ("own kernel on a GPU" in done.stderr) == (semantics == "v2")


def test_standard_input_is_read_from_any_folder(file, tmp_path):
    found = printed(
        "replay", "-", "--grid", GRID, "--semantics", "v1", "--json", stdin=file.read_text(), folder=tmp_path
    )
    assert json.loads(found) == ROWS["v1"]


def test_the_table_sums_up_classes_with_their_names_as_given(file):
    lines = printed("replay", file, "--grid", GRID, "--semantics", "v2").splitlines()
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines if line.startswith("│")]
    assert cells == [
        ["all", "5", "4", "4", "3", "16", "9", "1.778", "100", "22 22 22 11 11"],
        ["all", "2", "1", "4", "3", "16", "8", "2.000", "100", "62 62"],
        ["code [edit]", "5", "4", "4", "1", "11", "8", "1.375", "100", "12 12 12 0 0"],
        ["code [edit]", "2", "1", "4", "1", "11", "6", "1.833", "100", "50 50"],
        ["story", "5", "4", "4", "2", "5", "1", "5.000", "100", "100 100 100 100 100"],
        ["story", "2", "1", "4", "2", "5", "2", "2.500", "100", "100 100"],
    ]
    assert "v2 is compared with the engine's own kernel" in " ".join(lines)


def test_the_summary_in_json_says_what_the_rule_was_compared_with(file):
    found = json.loads(printed("replay", file, "--grid", GRID, "--semantics", "v1", "--json", "--summary"))
    assert (found["semantics"], found["max_model_len"]) == ("v1", None)
    assert "the engine's own proposer" in found["checked"]
    assert [(one["class"], one["k"]) for one in found["summary"]] == [
        (cls, k) for cls in (None, "code [edit]", "story") for k in (5, 2)
    ]
    assert found["summary"][5] == {
        "class": "story",
        "k": 2,
        "min": 1,
        "max": 4,
        "requests": 2,
        "tokens": 5,
        "steps": 3,
        "tokens_per_step": 5 / 3,
        "draft_step_share": 2 / 3,
        "drafted": 2,
        "accepted": 2,
        "drafted_by_position": [2, 0],
        "accepted_by_position": [2, 0],
        "acceptance_by_position": [1.0, None],
    }


def test_a_limit_cuts_the_last_drafts(file):
    found = json.loads(
        printed("replay", file, "--grid", "k=5 min=4 max=4", "--semantics", "v2", "--json", "--max-model-len", 19)
    )
    # Before its last step request a has 18 tokens of 19: no room for a draft beside the sampled token.
    assert found[0]["drafted"] == [5, 5, 5, 5, 5, 2, 1, 0]


USUAL = ["--grid", GRID, "--semantics", "v1"]


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        (["replay", "-", *USUAL], "", "standard input: found no transcript"),
        (["replay", "-", *USUAL], '\n{"id": 1}\n', "standard input:2: class, prompt_token_ids"),
        (["replay", "nowhere.jsonl", *USUAL], "", "nowhere.jsonl: cannot be read: No such file"),
        (["replay", ".", *USUAL], "", ".: cannot be read: Is a directory"),
        (["replay", "-", "--grid", "k=5", "--semantics", "v1"], "", "grid, setting 1 ('k=5'): min and max not given"),
        (["replay", "-", "--grid", GRID, "--semantics", "v3"], "", "invalid choice: 'v3'"),
        (["replay", "-", "--grid", GRID], "", "--semantics"),
        (["replay", "-", *USUAL, "--summary"], "", "--summary: found without --json"),
        (["replay", "-", *USUAL, "--max-model-len", "0"], "", "found '0', expected a whole number"),
        ([], "", "required: command"),
    ],
)
def test_wrong_calls_and_input_exit_with_2_and_say_why(arguments, stdin, said):
    done = predict(*arguments, stdin=stdin)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_full_disk_exits_with_1(file):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, str(PROGRAM), "replay", str(file), *USUAL, "--json"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
        )
    assert done.returncode == 1
    assert done.stderr.startswith("predict replay: standard output cannot be written: No space left on device")
    assert len(done.stderr.splitlines()) == 1


def test_help_has_the_shapes_and_the_exit_codes():
    text = printed("replay", "--help")
    for words in ('"output_token_ids"', '"tokens_per_step"', '"acceptance_by_position"', "free-verify", "exit codes"):
        assert words in text
