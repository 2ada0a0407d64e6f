"""What a person reads: one line while a swap runs, a few lines when it ended. Pure functions over `swapgate status`."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from . import topology

SEPARATOR = " | "
JsonDict = dict[str, Any]


def seconds(value: float) -> str:
    """``75`` as ``1 min 15 s``."""
    whole = round(value)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min {whole % 60:02d} s"


def time_left(snapshot: Mapping[str, Any]) -> str:
    """What is left of a load, as far as it is known, from a LoadWatch snapshot."""
    left = snapshot["remaining_s"]
    if left is None:
        return "time left not known yet"
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


def line(host: str, status: Mapping[str, Any], now_unix: float) -> str:
    """Host, variant, phase, percent, elapsed and what is left of the swap in ``status``, as one line."""
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
            time_left(snapshot),
        ]
        if snapshot["detail"]:
            words.append(snapshot["detail"])
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
    lines = [
        "{}: {} -> {}: {}; {}".format(
            host,
            swap["from"]["variant"] if swap["from"] else "nothing",
            swap["to"]["variant"],
            swap["outcome"],
            serving,
        )
    ]
    if swap["phases"]:
        lines.append("  " + ", ".join("{} {:.1f} s".format(item["name"], item["seconds"]) for item in swap["phases"]))
    if swap["seconds_without_service"] is not None:
        lines.append("  {} without service".format(seconds(swap["seconds_without_service"])))
    if swap["cause"]:
        lines += _cause("  cause", swap["cause"])
    if swap["rollback_cause"]:
        lines += _cause("  and the roll back failed", swap["rollback_cause"])
        lines.append("  no service: mend the cause, then run the deploy again, or playbooks/rollback.yml")
    return lines


def waiting(host: str, swap: Mapping[str, Any]) -> list[str]:
    """A swap in phase `confirm` for people: until when it waits, for what, and what comes otherwise."""
    until = time.strftime("%H:%M:%SZ", time.gmtime(swap["phase_since_unix"] + swap["confirm_within_s"]))
    back = "'{}' comes back".format(swap["from"]["variant"]) if swap["from"] else "nothing serves any more"
    return [
        "{}: {} -> {}: serves and waits to be confirmed, {} in all, until {}; then {}".format(
            host,
            swap["from"]["variant"] if swap["from"] else "nothing",
            swap["to"]["variant"],
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
    """What a swap to a release would do, for consent and for check mode."""
    if not status:
        return f"{host}: nothing of swapgate is installed; '{variant}' would be the first variant"
    serving = [unit for unit in status["units"] if unit["active"] == "active"]
    if any(unit["release"] == release for unit in serving):
        return f"{host}: '{variant}' already serves as it is; nothing would change"
    usual = status.get("usual_seconds_without_service", {}).get(variant)
    how_long = f"usually {seconds(usual)} here" if usual else "no earlier load on this host tells how long"
    stopped = ", ".join("'{}'".format(unit["variant"]) for unit in serving)
    if not stopped:
        return f"{host}: nothing serves; '{variant}' would be loaded ({how_long})"
    return f"{host}: stops {stopped} and drops its traffic until '{variant}' has loaded ({how_long})"


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
    """What serves on a host, since when, how long it took to load, and how well its drafts are accepted."""
    if status["problem"]:
        return ["{}: {}".format(host, status["problem"])]
    good = status["last_good"]
    lines = []
    for unit in status["units"]:
        load = unit["load"] or {}
        words = [
            unit["variant"],
            unit["active"] + (" ({})".format(unit["sub"]) if unit["active"] != unit["sub"] else ""),
            "since " + unit["since"] if unit["active"] == "active" else "",
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
        lines.append("    " + _acceptance(status["acceptance"]))
    swap = status["swap"]
    if swap and swap["outcome"] is None:
        if swap["phase"] == "confirm":
            lines += ["    " + text.strip() for text in waiting(host, swap)]
        else:
            lines.append("    a swap to '{}' is in phase {}".format(swap["to"]["variant"], swap["phase"]))
    return lines or [f"{host}: no variant is installed"]


def history_table(swaps: list[Mapping[str, Any]]) -> list[str]:
    """One line a swap, oldest first."""
    lines = []
    for swap in swaps:
        started = time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(swap["started_unix"]))
        lost = swap["seconds_without_service"]
        words = [
            started,
            swap["by"],
            "{} -> {}".format(swap["from"]["variant"] if swap["from"] else "nothing", swap["to"]["variant"]),
            swap["outcome"],
            f"{seconds(lost)} without service" if lost is not None else "",
            swap["cause"]["what"] if swap["cause"] else "",
        ]
        lines.append(", ".join(word for word in words if word))
    return lines
