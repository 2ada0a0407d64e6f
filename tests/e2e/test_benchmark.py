"""playbooks/benchmark.yml, and a deploy that keeps a variant only when it is faster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from throwaway import BASELINE, NGRAM, Host, write_prompts

pytestmark = pytest.mark.host

# Steps so long that what else the machine does hardly counts, and four streams at a time so that it does not take long.
STEADY = {"tokens_per_s": 40, "ttft_s": 0.2}
MEASURE = {"keep_if_faster": True, "concurrency": [4], "repeats": 2}


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sixteen short prompts of two classes."""
    file = tmp_path_factory.mktemp("prompts") / "own.jsonl"
    write_prompts(file, 16, max_tokens=16)
    return file


def read(folder: Path, name: str) -> Any:
    return json.loads((folder / name).read_text())


def loads(folder: Path) -> list[tuple[str, int, str, str]]:
    return [(one["arm"], one["boot"], one["variant"], one["outcome"]) for one in read(folder, "run.json")["loads"]]


def test_what_serves_is_measured_and_left_alone(host: Host, prompts: Path, tmp_path: Path) -> None:
    before = host.picture()
    run = host.ansible(
        "playbooks/benchmark.yml", prompts=str(prompts), run=str(tmp_path / "run"), repeats=1, concurrency="[2]"
    )
    assert run.code == 0, run.text[-4000:]
    assert "benchmark of 'baseline' at 2 streams: 16 prompts are recorded, then asked in 2 passes; " in run.flat
    assert any("| benchmark | " in line for _, line in run.progress()), run.text
    assert host.picture() == before
    assert host.sh("ls -A /var/lib/swapgate/benchmarks") == "", "something of it stayed on the host"
    (load,) = read(tmp_path / "run", "run.json")["loads"]
    assert load["outcome"] == "measured" and load["release"] == host.release("baseline")
    assert load["invocation_id"] == host.show(BASELINE, "InvocationID")["InvocationID"]
    assert load["load_s"] > 0 and load["engine_version"] == "0.32.0"
    raw = [json.loads(line) for line in (tmp_path / "run/raw.jsonl").read_text().splitlines()]
    assert len(raw) == 17 and all(line["error"] is None for line in raw if "facts" not in line)
    owner = host.sh("stat -c %U /var/lib/swapgate/benchmarks")
    assert owner == "root"


def test_a_slower_variant_comes_back_by_itself(host: Host, prompts: Path, tmp_path: Path) -> None:
    with host.knobs(variants=[{"when": "--speculative-config", "spec_speedup": 0.8}], **STEADY):
        run = host.deploy("ngram", prompts=str(prompts), run=str(tmp_path / "run"), **MEASURE)
    assert run.code == 0, run.text[-4000:]
    assert f"{host.name}: 'ngram' not kept, the variant before serves again: " in run.flat
    assert loads(tmp_path / "run") == [
        ("A", 1, "baseline", "measured"),
        ("B", 2, "ngram", "measured"),
        ("A", 3, "baseline", "measured"),
    ]
    assert host.active() == host.enabled() == [BASELINE]
    swap = host.status()["swap"]
    assert swap["outcome"] == "rolled_back" and "B (ngram)" in swap["cause"]["what"]
    (verdict,) = read(tmp_path / "run", "verdict.json")["verdicts"]
    # On a busy machine the rig may be refused instead, which keeps no variant either.
    assert verdict["word"] in ("slower", "undecided", "refused")
    assert [row["boot"] for row in verdict["boots"] if row["arm"] == "A"] == [1, 3]


def test_a_faster_variant_is_kept(host: Host, prompts: Path, tmp_path: Path) -> None:
    with host.knobs(variants=[{"when": "--speculative-config", "spec_speedup": 4.0}], **STEADY):
        run = host.deploy("ngram", prompts=str(prompts), run=str(tmp_path / "run"), **MEASURE)
        assert run.code == 0, run.text[-4000:]
        assert f"{host.name}: 'ngram' kept: B (ngram) is faster than A (baseline)" in run.flat
        assert [one[:2] for one in loads(tmp_path / "run")] == [("A", 1), ("B", 2)]
        assert host.active() == host.enabled() == [NGRAM]
        again = host.deploy("ngram", prompts=str(prompts), **MEASURE)
    assert again.code != 0 and "'ngram' serves already, expected another variant" in again.flat


def test_a_verb_that_refuses_is_its_own_sentence_alone(host: Host) -> None:
    for playbook, said in (
        ("playbooks/profile.yml", "profiler: true"),
        ("playbooks/confirm.yml", "no swap waits to be confirmed"),
    ):
        run = host.ansible(playbook)
        assert run.code != 0 and f"{host.name}: swapgate: " in run.flat and said in run.flat, run.text
        assert not any(field in run.text for field in ("stderr", "non-zero return code", "Traceback")), run.text
