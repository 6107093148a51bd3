"""One model and one process group of a single rank for the tests in this process."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

if importlib.util.find_spec("verl") is None:
    collect_ignore_glob = ["test_*.py"]  # verl has environments of its own: make test-verl


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.verl_real import tiny

    folder: pathlib.Path = tmp_path_factory.mktemp("verl")
    tiny.start(folder)
    return tiny.save_model(folder / "model")
