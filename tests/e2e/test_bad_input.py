"""Bad input: one clear error each, and nothing that serves, boots or is enabled has changed."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from throwaway import Host, Run, until

from tests.faults.actions import HANG

pytestmark = pytest.mark.host


def one_error(run: Run, *said: str) -> None:
    """The run failed, said all of this, and said it once: no second error hides the first."""
    assert run.code != 0, run.text[-3000:]
    for words in said:
        assert words in run.flat, run.text[-3000:]
    assert "Traceback" not in run.text, run.text[-3000:]


def test_unknown_variant_says_which_exist(host: Host) -> None:
    before = host.picture()
    run = host.deploy("ngrm")
    one_error(run, "variant 'ngrm' does not exist.", "Did you mean 'ngram'?", "baseline, ", "eagle3")
    assert host.picture() == before


def test_no_variant_at_all(host: Host) -> None:
    run = host.ansible("playbooks/deploy.yml")
    one_error(run, "-e variant=NAME")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"ngram": {"extends": "baseline", "speculativ_config": {}}},
            ["variant 'ngram': unknown key 'speculativ_config'.", "Did you mean 'speculative_config'?"],
        ),
        ({"ngram": {"extends": "baseline", "soak_s": "a while"}}, ["variant 'ngram'", "soak_s"]),
        (
            {"ngram": {"extends": "baseline", "engine_args": {"max-num-seqs": [[1]]}}},
            ["max-num-seqs", "strings or numbers"],
        ),
        ({"ngram": {"extends": "base"}}, ["variant 'base' does not exist.", "named by `extends` of variant 'ngram'"]),
        (
            {"second": {"description": "also a base"}},
            ["'baseline' and 'second' would both be vllm-tiny.service", "Add `extends`"],
        ),
    ],
    ids=["unknown key", "wrong type", "wrong flag value", "unknown base", "two without extends"],
)
def test_a_table_that_cannot_be_meant(host: Host, change: dict[str, object], said: list[str]) -> None:
    before = host.picture()
    run = host.deploy("ngram", swapgate_variants={**host.inventory_variants(), **change})
    one_error(run, *said)
    assert host.picture() == before


@pytest.mark.parametrize(
    ("host_entry", "key", "said"),
    [({"bind": "0.0.0.0"}, "", ["since there is no API key", "no-api-key", "/metrics"])],
)
def test_an_engine_that_strangers_would_reach(
    host: Host, host_entry: dict[str, object], key: str, said: list[str]
) -> None:
    before = host.picture()
    given = {**host.inventory_value("swapgate_host"), **host_entry}
    run = host.deploy("ngram", swapgate_host=given, vllm_service_api_key=key)
    one_error(run, *said)
    assert run.recap()["changed"] == 0
    assert host.picture() == before


def test_a_model_that_is_not_there_is_told_before_the_engine_is_installed(host: Host) -> None:
    before = host.picture()
    models = host.inventory_value("swapgate_models")
    models["tiny"]["path"] = "/srv/models/nowhere"
    table = host.inventory_variants()
    table["older"]["engine_version"] = "0.26.0"
    run = host.deploy("older", swapgate_models=models, swapgate_variants=table)
    one_error(run, "/srv/models/nowhere: found no such folder", "or a `source` in its entry")
    assert run.recap()["changed"] == 0
    assert host.run("test -e /opt/swapgate/engines/vllm-0.26.0").returncode == 1
    assert host.picture() == before


def test_words_given_as_texts_mean_what_they_say(host: Host) -> None:
    before = host.picture()
    words = ["preflight_only=true", "nvidia_stack_install=false", "end_orphans=no", "confirm_within_s=0"]
    words += ["python_env_allow_unpinned=yes", "python_env_no_index=true", "python_env_needed_mib=100"]
    words += ["keep_if_faster=false", "model_cache_rehash=false", "concurrency=[1,4]"]
    run = host.deploy("ngram", *[part for word in words for part in ("-e", word)])
    assert run.code == 0, run.text[-3000:]
    assert "vLLM 0.32.0 accepts the variant" in run.flat
    assert host.picture() == before


def test_a_part_of_a_play_is_refused(host: Host) -> None:
    before = host.picture()
    run = host.deploy("ngram", "--tags", "never")
    one_error(run, "found --tags never", "these playbooks have no tags")
    assert host.picture() == before


def colliding_keys() -> tuple[str, str]:
    """Two keys whose hashes begin with the same four digits."""
    seen: dict[str, str] = {}
    for number in range(10**6):
        key = f"sk-test-{number}"
        mark = hashlib.sha256(key.encode()).hexdigest()[:4]
        if mark in seen:
            return seen[mark], key
        seen[mark] = key
    raise AssertionError("no two keys collide")


def test_a_key_that_the_unit_could_not_tell_from_the_stored_one(host: Host) -> None:
    before = host.picture()
    first, second = colliding_keys()
    stored = "/etc/swapgate/credentials/vllm_api_key"
    try:
        assert host.ansible("playbooks/preflight.yml", variant="ngram", vllm_service_api_key=first).code == 0
        run = host.ansible("playbooks/preflight.yml", variant="ngram", vllm_service_api_key=second)
        one_error(run, "has the same four-digit fingerprint as the stored one")
        assert second not in run.text and first not in run.text
        assert host.sh(f"cat {stored}") == first
        assert host.ansible("playbooks/preflight.yml", variant="ngram", vllm_service_api_key=first).code == 0
    finally:
        host.sh(f"rm -f {stored}")
    assert host.picture() == before


def test_a_host_that_cannot_be_reached(host: Host, tmp_path: Path) -> None:
    file = tmp_path / "hosts.yml"
    file.write_text("---\nvllm_hosts:\n  hosts:\n    nobody:\n      ansible_host: 127.0.0.1\n      ansible_port: 9\n")
    run = host.ansible("playbooks/deploy.yml", "-i", str(file), "--limit", "nobody", variant="baseline")
    assert run.code == 4, run.text
    assert run.recap() == {
        "ok": run.recap()["ok"],
        "changed": 0,
        "unreachable": 1,
        "failed": 0,
        "skipped": run.recap()["skipped"],
        "rescued": 0,
        "ignored": 0,
    }
    assert "Connection refused" in run.flat


def test_without_root(host: Host) -> None:
    before = host.picture()
    host.sh(
        "id somebody >/dev/null 2>&1 || useradd --create-home somebody; install -d -o somebody -m 700 "
        "/home/somebody/.ssh && install -o somebody -m 600 /root/.ssh/authorized_keys /home/somebody/.ssh/"
    )
    run = host.deploy("ngram", ansible_user="somebody", ansible_become=False)
    one_error(run, "root")
    assert run.recap()["failed"] == 1
    assert run.recap()["changed"] == 0, run.text[-3000:]
    assert host.picture() == before


def test_no_disk_for_an_engine(host: Host) -> None:
    before = host.picture()
    table = host.inventory_variants()
    table["older"]["engine_version"] = "0.26.0"
    run = host.deploy("older", swapgate_variants=table, python_env_needed_mib=900_000_000)
    one_error(run, "needed 900000000 MiB, free ")
    assert host.picture() == before


def test_no_disk_for_a_swap(host: Host) -> None:
    before = host.picture()
    host.sh("mount -t tmpfs -o size=8m tmpfs /var/cache")
    try:
        swap = host.swap("ngram")
    finally:
        host.sh("umount /var/cache")
    assert swap["outcome"] == "refused"
    assert "/var/cache has " in swap["cause"]["what"] and "expected at least " in swap["cause"]["what"]
    assert host.picture() == before


def test_a_model_that_the_service_user_cannot_read(host: Host) -> None:
    before = host.picture()
    host.sh("chmod 0600 /srv/models/tiny/model-1.safetensors")
    try:
        run = host.deploy("ngram")
        one_error(run, "/srv/models/tiny/model-1.safetensors: found Permission denied for user vllm", "chmod o+r")
        assert host.picture() == before
    finally:
        host.sh("chmod 0644 /srv/models/tiny/model-1.safetensors")


def test_a_model_on_a_mount_that_hangs(host: Host) -> None:
    before = host.picture()
    host.write("/opt/hang.py", HANG)
    host.sh("systemd-run --quiet --collect --unit=hang python3 /opt/hang.py /srv/models/tiny")
    try:
        until(lambda: "autofs" in host.sh("grep ' /srv/models/tiny ' /proc/mounts || true"), 10, "the mount")
        run = host.deploy("ngram")
    finally:
        host.sh("systemctl stop hang; rm -f /opt/hang.py")
    one_error(run, "/srv/models/tiny: found no answer", "findmnt -T /srv/models/tiny")
    assert run.seconds < 90
    assert host.picture() == before
