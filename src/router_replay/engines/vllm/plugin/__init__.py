"""Add forced routing, request checks, weight updates and packed delivery to vLLM through its plugin entry point.

vLLM calls `register` in the API server, in the engine core and in every worker. If the environment variable
ROUTER_REPLAY_VLLM is not set, `register` returns at once and changes nothing. If it is set, the plugin supplies eleven
things:

    forced routing     rows that come with a request are the experts the engine uses       routes/forcing.py, rules.py
    request checks     bad rows are refused before they reach the engine; the prefix
                       cache is salted with the rows                                       routes/frontend.py
    worker calls       report (is the plugin active, and if not why), and new weights
                       with the CPU repair                                                 worker.py, weights/
    weight transfer    the backend "router_replay" of vLLM's own calls for new weights     weights/transfer.py
    all ranks          a worker call is answered by every data-parallel rank               ranks.py
    delivery           the captured rows and log-probs of a step are stored and leave
                       the engine core together                                            routes/delivery.py, commit.py
    merged answers     keep their rows                                                     repairs/merged_rows.py
    float32 routers    on request, the routers' logits are computed in float32             routes/precision.py
    compiled code      is found again at the next start, in whatever folder the model is   repairs/compile_cache.py
    Ctrl-C             vLLM's processes ignore it; the one that started the engine
                       handles it                                                          repairs/signals.py
    Dynamo             a route of its worker that returns what the calls above answer      dynamo.py

`seams.py` lists every place in vLLM that the plugin touches, for each version. The places of the running version are
all checked before anything is changed. `runner.py` hides the difference between vLLM's two model runners.

`ROUTER_REPLAY_VLLM=required` makes a worker that cannot force routes refuse to start. `observe` leaves the routers
unchanged and supplies the rest. With any other value, a worker that cannot force routes starts, captures them, and
gives the reason in its report.
"""

from __future__ import annotations

import contextlib
import logging
import os

from router_replay.errors import EngineError

ENVIRONMENT = "ROUTER_REPLAY_VLLM"
ROUTER_DTYPE = "ROUTER_REPLAY_VLLM_ROUTER_DTYPE"
REQUIRED, OBSERVE = "required", "observe"
# The name of our backend in vLLM's --weight-transfer-config.
BACKEND = "router_replay"
# Beside vLLM's environment variables in /server_info, with our version: the sign that workers know the plugin's calls.
SIGN = "VLLM_ROUTER_REPLAY"


def asked_for() -> bool:
    """Return whether ROUTER_REPLAY_VLLM asks for the plugin in this process."""
    return os.environ.get(ENVIRONMENT, "") not in ("", "0")


def register() -> None:
    """Install the plugin into this vLLM process; calling it twice does no harm.

    All seams are checked first. If one does not fit, nothing is patched and the reason is logged. Raises EngineError
    instead if ROUTER_REPLAY_VLLM is "required".
    """
    if not asked_for():
        return
    # Imported here, so that vLLM does not import torch and the rest if the plugin is installed but not used.
    from router_replay.engines.vllm.plugin import seams

    problems = seams.problems()
    if problems:
        _refuse("; ".join(problems))
        return
    from router_replay.engines.vllm.plugin import dynamo, ranks, worker
    from router_replay.engines.vllm.plugin.repairs import compile_cache, merged_rows, signals
    from router_replay.engines.vllm.plugin.routes import commit, delivery, frontend, precision

    frontend.install()
    worker.install()
    ranks.install()
    commit.install()
    delivery.install()
    merged_rows.install()
    precision.install()
    compile_cache.install()
    signals.install()
    dynamo.install()
    _show_sign()


def _show_sign() -> None:
    """Let the server say that it has the plugin, before a client asks its workers."""
    from vllm import envs

    from router_replay import __version__

    envs.environment_variables[SIGN] = lambda: __version__


def _refuse(reason: str) -> None:
    """Log the reason in the server's log, and make the workers' reports include it."""
    message = f"the plugin of Router Replay is NOT active in this vLLM, and nothing was patched: {reason}"
    if os.environ.get(ENVIRONMENT) == REQUIRED:
        raise EngineError(message)
    logging.getLogger("vllm.router_replay").error(message)
    from router_replay.engines.vllm.plugin.inactive import install

    install(message)
    with contextlib.suppress(ImportError, AttributeError):
        _show_sign()
