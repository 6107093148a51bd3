"""Helpers for environments that work with text. `tokenizer` is a Hugging Face tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from router_replay.errors import ConfigError


def prompt_tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return the tokens of a text that starts a sequence, with the special tokens that the tokenizer adds there."""
    return tuple(tokenizer.encode(text))


def further_tokens(tokenizer: Any, text: str) -> tuple[int, ...]:
    """Return the tokens of a text that follows other tokens, without special tokens."""
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def one_token(tokenizer: Any, text: str) -> int:
    """Return the id of a text that must be one token, because the engine stops at it; otherwise raise ConfigError."""
    tokens = further_tokens(tokenizer, text)
    if len(tokens) != 1:
        raise ConfigError(
            f"the environment stops at {text!r}, which must be one token of the model's tokenizer; "
            f"it is {len(tokens)}: {list(tokens)}. Use another environment or another tokenizer"
        )
    return tokens[0]


def end_of_sequence(tokenizer: Any) -> int:
    """Return the id of the end-of-sequence token; raise ConfigError if there is none."""
    token = tokenizer.eos_token_id
    if token is None:
        raise ConfigError(
            "the environment rewards only answers that end with the end of sequence, but this tokenizer has no "
            "eos_token: set it in the model folder's tokenizer_config.json"
        )
    return int(token)


def ended_answer(tokenizer: Any, token_ids: Sequence[int], end: int) -> str | None:
    """Return the text before the end of sequence `end`; None if the tokens do not end with it."""
    if not token_ids or token_ids[-1] != end:
        return None
    return str(tokenizer.decode(list(token_ids[:-1]))).strip()
