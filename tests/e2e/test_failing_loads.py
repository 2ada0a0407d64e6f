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
    "silence and exit 0": (only_ngram(crash_at="weights", crash_with="silent", exit_code=0), "status 0"),
    "killed by a signal": (only_ngram(crash_at="weights", crash_signal=11), "signal 11"),
    "another model's name": (only_ngram(wrong_served_name="somebody-else"), "somebody-else"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_failed_load_ends_with_the_last_good_variant(host: Host, case: str) -> None:
    """More ways to fail are rows of the fault matrix."""
    knobs, cause = CASES[case]
    with host.knobs(**knobs):
        swap = host.swap("ngram")
    assert swap["outcome"] == "rolled_back", swap
    told = " ".join(str(swap["cause"][key]) for key in ("what", "root_cause", "context"))
    assert cause in told, swap["cause"]
    spent = {phase["name"]: phase["seconds"] for phase in swap["phases"]}
    # The way back, in the same swap, shows what a sound load takes on this machine now.
    failed, sound = (sum(spent.get(way + name, 0) for name in ("start", "watch", "probe")) for way in ("", "rollback-"))
    assert 0 < failed < 2 * sound, swap["phases"]
    assert swap["seconds_without_service"] is not None
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
