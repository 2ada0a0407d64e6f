"""`swapgate bench` against a running fake engine, with its `vllm bench serve`: what is in the folder afterwards."""

import json
import os
import signal
import tarfile
import threading
import time

import pytest
from ansible_collections.swapgate.core.plugins.host_program import bench, jobs, main, recorder
from ansible_collections.swapgate.core.plugins.module_utils import records
from fake_engine import NGRAM, READY, site

TEXT = "red green blue yellow red green blue yellow red green"
PROMPTS = [
    {
        "id": f"p{number}",
        "class": "reasoning" if number % 2 else "code_edit",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"{number} {TEXT} {number}"},
        ],
        "max_tokens": 30,
    }
    for number in range(4)
]
SMI = """#!/bin/sh
echo "index, driver_version, clocks.current.sm [MHz], clocks.current.memory [MHz], temperature.gpu, power.draw [W], clocks_event_reasons.active"
echo "0, 580.65, 1980 MHz, 3201 MHz, 61, 512.3 W, {bits}"
"""  # noqa: E501


@pytest.fixture
def host(tmp_path, start, shared, monkeypatch):
    """A host's folders, and `serve(*flags, **knobs)`, which starts the engine that its one variant `v` names."""
    layout = records.Layout(str(tmp_path / "root"))
    program = tmp_path / "venv/bin/vllm"
    program.parent.mkdir(parents=True)
    program.write_text(f'#!/bin/sh\nPYTHONPATH={site(shared)} exec python3 -m vllm.entrypoints.cli.main "$@"\n')
    program.chmod(0o755)
    # Nobody can look into pytest's folders; the end-to-end tests have a service user.
    monkeypatch.setattr(bench.Bench, "_account", lambda self: {})

    def serve(*flags, gpus=(), **knobs):
        fake = start("--max-num-seqs", "4", *flags, knobs={"tokens_per_s": 2000, "ttft_s": 0.001, **knobs})
        fake.wait_for(READY)
        variant = {
            "name": "v",
            "unit": "vllm-tiny.service",
            "bind": "127.0.0.1",
            "port": fake.port,
            "gpus": list(gpus),
            "model": {"name": "tiny", "served_name": "smol", "path": str(shared / "model")},
            "engine": {"venv": str(tmp_path / "venv"), "version": "0.32.0", "package": "vllm"},
            "argv": ["vllm", "serve", "x", "--max-num-seqs", "4", *flags],
            "env": {"NCCL_P2P_LEVEL": "SYS", "HOME": "/x"},
        }
        records.write_json(layout.variants / "v.json", variant)
        return fake

    layout.serve = serve
    return layout


def request(**changes):
    return {"variant": "v", "prompts": PROMPTS, "concurrency": [1], "repeats": 2, "cache": "cold", **changes}


def measure(host, tmp_path, **changes):
    said = []
    load = bench.Bench(host, request(**changes), tmp_path / "out", said.append).run()
    return load, said


def read(tmp_path, name):
    return json.loads((tmp_path / "out" / name).read_text())


def test_what_is_measured_and_kept(host, tmp_path):
    host.serve("--speculative-config", NGRAM)
    load, said = measure(host, tmp_path, concurrency=[1, 4, 8])
    assert load["outcome"] == "measured", load
    assert (load["levels"], load["left_out"], load["max_num_seqs"]) == ([1, 4], [8], 4)
    assert load["speculative_config"]["method"] == "ngram" and load["nccl_env"] == {"NCCL_P2P_LEVEL": "SYS"}
    assert load["counted"]["accepted"] > 0 and load["counted"]["tokens_per_step"] > 1
    assert load["changes"] == [] and load["effective"] == {}, "no supervisor and no preflight here"
    assert load["kv_cache_tokens"] == 400_000 and load["foreign_requests"] == 0
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"c1-warmup.json", "c1-r0.json", "c1-r1.json", "c4-r1.pass.json", "recorded.jsonl", "load.json"} <= files
    recorded = [json.loads(line) for line in (tmp_path / "out/recorded.jsonl").read_text().splitlines()]
    for name in ("c1-r0", "c4-r1"):
        result, one = read(tmp_path, f"{name}.json"), read(tmp_path, f"{name}.pass.json")
        assert result["input_lens"] == [len(line["prompt_token_ids"]) for line in recorded]
        assert result["generated_texts"] == [line["text"] for line in recorded], "the same tokens in, the same text out"
        assert one["void"] is None and one["between"]["prefix_hits"] == 0, "cold"
        assert one["between"]["requests"] == len(PROMPTS)
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert set(archive.getnames()) == files - {"watched"}
    assert said[-1] == "7 of 7 passes, concurrency 4, 0.0 min left"


def test_a_warm_cache_is_warm_in_every_measured_pass(host, tmp_path):
    host.serve()
    load, _ = measure(host, tmp_path, cache="warm", repeats=1)
    assert load["counted"]["prefix_hits"] > 0


def test_the_key_reaches_the_load_generator_by_its_environment_only(host, tmp_path):
    host.serve("--api-key", "sk-bench")
    records.write_atomic(host.api_key, "sk-bench\n", 0o600)
    asked = bench.Bench(host, request(repeats=1), tmp_path / "out", lambda _: None)
    assert "sk-bench" not in " ".join(asked.command(tmp_path, "c1-r0", 1))
    assert asked.run()["outcome"] == "measured"
    assert all(b"sk-bench" not in file.read_bytes() for file in (tmp_path / "out").iterdir())


@pytest.mark.parametrize(("bits", "found"), [("0x0000000000000044", ["GPU 0: hardware thermal slowdown"]), ("0x4", [])])
def test_a_throttled_gpu_is_seen_and_a_power_cap_is_not_one(host, tmp_path, monkeypatch, bits, found):
    smi = tmp_path / "bin/nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(SMI.format(bits=bits))
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{smi.parent}:{os.environ['PATH']}")
    host.serve(gpus=[0])
    load, _ = measure(host, tmp_path, repeats=1)
    assert load["throttle_reasons"] == found and load["power_capped"] == [0]
    assert load["driver"] == "580.65" and load["temperatures"] == {"0": [61.0, 61.0]}
    assert load["clocks"]["0"] == {"sm_mhz": [1980.0, 1980.0], "mem_mhz": [3201.0, 3201.0]}


def measure_and_kill(host, tmp_path, file, after_s=0.0):
    """The LOAD of a benchmark whose engine is killed so long after a file of it has something in it."""
    fake, seen = host.serve(tokens_per_s=60), tmp_path / "out" / file

    def kill():
        while not (seen.exists() and seen.read_text()):
            time.sleep(0.05)
        time.sleep(after_s)
        os.killpg(fake.process.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    load, _ = measure(host, tmp_path)
    thread.join()
    return load


def test_an_engine_that_dies_in_a_pass_makes_it_void(host, tmp_path):
    load = measure_and_kill(host, tmp_path, "c1-warmup.pass.json", after_s=0.8)
    assert load["outcome"] == "failed"
    assert "the engine was restarted or stopped during the pass" in load["cause"]
    assert read(tmp_path, "c1-r0.pass.json")["void"]
    assert not (tmp_path / "out/c1-r1.json").exists(), "went on with an engine that is gone"
    assert (tmp_path / "out.tar.gz").exists()


def test_an_engine_that_dies_while_answers_are_recorded_is_the_cause(host, tmp_path):
    load = measure_and_kill(host, tmp_path, "recorded.jsonl")
    assert load["outcome"] == "failed"
    assert load["cause"].startswith(
        "the engine ended or was started anew during the benchmark (3 requests in a row failed"
    )


def test_other_tokens_than_the_recorders_are_refused(host, tmp_path, monkeypatch):
    host.serve()
    monkeypatch.setattr(
        bench.Bench,
        "_render",
        lambda self: self.out.joinpath("prompts.jsonl").write_text(
            "".join(json.dumps({"prompt": f"other {at}", "output_tokens": 8}) + "\n" for at in range(len(PROMPTS)))
        ),
    )
    load, _ = measure(host, tmp_path)
    assert load["outcome"] == "failed"
    assert "sent other tokens than the recorder: p0: found 3 tokens sent, expected" in load["cause"]


def test_a_load_generator_that_fails_says_why(host, tmp_path, shared):
    host.serve()
    variant = records.read_json(host.variants / "v.json")
    variant["model"]["path"] = "/nowhere"
    records.write_json(host.variants / "v.json", variant)
    load, _ = measure(host, tmp_path)
    assert load["cause"].startswith("the load generator ended with status 1: OSError: /nowhere is not a local folder")


def test_nobody_watching_ends_it(host, tmp_path, monkeypatch):
    monkeypatch.setattr(recorder, "TELL_S", 0.2)
    host.serve(tokens_per_s=20)
    asked = bench.Bench(host, request(), tmp_path / "out", lambda _: None, unwatched_s=1.0)
    begun = time.monotonic()
    load = asked.run()
    assert load["cause"] == "nobody has looked at it for 1 s" and time.monotonic() - begun < 20


def test_the_plan_is_said_and_measures_nothing(host, tmp_path, monkeypatch, capsys):
    host.serve(tokens_per_s=100)
    (tmp_path / "request.json").write_text(json.dumps(request()))
    monkeypatch.setattr(records, "Layout", lambda: host)
    assert main.main(["bench", "--plan", str(tmp_path / "request.json"), str(tmp_path / "out")]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["passes"] == 3 and plan["seconds_per_token"] == pytest.approx(0.01, rel=0.5)
    assert plan["at_most_s"] > 4 * 30 * 0.01 * 3
    assert not (tmp_path / "out").exists()


def test_looking_at_it_is_watching(host, tmp_path):
    out = tmp_path / "out"
    assert bench.status(out) == {"progress": None, "load": None} and not out.exists()
    host.serve()
    measure(host, tmp_path, repeats=1)
    os.utime(out / "watched", (0, 0))
    found = bench.status(out)
    assert found["progress"]["done"] == found["progress"]["of"] == 3 and found["load"]["outcome"] == "measured"
    assert time.time() - (out / "watched").stat().st_mtime < 60
    (tmp_path / "out.tar.gz").unlink()
    assert bench.status(out)["load"] is None, "ended before there is something to fetch"


def test_what_the_engine_said_of_the_release_is_found_in_the_newest_record(tmp_path):
    layout = records.Layout(str(tmp_path))
    layout.state_dir.mkdir(parents=True)
    for at, release in enumerate(("a", "b", "a")):
        found = {"effective": {"at": at}, "notices": [f"notice {at}"]}
        records.append_history(layout, {"to": {"release": release}, "preflight": found})
    assert bench.preflight_of(layout, "a")["effective"] == {"at": 2}
    assert bench.preflight_of(layout, "b")["notices"] == ["notice 1"]
    assert bench.preflight_of(layout, "c") == {}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"concurrency": []}, "concurrency: found"),
        ({"concurrency": [0]}, "whole numbers of at least 1"),
        ({"repeats": 0}, "no repeats or no prompts"),
        ({"cache": "tepid"}, "cache: found 'tepid', expected cold or warm"),
    ],
)
def test_a_request_of_the_wrong_shape(host, tmp_path, changes, said):
    with pytest.raises(records.RecordError, match=said):
        measure(host, tmp_path, **changes)


def test_no_level_that_the_unit_can_run(host, tmp_path):
    host.serve()
    load, _ = measure(host, tmp_path, concurrency=[8, 16])
    assert load["cause"].startswith("no level left: asked for [8, 16], the unit runs at most 4 sequences")


def test_a_swap_ends_a_benchmark_which_says_so(host, tmp_path):
    host.serve(tokens_per_s=20)
    out = tmp_path / "out"

    def swap():
        while not (out / "progress.json").exists() or read(tmp_path, "progress.json")["done"] < 1:
            time.sleep(0.05)
        time.sleep(0.5)  # well in a pass
        records.write_json(host.job_end, {"pid": os.getpid(), "why": "it was ended by a swap to 'ngram'"})
        os.kill(os.getpid(), signal.SIGTERM)

    ended = threading.Thread(target=swap)
    ended.start()
    begun = time.monotonic()
    with jobs.running(host, "benchmark", "root"):
        load = bench.Bench(host, request(prompts=PROMPTS[:1]), out, lambda _: None).run()
    ended.join()
    assert (load["outcome"], load["cause"]) == ("failed", "it was ended by a swap to 'ngram'")
    assert time.monotonic() - begun < 20
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert {"load.json", "recorded.jsonl"} <= set(archive.getnames()), "what was measured before is kept"


def test_the_recorders_pass_is_counted_with_the_time_left(host, tmp_path, monkeypatch):
    host.serve()
    monkeypatch.setattr(recorder, "TELL_S", 0.0)
    _, said = measure(host, tmp_path, repeats=1)
    counted = [line for line in said if "recorded 2 of 4 answers" in line]
    assert counted and counted[0].startswith("0 of 3 passes, ") and counted[0].endswith(" min left")
