"""Packed sequences give what one sequence at a time gives, in every family, or the family refuses them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from router_replay import Sample, logprobs, pack
from router_replay.errors import ReplayError
from router_replay.families import FAMILIES, by_folder
from router_replay.forward import use_packed_attention
from router_replay.forward.packing import packed_arguments, reaching_the_decoder
from router_replay.replay.replayer import RouterReplay
from tests.makers import random_routes
from tests.replay import tiny

PACKED = sorted(family.name for family in FAMILIES if family.packing and family.packing.borders)
NOT_PACKED = sorted(family.name for family in FAMILIES if family.packing and not family.packing.borders)
LENGTHS = (19, 30, 10)  # longer than the sliding windows, index sizes and compression blocks of the tiny models


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, tiny.VOCAB, (length,), generator=generator) for length in LENGTHS]


def outputs(
    model: tiny.Tiny, tokens: torch.Tensor, positions: torch.Tensor, boundaries: tuple[int, ...] = ()
) -> torch.Tensor:
    arguments = packed_arguments(model.model, tokens[None], positions[None], boundaries)
    with reaching_the_decoder(model.model, arguments, boundaries):
        out = model.model(**arguments, use_cache=False)
    return (out.logits if getattr(out, "logits", None) is not None else out.last_hidden_state)[0]


@pytest.mark.parametrize("family", PACKED)
def test_packed_sequences_do_not_see_each_other(family: str) -> None:
    """With a mask over the bin, and by their lengths in the families whose record says so."""
    torch.set_num_threads(1)
    model = tiny.make(family)
    model.model.eval()
    replayer = RouterReplay(model.model)
    alone = sequences()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    boundaries = tuple(np.cumsum([0, *LENGTHS]).tolist())
    with torch.no_grad():
        with replayer.record() as one_by_one:
            apart = torch.cat([outputs(model, tokens, torch.arange(len(tokens))) for tokens in alone])
        for kind in ("masked", "auto"):
            used = use_packed_attention(model.model, kind)
            by_lengths = kind == "auto" and by_folder(family).attention == "yes"
            assert used.startswith("segments" if by_lengths else "masked: ")
            with replayer.record() as in_one:
                together = outputs(model, torch.cat(alone), positions, boundaries)
            assert torch.allclose(apart, together, atol=1e-4)
            assert in_one.routes.same_sets(one_by_one.routes)
        again = torch.cat([outputs(model, tokens, torch.arange(len(tokens))) for tokens in alone])
        assert torch.equal(again, apart)  # other calls keep the attention that the model had


@pytest.mark.parametrize("family", NOT_PACKED)
def test_a_family_that_would_mix_them_refuses(family: str) -> None:
    model = tiny.make(family).model
    tokens = torch.full((1, 6), 5)
    with pytest.raises(ReplayError, match=f"{family} does not keep packed sequences apart"):
        packed_arguments(model, tokens, torch.tensor([[0, 1, 2, 0, 1, 2]]))
    assert set(packed_arguments(model, tokens, torch.arange(6)[None])) == {"input_ids", "position_ids"}


def test_a_kind_of_layer_that_nobody_vouched_for_refuses() -> None:
    model = tiny.make("qwen3_moe").model
    model.config.layer_types = ["full_attention", "memory_of_elephants", "full_attention"]
    with pytest.raises(ReplayError, match="layers of kind memory_of_elephants"):
        packed_arguments(model, torch.full((1, 6), 5), torch.tensor([[0, 1, 2, 0, 1, 2]]))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_replayed_logprobs_of_a_packed_batch_are_those_of_each_sample(family: str) -> None:
    torch.set_num_threads(1)
    model = tiny.make(family)
    model.model.eval()
    replayer = RouterReplay(model.model)
    samples = [
        Sample(
            tokens.numpy(),
            np.zeros(len(tokens)),
            np.ones(len(tokens), bool),
            random_routes(len(tokens), replayer.spec, n),
        )
        for n, tokens in enumerate(sequences())
    ]
    batch = pack(samples, 64, pad_to_multiple_of=4)
    with torch.no_grad():
        with replayer.replay(batch):
            packed = batch.per_sample(logprobs(model.model, batch).numpy())
        for sample, mine in zip(samples, packed, strict=True):
            single = pack([sample], 64)
            with replayer.replay(single):
                assert np.allclose(logprobs(model.model, single).numpy(), mine, atol=1e-4)
