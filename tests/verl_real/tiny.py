"""A tiny model, rollouts with random routes in verl's own fields, and engines of verl on them.

The first decoder layer is dense, so that absolute layer ids matter. The routes are random, not the model's own: a
replay that does nothing shows.
"""

from __future__ import annotations

import functools
import pathlib
from typing import Any

from tests.verl_real import cpu

# isort: split
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.workers.config import EngineRouterReplayConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.padding import response_from_nested

import router_replay.integrations.verl  # the loud way
from router_replay import RouterReplay, RouterSpec, Routes, Sample, logprobs, pack
from tests.makers import random_ids

__all__ = ["cpu"]
SPEC = RouterSpec(num_experts=8, top_k=2, layers=(1, 2), num_layers=3)
LENGTHS = ((3, 6), (5, 4), (2, 7), (4, 3))  # prompt and response
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def save_model(folder: pathlib.Path) -> str:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return str(folder)


def rollouts(lengths: tuple[tuple[int, int], ...] = LENGTHS) -> list[AgentLoopOutput]:
    """What verl's agent loop returns; the engine has no row for the last token, and the middle turn is a tool's."""
    made = []
    for number, (prompt, response) in enumerate(lengths):
        rng = np.random.default_rng(number)
        tokens = rng.integers(1, 64, prompt + response).tolist()
        ids = np.zeros((prompt + response - 1, 3, 2), np.uint8)
        ids[:, SPEC.layers] = random_ids(len(ids), SPEC, number)
        mask = [0 if 1 < place < 3 else 1 for place in range(response)]
        made.append(
            AgentLoopOutput(
                prompt_ids=tokens[:prompt],
                response_ids=tokens[prompt:],
                response_mask=mask,
                response_logprobs=[0.0] * response,
                routed_experts=ids,
                metrics=AgentLoopMetrics(),
            )
        )
    return made


def batch_of(outputs: list[AgentLoopOutput], **settings: Any) -> Any:
    """The batch that verl's agent loop makes of its outputs; micro-batches of about 20 tokens."""
    fields = []
    for output in outputs:
        one = output.as_dict()
        fields.append(
            {name: one[name] for name in ("prompts", "responses", "response_mask", "routed_experts") if name in one}
        )
        fields[-1]["input_ids"] = torch.cat([one["prompts"], one["responses"]])
        fields[-1]["position_ids"] = torch.arange(len(fields[-1]["input_ids"]))
        fields[-1]["loss_mask"] = one["response_mask"]
        fields[-1]["advantages"] = torch.linspace(-1, 2, len(one["responses"]))
        fields[-1]["old_log_probs"] = torch.zeros(len(one["responses"]))
    data = tu.list_of_dict_to_tensordict(fields)
    for name in (
        "input_ids",
        "position_ids",
    ):  # sequences of one length are stacked, and verl's engine needs them nested
        data[name] = torch.nested.as_nested_tensor([one[name] for one in fields], layout=torch.jagged)
    tu.assign_non_tensor(data, **{"temperature": 1.0, "max_token_len_per_gpu": 20, "global_batch_size": 4, **settings})
    return data


def engine(model: str, mode: str = "R3", strategy: str = "fsdp", **settings: Any) -> Any:
    """An engine as verl's worker makes it. `settings` are fields of verl's two configs."""
    fields = HFModelConfig.__dataclass_fields__
    of_model = {name: settings.pop(name) for name in list(settings) if name in fields}
    attention = {"attn_implementation": "sdpa"}
    model_config = HFModelConfig(path=model, load_tokenizer=False, override_config=attention, **of_model)
    engine_config = FSDPEngineConfig(
        strategy=strategy,
        router_replay=settings.pop("router_replay", EngineRouterReplayConfig(mode=mode)),
        mixed_precision=settings.pop("mixed_precision", FP32),
        use_torch_compile=False,
        **settings,
    )
    optimizer = FSDPOptimizerConfig(
        optimizer="SGD", lr=1.0, weight_decay=0.0, clip_grad=1e9, total_training_steps=9, lr_warmup_steps=0
    )
    made = EngineRegistry.new(
        model_type=model_config.model_type,
        backend=strategy,
        model_config=model_config,
        engine_config=engine_config,
        optimizer_config=optimizer,
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


def start(folder: pathlib.Path, rank: int = 0, world: int = 1) -> None:
    """A process group of gloo; once per process."""
    if not dist.is_initialized():
        store = dist.FileStore(str(folder / f"store{world}"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


def loss_of(model_output: Any, data: Any, dp_group: Any = None) -> Any:
    """-sum of advantage x log-prob over the tokens of the response, over all ranks, whose gradients FSDP averages."""
    found = response_from_nested(model_output["log_probs"], data["response_mask"])
    parts = (one.unbind() for one in (found, data["advantages"], data["response_mask"]))
    each = [logprob * advantage * mask for logprob, advantage, mask in zip(*parts, strict=True)]
    return -torch.cat(each).sum() * data["dp_size"], {}


def weights(module: Any) -> dict[str, Tensor]:
    state = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True))
    return {name: value.clone() for name, value in state.items()}


def train(made: Any, data: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """One step of SGD with a learning rate of 1: the metrics, and the gradients by what the step changed."""
    before = weights(made.module)
    with made.train_mode():
        output = made.train_batch(data, loss_of)
    after = weights(made.module)
    return output["metrics"], {name: before[name] - after[name] for name in before}


def score(made: Any, data: Any) -> dict[str, Any]:
    """Verl's `compute_log_prob`: the log-probs of every token of each sequence, and the routes with R2."""
    with made.eval_mode():
        output = made.infer_batch(data)
    return output["model_output"] | {"metrics": output["metrics"]}


@functools.cache
def plain(model: str) -> tuple[Any, RouterReplay]:
    made = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    return made, RouterReplay(made)


def samples_of(outputs: list[AgentLoopOutput]) -> list[Sample]:
    made = []
    for output in outputs:
        tokens = np.array(output.prompt_ids + output.response_ids)
        ids = np.zeros((len(tokens), 2, 2), np.uint8)
        ids[:-1] = output.routed_experts[:, SPEC.layers]
        mask = np.array([0] * len(output.prompt_ids) + output.response_mask, bool)
        routes = Routes(ids, SPEC, captured=np.arange(len(tokens)) < len(tokens) - 1)
        made.append(Sample(tokens, np.zeros(len(tokens)), mask, routes))
    return made


def ours(model: str, outputs: list[AgentLoopOutput], *, live: bool = False) -> tuple[list[Tensor], dict[str, Tensor]]:
    """The log-probs of each sequence's next tokens, and the gradients of the loss, by our replay on the plain model."""
    module, replayer = plain(model)
    module.zero_grad()
    found = []
    for output, sample in zip(outputs, samples_of(outputs), strict=True):
        batch = pack([sample], max_tokens=64)
        if live:
            lines = logprobs(module, batch)
        else:
            with replayer.replay(batch):
                lines = logprobs(module, batch)
        advantages = torch.zeros(len(lines))
        prompt, response = len(output.prompt_ids), len(output.response_ids)
        answered = slice(prompt - 1, prompt + response - 1)
        advantages[answered] = torch.linspace(-1, 2, response) * torch.tensor(output.response_mask)
        (-(lines * advantages).sum()).backward()
        found.append(lines.detach()[: prompt + response - 1])
    return found, {name: value.grad.clone() for name, value in module.named_parameters()}


assert router_replay.integrations.verl
