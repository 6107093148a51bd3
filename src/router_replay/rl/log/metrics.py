"""The metrics of a training step: every name with its meaning, and the files that the numbers go to.

with MetricsWriter(folder, config.logging, config.model_dump(mode="json")) as writer:
    writer.write(0, {"reward": 0.31, "mismatch/k3": 1.9e-3})
read_metrics(folder)  # [{"step": 0, "reward": 0.31, "mismatch/k3": 0.0019}]
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import json
import math
import numbers
import os
import pathlib
import secrets
import types
from collections.abc import Iterable, Mapping
from typing import Any, Self

from router_replay.errors import ConfigError, MeasureError, TrainError
from router_replay.rl.config import LoggingConfig
from router_replay.run_files import CONFIG_FILE, METRICS_FILE, PER_LAYER, read_lines, read_metrics

__all__ = ["NAMES", "MetricsWriter", "read_metrics"]

NAMES: dict[str, str] = {
    "reward": "mean reward of the step's episodes",
    "reward/std": "standard deviation of the reward over the step's episodes",
    "groups_without_signal": "share of groups whose episodes all got the same reward: nothing is learned from them",
    "response_length": "mean number of sampled tokens per episode",
    "turns": "mean number of turns per episode",
    "mismatch/k1": "KL(engine to trainer) as the mean of rollout - old log-prob; may be negative",
    "mismatch/k3": "the same KL as the mean of exp(d) - 1 - d with d = old - rollout log-prob; never negative",
    "mismatch/abs_mean": "mean absolute difference between old and rollout log-prob",
    "mismatch/abs_max": "largest absolute difference between old and rollout log-prob",
    "mismatch/extreme_tau2": "share of tokens whose old and rollout probabilities are more than a factor 2 apart",
    "routes/agreement": "share of (token, layer) pairs in which the trainer's own router would choose the engine's set",
    "routes/agreement_worst": "the same share in the layer in which it is smallest",
    "routes/agreement_worst_layer": "the id of that layer",
    "routes/agreement/layers": "the same share in each routed layer: a list, in the order of routing/layers",
    "routes/layers_out_of_line": "layers whose agreement is out of line with their neighbours'; 0 if all is well",
    "routes/replayed": "rows that were replayed, over all of the step's passes",
    "routes/live": "rows that the trainer's own router decided, over all of the step's passes",
    "routing/load": "load of the busiest expert over the mean load of a layer, mean over layers; 1 if even",
    "routing/load_worst": "the same in the layer in which it is largest",
    "routing/load_worst_layer": "the id of that layer",
    "routing/confidence": "mass that a router gives to the experts that the pass used, mean over tokens and layers",
    "routing/entropy": "entropy of a router's distribution over all experts in nats, mean over tokens and layers",
    "routing/load/layers": "routing/load of each routed layer: a list, in the order of routing/layers",
    "routing/confidence/layers": "routing/confidence of each routed layer: a list",
    "routing/entropy/layers": "routing/entropy of each routed layer: a list",
    "routing/layers": "the ids of the routed layers: a list; the id of a layer with two routers stands twice",
    "loss": "mean loss over the step's mini-batches",
    "reference_kl": "KL to the reference model (k3), without the factor reference.kl; only with a reference model",
    "ppo_kl": "mean of old - new log-prob over the mini-batches: how far the step moved the policy",
    "clip_fraction": "share of tokens whose probability ratio was clipped and that gave no gradient",
    "truncated_fraction": "share of tokens whose weight old / rollout was cut; only with loss.truncated_importance",
    "entropy": "mean of -log-prob of the sampled tokens, in nats: an estimate of the policy's entropy",
    "grad_norm": "norm of the gradient before clipping, mean over the mini-batches",
    "lr": "learning rate of the step's last update",
    "tokens": "tokens in the step's batch, prompts included",
    "tokens_per_second": "tokens divided by seconds/step",
    "trainer/tokens_per_second": "tokens divided by the seconds of score and update: the speed of the trainer alone",
    "trainer/tflops": "operations of score and update per second on one device, in 10^12, as the model needs them",
    "trainer/peak_share": "trainer/tflops as a share of the device's bfloat16 peak; only if the peak is known",
    "memory/peak_gib": "most memory in GiB: of the first GPU in the step; on a CPU, of the process since its start",
    "version": "policy version that the engine samples with after the step",
    "seconds/rollout": "time to sample all episodes, without seconds/reward; asynchronous: time to wait for episodes",
    "seconds/reward": "time in the environments and reward functions; asynchronous: over all threads, beside the rest",
    "seconds/score": "time of the old-policy (and reference) log-prob passes",
    "seconds/update": "time of forward, backward and optimizer over all mini-batches",
    "seconds/sync": "time to get the new weights into the engine",
    "seconds/evaluation": "time that the step waited for an evaluation, if there was one",
    "seconds/checkpoint": "time of the checkpoint that was written just before this step, if there was one",
    "seconds/step": "time of the whole step",
    "sync/share_of_step": "seconds/sync divided by seconds/step",
    "sync/cuda_ipc": "share of the engines that get new weights by CUDA IPC: through memory of the trainer's GPU",
    "async/trainer_idle": 'share of the step in which the trainer waited for episodes; async/ is for loop = "async"',
    "async/engine_idle": "share of the step in which the engine had no request",
    "async/staleness_mean": "mean age of the trained tokens: version being updated minus version of the token",
    "async/staleness_max": "largest age of a trained token",
    "async/versions_per_sample": "mean number of policy versions that sampled a trained sequence",
    "async/queue_seconds": "mean time that the step's groups waited for the trainer",
    "async/ready": "groups that wait for the trainer after the step",
    "async/tokens_wasted": "sampled tokens of episodes that were dropped",
    "async/tokens_resumed": "sampled tokens of answers that new weights interrupted and that were continued",
    "evaluation/version": "policy version of the newest evaluation that ended in the step; all its tokens are of it",
    "evaluation/reward": "mean reward of its episodes, on problems that are not trained",
    "evaluation/reward_std": "standard deviation of the reward over its episodes",
    "evaluation/response_length": "mean number of sampled tokens per episode of the evaluation",
    "evaluation/turns": "mean number of turns per episode of the evaluation",
    "evaluation/episodes": "episodes of the evaluation",
    "evaluation/seconds": "time from its start to its end; asynchronous: beside the training",
    "evaluation/waited": "asynchronous: time that new weights waited for the evaluation; part of seconds/sync",
    "episodes/admitted": "episodes started since the start of the run; it is the sum of the other episodes/ values",
    "episodes/trained": "episodes trained since the start of the run",
    "episodes/saved": "finished episodes that wait to be trained; they are in the journal",
    "episodes/playing": "episodes in progress",
    "episodes/dropped_stale": "episodes dropped since the start of the run because they were too old",
    "episodes/dropped_no_signal": "episodes dropped because their group had equal rewards",
    "episodes/dropped_interrupted": "episodes that the end of a process interrupted; their groups are played again",
    "episodes/dropped_environment": "episodes of groups of which an environment was lost with its process",
}


class MetricsWriter:
    """Write metrics.jsonl in `folder`, and also to TensorBoard and wandb if `logging` asks for them.

    `config` is written to config.json, which the report reads. `done` is the number of finished steps: lines of later
    steps are dropped from the file, because these steps run again. The attribute `sinks` names the outputs in use.
    """

    def __init__(self, folder: pathlib.Path, logging: LoggingConfig, config: Mapping[str, Any], done: int = 0) -> None:
        wandb = _wandb() if logging.wandb else None  # refused before anything is written
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / METRICS_FILE
        settings = json.dumps(config, indent=2, default=str)
        _replace(folder / CONFIG_FILE, settings + "\n")
        kept = [line for line in read_lines(folder) if line["step"] < done] if self._path.exists() else []
        _replace(self._path, "".join(_line(values) for values in kept))
        self._last_step = kept[-1]["step"] if kept else -1
        self._file = self._path.open("a", encoding="utf-8")
        self._tensorboard = _tensorboard(folder, done) if logging.tensorboard else None
        self._wandb = _wandb_run(wandb, folder, logging.project, json.loads(settings)) if wandb else None
        beside = {"tensorboard": self._tensorboard, "wandb": self._wandb}
        self.sinks: tuple[str, ...] = ("jsonl", *(name for name, sink in beside.items() if sink is not None))

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Write the `values` of one `step` by name: numbers, and lists of numbers under a name that ends with /layers.

        A number that is not finite is written as null, since JSON has no NaN. Lists go to metrics.jsonl only.
        """
        _check_names(values)
        if step <= self._last_step:
            raise MeasureError(
                f"step {step} cannot follow step {self._last_step} in {self._path}: write each step once, in order"
            )
        line = {"step": step, **{name: _value(name, value) for name, value in values.items()}}
        try:
            self._file.write(_line(line))
            self._file.flush()  # one short write: after a kill the line is complete or cut, never mixed with another
        except OSError as error:
            raise TrainError(f"{self._path}: the line of step {step} could not be written: {error.strerror}") from error
        self._last_step = step
        numbers_only = {name: value for name, value in line.items() if not name.endswith(PER_LAYER)}
        finite = {name: value for name, value in numbers_only.items() if name != "step" and value is not None}
        if self._tensorboard is not None:
            for name, value in finite.items():
                self._tensorboard.add_scalar(name, value, step)
            self._tensorboard.flush()
        if self._wandb is not None:
            self._wandb.log(finite, step=step)

    def close(self) -> None:
        """Close the file and the other sinks."""
        with contextlib.suppress(OSError):  # a line that could not be written has raised its error before
            self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, n=1)
            hint = f"write {near[0]!r} if you mean that, or " if near else ""
            raise MeasureError(
                f"{name!r} is not a documented metric: {hint}add it to NAMES in router_replay/rl/log/metrics.py first"
            )


def _value(name: str, value: Any) -> float | list[float | None] | None:
    return [_plain(one) for one in value] if name.endswith(PER_LAYER) else _plain(value)


def _plain(value: Any) -> float | None:
    """Return a Python number from a NumPy or torch scalar; None if it is not finite."""
    if isinstance(value, numbers.Integral):
        return int(value)
    value = float(value)
    return value if math.isfinite(value) else None


def _line(values: Mapping[str, Any]) -> str:
    return json.dumps(values, allow_nan=False) + "\n"


def _replace(path: pathlib.Path, text: str) -> None:
    """Write to a new file and rename it, so that a kill leaves either the old file or the new one."""
    beside = path.with_name(path.name + ".new")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise TrainError(f"{path} could not be written: {error.strerror}") from error


def _tensorboard(folder: pathlib.Path, done: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(log_dir=str(folder / "tensorboard"), purge_step=done)


def _wandb() -> types.ModuleType:
    try:
        return importlib.import_module("wandb")
    except ImportError as error:
        raise ConfigError(
            "logging.wandb is on, but wandb is not installed: run `pip install wandb`, or set logging.wandb=false"
        ) from error


def _wandb_run(wandb: types.ModuleType, folder: pathlib.Path, project: str, config: dict[str, Any]) -> Any:
    """Start a wandb run. The folder keeps its id, so that a resumed run continues the same curves."""
    id_file = folder / "wandb_id.txt"
    if not id_file.exists():
        _replace(id_file, secrets.token_hex(8))
    name = folder.resolve().name
    run_id = id_file.read_text().strip()
    return wandb.init(project=project, name=name, id=run_id, resume="allow", dir=str(folder), config=config)
