"""The throwaway host of the end-to-end tests, with fake engines of several versions and a tiny model.

Each process of pytest-xdist has a host of its own, so that one can work while the other waits.

SWAPGATE_E2E_KEEP=1 keeps the host for the next run; what swapgate put on it is removed at the start all the same.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parent))

from throwaway import BASELINE, ROOT, WIPE, Host, Run, destroy_sandbox, free_port, make_sandbox

VERSIONS = ("0.32.0", "0.31.0", "0.26.0", "0.16.0", "0.10.0")
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
NAME = f"e2e-{WORKER}"
WHEELS = ROOT / ".artifacts" / NAME / "wheels"
# Far enough apart that no two hosts choose the same port of the network that they share; a second checkout on the same
# machine sets another base.
FIRST_PORT = int(os.environ.get("SWAPGATE_E2E_PORT", "8731")) + 20 * WORKER
MODEL = "/srv/models/tiny"
KEEP = bool(os.environ.get("SWAPGATE_E2E_KEEP"))


def variants() -> dict[str, Any]:
    """The variants that ship, on a base with short times, and a few that must be refused or fail."""
    table: dict[str, Any] = yaml.safe_load((ROOT / "group_vars/all/variants.yml").read_text())[
        "swapgate_shipped_variants"
    ]
    table["baseline"].update(soak_s=2, restart_delay_s=1, drain_timeout_s=10, load_timeout_s=120)
    ngram = table["ngram"]["speculative_config"]
    own = {
        "hasty": {"load_timeout_s": 12, "engine_args": {"max-num-seqs": 9}},
        "shared_shm": {"private_shm": False, "engine_args": {"max-num-seqs": 5}},
        "older": {"engine_version": "0.31.0"},
        "holes": {"engine_version": "0.16.0"},
        "ancient": {"engine_version": "0.10.0"},
        "nowhere": {"engine_version": "9.9.9"},
        "unknown_flag": {"engine_args": {"no-such-flag": 1}},
        "removed_flag": {"engine_args": {"disable-log-requests": True}},
        # What the table cannot tell, and the engine's own parser refuses.
        "mistyped": {"speculative_config": {**ngram, "tensor_parallel_size": 1}},
        "crossed": {"speculative_config": {**ngram, "max_model_len": 0}},
    }
    table.update({name: {"extends": "baseline", "description": "for a test", **entry} for name, entry in own.items()})
    return table


def inventory(folder: Path, port: int) -> Path:
    """An inventory folder with what the tests' host serves."""
    values = {
        "swapgate_model": "tiny",
        "swapgate_models": {
            "tiny": {
                "path": MODEL,
                "served_name": "tiny",
                "max_model_len": 2048,
                "drafts": {name: f"/srv/models/tiny-{name}" for name in ("eagle3", "medusa", "draft_model")},
            }
        },
        "swapgate_host": {
            "engine": {"package": "vllm", "version": VERSIONS[0]},
            "gpus": [],
            "port": port,
            "free_timeout_s": 4,
        },
        "swapgate_variants": variants(),
        "allow_disruption": True,
        "python_env_find_links": ["/opt/wheels-of-the-site"],
        "python_env_no_index": True,
        "python_env_extra_packages": [],
        "python_env_allow_unpinned": True,
        "python_env_constraints_file": "/dev/null",  # the role's own are the hashes of the real engine
        "python_env_needed_mib": 100,
    }
    (folder / "group_vars").mkdir(parents=True)
    (folder / "hosts.yml").write_text("---\nvllm_hosts:\n")
    (folder / "group_vars/vllm_hosts.yml").write_text(json.dumps(values, indent=1))
    return folder


@pytest.fixture(scope="session")
def session_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The host, booted, with wheels and a model on it and nothing of swapgate."""
    WHEELS.mkdir(parents=True, exist_ok=True)
    build = [sys.executable, str(ROOT / "tests/fake_vllm/build_wheels.py"), str(WHEELS), *VERSIONS]
    subprocess.run(build, check=True, capture_output=True)
    sandbox = make_sandbox(NAME, [f"{WHEELS}:/opt/wheels-of-the-site"], fresh=not KEEP)
    host = Host(NAME, sandbox, Path(), 0)
    host.sh(WIPE + "; rm -rf /opt/swapgate/engines")
    host.port = free_port(FIRST_PORT)
    host.inventory = inventory(tmp_path_factory.mktemp("inventory"), host.port)
    maker = (ROOT / "roles/model_cache/molecule/default/files/make_model.py").read_text()
    host.sh(f"python3 - {MODEL} 4096", given=maker)
    yield host
    if not KEEP:
        destroy_sandbox(NAME)


@pytest.fixture(scope="session")
def first_plan(session_host: Host) -> Run:
    """Check mode on a host that swapgate never saw, and what it left there as a last line."""
    run = session_host.deploy("baseline", "--check")
    left = session_host.sh("ls -d /usr/local/bin/swapgate /var/lib/swapgate /opt/swapgate/engines 2>/dev/null || true")
    run.lines.append((run.seconds, f"left behind: {left or 'nothing'}"))
    return run


@pytest.fixture(scope="session")
def first_deploy(session_host: Host, first_plan: Run) -> Run:
    """The very first deploy on the clean host, which all other tests stand on."""
    run = session_host.deploy("baseline")
    assert run.code == 0, run.text[-4000:]
    assert session_host.active() == session_host.enabled() == [BASELINE]
    return run


@pytest.fixture(scope="session")
def staged(session_host: Host, first_deploy: Run) -> Host:
    """The host with the releases staged that tests swap to without a playbook."""
    names = "baseline ngram mistyped unknown_flag removed_flag crossed eagle3 shared_shm"
    session_host.stage(*names.split())
    return session_host


@pytest.fixture
def host(staged: Host) -> Iterator[Host]:
    """The host with a healthy `baseline` serving; knobs and foreign listeners of the test before are gone."""
    staged.sh("rm -f /etc/fake_vllm.json; systemctl stop foreign.service 2>/dev/null || true")
    staged.ensure_serving("baseline")
    assert staged.enabled() == [BASELINE]
    yield staged
