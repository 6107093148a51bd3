"""Turn episodes into samples with advantages, and save them to a file when a step fails."""

from __future__ import annotations

import base64
import contextlib
import json
import pathlib
from collections.abc import Sequence

import numpy as np

from router_replay import wire
from router_replay.batch import Sample
from router_replay.errors import TrainError
from router_replay.rl.config import TrainConfig
from router_replay.rl.rollout.advantages import group_advantages
from router_replay.rl.rollout.player import Episode


def samples_of(episodes: Sequence[Episode], config: TrainConfig, with_routes: bool) -> tuple[list[Sample], list[int]]:
    """Return one sample per trajectory with the advantage of its episode, and the episode number of each sample."""
    rewards = [episode.reward for episode in episodes]
    advantages = group_advantages(rewards, [episode.group for episode in episodes], config.loss.kind)
    samples, numbers = [], []
    for episode, advantage in zip(episodes, advantages.tolist(), strict=True):
        for trajectory in episode.trajectories:
            routes = trajectory.routes if with_routes else None
            tokens, mask = trajectory.token_ids, trajectory.loss_mask
            samples.append(Sample(tokens, trajectory.logprobs, mask, routes, advantage, trajectory.versions))
            numbers.append(episode.number)
    return samples, numbers


def episode_figures(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the metrics of a step that depend on its episodes alone."""
    rewards = np.array([episode.reward for episode in episodes])
    groups = np.array([episode.group for episode in episodes])
    flat = [np.ptp(rewards[groups == group]) == 0 for group in np.unique(groups)]
    return {
        "reward": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "groups_without_signal": float(np.mean(flat)),
        "turns": float(np.mean([episode.turns for episode in episodes])),
        "response_length": float(np.mean([episode.sampled_tokens for episode in episodes])),
        "tokens": float(sum(len(trajectory) for episode in episodes for trajectory in episode.trajectories)),
    }


def save_episodes(episodes: Sequence[Episode], path: pathlib.Path) -> str:
    """Write the episodes to `path`. Return a text that says whether it worked.

    It does not raise for a full disk or for routes that are lost, because it runs while another error is handled and
    must not hide that error.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_episodes(episodes, path)
    except (OSError, TrainError) as error:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None) or error
        return f"the rollouts of the step could not be written to {path}: {reason}"
    return f"the rollouts of the step are in {path}"


def _write_episodes(episodes: Sequence[Episode], path: pathlib.Path) -> None:
    """Write one JSON object per trajectory; `routes` is base64 of router_replay.wire bytes."""
    with path.open("w", encoding="utf-8") as file:
        for episode in episodes:
            for trajectory in episode.trajectories:
                tokens = trajectory.token_ids
                rows = b"" if trajectory.routes is None else wire.encode(trajectory.routes.read(), codec="dense")
                line = {
                    "problem": episode.problem,
                    "group": episode.group,
                    "reward": episode.reward,
                    "done": episode.done,
                    "prompt": [int(token) for token in episode.prompt] if not len(tokens) else None,
                    "token_ids": tokens.tolist(),
                    "logprobs": trajectory.logprobs.tolist(),
                    "loss_mask": trajectory.loss_mask.astype(int).tolist(),
                    "routes": base64.b64encode(rows).decode(),
                }
                file.write(json.dumps(line) + "\n")
