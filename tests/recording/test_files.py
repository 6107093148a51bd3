"""A file of trajectories gives back every record bit by bit, loses only what a kill cut off, and names damage."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys

import numpy as np
import pytest

from router_replay import RouterSpec, Routes, Sample, pack
from router_replay.errors import BatchError, WireError
from router_replay.recording import TrajectoryReader, TrajectoryRecord, TrajectoryWriter
from tests.makers import random_ids

SPEC = RouterSpec(num_experts=16, top_k=2, layers=(1, 3), num_layers=4)


def record(number: int, step: int = 0, tokens: int = 5) -> TrajectoryRecord:
    routes = Routes(
        random_ids(tokens, SPEC, number), SPEC, captured=np.arange(tokens) < tokens - 1, versions=np.arange(tokens) // 2
    )
    sample = Sample(
        np.arange(tokens) + 10 * number,
        np.linspace(-1, -2, tokens, dtype=np.float32),
        np.arange(tokens) > 1,
        routes,
        versions=np.arange(tokens),
    )
    return TrajectoryRecord(sample, step, group=number // 2, episode=number, problem=70, reward=0.5, temperature=0.7)


def written(path: pathlib.Path, count: int = 3) -> pathlib.Path:
    with TrajectoryWriter(path) as writer:
        for number in range(count):
            writer.write([record(number, step=number)])
    return path


def assert_same(one: TrajectoryRecord, other: TrajectoryRecord) -> None:
    for name in ("token_ids", "logprobs", "loss_mask", "versions"):
        assert np.array_equal(getattr(one, name), getattr(other, name))
    assert one.routes == other.routes
    for name in ("step", "group", "episode", "problem", "reward", "turns", "done", "temperature"):
        assert getattr(one, name) == getattr(other, name)


def test_a_record_comes_back_as_it_was_and_can_be_packed(tmp_path: pathlib.Path) -> None:
    found = list(TrajectoryReader(written(tmp_path / "deep" / "routes")))
    assert len(found) == 3
    for number, one in enumerate(found):
        assert_same(one, record(number, step=number))
        assert one.routes is not None
        assert one.routes.spec.num_layers == 4
    assert len(pack(found, 64)) == 15


def test_a_trajectory_without_routes_has_none_again(tmp_path: pathlib.Path) -> None:
    sample = Sample(np.arange(3), np.zeros(3, np.float32), np.ones(3, bool), None)
    with TrajectoryWriter(tmp_path / "routes") as writer:
        writer.write([TrajectoryRecord(sample)])
    [one] = TrajectoryReader(tmp_path / "routes")
    assert one.routes is None
    assert one.token_ids.tolist() == [0, 1, 2]


def test_steps_are_found_by_their_position(tmp_path: pathlib.Path) -> None:
    with TrajectoryWriter(tmp_path / "routes") as writer:
        writer.write([record(0, 4), record(1, 4)])
        writer.write([record(2, 5)])
    reader = TrajectoryReader(tmp_path / "routes")
    positions = reader.step_positions()
    assert list(positions) == [4, 5]
    for step, position in positions.items():
        assert [one.episode for one in reader.step(step, position)] == [one.episode for one in reader.step(step)]
    assert [one.episode for one in reader.step(4)] == [0, 1]
    assert reader.step(6) == []


def test_every_cut_leaves_the_whole_records_and_the_next_writer_continues_after_them(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path / "routes")
    whole = path.read_bytes()
    for cut in range(len(whole), -1, -1):
        path.write_bytes(whole[:cut])
        if cut >= len(b"router-replay trajectories 1\n"):
            kept = len(list(TrajectoryReader(path)))
            assert kept == sum(cut >= end for end in ends(whole))
        else:
            kept = 0
        if cut % 7 == 0:
            with TrajectoryWriter(path) as writer:
                writer.write([record(9)])
            assert [one.episode for one in TrajectoryReader(path)] == [*range(kept), 9]


def ends(whole: bytes) -> list[int]:
    """The positions after each record, by the documented framing."""
    at, found = len(b"router-replay trajectories 1\n"), []
    while at < len(whole):
        at += 8 + int.from_bytes(whole[at : at + 4], "little")
        found.append(at)
    return found


def test_kill_minus_9_loses_nothing_that_was_written(tmp_path: pathlib.Path) -> None:
    code = (
        "import os, sys; from tests.recording.test_files import record, TrajectoryWriter\n"
        "writer = TrajectoryWriter(sys.argv[1])\n"
        "for number in range(20):\n    writer.write([record(number)])\n"
        "print('written', flush=True); sys.stdin.read()"
    )
    path = tmp_path / "routes"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        cwd=pathlib.Path(__file__).parents[2],
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"written\n"
        os.kill(process.pid, signal.SIGKILL)
    assert [one.episode for one in TrajectoryReader(path)] == list(range(20))


def test_a_resumed_run_writes_its_steps_again(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path / "routes")
    with TrajectoryWriter(path, before_step=1) as writer:
        writer.write([record(7, step=1)])
    assert [(one.step, one.episode) for one in TrajectoryReader(path)] == [(0, 0), (1, 7)]


def test_damage_is_named_with_the_file_and_the_record(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path / "routes")
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 1
    path.write_bytes(whole)
    with pytest.raises(WireError, match=r"routes: trajectory 1 cannot be read \(its checksum is wrong\)"):
        list(TrajectoryReader(path))
    with pytest.raises(WireError, match="trajectory 1"):
        TrajectoryWriter(path)
    path.write_bytes(b"something else")
    with pytest.raises(WireError, match="does not begin with the line 'router-replay trajectories 1'"):
        TrajectoryWriter(path)
    assert path.read_bytes() == b"something else"


def test_routes_of_other_tokens_are_refused(tmp_path: pathlib.Path) -> None:
    """The blob has the digest of its tokens, so a writer that mixes two up is found."""
    import msgspec

    from router_replay.framed_file import framed
    from router_replay.recording.file import MAGIC

    path = written(tmp_path / "routes", 2)
    first, second = [
        msgspec.msgpack.decode(path.read_bytes()[start + 8 : end])
        for start, end in zip([len(MAGIC), *ends(path.read_bytes())], ends(path.read_bytes()), strict=False)
    ]
    first["sequence"][4] = second["sequence"][4]
    path.write_bytes(MAGIC + framed(msgspec.msgpack.encode(first)))
    with pytest.raises(WireError, match=r"trajectory 0 cannot be read .*these routes belong to other tokens"):
        list(TrajectoryReader(path))


def test_a_wrong_record_is_refused_before_anything_is_written(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "routes"
    wrong = Sample(np.arange(3), np.zeros(2, np.float32), np.ones(3, bool), None)
    with TrajectoryWriter(path) as writer, pytest.raises(BatchError, match="logprobs"):
        writer.write([record(0), TrajectoryRecord(wrong)])
    assert list(TrajectoryReader(path)) == []
