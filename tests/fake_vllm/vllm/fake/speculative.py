"""Checks --speculative-config as the real engine does: same rules, same words, same defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.fake import release
from vllm.fake.errors import ValidationError, problem, value_problem

SYNC_METHODS = ("ngram", "suffix", "medusa", "mlp_speculator", "custom_class")
SELF_DRAFTING = ("ngram", "[ngram]", "ngram_gpu", "suffix", "extract_hidden_states")
TAIL = "very_timeout_sec=120))})"
WORDS_NO_K = (
    "num_speculative_tokens must be provided with speculative model unless the draft model config contains an "
    "n_predict parameter."
)


@dataclass
class SpeculativeConfig:
    """What a --speculative-config became.

    Lookup lengths are in tokens; `model` is the draft's folder, or the method for self-drafting ones.
    """

    method: str
    num_speculative_tokens: int
    prompt_lookup_min: int
    prompt_lookup_max: int
    model: str | None

    def __str__(self) -> str:
        draft = repr(self.model) if self.model and self.model != self.method else None
        return (
            f"SpeculativeConfig(method={self.method!r}, model={draft}, num_spec_tokens={self.num_speculative_tokens})"
        )

    __repr__ = __str__


def fail(text: str, given: dict[str, Any]) -> ValidationError:
    """An error of the config as a whole."""
    return ValidationError("SpeculativeConfig", [value_problem(text, repr({**given, "target_model_config": 0}), TAIL)])


def number_problem(name: str, value: Any, rule: dict[str, Any]) -> str | None:
    """What is wrong with the value of an integer key, or None."""
    text = kind = ""
    if isinstance(value, str) and not value.lstrip("-").isdigit():
        text, kind = "Input should be a valid integer, unable to parse string as an integer", "int_parsing"
    elif isinstance(value, float) and value != int(value):
        text, kind = "Input should be a valid integer, got a number with a fractional part", "int_from_float"
    elif not isinstance(value, (int, float, str)):
        text, kind = "Input should be a valid integer", "int_type"
    elif "gt" in rule and int(value) <= rule["gt"]:
        text, kind = f"Input should be greater than {rule['gt']}", "greater_than"
    elif "ge" in rule and int(value) < rule["ge"]:
        text, kind = f"Input should be greater than or equal to {rule['ge']}", "greater_than_equal"
    return problem(name, text, kind, value) if kind else None


def field_problem(name: str, value: Any, rule: dict[str, Any], methods: list[str]) -> str | None:
    """What is wrong with one key's value, or None."""
    if value is None:
        return None
    if name == "method" and value not in methods:
        choices = ", ".join(repr(method) for method in methods[:-1]) + f" or {methods[-1]!r}"
        return problem(name, f"Input should be {choices}", "literal_error", value)
    if rule["type"] == "int":
        return number_problem(name, value, rule)
    if rule["type"] == "str" and not isinstance(value, str):
        return problem(name, "Input should be a valid string", "string_type", value)
    return None


def check_fields(given: dict[str, Any]) -> None:
    """Raises for wrong values, then unknown keys, all in one error."""
    known = release.record()["speculative"]
    problems = []
    for name, rule in known["fields"].items():
        if name in given:
            found = field_problem(name, given[name], rule, known["methods"])
            problems += [found] if found else []
    for name, value in given.items():
        if name not in known["fields"]:
            problems.append(problem(name, "Unexpected keyword argument", "unexpected_keyword_argument", value))
    if problems:
        raise ValidationError("SpeculativeConfig", problems)


def lookup_range(given: dict[str, Any]) -> tuple[int, int]:
    """(min, max) of an n-gram lookup: 5 and 5 when neither is given, a missing one copied from the other.

    Raises when min > max.
    """
    low, high = given.get("prompt_lookup_min"), given.get("prompt_lookup_max")
    if low is None and high is None:
        low = high = 5
    low, high = low if low is not None else high, high if high is not None else low
    if int(low) > int(high):  # type: ignore[arg-type]
        raise fail(f"prompt_lookup_min={low} must be <= prompt_lookup_max={high}", given)
    return int(low), int(high)  # type: ignore[arg-type]


def resolve(given: Any, target_model: str, draft_exists: Any) -> SpeculativeConfig:
    """The config that a JSON value becomes.

    `draft_exists(path)` raises the loader's error for a draft that cannot be read.

    Raises AttributeError for JSON that is no object, ImportError for a method whose package is missing,
    NotImplementedError for a method that the target has no weights for, else ValidationError.
    """
    if not isinstance(given, dict):
        raise AttributeError(f"{type(given).__name__!r} object has no attribute 'items'")
    check_fields(given)
    if given.get("tensor_parallel_size") is not None:
        text = (
            "'tensor_parallel_size' is not a valid argument in the speculative_config. Please pass "
            "'draft_tensor_parallel_size' instead."
        )
        raise fail(text, given)
    model, count = given.get("model"), given.get("num_speculative_tokens")
    method = given.get("method") or ("ngram" if model in ("ngram", "[ngram]") else "draft_model")
    if method in release.record()["speculative"]["mtp_methods"]:
        method = "mtp"
    if method == "suffix":
        raise ImportError(
            "Arctic Inference is required for suffix decoding. Install via `pip install arctic-inference==0.1.1`."
        )
    if count is None and model is None:
        raise fail(WORDS_NO_K, given)
    if model is None:
        if method == "mtp":
            raise NotImplementedError("Unsupported speculative method: 'mtp'")
        if method == "custom_class":
            text = (
                "method='custom_class' requires 'model' to contain the custom proposer module path (e.g., "
                "'my_module.MyProposer')."
            )
            raise fail(text, given)
        if method not in SELF_DRAFTING:
            raise fail("num_speculative_tokens was provided but without speculative model.", given)
        model = "ngram" if method == "[ngram]" else method
    low, high = lookup_range(given) if method in ("ngram", "ngram_gpu") else (0, 0)
    if method not in SELF_DRAFTING and method != "custom_class" and model != target_model:
        draft_exists(model)
    if count is None:
        raise fail("A speculative model was provided, but `num_speculative_tokens` was not provided", given)
    return SpeculativeConfig(method, int(count), low, high, model)
