"""logprobs: equal to the model's own logits, for packed sequences, without ever holding them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Cohere2MoeConfig, GraniteMoeConfig, Qwen3MoeConfig
from transformers.models.cohere2_moe.modeling_cohere2_moe import Cohere2MoeForCausalLM
from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeForCausalLM

from router_replay import Sample, logprobs, pack
from router_replay.errors import ReplayError
from router_replay.forward.vocabulary import LogitRule, TokenLogprobs

COMMON = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip


def qwen() -> torch.nn.Module:
    torch.manual_seed(0)
    extra = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**COMMON, **extra))


def granite() -> torch.nn.Module:
    torch.manual_seed(0)
    return GraniteMoeForCausalLM(
        GraniteMoeConfig(**COMMON, num_local_experts=8, num_experts_per_tok=2, logits_scaling=3.0)
    )


def cohere() -> torch.nn.Module:
    torch.manual_seed(0)
    extra = {"num_experts": 8, "num_experts_per_tok": 2, "logit_scale": 0.25}
    return Cohere2MoeForCausalLM(Cohere2MoeConfig(**COMMON, **extra))


def samples(lengths: tuple[int, ...]) -> list[Sample]:
    rng = np.random.default_rng(1)
    return [Sample(rng.integers(1, 97, n), np.zeros(n), np.ones(n, bool), None) for n in lengths]


def own_logprobs(model: torch.nn.Module, tokens: np.ndarray, temperature: float = 1.0) -> torch.Tensor:
    logits = model(input_ids=torch.from_numpy(tokens)[None], use_cache=False).logits[0].float() / temperature
    labels = torch.from_numpy(tokens[1:])[:, None]
    return logits[:-1].log_softmax(-1).gather(-1, labels)[:, 0]


@pytest.mark.parametrize("make", [qwen, granite, cohere])
def test_packed_logprobs_and_gradients_are_those_of_one_sequence_at_a_time(make) -> None:
    model = make()
    given = samples((7, 12, 3))
    batch = pack(given, 32, pad_to_multiple_of=4)
    out = logprobs(model, batch, vocabulary_piece=20, temperature=0.7)
    (out**2).sum().backward()
    packed = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    alone = [own_logprobs(model, sample.token_ids, 0.7) for sample in given]
    torch.cat([part**2 for part in alone]).sum().backward()
    for mine, theirs in zip(batch.per_sample(out.detach().numpy()), alone, strict=True):
        assert np.allclose(mine[:-1], theirs.detach().numpy(), atol=2e-5)
        assert mine[-1] == 0
    for name, parameter in model.named_parameters():
        assert torch.allclose(packed[name], parameter.grad, atol=2e-4, rtol=1e-3), name


@pytest.mark.parametrize("rule", [LogitRule(), LogitRule(scale=0.5, softcap=2.0)])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_match_finite_differences(rule: LogitRule, bias: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(5, 4, requires_grad=True)
    weight = torch.randn(11, 4, requires_grad=True)
    bias_V = torch.randn(11, requires_grad=True) if bias else None
    labels = torch.tensor([0, 3, 4, 9, 10])
    out = TokenLogprobs.apply(hidden, weight, bias_V, labels, rule, 1.3, 4)
    logits = rule.apply(hidden @ weight.T + (bias_V if bias else 0)) / 1.3
    expected = logits.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    assert torch.allclose(out, expected, atol=1e-5)
    inputs = [hidden, weight] + ([bias_V] if bias else [])
    upstream = torch.randn(5)
    for mine, theirs in zip(
        torch.autograd.grad(out, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_the_logits_never_exist_at_once() -> None:
    """No tensor of the forward or backward pass holds more than a piece of the vocabulary per token."""
    model = qwen()
    batch = pack(samples((16, 16)), 32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else [out]:
                if isinstance(tensor, torch.Tensor) and tensor.ndim == 2 and tensor.shape[0] == 32:
                    largest = max(largest, tensor.shape[1])
            return out

    with Watch():
        logprobs(model, batch, vocabulary_piece=40).sum().backward()
    assert 0 < largest <= 64  # 64 is the width of queries; 97 would be the vocabulary


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_piece_of_the_logits_exists_once_in_float32(temperature: float) -> None:
    """Each piece makes one [T, P] tensor of float32 in the forward pass and one in the backward pass."""
    hidden = torch.randn(32, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(97, 8, dtype=torch.bfloat16, requires_grad=True)
    made = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            given = {tensor.data_ptr() for tensor in args if isinstance(tensor, torch.Tensor)}
            out = func(*args, **(kwargs or {}))
            wide = isinstance(out, torch.Tensor) and out.shape[:1] == (32,) and out.ndim == 2 and out.shape[1] >= 17
            if wide and out.dtype == torch.float32 and out.untyped_storage().data_ptr() not in given:
                made.append((func, tuple(out.shape)))
            return out

    with Watch():
        found = TokenLogprobs.apply(hidden, weight, None, torch.arange(32), LogitRule(), temperature, 40)
        found.sum().backward()
    assert [shape for _, shape in made] == [(32, 40), (32, 40), (32, 17)] * 2, made


def test_a_model_that_treats_its_logits_in_an_unknown_way_is_refused() -> None:
    model = granite()
    model.config.logits_scaling = 3.0
    original = model.forward

    def forward(*args, **kwargs):
        out = original(*args, **kwargs)
        out.logits = out.logits + 1.0
        return out

    model.forward = forward
    with pytest.raises(ReplayError, match="transforms its logits in a way"):
        logprobs(model, pack(samples((5,)), 8))
    assert "forward" not in vars(model.get_output_embeddings())  # the head is as before


@pytest.mark.parametrize("temperature", [0, 0.0, -1.0, float("nan"), float("inf"), "1", None, True, 1j])
def test_a_temperature_that_divides_nothing_is_refused(temperature) -> None:
    with pytest.raises(ReplayError, match="temperature must be a finite number above 0, got"):
        logprobs(qwen(), pack(samples((5,)), 8), temperature=temperature)


@pytest.mark.parametrize("piece", [0, -1, 2.5, "8", None, True, float("nan")])
def test_a_piece_of_the_vocabulary_that_is_none_is_refused(piece) -> None:
    with pytest.raises(ReplayError, match="vocabulary_piece must be an integer of 1 or more, got"):
        logprobs(qwen(), pack(samples((5,)), 8), vocabulary_piece=piece)


def test_numbers_of_numpy_are_numbers() -> None:
    model, batch = qwen(), pack(samples((5,)), 8)
    plain = logprobs(model, batch, temperature=0.5, vocabulary_piece=7)
    given = logprobs(model, batch, temperature=np.float32(0.5), vocabulary_piece=np.int64(7))
    assert torch.equal(plain, given)


@pytest.mark.parametrize("label", [-1, 97])
def test_a_label_that_is_no_token_is_refused(label: int) -> None:
    tensors = pack(samples((5,)), 8).to_torch()
    tensors.labels[2] = label
    with pytest.raises(ReplayError, match=rf"label of slot 2 must be in \[0, 97\).*got {label}"):
        logprobs(qwen(), tensors)


def test_a_pass_that_fails_leaves_the_head_as_it_was() -> None:
    model = qwen()
    model.model.norm.register_forward_hook(lambda *_: 1 / 0)
    for _ in range(2):  # the second one does not wait for the first
        with pytest.raises(ZeroDivisionError):
            logprobs(model, pack(samples((5,)), 8))
    assert "forward" not in vars(model.lm_head)
