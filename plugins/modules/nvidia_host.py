"""Module `swapgate.core.nvidia_host`: what a host has of NVIDIA boards, driver, kernels and packages. Only reads."""

from __future__ import annotations

DOCUMENTATION = r"""
module: nvidia_host
short_description: Say what a host has of NVIDIA boards, driver, kernels and packages
description:
  - Reads sysfs, the package database, systemd and Secure Boot's state. Changes nothing.
  - What follows from it is computed by the filter C(nvidia_plan) of the same collection.
options:
  sysfs:
    description: Where the kernel's view of the hardware is mounted.
    type: path
    default: /sys
author:
  - The swapgate contributors (@swapgate)
attributes:
  check_mode:
    support: full
    description: It only reads.
"""

EXAMPLES = r"""
- name: The host is looked at
  swapgate.core.nvidia_host:
  register: host
"""

RETURN = r"""
host:
  description:
    - distribution {id, version, codename, like}, arch, container (the kernel is the outer host's), cmdline.
    - archive (first Debian mirror that apt knows, or null), packages {name, version}, held [names].
    - devices (NVIDIA's PCI functions), acs_redirect (bridges above GPUs that redirect), iommu {GPU, type of its group}.
    - module_version (of what is loaded, or null), nouveau (loaded), kernels [{release, running, next, module}].
    - secure_boot and key_enrolled (true, false, null where it cannot be told), runfile (driver of the .run installer).
    - reboot_required (text or null), busy_units [{unit, state}], gpu_holders [text] (other processes with a GPU open).
    - initramfs (the command that makes the initial RAM disks anew, or null).
    - persistenced (ExecStart of the package's unit of the daemon, or null).
  type: dict
  returned: always
"""

import contextlib  # noqa: E402 - Ansible wants the documentation first
import os  # noqa: E402
import re  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

from ansible.module_utils.basic import AnsibleModule  # noqa: E402
from ansible_collections.swapgate.core.plugins.module_utils import nvidia_pci, processes  # noqa: E402

# Where DKMS and Ubuntu keep the key that they sign modules with.
MODULE_KEYS = ("/var/lib/dkms/mok.pub", "/var/lib/shim-signed/mok/MOK.der")
SECURE_BOOT_VARIABLE = "SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"
# The driver's own daemons and tools, as the kernel cuts their names: the packages stop and start them.
DRIVERS_OWN = ("nvidia-persiste", "nv-fabricmanage", "nvidia-smi")
ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def read(path: Path) -> str:
    """A small text file's content, stripped; empty where it is not there."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def pci(sysfs: Path) -> dict[str, Any]:
    """NVIDIA's PCI functions, the bridges above its GPUs that redirect peer traffic, and its GPUs' IOMMU modes."""
    devices = []
    for folder in sorted(sysfs.glob("bus/pci/devices/*")):
        numbers = {name: read(folder / name) for name in ("vendor", "device", "class")}
        if all(numbers.values()) and int(numbers["vendor"], 16) == nvidia_pci.VENDOR:
            devices.append({"address": folder.name, **{name: int(text, 16) for name, text in numbers.items()}})
    redirect, iommu = set(), {}
    for gpu in nvidia_pci.boards(devices)["gpus"]:
        folder = (sysfs / "bus/pci/devices" / gpu["address"]).resolve()
        iommu[gpu["address"]] = read(folder / "iommu_group/type") or "none"
        for above in folder.parents:
            if ADDRESS.fullmatch(above.name):
                with contextlib.suppress(OSError):
                    if nvidia_pci.acs_redirects((above / "config").read_bytes()):
                        redirect.add(above.name)
    return {"devices": devices, "acs_redirect": sorted(redirect), "iommu": iommu}


def kernel_key(release: str) -> list[Any]:
    """Sorts kernel releases as their numbers say: 6.1.0-9 before 6.1.0-38."""
    return [int(part) if part.isdigit() else -1 for part in re.split(r"[.\-+~_]", release)]


def kernels(boot: Path, modules: Path) -> list[dict[str, Any]]:
    """The running kernel and the newest installed one, which is what boots next, with whether each has the module."""
    running = os.uname().release
    installed = sorted((file.name.partition("-")[2] for file in boot.glob("vmlinuz-[0-9]*")), key=kernel_key)
    following = installed[-1] if installed else running
    found = []
    for release in dict.fromkeys([running, following]):
        built = [*(modules / release).rglob("nvidia.ko*"), *(modules / release).rglob("nvidia-current*.ko*")]
        found.append(
            {
                "release": release,
                "running": release == running,
                "next": release == following,
                "module": bool(built),
            }
        )
    return found


def archive(texts: list[str]) -> str | None:
    """The first Debian mirror among apt's sources; security has one of its own and does not count."""
    for text in texts:
        for line in text.splitlines():
            words = re.sub(r"\[[^]]*\]", "", line).split()
            urls = words[1:] if words[:1] == ["URIs:"] else words[1:2] if words[:1] == ["deb"] else []
            for url in urls:
                if re.search(r"/debian/?$", url):
                    return url
    return None


def distribution() -> dict[str, Any]:
    """What /etc/os-release says."""
    pairs = [line.partition("=") for line in read(Path("/etc/os-release")).splitlines()]
    release = {key: value.strip("\"'") for key, _, value in pairs}
    return {
        "id": release.get("ID", ""),
        "version": release.get("VERSION_ID", ""),
        "codename": release.get("VERSION_CODENAME", ""),
        "like": release.get("ID_LIKE", "").split(),
    }


def packages(module: AnsibleModule) -> dict[str, Any]:
    """Installed packages with versions, and which of them are held back."""
    if module.get_bin_path("dpkg-query"):
        layout = "${Package}\\t${Version}\\t${db:Status-Abbrev}\\n"
        rows = [line.split("\t") for line in output(module, ["dpkg-query", "-W", "-f", layout]).splitlines()]
        there = [row for row in rows if len(row) == 3 and row[2][1:2] == "i"]
        return {
            "packages": {row[0]: row[1] for row in there},
            "held": sorted({row[0] for row in there if row[2].startswith("h")}),
        }
    rows = [line.split("\t") for line in output(module, ["rpm", "-qa", "--qf", "%{NAME}\\t%{VERSION}\\n"]).splitlines()]
    locks = read(Path("/etc/dnf/plugins/versionlock.list")).splitlines()
    names = {row[0] for row in rows}
    # A lock is NAME-EPOCH:VERSION-RELEASE.ARCH, or a name alone.
    locked = {re.sub(r"-(?:\d+:)?[^-]+-[^-]+$", "", lock) for lock in locks if lock and not lock.startswith(("#", "!"))}
    return {"packages": {row[0]: row[1] for row in rows if len(row) == 2}, "held": sorted(names & locked)}


def output(module: AnsibleModule, argv: list[str]) -> str:
    """Standard output of a program; empty where it is not there or fails."""
    if not module.get_bin_path(argv[0]):
        return ""
    status, text, _ = module.run_command(argv, check_rc=False)
    return str(text) if status == 0 else ""


def secure_boot(module: AnsibleModule, sysfs: Path) -> dict[str, bool | None]:
    """Whether the firmware asks for signed modules, and whether the key that signs ours is enrolled."""
    said = output(module, ["mokutil", "--sb-state"])
    variable = sysfs / "firmware/efi/efivars" / SECURE_BOOT_VARIABLE
    state: bool | None = None
    if "SecureBoot" in said:
        state = "enabled" in said
    elif variable.exists():
        state = variable.read_bytes()[-1:] == b"\x01"
    elif not (sysfs / "firmware/efi").exists():
        state = False
    enrolled: bool | None = None
    keys = [key for key in MODULE_KEYS if Path(key).exists()]
    if state and module.get_bin_path("mokutil"):
        # It ends with 0 for a key that is not enrolled and with 1 for one that is: its words decide.
        said = "".join("".join(module.run_command(["mokutil", "--test-key", key])[1:]) for key in keys)
        enrolled = "already enrolled" in said
    return {"secure_boot": state, "key_enrolled": enrolled}


def busy_units(module: AnsibleModule) -> list[dict[str, str]]:
    """Units of engines and of a swap that run, start or stop."""
    argv = ["systemctl", "list-units", "--all", "--plain", "--no-legend", "--no-pager"]
    rows = [line.split() for line in output(module, [*argv, "vllm-*.service", "swapgate-swap.service"]).splitlines()]
    quiet = ("inactive", "failed")
    return [{"unit": row[0], "state": row[2]} for row in rows if len(row) > 3 and row[2] not in quiet]


def gpu_holders(device: str = "/dev/nvidia") -> list[str]:
    """Who else has a GPU open: an engine started by hand, a container, another tenant's job."""
    holders = processes.device_holders(device)
    return [str(one) for one in holders if one.command not in DRIVERS_OWN and not one.unit.startswith("vllm-")]


def unit_start(text: str) -> str | None:
    """The first ExecStart= line of `systemctl cat`: the unit file's own, since drop-ins come after it."""
    match = re.search(r"^ExecStart=\S.*$", text, re.MULTILINE)
    return match[0] if match else None


def initramfs(module: AnsibleModule) -> list[str] | None:
    """The command that makes the initial RAM disks of all kernels anew; None where no such program is."""
    commands = (["update-initramfs", "-u", "-k", "all"], ["dracut", "--force", "--regenerate-all"])
    return next((argv for argv in commands if module.get_bin_path(argv[0])), None)


def main() -> None:
    """Gather."""
    module = AnsibleModule(argument_spec={"sysfs": {"type": "path", "default": "/sys"}}, supports_check_mode=True)
    sysfs = Path(module.params["sysfs"])
    sources = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*.*"))]
    required = Path("/run/reboot-required")
    host = {
        "distribution": distribution(),
        "arch": os.uname().machine,
        "archive": archive([read(file) for file in sources if file.suffix in (".list", ".sources")]),
        **pci(sysfs),
        "module_version": read(sysfs / "module/nvidia/version") or None,
        "nouveau": (sysfs / "module/nouveau").exists(),
        "cmdline": read(Path("/proc/cmdline")).split(),
        "kernels": kernels(Path("/boot"), Path("/lib/modules")),
        **packages(module),
        **secure_boot(module, sysfs),
        "reboot_required": (read(Path(f"{required}.pkgs")) or read(required) or "yes") if required.exists() else None,
        "runfile": Path("/usr/bin/nvidia-uninstall").exists(),
        "busy_units": busy_units(module),
        "gpu_holders": gpu_holders(),
        "initramfs": initramfs(module),
        "persistenced": unit_start(output(module, ["systemctl", "cat", "nvidia-persistenced.service"])),
        "container": bool(output(module, ["systemd-detect-virt", "--container"]).strip()),
    }
    module.exit_json(changed=False, host=host)


if __name__ == "__main__":
    main()
