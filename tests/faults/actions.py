"""What a row can do to the host: a verb and its words, as rows name them.

sh SCRIPT                     run it on the host over SSH
bg NAME SCRIPT                run it on the host in a transient unit fault-NAME.service
kill-swap                     SIGKILL of the swap's main process, in the very phase
hold-swap SCRIPT              stop the swap's main process in the very phase, run the script on the host, let it go on
kill-swap-and-resolve         the same, and of the resolve that ExecStopPost starts, once
signal N UNIT WORDS           signal the processes of a unit whose name or command line holds WORDS
power-cut | reboot            in the very phase; comes back when the host is up again
power-off                     the same without coming back; `power-on` boots it
drop-ssh                      kill the ssh client of whoever asked
ask LABEL OWNER               ask for another swap meanwhile
knobs JSON                    other knobs for the starts that follow
nvidia JSON                   a stand-in nvidia-smi; {"exit": n, "text": s} or {"gpus": [{field: value}]}
stream N                      a client that streams N tokens and notes how it ended
foreign PORT SECONDS          a process outside every unit takes the port as soon as it is free and answers 200
hang-mount FOLDER             whoever looks into the folder waits for ever, as for a mount whose server has gone
stage-directive LINE          stage a release `directive`: the target's unit with one more line under [Service]
stage-trial                   stage a release `trial`: the target as a trial variant
stage-watchdog SECONDS        stage a release `watchdog`: the target with another limit of its unit's watchdog
stage-gpu-waits               stage a release `gpu-waits`: `gpu`, with the patience to see that waiting will not help
swap LABEL                    swap to a release and wait until it serves
shim-systemctl                the host program's `systemctl stop` of the baseline fails, all else passes
shim-clock SECONDS            the host program's wall clock jumps by so much two seconds after each start of it
stop-swap-after VERB UNIT     the swap's main process is stopped right after its next `systemctl VERB` of the unit
small-state                   lay a tmpfs under the state folder
fill PLACE KIB                shrink the tmpfs of a folder to what it holds, and so much more
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable

from ansible_collections.swapgate.core.plugins.module_utils import units

from . import bed as beds
from .host import PORT, PROMPT, SERVED, HostError

SWAP_UNIT = "swapgate-swap.service"
APPEAR_S = 3.0
FOREIGN = """
import http.server, json, sys, time
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = {"object": "list", "data": [{"id": "tiny"}], "model": "tiny", "usage": {"completion_tokens": 8},
                "choices": [{"text": " Paris, says somebody else"}]}
        text = json.dumps(body).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(text))); self.end_headers()
        self.wfile.write(text)
    do_POST = do_GET
    def log_message(self, *words): pass
port, end = int(sys.argv[1]), time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    try:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer)
    except OSError:
        time.sleep(0.001)
        continue
    server.timeout = 0.2
    while time.monotonic() < end:
        server.handle_request()
    break
"""
NVIDIA = """#!/usr/bin/python3
import json, sys
told = json.loads(r'''{told}''')
words = sys.argv[1:]
asked = next((word.partition("=")[2] for word in words if word.startswith("--query-gpu=")), None)
if "text" in told:
    print(told["text"])
elif asked:
    if not any("noheader" in word for word in words):
        print(", ".join(asked.split(",")))
    for index, gpu in enumerate(told["gpus"]):
        known = {{"index": str(index), "uuid": "GPU-%d" % index, "name": "Stand-in", "memory.total": "97887 MiB",
                 "memory.used": "3 MiB", "memory.free": "97884 MiB", "memory.reserved": "600 MiB",
                 "utilization.gpu": "0 %",
                 "power.draw": "30.00 W", "temperature.gpu": "30", "compute_mode": "Default",
                 "mig.mode.current": "Disabled", "ecc.errors.uncorrected.volatile.total": "0",
                 "gpu_recovery_action": "None", "fabric.state": "N/A", "driver_version": "580.95.05"}}
        known.update(gpu)
        print(", ".join(known.get(field, "[N/A]") for field in asked.split(",")))
elif any("query-compute-apps" in word for word in words):
    print("gpu_uuid, pid, process_name, used_gpu_memory [MiB]")
    for row in told.get("apps", []):
        print(row)
sys.exit(told.get("exit", 0))
"""


# An automount point whose daemon never answers: the kernel lets every other process wait for it, until it is told that
# there is no daemon any more.
HANG = """
import ctypes, fcntl, os, signal, sys
CATATONIC, DETACH = 0x9362, 2
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
folder = sys.argv[1].encode()
_, pipe = os.pipe()
options = f"fd={pipe},pgrp={os.getpgrp()},minproto=5,maxproto=5,direct"
libc = ctypes.CDLL(None, use_errno=True)
if libc.mount(b"hangs", folder, b"autofs", 0, options.encode()):
    sys.exit(os.strerror(ctypes.get_errno()))
root = os.open(folder, os.O_RDONLY)
signal.sigwait([signal.SIGTERM])
fcntl.ioctl(root, CATATONIC)
libc.umount2(folder, DETACH)
"""


class Missed(Exception):
    """The phase was over before the fault could be put into it; the row is tried again."""


class Stage:
    """What the actions of one try of a row share."""

    def __init__(self, bed: beds.Bed) -> None:
        self.bed = bed
        self.host = bed.host
        self.said: list[str] = []
        self.asker: subprocess.Popen[str] | None = None
        self.phase = ""
        self.resolved = threading.Event()

    def act(self, action: str) -> float:
        """Do one action; returns its moment (monotonic s)."""
        verb, _, words = action.partition(" ")
        return VERBS[verb](self, words)

    def freeze(self) -> list[int]:
        """Stop the swap in the phase that it is in; Missed when it has just left it."""
        held = self.host.signal(SWAP_UNIT, "/usr/local/bin/swapgate", signal.SIGSTOP)
        now = self.host.swap().get("phase")
        if not held or now != self.phase:
            for pid in held:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            raise Missed(f"phase {self.phase} was over, now {now}")
        return held


def _sh(stage: Stage, words: str) -> float:
    moment = time.monotonic()
    done = stage.host.run(words, limit_s=90)
    stage.said.append(f"exit {done.returncode}: {done.stdout}{done.stderr}")
    return moment


def _background(stage: Stage, words: str) -> float:
    name, _, script = words.partition(" ")
    stage.host.sh(f"systemd-run -q --collect --unit=fault-{name} -p KillMode=control-group bash -c '{script}'")
    return time.monotonic()


def _kill_swap(stage: Stage, _words: str) -> float:
    held = stage.freeze()
    moment = time.monotonic()
    for pid in held:
        with contextlib.suppress(ProcessLookupError):  # a child of it that was just being forked
            os.kill(pid, signal.SIGKILL)
    return moment


def _hold_swap(stage: Stage, words: str) -> float:
    held = stage.freeze()
    try:
        return _sh(stage, words)
    finally:
        for pid in held:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def _kill_both(stage: Stage, words: str) -> float:
    moment = _kill_swap(stage, words)
    end = time.monotonic() + 10
    while not stage.host.signal(SWAP_UNIT, "swapgate resolve", signal.SIGKILL):
        if time.monotonic() > end:
            raise Missed("no resolve was started within 10 s of the swap's end")
        time.sleep(0.005)
    return moment


def _signal(stage: Stage, words: str) -> float:
    number, unit, needle = words.split(" ", 2)
    end = time.monotonic() + APPEAR_S
    while True:  # on a busy machine the process may not be there yet
        moment = time.monotonic()
        if stage.host.signal(unit, needle, int(number)):
            return moment
        if moment > end:
            raise Missed(f"{unit} has no process {needle!r}")
        time.sleep(0.05)


def _power_cut(stage: Stage, _words: str) -> float:
    if stage.phase:
        stage.freeze()
    moment = stage.host.cut_power()
    stage.host.power_on()
    return moment


def _reboot(stage: Stage, _words: str) -> float:
    if stage.phase:
        stage.freeze()
    moment, before = stage.host.begin_reboot()
    stage.host.end_reboot(before)
    return moment


def _drop_ssh(stage: Stage, _words: str) -> float:
    moment = time.monotonic()
    if stage.asker is None or stage.asker.poll() is not None:
        raise Missed("the asking ssh has ended by itself")
    stage.asker.kill()
    return moment


def _ask(stage: Stage, words: str) -> float:
    label, owner = words.split()
    return _sh(stage, f"swapgate ask {stage.bed.releases[label]} --by {owner}")


def _knobs(stage: Stage, words: str) -> float:
    stage.host.write("/etc/fake_vllm.json", json.dumps({**beds.KNOBS, **json.loads(words)}))
    return time.monotonic()


def _nvidia(stage: Stage, words: str) -> float:
    json.loads(words)
    stage.host.write("/usr/local/bin/nvidia-smi", NVIDIA.format(told=words), "0755")
    return time.monotonic()


def _stream(stage: Stage, words: str) -> float:
    body = json.dumps({"model": SERVED, "prompt": PROMPT, "max_tokens": int(words), "ignore_eos": True, "stream": True})
    argv = [
        "curl",
        "-sS",
        "-N",
        "-m",
        "60",
        "-H",
        "Content-Type: application/json",
        "-d",
        body,
        f"http://127.0.0.1:{PORT}/v1/completions",
    ]
    subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(0.5)
    return time.monotonic()


def _foreign(stage: Stage, words: str) -> float:
    port, seconds = words.split()
    stage.host.write("/opt/faults/foreign.py", FOREIGN)
    return _background(stage, f"foreign exec python3 /opt/faults/foreign.py {port} {seconds}")


def _hang_mount(stage: Stage, words: str) -> float:
    stage.host.write("/opt/faults/hang.py", HANG)
    _background(stage, f"hang exec python3 /opt/faults/hang.py {words}")
    stage.host.sh(f"for try in $(seq 50); do grep -q ' {words} autofs ' /proc/mounts && exit; sleep 0.1; done; exit 1")
    return time.monotonic()


def _sleep(_stage: Stage, words: str) -> float:
    time.sleep(float(words))
    return time.monotonic()


def _stage_directive(stage: Stage, words: str) -> float:
    return _stage_odd(stage, "directive", f"[Service]\n{words}\n", {})


def _stage_trial(stage: Stage, _words: str) -> float:
    return _stage_odd(stage, "trial", "[Service]\n", {"trial": True})


def _stage_watchdog(stage: Stage, words: str) -> float:
    return _stage_odd(stage, "watchdog", "[Service]\n", {}, {"WatchdogSec=120": f"WatchdogSec={words}"})


def _stage_gpu_waits(stage: Stage, _words: str) -> float:
    return _stage_odd(stage, "gpu-waits", "[Service]\n", {"free_timeout_s": 60}, origin="gpu")


def _stage_links(stage: Stage, words: str) -> float:
    """A release that proves its links, and an engine whose torch says ``words`` when they are tried."""
    root = next(
        (stage.host.box.root / f"opt/swapgate/engines/vllm-{beds.OLDER}" / "lib").glob("python3*/site-packages")
    )
    packages = "/" + str(root.relative_to(stage.host.box.root))
    stage.host.write(
        f"{packages}/torch/__init__.py",
        "__version__ = '0'\nclass device:\n    type = 'cpu'\n    def __init__(self, _name): pass\n",
    )
    broken = f"def init_process_group(*_words, **_options):\n    raise RuntimeError({words!r})\n"
    stage.host.write(f"{packages}/torch/distributed/__init__.py", broken)
    return _stage_odd(stage, "links", "[Service]\n", {"prove_links": True}, origin="older")


def _swap(stage: Stage, words: str) -> float:
    stage.host.sh(f"swapgate ask {stage.bed.releases[words]} --by matrix")
    end = time.monotonic() + 60
    while stage.host.swap().get("outcome") != "swapped":
        if time.monotonic() > end:
            raise HostError(f"the swap to {words} before the fault: expected swapped, found {stage.host.swap()}")
        time.sleep(0.1)
    return time.monotonic()


def _stage_odd(
    stage: Stage,
    label: str,
    service: str,
    more: dict[str, object],
    other: dict[str, str] | None = None,
    origin: str = "ngram",
) -> float:
    root = stage.host.box.root / "var/lib/swapgate/releases" / stage.bed.releases[origin]
    variant = {**json.loads((root / "variant.json").read_text(encoding="utf-8")), **more}
    unit = (root / variant["unit"]).read_text(encoding="utf-8").replace("[Service]\n", service, 1)
    for old, new in (other or {}).items():
        assert unit.count(old) == 1, f"{old} stands {unit.count(old)} times in {variant['unit']}"
        unit = unit.replace(old, new)
    release = units.release_id(unit, variant)
    stage.host.write(f"/var/lib/swapgate/releases/{release}/{variant['unit']}", unit)
    stage.host.write(f"/var/lib/swapgate/releases/{release}/variant.json", json.dumps(variant))
    stage.bed.releases[label] = release
    return time.monotonic()


SHIM_SYSTEMCTL = """#!/bin/bash
if [[ " $* " == *" stop "* && " $* " == *" vllm-tiny.service "* ]]; then
  echo "stand-in: the job timed out" >&2; exit 1
fi
exec /usr/bin/systemctl "$@"
"""
# Lets every call pass; after the one that is waited for it takes itself away and stops who called.
SHIM_STOP = """#!/bin/bash
/usr/bin/systemctl "$@"; code=$?
if [[ " $* " == *" {verb} "* && " $* " == *" {unit} "* ]]; then rm "$0"; kill -STOP $PPID; fi
exit $code
"""
# Only wall-clock readings jump, as when somebody sets the time; monotonic ones go on.
SHIM_CLOCK = """#!/usr/bin/python3 -I
import sys, time
sys.path.insert(0, "/usr/local/lib/swapgate")
real, real_gmtime, begun = time.time, time.gmtime, time.monotonic()
def jumped():
    return real() + ({seconds} if time.monotonic() - begun > 2 else 0)
time.time = jumped
time.gmtime = lambda at=None: real_gmtime(jumped() if at is None else at)
from swapgate.host_program.main import main
sys.exit(main())
"""


def _shim_systemctl(stage: Stage, _words: str) -> float:
    return _shim(stage, SHIM_SYSTEMCTL)


def _stop_swap_after(stage: Stage, words: str) -> float:
    verb, unit = words.split()
    return _shim(stage, SHIM_STOP.format(verb=verb, unit=unit))


def _shim(stage: Stage, script: str) -> float:
    stage.host.write("/opt/faults/shim/systemctl", script, "0755")
    path = "/opt/faults/shim:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"
    stage.host.write(f"/etc/systemd/system/{SWAP_UNIT}.d/shim.conf", f"[Service]\nEnvironment=PATH={path}\n")
    stage.host.sh("systemctl daemon-reload")
    return time.monotonic()


def _shim_clock(stage: Stage, words: str) -> float:
    stage.host.write("/usr/local/bin/swapgate", SHIM_CLOCK.format(seconds=int(words)), "0755")
    return time.monotonic()


def _small_state(stage: Stage, _words: str) -> float:
    stage.host.sh(
        "mkdir -p /opt/faults/small && mount -t tmpfs -o size=2g tmpfs /opt/faults/small && "
        "cp -a /var/lib/swapgate/. /opt/faults/small/ && mount --move /opt/faults/small /var/lib/swapgate || "
        "mount --bind /opt/faults/small /var/lib/swapgate"
    )
    return time.monotonic()


def _fill(stage: Stage, words: str) -> float:
    place, more = words.split()
    stage.host.sh(
        f"mount -o remount,size=$(( $(df -k --output=used {place} | tail -1) + {more} ))k "
        f"$(findmnt -n -o TARGET -T {place} | tail -1)"
    )
    return time.monotonic()


VERBS: dict[str, Callable[[Stage, str], float]] = {
    "sh": _sh,
    "bg": _background,
    "kill-swap": _kill_swap,
    "hold-swap": _hold_swap,
    "kill-swap-and-resolve": _kill_both,
    "signal": _signal,
    "power-cut": _power_cut,
    "reboot": _reboot,
    "drop-ssh": _drop_ssh,
    "ask": _ask,
    "knobs": _knobs,
    "nvidia": _nvidia,
    "stream": _stream,
    "foreign": _foreign,
    "hang-mount": _hang_mount,
    "sleep": _sleep,
    "stage-directive": _stage_directive,
    "stage-trial": _stage_trial,
    "stage-watchdog": _stage_watchdog,
    "stage-gpu-waits": _stage_gpu_waits,
    "stage-links": _stage_links,
    "swap": _swap,
    "stop-swap-after": _stop_swap_after,
    "shim-systemctl": _shim_systemctl,
    "shim-clock": _shim_clock,
    "small-state": _small_state,
    "fill": _fill,
}
