"""The GPUs of this host as nvidia-smi tells them, judged by module_utils.nvidia_smi."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Sequence
from typing import Any

from ..module_utils import nvidia_smi

LIMIT_S = 30.0
WATCH_S = 10.0
# What passes by itself once the engine that serves is gone.
PASSING = ("busy",)


def _ask(kind: str, fields: Sequence[str]) -> dict[str, Any]:
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-{kind}={','.join(fields)}", "--format=csv"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            text=True,
            timeout=LIMIT_S,
        )
        text = done.stdout
    except FileNotFoundError:
        text = "nvidia-smi: command not found"
    except subprocess.TimeoutExpired:
        text = f"nvidia-smi: no answer in {LIMIT_S:.0f} s"
    return nvidia_smi.parse_csv(text)


class MemoryWatch:
    """Whether the memory in use on some GPUs moves, asked without waiting for the answer."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        self._command += ["--id=" + ",".join(str(index) for index in indices)]
        self._asked: subprocess.Popen[str] | None = None
        self._asked_at = 0.0
        self._seen = ""

    def moved(self, now_s: float) -> bool:
        """True when an answer came that differs from the one before; a question is asked every WATCH_S at most."""
        if self._asked is None:
            if now_s - self._asked_at >= WATCH_S:
                self._asked_at = now_s
                with contextlib.suppress(OSError):
                    self._asked = subprocess.Popen(
                        self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                    )
            return False
        if self._asked.poll() is None:
            if now_s - self._asked_at > LIMIT_S:
                self._asked.kill()
            return False
        answer, _ = self._asked.communicate()
        failed, self._asked = self._asked.returncode != 0, None
        if failed or answer == self._seen:
            return False
        first, self._seen = not self._seen, answer
        return not first


def judge(indices: Sequence[int], busy_mib: float) -> dict[str, Any]:
    """nvidia_smi.judge over the GPUs with these indices; a GPU counts as busy from ``busy_mib`` on."""
    report = _ask("gpu", nvidia_smi.QUERY)
    if not report["gpus"]:  # an older driver refuses the whole query for one field that it does not know
        report = _ask("gpu", nvidia_smi.QUERY_OLD)
    holders = _ask("compute-apps", nvidia_smi.PROCESS_QUERY)
    report["gpus"] = [gpu for gpu in report["gpus"] if gpu.get("index") in indices]
    report["notices"] = report["notices"] + [item for item in holders["notices"] if item not in report["notices"]]
    report.update({key: holders[key] for key in ("processes", "processes_known")})
    return nvidia_smi.judge(report, expected=len(indices), busy_mib=busy_mib)


def faults(indices: Sequence[int]) -> list[str]:
    """What is wrong with these GPUs besides that somebody uses them: seen before anything is stopped."""
    verdict = judge(indices, float("inf"))
    if verdict["verdict"].startswith("accept") or verdict["state"] in PASSING:
        return []
    return ["{}. {}.".format(reason, verdict["remedy"]) for reason in verdict["reasons"]]
