"""Race a step of our trainer against one of TRL's GRPOTrainer with our replay: same model, engine and settings.

    make bench-trl                       # or: .venv-trl/bin/python -m bench.trl --rounds 15

Both train the tiny model with R3 on the same additions: 64 prompts x 8 samples of at most 8 tokens, four updates, an
old-policy pass, truncated importance sampling, AdamW with the same settings, and an embedded engine in bfloat16 beside
a float32 policy. Each trainer is a process of its own. In each round both run one step, one after the other, in
alternating order; the one that does not run waits. Ratios are medians over rounds of the ratio within a round, with a
bootstrap interval. The verdict is on CPU seconds, which depend less on other load than the wall time does. The table
shows in which phases our step takes longer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from bench.train_step import MARK
from bench.verdicts import LEAST_ROUNDS, Share

GOAL = 0.9
HERE = pathlib.Path(__file__).resolve().parent.parent
PROMPTS, GROUP, TOKENS, UPDATES, RATE = 64, 8, 8, 4, 5e-5
PHASES = ("rollout", "reward", "score", "update", "sync")
PARTS = ("step", "step, CPU", *(f"{phase}, CPU" for phase in PHASES), "all else, CPU", "peak memory, MiB")


# -- the workers: one process for each trainer -------------------------------------------------------------------------


class Turns:
    """Waits before every step, and tells what the step took: in all, and in each phase."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._wall = self._cpu = 0.0
        self._phases: dict[str, float] = {}
        self._open: list[str] = []

    def wait(self) -> None:
        if not sys.stdin.readline():
            sys.exit("the bench has ended")
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the CPU seconds of the block to a phase; a phase inside of another one counts for itself only."""
        started = time.process_time()
        self._open.append(name)
        try:
            yield
        finally:
            self._synchronize()
            self._open.pop()
            taken = time.process_time() - started
            self._phases[name] = self._phases.get(name, 0.0) + taken
            if self._open:
                self._phases[self._open[-1]] = self._phases.get(self._open[-1], 0.0) - taken

    def tell(self, tokens: float, k3: float) -> None:
        self._synchronize()
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        phases = {f"{name}, CPU": self._phases[name] for name in PHASES}
        found = {"step": wall, "step, CPU": cpu, **phases, "all else, CPU": cpu - sum(phases.values())}
        print(MARK + json.dumps({**found, "peak memory, MiB": self._memory(), "tokens": tokens, "k3": k3}), flush=True)

    def _memory(self) -> float:
        if self._device == "cuda":
            import torch

            return torch.cuda.max_memory_allocated() / 2**20
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10

    def _synchronize(self) -> None:
        if self._device == "cuda":
            import torch

            torch.cuda.synchronize()


def run_ours(steps: int, device: str, output: str) -> None:
    from router_replay.rl.config import load_config
    from router_replay.rl.log import metrics
    from router_replay.rl.loop import phases
    from router_replay.rl.loop.train import train

    turns, write, named = Turns(device), metrics.MetricsWriter.write, phases.Phases.phase

    @contextlib.contextmanager
    def measured(self: Any, name: str) -> Iterator[None]:
        with turns.phase(name), named(self, name):
            yield

    def write_and_wait(writer: Any, step: int, values: dict[str, float]) -> None:
        write(writer, step, values)
        turns.tell(values["tokens"], values["mismatch/k3"])
        if step + 1 < steps:
            turns.wait()

    phases.Phases.phase = measured  # type: ignore[method-assign]
    metrics.MetricsWriter.write = write_and_wait  # type: ignore[method-assign,assignment]
    turns.wait()
    train(
        load_config(
            None,
            [
                "replay=r3", f"steps={steps}", f'output="{output}"', f"model.device={device}", "model.dtype=float32",
                "engine.kind=embedded", "engine.dtype=bfloat16", "engine.max_length=64",
                f'engine.arguments={{device_map="{device}"}}', f"rollout.prompts={PROMPTS}", f"rollout.group={GROUP}",
                f"rollout.max_tokens={TOKENS}", f"optimizer.lr={RATE}", f"optimizer.mini_batches={UPDATES}",
                "loss.truncated_importance=2.0", "logging.tensorboard=false",
            ],
        )
    )  # fmt: skip


def run_trl(steps: int, device: str, output: str) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig

    from router_replay.engines import EmbeddedEngine
    from router_replay.integrations.trl import RouterReplayGRPOTrainer
    from router_replay.rl.config import tiny_folder
    from router_replay.rl.environments.problems import operands

    folder, turns = str(tiny_folder()), Turns(device)

    class Measured(RouterReplayGRPOTrainer):
        """Waits at the start of each rollout, and counts what lies outside of the other phases as the update."""

        batch: dict[str, Any] | None = None

        def _generate_and_score_completions(self, inputs: Any) -> Any:
            self.tell()
            turns.wait()
            self.batch = super()._generate_and_score_completions(inputs)
            return self.batch

        def tell(self) -> None:
            if self.batch is not None:
                tokens = self.batch["prompt_mask"].sum() + self.batch["completion_mask"].sum()
                k3 = [entry["mismatch/k3"] for entry in self.state.log_history if "mismatch/k3" in entry][-1]
                turns.tell(float(tokens), k3)

        def _generate(self, prompts: Any) -> Any:
            with turns.phase("rollout"):
                return super()._generate(prompts)

        def _calculate_rewards(self, *arguments: Any) -> Any:
            with turns.phase("reward"):
                return super()._calculate_rewards(*arguments)

        def _get_per_token_logps_and_entropies(self, *arguments: Any, **named: Any) -> Any:
            with contextlib.nullcontext() if torch.is_grad_enabled() else turns.phase("score"):
                return super()._get_per_token_logps_and_entropies(*arguments, **named)

        def training_step(self, *arguments: Any, **named: Any) -> Any:
            with turns.phase("update"):
                return super().training_step(*arguments, **named)

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            with turns.phase("between"):  # called inside training_step, and no part of the update
                return super()._prepare_inputs(generation_batch)

    def right(prompts: list[str], completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
        sums = [str(sum(map(int, prompt.rstrip("=").split("+")))) for prompt in prompts]
        ended = [ids[-1] == tokenizer.eos_token_id for ids in completion_ids]
        return [float(end and one == wanted) for one, wanted, end in zip(completions, sums, ended, strict=True)]

    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = ["{}+{}=".format(*operands(0, number, 2, 2)) for number in range(PROMPTS * steps)]
    made = Measured(
        model=folder, reward_funcs=right, train_dataset=Dataset.from_dict({"prompt": questions}),
        processing_class=tokenizer, replay="r3",
        engine=lambda: EmbeddedEngine(folder, dtype=torch.bfloat16, max_length=64, device_map=device),
        args=GRPOConfig(
            output_dir=output, max_steps=UPDATES * steps, logging_steps=UPDATES, shuffle_dataset=False,
            per_device_train_batch_size=PROMPTS * GROUP // UPDATES, steps_per_generation=UPDATES,
            gradient_accumulation_steps=1, num_generations=GROUP, max_completion_length=TOKENS, learning_rate=RATE,
            lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, epsilon=0.2,
            epsilon_high=0.28, loss_type="bnpo", vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_max=2.0, router_aux_loss_coef=0.0, gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"}, bf16=False, use_cpu=device == "cpu", report_to="none",
            save_strategy="no", disable_tqdm=True, seed=0,
        ),
    )  # fmt: skip
    sync = made.vllm_generation.sync_weights

    def measured_sync() -> None:
        with turns.phase("sync"):
            sync()

    made.vllm_generation.sync_weights = measured_sync  # type: ignore[method-assign]
    made.train()
    made.tell()
    made.close()


# -- the race ----------------------------------------------------------------------------------------------------------


class Racer:
    """A process that trains with one of the trainers, step by step."""

    def __init__(self, name: str, arguments: argparse.Namespace, steps: int, root: pathlib.Path) -> None:
        self.name = name
        self._log = root / f"{name}.log"
        settings = ["--steps", str(steps), "--device", arguments.device, "--output", str(root / name)]
        threads = str(arguments.threads)
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.trl", "--worker", name, *settings],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd=HERE, text=True,
                env={**os.environ, "OMP_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false"},
            )  # fmt: skip

    def step(self) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARK):
                return dict(json.loads(line.removeprefix(MARK)))
            with self._log.open("a") as log:
                log.write(line)
        raise RuntimeError(f"{self.name} ended with {self._process.wait()}\n{self._log.read_text()[-3000:]}")

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait()


def show(trl: list[dict[str, float]], ours: list[dict[str, float]]) -> int:
    """Print the table and the verdict; return 1 if the goal is missed."""
    print(f"\nA step of R3, {statistics.median(one['tokens'] for one in ours):,.0f} tokens, {len(ours)} rounds\n")
    print("| part | TRL | ours | ours / TRL |\n| --- | ---: | ---: | ---: |")
    lost = []
    for part in PARTS:
        theirs, mine = ([max(1e-9, one[part]) for one in rounds] for rounds in (trl, ours))
        share = Share.of(mine, theirs)
        print(f"| {part} | {statistics.median(theirs):.3f} | {statistics.median(mine):.3f} | {share}x |")
        if "CPU" in part and statistics.median(mine) - statistics.median(theirs) > 0.01:
            lost.append(f"{part} ({statistics.median(mine):.2f} s against {statistics.median(theirs):.2f} s)")
    speeds = [statistics.median(one["tokens"] / one["step"] for one in rounds) for rounds in (trl, ours)]
    print(f"| tokens/s | {speeds[0]:,.0f} | {speeds[1]:,.0f} | {speeds[1] / speeds[0]:.3f}x |")
    k3 = [statistics.median(one["k3"] for one in rounds) for rounds in (trl, ours)]
    print(f"| mismatch/k3 | {k3[0]:.2e} | {k3[1]:.2e} | |")
    print(f"\nwe lose in: {', '.join(lost) or 'nothing'}")
    share = Share.of([one["step, CPU"] for one in ours], [one["step, CPU"] for one in trl])
    if len(ours) < LEAST_ROUNDS:
        verdict = f"no verdict: {len(ours)} rounds, at least {LEAST_ROUNDS} are needed"
    elif share.high <= GOAL:
        verdict = "kept"
    else:
        verdict = "MISSED" if share.low > GOAL else "no verdict: the goal lies in the interval. Run more rounds"
    print(f"our step takes {share}x of the CPU seconds of TRL's (goal {GOAL}x): {verdict}")
    return int(verdict == "MISSED")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before; the first one starts the engines")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch in each trainer")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--worker", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run = run_ours if arguments.worker == "ours" else run_trl
        run(arguments.steps, arguments.device, arguments.output)
        return 0
    steps = arguments.warm_up + arguments.rounds
    taken: dict[str, list[dict[str, float]]] = {"trl": [], "ours": []}
    with tempfile.TemporaryDirectory() as temporary:
        racers = [Racer(name, arguments, steps, pathlib.Path(temporary)) for name in taken]
        try:
            for number in range(steps):
                for racer in racers if number % 2 else racers[::-1]:
                    found = racer.step()
                    warm = " (warm-up)" if number < arguments.warm_up else ""
                    wall, cpu = found["step"], found["step, CPU"]
                    print(f"round {number}{warm}, {racer.name}: {wall:.2f} s, {cpu:.2f} CPU s", flush=True)
                    if not warm:
                        taken[racer.name].append(found)
        finally:
            for racer in racers:
                racer.close()
    return show(taken["trl"], taken["ours"])


if __name__ == "__main__":
    sys.exit(main())
