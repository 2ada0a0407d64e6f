"""What a step costs that verifies drafts, measured on an engine that has no speculation: `swapgate probe`.

A step with d drafts computes 1 + d tokens. Four kinds of requests, all through the public API, let a plain engine
compute b tokens in one step:

    independent     b different texts in one request body, which the engine decodes in lock-step
    duplicate       one text b times: on a mixture of experts the least that b tokens can cost, one token's experts
    staircase       one text cut at n, n + 1, ...: every step holds b ADJACENT tokens of one text, as verifying does
    suffix-prefill  a cached prefix and b new tokens of one text: the prefill path, where some attention kernels verify

Every run of b stands between two single-stream runs, so that a host that drifts does not pass for a cost. Runs are kept
raw; `scripts/predict.py` makes the curve T(b)/T(1) of them. Answers are not read and go on past their end
(`ignore_eos`): fine for the cost of a step, never for acceptance.

REQUEST
    {"variant": name of an installed variant, "texts": [[token id, ...], ...]: recorded prompts with their answers,
     "batch": [2, 3, ...], "later": [12, ...]: b that get what time is left once every repeat of the batch is done ([]),
     "kinds": [...] (default: all), "repeats": n (3), "tokens": decode steps of a run (32), "context": tokens before the
     cut, at most (384), "max_minutes": m (5), "seed": n (1)}
RESULT
    {"schema": 1, "variant", "unit", "served_name", "engine_version", "block_size", "prefix_caching", "started_unix",
     "ended_unix", "asked": REQUEST without texts, "runs": [RUN], "stopped": null | why it ended early,
     "absent": {kind: why it could not be probed}, "experts": null | {"per_layer", "per_token"}, "cpus", "load_average"}
RUN
    {"kind", "repeat", "group": runs of one group follow each other, "b", "ok", "why": null | text,
     "steps", "wall_s": client's seconds over `steps` steps, "engine_s": engine's own seconds of one step | null,
     "engine_steps": | null, "thread_s": CPU seconds of the busiest engine thread over `steps` | null, "cpu_s": of all}
    suffix-prefill: "steps" is the number of requests, "engine_s" the engine's seconds of one prefill.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..module_utils import metrics, records
from . import engine_api, installed, systemd

JsonDict = dict[str, Any]
KINDS = ("independent", "duplicate", "staircase", "suffix-prefill")
DEFAULTS: JsonDict = {
    "later": [],
    "kinds": list(KINDS),
    "repeats": 3,
    "tokens": 32,
    "context": 384,
    "max_minutes": 5,
    "seed": 1,
}
LIMIT_S = 120.0
SETTLE_S = 2.0
QUIET_S = 20.0
LATE = 0.02
# One prefill is one step: a run of this kind is so many of them.
PREFILLS = 6
LARGEST = 256
WATCHED = {
    "decode_s": "vllm:request_decode_time_seconds_sum",
    "prefill_s": "vllm:request_prefill_time_seconds_sum",
    "steps": "vllm:iteration_tokens_total_count",
    "generated": "vllm:generation_tokens_total",
    "finished": "vllm:request_success_total",
    "hits": "vllm:prefix_cache_hits_total",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "drafted_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}


class ProbeError(Exception):
    """The probe cannot be made; the text says what, found against expected, and what to do."""


class Traffic(Exception):
    """Others are being served; the probe ends and keeps what it has."""


class Engine:
    """One serving engine, asked one request at a time. ``members`` names the processes whose CPU time counts."""

    def __init__(
        self, bind: str, port: int, served_name: str, api_key: str | None, members: Callable[[], Sequence[int]]
    ) -> None:
        self.bind, self.port, self.served_name, self.members = bind, port, served_name, members
        self.headers = engine_api.headers(api_key)
        self.connection = engine_api.connect(bind, port, LIMIT_S)

    def counters(self) -> JsonDict:
        """The watched figures of the metrics page; None where the page has them not."""
        samples = engine_api.samples(self.bind, self.port)
        return {key: metrics.total(samples, name) for key, name in WATCHED.items()}

    def facts(self) -> JsonDict:
        """{"block_size", "prefix_caching", "engine_version"}, None where the engine does not say."""
        labels: JsonDict = {}
        for name, found, _ in engine_api.samples(self.bind, self.port):
            if name == "vllm:cache_config_info":
                labels = found
        size = labels.get("block_size", "")
        caching = labels.get("enable_prefix_caching")
        version = None
        with contextlib.suppress(engine_api.EngineError, ValueError, AttributeError):
            version = json.loads(engine_api.request(self.bind, self.port, "GET", "/version")).get("version")
        return {
            "block_size": int(size) if size.isdigit() else None,
            "prefix_caching": None if caching is None else caching == "True",
            "engine_version": version,
        }

    def cpu(self) -> dict[tuple[int, int], float]:
        """CPU seconds so far of each thread, by (process, thread)."""
        found = {}
        for pid in self.members():
            with contextlib.suppress(OSError):
                for tid in os.listdir(f"/proc/{pid}/task"):
                    with contextlib.suppress(OSError, ValueError, IndexError):
                        text = Path(f"/proc/{pid}/task/{tid}/schedstat").read_text(encoding="ascii")
                        found[pid, int(tid)] = int(text.split()[0]) / 1e9
        return found

    def stream(self, prompts: Sequence[Sequence[int]], tokens: int) -> JsonDict:
        """``tokens`` tokens after each prompt at once; times from when all have begun until the first is done."""
        body = {
            "model": self.served_name,
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        counts = [0] * len(prompts)
        begun: tuple[float, list[int], dict[tuple[int, int], float], float] | None = None
        ended: tuple[float, int, dict[tuple[int, int], float], float] | None = None
        # A server closes a connection that was idle for some seconds; times begin at the first token.
        self.connection.close()
        try:
            self.connection.request("POST", "/v1/completions", json.dumps(body), self.headers)
            answer = self.connection.getresponse()
            if answer.status != http.HTTPStatus.OK:
                raise ProbeError(f"POST /v1/completions: status {answer.status}: {answer.read()!r:.300}")
            for raw in answer:
                if not raw.startswith(b"data: {"):
                    continue
                at = time.monotonic()
                line = json.loads(raw[6:])
                if "choices" not in line:
                    raise ProbeError(f"POST /v1/completions: found {line!r:.200}, expected choices")
                for choice in line["choices"]:
                    index = choice["index"]
                    counts[index] += len(choice["token_ids"]) if choice.get("token_ids") else 1
                    if ended is None and counts[index] >= tokens:
                        ended = (at, index, self.cpu(), time.monotonic())
                if begun is None and min(counts) > 0:
                    begun = (at, list(counts), self.cpu(), time.monotonic())
        except (OSError, http.client.HTTPException, ValueError, KeyError, IndexError, TypeError) as error:
            self.connection.close()
            raise ProbeError(
                f"POST /v1/completions: {error or type(error).__name__}; does the engine serve?"
            ) from error
        if min(counts) < tokens or begun is None or ended is None:
            raise ProbeError(f"POST /v1/completions: found {counts} tokens, expected {tokens} in each answer")
        steps = tokens - begun[1][ended[1]]
        wall = ended[0] - begun[0]
        # Who was kept waiting between the clock and the threads' clocks has timed two different spans.
        late = max(begun[3] - begun[0], ended[3] - ended[0]) > LATE * wall
        spent = [ended[2][key] - before for key, before in begun[2].items() if key in ended[2]]
        return {"steps": steps, "wall_s": round(wall, 6), **busy([] if late else spent)}

    def close(self) -> None:
        """End the connection."""
        self.connection.close()


def busy(spent: Sequence[float]) -> JsonDict:
    """CPU seconds of the busiest thread and of all; None where they are not known."""
    known = bool(spent) and max(spent) > 0
    return {"thread_s": round(max(spent), 6) if known else None, "cpu_s": round(sum(spent), 6) if known else None}


def members_of(unit: str) -> list[int]:
    """The processes of a unit."""
    group = systemd.show(unit, "ControlGroup").get("ControlGroup", "")
    found: list[int] = []
    for file in Path("/sys/fs/cgroup" + group).rglob("cgroup.procs") if group else []:
        with contextlib.suppress(OSError, ValueError):
            found += [int(line) for line in file.read_text(encoding="ascii").split()]
    return found


def asked(request: JsonDict) -> JsonDict:
    """The request with its defaults; ProbeError names what is wrong in it."""
    unknown = sorted(set(request) - {"variant", "texts", "batch", *DEFAULTS})
    if unknown:
        raise ProbeError(
            f"request: found {', '.join(unknown)}, expected variant, texts, batch, {', '.join(DEFAULTS)}. If this "
            "host's program is older than the repository, the next deploy renews it"
        )
    found = {**DEFAULTS, **request}
    texts, batch = found.get("texts"), found.get("batch")
    if not isinstance(texts, list) or not texts or any(not isinstance(text, list) or len(text) < 8 for text in texts):
        raise ProbeError(
            "request: texts: expected recorded texts of at least 8 token ids each; record some answers first"
        )
    for name, some in (("batch", batch), ("later", found["later"])):
        if not isinstance(some, list) or any(type(b) is not int or not 2 <= b <= LARGEST for b in some):
            raise ProbeError(f"request: {name}: found {some!r:.60}, expected whole numbers from 2 to {LARGEST}")
    if not batch:
        raise ProbeError("request: batch: found none, expected k + 1 of each setting")
    wrong = sorted(set(found["kinds"]) - set(KINDS))
    if wrong:
        raise ProbeError(f"request: kinds: found {', '.join(wrong)}, expected some of {', '.join(KINDS)}")
    for name in ("repeats", "tokens", "context", "max_minutes"):
        if not isinstance(found[name], (int, float)) or found[name] <= 0:
            raise ProbeError(f"request: {name}: found {found[name]!r}, expected a number above 0")
    if found["tokens"] < 8:
        raise ProbeError(f"request: tokens: found {found['tokens']}, expected at least 8 steps")
    return found


def prompts_of(kind: str, b: int, texts: Sequence[Sequence[int]], first: int, context: int) -> list[list[int]]:
    """The b prompts of a run: the text at index ``first``, and for ``independent`` the b - 1 after it.

    Texts are cut at three quarters, behind at most ``context`` tokens; a staircase goes up from there. The single run
    of every kind is b=1.
    """

    def cut(index: int, more: int) -> list[int]:
        text = texts[index % len(texts)]
        end = max(4, min(len(text) - max(b - 1, 1), len(text) * 3 // 4))
        return list(text[max(0, end - context) : end + more])

    if kind == "independent":
        return [cut(first + i, 0) for i in range(b)]
    return [cut(first, i if kind == "staircase" else 0) for i in range(b)]


def fitting(kind: str, batch: Sequence[int], texts: Sequence[Sequence[int]], block_size: int | None) -> list[int]:
    """The b of the batch that a kind can be probed at with these texts."""
    if kind == "independent":
        return [b for b in batch if b <= len(texts)]
    if kind == "suffix-prefill":
        return [b for b in batch if block_size and b < block_size]
    return list(batch)


def quiet(counters: JsonDict) -> bool:
    """Whether nobody is being served."""
    return not (counters["running"] or 0) and not (counters["waiting"] or 0)


class Probe:
    """All runs of one request against one engine."""

    def __init__(self, engine: Engine, wanted: JsonDict, say: Callable[[str], None]) -> None:
        self.engine, self.wanted, self.say = engine, wanted, say
        self.random = random.Random(wanted["seed"])
        self.facts = engine.facts()
        self.runs: list[JsonDict] = []
        self.absent: dict[str, str] = {}
        self.began = time.monotonic()

    def settled(self, before: JsonDict, requests: int) -> JsonDict:
        """The counters once the engine has counted our own requests."""
        end = time.monotonic() + SETTLE_S
        now = self.engine.counters()
        while time.monotonic() < end and (now["finished"] or 0) - (before["finished"] or 0) < requests:
            time.sleep(0.02)
            now = self.engine.counters()
        return now

    def calm(self) -> JsonDict:
        """Counters of an engine that serves nobody; Traffic when it does not come to rest."""
        end = time.monotonic() + QUIET_S
        counters = self.engine.counters()
        while not quiet(counters):
            if time.monotonic() > end:
                raise Traffic(
                    f"others are being served ({counters['running']:g} requests running, {counters['waiting'] or 0:g} "
                    f"waiting for {QUIET_S:g} s): timings would be theirs too. Probe at a quiet time"
                )
            time.sleep(0.2)
            counters = self.engine.counters()
        return counters

    def run(self, kind: str, b: int, first: int) -> JsonDict:
        """One run: b tokens a step."""
        wanted = self.wanted
        tokens = wanted["tokens"]
        before = self.calm()
        if kind == "suffix-prefill":
            requests, steps, found = PREFILLS, PREFILLS, self.prefills(b, first)
            generated = PREFILLS
        else:
            prompts = prompts_of(kind, b, wanted["texts"], first, wanted["context"])
            requests, steps, generated = b, b * (tokens - 1), b * tokens
            found = self.engine.stream(prompts, tokens)
        after = self.settled(before, requests)
        gone = {key: None if after[key] is None or before[key] is None else after[key] - before[key] for key in WATCHED}
        spent = gone["prefill_s" if kind == "suffix-prefill" else "decode_s"]
        found["engine_s"] = None if spent is None else round(spent / steps, 9)
        found["engine_steps"] = None if gone["steps"] is None else int(gone["steps"])
        why = None
        if gone["finished"] is not None and gone["finished"] != requests:
            why = f"{gone['finished']:g} requests ended, expected our {requests}: others were served"
        elif gone["generated"] is not None and gone["generated"] != generated:
            why = f"{gone['generated']:g} tokens were generated, expected our {generated}: others were served"
        elif gone["drafts"]:
            why = "the engine drafted: speculation is on, its steps are not plain"
        elif found["steps"] < (1 if kind == "suffix-prefill" else tokens // 2):
            why = f"only {found['steps']} of {tokens} steps held all {b}: more than the engine runs at once?"
        elif kind == "suffix-prefill" and gone["hits"] is not None and gone["hits"] < requests:
            why = "the prefix was not found in the cache"
        found.update(ok=why is None, why=why)
        return found

    def prefills(self, b: int, first: int) -> JsonDict:
        """Some requests of one token each, of b new tokens behind a cached prefix."""
        text = self.wanted["texts"][first % len(self.wanted["texts"])]
        block = self.facts["block_size"]
        edge = min(len(text) - b, self.wanted["context"]) // block * block
        began, cpu = time.monotonic(), self.engine.cpu()
        for _ in range(PREFILLS):
            self.engine.stream([text[: edge + b]], 1)
        spent = [after - cpu[key] for key, after in self.engine.cpu().items() if key in cpu]
        return {"steps": PREFILLS, "wall_s": round(time.monotonic() - began, 6), **busy(spent)}

    def texts_for(self, kind: str, highest: int) -> list[int]:
        """Indices of texts that a kind can use."""
        texts = self.wanted["texts"]
        if kind != "suffix-prefill":
            return list(range(len(texts)))
        block = self.facts["block_size"] or 0
        return [i for i, text in enumerate(texts) if block and len(text) >= block + highest + 1]

    def group(self, kind: str, repeat: int, number: int, batch: Sequence[int], pool: Sequence[int]) -> None:
        """Runs of one kind with one text: 1, b, 1, b', 1, ... in an order of its own."""
        order = list(batch)
        self.random.shuffle(order)
        first = pool[(repeat * 7 + self.wanted["seed"]) % len(pool)]
        for b in sorted({1, *batch}) if kind != "suffix-prefill" else (1,):
            # Prefill caches and kernels of these very prompts, so that no run pays for them.
            if kind == "suffix-prefill":
                self.prefills(b, first)
            else:
                prompts = prompts_of(kind, b, self.wanted["texts"], first, self.wanted["context"])
                self.engine.stream(prompts, 2)
        for b in [1, *(one for more in order for one in (more, 1))]:
            if time.monotonic() - self.began > 60 * self.wanted["max_minutes"]:
                raise Traffic(f"{self.wanted['max_minutes']:g} minutes are over (max_minutes)")
            self.runs.append({"kind": kind, "repeat": repeat, "group": number, "b": b, **self.run(kind, b, first)})

    def all(self) -> str | None:
        """Every run that was asked for; returns why it ended early, or None."""
        groups: list[tuple[str, int, list[int], list[int]]] = []
        first = 0  # group of the later b
        for name in ("batch", "later"):
            pools = self.pools(name)
            repeats = range(int(self.wanted["repeats"]))
            groups += [(kind, repeat, *pools[kind]) for repeat in repeats for kind in pools]
            first = first or len(groups)
        total = sum(2 * len(batch) + 1 for _, _, batch, _ in groups)
        try:
            for number, (kind, repeat, batch, pool) in enumerate(groups):
                self.group(kind, repeat, number, batch, pool)
                spent, done = time.monotonic() - self.began, len(self.runs)
                left = min(spent / done * (total - done), max(0.0, 60 * self.wanted["max_minutes"] - spent))
                self.say(f"probed {done} of {total} runs, {kind}, {left:.0f} s left")
        except Traffic as stop:
            grid = sum(2 * len(batch) + 1 for _, _, batch, _ in groups[:first])
            whole = "; every run of the batch is there, of the later b some" if len(self.runs) >= grid else ""
            self.say(f"probed {len(self.runs)} of {total} runs: {stop}{whole}")
            return f"{stop}{whole}"
        return None

    def pools(self, name: str) -> dict[str, tuple[list[int], list[int]]]:
        """By kind that can be probed: the b of ``batch`` or ``later``, and the indices of the texts for it."""
        wanted, found = self.wanted, {}
        for kind in wanted["kinds"] if wanted[name] else ():
            batch = fitting(kind, sorted(set(wanted[name])), wanted["texts"], self.facts["block_size"])
            pool = self.texts_for(kind, max(batch, default=1))
            if name == "later":
                # Many streams at once decode; a prefill of so many tokens says nothing of them.
                if batch and pool and kind != "suffix-prefill":
                    found[kind] = (batch, pool)
            elif kind == "suffix-prefill" and self.facts["prefix_caching"] is False:
                self.absent[kind] = "prefix caching is off"
            elif not batch or not pool:
                self.absent[kind] = "no text is long enough" if batch else "no b of the batch fits the texts given"
            else:
                found[kind] = (batch, pool)
        return found


def experts_of(model: str | None) -> JsonDict | None:
    """{"per_layer", "per_token"} of a mixture of experts, from the model's config.json; None: dense, or not known."""
    config = records.read_if_there(Path(model) / "config.json") if model else None
    for part in ((config or {}).get("text_config"), config):
        if isinstance(part, dict):
            count = next(
                (part[k] for k in ("num_experts", "n_routed_experts", "num_local_experts") if part.get(k)), None
            )
            if isinstance(count, int) and count > 1:
                return {"per_layer": count, "per_token": part.get("num_experts_per_tok")}
    return None


def probe(engine: Engine, request: JsonDict, say: Callable[[str], None], model: str | None = None) -> JsonDict:
    """The RESULT of a request. ProbeError where nothing could be measured."""
    wanted = asked(request)
    started = time.time()
    one = Probe(engine, wanted, say)
    first = engine.counters()
    if first["drafts"] is not None:
        raise ProbeError("this engine has speculation on: probe the plain baseline, whose steps are plain")
    if not quiet(first):
        raise ProbeError(
            f"others are being served ({first['running']:g} requests running): the probe would slow them down and "
            "measure them too. Probe at a quiet time"
        )
    stopped = one.all()
    if not any(run["ok"] and run["b"] > 1 for run in one.runs):
        reasons = sorted({run["why"] for run in one.runs if run["why"]} | set(one.absent.values()))
        raise ProbeError(f"no run can be used: {stopped or '; '.join(reasons)}")
    return {
        "schema": 1,
        "variant": wanted.get("variant"),
        "served_name": engine.served_name,
        **one.facts,
        "experts": experts_of(model),
        "started_unix": round(started, 3),
        "ended_unix": round(time.time(), 3),
        "cpus": os.cpu_count(),
        "load_average": list(os.getloadavg()),
        "asked": {key: value for key, value in wanted.items() if key != "texts"},
        "runs": one.runs,
        "stopped": stopped,
        "absent": one.absent,
    }


def command(layout: records.Layout, request_file: str, out_file: str, say: Callable[[str], None]) -> int:
    """`swapgate probe REQUEST.json OUT.json`; OUT is readable by its owner only. Returns the exit code."""
    request = records.read_json(Path(request_file))
    name = request.get("variant") if isinstance(request, dict) else None
    if not isinstance(name, str):
        raise records.RecordError(f"{request_file}: found no variant, expected an object with one")
    variant = installed.named(layout, name)
    key = installed.api_key(layout)
    unit = variant["unit"]
    model = variant["model"]
    engine = Engine(variant["bind"], variant["port"], model["served_name"], key, lambda: members_of(unit))
    try:
        result = probe(engine, request, say, model.get("path"))
    except (ProbeError, engine_api.EngineError) as error:
        say(f"swapgate probe: {name}: {error}")
        return 1
    finally:
        engine.close()
    records.write_json(Path(out_file), {**result, "unit": unit}, 0o600)
    return 0
