"""The HTTP side: the real server's routes, bodies and status codes, over threads of the standard library."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Callable

from vllm import __version__
from vllm.fake import log, text, worker
from vllm.fake.answers import CLOSED, Job, Refusal, Request, Writer, bad, broken, chat_prompt

GUARDED = ("/v1", "/v2", "/inference", "/cohere")


@dataclass
class State:
    """What the routes need to know.

    `healthy` answers /health; `first` is called once, before the first completion is computed.
    """

    writer: Writer
    model: str
    keys: list[str]
    access_log: bool
    healthy: Callable[[], bool]
    first: Callable[[], None]
    loading: bool = False
    draining: bool = False
    born: int = field(default_factory=lambda: int(time.time()))
    lock: threading.Lock = field(default_factory=threading.Lock)
    seen: bool = False
    inflight: int = 0

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a request from before its first byte until after its last: a drain must see all of it."""
        with self.lock:
            self.inflight += 1
        try:
            yield
        finally:
            with self.lock:
                self.inflight -= 1

    def note_first(self) -> None:
        """Runs `first` for the first completion only."""
        with self.lock:
            again, self.seen = self.seen, True
        if not again:
            self.first()


def usage(request: Request) -> dict[str, Any]:
    """The token counts of a finished request."""
    done = sum(job.done for job in request.jobs)
    return {
        "prompt_tokens": request.prompt_tokens,
        "total_tokens": request.prompt_tokens + done,
        "completion_tokens": done,
    }


def finish(job: Job) -> str:
    """Why a sequence ended."""
    return "stop" if job.ended else "length"


def acceptance(request: Request, writer: Writer) -> dict[str, Any] | None:
    """What speculation did for a request of one sequence, where the server was started to say it."""
    if writer.spec is None or writer.detail == "none" or len(request.jobs) != 1:
        return None
    steps = [step for step in request.jobs[0].steps[: request.jobs[0].at] if step[0]]
    accepted = sum(step[1] for step in steps)
    told: dict[str, Any] = {
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": sum(step[0] for step in steps),
        "num_spec_tokens": writer.spec.num_speculative_tokens,
    }
    if writer.detail == "detailed" and steps:
        told.update(per_step_accepted=[step[1] for step in steps], per_step_drafted=[step[0] for step in steps])
    return {"speculative_decoding": told}


def cut(content: str, stops: list[str]) -> tuple[str, bool]:
    """The text before the earliest stop string, and whether there was one."""
    places = [at for at in (content.find(stop) for stop in stops if stop) if at >= 0]
    return (content[: min(places)], True) if places else (content, False)


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    state: State

    def version_string(self) -> str:
        """The Server header."""
        return "uvicorn"

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: log_request prints the access line, and errors of broken clients are no news."""

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """uvicorn's access line."""
        if self.state.access_log:
            host, port = self.client_address[:2]
            words = {200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed"}
            words.update({500: "Internal Server Error", 503: "Service Unavailable"})
            number = int(code)
            log.write(
                f'INFO:     {host}:{port} - "{self.command} {self.path} HTTP/1.1" {number} {words.get(number, "")}\n'
            )

    def reply(self, status: int, content: bytes, kind: str = "application/json") -> None:
        """A whole response."""
        self.send_response(status)
        if content or kind == "application/json":
            self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def reply_json(self, status: int, body: Any) -> None:
        """A JSON response, compact as the real one."""
        self.reply(status, json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode())

    def allowed(self) -> bool:
        """Checks the API key on guarded paths; answers 401 itself."""
        keys = self.state.keys
        if not keys or not self.path.startswith(GUARDED):
            return True
        given = self.headers.get("Authorization", "")
        if any(secrets.compare_digest(given.encode(), f"Bearer {key}".encode()) for key in keys):
            return True
        self.reply_json(401, {"error": "Unauthorized"})
        return False

    def do_GET(self) -> None:
        """Routes without a body."""
        state, path = self.state, self.path.split("?")[0]
        if not self.allowed():
            return
        if path in ("/health", "/ping"):
            self.reply(200 if state.healthy() else 503, b"", "text/plain")
        elif path == "/version":
            self.reply_json(200, {"version": __version__})
        elif path == "/metrics":
            self.reply(200, state.writer.metrics.page().encode(), "text/plain; version=1.0.0; charset=utf-8")
        elif path == "/load":
            self.reply_json(200, {"server_load": state.writer.metrics.running})
        elif path == "/v1/models":
            self.reply_json(200, self.models())
        else:
            self.reply_json(404, {"detail": "Not Found"})

    def models(self) -> dict[str, Any]:
        """The list of served names."""
        state = self.state
        common = {"object": "model", "created": state.born, "owned_by": "vllm", "root": state.model, "parent": None}
        rows = [
            {"id": name, **common, "max_model_len": state.writer.max_model_len, "permission": []}
            for name in state.writer.served
        ]
        return {"object": "list", "data": rows}

    def body(self) -> Any:
        """The request's JSON."""
        try:
            return json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        except ValueError as error:
            raise bad(f"Invalid JSON body: {error}") from error

    def do_POST(self) -> None:
        """Routes with a body."""
        path = self.path.split("?")[0]
        if not self.allowed():
            return
        try:
            if path == "/ping":
                self.reply(200 if self.state.healthy() else 503, b"", "text/plain")
            elif path == "/tokenize":
                self.tokenize()
            elif path == "/detokenize":
                self.reply_json(200, {"prompt": text.decode(self.body().get("tokens", []))})
            elif path == "/collective_rpc" and worker.has_endpoints():
                self.collective_rpc()
            elif path in ("/v1/completions", "/v1/chat/completions"):
                with self.state.counted():
                    self.complete(path == "/v1/chat/completions")
            else:
                self.reply_json(404, {"detail": "Not Found"})
        except Refusal as refusal:
            self.reply_json(refusal.status, refusal.body)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def tokenize(self) -> None:
        """Token ids of a prompt or of chat messages."""
        body = self.body()
        ids = text.encode(chat_prompt(body["messages"]) if body.get("messages") else str(body.get("prompt", "")))
        length = self.state.writer.max_model_len
        self.reply_json(200, {"count": len(ids), "max_model_len": length, "tokens": ids, "token_strs": None})

    def collective_rpc(self) -> None:
        """A method of the worker by its name; what it raises is a 500 with its text."""
        body = self.body()
        try:
            result = getattr(self.state.writer.worker, body["method"])(*body.get("args", []), **body.get("kwargs", {}))
        except Exception as error:
            said = f"Worker failed with error '{error}', please check the stack trace above for the root cause"
            raise broken(f"Call to collective_rpc method failed: {said}") from error
        self.reply_json(200, {"results": [result]})

    def complete(self, chat: bool) -> None:
        """A completion, streamed or whole."""
        state = self.state
        request = state.writer.parse(self.body(), chat)
        if state.draining:
            raise broken(CLOSED)
        if state.loading:
            state.writer.wait(float("inf"))  # bound too early: the request waits for an engine that is not there
        state.note_first()
        identity = ("chatcmpl-" if chat else "cmpl-") + secrets.token_hex(8)
        head = {"id": identity, "object": "", "created": int(time.time()), "model": state.writer.served[0]}
        steps = state.writer.generate(request)
        if request.stream:
            head["object"] = "chat.completion.chunk" if chat else "text_completion"
            self.stream(request, steps, head)
            return
        for _ in steps:
            pass
        head["object"] = "chat.completion" if chat else "text_completion"
        choices = [self.choice(request, index, job) for index, job in enumerate(request.jobs)]
        fingerprint = f"vllm-{__version__}"
        self.reply_json(200, {**head, "choices": choices, "system_fingerprint": fingerprint, "usage": usage(request)})

    @staticmethod
    def choice(request: Request, index: int, job: Job) -> dict[str, Any]:
        """One finished sequence."""
        content, stopped = cut(text.decode(job.out), request.stop)
        common: dict[str, Any] = {"index": index, "logprobs": None}
        common["finish_reason"], common["stop_reason"] = "stop" if stopped else finish(job), None
        common["token_ids"] = job.out if request.token_ids else None
        if request.chat:
            return {**common, "message": {"role": "assistant", "content": content, "refusal": None, "reasoning": None}}
        return {**common, "text": content, "prompt_token_ids": job.prompt if request.token_ids else None}

    def stream(self, request: Request, steps: Iterator[list[tuple[Job, list[int]]]], head: dict[str, Any]) -> None:
        """Server-sent events, one chunk per step; an error after the first chunk is an event, as the status is sent
        already.
        """
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        if request.chat:
            role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
            ids = {"prompt_token_ids": request.jobs[0].prompt} if request.token_ids else {}
            self.event({**head, "choices": [role], **ids})
        said: dict[int, int] = {}
        try:
            for new in steps:
                for job, ids in new:
                    index = request.jobs.index(job)
                    # cut by characters, not tokens: a token may end in the middle of one
                    whole = text.decode(job.out[: job.done])
                    part, said[index] = whole[said.get(index, 0) :], len(whole)
                    end = finish(job) if job.done >= len(job.out) else None
                    common: dict[str, Any] = {
                        "index": index,
                        "logprobs": None,
                        "finish_reason": end,
                        "stop_reason": None,
                    }
                    common["token_ids"] = ids if request.token_ids else None
                    said_here = {"delta": {"content": part}} if request.chat else {"text": part}
                    self.event({**head, "choices": [{**common, **said_here}]})
            if request.usage_in_stream:
                told = acceptance(request, self.state.writer)
                self.event({**head, "choices": [], "usage": usage(request), **({"metrics": told} if told else {})})
        except Refusal as refusal:
            self.event(refusal.body)
        self.chunk(b"data: [DONE]\n\n")
        self.chunk(b"")

    def event(self, body: dict[str, Any]) -> None:
        """One event."""
        self.chunk(f"data: {json.dumps(body, separators=(',', ':'), ensure_ascii=False)}\n\n".encode())

    def chunk(self, content: bytes) -> None:
        """One chunk of a chunked body; an empty one ends it."""
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        self.wfile.flush()


class Server(ThreadingHTTPServer):
    """Serves on a socket that was bound earlier."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, bound: socket.socket, state: State):
        handler = type("BoundHandler", (Handler,), {"state": state})
        super().__init__(bound.getsockname()[:2], handler, bind_and_activate=False)
        self.socket.close()
        self.socket = bound

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of the server; anything else is printed by the base class."""
        if not isinstance(sys.exc_info()[1], (BrokenPipeError, ConnectionResetError)):
            super().handle_error(request, client_address)

    def listen(self) -> None:
        """Takes connections; they wait for `start`."""
        self.socket.listen(2048)

    def start(self) -> None:
        """Listens and serves in a thread."""
        self.listen()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.5}, name="http", daemon=True).start()


def bound_socket(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet, as the real server has it during its whole load.

    Raises OSError when the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind((host, port))
    return made
