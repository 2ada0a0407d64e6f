"""Many swaps, each with a random fault at a random step: what must hold after every single one of them.

After each: an outcome of the closed list; the last good release serves, by a process of its own unit, and it alone is
enabled and active; the lock is free; nothing was left behind; and last good changed only by `swapped`.
"""

from __future__ import annotations

import collections
import json
import random
import time
from collections.abc import Callable
from typing import Any

from . import bed as beds
from .actions import SWAP_UNIT, Missed, Stage
from .host import HostError
from .row import Row
from .rows import BACK_PHASES, PHASES
from .runner import Client, Follower, ask, settle

MANY = 200
FEW = 10
TARGETS = ("baseline", "ngram", "baseline2")
MARK = {"baseline": "", "ngram": '"method":"ngram"', "baseline2": "--max-num-seqs 16"}
OUTCOMES = ("swapped", "unchanged", "refused", "rolled_back", "recovered", "failed")
# Knobs of a bad start of the target, and how often nothing is wrong with it.
BAD_STARTS: tuple[dict[str, Any], ...] = (
    {"crash_at": "20%"},
    {"crash_at": "90%"},
    {"crash_at": "compile", "crash_with": "silent"},
    {"crash_at": "50%", "exit_code": 0},
    {"crash_at": "50%", "crash_signal": 9},
    {"wrong_served_name": "x"},
    {"die_on_first_completion": True},
    {"die_after_ready_s": 1.0},
    {"exit0_after_ready_s": 0.7},
    {"crash_at": "70%", "orphan_workers": True},
)
BLOWS = ("kill-swap", "kill-swap", "kill-swap", "stop-swap", "stop-unit", "power-cut", "reboot", "reload")
BLOW_SHARE = 0.5
HEARD_S = 15.0
BAD_START_SHARE = 0.5
WAIT_SHARE = 0.2
WAIT_S = 3
ANSWERS = ("sh swapgate confirm", "sh swapgate decline --because chance", "")
# Requests that began no swap, by their share, before the run is given up.
LOST_SHARE = 0.2


def plan(chance: random.Random, number: int, serving: str) -> Row:
    """One random swap as a row."""
    target = chance.choice([one for one in TARGETS if one != serving or chance.random() < 0.1])
    bad = chance.choice(BAD_STARTS) if chance.random() < BAD_START_SHARE else {}
    # `baseline` has no word of its own in its command line: the rule is for whatever is none of the others.
    rule = {"when": MARK[target] or "serve", **({} if MARK[target] else {"unless": MARK["ngram"]}), **bad}
    if target == "baseline" and serving == "baseline2":
        rule["unless"] = MARK["baseline2"]
    knobs = {"variants": [rule]} if bad else {}
    at: dict[str, tuple[str, ...]] = {}
    # Some wait for a person, who confirms, declines, or does not come.
    waits = chance.random() < WAIT_SHARE
    if waits and (said := chance.choice(ANSWERS)):
        at["confirm+0.3"] = (said,)
    if chance.random() < BLOW_SHARE:
        good = (*PHASES, *(["confirm"] * 3 if waits else []))
        phase = chance.choice(good if not bad else (*PHASES[:8], *BACK_PHASES))
        blow = chance.choice(BLOWS)
        unit = beds.UNIT[target]
        if blow == "stop-unit" and phase == "commit":
            blow = "reload"  # the moment after the swap it is the operator's will, no fault: row hand-stop-commit
        at[phase] = (
            {
                "stop-swap": f"sh systemctl stop --no-block {SWAP_UNIT}",
                "stop-unit": f"sh systemctl stop --no-block {unit}",
                "reload": "sh systemctl daemon-reload",
            }.get(blow, blow),
        )
    name = f"{number}: to {target}{', to be confirmed' if waits else ''}, {bad or 'sound'}, {at or 'undisturbed'}"
    return Row(
        str(number),
        name,
        OUTCOMES,
        target=target,
        confirm_within_s=WAIT_S if waits else 0,
        knobs=knobs,
        at=at,
        serves="last good",
        limit_s=90,
        settle_s=30,
    )


def _ask_until_heard(stage: Stage, row: Row) -> None:
    """Ask as an operator does: again while the swap before is being settled. Returns when the new one is on record."""
    old = stage.host.swap().get("id")
    end = time.monotonic() + HEARD_S
    while stage.host.swap().get("id") == old:
        if stage.asker is None or stage.asker.poll() not in (None, 0):
            if stage.asker is not None:
                stage.said.append(str(stage.asker.communicate()[1]).strip())
                time.sleep(0.5)
            stage.asker = ask(stage, row)
        if time.monotonic() > end:
            raise HostError(
                f"the swap was asked for and never began within {HEARD_S:.0f} s; ask said: {stage.said[-1:]}"
            )
        time.sleep(0.005)


def one(bed: beds.Bed, row: Row) -> tuple[str, list[str]]:
    """Run one planned swap on the host as the one before left it; returns its outcome and the broken promises.

    The outcome is that of this very swap, by its id; `none` when it left no record of its own.
    """
    stage = Stage(bed)
    before = bed.host.state().get("last_good") or {}
    earlier = bed.host.swap().get("id")
    stage.act("knobs " + json.dumps(row.knobs))
    client = Client(bed.host)
    swap: dict[str, Any] = {}
    try:
        follower = Follower(row, stage, client)
        asked = time.monotonic()
        _ask_until_heard(stage, row)
        try:
            swap = follower.follow()
        except Missed:
            follower.pending = []
            swap = follower.follow()
        stage.act("knobs {}")
        _seen, misses = settle(row, stage, asked, row.settle_s)
    finally:
        client.close()
        if stage.asker is not None:
            stage.asker.communicate(timeout=30)
    outcome = str(swap.get("outcome")) if swap.get("id") != earlier else "none"
    now = bed.host.state().get("last_good") or {}
    if outcome not in OUTCOMES:
        misses.append(f"outcome {outcome}, expected one of {', '.join(OUTCOMES)}")
    if outcome == "failed":
        misses.append(
            f"failed, although the last good variant could serve: {json.dumps(swap.get('rollback_cause'))[:300]}"
        )
    if outcome not in ("swapped", "none") and now.get("release") != before.get("release"):
        misses.append(f"last good became {now.get('variant')} by a swap that ended {outcome}")
    if outcome == "swapped" and now.get("release") != bed.releases[row.target]:
        misses.append(f"swapped to {row.target}, and last good is {now.get('variant')}")
    return outcome, misses


def _start_over(bed: beds.Bed) -> None:
    """The known good state, with these targets' releases alone: a swap forgets all but the newest ten."""
    bed.reset(cold=True)
    keep = " ".join(f"! -name {bed.releases[label]}" for label in TARGETS)
    bed.host.sh(f"find /var/lib/swapgate/releases -mindepth 1 -maxdepth 1 {keep} -exec rm -rf {{}} +")


def run(bed: beds.Bed, count: int, seed: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Go on until ``count`` swaps with a record of their own have ended; what changed nothing is not counted.

    {"swaps", "seed", "outcomes": {outcome: n}, "requests", "misses": [{"swap", "outcome", "misses"}], "minutes"}
    """
    chance = random.Random(seed)
    begun = time.monotonic()
    _start_over(bed)
    outcomes: collections.Counter[str] = collections.Counter()
    broken: list[dict[str, Any]] = []
    ran = number = 0
    while ran < count and number < count * (1 + LOST_SHARE) + 5:
        number += 1
        serving = bed.label_of((bed.host.state().get("last_good") or {}).get("release", ""))
        row = plan(chance, number, serving)
        try:
            outcome, misses = one(bed, row)
        except HostError as error:
            outcome, misses = "none", [str(error)]
        outcomes[outcome] += 1
        ran += outcome in OUTCOMES and outcome != "unchanged"
        say(f"{'ok  ' if not misses else 'MISS'} swap {row.fault}: {outcome}")
        if misses:
            broken.append({"swap": row.fault, "outcome": outcome, "misses": misses})
            for miss in misses:
                say(f"       {miss}")
            _start_over(bed)
    return {
        "swaps": ran,
        "requests": number,
        "seed": seed,
        "outcomes": dict(outcomes),
        "misses": broken,
        "minutes": round((time.monotonic() - begun) / 60, 1),
    }
