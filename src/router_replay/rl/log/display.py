"""Show the progress of a run: a table that is updated in place in a terminal, one plain line per step elsewhere.

with Display(steps=20, title="r3") as display:
    display.phase("rollout")
    display.step(0, {"reward": 0.31, "mismatch/k3": 1.9e-3, "seconds/step": 12.0})
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from router_replay.number_format import Kind, duration, number

SHOWN_ROWS = 8
ETA_STEPS = 10
"""The time left is estimated from the mean of this many latest steps."""
COLUMNS: tuple[tuple[str, str, Kind], ...] = (
    ("reward", "reward", "plain"),
    ("k3", "mismatch/k3", "small"),
    ("agreement", "routes/agreement", "share"),
    ("rows live", "routes/live", "count"),
    ("tokens/s", "tokens_per_second", "count"),
    ("trained/s", "trainer/tokens_per_second", "count"),
    ("of peak", "trainer/peak_share", "share"),
    ("seconds", "seconds/step", "seconds"),
)
ASYNC_COLUMNS: tuple[tuple[str, str, Kind], ...] = (
    *COLUMNS[:-1],
    ("age", "async/staleness_mean", "plain"),
    ("waits", "async/trainer_idle", "share"),
    ("engine idle", "async/engine_idle", "share"),
    COLUMNS[-1],
)


class Display:
    """Show the progress of one run of `steps` steps, of which `done` were finished by an earlier process.

    `title` is shown before the progress. `console` and `clock` can be replaced in tests. `columns` are the metrics to
    show: the label, the name and the kind of number of each.
    """

    def __init__(
        self,
        steps: int,
        title: str,
        console: Console | None = None,
        done: int = 0,
        clock: Callable[[], float] = time.monotonic,
        columns: tuple[tuple[str, str, Kind], ...] = COLUMNS,
    ) -> None:
        # With variables like FORCE_COLOR, rich would treat a log file as a terminal, so ask the file itself.
        self._console = console or Console(force_terminal=None if sys.stdout.isatty() else False)
        self._steps, self._title, self._done, self._clock = steps, _printable(title), done, clock
        self._columns = columns
        self._phase = "starting"
        self._step_began = clock()
        # These lists are replaced, never changed in place, because rich draws from another thread.
        self._rows: list[tuple[int, list[str]]] = []
        self._seconds: list[float] = []
        self._spinner = Spinner("dots")
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._console.is_interactive:
            self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
            self._live.start()
        else:
            self._line(f"{self._title}: {self._steps} steps" + (f", {self._done} done" if self._done else ""))
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if self._live is not None:
            self._phase = "stopped" if kind or self._done < self._steps else "finished"
            self._live.stop()

    def phase(self, name: str) -> None:
        """Show the name of the current phase."""
        self._phase = _printable(name)
        if self._live is not None:
            self._live.refresh()

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Show the metrics of a finished step; `step` counts from 0."""
        self._done = step + 1
        now = self._clock()
        self._seconds = [*self._seconds, values.get("seconds/step", now - self._step_began)][-ETA_STEPS:]
        self._step_began = now
        texts = [number(values.get(name), kind) for _, name, kind in self._columns]
        self._rows = [*self._rows, (step, texts)][-SHOWN_ROWS:]
        if self._live is None:
            named = (f"{label} {text}" for (label, *_), text in zip(self._columns, texts, strict=True))
            self._line("  ".join([f"{self._title} {self._count()}", *named, f"left {self._time_left()}"]))

    def fact(self, text: str) -> None:
        """Show what the run found out or chose, above the progress."""
        self._line(_printable(text))

    def note(self, text: str) -> None:
        """Show a warning above the progress."""
        self._line(f"note: {_printable(text)}", style="yellow")

    def _line(self, text: str, style: str = "") -> None:
        self._console.print(Text(text, style=style), soft_wrap=True)

    def _count(self) -> str:
        return f"{self._done:>{len(str(self._steps))}}/{self._steps}"

    def _time_left(self) -> str:
        if self._done >= self._steps:
            return duration(0)
        if not self._seconds:
            return "?"
        mean = sum(self._seconds) / len(self._seconds)
        this_step = max(0.0, mean - (self._clock() - self._step_began))
        return duration(this_step + mean * (self._steps - self._done - 1))

    def _render(self) -> RenderableType:
        head = Table.grid(padding=(0, 2))
        bar = ProgressBar(total=self._steps, completed=self._done, width=28)
        running = self._phase not in ("finished", "stopped")
        mark: RenderableType = self._spinner if running else Text("·")
        head.add_row(
            Text(self._title, style="bold"), bar, self._count(), mark, Text(self._phase), f"left {self._time_left()}"
        )
        if not self._rows:
            return head
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        for label in ("step", *(label for label, *_ in self._columns)):
            table.add_column(label, justify="right", no_wrap=True)
        for step, texts in self._rows:
            table.add_row(str(step + 1), *texts)
        return Group(head, table)


class Quiet:
    """Take the place of Display on all ranks but the first, and show nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None: ...

    def phase(self, name: str) -> None:
        """Do nothing."""

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def fact(self, text: str) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""


def _printable(text: str) -> str:
    """Return the text without characters that would move the cursor or break the line."""
    return "".join(letter if letter.isprintable() else " " for letter in text)
