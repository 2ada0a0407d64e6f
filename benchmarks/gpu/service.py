"""One supervised engine as systemd would run it: own environment, notify socket, log, signals, exit code."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

from bed import Bed

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "collections"))

from ansible_collections.swapgate.core.plugins.host_program import engine_api  # noqa: E402
from ansible_collections.swapgate.core.plugins.module_utils import processes, records  # noqa: E402

JsonDict = dict[str, Any]
TICK_S = 0.1
SNAPSHOT_S = 0.5
# A snapshot is kept when it says something new, or after this long.
KEEP_S = 3.0
WATCHDOG_S = 20


def alive(pid: int) -> bool:
    """Whether the process is there and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def command_of(pid: int) -> str:
    """The command line of a process, at most 120 characters."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
        return words.decode("utf-8", "replace").strip()[:120]
    return ""


class Notified:
    """The service manager's side of the notify socket."""

    def __init__(self, path: Path, started: float) -> None:
        self.path, self.started = path, started
        self.messages: list[tuple[float, str]] = []
        self.counts: dict[str, int] = {}
        self.watchdog_at: list[float] = []
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        last_status = ""
        while True:
            try:
                text = self._socket.recv(8192).decode("utf-8", "replace")
            except OSError:
                return
            at = round(time.monotonic() - self.started, 1)
            for line in text.splitlines():
                key, _, value = line.partition("=")
                self.counts[key] = self.counts.get(key, 0) + 1
                if key == "WATCHDOG":
                    self.watchdog_at.append(at)
                if key in ("READY", "STOPPING"):
                    self.messages.append((at, line))
                # One status a phase: "loading NAME: PHASE 12 %, ..."
                head = " ".join(value.split()[:3])
                if key == "STATUS" and head != last_status:
                    last_status = head
                    self.messages.append((at, line))

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        self.path.unlink(missing_ok=True)


class Stream(threading.Thread):
    """One streamed greedy completion of ``tokens`` tokens in a thread of its own; see ``result``."""

    def __init__(self, variant: JsonDict, tokens: int) -> None:
        super().__init__(daemon=True)
        self.variant, self.tokens = variant, tokens
        self.result: JsonDict = {"chunks": 0, "finish_reason": None, "error": None, "seconds": None, "text": ""}

    def run(self) -> None:
        """Ask and count."""
        body = {
            "model": self.variant["model"]["served_name"],
            "prompt": "Count from one upwards: 1, 2, 3, 4,",
            "max_tokens": self.tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        began = time.monotonic()
        connection = http.client.HTTPConnection(self.variant["bind"], self.variant["port"], timeout=120)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                self.result["error"] = f"status {answer.status}"
            for raw in answer:
                if not raw.startswith(b"data: {"):
                    continue
                choice = json.loads(raw[6:])["choices"][0]
                self.result["chunks"] += 1
                self.result["text"] = (self.result["text"] + choice["text"])[:80]
                self.result["finish_reason"] = choice.get("finish_reason") or self.result["finish_reason"]
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError) as error:
            self.result["error"] = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
            self.result["seconds"] = round(time.monotonic() - began, 2)


class Service:
    """A run of the supervisor over one variant. All times are seconds since its start."""

    # Those that were not closed: whoever is told to end must not leave an engine behind.
    running: ClassVar[list[Service]] = []

    def __init__(self, bed: Bed, variant: JsonDict, log: Path) -> None:
        self.bed, self.variant, self.log = bed, variant, log
        bed.install(variant)
        self.load_file = bed.layout.unit_runtime(variant["unit"]) / "load.json"
        self.load_file.unlink(missing_ok=True)
        self.started = time.monotonic()
        self.snapshots: list[JsonDict] = []
        self.exit_code: int | None = None
        self.exited_at: float | None = None
        self.members: dict[int, str] = {}
        self.notified = Notified(bed.root / f"notify-{variant['name']}.sock", self.started)
        environment = {
            **bed.environment(),
            **variant["env"],
            "NOTIFY_SOCKET": str(self.notified.path),
            "WATCHDOG_USEC": str(WATCHDOG_S * 1_000_000),
        }
        words = [sys.executable, str(Path(__file__).with_name("supervise.py")), str(bed.root), variant["name"], "--"]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [*words, *variant["argv"]], stdout=out, stderr=subprocess.STDOUT, env=environment, cwd="/"
            )
        self.running.append(self)
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def now(self) -> float:
        """Seconds since the start."""
        return round(time.monotonic() - self.started, 2)

    # --- following -------------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        looked = 0.0
        while self.process.poll() is None:
            time.sleep(TICK_S)
            if time.monotonic() - looked >= SNAPSHOT_S:
                looked = time.monotonic()
                self.look()
        self.exit_code, self.exited_at = self.process.returncode, self.now()
        self.look()

    def look(self) -> None:
        """Keep what load.json and the process tree say now."""
        report = records.read_if_there(self.load_file)
        if report is None:
            return
        load = report["load"]
        row = {
            "at_s": self.now(),
            "state": report["state"],
            "phase": load["phase"],
            "percent": load["percent"],
            "remaining_s": load["remaining_s"],
            "remaining_from": load["remaining_from"],
            "detail": load["detail"],
            "stalled": load["stalled"],
        }
        last = self.snapshots[-1] if self.snapshots else None
        new = last is None or (last["state"], last["phase"], last["detail"]) != (
            row["state"],
            row["phase"],
            row["detail"],
        )
        if new or (row["state"] == "loading" and row["at_s"] - last["at_s"] >= KEEP_S):  # type: ignore[index]
            self.snapshots.append(row)
        for pid in processes.descendants(self.process.pid):
            self.members[pid] = command_of(pid) or self.members.get(pid, "")

    def report(self) -> JsonDict:
        """The supervisor's last load.json."""
        return records.read_if_there(self.load_file) or {}

    def wait(self, until: Callable[[JsonDict], bool], limit_s: float) -> bool:
        """Wait until ``until`` holds of load.json, the supervisor ended, or ``limit_s`` passed; whether it holds."""
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            report = self.report()
            if report and until(report):
                return True
            if self.process.poll() is not None:
                return bool(until(self.report()))
            time.sleep(TICK_S)
        return False

    def ready(self, limit_s: float) -> bool:
        """Wait for READY."""
        return self.wait(lambda report: report.get("state") == "ready", limit_s)

    def wait_exit(self, limit_s: float) -> bool:
        """Wait for the end of the supervisor; past the limit everything of it is killed and False returned."""
        self._thread.join(limit_s)
        if not self._thread.is_alive():
            return True
        for pid in [self.process.pid, *processes.descendants(self.process.pid)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._thread.join(10)
        return False

    def engine_core(self) -> int | None:
        """The pid of the engine core: by the title that it gives itself, or, where it gives none, as the process that
        the API server spawned."""
        found = {pid: command_of(pid) for pid in processes.descendants(self.process.pid)}
        for word in ("EngineCore", "spawn_main"):
            for pid, command in found.items():
                if word in command:
                    return pid
        return None

    # --- ending ----------------------------------------------------------------------------------------------------

    def end(self, number: signal.Signals, pid: int, limit_s: float) -> JsonDict:
        """Send a signal to ``pid``, watch how the service goes; times in seconds since the signal."""
        self.look()
        sent = time.monotonic()
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            return {"signal": number.name, "error": f"pid {pid} was gone already", "exit_code": self.process.poll()}
        last_answer = first_refusal = None
        members_gone: float | None = None
        while time.monotonic() - sent < limit_s:
            since = round(time.monotonic() - sent, 2)
            if self._healthy():
                last_answer, first_refusal = since, None
            elif first_refusal is None:
                first_refusal = since
            # Not those that are no engine: the supervisor's own children are all engine.
            if not any(alive(member) for member in self.members):
                members_gone = since
            if self.process.poll() is not None and members_gone is not None:
                break
            time.sleep(TICK_S)
        in_time = self.wait_exit(max(0.1, limit_s - (time.monotonic() - sent)))
        return {
            "signal": number.name,
            "sent_to": command_of(pid) or ("supervisor" if pid == self.process.pid else "process of the engine"),
            "health_last_200_after_s": last_answer,
            "health_refused_after_s": first_refusal,
            "processes_gone_after_s": members_gone,
            "supervisor_gone_after_s": round((self.exited_at or self.now()) - (sent - self.started), 2),
            "in_time": in_time,
            "exit_code": self.exit_code,
        }

    def _healthy(self) -> bool:
        try:
            engine_api.request(self.variant["bind"], self.variant["port"], "GET", "/health", limit_s=0.5)
        except engine_api.EngineError:
            return False
        return True

    def summary(self) -> JsonDict:
        """What was seen of the run."""
        last = self.report()
        return {
            "variant": self.variant["name"],
            "argv": self.variant["argv"][1:],
            "ready_after_s": last.get("ready_after_s"),
            "state": last.get("state"),
            "phases": (last.get("load") or {}).get("phases"),
            "changes": last.get("changes"),
            "typical_load_s": last.get("typical_load_s"),
            "engine_exit": last.get("exit"),
            "failure": last.get("failure"),
            "exit_code": self.exit_code,
            "exited_at_s": self.exited_at,
            "snapshots": self.snapshots,
            "notified": {
                "messages": self.notified.messages,
                "counts": self.notified.counts,
                "watchdog_at_s": self.notified.watchdog_at,
            },
            "processes": sorted(set(self.members.values())),
        }

    def close(self) -> None:
        """End whatever is left, an engine without its supervisor too, and the socket."""
        if self.process.poll() is None:
            self.wait_exit(0.1)
        for pid, command in self.members.items():
            if alive(pid) and command and command_of(pid) == command:
                os.kill(pid, signal.SIGKILL)
        self.notified.close()
        self.running.remove(self)
