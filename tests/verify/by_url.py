"""Run `router-replay verify` on a server by its URL."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from router_replay.cli import main


def verdict(capsys: pytest.CaptureFixture[str], model: str, engine: str, *more: str) -> tuple[int, dict[str, Any]]:
    """Return the status of the command and the JSON that it printed."""
    capsys.readouterr()
    options = ["--engine", engine, "--tokens", "12", "--device", "cpu", "--json"]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        status = main(["verify", model, *options, *more])
    finally:
        torch.set_num_threads(threads)
    printed = capsys.readouterr()
    assert printed.out, printed.err
    facts: dict[str, Any] = json.loads(printed.out)
    return status, facts


def check_verdicts(capsys: pytest.CaptureFixture[str], engine: str, right: str, wrong: str, *more: str) -> None:
    """See that the rows of a server on the checkpoint `right` are not accused, and that `wrong` is found and named."""
    status, facts = verdict(capsys, right, engine, *more)
    assert (status, facts["finding"], facts["missing"]) == (0, None, 0), facts
    assert facts["sequences"] == 16
    assert facts["replayed"]["k3"] < 1e-3
    status, facts = verdict(capsys, wrong, engine, *more)
    assert (status, facts["finding"]["fault"] in ("other-tokens", "stale")) == (1, True), facts
    status, facts = verdict(capsys, wrong, engine, "--against", right, *more)
    assert (status, facts["finding"]["fault"]) == (1, "stale"), facts
    assert "the suspected checkpoint" in facts["finding"]["cause"]
