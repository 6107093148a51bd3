"""The journal gives back every episode bit by bit, forgets only what a kill cut off, and names what is damaged."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from router_replay.errors import TrainError
from router_replay.rl.rollout.player import Episode
from router_replay.rl.state.journal import Journal, read
from router_replay.routes import Routes
from router_replay.stitch import Trajectory
from tests.rl.rollout.chance_engine import SPEC


def episode(group: int, versions: tuple[int, ...] = (3, 4)) -> Episode:
    trajectory = Trajectory(SPEC)
    ids = np.tile(np.array([[0, 1], [2, 3]], np.uint8), (2 + len(versions) - 1, 1, 1))
    logprobs = np.linspace(-1, -2, len(versions))
    trajectory.append([5, 6], range(len(versions)), logprobs, Routes(ids, SPEC), versions=versions)
    return Episode(0, group, 70 + group, None, (), [trajectory], reward=0.5, turns=2, done=True)


def written(folder: pathlib.Path, count: int = 3) -> pathlib.Path:
    journal = Journal(folder)
    journal.begin(10, [(1, 4, episode(0))])
    for group in range(1, count):
        journal.add(episode(group), member=group, size=4)
    journal.close()
    return folder / "journal" / "step_000010.bin"


def test_an_episode_comes_back_as_it_was(tmp_path: pathlib.Path) -> None:
    written(tmp_path)
    found = read(tmp_path, 10, version=9, spec=SPEC)
    assert [(member, size, one.group) for member, size, one in found] == [(1, 4, 0), (1, 4, 1), (2, 4, 2)]
    for number, (_, _, one) in enumerate(found):
        [before], [after] = episode(number).trajectories, one.trajectories
        assert (one.problem, one.reward, one.turns, one.done) == (70 + number, 0.5, 2, True)
        for name in ("token_ids", "logprobs", "loss_mask", "versions"):
            assert np.array_equal(getattr(before, name), getattr(after, name))
        assert before.routes is not None
        assert after.routes is not None
        assert np.array_equal(before.routes.captured, after.routes.captured)
        assert np.array_equal(before.routes.ids[:-1], after.routes.ids[:-1])
        assert np.array_equal(before.routes.versions[:-1], after.routes.versions[:-1])


def test_versions_of_lost_weights_count_as_many_updates_as_lie_between(tmp_path: pathlib.Path) -> None:
    """At version 3, a token of the lost version 4 is one update away, as a token of version 2 is."""
    journal = Journal(tmp_path)
    journal.begin(3, [(0, 2, episode(0, versions=(2, 3, 4, 6)))])
    journal.close()
    [(_, _, one)] = read(tmp_path, 3, version=3, spec=SPEC)
    assert one.versions.tolist() == [2, 3, 2, 0]


def test_a_kill_in_the_middle_of_a_write_loses_that_episode_only(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    ends = [len(read(tmp_path, 10, 9, SPEC))]
    for cut in range(1, 400, 7):
        path.write_bytes(whole[:-cut])
        ends.append(len(read(tmp_path, 10, 9, SPEC)))
    assert ends == sorted(ends, reverse=True)
    assert ends[1] == 2


def test_damage_is_named_with_the_file_and_the_episode(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path)
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    with pytest.raises(TrainError, match=r"step_000010\.bin: episode 1 cannot be read \(its checksum is wrong\)"):
        read(tmp_path, 10, 9, SPEC)
    path.write_bytes(b"something else")
    with pytest.raises(TrainError, match="does not begin with the line 'router-replay journal 1'"):
        read(tmp_path, 10, 9, SPEC)


def test_later_segments_are_read_and_earlier_ones_removed(tmp_path: pathlib.Path) -> None:
    written(tmp_path)
    journal = Journal(tmp_path)
    journal.begin(20, [(1, 4, episode(0)), (0, 4, episode(7))])
    assert len(read(tmp_path, 10, 9, SPEC)) == 4  # episode 0 stands in both
    assert len(read(tmp_path, 20, 9, SPEC)) == 2
    journal.prune(20)
    assert [path.name for path in (tmp_path / "journal").iterdir()] == ["step_000020.bin"]
    journal.forget_after(10)
    assert not list((tmp_path / "journal").iterdir())
