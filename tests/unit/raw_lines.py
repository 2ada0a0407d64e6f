"""Raw lines of runs with a known truth, and run folders made of them."""

import json
import math
import random

import numpy as np

KINDS = ("reasoning", "code_edit", "quote_rag", "summary")


def lines_of(
    effect=1.4, prompts=24, repeats=2, boots="ABA", shared=False, sd=0.05, noise=0.01, boot_sd=0.0, seed=1, facts=True
):
    """Raw lines of a run with a known speed-up; `shared`: each letter of `boots` is not a load, they share load 0."""
    rng = np.random.default_rng(seed)
    gain = math.log(effect) + rng.normal(0, sd, prompts)
    level = math.log(0.0136) + rng.normal(0, 0.05, prompts)
    out = []
    for number, arm in enumerate(boots):
        moved = rng.normal(0, boot_sd)
        if facts:
            speculation = {"method": "ngram", "drafted": 900, "accepted": 400} if arm == "B" else {"method": None}
            out.append(
                {
                    "arm": arm,
                    "boot": 0 if shared else number,
                    "facts": {
                        "kv_cache_tokens": 100_000 if arm == "A" else 90_000,
                        "preemptions": 0,
                        "throttle_reasons": [],
                        **speculation,
                    },
                }
            )
        for repeat in range(repeats):
            for prompt in range(prompts):
                tokens = 80 + 5 * prompt
                log = level[prompt] + moved + rng.normal(0, noise) - (gain[prompt] if arm == "B" else 0)
                decode = math.exp(log) * (tokens - 1)
                ttft = 0.2 * math.exp(rng.normal(0, 0.01))
                out.append(
                    {
                        "arm": arm,
                        "variant": {"A": "base", "B": "ngram", "C": "suffix"}[arm],
                        "boot": 0 if shared else number,
                        "repeat": repeat,
                        "prompt_id": f"p{prompt}",
                        "class": KINDS[prompt % len(KINDS)],
                        "ttft_s": ttft,
                        "decode_s": decode,
                        "e2e_s": ttft + decode,
                        "output_tokens": tokens,
                        "finish_reason": "stop",
                        "token_ids": answer(prompt, tokens),
                        "tool_call_ok": True,
                        "reasoning_ok": True,
                    }
                )
    return out


def answer(prompt, tokens):
    """Token ids of one prompt's answer, without a loop."""
    rng = random.Random(prompt)
    return [rng.randrange(30_000) for _ in range(tokens)]


def requests(lines, arm=None, prompts=None):
    """Request lines of an arm, of the first so many prompts."""
    return [
        line
        for line in lines
        if "prompt_id" in line
        and arm in (None, line["arm"])
        and (prompts is None or int(line["prompt_id"][1:]) < prompts)
    ]


def run_folder(folder, lines, loads=(), **about):
    """A run folder of raw lines, with a load for each boot in them and those of `loads` besides. Returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "raw.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    variants = {line["arm"]: line["variant"] for line in lines if "variant" in line}
    measured = [
        {
            "arm": arm,
            "variant": variants[arm],
            "boot": boot,
            "release": f"{arm.lower()}0ffee" * 8,
            "unit": f"vllm-kimi-{variants[arm]}.service",
            "engine_package": "vllm",
            "engine_version": "0.32.0",
            "changes": ["async scheduling is off"] if arm != "A" else [],
            "speculative_config": None,
            "driver": "575.51",
            "gpus": ["NVIDIA H200"],
            "throttle_reasons": [],
            "load_s": 1803.4,
            "outcome": "measured",
            "cause": None,
            "started_unix": 1.79e9 + 3600 * boot,
        }
        for arm, boot in dict.fromkeys((line["arm"], line["boot"]) for line in lines)
    ]
    known = {
        "schema": 1,
        "kind": "experiment",
        "id": folder.name,
        "host": "gpu-host-1",
        "model": "kimi-k2.5",
        "started_unix": 1.79e9,
        "ended_unix": 1.79e9 + 9000,
        "commit": "c204a07",
        "prompts": {"file": "mine.jsonl", "sha256": "ab" * 32, "count": 24},
        "settings": {"concurrency": [1], "cache": "cold"},
        "loads": [*measured, *loads],
        **about,
    }
    (folder / "run.json").write_text(json.dumps(known))
    return folder
