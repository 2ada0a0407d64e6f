"""The fake engine, run as the program that it is: what a supervisor, a preflight and a client see of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FAKE, NGRAM, READY, SHM, Fake, free_port


def test_serves_and_stops_cleanly(start: Any) -> None:
    fake = start("--tensor-parallel-size", "2", knobs={"shards": 4})
    before = set(SHM.glob("psm_*"))
    fake.wait_for("Initializing a V1 LLM engine")
    with pytest.raises((urllib.error.URLError, ConnectionError)):  # the port answers only at the end
        fake.get("/health")
    text = fake.wait_for(READY)
    assert "(Worker_TP1 pid=" in text
    assert "\rLoading safetensors checkpoint shards:  75% Completed | 3/4" in text
    assert re.search(r"\rCapturing CUDA graphs \(FULL\):   0%.*\rCapturing CUDA graphs \(FULL\): 100%", text)
    assert set(fake.tree()) == {"VLLM::EngineCore", "VLLM::Worker_TP0", "VLLM::Worker_TP1"}
    assert len(set(SHM.glob("psm_*")) - before) >= 2
    answer = fake.complete(max_tokens=8, return_token_ids=True)
    assert answer["choices"][0]["text"].startswith(" Paris")
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 15, "completion_tokens": 8}
    assert (
        fake.complete(max_tokens=8, prompt=answer["choices"][0]["prompt_token_ids"])["choices"][0]["text"]
        == answer["choices"][0]["text"]
    )
    assert fake.get("/v1/completions", {"model": "other", "prompt": "x"})[0] == 404
    page = fake.get("/metrics")[1]
    assert 'vllm:generation_tokens_total{engine="0",model_name="smol"} 16.0' in page
    assert "spec_decode" not in page
    fake.process.terminate()
    assert fake.status() == 0
    assert not set(SHM.glob("psm_*")) - before


def test_streams_chat_with_usage_and_checks_the_key(start: Any) -> None:
    fake = start(env={"VLLM_API_KEY": "secret"})
    text = fake.wait_for(READY)
    assert "secret" not in text
    body = {
        "messages": [{"role": "user", "content": "Say something"}],
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert fake.get("/v1/chat/completions", body) == (401, '{"error":"Unauthorized"}')
    assert fake.get("/health")[0] == 200
    events = fake.get("/v1/chat/completions", body, key="secret")[1].split("\n\n")
    assert events[-2] == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1]["usage"]["completion_tokens"] == 5


def test_speculation_changes_speed_and_metrics_but_not_the_text(start: Any) -> None:
    plain = start(knobs={"tokens_per_s": 300})
    knobs = {"variants": [{"when": "ngram", "acceptance": 0.8, "spec_step_cost": 1.0}], "tokens_per_s": 300}
    spec = start("--speculative-config", NGRAM, knobs=knobs)
    seconds, texts = [], []
    for fake in (plain, spec):
        fake.wait_for(READY)
        begun = time.monotonic()
        texts.append(fake.complete(max_tokens=120, ignore_eos=True)["choices"][0]["text"])
        seconds.append(time.monotonic() - begun)
    assert texts[0] == texts[1]
    assert seconds[1] < 0.7 * seconds[0]
    page = spec.get("/metrics")[1]
    drafts = float(re.search(r"vllm:spec_decode_num_drafts_total\{.*\} (\S+)", page).group(1))  # type: ignore[union-attr]
    accepted = float(re.search(r"vllm:spec_decode_num_accepted_tokens_total\{.*\} (\S+)", page).group(1))  # type: ignore[union-attr]
    assert drafts > 0
    assert 1 + accepted / drafts > 2
    assert "Async scheduling not supported with ngram-based" in spec.text()


def test_a_dead_worker_ends_the_server_with_status_0(start: Any) -> None:
    fake = start(knobs={"engine_death_exit_s": 0.4})
    fake.wait_for(READY)
    os.kill(fake.pid_of("VLLM::Worker"), signal.SIGKILL)
    fake.wait_for("EngineDeadError")
    assert fake.get("/health")[0] == 503
    assert fake.status() == 0
    assert "died unexpectedly (exit code: -9)" in fake.text()


def test_a_stopped_worker_hangs_completions_while_health_is_200(start: Any) -> None:
    fake = start()
    fake.wait_for(READY)
    worker = fake.pid_of("VLLM::Worker")
    os.kill(worker, signal.SIGSTOP)
    state = Path(f"/proc/{worker}/stat")
    while state.read_text().rpartition(")")[2].split()[0] != "T":  # it stops when it is next scheduled
        time.sleep(0.01)
    with pytest.raises(TimeoutError):
        fake.get("/v1/completions", {"prompt": "x", "max_tokens": 2}, timeout=0.5)
    assert fake.get("/health")[0] == 200
    os.kill(worker, signal.SIGCONT)
    assert fake.complete(max_tokens=2)["usage"]["completion_tokens"] == 2


def test_the_first_sigterm_during_a_load_is_swallowed(start: Any) -> None:
    fake = start(knobs={"load_s": 0.4, "second_term_s": 0.1})
    fake.wait_for("Initializing a V1 LLM engine")
    fake.process.terminate()
    fake.wait_for("init engine (profile")
    time.sleep(0.2)
    assert fake.process.poll() is None
    assert READY not in fake.text()
    fake.process.terminate()
    assert fake.status() == 1


def test_a_drain_lets_a_stream_end_and_hangs_when_it_is_too_long(start: Any) -> None:
    for tokens, ends in ((40, True), (900, False)):
        fake = start("--shutdown-timeout", "1")
        fake.wait_for(READY)
        body = json.dumps({"prompt": "x", "max_tokens": tokens, "stream": True, "ignore_eos": True})
        with socket.create_connection(("127.0.0.1", fake.port)) as client:
            client.sendall(
                f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            begun = client.recv(4096)  # the head, and what of the stream came with it
            fake.process.terminate()
            fake.wait_for("shutdown triggered")
            assert fake.get("/v1/completions", {"prompt": "x"})[0] == 500
            if ends:
                content = begun + b"".join(iter(lambda c=client: c.recv(65536), b""))  # type: ignore[misc]
                assert content.count(b"data: ") == tokens + 1
                assert fake.status() == 0
            else:
                fake.wait_for("Waiting for connections to close")
                fake.process.terminate()
                time.sleep(0.3)
                assert fake.process.poll() is None


@pytest.mark.parametrize(
    ("knobs", "status", "words"),
    [
        ({"crash_at": "weights", "crash_with": "cuda_oom", "crash_rank": 1}, 1, "(Worker_TP1 pid="),
        ({"crash_at": "80%", "crash_with": "nccl_watchdog"}, 1, "Watchdog caught collective operation timeout"),
        ({"crash_at": 0.1, "crash_with": "import_error", "exit_code": 3}, 3, "undefined symbol"),
        ({"crash_at": "compile", "crash_signal": 9}, -9, "torch_compile_cache"),
        ({"crash_at": "no such phase"}, 64, "this load has"),
        ({"crash_att": 1}, 64, "unknown knob crash_att"),
    ],
)
def test_a_load_crashes_as_told(start: Any, knobs: dict[str, Any], status: int, words: str) -> None:
    fake = start("--tensor-parallel-size", "2", knobs=knobs)
    assert fake.status() == status
    if status != -9:
        assert words in fake.text()
    if status == 1:
        assert (
            fake.text()
            .rstrip()
            .endswith(
                "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): "
                "{'EngineCore': 1}"
            )
        )
    assert READY not in fake.text()


def test_a_hang_prints_nothing_and_burns_nothing(start: Any) -> None:
    fake = start(knobs={"hang_at": "distributed"})
    fake.wait_for("Initializing a V1 LLM engine")
    time.sleep(0.3)
    size, used = fake.log.stat().st_size, cpu_ticks(fake.process.pid)
    time.sleep(0.5)
    assert (fake.log.stat().st_size, cpu_ticks(fake.process.pid)) == (size, used)
    assert fake.process.poll() is None


def test_orphans_and_a_foreign_listener_outlive_a_stop(start: Any) -> None:
    port = free_port()
    fake = start("-tp", "2", knobs={"orphan_workers": True, "memory_mib": 30, "extra_listener_port": port})
    text = fake.wait_for(READY)
    workers = {int(pid) for pid in re.findall(r"Worker_TP\d pid=(\d+)", text)}
    fake.process.terminate()
    assert fake.status() == 0
    assert len(workers) == 2
    for pid in workers:
        assert os.getsid(pid) == pid
        assert (
            int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
            > 30 << 20
        )
        os.kill(pid, signal.SIGKILL)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
        assert answer.status == 200
    holders = [
        int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit() and listens(folder, port)
    ]
    assert len(holders) == 1
    os.kill(holders[0], signal.SIGKILL)


def listens(folder: Path, port: int) -> bool:
    """Whether a process holds a socket that listens on a port of 127.0.0.1."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="utf-8").splitlines()[1:]]
    inodes = {row[9] for row in rows if row[1] == f"0100007F:{port:04X}" and row[3] == "0A"}
    with contextlib.suppress(OSError):
        return any(
            str(entry.readlink()) == f"socket:[{inode}]" for entry in (folder / "fd").iterdir() for inode in inodes
        )
    return False


def cpu_ticks(pid: int) -> int:
    """User and system time of a process in clock ticks."""
    parts = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(parts[11]) + int(parts[12])


@pytest.mark.parametrize(
    ("knobs", "text", "reason"),
    [
        ({"empty_answer": True}, "", "stop"),
        ({"completions_garbage": True}, "!!!!!!!!", "length"),
        ({"answer_tokens": 3}, None, "stop"),
        ({"loop_output": True}, " again and again the same again and again", "length"),
    ],
)
def test_bad_answers(start: Any, knobs: dict[str, Any], text: str | None, reason: str) -> None:
    fake = start(knobs=knobs)
    fake.wait_for(READY)
    choice = fake.complete(max_tokens=8)["choices"][0]
    assert choice["finish_reason"] == reason
    if text is not None:
        assert choice["text"] == text


@pytest.mark.parametrize(
    ("flags", "status", "last"),
    [
        (["--disable-log-requests"], 2, "vllm: error: unrecognized arguments: --disable-log-requests"),
        (["--max-num-seqs", "many"], 2, "vllm serve: error: argument --max-num-seqs: invalid int value: 'many'"),
        (["--speculative-config", '{"method":"ngramm"}'], 1, "https://errors.pydantic.dev/2.14/v/literal_error"),
        (["--max-model-len", "100000"], 1, "https://errors.pydantic.dev/2.14/v/value_error"),
        (["--enable-auto-tool-choice", "--tool-call-parser", "kimi_k9"], 1, "seed_oss,step3,step3p5,xlam })'"),
    ],
)
def test_bad_arguments_end_it_in_the_real_words(start: Any, flags: list[str], status: int, last: str) -> None:
    fake = start(*flags)
    assert fake.status() == status
    assert fake.text().rstrip().split("\n")[-1].endswith(last)


def test_a_missing_model_and_a_taken_port(start: Any, shared: Path) -> None:
    gone = start(model=shared / "nothing")
    assert gone.status() == 1
    assert (
        f"HFValidationError: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '{shared}/nothing'"
        in gone.text()
    )
    first = start()
    first.wait_for(READY)
    second = Fake(shared, "--port", str(first.port))
    assert second.status() == 1
    assert "OSError: [Errno 98] Address already in use" in second.text()


PREFLIGHT = """
import json, sys, time
begun = time.monotonic()
import vllm
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.entrypoints.{module} import make_arg_parser, validate_parsed_serve_args
from vllm.engine.arg_utils import AsyncEngineArgs
args = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(sys.argv[1:])
validate_parsed_serve_args(args)
config = AsyncEngineArgs.from_cli_args(args).create_engine_config()
spec = config.speculative_config
print(json.dumps([vllm.__version__, spec and [spec.method, spec.prompt_lookup_min, spec.prompt_lookup_max],
    config.scheduler_config.async_scheduling, config.model_config.max_model_len,
    config.parallel_config.tensor_parallel_size, str(config.compilation_config.cudagraph_mode),
    time.monotonic() - begun]))
"""


@pytest.mark.parametrize(("version", "module"), [("0.32.0", "launchers.cli_args"), ("0.26.0", "openai.cli_args")])
def test_preflight_imports(shared: Path, tmp_path: Path, version: str, module: str) -> None:
    wheels = [sys.executable, str(FAKE / "build_wheels.py"), str(tmp_path), version]
    subprocess.run(wheels, check=True, stdout=subprocess.DEVNULL)
    wheel = tmp_path / f"vllm-{version}-py3-none-any.whl"
    first = wheel.read_bytes()
    subprocess.run(wheels, check=True, stdout=subprocess.DEVNULL)
    assert wheel.read_bytes() == first  # deterministic
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(tmp_path / "site")], check=True)
    found = {}
    for name, flags in (("baseline", []), ("ngram", ["--speculative-config", NGRAM])):
        command = [
            sys.executable,
            "-c",
            PREFLIGHT.format(module=module),
            str(shared / "model"),
            "--max-model-len",
            "2k",
            *flags,
        ]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env={"PYTHONPATH": str(tmp_path / "site")}
        )
        found[name] = json.loads(done.stdout.splitlines()[-1])
    assert found["baseline"][:6] == [version, None, True, 2000, 1, "FULL_AND_PIECEWISE"]
    assert found["ngram"][:3] == [version, ["ngram", 4, 4], False]
    assert found["ngram"][6] < 0.3


def test_old_releases_take_their_own_flags(tmp_path: Path) -> None:
    for version, taken in (("0.16.0", True), ("0.31.0", False)):
        subprocess.run(
            [sys.executable, str(FAKE / "build_wheels.py"), str(tmp_path), version],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        folder = tmp_path / version
        subprocess.run(
            [sys.executable, "-m", "zipfile", "-e", str(tmp_path / f"vllm-{version}-py3-none-any.whl"), str(folder)],
            check=True,
        )
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "/nonexistent", "--disable-log-requests"]
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(folder)})
        assert ("unrecognized arguments" not in done.stderr) is taken
        assert done.returncode == (1 if taken else 2)
