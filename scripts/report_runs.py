"""A run folder, read and judged again: what scripts/report.py shows."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scripts.json_files import InputError
from scripts.run_folder import history_file, read_object
from scripts.verdict import lines_of, verdicts
from scripts.verdict_arms import SEED, Arm, Settings
from scripts.verdict_gates import p95
from scripts.verdict_history import BaseLoad, base_loads, read_history, spread_of
from scripts.verdict_intervals import DRAWS, BootSpread, known_mean, student
from scripts.verdict_runs import Run, json_lines, read_prompts, read_run

ROOT = Path(__file__).resolve().parent.parent
MOST_POSITIONS = 64  # drafted tokens a step
MOST_DRAWS = 1_000_000
RANK = ("faster", "equivalent", "undecided", "not faster", "output changed", "slower", "refused")


@dataclass
class Speculation:
    """What one arm's speculation did at one concurrency, summed over its requests; by position from the first on."""

    steps: int = 0
    generated: int = 0
    drafting_steps: int = 0
    accepted: list[int] = field(default_factory=list)

    def add(self, line: Mapping[str, Any]) -> None:
        """Count the steps of one raw line, as far as it states them."""
        if isinstance(line.get("steps"), int) and line["steps"] > 0:
            self.steps += line["steps"]
            self.generated += max(int(line.get("output_tokens") or 0) - 1, 0)
        drafted, accepted = line.get("drafted"), line.get("accepted")
        if not (isinstance(drafted, list) and isinstance(accepted, list)):
            return
        self.drafting_steps += sum(isinstance(count, int) and count > 0 for count in drafted)
        for count in accepted:
            for position in range(min(count, MOST_POSITIONS) if isinstance(count, int) else 0):
                if position == len(self.accepted):
                    self.accepted.append(0)
                self.accepted[position] += 1


@dataclass
class Folder:
    """One run folder. `results` are judged from raw.jsonl; `stale` says where verdict.json differs from that."""

    path: Path
    about: dict[str, Any]
    run: Run
    raw_sha256: str | None
    options: dict[str, Any]
    prompts: Path | None
    results: list[dict[str, Any]]
    speculation: dict[tuple[str, int], Speculation]
    settings_of: dict[str, str]
    stale: list[str]
    history: list[BaseLoad]
    prediction: dict[str, Any] | None
    checked: dict[str, Any] | None  # what `predict.py check` found

    @property
    def loads(self) -> list[dict[str, Any]]:
        """Loads as run.json has them."""
        loads: list[dict[str, Any]] = self.about.get("loads") or []
        return loads

    @property
    def started(self) -> float:
        """When it began, in Unix seconds; 0 where nothing says so."""
        value = self.about.get("started_unix")
        return float(value) if isinstance(value, (int, float)) else 0.0

    @property
    def failed(self) -> list[dict[str, Any]]:
        """Loads that did not come up, or died."""
        return [load for load in self.loads if load.get("outcome") == "failed"]

    @property
    def levels(self) -> list[int]:
        """Concurrencies that were measured."""
        return sorted({request.concurrency for request in self.run.requests})

    @property
    def base(self) -> str | None:
        """The arm that others are compared with."""
        return self.results[0]["base"]["arm"] if self.results else next(iter(self.run.arms), None)

    @property
    def lead(self) -> dict[str, Any] | None:
        """The comparison that heads the page: at the lowest concurrency the best word, then the highest lower bound."""
        if not self.results:
            return None
        least = min(result["concurrency"] for result in self.results)
        return min(
            (result for result in self.results if result["concurrency"] == least),
            key=lambda r: (RANK.index(r["word"]), -((r["speedup"] or {}).get("low") or 0)),
        )


def object_if_there(path: Path) -> dict[str, Any] | None:
    """The JSON object of a file, None without the file. Raises InputError."""
    return read_object(path, "one JSON object", "restore or remove it") if path.is_file() else None


def read_about(path: Path) -> dict[str, Any]:
    """run.json of a folder, its lists and objects checked. Raises InputError."""
    about = object_if_there(path / "run.json")
    if about is None:
        raise InputError(
            f"{path}: found no run.json, expected a run folder as scripts/bench.py or scripts/experiment.py make it"
        )
    loads = about.setdefault("loads", [])
    if not isinstance(loads, list) or not all(isinstance(load, dict) for load in loads):
        raise InputError(f"{path / 'run.json'}: loads: found no list of objects, expected one object a load")
    for key in ("prompts", "settings"):
        if not isinstance(about.get(key) or {}, dict):
            raise InputError(f"{path / 'run.json'}: {key}: found {type(about[key]).__name__}, expected an object")
    return about


def prompts_file(path: Path, about: Mapping[str, Any], named: object = None) -> Path | None:
    """The prompt set that was used, where it is at hand: by its checksum in run.json, if that has one.

    Raises InputError where the folder's own is another one."""
    prompts = about.get("prompts") or {}
    wanted, own = prompts.get("sha256"), path / "prompts.jsonl"
    names = [own, *(ROOT / str(name) for name in (named, prompts.get("file")) if name)]
    for file in names:
        if file.is_file():
            found = hashlib.sha256(file.read_bytes()).hexdigest()
            if wanted in (None, found):
                return file
            if file == own:
                raise InputError(
                    f"{file}: found SHA-256 {found[:12]}, expected {wanted[:12]} as in run.json; restore or remove it"
                )
    return None


def _figures(results: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], tuple[Any, ...]]:
    return {
        (result["variant"]["arm"], result["concurrency"]): (
            result["word"],
            *(round((result["speedup"] or {}).get(key) or math.nan, 6) for key in ("low", "value", "high")),
        )
        for result in results
    }


def stale_against(results: Sequence[Mapping[str, Any]], stored: Mapping[str, Any] | None) -> list[str]:
    """How a stored verdict.json differs from what the raw lines give now; empty where it does not."""
    if stored is None:
        return []
    try:
        then, now = _figures(stored["verdicts"]), _figures(results)
    except (KeyError, TypeError):
        return ["verdict.json does not have the shape of scripts/verdict.py --json"]
    found = []
    for arm, level in sorted({*then, *now}):
        told = [
            "nothing" if row is None else f"{row[0]}, {row[2]:.3f}x ({row[1]:.3f} to {row[3]:.3f})"
            for row in (then.get((arm, level)), now.get((arm, level)))
        ]
        if told[0] != told[1]:
            found.append(f"arm {arm} at concurrency {level}: verdict.json says {told[0]}; raw.jsonl gives {told[1]}")
    return found


def _settings(path: Path, stored: Mapping[str, Any], history: list[BaseLoad]) -> tuple[dict[str, Any], BootSpread]:
    """The options of the verdict: those that verdict.json was made with, else the defaults."""
    given = stored.get("settings") or {}
    known = spread_of(history) if history else BootSpread()
    options = {"seed": stored.get("seed", SEED), "draws": stored.get("draws", DRAWS), "base": given.get("base")}
    options.update({key: given.get(key) for key in ("method", "weights", "prompts")})
    sd, loads = given.get("boot_sd"), given.get("boot_loads")
    fine = (
        all(type(options[key]) is int and options[key] >= 0 for key in ("seed", "draws"))
        and 100 <= options["draws"] <= MOST_DRAWS
        and all(
            options[key] is None or (isinstance(options[key], str) and options[key].isprintable())
            for key in ("base", "method", "prompts")
        )
        and (options["weights"] is None or isinstance(options["weights"], dict))
        and (sd is None or (isinstance(sd, (int, float)) and sd >= 0 and type(loads) is int and loads >= 2))
    )
    if not fine:
        raise InputError(
            f"{path / 'verdict.json'}: settings: found {given}, expected those of scripts/verdict.py --json; "
            "run it again"
        )
    if sd is not None and loads is not None:
        known = BootSpread(float(sd), loads - 1)
    options.update(boot_sd=known.sd, boot_loads=known.df + 1)
    return options, known


def earlier_loads(path: Path, about: Mapping[str, Any], given: Path | None) -> list[BaseLoad]:
    """The baseline's loads before this run: of the file given, else RUN/history.jsonl, else the one beside the runs."""
    named = about.get("host") and about.get("model")
    places = [path / "history.jsonl", *([history_file(path, dict(about))] if named else [])]
    file = given or next((place for place in places if place.is_file()), None)
    if file is None:
        return []
    loads = read_history(lines_of(str(file)), file.name, str(about.get("id") or path.name))
    began = about.get("started_unix")
    late = began if isinstance(began, (int, float)) else math.inf
    return [load for load in loads if (load.started_unix or 0) < late]


def read_folder(path: Path, given: Path | None = None) -> Folder:
    """Read and judge a run folder. `given`: a file with the baseline's earlier loads. Raises InputError."""
    about = read_about(path)
    raw = path / "raw.jsonl"
    lines = lines_of(str(raw)) if raw.is_file() else []
    run = read_run(lines, "raw.jsonl", 0)
    if not run.requests and not any(load.get("outcome") == "failed" for load in about["loads"]):
        raise InputError(f"{raw}: found no request, expected raw lines as scripts/bench.py writes them; measure again")
    speculation: dict[tuple[str, int], Speculation] = {}
    settings_of: dict[str, str] = {}
    for _, line in json_lines(lines, "raw.jsonl"):
        if "facts" not in line:
            key = (line["arm"], line.get("concurrency", 1))
            speculation.setdefault(key, Speculation()).add(line)
            if isinstance(line.get("setting"), str):
                settings_of.setdefault(line["arm"], line["setting"])
    history = earlier_loads(path, about, given)
    stored = object_if_there(path / "verdict.json")
    options, known = _settings(path, stored or {}, history)
    base = options["base"] or ("A" if any(load.get("arm") == "A" for load in about["loads"]) else None)
    results: list[dict[str, Any]] = []
    prompts = prompts_file(path, about, options["prompts"])
    if len(run.arms) > 1 and base in (None, *run.arms):
        chosen = Settings(
            seed=options["seed"],
            draws=options["draws"],
            known=known,
            method=options["method"],
            weights=options["weights"],
            texts={p.id: p.text for p in read_prompts(lines_of(str(prompts)), prompts.name)} if prompts else None,
        )
        results = verdicts(run, base, chosen)
    return Folder(
        path=path,
        about=about,
        run=run,
        raw_sha256=hashlib.sha256(raw.read_bytes()).hexdigest() if lines else None,
        options=options,
        prompts=prompts,
        results=results,
        speculation=speculation,
        settings_of=settings_of,
        stale=stale_against(results, stored),
        history=history,
        prediction=object_if_there(path / "prediction.json"),
        checked=object_if_there(path / "prediction-check.json"),
    )


# -- figures ----------------------------------------------------------------------------------------------------------


def _rates(values: object) -> list[float] | None:
    """A list of shares, or None for anything else."""
    fine = isinstance(values, list) and all(isinstance(value, (int, float)) and 0 <= value <= 1 for value in values)
    return values[:MOST_POSITIONS] if fine and isinstance(values, list) else None


def arm_row(folder: Folder, name: str, level: int) -> dict[str, Any]:
    """What one arm measured at one concurrency; None where it is not known.

    {"arm", "variant", "concurrency", "ms_per_token": geometric mean over prompts, "low", "high": its 95 % interval from
     prompts and loads, "by_boot": {boot: ms}, "ttft_p95_s", "e2e_p95_s", "itl_p95_s": median over requests,
     "requests", "errors", "tokens_per_step", "accepted": share of the drafted tokens, "by_position": share of drafting
     steps whose draft was accepted up to there, "preemptions", "kv_cache_tokens"}
    """
    prompts = list(dict.fromkeys(r.prompt for r in folder.run.requests if r.concurrency == level))
    arm = Arm(folder.run, name, level, prompts)
    means = known_mean(np.stack([boot.mean for boot in arm.boots], 1)) if arm.boots else np.full(len(prompts), np.nan)
    means = means[~np.isnan(means)]
    count, value = len(means), float(means.mean()) if len(means) else math.nan
    spread = BootSpread(folder.options["boot_sd"], folder.options["boot_loads"] - 1)
    half = math.nan
    if count > 1:
        of_prompts = student(count - 1) * float(means.std(ddof=1)) / math.sqrt(count)
        half = math.hypot(of_prompts, student(spread.df) * spread.sd / math.sqrt(len(arm.boots)))

    def tail(key: str) -> float | None:
        values = arm.values(prompts, key).ravel()
        return float(p95(values)) if (~np.isnan(values)).any() else None

    itl = arm.values(prompts, "itl_p95_s")
    told = folder.speculation.get((name, level), Speculation())
    drafted, accepted = arm.total("drafted"), arm.total("accepted")
    stated = [rates for facts in arm.facts.values() if (rates := _rates(facts.get("by_position")))]
    steps = [
        float(facts["tokens_per_step"])
        for facts in arm.facts.values()
        if isinstance(facts.get("tokens_per_step"), (int, float))
    ]
    sizes = [facts["kv_cache_tokens"] for facts in arm.facts.values() if facts.get("kv_cache_tokens")]
    return {
        "arm": name,
        "variant": arm.variant,
        "concurrency": level,
        "ms_per_token": 1000 * math.exp(value) if count else None,
        "low": None if math.isnan(half) else 1000 * math.exp(value - half),
        "high": None if math.isnan(half) else 1000 * math.exp(value + half),
        "by_boot": {
            boot.number: 1000 * math.exp(float(np.nanmean(boot.mean)))
            for boot in arm.boots
            if not np.isnan(boot.mean).all()
        },
        "ttft_p95_s": tail("ttft_s"),
        "e2e_p95_s": tail("e2e_s"),
        "itl_p95_s": float(np.nanmedian(itl)) if (~np.isnan(itl)).any() else None,
        "requests": len(arm.requests),
        "errors": sum(request.error is not None for request in arm.requests),
        "tokens_per_step": told.generated / told.steps if told.steps else next(iter(steps), None),
        "accepted": accepted / drafted if drafted and accepted is not None else None,
        "by_position": [count / told.drafting_steps for count in told.accepted]
        if told.drafting_steps
        else next(iter(stated), None),
        "preemptions": arm.total("preemptions"),
        "kv_cache_tokens": sum(sizes) / len(sizes) if sizes else None,
    }


def setting_of(folder: Folder, arm: str) -> tuple[int, int, int] | None:
    """(k, min, max) of the n-gram speculation of an arm, None where nothing says so."""
    for load in folder.loads:
        config = load.get("speculative_config")
        if load.get("arm") == arm and isinstance(config, dict) and arm not in folder.settings_of:
            least, most = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
            k, least, most = config.get("num_speculative_tokens"), least or most, most or least
            if type(k) is int and type(least) is int and type(most) is int:
                return k, least, most
    variant = next((request.variant for request in folder.run.requests if request.arm == arm), "")
    found = re.search(r"k\W?(\d+)\D+min\W?(\d+)\D+max\W?(\d+)", folder.settings_of.get(arm, variant))
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def drift(folder: Folder) -> list[BaseLoad]:
    """Loads of the baseline, earlier ones that are like this run's and its own, by time."""
    own = base_loads(folder.about, [result for result in folder.results if result["concurrency"] == folder.levels[0]])
    now = read_history([json.dumps({**line, "run": line["run"] or folder.path.name}).encode() for line in own], "now")
    alike = {load.same for load in now}
    earlier = [load for load in folder.history if load.same in alike]
    return sorted([*earlier, *now], key=lambda load: (load.started_unix or 0, load.boot))
