"""Counters of the server and their page, in the real engine's Prometheus names."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

LATENCY_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 40.0, 160.0)
REASONS = ("stop", "length", "abort", "error", "repetition")


@dataclass
class Histogram:
    """Observations in seconds, with cumulative buckets when printed."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BUCKETS) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        """Adds one observation."""
        at = next((index for index, bound in enumerate(LATENCY_BUCKETS) if value <= bound), len(LATENCY_BUCKETS))
        self.counts[at] += 1
        self.total += value


@dataclass
class Metrics:
    """All figures of one server.

    `positions` counts accepted draft tokens by position and is None when speculation is off.
    """

    model: str
    max_tokens: int
    memory: float
    positions: list[int] | None
    lock: threading.Lock = field(default_factory=threading.Lock)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    context_tokens: int = 0
    success: dict[str, int] = field(default_factory=lambda: dict.fromkeys(REASONS, 0))
    first_token: Histogram = field(default_factory=Histogram)
    between_tokens: Histogram = field(default_factory=Histogram)
    whole: Histogram = field(default_factory=Histogram)
    per_token: Histogram = field(default_factory=Histogram)
    born: float = field(default_factory=time.time)

    def step(self, drafted: int, accepted: int) -> None:
        """One decode step: tokens generated, and the draft's fate where there was one."""
        with self.lock:
            self.generation_tokens += accepted + 1
            if self.positions is None or drafted == 0:
                return
            self.drafts += 1
            self.drafted += drafted
            self.accepted += accepted
            for position in range(accepted):
                self.positions[position] += 1

    def prefix(self, tokens: int, hits: int) -> None:
        """One prompt of so many tokens, of which the prefix cache had so many."""
        with self.lock:
            self.prefix_queries += tokens
            self.prefix_hits += hits

    def page(self) -> str:
        """The text of /metrics."""
        labels = f'engine="0",model_name="{self.model}"'
        out: list[str] = []

        def head(name: str, kind: str, text: str) -> None:
            out.extend([f"# HELP {name} {text}", f"# TYPE {name} {kind}"])

        def single(name: str, kind: str, text: str, value: float) -> None:
            head(name, kind, text)
            out.append(f"{name}{{{labels}}} {float(value)}")
            if kind == "counter":
                made = name[: -len("_total")] + "_created"
                head(made, "gauge", text)
                out.append(f"{made}{{{labels}}} {self.born}")

        def histogram(name: str, text: str, values: Histogram) -> None:
            head(name, "histogram", text)
            sofar = 0
            for bound, count in zip([*map(str, LATENCY_BUCKETS), "+Inf"], values.counts):
                sofar += count
                out.append(f'{name}_bucket{{engine="0",le="{bound}",model_name="{self.model}"}} {float(sofar)}')
            out.extend([f"{name}_count{{{labels}}} {float(sofar)}", f"{name}_sum{{{labels}}} {values.total}"])

        with self.lock:
            if self.positions is not None:
                single("vllm:spec_decode_num_drafts_total", "counter", "Number of spec decoding drafts.", self.drafts)
                single("vllm:spec_decode_num_draft_tokens_total", "counter", "Number of draft tokens.", self.drafted)
                single(
                    "vllm:spec_decode_num_accepted_tokens_total", "counter", "Number of accepted tokens.", self.accepted
                )
                name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                head(name, "counter", "Accepted tokens per draft position.")
                out.extend(
                    f'{name}{{{labels},position="{at}"}} {float(count)}' for at, count in enumerate(self.positions)
                )
            single("vllm:num_requests_running", "gauge", "Number of requests in model execution batches.", self.running)
            single("vllm:num_requests_waiting", "gauge", "Number of requests waiting to be processed.", self.waiting)
            used = min(1.0, self.context_tokens / self.max_tokens) if self.max_tokens else 0.0
            single("vllm:kv_cache_usage_perc", "gauge", "KV-cache usage. 1 means 100 percent usage.", used)
            single(
                "vllm:num_preemptions_total",
                "counter",
                "Cumulative number of preemption from the engine.",
                self.preemptions,
            )
            single("vllm:prompt_tokens_total", "counter", "Number of prefill tokens processed.", self.prompt_tokens)
            single(
                "vllm:generation_tokens_total",
                "counter",
                "Number of generation tokens processed.",
                self.generation_tokens,
            )
            single(
                "vllm:prefix_cache_queries_total", "counter", "Prefix cache queries, in tokens.", self.prefix_queries
            )
            single("vllm:prefix_cache_hits_total", "counter", "Prefix cache hits, in tokens.", self.prefix_hits)
            name = "vllm:request_success_total"
            head(name, "counter", "Count of successfully processed requests.")
            for reason, count in self.success.items():
                out.append(f'{name}{{engine="0",finished_reason="{reason}",model_name="{self.model}"}} {float(count)}')
            histogram(
                "vllm:time_to_first_token_seconds", "Histogram of time to first token in seconds.", self.first_token
            )
            histogram(
                "vllm:inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", self.between_tokens
            )
            name = "vllm:request_time_per_output_token_seconds"
            histogram(name, "Histogram of time_per_output_token_seconds per request.", self.per_token)
            histogram("vllm:e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", self.whole)
            head("vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig")
            blocks = self.max_tokens // 16
            out.append(
                f'vllm:cache_config_info{{block_size="16",cache_dtype="auto",enable_prefix_caching="True",engine="0",'
                f'gpu_memory_utilization="{self.memory}",kv_cache_size_tokens="{self.max_tokens}",'
                f'num_gpu_blocks="{blocks}"}} 1.0'
            )
        return "\n".join(out) + "\n"
