"""Every error this package raises on purpose, under one root.

Each message says what was expected, what came, where (layer, row, sample, field), and what to do.
Errors about input are also ValueError, so `except ValueError` in a user's code keeps working.
"""

from collections.abc import Sequence


class RouterReplayError(Exception):
    """Root of all errors of Router Replay."""


class SpecError(RouterReplayError, ValueError):
    """A RouterSpec that cannot be: bad numbers, or a config whose routers are not described."""


class RoutesError(RouterReplayError, ValueError):
    """Rows that no router could have produced: wrong shape, dtype, range, or a repeated expert."""


class WireError(RouterReplayError, ValueError):
    """Bytes that are not the routes they claim to be."""


class StitchError(RouterReplayError, ValueError):
    """An engine response that does not fit the trajectory so far."""


class BatchError(RouterReplayError, ValueError):
    """Samples that cannot be packed, or a batch that cannot be sharded as asked."""


class ReplayError(RouterReplayError, ValueError):
    """Routes that do not fit the model, or a forward pass that did not use them."""


class MeasureError(RouterReplayError, ValueError):
    """Numbers that cannot be compared: other shapes, nothing to measure, or values that are not finite."""


class EngineError(RouterReplayError):
    """A rollout engine that cannot do what was asked, or did not answer."""


class ConfigError(RouterReplayError, ValueError):
    """A setting that is unknown, of the wrong kind, or that cannot go with another one."""


class TrainError(RouterReplayError):
    """A training run that cannot go on; what it had is saved where the message says."""


class RewardError(TrainError):
    """An environment or a reward function that raised, or gave something that is not a number."""


def shorten(items: Sequence[object], most: int = 5) -> str:
    """The first of many names or numbers, for a message: `a, b, c, d, e, ... 48 in all`."""
    shown = ", ".join(str(item) for item in items[:most])
    return f"{shown}, ... {len(items)} in all" if len(items) > most else shown
