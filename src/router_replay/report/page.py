"""The frame of every page: its policy, style and scripts, the figures, and the JSON file beside it.

The page holds its data as JSON, and `assets/` holds the scripts that draw it with Vega. Text of users goes through
`html.escape` or into JSON, never into a script.
"""

from __future__ import annotations

import dataclasses
import html
import importlib.resources
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from router_replay.errors import ConfigError
from router_replay.report.library import library_script

# With this policy the browser refuses to load any other resource, and to make code out of text.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
LIVE_POLICY = f"{POLICY}; connect-src 'self'"
SCRIPTS = ("format.js", "curves.js", "grids.js", "tokens.js", "bands.js", "page.js")
COLOURS = 7
"""Runs and series have the colours c0 to c6 of assets/page.css, again and again."""


@dataclasses.dataclass(frozen=True)
class Figure:
    """Describe one chart of a page: the `drawing` of assets/ that draws it, its `title`, `meaning` and `data`.

    `series` are the names of the curves or groups that can be hidden. A `wide` figure takes a whole line. `choices`
    are the entries of a menu that chooses what is shown.
    """

    drawing: str
    title: str
    meaning: str
    data: Mapping[str, Any]
    series: Sequence[str] = ()
    wide: bool = False
    choices: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """Return what the page and the JSON file hold of the chart."""
        return {"drawing": self.drawing, "title": self.title, "series": list(self.series), **self.data}


def short(value: float) -> float:
    """Return the number with six significant digits: more cannot be seen, and would make the page larger."""
    return float(f"{value:.6g}")


def check_name(out: pathlib.Path) -> None:
    """Raise ConfigError if the page would have the name of its JSON file."""
    if out.suffix == ".json":
        raise ConfigError(f"the page cannot have the name {out.name}: the JSON file gets this name; use .html")


def write_both(out: pathlib.Path, page: str, twin: Mapping[str, Any]) -> None:
    """Write the page to `out` and `twin` beside it, with the suffix .json."""
    text = json.dumps(twin, indent=1, allow_nan=False, ensure_ascii=False)
    out.parent.mkdir(parents=True, exist_ok=True)
    # A lone surrogate (from a damaged name) cannot be encoded as UTF-8; its escape is valid in JSON.
    out.with_suffix(".json").write_text(text + "\n", encoding="utf-8", errors="backslashreplace")
    out.write_text(page, encoding="utf-8", errors="backslashreplace")


def page(title: str, body: str, data: Mapping[str, Any], live: bool = False) -> str:
    """Return the whole page. `body` is its HTML, and `data` what the scripts draw; a `live` page asks for more."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{LIVE_POLICY if live else POLICY}">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<style>{_asset("page.css")}</style>
</head>
<body>
<main>
<h1>{html.escape(title)}</h1>
{body}
<noscript><p class="verdict bad">The charts need JavaScript; the JSON file beside the page has the data.</p></noscript>
</main>
<div id="tip" role="status" aria-live="polite" hidden></div>
<script type="application/json" id="data">{_as_json({**data, "live": live})}</script>
<script type="module">{library_script()}</script>
<script type="module">{"".join(_asset(name) for name in SCRIPTS)}</script>
</body>
</html>
"""


def _as_json(data: Mapping[str, Any]) -> str:
    """Return JSON that no reader of HTML takes for a tag."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return importlib.resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def figures(some: Sequence[Figure], first: int = 0) -> str:
    """Return the HTML of figures without their charts. `first` is the place of the first one in the page's data."""
    inside = "".join(_figure(one, first + index) for index, one in enumerate(some))
    return f'<div class="charts">{inside}</div>'


def _figure(one: Figure, place: int) -> str:
    keys = "".join(
        f'<span class="run" data-series="{index}">{swatch(index)}<span class="name">{html.escape(name)}</span>'
        "<b></b></span>"
        for index, name in enumerate(one.series)
    )
    options = "".join(f'<option value="{index}">{html.escape(text)}</option>' for index, text in enumerate(one.choices))
    title = html.escape(one.title)
    menu = f'<select aria-label="what {title} shows">{options}</select>' if options else ""
    return (
        f'<figure data-chart="{place}"{" class=wide" if one.wide else ""}><figcaption><h3>{title}</h3>'
        f'<p class="meaning">{html.escape(one.meaning)}</p>{menu}<p class="key">{keys}</p></figcaption>'
        f'<div class="plot" tabindex="0" role="application" aria-roledescription="chart" '
        f'aria-label="{title}: arrow keys read its values"></div></figure>'
    )


def swatch(index: int) -> str:
    """Return the HTML of the dot with the colour of run or series `index`."""
    return f'<i class="swatch c{index % COLOURS}"></i>'


def toggles(names: Sequence[str], what: str) -> str:
    """Return checkboxes that show and hide the series `names` in all charts; `what` says what they are."""
    boxes = "".join(
        f'<label><input type="checkbox" checked data-toggle="{index}">{swatch(index)}'
        f'<span class="name">{html.escape(name)}</span></label>'
        for index, name in enumerate(names)
    )
    return f'<fieldset class="toggles"><legend>{html.escape(what)}</legend>{boxes}</fieldset>'


def scrolled(head: str, body: str) -> str:
    """Return a table that scrolls separately if the window is too narrow for it."""
    return f'<div class="scroll" tabindex="0"><table>{head}<tbody>{body}</tbody></table></div>'


def notes_list(notes: Sequence[str]) -> str:
    """Return the HTML of the notes."""
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>' if notes else ""


def verdict_box(good: bool | None, headline: str, lines: Sequence[str] = ()) -> str:
    """Return the box at the top. `good` chooses its colour, None for neither; `lines` follow the `headline`."""
    kind = {True: "good", False: "bad", None: "plain"}[good]
    inside = "".join(f"<p>{html.escape(line)}</p>" for line in lines)
    return f'<section class="verdict {kind}"><p class="headline">{html.escape(headline)}</p>{inside}</section>'
