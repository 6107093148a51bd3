"""The architecture as a test: imports go one way, and moving bytes needs no torch."""

from __future__ import annotations

import ast
import pathlib
import subprocess
import sys

import pytest

import router_replay

ROOT = pathlib.Path(router_replay.__file__).parent
# A package may import from those before it. Modules beside the packages are the foundation.
ORDER = ["wire", "stitch", "batch", "replay", "rl"]
ALLOWED = {name: set(ORDER[:position]) for position, name in enumerate(ORDER)}
ALLOWED |= {"": set(), "measure": set(), "report": set(), "engines": {"wire", "stitch", "batch", "replay"}}
ALLOWED["replay"] |= {"measure"}
ALLOWED["rl"] |= {"engines", "measure"}
ALLOWED["recipes"] = {"rl", "report"}
ALLOWED["cli"] = {*ORDER, "engines", "measure", "report", "recipes"}


def package_of(path: pathlib.Path) -> str:
    parts = path.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else ""


def imported_packages(path: pathlib.Path) -> set[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    inside = {name.split(".")[1] for name in names if name.startswith("router_replay.")}
    return {name for name in inside if (ROOT / name).is_dir()}


def test_imports_go_one_way() -> None:
    for path in ROOT.rglob("*.py"):
        if path == ROOT / "__init__.py":  # names everything, loads nothing
            continue
        package = package_of(path)
        extra = imported_packages(path) - ALLOWED[package] - {package}
        assert not extra, f"{path.relative_to(ROOT)} imports {extra}; {package or 'the foundation'} stands below them"


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("module", ["routes", "wire", "stitch", "measure", "batch"])
def test_no_torch_where_only_bytes_move(module: str) -> None:
    code = f"import sys, router_replay.{module}; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert run(code).split() == ["False", "False"]


def test_the_public_names_resolve() -> None:
    for name in router_replay.__all__:
        assert getattr(router_replay, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        router_replay.nothing  # noqa: B018


def test_the_package_itself_loads_nothing_heavy() -> None:
    """What makes `import router_replay` quick; bench/wire.py holds the time."""
    code = "import sys, router_replay; print(sorted(set(sys.modules) & {'numpy', 'torch', 'msgspec', 'transformers'}))"
    assert run(code).strip() == "[]"
