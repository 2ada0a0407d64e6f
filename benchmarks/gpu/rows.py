"""Configurations that a preflight must accept or refuse on a real engine, most of them out of tests/cases."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple


class Row(NamedTuple):
    """One configuration.

    ``expect`` is "accept" or "refuse". ``spec`` is the speculative config: a map goes through the resolver, a text is
    put on the command line as it is. ``flags`` are added to the command line, ``change`` alters the model's
    config.json. DRAFT in a text is a model folder that exists, NONE one that does not. ``must_say`` has to be in what
    refuses or, for an accepted one, in the engine's notices or effective values.
    """

    name: str
    expect: str
    spec: Mapping[str, Any] | str | None = None
    flags: tuple[str, ...] = ()
    change: Mapping[str, Any] | None = None
    case: str | None = None
    must_say: str = ""


def _ngram(**keys: Any) -> dict[str, Any]:
    return {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 4, "prompt_lookup_max": 4, **keys}


ROWS: tuple[Row, ...] = (
    Row("baseline", "accept"),
    Row("ngram", "accept", _ngram(), must_say="ngram"),
    Row("ngram-gpu", "accept", _ngram(method="ngram_gpu"), must_say="ngram_gpu"),
    Row("method-mistyped", "refuse", json.dumps(_ngram(method="ngramm")), must_say="ngramm"),
    Row("key-unknown", "refuse", json.dumps(_ngram(ngram_prompt_lookup_max=10)), must_say="ngram_prompt_lookup_max"),
    Row(
        "key-of-old-release",
        "refuse",
        '{"method": "ngram", "num_speculative_tokens": 10, "ngram_prompt_lookup_max": 10}',
        case="cfg-ngram-old-prefixed-keys",
        must_say="ngram_prompt_lookup_max",
    ),
    Row(
        "keys-hyphenated",
        "accept",
        '{"method":"ngram","num-speculative-tokens":5,"prompt-lookup-min":4,"prompt-lookup-max":4}',
        case="cfg-draft-hyphenated-key",
        must_say="ngram",
    ),
    Row(
        "min-over-max", "refuse", json.dumps(_ngram(prompt_lookup_min=5, prompt_lookup_max=2)), must_say="prompt_lookup"
    ),
    Row("tokens-zero", "refuse", json.dumps(_ngram(num_speculative_tokens=0)), must_say="num_speculative_tokens"),
    Row(
        "only-lookup-max",
        "accept",
        '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}',
        case="cfg-ngram-only-lookup-max",
        must_say='"prompt_lookup_min": 4',
    ),
    Row(
        "json-escaped",
        "refuse",
        '\\{\\"method\\":\\"qwen3_next_mtp\\"\\,\\"num_speculative_tokens\\":2\\}',
        case="spec-json-backslash-escaped",
        must_say="speculative-config",
    ),
    Row(
        "json-placeholder",
        "refuse",
        '{"method":"mtp","num_speculative_tokens":{num_speculative_tokens}}',
        case="spec-json-unrendered-placeholder",
        must_say="speculative-config",
    ),
    Row(
        "draft-missing",
        "refuse",
        {"method": "draft_model", "model": "NONE", "num_speculative_tokens": 3},
        must_say="draft model",
    ),
    Row(
        "draft-missing-raw",
        "refuse",
        '{"method": "draft_model", "model": "NONE", "num_speculative_tokens": 3}',
    ),
    Row(
        "draft-there",
        "accept",
        {"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 3},
        must_say="draft_model",
    ),
    Row(
        "mtp-without-head",
        "refuse",
        {"method": "mtp", "num_speculative_tokens": 1},
    ),
    Row(
        "medusa-without-method",
        "accept",
        '{"model": "DRAFT", "num_speculative_tokens": 3}',
        case="cfg-medusa-without-method",
        must_say="draft_model",
    ),
    Row(
        "flag-removed",
        "refuse",
        flags=("--disable-log-requests",),
        case="arg-removed-disable-log-requests",
        must_say="disable-log-requests",
    ),
    Row(
        "flag-never-was",
        "refuse",
        flags=("--temperature", "0.8"),
        case="arg-unknown-after-deprecation-warning",
        must_say="--temperature",
    ),
    Row(
        "flags-of-2024",
        "refuse",
        flags=("--speculative-model", "NONE", "--num-speculative-tokens", "4"),
        case="cfg-old-flat-spec-flags",
        must_say="--speculative-model",
    ),
    Row(
        "tool-parser-wrong",
        "refuse",
        flags=("--enable-auto-tool-choice", "--tool-call-parser", "kimi_k9"),
        case="parser-invalid-tool-call-parser",
        must_say="kimi_k9",
    ),
    Row(
        "reasoning-parser-wrong",
        "refuse",
        flags=("--reasoning-parser", "kimi_k9"),
        must_say="kimi_k9",
    ),
    Row("max-model-len-too-long", "refuse", flags=("--max-model-len", "9000000"), must_say="9000000"),
    Row("utilization-over-1", "refuse", flags=("--gpu-memory-utilization", "1.5")),
    Row(
        "two-gpus-of-one",
        "refuse",
        flags=("--pipeline-parallel-size", "2"),
        must_say="2",
    ),
    Row(
        "quantization-gguf-over-fp8",
        "refuse",
        flags=("--quantization", "gguf"),
        change={"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}},
        case="quant-arg-mismatch-fp8-gguf",
        must_say="fp8",
    ),
    Row(
        "quantization-awq-over-gptq",
        "refuse",
        flags=("--quantization", "awq"),
        change={"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}},
        case="quant-arg-mismatch",
        must_say="gptq",
    ),
    Row(
        "remote-code-not-trusted",
        "refuse",
        change={
            "model_type": "capybara_custom",
            "auto_map": {"AutoConfig": "configuration_capybara.CapybaraConfig"},
        },
        case="trust-remote-code-eof",
    ),
    Row(
        "architecture-unknown",
        "refuse",
        change={"architectures": ["NoSuchModelForCausalLM"]},
        case="arch-not-in-registry",
        must_say="NoSuchModelForCausalLM",
    ),
)
