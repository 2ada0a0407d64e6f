"""scripts/deploy.py: its exit codes, its JSON, its words without a terminal, and Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from throwaway import BASELINE, NGRAM, ROOT, Command, Host

pytestmark = pytest.mark.host
CRASH = {"crash_at": "weights", "crash_with": "cuda_oom"}


def deploy(host: Host, *words: str) -> Command:
    inventories = ["-i", str(host.sandbox["inventory"]), "-i", str(host.inventory)]
    return Command([str(ROOT / "scripts/deploy.py"), *words, *inventories])


def test_swapped_is_0_and_the_last_line_is_json(host: Host) -> None:
    with host.knobs(load_s=6):
        run = deploy(host, "ngram", "--json", "--allow-disruption").wait()
    assert run.code == 0, run.text[-3000:]
    result = json.loads(run.lines[-1][1])
    assert set(result) == {host.name}
    assert result[host.name]["outcome"] == "swapped"
    assert result[host.name]["variant"] == "ngram"
    assert result[host.name]["seconds_without_service"] > 0
    assert [line for _, line in run.progress() if line.startswith(f"{host.name} | ngram | watch")], run.text
    assert "\x1b[" not in run.text, "control sequences where no terminal is"
    assert host.enabled() == [NGRAM]


def test_rolled_back_is_1(host: Host) -> None:
    with host.knobs(variants=[{"when": "--speculative-config", **CRASH}]):
        run = deploy(host, "ngram", "--json").wait()
    assert run.code == 1, run.text[-3000:]
    result = json.loads(run.lines[-1][1])[host.name]
    assert result["outcome"] == "rolled_back"
    assert "CUDA out of memory" in run.flat
    assert host.enabled() == [BASELINE]
    assert host.complete()[0] == 200


def test_refused_is_2(host: Host) -> None:
    before = host.picture()
    for words, said in (
        (("ngrm",), "variant 'ngrm' does not exist"),
        (("mistyped", "--preflight"), "draft_tensor_parallel_size"),
        (("ngram", "-e", "nonsense"), "expected KEY=VALUE"),
    ):
        run = deploy(host, *words).wait()
        assert run.code == 2, run.text[-3000:]
        assert said in run.flat, run.text[-3000:]
    assert host.picture() == before


def test_no_service_is_3(host: Host) -> None:
    with host.knobs(**CRASH):
        run = deploy(host, "ngram", "--json").wait()
    assert run.code == 3, run.text[-3000:]
    result = json.loads(run.lines[-1][1])[host.name]
    assert result["outcome"] == "failed"
    assert "and the roll back failed" in run.flat
    assert "no service: mend the cause, then run the deploy again" in run.flat
    assert host.active() == []
    assert host.enabled() == [BASELINE], "what is enabled is the last good variant, for the next boot"


def test_unreachable_is_4(host: Host, tmp_path: Path) -> None:
    file = tmp_path / "hosts.yml"
    file.write_text("---\nvllm_hosts:\n  hosts:\n    nobody:\n      ansible_host: 127.0.0.1\n      ansible_port: 9\n")
    run = deploy(host, "baseline", "-i", str(file), "--limit", "nobody", "--json").wait()
    assert run.code == 4, run.text[-3000:]
    assert json.loads(run.lines[-1][1]) == {"nobody": {"outcome": "unreachable"}}


def test_check_is_0_and_changes_nothing(host: Host) -> None:
    before = host.picture()
    run = deploy(host, "ngram", "--check").wait()
    assert run.code == 0, run.text[-3000:]
    assert "stops 'baseline' and drops its traffic until 'ngram' has loaded" in run.flat, run.text
    assert host.picture() == before


def test_preflight_is_0_and_says_what_the_engine_made_of_it(host: Host) -> None:
    before = host.picture()
    run = deploy(host, "ngram", "--preflight").wait()
    assert run.code == 0, run.text[-3000:]
    assert "vLLM 0.32.0 accepts the variant" in run.flat, run.text
    assert "speculative prompt_lookup_min: 4" in run.flat
    assert host.picture() == before


def test_ctrl_c_leaves_the_swap_to_the_host_and_the_same_command_attaches(host: Host) -> None:
    with host.knobs(variants=[{"when": "--speculative-config", "load_s": 45}]):
        first = deploy(host, "ngram")
        first.await_line("| ngram | watch")
        swap_id = host.status()["swap"]["id"]
        first.interrupt()
        interrupted = first.wait(20)
        assert interrupted.code == 130, interrupted.text[-3000:]
        assert f"interrupted; the swap on {host.name} goes on" in interrupted.flat
        assert host.status()["swap"]["outcome"] is None, "the swap ended with the controller"
        second = deploy(host, "ngram", "--json").wait()
    assert second.code == 0, second.text[-3000:]
    status = host.status()
    assert status["swap"]["id"] == swap_id, "a second swap was begun"
    assert status["swap"]["outcome"] == "swapped"
    assert json.loads(second.lines[-1][1])[host.name]["outcome"] == "swapped"
    assert host.enabled() == [NGRAM]
