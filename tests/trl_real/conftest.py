"""One model folder for all tests, and trainers that are closed at the end of a test."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.trl_real import makers

    return makers.model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make(folder: str, tmp_path: pathlib.Path) -> Iterator[Callable[..., Any]]:
    """`make(replay, **settings)` returns a trainer that has not trained yet."""
    from tests.trl_real import makers

    with contextlib.ExitStack() as closing:

        def made(replay: str = "r3", **settings: Any) -> Any:
            one = makers.trainer(folder, tmp_path, replay, **settings)
            if hasattr(one, "close"):
                closing.callback(one.close)
            return one

        yield made
