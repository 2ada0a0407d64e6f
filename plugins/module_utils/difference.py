"""What changes between two releases, in a few lines for whoever approves the swap. Pure functions.

Flags, environment and settings come from the units' own text, so that an edit by hand shows too; what no unit holds
(model files, GPUs, times) from the variants' data.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from . import unit_text

JsonDict = dict[str, Any]
Change = tuple[str, str]  # what kind of thing changed, in one word; and the line that says how

LONGEST = 100
KEY_ROTATED: Change = ("key", "the API key")
# Nobody should find one in a unit, which every local user can read; if it is there, a plan does not copy it.
_SECRET = re.compile(r"(^|[_-])(key|token|secret|password|passwd)($|[_-])", re.IGNORECASE)
_KEY_CREDENTIAL = "vllm_api_key:"
# Of a variant's data what has lines of its own below, or stands in the unit as flag or environment.
_TOLD_ELSEWHERE = {
    *("name", "slot", "unit", "description", "model", "engine", "argv", "env", "nccl", "bind", "port", "gpus"),
    "speculative_config",
}
# What follows from a variant's data by a rule of the template: told only where that data is the same.
_DERIVED = {
    "SyslogIdentifier": ("unit",),
    "Description": ("name", "description", "model"),
    "RequiresMountsFor": ("model", "engine"),
    "StartLimitIntervalSec": ("load_timeout_s", "restart_delay_s"),
    "TimeoutStopSec": ("drain_timeout_s",),
    "--shutdown-timeout": ("drain_timeout_s",),
    "RestartSec": ("restart_delay_s",),
    "TemporaryFileSystem": ("private_shm",),
    "RemoveIPC": ("private_shm",),
    "DeviceAllow": ("gpus",),
    "CUDA_VISIBLE_DEVICES": ("gpus",),
    "CUDA_DEVICE_ORDER": ("gpus",),
}


def changes(old: Mapping[str, Any], old_text: str, new: Mapping[str, Any], new_text: str) -> list[Change]:
    """What a swap from one variant and its unit's text to another changes, what matters most first."""
    before, after = unit_text.parse(old_text), unit_text.parse(new_text)
    derived = {name for name, causes in _DERIVED.items() if any(old.get(key) != new.get(key) for key in causes)}
    found = [*_engine_and_model(old, new)]
    found += _flags(_command(before), _command(after), derived)
    found += [("environment", line) for line in _named(_environment(before), _environment(after), "=", derived)]
    found += _data(old, new)
    found += _settings(before, after, derived)
    found += _api_key(old_text, new_text)
    return found


def dropins(old: Mapping[str, str], new: Mapping[str, str], new_unit: str) -> list[Change]:
    """The administrator's drop-ins, by file name with their text, that held for the old unit and hold for the new."""
    found = [f"- drop-in {name}, which does not hold for {new_unit}" for name in sorted(set(old) - set(new))]
    found += [f"+ drop-in {name} of {new_unit}" for name in sorted(set(new) - set(old))]
    found += [f"drop-in {name}: another text" for name in sorted(set(old) & set(new)) if old[name] != new[name]]
    return [("drop-ins", line) for line in found]


def lines(found: Sequence[Change]) -> list[str]:
    """The changes, a line each."""
    if list(found) == [KEY_ROTATED]:
        return ["only " + KEY_ROTATED[1]]
    return [line for _, line in found] or ["nothing but comments of the unit"]


def words(found: Sequence[Change]) -> str:
    """The same in two or three words, for one line of the history."""
    if len(found) == 1 and found[0][0] in ("flags", "environment", "settings") and len(found[0][1]) <= 40:
        return found[0][1]
    kinds = list(dict.fromkeys(kind for kind, _ in found))
    return ", ".join(kinds) or "comments"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    text = re.sub(r"[\x00-\x1f\x7f]", "?", text)
    return text if len(text) <= LONGEST else text[: LONGEST - 3] + "..."


def _named(
    old: Mapping[str, Any], new: Mapping[str, Any], joint: str, hidden: set[str] | frozenset[str] = frozenset()
) -> list[str]:
    """One line a name that is gone, new, or has another value. An empty value is a bare name."""
    found = []
    for name in [*old, *(name for name in new if name not in old)]:
        if name in hidden or (name in old and name in new and old[name] == new[name]):
            continue
        sign = "" if name in old and name in new else "- " if name in old else "+ "
        if _SECRET.search(name.lstrip("-")):
            found.append(f"{sign}{name} (not shown)")
        elif not sign:
            found.append(f"{name} {_short(old[name]) or '(bare)'} -> {_short(new[name]) or '(bare)'}")
        else:
            value = _short(old.get(name, new.get(name)))
            found.append(sign + name + (joint + value if value else ""))
    return found


def _engine_and_model(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    found: list[Change] = []
    engines = ["{package} {version}".format(**variant["engine"]) for variant in (old, new)]
    if engines[0] != engines[1]:
        found.append(("engine", "engine {} -> {}".format(*engines)))
    elif old["engine"].get("venv") != new["engine"].get("venv"):
        found.append(("engine", "engine in {} -> {}".format(old["engine"].get("venv"), new["engine"].get("venv"))))
    for key, name in (("name", "model"), ("path", "weights in"), ("source", "weights from")):
        values = [_source(variant["model"].get(key)) for variant in (old, new)]
        if values[0] != values[1]:
            found.append(("model", "{} {} -> {}".format(name, *values)))
    if old["gpus"] != new["gpus"]:
        listed = [" ".join(str(index) for index in variant["gpus"]) or "none" for variant in (old, new)]
        found.append(("GPUs", "GPUs {} -> {}".format(*listed)))
    return found


def _source(value: Any) -> str:
    if isinstance(value, dict):
        return "@".join(str(value[key]) for key in ("repo", "revision") if value.get(key)) or _short(value)
    return "nowhere" if value is None else str(value)


def _words(value: str) -> list[str]:
    """One setting's value as words, undone what `units.quote` did; a value that cannot be read is one word."""
    try:
        found = shlex.split(value)
    except ValueError:
        found = [value]
    return [word.replace("%%", "%") for word in found]


def _command(settings: Sequence[unit_text.Setting]) -> list[str]:
    """The engine's command: what stands after the supervisor's `--`, or all of it in a unit of another hand."""
    argv = [
        word.replace("$$", "$")
        for section, key, value in settings
        if (section, key) == ("Service", "ExecStart")
        for word in _words(value)
    ]
    return argv[argv.index("--") + 1 :] if "--" in argv else argv


def _flags(old: Sequence[str], new: Sequence[str], derived: set[str]) -> list[Change]:
    before, after = _by_flag(old), _by_flag(new)
    # The binary and the model's folder are the engine and the weights, which have their own lines.
    before.pop("", None)
    after.pop("", None)
    found: list[Change] = []
    for flag in list(dict.fromkeys([*before, *after])):
        kind = "speculation" if flag == "--speculative-config" else "flags"
        one, other = _inner(before.get(flag)), _inner(after.get(flag))
        if isinstance(one, dict) and isinstance(other, dict):
            found += [(kind, f"{flag}: {line}") for line in _named(one, other, " ")]
            continue
        have = {flag: " ".join(before[flag])} if flag in before else {}
        want = {flag: " ".join(after[flag])} if flag in after else {}
        found += [(kind, line) for line in _named(have, want, " ", derived)]
    return found


def _by_flag(argv: Sequence[str]) -> dict[str, list[str]]:
    """Each flag with its values; what stands before the first one under the empty name."""
    found: dict[str, list[str]] = {}
    flag = ""
    for word in argv:
        if word.startswith("--"):
            flag, joined, value = word.partition("=")
            found.setdefault(flag, []).extend([value] if joined else [])
        else:
            found.setdefault(flag, []).append(word)
    return found


def _inner(values: Sequence[str] | None) -> Any:
    """The map that a flag's one value is, if it is one."""
    if values and len(values) == 1 and values[0].startswith("{"):
        with contextlib.suppress(ValueError):
            return json.loads(values[0])
    return None


def _environment(settings: Sequence[unit_text.Setting]) -> dict[str, str]:
    assignments = [
        word
        for section, key, value in settings
        if (section, key) == ("Service", "Environment")
        for word in _words(value)
    ]
    return dict(assignment.partition("=")[::2] for assignment in assignments)


def _data(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """What no unit shows. A key that one of the two does not have and that says nothing is no change: the older one was
    written before there was such a key."""
    keys = [key for key in dict.fromkeys([*old, *new]) if key not in _TOLD_ELSEWHERE]
    kept = [
        {key: variant[key] for key in keys if variant.get(key) not in (None, False, [], {})} for variant in (old, new)
    ]
    found = [("settings", line) for line in _named(kept[0], kept[1], " ")]
    if old["name"] == new["name"] and old.get("description") != new.get("description"):
        found.append(("settings", "description {} -> {}".format(old.get("description"), new.get("description"))))
    return found


def _settings(
    before: Sequence[unit_text.Setting], after: Sequence[unit_text.Setting], derived: set[str]
) -> list[Change]:
    """The unit's own settings; one that stands several times is compared value by value."""
    own = [
        [
            (section, key, value)
            for section, key, value in settings
            if (section, key) not in (("Service", "ExecStart"), ("Service", "Environment"))
            and key not in derived
            and not value.startswith(_KEY_CREDENTIAL)
        ]
        for settings in (before, after)
    ]
    found: list[str] = []
    for section, key in dict.fromkeys((section, key) for section, key, _ in own[0] + own[1]):
        values = [[value for at, name, value in settings if (at, name) == (section, key)] for settings in own]
        gone = [value for value in values[0] if value not in values[1]]
        come = [value for value in values[1] if value not in values[0]]
        if len(gone) == len(come) == 1:
            found += _named({key: gone[0]}, {key: come[0]}, "=")
        else:
            found += [f"- {key}={_short(value)}" for value in gone] + [f"+ {key}={_short(value)}" for value in come]
    return [("unit", line) for line in found]


def _api_key(old_text: str, new_text: str) -> list[Change]:
    """The key itself is in no unit; a unit says that there is one, and in a comment which."""
    had, has = _key_mark(old_text), _key_mark(new_text)
    if had == has:
        return []
    return [KEY_ROTATED if None not in (had, has) else ("key", "+ an API key" if had is None else "- the API key")]


def _key_mark(text: str) -> str | None:
    """The comment over the credential, which is another one for another key; None without a credential."""
    above = ""
    for line in text.splitlines():
        if line.startswith("LoadCredential=" + _KEY_CREDENTIAL):
            return above
        above = line if line.startswith("#") else ""
    return None
