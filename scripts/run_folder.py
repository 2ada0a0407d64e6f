#!/usr/bin/env python3
"""Keep a run folder: begin a load, add what a host measured of it, judge the arms, show the table.

    python scripts/run_folder.py begin --host H --variant V --prompts FILE [--run DIR --arm B] ...   prints JSON
    python scripts/run_folder.py add DIR --arm A --boot 1 --archive FILE.tar.gz                      prints JSON
    python scripts/run_folder.py result DIR --boot 1 | judge DIR                                     prints JSON
    python scripts/run_folder.py rebuild DIR      raw.jsonl and transcripts.jsonl again from what was fetched
    python scripts/run_folder.py show DIR         the table

role vllm_benchmark and scripts/bench.py call it. Everything in raw.jsonl comes from raw/ARM-BOOT/, which stays as the
host wrote it. Exit codes: 0 done, 2 the input or the call was wrong.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "collections"))

from ansible_collections.swapgate.core.plugins.module_utils import bench_results, records  # noqa: E402

from scripts import json_files, verdict  # noqa: E402
from scripts.json_files import InputError  # noqa: E402
from scripts.verdict_gates import LOOKUP_METHODS  # noqa: E402
from scripts.verdict_runs import Prompt, json_lines  # noqa: E402

JsonDict = dict[str, Any]

SCHEMA = 1
RUNS = ROOT / "runs"
BASE = "A"
AGAIN_S = 180  # what another load may take in any case, and what deciding upon it may
ARM = re.compile(r"[A-Za-z0-9_]{1,16}")
# What all loads of one run have in common; another run is not comparable.
SETTINGS = ("concurrency", "repeats", "cache", "temperature")
# From the host's LOAD to run.json's; the rest of it stays in raw/ARM-BOOT/load.json.
LOAD_KEYS = (
    "variant",
    "unit",
    "release",
    "engine_version",
    "engine_package",
    "speculative_config",
    "changes",
    "effective",
    "load_s",
    "driver",
    "gpus",
    "nccl_env",
    "clocks",
    "temperatures",
    "throttle_reasons",
    "power_capped",
    "host_facts",
    "invocation_id",
    "levels",
    "left_out",
    "foreign_requests",
    "started_unix",
    "ended_unix",
    "outcome",
    "cause",
)


class FolderError(InputError):
    """The call or the folder is wrong; the text says what, where, found against expected, and what to do."""


def read_object(file: Path, expected: str, then: str) -> JsonDict:
    """The JSON object in a file. FolderError says what was found, what was expected, and what to do then."""
    try:
        found: JsonDict = json_files.read_json(str(file), dict, expected)
        return found
    except InputError as error:
        raise FolderError(f"{error}; {then}") from error


def commit() -> str | None:
    """The commit of this tree, with +changed where files differ from it; None outside git."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+changed"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    except OSError:
        return None
    return done.stdout.strip() or None


def read_run(folder: Path) -> JsonDict:
    """run.json of a folder, its shape checked. FolderError when there is none, or it is another thing."""
    file = folder / "run.json"
    about = read_object(file, "a run as scripts/bench.py begins it", "restore it, or name another folder")
    loads, prompts, settings = (about.get(key) for key in ("loads", "prompts", "settings"))
    shapes = {
        f"schema {SCHEMA}": about.get("schema") == SCHEMA,
        "the texts id, host and model": all(isinstance(about.get(key), str) for key in ("id", "host", "model")),
        "prompts with their sha256": isinstance(prompts, dict) and isinstance(prompts.get("sha256"), str),
        "settings with a list concurrency": isinstance(settings, dict)
        and isinstance(settings.get("concurrency"), list),
        "loads, each with arm, boot, variant and outcome": isinstance(loads, list) and all(map(_is_load, loads)),
    }
    absent = [what for what, there in shapes.items() if not there]
    if absent:
        raise FolderError(f"{file}: found another shape, expected {'; '.join(absent)}; restore it, or name another run")
    about["loads"] = [{**dict.fromkeys(LOAD_KEYS), **load} for load in about["loads"]]
    return about


def _is_load(value: Any) -> bool:
    """Whether it is a load's entry, as far as all commands need it."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("arm"), str)
        and bool(ARM.fullmatch(value["arm"]))
        and type(value.get("boot")) is int
        and all(isinstance(value.get(key), str) for key in ("variant", "outcome"))
        and all(isinstance(value.get(key) or [], list) for key in ("left_out", "throttle_reasons"))
        and all(isinstance(value.get(key) or 0.0, (int, float)) for key in ("started_unix", "ended_unix"))
        and isinstance(value.get("speculative_config") or {}, dict)
    )


def make_private(folder: Path) -> Path:
    """The folder, for its owner alone: answers may be customers' text. One that holds other things keeps its mode."""
    ours = not folder.exists() or (folder / "run.json").exists() or not any(folder.iterdir())
    folder.mkdir(parents=True, exist_ok=True)
    if ours:
        folder.chmod(0o700)
    return folder


def prompts_of(file: Path, methods: Sequence[str]) -> tuple[bytes, list[JsonDict]]:
    """The prompt set, checked: for a look-up method (n-gram, suffix) also that it is text that users send."""
    try:
        content = file.read_bytes()
        prompts = verdict.read_prompts(content.splitlines(), str(file))
    except OSError as error:
        raise FolderError(f"{file}: cannot be read: {error.strerror}; expected a prompt set (JSONL)") from error
    except InputError as error:
        raise FolderError(str(error)) from error
    must_fit(prompts, methods, str(file))
    keys = ("id", "class", "messages", "max_tokens")
    values = [json.loads(line) for line in content.splitlines() if line.strip()]
    return content, [{key: value[key] for key in keys} for value in values]


def must_fit(prompts: Sequence[Prompt], methods: Sequence[str], where: str) -> None:
    """FolderError when a look-up method is among the methods, and the prompts are not text that users send."""
    lookup = [method for method in methods if method in LOOKUP_METHODS]
    problems = verdict.check_prompts(prompts) if lookup else []
    if problems:
        raise FolderError(
            f"{where}: refused for a verdict on {', '.join(lookup)}: {'; '.join(problems)}. Nothing was measured. See "
            "benchmarks/prompts/README.md"
        )


def named(file: Path) -> str:
    """A file of this tree by its path inside it: the run may be read elsewhere."""
    return str(file.resolve().relative_to(ROOT)) if file.resolve().is_relative_to(ROOT) else str(file)


def begin(args: argparse.Namespace) -> JsonDict:
    """Make or check the folder; {"run", "arm", "boot", "request": for `swapgate bench`, "reuse": bool}.

    Nothing is measured yet; with "reuse" nothing need be: the run has this arm of this very load (--invocation-id).
    """
    if not ARM.fullmatch(args.arm):
        raise FolderError(f"--arm: found {args.arm!r}, expected a name like A or B")
    content, prompts = prompts_of(args.prompts, args.method)
    levels = sorted(set(args.concurrency))
    if not levels or levels[0] < 1 or args.repeats < 1:
        raise FolderError("found no concurrency or no repeats, expected whole numbers of at least 1")
    settings: JsonDict = {"concurrency": levels, "repeats": args.repeats, "cache": args.cache, "temperature": 0}
    digest = hashlib.sha256(content).hexdigest()
    if args.run and (args.run / "run.json").exists():
        about = read_run(args.run)
        _must_match(about, args, settings, digest)
        folder = make_private(args.run.resolve())
    else:
        name = time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + f"-{args.host}"
        folder = (args.run or RUNS / re.sub(r"[^A-Za-z0-9._-]", "_", name)).resolve()
        make_private(folder)
        about = {
            "schema": SCHEMA,
            "kind": "benchmark",
            "id": folder.name,
            "host": args.host,
            "model": args.model,
            "started_unix": time.time(),
            "ended_unix": None,
            "commit": commit(),
            "prompts": {"file": named(args.prompts), "sha256": digest, "count": len(prompts)},
            "settings": settings,
            "loads": [],
        }
        (folder / "prompts.jsonl").write_bytes(content)
        records.write_json(folder / "run.json", about)
    boot = 1 + max((load["boot"] for load in about["loads"]), default=0)
    request = {
        "variant": args.variant,
        "prompts": prompts,
        "concurrency": levels,
        "repeats": args.repeats,
        "cache": args.cache,
        "limit_s": args.limit_s,
    }
    same = [
        load["boot"]
        for load in about["loads"]
        if args.invocation_id and load["invocation_id"] == args.invocation_id and load["arm"] == args.arm
        if load["outcome"] == "measured"
    ]
    return {
        "run": str(folder),
        "arm": args.arm,
        "boot": same[-1] if same else boot,
        "request": request,
        "reuse": bool(same),
    }


def result_of(folder: Path, boot: int) -> JsonDict:
    """{"run", "load": its run.json entry, "table", "again_limit_s": how long measuring another such load may take,
    "again_s": within which that has to be decided upon}."""
    loads = {load["boot"]: load for load in read_run(folder)["loads"]}
    if boot not in loads:
        raise FolderError(
            f"--boot: found {boot}, expected a load of {folder}: {', '.join(map(str, loads)) or 'none yet'}"
        )
    load = loads[boot]
    took = (load["ended_unix"] or 0) - (load["started_unix"] or 0)
    limit = math.ceil(2 * took) + AGAIN_S
    return {
        "run": str(folder),
        "load": load,
        "table": table(folder),
        "again_limit_s": limit,
        "again_s": limit + AGAIN_S,
    }


def _must_match(about: JsonDict, args: argparse.Namespace, settings: JsonDict, digest: str) -> None:
    """FolderError unless another load of this run may be measured so."""
    pairs = [("host", about["host"], args.host), ("model", about["model"], args.model)]
    pairs += [("prompts", about["prompts"]["sha256"][:12], digest[:12])]
    pairs += [(key, about["settings"].get(key), settings[key]) for key in SETTINGS]
    pairs += [
        (f"variant of arm {args.arm}", load["variant"], args.variant)
        for load in about["loads"]
        if load["arm"] == args.arm and args.variant
    ]
    for what, there, now in pairs:
        if there != now:
            raise FolderError(
                f"{args.run}: {what}: found {now!r}, expected {there!r} as in the loads that are there; measure the "
                "same, take another arm, or leave the run out to begin a new one"
            )


def unpack(archive: Path, into: Path) -> None:
    """The host's files into a folder of their own; nothing leaves it, and a link is none of them."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    try:
        with tarfile.open(archive) as packed:
            for member in packed:
                if member.isfile() and re.fullmatch(r"[A-Za-z0-9._-]+", member.name):
                    file = packed.extractfile(member)
                    assert file is not None
                    (into / member.name).write_bytes(file.read())
    except (OSError, tarfile.TarError, EOFError) as error:
        raise FolderError(f"{archive}: cannot be unpacked: {str(error).splitlines()[0]}; fetch it again") from error


FETCH = "fetch raw/ again from where it was measured; raw.jsonl was left as it is"


def _host_file(file: Path) -> JsonDict:
    """A file of raw/ARM-BOOT/."""
    return read_object(file, "what the host wrote of this load", FETCH)


def add(folder: Path, arm: str, boot: int, archive: Path) -> JsonDict:
    """Take in what a host measured of one load; its run.json entry. The history of its host gets a line a level."""
    about = read_run(folder)
    place = folder / "raw" / f"{arm}-{boot}"
    if any(load["boot"] == boot for load in about["loads"]):
        raise FolderError(f"{folder}: load {boot} is there already; begin another one")
    unpack(archive, place)
    found = _host_file(place / "load.json")
    load = {"arm": arm, "boot": boot, **{key: found.get(key) for key in LOAD_KEYS}}
    if not _is_load(load):
        raise FolderError(f"{place / 'load.json'}: found another shape, expected a load of the host's; {FETCH}")
    about["loads"].append(load)
    about["ended_unix"] = time.time()
    raw, told = lines_of(folder, load)
    _append(folder / "raw.jsonl", raw)
    _append(folder / "transcripts.jsonl", told)
    records.write_json(folder / "run.json", about)
    if arm == BASE and load["outcome"] == "measured":
        _append(history_file(folder, about), history_lines(about, load, raw))
    return load


def _append(file: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)


def rebuild(folder: Path) -> int:
    """raw.jsonl and transcripts.jsonl of all loads again, from raw/ARM-BOOT/; how many raw lines there are."""
    about = read_run(folder)
    make_private(folder)
    raw: list[JsonDict] = []
    told: list[JsonDict] = []
    for load in about["loads"]:
        for into, lines in zip((raw, told), lines_of(folder, load)):
            into += lines
    for name, lines in (("raw.jsonl", raw), ("transcripts.jsonl", told)):
        write_lines(folder / name, lines)
    return len(raw)


def read_lines(file: Path) -> list[JsonDict]:
    """JSON lines; none when there is no file. InputError names the line that is none."""
    if not file.is_file():
        return []
    return [line for _, line in json_lines(file.read_bytes().splitlines(), str(file))]


def write_lines(file: Path, lines: Sequence[Mapping[str, Any]], mode: int = 0o644) -> None:
    """JSON lines, atomically."""
    records.write_atomic(file, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), mode)


def passes_of(place: Path) -> list[JsonDict]:
    """The measured passes of one load, as the host wrote them, by concurrency and repeat."""
    found = [_host_file(file) for file in place.glob("*.pass.json")]
    measured = [one for one in found if one["repeat"] >= 0]
    return sorted(measured, key=lambda one: (one["concurrency"], one["repeat"]))


def lines_of(folder: Path, load: JsonDict) -> tuple[list[JsonDict], list[JsonDict]]:
    """(raw lines, transcript lines) of one load, from its files."""
    place = folder / "raw" / f"{load['arm']}-{load['boot']}"
    prompts = _host_file(place / "request.json")["prompts"]
    recorded = read_lines(place / "recorded.jsonl")
    known = {line["id"]: line for line in recorded}
    head = {key: load[key] for key in ("arm", "variant", "boot")}
    lines: list[JsonDict] = []
    passes = passes_of(place)
    for one in passes:
        here = {**head, "repeat": one["repeat"], "concurrency": one["concurrency"]}
        if one["void"]:
            lines += bench_results.failed_lines(prompts, here, one["void"])
        else:
            lines += bench_results.request_lines(_host_file(place / one["file"]), prompts, known, here)
    found = _host_file(place / "load.json")
    counted = bench_results.together([one["between"] for one in passes])
    drafts = counted["drafts"]
    facts = {
        "method": (load["speculative_config"] or {}).get("method"),
        "kv_cache_tokens": found.get("kv_cache_tokens"),
        "preemptions": counted["preemptions"],
        "drafted": counted["drafted"],
        "accepted": counted["accepted"],
        "by_position": [count / drafts for count in counted["by_position"]] if drafts else None,
        "tokens_per_step": counted["tokens_per_step"],
        "finished": counted["finished"],
        "prefix_hits": counted["prefix_hits"],
        "prefix_queries": counted["prefix_queries"],
        "throttle_reasons": load["throttle_reasons"] or [],
    }
    lines.append({"arm": load["arm"], "boot": load["boot"], "facts": facts})
    told = [
        {**{key: line[key] for key in ("id", "class")}, **head}
        | {key: line[key] for key in ("prompt_token_ids", "output_token_ids", "text", "finish_reason")}
        for line in recorded
        if not line["error"]
    ]
    return lines, told


# --- history -------------------------------------------------------------------------------------------------------


def history_file(folder: Path, about: JsonDict) -> Path:
    """Every load of a host's baselines that was measured beside this run, one line a load and concurrency."""
    name = re.sub(r"[^A-Za-z0-9._-]", "_", f"{about['host']}-{about['model']}")
    return folder.resolve().parent / "history" / f"{name}.jsonl"


def history_lines(about: JsonDict, load: JsonDict, raw: Sequence[JsonDict]) -> list[JsonDict]:
    """What a load adds to the history; `scripts/verdict.py --history` reads it."""
    lines = []
    for level in about["settings"]["concurrency"]:
        logs = bench_results.level_of(line for line in raw if line.get("concurrency") == level)
        if logs is not None:
            lines.append(
                {
                    "run": about["id"],
                    "boot": load["boot"],
                    "started_unix": load["started_unix"],
                    "ms_per_token": 1000 * math.exp(logs),
                    "host": about["host"],
                    "model": about["model"],
                    "variant": load["variant"],
                    "release": load["release"],
                    "engine_version": load["engine_version"],
                    "prompts_sha256": about["prompts"]["sha256"],
                    "cache": about["settings"]["cache"],
                    "concurrency": level,
                }
            )
    return lines


# --- the verdict -----------------------------------------------------------------------------------------------------


def judge(folder: Path) -> JsonDict:
    """{"keep": bool, "word", "sentence", "verdicts": n}; verdict.json is written where there is a verdict.

    Only *faster* at every concurrency keeps. A run that has no verdict says why, and keeps nothing.
    """
    about = read_run(folder)
    words = [sys.executable, str(ROOT / "scripts/verdict.py"), str(folder / "raw.jsonl"), "--json", "--base", BASE]
    words += ["--prompts", str(folder / "prompts.jsonl")]
    history = history_file(folder, about)
    if history.is_file():
        words += ["--history", str(history)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    failed = [load for load in about["loads"] if load["outcome"] == "failed"]
    because = "; ".join(
        f"arm {load['arm']} ({load['variant']}), load {load['boot']}: {load['cause']}" for load in failed
    )
    if done.returncode == 2:
        said = because or (done.stderr.strip().splitlines() or ["verdict.py said nothing"])[-1]
        return {"keep": False, "word": "refused", "sentence": f"No verdict. {said}", "verdicts": 0}
    records.write_atomic(folder / "verdict.json", done.stdout)
    results = json.loads(done.stdout)["verdicts"]
    worst = next((one for one in results if one["word"] != "faster"), results[0])
    return {
        "keep": not failed and all(one["word"] == "faster" for one in results),
        "word": worst["word"],
        "sentence": worst["sentence"] + (f". {because}" if because else ""),
        "verdicts": len(results),
    }


# --- the table -------------------------------------------------------------------------------------------------------


def rows(folder: Path) -> list[JsonDict]:
    """bench_results.summary of the run, with "tokens_per_step" of each arm, load and concurrency."""
    file = folder / "raw.jsonl"
    lines = read_lines(file)
    verdict.read_run((json.dumps(line).encode() for line in lines), str(file), 0)  # every line is whole
    found = bench_results.summary(lines)
    for row in found:
        here = [
            one["between"]
            for one in passes_of(folder / "raw" / f"{row['arm']}-{row['boot']}")
            if one["concurrency"] == row["concurrency"] and not one["void"]
        ]
        row["tokens_per_step"] = bench_results.together(here)["tokens_per_step"] if here else None
    return found


def table(folder: Path) -> list[str]:
    """The run as lines of text: medians and, after the slash, 95th percentiles."""
    about = read_run(folder)
    heads = (
        "arm",
        "variant",
        "load",
        "streams",
        "requests",
        "failed",
        "TTFT ms",
        "TPOT ms",
        "ITL ms",
        "E2E s",
        "tok/step",
    )
    cells = [heads]
    for row in rows(folder):
        cells.append(
            (
                row["arm"],
                row["variant"],
                str(row["boot"]),
                str(row["concurrency"]),
                str(row["requests"]),
                str(row["failed"]),
                *(_pair(row[key], 1000.0, 1) for key in ("ttft_s", "tpot_s", "itl_s")),
                _pair(row["e2e_s"], 1.0, 2),
                "-" if row["tokens_per_step"] is None else f"{row['tokens_per_step']:.2f}",
            )
        )
    widths = [max(len(line[at]) for line in cells) for at in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in cells]
    for load in about["loads"]:
        if load["outcome"] == "failed":
            lines.append(f"arm {load['arm']}, load {load['boot']} failed: {load['cause']}")
        if load["left_out"]:
            levels = ", ".join(str(level) for level in load["left_out"])
            lines.append(f"arm {load['arm']}, load {load['boot']}: {levels} streams left out: above --max-num-seqs")
        if load["foreign_requests"]:
            lines.append(f"arm {load['arm']}, load {load['boot']}: {load['foreign_requests']} requests were not ours")
        if load["throttle_reasons"]:
            lines.append(f"arm {load['arm']}, load {load['boot']} throttled: {', '.join(load['throttle_reasons'])}")
    return [*lines, f"in {folder}"]


def _pair(values: Mapping[str, float] | None, factor: float, digits: int) -> str:
    if values is None:
        return "-"
    return "/".join(f"{values[share] * factor:.{digits}f}" for share in ("p50", "p95"))


def whole_numbers(text: str) -> list[int]:
    """Whole numbers of a JSON list, or separated by commas."""
    try:
        return [int(word) for word in text.strip("[] ").split(",")]
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected whole numbers as in 1,4") from error


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    start = commands.add_parser("begin", help="make or check the folder before anything is measured")
    start.add_argument("--host", required=True)
    start.add_argument("--model", required=True)
    start.add_argument("--variant", required=True)
    start.add_argument("--prompts", required=True, type=Path)
    start.add_argument("--run", type=Path, help="an existing run to add a load to, or where a new one shall be")
    start.add_argument("--arm", default=BASE)
    start.add_argument("--concurrency", type=whole_numbers, default=[1])
    start.add_argument("--repeats", type=int, default=3)
    start.add_argument("--cache", choices=("cold", "warm"), default="cold")
    start.add_argument("--method", action="append", default=[], help="speculation that the prompts must be fit for")
    start.add_argument("--limit-s", type=float)
    start.add_argument("--invocation-id", help="take what the run has of this very load, instead of measuring anew")
    put = commands.add_parser("add", help="take in what a host measured")
    put.add_argument("folder", type=Path)
    put.add_argument("--arm", required=True)
    put.add_argument("--boot", required=True, type=int)
    put.add_argument("--archive", required=True, type=Path)
    told = commands.add_parser("result", help="what `add` printed, again")
    told.add_argument("folder", type=Path)
    told.add_argument("--boot", required=True, type=int)
    for name, words in (("judge", "verdict.json"), ("rebuild", "raw.jsonl from raw/"), ("show", "the table")):
        commands.add_parser(name, help=words).add_argument("folder", type=Path)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line."""
    args = build_parser().parse_args(argv)
    try:
        if args.command == "begin":
            print(json.dumps(begin(args)))
        elif args.command == "add":
            add(args.folder, args.arm, args.boot, args.archive)
            print(json.dumps(result_of(args.folder, args.boot)))
        elif args.command == "result":
            print(json.dumps(result_of(args.folder, args.boot)))
        elif args.command == "judge":
            print(json.dumps(judge(args.folder)))
        elif args.command == "rebuild":
            print(f"{rebuild(args.folder)} lines")
        else:
            print("\n".join(table(args.folder)))
    except (InputError, bench_results.ResultError) as error:
        print(f"run_folder: {error}", file=sys.stderr)
        return 2
    except (KeyError, TypeError, AttributeError) as error:
        # Of the host's own files only the shape that matters everywhere is checked above.
        print(f"run_folder: {args.command}: a file of the run has another shape ({error!r}); {FETCH}", file=sys.stderr)
        return 2
    except OSError as error:
        said = f"{error.filename}: {error.strerror}, expected a folder that can be read and written; name another one"
        print(f"run_folder: {said}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
