"""A short run of the fuzzer of what is in force; `make fuzz` runs it for minutes."""

from __future__ import annotations

from tests.replay import fuzz


def test_random_blocks_passes_and_failures_do_what_a_plain_list_says() -> None:
    fuzz.run(examples=20, derandomize=True, database=None)
