"""Writes answers in OpenAI's form, whole or as a stream. Routes, versions and token ids are not in them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

from router_replay.gateway.fields import Ask
from router_replay.gateway.gateway import Answer, Choice


class Reply:
    """Writes one `answer` to what a client asked, `ask`; `model` is the name of the model."""

    def __init__(self, ask: Ask, answer: Answer, model: str) -> None:
        self._ask, self._answer = ask, answer
        name = "chatcmpl" if ask.is_chat else "cmpl"
        self._head = {"id": f"{name}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    @property
    def usage(self) -> dict[str, int]:
        """The numbers of tokens. Sampled tokens behind a stop text do not count."""
        prompt, sampled = self._answer.prompt_tokens, sum(choice.sampled for choice in self._answer.choices)
        return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}

    def whole(self) -> dict[str, Any]:
        """Return the reply as one JSON object."""
        kind = "chat.completion" if self._ask.is_chat else "text_completion"
        choices = [self._choice(index, choice) for index, choice in enumerate(self._answer.choices)]
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """Yield the reply in the pieces of a stream."""
        kind = "chat.completion.chunk" if self._ask.is_chat else "text_completion"
        head = {**self._head, "object": kind, **({"usage": None} if self._ask.include_usage else {})}
        for index, choice in enumerate(self._answer.choices):
            if self._ask.is_chat:
                for delta, logprobs, reason in self._deltas(choice):
                    piece = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
                    yield {**head, "choices": [piece]}
            else:
                yield {**head, "choices": [self._choice(index, choice)]}
        if self._ask.include_usage:
            yield {**head, "choices": [], "usage": self.usage}

    def _choice(self, index: int, choice: Choice) -> dict[str, Any]:
        end = {"index": index, "finish_reason": choice.finish_reason, "logprobs": self._logprobs(choice)}
        if not self._ask.is_chat:
            return {**end, "text": choice.written.content}
        return {**end, "message": {"refusal": None, **choice.written.message()}}

    def _deltas(self, choice: Choice) -> Iterator[tuple[dict[str, Any], Any, str | None]]:
        yield {"role": "assistant", "content": ""}, None, None
        if choice.written.content:
            yield {"content": choice.written.content}, self._logprobs(choice), None
        for place, call in enumerate(choice.written.calls):
            yield {"tool_calls": [{"index": place, **call}]}, None, None
        yield {}, None, choice.finish_reason

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if not self._ask.logprobs:
            return None
        pairs = list(zip(choice.tokens, choice.logprobs, strict=True))
        if self._ask.is_chat:
            content = [
                {"token": token, "logprob": value, "bytes": _bytes(token), "top_logprobs": []} for token, value in pairs
            ]
            return {"content": content, "refusal": None}
        offsets = [sum(map(len, choice.tokens[:place])) for place in range(len(pairs))]
        return {
            "tokens": list(choice.tokens),
            "token_logprobs": list(choice.logprobs),
            "top_logprobs": None,
            "text_offset": offsets,
        }


def _bytes(token: str) -> list[int] | None:
    """Return the bytes of a token's text; None for a part of a character, whose bytes the text does not show."""
    return None if "\N{REPLACEMENT CHARACTER}" in token else list(token.encode())
