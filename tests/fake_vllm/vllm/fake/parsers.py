"""The check of parser names that the real server makes before it starts its engine."""

from __future__ import annotations

import argparse

from vllm.fake import release


def validate_api_server_args(args: argparse.Namespace) -> None:
    """Raises KeyError for a tool-call or reasoning parser that is not registered, listing those that are."""
    tools = release.record()["tool_parsers"]
    if args.enable_auto_tool_choice and args.tool_call_parser not in tools:
        raise KeyError(f"invalid tool call parser: {args.tool_call_parser} (chose from {{ {','.join(tools)} }})")
    reasoning = release.record()["reasoning_parsers"]
    if args.reasoning_parser and args.reasoning_parser not in reasoning:
        raise KeyError(f"invalid reasoning parser: {args.reasoning_parser} (chose from {{ {','.join(reasoning)} }})")
