"""`python -m vllm.entrypoints.openai.api_server --model X ...`: the old way to start, which still works and says that
it is old.
"""

from __future__ import annotations

import sys
import warnings

from vllm.fake.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.fake.parsers import validate_api_server_args
from vllm.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["main", "validate_api_server_args"]


def main() -> None:
    """Runs the server and exits with its status."""
    warnings.warn(
        "The `python -m vllm.entrypoints.openai.api_server` command is deprecated and may be removed in a future "
        "release. "
        "Please use `vllm server` instead.",
        DeprecationWarning,
        stacklevel=1,
    )
    args = make_arg_parser(FlexibleArgumentParser()).parse_args()
    validate_parsed_serve_args(args)
    from vllm.fake.serve import serve

    sys.exit(serve(args))


if __name__ == "__main__":
    main()
