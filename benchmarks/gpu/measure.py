#!/usr/bin/env python3
"""`swapgate bench` on a machine with one GPU and no systemd: several loads, one after the other, into one run folder.

    python3 benchmarks/gpu/measure.py --python PY --model DIR --out OUT [--loads A=baseline,B=ngram,A=baseline]

PY is the interpreter of an installed vLLM (and of pandas), DIR a model folder; this interpreter needs numpy. Each load
is started by the product's supervisor, measured by its `bench`, stopped, and waited for until the GPU is free. OUT/run
is the run folder: scripts/run_folder.py judge OUT/run and scripts/report.py OUT/run read it here or anywhere else.
OUT may be used again: more loads are added to its run. OUT/services has what each load and its end looked like.

Exit codes: 0 all loads were measured, 1 one was not, 2 the machine lacks what is needed, or the call was wrong.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(REPO / "collections")]

from ansible_collections.swapgate.core.plugins.host_program import bench, swap  # noqa: E402
from ansible_collections.swapgate.core.plugins.module_utils import records  # noqa: E402
from bed import MODEL_NAME, Bed, BedError, add_options, bed_of  # noqa: E402
from service import Service  # noqa: E402

from scripts import run_folder  # noqa: E402

JsonDict = dict[str, Any]

STOP_LIMIT_S = 90.0


class LoadBench(bench.Bench):
    """The product's benchmark where no unit is there to ask: its release is told, its load generator runs as we do."""

    release = ""

    def describe(self) -> JsonDict:
        return {**super().describe(), "release": self.release}

    def _account(self) -> JsonDict:
        return {}

    def fail(self, cause: str) -> None:
        """Leave the folder of a load that never came to be measured."""
        self.out.mkdir(parents=True, exist_ok=True)
        records.write_json(self.out / "request.json", self.request)
        records.write_json(self.out / "load.json", {**self.describe(), "cause": cause, "ended_unix": time.time()})
        self._archive()


def choose(file: Path, per_class: int, max_tokens: int, target: Path) -> int:
    """Write the first ``per_class`` prompts of each class, answers cut to ``max_tokens``; returns how many."""
    taken: dict[str, int] = {}
    lines = []
    for line in file.read_text(encoding="utf-8").splitlines():
        prompt = json.loads(line)
        taken[prompt["class"]] = taken.get(prompt["class"], 0) + 1
        if taken[prompt["class"]] <= per_class:
            prompt["max_tokens"] = min(prompt["max_tokens"], max_tokens)
            lines.append(json.dumps(prompt, ensure_ascii=False))
    records.write_atomic(target, "\n".join(lines) + "\n")
    return len(lines)


def methods_of(bed: Bed, names: Sequence[str]) -> list[str]:
    """The methods of speculation of these variants, each once."""
    configs = [bed.resolve(name).get("speculative_config") or {} for name in names]
    return sorted({config["method"] for config in configs if "method" in config})


def say(text: str) -> None:
    """A line of progress, with the time."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def measure(bed: Bed, options: argparse.Namespace, arm: str, name: str) -> bool:
    """One load of variant ``name`` as ``arm``: start, bench, stop, into the run folder; whether it was measured."""
    variant = bed.resolve(name)
    words = ["begin", "--host", options.host, "--model", MODEL_NAME, "--variant", name, "--arm", arm]
    words += ["--prompts", str(options.out / "prompts.jsonl"), "--run", str(options.out / "run")]
    words += ["--concurrency", options.concurrency, "--repeats", str(options.repeats), "--cache", options.cache]
    words += ["--limit-s", str(options.limit_s)]
    for method in methods_of(bed, [name for _, name in options.loads]):  # no arm is measured for nothing
        words += ["--method", method]
    begun = run_folder.begin(run_folder.build_parser().parse_args(words))
    label = f"{arm}-{begun['boot']}"
    LoadBench.release = bed.stage(variant)
    say(f"load {label}: {name}")
    service = Service(bed, variant, options.out / "logs" / f"{label}.log")
    place = options.out / "host" / label
    try:
        asked = LoadBench(bed.layout, begun["request"], place, say)
        if service.ready(options.ready_s):
            say(f"load {label}: ready after {service.report()['ready_after_s']} s")
            asked.run()
        else:
            failure = service.report().get("failure") or {}
            asked.fail(f"not ready: {failure.get('root_cause') or failure.get('what') or 'no reason is known'}")
        found = {"stop": service.end(signal.SIGTERM, service.process.pid, STOP_LIMIT_S), **service.summary()}
        found.update(versions=bed.versions, env=variant["env"])
    finally:
        service.close()
    try:
        swap.Swap(bed.layout, records.empty_state(), lambda _: None).wait_free(variant)
    except swap.SwapFailed as error:
        found["not_free"] = error.cause
        say(f"load {label}: {error.cause}")
    records.write_json(options.out / "services" / f"{label}.json", found)
    load = run_folder.add(options.out / "run", arm, begun["boot"], place.with_name(label + ".tar.gz"))
    say(f"load {label}: {load['outcome']}" + (f": {load['cause']}" if load["cause"] else ""))
    return bool(load["outcome"] == "measured")


def note_commit(run: Path, commit: str | None) -> None:
    """The commit, where git is not there to ask."""
    about = run_folder.read_run(run)
    if commit and not about["commit"]:
        records.write_json(run / "run.json", {**about, "commit": commit})


def pack(out: Path, target: Path) -> None:
    """Everything that was measured, without the caches, as one archive."""
    with tarfile.open(target, "w:gz") as archive:
        for name in ("run", "services", "logs", "prompts.jsonl"):
            if (out / name).exists():
                archive.add(out / name, arcname=name)


def options_of(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--loads", default="A=baseline,B=ngram,A=baseline", help="ARM=VARIANT,... (%(default)s)")
    parser.add_argument("--prompts", type=Path, default=REPO / "benchmarks/prompts/mixed.jsonl")
    parser.add_argument("--per-class", type=int, default=6, help="prompts of each class (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest answer (default: %(default)s)")
    parser.add_argument("--concurrency", default="1,4", help="levels (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=2, help="measured passes of a level (default: %(default)s)")
    parser.add_argument("--cache", choices=bench.CACHES, default="cold", help="the prefix cache (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=300.0, help="of one load's passes (default: %(default)s)")
    parser.add_argument("--ready-s", type=float, default=420.0, help="limit of a load (default: %(default)s)")
    parser.add_argument("--host", default="gpu", help="what the host is called in the run (default: %(default)s)")
    parser.add_argument("--pack", type=Path, metavar="FILE.tar.gz", help="also everything but caches in one archive")
    options = parser.parse_args(words)
    options.loads = [tuple(word.partition("=")[::2]) for word in options.loads.split(",")]
    if not all(arm and name for arm, name in options.loads):
        parser.error("--loads: expected ARM=VARIANT,... as in A=baseline,B=ngram")
    return options


def main(words: list[str] | None = None) -> int:
    """Measure the loads; returns the exit code that the module's text lists."""
    options = options_of(words)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        options.out, options.model = options.out.resolve(), options.model.resolve()
        options.out.mkdir(parents=True, exist_ok=True)
        bed = bed_of(options)
        count = choose(options.prompts, options.per_class, options.max_tokens, options.out / "prompts.jsonl")
        say(f"{count} prompts, answers of at most {options.max_tokens} tokens, {len(options.loads)} loads")
        good = True
        for arm, name in options.loads:
            good = measure(bed, options, arm, name) and good
            note_commit(options.out / "run", options.commit)
            if options.pack:
                pack(options.out, options.pack)
    except (BedError, run_folder.FolderError, records.RecordError) as error:
        print(f"measure: {error}", file=sys.stderr)
        return 2
    finally:
        for service in list(Service.running):
            service.close()
    print("\n".join(run_folder.table(options.out / "run")))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
