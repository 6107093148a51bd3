"""Weights as an FP8 checkpoint has them: rounded to float8_e4m3, with one scale for each block of the matrix."""

from __future__ import annotations

import torch

BLOCK = 128  # FP8 checkpoints have one scale per block of 128 x 128 weights
LARGEST = 448.0  # of float8_e4m3


def fp8_rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Round to float8_e4m3 with one scale per 128 x 128 block of the last two dimensions, and back."""
    rows, columns = tensor.shape[-2:]
    out = torch.empty_like(tensor, dtype=torch.float32)
    for row in range(0, rows, BLOCK):
        for column in range(0, columns, BLOCK):
            place = (..., slice(row, row + BLOCK), slice(column, column + BLOCK))
            block = tensor[place].float()
            scale = block.abs().amax(dim=(-2, -1), keepdim=True).clamp(min=1e-12) / LARGEST
            out[place] = (block / scale).to(torch.float8_e4m3fn).float() * scale
    return out
