"""Profiling what serves: a server that streams and writes a trace when its profiler is switched off."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from ansible_collections.swapgate.core.plugins.host_program import decode_profile
from ansible_collections.swapgate.core.plugins.module_utils import records

UNIT = "vllm-tiny-profiled.service"
TRACE = {
    "traceEvents": [
        {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "pid": 0, "tid": 7}
        for name, ts, dur in (("ncclDevKernel_AllReduce", 0, 60), ("nvjet", 60, 40))
    ]
}


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A layout whose variant is answered by a small server; yields it with what was asked and a switch to fail."""
    folder = tmp_path / "profiles"
    folder.mkdir()
    (folder / "old.pt.trace.json").write_text("of an earlier profile")
    asked: list[tuple[str, int]] = []
    behave = {"start": 200, "trace": json.dumps(TRACE)}
    pieces = [0]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.append((self.path, pieces[0]))
            if self.path == "/start_profile" and behave["start"] != 200:
                self.send_error(behave["start"])
                return
            self.send_response(200)
            self.end_headers()
            if self.path == "/stop_profile":
                (folder / "rank0.pt.trace.json").write_text(behave["trace"])
            if self.path == "/v1/completions":
                assert json.loads(body)["ignore_eos"] and self.headers["Authorization"] == "Bearer k"
                try:
                    while pieces[0] < 500:
                        pieces[0] += 1
                        self.wfile.write(b'data: {"choices": []}\n\n')
                        time.sleep(0.002)
                except OSError:
                    return

        def log_message(self, *words):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    layout = records.Layout(str(tmp_path))
    layout.units.mkdir(parents=True)
    (layout.units / UNIT).write_text("[Service]\n")
    layout.api_key.parent.mkdir(parents=True)
    layout.api_key.write_text("k\n")
    variant = {
        "name": "profiled",
        "unit": UNIT,
        "bind": "127.0.0.1",
        "port": server.server_port,
        "model": {"name": "tiny", "served_name": "tiny"},
        "argv": ["vllm", "serve", "--profiler-config", json.dumps({"torch_profiler_dir": str(folder)})],
    }
    records.write_json(layout.variants / "profiled.json", variant)
    monkeypatch.setattr(decode_profile, "active_units", lambda _: [UNIT])
    yield layout, asked, behave, folder
    server.shutdown()
    server.server_close()


def test_some_decode_steps_are_profiled_and_summed(engine):
    layout, asked, _, folder = engine
    report = decode_profile.profile(layout, 20, keep=False)
    assert [path for path, _ in asked] == ["/v1/completions", "/start_profile", "/stop_profile"]
    started, stopped = asked[1][1], asked[2][1]
    assert started >= decode_profile.SKIP_STEPS and stopped - started >= 15, "not around decode steps"
    assert report["kinds"]["all-reduce"]["share"] == pytest.approx(0.6)
    assert (report["variant"], report["unit"], report["traces"]) == ("profiled", UNIT, [])
    assert [path.name for path in folder.iterdir()] == ["old.pt.trace.json"], "an old trace is not this profile's"


def test_traces_can_be_kept(engine):
    layout, _, _, folder = engine
    assert decode_profile.profile(layout, 5, keep=True)["traces"] == [str(folder / "rank0.pt.trace.json")]


def test_a_profiler_that_does_not_start_is_said_with_the_unit(engine):
    engine[2]["start"] = 404
    with pytest.raises(decode_profile.ProfileError, match="POST /start_profile: status 404"):
        decode_profile.profile(engine[0], 5, keep=False)


def test_what_serves_without_a_profiler_is_told_how_to_get_one(engine, monkeypatch):
    layout = engine[0]
    variant = records.read_json(layout.variants / "profiled.json")
    records.write_json(layout.variants / "profiled.json", dict(variant, argv=["vllm", "serve"]))
    with pytest.raises(decode_profile.ProfileError, match="extends 'profiled' with `profiler: true`"):
        decode_profile.profile(layout, 5, keep=False)
    monkeypatch.setattr(decode_profile, "active_units", lambda _: [])
    with pytest.raises(decode_profile.ProfileError, match="nothing serves"):
        decode_profile.profile(layout, 5, keep=False)
