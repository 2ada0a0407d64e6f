#!/usr/bin/env python3
"""`swapgate profile` on GPUs without systemd: where a decode step's time goes, by the engine's own torch profiler.

    python3 benchmarks/gpu/profile_gpu.py --python PY --model DIR --out OUT --gpus 0,1 [--moe] [--steps 32]

PY is the interpreter of an installed vLLM, DIR a model folder; as many GPUs as are named share each layer. --moe takes
a mixture of experts of random weights instead, with that folder's tokenizer: a shape with every kind of kernel. The
product's supervisor starts the engine and the product's profiler asks it. OUT/profile.json is the report with every
kernel's name, for reading whether each was put where it belongs; traces stay in OUT/traces.

Exit codes: 0 done, 1 the engine did not serve or no profile came of it, 2 the machine lacks what is needed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "collections")]

from ansible_collections.swapgate.core.plugins.host_program import decode_profile  # noqa: E402
from ansible_collections.swapgate.core.plugins.module_utils import kernel_times, records  # noqa: E402
from bed import BedError, add_options, bed_of  # noqa: E402
from predict_gpu import moe_folder  # noqa: E402
from service import Service  # noqa: E402

READY_S = 420.0
STOP_LIMIT_S = 90.0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--moe", action="store_true", help="a mixture of experts of random weights")
    parser.add_argument("--steps", type=int, default=32, help="decode steps to profile (default: %(default)s)")
    options = parser.parse_args()
    arguments = {}
    try:
        if options.moe:
            folder = options.out / "model"
            moe_folder("full", None, options.model, folder)
            options.model, arguments = folder, {"load-format": "dummy"}
        bed = bed_of(options)
        entry = {"extends": "baseline", "profiler": True, "engine_args": arguments}
        variant = bed.resolve("profiled", entry, parallel=max(1, len(bed.host["gpus"])))
    except BedError as error:
        print(f"profile_gpu: {error}", file=sys.stderr)
        return 2
    traces = Path(json.loads(variant["argv"][variant["argv"].index("--profiler-config") + 1])["torch_profiler_dir"])
    traces.mkdir(parents=True, exist_ok=True)
    service = Service(bed, variant, options.out / "engine.log")
    try:
        if not service.ready(READY_S):
            print(f"profile_gpu: not ready: {service.report().get('failure')}", file=sys.stderr)
            return 1
        report = decode_profile.profile_unit(variant, traces, None, options.steps, keep=True)
        service.end(signal.SIGTERM, service.process.pid, STOP_LIMIT_S)
    except decode_profile.ProfileError as error:
        print(f"profile_gpu: {error}", file=sys.stderr)
        return 1
    finally:
        service.close()
    names: dict[str, list[float]] = {}
    for path in report["traces"]:
        for event in kernel_times.read(path):
            if event.get("cat") == "kernel" and "dur" in event:
                count = names.setdefault(event["name"], [0, 0.0])
                count[0], count[1] = count[0] + 1, count[1] + float(event["dur"])
    found = sorted(names.items(), key=lambda item: -item[1][1])
    report["every_kernel"] = [
        {"kind": kernel_times.kind(name), "name": name, "calls": calls, "microseconds": round(spent, 1)}
        for name, (calls, spent) in found
    ]
    report.update(versions=bed.versions, commit=options.commit, argv=variant["argv"], env=variant["env"])
    records.write_json(options.out / "profile.json", report)
    shutil.copytree(traces, options.out / "traces", dirs_exist_ok=True)
    for kind, row in sorted(report["kinds"].items(), key=lambda item: -item[1]["share"]):
        print(f"{kind:12} {row['share']:.1%}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
