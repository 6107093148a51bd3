"""Finds the calls of tools in what the model wrote, in the form of Hermes and Qwen:

    <tool_call>
    {"name": "add", "arguments": {"a": 12, "b": 34}}
    </tool_call>

Models that write calls in another form get them back as text. A block that is not such JSON makes the whole answer
text: half of an answer would hide from the agent that the other half was wrong.
"""

from __future__ import annotations

import dataclasses
import json
import re
import uuid
from typing import Any

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(rf"{OPENING}(.*?){CLOSING}", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Written:
    """Holds an answer: the text `content`, the tool `calls` in OpenAI's form, and whether a call was `malformed`."""

    content: str
    calls: tuple[dict[str, Any], ...] = ()
    malformed: bool = False

    def message(self) -> dict[str, Any]:
        """Return the assistant message of this answer."""
        if not self.calls:
            return {"role": "assistant", "content": self.content}
        return {"role": "assistant", "content": self.content or None, "tool_calls": list(self.calls)}


def read_calls(text: str) -> Written:
    """Return `text` with its calls taken out, or as it is if it has none, or one that cannot be read."""
    if OPENING not in text:
        return Written(text)
    calls = [_call(block) for block in _BLOCK.findall(text)]
    rest = _BLOCK.sub("", text)
    if not calls or None in calls or OPENING in rest:
        return Written(text, malformed=True)
    return Written(rest.strip(), tuple(call for call in calls if call is not None))


def _call(block: str) -> dict[str, Any] | None:
    try:
        value = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        return None
    function = {"name": value["name"], "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}
