"""The virtual environment of the real SGLang server: `python -m tests.sglang_real.environment`.

Nothing is installed anywhere else. SGLANG_VENV says where it lies; by default in .venv/sglang, which git ignores.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import venv

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "sglang.txt"


def folder() -> pathlib.Path:
    return pathlib.Path(os.environ.get("SGLANG_VENV", ROOT / ".venv" / "sglang"))


def python() -> str:
    path = folder() / "bin" / "python"
    if not path.exists():
        raise SystemExit(f"{path} is missing: python -m tests.sglang_real.environment makes it")
    return str(path)


def make() -> None:
    ready = folder() / ".ready"
    if ready.exists() and ready.read_bytes() == LOCK.read_bytes():
        return
    venv.create(folder(), with_pip=True)
    pip = [python(), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    # torch first, and no dependencies then: SGLang's own requirements would pull gigabytes of CUDA packages.
    subprocess.run([*pip, "-r", str(ROOT / "requirements" / "torch.txt")], check=True)
    subprocess.run([*pip, "--no-deps", "-r", str(LOCK)], check=True)
    ready.write_bytes(LOCK.read_bytes())


if __name__ == "__main__":
    make()
    sys.stdout.write(f"{python()}\n")
