"""A started fake engine, and the fake installed as a virtualenv would have it: for tests that need something to ask."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

FAKE = Path(__file__).resolve().parent.parent / "fake_vllm"
SHM = Path("/dev/shm")
NGRAM = '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4}'
READY = "Application startup complete"


class Fake:
    """One started fake engine, its output in a file, its whole process group ended at the end."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        knobs: dict[str, Any] | None = None,
        model: Path | None = None,
        env: dict[str, str] | None = None,
    ):
        self.port = free_port()
        self.log = folder / f"out-{self.port}.log"
        rules = folder / f"knobs-{self.port}.json"
        rules.write_text(json.dumps({"load_s": 0.15, **(knobs or {})}), encoding="utf-8")
        environment = {
            **os.environ,
            "FAKE_VLLM_KNOBS": str(rules),
            "PYTHONPATH": str(site(folder)),
            **(env or {}),
        }
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            str(model or folder / "model"),
            "--port",
            str(self.port),
        ]
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--served-model-name", "smol", *flags],
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def text(self) -> str:
        """The output so far."""
        return self.log.read_bytes().decode("utf-8", errors="replace")  # as it is: carriage returns matter

    def wait_for(self, words: str, seconds: float = 8.0) -> str:
        """Waits for a line; fails with the output when it does not come."""
        end = time.monotonic() + seconds
        while words not in self.text():
            assert time.monotonic() < end, f"no {words!r} in {seconds} s; output:\n{self.text()[-3000:]}"
            time.sleep(0.02)
        return self.text()

    def status(self, seconds: float = 8.0) -> int:
        """The exit status, awaited."""
        return self.process.wait(seconds)

    def get(self, path: str, body: Any = None, key: str | None = None, timeout: float = 5.0) -> tuple[int, str]:
        """Status and body of a request."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data=data)
        if key:
            request.add_header("Authorization", f"Bearer {key}")
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def complete(self, **body: Any) -> dict[str, Any]:
        """A finished completion."""
        status, text = self.get("/v1/completions", {"model": "smol", "prompt": "The capital of France is", **body})
        assert status == 200, text
        found: dict[str, Any] = json.loads(text)
        return found

    def tree(self) -> dict[str, int]:
        """Title to process id, of the engine core and the workers."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    title = (folder / "cmdline").read_bytes().rstrip(b"\0").decode()
                    if title.startswith("VLLM::") and os.getsid(int(folder.name)) == self.process.pid:
                        found[title] = int(folder.name)
        return found

    def pid_of(self, title: str) -> int:
        """The process of that title; one that was just started may not carry it yet."""
        deadline = time.monotonic() + 5
        while title not in self.tree():
            assert time.monotonic() < deadline, f"no process {title}: {self.tree()}; it printed: {self.text()[-2000:]}"
            time.sleep(0.1)
        return self.tree()[title]

    def end(self) -> None:
        """Kills what is left of the group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(5)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def site(folder: Path) -> Path:
    """A folder on PYTHONPATH with the fake installed from its wheel, as a virtualenv would have it."""
    target = folder / "site"
    if not target.exists():
        subprocess.run(
            [sys.executable, str(FAKE / "build_wheels.py"), str(folder / "wheels"), "0.32.0"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        subprocess.run(
            [sys.executable, "-m", "zipfile", "-e", str(next((folder / "wheels").glob("*.whl"))), str(target)],
            check=True,
        )
    return target
