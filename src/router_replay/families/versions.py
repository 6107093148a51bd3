"""Compare the installed transformers with the version that a family needs, without importing transformers."""

from __future__ import annotations

import importlib.metadata
import re
import sys

from router_replay.families import measured


def installed() -> str:
    """Return the version of the installed transformers; empty if it is not installed."""
    if (imported := getattr(sys.modules.get("transformers"), "__version__", "")) != "":
        return str(imported)  # a source checkout may have no metadata
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return ""


def is_older(version: str) -> bool:
    """Return whether the installed transformers is older than `version`; a development version counts as released."""
    return _release(installed()) < _release(version)


def summary() -> str:
    """Return one sentence: how many families are found with the installed transformers."""
    found = sum(not is_older(known.since) for known in measured.FAMILIES.values())
    have = f"transformers {installed()} is installed" if installed() else "transformers is not installed"
    return f"{have}: {found} of the {len(measured.FAMILIES)} families are found with it"


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])
