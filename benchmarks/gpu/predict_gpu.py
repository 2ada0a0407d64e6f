#!/usr/bin/env python3
"""The three terms of a prediction on one GPU: acceptance, cost of a step, fixed cost; then predicted against measured.

    python3 benchmarks/gpu/predict_gpu.py --python PY --model DIR --out DIR [--stages kernel,dense,moe] [--minutes 9]

PY is the interpreter of an installed vLLM, DIR a small model with its tokenizer. No systemd, no network. Each stage
writes OUT/STAGE.json with everything it found and its raw lines beside it; a stage that fails says why and the next one
goes on.

    kernel  the V2 runner's n-gram kernel, compiled, against the replay (--speculator FILE: the engine's
            vllm/v1/worker/gpu/spec_decode/ngram/speculator.py; releases before about 0.30 have none)
    dense   the model: plain server and one with n-gram side by side, probed, recorded, then every prompt asked plain,
            with drafting off, and under two settings, in an order drawn anew: the prediction against that
    moe     the same on a mixture of experts of random weights: costs of steps alone. Its answers go on past their end
            and run into cycles, so that n-gram drafts at all; what they gain means nothing

Two servers of a stage are loaded at once, and timed one at a time. Exit codes: 0 all stages asked for ran, 1 one did
not, 2 the call was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "collections")]

import numpy as np  # noqa: E402
from ansible_collections.swapgate.core.plugins.host_program import probes  # noqa: E402

from benchmarks.prediction import EXTENSION, SPECULATION, Server, StartFailed, say, write_lines  # noqa: E402
from scripts import prediction, replay, step_cost  # noqa: E402
from scripts.json_files import InputError  # noqa: E402

JsonDict = dict[str, Any]
KERNEL_SETTINGS = [(5, 4, 4), (2, 4, 4), (3, 3, 3), (5, 1, 4), (1, 2, 5), (8, 1, 1), (4, 5, 5), (3, 2, 7)]
SETTINGS = {
    "off": {"k": 0, "min": 4, "max": 4},
    "5,4,4": {"k": 5, "min": 4, "max": 4},
    "5,1,4": {"k": 5, "min": 1, "max": 4},
}
BATCH = [2, 3, 4, 6, 8, 12, 24]
WARMING = 6  # prompts that warm up both servers
# What the engine decided at start, as it says it.
TOLD = re.compile(
    r"Model Runner|[Aa]sync(hronous)? scheduling|cudagraph_mode|Capturing CUDA graphs|Graph captur|attention backend|"
    r"FlashAttention|MoE backend|fused_moe|Initializing a V1 LLM engine|Available KV|init engine|Loading weights took"
)
# A mixture of experts of the shape of a 30B model with 3B active, with fewer layers; and a toy for a CPU.
MOE_SIZES = {
    "full": {
        "hidden": 2048,
        "layers": 24,
        "heads": 32,
        "kv": 4,
        "head": 128,
        "experts": 128,
        "picked": 8,
        "width": 768,
    },
    "toy": {"hidden": 128, "layers": 2, "heads": 4, "kv": 2, "head": 32, "experts": 16, "picked": 4, "width": 64},
}


def moe_folder(size: str, layers: int | None, model: Path, folder: Path) -> JsonDict:
    """Write config.json of the mixture beside the model's tokenizer files; returns its shape."""
    shape = dict(MOE_SIZES[size])
    if layers:
        shape["layers"] = layers
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json"):
        if (model / name).exists():
            shutil.copy(model / name, folder / name)
    dense = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": dense["vocab_size"],
        "bos_token_id": dense.get("bos_token_id", 1),
        "eos_token_id": dense.get("eos_token_id", 2),
        "hidden_size": shape["hidden"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv"],
        "head_dim": shape["head"],
        "intermediate_size": 3 * shape["hidden"],
        "moe_intermediate_size": shape["width"],
        "num_experts": shape["experts"],
        "num_experts_per_tok": shape["picked"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "hidden_act": "silu",
        "initializer_range": 0.02,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    expert = 3 * shape["hidden"] * shape["width"] * 2
    return {**shape, "expert_bytes": expert, "expert_bytes_per_token": expert * shape["picked"] * shape["layers"]}


def engine_has(python: str, words: list[str]) -> dict[str, bool]:
    """Whether the engine's sources know these words; read without importing them."""
    code = "import importlib.util as u; print(u.find_spec('vllm').submodule_search_locations[0])"
    where = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    text = (Path(where) / "engine/arg_utils.py").read_text(encoding="utf-8")
    return {word: word in text for word in words}


def gpu_state() -> list[str]:
    """Name, driver, clocks, temperature, power and throttle reasons, as nvidia-smi says them."""
    fields = (
        "name,driver_version,clocks.sm,clocks.mem,temperature.gpu,power.draw,memory.used,clocks_event_reasons.active"
    )
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        words = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]
        return subprocess.run(words, capture_output=True, text=True, timeout=30, check=False).stdout.splitlines()
    return []


def told(log: Path) -> list[str]:
    """What the engine decided at start."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return list(dict.fromkeys(line.strip()[:400] for line in lines if TOLD.search(line)))[:40]


def pair(options: argparse.Namespace, model: str, name: str, extra: list[str]) -> tuple[Server, Server]:
    """A plain server and one with speculation, started together; one after the other if that does not work."""
    out: Path = options.out
    known = engine_has(options.python, ["per_request_spec_decode_metrics", "kv_cache_memory_bytes"])
    words = [*extra, *options.engine_arg]
    if options.cpu:
        words += ["--enforce-eager", "--max-num-seqs", "32"]
    elif known["kv_cache_memory_bytes"]:
        # No profiling, which two engines that load at once would disturb.
        words += ["--kv-cache-memory-bytes", str(options.kv_gib * 2**30)]
    # As much GPU memory as weights and cache need, so that both fit.
    if not options.cpu:
        words += ["--gpu-memory-utilization", str(options.utilization)]
    draft = ["--speculative-config", json.dumps(SPECULATION), *EXTENSION]
    if known["per_request_spec_decode_metrics"]:
        draft += ["--per-request-spec-decode-metrics", "detailed"]
    made = [(f"{name}-plain", words, options.port), (f"{name}-ngram", [*words, *draft], options.port + 1)]
    servers: list[Server] = []
    try:
        for title, arguments, port in made:
            servers.append(Server(options.python, model, port, out / f"{title}.log", arguments, options.cpu))
            if options.one_by_one:
                servers[-1].wait()
        for i, server in enumerate(servers):
            try:
                server.wait()
            except StartFailed as error:
                if options.one_by_one:
                    raise
                say(f"{error}; once more, alone")
                title, arguments, port = made[i]
                servers[i] = Server(
                    options.python, model, port, out / f"{title}-again.log", arguments, options.cpu
                ).wait()
    except BaseException:
        for server in servers:
            server.stop()
        raise
    say(f"{name}: plain serves after {servers[0].start_s:.0f} s, n-gram after {servers[1].start_s:.0f} s")
    return servers[0], servers[1]


def prompts_for(options: argparse.Namespace, plain: Server, endless: bool) -> list[JsonDict]:
    """The first prompts as token ids."""
    count = options.moe_count if endless else options.count
    lines = options.prompts.read_text(encoding="utf-8").splitlines()[:count]
    found = []
    for line in lines:
        prompt = json.loads(line)
        ids = plain.post("/tokenize", {"model": "measured", "messages": prompt["messages"]})["tokens"]
        most = options.max_tokens if endless else min(prompt["max_tokens"], options.max_tokens)
        found.append({"id": prompt["id"], "class": prompt["class"], "max_tokens": most, "prompt_token_ids": ids})
    return found


def record(plain: Server, prompts: list[JsonDict], endless: bool, longer: int) -> list[JsonDict]:
    """Answers of the plain server. ``longer`` tokens are answered first and become part of the prompt."""
    found = []
    for one in prompts:
        ids = one["prompt_token_ids"]
        if longer:
            ids = ids + plain.ask(ids, longer, endless)["output_token_ids"]
        answer = plain.ask(ids, one["max_tokens"], endless)
        found.append({**one, "prompt_token_ids": ids, "output_token_ids": answer["output_token_ids"]})
    return found


def measure(
    plain: Server,
    drafting: Server,
    transcripts: list[JsonDict],
    options: argparse.Namespace,
    endless: bool,
    until: float,
) -> list[JsonDict]:
    """Every prompt plain and under every setting, in an order drawn anew for each prompt and repeat."""
    rows: list[JsonDict] = []
    order = random.Random(6)
    for repeat in range(options.repeats + 1):  # the first pass warms up and is left out
        for one in transcripts if repeat else transcripts[:WARMING]:
            if time.monotonic() > until:
                say("time is up: the rest of the repeats is left out")
                return rows
            names = ["plain", *SETTINGS] if repeat else ["plain", "5,1,4"]
            order.shuffle(names)
            for name in names:
                server = plain if name == "plain" else drafting
                if name != "plain":
                    drafting.choose(SETTINGS[name])
                answer = server.ask(one["prompt_token_ids"], one["max_tokens"], endless)
                tokens = answer.pop("output_token_ids")
                row = {"id": one["id"], "class": one["class"], "setting": name, "repeat": repeat, "n": len(tokens)}
                if repeat:
                    rows.append({**row, "same": tokens == one["output_token_ids"], **answer})
    return rows


def summary(result: JsonDict) -> None:
    """The figures that matter, as lines."""
    for clock, one in result["by_clock"].items():
        curve = "  ".join(f"{row['b']}:{row['ratio']:.2f}" for row in one["curve"]["curve"])
        say(f"  {clock}: T(1) {1000 * one['curve']['step_s']:.3f} ms; T(b)/T(1) {curve}")
        for kind, rows in one["curve"]["kinds"].items():
            say(f"    {kind:15} " + "  ".join(f"{row['b']}:{row['ratio']:.2f}" for row in rows))
        fixed = {**one["fixed_cost"], "drafting": one["fixed_cost_of_half"]["drafting"]}
        for what, part in (("", fixed), (" of steps with drafts", fixed["drafting"])):
            if part:
                say(f"    fixed cost{what} {part['value']:.3f} ({part['low']:.3f} to {part['high']:.3f})")
        inside = one["in_situ"]
        say("    in situ, drafts: ratio  " + "  ".join(f"{d}: {ratio:.2f}" for d, ratio in inside["ratio"].items()))
        for row in [*one["check"]["settings"], *one["check_of_the_other_half"]["settings"]]:
            foretold, found, arrays = row["predicted"], row["measured"], row["acceptance"]
            say(
                f"    {row['setting']}: predicted {foretold['speedup']:.3f} "
                f"({foretold['low']:.2f}..{foretold['high']:.2f}), "
                f"measured {found['speedup']:.3f} ({found['low']:.2f}..{found['high']:.2f}), "
                f"arrays equal {arrays['equal']} of {arrays['same_text']}, failed {row['failed_terms']}"
            )


def timed(
    work: prediction.Workload, names: list[str], rows: list[JsonDict], clock: str
) -> Iterator[tuple[str, float, prediction.Floats]]:
    """(prompt, seconds, steps by drafts) of the requests whose text is the recorded one."""
    place = {str(one): p for p, one in enumerate(work.ids)}
    for row in rows:
        if row["id"] in place and row["setting"] in names and row["same"] and row.get(clock):
            yield row["id"], row[clock], work.counts[place[row["id"]], names.index(row["setting"])]


def judged(folder: Path, name: str, probe: JsonDict, rows: list[JsonDict], semantics: str) -> JsonDict:
    """Prediction against measurement by each clock that both have."""
    with (folder / f"{name}-transcripts.jsonl").open("rb") as stream:
        transcripts = replay.read_transcripts(stream, name)
    names = [key for key in SETTINGS if key != "off"]
    settings = [replay.Setting(**SETTINGS[key]) for key in names]
    rule = replay.Rule(semantics)
    work = prediction.workload(transcripts, settings, rule)
    result: JsonDict = {}
    for metric, clock in (("engine", "engine_decode_s"), ("wall", "decode_s"), ("cpu", "cpu_s")):
        if not any(row.get(clock) for row in rows):
            continue
        try:
            curve = step_cost.curve_of(probe, "probe", metric, None, 1000, np.random.default_rng(6))
            plain = prediction.per_token([row for row in rows if row["setting"] == "plain"], "plain", clock)
            off = prediction.per_token([row for row in rows if row["setting"] == "off"], "off", clock)
            fixed = prediction.fixed_cost(plain, off, "this run: drafting off over plain")
        except InputError as error:
            say(f"{name}: {metric}: {error}")
            continue
        drafted = [row for row in rows if row["setting"] != "plain"]
        check = prediction.check(work, transcripts, curve, fixed, names, drafted, rule, clock, plain)
        check.pop("pairs")
        # Both fixed costs, of every other prompt, foretell the rest.
        known, rest = transcripts[::2], transcripts[1::2]
        learned = prediction.workload(known, settings, rule)
        drafting = prediction.drafting_cost(plain, off, timed(learned, names, drafted, clock), curve)
        owners = {one.id for one in known}
        idle = {name: log for name, log in off.items() if name in owners}
        both_costs = dataclasses.replace(prediction.fixed_cost(plain, idle, "every other prompt"), drafting=drafting)
        foretold = prediction.check(
            prediction.workload(rest, settings, rule), rest, curve, both_costs, names, drafted, rule, clock, plain
        )
        foretold.pop("pairs")
        result[metric] = {
            "curve": curve.as_json(),
            "fixed_cost": fixed.as_json(),
            "fixed_cost_of_half": both_costs.as_json(),
            "in_situ": prediction.in_situ(work, names, drafted, clock),
            "check": check,
            "check_of_the_other_half": foretold,
            "prediction": {
                key: prediction.predict(work, curve, fixed)[key] for key in ("settings", "break_even", "caveats")
            },
        }
    return result


def both(options: argparse.Namespace, name: str, model: str, extra: list[str], until: float) -> JsonDict:
    """One model: two servers, probes, answers, prediction against measurement."""
    endless = name == "moe"
    folder: Path = options.out
    state = [gpu_state()]
    plain, drafting = pair(options, model, name, extra)
    try:
        prompts = prompts_for(options, plain, endless)
        # A mixture of random weights runs into a cycle after some hundred tokens: those become the prompt.
        transcripts = record(plain, prompts, endless, options.run_in if endless else 0)
        write_lines(folder / f"{name}-transcripts.jsonl", transcripts)
        say(f"{name}: recorded {len(transcripts)} answers")
        request = {
            "texts": [one["prompt_token_ids"] + one["output_token_ids"] for one in transcripts],
            "batch": options.batch,
            "repeats": options.probe_repeats,
            "tokens": options.probe_tokens,
            "max_minutes": options.probe_minutes,
        }
        probe = probes.probe(plain.probe_engine(), request, say, model)
        (folder / f"{name}-probe.json").write_text(json.dumps(probe) + "\n", encoding="utf-8")
        state.append(gpu_state())
        rows = measure(plain, drafting, transcripts, options, endless, until)
        write_lines(folder / f"{name}-measured.jsonl", rows)
        state.append(gpu_state())
    finally:
        plain.stop()
        drafting.stop()
    started = {"plain": told(plain.log), "ngram": told(drafting.log)}
    semantics = options.semantics
    if semantics == "auto":  # the V2 runner says so in the log of the server with speculation, or says what it lacks
        lines = " ".join(started["ngram"])
        lacks = "does not yet support" in lines or "Using V2 Model Runner" not in lines
        semantics = "v1" if lacks else "v2"
    result = {
        "model": model,
        "engine_args": plain.words[2:],
        "engine_version": probe["engine_version"],
        "experts": probe["experts"],
        "start_s": {"plain": plain.start_s, "ngram": drafting.start_s},
        "told_at_start": started,
        "semantics": semantics,
        "gpu": state,
        "probe_stopped": probe["stopped"],
        "absent": probe["absent"],
        "requests": len(rows),
        "same_text": sum(row["same"] for row in rows),
        "by_clock": judged(folder, name, probe, rows, semantics),
    }
    summary(result)
    return result


def kernel(options: argparse.Namespace, _until: float) -> JsonDict:
    """The compiled V2 kernel against the replay, at positions of random and real text."""
    if not options.speculator:
        raise SystemExit("kernel: --speculator is not given, expected the engine's speculator.py of the V2 runner")
    given, found = options.out / "kernel-in.npz", options.out / "kernel-out.npz"
    tests = ROOT / "tests/engine"

    def call(*words: Any) -> str:
        done = subprocess.run([options.python, *map(str, words)], capture_output=True, text=True, check=False)
        if done.returncode > 1:
            raise SystemExit(f"{words[0]}: exit code {done.returncode}: {done.stderr[-1500:]}")
        return done.stdout.strip()

    call(tests / "corpus.py", "write", given, "--semantics", "v2", "--positions", options.positions)
    # Each setting is a kernel of its own to compile: a few of them, in turns.
    arrays = dict(np.load(given))
    for i, case in enumerate(arrays["cases"]):
        case[1:4] = KERNEL_SETTINGS[i % len(KERNEL_SETTINGS)]
    np.savez(given, **arrays)
    where = call(tests / "kernel.py", given, found, options.speculator, *([] if options.cpu else ["cuda"]))
    compared = json.loads(call(tests / "corpus.py", "compare", given, found, "--semantics", "v2"))
    given.unlink()
    found.unlink()
    say(f"kernel: {compared['compared']} drafts compared on {where}, {compared['differences']} differences")
    return {"where": where, "speculator": str(options.speculator), **compared}


def dense(options: argparse.Namespace, until: float) -> JsonDict:
    """The given model."""
    return both(options, "dense", str(options.model), [], until)


def moe(options: argparse.Namespace, until: float) -> JsonDict:
    """A mixture of experts of random weights."""
    folder = options.out / "moe-model"
    shape = moe_folder(options.moe_size, options.moe_layers, options.model, folder)
    result = both(options, "moe", str(folder), ["--load-format", "dummy"], until)
    return {"shape": shape, **result}


STAGES: dict[str, Callable[[argparse.Namespace, float], JsonDict]] = {"kernel": kernel, "dense": dense, "moe": moe}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--python", default=sys.executable, help="interpreter of an installed vLLM")
    top.add_argument("--model", required=True, type=Path)
    top.add_argument("--out", required=True, type=Path)
    top.add_argument("--stages", default="kernel,dense,moe")
    top.add_argument("--minutes", type=float, default=9.0, help="for all stages; no measurement starts after it")
    top.add_argument("--speculator", type=Path, help="for kernel: the engine's speculator.py")
    top.add_argument("--positions", type=int, default=40000, help="for kernel")
    top.add_argument("--semantics", choices=("auto", *replay.SEMANTICS), default="auto")
    top.add_argument("--prompts", type=Path, default=ROOT / "benchmarks/prompts/mixed.jsonl")
    top.add_argument("--count", type=int, default=20, help="prompts of dense")
    top.add_argument("--moe-count", type=int, default=12, help="prompts of moe")
    top.add_argument("--max-tokens", type=int, default=128)
    top.add_argument("--run-in", type=int, default=384, help="for moe: tokens of an answer that become its prompt")
    top.add_argument("--repeats", type=int, default=2)
    top.add_argument("--batch", type=lambda text: [int(one) for one in text.split(",")], default=BATCH)
    top.add_argument("--probe-repeats", type=int, default=4)
    top.add_argument("--probe-tokens", type=int, default=96)
    top.add_argument("--probe-minutes", type=float, default=1.5)
    top.add_argument("--moe-size", choices=tuple(MOE_SIZES), default="full")
    top.add_argument("--moe-layers", type=int)
    top.add_argument("--kv-gib", type=int, default=8)
    top.add_argument("--utilization", type=float, default=0.4)
    top.add_argument("--one-by-one", action="store_true", help="start the second server when the first one serves")
    top.add_argument("--port", type=int, default=8471)
    top.add_argument("--cpu", action="store_true", help="a CPU build, to try the script itself")
    top.add_argument("--engine-arg", action="append", default=[], help="one more word for every server")
    return top


def main() -> int:
    """Command line."""
    options = parser().parse_args()
    stages = options.stages.split(",")
    unknown = [name for name in stages if name not in STAGES]
    if unknown:
        print(f"--stages: found {', '.join(unknown)}, expected some of {', '.join(STAGES)}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    # A kernel for sampling that greedy answers never use, and that takes minutes to compile at the first start.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    began = time.monotonic()
    failed = []
    for name in stages:
        until = began + 60 * options.minutes
        if time.monotonic() > until:
            say(f"{name}: not begun, {options.minutes:g} minutes are over")
            failed.append(name)
            continue
        say(f"{name}: begins after {time.monotonic() - began:.0f} s")
        try:
            result = STAGES[name](options, until)
            (options.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        except (Exception, SystemExit) as error:  # the next stage is worth its minutes all the same
            traceback.print_exc()
            say(f"{name}: failed: {error}")
            failed.append(name)
    say(f"done after {time.monotonic() - began:.0f} s; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
