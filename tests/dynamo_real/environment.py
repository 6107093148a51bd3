"""The virtual environment of the real Dynamo: `python -m tests.dynamo_real.environment`.

It holds Dynamo's own packages only. A .pth file adds the packages of the environment that runs this module, so torch
and vLLM are not installed twice. DYNAMO_VENV says where it lies; by default in .venv/dynamo, which git ignores.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import sysconfig
import venv

ROOT = pathlib.Path(__file__).resolve().parents[2]
LOCK = ROOT / "requirements" / "dynamo.txt"


def folder() -> pathlib.Path:
    return pathlib.Path(os.environ.get("DYNAMO_VENV", ROOT / ".venv" / "dynamo"))


def python() -> str:
    path = folder() / "bin" / "python"
    if not path.exists():
        raise SystemExit(f"{path} is missing: python -m tests.dynamo_real.environment makes it")
    return str(path)


def make() -> None:
    ready, wanted = folder() / ".ready", f"{sysconfig.get_path('purelib')}\n{LOCK.read_text()}"
    if ready.exists() and ready.read_text() == wanted:
        return
    venv.create(folder(), with_pip=True)
    pip = [python(), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, "--no-deps", "-r", str(LOCK)], check=True)
    # addsitedir, and not the plain path: it also reads the .pth files there, such as that of an editable install.
    own = pathlib.Path(sysconfig.get_path("purelib", vars={"base": str(folder())}))
    (own / "router_replay_base.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    ready.write_text(wanted)


if __name__ == "__main__":
    make()
    sys.stdout.write(f"{python()}\n")
