"""The GPUs of this host as nvidia-smi tells them, judged by module_utils.nvidia_smi."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

from ..module_utils import nvidia_smi

LIMIT_S = 30.0
FIELDS = "index,memory.used,memory.total,utilization.gpu,ecc.errors.uncorrected.volatile.total,pstate"
# What passes by itself once the engine that serves is gone.
PASSING = ("busy",)


def _ask(query: str) -> str:
    try:
        done = subprocess.run(
            ["nvidia-smi", query, "--format=csv"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            text=True,
            timeout=LIMIT_S,
        )
    except FileNotFoundError:
        return "nvidia-smi: command not found"
    except subprocess.TimeoutExpired:
        return f"nvidia-smi: no answer in {LIMIT_S:.0f} s"
    return done.stdout


def judge(indices: Sequence[int], busy_mib: float) -> dict[str, Any]:
    """nvidia_smi.judge over the GPUs with these indices; a GPU counts as busy from ``busy_mib`` on."""
    report = nvidia_smi.parse_csv(_ask("--query-gpu=" + FIELDS))
    holders = nvidia_smi.parse_csv(_ask("--query-compute-apps=gpu_uuid,pid,process_name,used_memory"))
    report["gpus"] = [gpu for gpu in report["gpus"] if gpu.get("index") in indices]
    report["processes"] = holders["processes"]
    return nvidia_smi.judge(report, expected=len(indices), busy_mib=busy_mib)


def faults(indices: Sequence[int]) -> list[str]:
    """What is wrong with these GPUs besides that somebody uses them: seen before anything is stopped."""
    verdict = judge(indices, float("inf"))
    if verdict["verdict"].startswith("accept") or verdict["state"] in PASSING:
        return []
    return ["{}. {}.".format(reason, verdict["remedy"]) for reason in verdict["reasons"]]
