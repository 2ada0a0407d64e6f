"""What the transaction costs and what it saves, in one run on one throwaway host with the fake engine.

    .venv/bin/python benchmarks/swap_cost.py [--host NAME] [--repeats 5] [--minutes M]
    .venv/bin/python benchmarks/swap_cost.py --part swaps|swapgate|plain      measure this, keep the rest
    .venv/bin/python benchmarks/swap_cost.py --page      write docs/swap-cost.md from the kept result

Three parts, kept in benchmarks/results/swap-cost.json:
  own       seconds of the engine's own stop and load: the variants' exact commands, started and stopped by hand
  swaps     healthy swaps, measured right after that; overhead = asked to outcome, less own stop, own load and soak
  faults    the same faults put into swaps by swapgate and by benchmarks/plain/swap.yml, asked all the while by the same
            client. noticed: seconds from the fault to the roll back (plain: to the playbook's end, when it failed).
            without service: seconds in which no completion came, from the request to the end of the observation, or
            null when none came again. serves: who answers at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "collections")]

from tests.faults import actions, bed, rows, runner  # noqa: E402 - the path comes first
from tests.faults.host import PORT, Host  # noqa: E402

RESULT = ROOT / "benchmarks/results/swap-cost.json"
PAGE = ROOT / "docs/swap-cost.md"
OLD, NEW = "plain-baseline", "plain-ngram"
LOAD_S = 3.0
# What a swap may take beyond the engine's own stop and load and the soak.
AIM_S = 3.0
# How long the plain playbook polls /health; in the field this is the longest load, half an hour and more.
WAIT_S = 10
OBSERVE_S = 5.0
# A plain playbook that has not ended by then is ended: it would have gone on.
PLAYBOOK_LIMIT_S = 60.0
RESETTLE_S = 30.0
BARE = """
import http.client, json, subprocess, sys, time
argvs, port = json.load(sys.stdin)
def answers():
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        body = json.dumps({"model": "tiny", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0})
        link.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        return link.getresponse().status == 200
    except OSError:
        return False
    finally:
        link.close()
def start(argv):
    begun = time.monotonic()
    engine = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not answers():
        time.sleep(0.02)
    return engine, time.monotonic() - begun
def stop(engine):
    begun = time.monotonic()
    engine.terminate()
    engine.wait()
    return time.monotonic() - begun
old, _ = start(argvs[0])
stop_s = stop(old)
new, load_s = start(argvs[1])
stop(new)
print(json.dumps({"stop_s": round(stop_s, 2), "load_s": round(load_s, 2)}))
"""


@dataclass(frozen=True)
class Fault:
    """One fault: the matrix's row for swapgate, and how it gets into the plain swap."""

    name: str
    row: str
    # What differs in the plain swap: knobs (default: the row's), the release whose command is started, a script before.
    label: str = "ngram"
    knobs: dict[str, Any] | None = None
    before: str = ""
    # When it happens there: seconds after the new service's start, or `line:PATTERN` in its journal.
    moment: str = "start+0"
    # What is done to the controller when the old service no longer answers.
    blow: str = ""


TRUNCATED = rows.ngram(load_s=LOAD_S, crash_at="weights", crash_with="truncated_shard")
FAULTS = (
    Fault("a speculative method that does not exist", "method-unknown", label="bad_method"),
    Fault("a flag that the engine does not know", "flag-unknown", label="unknown_flag"),
    Fault("a weight file lost its end", "weights-truncated", knobs=TRUNCATED, moment="line:afetensor"),
    Fault("out of memory at the beginning of the load", "crash-early", moment="line:OutOfMemory"),
    Fault("out of memory at 80 % of the load", "crash-late", moment="line:OutOfMemory"),
    Fault("the load fails and the engine exits 0", "crash-exit0", moment="line:OutOfMemory"),
    Fault("the load stalls", "stall", moment="start+1.8"),
    Fault("the server answers to another model name", "name-wrong", moment="start+0.9"),
    Fault("the first completion kills the engine", "first-completion", moment="start+1"),
    Fault("/health is 200, completions hang", "completions-hang", moment="start+1"),
    Fault("completions are garbage", "answer-garbage", moment="start+1"),
    Fault("ready, then dead 1.2 s later", "soak-death", moment="start+1.8"),
    Fault("ready, then a worker dies and the engine exits 0", "soak-exit0", moment="start+1.4"),
    Fault(
        "a second server answers on the port for 10 s",
        "port-old-server",
        before=f"systemd-run -q --collect --unit=fault-foreign python3 /opt/faults/foreign.py {PORT} 10",
    ),
    Fault("SSH drops while the old one stops", "ssh-stop", blow="ssh"),
    Fault("the controller is killed while the old one stops", "ssh-install", blow="controller"),
)

# To a plain playbook these are like another fault: they come last, for when the minutes are short.
ALIKE = ("flag-unknown", "crash-late", "weights-truncated", "crash-early", "soak-exit0")


def silence(good: list[float], begin: float, end: float, answers: bool) -> float | None:
    """Seconds without an answer between two moments; None when nobody answers any more at the end."""
    if not answers:
        return None
    times = [begin, *[when for when in good if begin < when < end], end]
    gaps = [later - sooner for sooner, later in zip(times, times[1:], strict=False)]
    return round(sum(gap for gap in gaps if gap > runner.SILENCE_S), 1)


def look(host: Host, *more: str) -> dict[str, Any]:
    """What look.py tells of the host."""
    words = " ".join(f"'{word}'" for word in more)
    seen: dict[str, Any] = json.loads(host.sh(f"python3 /opt/faults/look.py {PORT} {words}"))
    return seen


def variant_of(place: bed.Bed, label: str) -> dict[str, Any]:
    """The resolved variant of a staged release."""
    folder = place.host.box.root / "opt/faults/good/lib/releases" / place.releases[label]
    variant: dict[str, Any] = json.loads((folder / "variant.json").read_text(encoding="utf-8"))
    return variant


# --- the cost of a healthy swap --------------------------------------------------------------------------------------


def bare(place: bed.Bed) -> dict[str, float]:
    """The engine's own stop and load, with nothing of swapgate around it."""
    host = place.host
    host.write("/opt/faults/bare.py", BARE)
    host.sh("systemctl stop vllm-tiny.service vllm-tiny-ngram.service 2>/dev/null; systemctl is-active vllm-tiny; true")
    argvs = [variant_of(place, label)["argv"] for label in ("baseline", "ngram")]
    told = host.sh(
        "cd /var/lib/vllm && runuser -u vllm -- python3 /opt/faults/bare.py", json.dumps([argvs, PORT]), limit_s=120
    )
    times: dict[str, float] = json.loads(told)
    host.sh("systemctl start vllm-tiny.service", limit_s=90)
    return times


def healthy(place: bed.Bed) -> dict[str, Any]:
    """One engine measured by hand and one swap from `baseline` to `ngram`."""
    place.reset(cold=True)
    place.host.write("/etc/fake_vllm.json", json.dumps({"load_s": LOAD_S}))
    own = bare(place)
    watcher = runner.Client(place.host)
    try:
        asked = time.monotonic()
        place.host.sh(f"swapgate ask {place.releases['ngram']} --by benchmark")
        while not place.host.swap().get("outcome"):
            if time.monotonic() - asked > 120:
                raise SystemExit(f"swap_cost: a healthy swap has no outcome after 120 s: {place.host.swap()}")
            time.sleep(0.02)
        took = time.monotonic() - asked
        time.sleep(1)
    finally:
        watcher.close()
    swap = place.host.swap()
    if swap["outcome"] != "swapped":
        raise SystemExit(f"swap_cost: a healthy swap ended {swap['outcome']}: {swap['cause']}")
    soak = variant_of(place, "ngram")["soak_s"]
    without = silence(watcher.good, asked, time.monotonic(), True) or 0.0
    engine = own["stop_s"] + own["load_s"]
    return {
        "own_stop_s": own["stop_s"],
        "own_load_s": own["load_s"],
        "soak_s": soak,
        "asked_to_outcome_s": round(took, 2),
        "overhead_beyond_engine_and_soak_s": round(took - engine - soak, 2),
        "without_service_s": without,
        "without_service_beyond_engine_s": round(without - engine, 2),
        "asked_to_outcome_over_engine": round(took / engine, 2),
        "phases": {phase["name"]: phase["seconds"] for phase in swap["phases"]},
        "load_average": round(os.getloadavg()[0], 1),
    }


# --- the same faults, both ways --------------------------------------------------------------------------------------


def by_swapgate(place: bed.Bed, fault: Fault) -> dict[str, Any]:
    """The row of the matrix, asked all the while."""
    row = rows.find(fault.row)
    watcher = runner.Client(place.host)
    try:
        result = runner.run(place, row)
        time.sleep(1)
        end = time.monotonic()
    finally:
        watcher.close()
    seen = look(place.host)
    answers = place.host.complete() is not None
    return {
        "row": row.id,
        "outcome": result.outcome,
        "noticed_s": result.noticed_s,
        "without_service_s": silence(watcher.good, result.asked_at, end, answers),
        "serves": next(iter(seen["holders"]), None) if answers else None,
        "as_expected": result.ok,
    }


class Plain:
    """The host as a plain playbook left it: two hand-made services, one of them serving."""

    def __init__(self, place: bed.Bed) -> None:
        self.place = place
        self.host = place.host
        place.reset(cold=True)
        self.host.sh("systemctl disable -q --now vllm-tiny.service", limit_s=60)
        self.host.write("/opt/faults/foreign.py", actions.FOREIGN)

    def _end_services(self) -> None:
        for unit in (OLD, NEW, "fault-foreign"):
            self.host.run(
                f"systemctl kill -s KILL {unit}; systemctl stop {unit}; systemctl disable -q {unit}", limit_s=60
            )
        self.host.sh("systemctl reset-failed; true")

    def reset(self) -> None:
        """The old service serves; nothing of an earlier fault is left."""
        self._end_services()
        model = bed.MODEL
        self.host.sh(f"rm -rf {model}; cp -a /opt/faults/good/model {model}")
        self.host.write("/etc/fake_vllm.json", json.dumps({**bed.KNOBS, "stop_s": 2.0}))
        unit = (ROOT / "benchmarks/plain/plain.service.j2").read_text(encoding="utf-8")
        words = " ".join(variant_of(self.place, "baseline")["argv"])
        unit = unit.replace("{{ argv | map('quote') | join(' ') }}", words).replace("{{ new }}", OLD)
        self.host.write(f"/etc/systemd/system/{OLD}.service", unit)
        self.host.sh(f"systemctl daemon-reload; systemctl enable -q --now {OLD}")
        self._until(lambda: self.host.complete() is not None, RESETTLE_S)

    @staticmethod
    def _until(holds: Callable[[], bool], limit_s: float) -> bool:
        end = time.monotonic() + limit_s
        while not holds():
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def close(self) -> None:
        """Leave no plain service behind."""
        self._end_services()
        self.host.sh(
            f"rm -f /etc/systemd/system/{OLD}.service /etc/systemd/system/{NEW}.service; systemctl daemon-reload"
        )
        self.place.reset(cold=True)

    def run(self, fault: Fault) -> dict[str, Any]:
        """One plain swap with the fault in it."""
        self.reset()
        row = rows.find(fault.row)
        knobs = row.knobs if fault.knobs is None else fault.knobs
        self.host.write("/etc/fake_vllm.json", json.dumps({**bed.KNOBS, **knobs}))
        if fault.before:
            self.host.sh(fault.before)
        given = {"old": OLD, "new": NEW, "argv": variant_of(self.place, fault.label)["argv"], "port": PORT}
        watcher = runner.Client(self.host)
        asked = time.monotonic()
        with tempfile.NamedTemporaryFile("w", suffix=".json") as variables:
            json.dump({**given, "wait_s": WAIT_S}, variables)
            variables.flush()
            words = [str(Path(sys.executable).parent / "ansible-playbook"), "-i", str(self.host.box.inventory)]
            words += ["-e", f"@{variables.name}", str(ROOT / "benchmarks/plain/swap.yml")]
            playbook = subprocess.Popen(
                words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
            )
            try:
                if fault.blow:
                    self._until(lambda: self.host.complete(limit_s=0.5) is None, 60)
                    self._strike(fault.blow, playbook)
                told = self._await(playbook)
                ended = time.monotonic()
                time.sleep(OBSERVE_S)
                end = time.monotonic()
            finally:
                watcher.close()
                with contextlib.suppress(ProcessLookupError):  # whatever went wrong: leave no playbook behind
                    os.killpg(playbook.pid, signal.SIGKILL)
        seen = look(self.host, f"{NEW}.service", f"{asked:.3f}", fault.moment.partition("line:")[2] or "Started")
        answers = self.host.complete() is not None
        moment = next(iter(seen.get("lines_at", {}).values()), None)
        if moment is not None and fault.moment.startswith("start+"):
            moment += float(fault.moment.partition("+")[2])
        said = {0: "ok", 4: "unreachable"}.get(
            playbook.returncode, "killed" if fault.blow == "controller" else "failed"
        )
        if told is None:
            said, told = f"not ended after {PLAYBOOK_LIMIT_S:.0f} s", ""
        return {
            "outcome": f"playbook: {said}",
            "noticed_s": round(ended - moment, 1) if said == "failed" and moment is not None else None,
            "without_service_s": silence(watcher.good, asked, end, answers),
            "serves": next(iter(seen["holders"]), None) if answers else None,
            "said": told[-400:] if said == "failed" and moment is None else "",
        }

    @staticmethod
    def _await(playbook: subprocess.Popen[str]) -> str | None:
        """What a playbook printed, or None when it outlived its limit and was ended."""
        try:
            return playbook.communicate(timeout=PLAYBOOK_LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(playbook.pid, signal.SIGKILL)
            playbook.communicate()
            return None

    def _strike(self, blow: str, playbook: subprocess.Popen[str]) -> None:
        if blow == "controller":
            os.killpg(playbook.pid, signal.SIGKILL)
            return
        folder = str(self.host.box.control_dir).encode()
        for entry in Path("/proc").glob("[0-9]*"):  # the connections that Ansible keeps to this host, and no others
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes()
                if line.startswith(b"ssh") and folder in line and b"/faults-" not in line:
                    os.kill(int(entry.name), signal.SIGKILL)


# --- the result ------------------------------------------------------------------------------------------------------


def about() -> dict[str, Any]:
    """What a part was measured on, and when."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {
        "commit": commit.stdout.strip(),
        "machine": f"{os.cpu_count()} CPUs, {platform.platform()}, Python {platform.python_version()}",
        "started_unix": round(time.time()),
        "load_average": round(os.getloadavg()[0], 1),
    }


def measure(host: str, repeats: int, part: str | None, minutes: float) -> dict[str, Any]:
    """Measure everything, or one part and keep the others; no fault begins after ``minutes``. Keeps each as it ends."""
    stop = time.monotonic() + minutes * 60
    place = bed.prepare(host, lambda text: print(f"swap_cost: {text}", flush=True))
    kept: dict[str, Any] = json.loads(RESULT.read_text(encoding="utf-8")) if part and RESULT.exists() else {}
    kept.update(schema=1, load_s=LOAD_S, wait_s=WAIT_S)
    if part in (None, "swaps"):
        kept["swaps_run"] = about()
        kept["swaps"] = []
        for number in range(repeats):
            kept["swaps"].append({**healthy(place), "commit": kept["swaps_run"]["commit"]})
            print(f"swap_cost: healthy swap {number + 1}: {json.dumps(kept['swaps'][-1])}", flush=True)
            save(kept)
    entries: list[dict[str, Any]] = kept.setdefault("faults", [{"fault": fault.name} for fault in FAULTS])
    if part in (None, "swapgate"):
        kept["swapgate_run"] = about()
        for fault, entry in zip(FAULTS, entries, strict=True):
            if time.monotonic() < stop:
                entry["swapgate"] = by_swapgate(place, fault)
                print(f"swap_cost: {json.dumps(entry)}", flush=True)
                save(kept)
    if part in (None, "plain"):
        kept["plain_run"] = about()
        plain = Plain(place)
        try:
            pairs = sorted(zip(FAULTS, entries, strict=True), key=lambda pair: pair[0].row in ALIKE)
            for fault, entry in pairs:
                if time.monotonic() < stop and "plain" not in entry:
                    entry["plain"] = {**plain.run(fault), "load_average": round(os.getloadavg()[0], 1)}
                    print(f"swap_cost: {json.dumps(entry)}", flush=True)
                    save(kept)
        finally:
            plain.close()
    return kept


def save(result: dict[str, Any]) -> None:
    """Keep what there is so far."""
    if result.get("swaps") and any("plain" in entry for entry in result.get("faults", [])):
        result["summary"] = summary(result)
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def summary(result: dict[str, Any]) -> dict[str, Any]:
    """Medians and counts."""
    figures: dict[str, Any] = {
        key: round(statistics.median(swap[key] for swap in result["swaps"]), 2)
        for key in (
            "own_stop_s",
            "own_load_s",
            "asked_to_outcome_s",
            "overhead_beyond_engine_and_soak_s",
            "without_service_beyond_engine_s",
            "asked_to_outcome_over_engine",
        )
    }
    figures["overhead_most_s"] = max(swap["overhead_beyond_engine_and_soak_s"] for swap in result["swaps"])
    for who in ("swapgate", "plain"):
        told = [entry[who] for entry in result["faults"] if "swapgate" in entry and "plain" in entry]
        noticed = [one["noticed_s"] for one in told if one["noticed_s"] is not None]
        gone = [one["without_service_s"] for one in told if one["without_service_s"] is not None]
        figures[who] = {
            "faults": len(told),
            "serve_at_the_end": sum(one["serves"] is not None for one in told),
            "noticed_median_s": round(statistics.median(noticed), 1) if noticed else None,
            "without_service_median_s": round(statistics.median(gone), 1) if gone else None,
        }
    return figures


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.1f}" if isinstance(value, float) else str(value)


def _gone(one: dict[str, Any]) -> str:
    return "for good" if one["without_service_s"] is None else _cell(one["without_service_s"])


def _name(unit: str | None) -> str:
    """Who serves, as a person calls it."""
    if unit is None:
        return "**nobody**"
    return "new" if "ngram" in unit or "older" in unit else "old"


TEXT = """# What a swap costs, and what a plain playbook costs

Generated by `benchmarks/swap_cost.py` from benchmarks/results/swap-cost.json; do not edit. Throwaway hosts on a small
shared machine with the fake engine; its load average is given, and where it is beyond the {cpus} CPUs all seconds are
longer than on a host of its own. Only compare what stands side by side; a real load takes minutes where this one takes
seconds.

## A healthy swap

{swaps} swaps, each right after the engine's exact commands were stopped and started by hand on the same host (*own*).
*Whole*: from the request to the outcome. *Overhead*: what that was beyond own stop, own load and soak, for the
preflight, the way back, waiting for what must be free, the probe, the commit. *Without service beyond*: beyond own stop
and load. The aim is an overhead under 3 s: {aim}.

| commit | load average | own stop s | own load s | soak s | whole s | overhead s | without service beyond s |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |
{healthy}

Where the overhead lies at commit {last}, median seconds by phase, less the engine's own stop, own load and the soak:
{phases}. The rest is `swapgate ask` itself.

## The same faults, both ways

The plain playbook is [benchmarks/plain](../benchmarks/plain/swap.yml): stop, template, start, `until` /health says 200,
for {wait_s} s or more (every try takes its own time); in the field that wait is as long as the longest load. One that
had not ended after {limit_s:.0f} s was ended, and the row says so. *Noticed*: seconds from the fault (for what is
refused, from the request) to the refusal or the roll back, or to the playbook's failure. *Without service*: seconds
without a completion for a client that asks five times a second, until {observe_s:.0f} s after the end. *Serves*: whose
completions come at the end. swapgate's columns are of commit {ours_commit}{ours_load}, the plain ones of
{plain_commit} (load average {plain_load}).

"""
END = """
Completions come at the end in {ours} of {faults} cases with swapgate, each time from the variant that was good before
or from a sound new one. With the plain playbook they come in {theirs}; {faulty} of these are the faulty new variant's.
The truncated weight file is a crash of the load in the plain case (the fake engine reads no weights). A killed
controller is to swapgate what a dropped connection is: whoever asked for the swap is gone.
"""


def healthy_lines(swaps: list[dict[str, Any]]) -> str:
    """One line of the table for each healthy swap."""
    keys: tuple[str, ...] = ("load_average", "own_stop_s", "own_load_s", "soak_s", "asked_to_outcome_s")
    keys += ("overhead_beyond_engine_and_soak_s", "without_service_beyond_engine_s")
    return "\n".join(f"| {' | '.join([swap['commit'], *(f'{swap[key]:.1f}' for key in keys)])} |" for swap in swaps)


def phase_words(swaps: list[dict[str, Any]]) -> str:
    """Median seconds of each phase beyond what the engine itself needs there, in the order of a swap."""
    own = {"stop": "own_stop_s", "watch": "own_load_s", "soak": "soak_s"}
    told = []
    for name in swaps[0]["phases"]:
        beyond = statistics.median(swap["phases"][name] - swap.get(own.get(name, ""), 0.0) for swap in swaps)
        told.append(f"{name} {beyond:.1f}")
    return ", ".join(told)


def page(result: dict[str, Any]) -> str:
    """docs/swap-cost.md."""
    figures = result["summary"]
    told = [entry for entry in result["faults"] if "swapgate" in entry and "plain" in entry]
    heads = ["fault", *("swapgate", "noticed s", "without service s", "serves")]
    heads += ["plain", *heads[2:]]
    rules = ["---", *("---", "---:", "---:", "---") * 2]
    lines = [f"| {' | '.join(heads)} |", f"| {' | '.join(rules)} |"]
    for entry in told:
        words = [entry["fault"]]
        for one in (entry["swapgate"], entry["plain"]):
            words += [
                one["outcome"].removeprefix("playbook: "),
                _cell(one["noticed_s"]),
                _gone(one),
                _name(one["serves"]),
            ]
        lines.append(f"| {' | '.join(words)} |")
    overheads = [swap["overhead_beyond_engine_and_soak_s"] for swap in result["swaps"]]
    met = sum(overhead < AIM_S for overhead in overheads)
    loads = [entry["plain"]["load_average"] for entry in told]
    ours = result["swapgate_run"]
    text = TEXT.format(
        aim=f"met by {met} of {len(overheads)}",
        cpus=os.cpu_count(),
        swaps=len(overheads),
        healthy=healthy_lines(result["swaps"]),
        last=result["swaps"][-1]["commit"],
        phases=phase_words([swap for swap in result["swaps"] if swap["commit"] == result["swaps"][-1]["commit"]]),
        wait_s=result["wait_s"],
        limit_s=PLAYBOOK_LIMIT_S,
        observe_s=OBSERVE_S,
        ours_commit=ours["commit"],
        ours_load=f" ({ours['note']})" if ours.get("note") else f" (load average {ours['load_average']})",
        plain_commit=result["plain_run"]["commit"],
        plain_load=f"{min(loads):.0f} to {max(loads):.0f}",
    )
    end = END.format(
        faults=len(told),
        faulty=sum(_name(entry["plain"]["serves"]) == "new" for entry in told),
        ours=figures["swapgate"]["serve_at_the_end"],
        theirs=figures["plain"]["serve_at_the_end"],
    )
    left = [entry["fault"] for entry in result["faults"] if entry not in told]
    if left:
        end += (
            "\nRun with swapgate only (benchmarks/results/swap-cost.json), not with the plain playbook: "
            + "; ".join(left)
            + ".\n"
        )
    return text + "\n".join(lines) + "\n" + end


def main() -> int:
    """Measure, keep, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="faults", help="name of the throwaway host (default: faults)")
    parser.add_argument("--repeats", type=int, default=5, help="healthy swaps (default: 5)")
    parser.add_argument("--part", choices=["swaps", "swapgate", "plain"], help="measure this part, keep the others")
    parser.add_argument("--minutes", type=float, default=120.0, help="begin no fault after this many (default: 120)")
    parser.add_argument("--page", action="store_true", help="only write the page from the kept result")
    args = parser.parse_args()
    if not args.page:
        save(measure(args.host, args.repeats, args.part, args.minutes))
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    if "summary" in result:
        PAGE.write_text(page(result), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
