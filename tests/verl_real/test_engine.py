"""R3 in verl's FSDP engines computes what our replay computes on the plain model."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.verl_real import tiny

# isort: split
from verl.trainer.ppo.padding_utils import construct_minimal_padding_template
from verl.utils import activation_offload
from verl.workers.engine import FSDPEngineWithLMHead

from router_replay.errors import ReplayError
from router_replay.integrations.verl.engine import FSDPEngineWithRouterReplay

ROWS = sum(prompt + response - 1 for prompt, response in tiny.LENGTHS)
CLOSE = 1e-5  # log-probs, float32
SETTINGS: dict[str, dict[str, Any]] = {
    "fsdp, packed": {"strategy": "fsdp"},
    "fsdp, padded": {"strategy": "fsdp", "use_remove_padding": False},
    "fsdp, original parameters": {"strategy": "fsdp", "use_orig_params": True},
    "fsdp2, packed": {"strategy": "fsdp2"},
    "fsdp2, padded": {"strategy": "fsdp2", "use_remove_padding": False},
    "fsdp2, padded to a bucket": {"strategy": "fsdp2", "pad_to_length": True, "pad_to_length_bucket": 16},
    "fsdp2, no checkpointing": {"strategy": "fsdp2", "enable_gradient_checkpointing": False},
}


def largest(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))


def next_token_logprobs(scored: dict[str, Any]) -> list[torch.Tensor]:
    return [line[:-1] for line in scored["log_probs"].unbind()]  # the last one predicts nothing


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_log_probs_and_gradients_are_ours(model: str, settings: dict[str, Any]) -> None:
    outputs = tiny.rollouts()
    expected, gradients = tiny.ours(model, outputs)
    live, _ = tiny.ours(model, outputs, live=True)
    engine = tiny.engine(model, **settings)
    layout = {"use_remove_padding": settings.get("use_remove_padding", True)}

    found = next_token_logprobs(tiny.score(engine, tiny.batch_of(outputs, **layout)))
    assert largest(found, expected) < CLOSE
    assert largest(found, live) > 0.1

    metrics, trained = tiny.train(engine, tiny.batch_of(outputs, **layout))
    assert metrics["routes/replayed"] == [ROWS]
    assert metrics["routes/live"] == [0]
    assert trained.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            trained[name], gradient, rtol=1e-4, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )
    assert gradients["model.layers.1.mlp.gate.weight"].abs().max() > 0.01


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2"])
def test_activation_offloading_recomputes_with_the_routes(
    model: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It brings a reentrant checkpoint of its own, which recomputes in backward."""
    handler = activation_offload.SynchronizedGroupOffloadHandler
    monkeypatch.setattr(handler, "offload", functools.partial(handler.offload, pin_memory=False))  # a CPU has none
    outputs = tiny.rollouts()
    _, gradients = tiny.ours(model, outputs)
    engine = tiny.engine(model, strategy=strategy, enable_activation_offload=True)
    _, trained = tiny.train(engine, tiny.batch_of(outputs))
    for name, gradient in gradients.items():
        torch.testing.assert_close(trained[name], gradient, rtol=1e-4, atol=1e-4)


def test_sequences_of_one_length_are_read(model: str) -> None:
    """verl stacks them instead of nesting them."""
    outputs = tiny.rollouts(((3, 5),) * 4)
    assert not tiny.batch_of(outputs)["routed_experts"].is_nested
    expected, _ = tiny.ours(model, outputs)
    engine = tiny.engine(model)
    assert largest(next_token_logprobs(tiny.score(engine, tiny.batch_of(outputs))), expected) < CLOSE


def test_a_disabled_engine_is_verls_own(model: str) -> None:
    outputs = tiny.rollouts()
    engine = tiny.engine(model, "disabled")
    assert type(engine) is FSDPEngineWithRouterReplay
    assert engine.replayer is None
    scored = tiny.score(engine, tiny.batch_of(outputs))
    engine.__class__ = FSDPEngineWithLMHead
    own = tiny.score(engine, tiny.batch_of(outputs))
    assert torch.equal(scored["log_probs"].values(), own["log_probs"].values())
    assert scored["metrics"] == own["metrics"] == {}


def test_the_engine_says_at_the_start_what_it_replays(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    tiny.engine(model, strategy="fsdp2")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("[router_replay]")]
    assert len(lines) == 1
    assert lines[0].startswith("[router_replay] R3 on RouterReplay(")
    assert "2 routers, 2 of 8 experts, model.layers.1.mlp.gate ... model.layers.2.mlp.gate" in lines[0]


def test_missing_rows_of_the_prompt_are_live_and_counted(model: str) -> None:
    outputs = tiny.rollouts()
    outputs[0].routed_experts[:2] = 0
    metrics, _ = tiny.train(tiny.engine(model), tiny.batch_of(outputs))
    assert metrics["routes/replayed"] == [ROWS - 2]
    assert metrics["routes/live"] == [2]


def test_a_missing_row_that_bears_loss_raises_and_leaves_the_model_live(model: str) -> None:
    outputs = tiny.rollouts()
    live, _ = tiny.ours(model, outputs, live=True)
    engine = tiny.engine(model)
    outputs[1].routed_experts[5] = 0
    with pytest.raises(ReplayError, match="1 rows that bear loss are missing"):
        tiny.score(engine, tiny.batch_of(outputs))
    engine.replay_mode, replayer, engine.replayer = "disabled", engine.replayer, None
    assert largest(next_token_logprobs(tiny.score(engine, tiny.batch_of(outputs))), live) < CLOSE
    assert replayer.stats.rows_live == (0, 0)


def test_a_row_with_an_expert_that_the_model_lacks_raises(model: str) -> None:
    outputs = tiny.rollouts()
    outputs[2].routed_experts[3, 1] = [7, 8]
    with pytest.raises(ValueError, match="8"):
        tiny.score(tiny.engine(model), tiny.batch_of(outputs))


def test_rows_for_other_layers_raise(model: str) -> None:
    outputs = tiny.rollouts()
    for output in outputs:
        output.routed_experts = output.routed_experts[:, 1:]  # over the routed layers only
    with pytest.raises(ValueError, match="a column for every decoder layer, dense ones included: expected 3"):
        tiny.score(tiny.engine(model), tiny.batch_of(outputs))


def test_the_sequences_that_verl_adds_to_fill_a_batch_stay_live(model: str) -> None:
    outputs = tiny.rollouts()
    data = tiny.batch_of(outputs)
    source = {name: value[0] for name, value in data.items() if isinstance(value, torch.Tensor)}
    padding, _ = construct_minimal_padding_template(source | {"position_ids": source["position_ids"]}, {}, 1)
    padding = {name: padding[name] for name in source}
    padding |= {name: torch.zeros(1) for name in ("advantages", "old_log_probs")}
    samples = [{name: value[i] for name, value in data.items() if isinstance(value, torch.Tensor)} for i in range(4)]
    filled = tiny.tu.list_of_dict_to_tensordict([*samples, padding, padding])
    # one sequence per micro-batch: those of the padding alone have no routes at all
    alone = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 1, "temperature": 1.0}
    tiny.tu.assign_non_tensor(filled, **alone)
    _, gradients = tiny.ours(model, outputs)
    metrics, trained = tiny.train(tiny.engine(model, strategy="fsdp2"), filled)
    assert metrics["routes/replayed"] == [ROWS]
    assert metrics["routes/live"] == [0]
    for name, gradient in gradients.items():
        torch.testing.assert_close(trained[name], gradient, rtol=1e-4, atol=1e-4)
