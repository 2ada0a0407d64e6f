"""What an engine release no longer takes, and which releases are too old to serve: tables with their sources.

Versions are compared by their numeric release part; ``0.32.0+cpu`` and ``0.32.0rc1`` count as 0.32.0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

OLDEST_KNOWN = "0.16"


class Removal(NamedTuple):
    """A flag or variable that is gone since ``since`` (the first release without it)."""

    name: str
    since: str
    successor: str
    source: str


# Sources are pull requests of vllm-project/vllm. A flag that was gone before OLDEST_KNOWN carries that release.
FLAGS: tuple[Removal, ...] = (
    Removal("--speculative-model", "0.8.4", "`speculative_config: {method, model}`", "PR 15466"),
    Removal("--num-speculative-tokens", "0.8.4", "`speculative_config: {num_speculative_tokens}`", "PR 15466"),
    Removal("--ngram-prompt-lookup-max", "0.8.4", "`speculative_config: {prompt_lookup_max}`", "PR 15466"),
    Removal("--ngram-prompt-lookup-min", "0.8.4", "`speculative_config: {prompt_lookup_min}`", "PR 15466"),
    Removal(
        "--speculative-draft-tensor-parallel-size",
        "0.8.4",
        "`speculative_config: {draft_tensor_parallel_size}`",
        "PR 15466",
    ),
    Removal(
        "--speculative-disable-by-batch-size",
        "0.8.4",
        "`speculative_config: {num_speculative_tokens_per_batch_size}` (0.24 and newer)",
        "PR 15466",
    ),
    Removal("--use-v2-block-manager", "0.10", "nothing: it has been the only one for long", "V0 clean-up"),
    Removal("--num-scheduler-steps", "0.11", "nothing: asynchronous scheduling took its place", "V0 clean-up"),
    Removal("--swap-space", "0.16", "`kv-transfer-config`, or nothing", "V0 clean-up"),
    Removal("--max-seq-len-to-capture", "0.12", "`max-cudagraph-capture-size`", "V0 clean-up"),
    Removal("--guided-decoding-backend", "0.12", "`structured-outputs-config: {backend}`", "V0 clean-up"),
    Removal("--disable-frontend-multiprocessing", "0.12", "nothing", "V0 clean-up"),
    Removal("--enable-reasoning", "0.10", "the model entry's `reasoning_parser` alone", "PR 17452"),
    Removal("--task", "0.16", "`runner`, and `convert` for pooling", "PR 21470"),
    Removal(
        "--disable-log-requests",
        "0.17",
        "nothing (requests are not logged by default), or `no-enable-log-requests`",
        "PR 21739, PR 29402",
    ),
)
VARIABLES: tuple[Removal, ...] = (
    Removal("TRANSFORMERS_CACHE", "0.16", "HF_HOME", "transformers 5 no longer reads it"),
    Removal("VLLM_USE_V1", "0.11", "nothing: V1 is the only engine", "V0 clean-up"),
)


# What --speculative-config takes in 0.16, 0.24 or 0.32, read from vllm/config/speculative.py of each. Which of them an
# engine takes is its own parser's to say.
NEWEST_READ = "0.32"
SPECULATIVE_METHODS: tuple[str, ...] = (
    "ngram",
    "medusa",
    "mlp_speculator",
    "draft_model",
    "suffix",
    "custom_class",
    "eagle",
    "eagle3",
    "extract_hidden_states",
    "mtp",
    "dflash",
    "ngram_gpu",
    "dspark",
    "bailing_hybrid_mtp",
    "bailing_hybrid_v3_mtp",
    "deepseek_mtp",
    "dots3_note_mtp",
    "ernie_mtp",
    "exaone4_5_mtp",
    "exaone_moe_mtp",
    "gemma4_mtp",
    "glm4_moe_lite_mtp",
    "glm4_moe_mtp",
    "glm5_next_mtp",
    "glm_ocr_mtp",
    "hy_v3_mtp",
    "hy_v4_mtp",
    "inkling_mtp",
    "kimi_k3_mtp",
    "longcat_flash_mtp",
    "mimo_mtp",
    "mimo_v2_mtp",
    "minimax_m3_mtp",
    "nemotron_h_mtp",
    "pangu_ultra_moe_mtp",
    "qwen3_5_mtp",
    "qwen3_next_mtp",
    "qwen4_exp_mtp",
    "step3p5_mtp",
)
SPECULATIVE_KEYS: tuple[str, ...] = (
    "attention_backend",
    "code_revision",
    "disable_by_batch_size",
    "disable_eagle_block_drop",
    "disable_padded_drafter_batch",
    "draft_load_config",
    "draft_sample_method",
    "draft_tensor_parallel_size",
    "dspark_draft_topk",
    "enable_adaptive_verification",
    "enforce_eager",
    "index_share_for_mtp_iteration",
    "kv_cache_dtype",
    "max_model_len",
    "method",
    "model",
    "moe_backend",
    "num_speculative_tokens",
    "num_speculative_tokens_per_batch_size",
    "parallel_drafting",
    "prompt_lookup_max",
    "prompt_lookup_min",
    "quantization",
    "rejection_sample_method",
    "revision",
    "speculative_token_tree",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_min_token_prob",
    "synthetic_acceptance_length",
    "synthetic_acceptance_rates",
    "tensor_parallel_size",
    "use_heterogeneous_vocab",
    "use_local_argmax_reduction",
)


class Vulnerability(NamedTuple):
    """A published hole, closed in release ``fixed_in``."""

    id: str
    fixed_in: str
    what: str


# Read in 2026-11. A later hole is not in the table: it proves a version bad, never good.
VULNERABILITIES: tuple[Vulnerability, ...] = (
    Vulnerability("CVE-2026-22807", "0.14.0", "a model's auto_map code runs without --trust-remote-code"),
    Vulnerability("CVE-2026-22778", "0.14.1", "remote code execution through a video, without authentication"),
    Vulnerability("GHSA-v359-jj2x-j536", "0.17.0", "see the advisory"),
    Vulnerability("CVE-2026-27893", "0.18.0", "Kimi-K2.5 and Nemotron-VL run remote code in spite of the flag"),
    Vulnerability("GHSA-3mwp-wvh9-7528", "0.19.0", "see the advisory"),
    Vulnerability("CVE-2026-9540", "0.19.1", "denial of service"),
    Vulnerability("CVE-2026-48746", "0.22.0", "--api-key bypassed by a crafted Host header"),
)


def release(version: str) -> tuple[int, ...]:
    """The numeric release of a version string; ValueError when it has none."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version.strip())
    if not match:
        raise ValueError(f"not a version: {version!r}")
    return tuple(int(part) for part in match.group(1).split("."))


def at_least(version: str, floor: str) -> bool:
    """Whether ``version`` is ``floor`` or newer."""
    have, want = release(version), release(floor)
    width = max(len(have), len(want))
    return have + (0,) * (width - len(have)) >= want + (0,) * (width - len(want))


def newer_than_read(version: str) -> bool:
    """Whether an engine may take words that the tables here do not have yet."""
    return (*release(version), 0)[:2] > release(NEWEST_READ)


def _successor(removal: Removal, version: str) -> str:
    return (
        f"{removal.name} is gone since vLLM {removal.since} (this host has {version}). "
        f"Instead: {removal.successor}. Source: {removal.source}."
    )


def removed_settings(argv: Sequence[str], env: Mapping[str, Any], version: str) -> list[str]:
    """One line for each flag of ``argv`` and variable of ``env`` that engine ``version`` no longer takes."""
    used = {word.split("=", 1)[0].replace("_", "-") for word in argv if word.startswith("--")}
    gone = [item for item in FLAGS if item.name in used and at_least(version, item.since)]
    gone += [item for item in VARIABLES if item.name in env and at_least(version, item.since)]
    return [_successor(item, version) for item in gone]


def known_vulnerabilities(version: str, accepted: Sequence[str] = ()) -> list[str]:
    """One line for each hole that ``version`` has and that the inventory did not accept by its id."""
    return [
        f"vLLM {version} has {hole.id} ({hole.what}; closed in {hole.fixed_in}). Use {floor()} or newer, or accept it: "
        f"`swapgate_host: {{accepted_risks: [{hole.id}]}}`."
        for hole in VULNERABILITIES
        if not at_least(version, hole.fixed_in) and hole.id not in accepted
    ]


def floor() -> str:
    """The oldest release without a hole of the table."""
    return max((hole.fixed_in for hole in VULNERABILITIES), key=release)


def unsupported(version: str | None) -> str | None:
    """Why swapgate does not drive this engine at all, or None."""
    if version is None:
        return "the engine's version cannot be read"
    if not at_least(version, OLDEST_KNOWN):
        return f"vLLM {version} is older than {OLDEST_KNOWN}, the oldest release that swapgate drives"
    return None


def table() -> dict[str, list[dict[str, str]]]:
    """The tables as plain data, for docs and `--json`."""
    return {
        "flags": [item._asdict() for item in FLAGS],
        "variables": [item._asdict() for item in VARIABLES],
        "vulnerabilities": [item._asdict() for item in VULNERABILITIES],
    }
