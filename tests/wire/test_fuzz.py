"""The fuzzer for a while; `make fuzz` runs it at length."""

from __future__ import annotations

import os

from tests.wire import fuzz


def test_fuzz() -> None:
    seconds = float(os.environ.get("ROUTER_REPLAY_FUZZ_SECONDS", "20"))
    counts = fuzz.run(seconds=seconds, seed=int(os.environ.get("ROUTER_REPLAY_FUZZ_SEED", "1")))
    assert counts["refused"] > 10 * seconds
    assert counts["decoded"] > seconds  # some mutations are harmless: the code behind the checks is reached
