"""Runs a short part of the tests that have a virtual environment of their own, in another process."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).parents[1]


def run_selected(python: pathlib.Path, folder: str, selected: Sequence[str]) -> None:
    """Run the `selected` tests of `folder` with the interpreter `python`, and see that all of them passed."""
    done = subprocess.run(
        [str(python), "-m", "pytest", "-q", "--disable-warnings", "-p", "no:cacheprovider"]
        + [f"{folder}/{name}" for name in selected],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
    assert re.findall(r"(\d+) (\w+)", done.stdout.splitlines()[-1])[0] == (str(len(selected)), "passed")
