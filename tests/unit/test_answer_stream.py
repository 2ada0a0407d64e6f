"""Streams of the real engine read token-exactly, whatever the engine put into one chunk."""

import json
from pathlib import Path

import pytest
from ansible_collections.swapgate.core.plugins.module_utils import answer_stream
from ansible_collections.swapgate.core.plugins.module_utils.answer_stream import AnswerStream, StreamError

# vLLM 0.32.0, n-gram with k=5, min 2, max 4, --per-request-spec-decode-metrics detailed.
RECORDED = (Path(__file__).parent / "answer_stream_ngram.sse").read_text(encoding="utf-8")
ANSWER = [88, 2756, 31394, 267, 29989, 400, 47526, 2382, 2654, 30, 2]


def read(text, every_s=0.5):
    """The result of a stream whose lines come at 100.0, 100.5, ..."""
    stream = AnswerStream()
    for number, line in enumerate(line for line in text.splitlines() if line):
        stream.feed(line, 100.0 + number * every_s)
    return stream.result(99.0)


def events(text):
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def told(*made):
    return "\n\n".join([*(f"data: {json.dumps(event)}" for event in made), "data: [DONE]"])


def merged(text):
    """The same answer as a busy server sends it: all tokens after the first in one chunk."""
    first, begin, *middle, usage = events(text)
    one = middle[-1]
    one["choices"][0]["token_ids"] = [i for event in middle for i in event["choices"][0]["token_ids"]]
    one["choices"][0]["delta"] = {"content": "".join(e["choices"][0]["delta"]["content"] for e in middle[:-1]) + "."}
    return told(first, begin, one, usage)


def test_a_recorded_stream():
    found = read(RECORDED)
    assert found["output_token_ids"] == ANSWER and found["output_tokens"] == 11
    assert found["prompt_token_ids"][:3] == [1, 9690, 198] and len(found["prompt_token_ids"]) == 44
    assert found["text"] == "héllo wörld 🙂 red green."
    assert found["finish_reason"] == "stop"
    assert found["drafted"] == [5, 5] and found["accepted"] == [5, 3]
    # The first line has only the role: the first token comes with the second one.
    assert found["ttft_s"] == pytest.approx(1.5)
    assert found["decode_s"] == pytest.approx(2.0) and found["e2e_s"] == pytest.approx(3.5)
    assert found["itl_s"] == {"p50": 0.5, "p95": 0.5, "p99": 0.5}


def test_steps_where_the_last_draft_reached_past_the_end():
    # Steps of 1, 1, 6 and 2 tokens: 10 tokens after the first minus 8 accepted would be 2.
    assert read(RECORDED)["steps"] == 4


def test_the_chunks_do_not_matter():
    usual, busy = read(RECORDED), read(merged(RECORDED))
    for key in ("output_token_ids", "text", "finish_reason", "drafted", "accepted", "output_tokens"):
        assert busy[key] == usual[key]


def test_without_speculation_steps_are_left_to_who_knows():
    made = events(RECORDED)
    del made[-1]["metrics"]
    found = read(told(*made))
    assert found["steps"] is None and found["drafted"] is None


def test_speculation_that_never_drafted():
    made = events(RECORDED)
    made[-1]["metrics"]["speculative_decoding"] = {"num_spec_steps": 0, "num_accepted_draft_tokens": 0}
    found = read(told(*made))
    assert (found["drafted"], found["accepted"], found["steps"]) == ([], [], 10)


def without_ids(made):
    for event in made:
        for choice in event["choices"]:
            choice.pop("token_ids", None)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (without_ids, "found 0 token ids, expected the 11"),
        (lambda made: made.pop(3), "found 10 token ids, expected the 11"),
        (lambda made: made[0].pop("prompt_token_ids"), "no ids of the prompt's tokens"),
        (
            lambda made: made.append({"error": {"message": "EngineCore encountered an issue."}}),
            "EngineCore encountered",
        ),
        (lambda made: made.pop(-2), "cut after 9 tokens"),
    ],
)
def test_what_cannot_be_used_is_said(spoil, said):
    made = events(RECORDED)
    spoil(made)
    with pytest.raises(StreamError, match=said):
        read(told(*made))


def test_a_cut_stream():
    with pytest.raises(StreamError, match="cut after 9 tokens"):
        read(RECORDED[: RECORDED.index("data:", RECORDED.index("2654]"))])


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([1.0], 95, 1.0), ([1.0, 3.0], 50, 2.0), ([4.0, 1.0, 2.0, 3.0], 0, 1.0), ([4.0, 1.0, 2.0, 3.0], 100, 4.0)],
)
def test_percentile(values, share, expected):
    assert answer_stream.percentile(values, share) == expected
