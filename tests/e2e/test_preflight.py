"""What is refused while the old variant serves. After each: the same process serves, and nothing else is enabled."""

from __future__ import annotations

import pytest
from throwaway import Host

pytestmark = pytest.mark.host


def test_a_good_variant_passes_and_is_not_swapped_to(host: Host) -> None:
    before = host.picture()
    run = host.ansible("playbooks/preflight.yml", variant="ngram")
    assert run.code == 0, run.text[-3000:]
    assert "vLLM 0.32.0 accepts the variant" in run.flat
    assert "speculative method: ngram" in run.flat
    assert "speculative prompt_lookup_min: 4" in run.flat
    assert "async_scheduling: False" in run.flat, "what speculation switched off is not shown"
    assert host.picture() == before


@pytest.mark.parametrize(
    ("variant", "said"),
    [
        ("mistyped", ["engine's own parser", "draft_tensor_parallel_size"]),
        ("unknown_flag", ["engine's own parser", "unrecognized arguments: --no-such-flag 1"]),
        ("crossed", ["max_model_len", "greater than or equal to 1"]),
        ("removed_flag", ["--disable-log-requests", "0.32.0", "no-enable-log-requests"]),
        ("eagle3", ["/srv/models/tiny-eagle3", "drafts"]),
    ],
)
def test_a_bad_variant_is_named_and_nothing_is_touched(host: Host, variant: str, said: list[str]) -> None:
    before = host.picture()
    report = host.run(f"/usr/local/bin/swapgate preflight {host.release(variant)}")
    assert report.returncode == 1
    assert all(word in report.stdout for word in said), report.stdout
    swap = host.swap(variant)
    assert swap["outcome"] == "refused"
    assert swap["stopped_old"] is False
    assert all(word in swap["cause"]["what"] for word in said), swap["cause"]
    assert host.picture() == before


def test_the_playbook_says_what_and_where_and_ends_in_failure(host: Host) -> None:
    before = host.picture()
    run = host.ansible("playbooks/preflight.yml", variant="mistyped")
    assert run.code != 0
    assert f"Preflight of variant 'mistyped' on {host.name} found:" in run.flat
    assert "draft_tensor_parallel_size" in run.flat
    assert "Nothing that serves was touched." in run.flat
    assert host.picture() == before
    deploy = host.deploy("mistyped")
    assert deploy.code != 0
    assert "draft_tensor_parallel_size" in deploy.flat
    assert host.picture() == before


def test_two_enabled_units_are_refused(host: Host) -> None:
    host.ensure_serving("ngram")
    host.ensure_serving("baseline")
    host.sh("systemctl enable --quiet vllm-tiny-ngram.service")
    try:
        before = host.picture()
        assert len(before["enabled"]) == 2
        swap = host.swap("ngram")
        assert swap["outcome"] == "refused"
        assert "vllm-tiny-ngram.service" in swap["cause"]["what"] and "vllm-tiny.service" in swap["cause"]["what"]
        assert "systemctl disable" in swap["cause"]["what"]
        assert host.picture() == before
    finally:
        host.sh("systemctl disable --quiet vllm-tiny-ngram.service")


def test_a_foreign_process_on_the_port_is_named(host: Host) -> None:
    host.sh("systemctl stop vllm-tiny.service")
    try:
        with host.listener() as unit:
            run = host.deploy("ngram")
            assert run.code != 0
            assert f"port {host.port} is held by pid " in run.flat
            assert f"(python3) of {unit}" in run.flat
            assert host.show(unit, "ActiveState")["ActiveState"] == "active", "the foreign process was disturbed"
            assert host.active() == []
    finally:
        host.sh("systemctl start vllm-tiny.service", limit_s=60)


def test_a_hand_edited_unit_does_not_pass_for_the_release(host: Host) -> None:
    """Drift is not adopted: `unchanged` would keep it for ever, so the release is put back in place and restarted."""
    pid = host.pid("vllm-tiny.service")
    host.sh(
        'sed -i \'s/^Environment="HOME=.*/&\\nEnvironment="EDITED=by-hand"/\' /etc/systemd/system/vllm-tiny.service '
        "&& systemctl daemon-reload"
    )
    assert "EDITED" in host.sh("systemctl cat vllm-tiny.service")
    swap = host.swap("baseline")
    assert swap["outcome"] == "swapped"
    assert "EDITED" not in host.sh("systemctl cat vllm-tiny.service")
    assert host.pid("vllm-tiny.service") not in (0, pid)
    staged = host.sh(f"cat /var/lib/swapgate/releases/{host.release('baseline')}/vllm-tiny.service")
    assert host.sh("cat /etc/systemd/system/vllm-tiny.service") == staged


def test_a_hand_edited_release_is_refused(host: Host) -> None:
    folder = f"/var/lib/swapgate/releases/{host.release('ngram')}"
    before = host.picture()
    host.sh(f'cp {folder}/variant.json /tmp/kept && sed -i \'s/"port": [0-9]*/"port": 1/\' {folder}/variant.json')
    try:
        done = host.run(f"/usr/local/bin/swapgate ask {host.release('ngram')}")
        assert done.returncode == 2
        assert f"release {host.release('ngram')}" in done.stderr and "changed by hand" in done.stderr
        assert "Deploy the variant again" in done.stderr
        assert host.picture() == before
    finally:
        host.sh(f"mv /tmp/kept {folder}/variant.json")
