"""Reads the body of a chat or completions request: every field is used, neutral, or refused by its name.

ask = read_chat({"messages": [{"role": "user", "content": "12+34="}], "temperature": 0.7})
ask.messages, ask.temperature                        # checked
read_chat({"messages": [...], "top_k": 5})           # Refusal: top_k is not a field that this gateway has
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from router_replay.gateway.refusal import Refusal

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_STOPS = 16
MOST_SAMPLES = 128
# Fields that other servers have, each with the values that change nothing. Any other value is refused.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "parallel_tool_calls": (True,),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
# What chat_template_kwargs must not have: arguments of apply_chat_template that are no variables of the template.
NOT_VARIABLES = {
    *("conversation", "messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
    *("return_assistant_tokens_mask", "tokenizer_kwargs"),
}
T = TypeVar("T", bound="_Body")


class _StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class _Body(msgspec.Struct, kw_only=True):
    """The fields that both routes have."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    user: str | None = None


class _Chat(_Body):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Text(_Body):
    prompt: str | list[Any] | None = None
    logprobs: int | None = None


@dataclasses.dataclass(frozen=True)
class Ask:
    """Holds a request of a client: `messages`, or for the completions route `prompt` as text or token ids.

    `tools` are the functions that the model may call. None in `max_tokens`, `temperature`, `top_p` and `seed` means
    that the client did not say. `template` are more variables for the chat template. `user` may name the session.
    """

    messages: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    prompt: str | list[int] = ""
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False
    user: str | None = None
    template: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        """Whether this is a request of the chat route."""
        return bool(self.messages)


def read_chat(body: Any) -> Ask:
    """Return the request in `body`, the parsed JSON of a chat request; raise Refusal that names a wrong field."""
    chat = _read(body, _Chat)
    if not chat.messages:
        raise Refusal(400, "messages must have at least one message, got none", param="messages")
    choice = "auto" if chat.tool_choice is None else chat.tool_choice
    if choice not in ("auto", "none"):
        raise Refusal(
            400,
            f'tool_choice must be "auto" or "none", got {_shown(choice)}: the model cannot be made to call a tool here',
            param="tool_choice",
        )
    if chat.max_tokens is not None and chat.max_completion_tokens is not None:
        raise Refusal(400, "max_tokens and max_completion_tokens mean the same: send one", param="max_tokens")
    most = chat.max_completion_tokens if chat.max_tokens is None else chat.max_tokens
    tools = None if choice == "none" else [_tool(tool, place) for place, tool in enumerate(chat.tools or ())] or None
    return dataclasses.replace(
        _common(chat),
        messages=[_message(message, place) for place, message in enumerate(chat.messages)],
        tools=tools,
        max_tokens=_at_least_one(most, "max_tokens"),
        logprobs=bool(chat.logprobs),
        template=_template(chat.chat_template_kwargs or {}),
    )


def read_text(body: Any) -> Ask:
    """Return the request in `body`, the parsed JSON of a completions request; raise Refusal for a wrong field."""
    text = _read(body, _Text)
    prompt = text.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if not prompt or (isinstance(prompt, list) and any(type(token) is not int for token in prompt)):
        raise Refusal(400, "prompt must be one text, or the token ids of one prompt", param="prompt")
    if text.logprobs:
        raise Refusal(
            400,
            f"logprobs must be 0, got {text.logprobs}: only the log-prob of the sampled token is known",
            param="logprobs",
        )
    return dataclasses.replace(
        _common(text),
        prompt=prompt,
        max_tokens=_at_least_one(text.max_tokens, "max_tokens"),
        logprobs=text.logprobs is not None,
    )


def _read(body: Any, kind: type[T]) -> T:
    if not isinstance(body, dict):
        raise Refusal(400, f"the body must be a JSON object, got {type(body).__name__}")
    body = dict(body)
    for name, neutral in NEUTRAL.items():
        value = body.pop(name, None)
        if value is not None and value not in neutral:
            raise Refusal(
                400,
                f"{name} = {_shown(value)} is not supported by this gateway: leave it out",
                param=name,
                code="unsupported_value",
            )
    unknown = sorted(set(body) - set(kind.__struct_fields__))
    if unknown:
        raise Refusal(
            400,
            f"this gateway does not have the fields {', '.join(unknown)}: leave them out. It has "
            f"{', '.join(sorted(kind.__struct_fields__))}",
            param=unknown[0],
            code="unknown_field",
        )
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        found = re.search(r"`\$\.(\w+)", str(error)) or re.search(r"required field `(\w+)`", str(error))
        raise Refusal(400, f"the body is wrong: {error}", param=found.group(1) if found else None) from None


def _common(body: _Body) -> Ask:
    stop = () if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if len(stop) > MOST_STOPS or not all(stop):
        raise Refusal(400, f"stop must be at most {MOST_STOPS} texts that are not empty", param="stop")
    n = 1 if body.n is None else body.n
    if not 1 <= n <= MOST_SAMPLES:
        raise Refusal(400, f"n must lie in [1, {MOST_SAMPLES}], got {n}", param="n")
    if body.temperature is not None and not 0 <= body.temperature <= 100:
        raise Refusal(400, f"temperature must lie in [0, 100], got {body.temperature}", param="temperature")
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise Refusal(400, f"top_p must lie in (0, 1], got {body.top_p}", param="top_p")
    if body.seed is not None and not 0 <= body.seed < 1 << 62:
        raise Refusal(400, f"seed must lie in [0, 2**62), got {body.seed}", param="seed")
    return Ask(
        temperature=body.temperature,
        top_p=body.top_p,
        n=n,
        stop=stop,
        seed=body.seed,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        user=body.user,
    )


def _message(message: dict[str, Any], place: int) -> dict[str, Any]:
    """Return a message without empty fields, its text in one piece, and the arguments of its calls as objects."""
    name = f"messages[{place}]"
    role = message.get("role")
    if role not in ROLES:
        raise Refusal(400, f"{name}.role must be one of {', '.join(ROLES)}, got {_shown(role)}", param="messages")
    kept = {key: value for key, value in message.items() if value is not None}
    kept["content"] = _text_of(message.get("content"), name)
    if "tool_calls" in kept:
        if not isinstance(kept["tool_calls"], list) or not kept["tool_calls"]:
            raise Refusal(400, f"{name}.tool_calls must be a list that is not empty", param="messages")
        kept["tool_calls"] = [_call(call, f"{name}.tool_calls") for call in kept["tool_calls"]]
    return kept


def _text_of(content: Any, name: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refusal(400, f"{name}.content must be text, got {type(content).__name__}", param="messages")
    texts: list[str] = []
    for part in content:
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise Refusal(400, f"{name}.content may have parts of the type text only", param="messages")
        texts.append(part["text"])
    return "".join(texts)


def _call(call: Any, name: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal(400, f"{name}: each must have function.name and function.arguments", param="messages")
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):  # chat templates want an object; what is none stays the text that the model wrote
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    return {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tool(tool: dict[str, Any], place: int) -> dict[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Refusal(400, f'tools[{place}] must be {{"type": "function", "function": {{"name": ...}}}}', param="tools")
    return tool


def _template(variables: dict[str, Any]) -> dict[str, Any]:
    wrong = sorted(NOT_VARIABLES & set(variables))
    if wrong:
        raise Refusal(400, f"chat_template_kwargs must not have {', '.join(wrong)}", param="chat_template_kwargs")
    return variables


def _at_least_one(value: int | None, name: str) -> int | None:
    if value is not None and not 1 <= value < 1 << 31:
        raise Refusal(400, f"{name} must lie in [1, 2**31), got {value}", param=name)
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."
