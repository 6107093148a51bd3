"""Let every step of a worker take some milliseconds, as it does with a model of useful size.

`--worker-extension-cls=tests.dynamo_real.slow_steps.SlowSteps` makes the worker import this module. Without it the tiny
model has answered before a command to abort or to pause can go from the client to the worker.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

SECONDS = 0.008
original = GPUModelRunner.execute_model


def execute_model(self: Any, *arguments: Any, **more: Any) -> Any:
    time.sleep(SECONDS)
    return original(self, *arguments, **more)


GPUModelRunner.execute_model = execute_model


class SlowSteps:
    """Add nothing to the worker; vLLM imports this module for it."""
