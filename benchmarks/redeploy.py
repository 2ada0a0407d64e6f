"""What an identical second deploy costs, beside the swap that it saves: both in one run on the host of `make demo`.

    .venv/bin/python benchmarks/redeploy.py [--host NAME] [--runs 3]

Swaps to `baseline` and back to `ngram`, deploying each RUNS times more without a change. Writes
benchmarks/results/redeploy.json: seconds of every deploy, the outcome and changed count that Ansible reported, and the
ratio of a swap to a deploy that changes nothing. Only the ratio travels: machines differ, and this one is never quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
RESULT = ROOT / "benchmarks/results/redeploy.json"


def deploy(host: str, variant: str) -> dict[str, Any]:
    """One deploy: its seconds, Ansible's changed count, and the swap's outcome."""
    started = time.monotonic()
    done = subprocess.run(
        [
            str(BIN / "ansible-playbook"),
            *("-i", "inventory/sandbox", "-i", f".sandbox/{host}/inventory.yml", "--limit", host),
            *("playbooks/deploy.yml", "-e", f"variant={variant}"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = time.monotonic() - started
    outcome = re.search(r"-> \S+: (\w+);", re.sub(r"\s+", " ", done.stdout))
    changed = re.search(r"changed=(\d+)", done.stdout)
    if not outcome or not changed:
        raise SystemExit(f"redeploy: no outcome in what ansible-playbook printed:\n{done.stdout[-2000:]}")
    return {
        "variant": variant,
        "seconds": round(seconds, 1),
        "outcome": outcome.group(1),
        "changed": int(changed.group(1)),
        "load_average": round(os.getloadavg()[0], 2),
    }


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--host", default="sandbox", help="a host on which `make demo` has run (default: sandbox)")
    parser.add_argument("--runs", type=int, default=3, help="deploys without a change after each swap (default: 3)")
    args = parser.parse_args()
    deploys = [deploy(args.host, variant) for variant in ("baseline", "ngram") for _ in range(args.runs + 1)]
    same = [item["seconds"] for item in deploys if item["outcome"] == "unchanged"]
    swaps = [item["seconds"] for item in deploys if item["outcome"] == "swapped"]
    result = {
        "machine": f"{os.cpu_count()} CPUs, {platform.platform()}, Python {platform.python_version()}",
        "deploys": deploys,
        "unchanged_median_s": statistics.median(same),
        "unchanged_most_s": max(same),
        "swap_median_s": statistics.median(swaps),
        "swap_to_unchanged": round(statistics.median(swaps) / statistics.median(same), 2),
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if key != "deploys"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
