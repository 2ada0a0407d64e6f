"""A throwaway host for end-to-end tests: reached over real SSH only, deployed to by the real playbooks.

What serves, boots and is enabled is compared through `Host.picture`: a test that says "nothing has changed" means it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
SANDBOX = [str(BIN / "python"), str(ROOT / "scripts/sandbox.py")]
KNOBS = "/etc/fake_vllm.json"
BASELINE, NGRAM = "vllm-tiny.service", "vllm-tiny-ngram.service"
PROGRESS = re.compile(r"^\s*\S+ \| [a-z0-9_-]+ \| [a-z -]+( \||$)")
# Everything that swapgate puts on a host but the engines' virtualenvs.
WIPE = (
    "systemctl stop swapgate-swap.service 2>/dev/null; systemctl stop 'vllm-*' foreign.service 2>/dev/null; "
    "rm -rf /etc/swapgate /var/lib/swapgate /usr/local/lib/swapgate /usr/local/bin/swapgate /run/swapgate "
    "/etc/systemd/system/vllm-* /etc/systemd/system/multi-user.target.wants/vllm-* /etc/systemd/system/swapgate-* "
    "/etc/systemd/system/*/swapgate-* /etc/fake_vllm.json /var/lib/vllm; "
    "systemctl daemon-reload; systemctl reset-failed"
)


class HostError(AssertionError):
    """The host did not do what a helper of the tests needs; the text holds what it said."""


@dataclass
class Run:
    """A command that ended: its exit code, all it printed, and when each line came (seconds since the start)."""

    code: int
    lines: list[tuple[float, str]]
    seconds: float

    @property
    def text(self) -> str:
        """All lines as one text, for `in`."""
        return "\n".join(line for _, line in self.lines)

    @property
    def flat(self) -> str:
        """The same as running text: Ansible's YAML wraps and indents what it shows, and doubles quotes."""
        return re.sub(r"\s+", " ", self.text).replace("''", "'")

    def progress(self) -> list[tuple[float, str]]:
        """The progress lines `host | variant | phase ...`, each with the second it came."""
        return [(when, line.strip()) for when, line in self.lines if PROGRESS.match(line)]

    def recap(self) -> dict[str, int]:
        """Ansible's counts (ok, changed, failed, ...) over all hosts of its recap."""
        counts: dict[str, int] = {}
        for _, line in self.lines:
            if re.search(r"\bok=\d+ .*changed=\d+", line):
                for key, value in re.findall(r"(\w+)=(\d+)", line):
                    counts[key] = counts.get(key, 0) + int(value)
        if not counts:
            raise HostError(f"no recap in what ansible-playbook printed:\n{self.text[-3000:]}")
        return counts


class Command:
    """A command under way, its output gathered with times."""

    def __init__(self, argv: list[str], environment: Mapping[str, str] | None = None) -> None:
        self.argv = argv
        self.started = time.monotonic()
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            argv,
            cwd=ROOT,
            env={
                **os.environ,
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_NOCOLOR": "1",
                "PYTHONUNBUFFERED": "1",
                "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
                **(environment or {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic() - self.started, line.rstrip("\n")))
        self.process.stdout.close()

    def interrupt(self) -> None:
        """What Ctrl-C in a terminal does: SIGINT to the whole foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait(self, limit_s: float = 600) -> Run:
        """The end. A command that outlives `limit_s` is killed, and that is a failure."""
        try:
            code = self.process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            os.killpg(self.process.pid, signal.SIGKILL)
            self._reader.join(10)
            raise HostError(
                f"{self.argv}: no end after {limit_s:.0f} s; it printed:\n"
                + "\n".join(line for _, line in self.lines)[-3000:]
            ) from error
        self._reader.join(10)
        return Run(code, self.lines, time.monotonic() - self.started)

    def await_line(self, needle: str, limit_s: float = 90) -> float:
        """Wait for a line that holds `needle`; returns the second it came."""
        found: list[float] = []

        def seen() -> bool:
            found.extend(when for when, line in list(self.lines) if needle in line)
            return bool(found) or self.process.poll() is not None

        until(seen, limit_s, f"a line with {needle!r}")
        if not found:
            raise HostError(f"{needle!r} never came; it printed:\n" + "\n".join(line for _, line in self.lines)[-3000:])
        return found[0]


def until(done: Callable[[], Any], limit_s: float, what: str, every_s: float = 0.2) -> Any:
    """Call `done` until it is true; returns what it returned. HostError after `limit_s`."""
    end = time.monotonic() + limit_s
    while True:
        value = done()
        if value:
            return value
        if time.monotonic() > end:
            raise HostError(f"waited {limit_s:.0f} s in vain for {what}")
        time.sleep(every_s)


@dataclass
class Host:
    """One sandbox and the inventory that the tests have of it."""

    name: str
    sandbox: dict[str, Any]
    inventory: Path
    port: int
    releases: dict[str, str] = field(default_factory=dict)

    # --- over SSH --------------------------------------------------------------------------------------------------

    def ssh_argv(self) -> list[str]:
        """The ssh command up to the remote command; one shared connection, so that a call costs milliseconds."""
        options = (
            "StrictHostKeyChecking=no",
            "UserKnownHostsFile=/dev/null",
            "LogLevel=ERROR",
            "ControlMaster=auto",
            f"ControlPath=/run/swapgate-sandbox/e2e-{self.name}-%p",
            "ControlPersist=120",
        )
        flags = [word for option in options for word in ("-o", option)]
        return ["ssh", *flags, "-p", str(self.sandbox["ssh_port"]), "-i", str(self.sandbox["key"]), "root@127.0.0.1"]

    def run(self, script: str, given: str | None = None, limit_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a line of shell on the host; its status is not looked at."""
        return subprocess.run(
            [*self.ssh_argv(), "--", script],
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
            stdin=None if given is not None else subprocess.DEVNULL,
        )

    def sh(self, script: str, given: str | None = None, limit_s: float = 60) -> str:
        """Standard output of a line of shell; HostError when it fails."""
        done = self.run(script, given, limit_s)
        if done.returncode != 0:
            raise HostError(f"`{script}` on {self.name}: exit {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def write(self, path: str, text: str, mode: str = "0644") -> None:
        """Put a file on the host."""
        self.sh(
            f"mkdir -p $(dirname {shlex.quote(path)}) && cat > {shlex.quote(path)} && chmod {mode} {shlex.quote(path)}",
            given=text,
        )

    @contextlib.contextmanager
    def knobs(self, **values: Any) -> Iterator[None]:
        """The fake engine's knobs for every start in this block; tests/fake_vllm/README.md lists them."""
        self.write(KNOBS, json.dumps(values))
        try:
            yield
        finally:
            self.sh(f"rm -f {KNOBS}")

    @contextlib.contextmanager
    def listener(self, answer: str = "{}") -> Iterator[str]:
        """A foreign process on the engine's port that answers every request with 200; yields its command's name."""
        program = (
            "import http.server as h\n"
            "class A(h.BaseHTTPRequestHandler):\n"
            "    def do_GET(self):\n"
            f"        body = {answer.encode()!r}\n"
            "        self.rfile.read(int(self.headers.get('Content-Length') or 0))\n"
            "        self.send_response(200); self.send_header('Content-Length', str(len(body))); self.end_headers()\n"
            "        self.wfile.write(body)\n"
            "    do_POST = do_GET\n"
            "    def log_message(self, *words): pass\n"
            f"h.ThreadingHTTPServer(('127.0.0.1', {self.port}), A).serve_forever()\n"
        )
        self.write("/opt/foreign.py", program)
        self.sh("systemd-run --quiet --collect --unit=foreign python3 /opt/foreign.py")
        until(self.listens, 10, f"the foreign listener on port {self.port}")
        try:
            yield "foreign.service"
        finally:
            self.sh("systemctl stop foreign.service; rm -f /opt/foreign.py")

    def listens(self) -> bool:
        """Whether anything listens on the engine's port."""
        return bool(self.sh(f"ss -Hltn 'sport = :{self.port}' || true"))

    # --- the host program ------------------------------------------------------------------------------------------

    def swapgate(self, *words: str, limit_s: float = 60) -> Any:
        """The JSON that `swapgate WORDS` prints."""
        return json.loads(self.sh("/usr/local/bin/swapgate " + shlex.join(words), limit_s=limit_s))

    def status(self) -> dict[str, Any]:
        """`swapgate status`."""
        status: dict[str, Any] = self.swapgate("status")
        return status

    def swap(self, variant: str, limit_s: float = 90) -> dict[str, Any]:
        """Ask the host program for a swap to a staged variant and wait for its end; returns the ended SWAP."""
        return self.await_swap(self.ask(variant), limit_s)

    def ask(self, variant: str) -> str:
        """Ask for a swap to a staged variant, once the unit of the swap before has ended; returns the swap's id."""
        until(
            lambda: self.show("swapgate-swap.service", "ActiveState")["ActiveState"] in ("inactive", "failed"),
            150,
            "the end of the swap of the test before",
        )
        return str(self.swapgate("ask", self.release(variant), "--by", "e2e")["id"])

    def release(self, variant: str) -> str:
        """A variant's staged release, staged anew when it is gone: the host keeps the ten newest and those in use."""
        if self.run(f"test -d /var/lib/swapgate/releases/{self.releases[variant]}").returncode:
            self.stage(variant)
        return self.releases[variant]

    def await_swap(self, swap_id: str, limit_s: float = 90) -> dict[str, Any]:
        """Wait for the end of a swap; returns its record."""
        ended: dict[str, Any] = until(lambda: self.ended(swap_id), limit_s, f"the end of swap {swap_id}", 0.3)
        return ended

    def ended(self, swap_id: str) -> dict[str, Any] | None:
        """The SWAP of that id once it has an outcome."""
        text = self.sh("cat /var/lib/swapgate/state.json 2>/dev/null || echo {}")
        swap: dict[str, Any] | None = json.loads(text).get("swap")
        return swap if swap and swap["id"] == swap_id and swap["outcome"] else None

    def await_phase(self, swap_id: str, phase: str, limit_s: float = 60) -> None:
        """Wait until a swap is in a phase whose name begins so."""

        def there() -> bool:
            state = json.loads(self.sh("cat /var/lib/swapgate/state.json"))["swap"] or {}
            return bool(state.get("id") == swap_id and str(state.get("phase")).startswith(phase))

        until(there, limit_s, f"phase {phase} of swap {swap_id}", 0.1)

    def inventory_value(self, name: str) -> Any:
        """A variable of the tests' inventory, to be changed and given as an extra variable."""
        return json.loads((self.inventory / "group_vars/vllm_hosts.yml").read_text())[name]

    def inventory_variants(self) -> dict[str, Any]:
        """The variants of the tests' inventory, to be changed and given with `swapgate_variants=`."""
        table: dict[str, Any] = self.inventory_value("swapgate_variants")
        return table

    def stage(self, *variants: str, **extra: Any) -> dict[str, str]:
        """Stage variants with role vllm_service, touching nothing that serves; returns and keeps variant to release."""
        run = self.ansible("tests/e2e/stage.yml", stage_variants=list(variants), **extra)
        if run.code:
            raise HostError(f"staging {variants} failed:\n{run.text[-3000:]}")
        staged = dict(re.findall(r"staged ([a-z0-9_.-]+) as ([0-9a-f]{12})", run.text))
        if set(staged) != set(variants):
            raise HostError(f"staged {staged}, asked for {variants}:\n{run.text[-3000:]}")
        self.releases.update(staged)
        return staged

    def ensure_serving(self, variant: str) -> None:
        """Have that variant serve, without caring what came before; the cheap way between two tests."""
        swap = self.swap(variant)
        if swap["outcome"] not in ("swapped", "unchanged"):
            raise HostError(f"'{variant}' cannot be brought back for the next test: {json.dumps(swap, indent=1)}")

    # --- systemd ---------------------------------------------------------------------------------------------------

    def show(self, unit: str, *properties: str) -> dict[str, str]:
        """Properties of a unit."""
        text = self.sh(f"systemctl show {unit} --property={','.join(properties)}")
        return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)

    def pid(self, unit: str) -> int:
        """The unit's main PID; 0 when it does not run."""
        return int(self.show(unit, "MainPID")["MainPID"])

    def enabled(self) -> list[str]:
        """The engine units that start at boot."""
        return self.sh("systemctl list-unit-files 'vllm-*' --state=enabled --no-legend --plain | cut -d' ' -f1").split()

    def active(self) -> list[str]:
        """The engine units that run."""
        return self.sh("systemctl list-units 'vllm-*' --state=active --no-legend --plain | cut -d' ' -f1").split()

    def picture(self) -> dict[str, Any]:
        """All that serves, boots or is enabled, as one value: main PIDs, start times, unit files and their content."""
        files = self.sh("find /etc/systemd/system -path '*vllm-*' -type f -exec sha256sum {} + 2>/dev/null | sort -k2")
        return {
            "enabled": self.enabled(),
            "units": self.sh("systemctl list-unit-files 'vllm-*' --no-legend --plain | awk '{print $1, $2}'"),
            "running": {
                unit: self.show(unit, "MainPID", "ActiveEnterTimestampMonotonic", "NRestarts") for unit in self.active()
            },
            "files": files,
        }

    # --- the engine ------------------------------------------------------------------------------------------------

    def complete(
        self,
        key: str | None = None,
        tokens: int = 12,
        limit_s: float = 20,
        prompt: str = "one two three one two three one two",
        model: str = "tiny",
        port: int | None = None,
    ) -> tuple[int, str]:
        """Ask the engine, or what else is on `port`, for a completion; returns the HTTP status and the text (or the
        error's body)."""
        body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port or self.port}/v1/completions", json.dumps(body).encode(), headers
        )
        try:
            with urllib.request.urlopen(request, timeout=limit_s) as answer:
                return answer.status, str(json.load(answer)["choices"][0]["text"])
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode("utf-8", "replace")

    # --- playbooks -------------------------------------------------------------------------------------------------

    def command(self, playbook: str, *options: str, **variables: Any) -> Command:
        """Start ansible-playbook on this host."""
        extra = [word for item in variables.items() for word in ("-e", as_typed(*item))]
        return Command(
            [
                str(BIN / "ansible-playbook"),
                "-i",
                str(self.sandbox["inventory"]),
                "-i",
                str(self.inventory),
                playbook,
                *extra,
                *options,
            ]
        )

    def ansible(self, playbook: str, *options: str, **variables: Any) -> Run:
        """Run ansible-playbook on this host to its end."""
        return self.command(playbook, *options, **variables).wait()

    def deploy(self, variant: str, *options: str, **variables: Any) -> Run:
        """`ansible-playbook playbooks/deploy.yml -e variant=...`."""
        return self.ansible("playbooks/deploy.yml", *options, variant=variant, **variables)


def as_typed(name: str, value: Any) -> str:
    """A variable as a person gives it to -e: a text, but JSON where it is a list or a dictionary."""
    if isinstance(value, (list, dict)):
        return json.dumps({name: value})
    return f"{name}={shlex.quote(str(value).lower() if isinstance(value, bool) else str(value))}"


def free_port(first: int) -> int:
    """A loopback port that nobody listens on, from `first` on: the sandbox shares this machine's network."""
    for port in range(first, first + 50):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no free port from {first} to {first + 49}")


def make_sandbox(name: str, binds: list[str], fresh: bool) -> dict[str, Any]:
    """Boot the sandbox of that name; a fresh one has nothing of an earlier run."""
    if fresh:
        destroy_sandbox(name)
    words = [word for bind in binds for word in ("--bind-ro", bind)]
    done = subprocess.run([*SANDBOX, "up", name, *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HostError(f"sandbox {name}: exit {done.returncode}: {done.stderr}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def destroy_sandbox(name: str) -> None:
    """Remove the sandbox of that name, if there is one."""
    done = subprocess.run([*SANDBOX, "destroy", name], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HostError(f"sandbox {name} cannot be removed: {done.stderr}")


def write_prompts(file: Path, count: int, max_tokens: int) -> list[dict[str, Any]]:
    """Short prompts of two classes, in a file and returned."""
    words = (
        "the pump in the yard was slow and the man who came for it said that he would rather wait for rain than pay "
    )
    lines = [
        {
            "id": f"p{at}",
            "class": ("reasoning", "code_edit")[at % 2],
            "messages": [{"role": "user", "content": f"Question {at}: why? {words}"}],
            "max_tokens": max_tokens,
        }
        for at in range(count)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines
