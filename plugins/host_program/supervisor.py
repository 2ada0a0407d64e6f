"""The main process of an engine's unit: starts the engine, says when it is ready, and ends it for good.

Its child is the exact engine command. systemd learns from it what the engine never says: READY after a real completion
by this unit's own server, STATUS with the phase of the load, a start limit that grows only while the load moves, a
watchdog fed by tokens, and a failure where the engine exits 0 although it died.

Exit codes: 0 the stop was asked for; 42 another try cannot help (the fault is the variant's or the model's); 69 the
port is taken; 70 the engine exited 0 unasked, or was dead and had to be ended; 75 the load stalled or took too long;
128+N the engine died of signal N; else the engine's own code.

``load.json`` in the unit's runtime folder, replaced about once a second while it loads
    {"schema", "unit", "variant", "state": "loading" | "ready" | "stopping" | "stopped" | "failed", "pid",
     "started_unix", "updated_unix", "ready_after_s": s | null, "load": LoadWatch snapshot, "changes": [str, ...],
     "typical_load_s": s | null, "exit": str | null, "failure": null | diagnosis with "what"}
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..module_utils import diagnosis, load_watch, phases, processes, progress, records
from ..module_utils.signatures import Signatures
from . import engine_api, gpus, systemd

RETRY_IS_USELESS = 42
PORT_TAKEN = 69
UNASKED_EXIT_0 = 70
LOAD_TOO_LONG = 75

TICK_S = 0.25
# While a probe of a load is on its way: its answer is what the service waits for.
PROBE_TICK_S = 0.05
TELL_S = 1.0
TAIL_S = 5.0
# A load that moved this lately gets more time from systemd. The watch ends a stalled load by itself, at limits that
# depend on the phase; the extension is the net below it, longer than the longest of those.
MOVES_S = 10.0
EXTENSION_US = 4000 * 1000 * 1000
WORK_S = 3.0
TAIL_LINES = 4000
# A stop during a load: the engine swallows the first SIGTERM, and the second ends it within about 10 s.
LOADING_TERM_AGAIN_S = 3.0
KILL_AFTER_S = 10.0
# After its drain limit the engine ends its own core, but its server then waits for the last connection for ever.
TEARDOWN_S = 6.0
PROBE_LIMIT_S = 60.0
# A server that listens has loaded; when its completions fail this often and this long, more of them will not help.
PROBE_FAILURES = 5
PROBE_PATIENCE_S = 15.0
# An engine that serves prints such lines for a failed request too: it is asked this often at most, and a dead one has
# this long for its last words.
DOUBT_EVERY_S = 10.0
LAST_WORDS_S = 0.5
# Below this, reads and CPU time are a waiting process's own noise.
READ_NOISE_BYTES = 1 << 20
CPU_NOISE = 0.10
LONGEST_LINE = 65536
PR_SET_CHILD_SUBREAPER = 36


class Probe:
    """A completion asked for in a thread, so that a hung engine does not stop the supervisor."""

    def __init__(self, variant: dict[str, Any], api_key: str | None, max_tokens: int, names: bool = False) -> None:
        self.error: str | None = None
        self.silent = False
        self.served: list[str] = []
        self._thread = threading.Thread(target=self._run, args=(variant, api_key, max_tokens, names), daemon=True)
        self._thread.start()

    def _run(self, variant: dict[str, Any], api_key: str | None, max_tokens: int, names: bool) -> None:
        bind, port, name = variant["bind"], variant["port"], variant["model"]["served_name"]
        try:
            if names:  # that of a server that is ours does not change while it runs
                self.served = engine_api.served_names(bind, port, api_key)
            engine_api.complete(bind, port, name, max_tokens, api_key=api_key, limit_s=PROBE_LIMIT_S)
        except engine_api.EngineError as error:
            self.error, self.silent = str(error), isinstance(error, engine_api.EngineSilent)

    @property
    def done(self) -> bool:
        """Whether an answer or an error is there."""
        return not self._thread.is_alive()


class Supervisor:
    """One run of one engine."""

    def __init__(self, variant: dict[str, Any], argv: Sequence[str], layout: records.Layout, signatures: Signatures):
        self.variant = variant
        self.argv = list(argv)
        self.layout = layout
        self.signatures = signatures
        self.folder = layout.unit_runtime(variant["unit"])
        self.history_file = layout.home / "loads" / (variant["unit"][: -len(".service")] + ".json")
        self.history = records.read_if_there(self.history_file)
        limits = None
        if variant.get("stall_timeout_s"):
            limits = {phase: float(variant["stall_timeout_s"]) for phase in phases.PHASES}
        self.started = time.monotonic()
        self.started_unix = time.time()
        self.watch = load_watch.LoadWatch(self.history, self.started, limits)
        self.scanner = diagnosis.Scanner(signatures)
        self.tail: collections.deque[str] = collections.deque(maxlen=TAIL_LINES)
        self.partial = ""
        self.held = b""  # the begun line of an engine that serves
        self.state = "loading"
        self.ready_after_s: float | None = None
        self.failure: dict[str, Any] | None = None
        self.exit_code: int | None = None
        self.stop_asked: float | None = None
        self.signals_sent = 0
        self.probe: Probe | None = None
        # Of an engine that serves and may be dead by its own log: the completion that decides, since when, and how many
        # such lines were excused.
        self.doubt: Probe | None = None
        self.doubt_at = 0.0
        self.excused = 0
        self.probe_error = ""
        self.probe_failures = 0
        self.probe_failed_at = 0.0
        self.work = processes.Work(0.0, 0)
        self.gpu_memory = gpus.MemoryWatch(variant["gpus"]) if variant["gpus"] else None
        self.work_at = self.told_at = self.tail_at = self.fed_at = 0.0
        self.tokens: float | None = None
        self.watchdog_s = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6
        self.api_key = self._credential("vllm_api_key")
        self.child: subprocess.Popen[bytes] | None = None
        # Readable once a signal came: a stop that was asked for, or a child's end.
        self.woken = -1

    # --- what the unit gives ---------------------------------------------------------------------------------------

    @staticmethod
    def _credential(name: str) -> str | None:
        folder = os.environ.get("CREDENTIALS_DIRECTORY")
        if not folder or not (Path(folder) / name).exists():
            return None
        return (Path(folder) / name).read_text(encoding="utf-8").strip()

    def _environment(self) -> dict[str, str]:
        # The engine must not be able to say READY for itself.
        hidden = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "CREDENTIALS_DIRECTORY")
        environment = {key: value for key, value in os.environ.items() if key not in hidden}
        if self.api_key:
            environment["VLLM_API_KEY"] = self.api_key
        return environment

    # --- the run ---------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run the engine to its end; returns the exit code of this process."""
        self.woken, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._asked_to_stop)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)  # a handler, so that an exit wakes the loop
        # Workers that lose their parent come to us, not to init: nothing of this unit escapes the stop.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.folder.mkdir(parents=True, exist_ok=True)
        taken = processes.listening_inodes(self.variant["port"])
        if taken:
            self._fail("port {} is already in use".format(self.variant["port"]), "host", PORT_TAKEN)
            return self._finish()
        try:
            self.child = subprocess.Popen(
                self.argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=self._environment(),
                start_new_session=True,
            )
        except OSError as error:
            self._fail(f"cannot start {self.argv[0]}: {error}", "config", RETRY_IS_USELESS)
            return self._finish()
        with selectors.DefaultSelector() as selector:
            assert self.child.stdout is not None
            os.set_blocking(self.child.stdout.fileno(), False)
            selector.register(self.child.stdout, selectors.EVENT_READ)
            selector.register(self.woken, selectors.EVENT_READ)
            while self.child.poll() is None:
                waits = self.doubt is not None or (self.probe is not None and self.state == "loading")
                self._read(selector, PROBE_TICK_S if waits else TICK_S)
                self._tick(time.monotonic())
            self._read(selector, 0.0)
        return self._finish()

    def _read(self, selector: selectors.BaseSelector, limit_s: float) -> None:
        """What the engine printed; waited for as long as that, or until a signal comes."""
        assert self.child is not None and self.child.stdout is not None
        for ready, _ in selector.select(limit_s):
            if ready.fd == self.woken:
                os.read(self.woken, 1 << 10)
                continue
            try:
                chunk = os.read(self.child.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                return
            if not chunk:
                selector.unregister(self.child.stdout)
                return
            chunk = self._without_own(chunk)
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.buffer.write(chunk)
                sys.stdout.buffer.flush()
            text = chunk.decode("utf-8", "replace")
            if self.state == "loading":
                self.watch.feed(text, time.monotonic())
            self._keep(text)

    def _without_own(self, chunk: bytes) -> bytes:
        """Of an engine that serves, whole lines without those of its access log about our own checks that it answered.

        They are known by the very port that a check came from, and each is dropped once. Before and after that
        everything goes on as it comes.
        """
        chunk, self.held = self.held + chunk, b""
        if self.state != "ready":
            return chunk
        whole, end, self.held = chunk.rpartition(b"\n")
        if len(self.held) > LONGEST_LINE:
            whole, self.held = chunk, b""
            end = b""
        return b"".join(line for line in (whole + end).splitlines(keepends=True) if not self._own(line))

    @staticmethod
    def _own(line: bytes) -> bool:
        for request in list(engine_api.asked):
            if b" " + request in line:
                engine_api.asked.remove(request)
                return True
        return False

    def _keep(self, text: str) -> None:
        lines = (self.partial + text).split("\n")
        self.partial = lines.pop()[-LONGEST_LINE:]
        self.tail.extend(lines)
        if self.state in ("loading", "ready"):
            for line in lines:
                self.scanner.feed(line)

    def _tick(self, now: float) -> None:
        if self.stop_asked is not None:
            self._press(now)
            return
        if self.failure is not None:
            return
        fatal = self.scanner.fatal()
        if fatal is not None and self.state == "loading":
            when = "at its first completion" if self.probe or self.probe_error else "during the load"
            self.failure = dict(fatal, what=f"the engine failed {when}, by its own log")
            self._end(now)
            return
        if self.state == "loading":
            self._loading(now)
        elif self.doubt is not None or (self.scanner.wrappers > self.excused and now - self.doubt_at >= DOUBT_EVERY_S):
            self._doubt(now)
        elif self.watchdog_s and now - self.fed_at >= self.watchdog_s / 4:
            self._feed_watchdog(now)

    # --- loading ---------------------------------------------------------------------------------------------------

    def _loading(self, now: float) -> None:
        if now - self.work_at >= WORK_S:
            self._notice_work(now)
        snapshot = self.watch.snapshot(now)
        if snapshot["stalled"]:
            hung = "the server listens, but a completion had no answer; " if self.probe or self.probe_error else ""
            self._fail(f"the load stalled: {hung}{snapshot['evidence']}", "unknown", LOAD_TOO_LONG)
            self._end(now)
            return
        # Not the snapshot's time: that stands still once the engine calls itself ready.
        if now - self.started > self.variant["load_timeout_s"]:
            what = "the load took longer than load_timeout_s, {} s: {}{}".format(
                self.variant["load_timeout_s"],
                snapshot["evidence"],
                "; last probe: " + self.probe_error if self.probe_error else "",
            )
            self._fail(what, "unknown", LOAD_TOO_LONG)
            self._end(now)
            return
        self._try_ready(now)
        if now - self.told_at >= TELL_S:
            self.told_at = now
            self._tell(now)

    def _notice_work(self, now: float) -> None:
        members = processes.descendants(os.getpid())
        work = processes.work(members)
        if work.cpu_s - self.work.cpu_s > CPU_NOISE * (now - self.work_at):
            self.watch.activity(now, "cpu")
        if work.read_bytes - self.work.read_bytes > READ_NOISE_BYTES:
            self.watch.activity(now, "disk")
        if self.gpu_memory is not None and self.gpu_memory.moved(now):
            self.watch.activity(now, "gpu_memory")
        self.work, self.work_at = work, now

    def _try_ready(self, now: float) -> None:
        if self.probe is None:
            inodes = processes.listening_inodes(self.variant["port"])
            if inodes and any(processes.holds_socket(pid, inodes) for pid in processes.descendants(os.getpid())):
                self.probe = Probe(self.variant, self.api_key, engine_api.PROBE_TOKENS, names=True)
            return
        if not self.probe.done:
            return
        probe, self.probe = self.probe, None
        served = self.variant["model"]["served_name"]
        if probe.served and served not in probe.served:
            what = "the server answers to {}, expected '{}'".format(", ".join(probe.served), served)
            self._fail(what, "config", RETRY_IS_USELESS)
            self._end(now)
        elif probe.error:
            self.probe_error = probe.error
            self.probe_failures += 1
            self.probe_failed_at = self.probe_failed_at or now
            if self.probe_failures >= PROBE_FAILURES and now - self.probe_failed_at >= PROBE_PATIENCE_S:
                self._fail(f"the server listens, but gives no completion: {probe.error}", "model", LOAD_TOO_LONG)
                self._end(now)
        else:
            self._ready(now)

    def _ready(self, now: float) -> None:
        self.state = "ready"
        self.excused = self.scanner.wrappers
        self.ready_after_s = round(now - self.started, 1)
        record = self.watch.record()
        with contextlib.suppress(OSError):
            records.write_json(self.history_file, load_watch.merge_history(self.history, record))
        self._tell(now)
        systemd.notify(
            "READY=1\nSTATUS=serving {}, loaded in {:.0f} s\nWATCHDOG=1".format(
                self.variant["name"], self.ready_after_s
            )
        )
        self.fed_at = now

    # --- serving ---------------------------------------------------------------------------------------------------

    def _feed_watchdog(self, now: float) -> None:
        """Tell systemd that the engine lives: tokens moved, or, when it is idle, a completion of our own."""
        if self.probe is not None:
            if self.probe.done:
                if self.probe.error is None:
                    self.fed_at = now
                    systemd.notify("WATCHDOG=1")
                self.probe = None
            return
        load = engine_api.load(self.variant["bind"], self.variant["port"], 2.0)
        if load is None:
            return
        moved = load["tokens"] is not None and load["tokens"] != self.tokens
        self.tokens = load["tokens"]
        if moved:
            self.fed_at = now
            systemd.notify("WATCHDOG=1")
        elif not load["running"] and not load["waiting"]:
            self.probe = Probe(self.variant, self.api_key, 1)

    def _doubt(self, now: float) -> None:
        """By its log the engine is dead, or one request failed: a completion decides. A dead one's server goes on for
        seconds and refuses them; one that takes its time may be busy, and is the watchdog's to judge."""
        if self.doubt is None:
            self.doubt, self.doubt_at = Probe(self.variant, self.api_key, 1), now
            self.excused = self.scanner.wrappers
        elif self.doubt.done and now - self.doubt_at >= LAST_WORDS_S:
            if self.doubt.error is not None and not self.doubt.silent:
                self._fail("the engine died after it served, by its own log", "unknown", UNASKED_EXIT_0)
                self._name_cause()
                self._end(now)
            self.doubt = None

    # --- the end ---------------------------------------------------------------------------------------------------

    def _asked_to_stop(self, _number: int, _frame: Any) -> None:
        if self.stop_asked is None:
            self.stop_asked = time.monotonic()

    def _end(self, now: float) -> None:
        """Stop the engine for a reason of our own."""
        self.stop_asked = now
        self._tell(now)

    def _press(self, now: float) -> None:
        """TERM and KILL, with a second TERM where it helps; a served engine gets its whole drain before the KILL."""
        assert self.child is not None
        if self.ready_after_s is not None:
            # What is dead has nothing to drain.
            drain_s = 0.0 if self.failure else float(self.variant["drain_timeout_s"])
            due = [(0.0, signal.SIGTERM), (drain_s + TEARDOWN_S, signal.SIGKILL)]
        else:
            again = LOADING_TERM_AGAIN_S
            due = [(0.0, signal.SIGTERM), (again, signal.SIGTERM), (again + KILL_AFTER_S, signal.SIGKILL)]
        waited = now - (self.stop_asked or now)
        if self.signals_sent < len(due) and waited >= due[self.signals_sent][0]:
            number = due[self.signals_sent][1]
            self.signals_sent += 1
            if self.signals_sent == 1:
                if self.state != "failed":
                    self.state = "stopping"
                systemd.notify("STOPPING=1\nSTATUS=stopping {}".format(self.variant["name"]))
                self._tell(now)
            if number == signal.SIGKILL:
                for pid in [self.child.pid, *processes.descendants(os.getpid())]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            else:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.child.pid, number)

    def _fail(self, what: str, kind: str, code: int) -> None:
        self.failure = {
            "what": what,
            "class": kind,
            "root_cause": None,
            "signature": None,
            "remedy": None,
            "context": [],
        }
        self.exit_code = code

    def _finish(self) -> int:
        """The engine is gone: end what it left behind, name the cause, choose the exit code."""
        for pid in processes.descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        asked = self.stop_asked is not None and self.failure is None
        returncode = self.child.returncode if self.child is not None else None
        if self.held:
            with contextlib.suppress(BrokenPipeError):
                sys.stdout.buffer.write(self.held)
                sys.stdout.buffer.flush()
            self._keep(self.held.decode("utf-8", "replace"))
            self.held = b""
        if self.partial:
            self._keep("\n")
        if asked:
            self.state, code = "stopped", 0
        else:
            self.state, code = "failed", self._explain(returncode)
        self._tell(time.monotonic(), f"exit {returncode}" if returncode is not None else None)
        return code

    def _explain(self, returncode: int | None) -> int:
        if returncode is None:
            return self.exit_code or 1
        if self.failure is None:
            how = f"with status {returncode}" if returncode >= 0 else f"of signal {-returncode}"
            when = "after it served" if self.ready_after_s is not None else "during the load"
            self.failure = {"what": f"the engine ended {how} {when}"}
        self._name_cause()
        if self.exit_code is not None:
            return self.exit_code
        if self.ready_after_s is None and self.failure.get("class") in ("config", "model") and self._recognised():
            return RETRY_IS_USELESS
        if returncode == 0:
            return UNASKED_EXIT_0
        return returncode if returncode > 0 else 128 - returncode

    def _name_cause(self) -> None:
        """What the engine's last lines say about the failure."""
        assert self.failure is not None
        found = diagnosis.diagnose(list(self.tail), self.signatures)
        # Where the log shows no failure, only its end is worth telling: the cause is ours.
        telling = ("root_cause", "signature", "remedy") if found["verdict"] == "fatal" else ()
        self.failure.update({key: found[key] for key in (*telling, "context", "phase") if found.get(key)})
        if found.get("class") and self.failure.get("class") in (None, "unknown"):
            # What served was configured well enough: then only a recognised cause may say otherwise.
            guessed = self.ready_after_s is not None and not self._recognised()
            self.failure["class"] = "unknown" if guessed else found["class"]

    def _recognised(self) -> bool:
        """Whether the failure's signature names a cause; the class of anything else is a guess."""
        named = (self.failure or {}).get("signature")
        return any(known.id == named and known.role == "cause" for known in self.signatures.all)

    # --- telling ---------------------------------------------------------------------------------------------------

    def _tell(self, now: float, ended: str | None = None) -> None:
        snapshot = self.watch.snapshot(now)
        typical = load_watch.typical_load(self.history)
        report = {
            "schema": records.SCHEMA,
            "unit": self.variant["unit"],
            "variant": self.variant["name"],
            "state": self.state,
            "pid": self.child.pid if self.child is not None else None,
            "started_unix": self.started_unix,
            "updated_unix": time.time(),
            "ready_after_s": self.ready_after_s,
            "load": snapshot,
            "changes": self.watch.changes(),
            "typical_load_s": sum(typical.values()) if typical else None,
            "exit": ended,
            "failure": self.failure,
        }
        with contextlib.suppress(OSError):
            records.write_json(self.folder / "load.json", report)
            if self.state != "loading" or now - self.tail_at >= TAIL_S:
                self.tail_at = now
                records.write_atomic(self.folder / "tail.log", "\n".join(self.tail) + "\n")
        if self.state == "loading":
            status = "loading {}: {} {:.0f} %, {:.0f} s elapsed, {}".format(
                self.variant["name"],
                snapshot["phase"],
                snapshot["percent"],
                snapshot["elapsed_s"],
                progress.time_left(snapshot),
            )
            # Only a load that moves gets more time, and never after a stop was asked: the same message would
            # stretch the stop limit too.
            moves = snapshot["quiet_s"] < MOVES_S and self.stop_asked is None
            systemd.notify("STATUS=" + status + (f"\nEXTEND_TIMEOUT_USEC={EXTENSION_US:d}" if moves else ""))
        elif self.state == "failed" and self.failure is not None:
            systemd.notify(
                "STATUS=failed: {}".format(str(self.failure.get("root_cause") or self.failure["what"])[:400])
            )


def supervise(variant: dict[str, Any], argv: Sequence[str], layout: records.Layout, signatures: Signatures) -> int:
    """Run one engine under its unit; returns the exit code."""
    return Supervisor(variant, argv, layout, signatures).run()
