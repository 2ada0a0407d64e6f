"""The engine's Prometheus page."""

import pytest
from ansible_collections.swapgate.core.plugins.module_utils import metrics

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="smollm2"} 2.0
vllm:num_requests_running{engine="1",model_name="smollm2"} 1.0
vllm:num_requests_waiting{engine="0",model_name="smollm2"} 0.0
vllm:prompt_tokens_total{engine="0",model_name="smollm2"} 1.25e+03
vllm:generation_tokens_total{engine="0",model_name="smollm2"} 750.0 1700000000000
vllm:spec_decode_num_drafts_total{engine="0",model_name="smollm2"} 100.0
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="smollm2"} 500.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="smollm2"} 150.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="smollm2",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="smollm2",position="1"} 50.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="smollm2",position="10"} 20.0
process_start_time_seconds 1.7e+09
"""


@pytest.mark.parametrize(
    ("line", "sample"),
    [
        ("a 1", ("a", {}, 1.0)),
        ("a{} 1", ("a", {}, 1.0)),
        ('a:b_c{x="1",y="two words"} 2.5', ("a:b_c", {"x": "1", "y": "two words"}, 2.5)),
        (r'a{x="q\"}, y=\"1",z="\\"} 1', ("a", {"x": r"q\"}, y=\"1", "z": r"\\"}, 1.0)),
        ("a 1e3 1700000000000", ("a", {}, 1000.0)),
        ("a +Inf", ("a", {}, float("inf"))),
    ],
)
def test_a_sample(line, sample):
    assert metrics.parse(line) == [sample]


@pytest.mark.parametrize("line", ["", "# TYPE a gauge", "a", "a one", "{x} 1", "<html>", "1a 2", "a{x=1"])
def test_what_is_no_sample_is_passed_over(line):
    assert metrics.parse(f"{line}\nok 1\n") == [("ok", {}, 1.0)]


def test_total_sums_over_labels_and_tells_zero_from_absent():
    samples = metrics.parse(PAGE)
    assert metrics.total(samples, "vllm:num_requests_running") == 3.0
    assert metrics.total(samples, "vllm:num_requests_waiting") == 0.0
    assert metrics.total(samples, "vllm:num_requests") is None


def test_load():
    assert metrics.load(metrics.parse(PAGE)) == {"running": 3.0, "waiting": 0.0, "tokens": 2000.0}
    assert metrics.load([]) == {"running": None, "waiting": None, "tokens": None}
    assert metrics.load(metrics.parse("vllm:prompt_tokens_total 5"))["tokens"] == 5.0


def test_acceptance():
    assert metrics.acceptance(metrics.parse(PAGE)) == {
        "drafts": 100,
        "draft_tokens": 500,
        "accepted_tokens": 150,
        "acceptance_rate": 0.3,
        "acceptance_length": 2.5,
        "by_position": [0.8, 0.5, 0.2],
    }


def test_acceptance_of_two_engines_is_that_of_all_their_drafts():
    other = PAGE.replace('engine="0"', 'engine="1"').replace(" 150.0", " 350.0").replace(" 80.0", " 100.0")
    found = metrics.acceptance(metrics.parse(PAGE + other))
    assert found is not None
    assert (found["drafts"], found["acceptance_rate"], found["acceptance_length"]) == (200, 0.5, 3.5)
    assert found["by_position"] == [0.9, 0.5, 0.2]


def test_acceptance_is_nothing_without_speculation_and_no_rate_before_the_first_draft():
    plain = "\n".join(line for line in PAGE.splitlines() if "spec_decode" not in line)
    assert metrics.acceptance(metrics.parse(plain)) is None
    assert metrics.acceptance(metrics.parse("vllm:spec_decode_num_drafts_total 0")) == {
        "drafts": 0,
        "draft_tokens": 0,
        "accepted_tokens": 0,
        "acceptance_rate": None,
        "acceptance_length": None,
        "by_position": [],
    }
