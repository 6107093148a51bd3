"""The errors that this package raises on purpose, all derived from RouterReplayError.

Each message says what was expected, what was found, where (layer, row, sample, field), and what to do.
Errors about input are also ValueError, so `except ValueError` in a user's code keeps working.
"""

from collections.abc import Sequence


class RouterReplayError(Exception):
    """The base class of all errors of Router Replay."""


class SpecError(RouterReplayError, ValueError):
    """A RouterSpec is invalid: its numbers are wrong, or the config does not describe its routers."""


class RoutesError(RouterReplayError, ValueError):
    """Rows cannot come from a router: the shape, dtype or range is wrong, or an expert is repeated."""


class WireError(RouterReplayError, ValueError):
    """A blob of encoded routes is invalid or damaged, or belongs to other tokens."""


class StitchError(RouterReplayError, ValueError):
    """An engine response does not fit the trajectory so far."""


class BatchError(RouterReplayError, ValueError):
    """Samples cannot be packed, or a batch cannot be sharded as requested."""


class StoreError(RouterReplayError, ValueError):
    """Routes cannot be kept in a RouteStore: rows and tokens do not fit together."""


class ReplayError(RouterReplayError, ValueError):
    """Routes do not fit the model, or a forward pass did not use them."""


class MeasureError(RouterReplayError, ValueError):
    """Numbers cannot be compared: shapes differ, there is nothing to measure, or values are not finite."""


class EngineError(RouterReplayError):
    """A rollout engine cannot do what was requested, or did not answer."""


class ConfigError(RouterReplayError, ValueError):
    """A setting is unknown, has the wrong type, or conflicts with another one."""


class TrainError(RouterReplayError):
    """A training run cannot continue; the message says where its state was saved."""


class RewardError(TrainError):
    """An environment or a reward function raised, or returned something that is not a number."""


def shorten(items: Sequence[object], most: int = 5) -> str:
    """Format the first `most` items and the total for an error message: `a, b, c, d, e, ... 48 in all`."""
    shown = ", ".join(str(item) for item in items[:most])
    return f"{shown}, ... {len(items)} in all" if len(items) > most else shown
