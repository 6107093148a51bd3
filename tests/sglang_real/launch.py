"""SGLang's own server on a machine without a GPU: `python launch.py --model-path FOLDER --port PORT ...`.

Scaffolding of the tests, run by the Python of a virtual environment that holds requirements/sglang.txt. SGLang 0.5.23
means to run on a CPU with kernels that are not on PyPI for this torch; four things stand in for what is missing, and
none of them touches routing, sampling, scheduling or HTTP:

- `torchvision`: imported at start, used for images only;
- `vllm._custom_ops.rotary_embedding`: the rotary embedding in plain torch, in place, as that kernel does it;
- pinned memory: the host buffer of the routed experts asks for it, which needs CUDA;
- `sgl_kernel` stays absent: SGLang then takes its plain torch paths.

The stubs are made when this file is imported, because SGLang's scheduler is a spawned process: it imports this file
again as its main module, and so has them too.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types

import torch


def stub(name: str, **members: object) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    module.__dict__.update(members)
    module.__dict__.setdefault("__getattr__", anything)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
    return module


def anything(name: str) -> Anything:
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything()


class Anything:
    """Stands where torchvision has enums and functions that nobody calls here."""

    def __getattr__(self, name: str) -> Anything:
        return Anything()

    def __call__(self, *_: object, **__: object) -> Anything:
        return Anything()


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox) -> None:  # type: ignore[no-untyped-def]
    """Rotate query and key in place."""
    cos, sin = cos_sin_cache[positions.flatten()].chunk(2, dim=-1)
    for tensor in (query, key):
        heads = tensor.view(positions.numel(), -1, head_size)
        rotated = heads[..., : 2 * cos.shape[-1]]
        first, second = rotated.chunk(2, dim=-1) if is_neox else (rotated[..., ::2], rotated[..., 1::2])
        c, s = cos[:, None].to(tensor.dtype), sin[:, None].to(tensor.dtype)
        a, b = first * c - second * s, second * c + first * s
        rotated.copy_(torch.cat([a, b], -1) if is_neox else torch.stack([a, b], -1).flatten(-2))


stub("torchvision", __version__="0.0")
for name in ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "io"):
    stub(f"torchvision.{name}")
stub("vllm")
stub("vllm._custom_ops", rotary_embedding=rotary_embedding)


def without_pinned_memory() -> None:
    from sglang.srt.state_capturer import base

    def plain(dims, dtype, device, pin_memory, allocator):  # type: ignore[no-untyped-def]
        return torch.empty(dims, dtype=dtype, device=device)

    base.ALLOC_MEMORY_FUNCS["cpu"] = plain


without_pinned_memory()

if __name__ == "__main__":
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import prepare_server_args

    launch_server(prepare_server_args(sys.argv[1:]))
