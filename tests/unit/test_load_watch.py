"""The load watcher, on recorded loads and on hung, slow and chopped ones. The clock is a number."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.swapgate.core.plugins.module_utils import load_watch, phases
from hypothesis import given, settings
from hypothesis import strategies as st

# A GPU load of vLLM 0.26 with n-gram speculation, as it came out of the pipe (carriage returns and all).
RECORDED = Path(__file__).parent / "load_ngram_0_26.log"
TEXT = RECORDED.read_bytes().decode()
BAR = "Loading safetensors checkpoint shards: {percent:3d}% Completed | {n}/96 [00:24<28:05, 24.08s/it]\r"
NCCL = "(Worker_TP0 pid=97) INFO 04-09 20:31:06 [pynccl.py:111] vLLM is using nccl==2.27.5\n"
CORE = "(EngineCore pid=90) INFO 04-09 20:31:0{} [core.py:116] {}\n"


def shard(n: int) -> str:
    """The bar at shard n of 96."""
    return BAR.format(percent=n * 100 // 96, n=n)


def follow(watch: load_watch.LoadWatch, text: str, size: int, start: float = 0.0, step: float = 0.1) -> float:
    """Feed a text in chunks of `size` characters, `step` seconds apart; the time at the end."""
    now = start
    for at in range(0, len(text), size):
        now += step
        watch.feed(text[at : at + size], now)
    return now


def test_a_recorded_load_passes_its_phases_in_order_and_is_ready():
    """Phases are those of the documentation, the percent never falls, and ready is 100."""
    watch = load_watch.LoadWatch(None, 0.0)
    percents, seen = [], []
    now = 0.0
    for line in TEXT.split("\n"):
        now += 0.5
        watch.feed(line + "\n", now)
        state = watch.snapshot(now)
        percents.append(state["percent"])
        if not seen or seen[-1] != state["phase"]:
            seen.append(state["phase"])
    assert seen[0] == "process"
    assert seen[-1] == "ready"
    assert {
        "arguments",
        "config",
        "distributed",
        "weights",
        "post_load",
        "compile",
        "kv_cache",
        "graphs",
        "api",
    } <= set(seen)
    assert percents == sorted(percents)
    assert percents[-1] == 100.0
    record = watch.record()
    assert record["finished"]
    assert record["total_s"] == pytest.approx(sum(record["phases"].values()), abs=1.0)


@pytest.mark.parametrize("size", [1, 7, 97, 4096])
def test_chunks_of_any_size_give_the_same_end(size):
    """A line cut by the pipe is put together again."""
    watch = load_watch.LoadWatch(None, 0.0)
    now = follow(watch, TEXT, size, step=0.01)
    assert watch.snapshot(now)["phase"] == "ready"
    assert watch.changes() == [
        "prompt_lookup_min 4, copied from prompt_lookup_max: only 4-grams are looked up",
        "async scheduling off: not supported with ngram speculation",
        "model runner V1: V2 lacks ngram/ngram_gpu speculative decoding",
        "cudagraph mode FULL_AND_PIECEWISE",
        "min_p and logit_bias refused because of speculation",
        "fallback: default tactics",
    ]


def test_without_history_it_says_so():
    """No number is invented; in the weights the shard rate gives a time for the weights only."""
    watch = load_watch.LoadWatch(None, 0.0)
    state = watch.snapshot(1.0)
    assert (state["remaining_s"], state["remaining_from"]) == (None, None)
    assert "no earlier load" in state["detail"]
    watch.feed(shard(0), 10.0)
    watch.feed(shard(24), 34.0)
    state = watch.snapshot(34.0)
    assert state["phase"] == "weights"
    assert (state["remaining_s"], state["remaining_from"]) == (72.0, "shard rate")
    assert state["detail"].startswith("24 of 96 shards")


def test_history_gives_the_time_left():
    """Median of the earlier loads, the shard rate of this one for what is being loaded now."""
    loads = [{"phases": {"process": 10, "weights": 200, "compile": seconds, "api": 5}} for seconds in (50, 60, 900)]
    watch = load_watch.LoadWatch({"loads": loads}, 0.0)
    assert watch.snapshot(0.0)["remaining_s"] == 10 + 200 + 60 + 5
    watch.feed(shard(0), 10.0)
    watch.feed(shard(48), 58.0)
    state = watch.snapshot(58.0)
    assert (state["remaining_s"], state["remaining_from"]) == (48 + 60 + 5, "history")
    assert 20 < state["percent"] < 50


def test_history_is_kept_of_finished_loads_only():
    """Five finished loads are kept, an unfinished one changes nothing, damage is skipped."""
    history = None
    for number in range(7):
        history = load_watch.merge_history(
            history, {"finished": True, "total_s": number, "phases": {"weights": number}}
        )
    assert [load["total_s"] for load in history["loads"]] == [2, 3, 4, 5, 6]
    assert load_watch.merge_history(history, load_watch.LoadWatch(None, 0.0).record()) == history
    assert load_watch.typical_load({"loads": [None, {"phases": {"weights": "x"}}, {"phases": {"weights": -1}}]}) == {}
    assert load_watch.typical_load([1]) == {}


def test_a_hung_collective_stalls_although_the_processor_spins():
    """After the NCCL line nothing is printed; processor time is no evidence there."""
    watch = load_watch.LoadWatch(None, 0.0)
    watch.feed(NCCL, 5.0)
    for second in range(6, 310):
        watch.activity(float(second), "cpu")
    state = watch.snapshot(306.0)
    assert state["stalled"]
    assert state["phase"] == "distributed"
    assert "vLLM is using nccl==2.27.5" in state["evidence"]
    assert "301 s" in state["evidence"]


def test_the_line_of_a_waiting_engine_moves_nothing():
    """The ring buffer's complaint comes every minute from a hung engine too."""
    watch = load_watch.LoadWatch(None, 0.0)
    watch.feed(NCCL, 5.0)
    for minute in range(1, 6):
        watch.feed(
            CORE.format(minute, "No available shared memory broadcast block found in 60 seconds."), 60.0 * minute
        )
    assert watch.snapshot(306.0)["stalled"]


def test_a_line_that_was_printed_before_moves_nothing():
    """A retry loop prints the same words for ever; a line with a new number is new."""
    same, counting = load_watch.LoadWatch(None, 0.0), load_watch.LoadWatch(None, 0.0)
    for step in range(40):
        same.feed(CORE.format(1, "cannot reach the store yet"), 10.0 * step)
        counting.feed(CORE.format(1, f"block {step} is placed"), 10.0 * step)
    assert same.snapshot(390.0)["stalled"]
    assert not counting.snapshot(390.0)["stalled"]


def test_a_long_compilation_with_a_busy_processor_is_alive():
    """37 minutes without a line, the processor busy: alive; idle as well: stalled."""
    busy, idle = load_watch.LoadWatch(None, 0.0), load_watch.LoadWatch(None, 0.0)
    for watch in (busy, idle):
        watch.feed(CORE.format(1, "Dynamo bytecode transform time: 65.30 s"), 1.0)
    for second in range(2, 2222, 10):
        busy.activity(float(second), "cpu")
    assert not busy.snapshot(2221.0)["stalled"]
    assert idle.snapshot(2221.0)["stalled"]


def test_crawling_shards_are_alive_for_as_long_as_they_count_up():
    """96 shards, one in nine minutes: slow, not stalled; the same bar drawn again is nothing."""
    watch = load_watch.LoadWatch(None, 0.0)
    now = 0.0
    for n in range(8):
        now += 540.0
        watch.feed(shard(n), now)
        assert not watch.snapshot(now + 530.0)["stalled"]
    for again in range(1, 70):
        watch.feed(shard(7), now + again * 10.0)
    assert watch.snapshot(now + 690.0)["stalled"]


def test_disk_reads_keep_a_silent_load_alive_and_weak_evidence_has_an_end():
    """Reads count fully in the weights, processor time only for WEAK_FACTOR limits."""
    reads, spins = (
        load_watch.LoadWatch(None, 0.0, {"weights": 100.0}),
        load_watch.LoadWatch(None, 0.0, {"weights": 100.0}),
    )
    for watch in (reads, spins):
        watch.feed(shard(1), 1.0)
    for second in range(2, 500, 5):
        reads.activity(float(second), "disk")
        spins.activity(float(second), "cpu")
    assert not reads.snapshot(499.0)["stalled"]
    assert not spins.snapshot(399.0)["stalled"] or spins.snapshot(399.0)["evidence"]
    state = spins.snapshot(499.0)
    assert state["stalled"]
    assert "spinning wait" in state["evidence"]


def test_a_draft_model_is_loaded_after_the_target():
    """The second shard bar goes back to the weights and says whose they are."""
    watch = load_watch.LoadWatch(None, 0.0)
    watch.feed(shard(96), 1.0)
    watch.feed(CORE.format(2, "Loading weights took 3.35 seconds"), 2.0)
    assert watch.snapshot(2.0)["phase"] == "post_load"
    watch.feed(CORE.format(3, "Loading drafter model..."), 3.0)
    watch.feed(shard(3), 4.0)
    state = watch.snapshot(4.0)
    assert state["phase"] == "weights"
    assert "3 of 96 shards of the draft model" in state["detail"]


def test_a_traceback_does_not_move_the_phase():
    """Error lines quote every part of the program."""
    watch = load_watch.LoadWatch(None, 0.0)
    watch.feed("(Worker_TP0 pid=1) ERROR 01-01 00:00:00 [x.py:1] Application startup complete\n", 1.0)
    assert watch.snapshot(1.0)["phase"] == "process"


def test_wrong_names_are_errors():
    """An unknown phase or kind of evidence is named with what was expected."""
    with pytest.raises(ValueError, match="found phase 'load', expected one of process"):
        load_watch.LoadWatch(None, 0.0, {"load": 1.0})
    with pytest.raises(ValueError, match="found 'gpu', expected cpu, disk or gpu_memory"):
        load_watch.LoadWatch(None, 0.0).activity(1.0, "gpu")


CHANGE_LINES = [
    ("WARNING 01-01 00:00:00 [vllm.py:1] Asynchronous scheduling is disabled.", "async scheduling off"),
    (
        "WARNING 01-01 00:00:00 [vllm.py:1] Async scheduling will be disabled because it is not supported with the "
        "`ray` distributed executor backend. ",
        "async scheduling off: it is not supported with the `ray` distributed executor backend",
    ),
    ("INFO 01-01 00:00:00 [gpu_worker.py:1] Using V2 Model Runner", "model runner V2"),
    (
        "WARNING 01-01 00:00:00 [vllm.py:1] Dynamic speculative decoding changes the target length at runtime. "
        "Overriding cudagraph_mode from FULL to PIECEWISE for reliability",
        "cudagraph mode PIECEWISE instead of FULL: Dynamic speculative decoding changes the target length at runtime",
    ),
    (
        "WARNING 01-01 00:00:00 [x.py:1] Custom allreduce is disabled because it's not supported on more than two "
        "PCIe-only GPUs. To",
        "custom all-reduce off: it's not supported on more than two PCIe-only GPUs",
    ),
    (
        "INFO 01-01 00:00:00 [x.py:1] Auto-fit max_model_len: reduced from 131072 to 90000 to fit",
        "max_model_len 90000 instead of 131072",
    ),
    ("WARNING 01-01 00:00:00 [x.py:1] Enforce eager set, disabling torch.compile and CUDAGraphs.", "CUDA graphs off"),
    ("ERROR 01-01 00:00:00 [x.py:1] Using V2 Model Runner", None),
    ("INFO 01-01 00:00:00 [x.py:1] Using max model len 4096", None),
]


@pytest.mark.parametrize(("line", "change"), CHANGE_LINES, ids=[line[22:60] for line, _change in CHANGE_LINES])
def test_what_the_engine_changed_at_start(line, change):
    """One sentence for each departure from the arguments."""
    assert load_watch.change_of(load_watch.parse(line)) == change


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.text(max_size=40) | st.sampled_from([shard(3), NCCL, "\r", "\x1b[1m", "9/0 ["]), st.floats(0, 50)),
        max_size=20,
    )
)
def test_no_output_can_crash_it(chunks):
    """Any text in any cut, any pace: a snapshot with numbers in range."""
    watch = load_watch.LoadWatch({"loads": [{"phases": {"weights": 10.0}}]}, 0.0)
    now = 0.0
    for text, wait in chunks:
        now += wait
        watch.feed(text, now)
        state = watch.snapshot(now)
        assert state["phase"] in phases.PHASES
        assert 0 <= state["percent"] <= 100
        assert state["remaining_s"] is None or state["remaining_s"] >= 0
    watch.record()


def test_a_line_that_never_ends_does_not_grow_the_watcher():
    """A writer without line ends is kept to a bounded rest."""
    watch = load_watch.LoadWatch(None, 0.0)
    for second in range(100):
        watch.feed("x" * 10_000, float(second))
    assert len(watch._partial) <= 65536
