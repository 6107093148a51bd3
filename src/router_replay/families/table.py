"""Build the table of `router-replay families`: every MoE family of transformers, and what replay supports in it.

Rows are made from the installed transformers' source and the records of the families. tests/replay/test_families.py
checks the records with tiny models of all families; a family without a record is "not tried".

No family of transformers 5.19 counts tokens per expert to adjust a bias, so there is no counter that replay could
distort. Load-balancing losses are computed from the live logits by a top-k of their own.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import re

from router_replay.errors import ReplayError
from router_replay.families.records import by_folder, where_router
from router_replay.families.types import NOT_TRIED, YES, Choice, Family


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table."""

    family: str  # its folder in transformers.models
    router: str  # the class whose choice is replayed
    choice: str  # the name of its Choice in lower case
    replay: str  # "yes", "not tried", or why not; the next three fields likewise
    checkpointing: str
    compiles: str
    packing: str  # are packed sequences kept apart?
    aux_loss: str  # what the family's own load-balancing loss sees under replay
    note: str  # of the family's record


def rows() -> list[Row]:
    """Return one row per family, sorted by name."""
    found = []
    for file in sorted(_models().glob("*/modeling_*.py")):
        source = file.read_text(encoding="utf-8")
        name = file.parent.name
        family = by_folder(name)
        if family.no_router:
            found.append(Row(name, "-", "-", f"no: {family.no_router}", "-", "-", "-", "-", ""))
        elif '"router_logits":' in source:
            found.append(_row(name, family, source))
    return found


def families_table() -> str:
    """Return the table as Markdown. Raises ReplayError if transformers is not installed."""
    head = ("family", "router", "choice", "replay", "checkpointing", "fullgraph", "packing", "aux loss sees", "note")
    lines = [dataclasses.astuple(row) for row in rows()]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ("---",) * len(head), *lines))


def _models() -> pathlib.Path:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ReplayError('the table needs transformers, which is not installed: pip install "router-replay[torch]"')
    return pathlib.Path(spec.origin).parent / "models"


def _row(name: str, family: Family, source: str) -> Row:
    named = re.findall(r'"router_logits":\s*\[?\s*OutputRecorder\(\s*([\w.]+)', source)
    router = next((name for name in (*named, *family.classes) if not where_router(name).skip), "-")
    grouped = family.choice is Choice.TOP_K and re.search(r"self\.num_group\b", source)
    own_loss = "load_balancing_loss_func(" in source
    return Row(
        family=name,
        router=router.removeprefix("nn."),
        choice=(Choice.GROUPED if grouped else family.choice).name.lower() if family.replay == YES else NOT_TRIED,
        replay=family.replay,
        checkpointing=family.checkpointing,
        compiles=family.compiles,
        packing=_packing(family),
        aux_loss="live logits, their own top-k" if own_loss else "no such loss",
        note=family.note,
    )


def _packing(family: Family) -> str:
    if family.packing is None:
        return NOT_TRIED
    if family.packing.borders is None:
        return f"no: {family.packing.note}"
    return family.packing.note or YES
