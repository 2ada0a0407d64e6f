"""scripts/deploy.py: what of its command line reaches Ansible, and what is refused before."""

from __future__ import annotations

import sys

import pytest
from rich.console import Console

from scripts import deploy, playbooks


@pytest.fixture
def call(monkeypatch, capsys):
    def run(*words):
        asked = []

        def fake(handle, inventories, options=(), **what):
            asked.append({"options": list(options), **what})
            return "successful", ""

        monkeypatch.setattr(playbooks, "run", fake)
        code = deploy.main([str(word) for word in words])
        return code, capsys.readouterr().err, asked

    return run


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{{ lookup('pipe', 'id') }}"], "expected the name of a variant"),
        (["ngram", "-e", "nonsense"], "expected KEY=VALUE, @FILE or a JSON object"),
        (["ngram", "-e", "@/nowhere.yml"], "found no such file"),
        (["ngram", "--", "--ask-become-pass"], "--become-password-file"),
        (["ngram", "--", "--vault-id", "x@prompt"], "--vault-password-file"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_ansible_starts(call, words, said):
    code, err, asked = call(*words)
    assert (code, asked) == (deploy.REFUSED, []) and said in err


def test_variables_and_options_reach_ansible_as_they_were_typed(call):
    variables = ["-e", "k=v", "-e", '{"n": 1}', "-e", f"@{__file__}"]
    code, _, (asked,) = call("ngram", *variables, "--", "--vault-password-file", "v", "--tags", "a b")
    assert code == deploy.OK and asked["extravars"] == {"variant": "ngram"}
    assert asked["options"] == [*variables, "--vault-password-file", "v", "--tags", "a b"]


OWNED = "\x1b]0;OWNED\x07\x1b[2J[bold]x[/bold]"


def shown(monkeypatch, capsys, terminal, *events):
    """What a call prints whose play sends these events."""

    def fake(handle, inventories, options=(), **what):
        for kind, data in events:
            handle({"event": kind, "event_data": data, "stdout": data.get("stdout", "")})
        return "failed", ""

    monkeypatch.setattr(playbooks, "run", fake)
    monkeypatch.setattr(deploy, "Console", lambda **_: Console(file=sys.stderr, force_terminal=terminal, width=100))
    deploy.main(["ngram"])
    return capsys.readouterr().err


@pytest.mark.parametrize("terminal", [False, True])
def test_what_a_host_says_reaches_a_terminal_as_letters_only(monkeypatch, capsys, terminal):
    err = shown(
        monkeypatch,
        capsys,
        terminal,
        ("verbose", {"stdout": f"gpu1 | ngram | watch | weights 3 % | {OWNED}"}),
        (
            "runner_on_ok",
            {"host": "gpu1", "task": f"vllm_swap : {deploy.PLAN_TASK}", "res": {"msg": f"a plan {OWNED}"}},
        ),
        ("runner_on_failed", {"host": "gpu1", "task": "t", "res": {"msg": f"CUDA died {OWNED}"}}),
    )
    assert "\x1b]0" not in err and "\x07" not in err and "\x1b[2J" not in err
    for said in ("a plan", "CUDA died"):
        assert f"{said} \\x1b]0;OWNED\\x07\\x1b[2J[bold]x[/bold]" in err


def test_the_view_names_what_runs_before_a_swap_and_its_title_is_one_line(monkeypatch, capsys):
    task = "Ensure the engine's packages are there, whole, and of the versions that were asked for"
    start = {"host": "gpu1", "task": task, "role": "python_env"}
    err = shown(monkeypatch, capsys, True, ("runner_on_start", start), ("runner_on_skipped", {"host": "gpu1"}))
    lines = [line for line in err.splitlines() if "deploying ngram" in line]
    assert lines and all("deploying ngram, 0 s" in line for line in lines)
    assert "gpu1" in err and "preparing" in err and "Ensure the engine's packages" in err


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([], "no swap had begun, and nothing that serves was touched"),
        ([("runner_on_start", {"host": "gpu1", "task": "vllm_swap : x"})], "no swap had begun"),
        (
            [("runner_on_start", {"host": "gpu1", "task": f"vllm_swap : {deploy.SWAP_TASK}"})],
            "the swap on gpu1 goes on: run the same command again to look at it",
        ),
    ],
)
def test_an_interruption_says_whether_a_swap_had_begun(monkeypatch, capsys, events, said):
    def fake(handle, inventories, options=(), **what):
        for kind, data in events:
            handle({"event": kind, "event_data": data})
        return "canceled", ""

    monkeypatch.setattr(playbooks, "run", fake)
    assert deploy.main(["ngram"]) == deploy.INTERRUPTED
    assert said in capsys.readouterr().err


def test_a_limit_that_fits_no_host_is_said_without_colour_codes(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert deploy.main(["ngram", "--limit", "typo"]) == deploy.REFUSED
    err = capsys.readouterr().err
    assert "Could not match supplied host pattern, ignoring: typo" in err and "[0;" not in err
