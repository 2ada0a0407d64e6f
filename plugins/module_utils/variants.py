"""From the variant table to one resolved variant: merge, render flags, name the unit.

Everything here is data to data. The allowed keys, their types and their defaults come from ``spec``, the parsed
``roles/vllm_service/meta/argument_specs.yml``: this module knows no key by heart that is not used in it.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any

from . import nccl, versions

JsonDict = dict[str, Any]

_KEY = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_NAME = re.compile(r"[a-z0-9]+([._-][a-z0-9]+)*")
# Paths stand unquoted in units; nobody needs blanks or % in them enough to make that unreadable.
_PATH = re.compile(r"/[A-Za-z0-9/._@+-]+")
_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# A name, or what an IPv4 address looks like without being one: then it is refused.
_HOST_NAME = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
# Quoted, these are texts to YAML; no flag of the engine and no key of its speculative_config takes one of them.
_QUOTED_SWITCHES = ("yes", "no", "true", "false", "on", "off")
# Types as argument specs name them. A quoted number is a string: YAML already says which is meant.
_TYPES = {"str": str, "path": str, "int": int, "bool": bool, "dict": dict, "list": list}

WEEK_S = 604800
# Least and most of the numbers, by where they stand. An argument spec has no word for a range: its descriptions say it.
RANGES: dict[str, dict[str, tuple[float, float]]] = {
    "variant": {
        "load_timeout_s": (1, WEEK_S),
        "stall_timeout_s": (1, WEEK_S),
        "drain_timeout_s": (0, WEEK_S),
        "restart_delay_s": (0, WEEK_S),
        "soak_s": (0, WEEK_S),
    },
    "model": {"tensor_parallel_size": (1, 1024)},
    "host": {"port": (1, 65535), "free_memory_mib": (0, 1000000), "free_timeout_s": (0, WEEK_S)},
    "speculative_config": {
        "num_speculative_tokens": (1, 256),
        "prompt_lookup_min": (1, 1024),
        "prompt_lookup_max": (1, 1024),
        "draft_tensor_parallel_size": (1, 1024),
    },
    "engine_args": {
        "max-num-seqs": (1, 1000000),
        "max-num-batched-tokens": (1, 100000000),
        "gpu-memory-utilization": (0, 1),
        "pipeline-parallel-size": (1, 1024),
        "data-parallel-size": (1, 1024),
    },
}
# Methods that draft without a model.
_FROM_TEXT = ("ngram", "ngram_gpu", "suffix")

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
# What an API key does not guard, as vLLM 0.32 has it.
GUARDED = "/v1, /v2, /inference and /cohere"
OPEN_PATHS = "/metrics, /health, /version, /load, /tokenize, /detokenize, /rerank, /score, /pooling and /invocations"
NO_API_KEY = "no-api-key"
# Where the entries of each table come from.
SOURCES = {
    "variant": "group_vars/all/variants.yml and swapgate_variants of your inventory",
    "model": "group_vars/all/models.yml and swapgate_models of your inventory",
}
SECRET_VARIABLES = ("VLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
# Names of other secrets: not a count of TOKENS, not the _FILE or _PATH that holds one. And addresses with a password.
_SECRET_NAME = re.compile(
    r"(?!.*_(FILE|PATH)$)(.*(SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY).*|(.*_)?TOKEN$)", re.IGNORECASE
)
_USERINFO = re.compile(r"://[^/\s]*:[^/\s]*@")


class VariantError(ValueError):
    """Input that cannot become a unit. The text says what, where, found against expected, and what to do next."""


class NotHere(VariantError):
    """A variant that this model, host or engine version cannot have, while another one may."""


def _closest(word: str, words: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, list(words), n=1)
    return f" Did you mean '{near[0]}'?" if near else ""


def _check_type(where: str, key: str, value: Any, name: str) -> None:
    kind = _TYPES[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        quote = " Quote what is meant as text." if kind is str else ""
        raise VariantError(f"{where}: key '{key}' is {value!r}, expected {name}. Correct the entry.{quote}")


def _check_range(where: str, key: str, value: float, ranges: Mapping[str, tuple[float, float]]) -> None:
    least, most = ranges.get(key, (value, value))
    if not least <= value <= most:
        raise VariantError(f"{where}: key '{key}' is {value!r}, expected {least} to {most}. Correct the entry.")


def _check_entry(where: str, entry: Any, options: Mapping[str, Any], kind: str = "") -> None:
    """Keys, types, choices and, by the ``kind`` of the entry, ranges. Null counts as absent."""
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
        if option["type"] == "int":
            _check_range(where, key, value, RANGES.get(kind, {}))
        if value not in option.get("choices", [value]):
            raise VariantError(
                "{}: key '{}' is {!r}, expected one of {}.{} Correct the entry.".format(
                    where, key, value, ", ".join(option["choices"]), _closest(str(value), option["choices"])
                )
            )


def _check_required(where: str, entry: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    for key, option in options.items():
        if option.get("required") and entry.get(key) is None:
            raise VariantError(f"{where}: key '{key}' is missing: {option['description']}")


def _check_name(kind: str, name: Any) -> None:
    if not _NAME.fullmatch(str(name)):
        raise VariantError(f"{kind} {str(name)!r}: a name is lower-case letters, digits and single '.', '_' or '-'.")


def _check_one_line(where: str, what: str, text: str) -> None:
    """Refuse what would end a line of a unit for systemd or for a reader, or cannot be seen."""
    for character in text:
        if unicodedata.category(character)[0] == "C" or unicodedata.category(character) in ("Zl", "Zp"):
            raise VariantError(
                f"{where}: {what} {text!r}: expected one line without control characters, found "
                f"U+{ord(character):04X}. Correct the entry."
            )


def _check_bind(where: str, bind: str) -> None:
    if _HOST_NAME.fullmatch(bind):
        return
    try:
        ipaddress.ip_address(bind)
    except ValueError:
        raise VariantError(
            f"{where}: key 'bind' is {bind!r}, expected an IP address of this host or its name. Correct the entry."
        ) from None


def _choose(kind: str, name: Any, table: Mapping[str, Any], named_by: str = "") -> Any:
    source = SOURCES[kind] + named_by
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


def lay_over(shipped: Mapping[str, Any], own: Any, name: str) -> JsonDict:
    """The table that counts: ``own``, an inventory's variable ``name``, laid over the one that ships.

    An entry replaces the shipped one of its name, null removes it, and with it what extends it. A table of variants
    whose entries extend a base of their own under another name is complete: nothing that ships is added.
    """
    if not isinstance(own, dict):
        raise VariantError(f"{name}: found {own!r}, expected a map of entries by name. Correct it in your inventory.")
    for key in [key for key, entry in own.items() if entry is None and key not in shipped]:
        raise VariantError(
            f"{name}: '{key}' is null, which removes a shipped entry, and none has that name."
            f"{_closest(str(key), list(shipped))} Shipped: {', '.join(sorted(shipped))}."
        )
    kept = {key: entry for key, entry in own.items() if entry is not None}
    bases = {_base_of(entry) for entry in kept.values()}
    if any(key in bases and key not in shipped and not _base_of(kept[key]) for key in kept):
        return kept
    merged = {key: entry for key, entry in {**shipped, **kept}.items() if key not in own or key in kept}
    roots = {key for key, entry in merged.items() if not _base_of(entry)}
    return {key: entry for key, entry in merged.items() if key in own or key in roots or _base_of(entry) in roots}


def _base_of(entry: Any) -> str | None:
    base = entry.get("extends") if isinstance(entry, dict) else None
    return str(base) if base else None


def defaults_of(options: Mapping[str, Any]) -> JsonDict:
    """The defaults that an argument spec's options declare."""
    return {key: option["default"] for key, option in options.items() if "default" in option}


def layers(name: str, variants: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, JsonDict]:
    """The entries that make a variant, base first, by the words for where each stands. One level of ``extends``."""
    where = f"variant '{name}'"
    entry = _choose("variant", name, variants)
    _check_entry(where, entry, options, "variant")
    base_name = entry.get("extends")
    if base_name is None:
        return {where: entry}
    base = _choose("variant", base_name, variants, f"; it is named by `extends` of {where}")
    _check_entry(f"variant '{base_name}'", base, options, "variant")
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


def _check_switch(what: str, value: Any) -> None:
    if isinstance(value, str) and value.lower() in _QUOTED_SWITCHES:
        raise VariantError(f"{what} is the text {value!r}, expected true or false. Write it without quotes.")


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
        value = arguments[raw]
        _check_switch(f"{where}: engine argument '{key}'", value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            _check_range(f"{where}.engine_args", key, value, RANGES["engine_args"])
        checked[key] = value
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
        _check_one_line(where, f"environment variable {key}", str(value))
        checked[str(key)] = str(value)
    return checked


def is_loopback(bind: str) -> bool:
    """Whether only this host reaches what listens there."""
    return bind.startswith("127.") or bind in ("localhost", "::1")


def exposure(resolved: Mapping[str, Any], has_key: bool) -> tuple[str | None, str | None]:
    """(why the variant must not listen where it would, what its operator should know), each or None."""
    bind = resolved["bind"]
    if is_loopback(bind):
        return None, None
    reach = f"{bind}:{resolved['port']}"
    unguarded = f"an API key guards only paths below {GUARDED}; {OPEN_PATHS} answer everybody without it"
    if has_key:
        return None, f"the engine listens on {reach}: {unguarded}. Keep those from strangers by a firewall or a proxy."
    if NO_API_KEY in resolved["accepted_risks"]:
        return None, f"the engine listens on {reach} without an API key, as `accepted_risks: [{NO_API_KEY}]` allows."
    return (
        f"the engine would listen on {reach} and answer everybody who reaches it, since there is no API key. Set "
        f"vllm_service_api_key (from a vault), or `bind: 127.0.0.1`, or accept it: `swapgate_host: {{accepted_risks: "
        f"[{NO_API_KEY}]}}`. Even so {unguarded}."
    ), None


def _profiler(where: str, version: str, bind: str, model_name: str, name: str) -> JsonDict:
    """The engine's --profiler-config: traces below the service user's home, of the workers alone, without stacks."""
    if not versions.at_least(version, "0.13"):
        raise NotHere(f"{where}: `profiler` needs engine version 0.13 or newer, found {version}.")
    if not is_loopback(bind):
        raise NotHere(
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


def _speculative(where: str, entry: JsonDict, model: Mapping[str, Any], version: str) -> JsonDict | None:
    config = entry.get("speculative_config")
    draft = entry.get("draft")
    if not config:
        if draft:
            raise VariantError(
                f"{where}: `draft: {draft}` without a speculative_config has no effect. Give the config, or remove "
                "`draft`."
            )
        return None
    config = dict(config)
    _check_speculative(where, config, draft, version)
    if draft is not None:
        drafts = model.get("drafts", {})
        if draft not in drafts:
            raise NotHere(
                "{}: the model names no draft '{}'. Drafts of the model: {}. Add `drafts: {{{}: /path/to/draft}}` to "
                "the model entry.".format(where, draft, ", ".join(sorted(drafts)) or "none", draft)
            )
        config["model"] = drafts[draft]
    return config


def _check_speculative(where: str, config: Mapping[str, Any], draft: Any, version: str) -> None:
    """What the table can tell of a speculative_config; the rest is the engine's own parser's."""
    place = f"{where}.speculative_config"
    method = config.get("method")
    if not versions.newer_than_read(version):
        for key in config:
            if str(key).replace("-", "_") not in versions.SPECULATIVE_KEYS:
                near = _closest(str(key), versions.SPECULATIVE_KEYS)
                raise VariantError(f"{place}: unknown key '{key}'.{near} Correct or remove it.")
        if method is not None and method not in versions.SPECULATIVE_METHODS:
            raise VariantError(
                "{}: method {!r} is none that vLLM knows.{} Methods: {}, and those of single models that end in "
                "_mtp.".format(
                    place,
                    method,
                    _closest(str(method), versions.SPECULATIVE_METHODS),
                    ", ".join(word for word in versions.SPECULATIVE_METHODS if not word.endswith("_mtp")),
                )
            )
    for key, value in config.items():
        _check_switch(f"{place}: key '{key}'", value)
        if key in RANGES["speculative_config"]:
            _check_type(place, key, value, "int")
            _check_range(place, key, value, RANGES["speculative_config"])
    has_model = draft is not None or config.get("model") is not None
    if method is None and not has_model:
        raise VariantError(f"{place}: key 'method' is missing, expected one such as ngram. Add it.")
    if method in _FROM_TEXT and has_model:
        raise VariantError(f"{place}: method '{method}' drafts without a model. Remove `draft` and `model`.")
    if method in ("ngram", "ngram_gpu"):
        low, high = config.get("prompt_lookup_min"), config.get("prompt_lookup_max")
        if low is None or high is None:
            raise VariantError(
                f"{where}: give both prompt_lookup_min and prompt_lookup_max; found min={low}, max={high}. The engine "
                "copies a missing one from the other, which silently searches one length only."
            )
        if low > high:
            raise VariantError(f"{place}: prompt_lookup_min={low} must be <= prompt_lookup_max={high}. Correct one.")


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
    _check_name("variant", name)
    _check_name("model", model_name)
    entry = dict(defaults_of(options["variant"]), **flatten(name, variants, options["variant"]))
    model = _choose("model", model_name, models)
    _check_entry(f"model '{model_name}'", model, options["model"], "model")
    model = dict(defaults_of(options["model"]), **{key: value for key, value in model.items() if value is not None})
    _check_entry("swapgate_host", host, options["host"], "host")
    host = dict(defaults_of(options["host"]), **{key: value for key, value in host.items() if value is not None})
    _check_required(f"model '{model_name}'", model, options["model"])
    _check_required("swapgate_host", host, options["host"])
    for place, path in ((f"model '{model_name}'", model["path"]), ("swapgate_host", host["engines_root"])):
        if not _PATH.fullmatch(path):
            raise VariantError(f"{place}: path {path!r}: expected an absolute path of letters, digits and /._@+-.")
    if "\\" in entry["description"]:
        raise VariantError(f"{where}: description {entry['description']!r}: expected one line without a backslash.")
    _check_one_line(where, "description", entry["description"])
    _check_one_line(f"model '{model_name}'", "served_name", model["served_name"])
    _check_bind("swapgate_host", host["bind"])
    if any(index < 0 for index in host["gpus"]) or len(set(host["gpus"])) != len(host["gpus"]):
        raise VariantError(
            f"swapgate_host: key 'gpus' is {host['gpus']}, expected each GPU's index once, from 0. Correct the entry."
        )

    engine = dict(host["engine"])
    if entry.get("engine_version"):
        engine["version"] = str(entry["engine_version"])
    try:
        versions.release(engine["version"])
    except ValueError as error:
        raise VariantError(f"{where}: engine version: {error}, expected one such as 0.32.0.") from None
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
        raise NotHere(
            f"{where}: {', '.join(twice)} stands in `env` and comes from `nccl` too. Keep it in `nccl`, where a "
            "variable of the profile can be overridden or removed with null."
        )
    environment = merge(environment, collective["settings"])
    if host["gpus"] and list(host["gpus"]) != list(range(len(host["gpus"]))):
        # The engine takes the first ones that it sees: these, by nvidia-smi's order.
        chosen = ",".join(str(index) for index in host["gpus"])
        environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": chosen, **environment}
    speculative = _speculative(where, entry, model, engine["version"])
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


def resolve_all(
    variants: Mapping[str, Any], models: Mapping[str, Any], model_name: Any, host: Any, spec: Mapping[str, Any]
) -> tuple[dict[str, JsonDict], dict[str, str]]:
    """(each variant that the model can have on the host, why it cannot have the others), by name.

    A mistake anywhere in the tables is a VariantError, whichever variant was asked for.
    """
    if model_name is None:
        raise VariantError(
            "swapgate_model is not set for this host, expected the name of a model: {} (from {}). Set it in "
            "group_vars/vllm_hosts.yml of your inventory.".format(", ".join(sorted(models)), SOURCES["model"])
        )
    if host is None:
        raise VariantError(
            "swapgate_host is not set for this host, expected what belongs to the machine, at least "
            "`swapgate_host: {engine: {package: vllm, version: 0.32.0}}`. Set it in group_vars/vllm_hosts.yml of your "
            "inventory; inventory/example-8gpu-pcie has an example."
        )
    for model in models:
        _check_name("model", model)
    found: dict[str, JsonDict] = {}
    impossible: dict[str, str] = {}
    for name in variants:
        try:
            found[name] = resolve(name, variants, models, model_name, host, spec)
        except NotHere as error:
            impossible[name] = str(error)
    problems = contradictions(variants, models, model_name)
    if problems:
        raise VariantError("; ".join(problems))
    return found, impossible


def choose(name: Any, found: Mapping[str, JsonDict], impossible: Mapping[str, str], model_name: str) -> JsonDict:
    """The variant that was asked for, of what resolve_all gave. VariantError when the model cannot have it here."""
    here = "model '{}' can have {} on this host".format(model_name, ", ".join(sorted(found)) or "none")
    if name in impossible:
        raise NotHere(f"{impossible[name]} Of the variants that exist {here}.")
    _choose("variant", name, {**found, **impossible}, f"; {here}" if impossible else "")
    return found[name]


def contradictions(variants: Mapping[str, Any], models: Mapping[str, Any], model_name: str) -> list[str]:
    """What makes the tables impossible: two variants, of one model or of two, that would have one unit file.

    Only names are looked at, so that a variant which a model cannot have counts too.
    """
    bases = [name for name in variants if not _base_of(variants[name])]
    if len(bases) > 1:
        return [
            f"variants '{bases[0]}' and '{bases[1]}' would both be {unit_name(model_name, bases[0], True)}: only one "
            "variant may extend nothing. Add `extends` to one of them."
        ]
    owner: dict[str, tuple[str, str]] = {}
    problems = []
    for model in models:
        for name in variants:
            unit = unit_name(model, name, name in bases)
            other, its = owner.setdefault(unit, (model, name))
            if other != model:
                problems.append(
                    f"variant '{its}' of model '{other}' and variant '{name}' of model '{model}' would both be {unit}. "
                    f"Rename model '{other}' or model '{model}'."
                )
    return problems
