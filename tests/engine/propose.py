"""Drafts of the installed engine's own n-gram proposer (V1 runner), for comparing; run by the engine's Python.

    ENGINE_PYTHON tests/engine/propose.py IN.npz OUT.npz [trial]

With `trial`, one proposer of the largest k serves all settings of a max_model_len, changed by the worker extension.
IN: `tokens`, int32, all texts one after the other; `starts`, int64, (texts + 1,), where each begins; `cases`, int64,
(cases, 5): text, k, min, max, max_model_len. OUT: `drafts`, int32, case after case; `counts`, int32, one per case and
position: how many tokens it drafted after the first 1, 2, ... tokens of the case's text, no longer than max_model_len.
Standard output: the version that answered.
"""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import vllm
from vllm.v1.spec_decode.ngram_proposer import NgramProposer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "plugins/engine_extension"))
import swapgate_trial

# Positions per call: each is one request of a batch, as in a running engine.
BATCH = 256


def proposer(k: int, low: int, high: int, max_model_len: int) -> NgramProposer:
    """The engine's class, with a config that holds what its constructor reads."""
    return NgramProposer(
        SimpleNamespace(
            speculative_config=SimpleNamespace(prompt_lookup_min=low, prompt_lookup_max=high, num_speculative_tokens=k),
            model_config=SimpleNamespace(max_model_len=max_model_len),
            scheduler_config=SimpleNamespace(max_num_seqs=BATCH),
            parallel_config=SimpleNamespace(tensor_parallel_size=1),
        )
    )


def drafts_of(one: NgramProposer, text: np.ndarray) -> list[list[int]]:
    """Drafts after each of the text's tokens."""
    found = []
    for first in range(1, len(text) + 1, BATCH):
        known = np.arange(first, min(first + BATCH, len(text) + 1), dtype=np.int32)
        batch = np.broadcast_to(text, (len(known), len(text))).copy()
        # What lies beyond a request's tokens is whatever was there before.
        batch[np.arange(len(text))[None, :] >= known[:, None]] = 7
        found += one.propose(one.k, [[int(text[n - 1])] for n in known], known, batch)
    return found


def changed(point: tuple[int, ...], largest: int, workers: dict[int, "swapgate_trial.TrialWorker"]) -> NgramProposer:
    """The proposer of the point's max_model_len, with the point's setting put in force as a running engine is told."""
    k, low, high, limit = point
    if limit not in workers:
        workers[limit] = swapgate_trial.TrialWorker()
        workers[limit].model_runner = SimpleNamespace(drafter=proposer(largest, 1, 1, limit))
    assert workers[limit].swapgate_set(k=k, min=low, max=high) == {"k": k, "min": low, "max": high}
    return workers[limit].model_runner.drafter


def main() -> None:
    """Command line."""
    given = np.load(sys.argv[1])
    largest = int(given["cases"][:, 1].max())
    workers: dict[int, swapgate_trial.TrialWorker] = {}
    tokens, starts = given["tokens"], given["starts"]
    proposers: dict[tuple[int, ...], NgramProposer] = {}
    drafts: list[int] = []
    counts: list[int] = []
    for text, *point in given["cases"].tolist():
        if sys.argv[3:] == ["trial"]:
            one = changed(tuple(point), largest, workers)
        else:
            one = proposers.get(tuple(point)) or proposers.setdefault(tuple(point), proposer(*point))
        for draft in drafts_of(one, tokens[starts[text] : starts[text + 1]][: point[3]]):
            counts.append(len(draft))
            drafts += draft
    np.savez(sys.argv[2], drafts=np.array(drafts, np.int32), counts=np.array(counts, np.int32))
    print(vllm.__version__)


main()
