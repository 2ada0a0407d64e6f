#!/usr/bin/env python3
"""How good is the prediction: measured against a real engine whose setting changes between requests.

    python benchmarks/prediction.py measure --engine VENV/bin/python --model DIR --out DIR [--lock FILE]
    python benchmarks/prediction.py evaluate DIR

`measure` serves the model twice. On the plain server it records the answers of some prompts and probes what a step
costs (plugins/host_program/probes.py). On a server with n-gram speculation it asks every prompt again under each
setting and with drafting off, in an order drawn anew for each prompt and repeat, so that a machine that drifts slows
all of them alike. `evaluate` predicts from the first server's files alone and compares. Every figure stays in DIR.

Exit codes: 0 done, 1 the engine failed or a bound was missed, 2 the call was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import http.client
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "collections")]

import numpy as np  # noqa: E402
from ansible_collections.swapgate.core.plugins.host_program import engine_api, probes  # noqa: E402
from ansible_collections.swapgate.core.plugins.module_utils import processes  # noqa: E402

from scripts import prediction, replay, step_cost  # noqa: E402

JsonDict = dict[str, Any]
SETTINGS = {
    "off": {"k": 0, "min": 4, "max": 4},
    "5,4,4": {"k": 5, "min": 4, "max": 4},
    "2,4,4": {"k": 2, "min": 4, "max": 4},
    "3,3,3": {"k": 3, "min": 3, "max": 3},
    "5,1,4": {"k": 5, "min": 1, "max": 4},
}
SPECULATION = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 4, "prompt_lookup_max": 4}
EXTENSION = ["--worker-extension-cls", "swapgate_trial.TrialWorker"]
BATCH = [2, 3, 4, 6]
NAME = "measured"
START_LIMIT_S = 900.0
LATE = 0.02
HOLD_S = 780.0  # of a turn, before others get theirs


class StartFailed(Exception):
    """An engine did not come up; the text says which, and where its log is."""


class Server:
    """One engine of our own, ended by its pid."""

    def __init__(self, python: str, model: str, port: int, log: Path, extra: list[str], cpu: bool) -> None:
        self.cpu, self.port, self.log = cpu, port, log
        words = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--served-model-name", NAME]
        words += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048", *extra]
        env = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
        path = [str(ROOT / "plugins/engine_extension"), os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        if cpu:
            env["VLLM_CPU_KVCACHE_SPACE"] = "1"
        self.words, self.began, self.start_s = words, time.monotonic(), 0.0
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                words, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True
            )

    def wait(self, limit_s: float = START_LIMIT_S) -> Server:
        """Return once it answers; raises StartFailed when it does not within the time, or ended."""
        while True:
            with contextlib.suppress(engine_api.EngineError):
                engine_api.complete("127.0.0.1", self.port, NAME, max_tokens=4)
                break
            spent = time.monotonic() - self.began
            if self.process.poll() is not None or spent > limit_s:
                self.stop()
                raise StartFailed(f"{' '.join(self.words)}: no server after {spent:.0f} s; see {self.log}")
            time.sleep(1)
        self.start_s = time.monotonic() - self.began
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        return self

    def members(self) -> list[int]:
        """The processes whose CPU time counts: all but the one that answers HTTP. On a GPU, none."""
        return processes.descendants(self.process.pid) if self.cpu else []

    def probe_engine(self) -> probes.Engine:
        """The engine as a probe sees it."""
        return probes.Engine("127.0.0.1", self.port, NAME, None, self.members)

    def post(self, path: str, body: JsonDict) -> JsonDict:
        """A JSON answer."""
        answer: JsonDict = json.loads(engine_api.request("127.0.0.1", self.port, "POST", path, body, limit_s=60))
        return answer

    def choose(self, setting: JsonDict) -> None:
        """Put a setting in force; wrong unless every worker says so."""
        values = {key: str(value) for key, value in setting.items()}
        found = self.post("/collective_rpc", {"method": "swapgate_set", "kwargs": values})["results"]
        if any(one != setting for one in found):
            raise SystemExit(f"swapgate_set: found {found}, expected {setting} of every worker")

    def ask(self, ids: list[int], max_tokens: int, ignore_eos: bool = False) -> JsonDict:
        """One greedy answer: token ids, wall and CPU seconds from its first token to its last, arrays per step."""
        body = {
            "model": NAME,
            "prompt": ids,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "ignore_eos": ignore_eos,
        }
        engine = self.probe_engine()
        counters = engine.counters()
        output: list[int] = []
        found: JsonDict = {"drafted": None, "accepted": None, "finish_reason": None}
        first: tuple[float, dict[tuple[int, int], float], float] | None = None
        last = first
        self.connection.close()  # the server closes it anyway when it was idle for some seconds
        self.connection.connect()
        began = time.monotonic()
        self.connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = self.connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise SystemExit(f"/v1/completions: status {answer.status}: {answer.read()!r:.300}")
        for raw in answer:
            if not raw.startswith(b"data: {"):
                continue
            at = time.monotonic()
            line = json.loads(raw[6:])
            for choice in line.get("choices") or []:
                ids_now = choice.get("token_ids") or []
                found["finish_reason"] = choice.get("finish_reason") or found["finish_reason"]
                if ids_now:
                    output += ids_now
                    if first is None:
                        first = (at, engine.cpu(), time.monotonic())
                    elif choice.get("finish_reason") or len(output) >= max_tokens:
                        last = (at, engine.cpu(), time.monotonic())
                    last = last if choice.get("finish_reason") else (at, {}, at)
            steps = ((line.get("metrics") or {}).get("speculative_decoding") or {}).get
            for key, name in (("drafted", "per_step_drafted"), ("accepted", "per_step_accepted")):
                found[key] = steps(name, found[key])
        if first is None or last is None:
            raise SystemExit("/v1/completions: an answer without a token")
        if not last[1]:  # the end came in a line of its own
            last = (last[0], engine.cpu(), time.monotonic())
        spent = [last[1][key] - before for key, before in first[1].items() if key in last[1]]
        # A client that was kept waiting between the clock and the threads' clocks has timed two different spans.
        late = max(first[2] - first[0], last[2] - last[0]) > LATE * (last[0] - first[0])
        after = engine.counters()
        settled = time.monotonic() + probes.SETTLE_S
        while (after["finished"] or 0) <= (counters["finished"] or 0) and time.monotonic() < settled:
            time.sleep(0.02)
            after = engine.counters()
        metric = None if after["decode_s"] is None else after["decode_s"] - (counters["decode_s"] or 0)

        def gone(key: str) -> int | None:
            return None if after[key] is None else int(after[key] - (counters[key] or 0))

        return {
            **found,
            "output_token_ids": output,
            "ttft_s": round(first[0] - began, 5),
            "decode_s": round(last[0] - first[0], 6),
            "engine_decode_s": None if metric is None else round(metric, 6),
            "cpu_s": round(max(spent), 6) if spent and not late else None,
            **{key: gone(key) for key in ("drafts", "drafted_tokens", "accepted_tokens")},
        }

    def stop(self) -> None:
        """End the server and what it started."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(30)


@contextlib.contextmanager
def turn(lock: str | None) -> Iterator[None]:
    """Hold the machine's lock while something is timed."""
    if lock is None:
        yield
        return
    with open(lock, "a", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def write_lines(path: Path, rows: list[JsonDict]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows), encoding="utf-8")


def read_lines(path: Path) -> list[JsonDict]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def say(text: str) -> None:
    """A line with the time."""
    print(time.strftime("%H:%M:%S"), text, flush=True)


def measure(options: argparse.Namespace) -> int:
    """Both servers, or the one asked for; every figure goes to files of the folder as soon as it is there."""
    out: Path = options.out
    facts: JsonDict = {"started_unix": time.time(), "cpus": os.cpu_count(), "cpu": processor(), "load_average": {}}
    extra = [*(["--enforce-eager", "--max-num-seqs", "8"] if options.cpu else []), *options.engine_arg]

    def load(name: str) -> None:
        facts["load_average"][name] = list(os.getloadavg())
        facts["ended_unix"] = time.time()
        (out / f"facts-{options.phase}.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")

    out.mkdir(parents=True, exist_ok=True)
    if options.phase != "trial":
        baseline(options, extra, load)
    if options.phase != "baseline":
        trial(options, extra, load)
    return 0


def baseline(options: argparse.Namespace, extra: list[str], load: Callable[[str], None]) -> None:
    """The plain server: answers recorded, timed, and steps probed."""
    out: Path = options.out
    prompts = [json.loads(line) for line in options.prompts.read_text(encoding="utf-8").splitlines()][: options.count]
    with turn(options.lock):
        server = Server(options.engine, options.model, options.port, out / "baseline.log", extra, options.cpu).wait()
        try:
            say(f"baseline serves after {server.start_s:.0f} s")
            transcripts, plain = [], []
            for repeat in range(options.baseline_repeats + 1):
                for number, prompt in enumerate(prompts):
                    if repeat == 0:
                        ids = server.post("/tokenize", {"model": NAME, "messages": prompt["messages"]})["tokens"]
                    else:
                        ids = transcripts[number]["prompt_token_ids"]
                    most = min(prompt["max_tokens"], options.max_tokens)
                    # The first answer warms caches and is recorded, not timed.
                    answer = server.ask(ids, most)
                    tokens = answer.pop("output_token_ids")
                    if repeat == 0:
                        transcripts.append(
                            {
                                "id": prompt["id"],
                                "class": prompt["class"],
                                "max_tokens": most,
                                "prompt_token_ids": ids,
                                "output_token_ids": tokens,
                            }
                        )
                    else:
                        same = tokens == transcripts[number]["output_token_ids"]
                        plain.append({"id": prompt["id"], "repeat": repeat, "n": len(tokens), "same": same, **answer})
                load(f"recorded-{repeat}")
                say(f"baseline: pass {repeat} over {len(prompts)} prompts")
            write_lines(out / "transcripts.jsonl", transcripts)
            write_lines(out / "baseline.jsonl", plain)
            request = {
                "variant": "baseline",
                "texts": [one["prompt_token_ids"] + one["output_token_ids"] for one in transcripts],
                "batch": BATCH,
                "repeats": options.probe_repeats,
                "tokens": options.probe_tokens,
                "max_minutes": options.probe_minutes,
            }
            result = probes.probe(server.probe_engine(), request, say, options.model)
            (out / "probe.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            load("probed")
        finally:
            server.stop()


def trial(options: argparse.Namespace, extra: list[str], load: Callable[[str], None]) -> None:
    """The server with speculation: every prompt under every setting, in an order drawn for each prompt and repeat."""
    out: Path = options.out
    transcripts = read_lines(out / "transcripts.jsonl")
    for one in transcripts:
        one["max_tokens"] = min(one["max_tokens"], options.max_tokens)
        one["output_token_ids"] = one["output_token_ids"][: one["max_tokens"]]
    write_lines(out / "asked.jsonl", transcripts)
    words = [*extra, "--speculative-config", json.dumps(SPECULATION), *options.trial_arg, *EXTENSION]
    server = Server(options.engine, options.model, options.port, out / "trial.log", words, options.cpu)
    try:
        server.wait()
        say(f"trial serves after {server.start_s:.0f} s")
        rows: list[JsonDict] = []
        order = random.Random(6)
        waiting = list(transcripts)
        while waiting:
            with turn(options.lock):
                until = time.monotonic() + HOLD_S
                while waiting and time.monotonic() < until:
                    one = waiting.pop(0)
                    server.ask(one["prompt_token_ids"], 2)  # its prefill is cached from here on
                    for repeat in range(1, options.repeats + 1):
                        rows += ask_settings(server, one, repeat, order)
                    write_lines(out / "measured.jsonl", rows)
                    say(f"trial: {one['id']}")
                    load(one["id"])
    finally:
        server.stop()


def ask_settings(server: Server, one: JsonDict, repeat: int, order: random.Random) -> list[JsonDict]:
    """One prompt under every setting, in a new order."""
    names = list(SETTINGS)
    order.shuffle(names)
    rows = []
    for name in names:
        server.choose(SETTINGS[name])
        answer = server.ask(one["prompt_token_ids"], one["max_tokens"])
        tokens = answer.pop("output_token_ids")
        row = {"id": one["id"], "class": one["class"], "setting": name, "repeat": repeat, "n": len(tokens)}
        row["same"] = tokens == one["output_token_ids"]
        # A text of its own has steps of its own.
        rows.append({**row, **({} if row["same"] else {"output_token_ids": tokens}), **answer})
    return rows


CLOCKS = {"cpu": "cpu_s", "engine": "engine_decode_s", "wall": "decode_s"}
BOUND = 0.05


def repeat_noise(rows: list[JsonDict], clock: str) -> JsonDict:
    """A/A: drafting off against itself, repeat against the next repeat of the same prompt.

    "sd" of the log ratio; "mean_abs": what a perfect prediction of one repeat by another would be off by.
    """
    seconds: dict[str, list[float]] = {}
    for row in rows:
        if row["setting"] == "off" and row["n"] > 1 and row[clock]:
            seconds.setdefault(row["id"], []).append(math.log(row[clock] / (row["n"] - 1)))
    ratios = [one - other for values in seconds.values() for one, other in itertools.pairwise(values)]
    if not ratios:
        return {"pairs": 0, "sd": None, "mean_abs": None}
    sd = math.sqrt(sum(ratio * ratio for ratio in ratios) / len(ratios))
    return {"pairs": len(ratios), "sd": sd, "mean_abs": sum(abs(math.expm1(ratio)) for ratio in ratios) / len(ratios)}


def own_texts(
    rows: list[JsonDict], transcripts: list[replay.Transcript], rule: replay.Rule
) -> dict[tuple[str, str], replay.Replayed]:
    """By prompt and setting: the replay of the text that came, where it was the same in every repeat."""
    known = {str(one.id): one for one in transcripts}
    found: dict[tuple[str, str], list[list[int]]] = {}
    for row in rows:
        one = known[row["id"]]
        ids = row.get("output_token_ids") or one.tokens[one.prompt :].tolist()
        found.setdefault((row["id"], row["setting"]), []).append(ids)
    result = {}
    for (name, setting), answers in found.items():
        if setting == "off" or any(one != answers[0] for one in answers):
            continue
        base = known[name]
        text = replay.Transcript(
            name, base.cls, base.prompt, np.concatenate((base.tokens[: base.prompt], np.array(answers[0], np.int32)))
        )
        result[name, setting] = replay.replay(text, [replay.Setting(**SETTINGS[setting])], rule)
    return result


def errors(pairs: list[JsonDict], key: str = "predicted") -> JsonDict:
    """Mean absolute error and bias of predicted over measured speed-ups."""
    if not pairs:
        return {"pairs": 0, "mean_abs_error": None, "bias": None}
    ratios = [pair[key] / pair["measured"] for pair in pairs]
    return {
        "pairs": len(pairs),
        "mean_abs_error": sum(abs(ratio - 1) for ratio in ratios) / len(ratios),
        "bias": math.expm1(sum(math.log(ratio) for ratio in ratios) / len(ratios)),
    }


def evaluate(options: argparse.Namespace) -> int:
    """Predict from the plain server's files, compare with the other server's; writes evaluation.json."""
    folder: Path = options.folder
    rows = read_lines(folder / "measured.jsonl")
    whole = max(row["repeat"] for row in rows)
    asked = {row["id"] for row in rows}
    with (folder / "asked.jsonl").open("rb") as stream:
        transcripts = [one for one in replay.read_transcripts(stream, "asked.jsonl") if one.id in asked]
    names = [name for name in SETTINGS if name != "off"]
    rule = replay.Rule("v1", 2048)
    work = prediction.workload(transcripts, [replay.Setting(**SETTINGS[name]) for name in names], rule)
    probe = step_cost.read_probe(str(folder / "probe.json"))
    own = own_texts(rows, transcripts, rule)
    changed = {(row["id"], row["setting"]) for row in rows if not row["same"]}
    compared, equal_own = 0, 0
    for row in rows:
        done = own.get((row["id"], row["setting"]))
        if done is not None and (row["drafted"] is not None or row["drafts"] == 0):
            compared += 1
            ours = done.drafted.tolist(), done.accepted.tolist()
            equal_own += prediction.arrays_equal(row["drafted"] or [], row["accepted"] or [], *ours)
    result: JsonDict = {
        "prompts": len(work.ids),
        "repeats": whole,
        "requests": len(rows),
        "texts_changed": sum(not row["same"] for row in rows),
        "arrays_compared": compared,
        "arrays_equal": equal_own,
        "by_clock": {},
    }
    for metric, clock in CLOCKS.items():
        curve = step_cost.curve_of(probe, "probe.json", metric, None, 2000, np.random.default_rng(6))
        plain = prediction.per_token(read_lines(folder / "baseline.jsonl"), "baseline.jsonl", clock)
        off = prediction.per_token([row for row in rows if row["setting"] == "off"], "measured.jsonl", clock)
        fixed = prediction.fixed_cost(plain, off, "drafting off, over the plain server loaded before it")
        # Against "off" of the same server and minutes: this is what the curve and the replay are judged by.
        check = prediction.check(work, transcripts, curve, None, names, rows, rule, clock)
        noise = repeat_noise(rows, clock)
        pairs = check.pop("pairs")
        same = [p for p in pairs if not {(p["id"], p["setting"]), (p["id"], "off")} & changed]
        for pair in pairs:
            done = own.get((pair["id"], pair["setting"]))
            if done is not None:
                cost = curve.at(np.arange(1, done.drafted_steps.shape[1] + 1))
                pair["given_text"] = float((done.transcript.outputs - 1) / (done.drafted_steps[0] @ cost))
        given = [pair for pair in pairs if "given_text" in pair]
        clear = [pair for pair in pairs if noise["sd"] and abs(math.log(pair["measured"])) > noise["sd"]]
        right = [pair for pair in clear if (pair["measured"] > 1) == (pair["predicted"] > 1)]
        result["by_clock"][metric] = {
            "errors": errors(pairs),
            "errors_of_unchanged_texts": errors(same),
            "errors_given_the_text": errors(given, "given_text"),
            "noise": noise,
            "direction_right": len(right),
            "direction_clear": len(clear),
            "direction_wrong": [pair for pair in clear if pair not in right],
            "curve": curve.as_json(),
            "in_situ": prediction.in_situ(work, names, rows, clock),
            "fixed_cost": fixed.as_json(),
            "settings": check["settings"],
            "pairs": pairs,
        }
    (folder / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(
        f"{len(work.ids)} prompts, {whole} repeats, {len(rows)} requests, {result['texts_changed']} of them with "
        f"another text than the plain server's; arrays as replayed from the text that came: {equal_own} of {compared}"
    )
    for metric, one in result["by_clock"].items():
        sd, off_by = one["noise"]["sd"], one["noise"]["mean_abs"]
        print(
            f"{metric}: "
            + "; ".join(
                f"{what}: mean abs error {100 * some['mean_abs_error']:.1f} %, bias {100 * some['bias']:+.1f} % "
                f"({some['pairs']})"
                for what, some in (
                    ("blind", one["errors"]),
                    ("unchanged texts", one["errors_of_unchanged_texts"]),
                    ("given the text", one["errors_given_the_text"]),
                )
                if some["pairs"]
            )
            + "\n  "
            + (f"A/A sd {100 * sd:.1f} %, mean {100 * off_by:.1f} %; " if sd else "no A/A; ")
            + f"direction right {one['direction_right']} of {one['direction_clear']} beyond it; "
            f"fixed cost {one['fixed_cost']['value']:.3f}"
        )
        print("  curve  ", "  ".join(f"{row['b']}: {row['ratio']:.2f}" for row in one["curve"]["curve"]))
        print("  in situ", "  ".join(f"{int(d) + 1}: {ratio:.2f}" for d, ratio in one["in_situ"]["ratio"].items()))
        for row in one["settings"]:
            print(
                f"  {row['setting']}: predicted {row['predicted']['speedup']:.3f}, measured "
                f"{row['measured']['speedup']:.3f} ({row['measured']['low']:.2f} to {row['measured']['high']:.2f})"
            )
    cpu = result["by_clock"]["cpu"]
    good = equal_own == compared and cpu["errors"]["mean_abs_error"] <= max(BOUND, cpu["noise"]["sd"] or 0)
    return 0 if good else 1


def processor() -> str:
    """The CPU's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(dest="command", required=True)
    one = commands.add_parser("measure")
    one.add_argument("--engine", required=True, help="Python of the engine's virtualenv")
    one.add_argument("--model", required=True, help="model folder")
    one.add_argument("--out", required=True, type=Path)
    one.add_argument("--phase", choices=("both", "baseline", "trial"), default="both", help="which of the servers")
    one.add_argument("--cpu", action="store_true", help="a CPU build: eager, small")
    one.add_argument("--prompts", type=Path, default=ROOT / "benchmarks/prompts/mixed.jsonl")
    one.add_argument("--count", type=int, default=18)
    one.add_argument("--max-tokens", type=int, default=96)
    one.add_argument("--repeats", type=int, default=2)
    one.add_argument("--baseline-repeats", type=int, default=1)
    one.add_argument("--probe-repeats", type=int, default=3)
    one.add_argument("--probe-tokens", type=int, default=24)
    one.add_argument("--probe-minutes", type=float, default=7)
    one.add_argument("--port", type=int, default=8461)
    one.add_argument("--lock", help="a file to lock while something is timed")
    one.add_argument("--engine-arg", action="append", default=[], help="one more word for both servers")
    one.add_argument("--trial-arg", action="append", default=[], help="one more word for the second server")
    one.set_defaults(run=measure)
    two = commands.add_parser("evaluate")
    two.add_argument("folder", type=Path)
    two.set_defaults(run=evaluate)
    return top


def main() -> int:
    """Command line."""
    options = parser().parse_args()
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
