"""`swapgate bench`: measure what serves, with the engine's own load generator, under conditions that are written down.

First the recorder asks every prompt once (token ids, and all kernels warm). Then each concurrency level has one pass
that is thrown away and ``repeats`` measured ones of `vllm bench serve`, from the unit's virtualenv, over loopback, as
the service user: the prompts in their order, greedy, a closed loop. Both send the same tokens, or nothing is measured.

The request
    {"variant": name | null for the one that serves, "prompts": as for `swapgate record`, "concurrency": [n, ...],
     "repeats": n, "cache": "cold" | "warm", "limit_s": s | null}
    "cold": each pass has a salt of its own, so that no pass finds another's tokens in the prefix cache. "warm": all
    share the cache that the warm-up filled.
The folder
    request.json, prompts.jsonl (as sent), recorded.jsonl (recorder), cN-warmup.json and cN-rR.json (what the load
    generator wrote), cN-rR.pass.json (PASS), progress.json, load.json (LOAD) at the end, and all of it in FOLDER.tar.gz
PASS
    {"file", "concurrency", "repeat", "started_unix", "ended_unix",
     "counted": {"before", "after": COUNTS of bench_results},
     "between": bench_results.between, "foreign_requests": n that were not ours, "gpus": nvidia_smi.paces,
     "void": null | why it does not count}
LOAD
    what is known of this load of the engine, "outcome": "measured" | "failed", "cause": text | null
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import shutil
import subprocess
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

from ..module_utils import bench_results, nvidia_smi, processes, records, units
from . import engine_api, gpus, installed, jobs, preflight, recorder, systemd

JsonDict = dict[str, Any]

START_S = 20.0  # a start of the load generator: it imports the whole engine
LEAST_LIMIT_S = 1800.0
LIMIT_FACTOR = 3.0
PROBE_TOKENS = 33
GPU_SAMPLE_S = 5.0
STOP_POLL_S = 0.5
ENDED_WITHIN_S = 10.0  # an engine that ended, until its unit is no longer active
CACHES = ("cold", "warm")
REQUEST_KEYS = {"prompts": list, "concurrency": list, "repeats": int, "cache": str}
# Of the unit's own flags, those that make another tokenizer of the same files.
TOKENIZER_FLAGS = ("--tokenizer", "--tokenizer-mode")
TRUST_FLAG = "--trust-remote-code"


class BenchFailed(Exception):
    """The benchmark cannot go on; what was measured before stays. The text is the load's cause."""


def check_request(request: Any) -> None:
    """RecordError names what of a request is not of the shape that the module's text shows."""
    recorder.check_keys(request, REQUEST_KEYS, "request")
    for prompt in request["prompts"]:
        recorder.check_keys(prompt, recorder.PROMPT_KEYS, "request: prompts")
    levels = request["concurrency"]
    if not levels or any(type(level) is not int or level < 1 for level in levels):
        raise records.RecordError(f"request: concurrency: found {levels!r:.60}, expected whole numbers of at least 1")
    if request["repeats"] < 1 or not request["prompts"]:
        raise records.RecordError("request: found no repeats or no prompts, expected at least one of each")
    if request["cache"] not in CACHES:
        raise records.RecordError(f"request: cache: found {request['cache']!r:.60}, expected {' or '.join(CACHES)}")


def serving(layout: records.Layout) -> JsonDict:
    """The installed variant that serves. RecordError unless it is exactly one."""
    active = installed.active_units(layout)
    found = [variant for variant in installed.managed_variants(layout) if variant["unit"] in active]
    if len(found) != 1:
        names = ", ".join(variant["name"] for variant in found) or "none"
        raise records.RecordError(f"found {names} serving, expected one variant. Look at `swapgate status`.")
    return found[0]


def flag_int(argv: list[str], flag: str) -> int | None:
    """The whole number after a flag, or None."""
    value = preflight.flag_value(argv, flag)
    return int(value) if value and value.isdigit() else None


def load_identity(variant: JsonDict, layout: records.Layout) -> str:
    """What is another text after each start of the engine: the unit's InvocationID with its count of restarts, or,
    where no unit runs it, the process that listens. Empty when nothing serves."""
    if (layout.units / variant["unit"]).exists():
        now = systemd.show(variant["unit"], "InvocationID", "NRestarts", "ActiveState")
        return now["InvocationID"] if now["ActiveState"] == "active" else ""
    holders = sorted(holder.pid for holder in processes.port_holders(variant["port"]))
    return f"pid-{holders[0]}" if holders else ""


class GpuWatch:
    """Samples the GPUs beside a pass: before and after it they idle, and say nothing of it."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._indices, self._samples = indices, [gpus.pace(indices)]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        if indices:
            self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(GPU_SAMPLE_S):
            self._samples.append(gpus.pace(self._indices))

    def end(self) -> list[list[JsonDict]]:
        """All samples, each a nvidia_smi.pace."""
        self._over.set()
        if self._indices:
            self._thread.join(gpus.LIMIT_S + GPU_SAMPLE_S)
        return [*self._samples, gpus.pace(self._indices)]


class Bench:
    """One benchmark of one load."""

    def __init__(
        self,
        layout: records.Layout,
        request: JsonDict,
        out: Path,
        say: Callable[[str], None],
        unwatched_s: float | None = None,
    ) -> None:
        check_request(request)
        self.layout, self.request, self.out, self.say = layout, request, out, say
        self.total = 0
        self.unwatched_s = unwatched_s
        self.variant = installed.named(layout, request["variant"]) if request.get("variant") else serving(layout)
        self.prompts: list[JsonDict] = request["prompts"]
        self.api_key = installed.api_key(layout)
        self.bind, self.port = self.variant["bind"], int(self.variant["port"])
        self.argv: list[str] = list(self.variant.get("argv") or [])
        self.levels, self.left_out = bench_results.levels(request["concurrency"], flag_int(self.argv, "--max-num-seqs"))
        self.recorded: dict[str, JsonDict] = {}
        self.passes: list[JsonDict] = []
        self.samples: list[list[JsonDict]] = []  # of the GPUs, in the measured passes
        self.begun = time.monotonic()
        self.one_stream_s = 0.0  # all prompts one by one, as the recorder found it
        self.limit_s = float("inf")
        self.salt = f"{int(time.time())}-{os.getpid()}"

    # --- what it will take ------------------------------------------------------------------------------------------

    def plan(self) -> JsonDict:
        """{"variant", "levels", "left_out", "prompts", "passes", "at_most_s", "seconds_per_token", "limit_s": when it
        gives up, "never_longer_s": after which somebody else may end it}. One short answer is timed."""
        name = self.variant["model"]["served_name"]
        limit_s = recorder.FIRST_BYTE_LIMIT_S
        engine_api.complete(self.bind, self.port, name, PROBE_TOKENS, api_key=self.api_key, limit_s=limit_s)
        body = {
            "model": name,
            "prompt": engine_api.PROBE_PROMPT,
            "max_tokens": PROBE_TOKENS,
            "temperature": 0,
            "ignore_eos": True,  # times a step; nothing is judged by this text
        }
        begun = time.monotonic()
        engine_api.request(self.bind, self.port, "POST", "/v1/completions", body, self.api_key, limit_s)
        per_token = (time.monotonic() - begun) / PROBE_TOKENS
        tokens = sum(prompt["max_tokens"] for prompt in self.prompts)
        repeats = self.request["repeats"]
        at_most = bench_results.expected_seconds(tokens, len(self.prompts), per_token, self.levels, repeats, START_S)
        limit = self.request.get("limit_s") or max(LEAST_LIMIT_S, LIMIT_FACTOR * at_most)
        return {
            "variant": self.variant["name"],
            "levels": self.levels,
            "left_out": self.left_out,
            "limit_s": round(limit),
            "never_longer_s": round(limit + LEAST_LIMIT_S),
            "passes": len(self.levels) * (repeats + 1),
            "prompts": len(self.prompts),
            "at_most_s": round(at_most),
            "seconds_per_token": per_token,
        }

    # --- the way ----------------------------------------------------------------------------------------------------

    def run(self) -> JsonDict:
        """Measure; returns LOAD, which is also on disk, as is everything else. Whatever ends it is in its cause."""
        self.out.mkdir(parents=True, exist_ok=True)
        records.write_json(self.out / "request.json", self.request)
        (self.out / "watched").touch()
        load = self.describe()
        try:
            if not self.levels:
                raise BenchFailed(
                    f"no level left: asked for {self.left_out}, the unit runs at most "
                    f"{flag_int(self.argv, '--max-num-seqs')} sequences (--max-num-seqs)"
                )
            plan = self.plan()
            self.limit_s, self.plan_s = plan["limit_s"], float(plan["at_most_s"])
            self.say(f"{plan['variant']}: {plan['passes']} passes, at most {plan['at_most_s'] / 60:.0f} min")
            self.total = 1 + plan["passes"]  # the recorder's own is one
            self._record()
            self._render()
            done = 1
            for level in self.levels:
                for repeat in range(-1, self.request["repeats"]):
                    self._still_wanted()
                    self._one_pass(level, repeat)
                    done += 1
                    self._progress(done, f"concurrency {level}")
            load.update(outcome="measured", cause=None)
        except jobs.Ended as error:
            load.update(outcome="failed", cause=str(error))
        except (BenchFailed, recorder.RecordingFailed, engine_api.EngineError) as error:
            load.update(outcome="failed", cause=self._cause(error))
        load.update(ended_unix=time.time(), **self._measured())
        records.write_json(self.out / "load.json", load)
        self._archive()
        return load

    def _cause(self, error: Exception) -> str:
        """An engine that is not the one of the start explains whatever was seen. Requests fail at once where it died,
        its unit follows some moments later."""
        deadline = time.monotonic() + (0 if isinstance(error, BenchFailed) else ENDED_WITHIN_S)
        with contextlib.suppress(systemd.SystemdError):
            while load_identity(self.variant, self.layout) == self.identity:
                if time.monotonic() >= deadline:
                    return str(error)
                time.sleep(STOP_POLL_S)
            return f"the engine ended or was started anew during the benchmark ({error})"
        return str(error)

    def describe(self) -> JsonDict:
        """LOAD as far as it is known before anything is measured."""
        variant, unit = self.variant, self.variant["unit"]
        self.identity = load_identity(variant, self.layout)
        file = self.layout.units / unit
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        progress = records.read_if_there(self.layout.unit_runtime(unit) / "load.json") or {}
        method = preflight.flag_json(self.argv, "--speculative-config")
        release = units.release_id(text, variant) if text else None
        preflight_report = preflight_of(self.layout, release)
        changes = [*(progress.get("changes") or []), *(preflight_report.get("notices") or [])]
        memory = re.search(r"MemTotal:\s*(\d+) kB", Path("/proc/meminfo").read_text(encoding="utf-8"))
        engine = variant.get("engine") or {}
        return {
            "variant": variant["name"],
            "unit": unit,
            "release": release,
            "model": variant["model"].get("name"),
            "engine_version": engine.get("version"),
            "engine_package": engine.get("package"),
            "speculative_config": method,
            "changes": list(dict.fromkeys(changes)),
            "effective": preflight_report.get("effective") or {},
            "load_s": progress.get("ready_after_s"),
            "driver": None,
            "gpus": variant.get("gpus") or [],
            "nccl_env": {key: value for key, value in (variant.get("env") or {}).items() if key.startswith("NCCL_")},
            "host_facts": {
                "kernel": os.uname().release,
                "cpus": os.cpu_count(),
                "memory_mib": int(memory.group(1)) // 1024 if memory else None,
            },
            "invocation_id": self.identity,
            "max_num_seqs": flag_int(self.argv, "--max-num-seqs"),
            "levels": self.levels,
            "left_out": self.left_out,
            "started_unix": time.time(),
            "outcome": "failed",
            "cause": "was not finished",
        }

    def _measured(self) -> JsonDict:
        """What LOAD says of its passes."""
        good = [one for one in self.passes if one["repeat"] >= 0]
        paces = nvidia_smi.paces(self.samples)
        last = good[-1]["counted"]["after"] if good else {}
        return {
            **paces,
            "kv_cache_tokens": last.get("kv_cache_tokens"),
            "counted": bench_results.together([one["between"] for one in good if not one["void"]]),
            "foreign_requests": sum(one["foreign_requests"] or 0 for one in good),
        }

    def _record(self) -> None:
        request = {
            "variant": self.variant["name"],
            "prompts": self.prompts,
            "repeats": 1,
            "settings": [None],
            "seed": 0,
            "salt": f"{self.salt}-record" if self.request["cache"] == "cold" else None,
        }
        file = self.out / "recorded.jsonl"
        self._progress(0, f"recording {len(self.prompts)} answers", self.plan_s)
        recorder.record(self.layout, request, file, lambda _: self._still_wanted(), self.limit_s, self._recorded)
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        self.recorded = {line["id"]: line for line in lines if not line["error"]}
        failed = [line for line in lines if line["error"]]
        if failed:
            raise BenchFailed(
                f"{len(failed)} of {len(lines)} prompts have no answer, the first is {failed[0]['id']}: "
                f"{failed[0]['error']}"
            )
        self.one_stream_s = sum(line["e2e_s"] for line in self.recorded.values())
        self._progress(1, "recorded")

    def _recorded(self, number: int, total: int, spent_s: float) -> None:
        self.one_stream_s = spent_s / number * total
        left_s = self.one_stream_s - spent_s + self._left(1)
        self._progress(0, f"recorded {number} of {total} answers", left_s)

    def _render(self) -> None:
        """Each prompt as the text whose tokens are exactly those of its messages, for a generator that takes text."""
        name = self.variant["model"]["served_name"]
        with (self.out / "prompts.jsonl").open("w", encoding="utf-8") as file:
            for prompt in self.prompts:
                ids = self.recorded[prompt["id"]]["prompt_token_ids"]
                text = self._ask("/detokenize", {"model": name, "tokens": ids})["prompt"]
                back = self._ask("/tokenize", {"model": name, "prompt": text, "add_special_tokens": False})["tokens"]
                if back != ids:
                    raise BenchFailed(
                        f"prompt {prompt['id']}: its text comes back as {len(back)} other tokens, expected the "
                        f"{len(ids)} of its messages: this tokenizer does not survive the way through text; leave "
                        "the prompt out"
                    )
                file.write(json.dumps({"prompt": text, "output_tokens": prompt["max_tokens"]}) + "\n")

    def _ask(self, path: str, body: JsonDict) -> JsonDict:
        text = engine_api.request(self.bind, self.port, "POST", path, body, self.api_key, recorder.METRICS_LIMIT_S)
        try:
            answer: JsonDict = json.loads(text)
        except ValueError as error:
            raise engine_api.EngineError(f"POST {path}: no JSON: {text:.100}") from error
        return answer

    # --- one pass ---------------------------------------------------------------------------------------------------

    def _one_pass(self, level: int, repeat: int) -> None:
        name = f"c{level}-warmup" if repeat < 0 else f"c{level}-r{repeat}"
        one: JsonDict = {"file": f"{name}.json", "concurrency": level, "repeat": repeat, "started_unix": time.time()}
        before = self._counts()
        watch = GpuWatch(self.variant.get("gpus") or [])
        said = None
        try:
            self._generate(name, level)
        except BenchFailed as error:
            said = str(error)
        samples = watch.end()
        one["gpus"] = nvidia_smi.paces(samples)
        self.samples += samples if repeat >= 0 else []
        after = before
        with contextlib.suppress(engine_api.EngineError):
            after = self._counts()
        one.update(ended_unix=time.time(), counted={"before": before, "after": after})
        one["between"] = bench_results.between(before, after, level)
        one["void"] = None
        one["foreign_requests"] = None
        if load_identity(self.variant, self.layout) != self.identity:
            one["void"] = "the engine was restarted or stopped during the pass"
        else:
            one["void"] = said or self._wrong_with(self.out / one["file"])
        if not one["void"]:
            one["foreign_requests"] = max(0, one["between"]["requests"] - len(self.prompts))
        self.passes.append(one)
        records.write_json(self.out / f"{name}.pass.json", one)
        if one["void"]:
            raise BenchFailed(one["void"])

    def _wrong_with(self, file: Path) -> str | None:
        """Why a result cannot be used, or None."""
        try:
            result = records.read_json(file)
            bench_results.check_result(result, self.prompts)
        except (records.RecordError, bench_results.ResultError) as error:
            return f"the load generator's result: {error}"
        other = bench_results.other_tokens(result, self.prompts, self.recorded)
        return "the load generator sent other tokens than the recorder: " + "; ".join(other[:3]) if other else None

    def _counts(self) -> JsonDict:
        return bench_results.counts(engine_api.samples(self.bind, self.port, recorder.METRICS_LIMIT_S))

    def command(self, scratch: Path, name: str, level: int) -> list[str]:
        """The load generator's argv for one pass."""
        body: JsonDict = {"add_special_tokens": False, "repetition_penalty": None}
        if self.request["cache"] == "cold":
            body["cache_salt"] = f"{self.salt}-{name}"
        words = [self.variant["engine"]["venv"] + "/bin/vllm", "bench", "serve", "--backend", "openai"]
        words += ["--base-url", f"http://{engine_api.address(self.bind)}:{self.port}", "--endpoint", "/v1/completions"]
        words += ["--model", self.variant["model"]["served_name"]]
        words += ["--tokenizer", self.variant["model"]["path"]]
        for flag in TOKENIZER_FLAGS:
            value = preflight.flag_value(self.argv, flag)
            if value:
                words += [flag, value]
        if TRUST_FLAG in self.argv:
            words.append(TRUST_FLAG)
        words += [
            "--dataset-name",
            "custom",
            "--dataset-path",
            str(scratch / "prompts.jsonl"),
            "--custom-output-len",
            "-1",
        ]
        words += [
            "--num-prompts",
            str(len(self.prompts)),
            "--no-oversample",
            "--skip-chat-template",
            "--disable-shuffle",
        ]
        words += ["--temperature", "0", "--max-concurrency", str(level), "--request-rate", "inf", "--disable-tqdm"]
        words += ["--save-result", "--save-detailed", "--result-dir", str(scratch), "--result-filename", "result.json"]
        return [*words, "--percentile-metrics", "ttft,tpot,itl,e2el", "--extra-body", json.dumps(body)]

    def _generate(self, name: str, level: int) -> None:
        """One pass of the load generator, its result in the folder. BenchFailed says what it said last."""
        account = self._account()
        scratch = Path(tempfile.mkdtemp(prefix="swapgate-bench-"))
        try:
            shutil.copyfile(self.out / "prompts.jsonl", scratch / "prompts.jsonl")
            if account:
                for path in (scratch, scratch / "prompts.jsonl"):
                    os.chown(path, account["user"], account["group"])
            environment = {
                "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                "HOME": str(scratch),
                "VLLM_CACHE_ROOT": str(scratch),
                "CUDA_VISIBLE_DEVICES": "",  # it sends requests; the GPUs are the engine's
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "PYTHONUNBUFFERED": "1",
            }
            if self.api_key:
                environment["OPENAI_API_KEY"] = self.api_key
            log = self.out / f"{name}.log"
            with log.open("wb") as file:
                try:
                    process = subprocess.Popen(
                        self.command(scratch, name, level),
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        cwd=str(scratch),
                        start_new_session=True,
                        **account,
                    )
                except OSError as error:
                    raise BenchFailed(f"the load generator cannot be run: {error}") from error
                self._await(process)
            if process.returncode != 0:
                raise BenchFailed(f"the load generator ended with status {process.returncode}: {last_line(log)}")
            self._take(scratch / "result.json", self.out / f"{name}.json")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _await(self, process: subprocess.Popen[str]) -> None:
        """The end of the load generator, or its end by us when no time is left or nobody wants it any more."""
        try:
            while True:
                try:
                    process.wait(STOP_POLL_S)
                    return
                except subprocess.TimeoutExpired:
                    self._still_wanted()
        except (BenchFailed, jobs.Ended):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
            raise

    @staticmethod
    def _take(source: Path, target: Path) -> None:
        """Copy what the service user wrote: a plain file, never what a link of its making points to."""
        try:
            handle = os.open(source, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError as error:
            raise BenchFailed(f"the load generator left no result: {error}") from error
        with os.fdopen(handle, "rb") as file, target.open("wb") as out:
            shutil.copyfileobj(file, out)

    def _account(self) -> JsonDict:
        """Whom the load generator runs as: the unit's service user; nobody in particular when we are no root."""
        if os.geteuid() != 0:
            return {}
        file = self.layout.units / self.variant["unit"]
        if file.exists():
            return preflight.account_of(file.read_text(encoding="utf-8"))
        nobody = pwd.getpwnam("nobody")
        return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}

    # --- time -------------------------------------------------------------------------------------------------------

    def _still_wanted(self) -> None:
        if time.monotonic() - self.begun > self.limit_s:
            raise BenchFailed(f"no end within {self.limit_s:.0f} s")
        if self.unwatched_s is not None:
            with contextlib.suppress(FileNotFoundError):
                if time.time() - (self.out / "watched").stat().st_mtime > self.unwatched_s:
                    raise BenchFailed(f"nobody has looked at it for {self.unwatched_s:.0f} s")

    def _progress(self, done: int, what: str, left_s: float | None = None) -> None:
        elapsed = time.monotonic() - self.begun
        left = self._left(done) if left_s is None else left_s
        records.write_json(
            self.out / "progress.json",
            {
                "variant": self.variant["name"],
                "done": done,
                "of": self.total,
                "what": what,
                "elapsed_s": round(elapsed),
                "left_s": round(left),
            },
        )
        self.say(f"{done} of {self.total} passes, {what}, {left / 60:.1f} min left")

    def _left(self, done: int) -> float:
        """Seconds to the end, from what the recorder's pass took and what the passes at each level have taken."""
        left = 0.0
        number = 1
        for level in self.levels:
            took = [one["ended_unix"] - one["started_unix"] for one in self.passes if one["concurrency"] == level]
            unseen = START_S + 1.2 * self.one_stream_s / min(level, len(self.prompts))
            expected = sum(took) / len(took) if took else unseen
            for _ in range(self.request["repeats"] + 1):
                number += 1
                left += expected if number > done else 0.0
        return left

    def _archive(self) -> None:
        beside = self.out.with_name(self.out.name + ".tar.gz.part")
        with tarfile.open(beside, "w:gz") as archive:
            for file in sorted(self.out.iterdir()):
                if file.name != "watched":
                    archive.add(file, arcname=file.name)
        os.replace(beside, self.out.with_name(self.out.name + ".tar.gz"))


def what_serves(layout: records.Layout) -> JsonDict:
    """{"variant", "unit", "release", "model", "file": of its data, "method": of its speculation | null,
    "invocation_id"}; RecordError unless exactly one variant serves."""
    variant = serving(layout)
    text = (layout.units / variant["unit"]).read_text(encoding="utf-8")
    return {
        "variant": variant["name"],
        "unit": variant["unit"],
        "release": units.release_id(text, variant),
        "model": variant["model"]["name"],
        "file": str(installed.data_file(layout, variant["unit"])),
        "method": (preflight.flag_json(list(variant["argv"]), "--speculative-config") or {}).get("method"),
        "invocation_id": load_identity(variant, layout),
    }


def preflight_of(layout: records.Layout, release: str | None) -> JsonDict:
    """What the engine itself said of a release before it was swapped to; empty when no record has it."""
    with contextlib.suppress(records.RecordError):
        for swap in [records.read_state(layout)["swap"], *reversed(records.read_history(layout))]:
            if swap and swap["to"]["release"] == release and swap.get("preflight"):
                return dict(swap["preflight"])
    return {}


def last_line(log: Path) -> str:
    """What the load generator said at its end: the last line of an exception rather than a library's farewell."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|error)\b.*:", line)]
    return (errors or lines or ["nothing"])[-1][:300]


def status(out: Path) -> JsonDict:
    """{"progress": {...} | null, "load": LOAD | null}; looking at it keeps a watched benchmark going."""
    if out.is_dir():
        (out / "watched").touch()
    ended = out.with_name(out.name + ".tar.gz").exists()  # the last thing that is made
    return {
        "progress": records.read_if_there(out / "progress.json"),
        "load": records.read_if_there(out / "load.json") if ended else None,
    }
