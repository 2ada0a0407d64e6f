"""Everything that can be said against a release while the old variant still serves. Changes nothing that serves.

The report
    {"schema", "release", "variant", "ok": bool, "problems": [{"check": str, "what": str}],
     "class": null | "config" | "model" | "host" of the first problem,
     "engine_version": str | null, "effective": {...}, "notices": [str, ...], "host_notices": [str, ...],
     "cached": bool, "seconds": s}
``effective`` and ``notices`` come from the engine itself: see engine_check; ``host_notices`` say what does not fit this
host and is no reason to refuse.
"""

from __future__ import annotations

import contextlib
import grp
import hashlib
import json
import os
import pwd
import shutil
import threading
import time
from pathlib import Path
from typing import Any, Callable, TypeVar

from ..module_utils import identity as identities
from ..module_utils import model_manifest, processes, records, units, versions
from ..module_utils.text import SHOWN, printable
from . import aside, gpus, installed, systemd

ENGINE_CHECK_LIMIT_S = 600.0
LOOK_LIMIT_S = 60.0
# For reading a model's folder: a mount whose server has gone lets a reader wait for ever.
MOUNT_LIMIT_S = 30.0
MIN_FREE_MIB = 1024
EXCLUSION_DROPIN = "50-swapgate-exclusive.conf"
ENGINE_MARKER = "swapgate-env.json"
WEIGHT_FORMATS = ("auto", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "mistral", "hf")

# Whose fault a check's problem is; what is not listed is the configuration's.
CLASSES = {
    "model": "model",
    "host": "host",
    "port": "host",
    "disk": "host",
    "engine": "host",
    "enabled": "host",
    "readable": "host",
    "writable": "host",
}

JsonDict = dict[str, Any]
T = TypeVar("T")


def rules_digest() -> str:
    """A hash over the program itself: a report of other rules is no report of these."""
    digest = hashlib.sha256()
    for folder in (Path(__file__).parent, Path(__file__).parent.parent / "module_utils"):
        for source in sorted(folder.glob("*.py")):
            digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def flag_value(argv: list[str], flag: str) -> str | None:
    """The word after ``flag``, or after ``flag=``."""
    for place, word in enumerate(argv):
        if word == flag and place + 1 < len(argv):
            return argv[place + 1]
        if word.startswith(flag + "="):
            return word.split("=", 1)[1]
    return None


def flag_json(argv: list[str], flag: str) -> JsonDict | None:
    """The JSON object after ``flag``; None where there is none."""
    with contextlib.suppress(ValueError):
        value = json.loads(flag_value(argv, flag) or "null")
        return value if isinstance(value, dict) else None
    return None


def identity(variant: JsonDict, layout: records.Layout) -> JsonDict:
    """What a release stands on besides its own text: engine build, model manifest, drop-ins, driver."""
    venv = Path(variant["engine"]["venv"])
    marker = venv / ENGINE_MARKER
    # The folders of metadata carry every version: a virtualenv that was changed in place is another one.
    installed = sorted(folder.name for folder in venv.glob("lib/python*/site-packages/*.dist-info"))
    manifest = _manifest(variant, layout)
    draft = _draft(variant)
    drafted = _manifest(variant, layout, draft) if draft else None
    driver = Path("/sys/module/nvidia/version")
    dropins = own_dropins(layout, variant["unit"]).values()
    return {
        "engine": hashlib.sha256(marker.read_bytes() + " ".join(installed).encode()).hexdigest()[:16]
        if marker.exists()
        else None,
        "model": manifest.get("id") if manifest else None,
        "draft": drafted.get("id") if drafted else None,
        "drop-ins": hashlib.sha256(b"\0".join(dropins)).hexdigest()[:16],
        "driver": driver.read_text(encoding="ascii").strip() if driver.exists() else None,
    }


def own_dropins(layout: records.Layout, unit: str) -> dict[str, bytes]:
    """The administrator's own drop-ins of a unit by file name: they change it as much as its file does."""
    found = sorted((layout.units / (unit + ".d")).glob("*.conf"))
    return {file.name: file.read_bytes() for file in found if file.name != EXCLUSION_DROPIN}


def changed_below(good: JsonDict, variant: JsonDict, layout: records.Layout) -> list[str]:
    """What a good release stood on (engine, model, drop-ins, driver) and that is another one now."""
    stood_on = good.get("identity") or {}
    return [part for part, now in identity(variant, layout).items() if stood_on.get(part) not in (None, now)]


def load_release(layout: records.Layout, release: str) -> JsonDict:
    """The variant of a staged release, after its content was held against its name; RecordError when it is not it."""
    folder = layout.release(release)
    try:
        variant = records.read_json(folder / "variant.json")
        text = (folder / variant["unit"]).read_text(encoding="utf-8")
    except (FileNotFoundError, KeyError, TypeError) as error:
        raise records.RecordError(f"release {release} is not complete in {folder}: {error}") from error
    found = units.release_id(text, variant)
    if found != release:
        raise records.RecordError(
            f"release {release}: the content of {folder} hashes to {found}; it was changed by hand. "
            "Deploy the variant again."
        )
    return dict(variant)


def _engine(variant: JsonDict) -> list[str]:
    venv = Path(variant["engine"]["venv"])
    marker = records.read_if_there(venv / ENGINE_MARKER)
    if not os.access(variant["argv"][0], os.X_OK):
        return [
            "{} is not there or not executable. Run the deploy again: role python_env builds it.".format(
                variant["argv"][0]
            )
        ]
    if marker is None:
        return [
            f"{venv} has no {ENGINE_MARKER}: the virtualenv was not finished by role python_env. Run the deploy again."
        ]
    return []


def _identity(variant: JsonDict, layout: records.Layout) -> list[str]:
    """Another model's variant that is installed under the same unit name would be replaced by this one."""
    wanted = identities.of(variant)
    there = [one for one in installed.managed_variants(layout) if one["unit"] == variant["unit"]]
    return [
        f"{variant['unit']} is installed as {identities.of(one)}, expected {wanted} or no such unit. Rename the model "
        "or the variant, so that each has a unit of its own."
        for one in there
        if identities.of(one) != wanted
    ]


def _version(variant: JsonDict) -> list[str]:
    version = variant["engine"]["version"]
    why_not = versions.unsupported(version)
    if why_not:
        return [why_not + ". Set swapgate_host.engine.version to a newer release."]
    return versions.known_vulnerabilities(version, variant["accepted_risks"]) + versions.removed_settings(
        variant["argv"], variant["env"], version
    )


def _draft(variant: JsonDict) -> str | None:
    """The folder of the variant's draft model, if it has one of its own."""
    path = (variant.get("speculative_config") or {}).get("model")
    own = isinstance(path, str) and path.startswith("/") and path != variant["model"]["path"]
    return path if own else None


def _manifest(variant: JsonDict, layout: records.Layout, draft: str | None = None) -> JsonDict | None:
    """What role model_cache wrote of the model's folder, or of its draft's; None if it has not."""
    name = variant["model"]["name"]
    file = model_manifest.draft_name(name, draft) if draft else name
    found = records.read_if_there(layout.manifests / (file + ".json"))
    return found if not draft or (found and found.get("path") == draft) else None


def _against_manifest(variant: JsonDict, manifest: JsonDict) -> list[str]:
    problems = model_manifest.quick_check(manifest, os.stat)
    if not problems and "--trust-remote-code" in variant["argv"]:
        problems = model_manifest.code_problems(manifest, model_manifest.hash_file)
    return problems


def _writable(variant: JsonDict, account: dict[str, Any]) -> list[str]:
    """Whether the engine, or any user, may change what the engine runs: its own code, its model, its draft."""
    gids = {account["group"], *account["extra_groups"]}
    places = [("model folder", variant["model"]["path"]), ("draft folder", _draft(variant))]
    problems = []
    for what, root in places:
        if root:
            below = [
                str((Path(at) / name).relative_to(root)) for at, dirs, files in os.walk(root) for name in dirs + files
            ]
            problems += model_manifest.write_problems(what, root, account["user"], gids, below)
    venv = variant["engine"]["venv"]
    code = [folder.relative_to(venv) for folder in Path(venv).glob("lib/python*/site-packages/*")]
    below = ["bin", "bin/python", *map(str, code), *(str(folder.parent) for folder in code[:1])]
    return problems + model_manifest.write_problems("engine", venv, account["user"], gids, below)


def _model(variant: JsonDict, layout: records.Layout) -> list[str]:
    path = Path(variant["model"]["path"])
    if not path.is_dir():
        return [
            "model folder {} is not there. Correct `path` of model '{}' or let role model_cache fetch it.".format(
                path, variant["model"]["name"]
            )
        ]
    problems = []
    if not (path / "config.json").is_file():
        problems.append(f"{path} has no config.json: not a model folder.")
    load_format = flag_value(variant["argv"], "--load-format") or "auto"
    weights = sorted(path.glob("*.safetensors"))
    if load_format == "dummy":
        problems.append("--load-format dummy serves random weights. Remove it.")
    elif load_format in WEIGHT_FORMATS and not weights:
        problems.append(f"{path} holds no *.safetensors file, which load format '{load_format}' reads.")
    problems += model_manifest.verify_headers(str(path))
    manifest = _manifest(variant, layout)
    if manifest is None:
        problems.append(
            "no manifest of model '{}' in {}. Run the deploy again: role model_cache writes it.".format(
                variant["model"]["name"], layout.manifests
            )
        )
    else:
        problems += _against_manifest(variant, manifest)
    draft = _draft(variant)
    if draft and not (Path(draft) / "config.json").is_file():
        problems.append(
            "draft model {} is not there (no config.json). Correct `drafts` of model '{}'.".format(
                draft, variant["model"]["name"]
            )
        )
    elif draft:
        problems += model_manifest.verify_headers(draft)
        # Hosts of an older swapgate have no manifest of it yet: the next deploy writes one.
        recorded = _manifest(variant, layout, draft)
        problems += _against_manifest(variant, recorded) if recorded else []
    return problems


def within(limit_s: float, folder: str, look: Callable[[], T]) -> T:
    """What ``look`` finds in a folder; TimeoutError when that takes longer than ``limit_s``.

    A thread that waits for a dead mount cannot be ended. It is left behind, and ends with this process.
    """
    found: list[T] = []
    errors: list[Exception] = []

    def read() -> None:
        try:
            found.append(look())
        except Exception as error:  # raised again below
            errors.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(limit_s)
    if reader.is_alive():
        raise TimeoutError(f"{folder} did not answer within {limit_s:.0f} s: a mount that hangs? Look at `findmnt -T`.")
    if errors:
        raise errors[0]
    return found[0]


def _readable(variant: JsonDict, text: str) -> list[str]:
    """Whether the service user gets at the model and the interpreter: cheap, so never taken from an earlier report."""
    path = variant["model"]["path"]
    seen = aside.run(text, ["find", "-L", path, "!", "-readable", "-print", "-quit"], {}, LOOK_LIMIT_S)
    if seen.code != 0 or seen.out.strip():
        what = (seen.out.strip() or seen.err.strip() or f"find {seen.how}").splitlines()[-1]
        return [f"the service user cannot read the model: {what}. Give it the right: files 0644, folders 0755."]
    python = variant["engine"]["venv"] + "/bin/python"
    started = aside.run(text, [python, "-c", ""], {}, LOOK_LIMIT_S)
    if started.code != 0:
        return [
            f"{python} {started.how} for the service user: {started.last}. Remove the virtualenv and run the deploy "
            "again."
        ]
    return []


def _venv_stamp(venv: str) -> list[int]:
    """Number, size and newest change of an engine's code: whatever is changed in place makes another stamp."""
    count = size = newest = 0
    for folder in Path(venv).glob("lib/python*/site-packages"):
        for place, _, names in os.walk(folder):
            for name in names:
                if name.endswith((".py", ".so")):
                    seen = os.stat(os.path.join(place, name))
                    count, size, newest = count + 1, size + seen.st_size, max(newest, seen.st_mtime_ns)
    return [count, size, newest]


def _gpus(variant: JsonDict) -> list[str]:
    size, indices = variant["model"]["tensor_parallel_size"], variant["gpus"]
    pipeline = int(flag_value(variant["argv"], "--pipeline-parallel-size") or 1)
    if indices and size * pipeline != len(indices):
        return [
            f"tensor parallel size {size} x pipeline {pipeline} needs {size * pipeline} GPUs, "
            f"swapgate_host.gpus lists {len(indices)}."
        ]
    return []


def _port(variant: JsonDict, managed: list[str]) -> list[str]:
    foreign = [holder for holder in processes.port_holders(variant["port"]) if holder.unit not in managed]
    return [
        "port {} is held by {}, which is not a unit of swapgate. Stop it or choose another port.".format(
            variant["port"], holder
        )
        for holder in foreign
    ]


def _disk(layout: records.Layout) -> list[str]:
    problems = []
    for folder in ("/var/cache", str(layout.state_dir), "/run"):
        free = shutil.disk_usage(folder).free >> 20
        least = MIN_FREE_MIB if folder != "/run" else 16
        if free < least:
            problems.append(f"{folder} has {free} MiB free, expected at least {least}. Make room.")
    return problems


def _enabled(managed: list[str]) -> list[str]:
    enabled = systemd.enabled(managed)
    if len(enabled) > 1:
        return [
            "{} are all enabled: at boot they would fight for the GPUs. `systemctl disable` all but one.".format(
                " and ".join(enabled)
            )
        ]
    return []


def _unit_file(layout: records.Layout, release: str, variant: JsonDict) -> list[str]:
    return systemd.verify(str(layout.release(release) / variant["unit"]))


def account_of(text: str) -> dict[str, Any]:
    """The account of a unit file's User= line, as keyword arguments for subprocess."""
    user = next((line[5:] for line in text.split("\n") if line.startswith("User=")), "root")
    entry = pwd.getpwnam(user)
    groups = [group.gr_gid for group in grp.getgrall() if user in group.gr_mem]
    return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}


def ask_engine(variant: JsonDict, layout: records.Layout, release: str) -> JsonDict:
    """The engine's own word on the argv: engine_check's report, as the service user, in the unit's environment.

    Its stage is `silent` where no answer came in time, and `import` where the interpreter did not get as far as one.
    """
    script = Path(__file__).with_name("engine_check.py")
    command = [variant["engine"]["venv"] + "/bin/python", str(script)]
    text = (layout.release(release) / variant["unit"]).read_text(encoding="utf-8")
    given = json.dumps({"argv": variant["argv"][2:]})
    try:
        done = aside.run(text, command, variant["env"], ENGINE_CHECK_LIMIT_S, given)
    except (OSError, KeyError) as error:
        return {"ok": False, "stage": "import", "error": f"cannot run {command[0]}: {error}"}
    if done.code is None:
        return {"ok": False, "stage": "silent", "error": f"no answer in {ENGINE_CHECK_LIMIT_S:.0f} s"}
    try:
        report = json.loads(done.out.strip().splitlines()[-1])
        return dict(report, error=report["error"] and printable(report["error"], 4 * SHOWN))
    except (ValueError, IndexError, KeyError, TypeError, RecursionError):
        what = printable(f"the engine's interpreter {done.how}: {done.last}")
        return {"ok": False, "stage": "import", "error": what}


def _hold_against(variant: JsonDict, answer: JsonDict) -> JsonDict:
    """An engine that is not the version that the variant names has not accepted it."""
    said, wanted = answer.get("version"), variant["engine"]["version"]
    if answer["ok"] and (not said or versions.release(said) != versions.release(wanted)):
        error = f"{variant['engine']['venv']} holds vLLM {said}, expected {wanted}"
        return dict(answer, ok=False, stage="import", error=error)
    return answer


def _remedy(variant: JsonDict, answer: JsonDict) -> str:
    """What to do about an answer that is no yes: the engine's virtualenv is at fault, the host's load, or an entry."""
    if answer["stage"] == "import":
        return "Remove {} and run the deploy again.".format(variant["engine"]["venv"])
    if answer["stage"] == "silent":
        return "See what keeps the host busy, then ask again."
    return "Correct the variant's or the model's entry."


def _trial(variant: JsonDict, effective: JsonDict) -> list[str]:
    """What keeps a trial's drafting from being changed while it serves, as the engine's own config tells it."""
    if not variant.get("trial") or effective.get("model_runner") != "V2":
        return []
    return [
        "'{}' is a trial variant and the engine would run it with model runner V2, whose graphs and scheduler fix k at "
        "the start. Measure each setting as a variant of its own, or give the trial and the variants it stands for "
        "`env: {{VLLM_USE_V2_MODEL_RUNNER: 0}}`, which measures the V1 runner and its other n-gram rule.".format(
            variant["name"]
        )
    ]


def check(layout: records.Layout, release: str, managed: list[str], on_step: Callable[[str], None]) -> JsonDict:
    """The preflight report of one staged release. ``managed`` are the units of swapgate on this host.

    The cheapest check comes first; the engine is asked only when nothing else is wrong, and not again when it has
    accepted the very same engine, argv, environment, model and rules before. ``on_step`` hears what is done.
    """
    started = time.monotonic()
    report: JsonDict = {
        "schema": records.SCHEMA,
        "release": release,
        "variant": None,
        "ok": False,
        "problems": [],
        "class": None,
        "engine_version": None,
        "effective": {},
        "notices": [],
        "host_notices": [],
        "cached": False,
        "seconds": 0.0,
    }

    def collect(name: str, found: list[str]) -> None:
        report["problems"] += [{"check": name, "what": what} for what in found]

    try:
        variant = load_release(layout, release)
    except records.RecordError as error:
        collect("release", [str(error)])
        return report
    report["variant"] = variant["name"]
    on_step("rules")
    collect("engine", _engine(variant))
    collect("version", _version(variant))
    collect("identity", _identity(variant, layout))
    try:
        collect("model", within(MOUNT_LIMIT_S, variant["model"]["path"], lambda: _model(variant, layout)))
    except TimeoutError as error:
        collect("host", [str(error)])
    collect("gpus", _gpus(variant))
    if variant["gpus"]:
        faults, notices = gpus.health(variant["gpus"])
        collect("host", faults)
        report["host_notices"] += notices
        collect("host", gpus.foreign(layout, variant))
        report["host_notices"] += gpus.collective_notices(variant)
    collect("port", _port(variant, managed))
    collect("disk", _disk(layout))
    collect("enabled", _enabled(managed))
    collect("unit", _unit_file(layout, release, variant))
    if not report["problems"]:
        text = (layout.release(release) / variant["unit"]).read_text(encoding="utf-8")
        collect("writable", _writable(variant, account_of(text)))
    if not report["problems"]:
        collect("readable", _readable(variant, text))
    if not report["problems"]:
        on_step("engine")
        stamp = _venv_stamp(variant["engine"]["venv"])
        asked = [rules_digest(), stamp, variant["engine"], variant["argv"], variant["env"], identity(variant, layout)]
        key = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:16]
        kept = layout.preflights / (key + ".json")
        answer = records.read_if_there(kept)
        report["cached"] = answer is not None
        if answer is None:
            answer = ask_engine(variant, layout, release)
            answer = _hold_against(variant, answer)
            if answer["ok"]:
                records.write_json(kept, answer)
        if not answer["ok"]:
            collect("engine's own parser", ["{}. {}".format(answer["error"].rstrip(" .:"), _remedy(variant, answer))])
        report["engine_version"] = answer.get("version")
        report["effective"] = answer.get("effective") or {}
        report["notices"] = answer.get("notices") or []
        collect("trial", _trial(variant, report["effective"]))
    report["ok"] = not report["problems"]
    if report["problems"]:
        report["class"] = CLASSES.get(report["problems"][0]["check"], "config")
    report["seconds"] = round(time.monotonic() - started, 1)
    return report
