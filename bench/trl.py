"""Race a step of our trainer against one of TRL's GRPOTrainer with our replay: same model, engine and settings.

    make bench-trl                       # or: .venv-trl/bin/python -m bench.trl --rounds 15
    python -m bench.trl --size gpu --device cuda --rounds 10           # 446M parameters, on one GPU
    python -m bench.trl --size check --rounds 2                        # a check that all of this runs, on the CPU

Both train the tiny model with R3 on the same additions: 64 prompts x 8 samples of at most 8 tokens, four updates, an
old-policy pass, truncated importance sampling, AdamW with the same settings, and an embedded engine in bfloat16 beside
a float32 policy. Each trainer is a process of its own. In each round both run one step, one after the other, in
alternating order; the one that does not run waits. Ratios are medians over rounds of the ratio within a round, with a
bootstrap interval. The verdict is on CPU seconds, which depend less on other load than the wall time does. The table
shows in which phases our step takes longer. Beside a GPU, CPU seconds say nothing: with `--device cuda` the verdict and
the phases are in wall seconds, and every phase waits for the GPU where it begins and where it ends. TRL clips gradients
and steps its optimizer between its phases, so that these stand under "all else"; ours are in the update.

`--size gpu` trains the model of `router-replay make-model --size gpu` with random weights (16 layers, 8 of 64 experts):
64 prompts x 8 samples of at most 64 tokens, all in one batch of the engine. Answers should have about 25 tokens. Such a
model never answers right, so `bench/even_sums.py` rewards the token ids, for both trainers. No group is dropped on
either side. Samples differ between the two, and with them the tokens of a step: the table has both.

With `--dtype float32`, the default, both compute the same: float32 weights, float32 passes without TF32, and a float32
AdamW. Mixed precision is not the same computation in both: TRL's is autocast, and transformers' experts are not part of
it, so that they would stay in float32. With `--dtype bfloat16` the passes of both are in bfloat16, but TRL then has
weights, gradients and moments in bfloat16, while ours keeps float32 ones beside its bfloat16 copies: TRL's optimizer
has less to do and needs less memory.

Each trainer attends as it does by default: ours packs sequences without padding (torch's varlen kernel in bfloat16 on a
GPU, elsewhere groups of sequences of near lengths), TRL pads them and uses sdpa. Neither checkpoints gradients, and an
update is one pass in both.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
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

from bench.even_sums import even_sum
from bench.train_gpu import make_model
from bench.train_step import MARK
from bench.verdicts import LEAST_ROUNDS, Share

GOAL = 0.9
HERE = pathlib.Path(__file__).resolve().parent.parent
PHASES = ("rollout", "reward", "score", "update", "sync")


@dataclasses.dataclass(frozen=True)
class Size:
    """Hold what a step of both trainers has to do."""

    prompts: int = 64
    group: int = 8
    tokens: int = 8
    updates: int = 4
    rate: float = 5e-5
    max_length: int = 64
    max_batch: int = 64
    """The samples that the engine decodes together."""
    bin_tokens: int = 8192
    """The most tokens of a packed pass of our trainer."""
    vocabulary: int = 0
    """Of a model with random weights that is made for the race, which is the tokenizer's; 0: the tiny model."""


SIZES = {
    "tiny": Size(),
    "gpu": Size(tokens=64, rate=1e-6, max_length=128, max_batch=512, bin_tokens=16384, vocabulary=22),
    "check": Size(prompts=8, group=4, tokens=16, rate=1e-6, max_batch=32, vocabulary=22),
}


def unit(device: str) -> str:
    """Return what stands behind the name of a phase: how its seconds were taken."""
    return "" if device == "cuda" else ", CPU"


# -- the workers: one process for each trainer -------------------------------------------------------------------------


class Turns:
    """Waits before every step, and tells what the step took: in all, and in each phase."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._now = time.perf_counter if device == "cuda" else time.process_time
        self._wall = self._cpu = 0.0
        self._phases: dict[str, float] = {}
        self._open: list[str] = []

    def wait(self) -> None:
        if not sys.stdin.readline():
            sys.exit("the bench has ended")
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def rest(self) -> None:
        """Wait for the end of the race, so that what follows the last step takes nothing from the other's step."""
        sys.stdin.read()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the seconds of the block to a phase; a phase inside of another one counts for itself only."""
        self._synchronize()
        started = self._now()
        self._open.append(name)
        try:
            yield
        finally:
            self._synchronize()
            self._open.pop()
            taken = self._now() - started
            self._phases[name] = self._phases.get(name, 0.0) + taken
            if self._open:
                self._phases[self._open[-1]] = self._phases.get(self._open[-1], 0.0) - taken

    def tell(self, tokens: float, k3: float) -> None:
        self._synchronize()
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        kind, whole = unit(self._device), wall if self._device == "cuda" else cpu
        phases = {name + kind: self._phases[name] for name in PHASES}
        found = {"step": wall, "step, CPU": cpu, **phases, f"all else{kind}": whole - sum(phases.values())}
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


def run_ours(arguments: argparse.Namespace, size: Size) -> None:
    from router_replay.rl.config import load_config
    from router_replay.rl.log import metrics
    from router_replay.rl.loop import phases
    from router_replay.rl.loop.train import train

    steps, device = arguments.steps, arguments.device
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
        else:
            turns.rest()

    phases.Phases.phase = measured  # type: ignore[method-assign]
    metrics.MetricsWriter.write = write_and_wait  # type: ignore[method-assign,assignment]
    made = [f'model.path="{arguments.model}"', "environment.kind=bench.even_sums:EvenSums", "checkpoint.every=0"]
    turns.wait()
    train(
        load_config(
            None,
            [
                "replay=r3", f"steps={steps}", f'output="{arguments.output}"', f"model.device={device}",
                f"model.dtype={arguments.dtype}", "engine.kind=embedded", "engine.dtype=bfloat16",
                f"engine.max_length={size.max_length}",
                f'engine.arguments={{device_map="{device}", max_batch={size.max_batch}}}',
                f"rollout.prompts={size.prompts}", f"rollout.group={size.group}", f"rollout.max_tokens={size.tokens}",
                f"optimizer.lr={size.rate}", f"optimizer.mini_batches={size.updates}",
                f"trainer.max_tokens={size.bin_tokens}", "loss.truncated_importance=2.0", "logging.tensorboard=false",
                *(made if size.vocabulary else ()),
            ],
        )
    )  # fmt: skip


def run_trl(arguments: argparse.Namespace, size: Size) -> None:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig

    from router_replay.engines import EmbeddedEngine
    from router_replay.integrations.trl import RouterReplayGRPOTrainer
    from router_replay.rl.config import tiny_folder
    from router_replay.rl.environments.problems import operands

    steps, device = arguments.steps, arguments.device
    folder, turns = str(arguments.model or tiny_folder()), Turns(device)

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

    def even(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [even_sum(ids) for ids in completion_ids]

    tokenizer = AutoTokenizer.from_pretrained(folder)
    questions = ["{}+{}=".format(*operands(0, number, 2, 2)) for number in range(size.prompts * steps)]
    made = Measured(
        model=folder, reward_funcs=even if size.vocabulary else right,
        train_dataset=Dataset.from_dict({"prompt": questions}), processing_class=tokenizer, replay="r3",
        engine=lambda: EmbeddedEngine(
            folder, dtype=torch.bfloat16, max_length=size.max_length, max_batch=size.max_batch, device_map=device
        ),
        args=GRPOConfig(
            output_dir=arguments.output, max_steps=size.updates * steps, logging_steps=size.updates,
            per_device_train_batch_size=size.prompts * size.group // size.updates, steps_per_generation=size.updates,
            gradient_accumulation_steps=1, num_generations=size.group, max_completion_length=size.tokens,
            learning_rate=size.rate, shuffle_dataset=False,
            lr_scheduler_type="constant", adam_beta2=0.95, weight_decay=0.0, max_grad_norm=1.0, epsilon=0.2,
            epsilon_high=0.28, loss_type="bnpo", vllm_importance_sampling_mode="token_truncate",
            vllm_importance_sampling_clip_max=2.0, router_aux_loss_coef=0.0, gradient_checkpointing=False,
            model_init_kwargs={"dtype": arguments.dtype}, bf16=False, use_cpu=device == "cpu", report_to="none",
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
    turns.rest()
    made.close()


# -- the race ----------------------------------------------------------------------------------------------------------


class Racer:
    """A process that trains with one of the trainers, step by step."""

    def __init__(self, name: str, arguments: argparse.Namespace, steps: int, root: pathlib.Path) -> None:
        self.name = name
        self._log = root / f"{name}.log"
        settings = ["--steps", str(steps), "--device", arguments.device, "--output", str(root / name)]
        settings += ["--size", arguments.size, "--dtype", arguments.dtype]
        if SIZES[arguments.size].vocabulary:
            settings += ["--model", str(root / "model")]
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


def show(trl: list[dict[str, float]], ours: list[dict[str, float]], device: str) -> int:
    """Print the table and the verdict; return 1 if the goal is missed."""
    print(f"\nA step of R3, {statistics.median(one['tokens'] for one in ours):,.0f} tokens, {len(ours)} rounds\n")
    print("| part | TRL | ours | ours / TRL |\n| --- | ---: | ---: | ---: |")
    whole, lost = f"step{unit(device)}", []
    judged = [whole, *(name + unit(device) for name in (*PHASES, "all else"))]
    for part in dict.fromkeys(["step", "step, CPU", *judged, "peak memory, MiB"]):
        theirs, mine = ([max(1e-9, one[part]) for one in rounds] for rounds in (trl, ours))
        share = Share.of(mine, theirs)
        print(f"| {part} | {statistics.median(theirs):.3f} | {statistics.median(mine):.3f} | {share}x |")
        if part in judged and statistics.median(mine) - statistics.median(theirs) > 0.01:
            lost.append(f"{part} ({statistics.median(mine):.2f} s against {statistics.median(theirs):.2f} s)")
    tokens = [statistics.median(one["tokens"] for one in rounds) for rounds in (trl, ours)]
    print(f"| tokens | {tokens[0]:,.0f} | {tokens[1]:,.0f} | {tokens[1] / tokens[0]:.3f}x |")
    speeds = [statistics.median(one["tokens"] / one["step"] for one in rounds) for rounds in (trl, ours)]
    print(f"| tokens/s | {speeds[0]:,.0f} | {speeds[1]:,.0f} | {speeds[1] / speeds[0]:.3f}x |")
    k3 = [statistics.median(one["k3"] for one in rounds) for rounds in (trl, ours)]
    print(f"| mismatch/k3 | {k3[0]:.2e} | {k3[1]:.2e} | |")
    print(f"\nwe lose in: {', '.join(lost) or 'nothing'}")
    share = Share.of([one[whole] for one in ours], [one[whole] for one in trl])
    if len(ours) < LEAST_ROUNDS:
        verdict = f"no verdict: {len(ours)} rounds, at least {LEAST_ROUNDS} are needed"
    elif share.high <= GOAL:
        verdict = "kept"
    else:
        verdict = "MISSED" if share.low > GOAL else "no verdict: the goal lies in the interval. Run more rounds"
    kind = "wall" if device == "cuda" else "CPU"
    print(f"our step takes {share}x of the {kind} seconds of TRL's (goal {GOAL}x): {verdict}")
    return int(verdict == "MISSED")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny", help="check: --size gpu with a tiny model, as a test")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of both policies' passes")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=2, help="rounds before; the first one starts the engines")
    parser.add_argument("--threads", type=int, default=2, help="threads of torch in each trainer")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--worker", choices=["ours", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--output", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        run = run_ours if arguments.worker == "ours" else run_trl
        run(arguments, SIZES[arguments.size])
        return 0
    steps = arguments.warm_up + arguments.rounds
    taken: dict[str, list[dict[str, float]]] = {"trl": [], "ours": []}
    with tempfile.TemporaryDirectory() as temporary:
        if vocabulary := SIZES[arguments.size].vocabulary:
            _, parameters = make_model(pathlib.Path(temporary, "model"), arguments.size != "gpu", vocabulary)
            print(f"{parameters / 1e6:.0f}M parameters, {arguments.dtype}, {arguments.device}", flush=True)
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
            return show(taken["trl"], taken["ours"], arguments.device)
        finally:
            for racer in racers:
                racer.close()


if __name__ == "__main__":
    sys.exit(main())
