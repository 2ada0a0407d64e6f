"""benchmarks/gpu/measure.py on a machine without a GPU, with the fake engine and its load generator."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

from fake_engine import free_port, site

ROOT = Path(__file__).resolve().parents[2]


def measure(shared: Path, out: Path, port: int, *words: str) -> subprocess.CompletedProcess[str]:
    (out.parent / "knobs.json").write_text('{"load_s": 0.2, "tokens_per_s": 400, "ttft_s": 0.002}', encoding="utf-8")
    command = [sys.executable, str(ROOT / "benchmarks/gpu/measure.py"), "--python", sys.executable, "--gpus", ""]
    command += ["--model", str(shared / "model"), "--out", str(out), "--port", str(port)]
    command += ["--env", f"PYTHONPATH={site(shared)}", "--env", f"FAKE_VLLM_KNOBS={out.parent / 'knobs.json'}"]
    command += ["--max-tokens", "16", "--concurrency", "4", "--repeats", "1", "--commit", "abc", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)


def test_two_loads_and_a_later_third_make_one_run(shared: Path, tmp_path: Path) -> None:
    port = free_port()
    done = measure(shared, tmp_path / "out", port, "--per-class", "3", "--loads", "A=baseline,B=ngram")
    assert done.returncode == 0, done.stdout + done.stderr
    packed = tmp_path / "measured.tar.gz"
    done = measure(shared, tmp_path / "out", port, "--per-class", "3", "--loads", "A=baseline", "--pack", str(packed))
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(packed) as archive:
        archive.extractall(tmp_path / "here", filter="data")
    run = tmp_path / "here/run"
    about = json.loads((run / "run.json").read_text())
    assert [(load["arm"], load["boot"], load["variant"]) for load in about["loads"]] == [
        ("A", 1, "baseline"),
        ("B", 2, "ngram"),
        ("A", 3, "baseline"),
    ]
    assert all(load["outcome"] == "measured" and load["release"] and load["load_s"] for load in about["loads"])
    assert about["loads"][0]["release"] == about["loads"][2]["release"] != about["loads"][1]["release"]
    raw = [json.loads(line) for line in (run / "raw.jsonl").read_text().splitlines()]
    assert len([line for line in raw if "facts" not in line and not line["error"]]) == 3 * 18
    ends = [json.loads((tmp_path / f"here/services/{name}.json").read_text()) for name in ("A-1", "B-2", "A-3")]
    assert [end["stop"]["exit_code"] for end in ends] == [0, 0, 0]
    assert not (tmp_path / "here/root").exists()


def test_too_few_prompts_for_an_arm_stop_it_before_the_first_load(shared: Path, tmp_path: Path) -> None:
    done = measure(shared, tmp_path / "out", free_port(), "--per-class", "1", "--loads", "A=baseline,B=ngram")
    assert done.returncode == 2 and "found 6 prompts, expected at least 16" in done.stderr
    assert not (tmp_path / "out/services").exists()
