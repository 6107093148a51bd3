"""Decide when Python's garbage collector looks through many objects: between two steps, and at no other time.

    with full_collections_between_steps() as collect:
        while ...:
            step(run)
            collect()

An asynchronous run holds the objects of all episodes in flight, some seventy for each. Python frees almost all of them
by counting references: neither the loop nor a training step makes reference cycles. Cycles come from errors and from
the user's environments and rewards, which run in this process. Python would search the objects that it made lately
again and again within a step, and all objects whenever a quarter as many new ones have survived, and find nothing. What
a search costs for each object grows with their number: those of many episodes do not fit into the processor's cache.

So the objects that exist when the steps begin (the modules, the model, the optimiser) are left out. The youngest
objects are searched as always, so that a short-lived cycle does not wait. `collect` searches those that were made since
the last call and, at every fourth call, all others too. What hangs on a cycle, such as a tensor, is freed at the end of
the step that made it, or at most four steps after the cycle became garbage, and on every rank at the same point.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator

NEVER = (1 << 31) - 1  # the largest threshold
FULL_EVERY = 4  # calls of `collect`


@contextlib.contextmanager
def full_collections_between_steps() -> Iterator[Callable[[], None]]:
    """Keep Python from searching other than the youngest objects within the block; the function that it gives does it.

    Every fourth call of the function searches all objects, the others those that were made since the call before.
    Afterwards all settings are as before. If the collector was switched off before, nothing is changed and the
    function does nothing: whoever did that has a rule of their own. Objects that somebody froze before stay frozen.
    """
    if not gc.isenabled():
        yield _nothing
        return
    young, middle, old = gc.get_threshold()
    freezes = not gc.get_freeze_count()
    gc.collect()  # garbage that is frozen is never found
    if freezes:
        gc.freeze()
    gc.set_threshold(young, NEVER, NEVER)
    calls = itertools.count(1)
    try:
        yield lambda: _collect(next(calls))
    finally:
        gc.set_threshold(young, middle, old)
        if freezes:
            gc.unfreeze()


def _collect(call: int) -> None:
    gc.collect(1 if call % FULL_EVERY else 2)


def _nothing() -> None:
    """Leave the collector alone."""
