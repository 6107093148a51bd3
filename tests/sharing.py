"""How `make test` shares the tests out to the processes of pytest-xdist: whole files, those that take minutes first.

A file stays in one process because its fixtures live there. For the same reason the files that use the vLLM servers of
the session (`tests/engines/conftest.py`) are one share, in the order in which pytest finds them.
"""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

WITH_SERVERS = (
    "tests/engines/test_contract.py",
    "tests/engines/vllm/test_delivery.py",
    "tests/engines/vllm/test_direct.py",
    "tests/engines/vllm/test_engine.py",
    "tests/engines/vllm/test_gateway.py",
    "tests/engines/vllm/test_guard.py",
    "tests/engines/vllm/test_http.py",
    "tests/engines/vllm/test_no_scale_out.py",
    "tests/engines/vllm/test_pool.py",
    "tests/engines/vllm/test_promise.py",
    "tests/engines/vllm/test_stock.py",
    "tests/engines/vllm/test_weights.py",
)
# What starts processes of its own. A share that begins late would leave the other processes idle at the end.
LONG = ("tests/engines/vllm/", "tests/engines/", "tests/rl/", "tests/replay/", "tests/recipes/", "tests/integrations/")


class Shares(LoadScopeScheduling):
    """Give a process a new share when it is nearly through with its last one."""

    def _split_scope(self, nodeid: str) -> str:
        return share_of(nodeid)


def share_of(nodeid: str) -> str:
    """Return the name of the share that the test `nodeid` is in."""
    file = nodeid.partition("::")[0]
    return "the tests with servers" if file in WITH_SERVERS else file


def turn_of(nodeid: str) -> int:
    """Return a number by which the tests are sorted: a lower one begins earlier."""
    if share_of(nodeid) not in nodeid:
        return 0
    return 1 + next((place for place, folder in enumerate(LONG) if nodeid.startswith(folder)), len(LONG))
