"""The collective check: what its parent makes of ranks that are sound, hang, die, or add wrongly.

Ranks are real processes; a stand-in interpreter takes the place of torch, and the real one runs in tests/engine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ansible_collections.swapgate.core.plugins.host_program import collective, collective_check
from ansible_collections.swapgate.core.plugins.module_utils import progress, unit_text

ROOT = Path(__file__).resolve().parents[2]
# What a rank tells: speaks like run_rank, and does what MISBEHAVE says at the size that it names.
STAND_IN = """\
#!{python}
import json, os, sys, time
words = sys.argv
rank = int(words[words.index("--rank") + 1])
sizes = [int(word) for word in words[words.index("--sizes") + 1 : words.index("--rank")]]
kind, who = os.environ.get("MISBEHAVE", "no 9").split()
mine = rank == int(who)
def tell(**what):
    print(json.dumps(what), flush=True)
print("a library's own line", flush=True)
tell(step="import torch")
if mine and kind == "import":
    time.sleep(60)
if mine and kind == "no-torch":
    sys.exit("ModuleNotFoundError: No module named 'torch'")
tell(torch="2.0")
if mine and kind == "busy":
    tell(busy="GPU 1: 70000 MiB are in use")
    sys.exit()
tell(step="init")
for size in sizes:
    tell(step=f"all-reduce of {{size}} bytes")
    if mine and size == 16384 and kind == "hang":
        time.sleep(60)
    if mine and size == 16384 and kind == "die":
        print("harmless", file=sys.stderr)
        print("x.cc:1 NCCL WARN Error while creating shared memory segment", file=sys.stderr)
        sys.exit(1)
    if mine and size == 16384 and kind == "leave":
        sys.exit(0)
    if size == 16384 and kind in ("die", "leave"):
        time.sleep(60)
    tell(size=size, wrong=3 if mine and size == 16384 and kind == "wrong" else 0, of=size, seconds=size / 1e9 + 1e-6)
tell(step="end")
tell(done=True)
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Run the check over two stand-in ranks; returns the exit code and the report."""
    program = tmp_path / "python"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(collective.sys, "executable", str(program))

    def run(misbehave="no 9", *words):
        monkeypatch.setenv("MISBEHAVE", misbehave)
        out = tmp_path / "report.json"
        argv = ["--ranks", "2", "--backend", "gloo", "--limit-s", "1.5", "--out", str(out), *words]
        return collective.main(argv), json.loads(out.read_text())

    return run


def test_sound_ranks_pass_with_a_time_and_a_bandwidth_for_each_size(check):
    code, report = check()
    assert (code, report["verdict"]) == (0, "ok")
    assert [row["bytes"] for row in report["sizes"]] == list(collective.SIZES["gloo"])
    assert report["bus_gbps"] == pytest.approx(1.0, rel=0.05), "2 (n-1) / n of 1 GB/s over two ranks"
    assert report["environment"]["GLOO_SOCKET_IFNAME"] == "lo"
    assert report["what"].startswith("no link between GPUs was proven"), "processes of a CPU have none"


@pytest.mark.parametrize(
    ("misbehave", "code", "verdict", "said"),
    [
        ("hang 1", 1, "hang", "s in 'all-reduce of 16384 bytes'"),
        ("die 1", 1, "failed", "rank 1 ended with status 1 in step 'all-reduce of 16384 bytes': x.cc:1 NCCL WARN"),
        ("wrong 0", 1, "wrong sum", "wrong at 16384 bytes"),
        ("busy 1", 2, "busy", "70000 MiB are in use"),
        ("no-torch 0", 2, "unable", "has no torch"),
    ],
)
def test_each_fault_has_its_name_and_ends_in_time(check, misbehave, code, verdict, said):
    began = time.monotonic()
    found, report = check(misbehave)
    assert (found, report["verdict"]) == (code, verdict)
    assert said in report["what"]
    assert report["remedy"] or verdict == "unable"
    assert time.monotonic() - began < 8


def test_a_slow_import_is_no_hang_of_a_link(check, monkeypatch):
    monkeypatch.setattr(collective, "START_LIMIT_S", 1.0)
    code, report = check("import 1")
    assert (code, report["verdict"]) == (2, "unable")


def test_a_bandwidth_far_under_the_links_is_a_fault_and_ll_gets_half_the_bar(check, monkeypatch):
    code, report = check("no 9", "--link-gbps", "8")
    assert (code, report["verdict"]) == (1, "slow")
    assert "expected at least 1.60 of the link's 8 GB/s" in report["what"]
    monkeypatch.setenv("NCCL_PROTO", "LL")
    assert check("no 9", "--link-gbps", "8")[0] == 0


def test_no_rank_stays_behind_when_the_check_is_ended(tmp_path):
    program = tmp_path / "python"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    code = f"import sys; sys.path.insert(0, {str(ROOT / 'plugins/host_program')!r}); import collective; "
    code += f"sys.executable = {str(program)!r}; sys.exit(collective.main(['--backend', 'gloo', '--limit-s', '60']))"
    environment = {**os.environ, "MISBEHAVE": "hang 1"}
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.DEVNULL)

    def ranks():
        found = subprocess.run(["pgrep", "-f", f"{program} .*--rank"], capture_output=True, text=True, check=False)
        return found.stdout.split()

    deadline = time.monotonic() + 10
    while len(ranks()) < 1 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert ranks()
    parent.terminate()
    assert parent.wait(10) == 143
    assert ranks() == []


def test_sums_stay_exact_for_any_number_of_ranks():
    for dtype, exact in collective.EXACT.items():
        for ranks in range(2, 17):
            largest = collective.pattern_length(dtype, ranks) * ranks * (ranks + 1) // 2
            assert largest <= exact or collective.pattern_length(dtype, ranks) == 1


LSPCI = """\
00:01.1 PCI bridge: Some Root Port
\tCapabilities: [2a0 v1] Access Control Services
\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans+
\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl- DirectTrans-
00:01.2 PCI bridge: Another
\t\tACSCtl:\tSrcValid- TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl- DirectTrans-
"""


def test_acs_and_iommu_are_read(tmp_path):
    assert collective.read_acs(LSPCI) == {"bridges": 2, "redirect": ["00:01.1"]}
    assert collective.read_acs("00:01.1 PCI bridge\n\tCapabilities: <access denied>\n") is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cmdline").write_text("quiet amd_iommu=on iommu=pt pci=noacs\n")
    for number, kind in enumerate(("DMA-FQ", "DMA-FQ", "identity")):
        group = tmp_path / f"sys/kernel/iommu_groups/{number}"
        group.mkdir(parents=True)
        (group / "type").write_text(kind + "\n")
    state = collective.fabric_state(str(tmp_path))
    assert state["cmdline"] == ["amd_iommu=on", "iommu=pt", "pci=noacs"]
    assert (state["iommu_groups"], state["iommu_types"]) == (3, {"DMA-FQ": 2, "identity": 1})


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "tests/golden/example-8gpu-pcie").iterdir()))
def test_the_checks_unit_differs_from_the_variants_in_its_command_alone(name):
    text = (ROOT / "tests/golden/example-8gpu-pcie" / name).read_text()
    argv = ["/v/bin/python", "/p/collective.py", "--out", "/run/x 1"]
    found = unit_text.parse(collective_check.check_unit(text, argv, 99))
    assert [value for _, key, value in found if key == "ExecStart"] == [
        '/v/bin/python /p/collective.py --out "/run/x 1"'
    ]
    added = set(found) - set(unit_text.parse(text))
    assert {key for _, key, _ in added} == {"Type", "TimeoutStartSec", "ExecStart"}
    gone = {key for _, key, _ in set(unit_text.parse(text)) - set(found)}
    assert gone == {
        "Description",
        "ExecStart",
        "NotifyAccess",
        "Restart",
        "RestartPreventExitStatus",
        "RestartSec",
        "StartLimitBurst",
        "StartLimitIntervalSec",
        "SyslogIdentifier",
        "TimeoutStartSec",
        "Type",
        "WantedBy",
        "WatchdogSec",
        "WatchdogSignal",
    }


def test_the_table_names_verdict_times_and_what_stands_between_the_gpus():
    report = {
        "variant": "baseline",
        "verdict": "hang",
        "what": "no end after 60 s: rank 0 60 s in 'init'",
        "remedy": "Look.",
        "sizes": [{"bytes": 4, "correct": True, "seconds": 2e-5, "bus_gbps": 0.0}],
        "environment": {"NCCL_PROTO": "LL"},
        "fabric": {
            "cmdline": ["iommu=pt"],
            "iommu_groups": 2,
            "iommu_types": {"DMA": 2},
            "acs": {"redirect": ["00:01.1"]},
        },
        "after": ["GPU 0: 100 % busy without a process."],
    }
    text = "\n".join(progress.collective_table("gpu1", report))
    for words in (
        "gpu1: baseline: hang: no end",
        "20.0 us",
        "NCCL_PROTO=LL",
        "2 DMA",
        "redirects at 00:01.1",
        "iommu=pt",
    ):
        assert words in text
    assert "GPUs since: GPU 0: 100 %" in text and "what to do: Look." in text
