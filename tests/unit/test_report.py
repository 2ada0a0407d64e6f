"""scripts/report.py: what stands in a page for every kind of run, and that nothing in it is invented or executed."""

import contextlib
import hashlib
import io
import json
import math
import re
import shlex
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from raw_lines import KINDS, answer, lines_of, requests, run_folder
from test_run_folder import compare as benchmarked

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts import report, report_runs, verdict  # noqa: E402

QUIET = {"settings": {"boot_sd": 0.005, "boot_loads": 20}, "verdicts": []}
NASTY = '<script>alert("x")</script><img src=x onerror=alert(1)>'


@pytest.fixture(autouse=True)
def few_draws(monkeypatch):
    monkeypatch.setattr(report_runs, "DRAWS", 400)


class Words(HTMLParser):
    """The texts of a page, and of its elements those of one name."""

    def __init__(self, page, name):
        super().__init__()
        self.name, self.inside, self.found, self.tags = name, False, [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == self.name:
            self.inside = True
            self.found.append("")

    def handle_endtag(self, tag):
        self.inside = self.inside and tag != self.name

    def handle_data(self, data):
        if self.inside:
            self.found[-1] += data


def made(folder, *options):
    """The two pages of a run folder."""
    assert report.main([str(folder), *options]) == 0
    pages = [(folder / f"report.{ending}").read_text(encoding="utf-8") for ending in ("html", "md")]
    assert_tables(pages[1])
    return pages


def known_quiet(folder):
    (folder / "verdict.json").write_text(json.dumps(QUIET))
    return folder


def assert_tables(text):
    """Every table of a Markdown text is whole: a head, a rule and rows as wide, without a gap."""
    for block in re.split(r"\n\s*\n", text):
        rows = [line for line in block.splitlines() if line.startswith("|")]
        if rows:
            assert rows == block.splitlines() and re.fullmatch(r"[| -]+", rows[1]), block
            assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1, block


def at(lines, level, slower=1.0):
    """The same requests at another concurrency, the variant slower."""
    out = [{**line, "concurrency": level} for line in requests(lines)]
    for line in out:
        line["decode_s"] *= slower if line["arm"] != "A" else 1
        line["e2e_s"] = line["ttft_s"] + line["decode_s"]
    return out


def spoiled(**values):
    lines = lines_of(effect=1.4)
    for line in requests(lines, "B", 6):
        line.update(values)
    return lines


RUNS = [
    ("faster", lines_of(effect=1.4)),
    ("slower", lines_of(effect=0.8)),
    ("equivalent", lines_of(effect=1.0, shared=True, boots="AB", sd=0.01)),
    ("undecided", lines_of(effect=1.05, sd=0.3)),
    ("not faster", [line for line in spoiled() if not line.update(ttft_s=2.0 if line["arm"] == "B" else 0.2)]),
    ("output changed", spoiled(finish_reason="length")),
    ("refused", lines_of(effect=1.4, prompts=9)),
]


@pytest.mark.parametrize(("word", "lines"), RUNS, ids=[word for word, _ in RUNS])
def test_the_first_line_is_the_verdict(tmp_path, capsys, word, lines):
    folder = known_quiet(run_folder(tmp_path / "r1", lines))
    page, text = made(folder)
    (result,) = report_runs.read_folder(folder).results
    assert result["word"] == word
    (head,) = Words(page, "h1").found
    assert head == capsys.readouterr().out.splitlines()[0] == text.splitlines()[0].replace("\\", "")
    assert len(head) <= 90 and "B (ngram)" in head, "a phone shows it whole"
    assert Words(page, "p").found[0] == text.splitlines()[2].replace("\\", "") == result["sentence"]
    classes = {"output changed": "output", "not faster": "not"}
    assert f'<span class="badge {classes.get(word, word)}">{word}</span>' in page
    for kind in KINDS:
        assert f"| {kind.replace('_', chr(92) + '_')} |" in text


def test_everything_of_the_run_is_shown(tmp_path):
    lines = lines_of(effect=1.4)
    for line in requests(lines, "B"):
        line.update(steps=50, drafted=[5, 0, 5], accepted=[5, 0, 2], itl_s={"p50": 0.01, "p95": 0.02, "p99": 0.03})
    folder = known_quiet(run_folder(tmp_path / "r1", lines))
    page, text = made(folder)
    for words in ("async scheduling is off", "575.51", "NVIDIA H200", "c204a07", "ab" * 32, "1,803 s", "gpu-host-1"):
        assert words in page and words in text, words
    for title in ("Time per output token by arm", "Speed-up per prompt", "Acceptance by position", "Drift of the base"):
        assert title in page
    assert page.count('<svg viewBox="0 0 420') == 4  # the fifth needs a second concurrency
    assert "not measured: one concurrency only" in page
    assert "position 2: 100%" in page and "position 3: 50%" in page
    assert "20.0 ms" in page and "-10.0%" in page


def test_what_was_not_measured_is_called_so(tmp_path):
    bare = ("arm", "variant", "boot", "outcome")
    lines = [{**line, "token_ids": None} for line in lines_of(facts=False)]
    folder = run_folder(tmp_path / "r1", lines)
    about = json.loads((folder / "run.json").read_text())
    about = {"loads": [{key: load[key] for key in bare} for load in about["loads"]]}
    (folder / "run.json").write_text(json.dumps(about))
    page, text = made(folder)
    assert re.search(r"<dt>Driver</dt><dd>not measured</dd>", page)
    assert "- Model: not measured" in text
    assert "| B (ngram) | 1 |" in text and "| not measured |" in text
    assert not re.search(r"\b(None|nan|inf)\b", page + text)


def test_concurrencies_and_their_gain(tmp_path):
    lines = lines_of(effect=1.4)
    folder = known_quiet(run_folder(tmp_path / "r1", [*lines, *at(lines, 4, 1.8)]))
    page, text = made(folder)
    (head,) = Words(page, "h1").found
    assert head.startswith("2 comparisons: 1 faster, 1 slower. At concurrency 1: B (ngram) is faster than A (base): 1.")
    assert page.count('<svg viewBox="0 0 420') == 4
    assert "concurrency 4: 0.7" in page
    assert text.count("\n## B (ngram) against A (base)") == 2


def test_a_trial_of_five_arms_in_one_load(tmp_path):
    lines = []
    for number, arm in enumerate("BCDE"):
        pair = lines_of(effect=1.0 + 0.15 * number, shared=True, boots="AB", sd=0.02)
        for line in pair:
            if line["arm"] == "B":
                lines.append({**line, "arm": arm, "setting": f"k={number + 2} min=3 max=4"})
                lines[-1].update({"variant": f"trial-{arm}"} if "variant" in line else {})
            elif arm == "B":
                lines.append(line)
    told = [{"k": k, "min": 3, "max": 4, "speedup": 1.0 + 0.1 * k, "low": 1.0, "high": 1.9} for k in (2, 3, 4, 5)]
    folder = known_quiet(run_folder(tmp_path / "trial", lines, kind="trial"))
    (folder / "prediction.json").write_text(json.dumps({"settings": told, "overall": {"speedup": 1.4}}))
    page, _ = made(folder)
    (head,) = Words(page, "h1").found
    assert head.startswith("4 comparisons: 3 faster, 1 equivalent. Best: E (trial-E) is faster")
    assert "Predicted speed-up of the grid" in page
    cells = re.findall(r">(1\.\d\dx)</text><text[^>]*>\[(1\.\d)", page)
    assert cells == [("1.20x", "1.0"), ("1.30x", "1.1"), ("1.40x", "1.3"), ("1.50x", "1.4")]  # each in its setting's
    assert "optimistic figure; confirm it" in page


def test_an_arm_that_did_not_load(tmp_path):
    lines = [line for line in lines_of() if line["arm"] == "A"]
    dead = {"arm": "B", "variant": "eagle3", "boot": 1, "outcome": "failed", "cause": "CUDA out of memory"}
    page, text = made(run_folder(tmp_path / "r1", lines, [dead]))
    assert Words(page, "h1").found == ["No verdict: B (eagle3) failed"]
    assert Words(page, "p").found[0] == "B (eagle3) failed: CUDA out of memory"
    assert text.startswith("No verdict: B (eagle3) failed\n\nB (eagle3) failed: CUDA out of memory\n")
    assert "Speed-up per prompt" not in page
    third = run_folder(tmp_path / "r2", lines_of(), [{**dead, "arm": "C"}])
    assert Words(made(third)[0], "p").found[1] == "C (eagle3) failed: CUDA out of memory"


def test_nothing_came_up_at_all(tmp_path):
    dead = {"arm": "A", "variant": "base", "boot": 0, "outcome": "failed", "cause": "no weights"}
    page, _ = made(run_folder(tmp_path / "r1", [], [dead]))
    assert Words(page, "h1").found == ["No verdict: A (base) failed"]


def test_the_base_did_not_come_up(tmp_path):
    lines = [line for line in lines_of(boots="BCB") if line["arm"] != "A"]
    dead = {"arm": "A", "variant": "base", "boot": 9, "outcome": "failed", "cause": "no weights"}
    page, _ = made(run_folder(tmp_path / "r1", lines, [dead]))
    assert Words(page, "h1").found == ["No verdict: A (base) failed"]


def test_one_arm_only(tmp_path):
    page, _ = made(run_folder(tmp_path / "r1", lines_of(boots="AA"), kind="benchmark"))
    assert "No verdict yet: only A (base) was measured" in Words(page, "h1").found[0]
    assert "Time per output token by arm" in page


def test_an_arm_that_died_midway(tmp_path):
    lines = lines_of()
    for line in requests(lines, "B")[10:]:
        for key in ("ttft_s", "decode_s", "e2e_s", "output_tokens", "finish_reason", "token_ids"):
            del line[key]
        line["error"] = "connection reset"
    page, text = made(run_folder(tmp_path / "r1", lines))
    assert Words(page, "h1").found == ["No verdict on B (ngram) against A (base): too few prompts, arm incomplete"]
    assert "arm_incomplete: arm B (ngram), boot 1: 10 of 48 answers" in Words(page, "p").found[0]
    assert "| 38 of 48 |" in text


def test_a_class_without_a_time(tmp_path):
    lines = lines_of(effect=1.4)
    for line in requests(lines):
        if line["class"] == "summary":
            line.update(output_tokens=1, decode_s=0.0, token_ids=answer(1, 1))
    page, _ = made(run_folder(tmp_path / "r1", lines))
    assert "none of class summary" in Words(page, "p").found[0]
    assert not re.search(r"\b(None|nan|inf)\b", page)


def test_texts_of_models_and_users_are_never_markup(tmp_path):
    lines = lines_of(effect=1.4)
    for line in requests(lines):
        line["class"] = NASTY if line["class"] == "summary" else line["class"]
        line["prompt_id"] += NASTY
        line["variant"] += NASTY
    requests(lines, "B")[3].update(error=NASTY)
    dead = {"arm": NASTY, "variant": NASTY, "boot": 7, "outcome": "failed", "cause": NASTY, "changes": [NASTY]}
    folder = run_folder(tmp_path / "r1", lines, [dead], host=NASTY, model=NASTY, id=NASTY, commit=NASTY)
    grid = [{"k": k, "min": 1, "max": 2, "speedup": 1.1, "worth": NASTY} for k in (1, 2)]
    told = {"overall": {"speedup": 1.2}, "classes": {NASTY: {"speedup": 1.1}}, "settings": grid, "caveats": [NASTY]}
    (folder / "prediction.json").write_text(json.dumps(told))
    for page in (*made(folder), *compared(tmp_path, folder)):
        assert "&lt;script&gt;" in page
        assert not re.search(r"<\s*(script|img|iframe|object|link|a)\b", page)
    tags = Words((folder / "report.html").read_text(), "h1").tags
    assert not [tag for tag, attrs in tags if any(name.startswith("on") or name in ("src", "href") for name in attrs)]


def compared(out, *folders):
    assert report.main(["compare", *map(str, folders), "--out", str(out)]) == 0
    pages = [(out / f"history.{ending}").read_text(encoding="utf-8") for ending in ("html", "md")]
    assert_tables(pages[1])
    return pages


def test_a_page_needs_nothing_from_elsewhere(tmp_path):
    page, _ = made(run_folder(tmp_path / "r1", lines_of()))
    assert not re.search(r"(?:https?:)?//|url\(|@import|<script", page)


def test_a_stale_verdict_is_not_believed(tmp_path):
    folder = run_folder(tmp_path / "r1", lines_of(effect=0.8))
    run = str(folder / "raw.jsonl")
    assert "verdict.json is out of date" not in made(folder)[0]
    stored = judged(run, "--draws", "400")
    (folder / "verdict.json").write_text(json.dumps(stored))
    assert "verdict.json is out of date" not in made(folder)[0]
    stored["verdicts"][0]["word"] = "faster"
    (folder / "verdict.json").write_text(json.dumps(stored))
    page, text = made(folder)
    assert "arm B at concurrency 1: verdict.json says faster, 0." in page and "raw.jsonl gives slower" in text
    assert "is slower than" in Words(page, "h1").found[0]


def judged(*arguments):
    """What scripts/verdict.py --json prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert verdict.main([*arguments, "--json"]) in (0, 1, 3)
    return json.loads(out.getvalue())


def test_the_printed_command_gives_the_same_verdict(tmp_path):
    folder = run_folder(tmp_path / "r 1", lines_of(effect=1.2))
    settings = {"weights": dict.fromkeys(KINDS, 1.0), "boot_sd": 0.02, "boot_loads": 12, "method": "ngram"}
    (folder / "verdict.json").write_text(json.dumps({"seed": 7, "draws": 300, "settings": settings, "verdicts": []}))
    prompt = {"class": "summary", "messages": [{"role": "user", "content": "x"}], "max_tokens": 99}
    texts = [{**prompt, "id": f"p{n}", "messages": [{"role": "user", "content": f"Tell {n}"}]} for n in range(24)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts))
    digest = hashlib.sha256((folder / "prompts.jsonl").read_bytes()).hexdigest()
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**about, "prompts": {"file": "elsewhere.jsonl", "sha256": digest}}))
    page, _ = made(folder)
    (command,) = Words(page, "pre").found
    python, program, *words = shlex.split(command)
    assert (python, program) == ("python", "scripts/verdict.py")
    assert "RUN/prompts.jsonl" in words and str(tmp_path) not in page
    (again,) = judged(*(word.replace("RUN", str(folder)) for word in words if word != "--json"))["verdicts"]
    (shown,) = report_runs.read_folder(folder).results
    assert next(gate for gate in again["gates"] if gate["name"] == "synthetic_text")["ok"]
    assert again["speedup"] == shown["speedup"] and again["sentence"] == shown["sentence"]


def test_history_of_the_base_enters_interval_and_chart(tmp_path):
    folder = run_folder(tmp_path / "r1", lines_of(effect=1.4))
    own = {"variant": "base", "release": "a0ffee" * 8, "engine_version": "0.32.0", "prompts_sha256": "ab" * 32}
    own.update(host="gpu-host-1", model="kimi-k2.5", cache="cold", concurrency=1)
    loads = [
        {**own, "run": f"old{n}", "boot": 0, "ms_per_token": 13.5 + n % 2 / 10, "started_unix": n + 1}
        for n in range(10)
    ]
    loads.append({**own, "run": "r1", "boot": 0, "ms_per_token": 99.0})
    loads.append({**own, "run": "other", "boot": 0, "ms_per_token": 50.0, "release": "another"})
    file = tmp_path / "history.jsonl"
    file.write_text("".join(json.dumps(load) + "\n" for load in loads))
    page, _ = made(folder, "--history", str(file))
    (tmp_path / "history").mkdir()
    (tmp_path / "history" / "gpu-host-1-kimi-k2.5.jsonl").write_bytes(file.read_bytes())
    assert made(folder)[0] == page  # found where the benchmark keeps it
    file.write_text(json.dumps({**loads[0], "run": "later", "started_unix": 1.8e9}) + "\n")
    assert "later" not in made(folder, "--history", str(file))[0]
    file.write_text("".join(json.dumps(load) + "\n" for load in loads))
    (tmp_path / "history" / "gpu-host-1-kimi-k2.5.jsonl").unlink()
    assert "12 loads of the same release" in page and "old9, boot 0" in page
    assert "99.00 ms" not in page and "50.00 ms" not in page
    wide = report_runs.read_folder(folder).results[0]["speedup"]
    narrow = report_runs.read_folder(folder, file).results[0]["speedup"]
    assert narrow["high"] - narrow["low"] < 0.5 * (wide["high"] - wide["low"])


def test_predicted_beside_measured(tmp_path):
    folder = known_quiet(run_folder(tmp_path / "r1", lines_of(effect=1.4)))
    told = {
        "overall": {"speedup": 1.38, "low": 1.3, "high": 1.5},
        "classes": {"summary": {"speedup": 3.0, "low": 2.9, "high": 3.1}, "reasoning": {"speedup": math.inf}},
        "prompts": {f"p{n}": {"speedup": 1.3} for n in range(24)},
        "caveats": ["excluding the cost of switching speculation on"],
        "settings": "none",
    }
    (folder / "prediction.json").write_text(json.dumps(told))
    page, text = made(folder)
    rows = {line.split(" | ")[0]: line for line in text.splitlines() if line.startswith("| ")}
    assert text.count("1.380x (1.300 to 1.500)") == 1
    measured = [line for line in text.splitlines() if line.startswith("| summary | 3.000x")]
    assert measured and measured[0].endswith("| no |")
    assert any(line.startswith("| all prompts | 1.380x") and line.endswith("| yes |") for line in text.splitlines())
    assert any(line.startswith("| reasoning | not measured |") for line in text.splitlines()), rows
    assert "the direction is right on 24 of 24" in page
    assert "excluding the cost of switching speculation on" in page


def test_an_arm_stands_beside_what_was_predicted_for_its_own_setting(tmp_path):
    lines = lines_of(effect=1.4)
    for line in requests(lines, "B"):
        line["variant"] = "ngram k5 min4 max4"
    folder = known_quiet(run_folder(tmp_path / "r1", lines))
    own = {"k": 5, "min": 4, "max": 4, "speedup": 1.38, "worth": "unclear", "classes": {"summary": {"speedup": 1.37}}}
    best = {"k": 5, "min": 1, "max": 4, "speedup": 1.9}
    told = {"best": best, "settings": [own, best], "overall": {"speedup": 1.9, "worth": "yes"}, "classes": {}}
    (folder / "prediction.json").write_text(json.dumps(told))
    _, text = made(folder)
    assert "| all prompts | 1.380x" in text and "| summary | 1.370x" in text and "Worth a try: unclear" in text
    (folder / "prediction.json").write_text(json.dumps({**told, "settings": [best]}))
    _, text = made(folder)
    assert "| all prompts | 1.900x" in text
    assert "predicted for k=5 min=1 max=4, which is not what this arm was measured with" in text


@pytest.mark.parametrize("told", [{}, {"overall": None, "settings": [1, {"k": 2}], "prompts": [], "best": 3}])
def test_a_prediction_may_lack_everything(tmp_path, told):
    folder = run_folder(tmp_path / "r1", lines_of())
    (folder / "prediction.json").write_text(json.dumps(told))
    assert "| all prompts | not measured |" in made(folder)[1]


def test_a_prediction_that_failed_names_its_term(tmp_path):
    folder = run_folder(tmp_path / "r1", lines_of(effect=1.4))
    (folder / "prediction.json").write_text(json.dumps({"overall": {"speedup": 0.7, "low": 0.6, "high": 0.8}}))
    assert "term of the prediction that failed: not known here" in made(folder)[1].lower()
    rows = [
        {"setting": "k5_min4_max4", "agree": False, "failed_terms": ["verify", "fixed"]},
        {"setting": "k2_min4_max4", "agree": True, "failed_terms": []},
    ]
    (folder / "prediction-check.json").write_text(json.dumps({"settings": rows}))
    page, text = made(folder)
    assert "Term of the prediction that failed: k5_min4_max4: verify, fixed</p>" in page
    assert "Term of the prediction that failed: k5\\_min4\\_max4: verify, fixed\n" in text


BROKEN = [
    # what is broken, words of the error
    (lambda folder: (folder / "run.json").unlink(), ("found no run.json", "scripts/bench.py")),
    (lambda folder: (folder / "raw.jsonl").unlink(), ("raw.jsonl", "found no request", "measure again")),
    (lambda folder: (folder / "raw.jsonl").write_text("{\n"), ("raw.jsonl:1", "not JSON")),
    (lambda folder: (folder / "raw.jsonl").write_text('{"arm": 3}\n'), ("raw.jsonl:1",)),
    (lambda folder: (folder / "run.json").write_text("[]"), ("run.json", "found a list")),
    (lambda folder: (folder / "run.json").write_text('{"loads": 3}'), ("run.json", "loads")),
    (lambda folder: (folder / "run.json").write_text('{"settings": 3}'), ("run.json", "settings")),
    (lambda folder: (folder / "prompts.jsonl").write_text("{"), ("prompts.jsonl", "SHA-256", "as in run.json")),
    (lambda folder: (folder / "verdict.json").write_text("{"), ("verdict.json", "not JSON")),
    (lambda folder: (folder / "verdict.json").write_text('{"seed": -1}'), ("verdict.json", "settings")),
    (lambda folder: (folder / "prediction.json").write_text("3"), ("prediction.json", "found a number")),
    (lambda folder: (folder / "history.jsonl").write_text("{}\n"), ("history.jsonl:1", "run")),
]


@pytest.mark.parametrize(("spoil", "words"), BROKEN, ids=[" ".join(words)[:40] for _, words in BROKEN])
def test_bad_input(tmp_path, capsys, spoil, words):
    folder = run_folder(tmp_path / "r1", lines_of())
    spoil(folder)
    assert report.main([str(folder)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("report: ") and said.err.count("\n") == 1
    assert all(word in said.err for word in words), said.err
    assert not (folder / "report.html").exists()


def test_a_folder_that_cannot_be_written(tmp_path, capsys):
    folder = run_folder(tmp_path / "r1", lines_of())
    (folder / "report.html").mkdir()
    assert report.main([str(folder)]) == 1
    assert "report.html: cannot be written" in capsys.readouterr().err


def test_a_run_as_the_benchmark_keeps_it(tmp_path, monkeypatch):
    from scripts import run_folder as keeper

    monkeypatch.setattr(keeper, "RUNS", tmp_path / "runs")
    said, folder = benchmarked(tmp_path, pace=0.5, closing=True)
    page, text = made(folder)
    (head,) = Words(page, "h1").found
    assert head.startswith("B (ngram) is faster than A (baseline)")
    assert "verdict.json is out of date" not in page
    assert said["keep"] and "--prompts RUN/prompts.jsonl" in text
    assert "Drift of the base" in page and "2 loads of the same release" in page


def test_a_hosts_history(tmp_path):
    folders = [
        run_folder(tmp_path / "r2", lines_of(effect=0.8), started_unix=1.8e9),
        run_folder(tmp_path / "r1", lines_of(effect=1.5), started_unix=1.7e9),
    ]
    page, text = compared(tmp_path, *folders)
    assert Words(page, "h1").found == ["2 runs of kimi-k2.5 on gpu-host-1: 1 faster, 1 slower"]
    assert text.index("| 1 | r1 |") < text.index("| 2 | r2 |")
    assert "Base over time" in page and "Speed-ups over time" in page
    assert "r1, boot 2" in page  # every load of the base is in the chart


def test_only_runs_of_one_host_are_compared(tmp_path, capsys):
    folders = [run_folder(tmp_path / host, lines_of(), host=host) for host in ("gpu1", "gpu2")]
    assert report.main(["compare", *map(str, folders), "--out", str(tmp_path)]) == 2
    assert "found runs of the hosts gpu1, gpu2, expected one" in capsys.readouterr().err
