"""Keep every finished episode on disk until it is trained, so that no kill loses one.

    journal.begin(step=10, episodes=untrained)   # before the checkpoint of step 10 is put in place
    journal.add(episode)                         # as soon as an episode has finished

A segment, `journal/step_000010.bin`, starts with the episodes that were finished and not trained at its checkpoint, and
goes on with those that finished later. `read` returns the episodes of a checkpoint's segment and of all later ones.

The framing is that of `framed_file.py`, with an episode in msgpack as the payload of a record. An episode reaches the
operating system when `add` returns, so a killed process loses none. A power failure can lose what finished since the
last checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import msgspec
import numpy as np

from router_replay.batch import Sample
from router_replay.errors import RouterReplayError, TrainError
from router_replay.framed_file import framed, read_frames
from router_replay.recording.sequence import Sequence
from router_replay.rl.rollout.player import Episode, Keep
from router_replay.spec import RouterSpec

FOLDER = "journal"
MAGIC = b"router-replay journal 1\n"


class _Record(msgspec.Struct, frozen=True, array_like=True):
    group: int
    member: int
    size: int  # episodes of the group
    problem: int
    reward: float
    turns: int
    done: bool
    sequences: list[Sequence]


class Journal:
    """Write the journal of the run in the folder `output`. `begin` must be called before `add`."""

    def __init__(self, output: pathlib.Path) -> None:
        self._folder = output / FOLDER
        self._file: BinaryIO | None = None

    def begin(self, step: int, episodes: Iterable[tuple[int, int, Episode]]) -> None:
        """Start the segment of `step` with these episodes, each with its member number and the size of its group.

        The segment appears under its name when it is complete.
        """
        final = self._folder / _name(step)
        beside = final.with_suffix(".new")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            file = beside.open("wb")
            file.write(MAGIC)
            for member, size, episode in episodes:
                file.write(framed(_encoded(episode, member, size)))
            file.flush()
            os.fsync(file.fileno())
            beside.replace(final)
        except OSError as error:
            raise TrainError(f"{final} could not be written: {error.strerror or error}") from error
        self.close()
        self._file = file

    def add(self, episode: Episode, member: int, size: int) -> None:
        """Append a finished episode, `member` of a group of `size` episodes."""
        assert self._file is not None, "begin comes first"
        try:
            self._file.write(framed(_encoded(episode, member, size)))
            self._file.flush()
        except OSError as error:
            raise TrainError(
                f"{self._file.name}: an episode could not be written: {error.strerror or error}"
            ) from error

    def prune(self, oldest: int) -> None:
        """Remove the segments before step `oldest`, that of the oldest checkpoint on disk."""
        for step, path in _segments(self._folder):
            if step < oldest:
                path.unlink(missing_ok=True)

    def forget_after(self, step: int) -> None:
        """Remove the segments after `step`: a resumed run has read them, and writes them again."""
        for later, path in _segments(self._folder):
            if later > step:
                path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the segment."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read(
    output: pathlib.Path, step: int, version: int, spec: RouterSpec, keep: Keep | None = None
) -> list[tuple[int, int, Episode]]:
    """Return the episodes since the checkpoint of `step`, each once, with member number and size of the group.

    `version` is the policy version of the checkpoint. Tokens of later versions were sampled with weights that are lost;
    a token that is k versions ahead gets the version `version` - k, because so many updates lie between the two
    policies. `spec` is that of the model. `keep` puts the rows of each episode away.
    """
    found: dict[tuple[int, int], tuple[int, int, Episode]] = {}
    for later, path in _segments(output / FOLDER):
        if later < step:
            continue
        for number, payload in enumerate(_payloads(path)):
            try:
                record = msgspec.msgpack.decode(payload, type=_Record)
                episode = _decoded(record, version, spec, keep)
            except (msgspec.MsgspecError, ValueError, RouterReplayError) as error:
                raise _damaged(path, number, str(error)) from error
            found.setdefault((record.group, record.member), (record.member, record.size, episode))
    return list(found.values())


def _segments(folder: pathlib.Path) -> list[tuple[int, pathlib.Path]]:
    named = [(re.fullmatch(r"step_(\d{6,})\.bin", path.name), path) for path in folder.glob("step_*.bin")]
    return sorted((int(match[1]), path) for match, path in named if match is not None)


def _name(step: int) -> str:
    return f"step_{step:06}.bin"


def _payloads(path: pathlib.Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            for _, payload in read_frames(file, MAGIC, lambda number, reason: _damaged(path, number, reason)):
                yield payload
    except OSError as error:
        raise TrainError(f"{path} cannot be read: {error.strerror or error}") from error


def _damaged(path: pathlib.Path, number: int, reason: str) -> TrainError:
    return TrainError(
        f"{path}: episode {number} cannot be read ({reason}): the journal is damaged; move the file away to continue "
        "without the episodes that it holds"
    )


def _encoded(episode: Episode, member: int, size: int) -> bytes:
    sequences = [Sequence.of_checked(one) for one in episode.trajectories if len(one)]
    record = _Record(
        episode.group, member, size, episode.problem, float(episode.reward), episode.turns, episode.done, sequences
    )
    return msgspec.msgpack.encode(record)


def _decoded(record: _Record, version: int, spec: RouterSpec, keep: Keep | None) -> Episode:
    trajectories = [_aged(one.sample(spec), version, keep) for one in record.sequences]
    return Episode(
        record.member,
        record.group,
        record.problem,
        None,
        (),
        [*trajectories],
        reward=record.reward,
        turns=record.turns,
        done=record.done,
    )


def _aged(sample: Sample, version: int, keep: Keep | None) -> Sample:
    """Return the sample with versions that `version` knows, and with its rows put away by `keep`."""
    versions, rows = np.asarray(sample.versions), sample.routes
    return dataclasses.replace(
        sample,
        routes=rows if rows is None or keep is None else keep(rows.read()),
        versions=np.where(versions > version, 2 * version - versions, versions),
    )
