"""Decide when Python's garbage collector looks through everything: between two steps, and at no other time.

    with full_collections_between_steps() as collect:
        while ...:
            step(run)
            collect()

An asynchronous run holds the objects of all episodes in flight, some sixty for each. Python frees almost all of them by
counting references: neither the loop nor a training step makes reference cycles. Cycles come from errors and from the
user's environments and rewards, which run in this process. Python would search all objects for them whenever a quarter
as many new ones have survived, which is again and again within a step with many episodes, and find nothing.

So the objects that exist when the steps begin (the modules, the model, the optimiser) are left out, young objects are
searched as always, so that a short-lived cycle does not wait, and all others are searched by `collect`. What hangs on
an older cycle, such as a tensor, is freed at most one step later, and on every rank at the same point.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator

NEVER = (1 << 31) - 1  # the largest threshold


@contextlib.contextmanager
def full_collections_between_steps() -> Iterator[Callable[[], None]]:
    """Keep Python from full collections within the block; the function that it gives does one.

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
    gc.set_threshold(young, middle, NEVER)
    try:
        yield _collect
    finally:
        gc.set_threshold(young, middle, old)
        if freezes:
            gc.unfreeze()


def _collect() -> None:
    gc.collect()


def _nothing() -> None:
    """Leave the collector alone."""
