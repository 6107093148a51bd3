"""The sequences of a pass are found in its mask, its positions or its borders, in every layout of a trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from router_replay.errors import ReplayError
from router_replay.replay.layout import layout_of, sequences_of


def tokens_of(**inputs: Any) -> list[list[int]]:
    layout = layout_of(inputs)
    return [layout.tokens_T[slots].tolist() for slots in layout.sequences]


IDS = torch.tensor([[5, 6, 7, 0], [0, 8, 9, 0]])


def test_without_anything_else_a_row_is_a_sequence() -> None:
    assert tokens_of(input_ids=IDS) == [[5, 6, 7, 0], [0, 8, 9, 0]]
    assert tokens_of(input_ids=IDS[0]) == [[5, 6, 7, 0]]
    assert tokens_of(decoder_input_ids=IDS[:1]) == [[5, 6, 7, 0]]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.float32, torch.bfloat16])
def test_a_mask_of_any_dtype_names_the_padding(dtype: torch.dtype) -> None:
    assert tokens_of(input_ids=IDS, attention_mask=(IDS != 0).to(dtype)) == [[5, 6, 7], [8, 9]]


def test_a_row_of_padding_alone_holds_no_sequence() -> None:
    mask = torch.tensor([[0, 0, 0, 0], [0, 1, 1, 0]])
    assert tokens_of(input_ids=IDS, attention_mask=mask) == [[8, 9]]
    assert tokens_of(input_ids=IDS, attention_mask=mask * 0) == []


def test_a_mask_that_numbers_sequences_parts_them() -> None:
    assert tokens_of(input_ids=IDS, attention_mask=torch.tensor([[1, 1, 2, 0], [1, 2, 2, 3]])) == [
        [5, 6], [7], [0], [8, 9], [0]
    ]  # fmt: skip


def test_padding_inside_a_sequence_is_left_out_however_positions_count() -> None:
    mask = torch.tensor([[1, 0, 1, 1]])
    for positions in (None, torch.tensor([[0, 1, 2, 3]]), torch.tensor([[0, 0, 1, 2]])):
        assert tokens_of(input_ids=IDS[:1], attention_mask=mask, position_ids=positions) == [[5, 7, 0]]


def test_positions_that_start_anew_part_sequences() -> None:
    ids = torch.arange(8)[None]
    positions = torch.tensor([[0, 1, 2, 0, 0, 1, 0, 1]])
    parts = [[0, 1, 2], [3], [4, 5], [6, 7]]
    assert tokens_of(input_ids=ids, position_ids=positions) == parts
    assert tokens_of(input_ids=ids, position_ids=positions[0]) == parts
    assert tokens_of(input_ids=ids, position_ids=positions[None].expand(4, -1, -1)) == parts
    assert tokens_of(input_ids=ids.expand(2, -1), position_ids=positions) == parts * 2


def test_three_axes_of_positions_stand_still_in_an_image() -> None:
    time = torch.tensor([[0, 1, 2, 2, 2, 4, 0, 1]])
    positions = torch.stack([time, time + 1, time * 2])
    assert tokens_of(input_ids=torch.arange(8)[None], position_ids=positions) == [[0, 1, 2, 3, 4, 5], [6, 7]]


@pytest.mark.parametrize("name", ["cu_seq_lens_q", "cu_seqlens"])
def test_borders_part_sequences(name: str) -> None:
    ids, borders = torch.arange(8)[None], torch.tensor([0, 3, 4, 8], dtype=torch.int32)
    parts = [[0, 1, 2], [3], [4, 5, 6, 7]]
    assert tokens_of(input_ids=ids, **{name: borders}) == parts
    assert tokens_of(input_ids=ids, **{name: borders}, position_ids=torch.arange(8)[None]) == parts


def test_a_mask_over_pairs_of_tokens_names_no_padding() -> None:
    for mask in (torch.ones(2, 1, 4, 4), {"full_attention": None}):
        assert tokens_of(input_ids=IDS, attention_mask=mask) == [[5, 6, 7, 0], [0, 8, 9, 0]]


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"inputs_embeds": torch.zeros(1, 4, 8)}, "the decoder got no input_ids"),
        ({"input_ids": torch.zeros(1, 2, 3)}, r"input_ids must be \[batch, sequence\], got \[1, 2, 3\]"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 5)}, "attention_mask must have the shape of input_ids"),
        ({"input_ids": IDS, "position_ids": torch.ones(2, 5)}, "position_ids must fit input_ids"),
        ({"input_ids": IDS, "position_ids": torch.ones(3, 4)}, "position_ids must fit input_ids"),
    ],
)
def test_inputs_that_do_not_fit_raise(inputs: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        layout_of(inputs)


@st.composite
def rows_of_sequences(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """For each slot of a few rows, the number of its sequence (-1 in padding), and its position in it."""
    width, number = 12, 0
    sequence, position = [], []
    for _ in range(draw(st.integers(1, 3))):
        row: list[int] = [-1] * draw(st.integers(0, 3))
        places = [1] * len(row)
        while len(row) < width and draw(st.booleans()):
            length = draw(st.integers(1, width - len(row)))
            row += [number] * length
            places += range(length)
            number += 1
        sequence.append(row + [-1] * (width - len(row)))
        position.append(places + [1] * (width - len(row)))
    return np.array(sequence), np.array(position)


@given(laid=rows_of_sequences(), borders=st.booleans())
def test_every_slot_is_in_the_sequence_that_it_was_laid_out_in(
    laid: tuple[np.ndarray, np.ndarray], borders: bool
) -> None:
    sequence_BS, position_BS = laid
    flat = sequence_BS.reshape(-1)
    ends = np.append(0, np.flatnonzero(np.append(flat[1:] != flat[:-1], True)) + 1) if borders else None
    positions = None if borders else position_BS
    found = sequences_of(sequence_BS.shape, (sequence_BS >= 0).astype(np.int64), positions, ends)
    got = [np.arange(flat.size)[slots].tolist() for slots in found]
    assert got == [np.flatnonzero(flat == number).tolist() for number in range(flat.max() + 1)]
