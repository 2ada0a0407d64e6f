"""Engine arguments and the config that they become, under the real engine's names."""

from __future__ import annotations

import argparse
import enum
import os
from dataclasses import dataclass
from typing import Any

from vllm.fake import log, model, speculative
from vllm.fake.errors import ValidationError, problem, value_problem
from vllm.fake.speculative import SpeculativeConfig

TAIL = " 'shutdown_timeout': 0})"


class CUDAGraphMode(enum.Enum):
    """Which graphs would be captured; printed as its bare name."""

    NONE = 0
    PIECEWISE = 1
    FULL = 2
    FULL_DECODE_ONLY = (2, 0)
    FULL_AND_PIECEWISE = (2, 1)

    def __str__(self) -> str:
        return self.name


@dataclass
class SchedulerConfig:
    """Scheduling: whether a step is prepared while the last one runs, and how many requests (and tokens) a step
    takes.
    """

    async_scheduling: bool
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass
class ModelConfig:
    """The model's folder and its context length in tokens."""

    model: str
    max_model_len: int
    quantization: str | None


@dataclass
class ParallelConfig:
    """Number of workers."""

    tensor_parallel_size: int
    world_size: int


@dataclass
class CompilationConfig:
    """Graph mode."""

    cudagraph_mode: CUDAGraphMode


@dataclass
class VllmConfig:
    """What the arguments became."""

    model_config: ModelConfig
    scheduler_config: SchedulerConfig
    parallel_config: ParallelConfig
    compilation_config: CompilationConfig
    speculative_config: SpeculativeConfig | None
    shutdown_timeout: int
    use_v2_model_runner: bool


def whole_error(text: str) -> ValidationError:
    """An error of the engine's config as a whole."""
    return ValidationError("VllmConfig", [value_problem(text, "{'model_config': 0", TAIL)])


def parallel_config(args: argparse.Namespace, heads: Any) -> ParallelConfig:
    """Checks the tensor parallel size against 1 and the model's attention heads."""
    size, stages = args.tensor_parallel_size, args.pipeline_parallel_size or 1
    if size < 1:
        text = "Input should be greater than or equal to 1"
        raise ValidationError("ParallelConfig", [problem("tensor_parallel_size", text, "greater_than_equal", size)])
    if isinstance(heads, int) and heads % size:
        raise whole_error(
            f"Total number of attention heads ({heads}) must be divisible by tensor parallel size ({size})."
        )
    return ParallelConfig(size, size * stages)


def scheduler_config(args: argparse.Namespace, spec: SpeculativeConfig | None) -> SchedulerConfig:
    """Asynchronous unless the speculative method forbids it.

    Raises ValidationError when it was asked for and cannot be.
    """
    sequences, tokens = args.max_num_seqs or 256, args.max_num_batched_tokens or 8192
    if tokens < sequences:
        text = f"max_num_batched_tokens ({tokens}) must be greater than or equal to max_num_seqs ({sequences})."
        raise ValidationError(
            "SchedulerConfig", [value_problem(text, "{'runner_type': 0", "t..., 'stream_interval': 1})")]
        )
    asked, forbids = args.async_scheduling, spec is not None and spec.method in speculative.SYNC_METHODS
    if asked and forbids:
        raise whole_error(
            "Currently, async scheduling is only supported with EAGLE/MTP/Draft Model/NGram GPU/DSpark/DFlash "
            "kind of speculative decoding"
        )
    return SchedulerConfig(asked is not False and not forbids, sequences, tokens)


def graph_mode(args: argparse.Namespace) -> CUDAGraphMode:
    """NONE when eager, else what the compilation config names, else the engine's default."""
    if args.enforce_eager:
        return CUDAGraphMode.NONE
    asked = (args.compilation_config or {}).get("cudagraph_mode") if isinstance(args.compilation_config, dict) else None
    return CUDAGraphMode[str(asked).upper()] if asked else CUDAGraphMode.FULL_AND_PIECEWISE


def speculative_value(args: argparse.Namespace) -> Any:
    """The JSON of --speculative-config with the --spec-* shorthands put in, or None when neither was given."""
    short = {"method": "spec_method", "model": "spec_model", "num_speculative_tokens": "spec_tokens"}
    extra = {key: getattr(args, name, None) for key, name in short.items() if getattr(args, name, None) is not None}
    given = args.speculative_config
    if given is None:
        return extra or None
    return {**given, **extra} if isinstance(given, dict) else given


def downgrades(config: VllmConfig) -> list[str]:
    """The lines with which the engine says that it switched something off."""
    spec = config.speculative_config
    found = []
    if spec is not None and spec.method in speculative.SYNC_METHODS:
        kind = "ngram" if spec.method == "ngram" else spec.method
        found.append(f"Async scheduling not supported with {kind}-based speculative decoding and will be disabled.")
    if spec is not None and not config.use_v2_model_runner:
        text = "Model Runner V2 does not yet support {} speculative decoding; using the V1 model runner instead."
        found.append(text.format("ngram/ngram_gpu" if spec.method.startswith("ngram") else spec.method))
    return found


@dataclass
class AsyncEngineArgs:
    """The engine's part of the parsed arguments."""

    args: argparse.Namespace

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> AsyncEngineArgs:
        """Keeps the namespace; the model's positional form wins, as in the real command."""
        if getattr(args, "model_tag", None):
            args.model = args.model_tag
        return cls(args)

    def create_engine_config(self, usage_context: Any = None, headless: bool = False) -> VllmConfig:
        """Builds and checks the config, printing the downgrades. Reads config.json files; touches nothing else."""
        config = self.resolve()
        for text in downgrades(config):
            log.line("WARNING", "vllm.py:1077", text, "MainProcess")
        state = "enabled" if config.scheduler_config.async_scheduling else "disabled"
        log.line("INFO", "vllm.py:1109", f"Asynchronous scheduling is {state}.", "MainProcess")
        return config

    def resolve(self) -> VllmConfig:
        """The config, without printing. Errors are those of speculative.resolve and of the functions above."""
        args = self.args
        content = model.read(args.model)
        model.check_remote_code(args.model, content, bool(args.trust_remote_code))
        length = model.context_length(content, args.max_model_len)
        model.check_quantization(content, args.quantization)
        memory = args.gpu_memory_utilization
        if not 0 < memory <= 1:
            low = memory <= 0
            text, kind = ("greater than 0", "greater_than") if low else ("less than or equal to 1", "less_than_equal")
            raise ValidationError(
                "CacheConfig", [problem("gpu_memory_utilization", f"Input should be {text}", kind, memory)]
            )
        parallel = parallel_config(args, model.text_config(content).get("num_attention_heads"))
        given = speculative_value(args)
        spec = None if given is None else speculative.resolve(given, args.model, model.read_draft)
        if getattr(args, "per_request_spec_decode_metrics", None) not in (None, "none", "off") and spec is None:
            raise whole_error(
                "--per-request-spec-decode-metrics requires speculative decoding to be enabled (via "
                "--speculative-config)."
            )
        wanted = os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "1") != "0"
        return VllmConfig(
            ModelConfig(args.model, length, args.quantization),
            scheduler_config(args, spec),
            parallel,
            CompilationConfig(graph_mode(args)),
            spec,
            getattr(args, "shutdown_timeout", None) or 0,
            wanted and not (spec is not None and spec.method in (*speculative.SYNC_METHODS, "ngram_gpu")),
        )
