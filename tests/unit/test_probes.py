"""swapgate probe against a small HTTP server that decodes in lock-step, with clocks of its own making."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.swapgate.core.plugins.host_program import main as program
from ansible_collections.swapgate.core.plugins.host_program import probes
from ansible_collections.swapgate.core.plugins.module_utils import records

COST = {1: 1.0, 2: 1.3, 3: 1.5, 6: 2.5}
BLOCK = 16


class FakeEngine(ThreadingHTTPServer):
    """Counts what it is asked; a step of b tokens takes COST[b] made-up seconds."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict[str, Any]] = []
        self.totals = dict.fromkeys(probes.WATCHED, 0.0)
        del self.totals["drafts"], self.totals["drafted_tokens"], self.totals["accepted_tokens"]
        self.others = 0  # requests of somebody else that end during each of ours
        self.foreign = 0  # tokens of somebody else's request that goes on
        self.most = 256

    def page(self) -> str:
        lines = [f"{probes.WATCHED[key]} {value}" for key, value in self.totals.items()]
        return "\n".join(
            [*lines, f'vllm:cache_config_info{{block_size="{BLOCK}",enable_prefix_caching="True"}} 1.0', ""]
        )


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeEngine

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_GET(self) -> None:
        self._answer(self.server.page() if self.path == "/metrics" else json.dumps({"version": "0.32.0"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        engine = self.server
        engine.bodies.append(body)
        prompts, tokens = body["prompt"], body["max_tokens"]
        lines = []
        # No more at a time than fits: the rest waits until those are done.
        for start in range(0, len(prompts), engine.most):
            some = range(start, min(start + engine.most, len(prompts)))
            lines += [{"choices": [{"index": i, "token_ids": [7]}]} for _ in range(tokens) for i in some]
        b = len(prompts)
        totals = engine.totals
        totals["decode_s"] += 0.01 * COST.get(b, 1.0) * (tokens - 1) * b
        totals["prefill_s"] += 0.03 + 0.001 * (len(prompts[0]) % BLOCK)
        totals["steps"] += tokens
        totals["generated"] += b * tokens + 5 * engine.others + engine.foreign
        totals["finished"] += b + engine.others
        totals["hits"] += len(prompts[0]) // BLOCK * BLOCK
        self._answer("".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n")


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    server = FakeEngine()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def asked(engine: FakeEngine) -> Iterator[probes.Engine]:
    one = probes.Engine("127.0.0.1", engine.server_address[1], "small", None, list)
    yield one
    one.close()


def request(**more: Any) -> dict[str, Any]:
    texts = [[1000 * i + one for one in range(60)] for i in range(6)]
    return {"texts": texts, "batch": [2, 3, 6], "repeats": 1, "tokens": 8, **more}


def run(asked: probes.Engine, **more: Any) -> dict[str, Any]:
    return probes.probe(asked, request(**more), lambda _: None)


def test_every_b_stands_between_two_single_streams(asked: probes.Engine) -> None:
    found = run(asked)
    assert found["block_size"] == BLOCK
    assert found["engine_version"] == "0.32.0"
    assert found["stopped"] is None
    assert {one["kind"] for one in found["runs"]} == set(probes.KINDS)
    for group in {one["group"] for one in found["runs"]}:
        order = [one["b"] for one in found["runs"] if one["group"] == group]
        assert order[::2] == [1] * 4
        assert sorted(order[1::2]) == [2, 3, 6]
    assert all(one["ok"] for one in found["runs"])
    for one in found["runs"]:
        if one["kind"] != "suffix-prefill":
            assert one["engine_s"] == pytest.approx(0.01 * COST[one["b"]])
            assert one["steps"] == 7
        else:
            assert one["engine_s"] == pytest.approx(0.03 + 0.001 * one["b"])


def test_what_the_four_kinds_ask(asked: probes.Engine, engine: FakeEngine) -> None:
    run(asked, kinds=["independent"])
    wide = next(body["prompt"] for body in engine.bodies if len(body["prompt"]) == 6)
    assert len({prompt[0] for prompt in wide}) == 6
    engine.bodies.clear()
    run(asked, kinds=["duplicate"])
    wide = next(body["prompt"] for body in engine.bodies if len(body["prompt"]) == 6)
    assert all(prompt == wide[0] for prompt in wide)
    engine.bodies.clear()
    run(asked, kinds=["staircase"])
    wide = next(body["prompt"] for body in engine.bodies if len(body["prompt"]) == 6)
    assert [len(prompt) for prompt in wide] == list(range(len(wide[0]), len(wide[0]) + 6))
    assert all(prompt == wide[-1][: len(prompt)] for prompt in wide)
    engine.bodies.clear()
    run(asked, kinds=["suffix-prefill"])
    assert {len(body["prompt"][0]) % BLOCK for body in engine.bodies} == {1, 2, 3, 6}
    assert all(body["max_tokens"] == 1 for body in engine.bodies)


def test_runs_that_others_shared_do_not_count(asked: probes.Engine, engine: FakeEngine) -> None:
    engine.others = 1
    with pytest.raises(probes.ProbeError, match="others were served"):
        run(asked, kinds=["duplicate"])
    engine.others, engine.foreign = 0, 3
    with pytest.raises(probes.ProbeError, match="19 tokens were generated, expected our 16"):
        run(asked, kinds=["duplicate"], batch=[2])


def test_what_may_come_later_comes_when_every_repeat_of_the_batch_is_done(asked: probes.Engine) -> None:
    said: list[str] = []
    found = probes.probe(asked, request(batch=[2], later=[12, 3], repeats=2), said.append)
    order = [one["b"] for one in found["runs"]]
    first = order.index(12 if order.index(12) < order.index(3) else 3)
    assert order[: first - 1].count(2) == order.count(2) == 2 * len(probes.KINDS)
    assert order.count(12) == 2 * 2, "no 12 different texts are there, and a prefill does not decode"
    assert order.count(3) == 2 * 3
    assert said[0].startswith(f"probed 3 of {len(order)} runs, independent, ") and said[0].endswith(" s left")
    assert said[-1].startswith(f"probed {len(order)} of {len(order)} runs") and said[-1].endswith(", 0 s left")


def test_minutes_that_end_in_the_later_part_say_that_the_batch_is_whole(
    asked: probes.Engine, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "QUIET_S", 0.1)

    def say(_: str) -> None:
        engine.totals["running"] = 1

    found = probes.probe(asked, request(kinds=["duplicate"], batch=[2], later=[3]), say)
    assert [one["b"] for one in found["runs"]] == [1, 2, 1]
    assert found["stopped"].endswith("; every run of the batch is there, of the later b some")


def test_an_engine_that_serves_others_is_left_alone(asked: probes.Engine, engine: FakeEngine) -> None:
    engine.totals["running"] = 2
    with pytest.raises(probes.ProbeError, match="2 requests running"):
        run(asked)
    assert not engine.bodies


def test_traffic_that_comes_later_ends_the_probe_with_what_it_has(
    asked: probes.Engine, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "QUIET_S", 0.1)
    seen: list[str] = []

    def say(line: str) -> None:
        seen.append(line)
        engine.totals["running"] = 1

    found = probes.probe(asked, request(kinds=["duplicate", "staircase"]), say)
    assert "others are being served" in found["stopped"]
    assert {one["kind"] for one in found["runs"]} == {"duplicate"}


def test_speculation_is_refused_and_the_minutes_are_kept(asked: probes.Engine, engine: FakeEngine) -> None:
    with pytest.raises(probes.ProbeError, match="no run can be used: 1e-09 minutes are over"):
        run(asked, max_minutes=1e-9)
    engine.totals["drafts"] = 0.0
    with pytest.raises(probes.ProbeError, match="speculation on"):
        run(asked)


def test_a_batch_that_the_engine_does_not_run_at_once_is_noticed(asked: probes.Engine, engine: FakeEngine) -> None:
    engine.most = 4
    found = run(asked, kinds=["duplicate"])
    assert {one["b"] for one in found["runs"] if not one["ok"]} == {6}
    assert "more than the engine runs at once" in next(one["why"] for one in found["runs"] if not one["ok"])


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"texts": []}, "texts"),
        ({"batch": [1]}, "batch"),
        ({"batch": []}, "batch"),
        ({"later": [300]}, "later"),
        ({"kinds": ["tree"]}, "tree"),
        ({"repeats": 0}, "repeats"),
        ({"tokens": 2}, "at least 8"),
        ({"minutes": 3}, "found minutes"),
    ],
)
def test_wrong_requests(more: dict[str, Any], told: str) -> None:
    with pytest.raises(probes.ProbeError, match=told):
        probes.asked(request(**more))


def test_a_kind_that_cannot_be_had_is_named(asked: probes.Engine) -> None:
    found = run(asked, texts=[list(range(10))] * 6, batch=[2])
    assert "suffix-prefill" in found["absent"]


def test_experts_come_from_the_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"text_config": {"n_routed_experts": 384, "num_experts_per_tok": 8}})
    )
    assert probes.experts_of(str(tmp_path)) == {"per_layer": 384, "per_token": 8}
    (tmp_path / "config.json").write_text("{}")
    assert probes.experts_of(str(tmp_path)) is None
    assert probes.experts_of(None) is None


def test_the_command(
    engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = records.Layout(str(tmp_path))
    variant = {
        **{"name": "baseline", "unit": "vllm-small.service", "bind": "127.0.0.1", "port": engine.server_address[1]},
        "model": {"name": "small", "served_name": "small", "path": "/nowhere"},
    }
    records.write_json(layout.variants / "baseline.json", variant)
    monkeypatch.setattr(program.records, "Layout", lambda: layout)
    monkeypatch.setattr(probes, "members_of", lambda _: [])
    ask, out = tmp_path / "ask.json", tmp_path / "out.json"
    ask.write_text(json.dumps({**request(kinds=["duplicate"]), "variant": "baseline"}))
    assert program.main(["probe", str(ask), str(out)]) == 0
    assert json.loads(out.read_text())["unit"] == "vllm-small.service"
    assert out.stat().st_mode & 0o777 == 0o600
    engine.totals["running"] = 1
    assert program.main(["probe", str(ask), str(out)]) == 1
    assert "quiet time" in capsys.readouterr().err
    ask.write_text("{}")
    assert program.main(["probe", str(ask), str(out)]) == 2
