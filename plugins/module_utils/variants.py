"""From the variant table to one resolved variant: merge, render flags, name the unit.

Everything here is data to data. The allowed keys, their types and their defaults come from ``spec``, the parsed
``roles/vllm_service/meta/argument_specs.yml``: this module knows no key by heart that is not used in it.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from . import nccl, versions

JsonDict = dict[str, Any]

_KEY = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_NAME = re.compile(r"[a-z0-9]+([._-][a-z0-9]+)*")
# Paths stand unquoted in units; nobody needs blanks or % in them enough to make that unreadable.
_PATH = re.compile(r"/[A-Za-z0-9/._@+-]+")
_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Types as argument specs name them. A quoted number is a string: YAML already says which is meant.
_TYPES = {"str": str, "path": str, "int": int, "bool": bool, "dict": dict, "list": list}

# Flags that other keys render. Two places for one fact would let them disagree.
OWNED_FLAGS = {
    "model": "the model entry's `path`",
    "served-model-name": "the model entry's `served_name`",
    "host": "the host's `bind`",
    "port": "the host's `port`",
    "speculative-config": "the variant's `speculative_config`",
    "tensor-parallel-size": "the model entry's `tensor_parallel_size`",
    "max-model-len": "the model entry's `max_model_len`",
    "trust-remote-code": "the model entry's `trust_remote_code`",
    "tool-call-parser": "the model entry's `tool_call_parser`",
    "enable-auto-tool-choice": "the model entry's `tool_call_parser`, which switches it on",
    "reasoning-parser": "the model entry's `reasoning_parser`",
    "profiler-config": "the variant's `profiler`",
    "shutdown-timeout": "the variant's `drain_timeout_s`",
    "hf-token": "`model_cache_token` (a command line can be read by every local user)",
    "api-key": "`vllm_service_api_key` (a command line can be read by every local user)",
}
# What every engine runs with; an `env` entry wins over it.
ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "HOME": "/var/lib/vllm",
    "PYTHONUNBUFFERED": "1",
    "VLLM_CACHE_ROOT": "/var/cache/vllm",
    "VLLM_NO_USAGE_STATS": "1",
}
# What a trial variant adds, so that its drafting can be changed while it serves: see plugins/engine_extension. The
# development endpoints ask nobody for a key, so it listens on loopback whatever the host's `bind` is.
TRIAL_BIND = "127.0.0.1"
TRIAL_FOLDER = "/usr/local/lib/swapgate/swapgate/engine_extension"
TRIAL_ARGS = {"worker-extension-cls": "swapgate_trial.TrialWorker", "per-request-spec-decode-metrics": "detailed"}
TRIAL_ENV = {"PYTHONPATH": TRIAL_FOLDER, "VLLM_SERVER_DEV_MODE": "1"}
SECRET_VARIABLES = ("VLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
# Names of other secrets: not a count of TOKENS, not the _FILE or _PATH that holds one. And addresses with a password.
_SECRET_NAME = re.compile(
    r"(?!.*_(FILE|PATH)$)(.*(SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY).*|(.*_)?TOKEN$)", re.IGNORECASE
)
_USERINFO = re.compile(r"://[^/\s]*:[^/\s]*@")


class VariantError(ValueError):
    """Input that cannot become a unit. The text says what, where, found against expected, and what to do next."""


def _closest(word: str, words: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, list(words), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def _check_type(where: str, key: str, value: Any, name: str) -> None:
    kind = _TYPES[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        quote = " Quote what is meant as text." if kind is str else ""
        raise VariantError(f"{where}: key '{key}' is {value!r}, expected {name}. Correct the entry.{quote}")


def _check_entry(where: str, entry: Any, options: Mapping[str, Any]) -> None:
    """Keys and types of one entry. Null counts as absent."""
    if not isinstance(entry, dict):
        raise VariantError(f"{where}: found {entry!r}, expected a map of keys. Correct the entry.")
    for key, value in entry.items():
        if key not in options:
            raise VariantError(
                "{}: unknown key '{}'.{} Known keys: {}. Correct or remove it.".format(
                    where, key, _closest(str(key), list(options)), ", ".join(sorted(options))
                )
            )
        option = options[key]
        if value is None or option.get("type", "raw") == "raw":
            continue
        if "options" in option:
            _check_entry(f"{where}.{key}", value, option["options"])
            _check_required(f"{where}.{key}", value, option["options"])
        _check_type(where, key, value, option["type"])
        for item in value if "elements" in option else []:
            _check_type(where, key, item, option["elements"])


def _check_required(where: str, entry: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    for key, option in options.items():
        if option.get("required") and entry.get(key) is None:
            raise VariantError(f"{where}: key '{key}' is missing: {option['description']}")


def _choose(kind: str, name: Any, table: Mapping[str, Any], source: str) -> Any:
    if name not in table:
        raise VariantError(
            "{} '{}' does not exist.{} {}s that exist: {} (from {}).".format(
                kind, name, _closest(str(name), list(table)), kind.capitalize(), ", ".join(sorted(table)), source
            )
        )
    return table[name]


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> JsonDict:
    """``over`` laid on ``base``: maps merge by key at every depth, null removes a key, everything else replaces."""
    merged = dict(base)
    for key, value in over.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, dict):
            under = merged.get(key)
            merged[key] = merge(under if isinstance(under, dict) else {}, value)
        else:
            merged[key] = value
    return merged


def defaults_of(options: Mapping[str, Any]) -> JsonDict:
    """The defaults that an argument spec's options declare."""
    return {key: option["default"] for key, option in options.items() if "default" in option}


def layers(name: str, variants: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, JsonDict]:
    """The entries that make a variant, base first, by the words for where each stands. One level of ``extends``."""
    where = f"variant '{name}'"
    entry = _choose("variant", name, variants, "swapgate_variants")
    _check_entry(where, entry, options)
    base_name = entry.get("extends")
    if base_name is None:
        return {where: entry}
    base = _choose("variant", base_name, variants, f"swapgate_variants, named by `extends` of {where}")
    _check_entry(f"variant '{base_name}'", base, options)
    if base.get("extends"):
        raise VariantError(
            "{}: `extends: {}` is itself built on '{}'; only one level is allowed. Extend '{}' directly.".format(
                where, base_name, base["extends"], base["extends"]
            )
        )
    return {f"variant '{base_name}'": {key: base[key] for key in base if key != "description"}, where: entry}


def flatten(name: str, variants: Mapping[str, Any], options: Mapping[str, Any]) -> JsonDict:
    """One variant's entry with its base merged in; no null is left."""
    flat: JsonDict = {}
    for entry in layers(name, variants, options).values():
        flat = merge(flat, entry)
    return flat


def render_flag(key: str, value: Any) -> list[str]:
    """The command-line words of one engine argument.

    A string or number is ``--key value``, true a bare flag, false and null nothing, a map one compact JSON word, a
    list the flag followed by each of its values. Anything else is an error.
    """
    flag = "--" + key
    if value is None or value is False:
        return []
    if value is True:
        return [flag]
    if isinstance(value, dict):
        return [flag, json.dumps(value, separators=(",", ":"), ensure_ascii=False)]
    if isinstance(value, (list, tuple)):
        if not value or not all(isinstance(item, (str, int, float)) and not isinstance(item, bool) for item in value):
            raise VariantError(f"engine argument '{key}': a list must hold strings or numbers, found {value!r}")
        return [flag] + [str(item) for item in value]
    if isinstance(value, (str, int, float)):
        return [flag, str(value)]
    raise VariantError(f"engine argument '{key}': a {type(value).__name__} cannot be a flag")


def render_flags(arguments: Mapping[str, Any]) -> list[str]:
    """All arguments as words, in the map's order."""
    return [word for key, value in arguments.items() for word in render_flag(key, value)]


def _engine_args(where: str, arguments: Mapping[str, Any]) -> JsonDict:
    checked = {}
    for raw in sorted(arguments):
        key = str(raw).lstrip("-").replace("_", "-")
        if not _KEY.fullmatch(key):
            raise VariantError(f"{where}: engine argument '{raw}' is not the name of a flag.")
        if key in OWNED_FLAGS:
            raise VariantError(
                f"{where}: engine argument '{key}' is set by {OWNED_FLAGS[key]}. Set it there and remove it here."
            )
        checked[key] = arguments[raw]
    return checked


def _environment(where: str, environment: Mapping[str, Any]) -> JsonDict:
    checked: JsonDict = {}
    for key in sorted(environment):
        value = environment[key]
        if not _ENV.fullmatch(str(key)):
            raise VariantError(f"{where}: '{key}' is not the name of an environment variable.")
        if key in SECRET_VARIABLES:
            raise VariantError(
                f"{where}: {key} in `env` could be read by every local user. Use vllm_service_api_key, or fetch the "
                "model with role model_cache."
            )
        if value is None:  # removes what an earlier layer set
            checked[str(key)] = None
            continue
        if _SECRET_NAME.match(str(key)) or _USERINFO.search(str(value)):
            holds = "a secret by its name" if _SECRET_NAME.match(str(key)) else "an address with a password"
            raise VariantError(
                f"{where}: {key} in `env` holds {holds}, and units can be read by every local user. Put it into a file "
                "that only root reads (0600) and name that file in a drop-in of the unit: "
                "[Service] EnvironmentFile=/etc/swapgate/NAME.env"
            )
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise VariantError(
                f"{where}: environment variable {key} is {value!r}; expected a string or a number. Quote the value."
            )
        checked[str(key)] = str(value)
    return checked


def _profiler(where: str, version: str, bind: str, model_name: str, name: str) -> JsonDict:
    """The engine's --profiler-config: traces below the service user's home, of the workers alone, without stacks."""
    if not versions.at_least(version, "0.13"):
        raise VariantError(f"{where}: `profiler` needs engine version 0.13 or newer, found {version}.")
    if not (bind.startswith("127.") or bind in ("localhost", "::1")):
        raise VariantError(
            f"{where}: `profiler` opens /start_profile and /stop_profile to all who reach {bind}, without a key. "
            "Set `bind` of the host to 127.0.0.1 as long as this variant serves."
        )
    return {
        "profiler": "torch",
        "torch_profiler_dir": f"{ENGINE_ENVIRONMENT['HOME']}/profiles/{model_name}-{name}",
        "torch_profiler_with_stack": False,
        "ignore_frontend": True,
    }


def _nccl(sources: Mapping[str, Mapping[str, Any]]) -> JsonDict:
    """NCCL's profile and settings, values as environment variables hold them."""
    named = {place: source["nccl"] for place, source in sources.items() if "nccl" in source}
    for place, entry in named.items():
        if entry is not None and not isinstance(entry, (str, dict)):
            raise VariantError(f"{place}: `nccl` is {entry!r}, expected a profile's name, a map or null.")
    try:
        found = nccl.settings(named)
    except nccl.NcclError as error:
        raise VariantError(str(error)) from error
    return {"profile": found["profile"], "settings": _environment("nccl", found["settings"])}


def unit_name(model_name: str, variant_name: str, is_base: bool) -> str:
    """The unit of a variant. One that extends nothing has the model's name alone; a name is never inherited."""
    return "vllm-{}{}.service".format(model_name, "" if is_base else "-" + variant_name)


def _speculative(where: str, entry: JsonDict, model: Mapping[str, Any]) -> JsonDict | None:
    config = entry.get("speculative_config")
    if not config:
        if entry.get("draft"):
            raise VariantError(
                f"{where}: `draft: {entry['draft']}` without a speculative_config has no effect. Give the config, or "
                "remove `draft`."
            )
        return None
    config = dict(config)
    draft = entry.get("draft")
    if draft is not None:
        drafts = model.get("drafts", {})
        if draft not in drafts:
            raise VariantError(
                "{}: the model names no draft '{}'. Drafts of the model: {}. Add `drafts: {{{}: /path/to/draft}}` to "
                "the model entry.".format(where, draft, ", ".join(sorted(drafts)) or "none", draft)
            )
        config["model"] = drafts[draft]
    if config.get("method") in ("ngram", "ngram_gpu"):
        low, high = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
        if low is None or high is None:
            raise VariantError(
                f"{where}: give both prompt_lookup_min and prompt_lookup_max; found min={low}, max={high}. The engine "
                "copies a missing one from the other, which silently searches one length only."
            )
    return config


def _trial(where: str, is_trial: bool, extra: JsonDict, environment: JsonDict, speculative: JsonDict | None) -> None:
    """Add a trial's own flags and variables to ``extra`` and ``environment``; VariantError where they do not fit."""
    if not is_trial:
        if environment.get("VLLM_SERVER_DEV_MODE") not in (None, "0"):
            raise VariantError(
                f"{where}: VLLM_SERVER_DEV_MODE opens development endpoints that ask nobody for a key. Remove it from "
                "`env`; a variant that only serves for a trial says `trial: true`."
            )
        return
    if not speculative or speculative.get("method") != "ngram":
        raise VariantError(
            f"{where}: `trial: true` with speculative method {(speculative or {}).get('method')!r}, expected 'ngram': "
            "no other can be changed while it serves. Correct `speculative_config`, with the largest k of the grid."
        )
    for key, given in (("engine argument", set(extra) & set(TRIAL_ARGS)), ("`env`", set(environment) & set(TRIAL_ENV))):
        if given:
            raise VariantError(f"{where}: {key} {sorted(given)[0]} is set by `trial: true`. Remove it.")
    extra.update(TRIAL_ARGS)
    environment.update(TRIAL_ENV)


def resolve(
    name: str,
    variants: Mapping[str, Any],
    models: Mapping[str, Any],
    model_name: str,
    host: Mapping[str, Any],
    spec: Mapping[str, Any],
) -> JsonDict:
    """One complete dict for variant ``name`` of model ``model_name`` on ``host``.

    ``spec`` is ``argument_specs`` of role vllm_service: its entry points ``variant``, ``model`` and ``host`` describe
    the inputs, ``main`` the result. Raises VariantError.
    """
    options = {kind: spec[kind]["options"] for kind in ("variant", "model", "host")}
    where = f"variant '{name}'"
    if not _NAME.fullmatch(str(name)):
        raise VariantError(f"{where}: a name is lower-case letters, digits and single '.', '_' or '-'.")
    entry = dict(defaults_of(options["variant"]), **flatten(name, variants, options["variant"]))
    model = _choose("model", model_name, models, "swapgate_models")
    _check_entry(f"model '{model_name}'", model, options["model"])
    model = dict(defaults_of(options["model"]), **{key: value for key, value in model.items() if value is not None})
    _check_entry("swapgate_host", host, options["host"])
    host = dict(defaults_of(options["host"]), **{key: value for key, value in host.items() if value is not None})
    _check_required(f"model '{model_name}'", model, options["model"])
    _check_required("swapgate_host", host, options["host"])
    for place, path in ((f"model '{model_name}'", model["path"]), ("swapgate_host", host["engines_root"])):
        if not _PATH.fullmatch(path):
            raise VariantError(f"{place}: path {path!r}: expected an absolute path of letters, digits and /._@+-.")
    if re.search(r"[\x00-\x1f\x7f\\]", entry["description"]):
        raise VariantError(f"{where}: description {entry['description']!r}: expected one line without a backslash.")

    engine = dict(host["engine"])
    if entry.get("engine_version"):
        engine["version"] = str(entry["engine_version"])
    try:
        versions.release(engine["version"])
    except ValueError as error:
        raise VariantError(f"{where}: engine version: {error}, expected one such as 0.32.0.") from error
    engine["venv"] = "{}/{}-{}".format(host["engines_root"].rstrip("/"), engine["package"], engine["version"])

    bind = TRIAL_BIND if entry["trial"] else host["bind"]
    arguments: JsonDict = {
        "served-model-name": model["served_name"],
        "host": bind,
        "port": host["port"],
        "tensor-parallel-size": model["tensor_parallel_size"],
        "max-model-len": model.get("max_model_len"),
        "trust-remote-code": model["trust_remote_code"],
        "enable-auto-tool-choice": bool(model.get("tool_call_parser")),
        "tool-call-parser": model.get("tool_call_parser"),
        "reasoning-parser": model.get("reasoning_parser"),
    }
    extra: JsonDict = {}
    environment: JsonDict = dict(ENGINE_ENVIRONMENT)
    sources = {"swapgate_host": host, f"model '{model_name}'": model, **layers(name, variants, options["variant"])}
    for place, source in sources.items():
        extra = merge(extra, _engine_args(place, source.get("engine_args") or {}))
        environment = merge(environment, _environment(place, source.get("env") or {}))
    collective = _nccl(sources)
    twice = sorted(set(collective["settings"]) & set(environment))
    if twice:
        raise VariantError(
            f"{where}: {', '.join(twice)} stands in `env` and comes from `nccl` too. Keep it in `nccl`, where a "
            "variable of the profile can be overridden or removed with null."
        )
    environment = merge(environment, collective["settings"])
    if host["gpus"] and list(host["gpus"]) != list(range(len(host["gpus"]))):
        # The engine takes the first ones that it sees: these, by nvidia-smi's order.
        chosen = ",".join(str(index) for index in host["gpus"])
        environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": chosen, **environment}
    speculative = _speculative(where, entry, model)
    _trial(where, entry["trial"], extra, environment, speculative)
    arguments.update(extra)
    if versions.at_least(engine["version"], "0.18"):
        arguments["shutdown-timeout"] = entry["drain_timeout_s"]
    if entry["profiler"]:
        arguments["profiler-config"] = _profiler(where, engine["version"], bind, model_name, name)
    arguments["speculative-config"] = speculative

    return {
        "name": name,
        "description": entry["description"],
        "unit": unit_name(model_name, name, not entry.get("extends")),
        "model": {
            "name": model_name,
            "path": model["path"],
            "served_name": model["served_name"],
            "source": model.get("source"),
            "tensor_parallel_size": model["tensor_parallel_size"],
        },
        "engine": engine,
        "argv": [engine["venv"] + "/bin/vllm", "serve", model["path"], *render_flags(arguments)],
        "env": {key: environment[key] for key in sorted(environment)},
        "nccl": collective,
        "bind": bind,
        "port": host["port"],
        "gpus": list(host["gpus"]),
        "accepted_risks": list(host["accepted_risks"]),
        "speculative_config": speculative,
        "load_timeout_s": entry["load_timeout_s"],
        "stall_timeout_s": entry.get("stall_timeout_s"),
        "drain_timeout_s": entry["drain_timeout_s"],
        "restart_delay_s": entry["restart_delay_s"],
        "soak_s": entry["soak_s"],
        "private_shm": entry["private_shm"],
        "free_memory_mib": host["free_memory_mib"],
        "free_timeout_s": host["free_timeout_s"],
        # Only where it is true: a key more would make another release of every variant, and each of them a reload.
        **({"trial": True} if entry["trial"] else {}),
        **({"prove_links": True} if host["prove_links"] else {}),
    }


def contradictions(resolved: Sequence[Mapping[str, Any]]) -> list[str]:
    """What makes variants of one host impossible together: two that would write the same unit file."""
    owner: dict[str, str] = {}
    problems = []
    for variant in resolved:
        other = owner.setdefault(variant["unit"], variant["name"])
        if other != variant["name"]:
            problems.append(
                "variants '{}' and '{}' would both be {}: only one variant may extend nothing. Add `extends` to one "
                "of them.".format(other, variant["name"], variant["unit"])
            )
    return problems
