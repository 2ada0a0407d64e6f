"""`swapgate record` against a running fake engine: what is on disk afterwards."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
from ansible_collections.swapgate.core.plugins.host_program import engine_api, installed, main, recorder
from ansible_collections.swapgate.core.plugins.module_utils import records
from fake_engine import NGRAM, READY, free_port

TEXT = "red green blue yellow red green blue yellow red green"
PROMPTS = [
    {"id": "a", "class": "reasoning", "messages": [{"role": "user", "content": TEXT}], "max_tokens": 40},
    {
        "id": "b",
        "class": "multi_turn",
        "messages": [{"role": role, "content": f"{role} says {TEXT}"} for role in ("user", "assistant", "user")],
        "max_tokens": 24,
    },
]
GRID = [{"name": "off", "k": 0, "min": 1, "max": 4}, {"name": "k3", "k": 3, "min": 2, "max": 4}]


def request(**changes):
    return {"variant": "v", "prompts": PROMPTS, "repeats": 1, "settings": [None], "seed": 7, "salt": None, **changes}


@pytest.fixture
def layout(tmp_path):
    """A host's folders with variant `v` installed; `layout.port` is where it has to serve."""
    found = records.Layout(str(tmp_path))
    found.port = free_port()
    records.write_json(
        found.variants / "v.json",
        {
            **{"name": "v", "unit": "vllm-tiny-v.service", "bind": "127.0.0.1", "port": found.port},
            "model": {"name": "tiny", "served_name": "smol"},
        },
    )
    return found


def serve(layout, start, *flags, **knobs):
    fake = start(*flags, knobs={"tokens_per_s": 2000, **knobs})
    fake.wait_for(READY)
    variant = records.read_json(layout.variants / "v.json")
    records.write_json(layout.variants / "v.json", {**variant, "port": fake.port})
    return fake


def record(layout, tmp_path, **changes):
    said = []
    failed = recorder.record(layout, request(**changes), tmp_path / "out.jsonl", said.append)
    return failed, lines(tmp_path), said


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]


def hits(fake):
    page = fake.get("/metrics")[1]
    return next(
        float(line.split()[-1]) for line in page.splitlines() if line.startswith("vllm:prefix_cache_hits_total")
    )


def test_baseline_and_ngram_give_the_same_tokens_in_fewer_steps(layout, start, tmp_path):
    serve(layout, start)
    failed, plain, said = record(layout, tmp_path, repeats=2)
    assert failed == 0 and said[-1] == "recorded 4 of 4, 0 s left"
    assert [(line["repeat"], line["id"]) for line in plain] == [(0, "a"), (0, "b"), (1, "a"), (1, "b")]
    serve(layout, start, "--speculative-config", NGRAM, "--per-request-spec-decode-metrics", "detailed")
    _, drafted, _ = record(layout, tmp_path)
    serve(layout, start, "--speculative-config", NGRAM)
    _, counted, _ = record(layout, tmp_path)
    for one, other, third in zip(plain, drafted, counted):
        assert one["output_token_ids"] == other["output_token_ids"] and one["text"] == other["text"]
        assert one["prompt_token_ids"] == other["prompt_token_ids"] and one["prompt_token_ids"]
        assert one["steps"] == one["output_tokens"] - 1 and one["drafted"] is None
        # The last draft may reach one token past the end.
        assert other["steps"] - (other["output_tokens"] - 1 - sum(other["accepted"])) in (0, 1)
        assert third["steps"] == other["steps"] and third["drafted"] is None, "counted from the metrics page"
        assert 0 < one["ttft_s"] < one["e2e_s"] and one["decode_s"] < one["e2e_s"]
        assert one["cpu_s"] is not None and 0 <= one["cpu_s"] < 5
    assert any(sum(line["accepted"]) for line in drafted)


def test_a_salt_keeps_the_prefix_cache_cold(layout, start, tmp_path):
    fake = serve(layout, start)
    record(layout, tmp_path, repeats=2, salt="cold-1")
    assert hits(fake) == 0
    record(layout, tmp_path, repeats=2)
    assert hits(fake) > 0, "without a salt the second repeat finds the first one's"


def test_the_key_of_the_host_is_used(layout, start, tmp_path):
    serve(layout, start, "--api-key", "sk-test")
    with pytest.raises(recorder.RecordingFailed, match="status 401"):
        record(layout, tmp_path, repeats=3)
    records.write_atomic(layout.api_key, "sk-test\n", 0o600)
    assert record(layout, tmp_path)[0] == 0


def test_an_engine_that_dies_is_said_and_what_came_before_stays(layout, start, tmp_path, monkeypatch, capsys):
    serve(layout, start, die_on_first_completion=True, engine_death_exit_s=0.1)
    (tmp_path / "request.json").write_text(json.dumps(request(repeats=3)))
    monkeypatch.setattr(records, "Layout", lambda: layout)
    assert main.main(["record", str(tmp_path / "request.json"), str(tmp_path / "out.jsonl")]) == 1
    assert "3 requests in a row failed" in capsys.readouterr().err
    found = lines(tmp_path)
    assert len(found) == 3 and all(line["error"] for line in found)
    assert {"id", "class", "setting", "repeat"} <= set(found[0])


class Workers(BaseHTTPRequestHandler):
    """A trial unit's development endpoint with two workers; `stubborn` keeps one at its setting."""

    asked: ClassVar[list] = []
    stubborn = False

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Workers.asked.append((self.path, body))
        second = {"k": 5, "min": 1, "max": 4} if Workers.stubborn else body["kwargs"]
        self.answer(json.dumps({"results": [body["kwargs"], second]}))

    def do_GET(self):
        self.answer("vllm:spec_decode_num_drafts_total 1.0\n")

    def answer(self, text):
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def workers(layout):
    server = ThreadingHTTPServer(("127.0.0.1", layout.port), Workers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    Workers.asked, Workers.stubborn = [], False
    yield recorder.Recorder(installed.named(layout, "v"), None)
    server.shutdown()
    server.server_close()


def test_a_setting_is_asked_of_every_worker_once(workers):
    workers.put(GRID[1])
    workers.put(GRID[1])
    workers.put(None)
    assert Workers.asked == [
        ("/collective_rpc", {"method": "swapgate_set", "kwargs": {"k": 3, "min": 2, "max": 4}, "timeout": 30.0})
    ]


def test_a_worker_that_keeps_its_setting_ends_the_recording(workers):
    Workers.stubborn = True
    with pytest.raises(recorder.RecordingFailed, match=r"setting k3: found .* expected .* of every worker"):
        workers.put(GRID[1])


def test_a_unit_that_is_no_trial_cannot_be_set(layout, start, tmp_path):
    serve(layout, start)
    with pytest.raises(recorder.RecordingFailed, match="Only a trial unit can change it"):
        record(layout, tmp_path, settings=GRID)


def test_settings_are_shuffled_within_each_prompt_and_the_seed_decides():
    def order(**changes):
        plan = list(recorder.plan(request(settings=GRID, repeats=8, salt="s", **changes)))
        assert len({salt for *_, salt in plan}) == len(plan), "every request has a salt of its own"
        keys = [(repeat, prompt["id"]) for repeat, prompt, *_ in plan]
        assert keys[::2] == keys[1::2] == [(repeat, name) for repeat in range(8) for name in "ab"]
        return [setting["name"] for _, _, setting, _ in plan]

    first = order()
    assert order() == first and order(seed=8) != first
    assert {tuple(first[at : at + 2]) for at in range(0, len(first), 2)} == {("off", "k3"), ("k3", "off")}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"repeats": 0}, "no prompts, repeats or settings"),
        ({"repeats": True}, "repeats: found True, expected int"),
        ({"prompts": [{"id": "a"}]}, "prompts: class: found None, expected str"),
        ({"settings": [None, GRID[0]]}, "settings: found NoneType"),
        ({"salt": "a/b"}, "salt: found 'a/b'"),
        ({"variant": "other"}, "variant 'other' is not installed on this host; installed are tiny/v"),
    ],
)
def test_a_request_of_the_wrong_shape_asks_nothing(layout, tmp_path, changes, said):
    with pytest.raises(records.RecordError, match=said):
        record(layout, tmp_path, **changes)
    assert not (tmp_path / "out.jsonl").exists()


def test_nothing_that_serves_is_an_error_of_the_engine(layout, tmp_path):
    with pytest.raises(engine_api.EngineError, match="GET /metrics"):
        record(layout, tmp_path)
