"""The rows of the fault matrix that are part of every test run, and some swaps with random faults."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ansible_collections.swapgate.core.plugins.module_utils import records

from . import random_swaps, rows, runner
from .bed import Bed, prepare
from .row import Row
from .runner import Result

SUBSET = [row for row in rows.ROWS if row.ci]
SEED = 20


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """The prepared host. It stays up: the next run starts in a second."""
    yield prepare("faults", print)


def test_the_matrix_is_sound() -> None:
    """Every row has a name of its own, expects outcomes of the closed list, and the matrix is as large as promised."""
    assert len({row.id for row in rows.ROWS}) == len(rows.ROWS) >= 50
    strange = {row.id: row.expect for row in rows.ROWS if not set(row.expect) <= set(records.OUTCOMES)}
    assert not strange
    # A row that ends badly and names no cause would pass for the wrong reason.
    nameless = [row.id for row in rows.ROWS if row.target and "swapped" not in row.expect and not row.cause]
    assert set(nameless) <= {"same-after", "disk-full-state"}


@pytest.mark.host
@pytest.mark.parametrize("row", SUBSET, ids=[row.id for row in SUBSET])
def test_a_fault_ends_as_it_must(bed: Bed, row: Row) -> None:
    """The outcome, who serves, what is enabled, the lock, the named cause."""
    result = runner.run(bed, row)
    assert not result.misses, "\n".join(result.misses)


@pytest.mark.host
def test_a_wrong_expectation_is_a_miss(bed: Bed) -> None:
    """The judge can say no: a healthy swap does not pass for a refused one with another cause."""
    row = Row("judge", "nothing", ("refused",), "no such cause", target="baseline")
    result: Result = runner.run(bed, row)
    assert result.outcome == "unchanged"
    assert result.cause_named is False
    assert len(result.misses) == 2


@pytest.mark.host
def test_random_faults_at_random_steps_break_no_promise(bed: Bed) -> None:
    """After each swap the last good variant serves, alone enabled, the lock is free and an outcome is on record."""
    found = random_swaps.run(bed, random_swaps.FEW, SEED, print)
    assert not found["misses"]
    assert found["swaps"] == random_swaps.FEW
