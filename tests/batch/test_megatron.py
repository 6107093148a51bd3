"""The layout of Megatron: every token has one place, and rows, tokens and masks have the same one."""

from __future__ import annotations

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from router_replay import RouterSpec, Routes
from router_replay.batch.megatron import MegatronLayout
from router_replay.errors import BatchError
from tests.makers import random_routes

SPEC = RouterSpec(num_experts=8, top_k=2, layers=(1, 2, 4))


def layouts(parts: int, context: int, kind: str) -> list[MegatronLayout]:
    return [
        MegatronLayout((2, 4), part, parts, other, context, kind)  # type: ignore[arg-type]
        for part, other in itertools.product(range(parts), range(context))
    ]


def test_the_example_of_the_docstring() -> None:
    assert MegatronLayout((0,), 0, 2).index(8, 2).tolist() == [0, 4, 1, 5]
    assert MegatronLayout((0,), 1, 2).index(8, 2).tolist() == [2, 6, 3, 7]


@given(
    st.integers(1, 3), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2, 3]), st.sampled_from(["zigzag", "contiguous"])
)
def test_the_ranks_divide_the_tokens_and_rows_go_with_them(sequences: int, parts: int, context: int, kind: str) -> None:
    tokens = sequences * parts * context * 4
    routes = random_routes(tokens, SPEC)
    mask = np.arange(tokens) % 3 == 0
    seen = []
    for layout in layouts(parts, context, kind):
        index = layout.index(tokens, sequences)
        share = layout.share(routes, sequences, padding=mask, idle=~mask)
        assert share.rows.spec.layers == (2, 4)
        assert np.array_equal(share.rows.ids, routes.ids[index][:, 1:])
        assert share.padding is not None
        assert share.idle is not None
        assert np.array_equal(share.padding, mask[index])
        assert np.array_equal(share.idle, ~mask[index])
        assert share.nbytes == len(index) * 2 * SPEC.top_k
        assert share.tokens == len(index) == tokens // (parts * context)
        seen += index.tolist()
    assert sorted(seen) == list(range(tokens))


def test_packed_sequences_are_cut_one_by_one_under_zigzag_and_together_under_contiguous() -> None:
    boundaries = np.array([0, 4, 12])
    zigzag = [MegatronLayout((0,), context_part=rank, context_parts=2) for rank in range(2)]
    assert zigzag[0].index(12, boundaries=boundaries).tolist() == [0, 3, 4, 5, 10, 11]
    assert zigzag[1].index(12, boundaries=boundaries).tolist() == [1, 2, 6, 7, 8, 9]
    contiguous = MegatronLayout((0,), context_part=1, context_parts=2, context_kind="contiguous")
    assert contiguous.index(12, boundaries=boundaries).tolist() == [6, 7, 8, 9, 10, 11]


def test_nothing_is_copied_for_a_rank_that_has_everything() -> None:
    routes = random_routes(6, SPEC)
    assert MegatronLayout(SPEC.layers).share(routes).rows is routes


def test_a_rank_without_routed_layers_gets_no_rows() -> None:
    share = MegatronLayout(()).share(random_routes(6, SPEC), 2)
    assert (share.rows, share.nbytes, share.tokens) == (None, 0, 6)


@pytest.mark.parametrize(
    ("layout", "tokens", "sequences", "message"),
    [
        (MegatronLayout((1,)), 7, 2, "2 sequences must have equally many tokens in each, got 7"),
        (MegatronLayout((1,), 0, 4), 12, 2, "multiple of the tensor parallel size 4, got 6"),
        (MegatronLayout((1,), context_parts=2), 6, 1, "sequence 0 has 6 slots, expected a multiple of 4"),
        (MegatronLayout((1,)), 6, 0, "micro_batch_size"),
    ],
)
def test_what_does_not_divide_is_refused(layout: MegatronLayout, tokens: int, sequences: int, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        layout.share(random_routes(tokens, SPEC), sequences)


def test_a_mask_of_another_length_is_refused() -> None:
    with pytest.raises(BatchError, match=r"padding must have one entry per token: expected \[6\], got \[5\]"):
        MegatronLayout((1,)).share(Routes.missing(6, SPEC), padding=np.zeros(5))
