"""Where releases with the launchers package keep their parser; older wheels of the fake do not have this file."""

from vllm.fake.cli_args import make_arg_parser, validate_parsed_serve_args

__all__ = ["make_arg_parser", "validate_parsed_serve_args"]
