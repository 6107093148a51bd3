"""The documentation and the examples of the settings: each setting once, in the words of its block."""

from __future__ import annotations

import ast
import inspect
import itertools
import pathlib
import re

import pytest

from router_replay.rl.config import Block, TrainConfig, load_config, to_toml
from router_replay.rl.config.checks import check_config


def rows_of_the_documentation() -> list[tuple[str, str, str]]:
    """The name, the default and the explanation of each setting, as docs/training.md has them."""
    page = (pathlib.Path(__file__).parents[3] / "docs" / "training.md").read_text()
    section = page.partition("## Settings\n")[2].partition("\n## ")[0]
    rows = [line.split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [(name.strip("| `"), default.strip("`"), text.removesuffix(" |")) for name, default, text in rows]


def explanations(block: type[Block], prefix: str = "") -> dict[str, str]:
    """The text below each setting of a block, and of the blocks in it; empty where there is none."""
    [body] = [node.body for node in ast.parse(inspect.getsource(block)).body if isinstance(node, ast.ClassDef)]
    below = {}
    for node, after in itertools.zip_longest(body, body[1:]):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            written = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            below[node.target.id] = " ".join(after.value.value.split()) if written else ""
    found = {}
    for name, field in block.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Block):
            found |= explanations(field.annotation, f"{name}.")
        else:
            found[prefix + name] = below[name]
    return found


def test_the_documentation_explains_every_setting_in_the_words_of_its_block() -> None:
    """The block is the home of the text. The page has it too, with links."""
    shown = {name: re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text) for name, _, text in rows_of_the_documentation()}
    assert shown == explanations(TrainConfig)
    assert all(shown.values())


def test_the_documentation_has_every_setting_with_its_default() -> None:
    documented = [(name, default) for name, default, _ in rows_of_the_documentation()]
    printed, block = [], ""
    for line in to_toml(TrainConfig()).splitlines():
        if line.startswith("["):
            block = line.strip("[]") + "."
        elif line:
            name, _, value = line.partition(" = ")
            printed.append((block + name, value))
    assert documented == printed


@pytest.mark.parametrize("path", sorted((pathlib.Path(__file__).parents[3] / "examples").glob("*.toml")), ids=str)
def test_the_examples_are_configs(path: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Those of a model and a server that are not here are only read; the others pass every check."""
    config = load_config(path)
    if config.model.path == "tiny":
        assert check_config(config, world_size=1) == []
    else:
        (tmp_path / "model").mkdir()
        check_config(load_config(path, [f"model.path={tmp_path / 'model'}"]), world_size=config.trainer.ulysses)
