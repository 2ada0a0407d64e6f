"""From what hosts measured to a run folder and a verdict: slow, looping, cut, dead and throttled arms are named."""

import json
import tarfile

import pytest

from scripts import run_folder

CLASSES = ("reasoning", "code_edit")
WORDS = "the pump in the yard was slow and the man who came for it said that he would rather wait for rain than pay "
PROMPTS = [
    {
        "id": f"p{at}",
        "class": CLASSES[at % 2],
        "messages": [{"role": "user", "content": f"Question {at}: why? {WORDS} {['ab', 'cd', 'ef', 'gh'][at % 4]}"}],
        "max_tokens": 64,
    }
    for at in range(20)
]
HEAD = "arm variant load streams requests failed TTFT ms TPOT ms ITL ms E2E s tok/step"
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 4, "prompt_lookup_max": 4}


@pytest.fixture(autouse=True)
def own_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder, "RUNS", tmp_path / "runs")


def counts(requests, generated, drafted, accepted):
    found = {"generated": generated, "drafts": drafted / 5, "drafted": drafted, "accepted": accepted}
    found.update(preemptions=0, prefix_queries=100.0, prefix_hits=0, engine_steps=None, kv_cache_tokens=400_000)
    return {**found, "by_position": [accepted / 2, accepted / 2], "finished": {"stop": requests}}


def archive(
    tmp_path, name, request, *, pace=1.0, text=None, tokens=40, config=None, accepted=None, broken=None, **load
):
    """What `swapgate bench` leaves of a host that needs 10 ms times `pace` a token, a bit more for each prompt."""
    folder = tmp_path / f"host-{name}"
    folder.mkdir()
    prompts = request["prompts"]
    told = [text or f"{prompt['id']}: {WORDS * 2}" for prompt in prompts]
    recorded = [
        {"id": prompt["id"], "class": prompt["class"], "error": None, "prompt_token_ids": [1, 2], "text": said}
        | {"output_token_ids": list(range(tokens)), "output_tokens": tokens, "finish_reason": "stop", "reasoning": None}
        | {"steps": tokens - 1, "drafted": None, "accepted": None}
        for prompt, said in zip(prompts, told)
    ]
    (folder / "recorded.jsonl").write_text("".join(json.dumps(line) + "\n" for line in recorded))
    (folder / "request.json").write_text(json.dumps(request))
    drafted = 500 if config else 0
    accepted = (200 if config else 0) if accepted is None else accepted
    n = len(prompts)
    for level in request["concurrency"]:
        for repeat in range(-1, request["repeats"]):
            label = f"c{level}-warmup" if repeat < 0 else f"c{level}-r{repeat}"
            step = [0.01 * pace * (1 + at / 50) * (1 + 0.002 * repeat) for at in range(n)]
            result = {
                "input_lens": [2] * n,
                "output_lens": [tokens] * n,
                "ttfts": [0.05] * n,
                "itls": [[one] * (tokens - 1) for one in step],
                "latencies": [0.05 + one * (tokens - 1) for one in step],
                "generated_texts": told,
                "errors": [""] * n,
            }
            (folder / f"{label}.json").write_text(json.dumps(result))
            void = broken if broken and repeat > 0 else None
            between = run_folder.bench_results.between(
                counts(0, 0, 0, 0), counts(n, n * tokens, drafted, accepted), level
            )
            one = {"file": f"{label}.json", "concurrency": level, "repeat": repeat, "between": between, "void": void}
            (folder / f"{label}.pass.json").write_text(json.dumps(one))
    values = {
        "variant": request["variant"],
        "speculative_config": config,
        "outcome": "failed" if broken else "measured",
    }
    values.update(cause=broken, started_unix=1000.0, release="abc", engine_version="0.32.0", kv_cache_tokens=400_000)
    (folder / "load.json").write_text(json.dumps({**values, **load}))
    packed = tmp_path / f"{name}.tar.gz"
    with tarfile.open(packed, "w:gz") as out:
        for file in folder.iterdir():
            out.add(file, arcname=file.name)
    return packed


def begin(tmp_path, *words, prompts=PROMPTS, variant="baseline"):
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    argv = [
        "begin",
        "--host",
        "gpu1",
        "--model",
        "tiny",
        "--variant",
        variant,
        "--prompts",
        str(file),
        "--repeats",
        "2",
    ]
    return run_folder.begin(run_folder.build_parser().parse_args([*argv, *words]))


def load(tmp_path, asked, **host):
    folder = run_folder.Path(asked["run"])
    name = f"{asked['arm']}{asked['boot']}"
    return run_folder.add(folder, asked["arm"], asked["boot"], archive(tmp_path, name, asked["request"], **host))


def compare(tmp_path, base=None, closing=False, **variant):
    """A run of A B [A]; what `judge` says of it, and its folder."""
    asked = begin(tmp_path)
    load(tmp_path, asked, **(base or {}))
    other = begin(tmp_path, "--run", asked["run"], "--arm", "B", variant="ngram")
    load(tmp_path, other, **{"config": NGRAM, **variant})
    if closing:
        load(tmp_path, begin(tmp_path, "--run", asked["run"]), **(base or {}))
    folder = run_folder.Path(asked["run"])
    return run_folder.judge(folder), folder


def failed_gates(folder):
    (result,) = json.loads((folder / "verdict.json").read_text())["verdicts"]
    return result["reasons"]


def test_twice_as_fast_is_kept(tmp_path):
    said, folder = compare(tmp_path, pace=0.5)
    assert said["keep"] and said["word"] == "faster"
    assert said["sentence"].startswith("B (ngram) is faster than A (baseline): 2.00")
    about = json.loads((folder / "run.json").read_text())
    assert [(one["arm"], one["boot"], one["variant"]) for one in about["loads"]] == [
        ("A", 1, "baseline"),
        ("B", 2, "ngram"),
    ]
    assert about["prompts"]["count"] == 20 and about["settings"]["cache"] == "cold" and about["id"] == folder.name
    told = [json.loads(line) for line in (folder / "transcripts.jsonl").read_text().splitlines()]
    assert len(told) == 40 and told[0]["output_token_ids"] == list(range(40)) and told[0]["arm"] == "A"


@pytest.mark.parametrize(
    ("variant", "word", "gate"),
    [
        ({"pace": 1.25}, "slower", None),
        ({"pace": 1.0}, "undecided", None),
        ({"pace": 0.5, "text": "and again and again " * 30}, "output changed", "looping_output"),
        ({"pace": 0.5, "text": "No. It", "tokens": 3}, "output changed", "short_answers"),
        ({"pace": 0.5, "accepted": 0}, "not faster", "acceptance"),
        ({"pace": 0.5, "throttle_reasons": ["GPU 0: hardware thermal slowdown"]}, "refused", "throttled"),
        ({"pace": 0.5, "broken": "the engine was restarted"}, "refused", "arm_incomplete"),
    ],
)
def test_anything_else_is_not_kept_and_named(tmp_path, variant, word, gate):
    said, folder = compare(tmp_path, **variant)
    assert not said["keep"] and said["word"] == word, said
    assert gate is None or gate in failed_gates(folder)
    if "throttle_reasons" in variant:
        assert "hardware thermal slowdown" in said["sentence"]
    if "broken" in variant:
        assert "arm B (ngram), load 2: the engine was restarted" in said["sentence"]


def test_an_arm_without_a_measured_pass_has_no_verdict(tmp_path):
    asked = begin(tmp_path)
    load(tmp_path, asked)
    other = begin(tmp_path, "--run", asked["run"], "--arm", "B", variant="ngram")
    packed = archive(tmp_path, "B2", {**other["request"], "repeats": 1}, broken="no level left")
    place = tmp_path / "host-B2"
    for file in place.glob("c1-*"):
        file.unlink()
    with tarfile.open(packed, "w:gz") as out:
        for file in place.iterdir():
            out.add(file, arcname=file.name)
    run_folder.add(run_folder.Path(asked["run"]), "B", 2, packed)
    said = run_folder.judge(run_folder.Path(asked["run"]))
    assert said == {
        "keep": False,
        "word": "refused",
        "sentence": "No verdict. arm B (ngram), load 2: no level left",
        "verdicts": 0,
    }


def test_what_was_fetched_gives_the_same_lines_again(tmp_path):
    _, folder = compare(tmp_path, closing=True, pace=0.5)
    before = {name: (folder / name).read_bytes() for name in ("raw.jsonl", "transcripts.jsonl")}
    for name in before:
        (folder / name).unlink()
    assert run_folder.main(["rebuild", str(folder)]) == 0
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_the_table_says_what_a_reader_wants(tmp_path, capsys):
    _, folder = compare(tmp_path, pace=0.5, foreign_requests=3, left_out=[16])
    assert run_folder.main(["show", str(folder)]) == 0
    head, first, second, *notes = capsys.readouterr().out.splitlines()
    assert " ".join(head.split()) == HEAD
    assert first.split()[:6] == ["A", "baseline", "1", "1", "40", "0"] and first.split()[-1] == "1.00"
    assert second.split()[6:8] == ["50.0/50.0", "6.0/6.8"] and second.split()[-1] == "1.34"
    assert notes[0].endswith("16 streams left out: above --max-num-seqs") and "3 requests were not ours" in notes[1]


def test_baselines_are_kept_as_history_and_a_run_does_not_count_its_own(tmp_path):
    for at in range(3):
        folder = tmp_path / f"first-{at}"
        (tmp_path / str(at)).mkdir()
        load(tmp_path / str(at), begin(tmp_path, "--run", str(folder)), pace=1 + at / 100)
    file = tmp_path / "history/gpu1-tiny.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["run"] for line in lines] == ["first-0", "first-1", "first-2"]
    assert lines[0]["ms_per_token"] == pytest.approx(11.9, rel=0.01) and lines[0]["concurrency"] == 1
    (tmp_path / "last").mkdir()
    asked = begin(tmp_path, "--run", str(tmp_path / "last-run"))
    load(tmp_path / "last", asked)
    load(tmp_path / "last", begin(tmp_path, "--run", asked["run"], "--arm", "B", variant="ngram"), pace=0.5)
    folder = run_folder.Path(asked["run"])
    said = run_folder.judge(folder)
    told = json.loads((folder / "verdict.json").read_text())["settings"]
    assert said["word"] == "faster" and told["boot_loads"] == 11, "two more than the nine that are assumed"


def test_a_look_up_method_needs_text_that_users_send(tmp_path):
    random = [{**prompt, "class": "random"} for prompt in PROMPTS]
    begin(tmp_path, prompts=random)
    with pytest.raises(run_folder.FolderError, match="refused for a verdict on ngram: classes random: synthetic"):
        begin(tmp_path, "--method", "ngram", prompts=random)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--concurrency", "[1,4]"), r"concurrency: found \[1, 4\], expected \[1\]"),
        (("--repeats", "5"), "repeats: found 5, expected 2"),
        (("--cache", "warm"), "cache: found 'warm', expected 'cold'"),
        (("--arm", "A/B"), "--arm: found 'A/B'"),
        (("--variant", "ngram"), "variant of arm A: found 'ngram', expected 'baseline'"),
    ],
)
def test_loads_of_one_run_are_measured_alike(tmp_path, words, said):
    asked = begin(tmp_path)
    load(tmp_path, asked)
    with pytest.raises(run_folder.FolderError, match=said):
        begin(tmp_path, "--run", asked["run"], *words)


def test_a_load_that_was_measured_is_not_measured_again(tmp_path):
    asked = begin(tmp_path)
    load(tmp_path, asked, invocation_id="one", started_unix=100.0, ended_unix=160.5)
    again = begin(tmp_path, "--run", asked["run"], "--invocation-id", "one")
    assert again["reuse"] and again["boot"] == 1
    assert run_folder.result_of(run_folder.Path(asked["run"]), 1)["again_s"] == 121 + 2 * 180
    for words in (("--invocation-id", "other"), ("--invocation-id", "one", "--arm", "B"), ()):
        assert not begin(tmp_path, "--run", asked["run"], *words)["reuse"]


def test_an_archive_that_would_write_elsewhere_does_not(tmp_path):
    packed = tmp_path / "evil.tar.gz"
    (tmp_path / "file").write_text("x")
    with tarfile.open(packed, "w:gz") as out:
        out.add(tmp_path / "file", arcname="../outside")
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        out.addfile(link)
        out.add(tmp_path / "file", arcname="fine.json")
    run_folder.unpack(packed, tmp_path / "in/to")
    assert [file.name for file in (tmp_path / "in/to").iterdir()] == ["fine.json"]
    assert not (tmp_path / "in/outside").exists()


# --- bad input: one clear error, exit code 2 -------------------------------------------------------------------------


def refused(capsys, *words):
    """The one line that a refused call says."""
    assert run_folder.main([str(word) for word in words]) == 2
    out = capsys.readouterr()
    assert out.out == "" and len(out.err.splitlines()) == 1 and out.err.startswith("run_folder: ")
    return out.err


COMMANDS = [
    ("judge",),
    ("rebuild",),
    ("show",),
    ("result", "--boot", "1"),
    ("add", "--arm=A", "--boot=1", "--archive=x"),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: words[0])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory; expected a run"),
        ("{", "not JSON"),
        ("[]", "found a list"),
        ('{"schema": 1, "loads": []}', "expected the texts id, host and model"),
        ('{"schema": 1, "loads": [{}]}', "loads, each with arm"),
    ],
)
def test_a_run_json_that_is_none_is_said(tmp_path, capsys, command, content, said):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    err = refused(capsys, command[0], tmp_path, *command[1:])
    assert str(tmp_path / "run.json") in err and said in err and "or name another" in err


def test_a_folder_that_cannot_be_made_is_said(tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    (tmp_path / "file").write_text("x")
    words = ["begin", "--host=h", "--model=m", "--variant=v", f"--prompts={tmp_path / 'prompts.jsonl'}"]
    for place in ("/proc/x/y", tmp_path / "file/below"):
        assert f"{place}"[:6] in refused(capsys, *words, f"--run={place}")


def test_what_a_run_does_not_have_is_said(tmp_path, capsys):
    asked = begin(tmp_path)
    load(tmp_path, asked)
    folder = run_folder.Path(asked["run"])
    assert "--boot: found 7, expected a load of" in refused(capsys, "result", folder, "--boot", "7")
    (tmp_path / "empty").write_bytes(b"")
    with tarfile.open(tmp_path / "bare.tar.gz", "w:gz") as out:
        out.add(tmp_path / "empty", arcname="log")
    for name, said in (("empty", "cannot be unpacked"), ("bare.tar.gz", "load.json: cannot be read: No such file")):
        assert said in refused(capsys, "add", folder, "--arm=A", "--boot=2", f"--archive={tmp_path / name}")
    assert len(run_folder.read_run(folder)["loads"]) == 1
    raw = (folder / "raw.jsonl").read_bytes()
    for text in ("{\n", '{"arm": "A"}\n'):
        (folder / "raw.jsonl").write_text(text)
        assert "raw.jsonl:1" in refused(capsys, "show", folder)
    (folder / "raw.jsonl").write_bytes(raw)
    (folder / "raw/A-1/request.json").unlink()
    assert "request.json: cannot be read: No such file" in refused(capsys, "rebuild", folder)
    assert (folder / "raw.jsonl").read_bytes() == raw


def test_answers_are_for_their_owner_alone(tmp_path):
    asked = begin(tmp_path)
    load(tmp_path, asked)
    folder = run_folder.Path(asked["run"])
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o755)
    run_folder.rebuild(folder)
    assert folder.stat().st_mode & 0o777 == 0o700, "also one of before"
    (tmp_path / "shared").mkdir(mode=0o755)
    (tmp_path / "shared/other").touch()
    begin(tmp_path, "--run", str(tmp_path / "shared"))
    assert (tmp_path / "shared").stat().st_mode & 0o777 == 0o755, "a folder of other things keeps its mode"
