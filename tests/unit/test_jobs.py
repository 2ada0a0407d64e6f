"""Measuring jobs of a host: one at a time, seen by name, and ended with a word of why."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
from ansible_collections.swapgate.core.plugins.host_program import jobs
from ansible_collections.swapgate.core.plugins.module_utils import records

JOB = """
import sys, time
from ansible_collections.swapgate.core.plugins.host_program import jobs
from ansible_collections.swapgate.core.plugins.module_utils import records
layout = records.Layout(sys.argv[1])
try:
    with jobs.running(layout, "benchmark", "anna"):
        print("runs", flush=True)
        time.sleep(60)
except jobs.Ended as error:
    print(error, flush=True)
"""


@pytest.fixture
def layout(tmp_path):
    return records.Layout(str(tmp_path))


@pytest.fixture
def job(tmp_path):
    """A job in a process of its own."""
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(JOB), str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdout.readline() == "runs\n"
        yield process
        process.kill()


def test_a_job_is_seen_with_its_kind_its_owner_and_its_age(layout, job):
    (found,) = jobs.under_way(layout)
    assert set(found) == {"unit", "kind", "by", "since_unix"}
    assert (found["kind"], found["by"]) == ("benchmark", "anna") and abs(found["since_unix"] - time.time()) < 30
    assert layout.job.stat().st_mode & 0o077 == 0, "nobody but root may hold it"
    job.kill()
    job.wait()
    assert jobs.under_way(layout) == [], "a killed job leaves no lock"


def test_a_second_job_is_refused_and_told_which_one_runs(layout, job):
    with pytest.raises(jobs.JobRuns, match=r"a benchmark job by anna has run on this host since \d{4}-"):
        jobs.refuse_beside(layout)
    with pytest.raises(jobs.JobRuns, match="by anna"), jobs.running(layout, "probe", "root"):
        pytest.fail("two jobs at once")


def test_an_ended_job_says_why_and_the_next_one_may_begin(layout, job):
    assert jobs.end(layout, "it was ended by a swap to 'ngram'")["by"] == "anna"
    assert job.stdout.readline() == "it was ended by a swap to 'ngram'\n"
    assert jobs.end(layout, "again") is None
    with jobs.running(layout, "record", "root"):
        assert jobs.under_way(layout)[0]["kind"] == "record"
    job.wait()


def test_somebody_elses_stop_is_not_told_as_a_swap(layout, job):
    records.write_json(layout.job_end, {"pid": job.pid + 1, "why": "a swap long ago"})
    job.send_signal(signal.SIGTERM)
    assert job.stdout.readline() == "it was stopped before its end\n"
