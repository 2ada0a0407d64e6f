"""The lines that an operator reads, and the line that deploy.py takes apart again."""

import copy

import pytest
from ansible_collections.swapgate.core.plugins.module_utils import progress
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

properties = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
NOW = 1_000_000.0
CAUSE = {
    "what": "the load stalled",
    "class": "model",
    "phase": "watch",
    "root_cause": None,
    "signature": None,
    "remedy": None,
    "context": [],
}


def release(name):
    """A RELEASE of records, as far as these lines read it."""
    return {"variant": name, "unit": f"vllm-m-{name}.service", "release": name * 3, "since_unix": 1.0}


def swap(**over):
    """A SWAP of records from `old` to `new`."""
    return {
        "id": "1",
        "by": "ann",
        "started_unix": 0.0,
        "from": release("old"),
        "to": release("new"),
        "phase": None,
        "phase_since_unix": None,
        "phases": [],
        "outcome": None,
        "cause": None,
        "rollback_cause": None,
        "seconds_without_service": None,
        **over,
    }


def unit(name, **over):
    """A unit of the host program's status."""
    return {
        "unit": f"vllm-m-{name}.service",
        "variant": name,
        "release": name * 3,
        "active": "inactive",
        "sub": "dead",
        "status": "",
        "enabled": False,
        "since": "",
        "load": None,
        **over,
    }


def status(swap_=None, units=(), **over):
    """The host program's status."""
    return {"swap": swap_, "units": list(units), "last_good": None, "acceptance": None, "problem": None, **over}


def loading(phase="weights", percent=37.4, elapsed=75.0, left=61.0, detail=""):
    """A load.json in its load."""
    snapshot = {"phase": phase, "percent": percent, "elapsed_s": elapsed, "remaining_s": left, "detail": detail}
    snapshot["remaining_from"] = None if left is None else "history"
    return {"load": snapshot, "ready_after_s": None, "failure": None}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (0.4, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (60, "1 min 00 s"),
        (75, "1 min 15 s"),
        (3600, "60 min 00 s"),
    ],
)
def test_seconds(value, text):
    assert progress.seconds(value) == text


# --- one line while it runs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given_", "line"),
    [
        (status(), "h | no swap"),
        (status(swap()), "h | new | starting"),
        (status(swap(phase="stop", phase_since_unix=NOW - 90)), "h | new | stop | 1 min 30 s in this phase"),
        (status(swap(phase="stop", phase_since_unix=NOW + 90)), "h | new | stop | 0 s in this phase"),
        (status(swap(phase="way back")), "h | new | way back"),
        (
            status(swap(phase="watch"), [unit("old"), unit("new", load=loading())]),
            "h | new | watch | weights 37 % | 1 min 15 s elapsed | about 1 min 01 s left",
        ),
        (
            status(swap(phase="watch"), [unit("new", load=loading(left=None, detail="shard 3 of 9"))]),
            "h | new | watch | weights 37 % | 1 min 15 s elapsed | time left not known yet | shard 3 of 9",
        ),
        (
            status(swap(phase="watch", phase_since_unix=NOW - 2), [unit("new")]),
            "h | new | watch | 2 s in this phase",
        ),
        (
            status(swap(phase="rollback-watch"), [unit("old", load=loading(percent=5)), unit("new", load=loading())]),
            "h | old | rollback-watch | weights 5 % | 1 min 15 s elapsed | about 1 min 01 s left",
        ),
        (status(swap(phase="rollback-stop", **{"from": None})), "h | new | rollback-stop"),
        (status(swap(outcome="swapped")), "h | new | swapped"),
    ],
)
def test_line(given_, line):
    assert progress.line("h", given_, NOW) == line


WORD = st.from_regex(r"\A[a-z0-9][a-z0-9._-]{0,15}\Z")
PHASES = ["preflight", "way back", "stop", "free", "start", "watch", "probe", "soak", "commit", "rollback-watch"]


@properties
@given(
    WORD,
    WORD,
    st.sampled_from(PHASES),
    st.floats(0, 100),
    st.floats(0, 9999),
    st.none() | st.floats(0, 9999),
    st.text(st.characters(blacklist_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=20),
    st.booleans(),
)
def test_parse_gives_the_parts_of_a_line_back(host, variant, phase, percent, elapsed, left, detail, loads):
    run = swap(phase=phase, phase_since_unix=NOW - elapsed, to=release(variant), **{"from": release(variant)})
    units = [unit(variant, load=loading("graphs", percent, elapsed, left, detail) if loads else None)]
    line = progress.line(host, status(run, units), NOW)
    parts = progress.parse(line)
    assert parts is not None
    assert (parts["host"], parts["variant"], parts["phase"]) == (host, variant, phase)
    assert parts["rest"] == line.split(progress.SEPARATOR, 3)[3].strip()
    assert progress.parse(f"  {line}\n") == parts


@pytest.mark.parametrize(
    "text",
    ["", "h", "h | no swap", "TASK [Ensure the swap ends] ***", "changed: [h]", "| | |", "a | b | FAILED", "a|b|c"],
)
def test_other_text_is_no_progress_line(text):
    assert progress.parse(text) is None


# --- the end ---------------------------------------------------------------------------------------------------------


def test_a_swap_that_went_well_is_told_with_its_times():
    run = swap(
        outcome="swapped",
        phases=[{"name": "stop", "seconds": 1.25}, {"name": "watch", "seconds": 60.0}],
        seconds_without_service=61.4,
    )
    assert progress.report("h", status(run, last_good=release("new"))) == [
        "h: old -> new: swapped; new serves since this swap",
        "  stop 1.2 s, watch 60.0 s",
        "  1 min 01 s without service",
    ]


def test_a_roll_back_is_told_with_its_cause_and_what_to_do():
    cause = {**CAUSE, "root_cause": "no shard 3", "remedy": "fetch it", "context": ["line 1", "line 2"]}
    lines = progress.report("h", status(swap(outcome="rolled_back", cause=cause), last_good=release("old")))
    assert lines == [
        "h: old -> new: rolled_back; old is the last good variant",
        "  cause: the load stalled [model, in phase watch]",
        "  first cause: no shard 3",
        "  what to do: fetch it",
        "    line 1",
        "    line 2",
    ]


def test_a_failed_roll_back_names_both_causes_and_the_next_command():
    second = {**CAUSE, "what": "port 8000 is held", "class": "host", "phase": "rollback-free"}
    run = swap(outcome="failed", cause=CAUSE, rollback_cause=second, **{"from": None})
    lines = progress.report("h", status(run))
    assert lines[0] == "h: nothing -> new: failed; no variant was ever good"
    assert "  and the roll back failed: port 8000 is held [host, in phase rollback-free]" in lines
    assert lines[-1] == "  no service: mend the cause, then run the deploy again, or playbooks/rollback.yml"


def test_a_swap_that_waits_says_until_when_and_which_commands_answer_it():
    run = swap(phase="confirm", phase_since_unix=NOW, confirm_within_s=600)
    lines = progress.report("h", status(run))
    assert lines[0] == (
        "h: old -> new: serves and waits to be confirmed, 10 min 00 s in all, until 13:56:40Z; then 'old' comes back"
    )
    assert "swapgate confirm" in lines[1] and "swapgate decline" in lines[2]
    shown = "\n".join(progress.status_table("h", status(run, units=[unit("new", active="active")])))
    assert "until 13:56:40Z" in shown and "swapgate confirm" in shown


def test_a_cause_is_not_said_twice():
    cause = {**CAUSE, "what": "it died: no shard 3", "root_cause": "no shard 3", "phase": None}
    lines = progress.report("h", status(swap(outcome="rolled_back", cause=cause), last_good=release("old")))
    assert lines[1:] == ["  cause: it died: no shard 3 [model]"]


def test_a_host_without_a_swap_says_so():
    assert progress.report("h", status()) == ["h: no swap has run"]


# --- preflight, plan, tables -----------------------------------------------------------------------------------------


def test_a_failed_preflight_is_its_problems():
    problems = [{"check": "port", "what": "held"}, {"check": "disk", "what": "full"}]
    assert progress.preflight_report({"ok": False, "problems": problems}) == ["port: held", "disk: full"]


@pytest.mark.parametrize(("cached", "end"), [(False, ""), (True, " (known from an earlier check)")])
def test_a_passed_preflight_shows_what_the_engine_made_of_the_configuration(cached, end):
    report = {
        "ok": True,
        "problems": [],
        "engine_version": "0.32.0",
        "cached": cached,
        "notices": ["async scheduling is off"],
        "effective": {"max_model_len": 2048, "async_scheduling": False, "speculative": {"prompt_lookup_min": 4}},
    }
    before = copy.deepcopy(report)
    assert progress.preflight_report(report) == [
        f"vLLM 0.32.0 accepts the variant{end}",
        "  async_scheduling: False",
        "  max_model_len: 2048",
        "  speculative prompt_lookup_min: 4",
        "  the engine says: async scheduling is off",
    ]
    assert report == before
    assert "  speculative" not in "".join(progress.preflight_report({**report, "effective": {"speculative": None}}))


@pytest.mark.parametrize(
    ("given_", "plan"),
    [
        (None, "h: nothing of swapgate is installed; 'new' would be the first variant"),
        (
            status(units=[unit("old")]),
            "h: nothing serves; 'new' would be loaded (no earlier load on this host tells how long)",
        ),
        (
            status(units=[unit("old", active="active")], usual_seconds_without_service={"new": 90}),
            "h: stops 'old' and drops its traffic until 'new' has loaded (usually 1 min 30 s here)",
        ),
        (status(units=[unit("new", active="active")]), "h: 'new' already serves as it is; nothing would change"),
        (
            status(units=[unit("new", active="active", release="changed")]),
            "h: stops 'new@chan' and drops its traffic until 'new@newn' has loaded (no earlier load on this "
            "host tells how long)",
        ),
    ],
)
def test_plan(given_, plan):
    assert progress.plan("h", given_, "new", "newnewnew") == plan


FIGURES = {
    "drafts": 10,
    "draft_tokens": 50,
    "accepted_tokens": 20,
    "acceptance_rate": 0.4,
    "acceptance_length": 3.0,
    "by_position": [0.9, 0.5],
}


def test_status_table():
    units = [
        unit("old", enabled=False, load={**loading(), "failure": {"what": "stalled", "root_cause": "no shard 3"}}),
        unit(
            "new",
            active="active",
            sub="running",
            since="Mon 10:00",
            enabled=True,
            load={**loading(), "ready_after_s": 61.0},
        ),
        unit("third", active="activating", sub="start", status="loading third: weights 5 %"),
    ]
    table = progress.status_table("h", status(swap(phase="soak"), units, last_good=release("new"), acceptance=FIGURES))
    assert table == [
        "h: new, active (running), since Mon 10:00, release newnewnew, loaded in 1 min 01 s, starts at boot, last good",
        "h: old, inactive (dead), release oldoldold",
        "    last failure: no shard 3",
        "h: third, activating (start), release thirdthirdthird, loading third: weights 5 %",
        "    drafts: 40 % of 50 draft tokens accepted, acceptance length 3.00, by position 0.90 0.50",
        "    last good: new@newn, since 1970-01-01 00:00:01Z",
        "    swap: old@oldo -> new@newn, asked for by ann at 1970-01-01 00:00:00Z, is in phase soak",
        "    next: wait; `journalctl -fu swapgate-swap` on the host follows it",
    ]


def test_status_table_of_a_host_with_a_broken_state_or_nothing():
    assert progress.status_table("h", status(problem="state.json: empty")) == ["h: state.json: empty"]
    assert progress.status_table("h", status()) == [
        "h: no variant is installed",
        "    next: playbooks/deploy.yml -e variant=NAME",
    ]


def test_status_at_3_a_m_says_what_failed_where_back_is_and_what_to_do():
    run = swap(outcome="failed", cause=CAUSE, rollback_cause=CAUSE, kind="deploy", because="new drafts")
    given_ = status(
        run,
        [unit("old", active="failed", sub="failed")],
        last_good=release("old"),
        way_back={"variant": "old", "release": "oldoldold"},
        jobs=[{"unit": "swapgate-bench.service", "kind": "benchmark", "by": "bob", "since_unix": NOW - 180}],
        now_unix=NOW,
    )
    assert progress.status_table("h", given_)[1:] == [
        "    last good: old@oldo, since 1970-01-01 00:00:01Z",
        "    last swap: 1970-01-01 00:00:00Z, ann, deploy, old@oldo -> new@newn, failed, because: new drafts",
        "    cause: the load stalled [model, in phase watch]",
        "    a rollback goes to: old@oldo",
        "    job: a benchmark by bob has run for 3 min 00 s",
        "    next: nothing serves: `journalctl -u vllm-m-old.service` tells why; playbooks/rollback.yml brings "
        "'old' back",
    ]


@pytest.mark.parametrize("drafts", [0, 3])
def test_acceptance_before_any_token_was_drafted_is_no_figure(drafts):
    figures = {
        **FIGURES,
        "drafts": drafts,
        "draft_tokens": 0,
        "acceptance_rate": None,
        "acceptance_length": None,
        "by_position": [],
    }
    assert "    drafts: no draft yet" in progress.status_table("h", status(acceptance=figures))


def test_history_table():
    swaps = [
        swap(started_unix=0.0, outcome="rolled_back", cause=CAUSE, seconds_without_service=75.0),
        swap(started_unix=86400.0, outcome="swapped", by="bob", **{"from": None}),
    ]
    assert progress.history_table(swaps) == [
        "1970-01-01 00:00:00Z, ann, old@oldo -> new@newn, rolled_back, 1 min 15 s without service, the load stalled",
        "1970-01-02 00:00:00Z, bob, nothing -> new@newn, swapped",
    ]


def test_history_tells_what_kind_of_swap_it_was_what_it_changed_and_why():
    to = {**release("old"), "release": "71b8"}
    run = swap(outcome="swapped", kind="rollback", changes="key", because="leaked", to=to)
    assert progress.history_table([run]) == [
        "1970-01-01 00:00:00Z, ann, rollback, old@oldo -> old@71b8 (key), swapped, because: leaked"
    ]


@pytest.mark.parametrize(
    ("old", "new", "direction"),
    [
        ({}, {}, "base -> base"),
        ({"release": "1"}, {"release": "2"}, "base@1 -> base@2"),
        ({"model": "a", "release": "1"}, {"model": "b", "release": "2"}, "a/base -> b/base"),
        ({"slot": "main"}, {"slot": "b"}, "base@main -> base@b"),
        ({}, {"model": "a", "slot": "main"}, "base -> base"),
    ],
)
def test_two_ends_are_told_apart_by_model_slot_or_release(old, new, direction):
    ends = [{"variant": "base", "release": "1", **one} for one in (old, new)]
    assert progress.direction({"from": ends[0], "to": ends[1]}) == direction


# --- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("over", "wanted", "said"),
    [
        ({}, "newnewnew", "h: a swap to 'new', asked for by ann 40 s ago, is in phase watch; following it"),
        (
            {},
            "third",
            "h: a swap to 'new@newn', asked for by ann 40 s ago, is in phase watch: a swap to 'new' would be refused "
            "until it has ended",
        ),
        (
            {"phase": "confirm"},
            "third",
            "h: a swap to 'new@newn', asked for by ann 40 s ago, is in phase confirm: a swap to 'new' would be refused "
            "until it is confirmed or declined: playbooks/confirm.yml",
        ),
    ],
)
def test_a_plan_during_a_swap_tells_of_that_swap(over, wanted, said):
    given_ = status(swap(**{"phase": "watch", **over}), [unit("new")], now_unix=40.0)
    assert progress.plan("h", given_, "new", wanted) == said


def test_a_plan_shows_what_changes_and_the_jobs_that_would_be_lost():
    job = {"unit": "swapgate-bench.service", "kind": "benchmark", "by": None, "since_unix": NOW - 180}
    difference = {"to": release("new"), "lines": ["what changes:", "    --max-num-seqs 8 -> 4"], "stale": False}
    given_ = status(units=[unit("old", active="active")], difference=difference, jobs=[job], now_unix=NOW)
    assert progress.plan("h", given_, "new", "newnewnew").splitlines()[:3] == [
        "h: what changes:",
        "    --max-num-seqs 8 -> 4",
        "h: a benchmark has run for 3 min 00 s and would be lost",
    ]
    idle = {**given_, "units": [unit("old")]}
    assert "would be lost" not in progress.plan("h", idle, "new", "newnewnew")


def shown(name="base", unit_text="[Service]\nUser=a\n", **over):
    """A release as `swapgate show-release` prints it."""
    variant = {
        "name": name,
        "unit": f"vllm-m-{name}.service",
        "model": {"name": "m", "path": "/m"},
        "engine": {"package": "vllm", "version": "1"},
        "gpus": [],
    }
    given_ = {"release": "1111", "serves": True, "variant": variant, "unit_text": unit_text, "dropins": {}}
    return {**given_, "changed_below": [], **over}


def test_a_comparison_names_both_ends_and_every_line_of_the_change():
    new = shown("ngram", "[Service]\nUser=b\n", release="2222", dropins=None)
    assert progress.comparison(shown(changed_below=["model"]), new)["lines"][:2] == [
        "what changes, from what serves, base@1111 to ngram@2222:",
        "    User a -> b",
    ]
    assert progress.comparison(shown(), None) == {}
    assert progress.comparison(None, new)["lines"] == []


def test_the_release_that_serves_is_loaded_again_only_when_something_below_it_changed():
    same = progress.comparison(shown(), shown())
    assert (same["lines"], same["stale"]) == ([], False)
    old = shown(changed_below=["model"])
    given_ = status(units=[unit("base", active="active", release="1111")], difference=progress.comparison(old, shown()))
    assert progress.plan("h", given_, "base", "1111").splitlines() == [
        "h: base@1111 was loaded before its model's files were changed",
        "h: stops 'base' and drops its traffic until 'base' has loaded (no earlier load on this host tells how long)",
    ]


# --- the journal of a swap -------------------------------------------------------------------------------------------


def test_the_journal_begins_with_who_wanted_what_and_ends_with_the_next_command():
    run = swap(id="c8bb12345678", kind="rollback", changes="speculation", because="too slow")
    assert progress.asked(run) == (
        "swap c8bb: old@oldo -> new@newn (speculation), a rollback, asked for by ann: too slow"
    )
    assert progress.asked(swap(id="c8bb", kind="deploy")) == "swap c8bb: old@oldo -> new@newn, asked for by ann"
    ended = progress.outcome(swap(outcome="rolled_back", cause=CAUSE, seconds_without_service=5.0))
    assert ended == [
        "swap 1: old@oldo -> new@newn: rolled_back, 5 s without service",
        "cause: the load stalled [model, in phase watch]",
        "next: correct the cause, then run the deploy again",
    ]
    assert len(progress.outcome(swap(outcome="swapped"))) == 1


def test_that_no_time_is_known_is_said_once():
    detail = "3 of 9 shards; no earlier load on this host to tell the time left from"
    given_ = status(swap(phase="watch"), [unit("new", load=loading(left=None, detail=detail))])
    assert progress.line("h", given_, NOW).endswith("elapsed | time left not known yet | " + detail)
    assert (
        progress.line("h", given_, NOW, told=True)
        == "h | new | watch | weights 37 % | 1 min 15 s elapsed | 3 of 9 shards"
    )
    known = status(swap(phase="watch"), [unit("new", load=loading())])
    assert progress.line("h", known, NOW, told=True) == progress.line("h", known, NOW)
