"""Runs on the host under test: prints as one JSON object what serves, what boots and what was left behind.

    python3 look.py PORT [UNIT SINCE_MONOTONIC_S PATTERN...]

{"holders": {unit: [pid, ...]}, "enabled": [unit, ...], "active": [unit, ...], "lock_free": bool,
 "engine_strays": [str, ...], "swap_unit": str, "installed_ok": bool, "status": {...},
 "lines_at": {PATTERN: s | null}, "restarts": {unit: n}}
``lines_at`` is when the journal of UNIT got its first line that matches a PATTERN (monotonic seconds).
"""

import contextlib
import fcntl
import json
import pathlib
import re
import subprocess
import sys

LOCK = "/run/swapgate/swap.lock"
UNITS = pathlib.Path("/etc/systemd/system")


def out(*words):
    return subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=False, text=True).stdout


def unit_of(pid):
    with contextlib.suppress(OSError):
        found = re.findall(r"/([^/\n]+\.service)", pathlib.Path(f"/proc/{pid}/cgroup").read_text())
        return found[0] if found else ""
    return ""


def holders(port):
    found = {}
    for pid in sorted(set(re.findall(r"pid=(\d+)", out("ss", "-Hltnp", f"sport = :{port}")))):
        found.setdefault(unit_of(pid), []).append(int(pid))
    return found


def lock_free():
    try:
        with open(LOCK, "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except BlockingIOError:
        return False
    return True


def strays(units):
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name = (entry / "comm").read_text().strip()
            if name.startswith("VLLM::") and unit_of(entry.name) not in units:
                found.append(f"{name} pid {entry.name}")
    return found


def lines_at(unit, since, patterns):
    found = dict.fromkeys(patterns)
    for row in out("journalctl", "-u", unit, "-o", "json", "--no-pager", "-b", "0", "-n", "3000").splitlines():
        entry = json.loads(row)
        text, when = entry.get("MESSAGE"), int(entry["__MONOTONIC_TIMESTAMP"]) / 1e6
        for pattern in patterns:
            if found[pattern] is None and when >= since and isinstance(text, str) and re.search(pattern, text):
                found[pattern] = when
    return found


def status():
    try:
        return json.loads(out("/usr/local/bin/swapgate", "status"))
    except ValueError:
        return {}


def installed_ok(known):
    good = known.get("last_good")
    if not good:
        return False
    staged = pathlib.Path("/var/lib/swapgate/releases", good["release"], good["unit"])
    try:
        return staged.read_text() == (UNITS / good["unit"]).read_text()
    except OSError:
        return False


def main():
    known = status()
    units = sorted(path.name for path in UNITS.glob("vllm-*.service"))
    active = [unit for unit in units if out("systemctl", "is-active", unit).strip() not in ("inactive", "failed")]
    enabled = [unit for unit in units if out("systemctl", "is-enabled", unit).strip() == "enabled"]
    print(
        json.dumps(
            {
                "holders": holders(int(sys.argv[1])),
                "enabled": enabled,
                "active": active,
                "lock_free": lock_free(),
                "engine_strays": strays(units),
                "swap_unit": out("systemctl", "is-active", "swapgate-swap.service").strip(),
                "installed_ok": installed_ok(known),
                "status": known,
                "lines_at": lines_at(sys.argv[2], float(sys.argv[3]), sys.argv[4:]) if len(sys.argv) > 4 else {},
                "restarts": {
                    unit: int(out("systemctl", "show", unit, "--property=NRestarts").strip().partition("=")[2] or 0)
                    for unit in units
                },
            }
        )
    )


main()
