"""From a request body to timed tokens: parsing, the engine's refusals, and the decode steps with their pace."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from vllm.fake import text
from vllm.fake.knobs import Knobs
from vllm.fake.metrics import Metrics
from vllm.fake.speculative import SpeculativeConfig

DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
CLOSED = "cannot schedule new futures after shutdown"


class Refusal(Exception):
    """A request that is answered with an error: HTTP status, the engine's error type, its text, the parameter at
    fault.
    """

    def __init__(self, status: int, kind: str, message: str, param: str | None = None):
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}


def bad(message: str, param: str | None = None) -> Refusal:
    """A 400."""
    return Refusal(400, "BadRequestError", message, param)


def broken(message: str = DEAD) -> Refusal:
    """A 500, as from a dead engine."""
    return Refusal(500, "InternalServerError", message)


@dataclass(eq=False)  # two jobs of one prompt are two
class Job:
    """One sequence: its prompt, what it will say, and its decode steps as (drafted, accepted)."""

    prompt: list[int]
    out: list[int]
    ended: bool
    steps: list[tuple[int, int]]
    done: int = 0
    at: int = 0

    def advance(self) -> list[int]:
        """Token ids of the next step: one from prefill first, then one plus the accepted ones per step."""
        if self.done == 0:
            count = 1
        else:
            count = 1 + self.steps[self.at][1] if self.at < len(self.steps) else len(self.out) - self.done
            self.at += 1
        new = self.out[self.done : self.done + count]
        self.done += len(new)
        return new


@dataclass
class Request:
    """A parsed request."""

    jobs: list[Job]
    stream: bool
    usage_in_stream: bool
    token_ids: bool
    chat: bool
    stop: list[str] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(len(job.prompt) for job in self.jobs)


def chat_prompt(messages: Any) -> str:
    """The chat template: role and text of each message."""
    if not isinstance(messages, list) or not messages:
        raise bad("messages must be a list with at least one message", "messages")
    parts = []
    for message in messages:
        content = message.get("content") or "" if isinstance(message, dict) else ""
        if isinstance(content, list):
            content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
        role = message.get("role", "user") if isinstance(message, dict) else "user"
        parts.append(f"<|im_start|>{role}\n{content}<|im_end|>\n")
    return "".join(parts) + "<|im_start|>assistant\n"


def prompts_of(body: dict[str, Any]) -> list[list[int]]:
    """Token ids of each prompt: a text, texts, ids, or lists of ids."""
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [text.encode(prompt)]
    if isinstance(prompt, list) and prompt and all(isinstance(part, int) for part in prompt):
        return [list(prompt)]
    if isinstance(prompt, list) and prompt and all(isinstance(part, (str, list)) for part in prompt):
        return [text.encode(part) if isinstance(part, str) else [int(number) for number in part] for part in prompt]
    raise bad("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")


@dataclass
class Writer:
    """Answers requests at the pace that the knobs and the speculative config give."""

    knobs: Knobs
    metrics: Metrics
    spec: SpeculativeConfig | None
    served: list[str]
    max_model_len: int
    max_num_seqs: int
    suspended: Callable[[], bool]
    detail: str = "none"  # --per-request-spec-decode-metrics
    worker: Any = None
    broken: threading.Event = field(default_factory=threading.Event)  # the engine is dead or aborts
    frozen: threading.Event = field(default_factory=threading.Event)  # the engine is gone, connections stay open
    slots: threading.Semaphore = field(init=False)
    checked: float = 0.0
    stalled: bool = False
    cached: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)  # (salt, prompt) whose prefix was computed

    def __post_init__(self) -> None:
        self.slots = threading.Semaphore(self.max_num_seqs)

    def style(self) -> text.Style:
        """How this start answers."""
        knobs = self.knobs
        ways = ((knobs.empty_answer, "empty"), (knobs.completions_garbage, "garbage"), (knobs.loop_output, "loop"))
        return text.Style(next((name for on, name in ways if on), "plain"), knobs.answer_tokens, knobs.answer_seed)

    def steps(self, prompt: list[int], out: list[int]) -> list[tuple[int, int]]:
        """The decode steps of an answer: by the acceptance knob, by the n-gram rule, or one token each."""
        if self.spec is None:
            return [(0, 0)] * max(0, len(out) - 1)
        count, rate = self.spec.num_speculative_tokens, self.knobs.acceptance
        if rate is None and self.spec.method.startswith("ngram"):
            return text.steps_by(self.worker.model_runner.drafter.drafts, prompt, out)
        return text.steps_by_rate(len(out), count, 0.6 if rate is None else rate)

    def parse(self, body: Any, chat: bool) -> Request:
        """A request from its body. Raises Refusal in the real engine's words."""
        if not isinstance(body, dict):
            raise bad("Input should be a valid dictionary")
        name = body.get("model")
        if name is not None and name not in self.served:
            aliases = ", ".join(self.served)
            raise Refusal(
                404, "NotFoundError", f"The model `{name}` does not exist. Valid aliases: {aliases}.", "model"
            )
        prompts = [text.encode(chat_prompt(body.get("messages")))] if chat else prompts_of(body)
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise bad(
                f"max_tokens must be at least 1, got {limit}. (parameter=max_tokens, value={limit})", "max_tokens"
            )
        jobs = []
        for prompt in prompts:
            room = self.max_model_len - len(prompt)
            if room < 1:
                raise bad(
                    f"This model's maximum context length is {self.max_model_len} tokens. However, your prompt "
                    "contains at least "
                    f"{len(prompt)} input tokens, which exceeds this limit even without any output tokens. Please "
                    "reduce the length "
                    f"of the input prompt. (parameter=input_tokens, value={len(prompt)})",
                    "input_tokens",
                )
            wanted = limit if limit is not None else (room if chat else 16)
            if wanted > room:
                raise bad(
                    f"'max_tokens' or 'max_completion_tokens' is too large: {wanted}. This model's maximum "
                    "context length is "
                    f"{self.max_model_len} tokens and your request has {len(prompt)} input tokens. "
                    f"(parameter=max_tokens, value={wanted})",
                    "max_tokens",
                )
            out, ended = text.answer(prompt, wanted, self.style(), bool(body.get("ignore_eos")))
            jobs += [Job(prompt, out, ended, self.steps(prompt, out)) for _ in range(int(body.get("n") or 1))]
        salt = str(body.get("cache_salt") or "")
        for prompt in prompts:
            known = (salt, tuple(prompt))
            self.metrics.prefix(len(prompt), len(prompt) // 16 * 16 if known in self.cached else 0)
            self.cached.add(known)
        stop = body.get("stop") or []
        options = body.get("stream_options") or {}
        return Request(
            jobs,
            bool(body.get("stream")),
            bool(options.get("include_usage")),
            bool(body.get("return_token_ids")),
            chat,
            [stop] if isinstance(stop, str) else list(stop),
        )

    def step_seconds(self, tokens: int) -> float:
        """Seconds of a decode step that yields `tokens`."""
        knobs = self.knobs
        crowd = 1 + knobs.batch_slowdown * max(0, self.metrics.running - 1)
        if self.spec is not None and knobs.spec_speedup is not None:
            return tokens * crowd / (knobs.tokens_per_s * knobs.spec_speedup)
        return crowd * (knobs.spec_step_cost if self.spec is not None else 1.0) / knobs.tokens_per_s

    def wait(self, until: float) -> None:
        """Sleeps to a monotonic time, longer while a process of the engine is stopped.

        Raises Refusal when the engine dies meanwhile.
        """
        while True:
            if self.frozen.is_set() or self.knobs.completions_hang:
                self.broken.wait(3600.0)
            if self.broken.is_set():
                raise broken()
            now = time.monotonic()
            if now - self.checked > 0.05:
                self.checked, self.stalled = now, self.suspended()
            if self.stalled:
                self.broken.wait(0.05)
                continue
            if now >= until:
                return
            self.broken.wait(min(0.05, until - now))

    def generate(self, request: Request) -> Iterator[list[tuple[Job, list[int]]]]:
        """The steps of a request, all its sequences in lock-step: (job, new token ids) of those that are not done."""
        born = last = time.monotonic()
        metrics = self.metrics
        with metrics.lock:
            metrics.waiting += 1
        try:
            while not self.slots.acquire(timeout=0.05):
                if self.broken.is_set():
                    raise broken()
        finally:
            with metrics.lock:
                metrics.waiting -= 1
        reason = "abort"
        tokens = sum(len(job.prompt) for job in request.jobs)
        with metrics.lock:
            metrics.running += 1
            metrics.context_tokens += tokens
        try:
            due = born + self.knobs.ttft_s
            first = True
            while any(job.done < len(job.out) for job in request.jobs) or first:
                self.wait(due)
                new = []
                for job in request.jobs:
                    if job.done >= len(job.out) and not first:
                        continue
                    step = job.steps[job.at] if job.done and job.at < len(job.steps) else (0, 0)
                    ids = job.advance()
                    metrics.step(step[0], max(0, len(ids) - 1))
                    new.append((job, ids))
                if first:  # counted with the first output, as the engine does: one that hangs counts nothing
                    with metrics.lock:
                        metrics.prompt_tokens += tokens
                now = time.monotonic()
                (metrics.first_token if first else metrics.between_tokens).observe(now - (born if first else last))
                first, last = False, now
                yield new
                upcoming = [
                    1 + job.steps[job.at][1] if job.at < len(job.steps) else 1
                    for job in request.jobs
                    if job.done < len(job.out)
                ]
                due += self.step_seconds(max(upcoming, default=1))
            reason = "stop" if all(job.ended for job in request.jobs) else "length"
            metrics.whole.observe(last - born)
        except Refusal:
            reason = "error"
            raise
        finally:
            self.slots.release()
            with metrics.lock:
                metrics.running -= 1
                metrics.context_tokens -= tokens
                metrics.success[reason] += len(request.jobs)
