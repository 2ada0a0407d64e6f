"""deploy.py and ansible-playbook at a real pseudo-terminal: asked, answered, interrupted, and nothing left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pexpect
import pytest
from throwaway import BIN, NGRAM, ROOT, Host, until

pytestmark = pytest.mark.host
MARK = "SWAPGATE_TERMINAL_TEST"
PLAYBOOK = [str(BIN / "ansible-playbook"), "playbooks/deploy.yml", "-e", "variant=ngram"]
DEPLOY = [str(ROOT / "scripts/deploy.py"), "ngram"]


def processes(mark: str) -> list[str]:
    """Command lines of the processes that were started in this test's terminal, but ssh's shared connections."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            environment, words = (folder / "environ").read_bytes(), (folder / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        line = words.replace(b"\0", b" ").decode(errors="replace").strip()
        if f"{MARK}={mark}".encode() in environment and line and "[mux]" not in line:
            found.append(line)
    return found


@contextmanager
def terminal(host: Host, words: list[str], *more: str) -> Iterator[Any]:
    """The command in a terminal of its own, where consent has not been given; nothing of it is left at the end."""
    mark = f"{os.getpid()}-{id(words)}-{len(more)}"
    inventories = ["-i", str(host.sandbox["inventory"]), "-i", str(host.inventory)]
    child = pexpect.spawn(
        words[0],
        [*words[1:], *inventories, "-e", "allow_disruption=false", *more],
        cwd=str(ROOT),
        env={
            **os.environ,
            MARK: mark,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "TERM": "xterm",
        },
        dimensions=(40, 160),
        encoding="utf-8",
        timeout=120,
    )
    try:
        yield child
        until(lambda: not processes(mark), 15, f"the end of every process, found {processes(mark)}")
    finally:
        child.close(force=True)


def code(child: Any, limit_s: float = 120) -> int:
    """The exit code, once it has ended."""
    child.expect(pexpect.EOF, timeout=limit_s)
    child.close()
    return int(child.exitstatus if child.exitstatus is not None else -child.signalstatus)


@pytest.mark.parametrize("words", [DEPLOY, PLAYBOOK], ids=["deploy.py", "ansible-playbook"])
def test_consent_is_asked_for_and_a_no_touches_nothing(host: Host, words: list[str]) -> None:
    before = host.picture()
    with terminal(host, words) as child:
        child.expect("Type yes to go on")
        child.sendline("no")
        child.expect("nobody agreed")
        assert code(child) == 2
    assert host.picture() == before


def test_a_yes_swaps(host: Host) -> None:
    with terminal(host, DEPLOY) as child:
        child.expect(rf"This stops baseline on {host.name}\. Type yes to go on: ")
        child.sendline("yes")
        child.expect(f"{host.name}: swapped")
        assert code(child) == 0
    assert host.enabled() == [NGRAM]


def test_ctrl_c_at_the_question_starts_nothing(host: Host) -> None:
    before = host.picture()
    with terminal(host, DEPLOY) as child:
        child.expect("Type yes to go on")
        child.sendintr()
        child.expect("interrupted; no swap had begun")
        assert code(child) == 130
    assert host.picture() == before


def test_ctrl_c_in_the_play_leaves_no_worker(host: Host) -> None:
    before = host.picture()
    with terminal(host, DEPLOY) as child:
        child.expect("preparing")
        child.sendintr()
        child.expect("interrupted; no swap had begun", timeout=30)
        assert code(child) == 130
    assert host.picture() == before


def test_ctrl_c_in_mid_swap_leaves_the_swap_to_the_host(host: Host) -> None:
    with host.knobs(variants=[{"when": "--speculative-config", "load_s": 20}]):
        with terminal(host, DEPLOY, "--allow-disruption") as child:
            child.expect("watch")
            swap_id = host.status()["swap"]["id"]
            child.sendintr()
            child.expect(f"interrupted; the swap on {host.name} goes on", timeout=30)
            assert code(child) == 130
        assert host.await_swap(swap_id)["outcome"] == "swapped"
