"""The distribution's Chromium, driven by Playwright. What a page says and asks for is kept with it."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

# Chromium's own services are switched off: a request of the page must be the only kind of request.
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
PATIENCE = 120_000
"""Milliseconds until a wait fails; long, so that a busy machine fails no test."""


@contextlib.contextmanager
def opened_browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        raise RuntimeError("there is no chromium: install the package of your distribution, such as Debian's chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@dataclasses.dataclass
class Opened:
    """A page in the browser, with its console, its errors and its requests."""

    page: Page
    said: list[str] = dataclasses.field(default_factory=list)
    asked: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def of(cls, browser: Browser, address: str | pathlib.Path, width: int = 1100, **options: Any) -> Opened:
        url = address if isinstance(address, str) else address.resolve().as_uri()
        opened = cls(browser.new_page(viewport={"width": width, "height": 900}, **options))
        page = opened.page
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: opened.said.append(message.text))
        page.on("pageerror", lambda error: opened.said.append(str(error)))
        page.on("request", lambda request: opened.asked.append(request.url))
        page.goto(url)
        opened.wait_until_drawn()
        return opened

    def wait_until_drawn(self) -> None:
        """Wait for every chart, those out of view too."""
        self.page.wait_for_selector("html[data-drawn=all]", state="attached")

    def check_quiet(self, allowed: str = "file://") -> None:
        """See that the page had no error and no warning, and asked for nothing but `allowed`."""
        assert self.said == []
        assert [url for url in self.asked if not url.startswith(allowed)] == []

    def chart(self, title: str) -> Any:
        """The figure with this heading."""
        return self.page.locator("figure").filter(has=self.page.get_by_role("heading", name=title, exact=True))

    def hover(self, title: str, across: float = 0.5, down: float = 0.5) -> None:
        """Move the pointer to a place of a chart; 0 to 1 from its left and its top."""
        plot = self.chart(title).locator(".plot")
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        self.page.mouse.move(box["x"] + across * box["width"], box["y"] + down * box["height"])

    def tip(self) -> str:
        """The text of the tip, when it is shown."""
        self.page.wait_for_selector("#tip:not([hidden])")
        return str(self.page.locator("#tip").text_content())

    def overflow(self) -> int:
        """The pixels by which the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))
