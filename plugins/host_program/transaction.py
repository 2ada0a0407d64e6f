"""Who may swap when, and what happens to a swap that was cut off: the lock, the request, resolution and recovery.

The swap itself runs in a unit of its own, `swapgate-swap.service`; whoever asked for it may go away.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import time
import uuid
from collections.abc import Iterator
from typing import Any, Callable

from ..module_utils import difference, identity, progress, records, units
from . import preflight, systemd
from .installed import managed_units, managed_variants, migrate
from .swap import Swap, SwapFailed, new_swap

JsonDict = dict[str, Any]

SWAP_UNIT = "swapgate-swap.service"
LOCK_LIMIT_S = 20.0
LOCK_POLL_S = 0.2
# A oneshot unit is activating while it runs.
UNDER_WAY = ("activating", "deactivating")


class Busy(Exception):
    """Another swap holds the lock; the text says whose and since when."""


@contextlib.contextmanager
def locked(layout: records.Layout, owner: str, limit_s: float = 0.0) -> Iterator[None]:
    """Hold the host's one lock, waited for at most ``limit_s``. The kernel frees it with the process."""
    layout.lock.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + limit_s
    with open(layout.lock, "a+", encoding="utf-8") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    file.seek(0)
                    raise Busy("a swap is running: {}".format(file.read().strip() or "owner not known")) from error
                time.sleep(LOCK_POLL_S)
        file.seek(0)
        file.truncate()
        file.write("{} since {}\n".format(owner, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())))
        file.flush()
        yield


def unfinished(state: JsonDict) -> bool:
    """Whether the state's swap has begun and not ended."""
    return bool(state["swap"]) and state["swap"]["outcome"] is None


def _let_it_end(layout: records.Layout) -> None:
    """A swap whose outcome is written may still be leaving: wait until its unit is gone, or a new one has begun."""
    deadline = time.monotonic() + LOCK_LIMIT_S
    while time.monotonic() < deadline:
        request, swap = records.read_if_there(layout.request), records.read_state(layout)["swap"]
        ended = bool(swap and request and swap["id"] == request["id"] and swap["outcome"])
        if not ended or systemd.show(SWAP_UNIT, "ActiveState")["ActiveState"] not in UNDER_WAY:
            return
        time.sleep(LOCK_POLL_S)


def ask(
    layout: records.Layout,
    release: str,
    owner: str,
    confirm_within_s: float = 0.0,
    because: str | None = None,
    kind: str = "deploy",
) -> JsonDict:
    """Ask for a swap to a staged release and return at once: {"id", "attached": bool}.

    The same release as that of the running swap attaches to it; another one is Busy. A trial variant is taken only with
    a time to go back within: RecordError.
    """
    _let_it_end(layout)
    try:
        with locked(layout, owner):
            records.read_state(layout)
            variant = preflight.load_release(layout, release)
            if variant.get("trial") and not confirm_within_s:
                raise records.RecordError(
                    "'{}' is a trial variant: it may serve for a while and never stays. Found no time to go back "
                    "within, expected one. Ask again with --confirm-within SECONDS (a deploy: -e "
                    "confirm_within_s=SECONDS)".format(variant["name"])
                )
            if systemd.show(SWAP_UNIT, "ActiveState")["ActiveState"] in UNDER_WAY:
                raise Busy("a swap was asked for a moment ago")
            request = {
                "id": uuid.uuid4().hex[:12],
                "release": release,
                "by": owner,
                **identity.record(variant),
                "confirm_within_s": confirm_within_s,
                "because": because,
                "kind": kind,
            }
            records.write_json(layout.request, request)
            systemd.systemctl("reset-failed", SWAP_UNIT, check=False)
            systemd.systemctl("start", "--no-block", SWAP_UNIT)
    except Busy:
        running = records.read_if_there(layout.request) or {}
        if running.get("release") != release:
            swap = records.read_state(layout)["swap"]
            if swap and swap["phase"] == "confirm":
                raise Busy(
                    "the swap to '{variant}' waits for `swapgate confirm` or `swapgate decline`".format(**swap["to"])
                ) from None
            raise
        return {"id": running["id"], "attached": True}
    return {"id": request["id"], "attached": False}


def run_request(layout: records.Layout, say: Callable[[str], None]) -> int:
    """Carry out the request file, as ExecStart of swapgate-swap.service. Exit 0 unless the swap failed."""
    request = records.read_json(layout.request)
    with locked(layout, request["by"], LOCK_LIMIT_S):
        for left in layout.state_dir.glob(".*.json?*"):  # what a kill left between writing and renaming
            left.unlink()
        migrate(layout, say)
        state = records.read_state(layout)
        last = state["swap"] or {}
        if unfinished(state):
            Swap(layout, state, say).settle("the swap was cut off")
        if last.get("id") == request["id"]:
            return 0  # systemd started us again after a kill: the record is settled, and nothing was asked anew
        # A request of an older swapgate names neither model nor slot.
        to = {key: request.get(key) for key in ("model", "variant", "slot", "unit", "release")}
        if state["last_good"] is None:
            state["last_good"] = adopt(layout)
        state["swap"] = new_swap(to, state["last_good"], request["by"], request["id"])
        state["swap"].update(because=request.get("because"), kind=request.get("kind") or "deploy")
        state["swap"]["changes"] = what_changes(layout, state["last_good"], request["release"])
        say(progress.asked(state["swap"]))
        swap = Swap(layout, state, say)
        swap.run(request.get("confirm_within_s") or 0.0)
        forget_releases(layout, state)
    return 0 if swap.swap["outcome"] in ("swapped", "unchanged", "refused") else 1


def what_changes(layout: records.Layout, good: JsonDict | None, release: str) -> str | None:
    """In two or three words how a release differs from the last good one; None where one of them cannot be read."""
    if good is None or good["release"] == release:
        return None
    try:
        variants = [preflight.load_release(layout, one) for one in (good["release"], release)]
        texts = [
            (layout.release(one) / variant["unit"]).read_text(encoding="utf-8")
            for one, variant in zip((good["release"], release), variants)
        ]
        return difference.words(difference.changes(variants[0], texts[0], variants[1], texts[1]))
    except (records.RecordError, OSError, KeyError, TypeError, ValueError):
        return None  # words for a history never stop a swap


def resolve(layout: records.Layout, say: Callable[[str], None]) -> int:
    """Finish a swap that was cut off: the last good variant comes back. ExecStopPost of the swap's unit."""
    with locked(layout, "resolve", LOCK_LIMIT_S):
        migrate(layout, say)
        state = records.read_state(layout)
        if unfinished(state):
            Swap(layout, state, say).settle("the swap was cut off")
    return 0


def adopt(layout: records.Layout) -> JsonDict | None:
    """The RELEASE that serves although no state file names it (it was lost): the one enabled unit, when it is active,
    its files are those of a staged release, and it answers."""
    for variant in managed_variants(layout):
        unit = variant["unit"]
        release = units.release_id((layout.units / unit).read_text(encoding="utf-8"), variant)
        if not (layout.release(release) / "variant.json").exists() or not systemd.is_enabled(unit):
            continue
        if systemd.show(unit, "ActiveState")["ActiveState"] == "active":
            return {
                **identity.record(variant),
                "release": release,
                "since_unix": time.time(),
                "answer": None,
                "identity": preflight.identity(variant, layout),
            }
    return None


def recover(layout: records.Layout, say: Callable[[str], None]) -> int:
    """At boot, before any engine starts: a swap that the last boot cut off ends with the last good variant.

    Its unit and data are put back in place (a changed release of the same name may lie there), it alone is enabled,
    and its start is queued. Starting is left to systemd, so that a slow load does not hold the boot.
    """
    migrate(layout, say)
    state = records.read_state(layout)
    if not unfinished(state):
        return 0
    swap = Swap(layout, state, say)
    good, phase = state["last_good"], state["swap"]["phase"]
    cause = SwapFailed(f"the host went down in phase {phase}", "host", phase=phase).cause
    if not state["swap"]["stopped_old"]:
        swap.end("refused", cause)
        return 0
    if good is None:
        systemd.systemctl("disable", "--quiet", state["swap"]["to"]["unit"], check=False)
        swap.end("failed", dict(cause, remedy="No earlier variant to go back to. Run the deploy again."))
        return 0
    variant = swap.install(good["release"])
    systemd.enable_only(variant["unit"], managed_units(layout))
    systemd.systemctl("start", "--no-block", variant["unit"])
    swap.end("recovered", cause)
    swap.tell_systemd()
    return 0


def confirm(layout: records.Layout, by: str) -> JsonDict:
    """Say that the swap in phase `confirm` is wanted: {"id"}. RecordError when none waits, or a trial variant does."""
    swap = _waiting(layout)
    if preflight.load_release(layout, swap["to"]["release"]).get("trial"):
        raise records.RecordError(
            "'{variant}' is a trial variant and cannot be confirmed. End the trial with `swapgate decline --because "
            "TEXT`, then deploy the variant that it stands for".format(**swap["to"])
        )
    records.write_json(layout.confirmation, {"id": swap["id"], "by": by, "declined": None})
    return {"id": swap["id"]}


def decline(layout: records.Layout, because: str, by: str) -> JsonDict:
    """Say that the swap in phase `confirm` is not wanted: it goes back at once. {"id"}; RecordError when none waits."""
    swap = _waiting(layout)
    records.write_json(layout.confirmation, {"id": swap["id"], "by": by, "declined": because})
    return {"id": swap["id"]}


def _waiting(layout: records.Layout) -> JsonDict:
    swap: JsonDict | None = records.read_state(layout)["swap"]
    if not swap or swap["phase"] != "confirm":
        raise records.RecordError(
            "no swap waits to be confirmed: {}".format(
                "the last one, to '{}', {}".format(
                    swap["to"]["variant"],
                    f"ended {swap['outcome']}" if swap["outcome"] else f"is in phase {swap['phase']}",
                )
                if swap
                else "none has run on this host"
            )
        )
    return swap


def forget_releases(layout: records.Layout, state: JsonDict, keep: int = 10) -> None:
    """Remove all but the newest staged releases; those that the state or an installed unit needs always stay."""
    needed = {
        record["release"] for record in (state["last_good"], state["swap"]["to"], state["swap"]["from"]) if record
    }
    for variant in managed_variants(layout):
        needed.add(units.release_id((layout.units / variant["unit"]).read_text(encoding="utf-8"), variant))
    folders = sorted(layout.releases.glob("*"), key=lambda folder: folder.stat().st_mtime, reverse=True)
    for folder in folders[keep:]:
        if folder.name not in needed:
            shutil.rmtree(folder)
