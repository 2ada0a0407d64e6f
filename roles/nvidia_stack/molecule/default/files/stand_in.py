"""Makes a stand-in GPU host: NVIDIA's repository in small, two boards in a folder like sysfs, the driver's programs.

stand_in.py first   builds /srv/cuda/debian12/x86_64 with branch 580, and what a fresh host has
stand_in.py later   publishes a newer 580 and branch 595 there, upgrades the host and says what that would have been
stand_in.py show    prints what the host has, as JSON
stand_in.py fault   changes what the stand-in nvidia-smi and module say: a JSON object of file to text follows
stand_in.py gone    removes the stand-in driver
"""

import gzip
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path("/srv/cuda/debian12/x86_64")
STAND_IN = Path("/opt/stand-in")
KERNEL = os.uname().release
NEXT = "9.9.0-1-amd64"
UNIT = """[Unit]
Description=stand-in of the persistence daemon
After=stand-in-driver.service
[Service]
ExecStart=/usr/bin/nvidia-persistenced --user nobody --no-persistence-mode --verbose
ExecStopPost=/bin/rm -f /opt/stand-in/persistence
"""
DAEMON = """#!/bin/sh
test -e /opt/stand-in/sys/module/nvidia/version || exit 1
case "$*" in *--no-persistence-mode*) ;; *) echo Enabled > /opt/stand-in/persistence ;; esac
exec sleep infinity
"""
# DKMS builds for every kernel whose headers are there, and only for those.
BUILD = """#!/bin/sh
for headers in /usr/src/linux-headers-*; do
  built="/lib/modules/${{headers#/usr/src/linux-headers-}}/updates/dkms"
  mkdir -p "$built" && echo {version} > "$built/nvidia.ko"
done
"""
MODPROBE = """#!/bin/sh
mkdir -p /opt/stand-in/sys/module/nvidia
cat "/lib/modules/$(uname -r)/updates/dkms/nvidia.ko" > /opt/stand-in/sys/module/nvidia/version
"""
BOOT = """[Unit]
Description=stand-in of a driver that udev loads at boot
ConditionPathExists=/opt/stand-in/built
[Service]
Type=oneshot
ExecStart=/usr/local/sbin/modprobe nvidia
ExecStart=/bin/sh -c 'test ! -e /opt/stand-in/ecc-pending || cp /opt/stand-in/ecc-pending /opt/stand-in/ecc-current'
[Install]
WantedBy=multi-user.target
"""
SMI = """#!/bin/sh
# Prints the rows it was given, with the status it was given; @ stands for the persistence mode, % for the version.
cd /opt/stand-in
mode() { cat persistence 2> /dev/null || echo Disabled; }
case "$*" in
  *--power-limit=*) echo "$*" > power-limit ;;
  *--ecc-config=1*) echo Enabled > ecc-pending ;;
  *ecc.mode*) for gpu in 0 1; do echo "$gpu, $(cat ecc-current), $(cat ecc-pending)"; done ;;
  *) sed "s/@/$(mode)/; s/%/$(cat sys/module/nvidia/version)/" rows; exit "$(cat status 2> /dev/null || echo 0)" ;;
esac
"""
SERVER = """[Unit]
Description=stand-in of NVIDIA's repository
[Service]
ExecStart=/usr/bin/python3 -m http.server --bind 127.0.0.1 --directory /srv/cuda 18580
[Install]
WantedBy=multi-user.target
"""


def put(path, text, mode=0o644):
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)


def package(name, version, depends="", files=None, conffiles="", postinst="", extra=""):
    """Build one small Debian package into the repository."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        root.mkdir(mode=0o755)
        for path, (content, mode) in (files or {}).items():
            put(root / path, content, mode)
        fields = f"Package: {name}\nVersion: {version}\nArchitecture: amd64\nMaintainer: stand-in <root@localhost>\n"
        fields += f"Depends: {depends}\n" if depends else ""
        put(root / "DEBIAN/control", f"{fields}{extra}Description: stand-in of {name}\n")
        if conffiles:
            put(root / "DEBIAN/conffiles", conffiles)
        if postinst:
            put(root / "DEBIAN/postinst", postinst, 0o755)
        build = ["dpkg-deb", "--build", "-Znone", root, REPOSITORY / f"{name}_{version}.deb"]
        subprocess.run(build, check=True, stdout=subprocess.DEVNULL)


def driver(number):
    """The driver's packages of one version, each bound to the library's."""
    version = f"{number}-1"
    same = f"libnvidia-ml1 (= {version})"
    package("libnvidia-ml1", version, files={f"opt/stand-in/lib/libnvidia-ml.so.{number}": ("", 0o644)})
    package("nvidia-driver-cuda", version, same)
    package("nvidia-kernel-open-dkms", version, same, postinst=BUILD.format(version=number))
    files = {"lib/systemd/system/nvidia-persistenced.service": (UNIT, 0o644)}
    package("nvidia-persistenced", version, same, {**files, "usr/bin/nvidia-persistenced": (DAEMON, 0o755)})
    package("nvidia-fabricmanager", version)


def pin(branch):
    """NVIDIA's pinning package of one branch."""
    text = f"Package: *nvidia*\nPin: version {branch}.*\nPin-Priority: 1001\n"
    only = "Provides: nvidia-driver-pinning\nConflicts: nvidia-driver-pinning\nReplaces: nvidia-driver-pinning\n"
    files = {"etc/apt/preferences.d/nvidia": (text, 0o644)}
    package(f"nvidia-driver-pinning-{branch}", f"{branch}-1", files=files, extra=only)


def kernel(version):
    """A kernel newer than the running one, and the headers of both."""
    package(f"linux-image-{NEXT}", version, files={f"boot/vmlinuz-{NEXT}": ("", 0o644)})
    package("linux-image-amd64", version, f"linux-image-{NEXT}")
    package("linux-headers-amd64", version, f"linux-headers-{NEXT}")
    for release in (KERNEL, NEXT):
        package(f"linux-headers-{release}", version, files={f"usr/src/linux-headers-{release}/Makefile": ("", 0o644)})


def gpg(*words):
    """Run GnuPG with a home of its own."""
    base = ["gpg", "--homedir", str(STAND_IN / "gnupg"), "--batch", "--yes", "--quiet"]
    subprocess.run([*base, *words], check=True)


def keyring():
    """A signing key, and the package that brings its public half and the line of the repository that it replaces."""
    (STAND_IN / "gnupg").mkdir(mode=0o700, parents=True, exist_ok=True)
    gpg("--passphrase", "", "--quick-generate-key", "stand-in", "rsa2048", "sign", "never")
    public = STAND_IN / "key.gpg"
    gpg("--output", str(public), "--export", "stand-in")
    line = "etc/apt/sources.list.d/cuda-debian12-x86_64.list"
    # A package of binary content: built by hand, since `package` writes text.
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        put(root / line, "deb [signed-by=/usr/share/keyrings/cuda-archive-keyring.gpg] http://127.0.0.1:9/ /\n")
        (root / "usr/share/keyrings").mkdir(parents=True)
        shutil.copy(public, root / "usr/share/keyrings/cuda-archive-keyring.gpg")
        put(
            root / "DEBIAN/control",
            "Package: cuda-keyring\nVersion: 1.1-1\nArchitecture: all\nMaintainer: stand-in <root@localhost>\n"
            "Description: stand-in of cuda-keyring\n",
        )
        put(root / "DEBIAN/conffiles", f"/{line}\n")
        subprocess.run(["dpkg-deb", "--build", root, REPOSITORY / "cuda-keyring_1.1-1_all.deb"], check=True)


def publish():
    """Write the repository's index and sign it."""
    stanzas = []
    for deb in sorted(REPOSITORY.glob("*.deb")):
        fields = subprocess.run(["dpkg-deb", "--field", deb], check=True, capture_output=True, text=True).stdout
        digest = hashlib.sha256(deb.read_bytes()).hexdigest()
        stanzas.append(f"{fields}Filename: ./{deb.name}\nSize: {deb.stat().st_size}\nSHA256: {digest}\n")
    index = "\n".join(stanzas).encode()
    (REPOSITORY / "Packages.gz").write_bytes(gzip.compress(index, mtime=0))
    (REPOSITORY / "Packages").write_bytes(index)
    sums = ""
    for name in ("Packages", "Packages.gz"):
        content = (REPOSITORY / name).read_bytes()
        sums += f" {hashlib.sha256(content).hexdigest()} {len(content)} {name}\n"
    put(STAND_IN / "Release", f"Origin: NVIDIA\nLabel: NVIDIA CUDA\nSHA256:\n{sums}")
    gpg("--clearsign", "--output", str(REPOSITORY / "InRelease"), str(STAND_IN / "Release"))


def boards(tree, device):
    """Two boards behind one IOMMU that translates."""
    for address in ("0000:01:00.0", "0000:02:00.0"):
        folder = tree / "bus/pci/devices" / address
        content = {"vendor": "0x10de", "device": device, "class": "0x030200", "iommu_group/type": "DMA"}
        for name, text in content.items():
            put(folder / name, text + "\n")


def first():
    """A fresh host: kernel, boards and a fabric manager that PCIe boards must not have; no driver."""
    REPOSITORY.mkdir(parents=True)
    # kmod brings it, which no host with a kernel of its own is without.
    Path("/etc/modprobe.d").mkdir(exist_ok=True)
    boards(STAND_IN / "sys", "0x2bb5")
    boards(STAND_IN / "sys-ada", "0x26b9")
    boards(STAND_IN / "sys-fresh", "0x2bb5")
    driver("580.95.05")
    pin(580)
    kernel("9.9.0-1")
    keyring()
    publish()
    rows = "".join(f"{gpu}, NVIDIA RTX PRO 6000 Blackwell Server Edition, %, @\n" for gpu in (0, 1))
    for name, text in (("rows", rows), ("ecc-current", "Disabled\n"), ("ecc-pending", "Disabled\n"), ("built", "")):
        put(STAND_IN / name, text)
    put(Path("/usr/local/bin/nvidia-smi"), SMI, 0o755)
    put(Path("/usr/local/sbin/modprobe"), MODPROBE, 0o755)
    put(Path("/usr/local/sbin/update-grub"), "#!/bin/sh\ntouch /opt/stand-in/update-grub-ran\n", 0o755)
    put(Path("/etc/systemd/system/stand-in-driver.service"), BOOT)
    put(Path("/etc/systemd/system/stand-in-repository.service"), SERVER)
    names = (f"linux-image-{NEXT}_9.9.0-1", "linux-image-amd64_9.9.0-1", "nvidia-fabricmanager_580.95.05-1")
    subprocess.run(["dpkg", "--install", *(REPOSITORY / f"{name}.deb" for name in names)], check=True)
    subprocess.run(["systemctl", "enable", "stand-in-driver.service"], check=True)
    subprocess.run(["systemctl", "enable", "--now", "stand-in-repository.service"], check=True)


def later():
    """NVIDIA publishes: a newer version of the branch, a newer branch, and the distribution a newer kernel package."""
    for number in ("580.105.08", "595.45.04"):
        driver(number)
    pin(595)
    kernel("9.9.0-2")
    publish()
    said("apt-get", "update")
    unheld = said("apt-get", "--simulate", "--ignore-hold", "dist-upgrade")
    subprocess.run(["apt-get", "dist-upgrade", "--yes", "-qq"], check=True, stdout=subprocess.DEVNULL)
    print(json.dumps({"without_holds": dict(re.findall(r"^Inst (\S+) \[\S+\] \((\S+)", unheld, re.MULTILINE))}))


def said(*words):
    """What a program prints, errors included; a failure is an answer."""
    text = subprocess.run(words, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False).stdout
    return text.strip()


def content(path):
    """A file's text, None without the file."""
    return Path(path).read_text().strip() if Path(path).exists() else None


def show():
    """Everything that the tests ask of the host."""
    rows = said("dpkg-query", "-W", "-f", "${Package} ${Version} ${db:Status-Abbrev}\n").splitlines()
    packages = {name: version for name, version, state in map(str.split, rows) if state[1] == "i"}
    smi = (
        subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode
        if shutil.which("nvidia-smi")
        else None
    )
    names = ("libnvidia-ml1", "nvidia-driver-cuda", "nvidia-kernel-open-dkms", "nvidia-persistenced")
    shown = {
        "held": said("apt-mark", "showhold").split(),
        "packages": packages,
        "versions": sorted({packages[name] for name in names if name in packages}),
        "daemon": said("systemctl", "is-enabled", "nvidia-persistenced.service"),
        "daemon_start": said("systemctl", "show", "--property", "ExecStart", "nvidia-persistenced.service"),
        "unattended": said("apt-config", "dump", "Unattended-Upgrade::Package-Blacklist"),
        "nouveau": content("/etc/modprobe.d/swapgate-nouveau.conf"),
        "next_kernel": content(f"/lib/modules/{NEXT}/updates/dkms/nvidia.ko"),
        "loaded": content(STAND_IN / "sys/module/nvidia/version"),
        "persistence": content(STAND_IN / "persistence"),
        "power_limit": content(STAND_IN / "power-limit"),
        "ecc": content(STAND_IN / "ecc-current"),
        "grub": content("/etc/default/grub.d/60-swapgate-nvidia.cfg"),
        "grub_updated": (STAND_IN / "update-grub-ran").exists(),
        "nvidia_smi": smi,
    }
    print(json.dumps(shown))


def fault():
    """What the stand-in driver is to say from now on."""
    for name, text in json.loads(sys.argv[2]).items():
        put(STAND_IN / name, text.rstrip() + "\n")


def gone():
    """Nothing of the stand-in driver stays, the drop-in of its daemon apart."""
    purge = [
        "apt-get",
        "purge",
        "--yes",
        "-qq",
        "--allow-change-held-packages",
        "^nvidia-",
        "libnvidia-ml1",
        "cuda-keyring",
    ]
    subprocess.run(purge, check=True, stdout=subprocess.DEVNULL)
    for path in [*Path("/etc/apt/sources.list.d").glob("cuda-*"), Path("/usr/local/bin/nvidia-smi")]:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    {"first": first, "later": later, "show": show, "fault": fault, "gone": gone}[sys.argv[1]]()
