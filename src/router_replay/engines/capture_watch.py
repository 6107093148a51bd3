"""Does an engine record every layer? Over many short answers, where one alone is too short to tell.

With top_k 1 a row of expert 0 looks like a row that was never recorded. A layer that runs chooses another expert now
and then; one that is zero in 64 rows on end, over however many answers, was never recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

from router_replay.engines.types import Completion
from router_replay.errors import EngineError
from router_replay.row_checks import NEVER_CAPTURED, never_captured, zero_layers
from router_replay.spec import RouterSpec


class CaptureWatch:
    """Counts, per layer, the rows of the answers that had nothing but expert 0 there since the last that had more.

    Used on an engine's event loop only.
    """

    def __init__(self, allow_zero_layers: bool) -> None:
        self._allowed = allow_zero_layers
        self._zero_rows: dict[int, int] = {}  # by column; a column that is not here is known to be recorded

    def check(self, completions: Sequence[Completion], spec: RouterSpec) -> None:
        """Raise EngineError where a layer has been zero for too long."""
        if self._allowed or spec.top_k > 1 or spec.num_experts == 1:  # above top_k 1, every zero row was refused
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
                advice = "; if expert 0 is really meant, start the engine object with allow_zero_layers=True"
                raise EngineError(f"{completion.request_id}: {never_captured(spec, too_long, count, advice)}")
