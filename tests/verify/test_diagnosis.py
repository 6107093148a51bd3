"""Every fault is found and named, and rows that only rounding changed are never accused."""

from __future__ import annotations

import numpy as np
import pytest

from router_replay.errors import MeasureError
from router_replay.spec import RouterSpec
from router_replay.verify.diagnosis import diagnose, nearer_precision
from router_replay.verify.inject import FAULT_NAMES, inject
from tests.verify.simulated import SPECS, Simulated

WORSE = (1e-3, 2e-3)  # k3 live and replayed: replay that hurts, as with rows of other weights
BETTER = (1e-3, 1e-4)


def possible(fault: str, spec: RouterSpec) -> bool:
    return not ((fault == "cast" and spec.num_experts <= 256) or (fault == "layer-offset" and len(spec.layers) < 2))


@pytest.mark.parametrize("name", SPECS)
def test_a_clean_run_is_never_accused(name: str) -> None:
    """100 seeds for each kind of model, at three levels of rounding; replay that hurts does not make it guilty."""
    for seed in range(100):
        simulated = Simulated(SPECS[name], seed, rounding=(0.0, 0.03, 0.15)[seed % 3], sequences=4, tokens=24)
        assert diagnose(simulated.evidence(), WORSE) is None, seed


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("fault", FAULT_NAMES)
def test_every_fault_is_found_and_named(name: str, fault: str) -> None:
    if not possible(fault, SPECS[name]):
        with pytest.raises(MeasureError, match="needs a model with"):
            Simulated(SPECS[name], 0).with_fault(fault)
        return
    for seed in range(5):
        simulated = Simulated(SPECS[name], seed)
        finding = diagnose(simulated.evidence(simulated.with_fault(fault, seed)), WORSE)
        assert finding is not None
        assert finding.fault == fault, (seed, finding)


def test_a_fault_in_a_part_of_the_rows_is_found_with_the_place() -> None:
    simulated = Simulated(SPECS["small"], 0)
    rows = [*simulated.engine]
    rows[3] = inject("shift", rows[3], simulated.spec)
    finding = diagnose(simulated.evidence(rows), BETTER)
    assert finding is not None
    assert finding.fault == "shift"
    assert finding.detail.endswith("of sequences 3")


def test_rows_of_another_sequence_are_rows_of_other_tokens() -> None:
    simulated = Simulated(SPECS["small"], 0)
    rows = [*simulated.engine]
    rows[2] = np.resize(simulated.engine[5], rows[2].shape)
    finding = diagnose(simulated.evidence(rows), BETTER)
    assert finding is not None
    assert finding.fault == "other-tokens"


def test_stale_rows_of_one_version_are_named_with_it() -> None:
    """A weight swap in the middle: the rows of version 4 are those of other weights."""
    simulated = Simulated(SPECS["small"], 0)
    versions = [np.where(np.arange(len(one)) < len(one) // 2, 3, 4) for one in simulated.live]
    old = simulated.other_weights(2.0)
    rows = [
        np.where((version == 4)[:, None, None], stale, engine)
        for version, stale, engine in zip(versions, old, simulated.engine, strict=True)
    ]
    finding = diagnose(simulated.evidence(rows, versions), BETTER)
    assert finding is not None
    assert finding.fault == "stale"
    assert finding.detail.endswith("in the rows of policy version 4")


def test_the_suspected_checkpoint_is_confirmed_or_not() -> None:
    simulated = Simulated(SPECS["small"], 0)
    old = simulated.other_weights()
    right = diagnose(simulated.evidence(old, other=old), WORSE)
    wrong = diagnose(simulated.evidence(old, other=simulated.other_weights()), WORSE)
    assert right is not None
    assert wrong is not None
    assert (right.fault, wrong.fault) == ("stale", "stale")
    assert "the suspected checkpoint" in right.cause
    assert "the suspected checkpoint" not in wrong.cause


def test_one_layer_out_of_line_is_named() -> None:
    simulated = Simulated(SPECS["small"], 0)
    rows = [one.copy() for one in simulated.engine]
    for one, own in zip(rows, simulated.scores, strict=True):
        one[:, 6] = simulated.choice(np.random.default_rng(1).permutation(own[:, 6]))
    finding = diagnose(simulated.evidence(rows), BETTER)
    assert finding is not None
    assert finding.fault == "one-layer"
    assert finding.detail == "only layer 6 out of line"


def test_the_agreement_under_replay_finds_the_layer_that_disturbs_the_later_ones() -> None:
    """The engine did use other experts in layer 2, so all later layers saw other inputs and differ in a live pass."""
    simulated = Simulated(SPECS["small"], 0)
    rows = [one.copy() for one in simulated.engine]
    for one, other in zip(rows, simulated.other_weights(2.0), strict=True):
        one[:, 2:] = other[:, 2:]
    followed = np.full(10, 0.95)
    followed[2] = 0.1
    finding = diagnose(simulated.evidence(rows), BETTER, followed)
    assert finding is not None
    assert (finding.fault, finding.detail) == ("one-layer", "only layer 2 out of line")


@pytest.mark.parametrize("layers", [[4], [0, 4]])
def test_zeros_and_permuted_experts_in_some_layers_are_named(layers: list[int]) -> None:
    simulated = Simulated(SPECS["small"], 0)
    for fault in ("zero", "permuted-experts"):
        whole = simulated.with_fault(fault)
        rows = [one.copy() for one in simulated.engine]
        for one, bad in zip(rows, whole, strict=True):
            one[:, layers] = bad[:, layers]
        finding = diagnose(simulated.evidence(rows), WORSE)
        assert finding is not None
        assert finding.fault == fault
        assert finding.detail.endswith(f"; in layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))} only")


def test_a_quantized_engine_is_accused_only_if_replay_hurts() -> None:
    """Its rows differ more than rounding explains, and still belong to its tokens."""
    simulated = Simulated(SPECS["small"], 0)
    rows = simulated.other_weights(0.3)
    evidence = simulated.evidence(rows)
    assert evidence.drifted
    assert diagnose(evidence, BETTER) is None
    assert diagnose(evidence) is None  # without log-probs there is no proof
    for k3 in (WORSE, (0.8, 0.5)):  # or if the log-probs stay far apart: then they are those of other weights
        finding = diagnose(evidence, k3)
        assert finding is not None
        assert finding.fault == "stale"


def test_a_known_fault_that_takes_little_overlap_is_named_all_the_same() -> None:
    """One in five experts of a model with 320 has an id above 255."""
    simulated = Simulated(SPECS["wide"], 0)
    evidence = simulated.evidence(simulated.with_fault("cast"))
    assert evidence.drifted
    finding = diagnose(evidence)
    assert finding is not None
    assert finding.fault == "cast"


def test_sets_that_no_router_can_choose_are_a_fault() -> None:
    simulated = Simulated(SPECS["small"], 0)
    rows = [one.copy() for one in simulated.engine]
    rows[0][3, 2, 0] = rows[0][3, 2, 1]
    rows[1][4, 5, 0] = 64
    finding = diagnose(simulated.evidence(rows), BETTER)
    assert finding is not None
    assert finding.fault == "impossible"
    assert finding.detail == "2 sets repeat an expert, or hold an id outside [0, 64)"


def test_the_number_type_that_the_rows_agree_with_is_named() -> None:
    simulated = Simulated(SPECS["small"], 0)
    assert nearer_precision(simulated.evidence(simulated.rounded)) == "bfloat16"
    assert nearer_precision(simulated.evidence(simulated.live)) is None
    assert nearer_precision(simulated.evidence()) is None


def test_no_captured_row_is_nothing_to_verify() -> None:
    simulated = Simulated(SPECS["tiny"], 0)
    simulated.captured = [np.zeros(len(one), bool) for one in simulated.live]
    with pytest.raises(MeasureError, match="no row is captured in any sequence"):
        simulated.evidence()
