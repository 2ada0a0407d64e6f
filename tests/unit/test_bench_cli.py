"""scripts/bench.py as a command: what is refused before anything is connected to, and the exit codes."""

import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO))

from scripts import bench, playbooks  # noqa: E402

LOAD = {"variant": "v", "arm": "A", "boot": 1, "outcome": "measured", "cause": None}


def event(kind, load=None, **result):
    if load is not None:
        result["ansible_facts"] = {"vllm_benchmark_result": {"run": "/runs/x", "load": load}}
    return {"event": f"runner_on_{kind}", "event_data": {"host": "h", "task": "t", "res": result}}


@pytest.fixture
def call(monkeypatch, capsys):
    """`bench.py WORDS` with what Ansible would tell of it: (exit code, standard error, what was asked of Ansible)."""

    def run(*words, events=(), status="successful"):
        asked = []

        def played(handle, inventories, **what):
            asked.append(what)
            for one in events:
                handle(one)
            return status, "" if status == "successful" else "ansible's last words"

        monkeypatch.setattr(playbooks, "run", played)
        try:
            code = bench.main(list(map(str, words)))
        except SystemExit as error:
            code = error.code
        return code, capsys.readouterr().err, asked

    return run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-i", "/missing"], "-i /missing: found nothing there"),
        (["--concurrency", "0"], "--concurrency: found 0, expected whole numbers of at least 1"),
        (["--concurrency", "1,x"], "--concurrency: found '1,x'"),
        (["--repeats", "0"], "--repeats: found 0, expected at least 1"),
        (["--arm", "a b"], "--arm: found 'a b', expected a name"),
        (["--prompts", "/missing.jsonl"], "/missing.jsonl: cannot be read: No such file"),
        (["--prompts", "/dev/null"], "/dev/null: found no prompt"),
        (["--run", "/missing"], "/missing/run.json: cannot be read: No such file"),
    ],
)
def test_a_bad_call_is_refused_before_anything_is_connected_to(call, words, said):
    code, err, asked = call(*words)
    assert (code, asked) == (bench.REFUSED, []) and said in err


@pytest.mark.parametrize(
    ("events", "status", "code"),
    [
        ([event("ok", LOAD)], "successful", bench.MEASURED),
        ([event("ok", {**LOAD, "outcome": "failed", "cause": "it died"})], "failed", bench.FAILED),
        ([event("failed", msg="no variant serves")], "failed", bench.REFUSED),
        ([event("unreachable", msg="no route")], "failed", bench.UNREACHABLE),
        ([event("ok", LOAD)], "failed", bench.REFUSED),
        ([], "failed", bench.REFUSED),
        ([], "successful", bench.REFUSED),
        ([], "canceled", bench.INTERRUPTED),
    ],
)
def test_exit_codes(call, events, status, code):
    found, err, _ = call("--limit", "nope", events=events, status=status)
    assert found == code and (err or code == bench.MEASURED)
    if (events, status) == ([], "successful"):
        assert "found no host for --limit nope" in err


def test_what_was_asked_for_reaches_the_playbook(call):
    prompts = REPO / "benchmarks/prompts/mixed.jsonl"
    code, _, (asked,) = call("--concurrency", "1,4", "--prompts", prompts, "--json", events=[event("ok", LOAD)])
    assert code == bench.MEASURED
    assert asked["extravars"] == {"repeats": 3, "cache": "cold", "arm": "A", "concurrency": [1, 4]} | {
        "prompts": {"__ansible_unsafe": str(prompts)}
    }


def test_options_after_two_dashes_reach_ansible_playbook(call):
    code, _, (asked,) = call("--", "--forks", "20", "-vv", events=[event("ok", LOAD)])
    assert (code, asked["options"]) == (bench.MEASURED, ["--forks", "20", "-vv"])
    code, err, asked = call("--", "-K")
    assert (code, asked) == (bench.REFUSED, []) and "--become-password-file" in err
