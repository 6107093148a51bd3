"""Test the kernel that forces rows, compiled for the device, against the torch code."""

from __future__ import annotations

import pytest


def test_the_kernel_forces_as_torch_does(device: str) -> None:
    pytest.importorskip("triton")
    if device == "cpu":
        pytest.skip("Triton compiles for GPUs only; test_rules.py runs the kernel in its interpreter")
    from tests.engines.vllm.force_check import compare

    assert compare(device) == 144
