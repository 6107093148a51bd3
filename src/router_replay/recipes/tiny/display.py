"""Show the progress line of `make-model` on stderr, so that stdout has the command's result only."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich import progress
from rich.console import Console

if TYPE_CHECKING:
    from router_replay.recipes.tiny.warm_start import Progress


@contextlib.contextmanager
def shown(title: str) -> Iterator[Callable[[Progress], None]]:
    """Show a progress line during the block. Yield the function for `make_model(progress=...)`."""
    columns = (
        progress.TextColumn("{task.description}"),
        progress.MofNCompleteColumn(),
        progress.BarColumn(bar_width=12),
        progress.TextColumn("{task.fields[figures]}"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("<"),  # at most: training may reach its target before the last step
        progress.TimeRemainingColumn(),
    )
    display = progress.Progress(*columns, console=Console(stderr=True))
    task = display.add_task(title, total=None, figures="")
    with contextlib.ExitStack() as open_display:

        def show(now: Progress) -> None:
            if not display.live.is_started:  # a model that exists already needs no display
                open_display.enter_context(display)
            figures = f"right {now.additions:.0%}, calculator {now.calculations:.0%}"
            display.update(task, completed=now.step, total=now.steps, figures=figures)

        yield show
