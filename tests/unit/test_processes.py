"""Who holds a port and what a process tree does, asked of real processes."""

import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from ansible_collections.swapgate.core.plugins.module_utils import processes

LIMIT_S = 20
# Listens on a free port of the given address, starts a child of its own that only waits, prints both, and then does
# as it is told, line by line: "cpu" burns some CPU time, "read" reads a few MiB, "end child" ends the child.
LISTENER = """
import socket, subprocess, sys, time
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = socket.socket(family)
server.bind((sys.argv[1], 0))
server.listen()
child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print(server.getsockname()[1], child.pid, flush=True)
for line in sys.stdin:
    if line == "cpu\\n":
        until = time.process_time() + 0.3
        while time.process_time() < until:
            pass
    elif line == "read\\n":
        with open("/dev/zero", "rb") as zero:
            zero.read(4 << 20)
    elif line == "end child\\n":
        child.stdin.close()
        child.wait()
    elif line == "close\\n":
        server.close()
    print("done", flush=True)
child.stdin.close()
child.wait()
"""


class Listener:
    """The running program above."""

    def __init__(self, process, port, child):
        self.process, self.port, self.child = process, port, child

    def do(self, what):
        """Tell it one thing and wait until it is done."""
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"


@contextmanager
def listening(address="127.0.0.1"):
    """A Listener for as long as the block lasts."""
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        try:
            port, child = process.stdout.readline().split()
            yield Listener(process, int(port), int(child))
        finally:
            process.stdin.close()
            process.wait(LIMIT_S)


@pytest.fixture(scope="module")
def listener():
    """One Listener for the tests that do not change it."""
    with listening() as one:
        yield one


def test_the_holder_of_a_port_is_named(listener):
    (holder,) = processes.port_holders(listener.port)
    assert holder.pid == listener.process.pid
    assert holder.command.startswith("python")
    assert str(holder).startswith(f"pid {holder.pid} (python")


def test_a_port_on_ipv6_is_seen_too():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with listening("::1") as one:
        assert [holder.pid for holder in processes.port_holders(one.port)] == [one.process.pid]


def test_a_connection_is_no_listener_on_either_side():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client, server.accept()[0]:
            assert processes.port_holders(client.getsockname()[1]) == []
            assert [holder.pid for holder in processes.port_holders(port)] == [os.getpid()]
            server.close()  # the accepted connection keeps the port's number, and nobody listens there any more
            assert processes.listening_inodes(port) == set()
            assert processes.port_holders(port) == []


def test_a_port_is_free_once_the_socket_is_closed():
    with listening() as one:
        assert processes.listening_inodes(one.port)
        one.do("close")
        assert processes.listening_inodes(one.port) == set()
        assert processes.port_holders(one.port) == []


def test_two_listeners_are_told_apart(listener):
    with listening() as other:
        assert [holder.pid for holder in processes.port_holders(other.port)] == [other.process.pid]
        assert not processes.listening_inodes(other.port) & processes.listening_inodes(listener.port)


def test_the_socket_is_held_by_its_process_only(listener):
    inodes = processes.listening_inodes(listener.port)
    assert processes.holds_socket(listener.process.pid, inodes)
    assert not processes.holds_socket(os.getpid(), inodes)
    assert not processes.holds_socket(listener.process.pid, [])
    assert not processes.holds_socket(2**22 + 1, inodes)


def test_descendants_are_children_and_theirs_and_not_the_process_itself(listener):
    mine = processes.descendants(os.getpid())
    assert {listener.process.pid, listener.child} <= set(mine)
    assert os.getpid() not in mine
    assert processes.descendants(listener.process.pid) == [listener.child]
    assert processes.descendants(listener.child) == []


def test_a_process_that_ended_is_no_descendant():
    with listening() as one:
        assert one.child in processes.descendants(one.process.pid)
        one.do("end child")
        assert processes.descendants(one.process.pid) == []


def test_a_command_name_with_blanks_and_brackets_does_not_shift_the_fields(tmp_path):
    program = tmp_path / "a ) b) 1"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "60"]) as sleeper:
        deadline = time.monotonic() + LIMIT_S
        while (text := Path(f"/proc/{sleeper.pid}/comm").read_text()) != "a ) b) 1\n":
            assert time.monotonic() < deadline, text
            time.sleep(0.01)
        try:
            assert sleeper.pid in processes.descendants(os.getpid())
            assert processes.work([sleeper.pid]).cpu_s < 1
        finally:
            sleeper.kill()


def test_work_grows_with_cpu_time_and_with_reads():
    with listening() as one:
        members = [one.process.pid, one.child]
        start = processes.work(members)
        one.do("cpu")
        after_cpu = processes.work(members)
        one.do("read")
        after_read = processes.work(members)
    assert 0.2 <= after_cpu.cpu_s - start.cpu_s <= 1.0
    assert after_cpu.read_bytes - start.read_bytes < 1 << 20
    assert after_read.read_bytes - after_cpu.read_bytes >= 4 << 20


def test_the_work_of_nobody_is_nothing():
    assert processes.work([]) == processes.Work(0.0, 0)
    assert processes.work([2**22 + 1]) == processes.Work(0.0, 0)


def test_ticks_are_seconds(listener):
    by_ticks = processes.work([listener.process.pid], ticks=1).cpu_s
    assert processes.work([listener.process.pid]).cpu_s <= by_ticks
    assert by_ticks == int(by_ticks)


@pytest.mark.parametrize(
    ("text", "unit"),
    [
        ("0::/system.slice/vllm-m.service\n", "vllm-m.service"),
        ("1:name=systemd:/payload/system.slice/vllm-m-ngram.service\n0::/\n", "vllm-m-ngram.service"),
        ("0::/system.slice/vllm-m.service/engine\n", "vllm-m.service"),
        ("0::/user.slice/user-0.slice/session-3.scope\n", "session-3.scope"),
        ("0::/\n", ""),
        ("", ""),
    ],
)
def test_the_unit_of_a_process(tmp_path, text, unit):
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cgroup").write_text(text)
    assert processes.unit_of(7, str(tmp_path)) == unit


def test_a_holder_is_told_with_its_unit_where_it_has_one():
    assert str(processes.Holder(7, "vllm", "vllm-m.service")) == "pid 7 (vllm) of vllm-m.service"
    assert str(processes.Holder(7, "nc", "")) == "pid 7 (nc)"


def test_whoever_is_left_of_a_unit_is_named(tmp_path):
    for pid, name, group in (
        ("11", "VLLM::Worker", "0::/system.slice/vllm-tiny.service"),
        ("12", "sleep", "0::/system.slice/vllm-tiny.service/deeper"),
        ("13", "sshd", "0::/system.slice/ssh.service"),
        ("14", "VLLM::Worker", "0::/system.slice/vllm-tiny-ngram.service"),
    ):
        (tmp_path / pid).mkdir()
        (tmp_path / pid / "comm").write_text(name + "\n")
        (tmp_path / pid / "cgroup").write_text(group + "\n")
    found = processes.members(["vllm-tiny.service", "vllm-none.service"], str(tmp_path))
    assert sorted(map(str, found)) == [
        "pid 11 (VLLM::Worker) of vllm-tiny.service",
        "pid 12 (sleep) of vllm-tiny.service",
    ]


def test_whoever_has_a_device_open_is_named(tmp_path):
    device = tmp_path / "nvidia0"
    device.touch()
    with device.open() as opened:
        holding = subprocess.Popen(["sleep", "60"], stdin=opened)
    try:
        found = processes.device_holders(str(tmp_path / "nvidia"))
        assert [(holder.pid, holder.command) for holder in found] == [(holding.pid, "sleep")]
    finally:
        holding.kill()
        holding.wait()
    assert processes.device_holders(str(tmp_path / "nvidia")) == []
