#!/usr/bin/env python3
"""Run swapgate's playbooks under a real systemd on a GPU machine that has neither systemd nor a network.

    python3 benchmarks/gpu/systemd_host.py --python PY --engine-site DIR --model DIR --carried DIR --out DIR

PY runs the engine and Ansible (3.11 or newer); the engine's site is an unpacked site-packages with vLLM. CARRIED holds
`fill`, the files of a Debian systemd with its libraries, and `ctl-site`, an unpacked ansible-core. Needs root and
overlayfs; standard library only. OUT/result.json says what was seen, up to the step that failed; logs lie beside it.

The host is the machine's own root under a layer in memory, with `fill` below both: what the machine has wins, nothing
of it is written to. systemd-nspawn boots that, sharing network and GPUs; Ansible runs inside over a local connection.
One thing is laid by hand: the engine's virtualenv, which role python_env would download. Its marker is the role's own.

Exit code 0 when each step was as expected, 1 when not (each is printed), 2 when the machine lacks something.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "scripts"))

import sandbox  # noqa: E402

JsonDict = dict[str, Any]

HOST = sandbox.Sandbox("gpu-systemd", 0)
ROOT = HOST.root
TREE, SITE, MODEL, CONTROLLER = "/opt/swapgate-tree", "/opt/engine-site", "/srv/models/proof", "/opt/ctl-site"
INVENTORY = "/etc/swapgate-inventory/hosts.json"
LIBRARIES = "usr/lib/x86_64-linux-gnu"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MASKED = (*sandbox.MASKED_UNITS, "dbus.service", "dbus.socket", "systemd-logind.service", "systemd-udevd.service")
PROGRAMS = ("unshare", "nsenter", "setpriv", "mount", "chroot", "ldconfig", "useradd", "groupadd", "ldd")
ENDING_S = 40.0
IDLE_MIB = 1000.0
UNIT = "vllm-proof{}.service"

MARKER_PLAY = """
- hosts: vllm_hosts
  gather_facts: false
  vars: {python_env_package: vllm, python_env_version: "VERSION"}
  tasks:
    - ansible.builtin.include_role: {name: python_env, tasks_from: look.yml, public: true}
    - ansible.builtin.copy:
        dest: "{{ __python_env_path }}/{{ __python_env_marker }}"
        mode: "0644"
        content: "{{ mark | to_nice_json }}"
      vars:
        role_path: TREE/roles/python_env
        mark: {inputs: "{{ __python_env_inputs_hash }}", package: vllm, version: "VERSION", engine_version: "VERSION",
               pinned: false}
"""


class StepError(Exception):
    """A step that did not end as expected; the text says what was found."""


def command(words: list[str], limit_s: float, env: dict[str, str] | None = None) -> tuple[int, str]:
    """Status and all output of a program; 124 when it took too long or cannot run."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
            env=env,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 124, str(error)
    return done.returncode, done.stdout.decode(errors="replace")


def must(words: list[str], limit_s: float = 30.0) -> str:
    """Output of a program that ended with 0. Raises StepError with its last lines."""
    status, text = command(words, limit_s)
    if status:
        raise StepError(f"`{' '.join(words)}` ended with status {status}: {' | '.join(text.splitlines()[-6:])}")
    return text


class Watch(threading.Thread):
    """Reads GPU memory once a second and asks /health five times a second, in seconds since `begun`."""

    def __init__(self, begun: float, gpu: str, port: int) -> None:
        super().__init__(daemon=True)
        self.begun, self.gpu, self.url = begun, gpu, f"http://127.0.0.1:{port}/health"
        self.memory: list[tuple[float, float]] = []
        self.health: list[tuple[float, bool]] = []

    def run(self) -> None:
        while True:
            for turn in range(5):
                now = round(time.monotonic() - self.begun, 2)
                if turn == 0 and self.gpu:
                    self.memory.append((now, memory_mib(self.gpu)))
                ok = answers(self.url)
                if not self.health or self.health[-1][1] != ok:
                    self.health.append((now, ok))
                time.sleep(0.2)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def memory_mib(gpu: str) -> float:
    """Used memory of a GPU; -1 when nvidia-smi does not say."""
    text = command(["nvidia-smi", "-i", gpu, "--query-gpu=memory.used", "--format=csv,noheader,nounits"], 10)[1]
    return float(text) if re.fullmatch(r"\d+\s*", text) else -1.0


class Trial:
    """One boot of the host and what was seen on it."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out
        self.begun = time.monotonic()
        self.result: JsonDict = {"steps": [], "not_as_expected": [], "seen": {}}
        self.keeper: subprocess.Popen[bytes] | None = None
        self.inside = 0
        self.watch = Watch(self.begun, options.gpu, options.port)

    # --- bookkeeping -------------------------------------------------------------------------------------------------

    def left_s(self) -> float:
        return float(self.options.limit_s - ENDING_S - (time.monotonic() - self.begun))

    def step(self, name: str, action: Callable[[], Any], needs_s: float = 0.0) -> bool:
        """Do one step and write down how it went; whether it went well."""
        row: JsonDict = {"step": name, "began_s": round(time.monotonic() - self.begun, 1)}
        self.result["steps"].append(row)
        if name in self.options.skip:
            row["skipped"] = "as asked for"
        elif self.left_s() < needs_s:
            row["skipped"] = f"{self.left_s():.0f} s were left, expected {needs_s:.0f} s"
        else:
            try:
                row["seen"] = action()
            except (StepError, sandbox.SandboxError, OSError, ValueError, KeyError) as error:
                row["error"] = f"{type(error).__name__}: {error}"
                self.result["not_as_expected"].append(f"{name}: {row['error']}")
        row["seconds"] = round(time.monotonic() - self.begun - row["began_s"], 1)
        print(f"{row['began_s']:6.1f} s  {name}: {row.get('error') or row.get('skipped') or 'ok'}", flush=True)
        self.save()
        return "error" not in row and "skipped" not in row

    def save(self) -> None:
        self.result["health_changes"], self.result["gpu_memory_mib"] = self.watch.health, self.watch.memory
        (self.out / "result.json").write_text(json.dumps(self.result, indent=1) + "\n", encoding="utf-8")

    # --- the machine -------------------------------------------------------------------------------------------------

    def check(self) -> JsonDict:
        """Everything that this program takes for granted about the machine; all that is wrong is said at once."""
        options = self.options
        wrong = [f"no program {name} in PATH" for name in PROGRAMS if not shutil.which(name)]
        filesystems = Path("/proc/filesystems").read_text().split()
        wrong += [f"the kernel has no {name}" for name in ("overlay", "tmpfs", "cgroup2") if name not in filesystems]
        wrong += [
            f"no /proc/self/ns/{n}"
            for n in ("pid", "mnt", "uts", "ipc", "cgroup")
            if not Path(f"/proc/self/ns/{n}").exists()
        ]
        wanted = [
            options.carried / "fill/usr/lib/systemd/systemd",
            options.carried / "fill/usr/bin/systemd-nspawn",
            options.carried / "ctl-site/ansible/__init__.py",
            options.engine_site / "vllm/__init__.py",
            options.model / "config.json",
            Path("/usr/bin/python3"),
        ]
        wanted += (
            [Path(f"/dev/nvidia{options.gpu}"), Path("/dev/nvidiactl"), Path("/dev/nvidia-uvm")] if options.gpu else []
        )
        wrong += [f"no {path}" for path in wanted if not path.exists()]
        if os.geteuid() != 0:
            wrong.append("not root")
        if Path("/run/systemd/system").is_dir():
            wrong.append("systemd runs this machine: deploy to it with the playbooks themselves")
        seen: JsonDict = {"kernel": os.uname().release, "cpus": os.cpu_count(), "hosts_python": sys.version.split()[0]}
        probe = (
            "import sys, platform, venv, yaml, jinja2; print(platform.python_version(), sys.prefix, sys.base_prefix)"
        )
        status, text = command(
            [options.python, "-c", probe], 30, {"PATH": PATH, "PYTHONPATH": str(options.carried / "ctl-site")}
        )
        seen["python"] = text.strip()
        if status or not re.match(r"3\.(1[1-9])", text):
            wrong.append(f"{options.python} is no Python 3.11 or newer with venv: {text[-300:]}")
        if answers(self.watch.url) or sandbox.port_holder(options.port):
            wrong.append(f"port {options.port} is taken")
        if options.gpu:
            seen["nvidia_smi"] = command(["nvidia-smi"], 20)[1]
            seen["gpu_memory_mib"] = memory_mib(options.gpu)
            if not 0 <= seen["gpu_memory_mib"] < IDLE_MIB:
                wrong.append(f"GPU {options.gpu} is not idle, or nvidia-smi fails: {seen['nvidia_smi'][-300:]}")
        seen["mounts"] = [
            line.split(" - ")[0].split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()
        ]
        if wrong:
            raise StepError("; ".join(wrong))
        return seen

    def cgroups(self) -> list[str]:
        """Mount what nspawn needs where the machine has mounted no cgroups."""
        if not sandbox.cgroup_dirs(HOST):
            sandbox.CGROUPS.mkdir(parents=True, exist_ok=True)
            must(["mount", "-t", "cgroup2", "cgroup2", str(sandbox.CGROUPS)])
        dirs = sandbox.cgroup_dirs(HOST)
        for path in dirs:
            path.mkdir(parents=True, exist_ok=True)
        return [str(path) for path in dirs]

    def root(self) -> JsonDict:
        """The host's root: the machine's under a layer in memory, with the carried files below."""
        layer = HOST.home / "layer"
        for path in (ROOT, layer):
            path.mkdir(parents=True, exist_ok=True)
        must(["mount", "-t", "tmpfs", "-o", "mode=0755,size=16g", "tmpfs", str(layer)])
        for name in ("upper", "work"):
            (layer / name).mkdir()
        fill = layer / "fill"  # overlayfs takes no layer that lies within another one
        must(["cp", "-a", str(self.options.carried / "fill"), str(fill)])
        must(
            [
                "mount",
                "-t",
                "overlay",
                "overlay",
                "-o",
                f"lowerdir=/:{fill},upperdir={layer}/upper,workdir={layer}/work",
                str(ROOT),
            ]
        )
        for path in self.result["steps"][0]["seen"]["mounts"]:  # overlayfs shows one file system
            if re.match(r"/(usr|opt|lib\w*)/", path):
                must(["mount", "--rbind", path, f"{ROOT}{path}"])
        for unit in MASKED:
            self.write(f"etc/systemd/system/{unit}", None)
        self.write("etc/machine-id", os.urandom(16).hex() + "\n")
        self.write("etc/hostname", "gpu-systemd\n")
        self.write("etc/hosts", "127.0.0.1 localhost gpu-systemd\n")
        self.write("etc/fstab", "")
        for folder in (
            "var/log/journal",
            "usr/local/bin",
            TREE[1:],
            SITE[1:],
            MODEL[1:],
            CONTROLLER[1:],
            "machine-sys",
        ):
            (ROOT / folder).mkdir(parents=True, exist_ok=True)
        seen: JsonDict = {"libraries_lacking": self.lacking()}
        if self.options.gpu:
            drivers = sorted(Path("/usr").glob("**/libnvidia-ml.so.*.*"))
            self.result["driver_folders"] = seen["driver_folders"] = [
                str(path.parent) for path in drivers if path.is_file() and not path.is_symlink()
            ]
            self.write("etc/ld.so.conf.d/00-gpu.conf", "".join(f"{folder}\n" for folder in seen["driver_folders"]))
            smi = shutil.which("nvidia-smi") or ""
            if not (ROOT / "usr/bin/nvidia-smi").exists() and smi != "/usr/local/bin/nvidia-smi":
                (ROOT / "usr/local/bin/nvidia-smi").symlink_to(smi)
        must(["chroot", str(ROOT), "ldconfig"])
        must(["chroot", str(ROOT), "systemd-sysusers"])
        for group in ("video", "render"):  # of any host with udev; the service user joins them
            must(["chroot", str(ROOT), "groupadd", "--system", "--force", group])
        self.virtualenv()
        self.inventory()
        return seen

    def write(self, name: str, text: str | None) -> None:
        """Write a file of the host; no text: a mask."""
        path = ROOT / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if text is None:
            path.symlink_to("/dev/null")
        else:
            path.write_text(text, encoding="utf-8")

    def lacking(self) -> list[str]:
        """Libraries or their versions that carried programs do not find in the host's root. Raises StepError."""
        programs = ["lib/systemd/systemd", "bin/systemctl", "bin/systemd-run", "lib/systemd/systemd-journald"]
        programs += ["bin/systemd-nspawn", "bin/systemd-analyze", "bin/journalctl", "bin/systemd-tmpfiles"]
        status, text = command(["chroot", str(ROOT), "ldd", *[f"/usr/{name}" for name in programs]], 20)
        lines = [line.strip() for line in text.splitlines() if "not found" in line]
        if status or lines:
            raise StepError(f"carried programs lack libraries here: {'; '.join(lines) or text[-300:]}")
        return lines

    def virtualenv(self) -> None:
        """What role python_env would have built: interpreter, engine and torch of the machine under the role's path."""
        version = self.options.version
        venv = f"/opt/swapgate/engines/vllm-{version}"
        must(["chroot", str(ROOT), self.options.python, "-m", "venv", "--without-pip", venv], 60)
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        own = must(["chroot", str(ROOT), f"{venv}/bin/python", "-c", ask]).strip()
        base = must(["chroot", str(ROOT), self.options.python, "-c", ask]).strip()
        self.write(f"{own[1:]}/engine.pth", f"{SITE}\nimport site; site.addsitedir({base!r})\n")
        # As pip writes it: the engine's processes import this file again.
        main = (
            "import sys\nfrom vllm.entrypoints.cli.main import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
        )
        self.write(f"{venv[1:]}/bin/vllm", f"#!{venv}/bin/python\n{main}")
        (ROOT / f"{venv[1:]}/bin/vllm").chmod(0o755)

    def inventory(self) -> None:
        """One host that is this machine, and the variants of the repository with three of this trial laid over them."""
        options = self.options
        own = {
            "baseline": {"soak_s": 5, "restart_delay_s": 3, "load_timeout_s": 300},
            "starved": {"extends": "baseline", "engine_args": {"gpu-memory-utilization": 0.001}},
            "mistyped": {"extends": "baseline", "engine_args": {"no-such-flag": 1}},
        }
        file = f"lookup('file', '{TREE}/group_vars/all/variants.yml')"
        table = f"({file} | from_yaml).swapgate_shipped_variants | combine(own_variants, recursive=true)"
        env = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        drafts = {name: f"{MODEL}-{name}" for name in ("eagle3", "medusa", "draft_model")}  # the table names them
        variables = {
            "swapgate_model": "proof",
            "swapgate_models": {
                "proof": {"path": MODEL, "served_name": "proof", "max_model_len": 4096, "drafts": drafts}
            },
            "own_variants": own,
            "swapgate_variants": f"{{{{ {table} }}}}",
            "swapgate_host": {
                "engine": {"package": "vllm", "version": options.version},
                "gpus": [int(options.gpu)] if options.gpu else [],
                "port": options.port,
                "engine_args": {"enforce-eager": True, "gpu-memory-utilization": 0.5},
                "env": env,
                "nccl": {"NCCL_NVLS_ENABLE": "0"},
            },
            "allow_disruption": True,
            "nvidia_stack_sysfs": "/machine-sys",
            "nvidia_stack_library_dirs": self.result.get("driver_folders", []),
        }
        host = {"ansible_connection": "local", "ansible_user": "root", "ansible_become": False}
        host["ansible_python_interpreter"] = options.python
        self.write(INVENTORY[1:], json.dumps({"vllm_hosts": {"hosts": {"gpu-systemd": host}}}))
        folder = Path(INVENTORY[1:]).parent / "group_vars"
        self.write(f"{folder}/vllm_hosts.json", json.dumps(variables))
        self.write(f"{folder.parent}/marker.yml", MARKER_PLAY.replace("VERSION", options.version).replace("TREE", TREE))
        if not options.gpu:  # the fake engine's word for what a real one does with so little memory
            rule = {"when": "gpu-memory-utilization 0.001", "crash_at": "80%", "crash_with": "kv_cache"}
            self.write("etc/fake_vllm.json", json.dumps({"load_s": 4, "variants": [rule]}))

    # --- the boot ----------------------------------------------------------------------------------------------------

    def boot_again(self) -> JsonDict:
        """Where cgroup2 alone cannot be had: the machine's own layout, in which the list of devices is not enforced."""
        sandbox.kill_container(HOST)
        self.options.plain_cgroups = True
        return self.boot()

    def boot(self) -> JsonDict:
        """Boot the host; what systemd found. Inside there is cgroup2 alone, whatever the machine has mounted."""
        options, unified = self.options, not self.options.plain_cgroups
        shown = {REPO: TREE, options.engine_site: SITE, options.model: MODEL, options.carried / "ctl-site": CONTROLLER}
        HOST.binds_ro = [f"{path.resolve()}:{inside}" for path, inside in shown.items()] + ["/sys:/machine-sys"]
        HOST.binds = [str(path) for path in sorted(Path("/dev").glob("nvidia*" if options.gpu else "fuse"))]
        paths = ["/" + LIBRARIES, *(str(options.carried / "fill" / LIBRARIES / name) for name in ("", "systemd"))]
        program = shutil.which("systemd-nspawn") or str(options.carried / "fill/usr/bin/systemd-nspawn")
        argv = [
            "env",
            f"LD_LIBRARY_PATH={':'.join(paths)}",
            program,
            *sandbox.nspawn_argv(HOST)[1:],
            *(["--system-call-filter=bpf"] if unified else []),  # with which systemd enforces DeviceAllow there
            *options.nspawn_arg,
        ]
        self.result["nspawn"] = argv
        dirs = [str(path) for path in sandbox.cgroup_dirs(HOST)]
        environment = {"PATH": PATH, "SYSTEMD_NSPAWN_TMPFS_TMP": "0"}
        if unified:
            environment["SYSTEMD_NSPAWN_UNIFIED_HIERARCHY"] = "1"
        console = (self.out / "console.log").open("wb")
        self.keeper = subprocess.Popen(
            ["/bin/sh", "-c", sandbox.KEEPER, "sandbox-keeper", *dirs, "--", *argv],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
            cwd="/",
        )
        HOST.pid, HOST.pid_start = self.keeper.pid, sandbox.process_start(self.keeper.pid)
        keeper = self.keeper

        def ended() -> str:
            text = (self.out / "console.log").read_text(errors="replace")
            return "" if keeper.poll() is None else f"nspawn ended with {keeper.returncode}: {text[-1500:]}"

        def up() -> bool:
            carriers = sandbox.container_processes(keeper.pid)
            self.inside = carriers[-1] if len(carriers) == 3 else 0
            return bool(self.inside) and self.ask("systemctl is-system-running")[1].strip() in ("running", "degraded")

        sandbox.wait_until("boot", 60, up, ended)
        return {
            "systemd": self.ask("systemctl --version")[1].splitlines()[0],
            "state": self.ask("systemctl is-system-running")[1].strip(),
            "failed": self.ask("systemctl --failed --plain --no-legend")[1],
            "cgroups": self.ask("stat -fc %T /sys/fs/cgroup")[1].strip(),
            "devices": self.ask("ls -l /dev")[1].splitlines(),
            "memory_limit": self.ask("df -m / /dev/shm")[1],
        }

    def ask(self, line: str, limit_s: float = 20.0) -> tuple[int, str]:
        """Run a shell line inside, beside what systemd runs."""
        words = ["nsenter", "-t", str(self.inside), "-m", "-u", "-i", "-n", "-p", "-C", "env", "-i", f"PATH={PATH}"]
        return command([*words, "HOME=/root", "LANG=C.UTF-8", "/bin/sh", "-c", line], limit_s)

    def engine(self) -> JsonDict:
        """Whether the laid engine starts for a user without rights, as role python_env tries what it builds."""
        program = f"/opt/swapgate/engines/vllm-{self.options.version}/bin/vllm"
        nobody = "setpriv --reuid=65534 --regid=65534 --clear-groups --no-new-privs"
        settings = "HOME=/nonexistent VLLM_NO_USAGE_STATS=1"
        status, text = self.ask(f"cd / && {nobody} env {settings} {program} --version", 120)
        if status or self.options.version not in text:
            raise StepError(
                f"{program} --version as nobody: status {status}, expected {self.options.version}: {text[-900:]}"
            )
        readable = self.ask(f"cd {MODEL} && {nobody} head -c 1 $(ls)", 20)
        if readable[0]:
            raise StepError(f"the model is not readable for everybody: {readable[1][-300:]}")
        return {"said": text}

    def device_policy(self) -> JsonDict:
        """Whether a unit's list of devices is enforced here: a unit without the GPU's must not open it."""
        node = "/dev/nvidiactl" if self.options.gpu else "/dev/fuse"
        run = "systemd-run -p Type=oneshot -p DevicePolicy=closed {} sh -c ': < " + node + "'"
        closed, listed = self.ask(run.format("")), self.ask(run.format(f"-p 'DeviceAllow={node} rw'"))
        return {"node": node, "closed": closed, "listed": listed, "enforced": closed[0] != 0 and listed[0] == 0}

    # --- the playbooks -----------------------------------------------------------------------------------------------

    def playbook(self, log: str, words: str, expected: int = 0, limit_s: float = 300.0) -> JsonDict:
        """Run a playbook inside; its last lines. Raises StepError when it ends otherwise than expected."""
        settings = (
            f"PYTHONPATH={CONTROLLER} ANSIBLE_CONFIG={TREE}/ansible.cfg ANSIBLE_NOCOLOR=1 HOME=/root LANG=C.UTF-8"
        )
        ansible = f"{self.options.python} -m ansible playbook -i {INVENTORY}"
        begun, limit_s = time.monotonic(), min(limit_s, max(self.left_s(), 5))
        line = f"cd {TREE} && timeout -k 5 {limit_s:.0f} env {settings} USER=root {ansible} {words}"
        status, text = self.ask(line, limit_s + 10)
        (self.out / f"play-{log}.log").write_text(text, encoding="utf-8")
        seen: JsonDict = {"status": status, "seconds": round(time.monotonic() - begun, 1)}
        seen["last_lines"] = text.splitlines()[-12:]
        if (status == 0) != (expected == 0) or status == 124:
            raise StepError(f"{words}: status {status}, expected {expected}: {' | '.join(text.splitlines()[-25:])}")
        return seen

    def deploy(self, variant: str, outcome: str, serves: str) -> JsonDict:
        """Deploy a variant, expecting a swap's outcome and what serves afterwards; memory before and after."""
        before, known = self.watch.memory[-1:], len(self.history())
        seen = self.playbook(
            variant, f"{TREE}/playbooks/deploy.yml -e variant={variant}", 0 if outcome == "swapped" else 2
        )
        ended = self.history()[known:]
        last = ended[-1] if ended else {"outcome": "refused"}  # by the preflight, before there was a swap
        kept = ("outcome", "phases", "seconds_without_service", "service_lost_s", "streams", "cause", "rollback_cause")
        seen.update({key: last.get(key) for key in kept}, memory_before=before, memory_after=self.watch.memory[-1:])
        seen["answer"] = self.answer()
        seen["unit"] = self.unit(serves)
        if last["outcome"] != outcome:
            raise StepError(f"{variant}: {last['outcome']}, expected {outcome}; {seen}")
        if "text" not in seen["answer"] or seen["unit"]["ActiveState"] != "active":
            raise StepError(f"{serves} does not answer: {seen}")
        return seen

    def history(self) -> list[JsonDict]:
        path = ROOT / "var/lib/swapgate/history.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def answer(self) -> JsonDict:
        """What the engine says to the machine, which shares its network."""
        body = {"model": "proof", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}
        url = f"http://127.0.0.1:{self.options.port}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=20) as reply:
                return {"text": json.load(reply)["choices"][0]["text"]}
        except (OSError, ValueError) as error:
            return {"error": str(error)}

    def unit(self, unit: str) -> JsonDict:
        """How systemd runs a unit, its processes with users and open GPU devices, and what it sees in /dev."""
        keys = "ActiveState,SubState,MainPID,NRestarts,Result,StatusText,User,DevicePolicy,DeviceAllow,ControlGroup"
        lines = self.ask(f"systemctl show -p {keys} {unit}")[1].splitlines()
        seen: JsonDict = {}
        for key, _, value in (line.partition("=") for line in lines):  # DeviceAllow has a line for each entry
            seen[key] = f"{seen[key]}, {value}" if key in seen else value
        pid, group = seen.get("MainPID", "0"), seen.get("ControlGroup", "")
        seen["processes"] = self.ask(
            f"for p in $(cat $(find /sys/fs/cgroup -path '*{group}/cgroup.procs' | head -1)); do "
            "echo $p $(cat /proc/$p/comm) uid $(awk '/^Uid/ {print $2}' /proc/$p/status) "
            "$(ls -l /proc/$p/fd | grep -o '/dev/nvidia.*' | sort -u); done"
        )[1].splitlines()
        seen["dev"] = self.ask(f"nsenter -t {pid} -m ls -l /dev")[1].splitlines()
        seen["environment"] = self.ask(f"tr '\\0' '\\n' < /proc/{pid}/environ | grep -E 'CUDA|NCCL|VLLM|HF_'")[
            1
        ].splitlines()
        seen["gpus"] = self.ask("swapgate gpus")[1]
        seen["compute_apps"] = self.ask("nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader")[1]
        return seen

    def kill_supervisor(self, unit: str) -> JsonDict:
        """kill -9 of the unit's main process alone: systemd must end the engine with it, and start it again."""
        old = self.unit(unit)["processes"]
        begun = time.monotonic()
        self.ask(f"systemctl kill --kill-who=main --signal=KILL {unit}")
        sandbox.wait_until(f"/health gone after the kill of {unit}", 30, lambda: not answers(self.watch.url))
        gone = time.monotonic() - begun
        sandbox.wait_until(
            f"{unit} active again", min(150, self.left_s()), lambda: self.ask(f"systemctl is-active {unit}")[0] == 0
        )
        seen = {
            "processes_before": old,
            "unanswered_after_s": gone,
            "active_after_s": time.monotonic() - begun,
            **self.unit(unit),
        }
        still = {row.split()[0] for row in old} & {row.split()[0] for row in seen["processes"]}
        if still or seen["NRestarts"] == "0" or "text" not in self.answer():
            raise StepError(f"processes that outlived their unit: {still}; {seen}")
        return seen

    def stop(self, unit: str) -> JsonDict:
        """`systemctl stop`, and how soon the memory is free."""
        begun = time.monotonic()
        status, text = self.ask(f"systemctl stop {unit}", 100)
        seen = {"status": status, "said": text, "stopped_after_s": time.monotonic() - begun}
        if self.options.gpu:
            sandbox.wait_until("GPU memory free", 30, lambda: 0 <= memory_mib(self.options.gpu) < IDLE_MIB)
            seen.update(free_after_s=time.monotonic() - begun, memory_mib=memory_mib(self.options.gpu))
        return seen

    # --- all of it ---------------------------------------------------------------------------------------------------

    def run(self) -> int:
        if not self.step("check the machine", self.check):
            return 2
        steps = (("cgroups", self.cgroups), ("root", self.root), ("boot", self.boot), ("engine", self.engine))
        for name, action in steps:
            if not self.step(name, action) and not (name == "boot" and self.step("boot, again", self.boot_again)):
                return 1
        self.watch.start()
        books = f"{TREE}/playbooks"
        base, ngram = UNIT.format(""), UNIT.format("-ngram")
        self.step("device policy", self.device_policy)
        if not self.step(
            "marker of the engine's virtualenv", lambda: self.playbook("marker", f"{Path(INVENTORY).parent}/marker.yml")
        ):
            return 1
        if self.step("deploy baseline", lambda: self.deploy("baseline", "swapped", base)):
            good = self.step("deploy ngram", lambda: self.deploy("ngram", "swapped", ngram), 60)
            serves = ngram if good else base
            self.step("deploy starved", lambda: self.deploy("starved", "rolled_back", serves), 60)
            self.step("deploy mistyped", lambda: self.deploy("mistyped", "refused", serves), 40)
            self.step("status", lambda: self.playbook("status", f"{books}/status.yml"), 10)
            self.step("history", lambda: self.playbook("history", f"{books}/history.yml"), 10)
            self.step("kill -9 of the supervisor", lambda: self.kill_supervisor(serves), 50)
            self.step("stop", lambda: self.stop(serves), 15)
        return 1 if self.result["not_as_expected"] else 0

    def end(self) -> None:
        """Keep the host's logs, then end every process of it and give its mounts and cgroups back."""
        if self.inside:
            _, journal = self.ask("journalctl --no-pager -o short-monotonic | tail -c 400000")
            (self.out / "journal.log").write_text(journal, encoding="utf-8")
            for name in ("state.json", "history.jsonl"):
                (self.out / name).write_text(self.ask(f"cat /var/lib/swapgate/{name}")[1], encoding="utf-8")
        if self.keeper:
            sandbox.kill_container(HOST)
            self.keeper.wait()
        sandbox.remove_cgroups(HOST)
        if self.options.gpu:
            time.sleep(2)
            self.result["seen"]["nvidia_smi_after"] = command(["nvidia-smi"], 20)[1]
        self.save()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="interpreter that has torch")
    parser.add_argument("--engine-site", required=True, type=Path, help="site-packages with vLLM")
    parser.add_argument("--model", required=True, type=Path, help="model folder with safetensors")
    parser.add_argument("--carried", required=True, type=Path, help="folder with fill/ and ctl-site/")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--version", default="0.26.0", help="the engine's version (default: %(default)s)")
    parser.add_argument("--gpu", default="0", help="index of the GPU; empty: the fake engine on the CPU (default: 0)")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--limit-s", type=float, default=480.0, help="ends by then (default: %(default)s)")
    parser.add_argument("--skip", action="append", default=[], metavar="STEP", help="a step to leave out, by its name")
    parser.add_argument("--plain-cgroups", action="store_true", help="the machine's layout, with no device policy")
    parser.add_argument("--nspawn-arg", action="append", default=[], help="a further argument of systemd-nspawn")
    options = parser.parse_args()
    if os.environ.get("SWAPGATE_OWN_MOUNTS") != "1":  # all mounts below go with this process
        words = ["unshare", "--mount", "--propagation", "slave", sys.executable, *sys.argv]
        os.execvpe(words[0], words, {**os.environ, "SWAPGATE_OWN_MOUNTS": "1"})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.out.mkdir(parents=True, exist_ok=True)
    trial = Trial(options)
    try:
        return trial.run()
    finally:
        trial.end()
        for line in trial.result["not_as_expected"]:
            print(f"not as expected: {line[:600]}")


if __name__ == "__main__":
    sys.exit(main())
