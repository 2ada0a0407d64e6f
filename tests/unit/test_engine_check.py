"""engine_check: the engine's own word on an argv, asked of the fake engine and of stand-ins for other releases."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
PROGRAM = REPO / "plugins/host_program/engine_check.py"
FAKE = REPO / "tests/fake_vllm"
NGRAM = '{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4}'


def run(text, engine=FAKE):
    """Run the program with ``text`` on its standard input and ``engine`` as the only place of vllm."""
    return subprocess.run(
        [sys.executable, str(PROGRAM)],
        input=text,
        env={**os.environ, "PYTHONPATH": str(engine)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def ask(argv, engine=FAKE):
    """The report on one argv. Standard output must be that alone, whatever the engine prints."""
    done = run(json.dumps({"argv": argv}), engine)
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    return json.loads(line)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model, as far as an engine's configuration reads it."""
    folder = tmp_path_factory.mktemp("model")
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 2048}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_an_accepted_argv_shows_what_the_configuration_became(model):
    report = ask([model, "--port", "8000", "--max-model-len", "1024", "--speculative-config", NGRAM])
    assert (report["ok"], report["stage"], report["error"], report["version"]) == (True, "done", None, "0.32.0")
    effective = report["effective"]
    assert (effective["model"], effective["max_model_len"], effective["tensor_parallel_size"]) == (model, 1024, 1)
    assert effective["async_scheduling"] is False  # the engine turns it off for n-grams, silently
    speculative = effective["speculative"]
    # The minimum that nobody gave is the maximum: the trap that the resolved variant refuses.
    assert (speculative["prompt_lookup_min"], speculative["prompt_lookup_max"]) == (4, 4)
    assert (speculative["method"], speculative["num_speculative_tokens"]) == ("ngram", 5)


@pytest.mark.parametrize(("words", "runner"), [([], "V2"), (["--speculative-config", NGRAM], "V1")])
def test_the_model_runner_is_told(model, words, runner):
    assert ask([model, *words])["effective"]["model_runner"] == runner


def test_without_speculation_there_is_none(model):
    assert ask([model])["effective"]["speculative"] is None


@pytest.mark.parametrize(
    ("words", "stage", "said"),
    [
        (["--disable-log-requests"], "arguments", "unrecognized arguments: --disable-log-requests"),
        (["--port", "http"], "arguments", "--port"),
        (["--speculative-config", "{broken"], "arguments", "--speculative-config"),
        (["--speculative-config", '{"method":"ngrm","num_speculative_tokens":5}'], "config", "method"),
        (["--max-model-len", "99999"], "config", "max_model_len"),
        (["--tool-call-parser", "nope", "--enable-auto-tool-choice"], "parsers", "nope"),
    ],
)
def test_what_the_engine_refuses_is_told_with_its_stage_on_one_line(model, words, stage, said):
    report = ask([model, *words])
    assert (report["ok"], report["stage"]) == (False, stage)
    assert said in report["error"] and "\n" not in report["error"]


def test_a_model_that_is_not_there_is_refused(tmp_path):
    report = ask([str(tmp_path / "none")])
    assert (report["ok"], report["stage"]) == (False, "config") and report["error"]


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"argv": "a b"}', '{"argv": [1]}', '{"argv": null}', "no JSON"])
def test_input_of_another_shape_is_exit_2_and_a_line_that_says_what_is_expected(text):
    done = run(text)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith('engine_check: expected {"argv": [str, ...]} on standard input: ')
    assert len(done.stderr.splitlines()) == 1


# --- stand-ins for releases whose modules lie elsewhere --------------------------------------------------------------


PARSER = "import argparse\nclass FlexibleArgumentParser(argparse.ArgumentParser):\n    pass\n"
CLI = """
def make_arg_parser(parser):
    print("the engine prints on standard output too")
    parser.add_argument("model_tag", nargs="?")
    parser.add_argument("--fault")
    return parser
def validate_parsed_serve_args(args):
    if args.fault == "validate":
        raise TypeError("Error: --enable-auto-tool-choice requires --tool-call-parser")
"""
ENGINE = """
import enum, logging
from types import SimpleNamespace as N
class Mode(enum.Enum):
    PIECEWISE = 1
class AsyncEngineArgs:
    @classmethod
    def from_cli_args(cls, args):
        cls.args = args
        return cls()
    def create_engine_config(self):
        log = logging.getLogger("vllm.config")
        log.warning("%s is off", "async scheduling")
        log.warning("async scheduling is off")
        log.info("not worth a notice")
        logging.getLogger("other").warning("somebody else's")
        if self.args.fault == "exit":
            raise SystemExit("the engine ended")
        if self.args.fault == "pydantic":
            raise ValueError("1 validation error for SpeculativeConfig\\nmethod\\n  Input should be 'ngram' [type=x]\\n"
                             "    For further information visit somewhere")
        if self.args.fault == "silent":
            raise RuntimeError()
        return N(model_config=N(model=self.args.model, max_model_len=7), parallel_config=N(tensor_parallel_size=2),
                 scheduler_config=N(), compilation_config=N(cudagraph_mode=Mode.PIECEWISE))
"""


def stand_in(root, cli="vllm/entrypoints/openai/cli_args.py", parser="vllm/utils/__init__.py", version="0.16.0"):
    """A package named vllm with the given places of its modules."""
    files = {
        "vllm/__init__.py": f'__version__ = "{version}"\n',
        "vllm/engine/arg_utils.py": ENGINE,
        cli: CLI,
        parser: PARSER,
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in path.parents:
            if folder == root:
                break
            (folder / "__init__.py").touch()
    return root


@pytest.mark.parametrize("cli", ["vllm/entrypoints/openai/cli_args.py", "vllm/entrypoints/launchers/cli_args.py"])
@pytest.mark.parametrize("parser", ["vllm/utils/__init__.py", "vllm/utils/argparse_utils.py"])
def test_modules_are_found_where_each_release_has_them(tmp_path, cli, parser):
    report = ask(["/m"], stand_in(tmp_path, cli, parser))
    assert (report["ok"], report["version"]) == (True, "0.16.0")
    assert report["effective"] == {
        "model": "/m",
        "max_model_len": 7,
        "tensor_parallel_size": 2,
        "async_scheduling": None,
        "cudagraph_mode": "PIECEWISE",
        "model_runner": None,
        "speculative": None,
    }
    assert report["notices"] == ["async scheduling is off"]


@pytest.mark.parametrize(
    ("fault", "stage", "error"),
    [
        ("validate", "arguments", "TypeError: Error: --enable-auto-tool-choice requires --tool-call-parser"),
        ("exit", "config", "SystemExit: the engine ended"),
        ("pydantic", "config", "ValueError: method: Input should be 'ngram'"),
        ("silent", "config", "RuntimeError: no message"),
    ],
)
def test_whatever_the_engine_raises_is_the_answer(tmp_path, fault, stage, error):
    report = ask(["/m", "--fault", fault], stand_in(tmp_path))
    assert (report["ok"], report["stage"], report["error"]) == (False, stage, error)


def test_an_engine_without_the_modules_says_which_were_looked_for(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").write_text('__version__ = "9.0"\n')
    report = ask(["/m"], tmp_path)
    assert (report["ok"], report["stage"], report["version"]) == (False, "import", "9.0")
    assert "vllm.utils.argparse_utils:FlexibleArgumentParser, vllm.utils:FlexibleArgumentParser" in report["error"]


def test_no_engine_at_all_is_an_answer_too(tmp_path):
    report = ask(["/m"], tmp_path)
    assert (report["ok"], report["stage"], report["version"]) == (False, "import", None)
    assert "No module named 'vllm'" in report["error"]
