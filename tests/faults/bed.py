"""The test bed: a host with the fake engine, every release of the matrix staged, and `baseline` last good and serving.

Made once and kept; what changed since (the host program, the fake engine, the releases) is brought up to date. Between
two rows `reset` puts everything back that a fault may have touched.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts import sandbox

from .host import OTHER_PORT, PORT, REPO, SERVED, SSH_PORT, Host, HostError

FOLDER = REPO / "tests/faults"
ARTIFACTS = REPO / ".artifacts/faults"
MODEL = "/srv/models/tiny"
SHELF = "/opt/wheels-of-the-matrix"
ENGINE = "0.32.0"
OLDER = "0.30.0"
# On the shelf, for an upgrade in place.
NEWER = "0.31.0"
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 4, "prompt_lookup_max": 4}
BASE = {
    "description": "plain decoding",
    "soak_s": 2,
    "restart_delay_s": 1,
    "drain_timeout_s": 3,
    "load_timeout_s": 40,
    "stall_timeout_s": 6,
}
CONFIG = {"architectures": ["TinyForCausalLM"], "model_type": "tiny", "max_position_embeddings": 4096}
Table = dict[str, dict[str, Any]]


def _release(variant: str, entry: dict[str, Any] | None = None, **over: dict[str, Any]) -> dict[str, Any]:
    """One release to stage: a variant, its entry in the table, and what is laid over host and model for it alone."""
    table = {} if entry is None else {variant: entry}
    return {"variant": variant, "table": table, "host": over.get("host", {}), "model": over.get("model", {})}


def _odd(name: str, **entry: Any) -> dict[str, Any]:
    return _release(name, {"extends": "baseline", "description": "for a fault", **entry})


# Label to release. A label is what a row names as its target.
RELEASES: Table = {
    "baseline": _release("baseline"),
    "ngram": _release("ngram"),
    "baseline2": _release("baseline", {"engine_args": {"max-num-seqs": 16}}),
    "elsewhere": _release("elsewhere", {"extends": "baseline", "description": "x"}, host={"port": OTHER_PORT}),
    "gpu": _release("gpu", {"extends": "baseline", "description": "x"}, host={"gpus": [0]}),
    "unknown_flag": _odd("unknown_flag", engine_args={"no-such-flag": 1}),
    "removed_flag": _odd("removed_flag", engine_args={"disable-log-requests": True}),
    "bad_method": _odd("bad_method", speculative_config={**NGRAM, "tensor_parallel_size": 1}),
    "bad_parser": _release("bad_parser", {"extends": "baseline"}, model={"tool_call_parser": "no_such_parser"}),
    "too_long": _release("too_long", {"extends": "baseline"}, model={"max_model_len": 99999999}),
    "no_draft": _odd("no_draft", draft="eagle3", speculative_config={"method": "eagle3", "num_speculative_tokens": 3}),
    "no_venv": _odd("no_venv", engine_version="0.29.0"),
    "older": _odd("older", engine_version=OLDER),
    "vulnerable": _odd("vulnerable", engine_version="0.10.0"),
}

VARIABLES: dict[str, Any] = {
    "swapgate_model": "tiny",
    "swapgate_models": {
        "tiny": {
            "path": MODEL,
            "served_name": SERVED,
            "max_model_len": 2048,
            "drafts": {"eagle3": "/srv/models/tiny-eagle3"},
        }
    },
    "swapgate_host": {"engine": {"package": "vllm", "version": ENGINE}, "gpus": [], "port": PORT, "free_timeout_s": 5},
    "swapgate_variants": {
        "baseline": BASE,
        "ngram": {"extends": "baseline", "description": "drafts from the text", "speculative_config": NGRAM},
    },
    "fault_releases": RELEASES,
}

# Of the labels whose unit is not named like them; those of the last two lines are staged by rows.
UNIT = {
    "baseline": "vllm-tiny.service",
    "baseline2": "vllm-tiny.service",
    "ngram": "vllm-tiny-ngram.service",
    **dict.fromkeys(("directive", "trial", "watchdog"), "vllm-tiny-ngram.service"),
    "gpu-waits": "vllm-tiny-gpu.service",
    "links": "vllm-tiny-older.service",
}

SAVE = """set -e
rm -rf /opt/faults/good; mkdir -p /opt/faults/good/units /opt/faults/good/lib
cp -a /etc/swapgate /opt/faults/good/etc
cp -a /etc/systemd/system/vllm-tiny.service /etc/systemd/system/vllm-tiny.service.d /opt/faults/good/units/
cp -a /etc/systemd/system/swapgate-*.service /opt/faults/good/units/
cp -a /usr/local/bin/swapgate /opt/faults/good/swapgate
cp -a /var/lib/swapgate/. /opt/faults/good/lib/
rm -rf /opt/faults/good/lib/preflight /opt/faults/good/lib/history.jsonl /opt/faults/good/lib/request.json
rm -rf /opt/faults/good/model; cp -a {model} /opt/faults/good/model
"""

# Puts back what a row may have broken. $1 is `cold` when the serving baseline must be started anew too.
RESET = """set -u
systemctl list-units 'fault-*' --all --plain --no-legend | cut -d' ' -f1 | xargs -r systemctl stop
for place in {places}; do while mountpoint -q $place; do umount -l $place || break; done; done
rm -rf /usr/local/bin/nvidia-smi /etc/systemd/system/swapgate-swap.service.d /run/swapgate/swap.lock
echo '{knobs}' > /etc/fake_vllm.json
systemctl kill -s KILL swapgate-swap.service 2>/dev/null
for try in 1 2 3 4 5 6 7 8 9 10; do
  case $(systemctl is-active swapgate-swap.service) in inactive|failed) break;; esac
  systemctl kill -s KILL swapgate-swap.service 2>/dev/null; sleep 0.3
done
for unit in $(cd /etc/systemd/system; ls -d vllm-*.service); do
  if [ $unit != vllm-tiny.service ] || [ $1 = cold ]; then
    systemctl kill -s KILL $unit 2>/dev/null; systemctl stop $unit 2>/dev/null; systemctl disable -q $unit 2>/dev/null
  fi
done
mkdir -p /var/lib/swapgate/preflight
find /var/lib/swapgate -mindepth 1 -maxdepth 1 ! -name preflight -exec rm -rf {{}} +
cp -a /opt/faults/good/lib/. /var/lib/swapgate/
rm -rf /etc/swapgate /etc/systemd/system/vllm-* /etc/systemd/system/swapgate-swap.service.d
cp -a /opt/faults/good/etc /etc/swapgate
cp -a /opt/faults/good/units/. /etc/systemd/system/
cp -a /opt/faults/good/swapgate /usr/local/bin/swapgate
cmp -s /opt/faults/good/model/config.json {model}/config.json && cmp -s /opt/faults/good/model/model-1.safetensors \\
  {model}/model-1.safetensors && [ -z "$(find {model} -newer /opt/faults/good/stamp)" ] || {{
  rm -rf {model}; cp -a /opt/faults/good/model {model}; }}
systemctl daemon-reload
rm -f /etc/systemd/system/multi-user.target.wants/vllm-*
systemctl enable -q vllm-tiny.service
systemctl reset-failed
case $(systemctl is-active vllm-tiny.service) in active) ;; *) systemctl start vllm-tiny.service;; esac
"""
# What every fake engine of the matrix has, unless a row says otherwise: a load that a person would not wait for.
KNOBS = {"load_s": 0.6}
PLACES = f"/var/lib/swapgate /var/cache /sys/module {MODEL}"


def _digest(*places: Path) -> str:
    """A hash over files and folders of this checkout."""
    digest = hashlib.sha256()
    for place in places:
        files = sorted(place.rglob("*")) if place.is_dir() else [place]
        for file in files:
            if file.is_file() and "__pycache__" not in file.parts and "molecule" not in file.parts:
                digest.update(str(file.relative_to(REPO)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


class Bed:
    """The prepared host: its releases by label, and the way back to the known good state."""

    def __init__(self, host: Host, releases: dict[str, str]) -> None:
        self.host = host
        self.releases = releases

    def label_of(self, release: str) -> str:
        """The label of a release's hash."""
        return next((label for label, known in self.releases.items() if known == release), release)

    def reset(self, cold: bool = False) -> None:
        """`baseline` serves, is last good and alone enabled; nothing of an earlier fault is left. HostError if not."""
        if not self.host.box.running():
            self.host.power_on()
        script = RESET.format(model=MODEL, places=PLACES, knobs=json.dumps(KNOBS))
        done = self.host.run(f"bash -s {'cold' if cold else 'warm'} 2>&1", given=script, limit_s=90)
        if self.host.complete() is None and not cold:
            self.reset(cold=True)
            return
        end = time.monotonic() + 20
        while self.host.complete() is None:
            if time.monotonic() > end:
                raise HostError(f"baseline does not answer after a reset; the reset said:\n{done.stdout}{done.stderr}")
            time.sleep(0.2)


def _wheels() -> Path:
    out = ARTIFACTS / "wheels"
    builder = [sys.executable, str(REPO / "tests/fake_vllm/build_wheels.py"), str(out), ENGINE, OLDER, NEWER]
    subprocess.run(builder, check=True, capture_output=True)
    return out


def _engines(host: Host) -> None:
    """A virtualenv for each engine version, made the way role python_env leaves one."""
    for version in (ENGINE, OLDER):
        venv = f"/opt/swapgate/engines/vllm-{version}"
        marker = json.dumps({"package": "vllm", "version": version})
        pip = f"{venv}/bin/pip install -q --no-index --find-links {SHELF} --force-reinstall vllm=={version}"
        host.sh(f"rm -rf {venv}; python3 -m venv {venv} && {pip}", limit_s=180)
        host.write(f"{venv}/swapgate-env.json", marker + "\n")
    host.sh(
        "cp -a /opt/swapgate/engines/. /opt/faults/engines/ 2>/dev/null || "
        "{ mkdir -p /opt/faults && cp -a /opt/swapgate/engines /opt/faults/engines; }"
    )


def _stage(host: Host) -> dict[str, str]:
    """Run the playbook; returns label to release."""
    variables = ARTIFACTS / f"{host.name}-variables.json"
    variables.write_text(json.dumps(VARIABLES, indent=1))
    words = [
        str(Path(sys.executable).parent / "ansible-playbook"),
        "-i",
        str(host.box.inventory),
        "-e",
        f"@{variables}",
        str(FOLDER / "prepare.yml"),
    ]
    done = subprocess.run(words, cwd=REPO, capture_output=True, text=True, check=False)
    staged = dict(re.findall(r"staged (\w+) as ([0-9a-f]{12})", done.stdout))
    if done.returncode != 0 or set(staged) != set(RELEASES):
        lacks = sorted(set(RELEASES) - set(staged))
        raise HostError(
            f"staging ended with status {done.returncode}, without {lacks}:\n{done.stdout[-3000:]}{done.stderr}"
        )
    return staged


def _first_swap(host: Host, releases: dict[str, str]) -> None:
    """`baseline` by the front door, so that it is last good. A swap may forget old releases: these must all stay."""
    host.sh("rm -rf /opt/faults/releases; mkdir -p /opt/faults; cp -a /var/lib/swapgate/releases /opt/faults/releases")
    host.sh(
        "systemctl stop 'vllm-*' swapgate-swap.service; rm -rf /etc/systemd/system/vllm-* /etc/swapgate/variants "
        "/var/lib/swapgate/state.json /var/lib/swapgate/history.jsonl /etc/fake_vllm.json; systemctl daemon-reload; "
        "systemctl reset-failed; rm -f /etc/systemd/system/multi-user.target.wants/vllm-*",
        limit_s=120,
    )
    host.sh(f"swapgate ask {releases['baseline']} --by prepare")
    end = time.monotonic() + 60
    while not host.swap().get("outcome"):
        if time.monotonic() > end:
            raise HostError(f"the first swap of the bed has no outcome after 60 s; state: {host.state()}")
        time.sleep(0.2)
    if host.swap()["outcome"] != "swapped":
        raise HostError(f"the first swap of the bed: expected swapped, found {json.dumps(host.swap(), indent=1)}")
    # Its unit is there a little longer: a reset that killed it would have systemd start it again.
    host.sh("for n in $(seq 99); do [ $(systemctl is-active swapgate-swap) = activating ] || exit 0; sleep 0.1; done")
    state = host.state()
    state["swap"] = None
    host.sh("cp -a /opt/faults/releases/. /var/lib/swapgate/releases/")
    host.write("/var/lib/swapgate/state.json", json.dumps(state))
    host.sh(SAVE.format(model=MODEL) + "touch /opt/faults/good/stamp")


def prepare(name: str, say: Callable[[str], None]) -> Bed:
    """The bed on the sandbox of that name, made or brought up to date."""
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    wheels = _wheels()
    fresh = name not in sandbox.known_names()
    words = [
        sys.executable,
        str(REPO / "scripts/sandbox.py"),
        "up",
        name,
        "--ssh-port",
        str(SSH_PORT),
        "--bind-ro",
        f"{wheels}:{SHELF}",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise HostError(f"sandbox {name}: exit {done.returncode}: {done.stderr}")
    host = Host(name)
    record = ARTIFACTS / f"{name}.json"
    known = json.loads(record.read_text()) if record.is_file() and not fresh else {}
    engine = _digest(REPO / "tests/fake_vllm/vllm", REPO / "tests/fake_vllm/build_wheels.py") + str(CONFIG)
    program = _digest(REPO / "plugins", REPO / "roles/vllm_service", FOLDER / "prepare.yml", FOLDER / "bed.py")
    program += f" on {PORT}"
    now = {"engine": engine, "program": program, "releases": known.get("releases", {})}
    if known.get("engine") != engine:
        say("installing the fake engine")
        maker = REPO / "roles/model_cache/molecule/default/files/make_model.py"
        host.sh(f"python3 - {MODEL} 4096", given=maker.read_text())
        host.write(f"{MODEL}/config.json", json.dumps(CONFIG) + "\n")
        _engines(host)
    if known.get("engine") != engine or known.get("program") != program:
        say("staging the host program and the releases")
        now["releases"] = _stage(host)
        say("swapping to baseline for the first time")
        _first_swap(host, now["releases"])
    host.write("/opt/faults/look.py", (FOLDER / "look.py").read_text())
    record.write_text(json.dumps(now, indent=1) + "\n")
    return Bed(host, now["releases"])
