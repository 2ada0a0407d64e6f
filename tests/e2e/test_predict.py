"""playbooks/predict.yml: an answer from what serves, without touching it."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from throwaway import BASELINE, Host, until, write_prompts

pytestmark = pytest.mark.host


def test_a_prediction_stops_nothing_and_leaves_no_answer_behind(host: Host, tmp_path: Path) -> None:
    prompts, run_folder = tmp_path / "own.jsonl", tmp_path / "run"
    lines = write_prompts(prompts, 6, max_tokens=64)
    run_folder.mkdir()
    (run_folder / "transcripts.jsonl").write_text("of a run\n")
    before = host.picture()
    run = host.ansible(
        "playbooks/predict.yml",
        prompts=str(prompts),
        run=str(run_folder),
        grid="k=2 min=2 max=4",
        probe_minutes="4",
        max_tokens="20",
    )
    assert run.code == 0, run.text[-4000:]
    assert "Worth a reload:" in run.text
    assert re.search(r"\| baseline \| record \| recorded \d of 6, \d+ s left", run.text)
    assert re.search(r"\| baseline \| probe \| probed \d+ of \d+ runs, [a-z-]+, \d+ s left", run.text)
    assert host.picture() == before
    assert host.sh("ls -A /run/swapgate/jobs; ls /tmp /var/tmp | grep swapgate || true") == "", (
        "no answer stays on the host"
    )
    assert (run_folder / "transcripts.jsonl").read_text() == "of a run\n", "a run's own file is as it was"
    own = run_folder / "prediction"
    answers = own / "transcripts.jsonl"
    assert own.stat().st_mode & 0o777 == 0o700
    for file in own.iterdir():
        assert file.stat().st_mode & 0o077 == 0 or file.name == "variant.json", file.name
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [row["id"] for row in rows] == [line["id"] for line in lines]
    assert all(len(row["output_token_ids"]) <= 20 for row in rows)
    found = json.loads((run_folder / "prediction.json").read_text())
    assert found["semantics"] == "v2" and found["fixed_cost"] is None
    assert found["overall"]["worth"] != "yes"
    assert found["sign_flip"]["probed_to"] == 8 and "not probed" not in found["sign_flip"]["text"]
    assert (run_folder / "prediction.svg").read_text().startswith("<svg")


def test_what_speculates_is_refused_before_anything_is_recorded(host: Host, tmp_path: Path) -> None:
    host.ensure_serving("ngram")
    run = host.ansible("playbooks/predict.yml", run=str(tmp_path / "run"))
    assert (
        run.code != 0 and "'ngram' serves with speculation (ngram)" in run.flat and "Nothing was recorded" in run.flat
    )
    assert "| record |" not in run.text and not (tmp_path / "run").exists()
    host.ensure_serving("baseline")


def test_a_recording_that_nobody_follows_refuses_others_ends_for_a_swap_and_is_deleted(
    host: Host, tmp_path: Path
) -> None:
    """The controller is cut off; another job is refused with its name; a swap spends no drain on it; nothing stays."""
    prompts = tmp_path / "own.jsonl"
    write_prompts(prompts, 6, max_tokens=400)
    with host.knobs(tokens_per_s=5):
        host.sh(f"systemctl restart {BASELINE}", limit_s=90)
        command = host.command("playbooks/predict.yml", prompts=str(prompts), run=str(tmp_path / "run"))
        command.await_line("| baseline | record |")
        os.killpg(command.process.pid, signal.SIGKILL)
        command.wait()
        until(lambda: host.status()["jobs"], 20, "the recording to be under way")
        (job,) = host.status()["jobs"]
        assert (job["unit"], job["kind"]) == ("swapgate-record.service", "record")
        again = host.ansible("playbooks/predict.yml", prompts=str(prompts), run=str(tmp_path / "other"))
        assert again.code != 0 and "a record job by" in again.flat and not (tmp_path / "other").exists(), again.text
        bench = host.ansible("playbooks/benchmark.yml", prompts=str(prompts), run=str(tmp_path / "bench"))
        assert bench.code != 0 and "or end it: systemctl stop swapgate-record.service" in bench.flat, bench.text
        begun = time.monotonic()
        host.swap("ngram")
        stopped = {phase["name"]: phase["seconds"] for phase in host.status()["swap"]["phases"]}["stop"]
    assert stopped < 8, f"the drain was spent on a recording: {stopped} s of 10"
    assert host.status()["jobs"] == [] and time.monotonic() - begun < 90
    (folder,) = host.sh("ls -A /run/swapgate/jobs").split()
    said = host.sh(f"cat /run/swapgate/jobs/{folder}/said")
    assert "swapgate record: it was ended by a swap to 'ngram'" in said
    timers = host.sh("systemctl list-timers --all --no-legend 'run-*' | grep -o 'run-[^ ]*[.]timer'").split()
    due = [timer.replace(".timer", ".service") for timer in timers]
    (due_for_it,) = [unit for unit in due if folder in host.sh(f"systemctl show -p ExecStart {unit}")]
    host.sh(f"systemctl start {due_for_it}")
    until(lambda: host.sh("ls -A /run/swapgate/jobs") == "", 10, "systemd to delete what no controller fetched")
