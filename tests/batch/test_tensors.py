from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from router_replay import RouterSpec, Routes, Sample, pack
from router_replay.batch.tensors import TensorRoutes
from router_replay.batch.types import PER_SLOT
from router_replay.errors import RoutesError
from tests.makers import random_routes


@pytest.mark.parametrize(("experts", "dtype"), [(256, torch.uint8), (257, torch.uint16)])
def test_tensors_are_writable_and_narrow(experts: int, dtype: torch.dtype) -> None:
    spec = RouterSpec(experts, 2, (0, 1))
    batch = pack([Sample(np.arange(5), np.zeros(5), np.ones(5, bool), random_routes(5, spec))], 8)
    tensors = batch.to_torch("cpu")
    assert tensors.routes.ids.dtype == dtype
    assert np.array_equal(tensors.routes.ids.numpy(), batch.routes.ids)
    assert np.array_equal(tensors.labels.numpy(), batch.labels)
    before = batch.routes.ids.copy()
    tensors.routes.ids.zero_()
    tensors.token_ids.zero_()
    assert np.array_equal(batch.routes.ids, before)
    assert batch.token_ids.any()


def test_the_host_knows_whether_any_row_is_captured() -> None:
    spec = RouterSpec(8, 2, (0, 1))
    some = Routes(random_routes(4, spec).ids, spec, captured=np.array([False, False, True, False]))
    for routes, expected in ((Routes.missing(4, spec), False), (some, True), (random_routes(4, spec), True)):
        made = TensorRoutes.from_routes(routes)
        assert made.any_captured is expected
        by_hand = TensorRoutes(made.ids, made.captured, spec, routes.all_captured)
        assert by_hand.any_captured is expected
    assert TensorRoutes.from_routes(Routes.missing(0, spec)).any_captured is False


def test_tensors_that_are_no_routes_are_refused() -> None:
    spec = RouterSpec(8, 2, (0, 1))
    ids, captured = torch.zeros(4, 2, 2, dtype=torch.uint8), torch.ones(4, dtype=torch.bool)
    with pytest.raises(RoutesError, match=r"\[rows, 2 layers, 2 slots\], got \[4, 2, 3\]"):
        TensorRoutes(torch.zeros(4, 2, 3, dtype=torch.uint8), captured, spec, True)
    for wrong in (captured[:3], captured.to(torch.uint8)):  # ~ of a byte is true for every row
        with pytest.raises(RoutesError, match=r"captured must be \[4\] of torch.bool"):
            TensorRoutes(ids, wrong, spec, False)


def test_a_batch_of_tensors_holds_what_the_batch_holds() -> None:
    samples = [Sample(np.arange(n), np.zeros(n), np.ones(n, bool), None) for n in (3, 5)]
    batch = pack(samples, 8, pad_to_multiple_of=2)
    tensors = batch.to_torch()
    assert (len(tensors), tensors.routes) == (10, None)
    for name in (*PER_SLOT, "cu_seqlens"):
        assert getattr(tensors, name).tolist() == getattr(batch, name).tolist()
    assert len(TensorRoutes.from_routes(Routes.missing(4, RouterSpec(8, 2, (0,))))) == 4


def test_one_captured_row_is_enough() -> None:
    made = TensorRoutes.from_routes(random_routes(1, RouterSpec(8, 2, (0, 1))))
    assert TensorRoutes(made.ids, made.captured, made.spec, all_captured=True).any_captured is True


def test_no_rows_are_routes_of_which_none_is_captured() -> None:
    ids, captured = torch.zeros(0, 2, 2, dtype=torch.uint8), torch.zeros(0, dtype=torch.bool)
    for all_captured in (True, False):
        assert TensorRoutes(ids, captured, RouterSpec(8, 2, (0, 1)), all_captured).any_captured is False


def test_rows_reach_a_gpu_from_pinned_memory_in_their_narrow_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: the memory that is asked for, and the copies that would start. tests/gpu has the real ones."""
    asked: list[tuple[torch.dtype, bool]] = []
    copied: list[tuple[torch.dtype, bool]] = []
    empty = torch.empty

    def watched_empty(*shape: Any, dtype: torch.dtype, pin_memory: bool = False) -> torch.Tensor:
        asked.append((dtype, pin_memory))
        return empty(*shape, dtype=dtype)

    def watched_copy(tensor: torch.Tensor, device: Any, non_blocking: bool = False) -> torch.Tensor:
        copied.append((tensor.dtype, non_blocking))
        return tensor

    monkeypatch.setattr(torch, "empty", watched_empty)
    monkeypatch.setattr(torch.Tensor, "to", watched_copy)
    routes = random_routes(5, RouterSpec(8, 2, (0, 1)))
    made = TensorRoutes.from_routes(routes, "cuda")
    assert asked == copied == [(torch.uint8, True), (torch.bool, True)]
    assert np.array_equal(made.ids.numpy(), routes.ids)
