"""One browser for all checks, and one set of pages."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.browser_real import chromium, pages


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with chromium.opened_browser() as opened:
        yield opened


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """The pages by name: runs, long, verdict, fault, trajectories."""
    return pages.make(tmp_path_factory.mktemp("pages"))
