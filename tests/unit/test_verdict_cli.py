"""scripts/verdict.py as a command: exit codes, one clear error for bad input, JSON out, plans and prompt sets."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from scripts import verdict  # noqa: E402

PROMPTS = ROOT / "benchmarks" / "prompts" / "mixed.jsonl"


def line_of(arm, boot, repeat, prompt, gain=1.0):
    tokens = 100
    wiggle = 1 + 0.002 * ((7 * prompt + 3 * repeat + boot) % 5)
    decode = 0.01 * (1 + prompt / 100) * wiggle / gain * (tokens - 1)
    return {
        "arm": arm,
        "variant": {"A": "base", "B": "ngram"}[arm],
        "boot": boot,
        "repeat": repeat,
        "prompt_id": prompt,
        "class": "code_edit" if prompt % 2 else "summary",
        "ttft_s": 0.1,
        "decode_s": decode,
        "e2e_s": 0.1 + decode,
        "output_tokens": tokens,
        "finish_reason": "stop",
    }


def lines_of(gain=1.5):
    return [
        line_of(arm, boot, repeat, prompt, gain if arm == "B" else 1.0)
        for boot, arm in enumerate("ABA")
        for repeat in range(2)
        for prompt in range(20)
    ]


def write(folder, lines):
    path = folder / "run.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def call(*arguments):
    return verdict.main([*arguments])


@pytest.mark.parametrize(
    ("gain", "options", "code", "word"),
    [
        (1.5, (), 0, "faster"),
        (0.5, (), 1, "slower"),
        (1.0, ("--boot-sd", "0", "--boot-loads", "9"), 1, "equivalent"),
        (1.1, (), 1, "undecided"),
        (1.5, ("--base", "B"), 1, "slower"),
    ],
)
def test_exit_code_and_first_line(tmp_path, capsys, gain, options, code, word):
    assert call(write(tmp_path, lines_of(gain)), "--draws", "500", *options) == code
    assert word in capsys.readouterr().out.splitlines()[0]


def test_refused_exits_with_three(tmp_path, capsys):
    lines = [line for line in lines_of() if line["prompt_id"] < 10]
    assert call(write(tmp_path, lines), "--draws", "200") == 3
    out = capsys.readouterr().out
    assert out.startswith("No verdict on B (ngram)")
    assert "FAIL  too_few_prompts: 10 prompts" in out


def test_json(tmp_path, capsys):
    path = write(tmp_path, lines_of())
    assert call(path, "--json", "--draws", "300", "--seed", "11") == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["file"], printed["seed"], printed["draws"]) == (path, 11, 300)
    (result,) = printed["verdicts"]
    assert result["word"] == "faster"
    assert len(result["by_prompt"]) == 20
    assert result["speedup"]["value"] == pytest.approx(1.5, rel=0.01)


def test_table_names_classes_totals_and_gates(tmp_path, capsys):
    call(write(tmp_path, lines_of()), "--draws", "200")
    out = capsys.readouterr().out
    for part in ("summary", "code_edit", "all prompts", "ratio of totals", "ok    null", "kv_capacity"):
        assert part in out


BROKEN = [
    # which line is changed, to what, what the message says
    ({"decode_s": -1}, "decode_s: found -1, expected seconds, a finite number above 0"),
    ({"decode_s": "0.9"}, 'decode_s: found "0.9"'),
    ({"decode_s": True}, "decode_s: found true"),
    ({"decode_s": float("nan")}, "decode_s: found NaN"),
    ({"decode_s": 990.0}, "decode_s: found 990.0, expected at most e2e_s"),
    ({"ttft_s": None}, "ttft_s: found null"),
    ({"output_tokens": 1.5}, "output_tokens: found 1.5, expected a whole number of at least 0"),
    ({"boot": -1}, "boot: found -1"),
    ({"boot": True}, "boot: found true"),
    ({"repeat": "1"}, 'repeat: found "1"'),
    ({"arm": ""}, 'arm: found ""'),
    ({"prompt_id": None}, "prompt_id: found null"),
    ({"class": 3}, "class: found 3"),
    ({"finish_reason": None}, "finish_reason: found null"),
    ({"token_ids": [1, -2]}, "token_ids: found [1, -2]"),
    ({"token_ids": [2**40]}, "below 2^31"),
    ({"text": 4}, "text: found 4"),
    ({"error": 5}, "error: found 5"),
    ({"tool_call_ok": "yes"}, 'tool_call_ok: found "yes", expected true, false or null'),
    ({"concurrency": 0}, "concurrency: found 0"),
    ({"variant": "other"}, "variant of arm A: found 'other', expected 'base' as at"),
    ({"class": "json"}, "class of prompt 2: found 'json', expected 'summary' as at"),
    ({"repeat": 0}, "found twice, first at"),
    ("{", "not JSON"),
    ("[1]", "found list, expected one JSON object a line"),
    ({"facts": 3}, "facts: found 3, expected an object"),
    ({"facts": {"accepted": -1}}, "accepted: found -1"),
    ({"facts": {"throttle_reasons": "hot"}}, "throttle_reasons: found"),
    ({"facts": {"method": 5}}, "method: found 5"),
]


@pytest.mark.parametrize(("change", "said"), BROKEN, ids=[str(change)[:40] for change, _ in BROKEN])
def test_bad_line_is_named_once(tmp_path, capsys, change, said):
    lines = lines_of()
    lines[22] = change if isinstance(change, str) else {**lines[22], **change}
    path = write(tmp_path, lines)
    assert call(path) == 2
    error = capsys.readouterr().err
    assert f"{path}:23: " in error
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["RUN", "--base", "Z"], "--base: found 'Z', expected an arm of"),
        (["RUN", "--weights", "summary=1"], "expected the classes of"),
        (["RUN", "--weights", "summary=1,code_edit=x"], "found 'code_edit=x'"),
        (["RUN", "--weights", "summary=0,code_edit=0"], "found only zeros"),
        (["RUN", "--boot-sd", "0.02"], "--boot-sd: found without --boot-loads"),
        (["RUN", "--draws", "5"], "fewer than 100 --draws"),
        (["RUN", "--plan", "prompts=72"], "found 2 of RUN.jsonl, --plan and --check-prompts"),
        ([], "found 0 of RUN.jsonl"),
        (["/nowhere/run.jsonl"], "/nowhere/run.jsonl: cannot be read"),
        (["--plan", "prompts"], "found 'prompts', expected NAME=NUMBER"),
        (["--plan", "colour=3"], "found 'colour=3'"),
        (["--plan", "boots=2"], "found 'boots=2'"),
        (["--plan", "prompts=many"], "expected a number for prompts"),
        (["--plan", "prompts=8"], "found prompts=8 repeats=3, expected at least 16 prompts"),
        (["--plan", "boots=0,1"], "expected 1 or more"),
        (["--plan", "prompt_sd=nan"], "expected 0 or more"),
    ],
)
def test_bad_call(tmp_path, capsys, arguments, said):
    path = write(tmp_path, lines_of())
    assert call(*(path if argument == "RUN" else argument for argument in arguments)) == 2
    assert said in capsys.readouterr().err


def test_one_arm_alone(tmp_path, capsys):
    assert call(write(tmp_path, [line for line in lines_of() if line["arm"] == "A"])) == 2
    assert "found 1 arm(s) ['A'], expected at least 2" in capsys.readouterr().err


def test_plan(capsys):
    assert call("--plan", "prompts=72 repeats=3 boots=3,2") == 0
    assert "5 loads (3 base, 2 variant): a speed-up of 1." in capsys.readouterr().out
    assert call("--plan", "prompts=72; one_load=1; boots=1,1", "--json") == 0
    weighed = json.loads(capsys.readouterr().out)
    assert weighed["loads"] == 1
    assert 1.03 < weighed["smallest_effect"] < 1.3


def test_check_prompts(tmp_path, capsys):
    assert call("--check-prompts", str(PROMPTS)) == 0
    assert "72 prompts" in capsys.readouterr().out
    few = tmp_path / "few.jsonl"
    few.write_text("".join(PROMPTS.read_text(encoding="utf-8").splitlines(keepends=True)[:5]), encoding="utf-8")
    assert call("--check-prompts", str(few), "--json") == 2
    assert "expected at least 16" in json.loads(capsys.readouterr().out)["problems"][0]


def test_prompts_beside_a_run_are_looked_at(tmp_path, capsys):
    lines = [
        {**line, "prompt_id": f"code_edit-{line['prompt_id'] + 1:02d}"} for line in lines_of() if line["prompt_id"] < 12
    ]
    call(write(tmp_path, lines), "--draws", "200", "--prompts", str(PROMPTS))
    assert "ok    synthetic_text: prompts read like written text" in capsys.readouterr().out


def test_as_a_program_from_standard_input(tmp_path):
    with open(write(tmp_path, lines_of()), "rb") as stream:
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / "verdict.py"), "-", "--draws", "200"],
            stdin=stream,
            capture_output=True,
            text=True,
            cwd=tmp_path,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("B (ngram) is faster than A (base): 1.5")


def test_help_names_every_key_and_exit_code(capsys):
    with pytest.raises(SystemExit):
        call("--help")
    out = " ".join(capsys.readouterr().out.split())
    for word in ("decode_s", "token_ids", "throttle_reasons", "output changed", "3 no verdict"):
        assert word in out


def test_history_narrows_or_widens_the_interval(tmp_path, capsys):
    path = write(tmp_path, lines_of(1.1))
    history = tmp_path / "history.jsonl"
    history.write_text(
        "".join(
            json.dumps({"run": f"r{n}", "boot": 0, "ms_per_token": 10 + 0.05 * (n % 2), "host": "gpu1"}) + "\n"
            for n in range(12)
        )
    )
    assert call(path, "--draws", "500") == 1
    assert "undecided" in capsys.readouterr().out
    assert call(path, "--draws", "500", "--history", str(history), "--json") == 0
    settings = json.loads(capsys.readouterr().out)["settings"]
    assert settings["boot_sd"] < 0.003 and settings["boot_loads"] == 12
    assert call(path, "--history", str(history), "--boot-sd", "0.01", "--boot-loads", "9") == 2
    assert "--history and --boot-sd" in capsys.readouterr().err
