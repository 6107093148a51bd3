"""Compare the kernel that forces rows on a GPU with the torch code that does so on a CPU, for every rule.

With TRITON_INTERPRET=1, `python -m tests.engines.vllm.force_check` runs the kernel on a CPU. Without, it compiles it
for an H200, which need not be there: the interpreter accepts more than the compiler.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys

import torch

from router_replay.engines.vllm.plugin.routes import force_kernel, rules

SHAPES = ((16, 4), (60, 6), (128, 8))  # experts and top-k; not all are powers of two
LAYERS, COLUMN = 3, 1


def compare(device: str) -> int:
    """Assert that both give the same; return the number of cases."""
    torch.manual_seed(0)
    cases = list(itertools.product(rules.SCORES, (True, False), (True, False), (torch.float32, torch.bfloat16), SHAPES))
    for (score, renormalize, float32, dtype, shape), tokens in itertools.product(cases, (1, 33)):
        rule = rules.Rule(score, renormalize, 2.5, float32)
        _compare_one(rule, dtype, *shape, tokens, device)
    return 2 * len(cases)


def _compare_one(rule: rules.Rule, dtype: torch.dtype, experts: int, top_k: int, tokens: int, device: str) -> None:
    logits = (4 * torch.randn(tokens, experts)).to(device, dtype)
    ids = torch.rand(tokens, experts).topk(top_k).indices.to(device, torch.int32)
    weights = torch.rand(tokens, top_k, device=device)
    # More rows than tokens, some free, one with the router's own choice in another order.
    wanted = torch.rand(tokens + 5, LAYERS, experts).topk(top_k).indices.to(device, torch.int16)
    wanted[2::3] = -1
    own = tokens // 2
    wanted[own, COLUMN] = ids[own].flip(0).short()
    exact = dataclasses.replace(rule, float32=True)  # the kernel computes in float32, and rounds at the end if asked
    expected = rules.force(exact, weights, ids, logits, wanted, COLUMN)
    found = force_kernel.force(rule, weights, ids, logits, wanted, COLUMN)
    where = f"{rule}, {dtype}, {top_k} of {experts}, {tokens} tokens"
    assert torch.equal(found[1], expected[1]), where
    assert found[0].dtype == weights.dtype, where
    difference = float((found[0] - expected[0]).abs().max() / expected[0].abs().max())
    assert difference <= (1e-5 if rule.float32 else torch.finfo(dtype).eps + 1e-5), f"{where}: {difference}"
    for kept in (found[0][2::3] == weights[2::3], found[0][own] == weights[own]):
        assert kept.all(), where  # to the bit


def compile_kernel() -> None:
    """Compile the kernel to the machine code of an H200, with and without a sum over all experts."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    for renormalize in (True, False):
        constants = {
            "EXPERTS": 60, "TOP_K": 6, "ALL_EXPERTS": 64, "SLOTS": 8, "TOKENS": force_kernel.TOKENS, "SCORE": 0,
            "RENORMALIZE": renormalize, "ROUNDED": True,
        }  # fmt: skip
        types = {
            "weights": "*fp32", "ids": "*i32", "logits": "*bf16", "wanted": "*i16", "new_weights": "*fp32",
            "new_ids": "*i32", "tokens": "i32", "column": "i32", "scale": "fp32", "wanted_stride": "i32",
            **dict.fromkeys(constants, "constexpr"),
        }  # fmt: skip
        source = ASTSource(force_kernel._force, types, constants)
        assert "cubin" in triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.stdout.write(f"{compare('cpu')} cases")
    else:
        compile_kernel()
        sys.stdout.write("compiled for an H200")
