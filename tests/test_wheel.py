"""The wheel: it installs into a clean virtual environment, runs there without torch, and holds the package alone."""

from __future__ import annotations

import importlib.metadata
import pathlib
import re
import shutil
import subprocess
import sys
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SOURCES = ("src", "setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE")
NEEDED = ("numpy", "msgspec", "xxhash")  # the dependencies of pyproject.toml
SNIPPET = """
import sys
import numpy as np
from router_replay import Routes, RouterSpec, wire

config = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2,
          "decoder_sparse_step": 1, "mlp_only_layers": []}
spec = RouterSpec.from_config(config)
ids = np.stack([np.random.default_rng(0).permutation(8)[:2] for _ in range(9 * 2)]).reshape(9, 2, 2)
capture = Routes(ids, spec)  # prompt 4 + completion 6 - 1
model = type("Model", (), {"config": config})
choice = {"routed_experts": wire.to_vllm(capture)}
prompt_ids, completion_ids, completion_logprobs = [3, 4, 5, 6], [7, 8, 9, 10, 11, 12], np.full(6, -2.0)
"""
AFTER = """
assert batch.routes[:9].same_sets(capture), batch.routes
assert "torch" not in sys.modules
import router_replay
print(router_replay.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Built from a copy of the sources, so that an old build folder adds nothing and nothing is left behind."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    leave = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=leave)
        else:
            shutil.copy(source, tree / name)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", out, tree)
    [path] = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def clean(wheel: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A virtual environment of the wheel and its dependencies, which are linked from this one: no network is needed."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder)
    [packages] = folder.glob("lib/python*/site-packages")
    for name in NEEDED:
        distribution = importlib.metadata.distribution(name)
        for top in {file.parts[0] for file in distribution.files or ()} - {".."}:
            (packages / top).symlink_to(pathlib.Path(str(distribution.locate_file(top))))
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]
    run(*pip, "install", "-q", "--no-index", "--no-deps", wheel)
    run(*pip, "check")
    return folder


def run(*command: str | pathlib.Path) -> str:
    """Outside of the checkout, and without what this process adds to the path."""
    environment = {"PATH": "/usr/bin:/bin", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd="/", env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_holds_the_package_and_nothing_else(wheel: pathlib.Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {re.sub(r"-[\d.]+\.dist-info$", ".dist-info", top) for top in tops} == {
        "router_replay",
        "router_replay.dist-info",
    }
    assert "router_replay/py.typed" in names
    assets = {
        path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src/router_replay/report/assets").iterdir()
    }
    assert assets
    assert assets <= set(names)
    strange = [name for name in names if re.search(r"test|payload|fuzz|\.(c|h|npz|jsonl|log)$", name)]
    assert not strange
    modules = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.py")}
    assert modules <= set(names)


def test_the_command_answers_in_a_clean_environment(clean: pathlib.Path) -> None:
    told = run(clean / "bin" / "router-replay", "--help")
    for command in ("train", "demo", "report", "watch", "serve", "families", "inspect"):
        assert command in told


def test_the_rollout_side_of_the_readme_runs_without_torch(clean: pathlib.Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rollout = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert rollout is not None
    told = run(clean / "bin" / "python", "-c", SNIPPET + rollout.group(1) + AFTER)
    assert pathlib.Path(told.strip()).is_relative_to(clean)


def test_the_extras_that_the_documentation_names_exist(wheel: pathlib.Path) -> None:
    archive = zipfile.ZipFile(wheel)
    [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    extras = set(re.findall(r"^Provides-Extra: (.+)$", archive.read(metadata).decode(), re.MULTILINE))
    assert {"http", "sglang", "torch", "report", "train", "vllm", "tensorboard", "wandb", "docs"} <= extras
