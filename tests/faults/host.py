"""The host under test, from outside: SSH, its processes, its power, its files, and the engine's port.

The sandbox shares this machine's kernel: its files can be read and its processes signalled without asking it, which is
what makes a fault land in a phase that lasts some milliseconds. What an operator does goes over SSH.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from scripts import sandbox

REPO = Path(__file__).resolve().parents[2]

# Throwaway hosts share this machine's network: a second run at the same time needs ports of its own.
FIRST_PORT = int(os.environ.get("SWAPGATE_FAULTS_PORT", "8741"))
SSH_PORT = FIRST_PORT - 6000
PORT = FIRST_PORT
OTHER_PORT = FIRST_PORT + 1
SERVED = "tiny"
# In the answer of a server that is no engine of ours: see actions.FOREIGN.
FOREIGN_MARK = "says somebody else"
PROMPT = "The capital of France is"
STATE = "var/lib/swapgate/state.json"
# systemd's own signal for an orderly reboot, as `systemctl reboot` asks for it.
SIGNAL_REBOOT = signal.SIGRTMIN + 5


class HostError(Exception):
    """The host under test did not do what the harness itself needs; the text holds what it said."""


class Host:
    """One running sandbox."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.box = sandbox.load_sandbox(name)
        self._init = self._init_start = 0

    # --- over SSH --------------------------------------------------------------------------------------------------

    def ssh_argv(self, shared: bool = True) -> list[str]:
        """The ssh command up to the remote one; ``shared`` connections cost milliseconds a call."""
        plain: list[str] = sandbox.ssh_argv(self.box)
        if not shared:
            return plain
        path = f"{self.box.control_dir}/faults-%p"
        extra = ["-o", "ControlMaster=auto", "-o", f"ControlPath={path}", "-o", "ControlPersist=60"]
        return [plain[0], *extra, *plain[1:]]

    def run(self, script: str, given: str | None = None, limit_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a line of shell on the host; status 255 also when no answer came within the limit."""
        argv = [*self.ssh_argv(), "--", script]
        try:
            return subprocess.run(
                argv, input=given or "", capture_output=True, text=True, errors="replace", timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(argv, 255, "", f"no answer in {limit_s:.0f} s")

    def sh(self, script: str, given: str | None = None, limit_s: float = 60) -> str:
        """Standard output of a line of shell; HostError when it fails."""
        done = self.run(script, given, limit_s)
        if done.returncode != 0:
            raise HostError(
                f"on {self.name}: `{script}` ended with status {done.returncode}, expected 0:\n"
                f"{done.stdout}{done.stderr}"
                f"Next: scripts/sandbox.py ssh {self.name}"
            )
        return done.stdout

    def write(self, path: str, text: str, mode: str = "0644") -> None:
        """Put a file on the host."""
        self.sh(f"mkdir -p $(dirname '{path}') && cat > '{path}' && chmod {mode} '{path}'", given=text)

    def root(self) -> Path:
        """Its root folder as its own processes see it, what is mounted there included; the bare one while it is off."""
        if not self._init or sandbox.process_start(self._init) != self._init_start:
            carriers = sandbox.container_processes(self.box.pid)
            self._init = carriers[2] if len(carriers) > 2 else 0  # keeper, nspawn, the init inside
            self._init_start = sandbox.process_start(self._init)
        return Path(f"/proc/{self._init}/root") if self._init else self.box.root

    # --- its files -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The state file as it is now, read without asking the host; {} while there is none that can be read."""
        try:
            value = json.loads((self.root() / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def swap(self) -> dict[str, Any]:
        """The swap of the state file; {} when there is none."""
        return self.state().get("swap") or {}

    def load_failed(self, unit: str) -> bool:
        """Whether the supervisor of a unit has said that its load failed."""
        path = self.root() / f"run/swapgate/{unit.removesuffix('.service')}/load.json"
        try:
            return json.loads(path.read_text(encoding="utf-8")).get("failure") is not None
        except (OSError, ValueError, AttributeError):
            return False

    # --- its processes ---------------------------------------------------------------------------------------------

    def processes(self, unit: str = "") -> list[tuple[int, str, str]]:
        """(process id on this machine, command name, command line) of the host's processes, of one unit or all."""
        carriers = sandbox.container_processes(self.box.pid)
        if len(carriers) < 3:
            return []
        inside = os.readlink(f"/proc/{carriers[2]}/ns/pid")
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if os.readlink(entry / "ns/pid") != inside:
                    continue
                if unit and f"/{unit}\n" not in (entry / "cgroup").read_text() + "\n":
                    continue
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
                found.append((int(entry.name), (entry / "comm").read_text().strip(), line))
        return sorted(found)

    def signal(self, unit: str, words: str, number: int) -> list[int]:
        """Signal each process of a unit whose command name or command line holds ``words``; returns whom it hit."""
        hit = []
        for pid, name, line in self.processes(unit):
            if words in name or words in line:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                    hit.append(pid)
        return hit

    # --- its power -------------------------------------------------------------------------------------------------

    def cut_power(self) -> float:
        """Kill every process at once; returns the moment (monotonic s)."""
        moment = time.monotonic()
        sandbox.kill_container(self.box)
        return moment

    def power_on(self) -> None:
        """Boot it again and wait for the end of its start-up."""
        sandbox.end_control_masters(self.box)
        sandbox.remove_cgroups(self.box)
        words = [sys.executable, str(REPO / "scripts/sandbox.py"), "up", self.name]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise HostError(
                f"{self.name} does not boot again: {' '.join(words)} ended with {done.returncode}: {done.stderr}"
            )
        self.box = sandbox.load_sandbox(self.name)

    def begin_reboot(self) -> tuple[float, str]:
        """Ask its init for an orderly reboot at once; returns the moment and the boot id before it."""
        before = (self.sh("cat /proc/sys/kernel/random/boot_id")).strip()
        sandbox.end_control_masters(self.box)
        moment = time.monotonic()
        os.kill(sandbox.container_processes(self.box.pid)[2], SIGNAL_REBOOT)
        return moment, before

    def end_reboot(self, before: str) -> None:
        """Wait until it is up again."""
        sandbox.await_boot(self.box, self.box.running, before)
        sandbox.end_control_masters(self.box)

    # --- the engine ------------------------------------------------------------------------------------------------

    def complete(self, port: int = PORT, limit_s: float = 2.0, tokens: int = 8) -> str | None:
        """The text of one greedy completion, or None when none came in time."""
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=limit_s)
        body = {"model": SERVED, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
        try:
            link.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = link.getresponse()
            text = answer.read()
            if answer.status != http.HTTPStatus.OK:
                return None
            told = str(json.loads(text)["choices"][0]["text"]).strip()
            return None if not told or FOREIGN_MARK in told else told
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError):
            return None
        finally:
            link.close()
