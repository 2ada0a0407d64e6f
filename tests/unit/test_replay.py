"""The acceptance replay against a slow reference written from the rules' text, and what it does with its input."""

import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts import replay
from scripts.json_files import InputError


def reference_draft(known, k, low, high, semantics):
    """Drafts after the tokens in `known`: try every order from the longest, every start from the wanted side."""
    for n in range(min(high, len(known) - 1), low - 1, -1):
        starts = range(len(known) - n)
        for start in starts if semantics == "v1" else reversed(starts):
            if known[start : start + n] == known[-n:]:
                found = known[start + n :][:k]
                return found if semantics == "v1" else found + [known[-1]] * (k - len(found))
    return [] if semantics == "v1" else [known[-1]] * k


def reference_replay(prompt, output, setting, semantics, max_model_len=None):
    """(drafted, accepted) per step, by writing the answer down token by token."""
    known, rest = prompt + output[:1], output[1:]
    drafted, accepted = [], []
    while rest:
        draft = reference_draft(known, *setting, semantics)
        if max_model_len is not None:
            draft = draft[: max(0, max_model_len - len(known) - 1)]
        hits = 0
        for said, wanted in zip(draft, rest, strict=False):
            if said != wanted:
                break
            hits += 1
        drafted.append(len(draft))
        accepted.append(hits)
        known, rest = known + rest[: hits + 1], rest[hits + 1 :]
    return drafted, accepted


def transcript(prompt, output, cls="c", name="r"):
    return replay.Transcript(name, cls, len(prompt), np.array(prompt + output, np.int32))


def arrays(replayed, i=0):
    row = replayed.rows()[i]
    return row["drafted"], row["accepted"]


@st.composite
def texts(draw):
    """Tokens with repetition: a small alphabet, or pieces of earlier text copied."""
    alphabet = draw(st.sampled_from([1, 2, 3, 5, 40]))
    tokens = draw(st.lists(st.integers(0, alphabet), max_size=30))
    for _ in range(draw(st.integers(0, 4))):
        if tokens:
            start = draw(st.integers(0, len(tokens) - 1))
            tokens = tokens + tokens[start : start + draw(st.integers(1, 20))]
            tokens = tokens + draw(st.lists(st.integers(0, alphabet), max_size=3))
    return tokens


@st.composite
def grids(draw):
    points = set()
    for _ in range(draw(st.integers(1, 4))):
        low = draw(st.integers(1, 6))
        points.add((draw(st.integers(1, 8)), low, draw(st.integers(low, 8))))
    return sorted(points)


@pytest.mark.parametrize("semantics", replay.SEMANTICS)
@given(prompt=texts(), output=texts(), grid=grids(), room=st.one_of(st.none(), st.integers(0, 12)))
@examples(max_examples=400, deadline=None)
def test_every_setting_of_a_grid_replays_like_the_reference(semantics, prompt, output, grid, room):
    limit = None if room is None else len(prompt) + len(output) + room
    settings = [replay.Setting(*point) for point in grid]
    replayed = replay.replay(transcript(prompt, output), settings, replay.Rule(semantics, limit))
    for i, point in enumerate(grid):
        drafted, accepted = reference_replay(prompt, output, point, semantics, limit)
        assert arrays(replayed, i) == (drafted, accepted)
        assert replayed.steps(i) == len(drafted)
        # Every step emits one token more than it accepts; only the last may have no room for that one.
        assert sum(accepted) + len(accepted) - max(0, len(output) - 1) in ({0, 1} if drafted else {0})


@pytest.mark.parametrize("semantics", replay.SEMANTICS)
@given(tokens=texts(), grid=grids())
@examples(max_examples=200, deadline=None)
def test_the_proposer_alone_drafts_like_the_reference_after_every_token(semantics, tokens, grid):
    for point in grid:
        drafts, counts = replay.proposals(np.array(tokens, np.int32), replay.Setting(*point), replay.Rule(semantics))
        found = [row[:count].tolist() for row, count in zip(drafts, counts, strict=True)]
        assert found == [reference_draft(tokens[:t], *point, semantics) for t in range(1, len(tokens) + 1)]


# Each row: what, prompt, output, (k, min, max), semantics, drafted, accepted.
STEPS = [
    ("the earliest match is followed", [1, 2, 7, 1, 2, 8], [1, 2, 7], (1, 2, 2), "v1", [0, 1], [0, 1]),
    ("the latest match is followed", [1, 2, 7, 1, 2, 8], [1, 2, 7], (1, 2, 2), "v2", [1, 1], [0, 0]),
    ("the longest order wins over an earlier shorter match", [2, 9, 1, 2, 7, 1], [2, 7], (1, 1, 2), "v1", [1], [1]),
    ("too short for min", [], [4, 4, 4], (2, 3, 3), "v1", [0, 0], [0, 0]),
    ("a draft ends with the text that is known", [], [5, 5, 6], (4, 1, 1), "v1", [0, 1], [0, 0]),
    ("empty slots hold the last token, and may be right", [], [5, 5, 5, 5], (3, 2, 2), "v2", [3], [3]),
    ("the last draft runs past the answer", [1, 2, 3, 4, 5], [1, 2, 3], (4, 1, 1), "v1", [4], [2]),
    ("one token comes from the prefill alone", [1], [1], (4, 1, 1), "v1", [], []),
    ("no answer at all", [1], [], (4, 1, 1), "v2", [], []),
]


@pytest.mark.parametrize("row", STEPS, ids=[row[0] for row in STEPS])
def test_steps_of_small_answers(row):
    _, prompt, output, point, semantics, drafted, accepted = row
    replayed = replay.replay(transcript(prompt, output), [replay.Setting(*point)], replay.Rule(semantics))
    assert arrays(replayed) == (drafted, accepted)


def test_drafts_leave_room_for_the_sampled_token_under_a_limit():
    one = transcript([1, 2, 3, 4, 5, 6, 7, 8], [1, 2])
    settings = [replay.Setting(5, 1, 1)]
    found = {limit: arrays(replay.replay(one, settings, replay.Rule("v2", limit)))[0] for limit in (10, 11, 12, 15)}
    assert found == {10: [0], 11: [1], 12: [2], 15: [5]}


def test_a_text_past_the_first_size_of_the_hash_table():
    rng = np.random.default_rng(1)
    pieces = rng.integers(0, 2**31 - 1, (70, 60))
    tokens = np.concatenate([pieces[i] for i in [*range(35), *rng.integers(0, 70, 8)]]).tolist()
    grid = [(3, 2, 2), (4, 4, 4)]
    for semantics in replay.SEMANTICS:
        one = transcript(tokens[:-480], tokens[-480:])
        replayed = replay.replay(one, [replay.Setting(*point) for point in grid], replay.Rule(semantics))
        for i, point in enumerate(grid):
            assert arrays(replayed, i) == reference_replay(tokens[:-480], tokens[-480:], point, semantics)


def test_the_largest_orders_and_drafts():
    text = np.random.default_rng(1).integers(0, 2**31 - 1, 520).tolist()
    prompt, output = [*text, 5, *text[:199]], text[199:]
    replayed = replay.replay(transcript(prompt, output), [replay.Setting(255, 200, 255)], replay.Rule("v1"))
    # The first step has just 200 tokens to match, and emits 256 of the 320 that are left.
    assert arrays(replayed) == reference_replay(prompt, output, (255, 200, 255), "v1") == ([255, 255], [255, 64])


def test_the_fast_json_equals_the_rows():
    rng = np.random.default_rng(3)
    settings = replay.parse_grid("k=12 min=1 max=3; k=110 min=2 max=2")
    for n in range(40):
        one = transcript(rng.integers(0, 3, n).tolist(), rng.integers(0, 3, 2 * n).tolist() + [1] * n, 'a"ä', n)
        replayed = replay.replay(one, settings, replay.Rule("v2"))
        assert json.loads(b"[" + replayed.rows_json() + b"]") == replayed.rows()
    assert max(replayed.rows()[1]["accepted"]) > 9


def test_the_summary_adds_up_the_steps_of_each_class():
    settings = replay.parse_grid("k=2 min=1 max=1; k=3 min=2 max=2")
    summary = replay.Summary(settings)
    many = [transcript([1, 2, 3], [1, 2, 3, 9], "x"), transcript([], [5, 5, 5], "y"), transcript([], [7], "y")]
    for one in many:
        summary.add(replay.replay(one, settings, replay.Rule("v1")))
    rows = {(row["class"], row["k"]): row for row in summary.rows()}
    assert list(rows) == [(None, 2), (None, 3), ("x", 2), ("x", 3), ("y", 2), ("y", 3)]
    # x drafts 2, 3 (both right) and meets 9; y meets its second 5 without a draft, then drafts a 5.
    assert rows[("x", 2)] == {
        "class": "x",
        "k": 2,
        "min": 1,
        "max": 1,
        "requests": 1,
        "tokens": 3,
        "steps": 1,
        "tokens_per_step": 3.0,
        "draft_step_share": 1.0,
        "drafted": 2,
        "accepted": 2,
        "drafted_by_position": [1, 1],
        "accepted_by_position": [1, 1],
        "acceptance_by_position": [1.0, 1.0],
    }
    assert rows[("y", 2)]["requests"] == 2
    assert (rows[("y", 2)]["steps"], rows[("y", 2)]["tokens"]) == (2, 2)
    assert rows[("y", 2)]["draft_step_share"] == 0.5
    assert rows[("y", 2)]["acceptance_by_position"] == [1.0, None]
    assert rows[(None, 2)]["tokens_per_step"] == 5 / 3
    assert rows[(None, 2)]["accepted_by_position"] == [2, 1]


GOOD = {"id": "a", "class": "c", "prompt_token_ids": [1, 2], "output_token_ids": [3]}


def bad(**changes):
    return json.dumps({**GOOD, **changes}).encode()


def read(*lines, limit=None):
    return replay.read_transcripts(io.BytesIO(b"\n".join(lines)), "t.jsonl", limit)


def test_lines_are_read_with_blank_lines_other_keys_and_whole_number_ids():
    line = json.dumps({**GOOD, "id": 7, "prompt_token_ids": [0, 2**31 - 1], "finish_reason": "stop"}).encode()
    one, two = read(b"", line, b"  ", line.replace(b"7", b'"\xc3\xa4"', 1))
    assert (one.id, one.cls, one.prompt, one.outputs, one.tokens.tolist()) == (7, "c", 2, 1, [0, 2**31 - 1, 3])
    assert two.id == "ä"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "t.jsonl:2: not JSON"),
        (b"\xff{}", "t.jsonl:2: not JSON"),
        (b"[" * 100_000, "t.jsonl:2: not JSON"),
        (b"[1]", "t.jsonl:2: found a list, expected an object"),
        (b"{}", "t.jsonl:2: id, class, prompt_token_ids, output_token_ids not found among no keys"),
        (bad(id=True), "t.jsonl:2: id found true or false, expected a string"),
        (bad(**{"class": None}), "t.jsonl:2: class found null, expected a string"),
        (bad(output_token_ids="abc"), "t.jsonl:2: output_token_ids found a string, expected a list"),
        (bad(output_token_ids=[1, 2.0]), "t.jsonl:2: output_token_ids[1] found 2.0, expected a"),
        (bad(prompt_token_ids=[True]), "t.jsonl:2: prompt_token_ids[0] found true, expected a"),
        (bad(prompt_token_ids=[1, -1]), "t.jsonl:2: prompt_token_ids[1] found -1, expected a"),
        (bad(prompt_token_ids=[2**31]), "t.jsonl:2: prompt_token_ids[0] found 2147483648, exp"),
        (bad(prompt_token_ids=[10**30]), "t.jsonl:2: prompt_token_ids[0] found 1000"),
        (bad(prompt_token_ids=[1, 2, 3, 4]), "t.jsonl:2: found 4 + 1 tokens, expected at most"),
    ],
)
def test_a_bad_line_is_named_with_what_was_expected(line, said):
    with pytest.raises(InputError) as caught:
        read(json.dumps(GOOD).encode(), line, limit=4)
    assert said in str(caught.value)


def test_an_empty_file_is_an_error():
    with pytest.raises(InputError, match=r"t\.jsonl: found no transcript, expected one JSON object a line"):
        read(b"", b" ")


def test_a_grid_keeps_its_order():
    assert replay.parse_grid(" max=4 k=5 min=4 ;k=2 min=1 max=4;") == (replay.Setting(5, 4, 4), replay.Setting(2, 1, 4))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "grid: found no setting"),
        (" ; ", "grid: found no setting"),
        ("k=5 min=4", "setting 1 ('k=5 min=4'): max not given"),
        ("k=1 min=1 max=1; k=5 n=4", "setting 2 ('k=5 n=4'): found 'n=4'"),
        ("k=5,min=4,max=4", "k found '5,min=4,max=4', expected a whole number from 1 to 255"),
        ("k=0 min=4 max=4", "k found '0', expected a whole number"),
        ("k=-1 min=4 max=4", "k found '-1'"),
        ("k=256 min=4 max=4", "k found '256'"),
        ("k=1000000000256 min=4 max=4", "k found '1000000000256'"),
        ("k=² min=4 max=4", "k found '²'"),
        ("k= min=4 max=4", "k found ''"),
        ("k=5 k=5 min=4 max=4", "k is given twice"),
        ("k=5 min=5 max=4", "min found 5, expected at most max, which is 4"),
        ("k=5 min=4 max=4; max=4 k=5 min=4", "setting 2 ('max=4 k=5 min=4'): the same setting is given twice"),
    ],
)
def test_a_bad_grid_is_named_with_what_was_expected(text, said):
    with pytest.raises(InputError) as caught:
        replay.parse_grid(text)
    assert said in str(caught.value)


def test_unknown_semantics_are_refused():
    with pytest.raises(InputError, match="semantics: found 'v3', expected v1 or v2"):
        replay.Rule("v3")
