"""Checks of one answer: tool calls and reasoning."""

import json

import pytest
from ansible_collections.swapgate.core.plugins.module_utils import answers

CALL = '{"tool": "stock", "arguments": {"article": "clay pot"}}'


@pytest.mark.parametrize(
    ("text", "finish", "calls", "ok"),
    [
        (CALL, "stop", None, True),
        (f"```json\n{CALL}\n```", "stop", None, True),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "stop", None, True),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL[:-1]}</tool_call>", "stop", None, False),
        (CALL[:-2], "stop", None, False),  # corrupted
        (CALL[:-2], "length", None, None),  # cut off by the limit
        ('{"tool": "stock", "arguments": "clay pot"}', "stop", None, False),
        ('{"tool": "stock", "arguments": "{\\"article\\": 1}"}', "stop", None, True),
        ('{"tool": "", "arguments": {}}', "stop", None, False),
        ('{"name": "table", "price": 3}', "stop", None, None),  # data that was asked for
        ("There are six pots.", "stop", None, None),
        ("", "tool_calls", [{"function": {"name": "stock", "arguments": "{}"}}], True),
        ("", "tool_calls", [{"function": {"name": "stock", "arguments": '{"a": '}}], False),
        ("", "tool_calls", [{"function": None}], False),
        ("[1, 2", "stop", None, None),
    ],
)
def test_tool_calls(text, finish, calls, ok):
    assert answers.tool_call_ok(text, finish, calls) is ok


@pytest.mark.parametrize(
    ("text", "reasoning", "ok"),
    [
        ("Six pots.", "The user asks ...", True),
        ("Six pots.", None, None),
        ("<think>The user asks</think>Six pots.", None, False),
        ("asks</think>Six pots.", "The user", False),
        ("Let me think about pots.", None, None),
    ],
)
def test_reasoning(text, reasoning, ok):
    assert answers.reasoning_ok(text, reasoning) is ok


def test_any_text_has_an_answer():
    for text in ("{", '{"tool"', "<tool_call>", "<tool_call>[]</tool_call>", json.dumps(None), "\x00"):
        assert answers.tool_call_ok(text) in (True, False, None)
