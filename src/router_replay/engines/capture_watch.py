"""Checks over many short answers that an engine records every layer, as one answer may be too short to tell.

With top_k 1, a row of expert 0 looks like a row that was never recorded. A layer that is recorded chooses another
expert now and then; a layer that is zero in 64 consecutive rows, over any number of answers, was never recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

from router_replay.engines.types import Completion
from router_replay.errors import EngineError
from router_replay.row_checks import NEVER_CAPTURED, never_captured, zero_layers
from router_replay.spec import RouterSpec


class CaptureWatch:
    """Counts, for each layer, the rows since the last answer in which the layer used any expert other than 0.

    With `allow_zero_layers` it checks nothing. It is used only on an engine's event loop.
    """

    def __init__(self, allow_zero_layers: bool) -> None:
        self._allowed = allow_zero_layers
        self._zero_rows: dict[int, int] = {}  # by column; a column that is missing here is known to be recorded

    def check(self, completions: Sequence[Completion], spec: RouterSpec) -> None:
        """Raise EngineError if a layer has been zero for too many rows."""
        if self._allowed or spec.top_k > 1 or spec.num_experts == 1:  # with top_k > 1, zero rows were refused before
            return
        for completion in completions:
            captured = completion.routes.captured
            rows = int(captured.sum())
            if not rows:
                continue
            columns = zero_layers(completion.routes.ids[captured])
            self._zero_rows = {column: self._zero_rows.get(column, 0) + rows for column in columns}
            too_long = [column for column, count in self._zero_rows.items() if count >= NEVER_CAPTURED]
            if too_long:
                count = min(self._zero_rows[column] for column in too_long)
                advice = "; if these layers really choose expert 0, create the engine with allow_zero_layers=True"
                raise EngineError(f"{completion.request_id}: {never_captured(spec, too_long, count, advice)}")
