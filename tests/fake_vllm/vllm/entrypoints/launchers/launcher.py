"""Where releases with the launchers package check parser names; older wheels of the fake do not have this file."""

from vllm.fake.parsers import validate_api_server_args

__all__ = ["validate_api_server_args"]
