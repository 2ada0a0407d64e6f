"""`vllm bench serve` with a custom data set: real requests to a server, a closed loop, and the real one's result file.

Of the real command's flags those are there that such a benchmark needs; any other one is refused.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import statistics
import sys
import threading
import time
import urllib.parse
from pathlib import Path
from typing import Any

TAKEN = {"backend": "openai", "endpoint": "/v1/completions", "dataset_name": "custom", "request_rate": "inf"}


def add_parser(parser: argparse.ArgumentParser) -> None:
    """The sub-commands of `vllm bench`; only `serve` is there."""
    serve = parser.add_subparsers(dest="bench_type").add_parser("serve")
    for name, default in TAKEN.items():
        serve.add_argument("--" + name.replace("_", "-"), default=default)
    for name in ("base-url", "model", "tokenizer", "tokenizer-mode", "dataset-path", "result-dir", "result-filename"):
        serve.add_argument("--" + name)
    serve.add_argument("--percentile-metrics", default="ttft,tpot,itl")
    serve.add_argument("--custom-output-len", type=int, default=256)
    serve.add_argument("--num-prompts", type=int, default=1000)
    serve.add_argument("--max-concurrency", type=int)
    serve.add_argument("--temperature", type=float)
    serve.add_argument("--extra-body", type=json.loads, default={})
    flags = ("no-oversample", "skip-chat-template", "disable-shuffle", "disable-tqdm", "save-result", "save-detailed")
    for name in (*flags, "trust-remote-code"):
        serve.add_argument("--" + name, action="store_true")


def ask(url: urllib.parse.SplitResult, body: dict[str, Any]) -> dict[str, Any]:
    """One streamed completion: the figures that the real command keeps of a request."""
    found: dict[str, Any] = {"ttft": 0.0, "itl": [], "latency": 0.0, "prompt": 0, "output": 0, "text": "", "error": ""}
    headers = {"Content-Type": "application/json"}
    key = os.environ.get("OPENAI_API_KEY")
    if key:
        headers["Authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection(url.hostname or "", url.port or 80, timeout=600)
    found["start"] = began = last = time.perf_counter()
    first = False
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            found["error"] = answer.reason or ""
            return found
        for raw in answer:
            line = raw.decode().strip()
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            if event.get("choices"):
                now = time.perf_counter()
                if first:
                    found["itl"].append(now - last)
                else:
                    first, found["ttft"] = True, now - began
                last = now
                found["text"] += event["choices"][0].get("text") or ""
            elif event.get("usage"):
                found["output"], found["prompt"] = event["usage"]["completion_tokens"], event["usage"]["prompt_tokens"]
        found["latency"] = last - began
        if not first:
            found["error"] = "Never received a valid chunk to calculate TTFT.This response will be marked as failed!"
    except (OSError, http.client.HTTPException, RuntimeError) as error:
        found["error"] = f"Traceback (most recent call last):\n{type(error).__name__}: {error}\n"
    finally:
        connection.close()
    return found


def requests(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The body of each request, in the file's order."""
    rows = [json.loads(line) for line in Path(args.dataset_path).read_text(encoding="utf-8").splitlines()]
    bodies = []
    for row in rows[: args.num_prompts]:
        limit = row["output_tokens"] if args.custom_output_len == -1 else args.custom_output_len
        body = {"model": args.model, "prompt": row["prompt"], "repetition_penalty": 1.0, "max_tokens": limit}
        body.update(stream=True, stream_options={"include_usage": True})
        if args.temperature is not None:
            body["temperature"] = args.temperature
        bodies.append({**body, **args.extra_body})
    return bodies


def closed_loop(url: urllib.parse.SplitResult, bodies: list[dict[str, Any]], streams: int) -> list[dict[str, Any]]:
    """All requests in order, at most `streams` at a time."""
    found: list[dict[str, Any]] = [{} for _ in bodies]
    waiting = iter(range(len(bodies)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                at = next(waiting, None)
            if at is None:
                return
            found[at] = ask(url, bodies[at])

    threads = [threading.Thread(target=work) for _ in range(min(streams, len(bodies)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def run(args: argparse.Namespace) -> int:
    """Sends the requests and writes the result file."""
    for name, only in TAKEN.items():
        if getattr(args, name) != only:
            sys.exit(
                f"fake vllm: bench serve --{name.replace('_', '-')} can only be {only}, see tests/fake_vllm/README.md"
            )
    if not (args.disable_shuffle and args.skip_chat_template):
        sys.exit("fake vllm: bench serve needs --disable-shuffle and --skip-chat-template: it has no other way")
    if not (Path(args.tokenizer or "") / "config.json").is_file():
        sys.exit(f"OSError: {args.tokenizer} is not a local folder with a tokenizer")
    bodies = requests(args)
    began = time.perf_counter()
    outputs = closed_loop(urllib.parse.urlsplit(args.base_url), bodies, args.max_concurrency or len(bodies))
    duration = time.perf_counter() - began
    good = [output for output in outputs if not output["error"]]
    total = sum(output["output"] for output in good)
    result: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "model_id": args.model,
        "tokenizer_id": args.tokenizer,
        "num_prompts": args.num_prompts,
        "request_rate": "inf",
        "max_concurrency": args.max_concurrency,
        "duration": duration,
        "completed": len(good),
        "failed": len(outputs) - len(good),
        "total_output_tokens": total,
        "output_throughput": total / duration,
        "mean_ttft_ms": 1000 * statistics.fmean([output["ttft"] for output in good] or [0.0]),
    }
    if args.save_detailed:
        columns = {"input_lens": "prompt", "output_lens": "output", "ttfts": "ttft", "itls": "itl"}
        columns.update(latencies="latency", start_times="start", generated_texts="text", errors="error")
        result.update({name: [output[key] for output in outputs] for name, key in columns.items()})
    print(f"Successful requests: {len(good)}\nFailed requests: {len(outputs) - len(good)}")
    if args.save_result:
        (Path(args.result_dir) / args.result_filename).write_text(json.dumps(result), encoding="utf-8")
    return 0
