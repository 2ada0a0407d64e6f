"""The diagnosis: causes by table, and properties that hold for any log."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
import yaml
from ansible_collections.swapgate.core.plugins.module_utils import diagnosis, log_text, signatures
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
SIGNATURE_FILE = ROOT / "roles" / "vllm_service" / "files" / "signatures.yml"
KNOWN = diagnosis.load_signatures(yaml.safe_load(SIGNATURE_FILE.read_text()))
SAMPLES = yaml.safe_load((Path(__file__).parent / "diagnosis_samples.yml").read_text())
CASES = [yaml.safe_load(path.read_text()) for path in sorted((ROOT / "tests" / "cases").glob("[!_]*.yml"))]
LOGS = [(case["id"], case["outcome"], "\n".join(case["log"])) for case in CASES if "log" in case]
QUIET = [(name, text) for name, outcome, text in LOGS if outcome != "fatal"]
FATAL = [(name, text) for name, outcome, text in LOGS if outcome == "fatal"]
CERTAIN = "(APIServer pid=2) RuntimeError: Engine core initialization failed. See root cause above."


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample["name"])
def test_sample(sample):
    """Each sample gives its verdict, its line as the cause and, where stated, class, signature and remedy."""
    result = diagnosis.diagnose(sample["log"], KNOWN)
    assert result["verdict"] == sample["verdict"]
    if "cause" in sample:
        assert result["root_cause"] == sample["log"].split("\n")[sample["cause"]]
        assert result["line"] == sample["cause"] + 1
    if "class" in sample:
        assert result["class"] == sample["class"]
    if "signature" in sample:
        assert result["signature"] == sample["signature"]
    if "remedy" in sample:
        assert re.search(sample["remedy"], result["remedy"])
    if sample["verdict"] == "fatal":
        assert result["class"] in signatures.CLASSES
        assert result["remedy"]


def test_an_unknown_failure_says_so_and_names_the_line():
    """Nobody knows the exception, the line is still the best one."""
    result = diagnosis.diagnose("INFO 01-01 00:00:00 [a.py:1] x\nWidgetError: loose", KNOWN)
    assert (result["verdict"], result["signature"], result["recognised"]) == ("fatal", None, False)
    assert result["root_cause"] == "WidgetError: loose"
    assert result["remedy"].startswith("not recognised")


def test_context_holds_ten_lines_around_the_cause():
    """Five lines before and five after, the cause between."""
    lines = [f"INFO 01-01 00:00:00 [a.py:{number}] step {number}" for number in range(20)]
    lines[10] = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB."
    result = diagnosis.diagnose(lines, KNOWN)
    assert result["context"] == lines[5:16]


def test_the_cause_stands_as_in_the_input_without_escape_codes():
    """Prefixes and spaces stay, codes go."""
    result = diagnosis.diagnose("\x1b[0;36m(EngineCore pid=7)\x1b[0;0m   ValueError: odd", KNOWN)
    assert result["root_cause"] == "(EngineCore pid=7)   ValueError: odd"


def test_a_silent_end_is_a_hang_only_when_the_log_is_over():
    """The same lines: a finished log hung in its first collective, a running one has just begun it."""
    text = "(Worker_TP0 pid=97) INFO 04-09 20:31:06 [pynccl.py:111] vLLM is using nccl==2.27.5"
    assert diagnosis.diagnose(text, KNOWN)["signature"] == "first-collective"
    assert diagnosis.diagnose(text, KNOWN, ended=False)["verdict"] != "fatal"
    went_on = text + "\nLoading safetensors checkpoint shards:   5% Completed | 4/71 [01:35<26:52, 23.72s/it]"
    assert diagnosis.diagnose(went_on, KNOWN)["verdict"] == "alive"


@pytest.mark.parametrize(("name", "text"), QUIET, ids=[name for name, _text in QUIET])
def test_a_live_wait_is_never_given_up_for_a_quiet_log(name, text):
    """`fatal()` stays None after every line of a benign or slow log."""
    scanner = diagnosis.Scanner(KNOWN)
    for line in text.split("\n"):
        scanner.feed(line)
        assert scanner.fatal() is None, name


def test_a_live_wait_is_given_up_once_the_cause_stands_below_the_wrapper():
    """The wrapper alone is not enough: the traceback with the cause comes after it."""
    log = next(sample["log"] for sample in SAMPLES if sample["name"] == "worker cause under three wrappers").split("\n")
    scanner = diagnosis.Scanner(KNOWN)
    fired = []
    for number, line in enumerate(log):
        scanner.feed(line)
        if scanner.fatal():
            fired.append(number)
    assert fired[0] == 7
    assert scanner.fatal()["root_cause"] == log[7]


def test_a_live_wait_is_given_up_at_the_parsers_last_words():
    """An argument error ends the engine: nothing is to be waited for."""
    scanner = diagnosis.Scanner(KNOWN)
    scanner.feed("usage: vllm serve [options]")
    assert scanner.fatal() is None
    scanner.feed("vllm serve: error: unrecognized arguments: --disable-log-requests")
    assert scanner.fatal()["signature"] == "argument-parser"


def test_ranks_interleaved_keep_the_cause():
    """Tracebacks of four ranks, line by line through each other: each process is followed by itself."""
    frames = [
        "Traceback (most recent call last):",
        '  File "/opt/v/gpu_worker.py", line 356, in load_model',
        "    self.model_runner.load_model(load_dummy_weights=load_dummy_weights)",
    ]
    lines = []
    for frame in frames:
        lines += [
            f"(Worker_TP{rank} pid={rank}) ERROR 01-01 00:00:00 [multiproc_executor.py:1] {frame}" for rank in range(4)
        ]
    lines.append("(Worker_TP2 pid=2) ERROR 01-01 00:00:00 [multiproc_executor.py:1] WidgetError: rank 2 was first")
    lines.append("(Worker_TP0 pid=0) ERROR 01-01 00:00:00 [multiproc_executor.py:1] WidgetError: rank 0 followed")
    result = diagnosis.diagnose(lines, KNOWN)
    assert result["root_cause"] == lines[-2]
    assert result["printed_by"] == "Worker_TP2"


@pytest.mark.parametrize(
    "prefix",
    [
        "Aug 19 18:34:30 host1 vllm[87]: ",
        "2026-02-08T00:40:07.13+00:00 ",
        "2026-02-08T00:40:07.130000000Z stderr F ",
        "vllm-1  | ",
        "[pod/vllm-0/main] ",
    ],
)
@pytest.mark.parametrize(("name", "text"), FATAL, ids=[name for name, _text in FATAL])
def test_the_way_a_log_was_collected_does_not_change_the_cause(prefix, name, text):
    """journald, kubectl and compose put their own prefix before each line."""
    lines = [log_text.strip_ansi(line) for line in text.split("\n")]
    if any("systemd" in line or "kernel" in line for line in lines):
        prefix = "2026-02-08T00:40:07.13+00:00 "
    bare = diagnosis.diagnose(lines, KNOWN)
    result = diagnosis.diagnose([prefix + line for line in lines], KNOWN)
    assert (result["verdict"], result["root_cause"]) == ("fatal", prefix + bare["root_cause"]), name


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(QUIET), st.data())
def test_a_quiet_log_cut_anywhere_is_never_fatal(log, data):
    """Any piece of a log in which nothing failed shows no failure."""
    text = log[1]
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    assert diagnosis.diagnose(text[start:end], KNOWN)["verdict"] != "fatal"


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(QUIET), st.sampled_from(QUIET), st.randoms(use_true_random=False))
def test_two_quiet_logs_interleaved_are_not_fatal(one, two, chance: random.Random):
    """Lines of two processes that are well, in any merge of them, show no failure."""
    left, right = one[1].split("\n"), two[1].split("\n")
    merged = []
    while left or right:
        merged.append((left if left and (not right or chance.random() < 0.5) else right).pop(0))
    assert diagnosis.diagnose(merged, KNOWN)["verdict"] != "fatal"


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(FATAL), st.data())
def test_a_fatal_log_with_other_ranks_talking_in_between_stays_fatal(log, data):
    """Healthy chatter between the lines does not hide the failure."""
    lines = log[1].split("\n")
    for _step in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(lines) - 1))
        lines.insert(at, "(Worker_TP7 pid=7777) DEBUG 01-01 00:00:00 [cuda.py:1] Using a block size of 16.")
    assert diagnosis.diagnose(lines, KNOWN)["verdict"] == "fatal"


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.lists(st.text(max_size=80), max_size=30).map("\n".join)))
def test_no_text_can_crash_it(text):
    """Any text has a verdict, and a cause that stands in it."""
    result = diagnosis.diagnose(text, KNOWN)
    assert result["verdict"] in {"fatal", "benign", "alive", "unknown"}
    if result["root_cause"] is not None:
        assert result["root_cause"] in log_text.strip_ansi(text)


PIECES = [
    "Traceback (most recent call last):",
    '  File "/x.py", line 1, in f',
    "    f()",
    "ValueError: x",
    CERTAIN,
    "\r",
    "\x1b[31m",
    "%|",
    "(Worker_TP0 pid=1) ERROR 01-01 00:00:00 [core.py:1] ",
    "During handling of the above exception, another exception occurred:",
    "vllm: error: argument --x: Value",
    "1 validation error for X",
    "  Value error, x [type=value_error]",
    "[<0>] uvm_x [nvidia_uvm]",
    "NCCL version 2.2",
    "KeyboardInterrupt",
    "Exception ignored in: x",
    '{"a": {b}}',
    "(INFO",
    "[rank0]:",
    "\x00",
]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=25), st.lists(st.sampled_from(["", "\n"]), min_size=25, max_size=25))
def test_no_mixture_of_its_own_words_can_crash_it(pieces, ends):
    """The words that it acts upon, in any order and cut anywhere, live and at the end."""
    scanner = diagnosis.Scanner(KNOWN)
    for line in "".join(piece + end for piece, end in zip(pieces, ends)).split("\n"):
        scanner.feed(line)
        scanner.fatal()
    assert scanner.result()["verdict"] in {"fatal", "benign", "alive", "unknown"}


def test_a_long_failing_log_needs_bounded_memory():
    """Thousands of different error lines leave the candidates bounded and the first cause in place."""
    scanner = diagnosis.Scanner(KNOWN)
    scanner.feed("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.")
    for number in range(5000):
        scanner.feed(f"ERROR 01-01 00:00:00 [x.py:{number}] OddError: number {number}")
    assert scanner.result()["signature"] == "cuda-oom"
    assert len(scanner._candidates) <= 64


BAD_FILES = [
    ({}, "expected a list of mappings"),
    ({"signatures": [3]}, "entry 1: found int, expected a mapping"),
    ({"signatures": [{"id": "x", "role": "reason"}]}, "role: found 'reason'"),
    ({"signatures": [{"id": "x", "role": "benign", "contains": "ab"}]}, "source: found None"),
    (
        {"signatures": [{"id": "x", "role": "cause", "contains": "ab", "source": "s", "remedy": "r"}]},
        "class: found None",
    ),
    ({"signatures": [{"id": "x", "role": "benign", "contains": "a", "source": "s"}]}, "strings of 2 characters"),
    (
        {"signatures": [{"id": "x", "role": "benign", "contains": "ab", "source": "s", "pattern": "("}]},
        "no regular expression",
    ),
    (
        {"signatures": [{"id": "x", "role": "benign", "contains": "ab", "source": "s", "patern": "x"}]},
        "unknown key 'patern'",
    ),
    (
        {"signatures": [{"id": "x", "role": "benign", "contains": "ab", "source": "s"}] * 2},
        "found 2 times, expected once",
    ),
    (
        {"signatures": [{"id": "x", "role": "benign", "contains": "ab", "source": "s", "hang": "last"}]},
        "hang: found 'last'",
    ),
]


@pytest.mark.parametrize(("content", "message"), BAD_FILES, ids=[message for _content, message in BAD_FILES])
def test_a_wrong_signature_file_names_entry_and_key(content, message):
    """What is wrong, where, and what was expected."""
    with pytest.raises(ValueError, match="signatures: ") as caught:
        diagnosis.load_signatures(content)
    assert message in str(caught.value)


def test_every_signature_has_a_source_and_remedies_say_something():
    """The shipped file is complete: causes have a remedy of a sentence, and every role is used."""
    assert {signature.role for signature in KNOWN.all} == set(signatures.ROLES)
    assert all(len(signature.remedy) > 20 for signature in KNOWN.all if signature.role in {"cause", "effect"})


STOPPED = """\
(APIServer pid=1) INFO 05-14 11:29:05 [gpu_model_runner.py:1347] Model loading took 14.9889 GiB and 20.515212 seconds
(APIServer pid=1) INFO 05-14 11:29:18 [backends.py:430] Dynamo bytecode transform time: 12.01 s"""


def test_a_load_that_ended_before_it_was_ready_is_not_told_that_all_is_well():
    """Whoever asks at 3 a.m. reads what happened: it was stopped, or its end stands elsewhere."""
    ended = diagnosis.diagnose(STOPPED, KNOWN)
    assert ended["verdict"] == "alive" and "before the server was ready" in ended["remedy"]
    assert diagnosis.diagnose(STOPPED, KNOWN, ended=False)["remedy"] == "Nothing to do: the load goes on."
    stopped = diagnosis.diagnose(STOPPED + "\nKeyboardInterrupt: terminated", KNOWN)
    assert stopped["verdict"] == "benign"
    assert '"KeyboardInterrupt: terminated"' in stopped["remedy"] and "not ready yet" in stopped["remedy"]
    served = "INFO:     Application startup complete.\nKeyboardInterrupt: terminated"
    assert "not ready" not in diagnosis.diagnose(served, KNOWN)["remedy"]


@pytest.mark.parametrize(
    ("line", "cls", "words"),
    [
        (
            "ValueError: tensor_parallel_size 3 and --max-num-seqs 4 cannot be combined",
            "config",
            "tensor_parallel_size, ",
        ),
        ("RuntimeError: could not download part 3 of the tensor file", "transient", "a download"),
        ("AssertionError", "config", "says next to nothing"),
        ("ValueError: tensor model.layers.3 of the checkpoint is odd", "model", "manifest"),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/var/lib/x'", "host", "service user"),
    ],
)
def test_the_class_of_what_no_signature_knows_comes_from_what_the_line_says(line, cls, words):
    """Arguments, a download or nothing at all, before the word "tensor" is taken for the model."""
    result = diagnosis.diagnose(f"(Worker_TP0 pid=9) ERROR 01-01 00:00:00 [multiproc_executor.py:1] {line}", KNOWN)
    assert (result["verdict"], result["class"], result["recognised"]) == ("fatal", cls, False)
    assert words in result["remedy"]


def test_dockers_json_file_reads_like_a_log():
    """`/var/lib/docker/containers/*/*-json.log` as it lies on the host."""
    lines = ['{"log":"ValueError: No available memory for the cache blocks.\\n","stream":"stderr","time":"2026"}']
    assert list(log_text.journal_lines(lines)) == ["ValueError: No available memory for the cache blocks."]
