"""Prints the recorded lines with this start's own names, numbers and process ids, and the lines of a start that
fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import secrets
import sys
from pathlib import Path
from typing import Any

from vllm import __version__
from vllm.engine.arg_utils import VllmConfig
from vllm.fake import log, release
from vllm.fake.engine import Engine, worker_name
from vllm.fake.story import Beat


def non_default(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that differ from their defaults, keys hidden, as the real engine logs them."""
    skip = ("model", "subparser", "dispatch_function")
    defaults = {flag["dest"]: flag["default"] for flag in release.flags()}
    given = {
        key: value
        for key, value in vars(args).items()
        if key not in skip and key in defaults and value != defaults[key]
    }
    ordered = {"model_tag": args.model_tag, **given, "model": args.model}
    if "api_key" in ordered:
        ordered["api_key"] = "***"
    return {key: value for key, value in ordered.items() if value is not None}


def fill(text: str, names: dict[str, Any]) -> str:
    """Puts names into a text whose other braces are its own, such as those of {'EngineCore': 1}."""
    return re.sub(r"\{(\w+)\}", lambda found: str(names.get(found[1], found[0])), text)


class Teller:
    """Prints for all processes of one start; the API server's process does the printing, the ids are the real ones."""

    def __init__(self, args: argparse.Namespace, served: str, host: str):
        self.args, self.served, self.host = args, served, host
        self.config: VllmConfig | None = None
        self.engine: Engine | None = None
        self.run = secrets.token_hex(16)
        self.free_port = 40000 + secrets.randbelow(20000)

    def names(self, rank: int) -> dict[str, Any]:
        """The values of the placeholders."""
        config = self.config
        length = config.model_config.max_model_len if config else self.args.max_model_len or 0
        return {
            "now": log.stamp(),
            "model": self.args.model,
            "served": self.served,
            "args": non_default(self.args),
            "version": __version__,
            "length": length,
            "length_commas": f"{length:,}",
            "speculative": str(config.speculative_config) if config else None,
            "tp": self.args.tensor_parallel_size,
            "rank": rank,
            "host": self.host,
            "port": self.args.port,
            "free_port": self.free_port,
            "pid": os.getpid(),
            "run": self.run,
            "site": str(Path(__file__).resolve().parents[2]),
            "python": sys.base_prefix,
            "venv": sys.prefix,
        }

    def worker_pid(self, rank: int) -> int:
        """The process id of a worker, or of this process while there is none."""
        return self.engine.workers[rank] if self.engine and rank < len(self.engine.workers) else os.getpid()

    def prefixes(self, who: str) -> list[tuple[int, str]]:
        """(rank, prefix) for each process that prints the line."""
        ranks = self.args.tensor_parallel_size
        if not who:
            return [(0, "")]
        if who == "EngineCore":
            return [(0, f"(EngineCore pid={self.engine.pid if self.engine else os.getpid()}) ")]
        if who.endswith("*"):
            base = who[:-1]
            names = [worker_name(rank, ranks) if base == "Worker" else f"{base}{rank}" for rank in range(ranks)]
            return [(rank, f"({name} pid={self.worker_pid(rank)}) ") for rank, name in enumerate(names)]
        if who == "Worker0":
            return [(0, f"({worker_name(0, ranks)} pid={self.worker_pid(0)}) ")]
        return [(0, f"({who} pid={os.getpid()}) ")]

    def tell(self, beat: Beat) -> None:
        """Prints one beat. Bars go to standard error, as tqdm's do; the prefix comes only where a new line begins."""
        for rank, prefix in self.prefixes(beat.who):
            if beat.raw:
                starts = "%|" not in beat.text or "  0%|" in beat.text
                log.write((prefix if starts else "") + beat.text, sys.stderr)
            else:
                log.write(prefix + beat.text.format(**self.names(rank)) + "\n")

    def noise(self, cases: list[str]) -> None:
        """Prints lines that look like failures and are none. Raises KeyError for a case that is not in noise.json."""
        known = json.loads((release.DATA / "noise.json").read_text(encoding="utf-8"))["cases"]
        for case in cases or list(known):
            for text in known[case]["lines"]:
                self.tell(Beat(0.0, "", "EngineCore" if self.engine else "APIServer", text))

    def failure(self, cause: dict[str, Any], rank: int) -> None:
        """Prints a failed start from its first cause outwards: worker, engine core, its process, API server."""
        wrappers = json.loads((release.DATA / "failures.json").read_text(encoding="utf-8"))["wrappers"]
        names = self.names(rank)
        worker = f"({worker_name(rank, self.args.tensor_parallel_size)} pid={self.worker_pid(rank)}) "
        engine = self.prefixes("EngineCore")[0][1]
        stamp = log.stamp()
        for text in cause.get("raw", []):
            log.write(fill(text, names) + "\n", sys.stderr)
        own = [*cause.get("frames", []), *cause.get("text", "").split("\n")]
        if cause["who"] == "worker" and cause.get("text"):
            for text in [*wrappers["worker_head"], *own]:
                log.write(f"{worker}ERROR {stamp} [multiproc_executor.py:953] {fill(text, names)}\n")
        inner = cause["who"] == "engine"
        core = [*wrappers["engine"][:-1], *own] if inner else wrappers["engine"]
        process = [*wrappers["process"][:-1], *own] if inner else wrappers["process"]
        for text in core:
            log.write(f"{engine}ERROR {stamp} [core.py:1510] {fill(text, names)}\n")
        for text in [*process, *wrappers["api"]]:
            log.write(fill(text, names) + "\n", sys.stderr)
