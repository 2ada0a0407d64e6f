"""The worker extension of a trial variant, over stand-ins for the engine's workers of several releases."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from ansible_collections.swapgate.core.plugins.host_program import recorder
from ansible_collections.swapgate.core.plugins.module_utils import records
from fake_engine import READY, site

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "plugins/engine_extension"))

import swapgate_trial  # noqa: E402 - the engine finds it in the same way, by its search path


class Proposer:
    """Drafts as the engine's class does since about 0.30: the scheduler hands k to each call."""

    def __init__(self):
        self.k, self.min_n, self.max_n = 5, 4, 4

    def batch_propose(self, num_requests, valid, lengths, tokens, k):
        return [[self.min_n, self.max_n, k][:k] for _ in range(num_requests)]

    def propose(self, k, requests):
        return self.batch_propose(requests, [0], [9], [[1]], k)


class OlderProposer(Proposer):
    """Before: its own k counts."""

    def batch_propose(self, num_requests, valid, lengths, tokens):
        return [[self.min_n, self.max_n, self.k] for _ in range(num_requests)]

    def propose(self, k, requests):
        return self.batch_propose(requests, [0], [9], [[1]])


class Worker(swapgate_trial.TrialWorker):
    """The engine's worker with the extension mixed in."""

    use_v2_model_runner = False

    def __init__(self, drafter):
        self.model_runner = SimpleNamespace(drafter=drafter)


@pytest.fixture(autouse=True)
def engines_module(monkeypatch):
    for kind in (Proposer, OlderProposer):
        monkeypatch.setattr(kind, "__module__", swapgate_trial.PROPOSER)


@pytest.mark.parametrize("kind", [Proposer, OlderProposer])
def test_each_setting_is_what_the_next_step_drafts_by(kind):
    drafter = kind()
    worker = Worker(drafter)
    assert worker.swapgate_get() == {"k": 5, "min": 4, "max": 4}
    assert drafter.propose(5, 2) == [[4, 4, 5]] * 2
    assert worker.swapgate_set(k=3, min=1, max=2) == {"k": 3, "min": 1, "max": 2}
    assert drafter.propose(5, 1) == [[1, 2, 3]]
    assert worker.swapgate_set(k=0) == {"k": 0, "min": 1, "max": 2}
    assert drafter.propose(5, 3) == [[], [], []], "k=0 is off, for every request of the batch"
    assert worker.swapgate_set(k="5", min="3", max="4") == worker.swapgate_get() == {"k": 5, "min": 3, "max": 4}
    assert drafter.propose(5, 1) == [[3, 4, 5]], "the loaded k comes back"


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"k": 6}, "k is 6, expected 0 (off) to 5, the k that was loaded"),
        ({"k": -1}, "k is -1"),
        ({"k": 2, "min": 5, "max": 4}, "expected 1 <= min <= max"),
        ({"k": 2, "min": 0}, "min is 0"),
        ({"k": "many"}, "k is 'many', expected a whole number"),
        ({"k": True}, "expected a whole number"),
        ({"k": 1.5}, "expected a whole number"),
    ],
)
def test_what_is_out_of_range_is_refused_and_changes_nothing(asked, said):
    drafter = Proposer()
    worker = Worker(drafter)
    worker.swapgate_set(2, 3, 4)
    with pytest.raises(swapgate_trial.TrialError) as caught:
        worker.swapgate_set(**asked)
    assert said in str(caught.value)
    assert worker.swapgate_get() == {"k": 2, "min": 3, "max": 4}
    assert drafter.propose(5, 1) == [[3, 4]]


def test_the_v2_runner_is_refused_with_what_to_do():
    worker = Worker(Proposer())
    worker.use_v2_model_runner = True
    with pytest.raises(swapgate_trial.TrialError, match=r"model runner V2.*VLLM_USE_V2_MODEL_RUNNER=0"):
        worker.swapgate_set(k=1)


@pytest.mark.parametrize(("drafter", "said"), [(None, "no proposer"), (SimpleNamespace(k=5), "SimpleNamespace")])
def test_another_proposer_is_refused_by_name(drafter, said):
    with pytest.raises(swapgate_trial.TrialError, match=f"drafts with {said}"):
        Worker(drafter).swapgate_get()


def test_the_recorder_sets_each_setting_in_an_engine_that_was_started_with_the_extension(start, shared, tmp_path):
    fake = start(
        "--speculative-config",
        '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_min":4,"prompt_lookup_max":4}',
        *("--worker-extension-cls", "swapgate_trial.TrialWorker", "--per-request-spec-decode-metrics", "detailed"),
        env={
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONPATH": f"{site(shared)}{os.pathsep}{REPO / 'plugins/engine_extension'}",
        },
        knobs={"tokens_per_s": 2000},
    )
    fake.wait_for(READY)
    layout = records.Layout(str(tmp_path))
    variant = {
        **{"name": "t", "unit": "vllm-tiny-t.service", "bind": "127.0.0.1", "port": fake.port},
        "model": {"name": "tiny", "served_name": "smol"},
    }
    records.write_json(layout.variants / "t.json", variant)
    text = "red green blue yellow red green blue yellow red green"
    request = {
        "variant": "t",
        "prompts": [
            {"id": "a", "class": "x", "messages": [{"role": "user", "content": text}], "max_tokens": 60},
            {"id": "b", "class": "x", "messages": [{"role": "user", "content": text[4:]}], "max_tokens": 60},
        ],
        "repeats": 2,
        "settings": [
            {"name": "off", "k": 0, "min": 4, "max": 4},
            {"name": "two", "k": 2, "min": 2, "max": 4},
            {"name": "five", "k": 5, "min": 2, "max": 4},
        ],
        "seed": 1,
        "salt": None,
    }
    assert recorder.record(layout, request, tmp_path / "out.jsonl", lambda _: None) == 0
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    most = dict.fromkeys(("off", "two", "five"), 0)
    for line in lines:
        most[line["setting"]] = max([most[line["setting"]], *(line["drafted"] or [])])
    assert most == {"off": 0, "two": 2, "five": 5}
    assert len({(line["id"], line["text"]) for line in lines}) == 2, "no setting changes an answer"
    status, said = fake.get("/collective_rpc", {"method": "swapgate_set", "kwargs": {"k": 9}})
    assert status == 500 and "k is 9, expected 0 (off) to 5, the k that was loaded" in said


def test_without_its_search_path_an_engine_does_not_start(start):
    fake = start("--worker-extension-cls", "swapgate_trial.TrialWorker")
    assert fake.status() == 1 and "No module named 'swapgate_trial'" in fake.text()
