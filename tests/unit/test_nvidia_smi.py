"""nvidia-smi outputs: odd values have a name, broken GPUs never look free."""

from __future__ import annotations

import re
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
    (
        "table, memory in use and a process part without any row",
        table("   58222MiB /  97887MiB") + "\n".join(PROCESSES.splitlines()[:4]),
        "reject",
        "busy",
    ),
    ("table, ERR! in the power", table().replace("12W /  600W", "ERR! / ERR!"), "reject", "error"),
    ("table, mig on", table(mig="              Enabled"), "reject", "mig enabled"),
    (
        "table, ecc",
        table().replace("|                    0 |", "|                    7 |"),
        "reject",
        "uncorrectable ecc",
    ),
    ("no header: total, used", "0, NVIDIA H100 80GB HBM3, 81559 MiB, 70123 MiB, 100 %", "reject", "busy"),
    ("no header: total, used, free board", "0, NVIDIA H100 80GB HBM3, 81559 MiB, 4 MiB, 0 %", "accept", "ok"),
    ("no header, no units: used, total", "0, 4, 81920\n1, 79000, 81920", "reject", "busy"),
    ("no header, no units: free boards", "0, 4, 81920\n1, 5, 81920", "accept", "ok"),
    ("no header: index, total, used, use", "0, 81920, 79000, 35, 0", "reject", "busy"),
    ("no header: total, used, free of a full board", "81920, 81400, 500", "reject", "busy"),
    ("no header: total, reserved, used, free", "0, 143771 MiB, 616 MiB, 0 MiB, 143156 MiB, 0 %", "accept", "ok"),
    ("no header: the same, busy", "0, 143771 MiB, 616 MiB, 70000 MiB, 73155 MiB, 0 %", "reject", "busy"),
    ("no header: one amount", "70123 MiB", "reject", "busy"),
    ("no header: one small amount", "4 MiB", "accept", "ok"),
    ("no header: nothing of the memory", "0, NVIDIA H100, 35, P0", "reject-as-unknown-memory", "memory not reported"),
    ("no header, no units: index, used", "0, 4", "accept", "ok"),
    ("no header: only use", "0, NVIDIA H100, 0 %, P0", "reject-as-unknown-memory", "memory not reported"),
    ("apps without a header", "4242, python3, 40000 MiB", "reject", "busy"),
    ("apps without a header, no amount", "4242, python3, [N/A]", "reject-as-unknown-memory", "memory not reported"),
    (
        "a process of unknown memory",
        f"{HEAD}\nGPU-1, 4242, [N/A], [N/A]",
        "reject-as-unknown-memory",
        "memory not reported",
    ),
    (
        "the same as an answer of its own",
        "gpu_uuid, pid, process_name, used_gpu_memory [MiB]\nGPU-1, 4242, [N/A], [N/A]",
        "reject-as-unknown-memory",
        "memory not reported",
    ),
    ("thousands", "0, 97,887 MiB, 60,000 MiB", "reject", "busy"),
    ("thousands below a header", f"{HEAD}\n0, A, 97,887 MiB, 60,000 MiB, 0 %", "reject", "busy"),
    ("thousands, free", f"{HEAD}\n0, A, 97,887 MiB, 2 MiB, 0 %", "accept", "ok"),
    (
        "mig to come",
        "index, memory.used [MiB], mig.mode.current, mig.mode.pending\n0, 2 MiB, Disabled, Enabled",
        "accept-with-warning",
        "reboot due",
    ),
    (
        "library missing",
        "NVIDIA-SMI couldn't find libnvidia-ml.so library in your system.",
        "reject",
        "driver library missing",
    ),
    ("no devices, shorter", "No devices found", "reject", "no devices"),
    (
        "a shell's advice",
        "Command 'nvidia-smi' not found, but can be installed with:\napt install nvidia-utils-580",
        "reject",
        "nvidia-smi missing",
    ),
    (
        "curly apostrophe",
        "NVIDIA-SMI has failed because it couldn\u2019t communicate with the NVIDIA driver.",
        "reject",
        "driver not loaded",
    ),
    ("killed", "Killed", "reject-as-unknown", "nvidia-smi ended"),
    ("killed after a row", f"{HEAD}\n0, A, 97887 MiB, 2 MiB, 0 %\nKilled", "reject-as-unknown", "nvidia-smi ended"),
    ("byte order mark", f"\ufeff{HEAD}\n0, A, 97887 MiB, 60000 MiB, 0 %", "reject", "busy"),
    ("nobody knows it", "the fans sing", "reject-as-unknown", "nothing read"),
    ("a bare warning", "WARNING: infoROM is corrupted at gpu 0000:65:00.0", "reject-as-unknown", "nothing read"),
    ("deprecated", f"{HEAD}, retired_pages.pending\n0, A, 97887 MiB, 2 MiB, 0 %, [Deprecated]", "accept", "ok"),
    (
        "deprecated, in full",
        f"{HEAD}, pstate\n0, A, 97887 MiB, 2 MiB, 0 %, [Requested functionality has been deprecated]",
        "accept",
        "ok",
    ),
    ("no process at all", "gpu_uuid, pid, process_name, used_gpu_memory [MiB]", "accept", "ok"),
    ("no process, in words", "No running processes found", "accept", "ok"),
    ("a header of GPUs alone", HEAD, "reject-as-unknown", "nothing read"),
    ("list of GPUs", "GPU 0: NVIDIA H200 (UUID: GPU-1234)", "reject-as-unknown-memory", "memory not reported"),
    (
        "list with a slice",
        "GPU 0: NVIDIA H200 (UUID: GPU-1234)\n  MIG 1g.18gb     Device  0: (UUID: MIG-1)",
        "reject",
        "mig enabled",
    ),
    ("quoted", f"> {HEAD}\n> 0, A, 97887 MiB, 60000 MiB, 0 %", "reject", "busy"),
    ("table, unified memory", table("      Not Supported     "), "reject-as-unknown-memory", "memory not reported"),
    ("table, mig to come", table(mig="            Disabled*"), "accept-with-warning", "reboot due"),
    ("table, mig on until a reset", table(mig="             Enabled*"), "reject", "mig enabled"),
    (
        "table, ecc with a mode to come",
        table().replace("|                    0 |", "|                   1* |"),
        "reject",
        "uncorrectable ecc",
    ),
    (
        "table, ecc mode to come",
        table().replace("|                    0 |", "|                   0* |"),
        "accept-with-warning",
        "reboot due",
    ),
    (
        "table, cut before the memory",
        "\n".join(table().splitlines()[:8]),
        "reject-as-unknown-memory",
        "memory not reported",
    ),
]


@pytest.mark.parametrize(("text", "verdict", "state"), [row[1:] for row in OUTPUTS], ids=[row[0] for row in OUTPUTS])
def test_output(text, verdict, state):
    """Each output gives its verdict under its name."""
    judged = nvidia_smi.judge(nvidia_smi.parse(text))
    assert (judged["verdict"], judged["state"]) == (verdict, state), judged["reasons"]


@pytest.mark.parametrize("name", ["query", "query-noheader", "query-ecc", "table"])
def test_a_real_boards_output_is_accepted(name):
    """What nvidia-smi said of a free H200."""
    raw = Path(__file__).resolve().parents[2] / f"benchmarks/results/gpu/raw/nvidia-smi-{name}.txt"
    assert nvidia_smi.judge(nvidia_smi.parse(raw.read_text()))["verdict"] == "accept"


def test_a_field_that_the_driver_does_not_know_is_named():
    """So that the query can be asked again without it."""
    report = nvidia_smi.parse_csv('Field "remapped_rows.pending" is not a valid field to query.\n')
    assert nvidia_smi.unknown_field(report) == "remapped_rows.pending"
    assert nvidia_smi.unknown_field(nvidia_smi.parse_csv("No devices were found")) is None


def xid(number, rest="pid=4242, name=python3, x", bus="0000:01:00"):
    """A line of the kernel's log."""
    return f"NVRM: Xid (PCI:{bus}): {number}, {rest}"


@pytest.mark.parametrize(
    ("lines", "action", "verdict"),
    [
        *(([xid(number)], "", "reject") for number in (48, 63, 64, 79, 94, 95, 119, 120)),
        *(([xid(number)], "None", "accept") for number in (13, 31, 43, 45)),
        ([xid(154, "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")], "", "reject"),
        ([xid(79), xid(154, "GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)")], "", "accept"),
        ([xid(79), "NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05"], "", "accept"),
        ([xid(95)], "None", "accept-with-warning"),
        ([xid(79, bus="0000:02:00")], "", "accept"),
        ([xid(66)], "", "accept-with-warning"),
        (["a text without any"], "", "accept"),
    ],
)
def test_xids_since_boot(lines, action, verdict):
    """The driver's faults refuse a GPU until it was reset, a program's own say nothing of it."""
    gpu = nvidia_smi.parse(f"index, pci.bus_id, memory.used [MiB], gpu_recovery_action\n0, x, 2 MiB, {action}")["gpus"][
        0
    ]
    gpu["xids"] = nvidia_smi.xids(lines).get("0000:01:00", [])
    judged = nvidia_smi.judge([gpu])
    assert judged["verdict"] == verdict
    assert verdict == "accept" or "NVRM: Xid" in judged["reasons"][0]


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


HELD = """    Processes
        GPU instance ID                   : N/A
        Process ID                        : 20037
            Type                          : C
            Name                          : python
            Used GPU Memory               : 5380 MiB"""
LONG = """
==============NVSMI LOG==============

Driver Version                                         : 595.80

Attached GPUs                                          : 1
GPU 00000000:01:00.0
    Product Name                                       : NVIDIA L40S
    Display Active                                     : Disabled
    MIG Mode
        Current                                        : Disabled
    GPU UUID                                           : GPU-1
    GPU Reset Status
        Reset Required                                 : No
    GPU Recovery Action                                : None
    FB Memory Usage
        Total                                          : 46068 MiB
        Used                                           : 0 MiB
    BAR1 Memory Usage
        Used                                           : 9999 MiB
    Utilization
        GPU                                            : 0 %
    ECC Errors
        Volatile
            DRAM Correctable                           : 3
            DRAM Uncorrectable                         : 0
        Aggregate
            DRAM Uncorrectable                         : 0
    Remapped Rows
        Pending                                        : No
        Remapping Failure Occurred                     : No
    Processes                                          : None
"""


@pytest.mark.parametrize(
    ("old", "new", "state"),
    [
        ("", "", "ok"),
        (
            "DRAM Uncorrectable                         : 0\n        Agg",
            "DRAM Uncorrectable : 2\n        Agg",
            "uncorrectable ecc",
        ),
        ("Reset Required                                 : No", "Reset Required : Yes", "requires reset"),
        ("Occurred                     : No", "Occurred : Yes", "memory repair pending"),
        ("Current                                        : Disabled", "Current : Enabled", "mig enabled"),
        ("Used                                           : 0 MiB", "Used : 40000 MiB", "held by nobody"),
        ("GPU                                            : 0 %", "GPU : 70 %", "busy"),
        ("    Processes                                          : None", HELD, "busy"),
    ],
)
def test_long_form(old, new, state):
    """What -q prints is judged as the table is: errors, repairs, MIG, memory in use and its holder."""
    assert nvidia_smi.is_long(LONG)
    report = nvidia_smi.parse(LONG.replace(old, new, 1) if old else LONG)
    assert [gpu["name"] for gpu in report["gpus"]] == ["NVIDIA L40S"]
    assert nvidia_smi.judge(report)["state"] == state


def test_fields_with_capitals_are_a_header():
    """A query of every field has names such as fabric.cliqueId and dramEncryption.mode.current."""
    text = "index, memory.used [MiB], dramEncryption.mode.current, fabric.cliqueId\n0, 0 MiB, N/A, N/A\n"
    report = nvidia_smi.parse_csv(text)
    assert not report["notices"]
    assert report["gpus"][0]["fields"]["fabric.cliqueId"] == "N/A"


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
    for parse in (
        nvidia_smi.parse,
        nvidia_smi.parse_csv,
        nvidia_smi.parse_long,
        nvidia_smi.parse_table,
        nvidia_smi.parse_observation,
    ):
        judged = nvidia_smi.judge(parse(text))
        assert judged["verdict"] in {
            "accept",
            "accept-with-warning",
            "reject",
            "reject-as-unknown",
            "reject-as-unknown-memory",
        }


SENTENCE = re.compile(r"(?:[A-Z0-9`]|nvidia-smi says ).*[.!?]\Z")


@pytest.mark.parametrize("text", [row[1] for row in OUTPUTS], ids=[row[0] for row in OUTPUTS])
def test_what_is_found_and_what_to_do_are_whole_sentences(text):
    """An operator reads "GPU 0: MIG mode is on. Turn MIG off.", never a reason and a remedy glued together."""
    judged = nvidia_smi.judge(nvidia_smi.parse(text), expected=1)
    said = judged["faults"] + judged["warnings"]
    assert bool(said) == bool(judged["reasons"])
    for one in said:
        assert SENTENCE.match(one), one
    assert SENTENCE.match(judged["remedy"]), judged["remedy"]
    assert bool(judged["faults"]) == (not judged["verdict"].startswith("accept"))


def test_each_reason_has_its_own_remedy():
    """Two faults of two kinds are two texts; one kind on two GPUs is one text that names both."""
    head = "index, memory.used [MiB], mig.mode.current, compute_mode"
    text = f"{head}\n0, 2 MiB, Enabled, Default\n1, 2 MiB, Enabled, Prohibited"
    judged = nvidia_smi.judge(nvidia_smi.parse(text))
    assert judged["faults"] == [
        "GPU 0: MIG mode is on, its memory belongs to slices. GPU 1: MIG mode is on, its memory belongs to slices. "
        "Turn MIG off, or serve from a slice on purpose.",
        "GPU 1: compute mode Prohibited. Set the compute mode back: nvidia-smi -c DEFAULT.",
    ]


def test_of_a_wrappers_traceback_the_exception_is_named():
    """A wrapper of nvidia-smi in Python fails: its last line says why, not "Traceback" nor what that quotes."""
    text = (
        "Traceback (most recent call last):\n"
        '  File "/usr/local/bin/nvidia-smi", line 3, in <module>\n'
        '    raise NVMLError("Failed to initialize NVML: " + why)\n'
        "pynvml.NVMLError_LibRmVersionMismatch: Driver/library version mismatch\n"
    )
    judged = nvidia_smi.judge(nvidia_smi.parse(text), expected=1)
    assert judged["state"] == "driver mismatch"
    assert judged["reasons"][0] == "pynvml.NVMLError_LibRmVersionMismatch: Driver/library version mismatch"
    assert judged["faults"][0] == (
        'nvidia-smi says "pynvml.NVMLError_LibRmVersionMismatch: Driver/library version mismatch". Reboot, or reload '
        "the modules. What still serves keeps working: do not stop it."
    )
    assert not any("Traceback" in one for one in judged["reasons"] + judged["faults"] + judged["warnings"])


def test_an_empty_process_list_is_no_proof_that_nobody_holds_the_memory():
    """Inside a container the processes of the host are not listed: a reset might end somebody's work."""
    for rows in ("", "|  No running processes found                                                             |"):
        text = table("   58222MiB /  97887MiB") + PROCESSES.format(rows=rows)
        judged = nvidia_smi.judge(nvidia_smi.parse(text))
        assert "on the host itself, not in a container" in judged["remedy"]
        assert not judged["remedy"].startswith("Reset")
