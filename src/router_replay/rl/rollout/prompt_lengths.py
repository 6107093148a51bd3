"""Find prompts that are too long at the start of a run, not in the step that uses them."""

from __future__ import annotations

from router_replay.errors import ConfigError
from router_replay.rl.config import TrainConfig
from router_replay.rl.environments import Task
from router_replay.rl.users_code import guarded

SHOWN = 5


def check_prompt_lengths(task: Task, config: TrainConfig) -> list[str]:
    """Raise a ConfigError that names the prompts that would end the run; return a note if some answers are cut."""
    limit, slots, answer = config.max_length, config.trainer.max_tokens, config.rollout.max_tokens
    multiple = config.trainer.ulysses  # a sequence is padded to it, so that it can be shared
    refused, cut = [], []
    with guarded(f"{type(task).__name__}.prompt_lengths", ConfigError):
        lengths = list(task.prompt_lengths())
    for place, length in lengths:
        longest = min(length + answer, limit)
        padded = -(-longest // multiple) * multiple
        if length >= limit:
            refused.append(
                f"{place}: the prompt has {length} tokens and leaves no room for an answer: engine.max_length is "
                f"{limit}; raise it, or remove the prompt"
            )
        elif padded > slots:
            refused.append(
                f"{place}: the prompt of {length} tokens and its answer can have {longest} tokens together"
                + (f" ({padded} when padded for trainer.ulysses = {multiple})" if padded > longest else "")
                + f", but one pass of the trainer takes {slots} (trainer.max_tokens); raise it, or lower "
                "rollout.max_tokens"
            )
        elif length + answer > limit:
            cut.append(place)
    if refused:
        more = [f"... and {len(refused) - SHOWN} more"] if len(refused) > SHOWN else []
        raise ConfigError("\n  ".join(["some prompts are too long", *refused[:SHOWN], *more]))
    if not cut:
        return []
    return [
        f"{len(cut)} prompts, such as {cut[0]}, leave room for less than rollout.max_tokens = {answer} tokens: "
        f"engine.max_length = {limit} cuts their answers; raise it to avoid this"
    ]
