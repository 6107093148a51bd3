"""Record the episodes of each step in a file of trajectories, and train on such a file again without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from router_replay.batch import Sample
from router_replay.errors import ConfigError, TrainError, WireError
from router_replay.recording import TrajectoryReader, TrajectoryRecord, TrajectoryWriter
from router_replay.rl.config import TrainConfig
from router_replay.rl.rollout.player import Episode
from router_replay.spec import RouterSpec


class TrajectoryRecorder:
    """Append the episodes of each step to `config.record`. Trajectories of `step` and later are written again.

    Raises ConfigError if the run is not `resumed` and the file holds trajectories already, or is something else.
    """

    def __init__(self, config: TrainConfig, step: int, resumed: bool) -> None:
        self._temperature = config.rollout.temperature
        try:
            self._writer = TrajectoryWriter(config.record, before_step=step if resumed else None)
            if not resumed and next(iter(TrajectoryReader(config.record)), None) is not None:
                self._writer.close()
                raise ConfigError(
                    f'record = "{config.record}" already holds trajectories, and this run starts anew: move the file '
                    "away, or set another one"
                )
        except (OSError, WireError) as error:
            raise ConfigError(f'record = "{config.record}" cannot be written to: {error}; set another file') from error

    def write(self, step: int, episodes: Sequence[Episode]) -> None:
        """Append the trajectories of `episodes`, those of the training step `step`."""
        records = [
            TrajectoryRecord(
                Sample.of(trajectory),
                step=step,
                group=episode.group,
                episode=episode.number,
                problem=episode.problem,
                reward=float(episode.reward),
                turns=episode.turns,
                done=episode.done,
                temperature=self._temperature,
            )
            for episode in episodes
            for trajectory in episode.trajectories
            if len(trajectory)
        ]
        try:
            self._writer.write(records)
        except OSError as error:
            raise TrainError(
                f"{self._writer.path}: the trajectories of step {step} could not be written: {error.strerror or error}"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class RecordedSteps:
    """Give the recorded steps of `config.rollout.replay_from` in their order.

    The whole file is read once at the start, so that a run does not end in the middle for what it holds.
    """

    def __init__(self, config: TrainConfig) -> None:
        source = config.rollout.replay_from
        self._place = f'rollout.replay_from = "{source}"'
        self._reader = TrajectoryReader(source)
        self._spec: RouterSpec | None = None
        self.has_routes = True
        self._steps: list[tuple[int, int]] = []
        try:
            self._look_through(config)
        except (OSError, WireError) as error:
            raise ConfigError(f"{self._place} cannot be read: {error}") from error
        if len(self._steps) < config.steps:
            raise ConfigError(
                f"{self._place} holds {len(self._steps)} steps, expected {config.steps}: set steps to "
                f"{len(self._steps)} or less"
            )

    def _look_through(self, config: TrainConfig) -> None:
        self._steps = list(self._reader.step_positions().items())
        for number, position in self._steps[: config.steps]:
            records = self._reader.step(number, position)
            episodes = len({record.episode for record in records})
            if episodes < config.optimizer.mini_batches:
                raise ConfigError(
                    f"{self._place}: step {number} has {episodes} episodes, fewer than optimizer.mini_batches = "
                    f"{config.optimizer.mini_batches}; lower it"
                )
            for record in records:
                self._check(record, config)

    def _check(self, record: TrajectoryRecord, config: TrainConfig) -> None:
        where = f"{self._place}: step {record.step}, episode {record.episode}"
        if record.temperature != config.rollout.temperature:
            raise ConfigError(
                f"{where} was sampled at temperature {record.temperature}, and rollout.temperature is "
                f"{config.rollout.temperature}: log-probs of two temperatures cannot be compared; set it to "
                f"{record.temperature}"
            )
        if record.routes is None or not record.routes.any_captured:
            self.has_routes = False
            if config.replay == "r3":
                raise ConfigError(
                    f'{where} has no routes, and replay = "r3" needs them: set replay = "r2" or "off", or record with '
                    "an engine that returns its experts"
                )
        if record.routes is not None:
            self._spec = self._spec or record.routes.spec

    def refuse_other_model(self, spec: RouterSpec) -> None:
        """Raise ConfigError if the trajectories are of another model than the policy, which has `spec`."""
        if self._spec is not None and self._spec != spec:
            raise ConfigError(
                f"{self._place} holds routes of a model with {self._spec}, but the policy has {spec}: give the "
                "trajectories of this model"
            )

    def episodes(self, step: int) -> list[Episode]:
        """Return the episodes of the recorded step number `step`, counted from 0."""
        found: dict[int, Episode] = {}
        for record in self._reader.step(*self._steps[step]):
            episode = found.setdefault(
                record.episode,
                Episode(
                    record.episode,
                    record.group,
                    record.problem,
                    None,
                    (),
                    [],
                    reward=record.reward,
                    turns=record.turns,
                    done=record.done,
                ),
            )
            episode.trajectories.append(record.sample)
        return list(found.values())
