"""Drift history: which loads are compared, and when a host's own spread replaces the public one."""

import json
import math
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts import verdict_history, verdict_runs  # noqa: E402

PUBLIC = 0.045


def load(run, log=0.0, **other):
    return {"run": run, "boot": 0, "ms_per_token": 13.6 * math.exp(log), "host": "gpu1", "concurrency": 1, **other}


def read(*lines, **options):
    return verdict_history.read_history([json.dumps(line).encode() for line in lines], "history.jsonl", **options)


def alternating(count, sd, **other):
    """Loads whose standard deviation is `sd`."""
    size = sd * math.sqrt((count - 1) / count)
    return [load(f"r{number}", size if number % 2 else -size, **other) for number in range(count)]


def test_nine_degrees_replace_the_public_figure():
    spread = verdict_history.spread_of(read(*alternating(10, 0.01)))
    assert (spread.sd, spread.df) == (pytest.approx(0.01), 9)


def test_fewer_loads_are_pooled_with_it():
    spread = verdict_history.spread_of(read(*alternating(4, 0.01)))
    assert spread.df == 8 + 3
    assert spread.sd == pytest.approx(math.sqrt((8 * PUBLIC**2 + 3 * 0.01**2) / 11))
    nothing = verdict_history.spread_of([])
    assert (nothing.sd, nothing.df) == (PUBLIC, 8)


@pytest.mark.parametrize("key", [key for key in verdict_history.SAME if key != "host"])
def test_loads_that_differ_on_purpose_are_not_compared(key):
    other = {**load("r99", 1.0), key: 8}
    spread = verdict_history.spread_of(read(*alternating(10, 0.01), other))
    assert spread.sd == pytest.approx(0.01)


def test_a_run_does_not_count_its_own_loads():
    lines = [*alternating(10, 0.01), load("now", 3.0)]
    assert verdict_history.spread_of(read(*lines, without="now")).sd == pytest.approx(0.01)
    assert verdict_history.spread_of(read(*lines)).sd > 0.5


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([load("r"), load("r")], ("history.jsonl:2", "twice")),
        ([load("r"), load("s", host="gpu2")], ("gpu1, gpu2", "one host")),
        ([load("r", ms_per_token=0)], ("history.jsonl:1", "ms_per_token")),
        ([load("")], ("history.jsonl:1", "run")),
        ([load("r", started_unix="yesterday")], ("started_unix",)),
    ],
)
def test_bad_history(lines, words):
    with pytest.raises(verdict_runs.InputError) as error:
        read(*lines)
    assert all(word in str(error.value) for word in words)
    assert "correct" in str(error.value) or "expected" in str(error.value)


def test_what_a_run_adds():
    about = {
        "id": "r1",
        "host": "gpu1",
        "model": "kimi",
        "prompts": {"sha256": "ab"},
        "settings": {"cache": "cold"},
        "loads": [{"boot": 0, "release": "r0", "engine_version": "0.32.0", "started_unix": 5.0}],
    }
    result = {
        "base": {"arm": "A", "variant": "baseline"},
        "concurrency": 1,
        "boots": [{"arm": "A", "boot": 0, "ms_per_token": 13.6}, {"arm": "B", "boot": 1, "ms_per_token": 10.0}],
    }
    (line,) = verdict_history.base_loads(about, [result, result])
    assert {"run", "boot", "ms_per_token", "started_unix", *verdict_history.SAME} == set(line)
    assert (line["release"], line["prompts_sha256"], line["started_unix"]) == ("r0", "ab", 5.0)
    (read_back,) = read(line)
    assert read_back.run == "r1"
