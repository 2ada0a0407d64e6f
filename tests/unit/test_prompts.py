"""The shipped prompt set, and the checker that people run over their own."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts import verdict_runs  # noqa: E402

FILE = ROOT / "benchmarks" / "prompts" / "mixed.jsonl"
CLASSES = ["reasoning", "code_edit", "quote_rag", "summary", "structured", "tool_use"]


def shipped():
    with FILE.open("rb") as stream:
        return verdict_runs.read_prompts(stream, FILE.name)


def read(*lines):
    return verdict_runs.read_prompts([json.dumps(line).encode() for line in lines], "own.jsonl")


def prompt(number=1, **changes):
    return {
        "id": f"p{number}",
        "class": "notes",
        "max_tokens": 64,
        "messages": [{"role": "user", "content": f"Tell me about bridge {number}."}],
        **changes,
    }


def test_the_set_has_twelve_of_every_declared_class():
    assert Counter(item.kind for item in shipped()) == dict.fromkeys(CLASSES, 12)
    assert verdict_runs.check_prompts(shipped()) == []


def test_every_part_of_the_set_is_as_mixed_as_the_whole():
    """So that a plan may take the first 24 prompts."""
    kinds = [item.kind for item in shipped()]
    assert all(kinds[first : first + 6] == CLASSES for first in range(0, 72, 6))


def test_lengths_vary_and_fit_a_small_context():
    asked = [item.max_tokens for item in shipped()]
    sizes = [len(item.text) for item in shipped()]
    assert min(asked) >= 128
    assert len(set(asked)) >= 12
    assert max(sizes) > 8 * min(sizes)
    # Reckoned cautiously, with three signs a token.
    assert all(size / 3 + tokens < 2048 for size, tokens in zip(sizes, asked, strict=True))


def test_classes_are_what_they_claim():
    for item in shipped():
        if item.kind == "code_edit":
            code = item.text.split("```")[1].count("\n") - 1
            assert 30 <= code <= 80, item.id
        elif item.kind == "quote_rag":
            assert 3 <= sum(f"\n[{number}] " in item.text for number in range(1, 6)) <= 5, item.id
        elif item.kind == "tool_use":
            assert [message["role"] for message in item.messages[:4]] == ["system", "user", "assistant", "user"]
            calls = [message["content"] for message in item.messages if message["content"].startswith('{"tool"')]
            assert calls and all(set(json.loads(call)) == {"tool", "arguments"} for call in calls), item.id
            results = [message["content"][8:] for message in item.messages if message["content"].startswith("Result: ")]
            assert results and all(json.loads(result) for result in results), item.id


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([prompt(id="")], 'own.jsonl:1: id: found ""'),
        ([prompt(**{"class": 4})], "own.jsonl:1: class: found 4"),
        ([prompt(messages=[])], "own.jsonl:1: messages: found []"),
        ([prompt(messages=[{"role": "tool", "content": "x"}])], 'expected {"role": system, user or assistant'),
        ([prompt(messages=[{"role": "user", "content": " "}])], "own.jsonl:1: content"),
        (
            [prompt(messages=[{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])],
            "the last message",
        ),
        ([prompt(max_tokens=8)], "max_tokens: found 8, expected a whole number of at least 16"),
        ([prompt(max_tokens=True)], "max_tokens: found true"),
        ([prompt(ignore_eos=True)], "found the key(s) ignore_eos"),
        ([prompt(temperature=1)], "sampling is fixed by the benchmark"),
        (
            [prompt(1), prompt(2), prompt(1, messages=prompt(3)["messages"])],
            "own.jsonl:3: id: found the same as at own.jsonl:1",
        ),
        ([prompt(1), prompt(2, messages=prompt(1)["messages"])], "own.jsonl:2: text: found the same as at own.jsonl:1"),
        ([], "own.jsonl: found no prompt"),
    ],
)
def test_a_bad_line_is_named(lines, said):
    with pytest.raises(verdict_runs.InputError) as error:
        read(*lines)
    assert said in str(error.value)


def test_a_set_that_cannot_carry_a_verdict():
    few = verdict_runs.check_prompts(read(*(prompt(number) for number in range(5))))
    assert few == ["found 5 prompts, expected at least 16, better 60; add prompts"]
    named = verdict_runs.check_prompts(read(*(prompt(number, **{"class": "random"}) for number in range(20))))
    assert [line.split(":")[0] for line in named] == ["classes random"]
    text = " ".join(f"w{number * 7919 % 30011}" for number in range(100))
    drawn = verdict_runs.check_prompts(
        read(*(prompt(n) for n in range(20)), prompt(99, messages=[{"role": "user", "content": text}]))
    )
    assert len(drawn) == 1
    assert drawn[0].startswith("prompt p99: random tokens")
