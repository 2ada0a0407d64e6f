"""scripts/test_stages.py: two lanes at once, readable output, and nothing left of what a failure cut off."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from scripts import sandbox, test_stages

REPO = test_stages.ROOT
# Prints a line, waits for a file, prints another.
MEET = (
    "import pathlib, sys, time; print(sys.argv[1], 'first', flush=True); pathlib.Path(sys.argv[2]).touch()\n"
    "end = time.monotonic() + 30\n"
    "while not pathlib.Path(sys.argv[3]).exists() and time.monotonic() < end: time.sleep(0.02)\n"
    "print(sys.argv[1], 'last'); sys.exit(not pathlib.Path(sys.argv[3]).exists())"
)
# Starts a process in a session of its own, as the end-to-end tests do, and waits with it.
HOLD = (
    "import pathlib, subprocess, sys; child = subprocess.Popen(['sleep', '300'], start_new_session=True); "
    "pathlib.Path(sys.argv[1]).write_text(str(child.pid)); child.wait()"
)
FAIL = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\nsys.exit('no good')"


def command(program: str, *words: object) -> tuple[list[str], Path]:
    return [sys.executable, "-c", program, *map(str, words)], test_stages.ROOT


@pytest.fixture(autouse=True)
def own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Stages of these tests' own, and a folder for what they keep."""
    monkeypatch.setattr(test_stages, "ROOT", tmp_path)
    monkeypatch.setattr(test_stages, "LOGS", tmp_path / "stages")
    monkeypatch.setattr(test_stages, "MINUTES", tmp_path / "minutes.json")
    monkeypatch.setattr(test_stages, "LANES", (("left",), ("right",)))
    monkeypatch.setattr(test_stages, "HOSTS", {})
    monkeypatch.setattr(sys, "argv", ["test_stages.py"])
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(test_stages.signal, "signal", lambda number, act: before)


def stages(monkeypatch: pytest.MonkeyPatch, **given: list[tuple[list[str], Path]]) -> None:
    monkeypatch.setattr(test_stages, "STAGES", given)


def gone(pid: int) -> bool:
    return sandbox.process_start(pid) == 0


def test_lanes_run_at_once_and_a_stage_is_shown_in_one_piece(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    stages(monkeypatch, left=[command(MEET, "left", here, there)], right=[command(MEET, "right", there, here)])
    assert test_stages.main([]) == 0
    said = capsys.readouterr().out
    assert "[left] begins" in said and "[right] begins" in said
    assert "left first\nleft last\n" in said and "right first\nright last\n" in said
    assert said.splitlines()[-1] == "2 passed, 0 failed"


def test_a_failure_ends_the_other_lane_with_all_that_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pid = tmp_path / "pid"
    never = command("import pathlib, sys; pathlib.Path(sys.argv[1]).touch()", tmp_path / "never")
    stages(monkeypatch, left=[command(FAIL, pid)], right=[command(HOLD, pid), never])
    assert test_stages.main([]) == 1
    said = capsys.readouterr().out
    assert "no good" in said and "cut off" in said
    assert said.splitlines()[-2:] == ["stage left FAILED", "0 passed, 1 failed"]
    assert gone(int(pid.read_text())) and not (tmp_path / "never").exists()


@pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("systemd-nspawn"), reason="needs root and systemd-nspawn (sandbox.py install)"
)
def test_no_host_of_a_stage_that_was_cut_off_stays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox, "REPO", tmp_path)
    names = ("cut-a", "cut-b", "somebodys")
    for name in names:
        sandbox.Sandbox(name, 1).save()
    monkeypatch.setattr(test_stages, "HOSTS", {"right": "cut-*", "left": "somebodys"})
    pid = tmp_path / "pid"
    stages(monkeypatch, left=[command(FAIL, pid)], right=[command(HOLD, pid)])
    assert test_stages.main([]) == 1
    assert sandbox.known_names() == ["somebodys"]


def test_an_interrupt_ends_everything(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pids = [tmp_path / "one", tmp_path / "two"]
    stages(monkeypatch, left=[command(HOLD, pids[0])], right=[command(HOLD, pids[1])])

    def press() -> None:
        end = time.monotonic() + 30
        while not all(file.exists() and file.read_text() for file in pids) and time.monotonic() < end:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    presser = threading.Thread(target=press)
    # A run in a shell's background has it ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        presser.start()
        assert test_stages.main([]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    presser.join()
    assert all(gone(int(file.read_text())) for file in pids)


def test_minutes_are_told_against_the_last_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages(monkeypatch, left=[command("pass")], right=[command("pass")])
    assert test_stages.main([]) == 0
    assert "(last" not in capsys.readouterr().out
    (tmp_path / "minutes.json").write_text(json.dumps({"left": 3.4, "right": 7.1, "all": 8.2}))
    assert test_stages.main(["left"]) == 0
    assert "minutes: left 0.0 (last 3.4)\n" in capsys.readouterr().out
    kept = json.loads((tmp_path / "minutes.json").read_text())
    assert kept["left"] < 1 and (kept["right"], kept["all"]) == (7.1, 8.2), "one stage alone is not the whole suite"


def test_each_stage_is_in_one_lane_and_the_command_line_knows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    program = [sys.executable, str(test_stages.ROOT / "scripts/test_stages.py")]
    shown = subprocess.run([*program, "--help"], capture_output=True, text=True, check=True).stdout
    in_lanes = [name for lane in test_stages.LANES for name in lane]
    assert sorted(in_lanes) == sorted(test_stages.STAGES)
    assert all(name in shown for name in in_lanes)
    assert subprocess.run([*program, "cases"], capture_output=True, check=False).returncode == 2


def made(folder: Path, *words: str) -> str:
    """What make prints in a checkout that has no virtualenv yet."""
    for name in ("Makefile", "requirements.lock"):
        shutil.copy(REPO / name, folder)
    return subprocess.run(["make", "-C", str(folder), *words], capture_output=True, text=True, check=True).stdout


def test_the_virtualenv_alone_asks_for_no_package_of_the_machine(tmp_path: Path) -> None:
    told = made(tmp_path, "-n", "venv")
    assert "-m venv .venv" in told and "--require-hashes -r requirements.lock" in told
    assert "sandbox.py" not in told
    for target in ("demo", "test", "unit"):
        assert made(tmp_path, "-n", target).index("sandbox.py install") < made(tmp_path, "-n", target).index("-m venv")


def test_help_has_every_target_that_people_type(tmp_path: Path) -> None:
    typed = (REPO / "Makefile").read_text().partition(".PHONY: ")[2].partition("\n")[0].split()
    shown = made(tmp_path, "help")
    lacks = [name for name in typed if f" {name} " not in shown]
    assert lacks == ["packages", "browser"]
