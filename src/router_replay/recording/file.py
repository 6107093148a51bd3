"""Write and read a file of trajectories. docs/trajectory_files.md is its spec.

    with TrajectoryWriter("out/routes") as writer:
        writer.write([TrajectoryRecord(sample, step=0, group=0, episode=0, reward=1.0)])
    for record in TrajectoryReader("out/routes"):
        record.token_ids, record.routes, record.reward

A record reaches the operating system when `write` returns, so kill -9 loses none that was written.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Self

import msgspec
import numpy as np

from router_replay.batch import Sample
from router_replay.errors import RouterReplayError, WireError
from router_replay.framed_file import framed, read_frames
from router_replay.recording.sequence import Sequence
from router_replay.routes import Routes

MAGIC = b"router-replay trajectories 1\n"


class _Record(msgspec.Struct, frozen=True):
    step: int
    group: int
    episode: int
    problem: int
    reward: float
    turns: int
    done: bool
    temperature: float
    sequence: Sequence


@dataclasses.dataclass(frozen=True, eq=False)
class TrajectoryRecord:
    """Hold one trajectory with where it came from. `pack` takes it as a sample.

    `sample` is the sequence: tokens, log-probs, loss mask, versions and routes. `step` is the training step that used
    it. `group` and `episode` are numbers within the step: the episodes of a group have the same problem, and an
    episode has several records if its environment rewrote the history. `problem` is the number of the problem,
    `reward` that of the episode, and `turns` its number of turns. `done` says whether the environment ended it.
    `temperature` is that of the sampling, which the log-probs include.
    """

    sample: Sample
    step: int = 0
    group: int = 0
    episode: int = 0
    problem: int = 0
    reward: float = 0.0
    turns: int = 1
    done: bool = True
    temperature: float = 1.0

    @property
    def token_ids(self) -> np.ndarray:
        """The tokens of the sequence."""
        return self.sample.token_ids

    @property
    def logprobs(self) -> np.ndarray:
        """The engine's log-prob of each sampled token."""
        return self.sample.logprobs

    @property
    def loss_mask(self) -> np.ndarray:
        """True for each sampled token."""
        return self.sample.loss_mask

    @property
    def versions(self) -> np.ndarray | int:
        """The policy version that sampled each token."""
        return self.sample.versions

    @property
    def routes(self) -> Routes | None:
        """One row per token, or None. Its spec is that of the model."""
        return None if self.sample.routes is None else self.sample.routes.read()

    def __len__(self) -> int:
        return len(self.sample)


class TrajectoryWriter:
    """Append records to the file `path`, which is created if it does not exist.

    A record that a kill cut off is removed from its end. With `before_step`, all records from the first one of that
    step or a later one on are removed too, because a resumed run does these steps again. Raises WireError if the file
    is something else or damaged, and OSError if it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], before_step: int | None = None) -> None:
        self.path = pathlib.Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open("a+b")
        try:
            self._file.truncate(self._end(before_step))
            if not self._file.seek(0, os.SEEK_END):
                self._file.write(MAGIC)
                self._file.flush()
        except BaseException:
            self._file.close()
            raise

    def _end(self, before_step: int | None) -> int:
        """Return the position after the last record to keep."""
        self._file.seek(0)
        if MAGIC.startswith(self._file.read(len(MAGIC) + 1)) and self._file.tell() < len(MAGIC):
            return 0  # killed while the first line was written
        end = len(MAGIC)
        for after, record in _records(self._file, self.path):
            if before_step is not None and record.step >= before_step:
                break
            end = after
        return end

    def write(self, records: Iterable[TrajectoryRecord]) -> None:
        """Append `records`. Raises BatchError if the parts of one do not fit together, before any is written."""
        data = b"".join(framed(_encoded(record)) for record in records)
        self._file.write(data)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TrajectoryReader:
    """Read the records of the file `path` in order, as often as wanted. Damage raises WireError with the place."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = pathlib.Path(path)

    def __iter__(self) -> Iterator[TrajectoryRecord]:
        for _, record in self._read():
            yield record

    def step_positions(self) -> dict[int, int]:
        """Return the numbers of the training steps in the file, each with the position of its first record.

        All records are read and checked for it.
        """
        found: dict[int, int] = {}
        at = len(MAGIC)
        for after, record in self._read():
            found.setdefault(record.step, at)
            at = after
        return found

    def step(self, number: int, position: int | None = None) -> list[TrajectoryRecord]:
        """Return the records of the training step `number`, which follow each other in the file.

        `position` is the one that `step_positions` gave; without it, the file is read from its beginning.
        """
        found = []
        for _, record in self._read(position):
            if record.step == number:
                found.append(record)
            elif found:
                break
        return found

    def _read(self, position: int | None = None) -> Iterator[tuple[int, TrajectoryRecord]]:
        with self.path.open("rb") as file:
            for number, (after, one) in enumerate(_records(file, self.path, position)):
                try:
                    yield after, _decoded(one)
                except RouterReplayError as error:
                    raise _damaged(self.path, number, str(error)) from error


def _records(file: object, path: pathlib.Path, position: int | None = None) -> Iterator[tuple[int, _Record]]:
    frames = read_frames(file, MAGIC, lambda number, reason: _damaged(path, number, reason), position)  # type: ignore[arg-type]
    for number, (after, payload) in enumerate(frames):
        try:
            yield after, msgspec.msgpack.decode(payload, type=_Record)
        except msgspec.MsgspecError as error:
            raise _damaged(path, number, str(error)) from error


def _damaged(path: pathlib.Path, number: int, reason: str) -> WireError:
    return WireError(f"{path}: trajectory {number} cannot be read ({reason})")


def _encoded(record: TrajectoryRecord) -> bytes:
    return msgspec.msgpack.encode(
        _Record(
            int(record.step),
            int(record.group),
            int(record.episode),
            int(record.problem),
            float(record.reward),
            int(record.turns),
            bool(record.done),
            float(record.temperature),
            Sequence.of(record.sample),
        )
    )


def _decoded(one: _Record) -> TrajectoryRecord:
    try:
        sample = one.sequence.sample()
    except RouterReplayError:
        raise
    except ValueError as error:  # bytes that are no whole numbers
        raise WireError(str(error)) from error
    place = (one.step, one.group, one.episode, one.problem, one.reward, one.turns, one.done, one.temperature)
    return TrajectoryRecord(sample, *place)
