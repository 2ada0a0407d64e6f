"""Headless Chromium for tests, driven over its debugging pipe: no driver, no port, no package."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts.sandbox import BROWSERS  # noqa: E402

QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-pipe",
)


class Chromium:
    """One browser. Messages go out on its descriptor 3 and come back on 4, each ended by a NUL."""

    def __init__(self, folder: Path, limit_s: float = 60) -> None:
        program = next((path for name in BROWSERS if (path := shutil.which(name))), None)
        assert program, (
            f"found none of {', '.join(BROWSERS)}, expected one: the report's page is tested in a browser. "
            "Next: apt-get install chromium, or: scripts/sandbox.py install --browser"
        )
        self.limit_s = limit_s
        ends = [os.pipe(), os.pipe()]
        # Above 9, so that the shell can move them to 3 and 4 without one taking the other's place.
        high = [[fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in pair] for pair in ends]
        for pair in ends:
            for end in pair:
                os.close(end)
        (told, self.out), (self.back, answers) = high
        self.log = (folder / "chromium.log").open("w")
        self.process = subprocess.Popen(
            [
                "bash",
                "-c",
                f'exec "$@" 3<&{told} 4>&{answers}',
                "bash",
                program,
                *QUIET,
                f"--user-data-dir={folder}/profile",
            ],
            pass_fds=(told, answers),
            stderr=self.log,
            stdout=self.log,
        )
        os.close(told)
        os.close(answers)
        os.set_blocking(self.back, False)
        self.number, self.buffer, self.events = 0, b"", []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = None
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def read(self, limit_s: float) -> dict | None:
        """The next message, None when there is none in time."""
        deadline = time.monotonic() + limit_s
        while b"\0" not in self.buffer:
            try:
                part = os.read(self.back, 1 << 20)
                assert part, f"Chromium went away: {Path(self.log.name).read_text()[-2000:]}"
                self.buffer += part
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.01)
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def call(self, method: str, **params) -> dict:
        """Call a method of the page, or of the browser before there is one."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if getattr(self, "session", None):
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.read(self.limit_s)
            assert answer is not None, f"{method}: no answer within {self.limit_s} s"
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def open(self, path: Path, width: int, dark: bool) -> list[str]:
        """Load a file at a width in one colour scheme; returns console messages, log entries and other requests."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.events.clear()
        own = path.resolve().as_uri()
        self.call("Page.navigate", url=own)
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            event = self.read(self.limit_s)
            assert event is not None, f"{path}: not loaded within {self.limit_s} s"
            self.events.append(event)
        while (event := self.read(0.3)) is not None:
            self.events.append(event)
        said = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                said.append(json.dumps(params))
            elif event.get("method") == "Network.requestWillBeSent" and params["request"]["url"] != own:
                said.append(f"request: {params['request']['url']}")
        return said

    def value(self, expression: str):
        """What a JavaScript expression gives in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path: Path) -> bytes:
        """The whole page as PNG, also written to `path`."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 8000), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path.read_bytes()

    def close(self) -> None:
        """End the browser."""
        os.close(self.out)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.back)
        self.log.close()
