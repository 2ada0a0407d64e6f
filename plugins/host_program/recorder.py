"""`swapgate record`: ask an engine every prompt, greedily, one stream at a time; its answers are written token-exactly.

The request
    {"variant": an installed variant's name, "prompts": [{"id", "class", "messages", "max_tokens"}], "repeats": n,
     "settings": [null] | [{"name", "k", "min", "max"}, ...], "seed": n, "salt": str | null}
    ``settings`` are put in force by a trial unit before each request, in an order shuffled by ``seed`` within each
    prompt and repeat. With a ``salt`` no request finds the tokens of another in the prefix cache.
One line of the answer
    {"id", "class", "setting": name | null, "repeat": from 0, "prompt_token_ids", "output_token_ids", "text",
     "reasoning", "finish_reason", "ttft_s", "decode_s", "e2e_s", "output_tokens", "itl_s", "cpu_s": CPU seconds of the
     engine's workers over the decode | null, "steps", "drafted", "accepted": see answer_stream, "error": null}
    or {"id", "class", "setting", "repeat", "error": text} for a request that failed.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable

from ..module_utils import answer_stream, metrics, processes, records
from . import engine_api, installed

JsonDict = dict[str, Any]

FIRST_BYTE_LIMIT_S = 600.0
METRICS_LIMIT_S = 60.0  # an engine under load answers late, and that is no failure
TOGGLE_LIMIT_S = 30.0
COUNTED_WITHIN_S = 0.5
COUNTED_POLL_S = 0.02
TELL_S = 10.0
IN_A_ROW = 3
TOGGLE = "swapgate_set"
SALT = re.compile(r"[A-Za-z0-9._-]{1,64}")
REQUEST_KEYS = {"variant": str, "prompts": list, "repeats": int, "settings": list, "seed": int}
PROMPT_KEYS = {"id": str, "class": str, "messages": list, "max_tokens": int}
SETTING_KEYS = {"name": str, "k": int, "min": int, "max": int}


class RecordingFailed(Exception):
    """The engine stopped answering, or would not take a setting. What was recorded before stays on disk."""


def check_keys(value: Any, keys: dict[str, type], where: str) -> None:
    """RecordError unless ``value`` is an object with these keys, each of its type."""
    if not isinstance(value, dict):
        raise records.RecordError(f"{where}: found {type(value).__name__}, expected an object")
    for key, kind in keys.items():
        if not isinstance(value.get(key), kind) or isinstance(value.get(key), bool):
            raise records.RecordError(f"{where}: {key}: found {value.get(key)!r:.60}, expected {kind.__name__}")


def check_request(request: Any) -> None:
    """RecordError names what of a request is not of the shape that the module's text shows."""
    check_keys(request, REQUEST_KEYS, "request")
    if not request["prompts"] or request["repeats"] < 1 or not request["settings"]:
        raise records.RecordError("request: found no prompts, repeats or settings, expected at least one of each")
    for prompt in request["prompts"]:
        check_keys(prompt, PROMPT_KEYS, "request: prompts")
    if request["settings"] != [None]:
        for setting in request["settings"]:
            check_keys(setting, SETTING_KEYS, "request: settings")
    salt = request.get("salt")
    if salt is not None and not (isinstance(salt, str) and SALT.fullmatch(salt)):
        raise records.RecordError(f"request: salt: found {salt!r:.60}, expected null or up to 64 of A-Z a-z 0-9 . _ -")


class WorkerClock:
    """CPU seconds of an engine's worker processes so far, to the nanosecond; pre-emption by others is not in it."""

    def __init__(self, port: int, proc: str = "/proc") -> None:
        self._files: list[int] = []
        members: set[int] = set()
        for holder in processes.port_holders(port, proc):
            members |= {holder.pid, *processes.descendants(holder.pid, proc)}
        # Without workers of its own the engine core computes itself.
        for wanted in ("VLLM::Worker", "VLLM::EngineCor"):
            chosen = [pid for pid in members if self._name(pid, proc).startswith(wanted)]
            if chosen:
                break
        for pid in chosen:
            for task in Path(f"{proc}/{pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):
                    self._files.append(os.open(task, os.O_RDONLY))

    @staticmethod
    def _name(pid: int, proc: str) -> str:
        try:
            return Path(f"{proc}/{pid}/comm").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def read(self) -> float | None:
        """Seconds, or None where no worker can be seen."""
        total, seen = 0, False
        for file in self._files:
            with contextlib.suppress(OSError, ValueError, IndexError):
                total += int(os.pread(file, 64, 0).split()[0])
                seen = True
        return total / 1e9 if seen else None

    def close(self) -> None:
        """Close the kernel's files."""
        for file in self._files:
            os.close(file)
        self._files = []


class Recorder:
    """One engine, asked over one connection at a time."""

    def __init__(self, variant: JsonDict, api_key: str | None) -> None:
        self.variant, self.api_key = variant, api_key
        self.bind, self.port = variant["bind"], int(variant["port"])
        self.clock = WorkerClock(self.port)
        self.setting: JsonDict | None = None
        # Speculation that is off has no such metric, and then every step yields one token.
        self.speculates = metrics.acceptance(engine_api.samples(self.bind, self.port, METRICS_LIMIT_S)) is not None

    def put(self, setting: JsonDict | None) -> None:
        """Have a trial unit's workers take ``setting``; RecordingFailed unless every one of them says that it did."""
        if setting is None or setting == self.setting:
            return
        wanted = {key: setting[key] for key in ("k", "min", "max")}
        body = {"method": TOGGLE, "kwargs": wanted, "timeout": TOGGLE_LIMIT_S}
        try:
            text = engine_api.request(
                self.bind, self.port, "POST", "/collective_rpc", body, self.api_key, TOGGLE_LIMIT_S
            )
            found = json.loads(text)["results"]
        except (engine_api.EngineError, ValueError, KeyError) as error:
            raise RecordingFailed(
                f"setting {setting['name']}: {error}. Only a trial unit can change it while it serves."
            ) from error
        if not found or any(not isinstance(one, dict) or wanted.items() - one.items() for one in found):
            raise RecordingFailed(f"setting {setting['name']}: found {found!r:.200}, expected {wanted} of every worker")
        self.setting = setting

    def _counts(self) -> tuple[float, float]:
        """Requests that ended and draft tokens that were accepted, over the engine's life."""
        page = engine_api.samples(self.bind, self.port, METRICS_LIMIT_S)
        names = ("vllm:request_success_total", "vllm:spec_decode_num_accepted_tokens_total")
        ended, accepted = (metrics.total(page, name) or 0.0 for name in names)
        return ended, accepted

    def _accepted(self, before: tuple[float, float]) -> int | None:
        """Draft tokens accepted by the engine's counters; None when somebody else's request was counted too."""
        deadline = time.monotonic() + COUNTED_WITHIN_S
        now = before
        while now[0] == before[0] and time.monotonic() < deadline:
            now = self._counts()
            if now[0] == before[0]:
                time.sleep(COUNTED_POLL_S)
        return int(now[1] - before[1]) if now[0] - before[0] == 1 else None

    def ask(self, prompt: JsonDict, salt: str | None) -> JsonDict:
        """The answer to one prompt; StreamError or EngineError when there is none."""
        body = {
            "model": self.variant["model"]["served_name"],
            "messages": prompt["messages"],
            "max_tokens": prompt["max_tokens"],
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if salt:
            body["cache_salt"] = salt
        before = self._counts() if self.speculates else (0.0, 0.0)
        stream, started, cpu = self._stream(body)
        answer = stream.result(started)
        if not self.speculates:
            answer["steps"] = answer["output_tokens"] - 1
        elif answer["steps"] is None:
            accepted = self._accepted(before)
            if accepted is not None:
                answer["steps"] = answer_stream.decode_steps(answer["output_tokens"], accepted, len(stream.times))
        return dict(answer, cpu_s=cpu)

    def _stream(self, body: JsonDict) -> tuple[answer_stream.AnswerStream, float, float | None]:
        path = "/v1/chat/completions"
        connection = engine_api.connect(self.bind, self.port, FIRST_BYTE_LIMIT_S)
        stream = answer_stream.AnswerStream()
        cpu_first = None
        try:
            connection.connect()  # not part of anyone's time to first token
            started = time.monotonic()
            connection.request("POST", path, json.dumps(body), engine_api.headers(self.api_key))
            answer = connection.getresponse()
            if answer.status != http.client.OK:
                text = answer.read().decode("utf-8", "replace")
                raise engine_api.EngineError(f"POST {path}: status {answer.status}: {text.strip():.200}")
            while not stream.ended:
                line = answer.readline()
                at = time.monotonic()
                if not line:
                    break
                stream.feed(line.decode("utf-8", "replace"), at)
                if cpu_first is None and stream.first_at is not None:
                    cpu_first = self.clock.read()
            cpu_last = self.clock.read()
        except (OSError, http.client.HTTPException) as error:
            raise engine_api.EngineError(f"POST {path}: {error or type(error).__name__}") from error
        finally:
            connection.close()
        known = cpu_first is not None and cpu_last is not None
        return stream, started, cpu_last - cpu_first if known else None  # type: ignore[operator]


def plan(request: JsonDict) -> Iterator[tuple[int, JsonDict, JsonDict | None, str | None]]:
    """(repeat, prompt, setting, salt) of every request, in order."""
    number = 0
    for repeat in range(request["repeats"]):
        for prompt in request["prompts"]:
            settings = list(request["settings"])
            random.Random(f"{request['seed']}/{repeat}/{prompt['id']}").shuffle(settings)
            for setting in settings:
                yield repeat, prompt, setting, f"{request['salt']}-{number}" if request.get("salt") else None
                number += 1


def record(
    layout: records.Layout,
    request: JsonDict,
    out: Path,
    say: Callable[[str], None],
    limit_s: float = 14_400.0,
    count: Callable[[int, int, float], None] = lambda _number, _total, _seconds: None,
) -> int:
    """Carry out the request, each line on disk before the next is asked; returns how many requests failed.

    ``count`` is told now and then how many are done, of how many, in how many seconds.

    RecordError for a request that is not one, RecordingFailed when the engine is gone or ``limit_s`` is over.
    """
    check_request(request)
    recorder = Recorder(installed.named(layout, request["variant"]), installed.api_key(layout))
    total = request["repeats"] * len(request["prompts"]) * len(request["settings"])
    begun = told = time.monotonic()
    failed = in_a_row = 0
    try:
        with out.open("w", encoding="utf-8") as file:
            for number, (repeat, prompt, setting, salt) in enumerate(plan(request), 1):
                if time.monotonic() - begun > limit_s:
                    raise RecordingFailed(f"no end within {limit_s:.0f} s: {number - 1} of {total} requests recorded")
                line = {"id": prompt["id"], "class": prompt["class"], "setting": (setting or {}).get("name")}
                line.update(repeat=repeat, error=None)
                try:
                    recorder.put(setting)
                    line.update(recorder.ask(prompt, salt))
                    in_a_row = 0
                except (engine_api.EngineError, answer_stream.StreamError) as error:
                    line["error"] = str(error)
                    failed, in_a_row = failed + 1, in_a_row + 1
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
                file.flush()
                if in_a_row == IN_A_ROW:
                    raise RecordingFailed(f"{IN_A_ROW} requests in a row failed, the last with: {line['error']}")
                now = time.monotonic()
                if now - told > TELL_S or number == total:
                    told = now
                    count(number, total, now - begun)
                    say(f"recorded {number} of {total}, {(now - begun) / number * (total - number):.0f} s left")
    finally:
        recorder.clock.close()
    return failed
