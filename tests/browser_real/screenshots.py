"""Take the pictures of the documentation: `.venv-browser/bin/python -m tests.browser_real.screenshots FOLDER docs`.

FOLDER holds pages of real runs: report.html, verify.html, fault.html and inspect.html; docs/report_page.md says by
which commands. What is missing is left out.
"""

from __future__ import annotations

import io
import pathlib
import sys

import PIL.Image
from playwright.sync_api import Locator

from tests.browser_real.chromium import Opened, opened_browser

# The picture, its page, the heading of its first and its last figure (None: from the top of the page), and the colours.
PICTURES = (
    ("report_runs.png", "report.html", None, "Agreement", "light"),
    ("report_verify.png", "verify.html", None, "Ratios of the probabilities", "light"),
    ("report_fault.png", "fault.html", None, "Disagreement by layer and position", "light"),
    ("report_inspect.png", "inspect.html", "All trajectories", "One trajectory", "dark"),
)
MARGIN = 16


def _telling(opened: Opened, menu: Locator) -> int:
    """The entry of a menu to show: the rows of all trajectories, or the trajectory of the most bands."""
    every = opened.page.evaluate("JSON.parse(document.getElementById('data').textContent).charts[0].trajectories")
    bands = [len(one["rows"]) for one in every]
    return bands.index(max(bands)) if menu.locator("option").count() == len(every) else 2


def main(folder: pathlib.Path, out: pathlib.Path) -> None:
    with opened_browser() as browser:
        for name, source, first, last, scheme in PICTURES:
            if not (folder / source).exists():
                continue
            opened = Opened.of(browser, folder / source, 980, color_scheme=scheme)
            for menu in opened.page.locator("figure select").all():
                menu.select_option(index=_telling(opened, menu))
            top = opened.chart(first).bounding_box()["y"] - MARGIN if first else 0
            end = opened.chart(last).bounding_box()
            area = {"x": 0, "y": top, "width": 980, "height": end["y"] + end["height"] + MARGIN - top}
            picture = PIL.Image.open(io.BytesIO(opened.page.screenshot(clip=area, full_page=True)))
            picture.convert("RGB").quantize(256).save(out / name, optimize=True)  # a third of the size
            opened.page.close()
            print(f"{out / name}: {(out / name).stat().st_size:,} bytes")  # noqa: T201


if __name__ == "__main__":
    main(*map(pathlib.Path, sys.argv[1:3]))
