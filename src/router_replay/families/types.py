"""Family holds everything that is known of one MoE family in one record."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

YES, NOT_TRIED = "yes", "not tried"


class Choice(enum.Enum):
    """Names the operation by which a router chooses experts."""

    TOP_K = "topk over all experts"
    GROUPED = "topk over groups of experts, then topk over the experts of the chosen groups"
    SPARSE_MIXER = "one max per slot, each over what the slots before left (phimoe)"
    ARGMAX = "one argmax per slot (nllb_moe, switch_transformers)"
    PRODUCT_KEYS = "topk over two halves of a key, then topk over their product (doge)"


@dataclasses.dataclass(frozen=True)
class Where:
    """Locates the module that chooses experts, starting from the class that a family names as its router."""

    child: str = ""  # the chooser is this submodule
    parent: bool = False  # the chooser is the module that holds the named one
    method: str = "forward"  # the method of the chooser that makes the choice
    skip: bool = False  # the chooser is found by another class of the same family


@dataclasses.dataclass(frozen=True)
class ConfigRules:
    """Holds the properties of a model type that the fields of its config do not give."""

    dense_first: int = 0  # number of leading dense layers if the config does not give it
    depth: str | None = None  # the field that counts DECODER layers, if the usual one counts another stack
    extra_experts: str | None = None  # a field that counts additional classes the router chooses from
    skip_classes: int = 0  # classes beyond the experts that the router can choose
    routers_per_layer: int = 1  # the spec lists a layer once for each of them
    switch: str | None = None  # a boolean field; the model is dense if it is not set
    sparse_offset: int = 0  # decoder_sparse_step: layer i is routed if (i + 1 - offset) % step == 0
    nested: str | None = None  # the sub-config that holds the router's numbers


class Borders(enum.Enum):
    """Names how a decoder detects where each of several packed sequences begins."""

    POSITIONS = "from position ids that start anew"
    FOUR_ROWS = "from four rows of position ids (text, time, height, width); with one row the mask sees none"
    MASKS = "from masks that it is given; its own are built without position ids"


@dataclasses.dataclass(frozen=True)
class Packing:
    """Says whether packed sequences are kept apart.

    If `borders` is None they are not, and `note` gives the reason; otherwise `note` is a condition.
    """

    borders: Borders | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Holds what `tools/family_versions.py` found out about a family."""

    since: str  # the oldest transformers in which its routes can be replayed
    router: str  # the class of the module whose choice is replayed, in the newest transformers
    choice: Choice
    own_loss: bool  # the family computes a load-balancing loss from the live logits


@dataclasses.dataclass(frozen=True)
class Family:
    """Describes one MoE family. Fields are set where they differ from the default; untested ones stay "not tried".

    `name` is the folder of the family in transformers.models. A family is found by this folder, by the model type of
    a config, or by the class of a module.
    """

    name: str
    model_types: tuple[str, ...] = ()  # of the config of its text decoder; defaults to its name
    classes: tuple[str, ...] = ()  # names of router classes, to recognise copies of them in other packages

    config: ConfigRules | None = None  # None: the config itself must give the routed layers
    no_router: str = ""  # why there is nothing to replay
    where: Mapping[str, Where] = dataclasses.field(default_factory=dict)  # by the class that transformers names
    choice: Choice = Choice.TOP_K  # TOP_K becomes GROUPED if a router has `num_group`
    ordered: bool = False  # the order of the slots has a meaning: they are filled by different rules
    top_k: int | None = None  # fixed by the architecture

    replay: str = NOT_TRIED  # YES, or why not
    packing: Packing | None = None  # None: not tried
    attention: str = NOT_TRIED  # packed attention by sequence lengths: YES, or why it needs a mask
    sinks: bool = False  # its attention has sinks or a soft cap
    mixes_tokens: bool = False  # the router mixes the tokens of a batch: sequences run one at a time
    cache_of_the_encoder: bool = False  # the decoder's cache holds only the encoder's tokens
    checkpointing: str = NOT_TRIED  # activation checkpointing: YES, or a limitation
    float32_router: str = NOT_TRIED  # its router can compute in float32 in a bfloat16 model: YES, or why not
    compiles: str = NOT_TRIED  # torch.compile(fullgraph=True): YES, or why not
    note: str = ""  # for the column `note` of the table in docs/families.md
