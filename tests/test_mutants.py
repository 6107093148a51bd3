"""tools/mutants.py: the changes it makes to a piece of source, and what it leaves alone."""

from __future__ import annotations

import ast

import pytest

from tools import mutants

SOURCE = '''
@decorated(limit=1)
def function(a: int | None, b: int = 3) -> int:
    """A docstring with 1 < 2."""
    if a < b and not b:
        raise ValueError(f"{a - 1}: é", 1 + 1)
    for value in (a, b):
        continue
    assert a > 1
    return swap(a, b) + a[b : -1] + max(a, b)
'''


def test_every_kind_of_change_is_made_once_and_gives_python() -> None:
    found = mutants.Finder("module.py", SOURCE).mutants
    changes = {mutant.lines(SOURCE)[1] for mutant in found}
    assert changes == {
        "def function(a: int | None, b: int = 4) -> int:",
        "if (a < b) or (not b):",
        "if a <= b and not b:",
        "if a < b and (b):",
        "pass",
        "return swap(b, a) + a[b : -1] + max(a, b)",
        "return swap(a, b) - a[b : -1] + max(a, b)",
        "return swap(a, b) + a[b : -1] - max(a, b)",
        "return swap(a, b) + a[b + 1 : -1] + max(a, b)",
        "return swap(a, b) + a[b : -2] + max(a, b)",
    }
    for mutant in found:
        ast.parse(mutant.apply(SOURCE))
        assert SOURCE.splitlines()[mutant.line - 1].strip() == mutant.lines(SOURCE)[0]


def test_an_equivalent_change_is_found_by_its_text_wherever_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mutants, "EQUIVALENT", {"if a <= b and": "a reason"})
    for source in (SOURCE, "\n\n" + SOURCE):
        found = [one for one in mutants.Finder("module.py", source).mutants if mutants.equivalent_by(one, source)]
        assert [mutant.lines(source)[1] for mutant in found] == ["if a <= b and not b:"]


def test_every_mutant_of_a_real_module_is_python() -> None:
    source = (mutants.ROOT / mutants.PACKAGE / "stitch/trajectory.py").read_text()
    found = mutants.Finder("stitch/trajectory.py", source).mutants
    assert len(found) > 50
    for mutant in found:
        ast.parse(mutant.apply(source))
