"""Lets vLLM choose the PyTorch code that it has for top-k and top-p on CPUs, and not its Triton kernel.

Triton's interpreter cannot run that kernel: its rows are plain integers there, which have no method `to`.
"""

from __future__ import annotations


def use_pytorch() -> None:
    """Called by vLLM in each of its processes, as a plugin."""
    from vllm.v1.sample.ops import topk_topp_sampler

    topk_topp_sampler.HAS_TRITON = False
