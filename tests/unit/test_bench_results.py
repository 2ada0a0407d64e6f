"""Results of the real load generator, and counters of the real metrics page, as raw lines and figures."""

import json
import math
from pathlib import Path

import pytest
from ansible_collections.swapgate.core.plugins.module_utils import bench_results, metrics

# vLLM 0.32.0: four prompts of the shipped set at two streams, n-gram with k=5.
RESULT = json.loads((Path(__file__).parent / "bench_serve_0_32.json").read_text())
PROMPTS = [
    {"id": name, "class": kind, "max_tokens": 24}
    for name, kind in (("r", "reasoning"), ("c", "code_edit"), ("q", "quote_rag"), ("s", "summary"))
]
HEAD = {"arm": "B", "variant": "ngram", "boot": 2, "repeat": 0, "concurrency": 2}
PAGE = """
vllm:spec_decode_num_drafts_total{engine="0"} 17.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 85.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 18.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 10.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 8.0
vllm:num_preemptions_total{engine="0"} 1.0
vllm:generation_tokens_total{engine="0"} 96.0
vllm:iteration_tokens_total_count{engine="0"} STEPS
vllm:request_success_total{engine="0",finished_reason="stop"} 1.0
vllm:request_success_total{engine="0",finished_reason="length"} 3.0
vllm:request_success_total{engine="0",finished_reason="abort"} 0.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0
"""


def recorded(**changes):
    line = {"output_tokens": 24, "finish_reason": "stop", "error": None, "reasoning": None}
    line.update(steps=20, drafted=[5], accepted=[3], prompt_token_ids=[1] * 104, text=RESULT["generated_texts"][0])
    return {"r": {**line, **changes}}


def looked(steps="80.0"):
    return bench_results.counts(metrics.parse(PAGE.replace("STEPS", steps)))


NOTHING = bench_results.counts(metrics.parse("vllm:generation_tokens_total 0.0\nvllm:iteration_tokens_total_count 0.0"))


def test_a_real_result_becomes_raw_lines():
    first, *_, last = bench_results.request_lines(RESULT, PROMPTS, recorded(), HEAD)
    assert {key: first[key] for key in HEAD} == HEAD and first["prompt_id"] == "r" and first["class"] == "reasoning"
    assert first["ttft_s"] == pytest.approx(0.7334, abs=1e-4) and first["e2e_s"] == pytest.approx(2.8974, abs=1e-4)
    assert first["decode_s"] == pytest.approx(first["e2e_s"] - first["ttft_s"])
    assert first["itl_s"]["p50"] == pytest.approx(sorted(RESULT["itls"][0])[9])
    assert (first["finish_reason"], first["steps"], first["drafted"]) == ("stop", 20, [5]), "as the recorder had it"
    assert last["finish_reason"] == "length" and "steps" not in last, "nobody recorded this answer"
    assert bench_results.tpot(first) == pytest.approx(first["decode_s"] / 23)


def test_another_answer_than_the_recorders_says_nothing_of_its_steps():
    first = bench_results.request_lines(RESULT, PROMPTS, recorded(text="other"), HEAD)[0]
    assert "steps" not in first and first["finish_reason"] == "length"


def test_an_older_generator_has_no_latencies():
    older = {key: value for key, value in RESULT.items() if key != "latencies"}
    now, then = (bench_results.request_lines(result, PROMPTS, {}, HEAD) for result in (RESULT, older))
    assert [line["e2e_s"] for line in then] == pytest.approx([line["e2e_s"] for line in now])


def test_a_failed_request_is_a_line_with_the_last_words():
    broken = {**RESULT, "errors": ["Traceback (most recent call last):\n  File x\nClientOSError: reset\n", "", "", ""]}
    first, second, *_ = bench_results.request_lines(broken, PROMPTS, {}, HEAD)
    assert first["error"] == "ClientOSError: reset" and "ttft_s" not in first
    assert second["error"] is None


@pytest.mark.parametrize("key", bench_results.LISTS)
def test_a_result_of_another_shape_is_refused(key):
    for value in ([], None):
        with pytest.raises(bench_results.ResultError, match=f"{key}: found .*, expected 4"):
            bench_results.request_lines({**RESULT, key: value}, PROMPTS, {}, HEAD)


def test_other_tokens_are_named():
    assert bench_results.other_tokens(RESULT, PROMPTS, recorded()) == []
    assert bench_results.other_tokens(RESULT, PROMPTS, recorded(prompt_token_ids=[1] * 105)) == [
        "r: found 104 tokens sent, expected 105 as recorded"
    ]


def test_tokens_per_step_counts_the_steps_without_a_draft():
    found = bench_results.between(NOTHING, looked(), 2)
    # 92 tokens after the first ones; 18 of them were accepted drafts. The engine's own figure would be 1 + 18/17.
    assert found["steps"] == 74 and found["tokens_per_step"] == pytest.approx(92 / 74)
    assert found["by_position"] == [10, 8] and found["finished"] == {"length": 3, "stop": 1}
    assert found["prefix_hits"] is None, "this engine does not say"
    assert looked()["kv_cache_tokens"] == 1600 and found["preemptions"] == 1


@pytest.mark.parametrize(("engine", "steps"), [("80.0", 76), ("78.0", 74), ("500.0", 74), ("60.0", 74)])
def test_one_streams_steps_are_the_engines_own_where_they_can_be(engine, steps):
    assert bench_results.between(NOTHING, looked(engine), 1)["steps"] == steps


def test_passes_add_up():
    one = bench_results.between(NOTHING, looked(), 2)
    both = bench_results.together([one, one])
    assert both["accepted"] == 36 and both["by_position"] == [20, 16] and both["requests"] == 8
    assert both["tokens_per_step"] == pytest.approx(one["tokens_per_step"])
    assert bench_results.together([])["tokens_per_step"] is None


@pytest.mark.parametrize(
    ("asked", "most", "kept", "left"),
    [([4, 1, 4], 8, [1, 4], []), ([1, 16, 8], 8, [1, 8], [16]), ([32], None, [32], []), ([32], 8, [], [32])],
)
def test_levels_above_what_the_engine_runs_are_left_out(asked, most, kept, left):
    assert bench_results.levels(asked, most) == (kept, left)


def test_the_summary_and_the_level():
    lines = bench_results.request_lines(RESULT, PROMPTS, {}, HEAD)
    lines += bench_results.failed_lines(PROMPTS, {**HEAD, "repeat": 1}, "gone")
    (row,) = bench_results.summary([*lines, {"arm": "B", "boot": 2, "facts": {}}])
    assert (row["requests"], row["failed"], row["output_tokens"]) == (8, 4, 96)
    assert row["tpot_s"]["p50"] == pytest.approx(RESULT["median_tpot_ms"] / 1000, rel=1e-3)
    assert row["ttft_s"]["p50"] == pytest.approx(RESULT["median_ttft_ms"] / 1000)
    logs = [math.log(bench_results.tpot(line)) for line in lines[:4]]
    assert bench_results.level_of(lines) == pytest.approx(sum(logs) / 4)
    assert bench_results.level_of([]) is None


def test_what_a_reader_is_told_before_and_meanwhile():
    plan = {"variant": "ngram", "levels": [1, 4], "left_out": [16], "prompts": 16, "passes": 8, "at_most_s": 1300}
    assert bench_results.plan_text("gpu1", plan) == (
        "gpu1: benchmark of 'ngram' at 1, 4 streams; left out above --max-num-seqs: 16: 16 prompts are recorded, then "
        "asked in 8 passes; 22 min if every answer is as long as it may be, mostly less"
    )
    progress = {"variant": "ngram", "done": 3, "of": 9, "what": "concurrency 1", "left_s": 90}
    assert bench_results.progress_line("gpu1", {"progress": progress, "load": None}) == (
        "gpu1 | ngram | benchmark | 3 of 9 passes | concurrency 1 | 1.5 min left"
    )
    assert bench_results.progress_line("gpu1", {"progress": None}).endswith("| beginning")


def test_more_streams_take_less_time():
    one, many = (bench_results.expected_seconds(1000, 10, 0.01, [level], 3, 20.0) for level in (1, 4))
    assert one == pytest.approx(10.2 + 4 * (10.2 * 1.2 + 20)) and many < one
