"""Family: everything that is known of one MoE family, in one record."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

YES, NOT_TRIED = "yes", "not tried"


class Choice(enum.Enum):
    """Which operation of the router is the choice of experts."""

    TOP_K = "topk over all experts"
    GROUPED = "topk over groups of experts, then topk over the experts of the chosen groups"
    SPARSE_MIXER = "one max per slot, each over what the slots before left (phimoe)"
    ARGMAX = "one argmax per slot (nllb_moe, switch_transformers)"
    PRODUCT_KEYS = "topk over two halves of a key, then topk over their product (doge)"


@dataclasses.dataclass(frozen=True)
class Where:
    """How to get from the class a family names as its router to the module that chooses."""

    child: str = ""  # the chooser is this submodule
    parent: bool = False  # the chooser is the module that holds the named one
    method: str = "forward"
    skip: bool = False  # the chooser is found by another class of the same family


@dataclasses.dataclass(frozen=True)
class ConfigRules:
    """What a model type does that the fields of its config do not say."""

    dense_first: int = 0  # leading dense layers where the config is silent
    depth: str | None = None  # the field that counts DECODER layers, where the usual one counts another stack
    extra_experts: str | None = None  # a field that counts more classes the router chooses from
    skip_classes: int = 0  # classes beyond the experts that the router can choose
    routers_per_layer: int = 1
    switch: str | None = None  # a boolean field without which the model is dense
    sparse_offset: int = 0  # decoder_sparse_step: layer i is routed where (i + 1 - offset) % step == 0
    nested: str | None = None  # the sub-config that holds the router's numbers


class Borders(enum.Enum):
    """How a decoder learns where each of several packed sequences begins."""

    POSITIONS = "from position ids that start anew"
    FOUR_ROWS = "from four rows of position ids (text, time, height, width); with one row the mask sees none"
    MASKS = "from masks that it is given; its own are built without position ids"


@dataclasses.dataclass(frozen=True)
class Packing:
    """Are packed sequences kept apart? `borders` None means no, and `note` says why; else `note` is a condition."""

    borders: Borders | None
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Family:
    """One MoE family. A field says what differs from the usual; what nobody tried stays "not tried".

    `name` is the folder of the family in transformers.models. A family is found by it, by a model type of a config
    and by the class of a module.
    """

    name: str
    model_types: tuple[str, ...] = ()  # of the config of its text decoder; its name where none is given
    classes: tuple[str, ...] = ()  # names of router classes, to know copies of them that live elsewhere

    config: ConfigRules | None = None  # None: a config must say by itself which layers are routed
    no_router: str = ""  # why there is nothing to replay
    where: Mapping[str, Where] = dataclasses.field(default_factory=dict)  # by the class that transformers names
    choice: Choice = Choice.TOP_K  # TOP_K becomes GROUPED where a router has `num_group`
    ordered: bool = False  # the order of the slots has a meaning: they are filled by different rules
    top_k: int | None = None  # fixed by the architecture

    replay: str = NOT_TRIED
    packing: Packing | None = None  # None: not tried
    mixes_tokens: bool = False  # the router mixes the tokens of a batch: sequences run one at a time
    cache_of_the_encoder: bool = False  # the decoder's cache holds the encoder's tokens, and none of its own
    checkpointing: str = NOT_TRIED
    compiles: str = NOT_TRIED  # torch.compile(fullgraph=True): YES, or why not
    note: str = ""
