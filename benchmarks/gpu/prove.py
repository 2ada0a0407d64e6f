#!/usr/bin/env python3
"""Run swapgate's own pieces against a real engine on one GPU, without systemd, and write down what they did.

    python3 benchmarks/gpu/prove.py --python PY --model DIR --out DIR [--stages smi,preflight,...]

PY is the interpreter of an installed vLLM, DIR a model folder with safetensors. Needs root, Linux, and this checkout;
standard library only. Each stage writes OUT/stages/NAME.json; logs and raw nvidia-smi texts lie beside it. OUT may be
used again: the histories of loads in it make the second start's time left. Exit code 0 when everything asked for was as
expected, 1 when something was not (each is printed), 2 when the machine lacks what the proof needs.

    smi        nvidia-smi in all its forms, parsed and judged
    preflight  every row of rows.py through preflight.check; GPU memory meanwhile
    bad_flag   a start with an unknown flag: exit code 42
    cold       baseline, first start, nothing cached; watchdog; SIGTERM while a stream runs; the wait for free memory
    warm       baseline again with a history; kill -9 of the engine core: exit code 70
    ngram      n-gram; beside it a start into the memory that it holds; SIGTERM under a stream longer than the drain
    abort      SIGTERM while n-gram loads
    kv         a start with nothing left for the KV cache
    orphan     kill -9 of the supervisor: what holds the GPU then
    notify     the notify socket goes away during the load: it loads, serves and stops all the same
    drain      SIGTERM under a stream longer than the drain: gone once the drain is over
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "collections"))

from ansible_collections.swapgate.core.plugins.host_program import (  # noqa: E402
    engine_api,
    gpus,
    preflight,
    swap,
    systemd,
)
from ansible_collections.swapgate.core.plugins.module_utils import (  # noqa: E402
    nvidia_smi,
    records,
    topology,
    variants,
)
from bed import MODEL_NAME, Bed, BedError, add_options, bed_of  # noqa: E402
from rows import ROWS, Row  # noqa: E402
from sampler import Sampler  # noqa: E402
from service import WATCHDOG_S, Service, Stream, alive, command_of  # noqa: E402

JsonDict = dict[str, Any]

READY_LIMIT_S = 420.0
STOP_LIMIT_S = 90.0
FAILING_LIMIT_S = 180.0
# What may stay in use on an idle GPU beyond what was in use before.
IDLE_MARGIN_MIB = 200.0
DRAIN_S = 30
SHORT_DRAIN_S = 2
STREAM_TOKENS = 1500
# After the drain the supervisor gives the engine 6 s for its teardown, then ends it; the rest is the machine's.
AFTER_DRAIN_S = 10.0
IDLE_WATCH_S = 1.25 * WATCHDOG_S
TEXT_LIMIT = 4000
SMI = {
    "table": [],
    "query": ["--query-gpu=" + ",".join(nvidia_smi.QUERY), "--format=csv"],
    "query-noheader": ["--query-gpu=" + ",".join(nvidia_smi.QUERY), "--format=csv,noheader,nounits"],
    "query-ecc": [
        "--query-gpu=index,ecc.mode.current,ecc.mode.pending,ecc.errors.uncorrected.volatile.total,"
        "ecc.errors.uncorrected.aggregate.total,remapped_rows.pending,remapped_rows.failure,pcie.link.gen.current,"
        "pcie.link.width.current,pcie.link.width.max,pstate,persistence_mode,power.limit",
        "--format=csv",
    ],
    "processes": ["--query-compute-apps=" + ",".join(nvidia_smi.PROCESS_QUERY), "--format=csv"],
    "topo-m": ["topo", "-m"],
    "topo-p2p": ["topo", "-p2p", "r"],
    "full": ["-q"],
}


class Proof:
    """One run: the bed, the options, and what was not as expected."""

    def __init__(self, bed: Bed, options: argparse.Namespace) -> None:
        self.bed, self.options, self.out = bed, options, options.out
        self.gpus = list(bed.host["gpus"])
        self.wrong: list[str] = []

    def expect(self, what: str, found: Any, wanted: Any) -> None:
        """Note a difference."""
        if found != wanted:
            self.wrong.append(f"{what}: found {found!r}, expected {wanted!r}")
            print(f"    NOT AS EXPECTED {self.wrong[-1]}", flush=True)

    def expect_true(self, what: str, holds: bool, found: Any) -> None:
        """Note what does not hold."""
        if not holds:
            self.wrong.append(f"{what}: found {found!r}")
            print(f"    NOT AS EXPECTED {self.wrong[-1]}", flush=True)

    def variant(self, name: str, label: str = "", port: int | None = None, **keys: Any) -> JsonDict:
        """The table's variant ``name`` with other keys; with a ``label`` one that extends the baseline like it."""
        entry = {**self.bed.files["variants"]["swapgate_shipped_variants"][name], **keys}
        if label:
            entry["extends"] = "baseline"
        return self.bed.resolve(label or name, entry, host={"port": port} if port else None)

    def sampler(self) -> Sampler:
        """A sampler over the GPU, judged as a swap to the variant would judge it."""
        return Sampler(self.gpus, float(self.bed.resolve("baseline")["free_memory_mib"]))

    def diagnose(self, log: Path, running: bool = False) -> JsonDict:
        """scripts/diagnose.py over a log; the engine's interpreter has the YAML reader it needs."""
        words = [self.bed.python, str(REPO / "scripts/diagnose.py"), "--json", *(["--running"] if running else [])]
        done = subprocess.run(
            [*words, str(log)], capture_output=True, text=True, env=self.bed.environment(), timeout=120, check=False
        )
        try:
            said = json.loads(done.stdout)
        except ValueError:
            return {"verdict": None, "exit_code": done.returncode, "stderr": done.stderr[-TEXT_LIMIT:]}
        keys = ("verdict", "phase", "root_cause", "signature", "class", "remedy", "printed_by", "line", "reasons")
        return {key: said.get(key) for key in keys}

    def service(self, variant: JsonDict, label: str) -> Service:
        """Start the supervisor over a variant."""
        print(f"  start {label}: {variant['name']}", flush=True)
        return Service(self.bed, variant, self.out / "logs" / (label + ".log"))


# --- stages --------------------------------------------------------------------------------------------------------


def stage_smi(proof: Proof) -> JsonDict:
    """Raw texts to OUT/raw, and what the product reads in them."""
    raw = proof.out / "raw"
    raw.mkdir(exist_ok=True)
    result: JsonDict = {}
    for name, words in SMI.items():
        began = time.monotonic()
        try:
            done = subprocess.run(
                ["nvidia-smi", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
            )
            text, code = done.stdout, done.returncode
        except FileNotFoundError:
            text, code = "nvidia-smi: command not found\n", 127
        (raw / f"nvidia-smi-{name}.txt").write_text(text, encoding="utf-8")
        row: JsonDict = {"exit_code": code, "seconds": round(time.monotonic() - began, 2)}
        if name.startswith("topo"):
            found = topology.parse(text)
            row.update(parsed=found, judged=topology.judge(found))
        elif name != "full":
            found = nvidia_smi.parse(text)
            row["gpus"] = [{key: gpu[key] for key in gpu if key != "fields"} for gpu in found["gpus"]]
            row["notices"] = found["notices"]
            row["processes"] = found["processes"]
            if name not in ("processes", "query-noheader", "query-ecc"):
                row["judged"] = nvidia_smi.judge(found, expected=len(proof.gpus) or None)
        row["diagnose"] = proof.diagnose(raw / f"nvidia-smi-{name}.txt")
        result[name] = row
    result["judge"] = gpus.judge(proof.gpus, 1000.0)
    result["faults"] = gpus.faults(proof.gpus)
    if proof.gpus:
        proof.expect("smi: gpus.judge of the idle GPU", result["judge"]["verdict"], "accept")
        proof.expect("smi: gpus.faults of the idle GPU", result["faults"], [])
        for name in ("table", "query"):
            proof.expect(f"smi: GPUs in {name}", len(result[name]["gpus"]), len(proof.gpus))
            proof.expect(f"smi: {name} judged", result[name]["judged"]["verdict"], "accept")
        proof.expect("smi: GPUs in topo -m", result["topo-m"]["parsed"]["gpus"], len(proof.gpus))
    return result


def _row_variant(proof: Proof, row: Row) -> tuple[JsonDict, str | None]:
    """The variant of a row as it would be staged, and what the resolver says against it."""
    draft, none = str(proof.bed.model_path), str(proof.bed.root / "srv/models/none")
    model = None
    if row.change:
        model = proof.bed.changed_model("row-" + row.name, row.change)
        proof.bed.manifest("row-" + row.name, model)
    variant = proof.bed.resolve("row-" + row.name, {"extends": "baseline"}, model)
    spec = json.loads(json.dumps(row.spec).replace("DRAFT", draft).replace("NONE", none))
    refused = None
    if isinstance(spec, dict):
        try:
            variant = proof.bed.resolve("row-" + row.name, {"extends": "baseline", "speculative_config": spec}, model)
        except variants.VariantError as error:
            refused = str(error)
            variant["argv"] += variants.render_flag("speculative-config", spec)
            variant["speculative_config"] = spec
    elif spec is not None:
        variant["argv"] += ["--speculative-config", spec]
    variant["argv"] += [word.replace("NONE", none) for word in row.flags]
    return variant, refused


def _ask(proof: Proof, row: Row, sampler: Sampler) -> JsonDict:
    variant, refused = _row_variant(proof, row)
    release = proof.bed.stage(variant)
    began = sampler.now()
    report = preflight.check(proof.bed.layout, release, [], lambda _: None)
    problems = report["problems"]
    found = {
        "row": row.name,
        "case": row.case,
        "expect": row.expect,
        "ok": report["ok"],
        "resolver": refused,
        "problems": problems,
        "class": report["class"],
        "caught_by": "resolver" if refused else (problems[0]["check"] if problems else None),
        "effective": report["effective"],
        "notices": report["notices"],
        "engine_version": report["engine_version"],
        "cached": report["cached"],
        "from_s": began,
        "seconds": report["seconds"],
    }
    print(
        f"  {row.name}: {'accepted' if report['ok'] else 'refused by ' + str(found['caught_by'])}, "
        f"{report['seconds']} s" + "".join(f"\n      {item['what'][:200]}" for item in problems),
        flush=True,
    )
    proof.expect(f"preflight {row.name}", "accept" if report["ok"] else "refuse", row.expect)
    said = " ".join(item["what"] for item in problems) + json.dumps([report["effective"], report["notices"]])
    if row.must_say:
        proof.expect_true(f"preflight {row.name}: words '{row.must_say}'", row.must_say in said, said[:400])
    return found


def stage_preflight(proof: Proof) -> JsonDict:
    """The rows, the first one alone, then several at a time, then the first again: warm, and out of the cache."""
    systemd_here = shutil.which("systemd-analyze") is not None
    if not systemd_here:  # the unit's text is systemd's to judge, and nobody else's
        systemd.verify = lambda path: []
    chosen = [row for row in ROWS if not proof.options.rows or row.name in proof.options.rows]
    with proof.sampler() as sampler:
        time.sleep(2)
        first = _ask(proof, chosen[0], sampler)
        with concurrent.futures.ThreadPoolExecutor(proof.options.parallel) as pool:
            rest = list(pool.map(lambda row: _ask(proof, row, sampler), chosen[1:]))
        cached = _ask(proof, chosen[0], sampler)
        for kept in proof.bed.layout.preflights.glob("*.json"):
            kept.unlink()
        warm = _ask(proof, chosen[0], sampler)
        time.sleep(2)
    proof.expect("preflight again: from the cache", cached["cached"], True)
    highest, lowest = sampler.highest_mib, sampler.lowest_mib
    if highest is not None and lowest is not None:
        proof.expect_true("preflight: GPU memory untouched", highest - lowest < KEEP_UNDER_MIB, [lowest, highest])
    return {
        "unit_text_checked": systemd_here,
        "parallel": proof.options.parallel,
        "rows": [first, *rest],
        "first_again_cached_s": cached["seconds"],
        "first_again_warm_s": warm["seconds"],
        "gpu": sampler.report(),
    }


# NVML's own contexts move a few MiB.
KEEP_UNDER_MIB = 64.0


def stage_bad_flag(proof: Proof) -> JsonDict:
    """The supervisor over an engine that refuses its arguments."""
    variant = proof.variant("baseline", "bad-flag")
    variant["argv"].append("--disable-log-requests")
    service = proof.service(variant, "bad-flag")
    service.wait_exit(READY_LIMIT_S)
    result = service.summary()
    result["diagnose"] = proof.diagnose(service.log)
    service.close()
    proof.expect("bad flag: exit code", result["exit_code"], 42)
    proof.expect("bad flag: class", (result["failure"] or {}).get("class"), "config")
    cause = str((result["failure"] or {}).get("root_cause"))
    proof.expect_true("bad flag: cause names the flag", "--disable-log-requests" in cause, cause)
    return result


def _load(proof: Proof, service: Service, label: str) -> bool:
    """Wait for READY; where it does not come, say why."""
    if service.ready(READY_LIMIT_S):
        return True
    failure = service.report().get("failure")
    proof.wrong.append(f"{label}: not ready in {READY_LIMIT_S:.0f} s: {failure}")
    print(f"    NOT READY {label}: {failure}", flush=True)
    service.wait_exit(0.1)
    return False


def _serving(proof: Proof, service: Service, label: str) -> JsonDict:
    """What can be seen of an engine that serves: an answer, its log benign or alive, the GPU busy and by whom."""
    variant = service.variant
    began = time.monotonic()
    text = engine_api.complete(variant["bind"], variant["port"], variant["model"]["served_name"], 32)
    copy = service.log.with_suffix(".so-far")
    shutil.copy(service.log, copy)
    said = proof.diagnose(copy, running=True)
    copy.unlink()
    proof.expect_true(f"{label}: log while it serves", said["verdict"] in ("benign", "alive"), said)
    found: JsonDict = {"completion": text, "completion_s": round(time.monotonic() - began, 2), "diagnose_running": said}
    if proof.gpus:
        found["judge"] = gpus.judge(proof.gpus, float(variant["free_memory_mib"]))
        found["faults"] = gpus.faults(proof.gpus)
        proof.expect(f"{label}: judge while it serves", found["judge"]["state"], "busy")
        proof.expect(f"{label}: faults while it serves", found["faults"], [])
    found["engine_core"] = service.engine_core()
    return found


def _left_error(summary: JsonDict) -> list[JsonDict]:
    """For each snapshot of the load the time left that was told, against the time that was left."""
    ready = summary["ready_after_s"]
    return [
        {
            "at_s": row["at_s"],
            "phase": row["phase"],
            "percent": row["percent"],
            "told_s": row["remaining_s"],
            "true_s": round(ready - row["at_s"], 1),
        }
        for row in summary["snapshots"]
        if ready is not None and row["state"] == "loading" and row["remaining_s"] is not None
    ]


class _FreeWait(threading.Thread):
    """The swap's own wait for a free port and GPU, beside the stop that it waits for."""

    def __init__(self, proof: Proof, variant: JsonDict) -> None:
        super().__init__(daemon=True)
        self.swap = swap.Swap(proof.bed.layout, records.empty_state(), lambda _: None)
        self.variant, self.began = variant, time.monotonic()
        self.result: JsonDict = {"returned_after_s": None, "error": None}

    def run(self) -> None:
        """Wait."""
        try:
            self.swap.wait_free(self.variant)
        except swap.SwapFailed as error:
            self.result["error"] = error.cause
        self.result["returned_after_s"] = round(time.monotonic() - self.began, 2)


def _stopped(
    proof: Proof, service: Service, sampler: Sampler, number: signal.Signals, pid: int, idle: float
) -> JsonDict:
    """End the service by a signal; when everything of it is gone, and when the GPU is free."""
    wait = _FreeWait(proof, service.variant)
    sent = sampler.mark(f"{number.name} to {command_of(pid)[:60] or pid}")
    wait.start()
    found = service.end(number, pid, STOP_LIMIT_S)
    wait.join(service.variant["free_timeout_s"] + 10)
    time.sleep(3)
    found["free_wait"] = wait.result
    found["memory_free_after_s"] = sampler.freed_after(sent, idle + IDLE_MARGIN_MIB)
    found["judge_accepts_after_s"] = sampler.accepted_after(sent)
    return found


def _idle(sampler: Sampler) -> float:
    time.sleep(1.5)
    return sampler.lowest_mib or 0.0


def stage_cold(proof: Proof) -> JsonDict:
    """First start, idle watch, then a stop while a stream runs."""
    variant = proof.variant("baseline", drain_timeout_s=DRAIN_S)
    with proof.sampler() as sampler:
        idle = _idle(sampler)
        service = proof.service(variant, "cold")
        result: JsonDict = {"idle_mib": idle}
        if _load(proof, service, "cold"):
            sampler.mark("ready")
            result["serving"] = _serving(proof, service, "cold")
            time.sleep(IDLE_WATCH_S)
            fed = [at for at in service.notified.watchdog_at if at > (service.report()["ready_after_s"] or 0) + 1]
            proof.expect_true("cold: watchdog fed while idle", len(fed) >= 2, fed)
            alone = Stream(variant, STREAM_TOKENS)
            alone.start()
            alone.join(120)
            # A third of the drain's time at the speed just seen: the stop must let it end.
            speed = alone.result["chunks"] / max(alone.result["seconds"] or 0.0, 0.1)
            stream = Stream(variant, min(STREAM_TOKENS, int(speed * DRAIN_S / 3)))
            stream.start()
            time.sleep(0.7)
            result["stop"] = _stopped(proof, service, sampler, signal.SIGTERM, service.process.pid, idle)
            stream.join(120)
            result["stream_alone"], result["stream_across_stop"] = alone.result, stream.result
            proof.expect("cold: exit code after SIGTERM", result["stop"]["exit_code"], 0)
            proof.expect("cold: the stream ended whole", stream.result["finish_reason"], "length")
        result.update(service.summary())
        service.close()
    result["time_left"] = _left_error(result)
    result["diagnose"] = proof.diagnose(service.log)
    proof.expect_true("cold: whole log", result["diagnose"]["verdict"] in ("benign", "alive"), result["diagnose"])
    result["gpu"] = sampler.report()
    return result


def stage_warm(proof: Proof) -> JsonDict:
    """Second start of the same unit, with a history; then the engine core is killed."""
    variant = proof.variant("baseline")
    with proof.sampler() as sampler:
        idle = _idle(sampler)
        service = proof.service(variant, "warm")
        result: JsonDict = {"idle_mib": idle}
        if _load(proof, service, "warm"):
            sampler.mark("ready")
            result["serving"] = _serving(proof, service, "warm")
            core = service.engine_core()
            proof.expect_true("warm: an engine core is found", core is not None, service.members)
            if core is not None:
                result["stop"] = _stopped(proof, service, sampler, signal.SIGKILL, core, idle)
                proof.expect("warm: exit code after kill -9 of the core", result["stop"]["exit_code"], 70)
        result.update(service.summary())
        service.close()
    result["time_left"] = _left_error(result)
    proof.expect_true("warm: a time left was told", bool(result["time_left"]), result["snapshots"][:3])
    result["diagnose"] = proof.diagnose(service.log)
    proof.expect("warm: whole log", result["diagnose"]["verdict"], "fatal")
    # A core that somebody killed says nothing against the variant.
    kind = (result["failure"] or {}).get("class")
    proof.expect_true("warm: class of the failure", kind not in ("config", "model"), kind)
    result["gpu"] = sampler.report()
    return result


def stage_ngram(proof: Proof) -> JsonDict:
    """n-gram; another engine starts into the memory that it holds; then a stop that the drain is too short for."""
    variant = proof.variant("ngram", drain_timeout_s=SHORT_DRAIN_S)
    with proof.sampler() as sampler:
        idle = _idle(sampler)
        service = proof.service(variant, "ngram")
        result: JsonDict = {"idle_mib": idle}
        if _load(proof, service, "ngram"):
            sampler.mark("ready")
            result["serving"] = _serving(proof, service, "ngram")
            stream = Stream(variant, STREAM_TOKENS)
            stream.start()
            stream.join(120)
            result["stream_alone"] = stream.result
            if proof.gpus:
                result["conflict"] = _conflict(proof)
                proof.expect("ngram: still serves beside the failed start", service.report().get("state"), "ready")
            long = Stream(variant, proof.options.max_model_len - 64)
            long.start()
            time.sleep(0.7)
            result["stop"] = _stopped(proof, service, sampler, signal.SIGTERM, service.process.pid, idle)
            long.join(120)
            result["stream_past_the_drain"] = long.result
            proof.expect("ngram: exit code after SIGTERM", result["stop"]["exit_code"], 0)
        result.update(service.summary())
        service.close()
    changes = " ".join(result["changes"] or [])
    proof.expect_true("ngram: changes name async scheduling", "async scheduling off" in changes, result["changes"])
    result["time_left"] = _left_error(result)
    result["diagnose"] = proof.diagnose(service.log)
    proof.expect_true("ngram: whole log", result["diagnose"]["verdict"] in ("benign", "alive"), result["diagnose"])
    result["gpu"] = sampler.report()
    return result


def _failing(proof: Proof, label: str, signature_word: str, utilization: float) -> JsonDict:
    """A start that must fail in the engine core; what the supervisor and scripts/diagnose.py make of it."""
    engine_args = {"gpu-memory-utilization": utilization}
    variant = proof.variant("baseline", label, proof.options.port + 1, engine_args=engine_args)
    service = proof.service(variant, label)
    service.wait(lambda report: report.get("state") in ("ready", "failed"), FAILING_LIMIT_S)
    service.wait_exit(STOP_LIMIT_S if service.report().get("state") == "failed" else 0.1)
    result = service.summary()
    service.close()
    result["diagnose"] = proof.diagnose(service.log)
    failure = result["failure"] or {}
    for where, found in (("supervisor", failure), ("diagnose", result["diagnose"])):
        cause = str(found.get("root_cause"))
        proof.expect_true(f"{label}: cause by {where}", signature_word in cause, cause)
        proof.expect_true(f"{label}: class by {where}", found.get("class") in ("config", "host"), found.get("class"))
    print(
        f"    {label}: exit {result['exit_code']}, class {failure.get('class')}, {failure.get('root_cause')}",
        flush=True,
    )
    return result


def _conflict(proof: Proof) -> JsonDict:
    return _failing(proof, "conflict", "Free memory on device", 0.9)


def stage_kv(proof: Proof) -> JsonDict:
    """Nothing left for the KV cache."""
    if not proof.gpus:
        return {"skipped": "needs a GPU"}
    return _failing(proof, "kv", "No available memory for the cache blocks", 0.001)


def stage_abort(proof: Proof) -> JsonDict:
    """A stop that is asked for while the engine loads."""
    variant = proof.variant("ngram")
    late = ("weights", "post-load", "compile", "kv cache", "kv_cache", "graphs", "warmup")
    with proof.sampler() as sampler:
        idle = _idle(sampler)
        service = proof.service(variant, "abort")
        there = service.wait(lambda report: (report.get("load") or {}).get("phase") in late, READY_LIMIT_S)
        proof.expect("abort: the load came as far as the weights", there, True)
        result: JsonDict = {"phase_at_stop": (service.report().get("load") or {}).get("phase"), "idle_mib": idle}
        result["stop"] = _stopped(proof, service, sampler, signal.SIGTERM, service.process.pid, idle)
        proof.expect("abort: exit code", result["stop"]["exit_code"], 0)
        gone = result["stop"].get("supervisor_gone_after_s")
        proof.expect_true("abort: gone within 30 s", gone is not None and gone < 30, result["stop"])
        result.update(service.summary())
        service.close()
    result["diagnose"] = proof.diagnose(service.log)
    result["gpu"] = sampler.report()
    return result


def stage_orphan(proof: Proof) -> JsonDict:
    """The supervisor is killed; without systemd nobody ends its engine. Who holds the GPU is then the question."""
    variant = proof.variant("baseline")
    variant["free_timeout_s"] = 5
    with proof.sampler() as sampler:
        idle = _idle(sampler)
        service = proof.service(variant, "orphan")
        result: JsonDict = {"idle_mib": idle}
        if _load(proof, service, "orphan"):
            time.sleep(1)
            service.look()
            members = dict(service.members)
            result["diagnose_running"] = proof.diagnose(service.log, running=True)
            os.kill(service.process.pid, signal.SIGKILL)
            service.wait_exit(10)
            time.sleep(5)
            left = {pid: what for pid, what in members.items() if alive(pid)}
            result["left_after_5_s"] = sorted(left.values())
            wait = _FreeWait(proof, variant)
            wait.start()
            wait.join(30)
            result["free_wait"] = wait.result
            if left:
                proof.expect_true("orphan: the free wait names a holder", bool(wait.result["error"]), wait.result)
            sent = sampler.mark("SIGKILL to what is left")
            for pid in left:
                os.kill(pid, signal.SIGKILL)
            time.sleep(8)
            result["memory_free_after_s"] = sampler.freed_after(sent, idle + IDLE_MARGIN_MIB)
        result.update(service.summary())
        service.close()
    result["gpu"] = sampler.report()
    return result


def stage_notify(proof: Proof) -> JsonDict:
    """Nobody listens to the supervisor any more: what serves must not end of it."""
    variant = proof.variant("baseline")
    with proof.sampler() as sampler:
        idle = _idle(sampler)
        service = proof.service(variant, "notify")
        loads = service.wait(lambda report: (report.get("load") or {}).get("phase") is not None, READY_LIMIT_S)
        proof.expect("notify: the load began", loads, True)
        result: JsonDict = {"idle_mib": idle, "socket_gone_at_s": service.now()}
        service.notified.close()
        if _load(proof, service, "notify"):
            sampler.mark("ready")
            time.sleep(IDLE_WATCH_S / 2)  # long enough for it to feed a watchdog that is not there
            result["alive_after_s"] = service.now()
            proof.expect("notify: exit code while it serves", service.process.poll(), None)
            result["serving"] = _serving(proof, service, "notify")
            result["stop"] = _stopped(proof, service, sampler, signal.SIGTERM, service.process.pid, idle)
            proof.expect("notify: exit code after SIGTERM", result["stop"]["exit_code"], 0)
        result.update(service.summary())
        service.close()
    result["diagnose"] = proof.diagnose(service.log)
    proof.expect_true("notify: whole log", result["diagnose"]["verdict"] in ("benign", "alive"), result["diagnose"])
    result["gpu"] = sampler.report()
    return result


def stage_drain(proof: Proof) -> JsonDict:
    """A stream that the drain is too short for keeps nobody waiting."""
    variant = proof.variant("baseline", drain_timeout_s=SHORT_DRAIN_S)
    with proof.sampler() as sampler:
        idle = _idle(sampler)
        service = proof.service(variant, "drain")
        result: JsonDict = {"idle_mib": idle}
        if _load(proof, service, "drain"):
            sampler.mark("ready")
            stream = Stream(variant, proof.options.max_model_len - 64)
            stream.start()
            time.sleep(0.7)
            result["stop"] = _stopped(proof, service, sampler, signal.SIGTERM, service.process.pid, idle)
            stream.join(120)
            result["stream_past_the_drain"] = stream.result
            proof.expect("drain: exit code after SIGTERM", result["stop"]["exit_code"], 0)
            proof.expect_true("drain: the stream was cut", stream.result["finish_reason"] is None, stream.result)
            gone = result["stop"].get("supervisor_gone_after_s")
            limit = SHORT_DRAIN_S + AFTER_DRAIN_S
            proof.expect_true(f"drain: gone within {limit:.0f} s", gone is not None and gone < limit, gone)
        result.update(service.summary())
        service.close()
    result["diagnose"] = proof.diagnose(service.log)
    result["gpu"] = sampler.report()
    return result


STAGES: dict[str, Callable[[Proof], JsonDict]] = {
    "smi": stage_smi,
    "preflight": stage_preflight,
    "bad_flag": stage_bad_flag,
    "cold": stage_cold,
    "warm": stage_warm,
    "ngram": stage_ngram,
    "abort": stage_abort,
    "kv": stage_kv,
    "orphan": stage_orphan,
    "notify": stage_notify,
    "drain": stage_drain,
}


def machine(bed: Bed, options: argparse.Namespace) -> JsonDict:
    """Versions of what the numbers depend on."""
    driver = Path("/sys/module/nvidia/version")
    commit = subprocess.run(["git", "-C", str(REPO), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "engine": bed.versions,
        "host_python": platform.python_version(),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "driver": driver.read_text(encoding="ascii").strip() if driver.exists() else None,
        "commit": options.commit or commit.stdout.strip() or None,
        "model_manifest": (records.read_if_there(bed.layout.manifests / (MODEL_NAME + ".json")) or {}).get("id"),
        "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def options_of(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--parallel", type=int, default=4, help="preflights at a time (default: %(default)s)")
    parser.add_argument("--rows", type=lambda text: text.split(","), help="only these rows of the preflight")
    parser.add_argument("--stages", type=lambda text: text.split(","), default=list(STAGES))
    options = parser.parse_args(words)
    unknown = [name for name in options.stages if name not in STAGES]
    if unknown:
        parser.error(f"unknown stages {unknown}, expected of {', '.join(STAGES)}")
    options.out, options.model = options.out.resolve(), options.model.resolve()
    return options


def main(words: list[str] | None = None) -> int:
    """Run the stages asked for; returns the exit code that the module's text lists."""
    options = options_of(words)
    if os.geteuid() != 0:
        print("prove: found another user than root, expected root: use sudo", file=sys.stderr)
        return 2
    (options.out / "stages").mkdir(parents=True, exist_ok=True)
    try:
        bed = bed_of(options)
    except BedError as error:
        print(f"prove: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        wrong = run_stages(bed, options)
    finally:
        for service in list(Service.running):
            service.close()
    for line in wrong:
        print(f"NOT AS EXPECTED {line}")
    return 1 if wrong else 0


def run_stages(bed: Bed, options: argparse.Namespace) -> list[str]:
    """Run each stage and write its report; returns what was not as expected."""
    wrong: list[str] = []
    for name in options.stages:
        proof = Proof(bed, options)
        print(f"{name}", flush=True)
        began = time.monotonic()
        try:
            result = STAGES[name](proof)
        except Exception:
            # The other stages still have something to show; this one is reported as wrong.
            result = {"crashed": traceback.format_exc()}
            proof.wrong.append(f"{name} crashed: {result['crashed'].strip().splitlines()[-1]}")
            print(result["crashed"], flush=True)
        seconds = round(time.monotonic() - began, 1)
        report = {
            "stage": name,
            "seconds": seconds,
            "not_as_expected": proof.wrong,
            "machine": machine(bed, options),
            **result,
        }
        records.write_json(options.out / "stages" / (name + ".json"), report)
        print(f"{name}: {seconds} s, {len(proof.wrong)} not as expected", flush=True)
        wrong += proof.wrong
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
