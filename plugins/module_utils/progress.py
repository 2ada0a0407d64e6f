"""What a person reads: one line while a swap runs, a few lines when it ended. Pure functions over `swapgate status`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from . import difference, identity, topology

SEPARATOR = " | "
UNKNOWN = "time left not known yet"
JsonDict = dict[str, Any]


def seconds(value: float) -> str:
    """``75`` as ``1 min 15 s``."""
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02d} s"


def utc(unix: float) -> str:
    """A moment for people, in UTC and saying so."""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(unix))


def labels(*releases: Mapping[str, Any], exact: bool = False) -> list[str]:
    """What people call these releases: the variant, with model and slot where those differ between them.

    With ``exact`` the first digits of the release follow, and also where the names alone would not tell two apart.
    Records of an older swapgate have no model and no slot.
    """
    models = {one["model"] for one in releases if one.get("model")}
    slots = {one.get("slot") or identity.SLOT for one in releases}
    names = [
        (f"{one.get('model') or '?'}/" if len(models) > 1 else "")
        + str(one["variant"])
        + (f"@{one.get('slot') or identity.SLOT}" if len(slots) > 1 else "")
        for one in releases
    ]
    alike = len(set(names)) < len({one.get("release") for one in releases})
    if exact or alike:
        names = ["{}@{}".format(name, str(one.get("release"))[:4]) for name, one in zip(names, releases)]
    return names


def direction(swap: Mapping[str, Any], exact: bool = False) -> str:
    """``baseline -> ngram``: from where to where a swap goes."""
    if not swap["from"]:
        return "nothing -> {}".format(*labels(swap["to"], exact=exact))
    return "{} -> {}".format(*labels(swap["from"], swap["to"], exact=exact))


def time_left(snapshot: Mapping[str, Any]) -> str:
    """What is left of a load, as far as it is known, from a LoadWatch snapshot."""
    left = snapshot["remaining_s"]
    if left is None:
        return UNKNOWN
    # A shard rate says nothing of what comes after the weights.
    return "about {} left{}".format(
        seconds(left), " for the weights" if snapshot["remaining_from"] == "shard rate" else ""
    )


def _unit_load(status: Mapping[str, Any], unit: str) -> JsonDict | None:
    for found in status["units"]:
        if found["unit"] == unit and found.get("load"):
            load: JsonDict = found["load"]
            return load
    return None


# Part of a load's detail: see load_watch.
NO_HISTORY = "no earlier load on this host"


def line(host: str, status: Mapping[str, Any], now_unix: float, told: bool = False) -> str:
    """Host, variant, phase, percent, elapsed and what is left of the swap in ``status``, as one line.

    That the time left is not known, and why, is left out when it was ``told`` before.
    """
    swap = status.get("swap")
    if not swap:
        return SEPARATOR.join([host, "no swap"])
    phase = swap["phase"] or swap["outcome"] or "starting"
    back = phase.startswith("rollback-")
    target = swap["from"] if back and swap["from"] else swap["to"]
    words = [host, target["variant"], phase]
    load = _unit_load(status, target["unit"]) if phase.endswith("watch") else None
    if load:
        snapshot = load["load"]
        words += [
            "{} {:.0f} %".format(snapshot["phase"], snapshot["percent"]),
            seconds(snapshot["elapsed_s"]) + " elapsed",
        ]
        if snapshot["remaining_s"] is not None or not told:
            words.append(time_left(snapshot))
        details = [part for part in snapshot["detail"].split("; ") if part and not (told and NO_HISTORY in part)]
        if details:
            words.append("; ".join(details))
    elif swap.get("phase_since_unix"):
        words.append(seconds(max(0.0, now_unix - swap["phase_since_unix"])) + " in this phase")
    return SEPARATOR.join(words)


_LINE = re.compile(r"(?P<host>[^|]+) \| (?P<variant>[^|]+) \| (?P<phase>[a-z_ -]+)(?: \| (?P<rest>.*))?$")


def parse(text: str) -> dict[str, str] | None:
    """A progress line taken apart into host, variant, phase and the rest; None for any other text."""
    match = _LINE.match(text.strip())
    return {key: (value or "").strip() for key, value in match.groupdict().items()} if match else None


def _cause(label: str, cause: Mapping[str, Any]) -> list[str]:
    lines = [
        "{}: {} [{}{}]".format(
            label, cause["what"], cause["class"], ", in phase " + cause["phase"] if cause.get("phase") else ""
        )
    ]
    for key, name in (("root_cause", "first cause"), ("remedy", "what to do")):
        if cause.get(key) and cause[key] not in cause["what"]:
            lines.append(f"  {name}: {cause[key]}")
    lines += ["    " + context for context in cause.get("context") or []]
    return lines


def report(host: str, status: Mapping[str, Any]) -> list[str]:
    """The end of a swap for people: outcome, times, cause, and what serves now."""
    swap = status.get("swap")
    if not swap:
        return [f"{host}: no swap has run"]
    if swap["phase"] == "confirm" and not swap["outcome"]:
        return waiting(host, swap)
    good = status["last_good"]
    serving = (
        "{} serves since {}".format(good["variant"], "this swap")
        if swap["outcome"] == "swapped"
        else ("{} is the last good variant".format(good["variant"]) if good else "no variant was ever good")
    )
    lines = ["{}: {}: {}; {}".format(host, direction(swap), swap["outcome"], serving)]
    if swap["phases"]:
        lines.append("  " + ", ".join("{} {:.1f} s".format(item["name"], item["seconds"]) for item in swap["phases"]))
    if swap["seconds_without_service"] is not None:
        lines.append("  {} without service".format(seconds(swap["seconds_without_service"])))
    if swap["cause"]:
        lines += _cause("  cause", swap["cause"])
    if swap["rollback_cause"]:
        lines += _cause("  and the roll back failed", swap["rollback_cause"])
        lines.append("  " + NEXT["failed"])
    return lines


# What to do after a swap, by its outcome.
NEXT = {
    "refused": "nothing that serves was touched: correct the cause, then run the deploy again",
    "rolled_back": "correct the cause, then run the deploy again",
    "recovered": "correct the cause, then run the deploy again",
    "failed": "no service: mend the cause, then run the deploy again, or playbooks/rollback.yml",
}


def asked(swap: Mapping[str, Any]) -> str:
    """The first line of a swap in the journal: which one it is, from where to where, who asked for it, and why."""
    words = "swap {}: {}".format(swap["id"][:4], direction(swap, exact=True))
    if swap.get("changes"):
        words += " ({})".format(swap["changes"])
    if swap.get("kind") == "rollback":
        words += ", a rollback"
    words += ", asked for by {}".format(swap["by"])
    return words + (": {}".format(swap["because"]) if swap.get("because") else "")


def outcome(swap: Mapping[str, Any]) -> list[str]:
    """The last lines of a swap in the journal: its outcome, the cause, and what to do next."""
    words = "swap {}: {}: {}".format(swap["id"][:4], direction(swap, exact=True), swap["outcome"])
    if swap["seconds_without_service"] is not None:
        words += ", {} without service".format(seconds(swap["seconds_without_service"]))
    lines = [words]
    if swap["cause"]:
        lines += _cause("cause", swap["cause"])
    if swap["rollback_cause"]:
        lines += _cause("and the roll back failed", swap["rollback_cause"])
    if swap["outcome"] in NEXT:
        lines.append("next: " + NEXT[swap["outcome"]])
    return lines


def waiting(host: str, swap: Mapping[str, Any]) -> list[str]:
    """A swap in phase `confirm` for people: until when it waits, for what, and what comes otherwise."""
    until = time.strftime("%H:%M:%SZ", time.gmtime(swap["phase_since_unix"] + swap["confirm_within_s"]))
    back = "'{}' comes back".format(swap["from"]["variant"]) if swap["from"] else "nothing serves any more"
    return [
        "{}: {}: serves and waits to be confirmed, {} in all, until {}; then {}".format(
            host,
            direction(swap),
            seconds(swap["confirm_within_s"]),
            until,
            back,
        ),
        "  keep it: playbooks/confirm.yml, or `swapgate confirm` on the host",
        "  go back now: playbooks/confirm.yml -e decline=true -e because=TEXT, or `swapgate decline --because TEXT`",
    ]


def preflight_report(report_: Mapping[str, Any]) -> list[str]:
    """A preflight for people: each problem, or what the engine made of the configuration."""
    if not report_["ok"]:
        return ["{}: {}".format(problem["check"], problem["what"]) for problem in report_["problems"]]
    lines = [
        "vLLM {} accepts the variant{}".format(
            report_["engine_version"], " (known from an earlier check)" if report_["cached"] else ""
        )
    ]
    effective = dict(report_["effective"])
    speculative = effective.pop("speculative", None) or {}
    lines += [f"  {key}: {value}" for key, value in sorted(effective.items())]
    lines += [f"  speculative {key}: {value}" for key, value in sorted(speculative.items())]
    lines += ["  the engine says: " + notice for notice in report_["notices"]]
    return lines + ["  this host: " + notice for notice in report_.get("host_notices", [])]


def gpu_table(host: str, report_: Mapping[str, Any]) -> list[str]:
    """`swapgate gpus` for people: each GPU with its state and whose it is, and the orphans."""
    lines = []
    for gpu in report_["gpus"]:
        used = "unknown" if gpu["used_mib"] is None else "{:.0f} MiB".format(gpu["used_mib"])
        lines.append("{}: GPU {}: {}, {} in use".format(host, gpu["index"], gpu["state"], used))
        lines += ["    {}: {}".format(holder["kind"], holder["who"]) for holder in gpu["holders"]]
    for orphan in report_["orphans"]:
        lines.append(f"{host}: orphan of a dead engine: {orphan}. `swapgate end-orphans` ends it")
    return lines


def collective_table(host: str, report_: Mapping[str, Any]) -> list[str]:
    """`swapgate collective` for people: the verdict, each size, what stands between the GPUs, what to do."""
    words = [report_["verdict"], report_["what"]]
    lines = ["{}: {}: {}".format(host, report_["variant"], ": ".join(words))]
    lines += [
        "    {:>9} bytes: {}, {:.1f} us, {:.3f} GB/s".format(
            row["bytes"], "correct" if row["correct"] else "WRONG", row["seconds"] * 1e6, row["bus_gbps"]
        )
        for row in report_["sizes"]
    ]
    if report_.get("environment"):
        lines.append("    " + " ".join(f"{key}={value}" for key, value in report_["environment"].items()))
    fabric = report_["fabric"]
    acs = fabric["acs"]
    lines.append(
        "    IOMMU: {} groups{}; ACS: {}; kernel: {}".format(
            fabric["iommu_groups"],
            "".join(f", {count} {kind}" for kind, count in fabric["iommu_types"].items()),
            "not to be seen"
            if acs is None
            else "redirects at {}".format(", ".join(acs["redirect"]))
            if acs["redirect"]
            else "no redirect on {} bridges".format(acs["bridges"]),
            " ".join(fabric["cmdline"]) or "says nothing of them",
        )
    )
    lines += ["    GPUs since: " + reason for reason in report_.get("after", [])]
    if report_["remedy"]:
        lines.append("    what to do: {}".format(report_["remedy"]))
    return lines


def topology_table(host: str, report_: Mapping[str, Any]) -> list[str]:
    """`swapgate topology` for people: GPUs, links, the profile that fits with its reasons, and what does not fit."""
    matrix, wanted = report_["picture"]["topology"], report_["derived"]
    nodes: dict[str, list[str]] = {}
    for gpu in report_["picture"]["gpus"]:
        nodes.setdefault(str(gpu["numa"] if gpu["numa"] is not None else "unknown"), []).append(str(gpu["index"]))
    lines = [
        "{}: {} GPUs, links {}, {}".format(
            host,
            matrix["gpus"],
            ", ".join(matrix["levels"]) or "none",
            "; ".join("NUMA {}: GPU {}".format(node, ", ".join(members)) for node, members in nodes.items()),
        )
    ]
    lines += ["    " + line for line in [*report_["picture"]["verdict"]["warnings"], *topology.nic_lines(matrix)]]
    lines.append("    profile `{profile}`: {reason}".format(**wanted))
    lines += [f"      {name}={item['value']}: {item['reason']}" for name, item in sorted(wanted["settings"].items())]
    lines += ["    " + notice for notice in wanted["notices"]]
    for name, found in report_["variants"].items():
        lines += [f"    variant '{name}': {notice}" for notice in found]
    return lines


def plan(host: str, status: Mapping[str, Any] | None, variant: str, release: str) -> str:
    """What a swap to a release would do, for consent and for check mode; several lines, the last one is the deed.

    ``status`` may hold "difference": what `comparison` gives for this release and what serves.
    """
    if not status:
        return f"{host}: nothing of swapgate is installed; '{variant}' would be the first variant"
    busy = under_way(host, status, variant, release)
    if busy:
        return busy
    found = status.get("difference") or {}
    lines = [text if text.startswith(" ") else f"{host}: {text}" for text in found.get("lines", [])]
    serving = [unit for unit in status["units"] if unit["active"] == "active"]
    if any(unit["release"] == release for unit in serving) and not found.get("stale"):
        return f"{host}: '{variant}' already serves as it is; nothing would change"
    lines += [f"{host}: {_job(job, status)} and would be lost" for job in status.get("jobs") or [] if serving]
    target = found.get("to") or {"variant": variant, "release": release}
    # An older host program tells them by variant.
    usual = status.get("usual_seconds_without_service", {}).get(target.get("unit", variant))
    how_long = f"usually {seconds(usual)} here" if usual else "no earlier load on this host tells how long"
    names = [labels(unit, target) for unit in serving]
    wanted = names[0][1] if names else variant
    stopped = ", ".join(f"'{name}'" for name, _ in names)
    if not stopped:
        lines.append(f"{host}: nothing serves; '{wanted}' would be loaded ({how_long})")
    else:
        lines.append(f"{host}: stops {stopped} and drops its traffic until '{wanted}' has loaded ({how_long})")
    return "\n".join(lines)


def under_way(host: str, status: Mapping[str, Any] | None, variant: str, release: str) -> str | None:
    """What a swap that runs already means for whoever asks for ``release``; None where none runs."""
    swap = (status or {}).get("swap")
    if not status or not swap or swap["outcome"]:
        return None
    ago = " {} ago".format(seconds(max(0.0, status["now_unix"] - swap["started_unix"]))) if "now_unix" in status else ""
    words = "{}: a swap to '{}', asked for by {}{}, is in phase {}".format(
        host, labels(swap["to"], {"variant": variant, "release": release})[0], swap["by"], ago, swap["phase"]
    )
    if swap["to"]["release"] == release:
        return words + "; following it"
    return words + ": a swap to '{}' would be refused until it {}".format(
        variant, "is confirmed or declined: playbooks/confirm.yml" if swap["phase"] == "confirm" else "has ended"
    )


def comparison(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> JsonDict:
    """What `plan` says of the change from what serves to a release, each as `swapgate show-release` prints it.

    {"to": what `labels` takes, "lines": [...], "stale": what serves has to be loaded again although it is this release}
    """
    if not new:
        return {}
    to = {**identity.record(new["variant"]), "release": new["release"]}
    if not old:
        return {"to": to, "lines": [], "stale": False}
    names = labels({**identity.record(old["variant"]), "release": old["release"]}, to, exact=True)
    below = [BELOW[part] for part in old["changed_below"]]
    if old["release"] == new["release"]:
        lines = [f"{names[1]} was loaded before {', '.join(below)}"] if below else []
        return {"to": to, "lines": lines, "stale": bool(below)}
    found = difference.changes(old["variant"], old["unit_text"], new["variant"], new["unit_text"])
    own = new.get("dropins")
    if own is not None:
        found += difference.dropins(old["dropins"], own, new["variant"]["unit"])
    changed = difference.lines(found) + [f"since it was loaded: {text}" for text in below]
    if found == [difference.KEY_ROTATED]:
        changed.append("(a new key takes a load as well)")
    lines = ["what changes, from {} {} to {}:".format("what serves," if old["serves"] else "the last good,", *names)]
    return {"to": to, "lines": lines + ["    " + text for text in changed], "stale": False}


# The parts of a release's identity, for what became of them since it was loaded.
BELOW = {
    "engine": "its engine was built again",
    "model": "its model's files were changed",
    "drop-ins": "the drop-ins of its unit were changed",
    "driver": "the GPU driver was changed",
}


def _job(job: Mapping[str, Any], status: Mapping[str, Any]) -> str:
    """``a benchmark by ann has run for 3 min 00 s``."""
    what = {"record": "recording of answers", "links": "check of the links"}.get(job["kind"], job["kind"])
    by = " by {}".format(job["by"]) if job.get("by") else ""
    since = job.get("since_unix")
    known = since is not None and "now_unix" in status
    return f"a {what}{by} " + (
        "has run for {}".format(seconds(max(0.0, status["now_unix"] - since))) if known else "is under way"
    )


def _acceptance(figures: Mapping[str, Any]) -> str:
    if not figures["draft_tokens"]:
        return "no draft yet"
    return "{:.0f} % of {} draft tokens accepted, acceptance length {:.2f}, by position {}".format(
        100 * figures["acceptance_rate"],
        figures["draft_tokens"],
        figures["acceptance_length"],
        " ".join(f"{rate:.2f}" for rate in figures["by_position"]),
    )


def status_table(host: str, status: Mapping[str, Any]) -> list[str]:
    """Each unit of a host, what serves first; then last good, swap, way back, jobs, and what to do next."""
    if status["problem"]:
        return ["{}: {}".format(host, status["problem"])]
    good = status["last_good"]
    rows = sorted(status["units"], key=lambda unit: unit["active"] != "active")
    lines = []
    for unit, name in zip(rows, labels(*rows)):
        load = unit["load"] or {}
        words = [
            name,
            unit["active"] + (" ({})".format(unit["sub"]) if unit["active"] != unit["sub"] else ""),
            "since " + unit["since"] if unit["active"] == "active" else "",
            "release " + unit["release"],
            "loaded in " + seconds(load["ready_after_s"]) if load.get("ready_after_s") else "",
            "starts at boot" if unit["enabled"] else "",
            "last good" if good and good["release"] == unit["release"] else "",
            unit["status"] if unit["active"] == "activating" else "",
        ]
        lines.append("{}: {}".format(host, ", ".join(word for word in words if word)))
        failure = load.get("failure")
        if failure and unit["active"] in ("failed", "inactive"):
            lines.append("    last failure: {}".format(failure.get("root_cause") or failure["what"]))
    if status["acceptance"]:
        lines.append("    drafts: " + _acceptance(status["acceptance"]))
    if good:
        lines.append("    last good: {}, since {}".format(*labels(good, exact=True), utc(good["since_unix"])))
    lines += _swap_lines(status)
    back = status.get("way_back")
    if back:
        lines.append("    a rollback goes to: {}".format(*labels(back, exact=True)))
    lines += ["    job: " + _job(job, status) for job in status.get("jobs") or []]
    step = _next_step(status)
    if step:
        lines.append("    next: " + step)
    return lines if rows else [f"{host}: no variant is installed", *lines]


def _swap_lines(status: Mapping[str, Any]) -> list[str]:
    """The swap that runs, or how the last one ended."""
    swap = status["swap"]
    if not swap:
        return []
    if swap["outcome"] is None:
        if swap["phase"] == "confirm":
            return ["    " + text.strip() for text in waiting("swap", swap)]
        return [
            "    swap: {}, asked for by {} at {}, is in phase {}".format(
                direction(swap, exact=True), swap["by"], utc(swap["started_unix"]), swap["phase"]
            )
        ]
    lines = ["    last swap: " + history_line(swap, with_cause=False)]
    if swap["cause"]:
        lines += ["    " + text for text in _cause("cause", swap["cause"])[:3]]
    return lines


def _next_step(status: Mapping[str, Any]) -> str | None:
    """The next command, where the state of a host asks for one."""
    swap, good = status["swap"], status["last_good"]
    states = {unit["active"] for unit in status["units"]}
    if swap and swap["outcome"] is None:
        # A swap that waits says itself which commands answer it.
        return None if swap["phase"] == "confirm" else "wait; `journalctl -fu swapgate-swap` on the host follows it"
    if not status["units"]:
        return "playbooks/deploy.yml -e variant=NAME"
    if states & {"active", "activating", "reloading"}:
        return None
    if good:
        return "nothing serves: `journalctl -u {}` tells why; playbooks/rollback.yml brings '{}' back".format(
            good["unit"], good["variant"]
        )
    return "nothing serves: playbooks/deploy.yml -e variant=NAME"


def way_back_lines(host: str, back: Mapping[str, Any]) -> list[str]:
    """`swapgate way-back` for people."""
    return ["{}: a rollback goes to {}: playbooks/rollback.yml".format(host, *labels(back, exact=True))]


def history_line(swap: Mapping[str, Any], with_cause: bool = True) -> str:
    """One ended swap: when, who, what kind, from where to where, what changed, how it ended, why."""
    lost = swap["seconds_without_service"]
    changes = swap.get("changes")
    words = [
        utc(swap["started_unix"]),
        swap["by"],
        swap.get("kind") or "",
        direction(swap, exact=True) + (f" ({changes})" if changes else ""),
        swap["outcome"],
        f"{seconds(lost)} without service" if lost is not None else "",
        "because: {}".format(swap["because"]) if swap.get("because") else "",
        swap["cause"]["what"] if swap["cause"] and with_cause else "",
    ]
    return ", ".join(word for word in words if word)


def history_table(swaps: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line a swap, oldest first."""
    return [history_line(swap) for swap in swaps]
