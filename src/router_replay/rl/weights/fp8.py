"""Round weights as in an FP8 checkpoint: to float8_e4m3, with one scale per block of the matrix."""

from __future__ import annotations

import torch

BLOCK = 128  # FP8 checkpoints have one scale per block of 128 x 128 weights
LARGEST = 448.0  # the largest float8_e4m3 value


def fp8_rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Round to float8_e4m3 with one scale per block of the last two dimensions, and convert back to float32.

    All blocks are rounded in one pass. Blocks at the edges are padded with zeros, which do not affect the scale. A
    matrix that is smaller than a block is not padded.
    """
    rows, columns = tensor.shape[-2:]
    high, wide = (max(1, min(BLOCK, size)) for size in (rows, columns))
    missing = (0, -columns % wide, 0, -rows % high)
    filled = (torch.nn.functional.pad(tensor, missing) if any(missing) else tensor).float()
    blocks = filled.unflatten(-1, (filled.shape[-1] // wide, wide)).unflatten(-3, (filled.shape[-2] // high, high))
    scale = blocks.abs().amax(dim=(-3, -1), keepdim=True).clamp(min=1e-12) / LARGEST
    rounded = (blocks / scale).to(torch.float8_e4m3fn).float().mul_(scale)
    return rounded.reshape(filled.shape)[..., :rows, :columns].contiguous()
