"""nvidia-smi outputs: odd values have a name, broken GPUs never look free."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from ansible_collections.swapgate.core.plugins.module_utils import nvidia_smi
from hypothesis import given, settings
from hypothesis import strategies as st

CASES = [
    case
    for path in sorted((Path(__file__).resolve().parents[1] / "cases").glob("[!_]*.yml"))
    if "input" in (case := yaml.safe_load(path.read_text()))
    and ("smi --query" in case["input_type"] or "table" in case["input_type"] or "GPU state" in case["input_type"])
]
HEAD = "index, name, memory.total [MiB], memory.used [MiB], utilization.gpu [%]"
TABLE = """\
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|
|   0  NVIDIA RTX PRO 6000 Blac...    On  |   00000000:01:00.0 Off |                    0 |
| 30%   28C    P8             12W /  600W |{memory} |{use}      Default |
|                                         |                        |{mig} |
+-----------------------------------------+------------------------+----------------------+
"""
PROCESSES = """
+-----------------------------------------------------------------------------------------+
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|
{rows}
+-----------------------------------------------------------------------------------------+
"""


def table(memory: str = "       2MiB /  97887MiB", use: str = "      0%", mig: str = "             Disabled") -> str:
    """A table of one GPU."""
    return TABLE.format(memory=memory, use=use, mig=mig)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_public_case(case):
    """Verdict as the case expects, with a named state wherever it is refused."""
    judged = nvidia_smi.judge(nvidia_smi.parse(case["input"]))
    assert judged["verdict"] == case["expected"]["verdict"], judged["reasons"]
    assert (judged["state"] == "ok") == (judged["verdict"] == "accept")


OUTPUTS = [
    ("free", f"{HEAD}\n0, NVIDIA H200, 143771 MiB, 4 MiB, 0 %", "accept", "ok"),
    (
        "eight free without units",
        "\n".join([HEAD.replace(" [MiB]", "").replace(" [%]", ""), *(f"{n}, A, 97887, 2, 0" for n in range(8))]),
        "accept",
        "ok",
    ),
    ("lost", f"{HEAD}\n0, NVIDIA H200, [GPU is lost], [GPU is lost], [GPU is lost]", "reject", "lost"),
    (
        "requires reset while memory reads zero",
        f"{HEAD}\n0, NVIDIA H200, 143771 MiB, 0 MiB, [GPU requires reset]",
        "reject",
        "requires reset",
    ),
    ("ERR! while memory reads zero", f"{HEAD}\n3, ERR!, 81920 MiB, 0 MiB, ERR!", "reject", "error"),
    (
        "unknown error",
        f"{HEAD}\n0, NVIDIA H200, 143771 MiB, 4 MiB, [Unknown Error]",
        "reject-as-unknown",
        "unknown error",
    ),
    (
        "no permission",
        f"{HEAD}\n0, NVIDIA H200, [Insufficient Permissions], [Insufficient Permissions], 0 %",
        "reject-as-unknown",
        "no permission",
    ),
    (
        "an odd word of a future driver",
        f"{HEAD}\n0, NVIDIA H200, 143771 MiB, 4 MiB, [GPU sleeps]",
        "reject-as-unknown",
        "unreadable",
    ),
    ("unified memory", f"{HEAD}\n0, NVIDIA GB10, [N/A], [N/A], 0 %", "reject-as-unknown-memory", "memory not reported"),
    (
        "old wording",
        f"{HEAD}\n0, Tesla K40, [Not Supported], [Not Supported], 0 %",
        "reject-as-unknown-memory",
        "memory not reported",
    ),
    (
        "one of eight broken",
        f"{HEAD}\n0, A, 97887 MiB, 2 MiB, 0 %\n1, A, 97887 MiB, 0 MiB, [GPU requires reset]",
        "reject",
        "requires reset",
    ),
    (
        "notice in the middle",
        f"{HEAD}\n0, A, 97887 MiB, 2 MiB, 0 %\nUnable to determine the device handle for GPU0000:65:00.0: "
        "GPU is lost.  Reboot the system to recover this GPU\n2, A, 97887 MiB, 2 MiB, 0 %",
        "reject",
        "gpu not answering",
    ),
    (
        "infoROM warning at the end",
        f"{HEAD}\n0, A, 97887 MiB, 2 MiB, 0 %\nWARNING: infoROM is corrupted at gpu 0000:65:00.0",
        "accept-with-warning",
        "inforom corrupted",
    ),
    (
        "words nobody knows",
        f"{HEAD}\n0, A, 97887 MiB, 2 MiB, 0 %\nthe fans sing",
        "accept-with-warning",
        "unrecognised",
    ),
    (
        "no driver",
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
        "NVIDIA driver is installed and running.",
        "reject",
        "driver not loaded",
    ),
    ("nvml in a container", "Failed to initialize NVML: Unknown Error", "reject", "nvml failed"),
    ("no nvidia-smi", "bash: nvidia-smi: command not found", "reject", "nvidia-smi missing"),
    (
        "old driver, new field",
        'Field "gpu_recovery_action" is not a valid field to query.',
        "reject-as-unknown",
        "field not known",
    ),
    ("nothing", "", "reject-as-unknown", "nothing read"),
    ("recovery action", "index, memory.used [MiB], gpu_recovery_action\n0, 2 MiB, Reboot", "reject", "recovery action"),
    ("fabric not ready", "index, memory.used [MiB], fabric.state\n0, 2 MiB, In Progress", "reject", "fabric not ready"),
    ("fabric of a PCIe board", "index, memory.used [MiB], fabric.state\n0, 2 MiB, N/A", "accept", "ok"),
    (
        "mig",
        "index, memory.total [MiB], memory.used [MiB], mig.mode.current\n0, 40960 MiB, 0 MiB, Enabled",
        "reject",
        "mig enabled",
    ),
    (
        "uncorrectable",
        "index, memory.used [MiB], ecc.errors.uncorrected.volatile.total\n0, 2 MiB, 3",
        "reject",
        "uncorrectable ecc",
    ),
    (
        "old errors",
        "index, memory.used [MiB], ecc.errors.uncorrected.aggregate.total\n0, 2 MiB, 3",
        "accept-with-warning",
        "old ecc errors",
    ),
    (
        "pending remap",
        "index, memory.used [MiB], remapped_rows.pending\n0, 2 MiB, Yes",
        "reject",
        "memory repair pending",
    ),
    (
        "spins without a process",
        f"{HEAD}\n0, A, 97887 MiB, 624 MiB, 100 %\nNo running processes found",
        "reject",
        "wedged",
    ),
    (
        "memory of nobody",
        f"{HEAD}\n0, A, 97887 MiB, 58222 MiB, 0 %\nNo running processes found",
        "reject",
        "held by nobody",
    ),
    (
        "compute app with commas in its name",
        f"{HEAD}\n0, A, 97887 MiB, 2 MiB, 0 %\nGPU-1234, 77, /usr/bin/python, -c, x, 9000 MiB",
        "reject",
        "busy",
    ),
    ("table, free", table(), "accept", "ok"),
    (
        "table, busy",
        table("   58222MiB /  97887MiB")
        + PROCESSES.format(
            rows="|    0   N/A  N/A            4242      C   VLLM::Worker_TP0                      58210MiB |"
        ),
        "reject",
        "busy",
    ),
    (
        "table, held by nobody",
        table("   58222MiB /  97887MiB")
        + PROCESSES.format(
            rows="|  No running processes found                                                             |"
        ),
        "reject",
        "held by nobody",
    ),
    ("table, ERR! in the power", table().replace("12W /  600W", "ERR! / ERR!"), "reject", "error"),
    ("table, mig on", table(mig="              Enabled"), "reject", "mig enabled"),
    (
        "table, ecc",
        table().replace("|                    0 |", "|                    7 |"),
        "reject",
        "uncorrectable ecc",
    ),
]


@pytest.mark.parametrize(("text", "verdict", "state"), [row[1:] for row in OUTPUTS], ids=[row[0] for row in OUTPUTS])
def test_output(text, verdict, state):
    """Each output gives its verdict under its name."""
    judged = nvidia_smi.judge(nvidia_smi.parse(text))
    assert (judged["verdict"], judged["state"]) == (verdict, state), judged["reasons"]


def test_odd_values_are_never_numbers():
    """Every odd cell leaves None behind and its state by its field."""
    gpu = nvidia_smi.parse_csv(f"{HEAD}\n0, [N/A], [GPU is lost], ERR!, [Not Supported]")["gpus"][0]
    assert (gpu["memory_total_mib"], gpu["memory_used_mib"], gpu["utilization_percent"], gpu["name"]) == (
        None,
        None,
        None,
        None,
    )
    assert gpu["states"] == {
        "name": "not available",
        "memory.total": "lost",
        "memory.used": "error",
        "utilization.gpu": "not supported",
    }


def test_known_columns_are_given_for_output_without_a_header():
    """`fields` names the columns of our own query; a name may hold a comma."""
    gpu = nvidia_smi.parse_csv("0, GPU, with comma, 1 GiB, 512", ["index", "name", "memory.total", "memory.used"])[
        "gpus"
    ][0]
    assert (gpu["name"], gpu["memory_total_mib"], gpu["memory_used_mib"]) == ("GPU, with comma", 1024.0, 512.0)


def test_mig_rows_are_devices_and_no_gpus():
    """The MIG table of a driver is read apart from the GPUs; a slice on purpose is accepted."""
    text = (
        table("       0MiB / 40960MiB", mig="              Enabled")
        + """\
| MIG devices:                                                                |
| GPU  GI  CI  MIG |         Memory-Usage |        Vol|         Shared        |
|  0    3   0   0  |  14366MiB / 19968MiB | 28      0 |  2   0    1    0    0 |
|                  |      4MiB / 32767MiB |           |                       |
"""
    )
    report = nvidia_smi.parse(text)
    assert len(report["gpus"]) == 1
    assert report["mig_devices"] == [{"gpu": 0, "device": 0, "memory_used_mib": 14366.0, "memory_total_mib": 19968.0}]
    assert nvidia_smi.judge(report)["state"] == "mig enabled"
    assert nvidia_smi.judge(report, allow_mig=True)["verdict"] == "accept"


def test_a_missing_gpu_is_refused():
    """The count is checked where it is known: a GPU that dropped out leaves no row."""
    report = nvidia_smi.parse(f"{HEAD}\n0, A, 97887 MiB, 2 MiB, 0 %")
    assert nvidia_smi.judge(report, expected=1)["verdict"] == "accept"
    judged = nvidia_smi.judge(report, expected=8)
    assert (judged["verdict"], judged["state"]) == ("reject", "gpu count")
    assert "1 GPUs found, 8 expected" in judged["reasons"]


def test_processes_that_cannot_be_placed_do_not_make_memory_nobodys():
    """Two GPUs without uuids: who holds the memory is not known, so the reason is no reset."""
    text = f"{HEAD}\n0, A, 97887 MiB, 50000 MiB, 0 %\n1, A, 97887 MiB, 2 MiB, 0 %\nGPU-1234, 77, python, 49000 MiB"
    judged = nvidia_smi.judge(nvidia_smi.parse(text))
    assert (judged["verdict"], judged["state"]) == ("reject", "busy")


def test_a_list_of_gpus_can_be_judged_alone():
    """`judge` takes the GPUs of a report as well."""
    report = nvidia_smi.parse(f"{HEAD}\n0, A, 97887 MiB, 5000 MiB, 0 %")
    assert nvidia_smi.judge(report["gpus"])["state"] == "busy"


WORDS = [
    "[N/A]",
    "ERR!",
    "0 MiB",
    "[GPU requires reset]",
    ", ",
    "\n",
    "|",
    "index",
    "memory.used [MiB]",
    "GPU-1",
    "97887MiB / 9MiB",
    "%",
    "No",
]


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from(WORDS), max_size=40).map("".join)))
def test_no_text_can_crash_it(text):
    """Any text has a verdict; a broken word in it is never accepted as a healthy GPU."""
    for parse in (nvidia_smi.parse, nvidia_smi.parse_csv, nvidia_smi.parse_table, nvidia_smi.parse_observation):
        judged = nvidia_smi.judge(parse(text))
        assert judged["verdict"] in {
            "accept",
            "accept-with-warning",
            "reject",
            "reject-as-unknown",
            "reject-as-unknown-memory",
        }
