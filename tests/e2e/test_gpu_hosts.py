"""What dead engines leave behind: processes and shared memory. Real units, users and segments; no GPU is needed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from throwaway import Host, until

pytestmark = pytest.mark.host
SLEEP = "import time; time.sleep(300)"
# Makes a segment, and goes on with it mapped but closed.
HOLD = (
    "import mmap, sys, time; f = open(sys.argv[1], 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 0); "
    "f.close(); time.sleep(300)"
)


@pytest.fixture
def clean(host: Host) -> Iterator[Host]:
    """The host, and what these tests start ended afterwards."""
    yield host
    host.sh(
        "systemctl stop 'test-*' 2>/dev/null; systemctl kill --signal=KILL test-gone 2>/dev/null; rm -f /dev/shm/test_*"
    )


def test_an_orphan_of_a_dead_unit_is_ended_and_nobody_else(clean: Host) -> None:
    python = clean.sh("ls -d /opt/swapgate/engines/vllm-0.32.0/bin/python")
    # Its main process ends, and KillMode leaves the child in the dead unit's control group.
    orphan = f"{python} -c '{SLEEP}' & sleep 1"
    clean.sh(f'systemd-run --quiet --unit=test-gone -p User=vllm -p KillMode=process sh -c "{orphan}"')
    clean.sh(f'systemd-run --quiet --unit=test-job -p User=vllm {python} -c "{SLEEP}"')
    until(lambda: clean.show("test-gone.service", "ActiveState")["ActiveState"] == "inactive", 20, "the unit's end")
    found = clean.swapgate("gpus")["orphans"]
    assert len(found) == 1 and "of test-gone.service, user vllm, since 20" in found[0], found
    before = clean.picture()
    kept = clean.ansible("playbooks/preflight.yml", variant="ngram")
    assert kept.code == 0 and len(clean.swapgate("gpus")["orphans"]) == 1, "nothing is ended without consent"
    run = clean.ansible("playbooks/preflight.yml", variant="ngram", end_orphans=True)
    assert run.code == 0, run.text[-3000:]
    assert "of test-gone.service, user vllm" in run.flat
    assert clean.swapgate("gpus")["orphans"] == []
    assert clean.show("test-job.service", "ActiveState")["ActiveState"] == "active", "a foreign job was ended"
    assert clean.picture() == before


def test_a_variant_without_a_profiler_is_told_how_to_get_one(host: Host) -> None:
    done = host.run("/usr/local/bin/swapgate profile")
    assert done.returncode == 2 and "extends 'baseline' with `profiler: true`" in done.stderr


def test_only_segments_of_dead_engines_are_removed_from_a_shared_dev_shm(clean: Host) -> None:
    swap = clean.swap("shared_shm")
    assert swap["outcome"] == "swapped", swap
    unit = swap["to"]["unit"]
    clean.sh(f"systemctl stop {unit}")
    for name, user in (("own", "vllm"), ("foreign", "nobody")):
        clean.sh(f'systemd-run --quiet --unit=test-{name} -p User={user} python3 -c "{HOLD}" /dev/shm/test_live_{name}')
        clean.sh(f"runuser -u {user} -- cp /etc/hostname /dev/shm/test_dead_{name}")
    until(lambda: len(clean.sh("ls /dev/shm/test_*").split()) == 4, 20, "all segments")
    assert clean.swap("shared_shm")["outcome"] == "swapped"
    left = clean.sh("ls /dev/shm").split()
    assert {"test_live_own", "test_live_foreign", "test_dead_foreign"} <= set(left) and "test_dead_own" not in left, (
        left
    )
    said = clean.sh("journalctl --no-pager --output=cat --unit=swapgate-swap.service --lines=60")
    assert "removed /dev/shm/test_dead_own" in said
