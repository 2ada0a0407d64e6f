"""`vllm serve`: the load, the serving, the ways to stop and the ways to fail, in the process that is the API server."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import time
from typing import Any, NoReturn

from vllm.engine.arg_utils import AsyncEngineArgs, VllmConfig
from vllm.fake import knobs as knob_file
from vllm.fake import log, release, story
from vllm.fake.engine import Engine
from vllm.fake.parsers import validate_api_server_args
from vllm.fake.story import Beat
from vllm.fake.teller import Teller

KV_TOKENS = 400_000
STATS_S = 10.0
EARLY = ("start", "arguments")  # before the real server installs its signal handlers


class Stopped(Exception):
    """The load ends: an exit status."""

    def __init__(self, status: int):
        super().__init__(status)
        self.status = status


def profile_for(args: argparse.Namespace, config: VllmConfig | None, wanted: str | None) -> str:
    """The recording to tell: the knob's, else by the number of workers and the speculative method."""
    known = story.profiles()
    if wanted is not None:
        if wanted not in known:
            raise knob_file.fail(f"load_profile {wanted!r} is not recorded, known are {', '.join(known)}")
        return wanted
    base = "tp8" if args.tensor_parallel_size > 1 else "h200"
    method = config.speculative_config.method if config and config.speculative_config else ""
    return f"{base}-ngram" if method == "ngram" else base


def moment(value: str | float | None, beats: list[Beat], knob: str) -> float | None:
    """Seconds of the load at which a fault strikes: a phase's name, seconds, or a percentage such as "80%".

    None for no fault.
    """
    if value is None:
        return None
    total = story.length_of(beats)
    if isinstance(value, (int, float)):
        return float(value)
    if value.endswith("%"):
        return total * float(value[:-1]) / 100
    found = next((beat.at for beat in beats if beat.phase == value and beat.opens), None)
    if found is None:
        phases = ", ".join(dict.fromkeys(beat.phase for beat in beats))
        raise knob_file.fail(f"{knob} names phase {value!r}, this load has {phases}")
    return found


class Launch:
    """One run of the server."""

    def __init__(self, args: argparse.Namespace, knobs: knob_file.Knobs):
        self.args, self.knobs = args, knobs
        self.host = args.host or "0.0.0.0"
        names = args.served_model_name or [args.model]
        self.served = [knobs.wrong_served_name] if knobs.wrong_served_name else list(names)
        self.teller = Teller(args, names[0], self.host)
        self.config: VllmConfig | None = None
        self.engine: Engine | None = None
        self.server: Any = None
        self.state: Any = None
        self.terms = 0
        self.born = time.monotonic()
        self.wake, wake_writer = os.pipe()
        os.set_blocking(self.wake, False)
        os.set_blocking(wake_writer, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        self.socket: Any = None
        self.fds = [self.wake, wake_writer]

    # --- waiting

    def pause(self, seconds: float | None) -> None:
        """Sleeps without burning CPU; a signal ends it early."""
        ready, _, _ = select.select([self.wake], [], [], seconds)
        if ready:
            with contextlib.suppress(BlockingIOError):
                os.read(self.wake, 4096)

    def note_signal(self, *_: object) -> None:
        """SIGTERM and SIGINT only count here; the loops look."""
        self.terms += 1

    def take_signals(self) -> None:
        """Installs the handlers: the real server does so when it starts its engine."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN if self.knobs.ignore_sigterm else self.note_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    # --- the load

    def check(self) -> None:
        """What the real server checks between its first lines and its engine.

        Errors end the program with a traceback and status 1.
        """
        from vllm.fake.server import bound_socket

        validate_api_server_args(self.args)
        self.socket = bound_socket(self.host, self.args.port)
        self.config = AsyncEngineArgs.from_cli_args(self.args).resolve()
        self.teller.config = self.config

    def make_server(self) -> None:
        """The HTTP server with its state; it listens when told to."""
        from vllm.fake import worker
        from vllm.fake.answers import Writer
        from vllm.fake.metrics import Metrics
        from vllm.fake.server import Server, State

        assert self.config is not None
        spec = self.config.speculative_config
        positions = None if spec is None else [0] * spec.num_speculative_tokens
        metrics = Metrics(self.served[0], KV_TOKENS, self.args.gpu_memory_utilization, positions)
        writer = Writer(
            self.knobs,
            metrics,
            spec,
            self.served,
            self.config.model_config.max_model_len,
            self.config.scheduler_config.max_num_seqs,
            lambda: self.engine is not None and self.engine.suspended(),
            getattr(self.args, "per_request_spec_decode_metrics", None) or "none",
            worker.make(spec, getattr(self.args, "worker_extension_cls", None)),
        )
        keys = [key for key in [os.environ.get("VLLM_API_KEY", ""), *(self.args.api_key or [])] if key]
        access = not getattr(self.args, "disable_uvicorn_access_log", False)
        self.state = State(writer, self.args.model, keys, access, self.healthy, self.first_completion)
        self.server = Server(self.socket, self.state)

    def load(self) -> None:
        """Tells the whole start. Raises Stopped when it ends early."""
        knobs = self.knobs
        early = story.lay_out(profile_for(self.args, None, knobs.load_profile), 0.0, 1, None)
        for beat in early:
            if beat.phase in EARLY:
                self.teller.tell(beat)
        self.check()
        profile = profile_for(self.args, self.config, knobs.load_profile)
        shards = knobs.shards or (64 if self.args.tensor_parallel_size > 1 else 1)
        beats = story.lay_out(profile, knobs.load_s, shards, knobs.slow_shards)
        crash = moment(knobs.crash_at, beats, "crash_at")
        hang = moment(knobs.hang_at, beats, "hang_at")
        self.take_signals()
        for beat in beats:
            if beat.phase in EARLY:
                continue
            if hang is not None and beat.at >= hang:
                self.hang()
            if crash is not None and beat.at >= crash:
                self.until(self.born + crash)
                self.crash()
            self.until(self.born + beat.at)
            if beat.phase == "api" and self.terms:
                if knobs.swallowed_term == "hang":
                    self.hang()
                self.terms = 0  # swallowed without a trace
            self.enter(beat)
            self.teller.tell(beat)
        if not knobs.bind_early:
            self.server.start()  # no answer comes before uvicorn's own lines, as with the real one

    def enter(self, beat: Beat) -> None:
        """What a phase does besides printing."""
        if not beat.opens:
            return
        knobs = self.knobs
        if beat.phase == "config":
            if knobs.noise:
                self.teller.noise(knobs.noise if isinstance(knobs.noise, list) else [])
            if knobs.extra_listener_port:
                self.start_listener(knobs.extra_listener_port)
        elif beat.phase == "engine":
            self.engine = Engine(self.args.tensor_parallel_size, knobs, [self.socket.fileno(), *self.fds])
            self.teller.engine = self.engine
            self.make_server()
            if knobs.bind_early:
                self.state.loading = True
                self.server.start()
        elif beat.phase == "distributed":
            assert self.engine is not None
            self.engine.tell("workers")
            self.engine.wait_workers()
        elif beat.phase == "api":
            assert self.engine is not None
            self.engine.tell("ready")
            self.state.loading = False
            if not knobs.bind_early:
                self.server.listen()

    def until(self, moment_: float) -> None:
        """Waits to a monotonic time while looking at signals and at the engine."""
        while True:
            self.look()
            left = moment_ - time.monotonic()
            if left <= 0:
                return
            self.pause(left)

    def look(self) -> None:
        """During the load: the first signal is swallowed, the second ends it; an engine that died ends it, unless a
        signal was swallowed.
        """
        if self.terms >= 2:
            self.pause(self.knobs.second_term_s)
            self.end_engine()
            raise Stopped(1)
        if self.engine is None or self.engine.alive() or self.terms:
            return
        cause = {"who": "worker"}
        self.teller.failure(cause, self.engine.death[0] if self.engine.death else 0)
        self.end_engine()
        raise Stopped(self.knobs.exit_code if self.knobs.exit_code is not None else 1)

    def hang(self) -> NoReturn:
        """Prints nothing more and uses no CPU; signals and a dying engine still count."""
        while True:
            self.look()
            self.pause(None)

    def crash(self) -> NoReturn:
        """The load fails in the recorded way."""
        knobs = self.knobs
        if knobs.crash_signal is not None:
            os.kill(os.getpid(), knobs.crash_signal)
        causes = json.loads((release.DATA / "failures.json").read_text(encoding="utf-8"))["causes"]
        if knobs.crash_with not in causes:
            raise knob_file.fail(f"crash_with {knobs.crash_with!r} is not recorded, known are {', '.join(causes)}")
        cause = causes[knobs.crash_with]
        if cause["who"] == "api":
            if cause["text"]:
                log.write(cause["text"].format(**self.teller.names(0)) + "\n", sys.stderr)
        else:
            if cause.get("worker_signal") and self.engine is not None:
                self.engine.tell(f"kill {knobs.crash_rank} {cause['worker_signal']}")
            self.teller.failure(cause, knobs.crash_rank)
        self.end_engine()
        raise Stopped(knobs.exit_code if knobs.exit_code is not None else 1)

    def end_engine(self) -> None:
        """Ends the engine's processes, if there are any."""
        if self.engine is not None:
            self.engine.stop(1.0)

    def start_listener(self, port: int) -> None:
        """Forks a process in a session of its own that answers 200 to everything on another port."""
        if os.fork():
            return
        os.setsid()
        for number in (self.socket.fileno(), *self.fds):
            os.close(number)
        from vllm.fake.listener import run

        run(self.host, port)

    # --- serving

    def healthy(self) -> bool:
        """What /health says: it reads a flag, as the real one, and runs nothing."""
        flaps = self.knobs.health_flaps
        if flaps:
            phase = (time.monotonic() - self.born) % flaps.get("period_s", 1.0)
            if phase >= flaps.get("period_s", 1.0) * flaps.get("up", 0.5):
                return False
        if self.knobs.health_ok_but_engine_dead or self.state.loading:
            return True
        return not self.state.writer.broken.is_set() or self.terms > 0

    def first_completion(self) -> None:
        """Before the first completion is computed."""
        if self.knobs.die_on_first_completion and self.engine is not None:
            self.engine.tell(f"kill 0 {int(signal.SIGKILL)}")
            self.state.writer.broken.wait(10.0)

    def serve(self) -> int:
        """Serves until asked to stop or until something dies. Returns the exit status."""
        knobs, ready = self.knobs, time.monotonic()
        assert self.engine is not None
        if knobs.health_ok_but_engine_dead:
            self.engine.tell("die")
        timers = [value for value in (knobs.exit0_after_ready_s, knobs.die_after_ready_s) if value is not None]
        said = 0
        next_stats = ready + STATS_S
        while True:
            if self.terms:
                return self.shut_down()
            if not self.engine.alive() and not (knobs.health_ok_but_engine_dead and self.state.writer.broken.is_set()):
                status = self.engine_died()
                if status is not None:
                    return status
            spent = time.monotonic() - ready
            if knobs.die_after_ready_s is not None and spent >= knobs.die_after_ready_s:
                return self.die()
            if knobs.exit0_after_ready_s is not None and spent >= knobs.exit0_after_ready_s:
                timers = [value for value in timers if value != knobs.exit0_after_ready_s]
                self.engine.tell(f"kill 0 {int(signal.SIGKILL)}")
                knobs.exit0_after_ready_s = None
            if time.monotonic() >= next_stats:
                said = self.say_stats(said)
                next_stats += STATS_S
            self.pause(min([max(0.0, value - spent) for value in timers] + [max(0.0, next_stats - time.monotonic())]))

    def say_stats(self, said: int) -> int:
        """The periodic line, when something happened since the last one.

        Takes and returns the tokens generated so far.
        """
        metrics = self.state.writer.metrics
        made: int = metrics.generation_tokens
        running: int = metrics.running
        if made == said and not running:
            return said
        used = 100 * metrics.context_tokens / metrics.max_tokens
        log.line(
            "INFO",
            "loggers.py:335",
            f"Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg generation throughput: "
            f"{(made - said) / STATS_S:.1f} tokens/s, "
            f"Running: {running} reqs, Waiting: {metrics.waiting} reqs, GPU KV cache usage: {used:.1f}%, Prefix "
            "cache hit rate: 0.0%",
        )
        return made

    def die(self) -> int:
        """Ends this process without a word, by a signal or a status, leaving the engine's processes to whoever cleans
        up.
        """
        if self.knobs.die_signal is not None:
            os.kill(os.getpid(), self.knobs.die_signal)
        self.end_engine()
        return self.knobs.exit_code if self.knobs.exit_code is not None else 1

    def engine_died(self) -> int | None:
        """The engine is gone: streams end with an error, /health says 503, and after a while the server ends with
        status 0.
        """
        where = "async_llm.py:906"
        log.line("ERROR", where, "AsyncLLM output_handler failed.")
        log.line("ERROR", where, "Traceback (most recent call last):")
        text = "EngineCore encountered an issue. See stack trace (above) for the root cause."
        log.line("ERROR", where, f"vllm.v1.engine.exceptions.EngineDeadError: {text}")
        self.state.writer.broken.set()
        assert self.engine is not None
        self.engine.kill_workers()
        self.engine.stop(0.5)
        if self.knobs.health_ok_but_engine_dead:
            return None
        self.until_gone(time.monotonic() + self.knobs.engine_death_exit_s)
        self.say_closing()
        return self.knobs.exit_code if self.knobs.exit_code is not None else 0

    def until_gone(self, end: float) -> None:
        """Waits to a monotonic time, whatever signals come."""
        while (left := end - time.monotonic()) > 0:
            self.pause(left)

    def say_closing(self) -> None:
        """uvicorn's last lines."""
        for text in ("Shutting down", "Waiting for application shutdown.", "Application shutdown complete."):
            log.write(f"INFO:     {text}\n")
        log.write(f"INFO:     Finished server process [{os.getpid()}]\n")

    def shut_down(self) -> int:
        """Asked to stop: abort or drain, then the engine, then the server.

        Never returns when streams outlive the drain limit.
        """
        assert self.config is not None and self.engine is not None
        limit = self.config.shutdown_timeout
        mode = "drain" if limit else "abort"
        log.line("INFO", "launcher.py:254", "[shutdown] API server: shutdown triggered")
        log.line(
            "INFO", "launcher.py:270", f"[shutdown] API server: stopping engine client mode={mode} timeout={limit}s"
        )
        log.line("INFO", "core_client.py:770", f"[shutdown] MPClient: start timeout={limit}s")
        self.state.draining = True
        end = time.monotonic() + limit
        while self.state.inflight and time.monotonic() < end:
            self.pause(0.02)
        stuck = (limit > 0 or self.knobs.abort_hangs) and self.state.inflight > 0
        (self.state.writer.frozen if stuck else self.state.writer.broken).set()
        self.engine.stop(1.0)
        self.until_gone(time.monotonic() + self.knobs.stop_s)
        log.line("INFO", "launcher.py:279", "[shutdown] API server: engine client stopped")
        log.line("INFO", "launcher.py:282", "[shutdown] API server: signalling HTTP server shutdown")
        if stuck:
            log.write("INFO:     Shutting down\nINFO:     Waiting for connections to close. (CTRL+C to force quit)\n")
            while True:
                self.pause(3600.0)
        self.say_closing()
        return 0


def serve(args: argparse.Namespace) -> int:
    """The command. Returns the exit status."""
    if args.model_tag:
        args.model = args.model_tag
    launch = Launch(args, knob_file.load(sys.argv[1:]))
    if launch.knobs.applied:
        log.write(f"fake vllm: knobs for {', '.join(launch.knobs.applied)}\n", sys.stderr)
    try:
        launch.load()
    except Stopped as stopped:
        return stopped.status
    except SystemExit:
        launch.end_engine()
        raise
    return launch.serve()
