"""Which packages of NVIDIA's a host needs: by boards, distribution, branch and source; and what stands against it."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.swapgate.core.plugins.module_utils import nvidia_packages, nvidia_pci
from ansible_collections.swapgate.core.plugins.modules import nvidia_host

REPO = Path(__file__).resolve().parents[2]
WISHES = {
    "gpus": [],
    "source": "cuda",
    "url": "https://mirror.example.org/cuda/",
    "keyring": "cuda-keyring_1.1-1_all.deb",
    "branch": "580",
    "flavour": "auto",
    "kernel_module": True,
    "fabric_manager": "auto",
    "cuda_toolkit": "",
    "compiler": False,
    "hold_kernel": True,
    "kernel_parameters": [],
}
# Device ids and names as the public pci.ids list has them (2026-08-22).
BOARDS = [
    (0x1BB3, "GP104GL [Tesla P4]", "pascal"),
    (0x15F8, "GP100GL [Tesla P100 PCIe 16GB]", "pascal"),
    (0x1DB5, "GV100GL [Tesla V100 SXM2 32GB]", "volta"),
    (0x1EB8, "TU104GL [Tesla T4]", "turing"),
    (0x2182, "TU116 [GeForce GTX 1660 Ti]", "turing"),
    (0x20B5, "GA100 [A100 PCIe 80GB]", "ampere"),
    (0x2235, "GA102GL [A40]", "ampere"),
    (0x2330, "GH100 [H100 SXM5 80GB]", "hopper"),
    (0x2335, "GH100 [H200 SXM 141GB]", "hopper"),
    (0x26B9, "AD102GL [L40S]", "ada"),
    (0x2684, "AD102 [GeForce RTX 4090]", "ada"),
    (0x2901, "GB100 [B200]", "blackwell"),
    (0x2B85, "GB202 [GeForce RTX 5090]", "blackwell"),
    (0x2BB1, "GB202GL [RTX PRO 6000 Blackwell Workstation Edition]", "blackwell"),
    (0x2BB5, "GB202GL [RTX PRO 6000 Blackwell Server Edition]", "blackwell"),
    (0x3000, "GR100 [Reserved Dev ID A]", "newer than blackwell"),
    (0x3182, "GB110 [B300 SXM6 AC]", "blackwell"),
]
P4, V100, T4, H200, L40S, B200, PRO6000 = 0x1BB3, 0x1DB5, 0x1EB8, 0x2335, 0x26B9, 0x2901, 0x2BB5
NVSWITCH = {"address": "0000:05:00.0", "vendor": 0x10DE, "device": 0x22A3, "class": 0x068000}
DISTRIBUTIONS = {
    "debian12": {"id": "debian", "version": "12", "codename": "bookworm", "like": []},
    "debian13": {"id": "debian", "version": "13", "codename": "trixie", "like": []},
    "ubuntu2204": {"id": "ubuntu", "version": "22.04", "codename": "jammy", "like": ["debian"]},
    "ubuntu2404": {"id": "ubuntu", "version": "24.04", "codename": "noble", "like": ["debian"]},
    "rhel9": {"id": "rocky", "version": "9.6", "codename": "", "like": ["rhel", "centos", "fedora"]},
}


def gpus(*devices, kind=0x030200):
    """PCI functions of these device ids."""
    return [
        {"address": f"0000:{number + 1:02x}:00.0", "vendor": 0x10DE, "device": device, "class": kind}
        for number, device in enumerate(devices)
    ]


def host(distribution="debian12", devices=(PRO6000,) * 2, **changes):
    """What nvidia_host says of a host with these boards and no driver."""
    return {
        "distribution": DISTRIBUTIONS[distribution],
        "arch": "x86_64",
        "archive": "http://deb.debian.org/debian",
        "devices": gpus(*devices),
        "acs_redirect": [],
        "iommu": {},
        "module_version": None,
        "nouveau": False,
        "cmdline": ["quiet"],
        "kernels": [{"release": "6.1.0-38-amd64", "running": True, "next": True, "module": False}],
        "packages": {},
        "held": [],
        "secure_boot": False,
        "key_enrolled": None,
        "reboot_required": None,
        "runfile": False,
        "busy_units": [],
        "gpu_holders": [],
        "container": False,
        "initramfs": None,
        **changes,
    }


def plan(wishes=None, **facts):
    """The plan for such a host."""
    return nvidia_packages.plan(host(**facts), {**WISHES, **(wishes or {})})


# --- boards ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("device", "_name", "generation"), BOARDS)
def test_a_boards_generation_follows_from_its_id(device, _name, generation):
    assert nvidia_pci.generation(device) == generation


def test_only_display_and_3d_functions_of_nvidia_count_as_gpus():
    audio = {"address": "0000:01:00.1", "vendor": 0x10DE, "device": 0x22E8, "class": 0x040300}
    other = {"address": "0000:00:02.0", "vendor": 0x1A03, "device": 0x2000, "class": 0x030000}
    found = nvidia_pci.boards([audio, other, *gpus(PRO6000, 0x2B85), *gpus(L40S, kind=0x030000)])
    assert [gpu["id"] for gpu in found["gpus"]] == ["10de:2bb5", "10de:26b9", "10de:2b85"]


@pytest.mark.parametrize(
    ("devices", "nvswitch", "nvlink5"),
    [
        (gpus(*[H200] * 8), False, False),
        ([*gpus(*[H200] * 8), NVSWITCH], True, False),
        (gpus(*[PRO6000] * 8), False, False),
        (gpus(*[B200] * 8), True, True),
    ],
)
def test_nvswitches_are_seen_on_the_bus_or_known_by_the_board(devices, nvswitch, nvlink5):
    found = nvidia_pci.boards(devices)
    assert (found["nvswitch"], found["nvlink5"]) == (nvswitch, nvlink5)


def config_space(control, at=0x148):
    """A PCIe function's configuration space: an advanced-error capability, then one with this ACS control register."""
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, at << 20 | 1 << 16 | 0x0001)
    struct.pack_into("<IHH", space, at, 0 << 20 | 1 << 16 | 0x000D, 0x005F, control)
    return bytes(space)


@pytest.mark.parametrize(
    ("config", "redirects"),
    [
        (config_space(0x0000), False),
        (config_space(0x0001), False),  # SrcValid+ alone sends nothing elsewhere
        (config_space(0x001D), True),  # SrcValid+ ReqRedir+ CmpltRedir+ UpstreamFwd+, as IOMMU groups set it
        (config_space(0x0004), True),
        (bytes(4096), None),
        (bytes(256), None),  # what a reader without privilege gets
        (config_space(0x001D)[:256], None),
        (b"", None),
    ],
)
def test_acs_is_read_from_the_configuration_space(config, redirects):
    assert nvidia_pci.acs_redirects(config) is redirects


def test_a_looping_capability_list_ends():
    space = bytearray(4096)
    struct.pack_into("<I", space, 0x100, 0x100 << 20 | 0x0001)
    assert nvidia_pci.acs_redirects(bytes(space)) is None


# --- flavour ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "branch", "wish", "flavour", "problem"),
    [
        ([PRO6000], "580", "auto", "open", None),
        ([PRO6000], "580", "proprietary", "open", "nvidia_stack_flavour: proprietary cannot be"),
        ([PRO6000], "570", "auto", "open", None),
        ([PRO6000], "550", "auto", "open", "does not know blackwell"),
        ([T4, H200, L40S], "580", "auto", "open", None),
        ([T4], "580", "proprietary", "proprietary", None),
        ([T4], "620", "proprietary", "open", "branch 620 has no other"),
        ([V100], "580", "auto", "proprietary", None),
        ([V100], "580", "open", "proprietary", "nvidia_stack_flavour: open cannot be"),
        ([P4], "590", "auto", "proprietary", "branch 590 does not drive pascal boards; expected 580"),
        ([P4], "620", "auto", "open", "open kernel modules only"),
        ([V100, PRO6000], "580", "auto", "open", "a host loads one of them"),
        ([0x3456], "620", "auto", "open", None),
    ],
)
def test_the_flavour_follows_from_boards_and_branch(devices, branch, wish, flavour, problem):
    found = plan({"branch": branch, "flavour": wish}, devices=devices)
    assert found["flavour"] == flavour
    assert [problem in text and "Next" in text for text in found["problems"]] == [True] * bool(problem)


# --- plans by family -------------------------------------------------------------------------------------------------

UBUNTU_KERNEL = {"linux-image-generic": "6.8.0.88.88", "linux-image-6.8.0-88-generic": "6.8.0-88.89"}
HEADERS = ["linux-headers-6.1.0-38-amd64"]


@pytest.mark.parametrize(
    ("distribution", "wishes", "facts", "pin", "headers", "driver"),
    [
        (
            "debian12",
            {},
            {},
            ["nvidia-driver-pinning-580"],
            HEADERS,
            ["nvidia-driver-cuda", "nvidia-persistenced", "nvidia-kernel-open-dkms"],
        ),
        (
            "debian13",
            {"branch": "580.95.05", "keyring_checksum": "sha256:" + 64 * "0"},
            {"devices": [V100], "packages": {"linux-image-amd64": "6.12"}},
            ["nvidia-driver-pinning-580.95.05"],
            [*HEADERS, "linux-headers-amd64"],
            ["nvidia-driver-cuda", "nvidia-persistenced", "nvidia-kernel-dkms"],
        ),
        (
            "debian12",
            {"source": "distribution", "branch": "535"},
            {"devices": [L40S]},
            [],
            HEADERS,
            ["libcuda1", "nvidia-smi", "nvidia-persistenced", "nvidia-open-kernel-dkms", "firmware-nvidia-gsp"],
        ),
        (
            "debian12",
            {"source": "distribution", "branch": "535", "kernel_module": False},
            {"devices": [L40S]},
            [],
            [],
            ["libcuda1", "nvidia-smi", "nvidia-persistenced"],
        ),
        (
            "ubuntu2204",
            {},
            {"packages": UBUNTU_KERNEL},
            ["nvidia-driver-pinning-580"],
            [*HEADERS, "linux-headers-generic"],
            ["libnvidia-compute-580", "nvidia-utils-580", "nvidia-compute-utils-580", "nvidia-dkms-580-open"],
        ),
        (
            "ubuntu2404",
            {"branch": "595"},
            {"packages": UBUNTU_KERNEL},
            ["nvidia-driver-pinning-595"],
            [*HEADERS, "linux-headers-generic"],
            ["libnvidia-compute", "nvidia-utils", "nvidia-persistenced", "nvidia-dkms-open"],
        ),
        (
            "ubuntu2404",
            {"source": "distribution"},
            {"packages": {"linux-image-generic-hwe-24.04": "6.14"}},
            [],
            [],
            [
                "nvidia-utils-580-server",
                "nvidia-compute-utils-580-server",
                "nvidia-headless-no-dkms-580-server-open",
                "linux-modules-nvidia-580-server-open-generic-hwe-24.04",
            ],
        ),
        (
            "ubuntu2404",
            {"source": "distribution"},
            {"devices": [V100], "packages": UBUNTU_KERNEL},
            [],
            [],
            [
                "nvidia-utils-580-server",
                "nvidia-compute-utils-580-server",
                "nvidia-headless-no-dkms-580-server",
                "linux-modules-nvidia-580-server-generic",
            ],
        ),
        (
            "rhel9",
            {},
            {},
            [],
            ["kernel-devel", "kernel-headers", "kernel-devel-6.1.0-38-amd64"],
            ["nvidia-driver-cuda", "nvidia-persistenced", "kmod-nvidia-open-dkms"],
        ),
    ],
)
def test_the_packages_of_each_family(distribution, wishes, facts, pin, headers, driver):
    found = plan(wishes, distribution=distribution, **facts)
    assert found["problems"] == []
    assert (found["packages"]["pin"], found["packages"]["headers"], found["packages"]["driver"]) == (
        pin,
        headers,
        driver,
    )
    assert found["missing"] == [*pin, *headers, *driver] and found["touches_driver"]


@pytest.mark.parametrize(
    ("distribution", "arch", "base", "stream"),
    [
        ("debian12", "x86_64", "https://mirror.example.org/cuda/debian12/x86_64", None),
        ("debian13", "x86_64", "https://mirror.example.org/cuda/debian13/x86_64", None),
        ("ubuntu2204", "x86_64", "https://mirror.example.org/cuda/ubuntu2204/x86_64", None),
        ("ubuntu2404", "aarch64", "https://mirror.example.org/cuda/ubuntu2404/sbsa", None),
        ("rhel9", "x86_64", "https://mirror.example.org/cuda/rhel9/x86_64", "580-open"),
    ],
)
def test_the_repository_of_each_family(distribution, arch, base, stream):
    found = plan(distribution=distribution, arch=arch)
    assert found["repository"]["base"] == base and found["stream"] == stream
    assert found["repository"]["keyring"] == (None if stream else f"{base}/cuda-keyring_1.1-1_all.deb")


def test_the_package_of_the_key_is_known_by_its_checksum():
    found = plan(distribution="ubuntu2404")
    assert found["repository"]["keyring_checksum"].startswith("sha256:d2a6b11c") and not found["problems"]
    own = {"keyring_checksum": "sha256:" + "0" * 64}
    assert plan(own, distribution="ubuntu2404")["repository"]["keyring_checksum"] == own["keyring_checksum"]


@pytest.mark.parametrize(
    ("wishes", "arch"), [({"keyring": "cuda-keyring_1.2-1_all.deb"}, "x86_64"), ({}, "aarch64")], ids=["name", "folder"]
)
def test_a_key_that_nothing_vouches_for_is_not_installed(wishes, arch):
    [problem] = plan(wishes, distribution="debian12", arch=arch)["problems"]
    assert "found no checksum" in problem and "nvidia_stack_keyring_checksum: sha256:HEX" in problem
    there = plan(wishes, distribution="debian12", arch=arch, packages={"cuda-keyring": "1.1-1"})
    assert not there["problems"]


def test_a_pascal_board_on_red_hat_has_the_other_stream():
    found = plan(distribution="rhel9", devices=[P4])
    assert found["stream"] == "580-dkms" and "kmod-nvidia-latest-dkms" in found["packages"]["driver"]


def test_the_next_kernel_gets_headers_as_well():
    kernels = [
        {"release": name, "running": name == "6.1.0-9", "next": False, "module": False}
        for name in ("6.1.0-9", "6.1.0-38")
    ]
    found = plan(kernels=kernels, packages={"linux-image-amd64": "6.1.148-1"})
    assert found["packages"]["headers"] == ["linux-headers-6.1.0-9", "linux-headers-6.1.0-38", "linux-headers-amd64"]


@pytest.mark.parametrize(
    ("distribution", "source", "devices", "package"),
    [
        ("debian12", "cuda", [*gpus(*[H200] * 8), NVSWITCH], "nvidia-fabricmanager"),
        ("ubuntu2404", "distribution", [*gpus(*[H200] * 8), NVSWITCH], "nvidia-fabricmanager-580"),
        ("debian12", "cuda", gpus(*[B200] * 8), "nvlink5-580"),
    ],
)
def test_the_fabric_manager_comes_with_nvswitches(distribution, source, devices, package):
    found = nvidia_packages.plan({**host(distribution), "devices": devices}, {**WISHES, "source": source})
    assert found["packages"]["driver"][-1] == package
    assert "fabric manager: wanted (NVSwitch)" in found["lines"]


def test_the_fabric_manager_goes_from_boards_without_nvswitches():
    have = {"nvidia-fabricmanager": "580.95.05-1", "nvidia-fabricmanager-dev": "580.95.05-1"}
    assert plan(packages=have)["unwanted"] == ["nvidia-fabricmanager"]
    assert plan({"fabric_manager": "present"}, packages=have)["unwanted"] == []


@pytest.mark.parametrize(
    ("source", "names"), [("cuda", ["cuda-toolkit-13-0"]), ("distribution", ["nvidia-cuda-toolkit"])]
)
def test_the_toolkit_is_optional(source, names):
    assert plan()["packages"]["others"] == []
    wishes = {"cuda_toolkit": "13.0", "source": source, "branch": "535"}
    assert plan(wishes, devices=[L40S])["packages"]["others"] == names


@pytest.mark.parametrize(("host", "headers"), [("debian12", "python3-dev"), ("rhel9", "python3-devel")])
def test_what_triton_builds_with_is_there(host, headers):
    assert plan({"compiler": True}, distribution=host)["packages"]["others"] == ["gcc", headers]


# --- what is installed -----------------------------------------------------------------------------------------------

INSTALLED = {
    "nvidia-driver-pinning-580": "580-1",
    "nvidia-driver-cuda": "580.95.05-1",
    "nvidia-persistenced": "580.95.05-1",
    "nvidia-kernel-open-dkms": "580.95.05-1",
    "libnvidia-ml1": "580.95.05-1",
    "libcuda1": "580.95.05-1",
    "linux-image-amd64": "6.1.148-1",
    "linux-image-6.1.0-38-amd64": "6.1.147-1",
    "linux-headers-6.1.0-38-amd64": "6.1.147-1",
    "linux-headers-amd64": "6.1.148-1",
    "nvidia-container-toolkit": "1.17.8-1",
    "libnvidia-container1": "1.17.8-1",
    "nvidia-cuda-toolkit": "11.8-1",
    "libnvidia-ml-dev": "580.95.05-1",
    "libc6": "2.36",
}
DRIVER = sorted(list(INSTALLED)[:6])
KERNEL = ["linux-headers-amd64", "linux-image-amd64"]


def test_driver_and_kernel_metapackages_are_held_and_nothing_else():
    found = plan(packages=INSTALLED, module_version="580.95.05")
    assert found["unheld"] == sorted(DRIVER + KERNEL)
    assert found["missing"] == [] and not found["touches_driver"]
    assert plan({"hold_kernel": False}, packages=INSTALLED)["unheld"] == DRIVER


def test_a_finished_host_has_nothing_to_do():
    found = plan(packages=INSTALLED, module_version="580.95.05", held=DRIVER + KERNEL)
    parts = ("missing", "unwanted", "unheld", "unhold", "reboot", "problems", "notices", "parameters")
    assert [found[part] for part in parts] == [[]] * len(parts)
    assert not found["touches_driver"] and found["replaces"] is None


@pytest.mark.parametrize(
    ("branch", "replaced"), [("580", False), ("580.95.05", False), ("580.105.08", True), ("595", True), ("58", True)]
)
def test_another_branch_or_version_replaces_the_driver_and_releases_its_holds(branch, replaced):
    found = plan({"branch": branch}, packages=INSTALLED, held=DRIVER, module_version="580.95.05")
    assert found["touches_driver"] is replaced
    assert found["replaces"] == (f"driver 580.95.05 is installed, branch {branch} is asked for" if replaced else None)
    assert found["unhold"] == (DRIVER if replaced else [])


def test_an_old_pin_gives_way_to_the_new_one():
    assert plan({"branch": "595"}, packages=INSTALLED)["unwanted"] == ["nvidia-driver-pinning-580"]


def test_a_split_driver_is_put_together():
    found = plan(packages={**INSTALLED, "nvidia-kernel-open-dkms": "580.82.07-1"})
    assert found["replaces"] == "the library's package is 580.95.05, the kernel module's 580.82.07"


def test_the_other_flavours_module_goes():
    found = plan(packages={**INSTALLED, "nvidia-kernel-dkms": "580.95.05-1"}, module_version="580.95.05")
    assert found["unwanted"] == ["nvidia-kernel-dkms"] and found["touches_driver"]


@pytest.mark.parametrize(
    ("version", "number"),
    [
        ("580.95.05-1", "580.95.05"),
        ("535.261.03-1~deb12u1", "535.261.03"),
        ("3:580.95.05-1.el9", "580.95.05"),
        ("580.126.20-0ubuntu0.24.04.1", "580.126.20"),
        ("570.124-1", "570.124"),
    ],
)
def test_the_drivers_number_in_a_packages_version(version, number):
    assert nvidia_packages.number(version) == number


# --- what stands against it, and what is due -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wishes", "facts", "problem"),
    [
        ({}, {"secure_boot": True}, "Secure Boot is on and no key of this host is enrolled"),
        ({}, {"secure_boot": True, "key_enrolled": False}, "Secure Boot is on"),
        ({}, {"secure_boot": True, "key_enrolled": True}, None),
        ({}, {"secure_boot": True, "module_version": "580.95.05"}, None),
        ({"kernel_module": False}, {"secure_boot": True}, None),
        ({}, {"secure_boot": True, "distribution": "ubuntu2404"}, "nvidia_stack_source: distribution, whose modules"),
        ({"source": "distribution"}, {"secure_boot": True, "distribution": "ubuntu2404"}, None),
        ({"gpus": [0, 1, 2]}, {}, "2 NVIDIA GPUs are on the PCI bus (0000:01:00.0, 0000:02:00.0), 3 are declared"),
        ({"gpus": [0]}, {}, None),
        ({"source": "distribution"}, {"devices": [L40S]}, "Debian 12 itself has branch 535"),
        ({"source": "distribution"}, {"distribution": "rhel9"}, "the distribution has no NVIDIA driver"),
        ({}, {"runfile": True}, ".run installer"),
    ],
)
def test_what_stands_against_a_plan(wishes, facts, problem):
    problems = plan(wishes, **facts)["problems"]
    assert [problem in text and "Next" in text for text in problems] == [True] * bool(problem)


def test_an_unknown_distribution_is_said_and_plans_nothing():
    other = {"id": "arch", "version": "", "codename": "", "like": []}
    found = nvidia_packages.plan({**host(), "distribution": other}, WISHES)
    assert "expected Debian 12 or 13" in found["problems"][0] and found["missing"] == []


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        (
            {"module_version": "580.82.07", "packages": INSTALLED},
            "the loaded module is 580.82.07, the installed library 580.95.05",
        ),
        ({"nouveau": True}, "nouveau holds the boards"),
        ({"module_version": "580.95.05", "packages": INSTALLED}, None),
        ({"reboot_required": "linux-image-6.1.0-38-amd64"}, None),
    ],
)
def test_when_a_reboot_is_due(facts, reason):
    assert plan(**facts)["reboot"] == ([reason] if reason else [])


def test_the_systems_own_wish_for_a_reboot_is_reported():
    said = plan(reboot_required="linux-image-6.1.0-38-amd64\nlibc6")["notices"]
    assert said == ["the system asks for a reboot (/run/reboot-required: linux-image-6.1.0-38-amd64, libc6)"]


def test_iommu_and_acs_are_reported_where_gpus_have_peers():
    facts = {"iommu": {"0000:01:00.0": "DMA-FQ", "0000:02:00.0": "identity"}, "acs_redirect": ["0000:00:01.1"]}
    iommu, acs = plan(**facts)["notices"]
    assert "translates for 1 of 2 GPUs" in iommu and "iommu=pt" in iommu
    assert "ACS redirects at 0000:00:01.1" in acs and "pci=disable_acs_redir=0000:00:01.1" in acs
    assert plan(devices=[PRO6000], **facts)["notices"] == []


def test_kernel_parameters_that_are_there_are_not_asked_for():
    found = plan({"kernel_parameters": ["iommu=pt", "quiet"]})
    assert found["parameters"] == ["iommu=pt"]


# --- the look at the host --------------------------------------------------------------------------------------------


def sysfs(root):
    """A tree like sysfs: a GPU below a bridge that redirects, another without, an IOMMU, and a loaded module."""
    places = {
        "0000:00:01.0": ("0x8086", "0x1234", "0x060400", "pci0000:00/0000:00:01.0"),
        "0000:01:00.0": ("0x10de", "0x2bb5", "0x030200", "pci0000:00/0000:00:01.0/0000:01:00.0"),
        "0000:02:00.0": ("0x10de", "0x2bb5", "0x030000", "pci0000:00/0000:02:00.0"),
    }
    (root / "bus/pci/devices").mkdir(parents=True)
    for address, (vendor, device, kind, place) in places.items():
        folder = root / "devices" / place
        (folder / "iommu_group").mkdir(parents=True)
        for name, text in (("vendor", vendor), ("device", device), ("class", kind), ("iommu_group/type", "DMA")):
            (folder / name).write_text(text + "\n")
        (root / "bus/pci/devices" / address).symlink_to(folder)
    (root / "devices/pci0000:00/0000:00:01.0/config").write_bytes(config_space(0x001D))
    (root / "module/nvidia").mkdir(parents=True)
    (root / "module/nvidia/version").write_text("580.95.05\n")
    return root


def test_the_module_reads_a_host(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ansible_collections.swapgate.core.plugins.modules.nvidia_host"],
        input=json.dumps({"ANSIBLE_MODULE_ARGS": {"sysfs": str(sysfs(tmp_path))}}),
        env={**os.environ, "PYTHONPATH": str(REPO / "collections"), "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert result["changed"] is False
    found = result["host"]
    assert [gpu["address"] for gpu in found["devices"]] == ["0000:01:00.0", "0000:02:00.0"]
    assert found["acs_redirect"] == ["0000:00:01.0"] and found["iommu"]["0000:01:00.0"] == "DMA"
    assert found["module_version"] == "580.95.05" and found["nouveau"] is False
    assert [kernel["release"] for kernel in found["kernels"] if kernel["running"]] == [os.uname().release]
    assert set(host()) <= set(found)
    # What the module says is what the plan reads.
    assert nvidia_packages.plan(found, WISHES)["expected"] == 2


def test_the_newest_installed_kernel_boots_next(tmp_path):
    boot, modules = tmp_path / "boot", tmp_path / "modules"
    boot.mkdir()
    for name in ("vmlinuz-6.1.0-9-amd64", "vmlinuz-6.1.0-38-amd64", "vmlinuz"):
        (boot / name).touch()
    (modules / "6.1.0-38-amd64/updates/dkms").mkdir(parents=True)
    (modules / "6.1.0-38-amd64/updates/dkms/nvidia-current-open.ko.xz").touch()
    running, following = nvidia_host.kernels(boot, modules)
    assert (running["release"], running["next"], running["module"]) == (os.uname().release, False, False)
    assert (following["release"], following["next"], following["module"]) == ("6.1.0-38-amd64", True, True)


@pytest.mark.parametrize(
    ("text", "mirror"),
    [
        ("deb http://deb.debian.org/debian bookworm main", "http://deb.debian.org/debian"),
        (
            "deb [signed-by=/x.gpg] https://mirror.example.org/debian/ bookworm main",
            "https://mirror.example.org/debian/",
        ),
        ("Types: deb\nURIs: http://deb.debian.org/debian\nSuites: bookworm", "http://deb.debian.org/debian"),
        ("deb http://deb.debian.org/debian-security bookworm-security main", None),
        ("# deb http://deb.debian.org/debian bookworm main", None),
    ],
)
def test_debians_mirror_is_taken_from_apts_sources(text, mirror):
    assert nvidia_host.archive([text]) == mirror
