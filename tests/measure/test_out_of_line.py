"""A layer whose agreement is out of line is found, and a clean run is never accused."""

from __future__ import annotations

import numpy as np
import pytest

from router_replay.measure import out_of_line
from tests.verify.simulated import SPECS, Simulated

SHAPES = {  # the share of disagreement by depth, from 0 to 1
    "flat": lambda x: np.ones_like(x),
    "rising": lambda x: 0.2 + 0.8 * x,
    "late": lambda x: 0.1 + 0.9 * x**3,
    "saturating": lambda x: np.sqrt(0.05 + 0.95 * x),
    "falling": lambda x: 1 - 0.8 * x,
}


def counted(differs: np.ndarray, rows: int, rng: np.random.Generator) -> np.ndarray:
    """The agreement that `rows` rows show; tokens differ in how close their routers decide."""
    closeness = rng.gamma(2.0, 0.5, rows)  # mean 1
    return 1 - (rng.random((rows, len(differs))) < np.clip(differs * closeness[:, None], 0, 1)).mean(axis=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("most", [0.0, 0.01, 0.1, 0.3])
def test_a_clean_run_is_never_accused(shape: str, most: float) -> None:
    for seed in range(120):
        rng = np.random.default_rng(seed)
        layers = int(rng.integers(2, 62))
        differs = most * SHAPES[shape](np.linspace(0, 1, layers)) * rng.uniform(0.8, 1.2, layers)
        rows = int(rng.choice([16, 64, 500, 4000]))
        assert out_of_line(counted(differs, rows, rng), rows) == [], (seed, layers, rows)


@pytest.mark.parametrize("spec", ["tiny", "small", "wide"])
def test_rounding_of_simulated_routers_is_never_out_of_line(spec: str) -> None:
    for seed in range(100):
        simulated = Simulated(SPECS[spec], seed)
        engine, live = (np.sort(np.concatenate(ids), axis=-1) for ids in (simulated.engine, simulated.live))
        assert out_of_line((engine == live).all(axis=-1).mean(axis=0), len(live)) == [], seed


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("after", [0.0, 0.3])
def test_a_broken_layer_is_always_found(shape: str, after: float) -> None:
    """Also if the layers after it disagree more too, as they do without replay."""
    for seed in range(120):
        rng = np.random.default_rng(seed)
        layers = int(rng.integers(4, 62))
        differs = 0.15 * SHAPES[shape](np.linspace(0, 1, layers)) * rng.uniform(0.8, 1.2, layers)
        broken = int(rng.integers(layers))
        differs[broken + 1 :] = np.maximum(differs[broken + 1 :], after)
        differs[broken] = rng.uniform(0.8, 1.0)
        rows = int(rng.choice([200, 500, 4000]))
        agreement = counted(differs, rows, rng)
        agreement[broken] = 1 - rng.binomial(rows, differs[broken]) / rows
        assert out_of_line(agreement, rows) == [broken], (seed, layers, broken, rows)


def test_the_first_and_the_last_layer_are_found_too() -> None:
    fine = [0.99, 0.98, 0.97, 0.96, 0.95, 0.94]
    for place in range(6):
        agreement = [*fine[:place], 0.2, *fine[place + 1 :]]
        assert out_of_line(agreement, 1000) == [place]
    assert out_of_line([0.99, 0.1], 1000) == [1]
    assert out_of_line([0.9, 0.1, 0.1, 0.92, 0.9], 1000) == [1, 2]


def test_few_rows_and_a_single_layer_prove_nothing() -> None:
    assert out_of_line([0.1], 1000) == []
    assert out_of_line([], 1000) == []
    assert out_of_line([1.0, 0.0, 1.0], 0) == []
    assert out_of_line([1.0, 0.5, 1.0, 1.0], 2) == []
    assert out_of_line([1.0, float("nan"), 1.0], 1000) == []
