"""One browser for all checks, and one set of pages. Playwright is imported late: `make test` reads this file too."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from tests.browser_real import chromium

    with chromium.opened_browser() as opened:
        yield opened


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """The pages by name: runs, long, verdict, fault, trajectories."""
    from tests.browser_real import pages

    return pages.make(tmp_path_factory.mktemp("pages"))
