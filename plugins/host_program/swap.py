"""One swap: from the variant that serves to another release, or back. The only place that starts or stops an engine.

    preflight (the old variant serves) -> way back -> stop -> install -> free -> start -> watch -> probe -> soak
    [-> confirm] -> commit; any failure after the stop: roll back, and prove that the last good variant answers

Every step first writes its name into the state file, so that whatever kills the swap, `settle` knows where it was.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import subprocess
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any, Callable

from ..module_utils import diagnosis, identity, processes, progress, records, signatures, units
from ..module_utils.text import SHOWN, printable
from . import collective, collective_check, engine_api, gpus, jobs, preflight, shared_memory, systemd
from .installed import active_units, api_key, data_file, managed_units, managed_variants, service_user

JsonDict = dict[str, Any]

POLL_S = 0.25
# Of a stop: it is without service, and mostly short.
STOP_POLL_S = 0.05
# How often the supervisor's own word on a load is looked at: a file, and much cheaper than systemd.
LOAD_POLL_S = 0.05
# For the metrics of a server, between two looks at a unit.
LOOK_LIMIT_S = 1.0
# Beyond the unit's own limits, which systemd enforces.
GRACE_S = 30.0
PROBE_LIMIT_S = 120.0
# For a port that a process of somebody else took while the last good variant has to come back.
PORT_PATIENCE_S = 3600.0
SOAK_PROBE_EVERY_S = 5.0
# A probe of the soak may take this many times what the first one took, and never less than the floor.
SOAK_PROBE_FACTOR = 3.0
SOAK_PROBE_FLOOR_S = 10.0
# One failed probe in a soak may be a busy moment; two in a row are a fault.
SOAK_FAILURES = 2
# For the all-reduce before a load, once its ranks have imported torch.
LINKS_LIMIT_S = 60.0
# While a person decides, an engine whose tokens stand still is asked this often.
CONFIRM_PROBE_EVERY_S = 15.0
# After one probe without an answer, or tokens that stand still under load: a long prompt must not look like a hang.
CONFIRM_LAST_PROBE_S = 45.0


class SwapFailed(Exception):
    """A step that ended the swap. ``cause`` is a CAUSE of records."""

    def __init__(self, what: str, kind: str = "unknown", **more: Any) -> None:
        super().__init__(what)
        self.cause: JsonDict = {
            "what": printable(what, 4 * SHOWN),  # parts of it are an engine's or a log's words
            "class": kind,
            "phase": None,
            "root_cause": None,
            "signature": None,
            "remedy": None,
            "context": [],
        }
        self.cause.update({key: value for key, value in more.items() if key in self.cause})


class Swap:
    """One swap and its record in the state file."""

    def __init__(self, layout: records.Layout, state: JsonDict, say: Callable[[str], None]) -> None:
        self.layout = layout
        self.state = state
        self.say = say
        self._phase_started = time.monotonic()
        self._asked_unix = time.time()
        self._probe_s = 0.0
        # What the target stood on when the preflight looked at it.
        self._looked_at: JsonDict = {}
        # On the way back the service comes before its record.
        self._may_lose_record = False

    # --- the record ------------------------------------------------------------------------------------------------

    @property
    def swap(self) -> JsonDict:
        """The SWAP of the state file."""
        swap: JsonDict = self.state["swap"]
        return swap

    def save(self) -> None:
        """Write the state file."""
        try:
            records.write_json(self.layout.state, self.state, records.PRIVATE)
        except OSError as error:
            if not self._may_lose_record:
                raise
            self.say(f"the state file cannot be written: {error}")

    def phase(self, name: str) -> None:
        """Enter a phase: the file knows before anything is done."""
        self._close_phase()
        self.swap["phase"] = name
        self.swap["phase_since_unix"] = time.time()
        self.save()
        self.say("phase: " + name)

    def _close_phase(self) -> None:
        now = time.monotonic()
        if self.swap["phase"]:
            self.swap["phases"].append({"name": self.swap["phase"], "seconds": round(now - self._phase_started, 2)})
        self._phase_started = now

    def end(self, outcome: str, cause: JsonDict | None = None) -> None:
        """Close the record with one of records.OUTCOMES."""
        self._close_phase()
        if cause is not None:
            self.swap["cause"] = cause
        self.swap.update(phase=None, outcome=outcome, ended_unix=time.time())
        self.save()
        try:
            records.append_history(self.layout, self.swap)
        except OSError as error:
            self.say(f"the history cannot be written: {error}")
        for line in progress.outcome(self.swap):
            self.say(line)

    # --- steps -----------------------------------------------------------------------------------------------------

    def install(self, release: str) -> JsonDict:
        """Put a release's unit and data in place, and say anew which units exclude each other."""
        variant = preflight.load_release(self.layout, release)
        folder = self.layout.release(release)
        wanted = {self.layout.units / variant["unit"]: (folder / variant["unit"]).read_text(encoding="utf-8")}
        records.write_json(self.layout.data(variant["unit"]), variant)
        known = managed_variants(self.layout)
        if variant["unit"] not in [one["unit"] for one in known]:
            known.append(variant)
        for unit, others in units.exclusions(known).items():
            dropin = self.layout.units / (unit + ".d") / preflight.EXCLUSION_DROPIN
            wanted[dropin] = units.exclusion_dropin(others)
        changed = {
            file: text for file, text in wanted.items() if not file.exists() or file.read_text(encoding="utf-8") != text
        }
        for file, text in changed.items():
            records.write_atomic(file, text)
        # Something may have been written, and the writer killed, before systemd read it.
        if changed or systemd.stale([one["unit"] for one in known]):
            systemd.systemctl("daemon-reload")
        return variant

    def tell_systemd(self) -> None:
        """systemd's own picture of what starts at boot follows the links, once the outcome is on record."""
        try:
            systemd.systemctl("daemon-reload")
        except systemd.SystemdError as error:
            self.say(f"systemd does not know yet what starts at boot: {error}")

    def end_job(self) -> None:
        """End a measuring job, so that the drain is not spent on its requests; its own record says why."""
        why = "it was ended by a swap to '{}', asked for by {}".format(self.swap["to"]["variant"], self.swap["by"])
        try:
            job = jobs.end(self.layout, why)
        except (OSError, systemd.SystemdError) as error:  # a job must not keep a swap from its way
            self.say(f"a measuring job could not be ended: {error}")
        else:
            if job:
                self.say("ended a {kind} job by {by}".format(**job))

    def stop_all(self, limit_s: float) -> None:
        """Stop every engine unit that is up, and count its streams. A stop that ends `failed` is still a stop."""
        running = active_units(self.layout)
        if running:
            systemd.systemctl("stop", "--no-block", *running)
        deadline = time.monotonic() + limit_s
        streams: float | None = None
        while active_units(self.layout):
            if time.monotonic() > deadline:
                raise SwapFailed(
                    "{} is not gone {:.0f} s after the stop was asked".format(
                        ", ".join(active_units(self.layout)), limit_s
                    ),
                    "host",
                )
            streams = self._running_requests(streams)
            time.sleep(STOP_POLL_S)
        if running:
            systemd.systemctl("reset-failed", *running, check=False)
        if streams is not None and self.swap["streams"] is not None:
            self.swap["streams"]["lost"] = int(streams)

    def _running_requests(self, before: float | None) -> float | None:
        """Requests running or waiting on whatever serves; ``before`` when nobody answers any more."""
        for variant in managed_variants(self.layout):
            if all(holder.unit != variant["unit"] for holder in processes.port_holders(variant["port"])):
                continue
            load = engine_api.load(variant["bind"], variant["port"], LOOK_LIMIT_S)
            if load is not None:
                return (load["running"] or 0.0) + (load["waiting"] or 0.0)
        return before

    @staticmethod
    def _tokens(variant: JsonDict) -> float | None:
        """Every token that the variant's server has worked on so far; None where it does not tell."""
        return (engine_api.load(variant["bind"], variant["port"], LOOK_LIMIT_S) or {}).get("tokens")

    def wait_free(self, variant: JsonDict, patient: bool = False) -> None:
        """Wait until the port and every GPU of the variant are free; name who holds them when they do not get so.

        Whatever is left of an engine's unit holds its memory until it is gone, be it too little to count as busy.
        ``patient`` on the way back: a port that somebody took is waited for, since there is no service without it.
        """
        begun = time.monotonic()
        deadline = begun + variant["free_timeout_s"]
        said = ""
        watch = gpus.FreeWatch(self.layout, variant)
        while True:
            taken = [str(holder) for holder in processes.port_holders(variant["port"])]
            thief = ["port {} is held by {}.".format(variant["port"], holder) for holder in taken]
            held = [f"{process} is not gone." for process in processes.members(managed_units(self.layout))]
            held += watch.blocked(time.monotonic())
            blocked = thief + held
            if not blocked:
                if said:
                    self.swap["waits_for"] = None
                return
            if patient and thief and not held and time.monotonic() < begun + PORT_PATIENCE_S:
                if " ".join(thief) != said:
                    said = " ".join(thief)
                    self.swap["waits_for"] = said
                    self.save()
                    self.say(f"{said} There is no service until it lets go. End it, and the way back goes on.")
                if self._left_to_boot():
                    raise SwapFailed("the host goes down", "host")
                deadline = time.monotonic() + variant["free_timeout_s"]
                time.sleep(1.0)
                continue
            if watch.hopeless:
                raise SwapFailed("the GPUs never get free ({}): {}".format(watch.hopeless, " ".join(blocked)), "host")
            if time.monotonic() > deadline:
                raise SwapFailed(
                    "not free after {} s: {}".format(variant["free_timeout_s"], " ".join(blocked)),
                    "host",
                    remedy="End what holds it, then run the deploy again.",
                )
            time.sleep(POLL_S)

    def prove_links(self, release: str) -> None:
        """An all-reduce over the GPUs that are free now: a hang costs a minute here, and a whole load after it."""
        report = collective_check.check(self.layout, release, LINKS_LIMIT_S)
        self.say("links: {verdict}: {what}".format(**report))
        if report["verdict"] in collective.FAULTS:
            what = "the links between the GPUs: {verdict}: {what}".format(**report)
            raise SwapFailed(what, "host", remedy=report["remedy"])

    def start(self, variant: JsonDict) -> None:
        """Ask for the start; the wait is `watch`."""
        unit = variant["unit"]
        systemd.systemctl("reset-failed", unit, check=False)
        with contextlib.suppress(OSError):  # what cannot be removed is no reason to stay without service
            records.remove(self.layout.unit_runtime(unit) / "load.json")
        self._asked_unix = time.time()
        systemd.systemctl("start", "--no-block", unit)

    def watch(self, variant: JsonDict, patient: bool = False) -> None:
        """Until the unit is active, or the first sign that it will not be.

        ``patient`` lets systemd try again as often as the unit's start limit allows: on the way back there is nothing
        better to wait for.
        """
        unit = variant["unit"]
        deadline = time.monotonic() + variant["load_timeout_s"] * (3 if patient else 1) + GRACE_S
        seen_running = False
        asked = time.monotonic()
        while True:
            now = systemd.show(unit, "ActiveState", "SubState", "Result", "NRestarts", "Job")
            active, sub = now["ActiveState"], now["SubState"]
            if active == "active":
                return
            if seen_running and active == "inactive":
                raise SwapFailed(f"{unit} was stopped by somebody while it loaded", "operator")
            if active == "failed" or (sub == "auto-restart" and not patient):
                raise self.explain(variant, "{} did not start (result {})".format(unit, now["Result"]))
            if now["NRestarts"] not in ("", "0") and not patient:
                raise self.explain(variant, f"{unit} died and was restarted while it loaded")
            seen_running = seen_running or active == "activating"
            if not seen_running and not now.get("Job", "").strip("0") and time.monotonic() - asked > GRACE_S:
                raise self.explain(variant, f"{unit} was asked to start and stayed {active}")
            if time.monotonic() > deadline:
                raise self.explain(variant, "{} is not ready after {} s".format(unit, variant["load_timeout_s"]))
            self._pause(unit)

    def _pause(self, unit: str) -> None:
        """Until systemd is worth asking again: for one poll, or until the supervisor says that the load is over."""
        end = time.monotonic() + POLL_S
        while time.monotonic() < end:
            time.sleep(LOAD_POLL_S)
            report = records.read_load(self.layout, unit)
            if report and report["state"] != "loading":
                return

    def explain(self, variant: JsonDict, what: str) -> SwapFailed:
        """A failure with what the supervisor found out about it."""
        report = records.read_load(self.layout, variant["unit"]) or {}
        found = report.get("failure")
        if not found:  # the supervisor itself did not get that far: systemd's own lines say why
            known = signatures.load_signatures(records.read_json(self.layout.signatures))
            found = diagnosis.diagnose(systemd.journal(variant["unit"], self._asked_unix), known)
        failed = SwapFailed(": ".join(filter(None, (what, found.get("what")))), found.get("class") or "unknown")
        for key in ("root_cause", "signature", "remedy", "context"):
            if found.get(key):
                shown = found[key]
                failed.cause[key] = [printable(one) for one in shown] if key == "context" else printable(shown)
        return failed

    def probe(self, variant: JsonDict, limit_s: float = PROBE_LIMIT_S) -> str:
        """One greedy answer by a process of this very unit; returns its text."""
        holders = processes.port_holders(variant["port"])
        foreign = [str(holder) for holder in holders if holder.unit != variant["unit"]]
        if foreign or not holders:
            raise SwapFailed(
                "port {} is answered by {}, expected a process of {}".format(
                    variant["port"], ", ".join(foreign) or "nobody", variant["unit"]
                ),
                "host",
            )
        try:
            answer = engine_api.complete(
                variant["bind"],
                variant["port"],
                variant["model"]["served_name"],
                api_key=api_key(self.layout),
                limit_s=limit_s,
            )
        except engine_api.EngineError as error:
            raise self.explain(variant, f"the engine gives no answer: {error}") from error
        if not answer.strip():
            raise SwapFailed("the answer to the fixed prompt is empty", "model")
        self._compare_answer(variant, answer)
        return answer

    def _compare_answer(self, variant: JsonDict, answer: str) -> None:
        """A model that gave an answer before must begin it alike: garbage is a fault, a late near-tie is not."""
        good = self.state["last_good"] or {}
        model = preflight.identity(variant, self.layout)["model"]
        before = good.get("answer")
        if not before or model is None or (good.get("identity") or {}).get("model") != model:
            return
        if answer.split()[:1] != before.split()[:1]:
            raise SwapFailed(
                f"the answer to the fixed prompt is {answer!r}, and this very model answered {before!r} before",
                "config",
                remedy="Look for a wrong quantisation, a broken kernel or another tokenizer.",
            )

    def soak(self, variant: JsonDict) -> None:
        """The unit must stay up and go on answering, at the end as well."""
        end = time.monotonic() + variant["soak_s"]
        failures = 0
        next_probe = time.monotonic() + SOAK_PROBE_EVERY_S
        while True:
            over = time.monotonic() >= end
            self._check_up(variant, "died in its soak")
            if over or time.monotonic() >= next_probe:
                try:
                    self.probe(variant, self._quick_s())
                    if over:
                        return
                    failures = 0
                except SwapFailed:
                    failures += 1
                    if failures >= SOAK_FAILURES:
                        raise
                next_probe = time.monotonic() + SOAK_PROBE_EVERY_S
            time.sleep(min(POLL_S, max(LOAD_POLL_S, end - time.monotonic())))

    def _quick_s(self) -> float:
        """How long a later probe may take, by the first one's pace."""
        return max(SOAK_PROBE_FLOOR_S, SOAK_PROBE_FACTOR * self._probe_s)

    def _check_up(self, variant: JsonDict, how: str) -> None:
        """SwapFailed that says ``how`` unless the unit still runs, never restarted."""
        now = systemd.show(variant["unit"], "ActiveState", "NRestarts", "Result")
        if now["ActiveState"] != "active" or now["NRestarts"] not in ("", "0"):
            hung = ": no token and no answer for the time of its watchdog" if now["Result"] == "watchdog" else ""
            raise self.explain(variant, "{} {} (result {}{})".format(variant["unit"], how, now["Result"], hung))

    def commit(self, variant: JsonDict, release: str, answer: str) -> None:
        """From here on this release is the last good one, and the only one that starts at boot."""
        systemd.enable_only(variant["unit"], managed_units(self.layout))
        self._check_up(variant, "is gone at its commit")
        before = self.state["last_good"]
        self.state["last_good"] = {
            **identity.record(variant),
            "release": release,
            "since_unix": time.time(),
            "answer": answer,
            "identity": preflight.identity(variant, self.layout),
        }
        self.save()
        try:  # what somebody stopped while it was written down is not good
            self._check_up(variant, "is gone at its commit")
        except SwapFailed:
            self.state["last_good"] = before
            raise

    # --- forward and back ------------------------------------------------------------------------------------------

    def bring_up(self, release: str, prefix: str = "") -> str:
        """Install, free, start, watch and probe one release; returns the probe's answer."""
        self.phase(prefix + "install")
        variant = self.install(release)
        self.phase(prefix + "free")
        self.wait_free(variant, patient=bool(prefix))
        if not variant.get("private_shm", True):
            user = service_user(self.layout, variant["unit"])
            shared_memory.remove_stale(pwd.getpwnam(user).pw_uid, self.say)
        if not prefix:
            self._check_unchanged(variant)
            if variant.get("prove_links"):
                self.phase("links")
                self.prove_links(release)
        self.phase(prefix + "start")
        self.start(variant)
        self.phase(prefix + "watch")
        self.watch(variant, patient=bool(prefix))
        self.phase(prefix + "probe")
        asked = time.monotonic()
        answer = self.probe(variant)
        self._probe_s = time.monotonic() - asked
        gone = self.swap["service_lost_s"]
        if gone is not None and self.swap["boot_id"] == boot_id():  # a monotonic clock means nothing after a boot
            self.swap["seconds_without_service"] = round(time.monotonic() - gone, 1)
        return answer

    def stop_old(self) -> None:
        """Stop what serves; from here on a failure means a roll back."""
        self.end_job()
        self.swap["stopped_old"] = True
        self.swap["service_lost_s"] = time.monotonic() if active_units(self.layout) else None
        running = self._running_requests(None)
        self.swap["streams"] = None if running is None else {"running": int(running), "lost": 0}
        self.phase("stop")
        self.stop_all(self._stop_limit_s())

    def _stop_limit_s(self) -> float:
        drains = [variant["drain_timeout_s"] for variant in managed_variants(self.layout)]
        return float(max([*drains, 0])) + 60 + GRACE_S

    def roll_back(self, cause: JsonDict, outcome: str = "rolled_back") -> None:
        """Bring the last good release back and prove that it answers."""
        good = self.state["last_good"]
        self.swap["cause"] = cause
        self._may_lose_record = True
        if self._left_to_boot():
            return
        try:
            self.phase("rollback-stop")
            self.end_job()
            self.stop_all(self._stop_limit_s())
            target = self.swap["to"]["unit"]
            if good is None or good["unit"] != target:
                systemd.systemctl("disable", "--quiet", "--no-reload", target, check=False)
            if good is None:
                self.end("failed", dict(cause, remedy=cause.get("remedy") or "No earlier variant to go back to."))
                self.tell_systemd()
                return
            self.bring_up(good["release"], "rollback-")
            systemd.enable_only(good["unit"], managed_units(self.layout))
            changed = self._changed_below(good, preflight.load_release(self.layout, good["release"]))
            if changed:
                cause = dict(cause, remedy=_and_then(cause.get("remedy"), good["variant"], changed))
        except Exception as error:
            if not self._left_to_boot():
                self.swap["rollback_cause"] = as_cause(error, self.swap["phase"])
                self.end("failed", cause)
            return
        self.end(outcome, cause)
        self.tell_systemd()

    def _left_to_boot(self) -> bool:
        """While the host goes down nothing can be started: the record stays unfinished, and `recover` settles it."""
        down = systemd.going_down()
        if down:
            self.say("the host goes down; the swap is settled at boot")
        return down

    def settle(self, why: str) -> None:
        """End a swap that something cut off: nothing was stopped yet, or it was committed, or it is rolled back."""
        phase = self.swap["phase"]
        cause = SwapFailed(f"{why} in phase {phase}", "unknown", phase=phase).cause
        good = self.state["last_good"]
        if not self.swap["stopped_old"]:
            self.end("refused", cause)
        elif good and good["release"] == self.swap["to"]["release"] and phase == "commit" and self._runs(good["unit"]):
            self.end("swapped")
            self.tell_systemd()
        else:
            self.roll_back(cause, "recovered")

    def run(self, confirm_within_s: float = 0.0) -> None:
        """The whole story; the outcome is in the record. Whatever a step raises, a swap that stopped something goes
        back: an error of our own, or one that an engine's answer provoked, must not end in silence."""
        release = self.swap["to"]["release"]
        try:
            variant = self._before_the_stop(release)
        except Exception as error:
            self.end("refused", as_cause(error, self.swap["phase"]))
            return
        if variant is None:
            self.end("unchanged")
            return
        try:
            self.stop_old()
            answer = self.bring_up(release)
            self.phase("soak")
            self.soak(variant)
            if confirm_within_s:
                self.swap["confirm_within_s"] = confirm_within_s
                self.phase("confirm")
                self.wait_confirmed(variant, confirm_within_s)
            self.phase("commit")
            self.commit(variant, release, answer)
        except Exception as error:
            self.roll_back(as_cause(error, self.swap["phase"]))
            return
        self.end("swapped")
        self.tell_systemd()

    def _before_the_stop(self, release: str) -> JsonDict | None:
        """Everything that can refuse a swap; the variant to swap to, or None when it serves already."""
        self.phase("preflight")
        report = preflight.check(self.layout, release, managed_units(self.layout), self.say)
        self.swap["preflight"] = report
        if not report["ok"]:
            problems = ["{check}: {what}".format(**problem) for problem in report["problems"]]
            raise SwapFailed("; ".join(problems), report["class"] or "config", root_cause=report["problems"][0]["what"])
        variant = preflight.load_release(self.layout, release)
        if self._serves_already(release, variant):
            return None
        self.phase("way back")
        self._check_way_back(release)
        self._looked_at = preflight.identity(variant, self.layout)
        return variant

    def _check_unchanged(self, variant: JsonDict) -> None:
        """The preflight's word is about what it saw: an engine that was upgraded meanwhile is another one."""
        now = preflight.identity(variant, self.layout)
        for part in ("engine", "model", "draft"):
            if self._looked_at.get(part) != now[part]:
                raise SwapFailed(
                    "the {} of '{}' was changed since its preflight".format(part, variant["name"]),
                    "operator",
                    remedy="Let the change end, then run the deploy again.",
                )

    def wait_confirmed(self, variant: JsonDict, limit_s: float) -> None:
        """A person must say that the new variant is wanted, or the old one comes back.

        A variant that dies meanwhile, or gives no answer, goes back at once. One whose tokens move answers others and
        is not asked besides, and a trial variant never: there somebody measures.
        """
        deadline = time.monotonic() + limit_s
        next_probe = time.monotonic() + CONFIRM_PROBE_EVERY_S
        failures = 0
        tokens: float | None = None
        while time.monotonic() < deadline:
            said = records.read_if_there(self.layout.confirmation) or {}
            if said.get("id") == self.swap["id"]:
                if said.get("declined") is None:
                    return
                raise SwapFailed("declined by {by}: {declined}".format(**said), "operator")
            self._check_up(variant, "died while it waited to be confirmed")
            if time.monotonic() >= next_probe and not variant.get("trial"):
                try:
                    before, tokens = tokens, self._tokens(variant)
                    if None in (before, tokens) or tokens == before:
                        self.probe(variant, CONFIRM_LAST_PROBE_S if failures else self._quick_s())
                        tokens = self._tokens(variant)
                    failures = 0
                except SwapFailed:
                    failures += 1
                    if failures >= SOAK_FAILURES:
                        raise
                next_probe = time.monotonic() + (SOAK_PROBE_EVERY_S if failures else CONFIRM_PROBE_EVERY_S)
            time.sleep(POLL_S)
        raise SwapFailed(
            f"nobody confirmed the swap within {limit_s:.0f} s",
            "operator",
            remedy="Swap again and run `swapgate confirm` on the host in time.",
        )

    def _serves_already(self, release: str, variant: JsonDict) -> bool:
        good = self.state["last_good"]
        if not good or good["release"] != release:
            return False
        if not self._runs(variant["unit"]):
            return False
        if self._drifted(release, variant) or not systemd.is_enabled(variant["unit"]):
            return False
        if self._changed_below(good, variant):
            return False
        with contextlib.suppress(SwapFailed):
            self.probe(variant)
            return True
        return False

    @staticmethod
    def _runs(unit: str) -> bool:
        return systemd.show(unit, "ActiveState")["ActiveState"] == "active"

    def _drifted(self, release: str, variant: JsonDict) -> str | None:
        """The installed file that is not the release's any more, if any."""
        pairs = (
            (self.layout.units / variant["unit"], self.layout.release(release) / variant["unit"]),
            (data_file(self.layout, variant["unit"]), self.layout.release(release) / "variant.json"),
        )
        for installed, staged in pairs:
            if not installed.exists():
                return str(installed)
            texts = [file.read_text(encoding="utf-8") for file in (installed, staged)]
            if installed.suffix == ".json":
                with contextlib.suppress(ValueError):
                    texts = [json.dumps(json.loads(text), sort_keys=True) for text in texts]
            if texts[0] != texts[1]:
                return str(installed)
        return None

    def _check_way_back(self, release: str) -> None:
        """Refuse to leave a variant that could not come back."""
        good = self.state["last_good"]
        if good is None:
            return
        name = good["variant"]
        again = f"Deploy '{name}' once more, so that it is proven on what is there now."
        try:
            variant = preflight.load_release(self.layout, good["release"])
        except records.RecordError as error:
            raise SwapFailed(f"the way back is broken: {error}", "host", remedy=again) from error
        for file, kind in ((variant["argv"][0], "host"), (variant["model"]["path"] + "/config.json", "model")):
            if not preflight.within(preflight.MOUNT_LIMIT_S, os.path.dirname(file), partial(os.path.exists, file)):
                raise SwapFailed(
                    f"the way back is broken: {file} of the last good variant '{name}' is gone",
                    kind,
                    remedy=f"Put it back, or deploy '{name}' first.",
                )
        if good["release"] == release:
            return  # what is deployed anew is proven anew
        drifted = self._drifted(good["release"], variant)
        if drifted:
            raise SwapFailed(
                f"{drifted} was edited by hand since '{name}' passed its soak",
                "config",
                remedy=again + " Your edit belongs into group_vars.",
            )
        changed = self._changed_below(good, variant)
        if changed:
            raise SwapFailed(
                f"the way back is not sound: '{name}' last served on another {changed}",
                "host",
                remedy=again,
            )

    def _changed_below(self, good: JsonDict, variant: JsonDict) -> str | None:
        """What a good release stood on (engine, model or driver) and that is another one now, if any."""
        return next(iter(preflight.changed_below(good, variant, self.layout)), None)


def as_cause(error: Exception, phase: str | None) -> JsonDict:
    """Any step's error as a CAUSE."""
    expected = (systemd.SystemdError, records.RecordError, OSError, subprocess.SubprocessError)
    what = str(error) if isinstance(error, expected) and str(error) else repr(error)
    cause = error.cause if isinstance(error, SwapFailed) else SwapFailed(what, "host").cause
    return dict(cause, phase=cause["phase"] or phase)


def _and_then(remedy: str | None, name: str, changed: str) -> str:
    """A remedy, and what to do about a way back that led to something else than what was left."""
    more = (
        f"'{name}' came back on another {changed} than it last served on: deploy it, so that it is proven on this one."
    )
    return f"{remedy} {more}" if remedy else more


def new_swap(to: JsonDict, good: JsonDict | None, owner: str, swap_id: str | None = None) -> JsonDict:
    """A SWAP that has not begun."""
    return {
        "id": swap_id or uuid.uuid4().hex[:12],
        "by": owner,
        "started_unix": time.time(),
        "boot_id": boot_id(),
        "from": good,
        "to": to,
        "phase": None,
        "phase_since_unix": None,
        "phases": [],
        "stopped_old": False,
        "service_lost_s": None,
        "streams": None,
        "seconds_without_service": None,
        "outcome": None,
        "cause": None,
        "rollback_cause": None,
        "ended_unix": None,
        "preflight": None,
        "confirm_within_s": None,
        "because": None,
        "kind": None,
        "changes": None,
    }


def boot_id() -> str:
    """The kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
