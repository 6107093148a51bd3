"""fp8_rounded gives, to the bit, what rounding block by block gives."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from router_replay.rl.weights.fp8 import BLOCK, LARGEST, fp8_rounded


def block_by_block(tensor: torch.Tensor) -> torch.Tensor:
    rows, columns = tensor.shape[-2:]
    out = torch.empty_like(tensor, dtype=torch.float32)
    for row in range(0, rows, BLOCK):
        for column in range(0, columns, BLOCK):
            place = (..., slice(row, row + BLOCK), slice(column, column + BLOCK))
            block = tensor[place].float()
            scale = block.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=1e-12) / LARGEST
            out[place] = (block / scale).to(torch.float8_e4m3fn).float() * scale
    return out


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(
        st.lists(st.integers(1, 3), max_size=2), st.sampled_from([0, 1, 5, 127, 128, 129, 256, 300]),
        st.sampled_from([1, 64, 128, 130, 257]),
    ),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e4]),
    seed=st.integers(0, 1000),
    turned=st.booleans(),
)  # fmt: skip
def test_one_pass_over_all_blocks_rounds_as_one_block_after_the_other(
    shape: tuple[list[int], int, int], dtype: torch.dtype, scale: float, seed: int, turned: bool
) -> None:
    leading, rows, columns = shape
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(*leading, rows, columns, generator=generator) * scale).to(dtype)
    if seed % 3 == 0 and tensor.numel():  # one weight that outweighs its block
        tensor.view(-1)[seed % tensor.numel()] = 3e4
    tensor = tensor.transpose(-1, -2) if turned else tensor
    expected, got = block_by_block(tensor), fp8_rounded(tensor)
    assert got.shape == tensor.shape
    assert torch.equal(got.view(torch.int32), expected.contiguous().view(torch.int32))


def test_what_is_not_a_number_stays_in_its_block() -> None:
    tensor = torch.ones(256, 256)
    tensor[3, 3] = torch.nan
    got = fp8_rounded(tensor)
    assert bool(got[:128, :128].isnan().all())
    assert bool((got[128:] == 1).all())
    assert bool((got[:128, 128:] == 1).all())
