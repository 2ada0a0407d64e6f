"""A small all-reduce over N ranks with a hard time limit: the one thing that proves the links between GPUs.

Alone, with the interpreter of the engine's virtualenv (standard library and torch, nothing of swapgate is imported):

    python collective.py --ranks 2 --backend nccl --limit-s 60 --out result.json

Every rank is a process of its own; the parent reads what step each of them is in, and ends them all when the limit is
reached (it counts from when all of them have imported torch, which may take a minute from a cold disk). So a hang is an
answer like any other, with the step that it happened in. The report
    {"schema", "verdict": VERDICT, "what": text, "remedy": text | null, "backend", "ranks", "dtype", "seconds",
     "torch", "nccl": text | null, "devices": [names], "environment": {NCCL's variables}, "bus_gbps": of the largest
     size | null, "link_gbps": what was expected | null,
     "sizes": [{"bytes", "correct": bool, "seconds": median a call, "bus_gbps"}], "steps": [last step of each rank],
     "fabric": fabric_state()}
VERDICT
    ok | hang | wrong sum | slow | failed | busy (a GPU is in use: nothing was run) | unable (no torch, too few GPUs)
Exit codes: 0 ok, 1 a fault of the host (hang, wrong sum, slow, failed), 2 nothing was proven (busy, unable).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import re
import selectors
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

JsonDict = dict[str, Any]

SCHEMA = 1
FAULTS = ("hang", "wrong sum", "slow", "failed")
# From a decode step's few KiB to where bandwidth alone counts.
SIZES = {"nccl": (4, 16 << 10, 256 << 10, 4 << 20, 64 << 20), "gloo": (4, 16 << 10, 256 << 10, 4 << 20)}
START_LIMIT_S = 180.0
# A bus bandwidth below this share of the link's is a fault. NCCL's LL protocol sends a flag with each word and is
# made for latency: half of that.
LEAST_SHARE = 0.2
LL_FACTOR = 0.5
# What a process that computes holds at least; a context alone holds some hundred MiB.
BUSY_MIB = 2000
ITEM_BYTES = {"float32": 4, "bfloat16": 2}
# Whole numbers up to these come back exact from a sum.
EXACT = {"float32": 1 << 24, "bfloat16": 1 << 8}
VARIABLES = ("NCCL_", "TORCH_NCCL_", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "GLOO_")
IOMMU_WORDS = re.compile(r"iommu|pcie_acs|noacs|disable_acs|uvm_disable_hmm|pci=", re.IGNORECASE)
REMEDIES = {
    "hang": "Look at `fabric`: switch ACS and IOMMU translation off (firmware, or iommu=pt). To serve until then: "
    "NCCL_P2P_DISABLE=1 with --disable-custom-all-reduce. Look for GPUs at 100 % without a process: they need a reset.",
    "wrong sum": "Do not serve on these GPUs. Read the kernel log for Xid and AER lines, reseat boards or bridges, and "
    "try again with NCCL_P2P_DISABLE=1 to see whether peer access is at fault.",
    "slow": "Compare link width and generation (nvidia-smi -q), the NVLink state (nvidia-smi nvlink -s) and the "
    "profile (swapgate topology).",
    "failed": "Read the error; run again with NCCL_DEBUG=INFO in the environment.",
    "busy": "Stop what holds the GPUs, then run again.",
}


# --- one rank --------------------------------------------------------------------------------------------------------


def tell(**what: Any) -> None:
    """One JSON line to the parent."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def pattern_length(dtype: str, ranks: int) -> int:
    """How many different whole numbers a tensor may count through so that their sum over all ranks stays exact."""
    return max(1, min(251, EXACT[dtype] // (ranks * (ranks + 1) // 2)))


def run_rank(args: argparse.Namespace) -> None:
    """One rank: init, then for each size a checked all-reduce and timed ones. Steps are told before they are done."""
    tell(step="import torch")
    torch: Any = importlib.import_module("torch")  # only the engine's virtualenv has it
    dist: Any = importlib.import_module("torch.distributed")
    tell(torch=torch.__version__)
    device = torch.device("cpu")
    if args.backend == "nccl":
        tell(step="open the device")
        if torch.cuda.device_count() < args.ranks:
            tell(unable=f"{torch.cuda.device_count()} GPUs are visible, {args.ranks} ranks need one each")
            return
        device = torch.device("cuda", args.rank)
        torch.cuda.set_device(device)
        free, total = torch.cuda.mem_get_info(device)
        tell(device=torch.cuda.get_device_name(device), nccl=".".join(str(part) for part in torch.cuda.nccl.version()))
        if (total - free) >> 20 > args.busy_mib:
            tell(busy=f"GPU {args.rank}: {(total - free) >> 20} MiB are in use")
            return
    tell(step="init")
    dist.init_process_group(
        args.backend, init_method=f"file://{args.store}", rank=args.rank, world_size=args.ranks, **_bound(device)
    )
    dtype = getattr(torch, args.dtype)
    for size in args.sizes:
        count = max(1, size // ITEM_BYTES[args.dtype])
        numbers = torch.arange(count, device=device) % pattern_length(args.dtype, args.ranks) + 1
        tell(step=f"all-reduce of {size} bytes")
        tensor = (numbers * (args.rank + 1)).to(dtype)
        dist.all_reduce(tensor)
        expected = (numbers * (args.ranks * (args.ranks + 1) // 2)).to(dtype)
        wrong = int((tensor != expected).sum().item())
        tell(step=f"timing of {size} bytes")
        tensor.zero_()
        calls = 20 if size <= 1 << 20 else 5
        times = []
        for _ in range(args.batches + 1):
            dist.barrier()
            _wait(torch, device)
            began = time.monotonic()
            for _call in range(calls):
                dist.all_reduce(tensor)
            _wait(torch, device)
            times.append((time.monotonic() - began) / calls)
        tell(size=size, wrong=wrong, of=count, seconds=statistics.median(times[1:]))  # the first batch warms up
    tell(step="end")
    dist.destroy_process_group()
    tell(done=True)


def _bound(device: Any) -> JsonDict:
    """Newer torch wants to know a rank's device, and says so; the CPU has none."""
    return {"device_id": device} if device.type == "cuda" else {}


def _wait(torch: Any, device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- the parent ------------------------------------------------------------------------------------------------------


class Rank:
    """One rank's process and all that it told."""

    def __init__(self, number: int, command: Sequence[str], environment: dict[str, str]) -> None:
        self.number = number
        self.step = "start"
        self.since = time.monotonic()
        self.told: list[JsonDict] = []
        self._rest = b""
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(
            [*command, "--rank", str(number)],
            stdout=subprocess.PIPE,
            stderr=self.errors,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )

    def hear(self, data: bytes) -> None:
        """Take what came from the rank's standard output; lines of libraries between ours are left out."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if isinstance(said, dict):
                    self.told.append(said)
                    if "step" in said:
                        self.step, self.since = said["step"], time.monotonic()

    def said(self, key: str) -> Any:
        """The last value told for ``key``, or None."""
        return next((said[key] for said in reversed(self.told) if key in said), None)

    def last_error(self) -> str:
        """The last line on standard error that says something."""
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors.read().decode("utf-8", "replace").splitlines()]
        errors = [line for line in lines if re.search(r"error|NCCL WARN|exception", line, re.IGNORECASE)]
        return (errors or [line for line in lines if line] or ["nothing was printed"])[-1][:500]

    def end(self) -> None:
        """Kill the rank and whatever it started, and collect it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        # A process in an uninterruptible call cannot be collected; the report must come all the same.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)

    def close(self) -> None:
        """Forget the rank's output."""
        self.errors.close()
        if self.process.stdout is not None:
            self.process.stdout.close()


def listen(ranks: Sequence[Rank], limit_s: float) -> bool:
    """Hear all ranks until they have ended, one has failed, or ``limit_s`` after their start is over: then False."""
    deadline, started = time.monotonic() + START_LIMIT_S, False
    with selectors.DefaultSelector() as selector:
        for rank in ranks:
            assert rank.process.stdout is not None
            selector.register(rank.process.stdout, selectors.EVENT_READ, rank)
        while selector.get_map():
            if not started and all(rank.said("torch") for rank in ranks):
                deadline, started = time.monotonic() + limit_s, True
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            for key, _ in selector.select(min(left, 1.0)):
                data = os.read(key.fd, 65536)
                if data:
                    key.data.hear(data)
                else:
                    selector.unregister(key.fileobj)
            if any(rank.said("busy") or rank.said("unable") for rank in ranks):
                return True
            # A rank that died leaves the others waiting for it: its error is the answer, not their hang.
            if any(rank.process.poll() not in (None, 0) for rank in ranks):
                return True
    return True


def run(args: argparse.Namespace) -> JsonDict:
    """Start the ranks, hear them, end them, and judge."""
    began = time.monotonic()
    environment = dict(os.environ)
    if args.backend == "gloo":  # the ranks are on one host: no name of it needs to resolve
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        environment.setdefault("OMP_NUM_THREADS", "1")
    if args.gpus is not None:
        environment["CUDA_VISIBLE_DEVICES"] = args.gpus
    folder = tempfile.mkdtemp(prefix="collective-")
    command = [sys.executable, os.path.abspath(__file__), "--store", folder + "/store", "--ranks", str(args.ranks)]
    command += ["--backend", args.backend, "--dtype", args.dtype, "--busy-mib", str(args.busy_mib)]
    command += ["--batches", str(args.batches), "--sizes", *[str(size) for size in args.sizes]]
    ranks: list[Rank] = []
    try:
        for number in range(args.ranks):
            ranks.append(Rank(number, command, environment))
        in_time = listen(ranks, args.limit_s)
        if in_time:  # what has told its end gets a moment to leave
            for rank in ranks:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    rank.process.wait(5 if rank.said("done") else 0.5)
    finally:
        codes = [rank.process.poll() for rank in ranks]
        for rank in ranks:
            rank.end()
        shutil.rmtree(folder, ignore_errors=True)
    protocol = environment.get("NCCL_PROTO", "")
    report: JsonDict = {
        "schema": SCHEMA,
        "backend": args.backend,
        "ranks": args.ranks,
        "dtype": args.dtype,
        "torch": ranks[0].said("torch"),
        "nccl": ranks[0].said("nccl"),
        "devices": [name for rank in ranks if (name := rank.said("device"))],
        "environment": {key: value for key, value in sorted(environment.items()) if key.startswith(VARIABLES)},
        "link_gbps": args.link_gbps,
        "sizes": sizes_of(ranks, args.sizes),
        "steps": [rank.step for rank in ranks],
        "fabric": fabric_state(),
    }
    largest = report["sizes"][-1] if report["sizes"] else None
    report["bus_gbps"] = largest["bus_gbps"] if largest else None
    report.update(judge(ranks, codes, in_time, report, args.limit_s, protocol))
    for rank in ranks:
        rank.close()
    report["remedy"] = REMEDIES.get(report["verdict"])
    report["seconds"] = round(time.monotonic() - began, 1)
    return report


def sizes_of(ranks: Sequence[Rank], sizes: Sequence[int]) -> list[JsonDict]:
    """The sizes that every rank finished: correct on all of them, and the time of the slowest."""
    rows = []
    for size in sizes:
        told = [said for rank in ranks for said in rank.told if said.get("size") == size]
        if len(told) < len(ranks):
            break
        seconds = max(said["seconds"] for said in told)
        # Each byte crosses a ring's links 2 (n-1) / n times: the figure that can be held against a link.
        bus = size / seconds * 2 * (len(ranks) - 1) / len(ranks) / 1e9
        correct = all(said["wrong"] == 0 for said in told)
        rows.append({"bytes": size, "correct": correct, "seconds": seconds, "bus_gbps": round(bus, 4)})
    return rows


def judge(
    ranks: Sequence[Rank], codes: Sequence[int | None], in_time: bool, report: JsonDict, limit_s: float, protocol: str
) -> JsonDict:
    """The verdict over what the ranks told and how they ended: {"verdict", "what"}."""
    for verdict in ("busy", "unable"):
        said = [text for rank in ranks if (text := rank.said(verdict))]
        if said:
            return {"verdict": verdict, "what": "; ".join(dict.fromkeys(said))}
    died = [(rank, code) for rank, code in zip(ranks, codes) if code not in (None, 0)]
    if died:
        rank, code = died[0]
        how = f"ended of signal {-code}" if code and code < 0 else f"ended with status {code}"
        error = rank.last_error()
        if "No module named 'torch'" in error:
            return {"verdict": "unable", "what": f"{sys.executable} has no torch: give the engine's interpreter"}
        return {"verdict": "failed", "what": f"rank {rank.number} {how} in step '{rank.step}': {error}"}
    if not in_time and not all(rank.said("torch") for rank in ranks):
        return {
            "verdict": "unable",
            "what": f"torch was not imported within {START_LIMIT_S:.0f} s: a slow or stale disk",
        }
    if not in_time:
        now = time.monotonic()
        where = ", ".join(f"rank {rank.number} {now - rank.since:.0f} s in '{rank.step}'" for rank in ranks)
        return {"verdict": "hang", "what": f"no end after {limit_s:.0f} s: {where}"}
    wrong = [f"{row['bytes']} bytes" for row in report["sizes"] if not row["correct"]]
    if wrong:
        return {"verdict": "wrong sum", "what": f"the sum over {len(ranks)} ranks is wrong at {', '.join(wrong)}"}
    if not all(rank.said("done") for rank in ranks):
        silent = next(rank for rank in ranks if not rank.said("done"))
        return {"verdict": "failed", "what": f"rank {silent.number} stopped in step '{silent.step}' without a word"}
    best = max((row["bus_gbps"] for row in report["sizes"]), default=0.0)
    link = report["link_gbps"]
    if link and len(ranks) > 1:
        least = link * LEAST_SHARE * (LL_FACTOR if protocol == "LL" else 1.0)
        if best < least:
            return {
                "verdict": "slow",
                "what": f"bus bandwidth {best:.2f} GB/s, expected at least {least:.2f} of the link's {link:g} GB/s",
            }
    if report["backend"] == "gloo":
        return {
            "verdict": "ok",
            "what": "no link between GPUs was proven: this variant uses no GPU, and the all-reduce ran over "
            f"{len(ranks)} processes of the CPU",
        }
    return {
        "verdict": "ok",
        "what": f"all-reduce over {len(ranks)} ranks is correct at {len(report['sizes'])} sizes, best bus bandwidth "
        f"{best:.2f} GB/s",
    }


# --- what stands between the GPUs ------------------------------------------------------------------------------------


def fabric_state(root: str = "/") -> JsonDict:
    """IOMMU and ACS as far as this user may see them: what makes peer traffic hang although every table says OK.

    {"cmdline": [words of the kernel's], "iommu_groups": count, "iommu_types": {type: count}, "acs": null (not to be
    seen) | {"bridges": with an ACS control, "redirect": [addresses where request redirection is on]}}
    """
    base = Path(root)
    words: list[str] = []
    with contextlib.suppress(OSError):
        words = (base / "proc/cmdline").read_text(encoding="utf-8", errors="replace").split()
    types: dict[str, int] = {}
    groups = sorted((base / "sys/kernel/iommu_groups").glob("*"))
    for group in groups:
        with contextlib.suppress(OSError):
            kind = (group / "type").read_text(encoding="ascii").strip()
            types[kind] = types.get(kind, 0) + 1
    return {
        "cmdline": [word for word in words if IOMMU_WORDS.search(word)],
        "iommu_groups": len(groups),
        "iommu_types": types,
        "acs": _acs() if root == "/" else None,
    }


def _acs() -> JsonDict | None:
    try:
        done = subprocess.run(["lspci", "-vvv"], capture_output=True, text=True, errors="replace", timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return read_acs(done.stdout)


def read_acs(text: str) -> JsonDict | None:
    """ACS of `lspci -vvv`; None where it shows no control at all, which without root is always so."""
    address, bridges, redirect = "", 0, []
    for line in text.splitlines():
        if line[:1].strip():
            address = line.split()[0]
        elif "ACSCtl:" in line:
            bridges += 1
            if "ReqRedir+" in line:
                redirect.append(address)
    return {"bridges": bridges, "redirect": redirect} if bridges else None


# --- the command -----------------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """The options; those without help are the parent's to its ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks; with nccl a GPU each (default 2)")
    parser.add_argument("--backend", choices=sorted(SIZES), default="nccl", help="gloo on hosts without GPU")
    parser.add_argument("--gpus", help="indices of the GPUs, such as 0,1 (default: all that are visible)")
    parser.add_argument("--limit-s", type=float, default=60.0, help="seconds until whatever still runs is a hang")
    parser.add_argument("--sizes", type=int, nargs="+", help="bytes of each all-reduce, smallest first")
    parser.add_argument("--dtype", choices=sorted(ITEM_BYTES), default="float32")
    parser.add_argument("--batches", type=int, default=5, help="timed batches a size, of 20 calls or, over 1 MiB, 5")
    parser.add_argument("--link-gbps", type=float, help="GB/s of the slowest link, each way; far below it is a fault")
    parser.add_argument("--busy-mib", type=int, default=BUSY_MIB, help="a GPU with more than this in use is not tried")
    parser.add_argument("--out", help="write the report here too")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Be a rank, or start them and print the report as JSON."""
    args = build_parser().parse_args(argv)
    args.sizes = args.sizes or list(SIZES[args.backend])
    if args.rank is not None:
        try:
            run_rank(args)
        except Exception:  # whatever it is, the parent reads it and the exit code says so
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # a library's threads must not keep a failed rank alive
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # the ranks must not stay behind
    report = run(args)
    text = json.dumps(report, indent=1, sort_keys=True)
    print(text)
    if args.out:
        Path(args.out).write_text(text + "\n", encoding="utf-8")
    return 0 if report["verdict"] == "ok" else 1 if report["verdict"] in FAULTS else 2


if __name__ == "__main__":
    sys.exit(main())
