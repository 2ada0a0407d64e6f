"""Whose a GPU is, and when waiting for it is over: a stand-in nvidia-smi, real processes."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
import time

import pytest
from ansible_collections.swapgate.core.plugins.host_program import gpus, shared_memory, status
from ansible_collections.swapgate.core.plugins.module_utils import processes, progress, records

UNIT = "vllm-tiny.service"
ME = pwd.getpwuid(os.getuid()).pw_name
HEADER = "index, uuid, pci.bus_id, name, memory.total [MiB], memory.used [MiB], memory.free [MiB], utilization.gpu [%]"
APPS = "gpu_uuid, pid, process_name, used_gpu_memory [MiB]"


def row(index, used=0, use=0):
    """One GPU of the stand-in."""
    return f"{index}, GPU-{index}, 0000000{index}:4B:00.0, NVIDIA X, 10000 MiB, {used} MiB, {10000 - used} MiB, {use} %"


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A stand-in nvidia-smi; call it with the rows of GPUs and processes that it shall tell."""
    program = tmp_path / "nvidia-smi"
    answer = 'case "$*" in *compute-apps*) cat apps;; topo*) cat "$*";; *) cat gpus;; esac'
    program.write_text(f"#!/bin/sh\ncd {tmp_path}\n{answer}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def tell(rows, apps=()):
        (tmp_path / "gpus").write_text("\n".join([HEADER, *rows]) + "\n")
        (tmp_path / "apps").write_text("\n".join([APPS, *apps]) + "\n")

    return tell


@pytest.fixture
def host(tmp_path, monkeypatch):
    """A layout with one installed variant on GPU 0 and 1, whose engine lies below tmp_path; units are up as `alive`."""
    layout = records.Layout(str(tmp_path / "root"))
    venv = tmp_path / "engines/vllm-1"
    (venv / "bin").mkdir(parents=True)
    layout.units.mkdir(parents=True)
    (layout.units / UNIT).write_text(f"[Service]\nUser={ME}\nExecStart=/bin/true\n")
    variant = {
        "name": "baseline",
        "unit": UNIT,
        "model": {"name": "tiny"},
        "gpus": [0, 1],
        "free_memory_mib": 1000,
        "engine": {"venv": str(venv)},
        "env": {},
        "argv": [],
    }
    records.write_json(layout.variants / "baseline.json", variant)
    alive = {"a-job.service"}
    monkeypatch.setattr(gpus, "_alive", lambda unit: unit in alive)
    layout.test = (variant, venv, alive)
    return layout


@pytest.fixture
def engine(host):
    """A process that runs from the engine's folder."""
    program = host.test[1] / "bin/sleeper"
    shutil.copy("/bin/sleep", program)
    process = subprocess.Popen([str(program), "60"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def job():
    """A process that does not."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def units(monkeypatch):
    """The unit that each pid shall be in; real control groups are looked at in tests/e2e."""
    table = {}
    monkeypatch.setattr(processes, "unit_of", lambda pid, proc="/proc": table.get(pid, ""))
    return table


def test_a_real_process_is_told_with_user_and_start(job):
    owner = processes.owner(job.pid)
    assert (owner.pid, owner.user) == (job.pid, ME)
    assert abs(owner.since_unix - time.time()) < 30
    assert f"pid {job.pid} (" in str(owner) and f"user {ME}, since 20" in str(owner)
    job.kill()
    deadline = time.monotonic() + 5
    while processes.owner(job.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes.owner(job.pid) is None, "a zombie holds nothing"


def test_kinds_of_holders(host, smi, engine, job, units):
    smi([row(0, 5000), row(1, 3000)], [f"GPU-0, {engine.pid}, x, 5000 MiB", f"GPU-1, {job.pid}, y, 3000 MiB"])

    def kinds():
        return [[holder["kind"] for holder in gpu["holders"]] for gpu in gpus.ownership(host)["gpus"]]

    units[engine.pid] = UNIT
    host.test[2].add(UNIT)
    assert kinds() == [["engine"], ["foreign"]]
    host.test[2].discard(UNIT)
    assert kinds() == [["orphan"], ["foreign"]], "its unit is dead, its process is not"
    units[engine.pid] = ""
    assert kinds() == [["orphan"], ["foreign"]], "started without any unit"
    units[engine.pid] = "a-job.service"
    assert kinds() == [["foreign"], ["foreign"]], "in a live unit of its own it is somebody's"
    text = "\n".join(progress.gpu_table("gpu1", gpus.ownership(host)))
    assert f"GPU 1: busy, 3000 MiB in use\n    foreign: pid {job.pid} (" in text


def test_a_pid_that_nobody_can_see_is_said_to_be_unseen(host, smi):
    smi([row(0, 5000), row(1)], ["GPU-0, 4194303, x, 5000 MiB"])
    assert [holder["kind"] for holder in gpus.ownership(host)["gpus"][0]["holders"]] == ["unseen"]


def test_only_orphans_are_ended(host, engine, job, units):
    said = gpus.end_orphans(host)
    assert [one["ended"] for one in said] == [True] and f"pid {engine.pid} (" in said[0]["who"]
    assert engine.wait(5) == -15 and job.poll() is None
    assert gpus.end_orphans(host) == []


def test_an_orphan_that_ignores_sigterm_is_killed(host, units, monkeypatch):
    monkeypatch.setattr(gpus, "ORPHAN_TERM_S", 0.5)
    link = host.test[1] / "bin/python"
    link.symlink_to(sys.executable)
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    process = subprocess.Popen([str(link), "-c", code], stdout=subprocess.PIPE)
    process.stdout.readline()
    assert [one["ended"] for one in gpus.end_orphans(host)] == [True]
    assert process.wait(5) == -9
    process.stdout.close()


def test_a_mapped_library_of_the_engine_tells_it_whatever_the_title(host, job):
    assert not processes.runs_from(job.pid, str(host.test[1]))
    library = host.test[1] / "lib.so"
    library.write_bytes(b"x" * 4096)
    code = (
        f"import mmap; f = open({str(library)!r}); m = mmap.mmap(f.fileno(), 0, prot=1); f.close(); print(flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code + "; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    assert processes.runs_from(process.pid, str(host.test[1]))
    process.communicate(b"\n")


def test_a_hosts_picture_and_what_does_not_fit_it(host, smi, tmp_path):
    smi([row(0), row(1)])
    (tmp_path / "topo -m").write_text("\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tPHB\t0-13\nGPU1\tPHB\t X \t0-13\n")
    (tmp_path / "topo -p2p r").write_text(" \tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n")
    for index, node in enumerate((0, -1)):
        device = tmp_path / f"sys/bus/pci/devices/000{index}:4b:00.0"
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    seen = gpus.picture(str(tmp_path / "sys"))
    assert [gpu["numa"] for gpu in seen["gpus"]] == [0, None]
    assert seen["topology"]["links"] == {"GPU0-GPU1": "PHB"} and seen["peers"]["kind"] == "p2p"
    variant = dict(host.test[0], env={"NCCL_P2P_LEVEL": "PIX"})
    assert "leaves 1 of 1 pairs" in gpus.collective_notices(variant)[0]
    report = status.topology(host)
    assert report["derived"]["settings"]["NCCL_P2P_LEVEL"]["value"] == "PHB"
    assert "profile `pcie` is made for such a board" in report["variants"]["baseline"][0]
    assert gpus.link_gbps(variant) is None, "no PCIe figures, no expectation"
    head = "index, pcie.link.gen.max, pcie.link.width.current"
    (tmp_path / "gpus").write_text(f"{head}\n0, 5, 16\n1, 4, 16\n")
    assert gpus.link_gbps(variant) == pytest.approx(1.969 * 16 / 2), "the slower board, over a host bridge"


def watch(host):
    """The wait of a swap."""
    return gpus.FreeWatch(host, host.test[0])


def test_free_gpus_are_free_and_others_do_not_count(host, smi, job):
    smi([row(0), row(1, 600), row(2, 9000)], [f"GPU-2, {job.pid}, y, 9000 MiB"])
    assert watch(host).blocked(0) == []


def test_a_holder_is_named_with_what_may_be_done(host, smi, engine, job, units):
    smi([row(0, 5000), row(1, 3000)], [f"GPU-0, {engine.pid}, x, 5000 MiB", f"GPU-1, {job.pid}, y, 3000 MiB"])
    waiting = watch(host)
    said = "\n".join(waiting.blocked(0))
    assert f"GPU 0: 5000 MiB held by pid {engine.pid}" in said and "`swapgate end-orphans`" in said
    assert f"GPU 1: 3000 MiB held by pid {job.pid}" in said and "stop it yourself" in said
    assert waiting.hopeless is None, "who holds it may go"
    assert all(one[0].isupper() and one.endswith(".") for one in said.split("\n"))
    refused = gpus.foreign(host, host.test[0])
    assert len(refused) == 2 and "end_orphans=true" in refused[0]
    units[engine.pid] = UNIT
    host.test[2].add(UNIT)
    assert len(gpus.foreign(host, host.test[0])) == 1, "what swapgate stops itself is no reason to refuse"


@pytest.mark.parametrize(
    ("used", "use", "state"), [(624, 100, "wedged"), (5000, 0, "held by nobody"), (5000, 100, "held by nobody")]
)
def test_a_gpu_that_never_gets_free_has_a_name_once_it_lasts(host, smi, used, use, state):
    smi([row(0), row(1, used, use)])
    waiting = watch(host)
    assert waiting.blocked(100.0) and waiting.hopeless is None, "the end of a process may leave that for a moment"
    assert waiting.blocked(104.0) and waiting.hopeless is None
    smi([row(0), row(1)])
    assert waiting.blocked(106.0) == []
    smi([row(0), row(1, used, use)])
    assert waiting.blocked(108.0) and waiting.hopeless is None, "it counts anew"
    assert "reset the GPU or reboot" in waiting.blocked(118.5)[-1]
    assert waiting.hopeless == state


def test_a_broken_gpu_is_hopeless_when_nvidia_smi_says_it_twice(host, smi):
    smi([row(0)])  # one of two is gone
    waiting = watch(host)
    assert waiting.blocked(0) and waiting.hopeless is None
    assert waiting.blocked(10.5) and waiting.hopeless == "gpu count"


def test_the_health_of_gpus_holds_the_kernels_words_of_this_boot(host, smi, tmp_path):
    smi([row(0), row(1), row(2)])
    program = tmp_path / "journalctl"
    program.write_text("#!/bin/sh\necho 'NVRM: Xid (PCI:0001:4B:00): 79, pid=7, GPU has fallen off the bus.'\n")
    program.chmod(0o755)
    faults, notices = gpus.health([0, 1])
    assert len(faults) == 1 and faults[0].startswith("GPU 1: ") and "Xid (PCI:0001:4B:00): 79" in faults[0]
    assert gpus.health([0, 2]) == ([], []) and notices == [], "another GPU's fault"
    program.write_text("#!/bin/sh\necho 'NVRM: Xid (PCI:0000:4B:00): 66, pid=7'\n")
    assert gpus.health([1]) == ([], [])
    faults, notices = gpus.health([0])
    assert faults == [] and "since boot" in notices[0]


def test_a_field_that_the_driver_does_not_know_costs_no_row(host, tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "_not_known", set())
    program = tmp_path / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\ncd {tmp_path}\necho >> asked\n"
        "for field in remapped_rows.failure retired_pages.pending; do\n"
        """  case "$*" in *$field*) echo "Field \\"$field\\" is not a valid field to query."; exit 2;; esac\ndone\n"""
        'case "$*" in *compute-apps*) ;; *) cat gpus;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "gpus").write_text(f"{HEADER}, remapped_rows.pending\n{row(0)}, No\n{row(1)}, Yes\n")
    assert "remapped_rows.pending Yes" in gpus.health([0, 1])[0][0]
    assert (tmp_path / "asked").read_text().count("\n") == 4, "each unknown field once, then rows and processes"
    gpus.health([0])
    assert (tmp_path / "asked").read_text().count("\n") == 6, "and never again"


def test_a_host_without_gpus_has_nothing_to_wait_for(host, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpus.FreeWatch(host, {"gpus": [], "free_memory_mib": 1}).blocked(0) == []


def test_only_segments_of_the_dead_and_of_the_user_are_stale(tmp_path):
    code = (
        "import mmap, os, sys\n"
        "held = [open(path, 'r+b') for path in sys.argv[1:]]\n"
        "m = mmap.mmap(held[1].fileno(), 0)\n"
        "held[1].close()\n"  # mapped, no longer open
        "print(flush=True)\n"
        "input()\n"
    )
    for name in ("open", "mapped", "dead", "foreign"):
        (tmp_path / name).write_bytes(b"x" * 4096)
    (tmp_path / "link").symlink_to("/etc/passwd")
    (tmp_path / "folder").mkdir()
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "open"), str(tmp_path / "mapped")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    holder.stdout.readline()
    proc = tmp_path / "proc"  # of the processes that this test may look into
    proc.mkdir()
    (proc / str(holder.pid)).symlink_to(f"/proc/{holder.pid}")
    mine = os.getuid()
    if mine == 0:
        os.chown(tmp_path / "foreign", 12345, 12345)
    else:
        (tmp_path / "foreign").unlink()
    assert shared_memory.stale(mine, str(tmp_path), str(proc)) == [str(tmp_path / "dead")]
    lines = []
    shared_memory.remove_stale(mine, lines.append, str(tmp_path), str(proc))
    assert lines == [f"removed {tmp_path / 'dead'} (0 MiB): its creator is dead"]
    assert not (tmp_path / "dead").exists() and (tmp_path / "mapped").exists() and (tmp_path / "folder").exists()
    holder.communicate(b"\n")
    assert shared_memory.stale(mine, str(tmp_path), str(proc)) == [str(tmp_path / "mapped"), str(tmp_path / "open")]
