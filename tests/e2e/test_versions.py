"""Engine versions: another one beside the serving one, one with known holes, and one that does not exist."""

from __future__ import annotations

import pytest
from throwaway import BASELINE, Host

pytestmark = pytest.mark.host


def test_another_version_is_installed_beside_and_swapped_to_and_back(host: Host) -> None:
    run = host.deploy("older")
    assert run.code == 0, run.text[-3000:]
    assert "baseline -> older: swapped" in run.flat
    assert host.sh("ls /opt/swapgate/engines").split() == ["vllm-0.31.0", "vllm-0.32.0"]
    assert host.sh("tr '\\0' ' ' < /proc/$(pgrep -of 'vllm-0.31.0/bin/vllm serve')/cmdline").count("vllm-0.31.0") >= 1
    assert host.enabled() == ["vllm-tiny-older.service"]
    back = host.swap("baseline")
    assert back["outcome"] == "swapped"
    assert host.enabled() == [BASELINE]


def test_a_version_with_known_holes_needs_the_risk_accepted_by_name(host: Host) -> None:
    before = host.picture()
    refused = host.deploy("holes")
    assert refused.code != 0
    for name in ("CVE-2026-48746", "CVE-2026-27893", "GHSA-v359-jj2x-j536"):
        assert name in refused.flat, refused.text[-3000:]
    assert "0.22.0 or newer" in refused.flat
    assert "accepted_risks" in refused.flat
    assert host.picture() == before

    given = host.inventory_value("swapgate_host")
    given["accepted_risks"] = [
        "CVE-2026-48746",
        "CVE-2026-27893",
        "CVE-2026-9540",
        "GHSA-v359-jj2x-j536",
        "GHSA-3mwp-wvh9-7528",
    ]
    accepted = host.deploy("holes", swapgate_host=given, preflight_only=True)
    assert accepted.code == 0, accepted.text[-3000:]
    assert "vLLM 0.16.0 accepts the variant" in accepted.flat


def test_a_version_below_all_that_is_known_is_refused(host: Host) -> None:
    before = host.picture()
    run = host.deploy("ancient")
    assert run.code != 0
    assert "0.10.0 is older than 0.16" in run.flat
    assert host.picture() == before


def test_a_version_that_cannot_be_installed(host: Host) -> None:
    before = host.picture()
    engines = host.sh("ls -A /opt/swapgate/engines")
    run = host.deploy("nowhere")
    assert run.code != 0
    assert run.recap()["failed"] == 1
    assert "vllm==9.9.9 cannot be installed" in run.flat
    assert "/opt/wheels-of-the-site" in run.flat
    assert host.sh("ls -A /opt/swapgate/engines") == engines
    assert host.picture() == before
