"""What holds for all tests: how many examples hypothesis draws, Ctrl-C, and who runs what where there are processes.

HYPOTHESIS_PROFILE=thorough draws more examples.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("default", deadline=None, max_examples=60)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=1000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

# A shell lets the commands that it starts in the background ignore Ctrl-C, and the commands of these tests would too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.sharing import Shares

    config.option.loadscopereorder = False  # the order is that of the tests
    return Shares(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests.sharing import turn_of

        items.sort(key=lambda item: turn_of(item.nodeid))
