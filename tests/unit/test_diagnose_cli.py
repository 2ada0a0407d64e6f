"""The command: exit codes, forms of input, what it prints. Run as a program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "diagnose.py"
CASES = ROOT / "tests" / "cases"
SAMPLES = {
    sample["name"]: sample for sample in yaml.safe_load((Path(__file__).parent / "diagnosis_samples.yml").read_text())
}
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."


def run(*arguments: str, stdin: str | bytes = "") -> subprocess.CompletedProcess:
    """The command with these arguments and this standard input."""
    data = stdin if isinstance(stdin, bytes) else stdin.encode()
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], input=data, capture_output=True, timeout=60, check=False
    )


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("worker cause under three wrappers", 1),
        ("asked to stop by systemd", 0),
        ("compile that takes its time", 3),
        ("nothing to see", 4),
    ],
)
def test_exit_code_is_the_verdict(tmp_path, name, code):
    """0 benign, 1 fatal, 3 alive, 4 unknown, from a file and from standard input alike."""
    log = tmp_path / "engine.log"
    log.write_text(SAMPLES[name]["log"])
    assert run(str(log)).returncode == code
    assert run("-", stdin=SAMPLES[name]["log"]).returncode == code


def test_a_reader_that_has_seen_enough_is_no_error():
    """As in `diagnose.py FILE | head -1`: the verdict is the exit code all the same, and nothing is complained of."""
    words = [sys.executable, str(SCRIPT), "-"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        command.stdout.close()
        command.stdin.write(f"{OOM}\n".encode())
        command.stdin.close()
        assert (command.stderr.read(), command.wait(60)) == (b"", 1)


def test_json_has_the_documented_keys():
    """One object on one line, with everything that the documentation names."""
    done = run("--json", "-", stdin=f"INFO 01-01 00:00:00 [a.py:1] x\n\x1b[31m{OOM}\x1b[0m\n")
    result = json.loads(done.stdout)
    assert done.returncode == 1
    assert result["root_cause"] == OOM
    assert (result["verdict"], result["signature"], result["class"], result["kind"]) == (
        "fatal",
        "cuda-oom",
        "config",
        "log",
    )
    assert {"phase", "remedy", "recognised", "line", "printed_by", "context"} <= set(result)


def test_the_text_names_cause_remedy_and_context():
    """What a person reads: verdict, cause with its line, what to do, the lines around."""
    out = run("-", stdin=f"before\n{OOM}\nafter").stdout.decode()
    assert "verdict: fatal (config" in out
    assert f"cause:   {OOM}" in out
    assert "line 2; signature cuda-oom" in out
    assert "do:      " in out
    assert f"    before\n  > {OOM}\n    after" in out


@pytest.mark.parametrize(
    ("case", "kind", "verdict", "code"),
    [
        ("nccl-watchdog-worker-died-first", "log", "fatal", 1),
        ("slow-deepseek-24s-per-shard", "log", "alive", 3),
        ("smi-csv-requires-reset-zero-memory", "nvidia-smi", "fatal", 1),
        ("smi-csv-consumer-na-fields", "nvidia-smi", "benign", 0),
        ("smi-csv-gb10-header", "nvidia-smi", "unknown", 4),
        ("smi-table-a100-err-row", "nvidia-smi", "fatal", 1),
        ("gpu-state-wedged-after-hung-collective", "nvidia-smi", "fatal", 1),
        ("topo-8x-pcie-pix-node-sys-ansi", "topology", "benign", 0),
        ("topo-8x-nv18-fused-columns", "topology", "unknown", 4),
        ("cfg-proposed-systemd-unit-vllm", "unit", "benign", 0),
        ("cfg-ngram-only-lookup-max", "engine config", "unknown", 4),
    ],
)
def test_case_files_are_read(case, kind, verdict, code):
    """The case files of the repository, each kind of input."""
    done = run("--json", str(CASES / f"{case}.yml"))
    result = json.loads(done.stdout)
    assert (result["kind"], result["verdict"], done.returncode) == (kind, verdict, code)


@pytest.mark.parametrize(
    "case",
    sorted(path.stem for path in CASES.glob("smi-*.yml")) + sorted(path.stem for path in CASES.glob("topo-*.yml")),
)
def test_bare_outputs_are_told_from_logs(tmp_path, case):
    """The same output without the case around it is recognised for what it is."""
    whole = yaml.safe_load((CASES / f"{case}.yml").read_text())
    bare = tmp_path / "output.txt"
    bare.write_text(whole["input"])
    result = json.loads(run("--json", str(bare)).stdout)
    assert result["kind"] == ("topology" if case.startswith("topo") else "nvidia-smi")
    assert result["judgement"] == whole["expected"]["verdict"]


def test_a_running_log_is_no_hang():
    """--running: the end of the input is not the end of the load."""
    line = "(Worker_TP0 pid=97) INFO 04-09 20:31:06 [pynccl.py:111] vLLM is using nccl==2.27.5\n"
    assert run("-", stdin=line).returncode == 1
    assert run("--running", "-", stdin=line).returncode == 3


def test_journal_json_is_read():
    """journalctl -o json, a coloured message as a list of bytes, systemd's own lines kept apart."""
    entries = [
        {"SYSLOG_IDENTIFIER": "vllm", "_PID": "7", "MESSAGE": list(f"\x1b[31m{OOM}\x1b[0m".encode())},
        {"SYSLOG_IDENTIFIER": "systemd", "_PID": "1", "MESSAGE": "vllm.service: Failed with result 'exit-code'."},
        {"SYSLOG_IDENTIFIER": "vllm", "MESSAGE": None},
    ]
    result = json.loads(run("--json", "-", stdin="\n".join(json.dumps(entry) for entry in entries)).stdout)
    assert (result["root_cause"], result["signature"]) == (OOM, "cuda-oom")


def test_bytes_that_are_no_text_are_read():
    """A core dump on standard input has a verdict too."""
    assert run("-", stdin=bytes(range(256)) * 50).returncode in {0, 1, 3, 4}


def test_a_long_log_is_streamed(tmp_path):
    """Beyond the size of an nvidia-smi output the input is a log; the cause in the middle is found."""
    log = tmp_path / "long.log"
    filler = "(Worker_TP0 pid=1) INFO 01-01 00:00:00 [cuda.py:1] Using a block size of 16.\n" * 6000
    log.write_text(filler + f"(Worker_TP0 pid=1) ERROR 01-01 00:00:00 [x.py:1] {OOM}\n" + filler)
    result = json.loads(run("--json", str(log)).stdout)
    assert (result["signature"], result["line"]) == ("cuda-oom", 6001)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["/nowhere/engine.log"], "/nowhere/engine.log: cannot be read: No such file or directory"),
        ([], "give a file (or -), or --unit UNIT"),
        (["-", "--unit", "x.service"], "give a file (or -), or --unit UNIT"),
        (["--signatures", "/nowhere.yml", "-"], "/nowhere.yml: cannot use the signatures"),
    ],
)
def test_a_wrong_call_is_exit_code_2(arguments, words):
    """What was wrong and what was expected, on standard error."""
    done = run(*arguments)
    assert done.returncode == 2
    assert words in done.stderr.decode()
    assert not done.stdout


def test_help_lists_the_exit_codes():
    """The codes are documented where one looks for them."""
    out = run("--help").stdout.decode()
    for code, verdict in ((0, "benign"), (1, "fatal"), (3, "alive"), (4, "unknown")):
        assert f"{code}  {verdict}" in out


def test_it_does_not_import_ansible():
    """The command answers without Ansible: none of its modules is loaded."""
    code = (
        f"import sys, runpy; sys.argv = ['diagnose', '-']; sys.stdin = open('/dev/null')\n"
        f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\nexcept SystemExit: pass\n"
        "print([name for name in sys.modules if name == 'ansible' or name.startswith('ansible.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_unit_without_a_start_is_named(tmp_path):
    """--unit asks systemd for the InvocationID and the journal for exactly that start."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "systemctl").write_text("#!/bin/sh\necho ${INVOCATION-}\n")
    (tools / "journalctl").write_text(
        '#!/bin/sh\nfor word; do case $word in _SYSTEMD_INVOCATION_ID=0123*) printf \'{"MESSAGE": "'
        + OOM
        + "\"}\\n';; esac; done\n"
    )
    for tool in tools.iterdir():
        tool.chmod(0o755)

    def ask(invocation: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, str(SCRIPT), "--unit", "vllm-x.service"],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PATH": f"{tools}:/usr/bin:/bin", "INVOCATION": invocation},
            check=False,
        )

    never = ask("")
    assert never.returncode == 2
    assert "InvocationID found '', expected 32 hex digits" in never.stderr
    started = ask("0123456789abcdef0123456789abcdef")
    assert started.returncode == 1
    assert "signature cuda-oom" in started.stdout


def test_table_out_of_compose():
    """The name that compose puts before each line does not hide a table."""
    table = (
        "|   0  Tesla T4            On   | 00000000:00:1E.0 Off |                    0 |\n"
        "| N/A   23C    P8     9W /  70W |      0MiB / 15109MiB |      0%      Default |\n"
    )
    done = run("--json", "-", stdin="".join(f"gpu_1  | {line}\n" for line in table.splitlines()))
    assert json.loads(done.stdout)["kind"] == "nvidia-smi"
    assert done.returncode == 0
