"""Which part of a load a line of the engine's output belongs to (vLLM 0.16 to 0.32, and the loaders and kernels it
starts)."""

from __future__ import annotations

import re
from typing import NamedTuple

from .log_text import Line

PROCESS, ARGUMENTS, CONFIG, DISTRIBUTED, WEIGHTS, POST_LOAD = (
    "process",
    "arguments",
    "config",
    "distributed",
    "weights",
    "post_load",
)
COMPILE, KV_CACHE, GRAPHS, WARMUP, API, READY = "compile", "kv_cache", "graphs", "warmup", "api", "ready"

# In the order in which a load passes them.
PHASES = (PROCESS, ARGUMENTS, CONFIG, DISTRIBUTED, WEIGHTS, POST_LOAD, COMPILE, KV_CACHE, GRAPHS, WARMUP, API, READY)
ORDER = {name: number for number, name in enumerate(PHASES)}

# Substrings of engine messages. The first that fits decides, so the more particular ones stand first.
_MARKS: tuple[tuple[str, str], ...] = (
    ("Application startup complete", READY),
    ("Server is ready to accept requests", READY),
    ("Uvicorn running on", READY),
    ("Waiting for application startup", API),
    ("Started server process", API),
    ("Starting vLLM API server", API),
    ("Starting vLLM server on", API),
    ("Available routes are", API),
    ("Supported tasks:", API),
    ("Supported_tasks:", API),
    ("chat template content format", API),
    ("init engine (profile, create kv cache, warmup model) took", API),
    ("Graph capturing finished", WARMUP),
    ("FlashInfer autotune", WARMUP),
    ("Autotuning process", WARMUP),
    ("Warming up", WARMUP),
    ("Warmed up", WARMUP),
    ("warmup finished", WARMUP),
    ("warmup starting", WARMUP),
    ("DeepGEMM JIT Pre-Compile", WARMUP),
    ("Kernel JIT monitor activated", WARMUP),
    ("CUDA graph pool memory", WARMUP),
    ("Compile and warming up model for size", COMPILE),
    ("Capturing cudagraphs for decoding", GRAPHS),
    ("Capturing CUDA graph", GRAPHS),
    ("cuda graph addresses", GRAPHS),
    ("Torch profiler disabled for CUDA graph capture", GRAPHS),
    ("Profiling CUDA graph memory", KV_CACHE),
    ("Estimated CUDA graph memory", KV_CACHE),
    ("Available KV cache memory", KV_CACHE),
    ("KV cache size:", KV_CACHE),
    ("Maximum concurrency for", KV_CACHE),
    ("# GPU blocks:", KV_CACHE),
    ("Memory profiling takes", KV_CACHE),
    ("Initial profiling/warmup run took", KV_CACHE),
    ("vLLM's torch.compile", COMPILE),
    ("Starting torch.compile", COMPILE),
    ("Dynamo bytecode transform time", COMPILE),
    ("Compiling a graph for", COMPILE),
    ("Directly load the compiled graph", COMPILE),
    ("Cache the graph of", COMPILE),
    ("AOT compil", COMPILE),
    ("torch.compile took", COMPILE),
    ("torch.compile takes", COMPILE),
    ("Loading weights took", POST_LOAD),
    ("Model loading took", POST_LOAD),
    ("Loading model weights took", POST_LOAD),
    ("Encoder cache will be initialized", POST_LOAD),
    ("Loading drafter model", WEIGHTS),
    ("Starting to load model", WEIGHTS),
    ("Filesystem type for checkpoints", WEIGHTS),
    ("Auto-prefetch is disabled", WEIGHTS),
    ("Prefetching checkpoint files", WEIGHTS),
    ("Time spent downloading weights", WEIGHTS),
    ("Using model weights format", WEIGHTS),
    ("Using FLASH", WEIGHTS),
    ("Using Flash Attention backend", WEIGHTS),
    ("MoE backend", WEIGHTS),
    ("vLLM is using nccl", DISTRIBUTED),
    ("Found nccl from library", DISTRIBUTED),
    ("NCCL version", DISTRIBUTED),
    ("NCCL INFO", DISTRIBUTED),
    ("distributed_init_method", DISTRIBUTED),
    ("in world size", DISTRIBUTED),
    ("Custom allreduce is disabled", DISTRIBUTED),
    ("SymmMemCommunicator", DISTRIBUTED),
    ("all2all", DISTRIBUTED),
    ("vLLM message queue communication handle", DISTRIBUTED),
    ("Initializing a V1 LLM engine", CONFIG),
    ("Initializing an LLM engine", CONFIG),
    ("Waiting for init message", CONFIG),
    ("Resolved architecture", CONFIG),
    ("Using max model len", CONFIG),
    ("Chunked prefill is enabled", CONFIG),
    ("Asynchronous scheduling is", CONFIG),
    ("Async scheduling", CONFIG),
    ("Final IR op priority", CONFIG),
    ("non-default args", ARGUMENTS),
    ("vLLM API server version", ARGUMENTS),
    ("args: Namespace", ARGUMENTS),
    ("Automatically detected platform", PROCESS),
)

# tqdm: "Loading safetensors checkpoint shards:  37% Completed | 26/71 [10:01<...", "Capturing CUDA graphs (decode,
# FULL):  12%|.. | 6/48 [".
_BAR = re.compile(
    r"(?P<what>[A-Za-z][^%|]{0,90}?):? +(?P<percent>\d{1,3})%(?: Completed)? ?\|(?:.*?\|)?"
    r" *(?P<n>\d+)/(?P<total>\d+) \["
)
# The weights' bar where its description went lost on the way through a pipe.
_BARE = re.compile(r" *\d{1,3}% Completed \| *(?P<n>\d+)/(?P<total>\d+) \[")
_PREFETCH = re.compile(r"Prefetching checkpoint files: (?P<percent>\d{1,3})% \((?P<n>\d+)/(?P<total>\d+)\)")
_BAR_PHASE: tuple[tuple[str, str], ...] = (
    ("checkpoint shards", WEIGHTS),
    ("Loading shards", WEIGHTS),
    ("Multi-thread loading", WEIGHTS),
    ("Loading safetensors", WEIGHTS),
    ("Loading", WEIGHTS),
    ("Fetching", WEIGHTS),
    ("Prefetching", WEIGHTS),
    ("Downloading", WEIGHTS),
    ("Capturing", GRAPHS),
    ("DeepGEMM", WARMUP),
    ("warmup", WARMUP),
    ("Autotun", WARMUP),
    ("Compiling", WARMUP),
)


class Bar(NamedTuple):
    """A progress bar: `n` of `total` steps done."""

    what: str
    n: int
    total: int


class Mark(NamedTuple):
    """A sign of a phase; `bar` where the line counts steps."""

    phase: str
    bar: Bar | None


def progress_bar(message: str) -> Bar | None:
    """The bar that a message shows, or None."""
    if "%" not in message:
        return None
    match = _BAR.match(message)
    what = match["what"].strip() if match else "Prefetching checkpoint files"
    if not match:
        match = _PREFETCH.match(message)
    if not match:
        match, what = _BARE.match(message), "Loading checkpoint shards"
    if not match:
        return None
    total = int(match["total"][:12])
    return Bar(what, min(int(match["n"][:12]), total), total) if total else None


def mark_of(line: Line) -> Mark | None:
    """The phase that this line shows, or None where it shows none.

    Lines of ERROR and worse show no phase: a traceback quotes every part of the program.
    """
    message = line.message
    bar = progress_bar(message)
    if bar:
        for text, phase in _BAR_PHASE:
            if text in bar.what:
                return Mark(phase, bar)
        return None
    if line.level in {"ERROR", "CRITICAL"} or message[:1] == " ":
        return None
    if '"POST /v1/' in message and ('" 200' in message or '" 4' in message):
        return Mark(READY, None)  # it answers requests
    for text, phase in _MARKS:
        if text in message:
            return Mark(phase, None)
    return None
