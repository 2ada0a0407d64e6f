"""The verdict's input: raw lines of a run, and prompt sets, each checked line by line."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "collections"))

from ansible_collections.swapgate.core.plugins.module_utils import answers

from scripts.json_files import InputError
from scripts.verdict_texts import loops, loops_text, synthetic_texts

FEWEST_PROMPTS = 16
TOKEN_LIMIT = 2**31
SYNTHETIC_CLASSES = ("random", "synthetic", "dummy", "lorem", "prefix_repetition")
PROMPT_KEYS = ("id", "class", "messages", "max_tokens")


@dataclass(frozen=True)
class Request:
    """One answered or failed request. Times in seconds; without an answer (`error`) they are NaN."""

    where: str
    arm: str
    variant: str
    boot: int
    repeat: int
    concurrency: int
    prompt: str
    kind: str
    ttft_s: float
    decode_s: float
    e2e_s: float
    itl_p95_s: float
    tokens: int
    finish: str
    answer: tuple[int, ...] | str | None
    looping: bool
    error: str | None
    tool_call_ok: bool | None
    reasoning_ok: bool | None

    @property
    def seconds_per_token(self) -> float:
        """Decode seconds per output token after the first; NaN with fewer than two tokens or without an answer."""
        return self.decode_s / (self.tokens - 1) if self.error is None and self.tokens > 1 else math.nan


@dataclass
class Run:
    """The lines of one file: requests, and by (arm, boot) what is known of that load."""

    name: str
    requests: list[Request] = field(default_factory=list)
    facts: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)

    @property
    def arms(self) -> list[str]:
        """Arms by their first line."""
        return list(dict.fromkeys(request.arm for request in self.requests))


def wrong(where: str, key: str, found: object, expected: str) -> InputError:
    shown = json.dumps(found, ensure_ascii=False, default=str)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return InputError(f"{where}: {key}: found {shown}, expected {expected}; correct the line and run again")


def text_of(line: Mapping[str, Any], key: str, where: str, expected: str = "a text that is not empty") -> str:
    value = line.get(key)
    if not isinstance(value, str) or not value.strip():
        raise wrong(where, key, value, expected)
    return value


def whole_of(line: Mapping[str, Any], key: str, where: str, least: int, default: int | None = None) -> int:
    value = line.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise wrong(where, key, value, f"a whole number of at least {least}")
    return value


def seconds_of(line: Mapping[str, Any], key: str, where: str, above: bool) -> float:
    value = line.get(key)
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not math.isfinite(value)
        or value < 0
        or (above and value == 0)
    ):
        raise wrong(where, key, value, "seconds, a finite number above 0" if above else "seconds, a finite number")
    return float(value)


def flag_of(line: Mapping[str, Any], key: str, where: str) -> bool | None:
    value = line.get(key)
    if value is not None and not isinstance(value, bool):
        raise wrong(where, key, value, "true, false or null")
    return value


def itl_p95_of(line: Mapping[str, Any], where: str) -> float:
    """95th percentile of this request's inter-token latencies, in seconds; NaN where it is not recorded."""
    itl = line.get("itl_s")
    if itl is None or (isinstance(itl, dict) and itl.get("p95") is None):
        return math.nan
    if not isinstance(itl, dict):
        raise wrong(where, "itl_s", itl, '{"p50", "p95", "p99"} in seconds, or null')
    return seconds_of(itl, "p95", where, False)


def answer_of(line: Mapping[str, Any], where: str) -> tuple[tuple[int, ...] | str | None, bool]:
    """What identifies the answer (token ids before text), and whether it loops."""
    ids, text = line.get("token_ids"), line.get("text")
    if ids is not None:
        if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < TOKEN_LIMIT for i in ids):
            raise wrong(where, "token_ids", ids, "a list of whole numbers from 0 to below 2^31")
        return tuple(ids), loops(ids)
    if text is not None:
        if not isinstance(text, str):
            raise wrong(where, "text", text, "a text")
        return text, loops_text(text)
    return None, False


def parse_request(line: Mapping[str, Any], where: str) -> Request:
    """The request of one raw line. Raises InputError with `where` in it."""
    error = line.get("error")
    if error is not None and not isinstance(error, str):
        raise wrong(where, "error", error, "a text or null")
    failed = bool(error)
    tokens = 0 if failed else whole_of(line, "output_tokens", where, 0)
    ttft = decode = e2e = math.nan
    answer, looping, finish = None, False, ""
    tool_call_ok, reasoning_ok = flag_of(line, "tool_call_ok", where), flag_of(line, "reasoning_ok", where)
    if not failed:
        ttft, e2e = seconds_of(line, "ttft_s", where, False), seconds_of(line, "e2e_s", where, True)
        decode = seconds_of(line, "decode_s", where, tokens > 1)
        if decode > e2e * 1.001 + 0.001:
            raise wrong(where, "decode_s", decode, f"at most e2e_s ({e2e}), both in seconds")
        finish = text_of(line, "finish_reason", where)
        answer, looping = answer_of(line, where)
        text = line.get("text")
        if isinstance(text, str):
            tool_call_ok = answers.tool_call_ok(text, finish) if tool_call_ok is None else tool_call_ok
            reasoning_ok = answers.reasoning_ok(text) if reasoning_ok is None else reasoning_ok
    prompt = line.get("prompt_id")
    if isinstance(prompt, bool) or not isinstance(prompt, (str, int)) or prompt == "":
        raise wrong(where, "prompt_id", prompt, "a text or a whole number")
    return Request(
        where=where,
        arm=text_of(line, "arm", where),
        variant=text_of(line, "variant", where),
        boot=whole_of(line, "boot", where, 0),
        repeat=whole_of(line, "repeat", where, 0),
        concurrency=whole_of(line, "concurrency", where, 1, 1),
        prompt=str(prompt),
        kind=text_of(line, "class", where),
        ttft_s=ttft,
        decode_s=decode,
        e2e_s=e2e,
        itl_p95_s=math.nan if failed else itl_p95_of(line, where),
        tokens=tokens,
        finish=finish,
        answer=answer,
        looping=looping,
        error=error if failed else None,
        tool_call_ok=tool_call_ok,
        reasoning_ok=reasoning_ok,
    )


def parse_facts(line: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The known facts of a boot line, checked; others are kept as they are. Raises InputError."""
    facts = line["facts"]
    if not isinstance(facts, dict):
        raise wrong(where, "facts", facts, "an object")
    for key in ("kv_cache_tokens", "preemptions", "drafted", "accepted"):
        if facts.get(key) is not None:
            whole_of(facts, key, where, 0)
    if facts.get("method") is not None:
        text_of(facts, "method", where, "the speculation's method, or null without speculation")
    reasons = facts.get("throttle_reasons")
    if reasons is not None and not (isinstance(reasons, list) and all(isinstance(reason, str) for reason in reasons)):
        raise wrong(where, "throttle_reasons", reasons, "a list of texts")
    return facts


def json_lines(lines: Iterable[bytes], name: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """(file:line, object) of every line that is not blank. Raises InputError."""
    for number, raw in enumerate(lines, 1):
        where = f"{name}:{number}"
        try:
            text = raw.decode("utf-8")
            value = json.loads(text) if text.strip() else None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InputError(
                f"{where}: not JSON ({error}); expected one JSON object a line; "
                "was the recording cut off? remove the line or record again"
            ) from error
        if text.strip():
            if not isinstance(value, dict):
                raise InputError(f"{where}: found {type(value).__name__}, expected one JSON object a line")
            yield where, value


def read_run(lines: Iterable[bytes], name: str, least_arms: int = 2) -> Run:
    """Requests and facts of a file of raw lines, of at least so many arms.

    Raises InputError, with file:line where one line is at fault."""
    run = Run(name)
    seen: dict[tuple[str, int, int, int, str], str] = {}
    variants: dict[str, tuple[str, str]] = {}
    kinds: dict[str, tuple[str, str]] = {}
    for where, line in json_lines(lines, name):
        if "facts" in line:
            at = (text_of(line, "arm", where), whole_of(line, "boot", where, 0))
            run.facts.setdefault(at, {}).update(parse_facts(line, where))
            continue
        request = parse_request(line, where)
        key = (request.arm, request.boot, request.repeat, request.concurrency, request.prompt)
        if key in seen:
            raise InputError(
                f"{where}: arm {request.arm}, boot {request.boot}, repeat {request.repeat}, prompt "
                f"{request.prompt}: found twice, first at {seen[key]}; expected once: was the same arm "
                "recorded twice into one file? number its boots or repeats on"
            )
        seen[key] = where
        for what, of, table, value in (
            ("variant of arm", request.arm, variants, request.variant),
            ("class of prompt", request.prompt, kinds, request.kind),
        ):
            known = table.setdefault(of, (value, where))
            if known[0] != value:
                raise InputError(
                    f"{where}: {what} {of}: found {value!r}, expected {known[0]!r} as at {known[1]}; "
                    "an arm is one variant, a prompt has one class"
                )
        run.requests.append(request)
    if len(run.arms) < least_arms:
        raise InputError(
            f"{name}: found {len(run.arms)} arm(s) {run.arms}, expected at least {least_arms}; "
            "record the other arm into the same file"
        )
    return run


@dataclass(frozen=True)
class Prompt:
    """One prompt of a set; `messages` are {"role", "content"}, the last of them the user's."""

    id: str
    kind: str
    messages: tuple[dict[str, str], ...]
    max_tokens: int

    @property
    def text(self) -> str:
        """All that is said, one message after the other."""
        return "\n".join(message["content"] for message in self.messages)


def read_prompts(lines: Iterable[bytes], name: str) -> list[Prompt]:
    """The prompts of a JSONL file, checked line by line. Raises InputError."""
    prompts: list[Prompt] = []
    ids: dict[str, str] = {}
    texts: dict[str, str] = {}
    for where, line in json_lines(lines, name):
        extra = sorted(set(line) - set(PROMPT_KEYS))
        if extra:
            raise InputError(
                f"{where}: found the key(s) {', '.join(extra)}, expected only {', '.join(PROMPT_KEYS)}; "
                "sampling is fixed by the benchmark, and ignore_eos would time text that nobody asked for"
            )
        identity, kind = text_of(line, "id", where), text_of(line, "class", where)
        messages = line.get("messages")
        if not isinstance(messages, list) or not messages:
            raise wrong(where, "messages", messages, 'a list of {"role", "content"}')
        for message in messages:
            if (
                not isinstance(message, dict)
                or set(message) != {"role", "content"}
                or message["role"] not in ("system", "user", "assistant")
            ):
                raise wrong(where, "messages", message, '{"role": system, user or assistant, "content": text}')
            text_of(message, "content", where)
        if messages[-1]["role"] != "user":
            raise wrong(where, "messages", messages[-1]["role"], "the last message to be the user's")
        prompt = Prompt(identity, kind, tuple(messages), whole_of(line, "max_tokens", where, 16))
        for what, table, value in (("id", ids, identity), ("text", texts, prompt.text)):
            if value in table:
                raise InputError(
                    f"{where}: {what}: found the same as at {table[value]}, expected every prompt to be "
                    "another one: a second copy counts nothing and warms caches; remove one"
                )
            table[value] = where
        prompts.append(prompt)
    if not prompts:
        raise InputError(f"{name}: found no prompt, expected at least {FEWEST_PROMPTS}")
    return prompts


def check_prompts(prompts: Sequence[Prompt]) -> list[str]:
    """What keeps a set from carrying an n-gram or suffix verdict; empty when nothing does."""
    problems = []
    if len(prompts) < FEWEST_PROMPTS:
        problems.append(f"found {len(prompts)} prompts, expected at least {FEWEST_PROMPTS}, better 60; add prompts")
    declared = sorted({prompt.kind for prompt in prompts if prompt.kind.casefold() in SYNTHETIC_CLASSES})
    if declared:
        problems.append(f"classes {', '.join(declared)}: synthetic by name, expected text that users send; replace it")
    for identity, why in synthetic_texts({prompt.id: prompt.text for prompt in prompts}).items():
        problems.append(f"prompt {identity}: {why}; replace it")
    return problems
