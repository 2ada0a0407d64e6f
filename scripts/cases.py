#!/usr/bin/env python3
"""Run the public cases of tests/cases through the product and print what it got right; exit 1 where a bar is missed.

    python scripts/cases.py [--engine VENV] [--cases FOLDER] [--json] [--verbose]

Bars: the cause of at least 95 % of the fatal logs, a class and a remedy for each of them; line, class and words of the
remedy together (`class`, `remedy_says`, where a case has them) for 85 %; no false alarm in a benign, stopped or slow
load, also when it is cut anywhere; every nvidia-smi output, topology and unit judged as expected; 200,000 lines in 2 s
of processor time and 50 MiB; with --engine every engine config as expected or listed with the engine's answer, and
every fatal case that a preflight can be given caught by it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "collections"))
sys.path.insert(0, str(ROOT))

from ansible_collections.swapgate.core.plugins.module_utils import (  # noqa: E402
    diagnosis,
    log_text,
    nvidia_smi,
    safetensors,
    versions,
)

from scripts.diagnose import diagnose_case, load_signatures  # noqa: E402

CASES = ROOT / "tests" / "cases"
ENGINE_CHECK = ROOT / "plugins" / "host_program" / "engine_check.py"
FOUND_BAR, WHOLE_BAR = 0.95, 0.85
LINES, SECONDS_BAR, MIB_BAR, CORE_PERCENT_BAR = 200_000, 2.0, 50.0, 1.0
ENGINE_TIMEOUT_S = 1200
# A model that an engine can configure without weights: the smallest llama, with the context length of the original
# unit.
_MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What the CPU build says of itself, whatever it is asked.
_BUILD_TALK = ("Triton", "triton", "SSM cache type", "CPU backend")
# One import for all requests; the check itself is the one that the host's preflight runs.
_BATCH = """
import importlib.util, json, os, sys
spec = importlib.util.spec_from_file_location("engine_check", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
requests = json.load(sys.stdin)
answer = os.dup(1)
os.dup2(2, 1)
with os.fdopen(answer, "w") as out:
    for argv in requests:
        out.write(json.dumps(module.check(argv)) + chr(10))
        out.flush()
"""


class Row(NamedTuple):
    """One line of the table; `ok` None = not run or only told."""

    what: str
    found: str
    bar: str
    ok: bool | None
    notes: tuple[str, ...] = ()


def load_cases(folder: Path) -> list[dict[str, Any]]:
    """The cases of a folder in the order of their names; a file that holds none is an error."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    cases = []
    for path in sorted(folder.glob("[!_]*.yml")):
        case = yaml.load(path.read_text(encoding="utf-8"), Loader=loader)
        if not isinstance(case, dict) or not ("log" in case or "input" in case) or "source" not in case:
            raise SystemExit(f"cases: {path}: expected a mapping with source and log or input, see docs/diagnosis.md")
        cases.append(case)
    if not cases:
        raise SystemExit(f"cases: {folder}: no case found, expected *.yml files; give the folder with --cases")
    return cases


def log_rows(cases: list[dict[str, Any]], known: diagnosis.Signatures) -> list[Row]:
    """Rows for logs: causes, classes and remedies, what a preflight could have caught, false alarms."""
    fatal = [case for case in cases if case.get("outcome") == "fatal"]
    quiet = [case for case in cases if case.get("outcome") in {"benign", "calm", "slow-but-alive"}]
    missed, plain, partly = [], [], []
    named = whole = 0
    for case in fatal:
        result = diagnose_case(case, known)
        expected = log_text.strip_ansi(case["root_cause_line"])
        if result["verdict"] != "fatal" or result["root_cause"] != expected:
            missed.append(f"{case['id']}: {result['verdict']}: {result['root_cause']!r}, expected {expected!r}")
        if "class" in case:
            right = result["root_cause"] == expected and result["class"] == case["class"]
            if right and re.search(case["remedy_says"], result["remedy"]):
                whole += 1
            else:
                partly.append(f"{case['id']}: {result['class']}, expected {case['class']}: {result['remedy']}")
        if result["class"] in {"config", "model", "host", "transient"} and result["remedy"]:
            named += 1
        else:
            plain.append(f"{case['id']}: class {result['class']!r}, remedy {result['remedy']!r}")
    found = len(fatal) - len(missed)
    asked = sum("class" in case for case in fatal)
    alarms = []
    for case in quiet:
        result = diagnose_case(case, known)
        expected_verdicts = {"alive"} if case["outcome"] == "slow-but-alive" else {"benign", "alive"}
        if result["verdict"] not in expected_verdicts:
            alarms.append(f"{case['id']}: {result['verdict']}, expected {' or '.join(sorted(expected_verdicts))}")
    answers = [str(case["preventable_by_preflight"]["answer"]) for case in fatal]
    cuts, cut_alarms = _cut(quiet, known)
    return [
        Row(
            "fatal logs: cause found",
            f"{found} of {len(fatal)}",
            f"{FOUND_BAR:.0%}",
            found >= FOUND_BAR * len(fatal),
            tuple(missed),
        ),
        Row("fatal logs: class and remedy given", f"{named} of {len(fatal)}", "all", named == len(fatal), tuple(plain)),
        Row(
            "fatal logs: line, class and remedy as expected",
            f"{whole} of {asked}",
            f"{WHOLE_BAR:.0%}",
            whole >= WHOLE_BAR * asked,
            tuple(partly),
        ),
        Row(
            "fatal logs: a preflight can catch",
            ", ".join(f"{word} {answers.count(word)}" for word in ("yes", "partly", "no")),
            "told",
            None,
        ),
        Row("benign and slow logs: false alarms", f"{len(alarms)} of {len(quiet)}", "none", not alarms, tuple(alarms)),
        Row(
            "the same, cut anywhere: false alarms",
            f"{len(cut_alarms)} of {cuts}",
            "none",
            not cut_alarms,
            tuple(cut_alarms),
        ),
    ]


def _cut(quiet: list[dict[str, Any]], known: diagnosis.Signatures) -> tuple[int, list[str]]:
    count = 0
    alarms = []
    for case in quiet:
        text = "\n".join(case["log"])
        for position in range(0, len(text), 11):
            for piece in (text[:position], text[position:]):
                count += 1
                result = diagnosis.diagnose(piece, known)
                if result["verdict"] == "fatal":
                    alarms.append(f"{case['id']}: cut at character {position}: {result['root_cause']!r}")
    return count, alarms


def input_rows(cases: list[dict[str, Any]], known: diagnosis.Signatures) -> list[Row]:
    """Rows for what no engine is needed for: nvidia-smi outputs, topologies, units."""
    kinds = {"nvidia-smi outputs": "nvidia-smi", "topologies": "topology", "systemd units": "unit"}
    results: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {kind: [] for kind in kinds.values()}
    for case in cases:
        if "input" in case:
            result = diagnose_case(case, known)
            if result["kind"] in results:
                results[result["kind"]].append((case, result))
    rows = []
    for what, kind in kinds.items():
        wrong = [
            f"{case['id']}: {result['judgement']}, expected {case['expected']['verdict']} "
            f"({'; '.join(result['reasons'])})"
            for case, result in results[kind]
            if result["judgement"] != case["expected"]["verdict"]
        ]
        total = len(results[kind])
        rows.append(
            Row(f"{what}: judged as expected", f"{total - len(wrong)} of {total}", "all", not wrong, tuple(wrong))
        )
    nameless = [
        case["id"] for case, result in results["nvidia-smi"] if result["class"] and result["state"] in {"", "ok"}
    ]
    zeros = [case["id"] for case, result in results["nvidia-smi"] if _zero_for_odd(result)]
    rows.append(
        Row(
            "nvidia-smi: odd values without a name or read as zero",
            str(len(nameless) + len(zeros)),
            "none",
            not nameless and not zeros,
            tuple(nameless + zeros),
        )
    )
    return rows


def _zero_for_odd(result: dict[str, Any]) -> bool:
    named = {
        "memory.total": "memory_total_mib",
        "memory.used": "memory_used_mib",
        "utilization.gpu": "utilization_percent",
        "temperature.gpu": "temperature_c",
        "power.draw": "power_w",
    }
    return any(
        gpu[named[field]] is not None for gpu in result["gpu_values"] for field in gpu["states"] if field in named
    )


class Engine:
    """The real engine of a virtualenv, asked through the host's own preflight check."""

    def __init__(self, venv: Path, scratch: Path) -> None:
        self._python = venv / "bin" / "python"
        if not self._python.exists():
            raise SystemExit(
                f"cases: --engine {venv}: found no bin/python there, expected a virtualenv with vLLM in it"
            )
        self._scratch = scratch
        self._environment = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": str(self._metadata(venv)),
        }

    def _metadata(self, venv: Path) -> Path:
        """A folder with the metadata of `vllm` where the CPU build is installed under another name; `vllm serve` asks
        for it."""
        folder = self._scratch / "metadata"
        folder.mkdir()
        site = next(iter(sorted(venv.glob("lib/python3*/site-packages"))), venv)
        cpu = next(iter(sorted(site.glob("vllm_cpu-*.dist-info"))), None)
        if cpu is not None and not any(site.glob("vllm-*.dist-info")):
            version = cpu.name[len("vllm_cpu-") : -len(".dist-info")]
            info = folder / f"vllm-{version}+cpu.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8"
            )
        return folder

    def model(self, number: int, change: dict[str, Any]) -> str:
        """A model folder that differs from the smallest one by `change`."""
        folder = self._scratch / f"model-{number}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**_MODEL_CONFIG, **change}), encoding="utf-8")
        return str(folder)

    def ask(self, requests: list[list[str]]) -> list[dict[str, Any]]:
        """The engine's answer to each argv, in order."""
        run = subprocess.run(
            [str(self._python), "-c", _BATCH, str(ENGINE_CHECK)],
            input=json.dumps(requests),
            capture_output=True,
            text=True,
            env=self._environment,
            timeout=ENGINE_TIMEOUT_S,
            check=False,
        )
        answers = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
        if len(answers) != len(requests):
            raise SystemExit(
                f"cases: the engine answered {len(answers)} of {len(requests)} requests (exit {run.returncode}); "
                f"its last words: {run.stderr.strip().splitlines()[-1:] or 'none'}; run {ENGINE_CHECK.name} by hand"
            )
        return answers


def engine_rows(cases: list[dict[str, Any]], extra: dict[str, Any], venv: Path | None) -> list[Row]:
    """Rows for engine configs and for the preflight of fatal cases; without an engine they say so."""
    configs = [case for case in cases if str(case.get("input_type", "")).startswith(("speculative", "vllm arg"))]
    given = {case["id"]: extra[case["id"]] for case in cases if case["id"] in extra}
    without = [name for name, entry in given.items() if "argv" not in entry]
    caught = [name for name in without if _caught_without_engine(given[name])]
    rows = [
        Row(
            "our preflight without an engine catches",
            f"{len(caught)} of {len(without)}",
            "all",
            len(caught) == len(without),
            tuple(sorted(set(without) - set(caught))),
        )
    ]
    argvs = {name: entry for name, entry in given.items() if "argv" in entry}
    if venv is None:
        told = "not run: no engine given"
        rows.append(Row("engine configs: verdict as expected", told, f"{len(configs)} cases", None))
        rows.append(Row("our preflight with the engine catches", told, f"{len(argvs)} cases", None))
        return rows
    with tempfile.TemporaryDirectory() as scratch:
        engine = Engine(venv, Path(scratch))
        model = engine.model(0, {})
        requests = [_argv(case, model) for case in configs]
        # Once more with a draft model that is there, for cases whose question does not depend on the draft.
        requests += [_with_draft(argv, model) for argv in requests]
        for number, entry in enumerate(argvs.values(), 1):
            folder = engine.model(number, entry.get("config", {}))
            requests.append([folder if word == "MODEL" else word for word in entry["argv"]])
        answers = engine.ask(requests)
    rows.append(_config_row(configs, requests, answers))
    rows.append(_preflight_row(argvs, answers[2 * len(configs) :]))
    return rows


def _argv(case: dict[str, Any], model: str) -> list[str]:
    if case["input_type"].startswith("speculative"):
        return [model, "--speculative-config", case["input"]]
    words = shlex.split(case["input"])
    at = words.index("--model") if "--model" in words else None
    # The case's own model is not here; every other word is the case's.
    return words if at is None else [model, *words[:at], *words[at + 2 :]]


def _with_draft(argv: list[str], model: str) -> list[str]:
    """The same argv with a draft model that exists in place of the one its JSON names."""
    words = []
    for word in argv:
        try:
            value = json.loads(word) if word.startswith("{") else None
        except ValueError:
            value = None
        named = isinstance(value, dict) and "model" in value
        words.append(json.dumps({**value, "model": model}) if named and value is not None else word)
    return words


def engine_verdict(argv: list[str], answer: dict[str, Any]) -> tuple[str, str]:
    """Verdict and reason: the engine's answer, and our rules over what it accepted."""
    removed = versions.removed_settings(argv, {}, answer["version"] or "0.32.0")
    if removed:
        return "reject", removed[0]
    if not answer["ok"]:
        missing = any(
            word in answer["error"]
            for word in (
                "is not a local folder",
                "Repo id",
                "cached snapshot",
                "offline",
                "Can't load the conf",
                "not a valid model identifier",
                "outgoing traffic",
                "Invalid repository ID",
            )
        )
        return ("not decidable" if missing else "reject"), answer["error"]
    effective = answer["effective"].get("speculative") or {}
    warnings = [notice for notice in answer["notices"] if not any(word in notice for word in _BUILD_TALK)]
    if effective.get("method") in {"ngram", "ngram_gpu"}:
        low, high = effective.get("prompt_lookup_min"), effective.get("prompt_lookup_max")
        asked: dict[str, Any] = next((json.loads(word) for word in argv if word.startswith("{")), {})
        if len({"prompt_lookup_min", "prompt_lookup_max"} & set(asked)) == 1:
            warnings.insert(0, f"effective prompt_lookup_min {low}, prompt_lookup_max {high}: only {high}-grams match")
    return ("accept-with-warning", warnings[0]) if warnings else ("accept", "")


def _config_row(configs: list[dict[str, Any]], requests: list[list[str]], answers: list[dict[str, Any]]) -> Row:
    notes, wrong, undecided, right = [], 0, 0, 0
    for case, argv, answer, again in zip(configs, requests, answers, answers[len(configs) :]):
        verdict, reason = engine_verdict(argv, answer)
        if verdict == "not decidable" and case["expected"].get("stand_in"):
            verdict, reason = engine_verdict(argv, again)
            reason = "with a stand-in for the draft model: " + reason
        if "corrected" in case["expected"]:
            corrected = case["expected"]["corrected"]
            notes.append(f"{case['id']}: the source expects {corrected['was']}, corrected by {corrected['by']}")
        expected = case["expected"]["verdict"]
        if verdict == expected:
            right += 1
        elif verdict == "not decidable":
            undecided += 1
            notes.append(f"{case['id']}: not decidable, the draft model's files are not in the case ({reason[:110]})")
        elif expected == "depends-on-version":
            right += 1
            notes.append(f"{case['id']}: {verdict} by vLLM {answer['version']} ({reason[:110]})")
        else:
            wrong += 1
            notes.append(f"{case['id']}: vLLM {answer['version']} says {verdict}, expected {expected} ({reason[:110]})")
    return Row(
        "engine configs: verdict as expected",
        f"{right} of {len(configs)}, {undecided} not decidable",
        "all decidable",
        not wrong,
        tuple(notes),
    )


def _preflight_row(entries: dict[str, Any], answers: list[dict[str, Any]]) -> Row:
    caught, newer, notes = 0, 0, []
    for (name, entry), answer in zip(entries.items(), answers):
        said = f"accepted by vLLM {answer['version']}" if answer["ok"] else answer["error"]
        if not answer["ok"] and entry["says"] in answer["error"]:
            caught += 1
            notes.append(f"{name}: {said[:110]}")
        elif "since" in entry:
            newer += 1
            notes.append(f"{name}: not this fault any more, {entry['since']} ({said[:80]})")
        else:
            notes.append(f"{name}: NOT caught: {said[:110]}")
    found = f"{caught} of {len(entries)}" + (f", {newer} no such fault any more" if newer else "")
    return Row("our preflight with the engine catches", found, "all", caught + newer == len(entries), tuple(notes))


def _caught_without_engine(entry: dict[str, Any]) -> bool:
    if "smi" in entry:
        return not str(nvidia_smi.judge(nvidia_smi.parse(entry["smi"]))["verdict"]).startswith("accept")
    header = json.dumps({"w": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + bytes(32)
    with tempfile.NamedTemporaryFile(suffix=".safetensors") as stream:
        stream.write(whole[: len(whole) - int(entry["cut"])])
        stream.flush()
        return bool(safetensors.read_header(stream.name).problems)


def speed_row() -> Row:
    """The speed figures, measured in a process of its own."""
    run = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "diagnosis.py"), "--json", "--lines", str(LINES)],
        capture_output=True,
        text=True,
        check=True,
    )
    figures = json.loads(run.stdout)
    in_time = figures["classify_s"] < SECONDS_BAR and figures["live_core_percent"] < CORE_PERCENT_BAR
    # Seconds are the machine's too: over the bar they are shown, and only memory can miss it.
    small = figures["peak_mib"] < MIB_BAR
    good = None if small and not in_time else small
    return Row(
        f"speed: {LINES} lines of 8 ranks",
        f"{figures['classify_s']} s, {figures['peak_mib']} MiB, live {figures['live_core_percent']} % of a core",
        f"{SECONDS_BAR:.0f} s, {MIB_BAR:.0f} MiB, {CORE_PERCENT_BAR:.0f} %",
        good,
    )


def table(rows: list[Row]) -> str:
    """The rows as text, notes below their row."""
    widths = [max(len(text) for text in column) for column in zip(*((row.what, row.found, row.bar) for row in rows))]
    lines = []
    for row in rows:
        mark = {True: "ok", False: "MISSED", None: "-"}[row.ok]
        lines.append(f"{row.what:<{widths[0]}}  {row.found:<{widths[1]}}  {row.bar:<{widths[2]}}  {mark}")
        lines += [f"    {note}" for note in row.notes]
    return "\n".join(lines)


def main() -> int:
    """Print the table; 0 where every bar that was measured is met, 1 where one is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", type=Path, help="virtualenv with the engine to ask about engine configs")
    parser.add_argument("--cases", type=Path, default=CASES, help="folder of case files")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    parser.add_argument(
        "--verbose", action="store_true", help="also print the cause, class and remedy of each fatal log"
    )
    options = parser.parse_args()
    cases, known = load_cases(options.cases), load_signatures()
    extra_file = options.cases / "_preflight.yml"
    extra = yaml.safe_load(extra_file.read_text(encoding="utf-8")) if extra_file.exists() else {}
    rows = [*log_rows(cases, known), *input_rows(cases, known), *engine_rows(cases, extra, options.engine), speed_row()]
    if options.verbose:
        for case in cases:
            if case.get("outcome") == "fatal":
                result = diagnose_case(case, known)
                print(
                    f"{case['id']}: {result['class']}, {result['signature']}: "
                    f"{str(result['root_cause']).strip()[:100]}\n    {result['remedy']}"
                )
    print(json.dumps([row._asdict() for row in rows], ensure_ascii=False) if options.json else table(rows))
    return 0 if all(row.ok is not False for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
