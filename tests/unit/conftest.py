"""Fixtures for tests that start fake engines."""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_engine import SHM, Fake, site


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed fake and a model folder."""
    folder = tmp_path_factory.mktemp("fake")
    site(folder)
    (folder / "model").mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096, "num_attention_heads": 8}
    (folder / "model" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture
def start(shared: Path) -> Iterator[Any]:
    """Starts fakes and ends them all; nothing of theirs may be left in /dev/shm after a clean stop.

    One test at a time, also where several processes run tests: all of them look at the same /dev/shm.
    """
    fakes: list[Fake] = []

    def begin(*flags: str, **options: Any) -> Fake:
        fakes.append(Fake(shared, *flags, **options))
        return fakes[-1]

    with (Path(tempfile.gettempdir()) / f"swapgate-fakes-{os.getuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = set(SHM.iterdir())
        yield begin
        for fake in fakes:
            fake.end()
        for left in set(SHM.iterdir()) - before:
            if left.name.startswith(("psm_", "sem.mp-")) and left.stat().st_uid == os.getuid():
                left.unlink(missing_ok=True)
