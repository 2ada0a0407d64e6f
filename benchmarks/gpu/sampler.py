"""What a GPU holds over time: memory through NVML ten times a second, and the product's own verdict once a second."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "collections"))

from ansible_collections.swapgate.core.plugins.host_program import gpus  # noqa: E402

MEMORY_EVERY_S = 0.1
JUDGE_EVERY_S = 1.0
# A reading is kept when it differs by this much from the last kept one, or after this long.
KEEP_MIB, KEEP_S = 8.0, 10.0


class _Memory(ctypes.Structure):
    """nvmlMemory_v2_t: like nvidia-smi it does not count the driver's own reserve as used."""

    _fields_ = (
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class Nvml:
    """Used memory of one GPU through libnvidia-ml; `used_mib` is None where there is no such library."""

    def __init__(self, index: int) -> None:
        self._library: Any = None
        self._handle = ctypes.c_void_p()
        try:
            library = ctypes.CDLL("libnvidia-ml.so.1")
            if (
                library.nvmlInit_v2() == 0
                and library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(self._handle)) == 0
            ):
                self._library = library
        except (OSError, AttributeError):
            return

    def used_mib(self) -> float | None:
        """MiB in use now."""
        if self._library is None:
            return None
        memory = _Memory(version=ctypes.sizeof(_Memory) | (2 << 24))
        if self._library.nvmlDeviceGetMemoryInfo_v2(self._handle, ctypes.byref(memory)) != 0:
            return None
        return float(memory.used) / 2**20


class Sampler:
    """Samples the first of ``indices`` between ``with`` and its end. All times are seconds since its start."""

    def __init__(self, indices: Sequence[int], busy_mib: float) -> None:
        self.indices, self.busy_mib = list(indices), busy_mib
        self.started = time.monotonic()
        self.memory: list[tuple[float, float]] = []
        self.verdicts: list[dict[str, Any]] = []
        self.marks: list[tuple[float, str]] = []
        self.readings = self.judgements = 0
        self.highest_mib: float | None = None
        self.lowest_mib: float | None = None
        self._over = threading.Event()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._measure, self._judge)]

    def __enter__(self) -> Sampler:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(gpus.LIMIT_S * 2)

    def now(self) -> float:
        """Seconds since the start."""
        return round(time.monotonic() - self.started, 2)

    def mark(self, what: str) -> float:
        """Note that something happened now; returns the time."""
        at = self.now()
        self.marks.append((at, what))
        return at

    def _measure(self) -> None:
        nvml = Nvml(self.indices[0]) if self.indices else None
        kept: tuple[float, float] | None = None
        while nvml is not None and not self._over.wait(MEMORY_EVERY_S):
            used = nvml.used_mib()
            if used is None:
                return
            self.readings += 1
            self.highest_mib = max(used, self.highest_mib or 0.0)
            self.lowest_mib = min(used, used if self.lowest_mib is None else self.lowest_mib)
            at = self.now()
            if kept is None or abs(used - kept[1]) >= KEEP_MIB or at - kept[0] >= KEEP_S:
                kept = (at, round(used, 1))
                self.memory.append(kept)

    def _judge(self) -> None:
        while self.indices and not self._over.wait(JUDGE_EVERY_S):
            began = self.now()
            verdict = gpus.judge(self.indices, self.busy_mib)
            faults = gpus.faults(self.indices) if not self.verdicts or self.judgements % 10 == 0 else None
            self.judgements += 1
            row = {"verdict": verdict["verdict"], "state": verdict["state"], "reasons": verdict["reasons"]}
            last = self.verdicts[-1] if self.verdicts else None
            if last is None or (last["verdict"], last["state"]) != (row["verdict"], row["state"]) or faults:
                row.update(at_s=began, took_s=round(self.now() - began, 2), faults=faults)
                self.verdicts.append(row)

    def freed_after(self, since_s: float, under_mib: float) -> float | None:
        """Seconds from ``since_s`` to the first reading under ``under_mib`` that no later one takes back."""
        late = [pair for pair in self.memory if pair[0] >= since_s]
        free = None
        for at, used in reversed(late):
            if used >= under_mib:
                break
            free = at
        return None if free is None else round(free - since_s, 2)

    def accepted_after(self, since_s: float) -> float | None:
        """Seconds from ``since_s`` until the product's verdict first accepted the GPU, asked once a second."""
        for row in self.verdicts:
            if row["at_s"] >= since_s and row["verdict"].startswith("accept"):
                return round(float(row["at_s"] + row["took_s"]) - since_s, 2)
        return None

    def report(self) -> dict[str, Any]:
        """Everything that was seen, as JSON."""
        return {
            "readings": self.readings,
            "judgements": self.judgements,
            "highest_mib": self.highest_mib,
            "lowest_mib": self.lowest_mib,
            "memory_used_mib": self.memory,
            "verdicts": self.verdicts,
            "marks": self.marks,
        }
