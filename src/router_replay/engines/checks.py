"""Checks single values from callers and servers. Each check returns the plain Python value or raises EngineError."""

from __future__ import annotations

import math
import numbers
import operator
import os
from collections.abc import Iterable, Mapping
from typing import Any

from router_replay.errors import EngineError
from router_replay.families.from_config import TEXT_FIELDS

TOKEN_LIMIT = 1 << 31  # no vocabulary is larger; engines keep token ids in int32 or int64
VERSION_LIMIT = 1 << 63  # versions are stored as int64


def integer(value: Any, name: str, lowest: int, below: int) -> int:
    """Return an integer of any integer type in [lowest, below). Bools, floats and strings are refused."""
    if type(value) is int and lowest <= value < below:
        return value
    try:
        if _is_bool(value):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise EngineError(f"{name} must be an integer, got {shown(value)}") from None
    if not lowest <= number < below:
        raise EngineError(f"{name} must lie in [{lowest}, {below}), got {number}")
    return number


def number(value: Any, name: str) -> float:
    """Return a finite number as a float. Bools and strings are refused."""
    if type(value) is float and math.isfinite(value):
        return value
    if _is_bool(value) or not isinstance(value, numbers.Real):
        raise EngineError(f"{name} must be a number, got {shown(value)}")
    if not math.isfinite(value):
        raise EngineError(f"{name} must be finite, got {value}")
    return float(value)


def flag(value: Any, name: str) -> bool:
    """Return a bool, from Python or NumPy. Numbers and strings are refused."""
    if value is True or value is False:
        return value
    if not _is_bool(value):
        raise EngineError(f"{name} must be True or False, got {shown(value)}")
    return bool(value)


def tokens(values: Any, name: str, vocabulary: int | None = None) -> tuple[int, ...]:
    """Return token ids as plain integers, from a sequence or a one-dimensional array or tensor."""
    if type(values) is not tuple:
        if hasattr(values, "tolist"):  # an array or a tensor; floats and bools keep their type
            values = values.tolist()
        if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
            raise EngineError(f"{name} must be a sequence of token ids, got {shown(values)}")
        values = tuple(values)
    if not values:
        return values
    if set(map(type, values)) - {int}:
        values = tuple(integer(value, f"{name}[{place}]", 0, TOKEN_LIMIT) for place, value in enumerate(values))
    below = TOKEN_LIMIT if vocabulary is None else vocabulary
    if not (min(values) >= 0 and max(values) < below):
        place, wrong = next((place, value) for place, value in enumerate(values) if not 0 <= value < below)
        raise EngineError(f"{name}: token ids must lie in [0, {below}), got {wrong} at position {place}")
    return values


def version(value: Any) -> int:
    """Return a policy version, which fits into int64 and is not negative."""
    return integer(value, "a policy version", 0, VERSION_LIMIT)


def router_dtype(value: Any) -> None:
    """Raise EngineError if `value` is no setting for the dtype of the routers."""
    if value not in ("model", "float32"):
        raise EngineError(f'router_dtype must be "model" (the dtype of the model) or "float32", got {value!r}')


def vocabulary(value: Any) -> int | None:
    """Return a vocabulary size, or None if it is not known."""
    return None if value is None else integer(value, "vocabulary", 1, TOKEN_LIMIT + 1)


def seconds(value: Any, name: str) -> float:
    """Return a time limit in seconds. Zero and None are refused, because they would mean no limit."""
    limit = number(value, name)
    if limit <= 0:
        raise EngineError(f"{name} must be more than 0 seconds, got {value}")
    return limit


def request_ids(values: Any) -> list[str] | None:
    """Return the request ids given to an abort.

    A single string is refused: it would be read as a list of characters and abort nothing.
    """
    if values is None:
        return None
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise EngineError(f"abort takes a list of request ids, or None for all requests, got {shown(values)}")
    names = list(values)
    for name in names:
        if not isinstance(name, str):
            raise EngineError(f"a request id must be a string, got {shown(name)}")
    return names


def folder(source: Any) -> str:
    """Return the path of a weight source that must be a folder."""
    if not isinstance(source, str | os.PathLike):
        raise EngineError(f"weights must be the path of a Hugging Face folder, got {type(source).__name__}")
    return os.fspath(source)


def vocabulary_of(config: Mapping[str, Any]) -> int | None:
    """Return the vocabulary size from a model config or its text part, or None if it is not given."""
    sizes = [config.get("vocab_size")]
    sizes += [vocabulary_of(config[name]) for name in TEXT_FIELDS if isinstance(config.get(name), Mapping)]
    return max((size for size in sizes if type(size) is int and size > 0), default=None)


def same_vocabulary(given: int | None, found: int | None) -> int | None:
    """Return whichever vocabulary size is known. Raises EngineError if both are known and differ."""
    if given is not None and found is not None and given != found:
        raise EngineError(f"vocabulary={given} was given, but the vocabulary of the server's model has {found} tokens")
    return found if given is None else given


def shown(value: Any) -> str:
    """Format a value for an error message: its type, and as much of the value as fits on one line."""
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool) or type(value).__name__ in ("bool", "bool_")
