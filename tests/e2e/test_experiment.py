"""scripts/experiment.py on the throwaway host: killed again and again, and a trial of a whole grid on one load."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from throwaway import BASELINE, ROOT, Command, Host

pytestmark = pytest.mark.host
FAST = {"tokens_per_s": 2000, "ttft_s": 0.001, "load_s": 1}
WORDS = [
    "harbour",
    "lantern",
    "meadow",
    "copper",
    "willow",
    "ember",
    "granite",
    "saddle",
    "orchard",
    "beacon",
    "tunnel",
    "velvet",
    "cedar",
    "anchor",
]


def plan(folder: Path, **keys: Any) -> Path:
    """A plan of 16 small prompts, in a file."""
    prompts = folder / "prompts.jsonl"
    lines = []
    for at in range(16):
        said = " ".join(WORDS[(at * 5 + step * (at + 3)) % len(WORDS)] for step in range(24))
        message = {"role": "user", "content": f"Report {at} says: {said}. What does it say about the {WORDS[at % 14]}?"}
        kind = "quote_rag" if at % 2 else "summary"
        lines.append(json.dumps({"id": f"p{at}", "class": kind, "messages": [message], "max_tokens": 48}))
    prompts.write_text("\n".join(lines) + "\n")
    file = folder / "plan.yml"
    file.write_text(yaml.safe_dump({"prompts": str(prompts), "repeats": 2, "budget_minutes": 60, **keys}))
    return file


def experiment(host: Host, *words: str) -> Command:
    inventories = ["-i", str(host.sandbox["inventory"]), "-i", str(host.inventory)]
    return Command([str(ROOT / "scripts/experiment.py"), *words, *inventories])


@pytest.mark.skipif(not os.environ.get("SWAPGATE_SLOW"), reason="takes five minutes: SWAPGATE_SLOW=1")
def test_five_kills_and_a_ctrl_c_change_nothing_of_the_result(host: Host, tmp_path: Path) -> None:
    before = host.status()["last_good"]["release"]
    run = tmp_path / "run"
    # Where the program is killed, by what it printed last.
    points = (
        "| benchmark |",
        "| ngram | ",
        "| benchmark |",
        "step 3 of 5: A",
        "step 4 of 5: C",
    )
    with host.knobs(**FAST):
        now = experiment(host, str(plan(tmp_path, variants=["ngram", "hasty"])), "--run", str(run), "--yes")
        for point in points:
            now.await_line(point)
            now.process.kill()
            now.wait(20)
            assert host.status()["last_good"]["release"] == before, "a killed controller leaves a way home"
            now = experiment(host, "--resume", str(run))
        now.await_line("| benchmark |")
        now.interrupt()
        stopped = now.wait()
        assert stopped.code == 130, stopped.text[-3000:]
        assert "'baseline' serves, as before" in stopped.text
        assert host.enabled() == [BASELINE] and host.status()["swap"]["outcome"] == "rolled_back"
        done = experiment(host, "--resume", str(run)).wait()
    assert done.code == 0, done.text[-4000:]
    about = json.loads((run / "run.json").read_text())
    assert [load["arm"] for load in about["loads"]] == list("ABACA")
    assert [load["boot"] for load in about["loads"]] == [1, 2, 3, 4, 5]
    assert {load["outcome"] for load in about["loads"]} == {"measured"}
    assert len({load["invocation_id"] for load in about["loads"]}) == 5, "no load was measured twice"
    lines = [json.loads(line) for line in (run / "raw.jsonl").read_text().splitlines()]
    asked = Counter((line["arm"], line["boot"]) for line in lines if "facts" not in line)
    assert set(asked.values()) == {16 * 2}, "each load has every prompt in each repeat, once"
    assert {result["variant"]["variant"] for result in json.loads((run / "verdict.json").read_text())["verdicts"]} == {
        "ngram",
        "hasty",
    }
    status = host.status()
    assert status["last_good"]["release"] == before and host.enabled() == [BASELINE]
    assert host.complete()[0] == 200


def test_a_trial_judges_a_grid_on_one_load_and_a_load_that_dies_is_a_result(host: Host, tmp_path: Path) -> None:
    run = tmp_path / "run"
    grid = [{"k": 5, "min": 2, "max": 4}, {"k": 1, "min": 4, "max": 4}]
    crash = {"when": '"num_speculative_tokens":3', "crash_at": "weights", "crash_with": "cuda_oom"}
    refused = host.deploy("ngram_trial")
    assert refused.code != 0 and "never stays" in refused.flat and "confirm_within_s" in refused.flat
    assert host.active() == [BASELINE]
    file = plan(tmp_path, grid=[{"k": 3, "min": 3, "max": 3}], trial={"grid": grid})
    with host.knobs(**FAST, variants=[crash]):
        done = experiment(host, str(file), "--run", str(run), "--yes").wait()
    assert done.code == 0, done.text[-4000:]
    assert "order: A T A B A" in done.text and "loads: 4" in done.text
    loads = json.loads((run / "run.json").read_text())["loads"]
    assert [(load["arm"], load["outcome"]) for load in loads] == [("A", "measured"), ("A", "measured"), ("B", "failed")]
    assert "out of memory" in loads[-1]["cause"]
    lines = [json.loads(line) for line in (run / "trial/raw.jsonl").read_text().splitlines()]
    drafted = dict.fromkeys(("off", "k5_min2_max4", "k1_min4_max4"), 0)
    for line in lines:
        if "facts" not in line:
            drafted[line["setting"]] = max([drafted[line["setting"]], *(line["drafted"] or [])])
    assert drafted == {"off": 0, "k5_min2_max4": 5, "k1_min4_max4": 1}
    found = json.loads((run / "trial/verdict.json").read_text())["verdicts"]
    assert [result["variant"]["arm"] for result in found] == ["B", "C"]
    assert {result["base"]["variant"] for result in found} == {"ngram_trial off"}
    assert host.active() == [BASELINE] == host.enabled()


@pytest.mark.skipif(not os.environ.get("SWAPGATE_SLOW"), reason="takes four minutes: SWAPGATE_SLOW=1")
def test_what_an_arm_does_wrong_is_named_and_keeps_it_from_being_called_faster(host: Host, tmp_path: Path) -> None:
    faults: dict[int, dict[str, Any]] = {
        1: {"loop_output": True},
        2: {"answer_tokens": 3},
        3: {"acceptance": 0.0, "spec_speedup": 4.0},
        4: {"die_after_ready_s": 20.0, "tokens_per_s": 30},
    }
    variants = [{"when": f'"num_speculative_tokens":{k}', **knobs} for k, knobs in faults.items()]
    file = plan(tmp_path, grid=[{"k": k, "min": 4, "max": 4} for k in faults], order="fewest")
    with host.knobs(**{**FAST, "tokens_per_s": 400}, variants=variants):
        done = experiment(host, str(file), "--run", str(tmp_path / "run"), "--yes").wait(1200)
    assert done.code == 0, done.text[-4000:]
    loads = json.loads((tmp_path / "run/run.json").read_text())["loads"]
    assert [(load["arm"], load["outcome"]) for load in loads] == [
        ("A", "measured"),
        ("B", "failed"),
        ("C", "measured"),
        ("D", "measured"),
        ("E", "failed"),
        ("A", "measured"),
    ]
    assert "again and again" in loads[1]["cause"], "a loop in the very first answer is found before it is measured"
    assert "died" in loads[4]["cause"] or "ended" in loads[4]["cause"], loads[4]["cause"]
    verdicts = json.loads((tmp_path / "run/verdict.json").read_text())["verdicts"]
    failed = {one["variant"]["arm"]: [gate["name"] for gate in one["gates"] if gate["ok"] is False] for one in verdicts}
    assert "short_answers" in failed["C"] and "acceptance" in failed["D"], failed
    assert all(one["word"] != "faster" for one in verdicts)
    assert host.active() == host.enabled() == [BASELINE]
