#!/usr/bin/env python3
"""How fast is the acceptance replay: 1,000,000 recorded tokens under 60 settings, beside the engine's own proposer.

    python benchmarks/replay.py --engine ENGINE_PYTHON [--tokenizer FOLDER] --out benchmarks/results/replay-NAME.json

The texts are the sources of the running Python's library, cut into pieces by a model's tokenizer (read by the engine's
Python) or, without --tokenizer, by a pattern. An answer is made from them by class: `edit` repeats its prompt with
small changes, `quote` alternates passages of the prompt with new text, `write` is new text. The engine's loop is what
a replay without this program would be: its proposer is asked once per decode step of every request, setting by
setting. Both sides replay the same requests, take turns in one run, and must find the same steps.

Prints a summary and writes all figures. Exit codes: 0 done, 1 the two sides differ, 2 the call was wrong.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = Path(__file__).resolve().parent.parent
SEED = 20
# 60 settings: each pair min <= max of 1..4, with six draft lengths.
GRID = "; ".join(
    f"k={k} min={low} max={high}"
    for low, high in itertools.combinations_with_replacement(range(1, 5), 2)
    for k in (1, 2, 3, 4, 5, 8)
)
CLASSES = ("edit", "quote", "write")
ROUNDS = 3

Ids = npt.NDArray[np.int32]


def library_text(characters: int) -> str:
    """Sources of the running Python's library, shortest names first, up to so many characters."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: (len(path.name), path.name))
    text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)
    return text[:characters]


def pattern_ids(text: str) -> Ids:
    """Token ids of a text cut into up to four letters of a word, spaces, or one other sign: near a real tokenizer's."""
    numbers: dict[str, int] = {}
    pieces = re.findall(r"\w{1,4}|\s+|[^\w\s]", text)
    return np.array([numbers.setdefault(piece, len(numbers)) for piece in pieces], np.int32)


def requests(ids: Ids, outputs: int, seed: int) -> Iterator[dict[str, Any]]:
    """Lines of a replay file with `outputs` output tokens in all; prompts have 200..3000 tokens, answers 200..2500."""
    chance = random.Random(seed)
    left = outputs
    for number in itertools.count():
        if left <= 0:
            return
        cls = CLASSES[number % len(CLASSES)]
        prompt = passage(ids, chance, chance.randint(200, 3000))
        size = min(left, chance.randint(200, 2500))
        answer = {"edit": edited, "quote": quoted, "write": written}[cls](ids, prompt, size, chance)[:size]
        left -= size
        yield {"id": f"{cls}-{number}", "class": cls, "prompt_token_ids": prompt, "output_token_ids": answer}


def passage(ids: Ids, chance: random.Random, length: int) -> list[int]:
    """So many adjacent tokens from anywhere in the texts."""
    start = chance.randrange(len(ids) - length)
    found: list[int] = ids[start : start + length].tolist()
    return found


def edited(ids: Ids, prompt: list[int], size: int, chance: random.Random) -> list[int]:
    """The prompt again and again, with a change every 30 tokens or so."""
    answer: list[int] = []
    while len(answer) < size:
        at = 0
        while at < len(prompt):
            length = 1 + int(chance.expovariate(1 / 30))
            answer += prompt[at : at + length] + passage(ids, chance, chance.randint(0, 3))
            at += length + chance.randint(0, 2)
    return answer


def quoted(ids: Ids, prompt: list[int], size: int, chance: random.Random) -> list[int]:
    """Passages of the prompt between passages of new text."""
    answer: list[int] = []
    while len(answer) < size:
        start = chance.randrange(len(prompt))
        answer += passage(ids, chance, chance.randint(10, 60)) + prompt[start : start + chance.randint(5, 30)]
    return answer


def written(ids: Ids, _prompt: list[int], size: int, chance: random.Random) -> list[int]:
    """New text: what repeats in it repeats by itself."""
    return passage(ids, chance, size)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Wall seconds of a piece of work, and its result."""
    start = time.perf_counter()
    found = work()
    return time.perf_counter() - start, found


# Ours.


def measure(options: argparse.Namespace) -> int:
    """The whole benchmark."""
    sys.path.insert(0, str(ROOT))
    from scripts import replay  # here, for the engine's Python runs this file too and has no need of it

    with tempfile.TemporaryDirectory() as folder:
        text = library_text(4_000_000)
        ids = engine_ids(options, text) if options.tokenizer else pattern_ids(text)
        file = Path(folder) / "transcripts.jsonl"
        with file.open("w") as stream:
            for line in requests(ids, options.tokens, SEED):
                stream.write(json.dumps(line) + "\n")
        settings = replay.parse_grid(GRID)
        result: dict[str, Any] = {
            "what": "acceptance replay, speed",
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": {"cpus": len(os.sched_getaffinity(0)), "cpu": cpu_name(), "python": platform.python_version()},
            "tokenizer": Path(options.tokenizer).name if options.tokenizer else "pattern",
            "settings": len(settings),
            "seed": SEED,
            "load_average_before": os.getloadavg(),
        }
        cold = {"NUMBA_CACHE_DIR": str(Path(folder) / "cache")}
        result["command_cold_s"] = timed(lambda: command(file, options.semantics, cold))[0]
        result["command_s"] = [timed(lambda: command(file, options.semantics, cold))[0] for _ in range(ROUNDS)]
        with file.open("rb") as recorded:
            load_s, transcripts = timed(lambda: replay.read_transcripts(recorded, file.name))
        rule = replay.Rule(options.semantics)
        result.update(
            {
                "semantics": options.semantics,
                "requests": len(transcripts),
                "read_s": load_s,
                "output_tokens": sum(one.outputs for one in transcripts),
                "prompt_tokens": sum(one.prompt for one in transcripts),
            }
        )
        summary = replay.Summary(settings)
        for transcript in transcripts:  # compiles, too
            summary.add(replay.replay(transcript, settings, rule))
        result["steps"] = sum(row["steps"] for row in summary.rows() if row["class"] is None)

        def replayed() -> None:
            for transcript in transcripts:
                replay.replay(transcript, settings, rule)

        result["replay_s"] = [timed(replayed)[0] for _ in range(ROUNDS)]
        result["tokens_per_step_range"] = {
            cls or "all": [min(values), max(values)]
            for cls in (None, *CLASSES)
            if (values := [row["tokens_per_step"] for row in summary.rows() if row["class"] == cls])
        }
        same = True
        if options.engine and options.semantics == "v1":
            result["against_engine"], same = side_by_side(options, transcripts, settings, rule)
        result["load_average_after"] = os.getloadavg()
    Path(options.out).write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "machine"}, indent=1))
    return 0 if same else 1


def command(file: Path, semantics: str, more: dict[str, str]) -> None:
    """The command line, reading the file and printing every row; what it prints is thrown away."""
    subprocess.run(
        [
            sys.executable,
            str(ROOT / "scripts/predict.py"),
            "replay",
            str(file),
            "--grid",
            GRID,
            "--json",
            "--semantics",
            semantics,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
        env={**os.environ, **more},
    )


def cpu_name() -> str:
    """The processor's name, as the kernel prints it."""
    found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    return found[1] if found else platform.processor()


def side_by_side(
    options: argparse.Namespace, transcripts: list[Any], settings: Any, rule: Any
) -> tuple[dict[str, Any], bool]:
    """Ours and the engine's loop, in turns, over the first requests; whether both found the same."""
    from scripts import replay

    subset = transcripts[: options.subset]
    work = {
        "settings": [[setting.k, setting.min, setting.max] for setting in settings],
        "requests": [[one.prompt, one.tokens.tolist()] for one in subset],
    }
    ours, theirs = [], []
    with subprocess.Popen(
        [options.engine, __file__, "--as-engine"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as engine:
        if engine.stdin is None or engine.stdout is None:
            raise RuntimeError("the engine's process has no pipes")
        engine.stdin.write(json.dumps(work) + "\n")
        for _ in range(ROUNDS):
            seconds, found = timed(lambda: [replay.replay(one, settings, rule) for one in subset])
            ours.append(seconds)
            engine.stdin.write("again\n")
            engine.stdin.flush()
            theirs.append(answer_of(engine.stdout))
        engine.stdin.close()
    rows = [[row["drafted"], row["accepted"]] for replayed in found for row in replayed.rows()]
    mine = statistics.median(ours)
    result = {
        "requests": len(subset),
        "output_tokens": sum(one.outputs for one in subset),
        "prompt_tokens": sum(one.prompt for one in subset),
        "settings": len(settings),
        "rounds": ROUNDS,
        "steps": sum(len(row[0]) for row in rows),
        "version": theirs[0]["version"],
        "replay_s": ours,
        "engine_class_s": [one["class_s"] for one in theirs],
        "engine_kernel_s": [one["kernel_s"] for one in theirs],
        "times_faster_than_class": statistics.median(one["class_s"] for one in theirs) / mine,
        "times_faster_than_kernel": statistics.median(one["kernel_s"] for one in theirs) / mine,
        "same_steps": all(one["rows"] == rows for one in theirs),
    }
    return result, bool(result["same_steps"])


def answer_of(lines: Iterable[str]) -> dict[str, Any]:
    """The next answer of the engine's process; the engine prints other lines too."""
    for line in lines:
        if line.startswith('{"version"'):
            found: dict[str, Any] = json.loads(line)
            return found
    raise RuntimeError("the engine's process ended without an answer; its own words are above")


def engine_ids(options: argparse.Namespace, text: str) -> Ids:
    """Token ids by the tokenizer of a model's folder, through the engine's Python."""
    code = (
        "import sys, json, tokenizers; t = tokenizers.Tokenizer.from_file(sys.argv[1] + '/tokenizer.json');"
        "print(json.dumps([i for part in json.load(sys.stdin) for i in t.encode(part).ids]))"
    )
    parts = [text[at : at + 20_000] for at in range(0, len(text), 20_000)]
    done = subprocess.run(
        [options.engine, "-c", code, options.tokenizer],
        input=json.dumps(parts),
        text=True,
        stdout=subprocess.PIPE,
        check=True,
    )
    return np.array(json.loads(done.stdout), np.int32)


# The engine's side: run by its Python, one answer for each line after the first.


def as_engine() -> None:
    """Replay the requests of the first line through the engine's class, and through its compiled function alone."""
    from types import SimpleNamespace

    import vllm
    from vllm.v1.spec_decode import ngram_proposer

    work = json.loads(sys.stdin.readline())
    texts = [(prompt, np.array(tokens, np.int32)) for prompt, tokens in work["requests"]]
    longest = max(len(tokens) for _, tokens in texts)

    def by_class(k: int, low: int, high: int) -> Callable[[Ids, Ids, int], Any]:
        proposer = ngram_proposer.NgramProposer(
            SimpleNamespace(
                speculative_config=SimpleNamespace(
                    prompt_lookup_min=low, prompt_lookup_max=high, num_speculative_tokens=k
                ),
                model_config=SimpleNamespace(max_model_len=longest + 64),
                scheduler_config=SimpleNamespace(max_num_seqs=1024),
                parallel_config=SimpleNamespace(tensor_parallel_size=1),
            )
        )
        known = np.zeros(1, np.int32)

        def draft(tokens: Ids, batch: Ids, t: int) -> Any:
            known[0] = t
            return proposer.propose(k, [[int(tokens[t - 1])]], known, batch)[0]

        return draft

    def by_kernel(k: int, low: int, high: int) -> Callable[[Ids, Ids, int], Any]:
        find = ngram_proposer._find_longest_matched_ngram_and_propose_tokens
        return lambda tokens, _batch, t: find(tokens[:t], low, high, longest + 64, k)

    def walk(sides: list[Callable[[Ids, Ids, int], Any]]) -> list[list[list[int]]]:
        return [steps_of(prompt, tokens, draft) for prompt, tokens in texts for draft in sides]

    classes = [by_class(*setting) for setting in work["settings"]]
    kernels = [by_kernel(*setting) for setting in work["settings"]]
    walk(classes[:1] + kernels[:1])  # compiles
    for _ in sys.stdin:
        class_s, rows = timed(lambda: walk(classes))
        kernel_s, again = timed(lambda: walk(kernels))
        if again != rows:
            raise RuntimeError("the engine's class and its function differ")
        found = {"version": vllm.__version__, "class_s": class_s, "kernel_s": kernel_s, "rows": rows}
        print(json.dumps(found), flush=True)


def steps_of(prompt: int, tokens: Ids, draft: Callable[[Ids, Ids, int], Any]) -> list[list[int]]:
    """[drafted, accepted] per step of one request, by asking for a draft at every step."""
    batch = tokens[None, :]
    text = tokens.tolist()
    drafted, accepted = [], []
    t = prompt + 1
    while t < len(text):
        said = draft(tokens, batch, t)
        hits = 0
        while hits < len(said) and t + hits < len(text) and said[hits] == text[t + hits]:
            hits += 1
        drafted.append(len(said))
        accepted.append(hits)
        t += hits + 1
    return [drafted, accepted]


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", help="Python of an engine's virtual environment; without it nothing is compared")
    parser.add_argument("--tokenizer", help="a model's folder with tokenizer.json (needs --engine)")
    parser.add_argument("--semantics", choices=("v1", "v2"), default="v1")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="output tokens; the prompts come on top")
    parser.add_argument("--subset", type=int, default=24, help="requests that the engine's loop replays too")
    parser.add_argument("--out", help="file for the figures, JSON")
    parser.add_argument("--as-engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_engine:
        as_engine()
        return 0
    if not options.out or (options.tokenizer and not options.engine):
        parser.error("give --out FILE, and --engine where --tokenizer is given")
    return measure(options)


if __name__ == "__main__":
    raise SystemExit(main())
