"""The `vllm` command: `vllm serve MODEL ...`, `vllm bench serve ...` and `vllm --version`."""

from __future__ import annotations

import importlib.metadata
import sys

from vllm.fake import bench
from vllm.fake.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

COMMANDS = (
    "chat",
    "complete",
    "serve",
    "launch",
    "bench",
    "collect-env",
    "download-kernels",
    "preload",
    "run-batch",
    "snapshot",
)


def make_parser() -> FlexibleArgumentParser:
    """The command's parser. Only `serve` and `bench serve` have their arguments."""
    parser = FlexibleArgumentParser(prog="vllm", description="vLLM CLI")
    # the real command asks for this very name, so a build under another one needs its metadata too
    parser.add_argument("-v", "--version", action="version", version=importlib.metadata.version("vllm"))
    subparsers = parser.add_subparsers(required=False, dest="subparser")
    for name in COMMANDS:
        sub = subparsers.add_parser(name, usage=f"vllm {name} [model_tag] [options]")
        if name == "serve":
            make_arg_parser(sub)
        if name == "bench":
            bench.add_parser(sub)
    return parser


def main() -> None:
    """Runs the command and exits with its status."""
    parser = make_parser()
    args = parser.parse_args()
    if args.subparser == "serve":
        validate_parsed_serve_args(args)
        from vllm.fake.serve import serve

        sys.exit(serve(args))
    if args.subparser == "bench" and args.bench_type:
        sys.exit(bench.run(args))
    if args.subparser:
        sys.exit(
            f"fake vllm: `vllm {args.subparser}` is not part of the fake engine; see tests/fake_vllm/README.md "
            "for what is"
        )
    parser.print_help()


if __name__ == "__main__":
    main()
