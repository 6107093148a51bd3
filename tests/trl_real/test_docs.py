"""The code of docs/integrations/trl.md runs as it stands there."""

from __future__ import annotations

import pathlib
import re

import pytest

pytest.importorskip("trl", reason="TRL has an environment of its own: make test-trl")

from tests.trl_real import makers

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "integrations" / "trl.md").read_text("utf-8")
[CODE] = re.findall(r"^```python\n(.+?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_lines_of_the_page_train_with_every_row_replayed(folder: str, tmp_path: pathlib.Path) -> None:
    names = {
        "folder": folder,
        "reward": makers.reward,
        "prompts": makers.prompts(),
        "settings": {**makers.config(tmp_path).to_dict(), "generation_batch_size": None},
    }
    exec(CODE, names)
    entries = [entry for entry in names["trainer"].state.log_history if "routes/live" in entry]
    assert entries
    for entry in entries:
        assert entry["routes/replayed"] > 0
        assert entry["routes/live"] == 0
    for name in re.findall(r"`((?:routes|routing|mismatch)/[\w/]+)`", PAGE):
        assert any(name in entry for entry in entries), name


def test_the_lines_are_few() -> None:
    """About ten, of which a script for TRL has most already."""
    added = [line for line in CODE.splitlines() if "router_replay" in line or "RouterReplay" in line]
    added += [line for line in CODE.splitlines() if "replay=" in line or "engine=" in line or "close" in line]
    assert len(added) <= 10
