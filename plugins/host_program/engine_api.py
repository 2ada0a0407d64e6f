"""The engine over HTTP: a completion, the metrics page, and whether it is really ours that answers."""

from __future__ import annotations

import collections
import http.client
import json
import socket
from typing import Any

from ..module_utils import metrics

# A question with one right continuation: greedy, so that a model gives the same answer each time.
PROBE_PROMPT = "The capital of France is"
PROBE_TOKENS = 8


# What the engine's access log prints for each of this process's latest requests, as far as its own socket tells.
asked: collections.deque[bytes] = collections.deque(maxlen=32)


class EngineError(Exception):
    """The engine did not answer as it should; the text says what came instead."""


class EngineSilent(EngineError):
    """No answer within the limit: a dead engine, or one with much to do."""


def address(bind: str) -> str:
    """Where an engine that listens on ``bind`` is reached from this host."""
    return "127.0.0.1" if bind in ("0.0.0.0", "::", "") else bind


def connect(bind: str, port: int, limit_s: float) -> http.client.HTTPConnection:
    """A connection to the engine on this host, not open yet; ``limit_s`` bounds each wait for bytes."""
    return http.client.HTTPConnection(address(bind), port, timeout=limit_s)


def headers(api_key: str | None) -> dict[str, str]:
    """Of a request with a JSON body."""
    return {"Content-Type": "application/json", **({"Authorization": "Bearer " + api_key} if api_key else {})}


def request(
    bind: str,
    port: int,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    api_key: str | None = None,
    limit_s: float = 10.0,
) -> str:
    """The body of one answer; EngineError on anything but status 200. ``limit_s`` bounds each wait for bytes."""
    connection = connect(bind, port, limit_s)
    try:
        connection.connect()
        own, its_port = connection.sock.getsockname()[:2]
        asked.append(f'{own}:{its_port} - "{method} {path} HTTP/1.1" 200'.encode())
        connection.request(method, path, json.dumps(body) if body is not None else None, headers(api_key))
        answer = connection.getresponse()
        text = answer.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException) as error:
        # Before Python 3.10 a socket's time limit is an error of its own.
        kind = EngineSilent if isinstance(error, (TimeoutError, socket.timeout)) else EngineError
        raise kind(f"{method} {path}: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if answer.status != http.HTTPStatus.OK:
        raise EngineError(f"{method} {path}: status {answer.status}: {text.strip():.200}")
    return text


def complete(
    bind: str,
    port: int,
    served_name: str,
    max_tokens: int = PROBE_TOKENS,
    prompt: str = PROBE_PROMPT,
    api_key: str | None = None,
    limit_s: float = 60.0,
) -> str:
    """The text of one greedy completion. An answer without a single token is an EngineError."""
    body = {"model": served_name, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "seed": 0}
    text = request(bind, port, "POST", "/v1/completions", body, api_key, limit_s)
    try:
        answer = json.loads(text)
        written = str(answer["choices"][0]["text"])
        tokens = int(answer["usage"]["completion_tokens"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise EngineError(f"POST /v1/completions: not a completion: {text:.200}") from error
    if tokens < 1:
        raise EngineError("POST /v1/completions: an answer without a token")
    return written


def served_names(bind: str, port: int, api_key: str | None = None, limit_s: float = 10.0) -> list[str]:
    """The model names that the server answers to."""
    text = request(bind, port, "GET", "/v1/models", None, api_key, limit_s)
    try:
        return [str(model["id"]) for model in json.loads(text)["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"GET /v1/models: not a list of models: {text:.200}") from error


def samples(bind: str, port: int, limit_s: float = 5.0) -> list[metrics.Sample]:
    """The metrics page, parsed."""
    return metrics.parse(request(bind, port, "GET", "/metrics", limit_s=limit_s))


def load(bind: str, port: int, limit_s: float) -> dict[str, float | None] | None:
    """metrics.load of the server's page; None when that does not come."""
    try:
        return metrics.load(samples(bind, port, limit_s))
    except EngineError:
        return None
