"""The watch over GPU memory, against a stand-in nvidia-smi on the PATH."""

from __future__ import annotations

import time

import pytest
from ansible_collections.swapgate.core.plugins.host_program import gpus


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """A stand-in that answers with the content of a file, or fails without one; yields that file."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/asked\ncat {tmp_path}/answer 2>/dev/null\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path / "answer"


def answered(watch, now_s):
    """What the watch says once the question of time `now_s` has its answer."""
    assert watch.moved(now_s) is False, "a question is not waited for"
    watch._asked.wait(10)
    return watch.moved(now_s)


def test_only_a_change_between_two_answers_is_movement(smi):
    watch = gpus.MemoryWatch([0, 3])
    said = []
    for number, answer in enumerate(("100\n616\n", "100\n616\n", "100\n9000\n", "100\n9000\n")):
        smi.write_text(answer)
        said.append(answered(watch, (number + 1) * gpus.WATCH_S))
    assert said == [False, False, True, False]
    assert (smi.parent / "asked").read_text().splitlines()[0].endswith("--id=0,3")


def test_a_failing_or_missing_nvidia_smi_moves_nothing(smi, monkeypatch):
    watch = gpus.MemoryWatch([0])
    smi.write_text("1\n")
    assert answered(watch, gpus.WATCH_S) is False
    smi.unlink()
    assert answered(watch, 2 * gpus.WATCH_S) is False
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpus.MemoryWatch([0]).moved(gpus.WATCH_S) is False


def test_it_does_not_ask_all_the_time(smi):
    smi.write_text("1\n")
    watch = gpus.MemoryWatch([0])
    answered(watch, gpus.WATCH_S)
    for tick in range(20):
        watch.moved(gpus.WATCH_S + tick * 0.25)
    time.sleep(0.2)
    assert len((smi.parent / "asked").read_text().splitlines()) == 1
