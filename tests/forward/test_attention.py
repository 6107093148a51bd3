"""Attention by sequence lengths equals attention with a mask, and a layer that misses the borders is found out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AttentionInterface
from transformers.utils.generic import is_flash_attention_requested

from router_replay import RouterReplay, Sample, logprobs, pack
from router_replay.batch import Batch
from router_replay.errors import ReplayError
from router_replay.forward import kernels, use_packed_attention
from router_replay.forward.attention import attention_of
from router_replay.forward.kernels import Sequences, attention, kernel_for
from tests.makers import random_routes
from tests.replay import tiny

HEADS, KEY_HEADS, SIZE = 4, 2, 8


def batch_of(lengths: tuple[int, ...], seed: int = 0, spec: Any = None) -> Batch:
    rng = np.random.default_rng(seed)
    samples = [
        Sample(
            rng.integers(3, tiny.VOCAB, n),
            np.zeros(n),
            np.ones(n, bool),
            None if spec is None else random_routes(n, spec, seed + n),
        )
        for n in lengths
    ]
    return pack(samples, sum(lengths))


def by_a_mask(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: list[int], **rule: Any) -> Any:
    """The same attention with one mask over the bin."""
    of_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    along_T = torch.arange(len(of_T))
    distance_TT = along_T[:, None] - along_T
    seen_TT = (of_T[:, None] == of_T) & (distance_TT >= 0)
    if rule.get("window"):
        seen_TT &= distance_TT < rule["window"]
    key, value = (part.repeat_interleave(HEADS // KEY_HEADS, dim=1) for part in (key, value))
    scores = query @ key.transpose(2, 3) * (rule.get("scale") or SIZE**-0.5)
    if rule.get("softcap"):
        scores = (scores / rule["softcap"]).tanh() * rule["softcap"]
    weights = scores.masked_fill(~seen_TT, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    if rule.get("sinks") is not None:
        total = total + rule["sinks"].exp()[None, :, None, None]
    return (weights / total @ value).transpose(1, 2)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    window=st.sampled_from([None, 1, 5, 100]),
    softcap=st.sampled_from([None, None, 2.0]),
    with_sinks=st.booleans(),
    in_order=st.booleans(),
)
def test_each_sequence_attends_to_itself_with_the_gradients_of_a_mask(
    lengths: list[int], window: int | None, softcap: float | None, with_sinks: bool, in_order: bool
) -> None:
    lengths = sorted(lengths, reverse=True) if in_order else lengths
    generator = torch.Generator().manual_seed(sum(lengths))
    slots = sum(lengths)
    shapes = [(1, heads, slots, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    parts = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
    sinks = torch.randn(HEADS, generator=generator, dtype=torch.float64).requires_grad_() if with_sinks else None
    rule = {"window": window, "softcap": softcap, "sinks": sinks, "scale": 0.3}
    sequences = Sequences(np.cumsum([0, *lengths]).tolist(), "cpu")
    found = attention(*parts, sequences, **rule)
    expected = by_a_mask(*parts, lengths, **rule)
    assert torch.allclose(found, expected, atol=1e-6)
    upstream = torch.randn(found.shape, generator=generator, dtype=torch.float64)
    inputs = parts if sinks is None else [*parts, sinks]
    for mine, theirs in zip(
        torch.autograd.grad(found, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        assert torch.allclose(mine, theirs, atol=1e-5)


def test_equal_lengths_are_one_group_without_padding_and_padding_is_bounded() -> None:
    [group] = Sequences(range(0, 129 * 12, 12), "cpu").groups
    assert (group.count, group.length, group.padded_NL) == (128, 12, None)
    lengths = sorted(np.random.default_rng(0).integers(1, 3000, 200).tolist(), reverse=True)
    groups = Sequences(np.cumsum([0, *lengths]).tolist(), "cpu").groups
    assert sum(group.count for group in groups) == len(lengths)
    assert sum(group.count * group.length for group in groups) <= sum(lengths) + len(groups) * kernels.GROUP_COST


def test_bins_of_other_lengths_look_the_same_to_compiled_code() -> None:
    first, second = Sequences((0, 300, 500, 600), "cpu"), Sequences((0, 400, 500, 520, 530), "cpu")
    assert first.cumulative.tolist() == [0, 300, 500, 600, 600]
    assert first.cumulative.shape == second.cumulative.shape
    assert first.longest == second.longest == 512


def test_compiled_layers_are_not_compiled_again_for_new_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that runs on a CPU and reads nothing on the host stands for the real one; its arguments are the same."""

    def varlen(query, key, value, ends, _, longest, __, scale, window_size, **___):
        of_T = torch.bucketize(torch.arange(len(query)), ends, right=True)
        seen_TT = (of_T[:, None] == of_T) & torch.ones(len(query), len(query), dtype=torch.bool).tril()
        repeats = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(repeats, dim=1).transpose(0, 1) for part in (key, value))
        out = nn.functional.scaled_dot_product_attention(query.transpose(0, 1), key, value, seen_TT, scale=scale)
        return out.transpose(0, 1)

    def always_varlen(*_, **__):
        return "varlen"

    model, plain = tiny.make("qwen3_moe").model.eval(), tiny.make("qwen3_moe").model.eval()
    use_packed_attention(model)
    monkeypatch.setattr(kernels, "varlen_attn", varlen)
    monkeypatch.setattr(kernels, "kernel_for", torch._dynamo.assume_constant_result(always_varlen))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = []
    for layer in model.model.layers:
        layer.compile(backend="eager", dynamic=True)
    for seed, lengths in enumerate([(19, 30, 10), (21, 29, 11), (20, 20, 20, 7), (50, 6, 3)]):
        batch = batch_of(lengths, seed)
        with torch.no_grad():
            assert torch.allclose(logprobs(model, batch), logprobs(plain, batch), atol=1e-4)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    torch._dynamo.reset()
    assert graphs[0] > 0
    assert graphs[-1] == graphs[1]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_layers_that_are_computed_again_see_the_borders_of_their_own_pass(family: str, reentrant: bool) -> None:
    torch.set_num_threads(1)
    model = tiny.make(family).model
    replayer = RouterReplay(model)
    batches = [batch_of((19, 30, 10), 0, replayer.spec), batch_of((7, 7, 25), 1, replayer.spec)]

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        found = []
        for batch in batches:  # both passes, then both backwards
            with replayer.replay(batch):
                found.append((logprobs(model, batch) ** 2).sum())
                if reentrant:  # replay refuses to recompute after its block by a reentrant checkpoint
                    found.pop().backward()
        for one in found:
            one.backward()
        return {name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None}

    masked = gradients()
    assert use_packed_attention(model) == "segments"
    plain = gradients()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for name, gradient in gradients().items():
        assert torch.allclose(gradient, plain[name], atol=1e-6), name
        assert torch.allclose(gradient, masked[name], atol=1e-3, rtol=1e-3), name


def test_other_calls_of_the_model_keep_their_attention() -> None:
    model = tiny.make("qwen3_moe").model.eval()
    tokens = torch.randint(3, tiny.VOCAB, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(tokens)
    mask[1, :5] = 0

    def results() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.no_grad():
            padded = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits[mask.bool()]
            written = model.generate(tokens, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0)
        return padded, written

    for before in ("eager", "sdpa"):
        model.set_attn_implementation(before)
        expected = results()
        use_packed_attention(model)
        assert all(torch.equal(one, two) for one, two in zip(results(), expected, strict=True))
        assert use_packed_attention(model, "masked") == "masked: as set"
        assert model.config._attn_implementation == before


class Drops(nn.Module):
    """A wrapper that does not pass the borders on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, packed: Any = None, **arguments: Any) -> Any:
        return self.model(**arguments)


def test_a_wrapper_that_drops_the_borders_is_found_out() -> None:
    model = tiny.make("qwen3_moe").model
    use_packed_attention(model)
    with pytest.raises(ReplayError, match="Drops did not pass its packed unchanged to the decoder"):
        logprobs(Drops(model), batch_of((5, 6)))
    with pytest.raises(ReplayError, match="Drops did not pass its packed unchanged to the decoder"):
        logprobs(Drops(model), batch_of((5,)))


def test_a_layer_that_gets_no_borders_raises() -> None:
    model = tiny.make("qwen3_moe").model
    use_packed_attention(model)
    layer = model.model.layers[1].self_attn
    forward = layer.forward
    layer.forward = lambda *args, packed=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(ReplayError, match=r"Qwen3MoeAttention got no sequence borders and an empty mask"):
        logprobs(model, batch_of((5, 6)))


def test_a_layer_that_attends_in_another_way_is_found_out() -> None:
    model = tiny.make("qwen3_moe").model
    use_packed_attention(model)
    model.model.layers[1].self_attn.forward = lambda hidden_states, **_: (hidden_states, None)
    with pytest.raises(ReplayError, match=r"all 3 layers must attend by sequence lengths, got 2 calls"):
        logprobs(model, batch_of((5, 6)))


def test_the_borders_of_another_batch_are_refused() -> None:
    parts = [torch.randn(1, heads, 9, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    with pytest.raises(ReplayError, match="expects one bin of 8 slots, got queries"):
        attention(*parts, Sequences((0, 3, 8), "cpu"))


@pytest.mark.parametrize("kind", ["varlen", "flash", "segments"])
def test_transformers_takes_the_name_of_every_kernel(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with "flash" in it would make it look for a kernel of its own, where flash-attn is installed."""
    monkeypatch.setattr("router_replay.forward.attention.attention_of", lambda *_: kind)  # as on a GPU
    model = tiny.make("qwen3_moe").model
    assert use_packed_attention(model, kind) == kind
    name = model.config._attn_implementation
    assert name in AttentionInterface()
    assert not is_flash_attention_requested(requested_attention_implementation=name)


def test_what_is_not_possible_is_said() -> None:
    model = tiny.make("qwen3_moe").model
    with pytest.raises(ReplayError, match="must be one of auto, varlen, flash, segments, masked, got 'fast'"):
        use_packed_attention(model, "fast")
    with pytest.raises(ReplayError, match=r'attention "varlen" is not possible: it runs on CUDA only'):
        use_packed_attention(model, "varlen")
    with pytest.raises(ReplayError, match=r'"segments" is not possible for PhimoeForCausalLM: its layers do not tell'):
        use_packed_attention(tiny.make("phimoe").model, "segments")
    with pytest.raises(ReplayError, match=r'"flash" is not possible: it computes in bfloat16 and float16 only'):
        kernel_for(torch.device("cuda"), torch.float32, wanted="flash")
    with pytest.raises(ReplayError, match=r'"varlen" is not possible: it knows no attention sinks'):
        kernel_for(torch.device("cuda"), torch.bfloat16, special=True, wanted="varlen")
    assert kernel_for(torch.device("cuda"), torch.float32) == "segments"
    assert attention_of(tiny.make("jamba").model).startswith("masked: its sequences run one at a time (carries state")
    assert attention_of(tiny.make("qwen3_moe", attention_dropout=0.1).model) == "masked: attention_dropout is 0.1"
    assert model.config._attn_implementation == "eager"
