"""Reads a systemd unit that somebody wrote by hand and says what in it will hurt an engine. Text only: no host is
asked.

``systemd-analyze verify`` finds what systemd does not understand; this finds what systemd does understand and an
engine with a load of half an hour does not survive. Units that swapgate renders come from `units`.
"""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

Setting = tuple[str, str, str]  # section, key, value

# Keys that people put under the wrong heading, where systemd ignores them with a warning and exit status 0.
_UNIT_ONLY = {
    "After",
    "Before",
    "Conflicts",
    "Requires",
    "Wants",
    "BindsTo",
    "PartOf",
    "StartLimitIntervalSec",
    "StartLimitBurst",
    "OnFailure",
    "RequiresMountsFor",
    "AssertPathExists",
    "ConditionPathExists",
    "Description",
}
_SERVICE_ONLY = {
    "Type",
    "ExecStart",
    "ExecStartPre",
    "ExecStartPost",
    "ExecStop",
    "Restart",
    "RestartSec",
    "TimeoutStartSec",
    "TimeoutStopSec",
    "User",
    "Group",
    "Environment",
    "EnvironmentFile",
    "WorkingDirectory",
    "KillMode",
    "LimitNOFILE",
}
_VARIABLE = re.compile(r"(?<!\$)\$(?:\{(\w+)\}|(\w+)(?=\s|$))")


def parse(text: str) -> list[Setting]:
    """Settings of a unit in their order; continued lines are joined, comments dropped. Never raises."""
    settings: list[Setting] = []
    section = ""
    pending = ""
    for raw in text.split("\n"):  # as systemd does: a separator of another kind is no new line
        line = raw.strip()
        if not pending and (not line or line[0] in "#;"):
            continue
        if pending and line[:1] in {"#", ";"}:  # comments may stand inside a continued setting
            continue
        line = pending + line
        if line.endswith("\\"):
            pending = line[:-1].rstrip() + " "
            continue
        pending = ""
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
        elif "=" in line:
            key, _, value = line.partition("=")
            settings.append((section, key.strip(), value.strip()))
    return settings


def lint(text: str) -> dict[str, Any]:
    """Verdict over a unit's text: ``{"verdict": accept | accept-with-warning | reject, "errors": [...], "warnings":
    [...]}``."""
    settings = parse(text)
    errors: list[str] = []
    warnings: list[str] = []
    service = {key: value for section, key, value in settings if section == "Service"}
    unit = {key: value for section, key, value in settings if section == "Unit"}
    commands = [(key, value) for section, key, value in settings if section == "Service" and key.startswith("Exec")]
    if "ExecStart" not in service:
        errors.append("[Service] has no ExecStart=: nothing would run")
    for section, key, _value in settings:
        if (section == "Service" and key in _UNIT_ONLY) or (section == "Unit" and key in _SERVICE_ONLY):
            warnings.append(f"{key}= stands under [{section}], where systemd ignores it")
    for key, value in commands:
        _command(key, value, _environment(settings), errors, warnings)
    restart = service.get("Restart", "no")
    if restart != "no" and "StartLimitIntervalSec" not in unit:
        warnings.append(
            f"Restart={restart} with RestartSec={service.get('RestartSec', '100ms')} and no StartLimitIntervalSec= "
            "loops for ever: the default limit of 5 starts in 10 s is never reached by a slow load"
        )
    if restart == "on-failure":
        warnings.append("Restart=on-failure does nothing when the engine dies: vLLM then exits with status 0")
    if restart == "always":
        warnings.append("Restart=always also repeats a configuration error and a clean end by signal")
    if "TimeoutStopSec" not in service or "KillMode" not in service:
        warnings.append(
            "TimeoutStopSec= and KillMode= are not stated: requests are cut off and a stuck worker decides the stop"
        )
    if service.get("Type", "simple") in {"simple", "exec"}:
        warnings.append("Type=simple: Started only means that the process was forked, not that the model is loaded")
    if service.get("User", "root") == "root":
        warnings.append("the engine runs as root")
    for name in ("LD_LIBRARY_PATH", "LD_PRELOAD"):
        if name in _environment(settings):
            warnings.append(f"{name} overrides the CUDA libraries that the engine's wheels bring")
    return {
        "verdict": "reject" if errors else "accept-with-warning" if warnings else "accept",
        "errors": errors,
        "warnings": warnings,
    }


def _environment(settings: list[Setting]) -> set[str]:
    names: set[str] = set()
    for section, key, value in settings:
        if section == "Service" and key == "Environment":
            names |= set(re.findall(r"(?:^|[\s\"'])([A-Za-z_]\w*)=", value))
    return names


def _command(key: str, value: str, environment: set[str], errors: list[str], warnings: list[str]) -> None:
    plain = value.lstrip("-+!@:")
    try:
        words = shlex.split(plain)
    except ValueError as error:
        errors.append(f"{key}=: quotes do not close ({error}): {value[:80]}")
        return
    if not words:
        return
    if not words[0].startswith(("/", "%", "$")):
        warnings.append(f"{key}= starts {words[0]!r} without an absolute path")
    if re.search(r"(?:^|/)(?:ba|da|z)?sh$", words[0]):
        warnings.append(f"{key}= runs a shell: $x is systemd's before it is the shell's")
    for braced, bare in _VARIABLE.findall(plain):
        if (braced or bare) not in environment:
            warnings.append(
                f"{key}= refers to ${braced or bare}, which the unit does not set: it becomes an empty string ($$ "
                "is the shell's)"
            )
    if re.search(r"\brm\b.*/dev/shm", plain):
        warnings.append(f"{key}= removes files in /dev/shm, also those that living programs use")
    if key == "ExecStart" and any("api_server" in word for word in words):
        warnings.append("the api_server module is deprecated: use `vllm serve`")
    if "--trust-remote-code" in words:
        warnings.append("--trust-remote-code runs the model's own Python")
    for option, following in zip(words, [*words[1:], ""]):
        name, _, inline = option.partition("=")
        argument = inline or following
        if name.startswith("--") and name.endswith("-config") and argument.startswith("{"):
            try:
                json.loads(argument)
            except ValueError as error:
                errors.append(f"{name}: no JSON when it reaches the program ({error}): {argument[:80]}")
