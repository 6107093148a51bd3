"""Show the phases of `router-replay verify` as progress lines on stderr, so that stdout has the verdict only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich import progress
from rich.console import Console

from router_replay.verify.run import Progress


@contextlib.contextmanager
def shown() -> Iterator[Progress]:
    """Show a line for each phase during the block. Yield the function that begins one."""
    columns = (
        progress.TextColumn("{task.description}"),
        progress.MofNCompleteColumn(),
        progress.BarColumn(bar_width=12),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True), transient=True) as display:

        def begin(phase: str, total: int) -> Callable[[], object]:
            task = display.add_task(phase, total=total)
            return lambda: display.advance(task)

        yield begin
