"""Watch or decide the order of an engine's passes, so that a run can be recorded and repeated to the bit.

Which requests share a pass decides the last bits of their results. `PassOrder` only watches and changes nothing; a
subclass with `decides` also says which requests join the batch, and when.
"""

from __future__ import annotations

from collections.abc import Sequence


class PassOrder:
    """Watch the passes of an engine. All methods are called on the engine's thread, between two passes."""

    decides = False
    """Whether `joining` says what joins the next pass; otherwise the engine takes what has arrived."""

    def joining(self) -> Sequence[str] | None:
        """Return the ids of the requests whose prompts join in the next pass; None if no pass may run now."""
        return None

    def passed(self, joined: Sequence[str], batch: Sequence[str]) -> None:
        """Take note of a pass: `joined` are the requests whose prompts were computed, `batch` those that decoded."""

    def aborts(self, requests: Sequence[str]) -> None:
        """Take note that `Engine.abort` ends `requests` now."""

    def swaps(self, version: int) -> None:
        """Take note that the weights of `version` are loaded now."""
