"""What a GPU host needs of NVIDIA's packages: from its boards, distribution and wishes to one plan, with reasons.

The input ``host`` is what module nvidia_host returns; ``wishes`` are role nvidia_stack's variables without their
prefix: gpus, source ("cuda" or "distribution"), url, keyring, keyring_checksum, branch, flavour ("auto", "open",
"proprietary"), kernel_module, fabric_manager ("auto", "present", "absent"), cuda_toolkit, compiler, hold_kernel,
kernel_parameters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import nvidia_pci

JsonDict = dict[str, Any]

SUPPORTED = {"debian": ("12", "13"), "ubuntu": ("22.04", "24.04"), "redhat": ("9",)}
# The branch that a Debian release ships itself.
_DEBIAN_BRANCH = {"12": 535, "13": 550}
_FIRST_BLACKWELL, _LAST_BEFORE_TURING, _FIRST_OPEN_ONLY, _FIRST_UNSUFFIXED = 570, 580, 620, 590
_DRIVER = re.compile(
    r"(?:lib)?nvidia-|libcuda1$|libcudadebugger1$|libnvcuvid1$|libnvoptix1$|kmod-nvidia|linux-(?:modules|objects|signatures)-nvidia-"
    r"|firmware-nvidia-|nvlink5|cuda-drivers|lib(?:egl|gl1|glx|gles\w*)-nvidia|xserver-xorg-video-nvidia"
)
_NOT_DRIVER = re.compile(
    r"(?:lib)?nvidia-(?:container|cuda-|cudnn|docker|fs|gds|profiler|visual-profiler|opencl-dev)|.*-(?:dev|devel)$"
)
_LIBRARY = re.compile(
    r"libnvidia-ml1?$|libnvidia-compute(?:-\d+)?(?:-server)?$|nvidia-driver-cuda(?:-libs)?$|libcuda1$"
)
_MODULE = {
    "open": re.compile(r"nvidia-(?:kernel-open|open-kernel)-dkms$|nvidia-dkms(?:-\d+)?-open$|kmod-nvidia-open-dkms$"),
    "proprietary": re.compile(r"nvidia-kernel-dkms$|nvidia-dkms(?:-\d+)?$|kmod-nvidia-latest-dkms$"),
}
_PIN, _FABRIC = re.compile(r"nvidia-driver-pinning-"), re.compile(r"nvidia-fabric-?manager|nvlink5|nvlsm$")
# Kernel packages that follow the distribution's newest kernel. Those of one kernel carry its number instead.
_FLAVOURS = r"(?:cloud-|rt-)?(?:amd64|arm64)|(?:generic|virtual|aws|azure|gcp|oracle|kvm|lowlatency|nvidia)(?:-[\w.]+)*"
_KERNEL = re.compile(rf"linux-(?:image-|headers-)?(?:{_FLAVOURS})$")
_KERNEL_IMAGE = re.compile(rf"linux-(?:image-)?({_FLAVOURS})$")
_KERNEL_REDHAT = ("kernel", "kernel-core", "kernel-modules", "kernel-modules-core", "kernel-devel", "kernel-headers")


def number(version: str) -> str:
    """The driver's own number in a package's version: 580.95.05 of 3:580.95.05-1.el9."""
    match = re.search(r"(?:^|:)(\d+(?:\.\d+)+)", version)
    return match[1] if match else version


def installed_driver(packages: Mapping[str, str]) -> JsonDict:
    """{"library", "module": driver version of the user-space library and of the module's package, or None}."""
    every = list(_MODULE.values())
    library = [number(version) for name, version in sorted(packages.items()) if _LIBRARY.match(name)]
    module = [number(packages[name]) for name in sorted(packages) if any(pattern.match(name) for pattern in every)]
    return {"library": library[0] if library else None, "module": module[0] if module else None}


def driver_packages(packages: Mapping[str, str]) -> list[str]:
    """Installed packages that are of the driver and of one version with it, toolkit and containers apart."""
    return sorted(name for name in packages if _DRIVER.match(name) and not _NOT_DRIVER.match(name))


def family(distribution: Mapping[str, Any]) -> str | None:
    """ "debian", "ubuntu" or "redhat"; None for what is neither."""
    if distribution["id"] in ("debian", "ubuntu"):
        return str(distribution["id"])
    return "redhat" if {"rhel", "centos", "fedora"} & {distribution["id"], *distribution["like"]} else None


def choose_flavour(gpus: Sequence[Mapping[str, Any]], branch: int, wish: str) -> tuple[str, str, list[str]]:
    """(flavour of the kernel modules, why, problems) for these boards and this branch."""
    kinds = {str(gpu["generation"]) for gpu in gpus}
    old = sorted(kinds & set(nvidia_pci.BEFORE_TURING))
    new = sorted(kinds & set(nvidia_pci.OPEN_ONLY))
    problems = []
    if new and branch < _FIRST_BLACKWELL:
        problems.append(
            f"branch {branch} does not know {' and '.join(new)} boards; expected {_FIRST_BLACKWELL} or newer. "
            "Next: nvidia_stack_branch: '580', from NVIDIA's repository"
        )
    if old and branch > _LAST_BEFORE_TURING:
        only = ", and it has open kernel modules only" if branch >= _FIRST_OPEN_ONLY else ""
        problems.append(
            f"branch {branch} does not drive {' and '.join(old)} boards{only}; expected {_LAST_BEFORE_TURING} or "
            f"older. Next: nvidia_stack_branch: '{_LAST_BEFORE_TURING}'"
        )
    if old and new:
        problems.append(
            f"{' and '.join(old)} boards need the proprietary kernel modules, {' and '.join(new)} boards the open "
            "ones; a host loads one of them. Next: take one kind of board out"
        )
    if new:
        flavour, why = "open", f"{' and '.join(new)} boards have no other"
    elif branch >= _FIRST_OPEN_ONLY:
        flavour, why = "open", f"branch {branch} has no other"
    elif old:
        flavour, why = "proprietary", f"{' and '.join(old)} boards have no other"
    elif wish == "proprietary":
        flavour, why = "proprietary", "asked for"
    else:
        flavour, why = "open", "NVIDIA's own choice for Turing and newer"
    if wish not in ("auto", flavour):
        problems.append(
            f"nvidia_stack_flavour: {wish} cannot be: {why}. Next: leave nvidia_stack_flavour at auto ({flavour})"
        )
    return flavour, why, problems


def plan(host: Mapping[str, Any], wishes: Mapping[str, Any]) -> JsonDict:
    """What is to be done on a host, and what stands against it.

    Returns ``family``, ``gpus``, ``expected`` (GPUs on the bus), ``branch``, ``flavour``, ``why``, ``repository``
    ({"base", "keyring", "keyring_checksum", "components", "archive", ...} or None), ``stream`` (dnf's), ``packages``
    ({"pin", "headers", "driver", "others"}), ``missing``, ``unwanted`` (to remove), ``replaces`` (why an installed
    driver goes, or None), ``touches_driver``, ``unhold`` (what a change must release), ``unheld`` (to be held),
    ``parameters`` (kernel parameters not on the command line), ``reboot`` (reasons), ``problems``, ``notices`` and
    ``lines`` (all of it as text).
    """
    found = nvidia_pci.boards(host["devices"])
    kind, release = family(host["distribution"]), str(host["distribution"]["version"])
    branch, major = str(wishes["branch"]), int(str(wishes["branch"]).split(".")[0])
    flavour, why, problems = choose_flavour(found["gpus"], major, str(wishes["flavour"]))
    have: Mapping[str, str] = host["packages"]
    own = installed_driver(have)
    known = kind is not None and (release if kind != "redhat" else release.split(".")[0]) in SUPPORTED[kind]
    packages = _packages(kind, host, wishes, found, major, flavour) if known else {}
    wanted = [name for part in ("pin", "headers", "driver", "others") for name in packages.get(part, [])]
    missing = [name for name in wanted if name not in have]
    unwanted = _unwanted(have, packages, wishes, flavour) if known else []
    replaces = _replaces(own, branch)
    touches = bool(replaces or [name for name in missing if name in packages.get("driver", [])]) or any(
        not _PIN.match(name) for name in unwanted
    )
    holdable = [name for name in driver_packages(have) if name not in unwanted] + _kernel_packages(kind, have, wishes)
    held = set(host["held"])
    repository = _repository(str(kind), release, host, wishes) if known else None
    parameters = [word for word in wishes["kernel_parameters"] if word not in host["cmdline"]]
    result: JsonDict = {
        "family": kind,
        **found,
        "expected": len(found["gpus"]),
        "branch": branch,
        "flavour": flavour,
        "why": why,
        "repository": repository,
        "stream": f"{major}-{'open' if flavour == 'open' else 'dkms'}" if kind == "redhat" else None,
        "packages": packages,
        "missing": missing,
        "unwanted": unwanted,
        "replaces": replaces,
        "touches_driver": touches,
        "unhold": sorted(held & {*holdable, *unwanted}) if touches else [],
        "unheld": sorted(set(holdable) - held),
        "parameters": parameters,
        "reboot": _reboot(host, own, wishes),
        "driver": own,
        "problems": problems
        + _problems(kind, known, release, host, wishes, found["gpus"], major)
        + _keyring_problems(repository, host),
        "notices": _notices(host, wishes, found["gpus"]),
    }
    result["lines"] = _lines(result, wishes)
    return result


def _packages(
    kind: str | None,
    host: Mapping[str, Any],
    wishes: Mapping[str, Any],
    found: Mapping[str, Any],
    major: int,
    flavour: str,
) -> dict[str, list[str]]:
    cuda, opened = wishes["source"] == "cuda", flavour == "open"
    dash = "-open" if opened else ""
    releases = [kernel["release"] for kernel in host["kernels"]]
    headers: list[str] = []
    pin: list[str] = []
    toolkit = str(wishes["cuda_toolkit"])
    if kind == "redhat":
        headers = ["kernel-devel", "kernel-headers", *(f"kernel-devel-{release}" for release in releases)]
        module = ["kmod-nvidia-open-dkms" if opened else "kmod-nvidia-latest-dkms"]
        driver = ["nvidia-driver-cuda", "nvidia-persistenced"]
    else:
        metas = [match[1] for name in sorted(host["packages"]) if (match := _KERNEL_IMAGE.match(name))]
        headers = [f"linux-headers-{name}" for name in dict.fromkeys([*releases, *metas])]
        if cuda:
            pin = [f"nvidia-driver-pinning-{wishes['branch']}"]
        if kind == "debian" and cuda:
            driver = ["nvidia-driver-cuda", "nvidia-persistenced"]
            module = ["nvidia-kernel-open-dkms" if opened else "nvidia-kernel-dkms"]
        elif kind == "debian":
            driver = ["libcuda1", "nvidia-smi", "nvidia-persistenced"]
            module = ["nvidia-open-kernel-dkms", "firmware-nvidia-gsp"] if opened else ["nvidia-kernel-dkms"]
        elif cuda and major >= _FIRST_UNSUFFIXED:
            driver = ["libnvidia-compute", "nvidia-utils", "nvidia-persistenced"]
            module = [f"nvidia-dkms{dash}"]
        elif cuda:
            driver = [f"libnvidia-compute-{major}", f"nvidia-utils-{major}", f"nvidia-compute-utils-{major}"]
            module = [f"nvidia-dkms-{major}{dash}"]
        else:
            # Canonical builds and signs the modules: neither a compiler nor a key of this host is needed.
            headers = []
            metas = [name for name in metas if name != "virtual"] or ["generic"]
            driver = [f"nvidia-utils-{major}-server", f"nvidia-compute-utils-{major}-server"]
            module = [f"nvidia-headless-no-dkms-{major}-server{dash}"]
            module += [f"linux-modules-nvidia-{major}-server{dash}-{name}" for name in metas]
    if wishes["kernel_module"]:
        driver = [*driver, *module]
    if _fabric_manager(wishes, found):
        suffix = f"-{major}" if kind == "ubuntu" and not cuda else ""
        driver = [*driver, f"nvlink5-{major}" if cuda and found["nvlink5"] else f"nvidia-fabricmanager{suffix}"]
    others = [f"cuda-toolkit-{toolkit.replace('.', '-')}" if cuda else "nvidia-cuda-toolkit"] if toolkit else []
    if wishes["compiler"]:
        others += ["gcc", "python3-devel" if kind == "redhat" else "python3-dev"]
    return {
        "pin": pin,
        "headers": headers if wishes["kernel_module"] else [],
        "driver": driver,
        "others": others,
    }


def _fabric_manager(wishes: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    return wishes["fabric_manager"] == "present" or (wishes["fabric_manager"] == "auto" and bool(found["nvswitch"]))


def _unwanted(
    have: Mapping[str, str], packages: Mapping[str, Sequence[str]], wishes: Mapping[str, Any], flavour: str
) -> list[str]:
    other = _MODULE["proprietary" if flavour == "open" else "open"]
    wanted = {name for part in packages.values() for name in part}
    # nvlink5 and what it brings go together.
    fabric = any(_FABRIC.match(name) for name in wanted)
    return sorted(
        name
        for name in have
        if name not in wanted
        and (
            (_PIN.match(name) and packages["pin"])
            or (wishes["kernel_module"] and other.match(name))
            or (not fabric and _FABRIC.match(name) and not name.endswith(("-dev", "-devel")))
        )
    )


def _replaces(own: Mapping[str, Any], branch: str) -> str | None:
    library, module = own["library"], own["module"]
    if library and not f"{library}.".startswith(f"{branch}."):
        return f"driver {library} is installed, branch {branch} is asked for"
    if library and module and library != module:
        return f"the library's package is {library}, the kernel module's {module}"
    return None


def _kernel_packages(kind: str | None, have: Mapping[str, str], wishes: Mapping[str, Any]) -> list[str]:
    if not (wishes["hold_kernel"] and wishes["kernel_module"]):
        return []
    return [name for name in have if (name in _KERNEL_REDHAT if kind == "redhat" else _KERNEL.match(name))]


# SHA-256 of cuda-keyring_1.1-1_all.deb by the folder of NVIDIA's repository that it lies in: that package is installed
# as root and brings the key that all others are checked by. Each was found in at least two public projects that do not
# copy each other, Google's installer for Compute Engine among them (Debian and Ubuntu on x86_64).
KEYRING = "cuda-keyring_1.1-1_all.deb"
KEYRING_SHA256 = {
    "debian12/x86_64": "e7f219eab6fe4819cdb5c15b98233dc3420302d9c00883219cd3d896857cf48d",
    "ubuntu2204/x86_64": "d93190d50b98ad4699ff40f4f7af50f16a76dac3bb8da1eaaf366d47898ff8df",
    "ubuntu2404/x86_64": "d2a6b11c096396d868758b86dab1823b25e14d70333f1dfa74da5ddaf6a06dba",
    "ubuntu2404/sbsa": "6ea7d2737648936820e85677177957a0f6521b840d98eb0bbae0a4f003fa7249",
}


def _keyring_checksum(folder: str, wishes: Mapping[str, Any]) -> str | None:
    """The checksum that the key's package must have, as get_url takes it; None if nobody has named one."""
    known = KEYRING_SHA256.get(folder) if wishes["keyring"] == KEYRING else None
    return str(wishes.get("keyring_checksum") or (f"sha256:{known}" if known else "")) or None


def _keyring_problems(repository: Mapping[str, Any] | None, host: Mapping[str, Any]) -> list[str]:
    """A key that nothing vouches for is not installed."""
    if repository is None or not repository["keyring"] or "cuda-keyring" in host["packages"]:
        return []
    if repository["keyring_checksum"]:
        return []
    return [
        f"{repository['keyring']}: found no checksum for this package, expected one, since the key that it brings "
        "vouches for every package after it. Next: get its SHA-256 on a machine and by a way that you trust "
        "(sha256sum), and set nvidia_stack_keyring_checksum: sha256:HEX"
    ]


def _repository(kind: str, release: str, host: Mapping[str, Any], wishes: Mapping[str, Any]) -> JsonDict | None:
    cuda = wishes["source"] == "cuda"
    name = {"debian": f"debian{release}", "ubuntu": "ubuntu" + release.replace(".", "")}.get(kind)
    name = name or "rhel" + release.split(".")[0]
    base = f"{str(wishes['url']).rstrip('/')}/{name}/{'sbsa' if host['arch'] == 'aarch64' else host['arch']}"
    return {
        "base": base if cuda else None,
        "name": f"cuda-{name}-{base.rpartition('/')[2]}",
        "keyring": f"{base}/{wishes['keyring']}" if cuda and kind != "redhat" else None,
        "keyring_checksum": _keyring_checksum("/".join(base.rsplit("/", 2)[1:]), wishes),
        # NVIDIA's packages for Debian depend on some of contrib; Debian's own are in non-free.
        "components": ("contrib" if cuda else "contrib non-free non-free-firmware") if kind == "debian" else None,
        "archive": host["archive"] if kind == "debian" else None,
        "codename": host["distribution"]["codename"],
    }


def _reboot(host: Mapping[str, Any], own: Mapping[str, Any], wishes: Mapping[str, Any]) -> list[str]:
    """Why what is installed does not work before a reboot."""
    reasons = []
    loaded = host["module_version"]
    if loaded and own["library"] and loaded != own["library"]:
        reasons.append(f"the loaded module is {loaded}, the installed library {own['library']}")
    if wishes["kernel_module"] and not loaded and host["nouveau"]:
        reasons.append("nouveau holds the boards")
    return reasons


def _problems(
    kind: str | None,
    known: bool,
    release: str,
    host: Mapping[str, Any],
    wishes: Mapping[str, Any],
    gpus: Sequence[Mapping[str, Any]],
    major: int,
) -> list[str]:
    problems = []
    if not known:
        problems.append(
            f"{host['distribution']['id']} {release} is not known; expected Debian 12 or 13, Ubuntu 22.04 or 24.04, or "
            "a system of the RHEL 9 family. Next: install the driver by hand and leave nvidia_stack_install off"
        )
    if len(wishes["gpus"]) > len(gpus):
        problems.append(
            f"{len(gpus)} NVIDIA GPUs are on the PCI bus ({', '.join(gpu['address'] for gpu in gpus) or 'none'}), "
            f"{len(wishes['gpus'])} are declared. No driver brings the others back. Next: lspci -d 10de: ; reseat or "
            "power-cycle what is missing, or correct the declared GPUs"
        )
    if wishes["source"] == "distribution" and kind == "redhat":
        problems.append("the distribution has no NVIDIA driver. Next: nvidia_stack_source: cuda")
    if wishes["source"] == "distribution" and kind == "debian" and _DEBIAN_BRANCH.get(release, major) != major:
        own = _DEBIAN_BRANCH[release]
        problems.append(
            f"Debian {release} itself has branch {own}, branch {major} is asked for. Next: nvidia_stack_source: cuda, "
            f"or nvidia_stack_branch: '{own}'"
        )
    if wishes["source"] == "distribution" and kind == "debian" and not host["archive"]:
        problems.append("apt knows no Debian mirror. Next: correct /etc/apt/sources.list.d")
    if host["runfile"]:
        problems.append(
            "a driver of NVIDIA's .run installer is there (/usr/bin/nvidia-uninstall); packages over it make a "
            "mixture. Next, with no engine running: nvidia-uninstall"
        )
    signed = wishes["source"] == "distribution" and kind == "ubuntu"
    if (
        wishes["kernel_module"]
        and host["secure_boot"]
        and not (host["key_enrolled"] or host["module_version"] or signed)
    ):
        way = " Or nvidia_stack_source: distribution, whose modules are signed." if kind == "ubuntu" else ""
        problems.append(
            "Secure Boot is on and no key of this host is enrolled (mokutil --test-key): a module built here would not "
            "load. Next, with a console at hand: dkms generate_mok; mokutil --import /var/lib/dkms/mok.pub; reboot and "
            f"enrol it in the firmware's dialogue.{way}"
        )
    return problems


def _notices(host: Mapping[str, Any], wishes: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]]) -> list[str]:
    notices = []
    if host["reboot_required"]:
        notices.append(
            f"the system asks for a reboot (/run/reboot-required: {', '.join(host['reboot_required'].split())})"
        )
    if host["container"] and wishes["kernel_module"]:
        notices.append("this is a container, its kernel the outer host's: nvidia_stack_kernel_module: false fits it")
    if len(gpus) > 1:
        translated = [address for address, mode in host["iommu"].items() if str(mode).startswith("DMA")]
        if translated:
            notices.append(
                f"PCIe peer traffic: the IOMMU translates for {len(translated)} of {len(gpus)} GPUs; on such hosts the "
                "first all-reduce has hung although topo -p2p said OK. Remedies: IOMMU off in the BIOS, or "
                "nvidia_stack_kernel_parameters: [iommu=pt]"
            )
        if host["acs_redirect"]:
            notices.append(
                f"PCIe peer traffic: ACS redirects at {', '.join(host['acs_redirect'])}, peers go through the root. "
                "Remedies: ACS off in the BIOS, or nvidia_stack_kernel_parameters: "
                f"['pci=disable_acs_redir={';'.join(host['acs_redirect'])}']"
            )
    return notices


def _lines(result: JsonDict, wishes: Mapping[str, Any]) -> list[str]:
    kinds: dict[str, int] = {}
    for gpu in result["gpus"]:
        word = f"{gpu['generation']} ({gpu['id']})"
        kinds[word] = kinds.get(word, 0) + 1
    boards = ", ".join(f"{count} x {word}" for word, count in kinds.items()) or "none"
    where = (result["repository"] or {}).get("base") or "the distribution"
    lines = [f"GPUs on the PCI bus: {boards}"]
    lines.append(f"driver: branch {result['branch']}, {result['flavour']} kernel modules ({result['why']}), {where}")
    if not wishes["kernel_module"]:
        lines[-1] += "; the kernel module is not this host's"
    switches = "NVSwitch" if result["nvswitch"] else "no NVSwitch"
    lines.append(f"fabric manager: {'wanted' if _fabric_manager(wishes, result) else 'not wanted'} ({switches})")
    for words, key in (("to install", "missing"), ("to remove", "unwanted"), ("to hold", "unheld")):
        if result[key]:
            lines.append(f"{words}: {', '.join(result[key])}")
    if result["replaces"]:
        lines.append(f"to replace: {result['replaces']}")
    if result["parameters"]:
        lines.append(f"kernel parameters to add: {' '.join(result['parameters'])}")
    lines += [f"reboot due: {reason}" for reason in result["reboot"]]
    lines += [f"notice: {notice}" for notice in result["notices"]]
    return lines + [f"problem: {problem}" for problem in result["problems"]]
