"""What the table says about versions, against the installed transformers: in make test, test-oldest and test-newest."""

from __future__ import annotations

import importlib
import re

import pytest
import torch
import transformers

from router_replay.errors import ReplayError
from router_replay.families import FAMILIES, measured
from router_replay.families.types import Measured
from router_replay.families.versions import installed, is_older, summary
from router_replay.replay.replayer import RouterReplay
from tests.families.found import try_family
from tests.replay import tiny


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_every_family_with_a_router_was_measured() -> None:
    assert set(measured.FAMILIES) == set(tiny.FAMILIES) == {family.name for family in FAMILIES if not family.no_router}
    assert len(measured.FAMILIES) == 70


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_since_agrees_with_the_installed_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = measured.FAMILIES[family]
    monkeypatch.setitem(measured.FAMILIES, family, _with_since(known, measured.OLDEST))  # or the old ones are refused
    tried = try_family(family)
    assert tried.found is not is_older(known.since), tried.why_not
    if tried.found:
        assert (tried.choice, tried.own_loss) == (known.choice.name.lower(), known.own_loss)
    if not is_older(measured.NEWEST):  # jamba's router had another class before
        assert tried.router == known.router


def test_a_model_whose_routers_this_transformers_does_not_name_gets_the_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny.make("qwen3_moe").model
    monkeypatch.setitem(measured.FAMILIES, "qwen3_moe", _with_since(measured.FAMILIES["qwen3_moe"], "99.1.0"))
    with pytest.raises(ReplayError, match=re.escape('pip install "transformers>=99.1.0"')):
        RouterReplay(model)
    with pytest.raises(ReplayError, match=r"family qwen3_moe.* transformers 99.1.0 or newer"):
        RouterReplay(torch.nn.Sequential(model))


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
def test_a_family_that_is_older_than_its_routers_names_is_refused(family: str) -> None:
    since = measured.FAMILIES[family].since
    if not is_older(since):
        return  # the other tests replay it
    try:
        importlib.import_module(f"transformers.models.{family}")
        model = tiny.build(family).model
    except Exception:  # this transformers does not have it, or not as the recipe knows it
        pytest.skip(f"{family} needs transformers >= {since}")
    with pytest.raises(ReplayError, match=re.escape(f'pip install "transformers>={since}"')):
        RouterReplay(model)


@pytest.mark.parametrize(
    ("version", "count"), [("5.10.4", 24), ("5.19.0", 63), ("5.22.2", 70), ("6.0.0.dev0", 70), ("", 0)]
)
def test_the_summary_counts_what_the_version_has(version: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router_replay.families.versions.installed", lambda: version)
    assert f"{count} of the 70 families" in summary()


def test_versions_are_compared_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    assert installed() == transformers.__version__
    for version, older in (("5.9.9", True), ("5.10.4", False), ("5.10.4.dev0", False), ("5.11.0", False)):
        monkeypatch.setattr("router_replay.families.versions.installed", lambda version=version: version)
        assert is_older("5.10.4") is older


def _with_since(known: Measured, since: str) -> Measured:
    return Measured(since, known.router, known.choice, known.own_loss)
