#!/usr/bin/env python3
"""Throwaway systemd hosts for trying and testing swapgate on one machine, without a container engine.

Each sandbox is a Debian root directory booted by systemd-nspawn: a real systemd as PID 1 and a real sshd on a loopback
port, sharing the machine's network, CPUs and memory. Needs root. Progress goes to stderr; stdout carries only results.

exit codes:
  0  done (also: `up` of a sandbox that already runs, `down` of one that does not)
  1  it was tried and failed: the message says where it stopped and shows the last console lines
  2  wrong usage
  3  this machine lacks something (root, a package, a kernel feature): the message says what and how to get it
  4  no sandbox of that name
  5  a conflict: the SSH port is taken, or the sandbox runs with other settings than asked for
`ssh` ends with the remote command's status (255: the connection failed).
"""

from __future__ import annotations

import argparse
import configparser
import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
SUITE = "bookworm"
# The packages of a small Debian server with Python: what any host in a real inventory has before the first playbook.
PACKAGES = (
    "acl",
    "ca-certificates",
    "dbus",
    "iproute2",
    "libnuma1",
    "libpam-systemd",
    "openssh-server",
    "procps",
    "python3",
    "python3-venv",
    "sudo",
    "systemd",
    "systemd-sysv",
)
# Raised whenever prepare_base() changes, so that an older cached tarball is not used.
RECIPE = 1
MACHINE_PACKAGES = {
    "systemd-nspawn": "systemd-container",
    "debootstrap": "debootstrap",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "tar": "tar",
    "unshare": "util-linux",
}
# Any of these shows the report's pages to their tests; Chromium alone comes as a Debian package.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Units without a purpose here: consoles, hardware, and whatever would touch the network shared with the machine.
MASKED_UNITS = (
    "apt-daily-upgrade.timer",
    "apt-daily.timer",
    "console-getty.service",
    "dev-hugepages.mount",
    "e2scrub_reap.service",
    "getty@.service",
    "getty.target",
    "sys-fs-fuse-connections.mount",
    "systemd-network-generator.service",
    "systemd-networkd.service",
    "systemd-networkd.socket",
    "systemd-networkd-wait-online.service",
    "systemd-resolved.service",
    "systemd-timesyncd.service",
)
FIRST_NAME = "sandbox"
FIRST_PORT = 2222
BOOT_LIMIT_S = 90.0
STOP_LIMIT_S = 45.0
POLL_S = 0.1
SYSTEM_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
CGROUPS = Path("/sys/fs/cgroup")

# The process that stays while a sandbox runs; its arguments are cgroups, `--`, and nspawn's argv. It enters them,
# gives nspawn a private tmpfs for its run directory (nspawn clears that at a reboot, and refuses to on a disk), starts
# nspawn, again whenever it ends with 133 (a reboot inside, when nspawn keeps its unit), and hands on the order to stop.
KEEPER = """
while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs" || exit; shift; done; shift
mkdir -p /run/systemd/nspawn && mount -t tmpfs -o mode=0755 tmpfs /run/systemd/nspawn || exit
trap 'kill -TERM "$child"' TERM
status=133
while [ "$status" = 133 ]; do
  "$@" & child=$!
  while kill -0 "$child" 2> /dev/null; do wait "$child"; status=$?; done
done
exit "$status"
"""

OK, FAILED, USAGE, LACKS, NO_SUCH, CONFLICT = 0, 1, 2, 3, 4, 5


class SandboxError(Exception):
    """A failure to tell the operator about; `code` is the exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def say(text: str) -> None:
    """Print one progress line for the operator on stderr."""
    print(f"sandbox: {text}", file=sys.stderr, flush=True)


# --- what is kept about a sandbox ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Sandbox:
    """One sandbox as recorded in `.sandbox/NAME/sandbox.json`.

    `pid` is that of the keeper (see KEEPER), nspawn's parent (0: not running), and `pid_start` its start time in clock
    ticks since boot, which together name one process for ever: a recycled number is not taken for ours. `binds` are
    nspawn's --bind values (`HOST:DIR`), `binds_ro` the read-only ones.
    """

    name: str
    ssh_port: int
    binds: list[str] = dataclasses.field(default_factory=list)
    binds_ro: list[str] = dataclasses.field(default_factory=list)
    pid: int = 0
    pid_start: int = 0

    @property
    def home(self) -> Path:
        return sandbox_home(self.name)

    @property
    def root(self) -> Path:
        return self.home / "root"

    @property
    def key(self) -> Path:
        return self.home / "id_ed25519"

    @property
    def inventory(self) -> Path:
        return self.home / "inventory.yml"

    @property
    def console(self) -> Path:
        return self.home / "console.log"

    @property
    def tag(self) -> str:
        """Short name, unique on this machine: two checkouts may both have a sandbox called `sandbox`."""
        return f"{self.name}-{hashlib.sha256(str(self.home).encode()).hexdigest()[:8]}"

    @property
    def control_dir(self) -> Path:
        """Where SSH's control sockets go: a short path, for a Unix socket's may have 107 bytes at most."""
        return Path("/run/swapgate-sandbox") / self.tag[-8:]

    def running(self) -> bool:
        return self.pid > 0 and process_start(self.pid) == self.pid_start

    def save(self) -> None:
        write_file(self.home / "sandbox.json", json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    def report(self) -> dict[str, object]:
        """The JSON object that `up` prints."""
        return {
            "name": self.name,
            "root": str(self.root),
            "ssh_port": self.ssh_port,
            "key": str(self.key),
            "pid": self.pid if self.running() else 0,
            "inventory": str(self.inventory),
        }


def sandbox_home(name: str) -> Path:
    return REPO / ".sandbox" / name


def load_sandbox(name: str) -> Sandbox:
    """Read one record. Raises SandboxError(NO_SUCH) with the names that exist."""
    path = sandbox_home(name) / "sandbox.json"
    if not path.is_file():
        known = ", ".join(known_names()) or "none"
        raise SandboxError(
            f"no sandbox named {name!r} in {path.parent.parent}; there are: {known}. "
            f"Make it with: scripts/sandbox.py up {name}",
            NO_SUCH,
        )
    return Sandbox(**json.loads(path.read_text()))


def known_names() -> list[str]:
    return sorted(path.parent.name for path in (REPO / ".sandbox").glob("*/sandbox.json"))


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` (made if absent); the kernel frees it when this process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def write_file(path: Path, text: str, mode: int = 0o644) -> None:
    """Write a file so that a reader sees the old or the new text, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text)
    beside.chmod(mode)
    beside.replace(path)


# --- processes and cgroups -------------------------------------------------------------------------------------------


def run(argv: Sequence[str | Path], env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program, capturing text output. Raises SandboxError with its last lines when it fails."""
    words = [str(word) for word in argv]
    done = subprocess.run(words, text=True, capture_output=True, check=False, env=env)
    if done.returncode != 0:
        tail = "\n  ".join((done.stderr or done.stdout).strip().splitlines()[-8:])
        raise SandboxError(f"`{' '.join(words)}` ended with status {done.returncode}:\n  {tail}")
    return done


def process_start(pid: int) -> int:
    """Start time of a live process in clock ticks since boot; 0 when there is none (a zombie counts as none)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def children(pid: int) -> list[int]:
    """Process ids of a process's children; empty when it has none or is gone."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def container_processes(keeper: int) -> list[int]:
    """The processes that carry a container, outermost first: keeper, nspawn, and the PID 1 inside while there is one.

    nspawn's child counts only once it is PID 1 of a namespace of its own: before, it is a passing helper.
    """
    found = [keeper]
    for nspawn in children(keeper):
        found.append(nspawn)
        for child in children(nspawn):
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{child}/status").read_text()
                ids = re.search(r"^NSpid:\s*(.*)$", status, re.MULTILINE)
                if ids and ids[1].split()[-1] == "1":
                    found.append(child)
    return found


def cgroup_dirs(sandbox: Sandbox) -> list[Path]:
    """The cgroups to start nspawn in, one per hierarchy that systemd uses; empty when systemd runs this machine.

    Without a systemd as PID 1 every nspawn would put its payload into the same `/payload` cgroup, and two sandboxes'
    `system.slice` would be one directory. Where systemd is PID 1 nspawn asks it for a scope instead.
    """
    if Path("/run/systemd/system").is_dir():
        return []
    roots = [CGROUPS / "systemd", CGROUPS / "unified"] if (CGROUPS / "systemd").is_dir() else [CGROUPS]
    return [root / "swapgate" / sandbox.tag for root in roots if (root / "cgroup.procs").exists()]


def cgroup_members(sandbox: Sandbox) -> list[int]:
    """Processes still in the sandbox's cgroups. Threads of other namespaces read as 0 and are left out."""
    found: set[int] = set()
    for top in cgroup_dirs(sandbox):
        for procs in [*top.glob("**/cgroup.procs")]:
            with contextlib.suppress(OSError):
                found.update(int(pid) for pid in procs.read_text().split())
    return sorted(found - {0})


def remove_cgroups(sandbox: Sandbox) -> None:
    """Remove the sandbox's empty cgroups, deepest first; one that is still busy stays and is used again."""
    for top in cgroup_dirs(sandbox):
        for path in sorted([*top.glob("**/"), top], key=lambda p: -len(p.parts)):
            with contextlib.suppress(OSError):
                path.rmdir()


def wait_until(what: str, limit_s: float, test: Callable[[], bool], alive: Callable[[], str] = lambda: "") -> None:
    """Poll `test` until it is true. Raises SandboxError after `limit_s`, or at once when `alive` returns a reason."""
    deadline = time.monotonic() + limit_s
    while not test():
        reason = alive()
        if reason:
            raise SandboxError(f"{what}: {reason}")
        if time.monotonic() > deadline:
            raise SandboxError(f"{what}: not within {limit_s:.0f} s")
        time.sleep(POLL_S)


# --- what this machine must have -------------------------------------------------------------------------------------


def missing_packages() -> list[str]:
    return sorted({package for program, package in MACHINE_PACKAGES.items() if not shutil.which(program)})


def require_machine() -> None:
    """Raise SandboxError(LACKS) unless sandboxes can be made here."""
    lacks = []
    if sys.platform != "linux":
        lacks.append(f"Linux (this is {sys.platform})")
    if os.geteuid() != 0:
        lacks.append(f"root (this is uid {os.geteuid()}; run it with sudo)")
    packages = missing_packages()
    if packages:
        names = " ".join(packages)
        lacks.append(f"packages: {names} (apt-get install -y {names}, or: scripts/sandbox.py install)")
    if lacks:
        raise SandboxError("this machine lacks " + "; ".join(lacks), LACKS)


def install(options: argparse.Namespace) -> int:
    """Install what sandboxes, and the virtualenv of the controller's tools, need on a Debian or Ubuntu machine; with
    `--browser` instead what the tests of the report's pages need."""
    if options.browser:
        packages = [] if any(shutil.which(name) for name in BROWSERS) else ["chromium", "fonts-dejavu-core"]
        if packages and machine_release().get("ID") == "ubuntu":
            raise SandboxError(
                f"found none of {', '.join(BROWSERS)}, and Ubuntu has Chromium as a snap only. Next: install the "
                "google-chrome-stable package from its maker, or run these tests on Debian",
                LACKS,
            )
    else:
        packages = missing_packages()
        if importlib.util.find_spec("ensurepip") is None:
            packages.append("python3-venv")
    if not packages:
        say("nothing to install: everything is here")
        return OK
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise SandboxError(
            f"cannot install {' '.join(packages)}: needs root and apt-get. On other systems install "
            + ("Chromium" if options.browser else "systemd-nspawn, debootstrap and an OpenSSH client")
            + " with the system's package manager",
            LACKS,
        )
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    if not options.browser:  # Ubuntu needs Debian's keys to check what debootstrap fetches
        packages.append("debian-archive-keyring")
    say(f"installing {' '.join(packages)}")
    run(["apt-get", "update", "-qq"], env=quiet)
    run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages], env=quiet)
    if not options.browser:
        require_machine()
    return OK


# --- the base tarball ------------------------------------------------------------------------------------------------


def cache_dir() -> Path:
    return Path(os.environ.get("SWAPGATE_CACHE") or Path.home() / ".cache" / "swapgate")


def base_tarball() -> Path:
    key = hashlib.sha256("\n".join([f"recipe {RECIPE}", SUITE, *PACKAGES]).encode()).hexdigest()[:12]
    return cache_dir() / f"debian-{SUITE}-{key}.tar"


def machine_release() -> dict[str, str]:
    """The machine's os-release as a dict; empty where there is no such file."""
    path = Path("/etc/os-release")
    if not path.is_file():
        return {}
    pairs = (line.partition("=") for line in path.read_text().splitlines() if "=" in line)
    return {key: value.strip('"') for key, _, value in pairs}


def debian_sources() -> tuple[str, str]:
    """(deb822 text, mirror URL) of the machine's own sources for the sandbox's Debian release.

    A machine of the same release knows the mirror that works at its site. Foreign archives among its sources are left
    out (their keys are not in the sandbox). On any other system both are empty: debootstrap then uses its default.
    """
    release = machine_release()
    if release.get("ID") != "debian" or release.get("VERSION_CODENAME") != SUITE:
        return "", ""
    stanzas = []
    for path in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")):
        stanzas += [part.strip() for part in re.split(r"\n\s*\n", path.read_text()) if part.strip()]
    own_suite = re.compile(rf"^Suites:.*\b{SUITE}\b", re.MULTILINE)
    stanzas = [stanza for stanza in stanzas if own_suite.search(stanza)]
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*.list"))]:
        lines = path.read_text().splitlines() if path.is_file() else []
        for line in lines:
            words = re.sub(r"\[.*?\]", "", line).split()
            if len(words) > 3 and words[0] == "deb" and re.fullmatch(rf"{SUITE}(-\w+)*", words[2]):
                uri, suite, components = words[1], words[2], " ".join(words[3:])
                stanzas.append(f"Types: deb\nURIs: {uri}\nSuites: {suite}\nComponents: {components}")
    main = re.compile(rf"^Suites:\s*(?:.*\s)?{SUITE}(?:\s|$)", re.MULTILINE)
    uris = [match[1] for part in stanzas if main.search(part) and (match := re.search(r"^URIs:\s*(\S+)", part, re.M))]
    return ("\n\n".join(stanzas) + "\n", uris[0]) if uris else ("", "")


def make_base() -> Path:
    """Return the cached base tarball, made by debootstrap when it is not there yet (about a minute)."""
    tarball = base_tarball()
    with locked(tarball.with_suffix(".lock")):
        if tarball.is_file():
            return tarball
        started = time.monotonic()
        say(f"making {tarball} with debootstrap, once (one to three minutes)")
        work = tarball.with_suffix(".building")
        shutil.rmtree(work, ignore_errors=True)
        _, mirror = debian_sources()
        include = "--include=" + ",".join(PACKAGES)
        try:
            run(["debootstrap", "--variant=minbase", include, SUITE, work / "root", *([mirror] if mirror else [])])
            prepare_base(work / "root")
            run(["tar", "--numeric-owner", "-cf", work / "base.tar", "-C", work / "root", "."])
            (work / "base.tar").replace(tarball)
        except SandboxError as error:
            log = work / "root/debootstrap/debootstrap.log"
            tail = "\n  ".join(log.read_text(errors="replace").splitlines()[-8:]) if log.is_file() else ""
            raise SandboxError(
                f"no base system could be made in {work}: {error}\n  {tail}\n  expected: the Debian mirror answers"
                f"{' at ' + mirror if mirror else ''}. Next: apt-get update, then the same command again"
            ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)
        say(f"made {tarball} ({tarball.stat().st_size >> 20} MiB) in {time.monotonic() - started:.0f} s")
        return tarball


def prepare_base(root: Path) -> None:
    """Turn a fresh debootstrap tree into what every sandbox starts from."""
    for path in [*(root / "etc/ssh").glob("ssh_host_*"), *(root / "var/cache/apt").glob("**/*.*")]:
        path.unlink()
    for unit in MASKED_UNITS:
        link = root / "etc/systemd/system" / unit
        link.unlink(missing_ok=True)
        link.symlink_to("/dev/null")
    # A real host keeps its journal over a reboot; without the folder journald writes to /run only.
    (root / "var/log/journal").mkdir(exist_ok=True)


# --- one sandbox's root ----------------------------------------------------------------------------------------------


def make_root(sandbox: Sandbox) -> None:
    """Unpack the base and make it this sandbox's own: identity, keys, and the machine's way to packages."""
    tarball = make_base()
    fresh = sandbox.home / "root.new"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    run(["tar", "--numeric-owner", "-xpf", tarball, "-C", fresh])
    write_file(fresh / "etc/machine-id", uuid.uuid4().hex + "\n", 0o444)
    write_file(fresh / "etc/hostname", f"{sandbox.name}\n")
    write_file(fresh / "etc/hosts", f"127.0.0.1 localhost {sandbox.name}\n::1 localhost ip6-localhost\n")
    for old in (sandbox.key, sandbox.key.with_suffix(".pub")):
        old.unlink(missing_ok=True)
    for path in (fresh / "etc/ssh/ssh_host_ed25519_key", sandbox.key):
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", sandbox.name, "-f", path])
    (fresh / "root/.ssh").mkdir(mode=0o700, exist_ok=True)
    write_file(fresh / "root/.ssh/authorized_keys", sandbox.key.with_suffix(".pub").read_text(), 0o600)
    copy_certificates(fresh)
    copy_apt_settings(fresh)
    shutil.rmtree(sandbox.root, ignore_errors=True)
    fresh.rename(sandbox.root)


def configure(sandbox: Sandbox) -> None:
    """Write what may differ from one `up` to the next: the SSH port, pip's settings, the inventory."""
    write_file(
        sandbox.root / "etc/ssh/sshd_config.d/sandbox.conf",
        f"ListenAddress 127.0.0.1:{sandbox.ssh_port}\n"
        "HostKey /etc/ssh/ssh_host_ed25519_key\n"
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        "UseDNS no\nMaxStartups 100\nMaxSessions 100\n",
    )
    write_file(sandbox.root / "etc/pip.conf", pip_config(pip_settings()))
    for source in (Path.home() / ".config/uv/uv.toml", Path("/etc/uv/uv.toml")):
        if source.is_file():
            write_file(sandbox.root / "etc/uv/uv.toml", source.read_text())
            break
    write_file(sandbox.inventory, inventory_text(sandbox))


def inventory_text(sandbox: Sandbox) -> str:
    """An inventory of one host, named like the sandbox, in group vllm_hosts. Values are JSON, hence valid YAML."""
    values = {
        "ansible_host": "127.0.0.1",
        "ansible_port": sandbox.ssh_port,
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(sandbox.key),
        "ansible_ssh_common_args": "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR",
        "ansible_control_path_dir": str(sandbox.control_dir),
    }
    lines = [f"      {key}: {json.dumps(value)}" for key, value in values.items()]
    return f"---\nvllm_hosts:\n  hosts:\n    {sandbox.name}:\n" + "\n".join(lines) + "\n"


def certificates(text: str) -> list[str]:
    """The PEM certificates in a bundle, each normalised to end in one newline."""
    found = re.findall(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", text, re.DOTALL)
    return [part + "\n" for part in found]


def copy_certificates(root: Path) -> None:
    """Trust inside whatever this machine trusts: a site's own CA may stand between it and every package index."""
    bundle = Path(os.environ.get("SSL_CERT_FILE") or SYSTEM_BUNDLE)
    inside = root / SYSTEM_BUNDLE.relative_to("/")
    if not bundle.is_file():
        return
    known = set(certificates(inside.read_text()))
    extra = [pem for pem in certificates(bundle.read_text()) if pem not in known]
    for number, pem in enumerate(extra):
        write_file(root / f"usr/local/share/ca-certificates/machine-{number}.crt", pem)
    if extra:
        run(["chroot", root, "update-ca-certificates"])


def copy_apt_settings(root: Path) -> None:
    """Give apt inside this machine's mirror (when both are the same Debian) and its proxy settings."""
    sources, _ = debian_sources()
    if sources:
        write_file(root / "etc/apt/sources.list.d/machine.sources", sources)
        (root / "etc/apt/sources.list").unlink(missing_ok=True)
    if shutil.which("apt-config"):
        lines = run(["apt-config", "dump"]).stdout.splitlines()
        proxies = [line for line in lines if re.match(r"Acquire::(http|https)::(\S*::)?(Proxy|CaInfo|Verify)", line)]
        write_file(root / "etc/apt/apt.conf.d/90machine", "".join(line + "\n" for line in proxies))


def pip_settings(environ: Mapping[str, str] = os.environ, files: Sequence[Path] | None = None) -> dict[str, str]:
    """pip's index settings on this machine: global, user and named files, then PIP_* variables, the later one winning.

    Only what says where packages come from is taken; `files` are the configuration files to read, in rising priority.
    """
    if files is None:
        home = Path.home()
        files = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf"), home / ".pip/pip.conf"]
        files += [home / ".config/pip/pip.conf"]
        files += [Path(environ["PIP_CONFIG_FILE"])] if environ.get("PIP_CONFIG_FILE") else []
    wanted = ("index-url", "extra-index-url", "find-links", "no-index", "trusted-host", "timeout", "default-timeout")
    found: dict[str, str] = {}
    for path in files:
        parser = configparser.RawConfigParser()
        if path.is_file():
            parser.read(path)
        for section in ("global", "install"):
            items = parser.items(section) if parser.has_section(section) else []
            found.update({key: " ".join(value.split()) for key, value in items if key in wanted})
    for key in wanted:
        value = environ.get("PIP_" + key.upper().replace("-", "_"))
        if value:
            found[key] = value
    return found


def pip_config(settings: Mapping[str, str]) -> str:
    """The text of a pip.conf with these settings and the sandbox's certificates, which include the machine's."""
    lines = [f"{key} = {value}" for key, value in sorted(settings.items())]
    return "\n".join(["[global]", f"cert = {SYSTEM_BUNDLE}", *lines]) + "\n"


def package_folders(settings: Mapping[str, str]) -> list[Path]:
    """Folders on this machine that pip's settings name, to be bound read-only at the same path.

    A simple index beside its files (`pypi/simple`, `pypi/files`) is bound by its parent: its pages point across.
    """
    folders: list[Path] = []
    for key in ("find-links", "index-url", "extra-index-url"):
        for word in settings.get(key, "").split():
            path = Path(word.removeprefix("file://"))
            if "://" in word.removeprefix("file://") or not path.is_absolute() or not path.is_dir():
                continue
            folders.append(path.parent if path.name == "simple" else path)
    kept = [path for path in dict.fromkeys(folders) if not any(other in path.parents for other in folders)]
    return [path for path in kept if path != Path("/")]


# --- boot and stop ---------------------------------------------------------------------------------------------------


def nspawn_argv(sandbox: Sandbox) -> list[str]:
    argv = ["systemd-nspawn", "--register=no", "--directory", str(sandbox.root), "--boot"]
    argv += ["--machine", sandbox.name, "--hostname", sandbox.name, "--console=read-only"]
    argv += ["--resolv-conf=copy-host", "--timezone=off", "--link-journal=no"]
    if cgroup_dirs(sandbox):
        argv.append("--keep-unit")
    argv += [f"--bind={bind}" for bind in sandbox.binds]
    argv += [f"--bind-ro={bind}" for bind in sandbox.binds_ro]
    argv += [f"--bind-ro={path}" for path in package_folders(pip_settings())]
    return argv


def boot(sandbox: Sandbox) -> None:
    """Start the container and wait until systemd inside has finished booting. Raises SandboxError with the console."""
    holder = port_holder(sandbox.ssh_port)
    if holder:
        raise SandboxError(
            f"port {sandbox.ssh_port} on 127.0.0.1 is taken by {holder}; expected it free for the sshd of sandbox "
            f"{sandbox.name!r}. Next: scripts/sandbox.py up {sandbox.name} --ssh-port PORT",
            CONFLICT,
        )
    configure(sandbox)
    sandbox.control_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    dirs = cgroup_dirs(sandbox)
    for path in dirs:
        path.mkdir(parents=True, exist_ok=True)
    words = [*[str(path) for path in dirs], "--", *nspawn_argv(sandbox)]
    argv = ["unshare", "--mount", "--propagation", "slave", "/bin/sh", "-c", KEEPER, "sandbox-keeper", *words]
    environment = {key: value for key, value in os.environ.items() if key in ("PATH", "HOME", "LANG")}
    # Debian's /tmp is on the disk; nspawn's default, a small tmpfs, is no place for a wheel of a gigabyte.
    environment["SYSTEMD_NSPAWN_TMPFS_TMP"] = "0"
    with sandbox.console.open("w") as console:
        child = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
            cwd="/",
        )
    sandbox.pid, sandbox.pid_start = child.pid, process_start(child.pid)
    sandbox.save()
    await_boot(sandbox, lambda: child.poll() is None)


def await_boot(sandbox: Sandbox, alive: Callable[[], bool], after_boot_id: str = "") -> None:
    """Wait for SSH (of another boot than `after_boot_id`) and for the end of systemd's start-up."""
    what = f"boot of sandbox {sandbox.name!r}"

    def reason() -> str:
        return "" if alive() else f"systemd-nspawn ended; its console said:\n  {console_tail(sandbox)}"

    def answers() -> bool:
        if not ssh_banner(sandbox.ssh_port):
            return False
        now = ssh(sandbox, ["cat", "/proc/sys/kernel/random/boot_id"], timeout_s=10)
        return now.returncode == 0 and now.stdout.strip() != after_boot_id

    try:
        wait_until(f"{what}: SSH on 127.0.0.1:{sandbox.ssh_port}", BOOT_LIMIT_S, answers, reason)
    except SandboxError as error:
        if "console said" in str(error):
            raise
        raise SandboxError(f"{error}; console:\n  {console_tail(sandbox)}\n  Next: less {sandbox.console}") from error
    done = ssh(sandbox, ["systemctl", "is-system-running", "--wait"], timeout_s=BOOT_LIMIT_S)
    state = done.stdout.strip()
    if state != "running":
        failed = ssh(sandbox, ["systemctl", "--failed", "--plain", "--no-legend"], timeout_s=20).stdout.strip()
        say(f"{sandbox.name}: systemd is {state or 'unknown'}, expected running; failed units: {failed or 'none'}")


def console_tail(sandbox: Sandbox, lines: int = 12) -> str:
    if not sandbox.console.is_file():
        return "(no console log)"
    text = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", sandbox.console.read_text(errors="replace"))
    return "\n  ".join(text.strip().splitlines()[-lines:]) or "(nothing)"


def ssh_argv(sandbox: Sandbox) -> list[str]:
    options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR", "IdentitiesOnly=yes")
    flags = [word for option in options for word in ("-o", option)]
    return ["ssh", *flags, "-p", str(sandbox.ssh_port), "-i", str(sandbox.key), "root@127.0.0.1"]


def ssh(sandbox: Sandbox, command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a command inside; status 255 when there is no connection or no answer within `timeout_s`."""
    argv = [*ssh_argv(sandbox), "--", *command]
    try:
        return subprocess.run(argv, text=True, capture_output=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(argv, 255, "", f"no answer within {timeout_s:.0f} s")


def ssh_banner(port: int) -> bool:
    """Whether an SSH server greets on this loopback port."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=2) as link:
            return link.recv(4) == b"SSH-"
    except OSError:
        return False


def port_holder(port: int) -> str:
    """Who listens on a loopback port: `name (pid N)`, `another process`, or empty when the port is free."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            if not shutil.which("ss"):
                return "another process"
            listing = run(["ss", "-Hltnp", f"sport = :{port}"]).stdout
            match = re.search(r'"([^"]+)",pid=(\d+)', listing)
            return f"{match[1]} (pid {match[2]})" if match else "another process"
    return ""


def free_port() -> int:
    """The lowest port from 2223 on that no process holds and no sandbox of this checkout has."""
    taken = {load_sandbox(name).ssh_port for name in known_names()}
    for port in range(FIRST_PORT + 1, FIRST_PORT + 500):
        if port not in taken and not port_holder(port):
            return port
    raise SandboxError(f"no free port from {FIRST_PORT + 1} to {FIRST_PORT + 499}; name one with --ssh-port", CONFLICT)


def kill_container(sandbox: Sandbox) -> None:
    """End every process of the container at once, as a power cut does, and wait until none is left."""
    # The kernel kills a PID namespace with its init. What carries it dies first, so that nothing starts it again.
    for pid in container_processes(sandbox.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    wait_until(f"power cut of sandbox {sandbox.name!r}", 10, lambda: not sandbox.running() and not leftovers(sandbox))


def leftovers(sandbox: Sandbox) -> list[int]:
    """Processes of a sandbox that outlived it; each is killed by its id. Empty once all are gone."""
    left = [pid for pid in cgroup_members(sandbox) if process_start(pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def stop(sandbox: Sandbox) -> None:
    """Shut the container down in order; after STOP_LIMIT_S cut its power instead, and say so."""
    end_control_masters(sandbox)
    if sandbox.running():
        # The keeper passes SIGTERM to nspawn, and nspawn to the init inside, as its signal for an orderly halt.
        os.kill(sandbox.pid, signal.SIGTERM)
        try:
            wait_until(f"stop of {sandbox.name!r}", STOP_LIMIT_S, lambda: not sandbox.running())
        except SandboxError:
            say(f"{sandbox.name}: no orderly stop within {STOP_LIMIT_S:.0f} s, cutting its power")
            kill_container(sandbox)
    if leftovers(sandbox):
        wait_until(f"end of the processes left in {sandbox.name!r}", 10, lambda: not leftovers(sandbox))
    remove_cgroups(sandbox)
    sandbox.pid = sandbox.pid_start = 0
    sandbox.save()


def end_control_masters(sandbox: Sandbox) -> None:
    """Close the SSH connections that Ansible keeps open: they would make the next boot's first task fail."""
    for path in sandbox.control_dir.glob("*"):
        closing = ["ssh", "-o", f"ControlPath={path}", "-O", "exit", "root@127.0.0.1"]
        subprocess.run(closing, capture_output=True, check=False)
        path.unlink(missing_ok=True)


# --- commands --------------------------------------------------------------------------------------------------------


def up(options: argparse.Namespace) -> int:
    """Make the sandbox if it is new, boot it if it does not run, print it as JSON."""
    require_machine()
    name: str = options.name
    binds = [checked_bind(bind) for bind in options.bind or []]
    binds_ro = [checked_bind(bind) for bind in options.bind_ro or []]
    started = time.monotonic()
    # One lock for all: the choice of a free port must be on record before the next `up` looks.
    with locked(REPO / ".sandbox" / ".ports.lock"):
        exists = (sandbox_home(name) / "sandbox.json").is_file()
        if exists:
            sandbox = load_sandbox(name)
        else:
            port = options.ssh_port or (FIRST_PORT if name == FIRST_NAME else free_port())
            sandbox = Sandbox(name, port, binds, binds_ro)
            sandbox.home.mkdir(parents=True, exist_ok=True)
        if sandbox.running():
            refuse_other_settings(sandbox, options.ssh_port, binds, binds_ro)
        else:
            sandbox.ssh_port = options.ssh_port or sandbox.ssh_port
            sandbox.binds, sandbox.binds_ro = binds or sandbox.binds, binds_ro or sandbox.binds_ro
            sandbox.save()
    with locked(sandbox.home / "lock"):
        sandbox = load_sandbox(name)
        if sandbox.running():
            # Running is not ready: the `up` that started it may have been interrupted, and an older one named the
            # host otherwise.
            write_file(sandbox.inventory, inventory_text(sandbox))
            await_boot(sandbox, sandbox.running)
            say(f"{name} is already running (pid {sandbox.pid}, SSH port {sandbox.ssh_port})")
        else:
            if not sandbox.root.is_dir():
                make_root(sandbox)
            boot(sandbox)
            say(f"{name} is up after {time.monotonic() - started:.1f} s")
    print(json.dumps(sandbox.report()))
    return OK


def checked_bind(text: str) -> str:
    """A --bind value as nspawn wants it (`HOST:DIR`). Raises SandboxError(USAGE) for a folder that is not there."""
    host, _, inside = text.partition(":")
    source = Path(host).resolve()
    if not source.exists() or not (inside or host).startswith("/"):
        raise SandboxError(
            f"--bind {text!r}: found no {source} on this machine or no absolute path inside; expected HOST_DIR:DIR",
            USAGE,
        )
    return f"{source}:{inside or source}"


def refuse_other_settings(sandbox: Sandbox, port: int | None, binds: list[str], binds_ro: list[str]) -> None:
    asked = {"ssh port": port, "bind": binds, "bind-ro": binds_ro}
    has = {"ssh port": sandbox.ssh_port, "bind": sandbox.binds, "bind-ro": sandbox.binds_ro}
    other = [f"{key}: asked {asked[key]}, has {has[key]}" for key in has if asked[key] and asked[key] != has[key]]
    if other:
        raise SandboxError(
            f"sandbox {sandbox.name!r} runs with other settings ({'; '.join(other)}). "
            f"Next: scripts/sandbox.py down {sandbox.name}, then the same command",
            CONFLICT,
        )


def running_sandbox(name: str) -> Sandbox:
    sandbox = load_sandbox(name)
    if not sandbox.running():
        raise SandboxError(f"sandbox {name!r} is not running. Next: scripts/sandbox.py up {name}")
    return sandbox


def reboot(options: argparse.Namespace) -> int:
    """Reboot in order and wait for the next boot's end."""
    require_machine()
    sandbox = running_sandbox(options.name)
    with locked(sandbox.home / "lock"):
        before = ssh(sandbox, ["cat", "/proc/sys/kernel/random/boot_id"], timeout_s=20)
        if before.returncode != 0:
            raise SandboxError(
                f"sandbox {sandbox.name!r} does not answer SSH on port {sandbox.ssh_port} ({before.stderr.strip()}). "
                f"Next: scripts/sandbox.py power-cut {sandbox.name}"
            )
        end_control_masters(sandbox)
        ssh(sandbox, ["systemctl", "reboot"], timeout_s=20)
        await_boot(sandbox, sandbox.running, before.stdout.strip())
    print(json.dumps(sandbox.report()))
    return OK


def power_cut(options: argparse.Namespace) -> int:
    """Kill every process of the container at once, then boot it again (unless --off)."""
    require_machine()
    sandbox = running_sandbox(options.name)
    with locked(sandbox.home / "lock"):
        kill_container(sandbox)
        end_control_masters(sandbox)
        remove_cgroups(sandbox)
        sandbox.pid = sandbox.pid_start = 0
        sandbox.save()
        if not options.off:
            boot(sandbox)
    print(json.dumps(sandbox.report()))
    return OK


def down(options: argparse.Namespace) -> int:
    require_machine()
    sandbox = load_sandbox(options.name)
    with locked(sandbox.home / "lock"):
        was_running = sandbox.running()
        stop(sandbox)
    say(f"{sandbox.name} is down" if was_running else f"{sandbox.name} was not running")
    return OK


def destroy(options: argparse.Namespace) -> int:
    """Stop the sandbox and remove everything of it; one that never was is fine."""
    require_machine()
    home = sandbox_home(options.name)
    if not (home / "sandbox.json").is_file():
        shutil.rmtree(home, ignore_errors=True)
        say(f"{options.name} does not exist")
        return OK
    sandbox = load_sandbox(options.name)
    with locked(home / "lock"):
        if sandbox.running():
            # What is thrown away needs no orderly shutdown.
            kill_container(sandbox)
        stop(sandbox)
        mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
        held = [path for path in mounts if path.startswith(f"{sandbox.root}/")]
        if held:
            raise SandboxError(f"{sandbox.root} stays: still mounted below it: {' '.join(held)}. Next: umount them")
        shutil.rmtree(sandbox.control_dir, ignore_errors=True)
        run(["rm", "-rf", "--one-file-system", sandbox.root])
        shutil.rmtree(home)
    say(f"{sandbox.name} is gone")
    return OK


def enter(options: argparse.Namespace) -> int:
    """Open a shell in the sandbox over SSH, or run one command there; ends with its status."""
    sandbox = running_sandbox(options.name)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    return subprocess.run([*ssh_argv(sandbox), "--", *command], check=False).returncode


def list_all(_options: argparse.Namespace) -> int:
    """Print one JSON object per sandbox of this checkout."""
    for name in known_names():
        sandbox = load_sandbox(name)
        print(json.dumps({**sandbox.report(), "state": "running" if sandbox.running() else "stopped"}))
    return OK


def sandbox_name(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]{0,40}", text):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a host name of a-z, 0-9 and - (a letter first)")
    return text


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="sandbox.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")

    def command(verb: str, action: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(verb, help=text, description=text)
        sub.set_defaults(action=action)
        return sub

    def named(verb: str, action: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        sub = command(verb, action, text)
        sub.add_argument("name", type=sandbox_name, metavar="NAME")
        return sub

    sub = named("up", up, "make it if it is new, boot it, print it as JSON")
    sub.add_argument("--ssh-port", type=int, metavar="PORT", help="its sshd's loopback port (2222, or a free one)")
    sub.add_argument("--bind", action="append", metavar="HOST_DIR:DIR", help="show a folder of this machine inside")
    sub.add_argument("--bind-ro", action="append", metavar="HOST_DIR:DIR", help="the same, read-only")
    named("reboot", reboot, "reboot it in order and wait")
    sub = named("power-cut", power_cut, "kill all its processes at once, then boot it again")
    sub.add_argument("--off", action="store_true", help="leave it off")
    named("down", down, "shut it down in order; its files stay")
    named("destroy", destroy, "end it and remove its files")
    sub = named("ssh", enter, "a shell inside, or one command: ssh NAME -- CMD ...")
    sub.add_argument("command", nargs=argparse.REMAINDER, metavar="-- CMD")
    command("list", list_all, "one JSON object per sandbox of this checkout")
    sub = command("install", install, "install what sandboxes need (Debian and Ubuntu)")
    sub.add_argument("--browser", action="store_true", help="instead Chromium, for the tests of the report's pages")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    options = parse(argv)
    action: Callable[[argparse.Namespace], int] = options.action
    try:
        return action(options)
    except SandboxError as error:
        say(f"error: {error}")
        return error.code


if __name__ == "__main__":
    sys.exit(main())
