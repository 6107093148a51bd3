"""The operations of a pass, counted by hand for a small model."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from router_replay.rl.policy import operations
from router_replay.rl.policy.operations import Operations, peak_of
from router_replay.spec import RouterSpec


@pytest.fixture
def count() -> Operations:
    config = Qwen3MoeConfig(
        vocab_size=11, hidden_size=8, moe_intermediate_size=4, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, num_experts=6, num_experts_per_tok=3,
    )  # fmt: skip
    return Operations(Qwen3MoeForCausalLM(config), RouterSpec.from_config(config))


def test_a_token_passes_through_its_matrices_and_its_experts_only(count: Operations) -> None:
    attention = 8 * 8 + 2 * 8 * 4 + 8 * 8  # queries, keys and values, output
    experts = 3 * 3 * 8 * 4  # three experts of three matrices
    layer = attention + experts + 8 * 6  # and the router
    pairs = 2 * 2 * (4 + 4)  # both products of attention, for two heads
    assert count.forward([1]) == 2 * (2 * layer + 11 * 8) + 2 * pairs
    assert count.forward([4]) == 4 * 2 * (2 * layer + 11 * 8) + 2 * pairs * (1 + 2 + 3 + 4)


def test_sequences_add_up_and_do_not_attend_to_each_other(count: Operations) -> None:
    assert count.forward([5, 7]) == count.forward([5]) + count.forward([7])
    assert count.forward([12]) > count.forward([5, 7])


def test_a_step_is_a_score_and_an_update_of_three_passes(count: Operations) -> None:
    assert count.step([5]) == 4 * count.forward([5])
    assert count.step([5], reference=True) == 5 * count.forward([5])


def test_a_window_ends_the_pairs_of_a_token() -> None:
    assert operations._pairs(5, 2) == 1 + 2 + 2 + 2 + 2
    assert operations._pairs(5, 9) == operations._pairs(5, None) == 15


def test_the_peak_of_a_cpu_is_unknown_and_that_of_a_gpu_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_of(torch.device("cpu")) is None
    for name, peak in (("NVIDIA H200", 9.89e14), ("NVIDIA H20", 1.48e14), ("NVIDIA L40S", 3.62e14), ("Tesla T4", None)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_of(torch.device("cuda")) == peak
