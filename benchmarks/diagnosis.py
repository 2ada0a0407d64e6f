#!/usr/bin/env python3
"""How fast and in how much memory a chatty multi-rank load is read: 200,000 journal lines through the scanner and the
watcher.

    python benchmarks/diagnosis.py [--lines N] [--json]

Prints processor seconds of this process (not wall time, so that a busy machine does not change the figure) and the
peak memory. The lines are made on the fly from the vocabulary of a real 8-rank load: NCCL chatter, progress bars,
warnings once per rank, one traceback at the end. Reported here, never asserted: the bars are in the table of ``make
cases``.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "collections"))
sys.path.insert(0, str(ROOT))

from ansible_collections.swapgate.core.plugins.module_utils import diagnosis, load_watch  # noqa: E402

from scripts.diagnose import load_signatures  # noqa: E402

RANKS = 8
_TALK = (
    "INFO 04-09 20:{m:02d}:{s:02d} [parallel_state.py:1615] world_size=8 rank={r} local_rank={r} backend=nccl step {i}",
    "INFO 04-09 20:{m:02d}:{s:02d} [mxfp4.py:495] Using 'MARLIN' Mxfp4 MoE backend for layer {i}.",
    "WARNING 04-09 20:{m:02d}:{s:02d} [fused_moe.py:888] Using default MoE config, E=256,N={i}",
    "INFO 04-09 20:{m:02d}:{s:02d} [default_loader.py:430] Loading weights took {i}.08 seconds",
    "DEBUG 04-09 20:{m:02d}:{s:02d} [utils.py:485] Waiting for {r} local, 0 remote core engine proc(s) to start.",
    "INFO 04-09 20:{m:02d}:{s:02d} [backends.py:292] Cache the graph of compile range (1, {i}) for later use",
)


def chatter(lines: int) -> Iterator[str]:
    """`lines` journal lines of a load on 8 ranks."""
    end = (
        "ERROR 04-09 20:59:59 [multiproc_executor.py:949] Traceback (most recent call last):",
        'ERROR 04-09 20:59:59 [multiproc_executor.py:949]   File "/opt/v/gpu_worker.py", line 356, in load_model',
        "ERROR 04-09 20:59:59 [multiproc_executor.py:949]     self.model_runner.load_model()",
        "ERROR 04-09 20:59:59 [multiproc_executor.py:949] torch.OutOfMemoryError: CUDA out of memory.",
    )
    for number in range(lines - len(end)):
        rank, step = number % RANKS, number // RANKS
        head = f"Apr 09 20:{step // 60 % 60:02d}:{step % 60:02d} host1 vllm[9{rank}]: "
        kind = step % (len(_TALK) + 3)
        if kind < len(_TALK):
            text = _TALK[kind].format(m=step // 60 % 60, s=step % 60, r=rank, i=step)
            yield f"{head}(Worker_TP{rank} pid=9{rank}) {text}"
        elif kind == len(_TALK):
            yield f"{head}host1:9{rank}:9{rank} [{rank}] NCCL INFO Channel {step % 32:02d}/0 : {rank} -> 1 via P2P"
        else:
            done = min(step // 300, 96)
            bar = f"{done * 100 // 96:3d}% Completed | {done}/96 [01:11<26:52, 23.72s/it]"
            yield f"{head}Loading safetensors checkpoint shards: {bar}"
    for text in end:
        yield f"Apr 09 20:59:59 host1 vllm[92]: (Worker_TP2 pid=92) {text}"


def measure(lines: int) -> dict[str, float]:
    """Seconds of processor time and MiB of peak memory for `lines` lines; and how much of a core a live watcher
    takes."""
    known = load_signatures()
    made = time.process_time()
    for _line in chatter(lines):
        pass
    making = time.process_time() - made
    started = time.process_time()
    result = diagnosis.diagnose(chatter(lines), known)
    classify = time.process_time() - started - making
    if result["verdict"] != "fatal" or result["signature"] != "cuda-oom":
        raise RuntimeError(
            f"benchmarks/diagnosis.py: found {result['verdict']} {result['signature']}, expected fatal cuda-oom"
        )
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    # A live load: one chunk of output a second for half an hour, the scanner and a snapshot each time.
    watch, scanner = load_watch.LoadWatch(None, 0.0), diagnosis.Scanner(known)
    seconds, per_second = 1800, 40
    source = chatter(seconds * per_second)
    chunks = ["".join(next(source) + "\n" for _ in range(per_second)) for _ in range(seconds)]
    started = time.process_time()
    for second, chunk in enumerate(chunks):
        watch.feed(chunk, float(second))
        for line in chunk.split("\n"):
            scanner.feed(line)
            scanner.fatal()
        watch.snapshot(float(second))
    live = (time.process_time() - started) / seconds
    return {
        "lines": lines,
        "classify_s": round(classify, 2),
        "peak_mib": round(memory, 1),
        "live_core_percent": round(100 * live, 3),
    }


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lines", type=int, default=200_000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = measure(options.lines)
    if options.json:
        print(json.dumps(figures))
    else:
        print(
            f"{figures['lines']} lines: {figures['classify_s']} s of one core, {figures['peak_mib']} MiB at most; "
            f"a live watcher at 40 lines a second takes {figures['live_core_percent']} % of a core"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
