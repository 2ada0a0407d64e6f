"""playbooks/predict.yml: an answer from what serves, without touching it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from throwaway import Host, write_prompts

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
    assert "swapgate" not in host.sh("ls /tmp /var/tmp"), "no answer stays on the host"
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
