"""The shape of one row of the matrix."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One fault and what must come of it.

    Actions are strings, `VERB WORDS`, see actions.py. Triggers of ``at`` are a phase of the swap, `PHASE+SECONDS` into
    it, or `end` (after the outcome). A row without a target asks for no swap.
    """

    id: str
    fault: str
    # Outcomes that are right, of records.OUTCOMES. A row without a swap says what became of the service in the same
    # words: unchanged (it serves), recovered (it serves again by itself), failed (it does not, and says so).
    expect: tuple[str, ...]
    # A pattern that the record of the swap (or what refused it) must hold: the injected fault, by its name.
    cause: str = ""
    # Rows of the reference's table of faults.
    ref: str = ""
    target: str = "ngram"
    # Asked for with this time to be confirmed within; 0: no confirmation.
    confirm_within_s: int = 0
    knobs: dict[str, Any] = field(default_factory=dict)
    # Whether the serving baseline is started anew under the knobs before the swap.
    restart: bool = False
    before: tuple[str, ...] = ()
    at: dict[str, tuple[str, ...]] = field(default_factory=dict)
    after: tuple[str, ...] = ()
    # When the fault happened: `ask`, `action` (the first of `at`), `start+S`, `probe+S`, `confirm+S`, `exit` (the
    # target's server ends, by its process), or `line:PATTERN`, the first such line in the journal of the target's unit.
    moment: str = "ask"
    # Of a row without a swap: the line in the journal of what serves with which the fault was noticed.
    noticed: str = ""
    # The label that must serve at the end, or "" when none can.
    serves: str = "baseline"
    # The fault itself forbids a clean end (two units enabled, no room for the state): only who serves is looked at.
    loose: bool = False
    # A pattern that the output of the row's actions must hold.
    says: str = ""
    # What is simulated at which boundary, because this kind of host cannot do it for real.
    simulated: str = ""
    # Whether the target reaching its soak would be a false ready.
    never_ready: bool = False
    ci: bool = False
    limit_s: float = 60.0
    settle_s: float = 15.0
