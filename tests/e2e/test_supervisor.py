"""The unit's main process on a real systemd: when it is ready, when it is not, how it dies and how it is stopped."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
import urllib.request

import pytest
from throwaway import BASELINE, Host, until

pytestmark = pytest.mark.host
ENGINE = "bin/vllm serve"


def start_anew(host: Host) -> None:
    """Stop `baseline` and ask for its start, without waiting for it."""
    host.sh(
        f"systemctl stop {BASELINE}; systemctl reset-failed {BASELINE} 2>/dev/null; "
        f"systemctl start --no-block {BASELINE}",
        limit_s=90,
    )


def await_state(host: Host, state: str, limit_s: float = 40) -> dict[str, str]:
    """Wait until the unit is in that ActiveState; returns what systemd says of it then."""
    names = (
        "ActiveState",
        "SubState",
        "Result",
        "NRestarts",
        "ExecMainStatus",
        "ExecMainCode",
        "StatusText",
        "MainPID",
    )
    shown: dict[str, str] = {}

    def there() -> bool:
        shown.update(host.show(BASELINE, *names))
        return shown["ActiveState"] == state

    until(there, limit_s, f"{BASELINE} to be {state}")
    return shown


def processes(host: Host) -> list[int]:
    """All processes of the unit and of any fake engine, wherever they are."""
    return [int(pid) for pid in host.sh("pgrep -f '[v]llm-0.32.0|[V]LLM::' || true").split()]


def health(host: Host) -> int:
    """The status of /health, 0 when nobody answers."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{host.port}/health", timeout=2) as answer:
            return int(answer.status)
    except OSError:
        return 0


def test_ready_only_after_a_completion(host: Host) -> None:
    with host.knobs(load_s=4, bind_early=True):
        start_anew(host)
        healthy = 0
        end = time.monotonic() + 12
        while time.monotonic() < end:
            assert host.show(BASELINE, "ActiveState")["ActiveState"] == "activating", "ready without an answer"
            healthy += health(host) == 200
            time.sleep(0.3)
    assert healthy >= 15, "/health was to say 200 while no completion came"

    with host.knobs(load_s=8):
        start_anew(host)
        texts: list[str] = []
        until(
            lambda: texts.append(host.show(BASELINE, "StatusText").get("StatusText", "")) or "serving" in texts[-1],
            40,
            "the unit to serve",
        )
    assert any(re.match(r"loading baseline: weights \d+ %, \d+ s elapsed, ", text) for text in texts), texts
    assert re.match(r"serving baseline, loaded in \d+ s", texts[-1])
    assert int(re.findall(r"\d+", texts[-1])[-1]) >= 8, texts[-1]
    await_state(host, "active", 5)
    assert host.complete()[0] == 200


def test_a_foreign_listener_never_makes_it_ready(host: Host) -> None:
    host.sh(f"systemctl stop {BASELINE}", limit_s=60)
    models = json.dumps({"data": [{"id": "tiny"}], "choices": [{"text": "x"}], "usage": {"completion_tokens": 1}})
    with host.listener(models):
        assert host.complete()[0] == 200, "the foreign listener does not pass for an engine"
        host.sh(f"systemctl start --no-block {BASELINE}")
        states = set()
        end = time.monotonic() + 20
        while time.monotonic() < end and "failed" not in states:
            states.add(host.show(BASELINE, "ActiveState")["ActiveState"])
            time.sleep(0.2)
        assert "active" not in states, states
        shown = await_state(host, "failed")
        assert shown["ExecMainStatus"] == "69"
    assert "is already in use" in host.sh(f"cat /run/swapgate/{BASELINE.removesuffix('.service')}/load.json")


def test_what_another_try_cannot_mend_is_not_tried_again(host: Host) -> None:
    with host.knobs(wrong_served_name="somebody-else"):
        start_anew(host)
        failed = await_state(host, "failed")
        time.sleep(2.5)  # RestartSec is 1 here
        later = host.show(BASELINE, "ActiveState", "NRestarts")
    assert failed["ExecMainStatus"] == "42"
    assert later == {"ActiveState": "failed", "NRestarts": "0"}
    assert "somebody-else" in failed["StatusText"]


def test_the_watchdog_ends_an_engine_whose_completions_hang(host: Host) -> None:
    dropin = f"/etc/systemd/system/{BASELINE}.d/99-test.conf"
    host.write(dropin, "[Service]\nWatchdogSec=6\n")
    try:
        host.sh("systemctl daemon-reload")
        start_anew(host)
        first = await_state(host, "active")
        time.sleep(8)
        assert host.show(BASELINE, "MainPID", "NRestarts") == {"MainPID": first["MainPID"], "NRestarts": "0"}, (
            "an idle, healthy engine was ended"
        )
        host.sh("pkill -STOP -f 'VLLM::Worker'")
        assert health(host) == 200
        until(lambda: host.show(BASELINE, "NRestarts")["NRestarts"] == "1", 45, "the watchdog's restart")
        await_state(host, "active")
        journal = host.sh(f"journalctl --no-pager -u {BASELINE} --lines 300")
        assert "Watchdog timeout" in journal
        assert host.complete()[0] == 200
    finally:
        host.sh(f"pkill -CONT -f 'VLLM::Worker'; rm -f {dropin}; systemctl daemon-reload")


def test_a_stop_during_a_load_is_done_within_30_s(host: Host) -> None:
    with host.knobs(load_s=90):
        start_anew(host)
        until(lambda: "weights" in host.show(BASELINE, "StatusText").get("StatusText", ""), 60, "the weights to load")
        assert processes(host)
        started = time.monotonic()
        host.sh(f"systemctl stop {BASELINE}", limit_s=120)
        took = time.monotonic() - started
    assert took < 30, took
    assert processes(host) == []
    assert host.show(BASELINE, "ActiveState")["ActiveState"] == "inactive"


def test_streams_are_drained_at_a_stop(host: Host) -> None:
    got: list[str] = []

    def read_stream() -> None:
        body = json.dumps({"model": "tiny", "prompt": "count", "max_tokens": 80, "stream": True, "ignore_eos": True})
        request = urllib.request.Request(
            f"http://127.0.0.1:{host.port}/v1/completions", body.encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=40) as answer:
            got.extend(line.decode().strip() for line in answer if line.strip())

    with host.knobs(tokens_per_s=20):
        start_anew(host)
        await_state(host, "active")
        reader = threading.Thread(target=read_stream)
        reader.start()
        until(lambda: len(got) > 3, 15, "the first tokens of the stream")
        started = time.monotonic()
        host.sh(f"systemctl stop {BASELINE}", limit_s=60)
        took = time.monotonic() - started
        reader.join(30)
    assert got[-1] == "data: [DONE]", got[-3:]
    events = [json.loads(line[len("data: ") :]) for line in got[:-1]]
    assert not [event for event in events if "error" in event]
    assert any(choice["finish_reason"] == "length" for event in events for choice in event["choices"]), events[-2:]
    assert 1 < took < 15, took
    assert processes(host) == []


def test_nothing_is_left_when_the_supervisor_is_killed(host: Host) -> None:
    with host.knobs(orphan_workers=True, shm_mib=2):
        start_anew(host)
        await_state(host, "active")
        pids = processes(host)
        assert len(pids) >= 3, pids
        assert host.sh(f"ls /proc/{host.pid(BASELINE)}/root/dev/shm"), "the engine has no shared memory to leave behind"
        host.sh(f"systemctl kill --kill-who=main --signal=KILL {BASELINE}")
        until(lambda: not set(pids) & set(processes(host)), 15, "the end of every process of the unit")
    assert host.sh("ls /dev/shm") == ""
    assert await_state(host, "active")["NRestarts"] == "1"


def test_exposure(host: Host) -> None:
    text = host.sh(f"systemd-analyze security --no-pager {BASELINE} | tail -1")
    exposure = float(re.findall(r"\d+\.\d+", text)[-1])
    print(f"systemd-analyze security: {text.strip()}")
    assert exposure < 3, text


def test_only_loopback_is_listened_on(host: Host) -> None:
    listening = host.sh(f"ss -Hltn 'sport = :{host.port}'")
    assert f"127.0.0.1:{host.port}" in listening
    assert len(listening.splitlines()) == 1
    own = socket.gethostbyname(socket.gethostname())
    if not own.startswith("127."):
        with pytest.raises(OSError):
            socket.create_connection((own, host.port), timeout=2)


def test_the_journal_of_an_idle_engine_has_nothing_of_our_own_checks_and_all_of_others(host: Host) -> None:
    dropin = f"/etc/systemd/system/{BASELINE}.d/99-test.conf"
    host.write(dropin, "[Service]\nWatchdogSec=8\n")
    try:
        host.sh("systemctl daemon-reload")
        start_anew(host)
        await_state(host, "active")
        time.sleep(1)
        since = host.sh("date +%s.%N")
        host.complete()
        time.sleep(20)  # ten checks of an engine that is idle
        lines = host.sh(f"journalctl -u {BASELINE} --since @{since} -o cat").splitlines()
        with urllib.request.urlopen(f"http://127.0.0.1:{host.port}/metrics", timeout=5) as page:
            counted = [
                line for line in page.read().decode().splitlines() if line.startswith("vllm:request_success_total")
            ]
    finally:
        host.sh(f"rm -f {dropin}; systemctl daemon-reload")
        start_anew(host)
        await_state(host, "active")
    asked = [line for line in lines if " HTTP/1.1" in line]
    assert len(asked) == 1 and "/completions HTTP/1.1" in asked[0], asked
    done = sum(float(line.split()[-1]) for line in counted)
    assert done >= 5, "the checks were made all the same"
