"""Supply the report of a worker in which the plugin is not active: the reason, and which seam does not fit."""

from __future__ import annotations

import contextlib
import importlib
import json
from typing import Any

from router_replay import __version__
from router_replay.engines.vllm.plugin import seams


def install(reason: str) -> None:
    """Add the method `router_replay_report` to vLLM's worker class if it exists; change nothing else."""

    def report(worker: Any) -> dict[str, Any]:
        return {"plugin": __version__, "active": False, "reason": reason, **NOTHING, "seams": seams.table()}

    with contextlib.suppress(ImportError, AttributeError):
        importlib.import_module("vllm.v1.worker.gpu_worker").Worker.router_replay_report = report


# The fields that our engines read from every report, whether the plugin is active or not.
NOTHING = {
    "captures": False,
    "forced_routes": False,
    "logprobs_mode": "",
    "config": json.dumps({}),
    "generation_config": json.dumps({}),
}
