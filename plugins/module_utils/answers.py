"""What an answer must keep when speculation is switched on: valid tool calls, and reasoning apart from the answer."""

from __future__ import annotations

import json
import re
from typing import Any

_FENCE = re.compile(r"^```[a-z]*\s*|\s*```$")
_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)
_CALL = re.compile(r'"(?:tool|arguments)\b')
_THINKING = re.compile(r"</?(?:seed:)?think(?:ing)?>|\[/?THINK\]|\u25c1/?think\u25b7|<\|channel\|>\s*analysis")


def _object(value: Any) -> bool:
    """Whether a value is a JSON object, as such or as text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return False
    return isinstance(value, dict)


def _valid(call: Any) -> bool:
    """Whether {"tool" | "name": text, "arguments" | "parameters": object} is what it should be."""
    if not isinstance(call, dict):
        return False
    name = call.get("tool", call.get("name"))
    return isinstance(name, str) and bool(name) and _object(call.get("arguments", call.get("parameters")))


def tool_call_ok(text: str, finish_reason: str = "stop", tool_calls: list[dict[str, Any]] | None = None) -> bool | None:
    """Whether the tool calls of an answer are valid JSON with a name and an object of arguments; None: it has none.

    `tool_calls`: the message's own, as the engine parsed them. Calls written in the text count too: between
    <tool_call> tags, or as an object at its start. An answer cut off at its limit of tokens says nothing.
    """
    if finish_reason == "length":
        return None
    if tool_calls:
        return all(_valid(call.get("function")) for call in tool_calls)
    bare = _FENCE.sub("", text.strip())
    found = _TAGGED.findall(text) or ([bare] if bare.startswith("{") and _CALL.search(bare) else [])
    for part in found:
        try:
            call, _ = json.JSONDecoder().raw_decode(part.strip())
        except ValueError:
            return False
        if not _valid(call):
            return False
    return True if found else None


def reasoning_ok(text: str, reasoning: str | None = None) -> bool | None:
    """Whether reasoning stands apart from the answer: False with its marks in the text, None without any reasoning."""
    if _THINKING.search(text):
        return False
    return True if reasoning else None
