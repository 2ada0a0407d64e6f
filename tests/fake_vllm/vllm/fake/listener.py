"""A foreign server: answers 200 with an empty object to everything."""

from __future__ import annotations

import os
import signal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NoReturn

from vllm.fake.engine import ORPHAN_LIMIT_S


class Yes(BaseHTTPRequestHandler):
    """Says yes."""

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        """200 and an empty object."""
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    do_POST = do_GET


def run(host: str, port: int) -> NoReturn:
    """Serves for ORPHAN_LIMIT_S seconds at most, so that an interrupted test leaves nothing for ever; SIGTERM ends
    it.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.alarm(ORPHAN_LIMIT_S)
    ThreadingHTTPServer((host, port), Yes).serve_forever()
    os._exit(0)
