"""Positions at which the replay and an engine's proposer are compared, and the comparison.

    python tests/engine/corpus.py write IN.npz --semantics v2 [--positions 20000]
    python tests/engine/corpus.py compare IN.npz OUT.npz --semantics v2

For a GPU machine: write here, run kernel.py there, compare here. Exit codes: 0 no difference, 1 differences (the first
one is printed), 2 the call was wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.replay import library_text, pattern_ids
from scripts import replay

SEED = 6
REAL_LENGTH = 2500


def texts(positions: int, longest: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Texts of at least so many tokens in all: half random (some with copied pieces), half real (with quotes)."""
    found, total = [], 0
    real = pattern_ids(library_text(400_000))
    while total < positions:
        if total < positions // 2:
            text = rng.integers(0, rng.choice([1, 2, 3, 5, 20, 2000]), rng.integers(1, min(200, longest)))
            if rng.random() < 0.5:  # a piece of it again, and something else after it
                start = rng.integers(0, len(text))
                text = np.concatenate((text, text[start : start + 40], rng.integers(0, 3, 2), text[-10:]))[:longest]
        else:
            start = rng.integers(0, len(real) - longest)
            text = real[start : start + longest]
            text = np.concatenate((text[: longest * 2 // 3], text[: longest - longest * 2 // 3]))
        found.append(text.astype(np.int32))
        total += len(text)
    return found


def cases(positions: int, longest: int = REAL_LENGTH, settings: int = 4) -> dict[str, np.ndarray]:
    """Input of propose.py and kernel.py: at least so many positions, each with `settings` random settings.

    Of a text's settings one has a max_model_len equal to the text's length: v1 cuts its last drafts.
    """
    rng = np.random.default_rng(SEED)
    every = texts(positions, longest, rng)
    rows = []
    for i, text in enumerate(every):
        for j in range(settings):
            low = int(rng.integers(1, 6))
            high = low + int(rng.choice([0, 0, 1, 3, 5]))
            limit = len(text) if j == 0 else longest + 300
            rows.append((i, int(rng.integers(1, 9)), low, high, limit))
    # One proposer of the engine per setting: those of equal settings lie together.
    rows.sort(key=lambda row: row[1:])
    return {
        "tokens": np.concatenate(every),
        "starts": np.cumsum([0, *(len(text) for text in every)]),
        "cases": np.array(rows, np.int64),
    }


def compare(given: dict[str, np.ndarray], found: dict[str, np.ndarray], semantics: str) -> dict[str, Any]:
    """Compare an engine's drafts with the replay's at every position of every case.

    Returns {"texts", "positions" (different ones), "compared" (positions times settings), "with_draft", "differences",
    "first": the first difference, in words, or None}.
    """
    tokens, starts = given["tokens"], given["starts"]
    result: dict[str, Any] = {
        "texts": len(starts) - 1,
        "positions": len(tokens),
        "compared": 0,
        "with_draft": 0,
        "differences": 0,
        "first": None,
    }
    ends = np.cumsum(found["counts"])
    at = 0
    for text, *point, limit in given["cases"].tolist():
        one = tokens[starts[text] : starts[text + 1]][:limit]
        setting = replay.Setting(*point)
        drafts, counts = replay.proposals(one, setting, replay.Rule(semantics, limit))
        for t in range(1, len(one) + 1):
            end = ends[at]
            theirs = found["drafts"][end - found["counts"][at] : end].tolist()
            ours = drafts[t - 1, : counts[t - 1]].tolist()
            result["compared"] += 1
            result["with_draft"] += bool(theirs)
            if ours != theirs:
                result["differences"] += 1
                result["first"] = result["first"] or (
                    f"text {text}, {setting}, max_model_len {limit}, after {t} tokens "
                    f"(the last: {one[max(0, t - 12) : t].tolist()}): the engine drafts {theirs}, the replay {ours}"
                )
            at += 1
    if at != len(ends):
        raise ValueError(f"found {len(ends)} positions in the engine's answer, expected {at}: is it of another input?")
    return result


def main() -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("write", "compare"))
    parser.add_argument("files", nargs="+", metavar="FILE.npz")
    parser.add_argument("--semantics", choices=replay.SEMANTICS, required=True)
    parser.add_argument("--positions", type=int, default=250_000)
    options = parser.parse_args()
    if len(options.files) != {"write": 1, "compare": 2}[options.action]:
        parser.error("write takes one file, compare two")
    if options.action == "write":
        np.savez(options.files[0], **cases(options.positions))
        return 0
    given, found = (dict(np.load(file)) for file in options.files)
    result = compare(given, found, options.semantics)
    print(json.dumps(result))
    return 1 if result["differences"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
