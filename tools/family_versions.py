"""Measure in which transformers each MoE family can be replayed, and write src/router_replay/families/measured.py.

    python tools/family_versions.py                    # every version of VERSIONS: about 15 minutes on one core
    python tools/family_versions.py 5.19.0 5.22.2      # these versions alone, printed and not written

Each version is installed into a temporary folder, with the huggingface_hub and the tokenizers that it asks for, and
laid over the packages of the Python that runs this. `tests/families/found.py` then tries every tiny model.
"""

# ruff: noqa: T201
from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
WRITTEN = ROOT / "src/router_replay/families/measured.py"
# The oldest that the metadata allows, the first release of each later minor version, and the newest.
VERSIONS = ("5.10.4", "5.11.0", "5.12.0", "5.13.0", "5.14.0", "5.15.0", "5.16.0", "5.17.0", "5.18.0", "5.19.0")
VERSIONS += ("5.20.0", "5.21.0", "5.22.0", "5.22.2")
PINNED_BY_TRANSFORMERS = ("huggingface-hub", "tokenizers")  # it refuses to be imported with other versions

HEAD = '''"""What was measured of each family. tools/family_versions.py writes this file: do not edit it."""

from __future__ import annotations

from router_replay.families.types import Choice, Measured

OLDEST, NEWEST = "{oldest}", "{newest}"
"""The oldest and the newest transformers that were measured."""

FAMILIES: dict[str, Measured] = {{
'''


def main(chosen: list[str]) -> int:
    results: dict[str, dict[str, Any]] = {}
    for version in chosen or VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            install(version, folder)
            results[version] = measure(folder)
        found = [name for name, tried in results[version].items() if tried["found"]]
        print(f"transformers {version}: {len(found)} of {len(results[version])} families", flush=True)
        for name, tried in results[version].items():
            if not tried["found"] and "does not have it" not in tried["why_not"]:
                print(f"    {name}: {tried['why_not'][:160]}")
    if not chosen:
        WRITTEN.write_text(source(results), encoding="utf-8")
    return 0


def install(version: str, folder: str) -> None:
    pip("install", "-q", "--no-deps", "--no-compile", "--target", folder, f"transformers=={version}")
    asked = importlib.metadata.Distribution.at(next(Path(folder).glob("transformers-*.dist-info"))).requires or ()
    for requirement in map(Requirement, asked):
        name = requirement.name.lower().replace("_", "-")
        pinned = name in PINNED_BY_TRANSFORMERS and not requirement.marker
        if pinned and importlib.metadata.version(name) not in requirement.specifier:
            pip("install", "-q", "--no-deps", "--no-compile", "--target", folder, str(requirement))


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments], check=True)


def measure(folder: str) -> dict[str, Any]:
    path = os.pathsep.join([folder, str(ROOT / "src"), str(ROOT)])
    child = subprocess.run(
        [sys.executable, "-m", "tests.families.found"],
        env={**os.environ, "PYTHONPATH": path, "TRANSFORMERS_VERBOSITY": "error"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(child.stdout)


def source(results: dict[str, dict[str, Any]]) -> str:
    """The module with what was measured. `since` begins an unbroken run of versions up to the newest."""
    versions = list(results)
    lines = [HEAD.format(oldest=versions[0], newest=versions[-1])]
    for name, tried in results[versions[-1]].items():
        if not tried["found"]:
            raise SystemExit(f"{name} is not found in transformers {versions[-1]}: {tried['why_not']}")
        since = versions[-1]
        for version in reversed(versions):
            if not results[version][name]["found"]:
                break
            since = version
        router, choice, own_loss = tried["router"], f"Choice.{tried['choice'].upper()}", tried["own_loss"]
        lines.append(f'    "{name}": Measured("{since}", "{router}", {choice}, own_loss={own_loss}),\n')
    return "".join([*lines, "}\n"])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
