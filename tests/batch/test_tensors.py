from __future__ import annotations

import numpy as np
import pytest
import torch

from router_replay import RouterSpec, Sample, pack
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
