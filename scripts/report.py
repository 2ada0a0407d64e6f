#!/usr/bin/env python3
"""Show a run as one page: the verdict first, then what it rests on and what it cost.

    python scripts/report.py RUN [--history FILE]          RUN/report.html and RUN/report.md
    python scripts/report.py compare RUN RUN... --out DIR  DIR/history.html and DIR/history.md of one host

RUN is a folder as scripts/bench.py and scripts/experiment.py make them. The verdict is computed again from
RUN/raw.jsonl; where RUN/verdict.json says otherwise, the page says so. What was not measured is called that.

Exit codes:

    0  the pages are written
    1  they could not be written
    2  the input or the call was wrong; the message says where, what was found and what was expected
"""

from __future__ import annotations

import argparse
import html
import math
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import charts, report_runs  # noqa: E402
from scripts.json_files import InputError  # noqa: E402
from scripts.report_figures import (  # noqa: E402
    UNKNOWN,
    Figure,
    arm_of,
    concurrency_figure,
    drift_figure,
    figure,
    interval,
    named,
    number,
    plain,
    positions_figure,
    prompts_figure,
    ratio,
    tpot_figure,
    when,
)
from scripts.report_prediction import predicted_of  # noqa: E402
from scripts.report_runs import Folder  # noqa: E402

# -- the page ---------------------------------------------------------------------------------------------------------


VERBS = {
    "undecided": "undecided against",
    "equivalent": "equivalent to",
    "faster": "faster than",
    "slower": "slower than",
}
# Other words: how the line begins, and the kind of gate that made the word.
HEADS = {
    "refused": ("No verdict on", "rig"),
    "output changed": ("Output changed:", "output"),
    "not faster": ("Not to be kept:", "cost"),
}


def short(result: Mapping[str, Any]) -> str:
    """A comparison in a few words: what a phone shows without scrolling."""
    word, speed = result["word"], result["speedup"]
    arms = [named(result[side]["arm"], result[side]["variant"]) for side in ("variant", "base")]
    if word in VERBS:
        return (
            f"{arms[0]} is {VERBS[word]} {arms[1]}: {speed['value']:.2f}x ({speed['low']:.2f} to {speed['high']:.2f})"
        )
    head, kind = HEADS[word]
    names = [gate["name"] for gate in result["gates"] if gate["ok"] is False and gate["kind"] == kind]
    because = ", ".join({"null": "null run"}.get(name, name.replace("_", " ")) for name in names)
    return f"{head} {arms[0]} against {arms[1]}: {because}"


def headline(folder: Folder) -> str:
    """What the run says, in one short line; `more` has the rest."""
    lead = folder.lead
    if lead is None:
        arms = [named(arm, next(r.variant for r in folder.run.requests if r.arm == arm)) for arm in folder.run.arms]
        dead = list(dict.fromkeys(arm_of(load) for load in folder.failed))
        if dead:
            return f"No verdict: {', '.join(dead)} failed"
        return f"No verdict yet: only {', '.join(arms)} was measured"
    if len(folder.results) == 1:
        return short(lead)
    counts: dict[str, int] = {}
    for result in folder.results:
        counts[result["word"]] = counts.get(result["word"], 0) + 1
    told = ", ".join(f"{counts[word]} {word}" for word in report_runs.RANK if word in counts)
    best = f"At concurrency {lead['concurrency']}" if len(folder.levels) > 1 else "Best"
    return f"{len(folder.results)} comparisons: {told}. {best}: {short(lead)}"


def more(folder: Folder) -> list[str]:
    """What stands below the headline: the verdict's own sentence, arms that failed, what is left to do."""
    died = [f"{arm_of(load)} failed: {load.get('cause') or 'no cause recorded'}" for load in folder.failed]
    if folder.lead is not None:
        return [str(folder.lead["sentence"]), *died]
    return died or ["Measure another arm into the same folder."]


def comparison(result: Mapping[str, Any]) -> dict[str, Any]:
    """One comparison for the page."""
    base: dict[str, list[float]] = {row["class"]: [] for row in result["classes"]}
    other: dict[str, list[float]] = {name: [] for name in base}
    for row in result["by_prompt"]:
        base[row["class"]].append(math.log(row["base_ms_per_token"]))
        other[row["class"]].append(math.log(row["variant_ms_per_token"]))

    def mean(values: Sequence[float]) -> str:
        return number(math.exp(sum(values) / len(values)) if values else None, " ms", 2)

    classes = [
        [
            row["class"],
            str(row["prompts"]),
            mean(base[row["class"]]),
            mean(other[row["class"]]),
            interval(row["speedup"]),
            interval(row["totals"]),
        ]
        for row in result["classes"]
    ]
    classes.append(
        [
            "all prompts",
            str(result["prompts"]),
            mean([value for values in base.values() for value in values]),
            mean([value for values in other.values() for value in values]),
            interval(result["speedup"]),
            interval(result["totals"]),
        ]
    )
    gates = {
        ok: [(g["name"].replace("_", " "), g["said"]) for g in result["gates"] if g["ok"] is ok]
        for ok in (False, None, True)
    }
    return {
        "title": f"{named(result['variant']['arm'], result['variant']['variant'])} against "
        f"{named(result['base']['arm'], result['base']['variant'])} at concurrency {result['concurrency']}",
        "word": result["word"],
        "sentence": result["sentence"],
        "speedup": interval(result["speedup"]),
        "classes": classes,
        "failed": gates[False],
        "unknown": gates[None],
        "passed": gates[True],
        "diverged": result["diverged"],
        "prompts": [
            [
                row["prompt_id"],
                row["class"],
                f"{row['base_ms_per_token']:.2f} ms",
                f"{row['variant_ms_per_token']:.2f} ms",
                ratio(row["speedup"]),
            ]
            for row in sorted(result["by_prompt"], key=lambda row: row["speedup"])
        ],
    }


def cost_row(row: Mapping[str, Any]) -> list[str]:
    """One arm at one concurrency: what it took."""
    return [
        named(row["arm"], row["variant"]),
        str(row["concurrency"]),
        number(row["ms_per_token"], " ms", 2),
        number(row["ttft_p95_s"], " ms", 0, 1000),
        number(row["itl_p95_s"], " ms", 1, 1000),
        number(row["e2e_p95_s"], " s", 2),
        f"{row['errors']} of {row['requests']}",
        number(row["tokens_per_step"], "", 2),
        number(row["accepted"], " %", 0, 100),
        number(row["preemptions"], "", 0),
        number(row["kv_cache_tokens"], "", 0),
    ]


def load_row(load: Mapping[str, Any]) -> list[str]:
    """One load for the page."""
    throttled = load.get("throttle_reasons")
    notes = [f"concurrency {plain(load['left_out'])} left out: above max-num-seqs"] if load.get("left_out") else []
    notes += [f"{load['foreign_requests']} requests were not the benchmark's"] if load.get("foreign_requests") else []
    notes += ["power capped"] if load.get("power_capped") else []
    return [
        arm_of(load),
        plain(load.get("boot")),
        str(load.get("outcome") or UNKNOWN) + (f": {load['cause']}" if load.get("cause") else ""),
        " ".join(str(load[key]) for key in ("engine_package", "engine_version") if load.get(key)) or UNKNOWN,
        str(load.get("release") or UNKNOWN)[:12],
        number(load["load_s"], " s", 0) if isinstance(load.get("load_s"), (int, float)) else UNKNOWN,
        when(load.get("started_unix")),
        "none" if throttled == [] else plain(throttled),
        "; ".join(notes) or "none",
    ]


def recompute(folder: Folder) -> str:
    """The command that gives the same verdict again, in the repository, with RUN for the folder."""
    options = folder.options
    words = ["python", "scripts/verdict.py", "RUN/raw.jsonl", "--json"]
    words += ["--seed", str(options["seed"]), "--draws", str(options["draws"])]
    words += ["--boot-sd", repr(options["boot_sd"]), "--boot-loads", str(options["boot_loads"])]
    for key in ("base", "method"):
        words += [f"--{key}", options[key]] if options[key] else []
    if folder.prompts:
        file = folder.prompts.resolve()
        known = [("RUN", folder.path.resolve()), ("", ROOT)]
        place = next((Path(name) / file.relative_to(top) for name, top in known if file.is_relative_to(top)), file)
        words += ["--prompts", str(place)]
    if options["weights"]:
        words += ["--weights", ",".join(f"{name}={value}" for name, value in options["weights"].items())]
    return shlex.join(words)


def provenance(folder: Folder) -> list[tuple[str, str]]:
    """Where the figures come from."""
    about, loads = folder.about, folder.loads
    prompts = about.get("prompts") or {}

    def each(key: str, of: Callable[[Any], str] = plain) -> str:
        found = list(dict.fromkeys(of(load[key]) for load in loads if load.get(key) not in (None, "", [], {})))
        return "; ".join(found) or UNKNOWN

    return [
        ("Run", plain(about.get("id") or folder.path.name)),
        ("Host", plain(about.get("host"))),
        ("Model", plain(about.get("model"))),
        ("Measured", f"{when(about.get('started_unix'))} to {when(about.get('ended_unix'))}"),
        ("Commit", plain(about.get("commit"))),
        ("Prompts", f"{plain(prompts.get('file'))}, {plain(prompts.get('count'))} prompts"),
        ("Prompts, SHA-256", plain(prompts.get("sha256"))),
        ("Raw lines, SHA-256", folder.raw_sha256 or UNKNOWN),
        ("Settings", plain(about.get("settings"))),
        ("Releases", each("release")),
        ("Units", each("unit")),
        ("Speculation", each("speculative_config")),
        ("Driver", each("driver")),
        ("GPUs", each("gpus")),
        ("Clocks", each("clocks")),
        ("Temperatures", each("temperatures")),
        ("NCCL environment", each("nccl_env")),
        ("Host facts", each("host_facts")),
    ]


def tiles_of(lead: Mapping[str, Any] | None) -> list[tuple[str, str, str]]:
    """The figures at the head: (name, value, what it is)."""
    if lead is None or lead["speedup"] is None:
        return []
    speed, boots = lead["speedup"], len({*lead["base"]["boots"], *lead["variant"]["boots"]})
    base, other = (
        math.exp(sum(math.log(row[key]) for row in lead["by_prompt"]) / len(lead["by_prompt"]))
        for key in ("base_ms_per_token", "variant_ms_per_token")
    )
    return [
        ("Speed-up", f"{speed['value']:.2f}x", f"95 % interval {speed['low']:.2f} to {speed['high']:.2f}"),
        ("Time per output token", f"{other:.2f} ms", f"{base:.2f} ms in the base"),
        ("All decode time", ratio(lead["totals"]["value"], 2), "ratio of totals"),
        ("Rests on", f"{lead['prompts']} prompts", f"{boots} load{'s' if boots != 1 else ''}, d = {lead['d']:.1%}"),
    ]


def page_of(folder: Folder) -> dict[str, Any]:
    """Everything that the templates show of a run."""
    lead = folder.lead
    rows = [report_runs.arm_row(folder, arm, level) for level in folder.levels for arm in folder.run.arms]
    rows = [row for row in rows if row["requests"]]
    ordered = sorted(folder.results, key=lambda result: (result is not lead, result["concurrency"]))
    changes: dict[str, list[str]] = {}
    for load in folder.loads:
        told = load.get("changes")
        found = changes.setdefault(arm_of(load), [])
        found += [str(text) for text in told if str(text) not in found] if isinstance(told, list) else []
        if not isinstance(told, list) and not found:
            changes[arm_of(load)] = [UNKNOWN]
    return {
        "headline": headline(folder),
        "more": more(folder),
        "word": lead["word"] if lead and len(folder.results) == 1 else "several" if lead else "refused",
        "name": str(folder.about.get("id") or folder.path.name),
        "kind": str(folder.about.get("kind") or "run"),
        "host": plain(folder.about.get("host")),
        "model": plain(folder.about.get("model")),
        "started": when(folder.about.get("started_unix")),
        "tiles": tiles_of(lead),
        "stale": folder.stale,
        "arms": len(folder.run.arms),
        "comparisons": [comparison(result) for result in ordered],
        "costs": [cost_row(row) for row in rows],
        "figures": [
            tpot_figure(folder, rows),
            *([prompts_figure(lead)] if lead else []),
            positions_figure(folder, rows),
            concurrency_figure(folder),
            drift_figure(folder),
        ],
        "predicted": predicted_of(folder),
        "changes": changes,
        "loads": [load_row(load) for load in folder.loads],
        "provenance": provenance(folder),
        "recompute": recompute(folder),
        "unknown": UNKNOWN,
    }


# -- a host's history -------------------------------------------------------------------------------------------------


def trend_figure(
    title: str,
    caption: str,
    found: Mapping[str, Sequence[charts.Point]],
    axis: charts.Axis,
    runs: int,
    mark: float | None = None,
) -> Figure:
    """Values by run, a series a variant."""
    series = [charts.Series(name, points, tone) for tone, (name, points) in enumerate(found.items())]
    if not series:
        return figure(title, UNKNOWN, None)
    shown = range(1, runs + 1) if runs <= 12 else (1, runs)
    what = "; ".join(f"{one.name}: {', '.join(p.title for p in one.points)}" for one in series)
    across = charts.Axis("runs, oldest first", [(place, str(place)) for place in shown])
    return figure(title, caption, charts.plot(title, what, series, across, axis, mark), charts.legend(series))


def history_of(folders: Sequence[Folder]) -> dict[str, Any]:
    """Everything that the templates show of several runs. Raises InputError unless all are of one host and model."""
    for key in ("host", "model"):
        found = sorted({str(folder.about.get(key)) for folder in folders})
        if len(found) > 1:
            raise InputError(
                f"compare: found runs of the {key}s {', '.join(found)}, expected one; compare those of one"
            )
    folders = sorted(folders, key=lambda folder: folder.started)
    names = [str(folder.about.get("id") or folder.path.name) for folder in folders]
    base: dict[str, list[charts.Point]] = {}
    gains: dict[str, list[charts.Point]] = {}
    rows = []
    for place, folder in enumerate(folders, 1):
        level = folder.levels[0] if folder.levels else None
        row = report_runs.arm_row(folder, folder.base, level) if folder.base and level else None
        if row and row["ms_per_token"] is not None:
            for boot, value in row["by_boot"].items():
                point = charts.Point(place, value, title=f"{names[place - 1]}, boot {boot}: {value:.2f} ms")
                base.setdefault(row["variant"], []).append(point)
        for result in folder.results:
            if result["concurrency"] == level and result["speedup"]:
                speed = result["speedup"]
                point = charts.Point(
                    place, speed["value"], speed["low"], speed["high"], f"{names[place - 1]}: {interval(speed)}"
                )
                gains.setdefault(result["variant"]["variant"], []).append(point)
        head = [str(place), names[place - 1], when(folder.about.get("started_unix"))]
        head.append(number(row["ms_per_token"] if row else None, " ms", 2))
        rows += [
            [
                *head,
                result["variant"]["variant"],
                str(result["concurrency"]),
                result["word"],
                interval(result["speedup"]),
            ]
            for result in folder.results
        ] or [[*head, UNKNOWN, UNKNOWN, "no verdict", UNKNOWN]]
    figures = [
        trend_figure(
            "Base over time",
            "Each mark is one load of the base, at the lowest concurrency.",
            base,
            charts.Axis("ms per output token"),
            len(folders),
        ),
        trend_figure(
            "Speed-ups over time",
            "At the lowest concurrency, with 95 % intervals.",
            gains,
            charts.Axis("speed-up", log=True),
            len(folders),
            1.0,
        ),
    ]
    words: dict[str, int] = {}
    for *_, word, _speed in rows:
        words[word] = words.get(word, 0) + 1
    host, model = plain(folders[0].about.get("host")), plain(folders[0].about.get("model"))
    told = ", ".join(f"{count} {word}" for word, count in words.items())
    return {
        "headline": f"{len(folders)} runs of {model} on {host}: {told}",
        "word": "several",
        "host": host,
        "model": model,
        "stale": [f"{name}: {text}" for name, folder in zip(names, folders, strict=True) for text in folder.stale],
        "rows": rows,
        "sentences": [(name, headline(folder)) for name, folder in zip(names, folders, strict=True)],
        "figures": figures,
        "unknown": UNKNOWN,
    }


# -- output -----------------------------------------------------------------------------------------------------------


def for_markdown(value: object) -> str:
    """A text that stays one text in Markdown: on one line, in one cell, without markup of its own."""
    if isinstance(value, Markup):
        return str(value)
    text = html.escape(" ".join(str(value).split()), quote=False)
    return re.sub(r"([\\`*_\[\]|#])", r"\\\1", text)


def write(folder: Path, name: str, page: Mapping[str, Any]) -> list[Path]:
    """NAME.html and NAME.md of a page."""
    loader = FileSystemLoader(ROOT / "scripts" / "templates")
    layout: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    pages = Environment(loader=loader, autoescape=True, **layout)
    texts = Environment(loader=loader, autoescape=False, finalize=for_markdown, trim_blocks=True, lstrip_blocks=True)
    written = []
    for environment, ending in ((pages, "html"), (texts, "md")):
        path = folder / f"{name}.{ending}"
        path.write_text(environment.get_template(f"{name}.{ending}.j2").render(page), encoding="utf-8")
        written.append(path)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    compare = given[:1] == ["compare"]
    if compare:
        parser.add_argument("compare", help=argparse.SUPPRESS)
        parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders of one host")
        parser.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where the pages go; default here")
    else:
        parser.add_argument("run", type=Path, metavar="RUN", help="a run folder")
        parser.add_argument(
            "--history", type=Path, metavar="FILE", help="the base's earlier loads; see verdict.py --help"
        )
    options = parser.parse_args(given)
    try:
        if compare:
            page = history_of([report_runs.read_folder(path) for path in options.runs])
            written = write(options.out, "history", page)
        else:
            page = page_of(report_runs.read_folder(options.run, options.history))
            written = write(options.run, "report", page)
    except InputError as error:
        print(f"report: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"report: {error.filename}: cannot be written: {error.strerror}", file=sys.stderr)
        return 1
    print(page["headline"])
    print(*written, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
