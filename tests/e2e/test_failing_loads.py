"""A variant that cannot be loaded: the last good one comes back by itself, and the cause is told within seconds."""

from __future__ import annotations

import re
from typing import Any

import pytest
from throwaway import BASELINE, Host

pytestmark = pytest.mark.host


def only_ngram(**values: Any) -> dict[str, Any]:
    """Knobs for starts with n-gram speculation alone, so that the way back is healthy."""
    return {"variants": [{"when": "--speculative-config", **values}]}


def check_back(host: Host) -> None:
    assert host.enabled() == [BASELINE]
    assert host.active() == [BASELINE]
    assert host.complete()[0] == 200


def test_the_playbook_tells_the_cause_within_seconds(host: Host) -> None:
    with host.knobs(load_s=8, **only_ngram(crash_at="weights", crash_with="cuda_oom", load_s=8)):
        run = host.deploy("ngram")
    assert run.code != 0
    assert "baseline -> ngram: rolled_back; baseline is the last good variant" in run.flat
    assert "CUDA out of memory" in run.flat, run.text[-4000:]
    assert re.search(r"\d+ s without service", run.flat)
    back = [line for _, line in run.progress() if "| baseline | rollback-" in line]
    assert back, "the way back was not shown while it ran"
    assert "236 retries left" not in run.text and "FAILED - RETRYING" not in run.text
    check_back(host)
    status = host.ansible("playbooks/status.yml")
    assert re.search(rf"{host.name}: ngram, (inactive|failed).* last failure: .*CUDA out of memory", status.flat), (
        status.text
    )


CASES = {
    "out of memory at the weights": (only_ngram(crash_at="weights", crash_with="cuda_oom"), "CUDA out of memory", 10),
    "silence and exit 0": (only_ngram(crash_at="weights", crash_with="silent", exit_code=0), "status 0", 10),
    "killed by a signal": (only_ngram(crash_at="weights", crash_signal=11), "signal 11", 10),
    "another model's name": (only_ngram(wrong_served_name="somebody-else"), "somebody-else", 10),
    "garbage for an answer": (only_ngram(completions_garbage=True), "answer", 15),
    "dies on the first completion": (only_ngram(die_on_first_completion=True), "died unexpectedly", 15),
    "dies in its soak": (only_ngram(die_after_ready_s=1, exit_code=3), "soak", 15),
}


@pytest.mark.parametrize("case", CASES)
def test_a_failed_load_ends_with_the_last_good_variant(host: Host, case: str) -> None:
    knobs, cause, within_s = CASES[case]
    with host.knobs(**knobs):
        swap = host.swap("ngram")
    assert swap["outcome"] == "rolled_back", swap
    told = " ".join(str(swap["cause"][key]) for key in ("what", "root_cause", "context"))
    assert cause in told, swap["cause"]
    forward = [phase for phase in swap["phases"] if not phase["name"].startswith("rollback")]
    watched = sum(phase["seconds"] for phase in forward if phase["name"] in ("start", "watch", "probe", "soak"))
    assert watched < within_s, swap["phases"]
    assert swap["seconds_without_service"] is not None
    check_back(host)


def test_a_stalled_load_ends_at_its_own_limit(host: Host) -> None:
    with host.knobs(variants=[{"when": "--max-num-seqs 7", "hang_at": "weights"}]):
        swap = host.swap("quick_stall")
    assert swap["outcome"] == "rolled_back", swap
    assert "stalled" in swap["cause"]["what"], swap["cause"]
    watch = next(phase["seconds"] for phase in swap["phases"] if phase["name"] == "watch")
    assert 4 <= watch < 25, swap["phases"]
    check_back(host)


@pytest.mark.parametrize(
    ("knob", "cause"), [("empty_answer", "without a token"), ("completions_hang", "load_timeout_s")]
)
def test_an_engine_that_listens_and_does_not_answer(host: Host, knob: str, cause: str) -> None:
    with host.knobs(variants=[{"when": "--max-num-seqs 9", knob: True}]):
        swap = host.swap("hasty")
    assert swap["outcome"] == "rolled_back", swap
    assert cause in swap["cause"]["what"], swap["cause"]
    watch = next(phase["seconds"] for phase in swap["phases"] if phase["name"] == "watch")
    assert watch < 40, swap["phases"]
    check_back(host)


def test_a_port_that_is_taken_in_mid_swap(host: Host) -> None:
    """The port is free at preflight; a foreign process takes it the moment the old engine lets go of it."""
    program = (
        "import socket, time\n"
        "while True:\n"
        "    taken = socket.socket()\n"
        "    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)\n"
        "    try:\n"
        f"        taken.bind(('127.0.0.1', {host.port})); taken.listen(); break\n"
        "    except OSError:\n"
        "        time.sleep(0.02)\n"
        "time.sleep(60)\n"
    )
    host.write("/opt/foreign.py", program)
    host.sh("systemd-run --quiet --collect --unit=foreign python3 /opt/foreign.py")
    try:
        swap_id = host.ask("ngram")
        host.await_phase(swap_id, "rollback-")
    finally:
        host.sh("systemctl stop foreign.service; rm -f /opt/foreign.py")
    swap = host.await_swap(swap_id)
    assert swap["outcome"] == "rolled_back", swap
    assert f"port {host.port} is held by pid " in swap["cause"]["what"]
    assert "foreign.service" in swap["cause"]["what"]
    check_back(host)


def test_a_changed_variant_of_the_same_name_comes_back_to_its_old_content(host: Host) -> None:
    before = host.sh(f"cat /etc/systemd/system/{BASELINE}")
    changed = host.inventory_variants()
    changed["baseline"]["engine_args"] = {"max-num-seqs": 3}
    with host.knobs(variants=[{"when": "--max-num-seqs 3", "crash_at": "weights"}]):
        run = host.deploy("baseline", swapgate_variants=changed)
    assert run.code != 0
    assert "baseline -> baseline: rolled_back" in run.flat
    assert "CUDA out of memory" in run.flat
    assert host.sh(f"cat /etc/systemd/system/{BASELINE}") == before
    assert "--max-num-seqs" not in host.sh("ps -ww -o args= -C vllm || ps axww -o args=")
    check_back(host)
