"""TRL's GRPOTrainer with Router Replay: two-digit additions on the tiny MoE model of this package, on a CPU.

    python examples/trl_grpo.py --replay off
    python examples/trl_grpo.py --replay r3      # mismatch/k3 falls, routes/live is 0

It needs `pip install ".[trl,vllm]"`; `--engine embedded` needs no vLLM. What Router Replay adds to a
script for TRL is the engine, the class of the trainer, and the arguments `replay` and `engine`.
"""

from __future__ import annotations

import argparse
import os
import random

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig

from router_replay.engines import EmbeddedEngine, Engine, VllmEngine
from router_replay.integrations.trl import RouterReplayGRPOTrainer
from router_replay.rl.config import tiny_folder

MODEL = str(tiny_folder())
# vLLM for CPUs starts quickly with these, and leaves the trainer its cores. A GPU needs none of them.
FOR_CPUS = {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def vllm_engine() -> Engine:
    for name, value in FOR_CPUS.items():
        os.environ.setdefault(name, value)
    torch.set_num_threads(1)  # on a GPU, leave this out too
    return VllmEngine(MODEL, dtype="bfloat16", max_model_len=64, block_size=32, enforce_eager=True)


def embedded_engine() -> Engine:
    return EmbeddedEngine(MODEL, dtype=torch.bfloat16, max_length=64)


def additions(count: int) -> Dataset:
    """Return a data set of prompts such as 12+34=, with their answers."""
    chance = random.Random(0)
    pairs = [(chance.randint(10, 99), chance.randint(10, 99)) for _ in range(count)]
    return Dataset.from_dict({"prompt": [f"{a}+{b}=" for a, b in pairs], "answer": [str(a + b) for a, b in pairs]})


def right_answer(completions: list[str], answer: list[str], **_: object) -> list[float]:
    return [float(given == expected) for given, expected in zip(completions, answer, strict=True)]


def train(replay: str, engine: str, steps: int, output: str, **settings: object) -> list[dict[str, float]]:
    """Train for `steps` rollouts and return TRL's log, one entry for each. `settings` are more of GRPOConfig."""
    config = {
        "output_dir": output,
        "max_steps": 4 * steps,
        "logging_steps": 4,
        "per_device_train_batch_size": 128,
        "steps_per_generation": 4,  # 512 completions, trained in four mini-batches
        "gradient_accumulation_steps": 1,
        "num_generations": 8,
        "max_completion_length": 8,
        "learning_rate": 2e-5,
        "lr_scheduler_type": "constant",
        "router_aux_loss_coef": 0.0,  # it counts the live choice, not the replayed one
        "model_init_kwargs": {"dtype": "float32"},
        "bf16": True,  # the passes compute in bfloat16, as the engine does
        "use_cpu": not torch.cuda.is_available(),
        "report_to": "none",
        "save_strategy": "no",
        "seed": 0,
    }
    trainer = RouterReplayGRPOTrainer(
        model=MODEL,
        reward_funcs=right_answer,
        args=GRPOConfig(**(config | settings)),
        train_dataset=additions(1024),
        processing_class=AutoTokenizer.from_pretrained(MODEL),
        replay=replay,
        engine={"vllm": vllm_engine, "embedded": embedded_engine}[engine],
    )
    trainer.train()
    trainer.close()
    return [entry for entry in trainer.state.log_history if "mismatch/k3" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replay", default="r3", choices=["off", "r2", "r3"])
    parser.add_argument("--engine", default="vllm", choices=["vllm", "embedded"])
    parser.add_argument("--steps", type=int, default=6, help="rollouts, with four updates each")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="out/trl")
    arguments = parser.parse_args()
    for entry in train(arguments.replay, arguments.engine, arguments.steps, arguments.output, seed=arguments.seed):
        names = ("mismatch/k3", "mismatch/extreme_tau2", "routes/replayed", "routes/live", "reward")
        print("  ".join(f"{name} {entry[name]:.3g}" for name in names))  # noqa: T201


if __name__ == "__main__":
    main()
