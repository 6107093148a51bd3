"""The architecture as a test: imports go one way, and moving bytes needs no torch."""

from __future__ import annotations

import ast
import importlib.util
import pathlib
import subprocess
import sys
import tomllib

import pytest

import router_replay
from router_replay import _moved

ROOT = pathlib.Path(router_replay.__file__).parent
# What each package imports from others, and no more. Modules beside the packages are the core: every package may use
# them. The packages stand around the core like a star, and the later ones on the earlier ones.
ALLOWED: dict[str, set[str]] = {
    "": {"kernel", "families"},
    "kernel": set(),
    "families": set(),
    "wire": {"kernel"},
    "stitch": set(),
    "store": {"wire"},
    "batch": set(),
    "measure": {"kernel"},
    "recording": {"wire", "batch"},
    "report": set(),
    "replay": {"families", "batch", "store"},
    "forward": {"families", "batch"},
    "engines": {"kernel", "families", "wire", "replay", "forward"},
    "gateway": {"wire", "stitch", "batch", "engines"},
    "rl": {"wire", "recording", "stitch", "batch", "measure", "replay", "forward", "engines", "gateway"},
    "integrations": {"families", "stitch", "batch", "measure", "replay", "engines", "rl"},
    "recipes": {"rl", "report"},
    "verify": {"recording", "stitch", "batch", "measure", "replay", "forward", "engines", "families", "rl", "report"},
    "cli": {"families", "verify", "batch", "recording", "measure", "engines", "gateway", "report", "rl", "recipes"},
}


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


def files() -> list[pathlib.Path]:
    """Every module but the door of the package, which names everything and loads nothing."""
    return [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]


def test_imports_go_one_way() -> None:
    for path in files():
        package = package_of(path)
        extra = imported_packages(path) - ALLOWED[package] - {package}
        assert not extra, f"{path.relative_to(ROOT)} imports {extra}; {package or 'the core'} may not"


def test_what_is_allowed_is_used() -> None:
    """Otherwise the star could become a chain, and nobody would notice."""
    used: dict[str, set[str]] = {name: set() for name in ALLOWED}
    for path in files():
        used[package_of(path)] |= imported_packages(path) - {package_of(path)}
    assert used == ALLOWED


def test_only_the_embedded_engine_needs_replay() -> None:
    users = {
        path for path in files() if package_of(path) == "engines" and imported_packages(path) & {"replay", "forward"}
    }
    assert users
    assert all("embedded" in str(path.relative_to(ROOT)) for path in users)


def test_log_probs_and_ulysses_are_still_found_where_they_were() -> None:
    from router_replay import forward, replay

    for name in ("logprobs", "Ulysses"):
        with pytest.warns(DeprecationWarning, match=f"{name} has moved to router_replay.forward: import it"):
            assert getattr(replay, name) is getattr(forward, name)


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


MODULES = ["routes", "wire", "stitch", "store", "measure", "batch", "families", "recording", "gateway.server"]


@pytest.mark.parametrize("module", MODULES)
def test_no_torch_where_only_bytes_move(module: str) -> None:
    code = f"import sys, router_replay.{module}; print('torch' in sys.modules, 'transformers' in sys.modules)"
    assert run(code).split() == ["False", "False"]


@pytest.mark.parametrize("module", ["vllm.http", "vllm.serve", "vllm.plugin", "sglang", "dynamo", "base"])
def test_a_client_of_a_server_needs_no_torch(module: str) -> None:
    heavy = "{'torch', 'transformers', 'safetensors', 'vllm'}"
    code = f"import sys, router_replay.engines.{module}; print(sorted(set(sys.modules) & {heavy}))"
    assert run(code).strip() == "[]"


def test_the_engines_are_exported_and_loaded_when_first_used() -> None:
    from router_replay import engines

    assert set(engines.__all__) == set(engines._HOMES)
    for name in engines.__all__:
        assert getattr(engines, name).__name__ == name
    code = "import sys, router_replay.engines; print(sorted(set(sys.modules) & {'numpy', 'torch', 'msgspec'}))"
    assert run(code).strip() == "[]"


def test_an_old_module_path_gives_the_new_module() -> None:
    """In a process of its own: here, the new modules may be loaded already."""
    needs_vllm = {} if importlib.util.find_spec("vllm") else {"router_replay.engines.vllm_plugin.transfer"}
    paths = {old: new for old, new in _moved.MODULES.items() if old not in needs_vllm}
    code = f"""
import importlib, warnings
import router_replay.engines
for old, new in {paths!r}.items():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        module = importlib.import_module(old)
    warned = any("has moved to" in str(one.message) for one in said)
    assert module is importlib.import_module(new), old
    assert warned != (old in {_moved.QUIET!r}), (old, said)
print("all")
"""
    assert run(code).splitlines()[-1] == "all"


def test_an_old_path_warns_and_names_the_new_one() -> None:
    import router_replay.engines  # noqa: F401

    sys.modules.pop("router_replay.engines.vllm_http", None)
    with pytest.warns(DeprecationWarning, match=r"vllm_http has moved to router_replay\.engines\.vllm\.http"):
        importlib.import_module("router_replay.engines.vllm_http")
    from router_replay.engines import prefill_decode, stale

    with pytest.warns(DeprecationWarning, match=r"moved to router_replay\.engines\.stale"):
        assert prefill_decode.check_server is stale.check_server
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        prefill_decode.nothing  # noqa: B018


def test_the_public_names_resolve() -> None:
    for name in router_replay.__all__:
        assert getattr(router_replay, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        router_replay.nothing  # noqa: B018


def names_for_the_type_checker() -> set[str]:
    tree = ast.parse((ROOT / "__init__.py").read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def test_the_three_lists_of_public_names_agree() -> None:
    """What is advertised, what is loaded on first use, and what a type checker sees."""
    loaded = {*router_replay._HOMES, *router_replay._MODULES}
    assert set(router_replay.__all__) == loaded == names_for_the_type_checker()


def test_the_version_is_written_once() -> None:
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "router_replay.__version__"}


def test_the_package_itself_loads_nothing_heavy() -> None:
    """What makes `import router_replay` quick; bench/wire.py holds the time."""
    code = "import sys, router_replay; print(sorted(set(sys.modules) & {'numpy', 'torch', 'msgspec', 'transformers'}))"
    assert run(code).strip() == "[]"


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is installed")
def test_the_plugin_for_verl_says_what_is_missing() -> None:
    with pytest.raises(ImportError, match=r'pip install "verl==0\.9\.1"'):
        importlib.import_module("router_replay.integrations.verl")
