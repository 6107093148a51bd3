"""Train the model of `router-replay make-model`, supervised, until its answers are right more often than not.

    folder = make_model("models/mine", size="tiny", progress=show)

A finished folder of the same recipe is returned at once. An unfinished run keeps its state beside the folder, so that
a killed run can continue. The folder itself gets its name when it is complete.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator

import torch

from router_replay.errors import ConfigError, TrainError
from router_replay.recipes.tiny.data import Examples, examples_of
from router_replay.recipes.tiny.model import (
    REVISION,
    STAMP,
    Recipe,
    Size,
    is_made,
    make_config,
    make_tokenizer,
    read_stamp,
    recipe_for,
)


@dataclasses.dataclass(frozen=True)
class Progress:
    """Report one step of the warm start.

    `additions` and `calculations` are accuracies: the mean probability that a sampled episode is right. It is the
    product of the probabilities of the tokens that the model must write, so nothing is sampled.
    """

    step: int
    steps: int
    loss: float
    additions: float
    calculations: float


def make_model(
    folder: str | os.PathLike[str],
    size: Size = "tiny",
    *,
    steps: int | None = None,
    digits: int | None = None,
    seed: int | None = None,
    device: str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> pathlib.Path:
    """Make the model of a size in `folder`, or continue an interrupted run, and return the folder.

    `steps`, `digits` and `seed` change the recipe. `device` is a GPU by default, if there is one. `progress` is called
    after each step.
    """
    folder = pathlib.Path(folder)
    return make_from_recipe(folder, recipe_for(size, steps=steps, digits=digits, seed=seed), device, progress)


def make_from_recipe(
    folder: pathlib.Path,
    recipe: Recipe,
    device: str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> pathlib.Path:
    """Make the model of a recipe in `folder`, or continue an interrupted run, and return the folder.

    A finished model of the same recipe is kept. Raise ConfigError if the folder holds anything else.
    """
    unfinished = folder.with_name(folder.name + ".unfinished")
    with _one_at_a_time(folder.parent):
        if not is_made(folder, recipe):
            _refuse_occupied(folder)
            unfinished.mkdir(exist_ok=True)
            _write(_trained(recipe, device, unfinished / "state.pt", progress), unfinished / "model")
            os.rename(unfinished / "model", folder)
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _trained(
    recipe: Recipe, device: str | None, state: pathlib.Path, progress: Callable[[Progress], None] | None
) -> WarmStart:
    run = WarmStart(recipe, device)
    run.load(state)
    while not run.finished:
        report = run.step()
        if progress is not None:
            progress(report)
        if run.steps_done % recipe.save_every == 0:
            run.save(state)
    return run


class WarmStart:
    """Train the model of a recipe. Weights are float32; on a GPU the forward pass computes in bfloat16."""

    def __init__(self, recipe: Recipe, device: str | None = None) -> None:
        from transformers import Qwen3MoeForCausalLM

        self.recipe = recipe
        self.device = _device(device)
        self.steps_done = 0
        self.recent: list[tuple[float, float]] = []
        """Accuracies of the last steps: additions, calculations."""
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            self.model = Qwen3MoeForCausalLM(make_config(recipe)).to(self.device).train()
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(self._optimizer, self._rate)

    @property
    def finished(self) -> bool:
        """Return whether the target accuracy or the maximum number of steps is reached."""
        full = len(self.recent) == self.recipe.window
        return self.steps_done >= self.recipe.steps or (full and self.accuracy[0] >= self.recipe.target)

    @property
    def accuracy(self) -> tuple[float, float]:
        """Return the accuracy of additions and of calculations, averaged over the last steps."""
        additions, calculations = zip(*self.recent, strict=True)
        return sum(additions) / len(additions), sum(calculations) / len(calculations)

    def step(self) -> Progress:
        """Make one optimizer step; raise TrainError if the loss is not a number."""
        self._optimizer.zero_grad()
        kinds = examples_of(self.recipe, self.steps_done)
        own_tokens = sum(int(examples.own.sum()) for examples in kinds)
        parts = [self._learn(examples, int(examples.own.sum()) / own_tokens) for examples in kinds]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.max_grad_norm)
        self._optimizer.step()
        self._schedule.step()
        self.steps_done += 1
        loss = sum(loss for loss, _ in parts)
        if loss != loss:
            raise TrainError(f"the loss of step {self.steps_done} is not a number; a smaller learning rate may help")
        self.recent = [*self.recent, (parts[0][1], parts[1][1])][-self.recipe.window :]
        return Progress(self.steps_done, self.recipe.steps, loss, *self.accuracy)

    def _learn(self, examples: Examples, share: float) -> tuple[float, float]:
        """Add the gradients of one kind of examples; return its part of the loss and how often it would be right.

        Each kind has a pass of its own, because the lengths differ. `share` is this kind's share of the step's tokens
        that bear loss.
        """
        logprobs, aux_loss = self._forward(examples)
        loss = share * (-logprobs.sum() / int(examples.own.sum()) + self.recipe.aux_loss * aux_loss)
        loss.backward()
        return float(loss.detach()), _right(logprobs.detach())

    def _forward(self, examples: Examples) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-probs [examples, tokens - 1] of the model's own tokens, 0 elsewhere, and the aux loss."""
        # Not autocast, because it does not cast the product over all experts.
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        weights = {name: weight.to(dtype) for name, weight in self.model.named_parameters()}
        token_ids = torch.from_numpy(examples.token_ids).to(self.device)
        inputs = {
            "input_ids": token_ids,
            "attention_mask": (token_ids != self.model.config.pad_token_id).long(),
            "output_router_logits": True,
            "use_cache": False,
        }
        output = torch.func.functional_call(self.model, weights, kwargs=inputs)
        logprobs = output.logits[:, :-1].float().log_softmax(-1).gather(-1, token_ids[:, 1:, None])[..., 0]
        own = torch.from_numpy(examples.own).to(self.device)[:, 1:]
        return torch.where(own, logprobs, 0.0), output.aux_loss

    def measured(self) -> tuple[float, float]:
        """Return how often additions and calculations are right, on examples that were not trained on."""
        unseen = [examples_of(self.recipe, self.recipe.steps + number) for number in range(4)]
        with torch.no_grad():
            right = [[_right(self._forward(examples)[0]) for examples in kinds] for kinds in zip(*unseen, strict=True)]
        additions, calculations = (sum(values) / len(values) for values in right)
        return additions, calculations

    def _rate(self, step: int) -> float:
        """Return the factor of the learning rate: it rises over the warm-up and falls to 0 along a cosine."""
        warmup, steps = self.recipe.warmup, self.recipe.steps
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 + 0.5 * float(torch.cos(torch.tensor(torch.pi * (step - warmup) / max(1, steps - warmup))))

    def save(self, file: pathlib.Path) -> None:
        """Write the state to `file`; after a kill the file is the old one or the new one, never a part."""
        state = {
            "digest": self.recipe.digest,
            "steps_done": self.steps_done,
            "recent": self.recent,
            "model": self.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }
        beside = file.with_suffix(".new")
        try:
            torch.save(state, beside)
            os.replace(beside, file)
        except Exception as error:  # torch reports a full disk with its own type
            beside.unlink(missing_ok=True)
            reason = str(error).strip().partition("\n")[0]
            raise TrainError(f"{file} could not be written: {reason}; make room and run the command again") from error

    def load(self, file: pathlib.Path) -> None:
        """Continue from a saved state of the same recipe, if there is one."""
        if not file.exists():
            return
        try:
            state = torch.load(file, map_location=self.device, weights_only=True)
            if state["digest"] != self.recipe.digest:
                return
            self.model.load_state_dict(state["model"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._schedule.load_state_dict(state["schedule"])
            self.steps_done, self.recent = state["steps_done"], state["recent"]
        except Exception as error:  # a damaged file fails in torch, pickle or zipfile, each with its own error
            reason = str(error).strip().partition("\n")[0]
            raise TrainError(f"{file} cannot be read: it is damaged ({reason}); remove it to start over") from error


def _right(logprobs: torch.Tensor) -> float:
    return float(logprobs.sum(-1).exp().mean())


@contextlib.contextmanager
def _one_at_a_time(parent: pathlib.Path) -> Iterator[None]:
    """Hold a lock on the folder, so that other processes that make the same model wait for this one.

    The lock ends with the process.
    """
    parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _no_bar() -> Iterator[None]:
    """Hide the progress bar of transformers, which would break ours."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _device(name: str | None) -> torch.device:
    cuda = torch.cuda.is_available()
    try:
        device = torch.device(name or ("cuda" if cuda else "cpu"))
    except RuntimeError as error:
        raise ConfigError(f"device must be cpu or cuda, got {name!r}") from error
    if device.type == "cuda" and not cuda:
        raise ConfigError("device is cuda, but torch finds no GPU on this machine: use cpu, or leave it out")
    return device


def _refuse_occupied(folder: pathlib.Path) -> None:
    if not folder.exists():
        return
    stamp = read_stamp(folder)
    what = "something else" if stamp is None else f"the model of another recipe ({stamp['digest'][:12]})"
    raise ConfigError(f"{folder} already holds {what}: choose another folder, or remove it first")


def _write(run: WarmStart, folder: pathlib.Path) -> None:
    """Write the folder of a finished model: weights, tokenizer and stamp."""
    shutil.rmtree(folder, ignore_errors=True)  # what a run left that was killed here
    run.model.to(torch.bfloat16)
    with _no_bar():
        run.model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    additions, calculations = run.measured()
    stamp = {
        "digest": run.recipe.digest,
        "revision": REVISION,
        "recipe": dataclasses.asdict(run.recipe),
        "steps_done": run.steps_done,
        "additions_right": round(additions, 3),
        "calculations_right": round(calculations, 3),
    }
    (folder / STAMP).write_text(json.dumps(stamp, indent=2) + "\n")
