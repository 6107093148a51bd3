"""The page of `router-replay inspect`: the turns of trajectories as bands, with their versions and their rows."""

from __future__ import annotations

import dataclasses
import html
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from router_replay.report.page import (
    Figure,
    check_name,
    figures,
    notes_list,
    page,
    scrolled,
    verdict_box,
    write_both,
)
from router_replay.report.verdict_page import load_figure
from router_replay.routes import Routes
from router_replay.runs import Runs

MOST_TRAJECTORIES, MOST_BANDS = 200, 20_000
"""A page shows the first trajectories of a file up to these numbers, and says how many it leaves out."""
MEANING = (
    "Turns: given tokens are grey, sampled ones blue. Token versions: the policy that sampled a token. Rows: the "
    "policy that routed a row; a missing row is red, and the trainer routes it live."
)


@dataclasses.dataclass(frozen=True, eq=False)
class Lanes:
    """Hold what the page shows of one sequence of a file.

    `name` says where it is. `routes` are None if it has none, and `start` is the position of row 0. `loss_mask` [T] is
    True for sampled tokens and `versions` [T] has the policy version of each token; both are None for a file of rows
    without tokens.
    """

    name: str
    routes: Routes | None
    start: int = 0
    loss_mask: np.ndarray | None = None
    versions: np.ndarray | None = None

    @property
    def bands(self) -> dict[str, Any]:
        """The bands of the three lanes, as lists of [from, to, ...]; docs/report_page.md describes them."""
        turns = _turns(self.loss_mask)
        return {"name": self.name, "turns": turns, "versions": self._sampled_by(), "rows": self._rows(turns)}

    def _sampled_by(self) -> list[list[int]]:
        if self.loss_mask is None or self.versions is None:
            return []
        found = Runs.of(np.where(self.loss_mask, self.versions, np.iinfo(np.int64).min))
        return [[a, b, int(version)] for a, b, version in found if self.loss_mask[a]]

    def _rows(self, turns: list[list[int]]) -> list[list[int | bool | None]]:
        """Return [from, to, captured, version, turn, sampled]. A row is cut where any of these changes."""
        routes, start = self.routes, self.start
        if routes is None or not len(routes):
            return []
        # The last token of a turn is forwarded by the prompt pass of the next one, and that of the last turn never.
        count = len(routes) - 1 if self.loss_mask is not None else len(routes)
        origin = np.zeros(start + count, np.int64)
        for a, b, sampled, turn in turns:
            origin[a : b - sampled] = 2 * turn + sampled
            origin[b - sampled : b] = 2 * (turn + sampled)
        key = np.stack([routes.captured[:count], routes.versions[:count], origin[start : start + count]], axis=1)
        if not count:
            return []
        ends = np.append(np.flatnonzero((key[1:] != key[:-1]).any(axis=1)) + 1, count)
        known = routes.version_runs is not None
        bands: list[list[int | bool | None]] = []
        for a, b in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            captured, version, whence = key[a].tolist()
            bands.append(
                [start + a, start + b, bool(captured), version if known else None, whence // 2, bool(whence % 2)]
            )
        return bands


def _turns(mask: np.ndarray | None) -> list[list[int]]:
    """Return [from, to, sampled, turn]: a turn is a given part, which may be empty, and the sampled part after it."""
    if mask is None:
        return []
    bands, turn, before = [], 1, False
    for a, b, sampled in Runs.of(mask):
        turn += before and not sampled
        bands.append([a, b, int(sampled), int(turn)])
        before = bool(sampled)
    return bands


def write_trajectories(
    sequences: Iterable[dict[str, Any]],
    lines: Sequence[str],
    out: pathlib.Path,
    load: tuple[Sequence[int], np.ndarray] | None,
) -> None:
    """Write the page of a file to `out`, and its data to the same path with the suffix .json.

    `sequences` are the `Lanes.bands` of the file's sequences, `lines` is the text about it, and `load` has the ids of
    the layers and the expert load [L, E], if there are routes. Raise ConfigError if `out` ends in .json, or if the
    plotting library is not installed.
    """
    check_name(out)
    shown: list[dict[str, Any]] = []
    bands = left_out = missing = 0
    for found in sequences:
        missing += sum(band[1] - band[0] for band in found["rows"] if not band[2])
        bands += sum(len(found[lane]) for lane in ("turns", "versions", "rows"))
        if len(shown) < MOST_TRAJECTORIES and (bands <= MOST_BANDS or not shown):
            shown.append(_cut(found))
        else:
            left_out += 1
    drawn = _figures(shown)
    if load is not None:
        drawn.append(load_figure(*load))
    title = "Router Replay: what the file holds"
    notes = [f"The page shows the first {len(shown)} sequences; {left_out:,} more are left out."] if left_out else []
    rows = "".join(f'<tr><td class="fact">{html.escape(line)}</td></tr>' for line in lines)
    verdict = f"{missing:,} rows are missing and would be routed live." if missing else "No row is missing."
    body = f"""{verdict_box(not missing if load is not None else None, verdict if load is not None else "No routes.")}
{scrolled("", rows)}
{notes_list(notes)}
<h2>Turns, versions and rows</h2>
{figures(drawn)}"""
    data = {"title": title, "lines": list(lines), "notes": notes, "charts": [one.as_json() for one in drawn]}
    write_both(out, page(title, body, {"runs": [], "charts": data["charts"]}), data)


def _cut(found: dict[str, Any]) -> dict[str, Any]:
    """Return the bands without those beyond MOST_BANDS in a lane: a sequence of so many is shown in part."""
    return {name: lane if name == "name" else lane[:MOST_BANDS] for name, lane in found.items()}


def _figures(shown: Sequence[dict[str, Any]]) -> list[Figure]:
    if not shown:
        return []
    lanes = ("turns", "token versions", "rows")
    every = Figure("trajectories", "All trajectories", MEANING, {"trajectories": list(shown)}, wide=True, choices=lanes)
    names = [f"{number}: {one['name']}" for number, one in enumerate(shown)]
    meaning = "its three lanes; the numbers are turns and policy versions"
    return [every, Figure("trajectory", "One trajectory", meaning, {"of": 0}, wide=True, choices=names)]
