"""Read TOML files and single TOML values, and write values, which the standard library cannot.

read_value("[1, 2]")        # [1, 2]
read_value("off")           # "off": anything that is not a TOML value is text
write_value({"a": [0.5]})   # '{a = [0.5]}'
"""

from __future__ import annotations

import json
import pathlib
import re
import tomllib
from collections.abc import Mapping
from typing import Any

from router_replay.errors import ConfigError

MOST_LEVELS = 64
TOO_DEEP = "lists or tables are nested too deeply"


def check_depth(tree: Any, place: str) -> None:
    """Raise a ConfigError if the tree is too deep: later code walks it recursively and would run out of stack."""
    level = [tree]
    for _ in range(MOST_LEVELS):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return
    raise ConfigError(f"{place}: {TOO_DEEP}: expected at most {MOST_LEVELS} levels")


def read_file(path: pathlib.Path) -> dict[str, Any]:
    """Parse a TOML file; a ConfigError names the file and the line that is not TOML."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: this file does not exist") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ConfigError(f"{path}: expected UTF-8, got byte {byte:#04x} at offset {error.start}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        end = f"at line {len(text.splitlines())}, the end of the file"
        raise ConfigError(f"{path}: not TOML: {str(error).replace('at end of document', end)}") from None
    except RecursionError:
        raise ConfigError(f"{path}: {TOO_DEEP}") from None
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"{path}: not TOML: {error}") from None


def read_value(text: str) -> Any:
    """Parse one TOML value. A bare word is text, unless it begins like a list, a table or a quoted string."""
    try:
        tree = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError as error:
        if text.startswith(("[", "{", '"', "'")):
            raise ConfigError(f"expected a TOML value, got {text} ({error})") from None
        return text
    except RecursionError:
        raise ConfigError(TOO_DEEP) from None
    except ValueError as error:
        raise ConfigError(f"expected a TOML value, got {text[:40]}... ({error})") from None
    return tree["value"] if len(tree) == 1 else text  # with a line break the text may hold further keys


def write_value(value: Any, place: str = "the value") -> str:
    """Write one value as TOML on one line. A ConfigError names `place` if TOML has no such value, such as None."""
    match value:
        case bool():
            return str(value).lower()
        case int() | float():
            return repr(value)
        case str() | pathlib.PurePath():
            # A JSON string is a TOML string, except for the delete character, which must be escaped in TOML.
            return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
        case list() | tuple():
            return "[" + ", ".join(write_value(item, place) for item in value) + "]"
        case Mapping():
            items = [f"{_key(key)} = {write_value(item, f'{place}.{key}')}" for key, item in value.items()]
            return "{" + ", ".join(items) + "}"
    raise ConfigError(f"{place}: expected text, a number, true or false, a list or a table, got {value!r}")


def _key(key: str) -> str:
    return key if re.fullmatch("[A-Za-z0-9_-]+", key) else write_value(key)
