"""Ask the installed engine itself whether it would accept an argv, without loading the model.

Runs under the Python of the engine's own virtualenv, as the service user, with the unit's environment:

    VENV/bin/python engine_check.py  < {"argv": [MODEL, "--flag", "value", ...]}

``argv`` is what follows ``vllm serve``. The answer is one JSON object on the last line of standard output:

    {"ok": bool, "stage": "import"|"arguments"|"config"|"parsers"|"done", "error": str|null, "version": str|null,
     "effective": {"model", "max_model_len", "tensor_parallel_size", "async_scheduling", "cudagraph_mode",
                   "model_runner": "V1"|"V2"|null where the engine knows only one,
                   "speculative": null | {"method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max",
                                          "model"}},
     "notices": [str, ...]}

``notices`` are warnings that the engine logged meanwhile: what it changes silently at start. Exit code 0 when the
check ran (whatever it found), 2 when its input is not of that shape. Engine releases moved the modules used here, so
each is looked for under the names it had from 0.16 to 0.32.
"""

import contextlib
import importlib
import io
import json
import logging
import os
import re
import sys


def _first(*places):
    """The first of ``module:attribute`` that imports."""
    missing = None
    for place in places:
        module, _, attribute = place.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ModuleNotFoundError, AttributeError) as error:
            missing = error
    raise ImportError("none of {} exists in this engine ({})".format(", ".join(places), missing))


def _collect_notices():
    """A list that fills with the engine's warnings. The engine replaces its log handlers, so the records are caught."""
    lines = []
    make = logging.getLogRecordFactory()

    def record(*args, **kwargs):
        made = make(*args, **kwargs)
        if made.levelno >= logging.WARNING and made.name.split(".")[0] == "vllm" and made.getMessage() not in lines:
            lines.append(made.getMessage())
        return made

    logging.setLogRecordFactory(record)
    return lines


def _last_line(text):
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _said(line):
    """A line of a validation error without Pydantic's notes, but with the value that was found when that is a word."""
    text, _, notes = line.partition(" [type=")
    value = re.search(r"input_value=('[^']*'), input_type=str", notes)
    return f"{text}, found {value.group(1)}" if value else text


def _message(error):
    """One line for an exception: its type and what it says. Pydantic puts the field and its message on two lines."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if "validation error" not in line and not line.startswith("For further")]
    said = [_said(line) for line in (telling or lines or ["no message"])]
    text = "{}: {}".format(*said[:2]) if len(said) > 1 and " " not in said[0] else said[0]
    return f"{type(error).__name__}: {text}"


def _plain(value):
    """A config value as JSON: enums by name, everything unknown as text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return getattr(value, "name", None) or str(value)


def _effective(config):
    spec = getattr(config, "speculative_config", None)
    speculative = None
    if spec is not None:
        keys = ("method", "num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max", "model")
        speculative = {key: _plain(getattr(spec, key, None)) for key in keys}
    return {
        "model": _plain(config.model_config.model),
        "max_model_len": _plain(config.model_config.max_model_len),
        "tensor_parallel_size": _plain(config.parallel_config.tensor_parallel_size),
        "async_scheduling": _plain(getattr(config.scheduler_config, "async_scheduling", None)),
        "cudagraph_mode": _plain(getattr(config.compilation_config, "cudagraph_mode", None)),
        "model_runner": {True: "V2", False: "V1"}.get(getattr(config, "use_v2_model_runner", None)),
        "speculative": speculative,
    }


def check(argv):
    """Parse ``argv`` and build the engine's configuration from it; the shape of the answer is in the module's text."""
    report = {"ok": False, "stage": "import", "error": None, "version": None, "effective": {}, "notices": []}
    report["notices"] = _collect_notices()
    try:
        import vllm

        report["version"] = getattr(vllm, "__version__", None)
        parser_class = _first("vllm.utils.argparse_utils:FlexibleArgumentParser", "vllm.utils:FlexibleArgumentParser")
        cli = ("vllm.entrypoints.launchers.cli_args", "vllm.entrypoints.openai.cli_args")
        make_parser = _first(*(place + ":make_arg_parser" for place in cli))
        validate = _first(*(place + ":validate_parsed_serve_args" for place in cli))
        engine_args = _first("vllm.engine.arg_utils:AsyncEngineArgs")

        report["stage"] = "arguments"
        stderr = io.StringIO()
        try:
            with contextlib.redirect_stderr(stderr):
                args = make_parser(parser_class(prog="vllm serve")).parse_args(argv)
        except SystemExit:
            report["error"] = _last_line(stderr.getvalue()) or "the engine's parser refused the arguments"
            return report
        if getattr(args, "model_tag", None):
            args.model = args.model_tag
        validate(args)

        report["stage"] = "config"
        report["effective"] = _effective(engine_args.from_cli_args(args).create_engine_config())

        report["stage"] = "parsers"
        with contextlib.suppress(ImportError):
            _first(
                "vllm.entrypoints.launchers.launcher:validate_api_server_args",
                "vllm.entrypoints.openai.api_server:validate_api_server_args",
            )(args)
    except (Exception, SystemExit) as error:
        report["error"] = _message(error)
        return report
    report.update(ok=True, stage="done")
    return report


def main():
    """Read the request, keep the engine's own printing off standard output, print the answer."""
    try:
        argv = json.load(sys.stdin)["argv"]
        if not (isinstance(argv, list) and all(isinstance(word, str) for word in argv)):
            raise TypeError("argv is not a list of strings")
    except (ValueError, KeyError, TypeError) as error:
        print(f'engine_check: expected {{"argv": [str, ...]}} on standard input: {error}', file=sys.stderr)
        return 2
    answer = os.dup(1)
    os.dup2(2, 1)  # the engine and its libraries print where they like
    report = check(argv)
    sys.stdout.flush()
    with os.fdopen(answer, "w") as out:
        out.write(json.dumps(report) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
