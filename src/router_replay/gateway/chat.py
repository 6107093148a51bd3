"""Turns messages into tokens and tokens into text, by the tokenizer and chat template of the model.

A history is not tokenised again where it was sampled here: the tokens of an earlier turn are taken as they are, and
only what follows them is tokenised. `continued` decides whether this is the history that the agent sent.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from router_replay.errors import EngineError
from router_replay.gateway.refusal import Refusal

Message = dict[str, Any]


class Chat:
    """Renders, tokenises and decodes with a Hugging Face `tokenizer`.

    `end_token_ids` are the tokens with which the model ends a sequence, besides the tokenizer's own.
    """

    def __init__(self, tokenizer: Any, end_token_ids: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        own = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
        self._special = frozenset(tokenizer.all_special_ids)
        self.end_token_ids = tuple(dict.fromkeys([*own, *end_token_ids, *self._closing_token()]))

    @property
    def has_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self.tokenizer.chat_template)

    def render(self, messages: Sequence[Message], tools: Any = None, variables: Mapping[str, Any] | None = None) -> str:
        """Return the text of a prompt for the next answer; `variables` are more variables for the template."""
        if not self.has_template:
            raise Refusal(400, "this model has no chat template: use the completions route", param="messages")
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=True, **(variables or {})
            )
        except Exception as error:  # a template is a program, and raises what it likes
            raise Refusal(
                400, f"the chat template refused the messages: {type(error).__name__}: {error}", param="messages"
            ) from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens that the text does not have."""
        return self._encoded(text, add_special_tokens=False)

    def encode_first(self, text: str) -> list[int]:
        """Return the tokens of a text that begins a sequence, with the special tokens that the tokenizer adds there."""
        return self._encoded(text, add_special_tokens=True)

    def _encoded(self, text: str, **options: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Refusal(400, f"the text is not valid Unicode: {error}") from None
        return [int(token) for token in self.tokenizer.encode(text, **options)]

    def decode(self, token_ids: Sequence[int], special: bool = True) -> str:
        """Return the text of tokens, with or without that of `special` tokens."""
        return str(
            self.tokenizer.decode(list(token_ids), skip_special_tokens=not special, clean_up_tokenization_spaces=False)
        )

    def without_end(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the tokens without the one that ended the answer."""
        ended = len(token_ids) and (token_ids[-1] in self.end_token_ids)
        return token_ids[:-1] if ended else token_ids

    def continued(
        self,
        token_ids: Sequence[int],
        place: int,
        messages: Sequence[Message],
        text: str,
        tools: Any,
        variables: Mapping[str, Any],
    ) -> list[int] | None:
        """Return a prompt that begins with `token_ids` and says the same as `text`; None if there is no such prompt.

        `token_ids` are the prompt and the answer of an earlier turn, whose answer is `messages[place]`. `text` is what
        the template makes of all `messages`. White space does not count: templates trim answers, and write the JSON of
        a call with other spaces than the model. Anything else counts, such as a template that leaves out the thoughts
        of earlier answers.
        """
        written = self.decode(token_ids)
        if text.startswith(written):
            return [*token_ids, *self.encode(text[len(written) :])]
        mark = f"answer{uuid.uuid4().hex}"
        marked = [*messages[:place], {"role": "assistant", "content": mark}, *messages[place + 1 :]]
        try:
            parts = self.render(marked, tools, variables).split(mark)
        except Refusal:  # such as a template that wants a call before the result of a tool
            return None
        if len(parts) != 2:
            return None
        end = self.decode(token_ids[-1:]) if token_ids[-1] in self.end_token_ids else ""
        prompt = [*token_ids, *self.encode(parts[1].removeprefix(end))]
        return prompt if _without_space(self.decode(prompt)) == _without_space(text) else None

    def _closing_token(self) -> Iterator[int]:
        """Yield the special token with which the template closes an answer, such as <|im_end|>."""
        if not self.has_template:
            return
        mark = f"answer{uuid.uuid4().hex}"
        try:
            text = self.render([{"role": "user", "content": "?"}, {"role": "assistant", "content": mark}])
        except Refusal:
            return
        first = self.encode(text.partition(mark)[2])[:1]
        if first and first[0] in self._special:
            yield first[0]


def digests(messages: Sequence[Message]) -> list[str]:
    """Return for each message a digest of it and all before it. Ids of calls, and how JSON is spaced, do not count."""
    found, before = [], ""
    for message in messages:
        calls = [
            (call["function"]["name"], json.dumps(_parsed(call["function"]["arguments"]), sort_keys=True))
            for call in message.get("tool_calls") or ()
        ]
        said = [before, message["role"], (message.get("content") or "").strip(), calls]
        before = hashlib.sha256(json.dumps(said).encode()).hexdigest()
        found.append(before)
    return found


def end_token_ids(folder: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return the tokens that end a sequence by generation_config.json or config.json of a model `folder`."""
    for name in ("generation_config.json", "config.json"):
        try:
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                value = json.load(file).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise EngineError(f"{os.path.join(folder, name)} cannot be read: {error}") from error
        if value is not None:
            return tuple(value) if isinstance(value, list) else (int(value),)
    return ()


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


def _without_space(text: str) -> str:
    return "".join(text.split())
