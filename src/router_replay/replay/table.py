"""The table behind `router-replay families`: every MoE family of transformers, and what replay covers in it.

Rows are made from the installed transformers' source; what a cell says beyond "yes" stands in this file, and
tests/replay/test_families.py holds it against tiny models of all of them.

No family of transformers 5.19 counts tokens per expert to move a bias, so there is no counter that replay could
feed or starve. Load-balancing losses are computed from the live logits by a top-k of their own.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import pathlib
import re

from router_replay.errors import ReplayError
from router_replay.forward.packing import NOT_PACKED, PARTLY_PACKED
from router_replay.replay.families import CHOICES, WHERE, Choice

NO_ROUTER = {
    "vitpose_backbone": "chooses its expert by the dataset index that the caller passes: there is nothing to replay",
}
# Where `torch.compile(fullgraph=True)` fails on the plain model too, with no replay near (transformers 5.19, torch
# 2.13 on a CPU, experts_implementation="batched_mm"). Everywhere else the replayed model compiles, and not again
# for new routes.
_LOOP = "the plain model loops over the experts that were hit"
_STRIDES = "the plain model's backward fails under aot_eager (a view in softplus_backward); its forward compiles"
DOES_NOT_COMPILE = {
    "dbrx": _LOOP,
    "doge": _STRIDES,
    "longcat_flash": _LOOP,
    "nllb_moe": "the plain model branches on a tensor",
    "qwen3_5_moe": _STRIDES,
    "qwen3_next": _STRIDES,
    "qwen4_exp": "the plain model's attention indexer has a size that depends on data",
    "step3p7": _LOOP,
    "switch_transformers": "the plain model raises while it is traced",
}
NO_CHECKPOINTING = {"jetmoe": "not offered by transformers; replay works where a layer is checkpointed by hand"}
NOTES = {
    "deepseek_v4": "its hash layers choose by token id and have no column",
    "diffusion_gemma": "decoder only: the encoder of the prompt stays live",
    "doge": "its router mixes the tokens of a batch: routes hold for the same batch layout only",
    "ernie4_5_vl_moe": "text experts; a pass with image tokens in it is refused",
    "jetmoe": "two routers a layer: attention, then MLP",
    "longcat_flash": "ids from n_routed_experts on are its zero experts",
    "nllb_moe": "decoder only; slot order is meaning; tokens over an expert's capacity are dropped as in a live pass",
    "phimoe": "slot order is meaning; its gradient in training is an estimate by design",
    "qwen3_omni_moe": "the thinker; wrap model.talker itself to replay the talker",
    "switch_transformers": "decoder only; tokens over an expert's capacity are dropped as in a live pass",
    "zaya": "the last id is its skip class",
}


@dataclasses.dataclass(frozen=True)
class Row:
    family: str
    router: str  # the class whose choice is replayed
    choice: str
    replay: str  # "yes", or why not
    checkpointing: str
    compiles: str
    packing: str  # are packed sequences kept apart?
    aux_loss: str  # what the family's own load-balancing loss sees under replay
    note: str


def rows() -> list[Row]:
    """One row per family, by name."""
    found = []
    for file in sorted(_models().glob("*/modeling_*.py")):
        source = file.read_text(encoding="utf-8")
        family = file.parent.name
        if family in NO_ROUTER:
            found.append(Row(family, "-", "-", f"no: {NO_ROUTER[family]}", "-", "-", "-", "-", ""))
        elif '"router_logits":' in source:
            found.append(_row(family, source))
    return found


def families_table() -> str:
    """The table as Markdown."""
    head = ("family", "router", "choice", "replay", "checkpointing", "fullgraph", "packing", "aux loss sees", "note")
    lines = [dataclasses.astuple(row) for row in rows()]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, ("---",) * len(head), *lines))


def _models() -> pathlib.Path:
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise ReplayError('transformers is not installed: pip install "router-replay[torch]"')
    return pathlib.Path(spec.origin).parent / "models"


def _row(family: str, source: str) -> Row:
    named = re.findall(r'"router_logits":\s*\[?\s*OutputRecorder\(\s*([\w.]+)', source)
    router = next((name for name in named if not (name in WHERE and WHERE[name].skip)), "JetMoeTopKGating")
    choice = CHOICES.get(router, Choice.GROUPED if re.search(r"self\.num_group\b", source) else Choice.TOP_K)
    own_loss = "load_balancing_loss_func(" in source
    return Row(
        family=family,
        router=router.removeprefix("nn."),
        choice=choice.name.lower(),
        replay="yes",
        checkpointing=NO_CHECKPOINTING.get(family, "yes"),
        compiles=f"no: {DOES_NOT_COMPILE[family]}" if family in DOES_NOT_COMPILE else "yes",
        packing=f"no: {NOT_PACKED[family]}" if family in NOT_PACKED else PARTLY_PACKED.get(family, "yes"),
        aux_loss="live logits, their own top-k" if own_loss else "no such loss",
        note=NOTES.get(family, ""),
    )
