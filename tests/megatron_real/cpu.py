"""Lets the real megatron-core run on a CPU over gloo. Import this module before anything of megatron.

megatron-core names CUDA in many places. This module answers these calls on the CPU: the current device, streams and
events, random states (the models here use no dropout, and weights are drawn on the CPU), factories with
device="cuda". On a machine with a GPU it only defines a name that 0.16.1 lacks without Transformer Engine.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from typing import Any
from unittest import mock

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

import torch
import torch._dynamo  # before the shim: it keeps a table of torch's functions
import torch.utils._device

torch.utils._device._device_constructors()  # another such table: `with torch.device("meta")` looks factories up in it

FACTORIES = ("arange", "empty", "full", "ones", "rand", "randn", "tensor", "zeros")


class Nothing:
    """Takes the place of a CUDA stream or event: every method does nothing and returns another one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: Nothing()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Nothing)

    __hash__ = None  # type: ignore[assignment]


def on_the_cpu(factory: Any) -> Any:
    @functools.wraps(factory)
    def made(*args: Any, **kwargs: Any) -> Any:
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return made


def not_compiled(function: Any = None, **kwargs: Any) -> Any:
    """Take the place of torch.compile, which takes longer for megatron's small functions than they run."""
    return function if function is not None else not_compiled


def shim() -> None:
    with warnings.catch_warnings(), mock.patch("torch.compile", not_compiled):
        warnings.simplefilter("ignore")  # about Apex and Transformer Engine, which a CPU does not have
        import megatron.core.models.gpt  # noqa: F401  (all of it, so that none of it is compiled)
        import megatron.core.tensor_parallel.random as random
        import megatron.core.transformer.moe.moe_utils as moe_utils
        import megatron.core.transformer.moe.token_dispatcher as token_dispatcher
        from megatron.core.transformer.torch_norm import WrappedTorchNorm

    cuda, cpu, state = torch.cuda, torch.device("cpu"), torch.zeros(1, dtype=torch.uint8)
    cuda.current_device = lambda: cpu
    cuda.Stream = cuda.Event = Nothing
    cuda.current_stream = lambda *args: Nothing()
    cuda.stream = lambda stream: contextlib.nullcontext()
    for name in ("synchronize", "empty_cache", "manual_seed"):
        setattr(cuda, name, lambda *args: None)
    cuda.get_rng_state = lambda *args, **kwargs: state
    cuda.random.get_rng_state = lambda *args, **kwargs: state
    for name in FACTORIES:
        setattr(torch, name, on_the_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda tensor, *args, **kwargs: tensor

    random._set_cuda_rng_state = lambda *args, **kwargs: None

    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_cpu

    def norm(cls: Any, config: Any, hidden_size: int, eps: float, **kwargs: Any) -> Any:
        made = torch.nn.RMSNorm(hidden_size, eps)
        made.weight.sequence_parallel = config.sequence_parallel  # megatron's own refuses sequence parallelism
        return made

    WrappedTorchNorm.__new__ = norm


def without_transformer_engine() -> None:
    import megatron.core.transformer.moe.moe_utils as moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


if not torch.cuda.is_available():
    shim()
without_transformer_engine()
