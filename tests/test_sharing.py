"""The shares of `make test`: who uses the vLLM servers of the session is in one share, which begins first."""

from __future__ import annotations

import pathlib
import random

import pytest

from tests.sharing import LONG, WITH_SERVERS, share_of, turn_of

ROOT = pathlib.Path(__file__).parents[1]
SERVERS = ("servers", "vllm_engine", "vllm_http_engine", "vllm_fresh_b")  # fixtures of tests/engines/conftest.py


def test_the_tests_with_servers_are_one_share_that_begins_first() -> None:
    others = [
        "tests/wire/test_kernel.py::test_a",
        "tests/rl/loop/test_sync.py::test_b[x::y]",
        "tests/test_spec.py::test_c",
    ]
    tests = [*(f"{file}::test_it" for file in WITH_SERVERS), *others]
    random.Random(0).shuffle(tests)
    first = sorted(tests, key=turn_of)[: len(WITH_SERVERS)]
    assert {test.partition("::")[0] for test in first} == set(WITH_SERVERS)
    assert len({share_of(test) for test in first}) == 1
    assert [share_of(test) for test in others] == [test.partition("::")[0] for test in others]
    assert turn_of(others[1]) < turn_of(others[0]) == turn_of(others[2])


def test_what_the_shares_name_is_there() -> None:
    assert all((ROOT / name).exists() for name in (*WITH_SERVERS, *LONG))


def uses_servers(item: pytest.Item) -> bool:
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return bool({*getattr(item, "fixturenames", ())} & set(SERVERS)) or parameters.get("engine") in (
        "vllm",
        "vllm_http",
    )


def test_no_other_test_uses_the_servers(request: pytest.FixtureRequest) -> None:
    """Otherwise each process starts servers of its own. It sees the tests that run with it."""
    files = {item.nodeid.partition("::")[0] for item in request.session.items if uses_servers(item)}
    assert files <= set(WITH_SERVERS)
