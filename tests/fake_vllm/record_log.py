"""Turns the start-up log of a real engine into a story that the fake engine can tell again at any speed.

Usage: record_log.py LOG OUT.jsonl [--as-ranks]

Each line of the story is {"phase": str, "who": str, "text": str}.
`who` is APIServer, EngineCore, VllmWorker-* or Worker* (every worker), Worker0 (the first worker), or "" for a line
without a prefix. Process ids, times, the model, its served name, arguments, address and installation folder become
placeholders in braces. With --as-ranks the worker lines of a one-GPU start, which its engine core prints, become
lines of Worker* or Worker0, as engines with several ranks print them.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PREFIX = re.compile(r"^\((?P<who>[\w-]+) pid=(?P<pid>\d+)\) ?")
STAMP = re.compile(r"(?P<stamp>\d\d-\d\d \d\d:\d\d:\d\d)")
BAR = re.compile(r"(Loading safetensors checkpoint shards|Capturing CUDA graphs[^:]*):")
ROUTE = re.compile(r"Route: ")
READY = "Application startup complete"
# (phase, text that starts it), in the order of a load; a phase never goes back
PHASES = (
    ("arguments", "non-default args"),
    ("config", "Resolved architecture"),
    ("engine", "Initializing a V1 LLM engine"),
    ("distributed", "world_size="),
    ("weights", "Starting to load model"),
    ("weights", "Loading model from scratch"),
    ("postload", "Loading weights took"),
    ("compile", "torch_compile_cache"),
    ("kv_cache", "Available KV cache memory"),
    ("kv_cache", "Explicitly set ("),
    ("graphs", "Capturing CUDA graphs"),
    ("warmup", "Graph capturing finished"),
    ("warmup", "init engine (profile"),
    ("api", "Supported tasks"),
)
ORDER = ["start", *dict.fromkeys(name for name, _ in PHASES)]
RANK_FILES = re.compile(
    r"\[(gpu_worker|model_runner|gpu_model_runner|parallel_state|backends|monitor|decorators|cuda|flash_attn|cpu_worker|cpu_model_runner)\.py:"
)
RANK0_FILES = re.compile(
    r"\[(weight_utils|default_loader|topk_topp_sampler|kernel_warmup|ll_bf16|cutedsl_warmup|jit_monitor|__init__)\.py:"
)
RANK_BARS = re.compile(r"Loading safetensors|Capturing CUDA graphs|flashinfer.jit")


def arguments_of(lines: list[str]) -> dict[str, Any]:
    """The `non-default args` of the recorded start."""
    for line in lines:
        _, found, rest = line.partition("non-default args: ")
        if found:
            value: dict[str, Any] = ast.literal_eval(rest.strip())
            return value
    raise ValueError(
        "no `non-default args` line: this is not the log of a whole start; record one from its first line on"
    )


def constant(text: str) -> Callable[[re.Match[str]], str]:
    """A replacement that is taken as it stands, backslashes too."""
    return lambda _: text


def placeholders(text: str, args: dict[str, Any], site: str) -> str:
    """The text with what belongs to the recorded start replaced by names in braces; other braces are doubled first."""
    text = text.replace("{", "{{").replace("}", "}}")
    if "non-default args: " in text:
        return "non-default args: ".join([text.split("non-default args: ")[0], "{args}"])
    served = (args.get("served_model_name") or [args["model"]])[0]
    length = args.get("max_model_len")
    swaps = [
        (re.escape(args["model"]), "{model}"),
        (r"version \d+\.\d+\.\d+", "version {version}"),
        (r"\(v\d+\.\d+\.\d+\)", "(v{version})"),
        (rf"served_model_name={re.escape(served)}", "served_model_name={served}"),
        (r"speculative_config=(None|SpeculativeConfig\([^)]*\))", "speculative_config={speculative}"),
        (r"tensor_parallel_size=\d+", "tensor_parallel_size={tp}"),
        (r"http://[\d.]+:\d+", "http://{host}:{port}"),
        (r"Started server process \[\d+\]", "Started server process [{pid}]"),
        (r"\b(?:\d{1,3}\.){3}\d{1,3}:\d+", "127.0.0.1:{free_port}"),
        (r"\b192\.0\.2\.\d+\b", "127.0.0.1"),
        (r"world_size=\d+ rank=\d+ local_rank=\d+", "world_size={tp} rank={rank} local_rank={rank}"),
        (r"local_world_size=\d+", "local_world_size={tp}"),
        (r"(?<!_)world_size=\d+,", "world_size={tp},"),
        (r"rank \d+ in world size \d+", "rank {rank} in world size {tp}"),
        (r"TP rank \d+", "TP rank {rank}"),
        (r"Rank \d+:", "Rank {rank}:"),
        (r"rank_0_0", "rank_{rank}_0"),
    ]
    if length:
        swaps += [
            (rf"max model len {length}\b", "max model len {length}"),
            (rf"max_seq_len={length}\b", "max_seq_len={length}"),
        ]
        swaps += [(rf"{length:,} tokens per request", "{length_commas} tokens per request")]
    if site:
        swaps.append((re.escape(site), "{site}"))
    for pattern, name in swaps:
        text = re.sub(pattern, constant(name), text)
    return re.sub(r"(?<=/vllm_dist_)[0-9a-f]+", "{run}", text)


def speaker(who: str, text: str, as_ranks: bool) -> str:
    """The story's name for the process that printed a line."""
    if as_ranks and who == "EngineCore":
        if RANK0_FILES.search(text) or RANK_BARS.search(text):
            return "Worker0"
        return "Worker*" if RANK_FILES.search(text) else who
    if who.startswith("VllmWorker"):
        return "VllmWorker-*"
    if who.startswith("Worker"):
        return "Worker*" if RANK_FILES.search(text) else "Worker0"
    return who


def story(content: str, as_ranks: bool) -> list[dict[str, str]]:
    """The lines of a start, up to and with its readiness."""
    lines = [line.rstrip("\r") for line in content.split("\n")]
    args = arguments_of(lines)
    found = re.search(r"(/\S+/site-packages)/", content)
    site = found.group(1) if found else ""
    phase = "start"
    told: list[dict[str, str]] = []
    bar_seen: set[str] = set()
    for line in lines:
        prefix = PREFIX.match(line)
        text = line[prefix.end() :] if prefix else line
        for name, start in PHASES:
            if start in text and ORDER.index(name) > ORDER.index(phase):
                phase = name
        bar = BAR.search(text)
        if bar:  # bars are told by the fake itself, so that it can count its own shards; only their place is kept
            if bar.group(1) not in bar_seen:
                bar_seen.add(bar.group(1))
                who = "Worker0" if as_ranks else prefix["who"] if prefix else ""
                told.append({"phase": phase, "who": who, "text": "{bar:" + bar.group(1) + "}"})
            continue
        if ROUTE.search(text) or (not text.strip() and not prefix):
            continue
        who = speaker(prefix["who"] if prefix else "", text, as_ranks)
        # a mark that no log holds keeps the place of the time while other braces are doubled
        text = placeholders(STAMP.sub("\x00", text), args, site).replace("\x00", "{now}")
        told.append({"phase": phase, "who": who, "text": text})
        if READY in text:
            break
    return told


def main() -> int:
    """Exit status 0, or 2 for wrong usage."""
    names = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    if len(names) != 2 or set(sys.argv[1:]) - set(names) - {"--as-ranks"}:
        print("usage: record_log.py LOG OUT.jsonl [--as-ranks]", file=sys.stderr)
        return 2
    content = Path(names[0]).read_bytes().decode("utf-8", errors="replace")
    told = story(content, "--as-ranks" in sys.argv)
    Path(names[1]).write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in told), encoding="utf-8")
    print(f"{names[1]}: {len(told)} lines, phases {', '.join(dict.fromkeys(item['phase'] for item in told))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
