"""Build the table of `router-replay families`: every MoE family of transformers, and what replay supports in it.

Each cell comes from a family's record or from what was measured; without either it says "not tried". Families of the
installed transformers that have no record are listed too. `tests/replay/test_families.py` checks the records with tiny
models of all families.

No family of transformers 5.22 counts tokens per expert to adjust a bias, so there is no counter that replay could
distort. Load-balancing losses are computed from the live logits by a top-k of their own.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib

from router_replay.families import measured
from router_replay.families.records import FAMILIES, by_folder
from router_replay.families.types import NOT_TRIED, YES, Family


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table. Each cell says "not tried" where nobody tried."""

    family: str  # its folder in transformers.models
    since: str  # the oldest transformers in which it is found and replayed
    router: str  # the class whose choice is replayed
    choice: str  # the name of its Choice in lower case
    replay: str  # "yes" or why not; the next five fields likewise
    checkpointing: str
    compiles: str
    float32_router: str  # can its router compute in float32 in a bfloat16 model?
    packing: str  # are packed sequences kept apart?
    attention: str  # do packed sequences attend by their lengths, without a mask over the whole bin?
    aux_loss: str  # what the family's own load-balancing loss sees under replay
    note: str  # of the family's record


HEAD = (
    *("family", "since", "router", "choice", "replay", "checkpointing", "fullgraph", "float32 router", "packing"),
    *("attention by lengths", "aux loss sees", "note"),
)


def rows() -> list[Row]:
    """Return one row per family, sorted by name: those with a record, and those that only transformers has."""
    names = {family.name for family in FAMILIES} | _installed_families()
    return [_row(name, by_folder(name)) for name in sorted(names)]


def families_table() -> str:
    """Return the table as Markdown."""
    lines = [dataclasses.astuple(row) for row in rows()]
    return "\n".join("| " + " | ".join(line) + " |" for line in (HEAD, ("---",) * len(HEAD), *lines))


def _installed_families() -> set[str]:
    """Return the folders of the installed transformers that name a router; none if it is not installed."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return set()
    files = (pathlib.Path(spec.origin).parent / "models").glob("*/modeling_*.py")
    return {file.parent.name for file in files if '"router_logits":' in file.read_text(encoding="utf-8")}


def _row(name: str, family: Family) -> Row:
    if family.no_router:
        return Row(name, "-", "-", "-", f"no: {family.no_router}", "-", "-", "-", "-", "-", "-", "")
    known = measured.FAMILIES.get(name)
    return Row(
        family=name,
        since=known.since if known else NOT_TRIED,
        router=known.router if known else NOT_TRIED,
        choice=known.choice.name.lower() if known else NOT_TRIED,
        replay=family.replay,
        checkpointing=family.checkpointing,
        compiles=family.compiles,
        float32_router=family.float32_router,
        packing=_packing(family),
        attention=family.attention if family.packing is None or family.packing.borders else "-",
        aux_loss=("live logits, their own top-k" if known.own_loss else "no such loss") if known else NOT_TRIED,
        note=family.note,
    )


def _packing(family: Family) -> str:
    if family.packing is None:
        return NOT_TRIED
    if family.packing.borders is None:
        return f"no: {family.packing.note}"
    return family.packing.note or YES
