"""What a benchmark's passes measured: from the engine's own load generator and its metrics to raw request lines.

Pure. A RESULT is the JSON that `vllm bench serve --save-result --save-detailed` writes; RECORDED are lines of
`swapgate record` by prompt id; COUNTS are `counts` of one look at the metrics page.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from . import answers, metrics
from .answer_stream import gaps_of, percentile

JsonDict = dict[str, Any]

LISTS = ("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors")
COUNTERS = {
    "generated": "vllm:generation_tokens_total",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "drafted": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
    "prefix_queries": "vllm:prefix_cache_queries_total",
    "prefix_hits": "vllm:prefix_cache_hits_total",
    "engine_steps": "vllm:iteration_tokens_total_count",
}
POSITIONS = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
FINISHED = "vllm:request_success_total"


class ResultError(ValueError):
    """A result that cannot be used; the text says what was found against what was expected."""


def levels(asked: Sequence[int], most: int | None) -> tuple[list[int], list[int]]:
    """(concurrency levels to run, those left out because the engine runs at most ``most`` sequences), each once."""
    kept = sorted({level for level in asked if not most or level <= most})
    return kept, sorted(set(asked) - set(kept))


def counts(samples: Sequence[metrics.Sample]) -> JsonDict:
    """The counters that a benchmark looks at: COUNTERS (null: the engine has no such metric), "by_position": [n, ...],
    "finished": {reason: n}, "kv_cache_tokens": n | null."""
    found: JsonDict = {key: metrics.total(list(samples), name) for key, name in COUNTERS.items()}
    positions: dict[int, float] = {}
    finished: dict[str, float] = {}
    found["kv_cache_tokens"] = None
    for name, labels, value in samples:
        if name == POSITIONS and labels.get("position", "").isdigit():
            positions[int(labels["position"])] = positions.get(int(labels["position"]), 0.0) + value
        elif name == FINISHED:
            reason = labels.get("finished_reason", "unknown")
            finished[reason] = finished.get(reason, 0.0) + value
        elif name == "vllm:cache_config_info":
            found["kv_cache_tokens"] = _kv_tokens(labels)
    return dict(found, by_position=[positions[key] for key in sorted(positions)], finished=finished)


def _kv_tokens(labels: Mapping[str, str]) -> int | None:
    size, blocks, block = (labels.get(key, "") for key in ("kv_cache_size_tokens", "num_gpu_blocks", "block_size"))
    if size.isdigit():
        return int(size)
    return int(blocks) * int(block) if blocks.isdigit() and block.isdigit() else None


def between(before: Mapping[str, Any], after: Mapping[str, Any], concurrency: int) -> JsonDict:
    """What was counted between two looks: COUNTERS and "by_position" as differences, "finished" without zeros,
    "requests": n, "steps": steps after each answer's first token, "tokens_per_step": n | null.

    Steps follow from tokens: each yields one and those of its draft that were accepted. The last draft of an answer may
    reach past its end, which makes them too few; one stream's steps are counted by the engine itself.
    """
    found: JsonDict = {
        key: None if after.get(key) is None else int(after[key] - (before.get(key) or 0.0)) for key in COUNTERS
    }
    earlier = [*before["by_position"], *[0.0] * len(after["by_position"])]
    found["by_position"] = [int(now - then) for now, then in zip(after["by_position"], earlier)]
    finished = {key: int(value - before["finished"].get(key, 0.0)) for key, value in after["finished"].items()}
    found["finished"] = {key: value for key, value in finished.items() if value}
    found["requests"] = sum(found["finished"].values())
    tokens = (found["generated"] or 0) - found["requests"]
    steps = tokens - (found["accepted"] or 0)
    if concurrency == 1 and found["engine_steps"] is not None:
        counted = found["engine_steps"] - found["requests"]  # the first token of each comes from its prefill
        if steps <= counted <= steps + len(found["by_position"]) * found["requests"]:
            steps = counted
    found["steps"] = max(steps, 0)
    found["tokens_per_step"] = tokens / steps if tokens > 0 and steps > 0 else None
    return found


def together(parts: Sequence[Mapping[str, Any]]) -> JsonDict:
    """Several `between` added up."""
    found: JsonDict = {}
    for key in (*COUNTERS, "requests", "steps"):
        known = [part[key] for part in parts if part.get(key) is not None]
        found[key] = sum(known) if known else None
    longest = max((len(part["by_position"]) for part in parts), default=0)
    found["by_position"] = [
        sum(part["by_position"][at] for part in parts if at < len(part["by_position"])) for at in range(longest)
    ]
    reasons = {reason for part in parts for reason in part["finished"]}
    found["finished"] = {reason: sum(part["finished"].get(reason, 0) for part in parts) for reason in sorted(reasons)}
    tokens = (found["generated"] or 0) - (found["requests"] or 0)
    found["tokens_per_step"] = tokens / found["steps"] if found["steps"] and tokens > 0 else None
    return found


def check_result(result: Any, prompts: Sequence[Mapping[str, Any]]) -> None:
    """ResultError unless RESULT has one entry a prompt in each of its lists."""
    if not isinstance(result, dict):
        raise ResultError(f"found {type(result).__name__}, expected the load generator's JSON object")
    for key in LISTS:
        found = result.get(key)
        if not isinstance(found, list) or len(found) != len(prompts):
            many = len(found) if isinstance(found, list) else f"no list ({found!r:.40})"
            raise ResultError(f"{key}: found {many}, expected {len(prompts)}, one a prompt: was --save-detailed taken?")


def other_tokens(
    result: Mapping[str, Any], prompts: Sequence[Mapping[str, Any]], recorded: Mapping[str, Any]
) -> list[str]:
    """Prompts that the load generator sent as other tokens than the recorder did, each in words; empty when none."""
    found = []
    for at, prompt in enumerate(prompts):
        line = recorded.get(prompt["id"])
        if line is None or line.get("error") or result["errors"][at]:
            continue
        wanted, sent = len(line["prompt_token_ids"]), result["input_lens"][at]
        if sent != wanted:
            found.append(f"{prompt['id']}: found {sent} tokens sent, expected {wanted} as recorded")
    return found


def same_answer(line: Mapping[str, Any] | None, tokens: int, text: str) -> bool:
    """Whether the recorder had the very answer: the engine then drafted and accepted the same, step by step."""
    return line is not None and not line.get("error") and line["output_tokens"] == tokens and line["text"] == text


def request_lines(
    result: Mapping[str, Any],
    prompts: Sequence[Mapping[str, Any]],
    recorded: Mapping[str, Any],
    head: Mapping[str, Any],
) -> list[JsonDict]:
    """One raw line a prompt, as scripts/verdict.py reads them; ``head`` has "arm", "variant", "boot", "repeat" and
    "concurrency". ResultError for a result of another shape."""
    check_result(result, prompts)
    latencies = result.get("latencies")
    lines = []
    for at, prompt in enumerate(prompts):
        line: JsonDict = {**head, "prompt_id": prompt["id"], "class": prompt["class"]}
        error = result["errors"][at]
        if error:
            said = [part for part in str(error).strip().splitlines() if part.strip()]
            lines.append({**line, "error": said[-1].strip() if said else "failed without a word"})
            continue
        ttft, itls = float(result["ttfts"][at]), [float(gap) for gap in result["itls"][at]]
        e2e = float(latencies[at]) if isinstance(latencies, list) else ttft + math.fsum(itls)
        tokens, text = int(result["output_lens"][at]), str(result["generated_texts"][at])
        known = recorded.get(prompt["id"])
        alike = known if same_answer(known, tokens, text) else None
        # The load generator does not say why an answer ended, nor in how many steps it came.
        finish = alike["finish_reason"] if alike else "length" if tokens >= prompt["max_tokens"] else "stop"
        times = [0.0]
        for gap in itls:
            times.append(times[-1] + gap)
        line.update(
            ttft_s=ttft,
            decode_s=max(e2e - ttft, 0.0),
            e2e_s=e2e,
            output_tokens=tokens,
            finish_reason=finish,
            text=text,
            itl_s=gaps_of(times),
            tool_call_ok=answers.tool_call_ok(text, finish),
            reasoning_ok=answers.reasoning_ok(known["text"], known.get("reasoning")) if known else None,
            error=None,
        )
        if alike:
            line.update({key: alike.get(key) for key in ("steps", "drafted", "accepted")})
        lines.append(line)
    return lines


def failed_lines(prompts: Sequence[Mapping[str, Any]], head: Mapping[str, Any], cause: str) -> list[JsonDict]:
    """The raw lines of a pass that is void: every prompt failed, for the same reason."""
    return [{**head, "prompt_id": prompt["id"], "class": prompt["class"], "error": cause} for prompt in prompts]


def tpot(line: Mapping[str, Any]) -> float | None:
    """Seconds per output token after the first of one raw line; None with fewer than two tokens or an error."""
    if line.get("error") or line["output_tokens"] < 2:
        return None
    return float(line["decode_s"] / (line["output_tokens"] - 1))


def summary(lines: Iterable[Mapping[str, Any]]) -> list[JsonDict]:
    """By arm, boot and concurrency, in the lines' order: {"arm", "variant", "boot", "concurrency", "requests",
    "failed", "ttft_s", "tpot_s", "e2e_s", "itl_s": {"p50", "p95"} | null, "output_tokens"}.

    ITL is the median over requests of each request's own percentiles.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        if "facts" not in line:
            key = tuple(line[name] for name in ("arm", "variant", "boot", "concurrency"))
            groups.setdefault(key, []).append(line)
    rows = []
    for (arm, variant, boot, concurrency), found in groups.items():
        good = [line for line in found if not line.get("error")]
        row: JsonDict = {"arm": arm, "variant": variant, "boot": boot, "concurrency": concurrency}
        row.update(requests=len(found), failed=len(found) - len(good))
        row["output_tokens"] = sum(line["output_tokens"] for line in good)
        columns = {
            "ttft_s": [line["ttft_s"] for line in good],
            "tpot_s": [value for line in good if (value := tpot(line)) is not None],
            "e2e_s": [line["e2e_s"] for line in good],
        }
        for name, values in columns.items():
            row[name] = {"p50": percentile(values, 50), "p95": percentile(values, 95)} if values else None
        gaps = [line["itl_s"] for line in good if line.get("itl_s")]
        row["itl_s"] = (
            {share: percentile([gap[share] for gap in gaps], 50) for share in ("p50", "p95")} if gaps else None
        )
        rows.append(row)
    return rows


def level_of(lines: Iterable[Mapping[str, Any]]) -> float | None:
    """Mean over prompts of the mean log seconds per output token: one number for how fast a load decodes."""
    logs: dict[str, list[float]] = {}
    for line in lines:
        value = tpot(line) if "facts" not in line else None
        if value:
            logs.setdefault(str(line["prompt_id"]), []).append(math.log(value))
    means = [math.fsum(values) / len(values) for values in logs.values()]
    return math.fsum(means) / len(means) if means else None


def expected_seconds(
    tokens: int, requests: int, seconds_per_token: float, concurrency: Sequence[int], repeats: int, start_s: float
) -> float:
    """At most how long a benchmark takes: the recorder's pass, then warm-up and ``repeats`` passes a level.

    ``tokens`` are those of all answers at their longest, ``start_s`` what one start of the load generator costs. A
    level's streams are taken to slow each other down by a fifth at most times their number.
    """
    one_stream = tokens * seconds_per_token + requests * 2 * seconds_per_token
    passes = sum((repeats + 1) * (one_stream / min(level, max(requests, 1)) * 1.2 + start_s) for level in concurrency)
    return one_stream + passes


def plan_text(host: str, plan: Mapping[str, Any]) -> str:
    """What a benchmark will take, for people, before it begins."""
    left = f"; left out above --max-num-seqs: {', '.join(map(str, plan['left_out']))}" if plan["left_out"] else ""
    levels = ", ".join(map(str, plan["levels"])) or "none"
    minutes = max(1, round(plan["at_most_s"] / 60))
    return (
        f"{host}: benchmark of '{plan['variant']}' at {levels} streams{left}: {plan['prompts']} prompts are recorded, "
        f"then asked in {plan['passes']} passes; {minutes} min if every answer is as long as it may be, mostly less"
    )


def progress_line(host: str, status: Mapping[str, Any]) -> str:
    """One line of progress in the shape of a swap's: host | variant | benchmark | how far."""
    found = status["progress"]
    if not found:
        return f"{host} | - | benchmark | beginning"
    left = f"{found['left_s'] / 60:.1f} min left"
    return (
        f"{host} | {found['variant']} | benchmark | {found['done']} of {found['of']} passes | {found['what']} | {left}"
    )
