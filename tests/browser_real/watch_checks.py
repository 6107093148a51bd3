"""`router-replay watch` in a real browser: the page waits, draws what the run writes, and says when it ends."""

from __future__ import annotations

import json
import pathlib
import signal
import subprocess
import sys

from playwright.sync_api import Browser, expect

from tests.browser_real.chromium import PATIENCE, Opened
from tests.browser_real.pages import line


def append(folder: pathlib.Path, *steps: int, **more: float) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({**line(step, 2), **more}) + "\n" for step in steps)


def test_the_page_follows_the_run(browser: Browser, tmp_path: pathlib.Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    command = [sys.executable, "-m", "router_replay.cli", "watch", f"R3={folder}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[2]
        opened = Opened.of(browser, url)
        page = opened.page
        expect.set_options(timeout=PATIENCE)
        live = page.locator("#live")
        expect(live).to_contain_text("waiting for its first step")
        append(folder, 0)
        expect(page.locator("figure")).not_to_have_count(0)  # the page loads itself again: it has charts now
        opened.wait_until_drawn()
        append(folder, 1, 2)
        steps = page.locator("#summary tbody tr").first
        expect(steps).to_contain_text("3")
        expect(live).to_have_text("Watching. R3: step 2.")
        page.get_by_label("R3").uncheck()
        append(folder, 3, new=1.0)
        expect(opened.chart("new")).to_have_count(1)  # a new metric, so again a new page
        opened.wait_until_drawn()
        expect(page.get_by_label("R3")).not_to_be_checked()  # what was hidden stays hidden
        page.get_by_label("R3").check()
        expect(opened.chart("Reward").locator(".mark-symbol path").first).to_be_visible()
        opened.check_quiet(url)
        process.send_signal(signal.SIGINT)
        process.communicate()
    assert process.returncode == 0
    expect(live).to_contain_text("has ended")
    opened.page.close()
