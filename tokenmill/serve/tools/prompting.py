"""Tells a model of tools when its chat template cannot: in a system message, in the Hermes style.

Templates that take tools never come here. Calls and results of earlier turns become plain text in the same style.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_INTRODUCTION = """You can call functions. Each line below describes one as JSON:
<tools>
{tools}
</tools>
To call a function, answer with its name and arguments as JSON between these tags:
<tool_call>
{{"name": "function name", "arguments": {{"argument name": "value"}}}}
</tool_call>"""


def with_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation in messages that any template can show."""
    shown = plain_messages(messages)
    introduction = _INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if shown and shown[0]["role"] == "system":
        shown[0] = {**shown[0], "content": f"{shown[0]['content']}\n\n{introduction}".lstrip()}
    else:
        shown.insert(0, {"role": "system", "content": introduction})
    return shown


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Calls and results as text."""
    return [_plain(message) for message in messages]


def _plain(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content") or ""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = "\n".join(map(_call_text, message.get("tool_calls") or ()))
    return {"role": message["role"], "content": f"{content}\n{calls}".strip() if calls else content}


def _call_text(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return json.dumps(call, ensure_ascii=False)
    arguments = function.get("arguments") or "{}"
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {json.dumps(function.get("name"))}, "arguments": {text}}}\n</tool_call>'
