"""One row on the bed: reset, inject, ask, follow, and hold what came of it against what was expected."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shlex
import subprocess
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from . import bed as beds
from .actions import Missed, Stage
from .host import PORT, Host
from .row import Row

TRIES = 3
POLL_S = 0.005
ANSWER_EVERY_S = 0.2
# Phases in which the last good variant cannot be asked: what listens then is the target.
TARGET_PHASES = ("install", "free", "start", "watch", "probe", "soak", "confirm", "commit")
# In which the target's server may run.
RUNNING_PHASES = ("start", "watch", "probe", "soak", "confirm")
# In the command line of an engine's server and of none of its other processes.
SERVER = "/bin/vllm serve"
# After the target's READY was believed.
READY_PHASES = ("soak", "commit")
GONE_S = 5.0
LOOK_EVERY_S = 0.1
# Answers further apart than this are an interruption, not a busy machine.
SILENCE_S = 0.7
# The event of the supervisor saying that the load failed; the roll back begins when the engine has been ended.
NOTICED = "load failed"


@dataclass
class Result:
    """What one row showed. Times in seconds; None where it does not apply or was not seen."""

    id: str
    fault: str
    ref: str
    simulated: str
    expected: str
    outcome: str = "none"
    noticed_s: float | None = None
    answered_s: float | None = None
    cause: str = ""
    # None for a row that ends well: it has no cause to name.
    cause_named: bool | None = None
    false_ready: bool = False
    misses: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    tries: int = 1
    seconds: float = 0.0
    # What it ran on, once it is kept.
    commit: str = ""
    # When the swap was asked for, on this machine's monotonic clock: of use while it runs, and not kept.
    asked_at: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the row met its expectation."""
        return not self.misses

    def as_json(self) -> dict[str, Any]:
        """The result for the JSON file."""
        kept = {**asdict(self), "ok": self.ok}
        del kept["asked_at"]
        return kept


def unit_of(label: str) -> str:
    """The unit of the release with that label."""
    return beds.UNIT.get(label, f"vllm-tiny-{label}.service")


class Client:
    """Asks the engine for completions all the while and keeps when each good one ended (monotonic s)."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.good: list[float] = []
        self.asking = True
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(ANSWER_EVERY_S):
            if self.asking and self.host.complete(limit_s=1.0) is not None and self.asking:
                self.good.append(time.monotonic())

    def close(self) -> None:
        """Stop asking."""
        self._end.set()
        self._thread.join(5)


class Follower:
    """Follows the swap in the state file, fires the row's triggers, and keeps when each phase began."""

    def __init__(self, row: Row, stage: Stage, client: Client) -> None:
        self.row = row
        self.stage = stage
        self.client = client
        self.events: list[tuple[float, str]] = []
        self.acted_at: float | None = None
        self.exited_at: float | None = None
        self._awaits_exit = row.moment == "exit"
        self.pending = [(*self._parse(trigger), actions) for trigger, actions in row.at.items() if trigger != "end"]

    @staticmethod
    def _parse(trigger: str) -> tuple[str, float]:
        phase, _, delay = trigger.partition("+")
        return phase, float(delay or 0)

    def follow(self) -> dict[str, Any]:
        """Until the swap has an outcome, or the asking failed, or nobody works on it any more. Returns the SWAP."""
        end = time.monotonic() + self.row.limit_s
        last, since, idle_since = None, time.monotonic(), time.monotonic()
        looked = 0.0
        while time.monotonic() < end:
            swap = self.stage.host.swap()
            phase, now = swap.get("phase"), time.monotonic()
            if swap and phase != last:
                self.events.append((now, phase or str(swap.get("outcome"))))
                last, since = phase, now
                self.client.asking = phase not in TARGET_PHASES
            for trigger in [one for one in self.pending if one[0] == phase and now - since >= one[1]]:
                self.pending.remove(trigger)
                self.stage.phase = str(phase)
                for action in trigger[2]:
                    moment = self.stage.act(action)
                    self.acted_at = self.acted_at or moment
                idle_since = time.monotonic()
            if phase == "watch" and now - looked > LOOK_EVERY_S and not self.began(NOTICED):
                looked = now
                if self.stage.host.load_failed(unit_of(self.row.target)):
                    self.events.append((now, NOTICED))
            if self._awaits_exit and phase in RUNNING_PHASES:
                self._await_exit()
            asker = self.stage.asker
            if swap.get("outcome"):
                return swap
            if asker is not None and asker.poll() not in (None, 0, -9):
                return swap
            if int(now * 10) % 5 == 0 and self.stage.host.processes("swapgate-swap.service"):
                idle_since = time.monotonic()
            if time.monotonic() - idle_since > GONE_S and asker is not None and asker.poll() is not None:
                return self.stage.host.swap()
            time.sleep(POLL_S)
        return self.stage.host.swap()

    def _await_exit(self) -> None:
        """Have the end of the target's server noted, once it runs."""
        servers = [pid for pid, _, line in self.stage.host.processes(unit_of(self.row.target)) if SERVER in line]
        with contextlib.suppress(ProcessLookupError, IndexError):
            handle = os.pidfd_open(servers[0])
            self._awaits_exit = False
            threading.Thread(target=self._note_exit, args=(handle,), daemon=True).start()

    def _note_exit(self, handle: int) -> None:
        select.select([handle], [], [])
        self.exited_at = time.monotonic()
        os.close(handle)

    def began(self, phase: str) -> float | None:
        """When a phase (or an outcome) was first seen."""
        return next((when for when, name in self.events if name == phase), None)


def ask(stage: Stage, row: Row) -> subprocess.Popen[str]:
    """The ssh of whoever asks. One that will be dropped stays to watch, as a person does."""
    ask = f"swapgate ask {stage.bed.releases.get(row.target, row.target)} --by matrix"
    ask += f" --confirm-within {row.confirm_within_s}" if row.confirm_within_s else ""
    stays = any("drop-ssh" in actions for actions in row.at.values())
    script = f"{ask} && while sleep 0.5; do swapgate status > /dev/null; done" if stays else ask
    argv = [*stage.host.ssh_argv(shared=not stays), *(["-tt"] if stays else []), "--", script]
    if stays:
        argv.remove("-tt")
        argv.insert(1, "-tt")
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _look(host: Host, row: Row, since: float) -> dict[str, Any]:
    unit = unit_of(row.target or row.serves)
    patterns = [pattern for pattern in (row.moment.partition("line:")[2], row.noticed) if pattern]
    more = f" {unit} {since:.3f} {shlex.join(patterns)}" if patterns else ""
    done = host.run(f"python3 /opt/faults/look.py {PORT}{more}", limit_s=30)
    try:
        seen: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        return {"unreachable": done.stderr or "no answer"}
    return seen


def _end_misses(row: Row, stage: Stage, seen: dict[str, Any]) -> list[str]:
    """What is not as it must be when all is over, whatever the outcome."""
    if "unreachable" in seen:
        return [f"the host does not answer: {seen['unreachable']}"]
    misses = []
    good = (seen["status"].get("last_good") or {}).get("unit")
    serves = (
        row.serves
        if row.serves != "last good"
        else stage.bed.label_of((seen["status"].get("last_good") or {}).get("release", ""))
    )
    unit = unit_of(serves) if serves else None
    if unit:
        if stage.host.complete() is None:
            misses.append(f"no completion on port {PORT}, expected one by {unit}")
        if list(seen["holders"]) != [unit]:
            misses.append(f"port {PORT} is held by {seen['holders'] or 'nobody'}, expected {unit} alone")
        if seen["active"] != [unit]:
            misses.append(f"active units: {seen['active']}, expected {unit} alone")
        if not seen["installed_ok"] and good == unit and row.expect != ("refused",):
            misses.append(f"the installed {unit} is not that of the last good release")
    if row.loose:
        return misses
    expected = unit or beds.UNIT["baseline"]
    if seen["enabled"] != [expected]:
        misses.append(f"enabled: {seen['enabled']}, expected {expected} alone")
    if not seen["lock_free"]:
        misses.append("the lock is still held")
    if seen["engine_strays"]:
        misses.append(f"processes left behind: {seen['engine_strays']}")
    return misses


def settle(row: Row, stage: Stage, since: float, limit_s: float) -> tuple[dict[str, Any], list[str]]:
    """Look until all is as it must be, for at most that long."""
    end = time.monotonic() + limit_s
    while True:
        seen = _look(stage.host, row, since)
        misses = _end_misses(row, stage, seen)
        if not misses or time.monotonic() > end:
            return seen, misses
        time.sleep(0.5)


def _moment(row: Row, follower: Follower, asked: float, seen: dict[str, Any]) -> float:
    """When the fault happened."""
    kind, _, more = row.moment.partition("+")
    line_at = seen.get("lines_at", {}).get(row.moment.partition("line:")[2])
    if line_at is not None:
        return float(line_at)
    if row.moment == "exit" and follower.exited_at is not None:
        return follower.exited_at
    if kind in ("start", "probe", "soak", "confirm", "stop") and follower.began(kind):
        return (follower.began(kind) or asked) + float(more or 0)
    if follower.acted_at is not None:
        return follower.acted_at
    return asked


def _outcome(row: Row, swap: dict[str, Any], asker: subprocess.Popen[str] | None, answered: bool) -> tuple[str, str]:
    """(outcome, all that is said about its cause)."""
    if not row.target:
        return "recovered" if answered else "failed", ""
    if swap.get("outcome"):
        # Without the lines around: the record must say it, not merely quote a page in which it stands.
        causes = {key: swap.get(key) or {} for key in ("cause", "rollback_cause")}
        told: dict[str, Any] = {
            key: {part: text for part, text in cause.items() if part != "context" and text}
            for key, cause in causes.items()
        }
        told["problems"] = (swap.get("preflight") or {}).get("problems") or []
        return str(swap["outcome"]), json.dumps(told, ensure_ascii=False)
    if asker is not None and asker.poll() not in (None, 0):
        return "refused", (asker.stderr.read() if asker.stderr else "").strip()
    return "none", ""


def attempt(bed: beds.Bed, row: Row) -> Result:
    """One try of one row. Raises Missed when the fault did not land in its phase, HostError when the bed is broken."""
    result = Result(row.id, row.fault, row.ref, row.simulated, " or ".join(row.expect))
    begun = time.monotonic()
    bed.reset()
    stage = Stage(bed)
    client = None
    try:
        if row.knobs:
            stage.act("knobs " + json.dumps(row.knobs))
        if row.restart:
            stage.host.sh("systemctl restart vllm-tiny.service", limit_s=60)
        for action in row.before:
            stage.act(action)
        client = Client(bed.host)
        asked = result.asked_at = time.monotonic()
        follower = Follower(row, stage, client)
        swap: dict[str, Any] = {}
        if row.target:
            stage.asker = ask(stage, row)
            swap = follower.follow()
            if follower.pending and swap.get("outcome") != "refused":
                asked_how = stage.asker.poll() if stage.asker is not None else None
                raise Missed(
                    f"never came to {[one[0] for one in follower.pending]}; "
                    f"phases {[name for _, name in follower.events]}, "
                    f"ask ended with {asked_how}"
                )
        client.asking = True
        stage.phase = ""
        for action in row.at.get("end", ()):
            moment = stage.act(action)
            follower.acted_at = follower.acted_at or moment
        # After a wrong outcome the end will not come right by waiting.
        hope = not row.target or swap.get("outcome") is None or swap["outcome"] in row.expect
        seen, end_misses = settle(row, stage, asked, row.settle_s if hope else 1.0)
        _judge(row, stage, follower, asked, swap, seen, end_misses, client, result)
    finally:
        if client is not None:
            client.close()
        if stage.asker is not None and stage.asker.poll() is None:
            stage.asker.kill()
        if stage.asker is not None:
            stage.asker.communicate()
        if not bed.host.box.running():
            bed.host.power_on()
        for action in row.after:
            stage.act(action)
        if row.restart or row.after:
            bed.reset(cold=True)
    result.seconds = round(time.monotonic() - begun, 1)
    return result


def _judge(
    row: Row,
    stage: Stage,
    follower: Follower,
    asked: float,
    swap: dict[str, Any],
    seen: dict[str, Any],
    end_misses: list[str],
    client: Client,
    result: Result,
) -> None:
    result.misses += end_misses
    result.said = [text.strip()[-600:] for text in stage.said]
    answered = stage.host.complete() is not None
    result.outcome, told = _outcome(row, swap, stage.asker, answered)
    if not row.target:
        told = json.dumps({"problem": seen.get("status", {}).get("problem"), "restarts": seen.get("restarts")})
    cause = swap.get("cause") or {}
    door = told if result.outcome == "refused" and not cause else seen.get("status", {}).get("problem")
    result.cause = str(cause.get("root_cause") or cause.get("what") or door or "")[:300]
    result.phases = [name for _, name in follower.events]
    if result.outcome not in row.expect:
        result.misses.insert(0, f"outcome {result.outcome}, expected {result.expected}; told: {told[:600]}")
    if row.cause:
        result.cause_named = bool(re.search(row.cause, told, re.IGNORECASE | re.DOTALL))
    if result.cause_named is False:
        result.misses.append(f"the cause does not name the fault: expected /{row.cause}/ in {told[:600]}")
    if row.says and not re.search(row.says, "\n".join(stage.said), re.IGNORECASE | re.DOTALL):
        result.misses.append(f"expected /{row.says}/ in what the actions said: {stage.said}")
    phases = {*result.phases, *(one["name"] for one in swap.get("phases", []))}
    result.false_ready = row.never_ready and (bool(phases & set(READY_PHASES)) or swap.get("outcome") == "swapped")
    if result.false_ready:
        result.misses.append("false ready: the target was taken for ready")
    if swap.get("outcome") in ("swapped", "unchanged", "rolled_back", "recovered") and row.serves and not answered:
        result.false_ready = True
    for name, spent in ((one["name"], one["seconds"]) for one in swap.get("phases", [])):
        if not -0.01 <= spent <= row.limit_s:
            result.misses.append(f"phase {name} took {spent} s by the record")
    moment = _moment(row, follower, asked, seen)
    own = ("line:", "exit") if result.outcome == "rolled_back" else ()
    if moment == asked and row.moment.startswith(own):
        result.misses.append(f"the fault's own moment, {row.moment}, was not seen")
    ends = [when for when, name in follower.events if name in ("rollback-stop", NOTICED) or name in row.expect]
    noticed = next((when for when in sorted(ends) if when >= moment - 0.6), None)
    if noticed is not None and result.outcome != "swapped":
        result.noticed_s = round(max(0.0, noticed - moment), 1)
    if row.noticed:
        seen_at = seen.get("lines_at", {}).get(row.noticed)
        result.noticed_s = round(seen_at - moment, 1) if seen_at is not None else None
        if seen_at is None:
            result.misses.append(f"no line of the journal matches /{row.noticed}/")
    power = any(action in ("power-cut", "reboot") for actions in row.at.values() for action in actions)
    if row.serves and result.outcome not in ("swapped", "unchanged"):
        stopped = follower.began("stop") is not None or not row.target or power
        result.answered_s = _gap_end(moment, client.good) if stopped else 0.0


def _gap_end(moment: float, good: list[float]) -> float | None:
    """Seconds from a moment to the first answer after the longest silence since then; None when none came."""
    times = [moment, *[when for when in good if when > moment]]
    gaps = [(later - earlier, later) for earlier, later in zip(times, times[1:], strict=False)]
    if not gaps:
        return None
    longest, end = max(gaps)
    return round(end - moment, 1) if longest > SILENCE_S else 0.0


def run(bed: beds.Bed, row: Row) -> Result:
    """A row, tried again when its fault came too late for its phase."""
    told = ""
    begun = time.monotonic()
    for number in range(1, TRIES + 1):
        try:
            result = attempt(bed, row)
        except Missed as error:
            told = str(error)
            continue
        result.tries = number
        return result
    lost = Result(row.id, row.fault, row.ref, row.simulated, " or ".join(row.expect), tries=TRIES)
    lost.misses = [f"the fault could not be injected in {TRIES} tries: {told}"]
    lost.seconds = round(time.monotonic() - begun, 1)
    with contextlib.suppress(AttributeError):
        lost.outcome = "none"
    return lost
