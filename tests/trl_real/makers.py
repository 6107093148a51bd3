"""A small random MoE model in a folder, and a trainer of it that takes a second or two per run."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import GRPOConfig

from router_replay.engines import EmbeddedEngine
from router_replay.engines.types import Completion
from router_replay.integrations.trl import RouterReplayGRPOTrainer
from router_replay.integrations.trl.rows import IDS, predicts
from router_replay.rl.config import tiny_folder

LAYERS, EXPERTS, PROMPTS, GROUP, LENGTH = 3, 16, 4, 4, 6
SEQUENCES = PROMPTS * GROUP


def model_folder(folder: pathlib.Path) -> str:
    """Write a random model with the tokenizer of the tiny one. Its weights are large, so that experts matter."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=22, hidden_size=32, moe_intermediate_size=24, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, num_experts=EXPERTS, num_experts_per_tok=4, max_position_embeddings=64,
        initializer_range=0.2, eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny_folder()).save_pretrained(folder)
    return str(folder)


class Watched(EmbeddedEngine):
    """An embedded engine in bfloat16 that keeps what it answered, and how often it got weights."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder, dtype=torch.bfloat16, max_length=48)
        self.answers: list[tuple[tuple[int, ...], Completion]] = []
        self.pushes = 0

    def generate_each(self, requests: Any) -> list[list[Completion]]:
        requests = list(requests)
        found = super().generate_each(requests)
        for request, completions in zip(requests, found, strict=True):
            self.answers += [(tuple(request.token_ids), one) for one in completions]
        return found

    def update_weights(self, *arguments: Any, **named: Any) -> None:
        super().update_weights(*arguments, **named)
        self.pushes += 1


def prompts(count: int = 64) -> Dataset:
    """Prompts of different lengths, so that there is padding on both sides."""
    return Dataset.from_dict({"prompt": [f"{number}+{7 * number}=" for number in range(3, 3 + count)]})


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def config(output: pathlib.Path, **settings: Any) -> GRPOConfig:
    defaults = {
        "output_dir": str(output), "max_steps": 2, "logging_steps": 1, "per_device_train_batch_size": SEQUENCES // 2,
        "steps_per_generation": 2, "gradient_accumulation_steps": 1, "num_generations": GROUP,
        "max_completion_length": LENGTH, "learning_rate": 1e-3, "report_to": "none", "save_strategy": "no", "seed": 0,
        "use_cpu": True, "bf16": False, "model_init_kwargs": {"dtype": "float32"}, "gradient_checkpointing": False,
        "disable_tqdm": True,
    }  # fmt: skip
    return GRPOConfig(**(defaults | settings))


def trainer(
    folder: str, output: pathlib.Path, replay: str = "r3", engine: Any = "embedded", kind: Any = None, **settings: Any
) -> Any:
    """A trainer of the model in `folder`. `settings` are those of GRPOConfig, or begin with `trainer_`."""
    more = {name.removeprefix("trainer_"): settings.pop(name) for name in list(settings) if name.startswith("trainer_")}
    if engine == "embedded":
        engine = Watched(folder)
    kind = kind or RouterReplayGRPOTrainer
    ours = {"replay": replay, "engine": engine} if issubclass(kind, RouterReplayGRPOTrainer) else {}
    more = {"model": folder, "train_dataset": prompts(), "reward_funcs": reward} | more
    return kind(args=config(output, **settings), processing_class=AutoTokenizer.from_pretrained(folder), **ours, **more)


class Losses(RouterReplayGRPOTrainer):
    """Keeps the batch and the log-probs of every pass of the loss."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.seen: list[tuple[dict[str, Any], torch.Tensor]] = []
        super().__init__(*arguments, **named)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)
        assert self._logprobs is not None
        self.seen.append((dict(inputs), self._logprobs.clone()))
        return loss


def gap(batch: dict[str, Any], logprobs: torch.Tensor, name: str = "old_per_token_logps") -> float:
    """The largest difference between the log-probs of the loss and others of the batch, on sampled tokens."""
    mask = batch["completion_mask"].bool()
    return float((logprobs - batch[name])[mask].abs().max())


def rows_of(batch: dict[str, Any]) -> np.ndarray:
    """The rows [T, L, K] that ride in a batch, of the tokens that predict another one."""
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    return batch[IDS][predicts(mask)].numpy()


def imbalance(ids_TLK: np.ndarray) -> np.ndarray:
    """The load of the busiest expert over the mean, in each layer."""
    load_LE = np.stack([np.bincount(ids_TLK[:, layer].ravel(), minlength=EXPERTS) for layer in range(LAYERS)])
    return load_LE.max(axis=1) / load_LE.mean(axis=1)


def weights(made: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in made.model.state_dict().items()}


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
