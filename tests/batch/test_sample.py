"""Sample.of: what a sequence may bring into a batch, and what is refused with its place."""

from __future__ import annotations

import types
from typing import Any

import numpy as np
import pytest

from router_replay import RouterSpec, Routes, Sample
from router_replay.errors import BatchError

SPEC = RouterSpec(num_experts=8, top_k=2, layers=(0, 1))


def source(**changes: Any) -> Any:
    """A sequence of four tokens, the last two of which bear loss."""
    fields = {
        "token_ids": [5, 6, 7, 8],
        "logprobs": [0.0, 0.0, -1.0, -2.0],
        "loss_mask": [False, False, True, True],
        "routes": None,
    }
    return types.SimpleNamespace(**fields | changes)


def test_a_sample_holds_arrays_of_fixed_types() -> None:
    sample = Sample.of(source())
    assert (sample.token_ids.dtype, sample.logprobs.dtype) == (np.int64, np.float32)
    assert (sample.loss_mask.dtype, np.asarray(sample.advantages).dtype) == (bool, np.float32)
    assert len(sample) == 4


def test_an_advantage_is_one_for_all_tokens_or_one_each() -> None:
    assert np.asarray(Sample.of(source()).advantages).tolist() == [0.0] * 4
    assert Sample(np.arange(1), np.zeros(1), np.ones(1, bool), None).advantages == 0.0
    assert np.asarray(Sample.of(source(advantages=3.0)).advantages).tolist() == [3.0] * 4
    assert np.asarray(Sample.of(source(advantages=3.0), advantages=2.0).advantages).tolist() == [2.0] * 4
    assert np.asarray(Sample.of(source(), advantages=[1, 2, 3, 4]).advantages).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("mask", [[0, 0, 1, 1], [0.0, 0.0, 1.0, 1.0], np.array([0, 0, 1, 1], np.uint8)])
def test_a_mask_may_be_zeros_and_ones(mask: Any) -> None:
    assert Sample.of(source(loss_mask=mask)).loss_mask.tolist() == [False, False, True, True]


def test_a_logprob_outside_the_loss_may_be_anything() -> None:
    assert np.isnan(Sample.of(source(logprobs=[0.0, np.nan, -1.0, -2.0])).logprobs[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_ids": [5.0, 6.0, 7.0, 8.0]}, "sample: token_ids must be a flat sequence of integers"),
        ({"loss_mask": [0, 0, 0.5, 1]}, "loss_mask must be booleans, or 0 and 1, got 0.5 at position 2"),
        ({"loss_mask": [0, 2, 1, 1]}, "got 2 at position 1"),
        ({"loss_mask": ["a", "b", "c", "d"]}, "got a at position 0"),
        ({"loss_mask": [True, False]}, r"loss_mask must have one entry per token: expected \[4\], got \[2\]"),
        ({"logprobs": [0.0, 0.0, -1.0, np.inf]}, "logprobs of tokens that bear loss: the value at position 3 is inf"),
        ({"advantages": np.nan}, "advantages: the value at position 0 is nan"),
        ({"advantages": [1.0, 2.0]}, r"advantages must have one entry per token: expected \[4\], got \[2\]"),
        ({"advantages": [1.0]}, r"expected \[4\], got \[1\]"),
        ({"versions": [1, 2]}, r"versions must have one entry per token: expected \[4\], got \[2\]"),
        ({"versions": [1.5] * 4}, "versions must be a flat sequence of integers"),
        ({"routes": np.zeros((4, 2, 2))}, "routes must be a Routes or None, got ndarray"),
        ({"routes": Routes.missing(5, SPEC)}, "one row per token: expected 4, got 5"),
    ],
)
def test_what_is_no_sample_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        Sample.of(source(**changes))


def test_the_first_row_that_the_loss_needs_and_nobody_captured() -> None:
    def missing(*captured: bool) -> int | None:
        ids = np.tile([0, 1], (4, 2, 1))
        return Sample.of(source(routes=Routes(ids, SPEC, captured=captured))).first_missing_loss_row()

    assert missing(True, True, True, True) is None
    assert missing(False, True, True, False) is None  # row 0 predicts no token of the loss, row 3 none at all
    assert missing(True, False, False, True) == 1
    assert missing(True, True, False, True) == 2
    assert Sample.of(source()).first_missing_loss_row() is None
