"""Read a training config from TOML and `--set`, name everything that is wrong with it, and print it as TOML again."""

from __future__ import annotations

import difflib
import pathlib
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from router_replay.errors import ConfigError
from router_replay.rl.config import toml
from router_replay.rl.config.blocks import Block, LossConfig, TrainConfig


def load_config(path: pathlib.Path | None, settings: Sequence[str] = ()) -> TrainConfig:
    """Read a config: the defaults, then the file at `path`, then `settings` in their order. The last value wins.

    Each of `settings` is `dotted.key=value`. The value is written as in TOML; anything else is text, such as
    `replay=off`. A ConfigError lists everything that is wrong, one line each.
    """
    tree = {} if path is None else toml.read_file(path)
    problems = []
    for setting in ("", *settings):
        if setting and (problem := _apply(tree, setting)):
            problems.append(problem)
        if isinstance(tree.get("model"), str):  # `model = "tiny"` is short for its path
            tree["model"] = {"path": tree["model"]}
    places = " and ".join(([str(path)] if path else []) + (["--set"] if settings else []))
    toml.check_depth(tree, places)
    try:
        config = TrainConfig.model_validate(tree)
    except ValidationError as error:
        problems += [_problem(dict(detail)) for detail in error.errors(include_url=False)]
    if problems:
        raise config_error(places, problems)
    return config


def config_error(place: str, problems: Sequence[str]) -> ConfigError:
    """Return one error that lists all `problems` of `place`, one line each."""
    count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
    return ConfigError("\n  ".join([f"{place}: {count}", *problems]))


def to_toml(config: TrainConfig) -> str:
    """Write every setting with its value as TOML. `load_config` reads it back as an equal config."""
    lists = {name for name, value in config if isinstance(value, list) and value}  # of blocks: `[[engines]]`
    outside = "".join(
        _line("", name, value) for name, value in config if not isinstance(value, Block) and name not in lists
    )
    blocks = [
        _table(f"[{name}]", name, block)
        for name, block in config
        if isinstance(block, Block) and not (name == "engine" and "engines" in lists)
    ]
    blocks += [_table(f"[[{name}]]", name, block) for name in sorted(lists) for block in getattr(config, name)]
    return "\n".join([outside, *blocks])  # in TOML, settings outside of blocks come first


def _table(head: str, name: str, block: Block) -> str:
    return f"{head}\n" + "".join(_line(name, key, item) for key, item in block if not _is_left_out(block, key))


def _line(block: str, name: str, value: Any) -> str:
    return f"{name} = {toml.write_value(value, _dotted(block, name))}\n"


def _dotted(block: str, name: str) -> str:
    return f"{block}.{name}" if block else name


def _is_left_out(block: Block, key: str) -> bool:
    """Return whether to leave out `normalize`: it is for grpo only, so the printed config would be refused."""
    return (
        isinstance(block, LossConfig)
        and key == "normalize"
        and block.kind != "grpo"
        and key not in block.model_fields_set
    )


def _apply(tree: dict[str, Any], setting: str) -> str | None:
    """Put one `a.b=c` into the tree. Return what is wrong with it, or None."""
    dotted, equals, text = setting.partition("=")
    *blocks, name = keys = [key.strip() for key in dotted.split(".")]
    if not equals or not all(keys):
        return f"--set {setting}: expected key=value, such as optimizer.lr=1e-5"
    try:
        value = toml.read_value(text.strip())
    except ConfigError as error:
        return f"{'.'.join(keys)}: {error}"
    for block in blocks:
        if not isinstance(tree.get(block), dict):
            tree[block] = {}
        tree = tree[block]
    tree[name] = value
    return None


# What to say in place of pydantic's own words, which are not those of a TOML file.
_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a table",
    "float_type": "a number",
    "greater_than": "a number above {gt:g}",
    "greater_than_equal": "a number of {ge:g} or more",
    "int_type": "a whole number",
    "less_than": "a number below {lt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "missing": "one more item",
    "model_type": "a table",
    "path_type": "a path",
    "string_type": "text in quotes",
    "too_long": "at most {max_length} items",
    "tuple_type": "a list",
}


def _problem(detail: dict[str, Any]) -> str:
    """Return one line of our own for one error of pydantic."""
    location = tuple(map(str, detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return _unknown(location)
    if detail["type"] == "value_error":  # of our own checks, which say what may be shown of the input
        return f"{'.'.join(location)}: {detail['ctx']['error']}"
    if detail["type"] in _EXPECTED:
        expected = _EXPECTED[detail["type"]].format(**detail.get("ctx", {}))
    else:
        expected = detail["msg"].removeprefix("Input should be ")
    try:
        came = toml.write_value(detail["input"], "")
    except ConfigError:
        came = str(detail["input"])
    if "@" in came:
        came = "a value that is not shown here, because it may hold a password"
    came = came if len(came) <= 80 else came[:77] + "..."
    return f"{'.'.join(location)}: expected {expected}, got {came}"


def _unknown(location: tuple[str, ...]) -> str:
    """Return the line for an unknown key. It suggests the nearest name of the block, or the same name elsewhere."""
    place, name = ".".join(location[:-1]), location[-1]
    block = "engine" if location[0] == "engines" else place
    known = list(_blocks()[block].model_fields)
    near = [_dotted(place, key) for key in difflib.get_close_matches(name, known, n=1)]
    near = near or [_dotted(other, name) for other, model in _blocks().items() if name in model.model_fields]
    hint = f"did you mean {' or '.join(near)}?" if near else f"the known names are {', '.join(known)}"
    return f"{'.'.join(location)}: unknown; {hint}"


def _blocks() -> dict[str, type[Block]]:
    """Return the class of each block by its name; "" is for the settings outside of any block."""
    inner = {name: field.annotation for name, field in TrainConfig.model_fields.items()}
    blocks = {name: kind for name, kind in inner.items() if isinstance(kind, type) and issubclass(kind, Block)}
    return {"": TrainConfig, **blocks}
