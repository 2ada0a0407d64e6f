"""The knobs of one start: a JSON file, a rule per served variant, defaults that are a healthy engine."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

DEFAULT_FILE = "/etc/fake_vllm.json"
ENVIRONMENT = "FAKE_VLLM_KNOBS"


@dataclass
class Knobs:
    """One start's knobs; README.md says what each does. Times are seconds, sizes MiB, rates tokens per second."""

    # the load
    load_s: float = 2.0
    load_profile: str | None = None
    shards: int | None = None
    slow_shards: float | None = None
    crash_at: str | float | None = None
    crash_with: str = "cuda_oom"
    crash_rank: int = 0
    crash_signal: int | None = None
    hang_at: str | float | None = None
    noise: bool | list[str] = False
    bind_early: bool = False
    # after ready
    exit0_after_ready_s: float | None = None
    die_after_ready_s: float | None = None
    die_signal: int | None = None
    die_on_first_completion: bool = False
    health_flaps: dict[str, float] | None = None
    health_ok_but_engine_dead: bool = False
    engine_death_exit_s: float = 1.5
    exit_code: int | None = None
    # answers
    completions_hang: bool = False
    completions_garbage: bool = False
    empty_answer: bool = False
    loop_output: bool = False
    answer_tokens: int | None = None
    answer_seed: int = 0
    wrong_served_name: str | None = None
    # speed
    tokens_per_s: float = 200.0
    ttft_s: float = 0.01
    acceptance: float | None = None
    spec_step_cost: float = 1.1
    spec_speedup: float | None = None
    batch_slowdown: float = 0.02
    # processes
    ignore_sigterm: bool = False
    stop_s: float = 0.3
    second_term_s: float = 1.0
    swallowed_term: str = "hang"
    abort_hangs: bool = False
    orphan_workers: bool = False
    memory_mib: int = 0
    shm_mib: int = 1
    extra_listener_port: int | None = None
    # not a knob: the rules that were applied, for the first log line
    applied: list[str] = field(default_factory=list)


def fail(text: str) -> SystemExit:
    """A mistake in the knobs file ends the fake at once: a fault test with a misspelt knob must not pass."""
    print(f"fake vllm: {text}; see tests/fake_vllm/README.md for the knobs", file=sys.stderr)
    return SystemExit(64)


def knobs_file() -> Path:
    """Where the knobs are: the file that the environment names, or the default."""
    return Path(os.environ.get(ENVIRONMENT) or DEFAULT_FILE)


def merged(content: dict[str, Any], argv: str) -> tuple[dict[str, Any], list[str]]:
    """The values for a command line, and the rules that matched: top-level keys first, then each matching rule in
    order.
    """
    values = {key: value for key, value in content.items() if key not in ("variants", "about")}
    applied = []
    rules = content.get("variants", [])
    if not isinstance(rules, list):
        raise fail(f"`variants` is a list of objects with `when`, found {type(rules).__name__}")
    for rule in rules:
        if not isinstance(rule, dict) or not isinstance(rule.get("when"), str):
            raise fail(
                f"each entry of `variants` needs `when`, a substring of the command line, found {json.dumps(rule)}"
            )
        unless = rule.get("unless")
        if rule["when"] in argv and not (unless and unless in argv):
            applied.append(rule["when"])
            values.update({key: value for key, value in rule.items() if key not in ("when", "unless", "about")})
    return values, applied


def load(argv: list[str]) -> Knobs:
    """The knobs for this command line.

    Ends the program with status 64 for a file that cannot be read or an unknown knob.
    """
    file = knobs_file()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if os.environ.get(ENVIRONMENT):
            raise fail(f"{ENVIRONMENT} names {file}, which does not exist") from None
        return Knobs()
    except (OSError, ValueError) as error:
        raise fail(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise fail(f"{file} holds {type(content).__name__}, expected an object")
    values, applied = merged(content, " ".join(argv))
    known = {item.name for item in fields(Knobs)} - {"applied"}
    unknown = sorted(set(values) - known)
    if unknown:
        raise fail(f"unknown knob {', '.join(unknown)} in {file}, known are {', '.join(sorted(known))}")
    return Knobs(**values, applied=applied)
