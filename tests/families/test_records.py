"""The records of the families: each is found by all its keys, and says "yes" only of what a test tries."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import pytest
from torch import nn

from router_replay.families import FAMILIES, Family, by_class, by_folder, by_model_type, table
from router_replay.families.from_modules import find_routers
from router_replay.families.records import UNKNOWN
from router_replay.families.types import YES
from tests.replay import tiny


def test_no_key_belongs_to_two_families() -> None:
    for keys in (
        [family.name for family in FAMILIES],
        [key for family in FAMILIES for key in family.model_types or (family.name,)],
        [key for family in FAMILIES for key in family.classes],
        [key for family in FAMILIES for key in family.where],
    ):
        assert [key for key, times in collections.Counter(keys).items() if times > 1] == []


@pytest.mark.parametrize("name", sorted(tiny.FAMILIES))
def test_a_record_is_found_by_folder_by_model_type_and_by_class(name: str) -> None:
    family = by_folder(name)
    assert family.name == name
    model: Any = tiny.make(name).model
    assert by_model_type(model.config.get_text_config(decoder=True).model_type) is family
    assert by_class(type(model)) is family
    for router in find_routers(model).routers:
        assert by_class(type(router.module)) is family


def test_a_subclass_and_a_copy_from_elsewhere_are_of_their_family() -> None:
    copied = type("PhimoeTopKRouter", (nn.Module,), {"__module__": "remote_code"})
    assert by_class(type("Wrapped", (copied,), {})) is by_folder("phimoe")
    assert by_class(nn.Linear) is UNKNOWN  # jamba names it as its router, which makes no Linear a part of jamba


def test_a_record_says_yes_only_where_a_tiny_model_is_tried() -> None:
    for family in FAMILIES:
        cells = {family.replay, family.compiles, family.checkpointing, family.float32_router}
        assert family.name in tiny.FAMILIES or (YES not in cells and family.packing is None)


def test_a_family_that_nobody_tried_says_so() -> None:
    for family in (by_folder("new_moe"), Family("new_moe")):
        name, *cells, note = dataclasses.astuple(table._row("new_moe", family))
        assert (name, set(cells), note) == ("new_moe", {"not tried"}, "")
