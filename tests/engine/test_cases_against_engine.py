"""The public cases that are engine configurations, judged by the real engine's own parser and our rules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.engine


def test_every_engine_config_gets_its_verdict(engine_python, shared_path):
    done = subprocess.run(
        [sys.executable, "scripts/cases.py", "--engine", str(engine_python.parents[1]), "--json"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(shared_path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "not run" not in json.dumps(json.loads(done.stdout)), "the engine was asked"
