"""scripts/deploy.py: what of its command line reaches Ansible, and what is refused before."""

from __future__ import annotations

import json

import pytest

from scripts import deploy, playbooks


@pytest.fixture
def call(monkeypatch, capsys):
    def run(*words):
        asked = []

        def fake(handle, inventories, stop=None, options=(), **what):
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
    by, rest = asked["options"][:2], asked["options"][2:]
    assert list(json.loads(by[1])["vllm_swap_by"]) == ["__ansible_unsafe"], "a user's name is no template"
    assert rest == [*variables, "--vault-password-file", "v", "--tags", "a b"]
