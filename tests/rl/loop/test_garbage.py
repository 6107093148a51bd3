"""The garbage collector of an asynchronous run: full collections happen between steps, and all is restored."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator

import pytest

from router_replay.rl.config import TrainConfig
from router_replay.rl.loop import asynchronous
from router_replay.rl.loop.garbage import FULL_EVERY, full_collections_between_steps
from router_replay.rl.loop.train import train


class Knot:
    """An object that refers to itself, which only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def collector_as_found() -> Iterator[None]:
    enabled, thresholds = gc.isenabled(), gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)
    (gc.enable if enabled else gc.disable)()


def old_knot() -> weakref.ref[Knot]:
    """Return a cycle that has outlived the young generations and is garbage now."""
    knot = Knot()
    gc.collect(0)
    gc.collect(1)
    return weakref.ref(knot)


def full_collections() -> int:
    return gc.get_stats()[2]["collections"]


def test_old_objects_are_searched_by_hand_only():
    with full_collections_between_steps() as collect:
        garbage, before = old_knot(), full_collections()
        held = [[] for _ in range(1_000_000)]  # Python would have searched everything several times
        for _ in range(FULL_EVERY - 1):
            collect()
            assert (full_collections(), garbage() is None) == (before, False)
        collect()
        assert (full_collections(), garbage() is None) == (before + 1, True)
        assert held


def test_the_garbage_of_a_step_is_freed_at_its_end():
    with full_collections_between_steps() as collect:
        for _ in range(2 * FULL_EVERY):
            knot = Knot()
            gc.collect(0)
            garbage = weakref.ref(knot)
            del knot
            before = gc.get_stats()[1]["collections"]
            held = [[] for _ in range(20 * gc.get_threshold()[0])]  # Python would have searched the middle-aged
            assert (gc.get_stats()[1]["collections"], garbage() is None) == (before, False)
            collect()
            assert garbage() is None
            assert held


def test_short_lived_cycles_do_not_wait_for_the_end_of_the_step():
    with full_collections_between_steps():
        garbage = weakref.ref(Knot())
        held = [[] for _ in range(2 * gc.get_threshold()[0])]
        assert garbage() is None
        assert held


def test_the_objects_of_the_start_are_left_out_and_its_garbage_is_not_kept():
    garbage = old_knot()
    with full_collections_between_steps():
        assert garbage() is None
        assert gc.get_freeze_count() > 0


@pytest.mark.parametrize("error", [None, RuntimeError("a step failed")])
def test_everything_is_as_before_at_the_end(error: Exception | None):
    gc.set_threshold(801, 12, 13)
    try:
        with full_collections_between_steps():
            assert gc.get_threshold()[0] == 801
            if error is not None:
                raise error
    except RuntimeError:
        pass
    assert (gc.get_threshold(), gc.get_freeze_count(), gc.isenabled()) == ((801, 12, 13), 0, True)


def test_objects_that_somebody_froze_stay_frozen():
    gc.freeze()
    most = 0.99 * gc.get_freeze_count()  # some are freed in between because nothing refers to them any more
    with full_collections_between_steps():
        assert gc.get_freeze_count() > most
    assert gc.get_freeze_count() > most


def test_a_collector_that_was_switched_off_is_left_alone():
    gc.disable()
    before, thresholds = full_collections(), gc.get_threshold()
    with full_collections_between_steps() as collect:
        collect()
        assert (full_collections(), gc.get_threshold(), gc.get_freeze_count()) == (before, thresholds, 0)
    assert not gc.isenabled()


def test_steps_make_no_reference_cycles(
    make_config: Callable[..., TrainConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[list[str]] = []

    @contextlib.contextmanager
    def noting() -> Iterator[Callable[[], None]]:
        def collect() -> None:
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            gc.set_debug(0)
            found.append(sorted({type(one).__qualname__ for one in gc.garbage}))
            gc.garbage.clear()
            gc.collect()

        gc.collect()
        gc.disable()  # so that nothing is freed before it is counted
        yield collect

    monkeypatch.setattr(asynchronous, "full_collections_between_steps", noting)
    train(make_config("loop=async", "steps=3", "rollout.prompts=6"))
    assert found == [[], [], []]
