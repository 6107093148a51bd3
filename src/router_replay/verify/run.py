"""Verify the routes of sequences against the trainer's own model.

samples, note = generate(engine, prompts, tokens=32)
verdict = verify(samples, model="Qwen/folder", source=note)
verdict.belongs, verdict.finding
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch

from router_replay.batch import Sample
from router_replay.errors import MeasureError, RoutesError
from router_replay.measure import logprob_gap
from router_replay.rl.policy.models import model_folder
from router_replay.routes import Routes
from router_replay.spec import RouterSpec
from router_replay.verify.compared import seen
from router_replay.verify.diagnosis import Finding, by_version, diagnose, nearer_precision
from router_replay.verify.evidence import Evidence
from router_replay.verify.inject import inject
from router_replay.verify.passes import Live, Trainer
from router_replay.verify.split import Split, Splitting, fitting
from router_replay.verify.verdict import Gap, Verdict

FEW = 64
"""With fewer rows than this, the verdict says that they are few."""
Progress = Callable[[str, int], Callable[[], object]]
"""Begins a phase, by its name and its number of sequences, and returns what is called after each of them."""


def _silent(_: str, __: int) -> Callable[[], object]:
    return lambda: None


@dataclasses.dataclass(frozen=True, eq=False)
class _Passes:
    """What the trainer's passes gave: the live pass in its number type, those in others, and the replayed ones."""

    live: Live
    variants: dict[str, list[np.ndarray]]
    replayed: list[np.ndarray] | None
    followed: np.ndarray | None
    split: Split | None


def verify(
    samples: Sequence[Sample],
    model: str,
    source: str,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    device: str | None = None,
    temperature: float = 1.0,
    against: str | None = None,
    fault: str | None = None,
    seed: int = 0,
    progress: Progress = _silent,
) -> Verdict:
    """Run `samples`, sequences with the rows of an engine, through the model of the folder `model`, and judge the rows.

    `source` says where the samples came from. `dtype`, `device` and `temperature` are those of the trainer's passes;
    by default the device is a GPU if there is one. `against` is the folder of a checkpoint whose routers may have
    chosen the rows. `fault` is one of FAULT_NAMES, put into the rows first, with `seed`. `progress` shows the phases.
    Raises MeasureError if there is nothing to compare, or routes of another model.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(model_folder(model), device, temperature)
    spec = trainer.spec
    routes = [_routes_of(sample, number, spec) for number, sample in enumerate(samples)]
    captured = [one.captured for one in routes]
    rows = [one.ids.astype(np.int64) for one in routes]
    count = len(samples)
    if fault == "stale":
        rows = trainer.noisy(samples, seed, progress("noisy routers", count)).ids
    elif fault is not None:
        rows = [inject(fault, ids, spec, seed) for ids in rows]
    usable = _as_routes(rows, captured, spec)
    passes = _run(trainer, samples, usable, dtype, progress)
    del trainer
    other = None
    if against is not None:
        suspect = Trainer(model_folder(against), device, temperature)
        if dtype == "bfloat16":
            suspect.to_bfloat16()
        other = suspect.live(samples, progress("suspected checkpoint", count)).ids
    versions = [one.versions for one in routes]
    evidence = Evidence.of(spec, rows, captured, passes.live.ids, passes.variants, versions, other)
    return _judged(evidence, samples, captured, passes, model=model, source=source, dtype=dtype)


def _routes_of(sample: Sample, number: int, spec: RouterSpec) -> Routes:
    if sample.routes is None:
        return Routes.missing(len(sample), spec)
    if sample.routes.spec != spec:
        raise MeasureError(
            f"sequence {number}: its routes are of another model: expected {spec}, got {sample.routes.spec}"
        )
    return sample.routes.read()


def _as_routes(rows: list[np.ndarray], captured: list[np.ndarray], spec: RouterSpec) -> list[Routes] | None:
    """Return the rows as Routes; None if one of them is impossible, so that nothing can be replayed."""
    with contextlib.suppress(RoutesError):
        return [Routes(ids, spec, captured=mask) for ids, mask in zip(rows, captured, strict=True)]
    return None


def _run(
    trainer: Trainer, samples: Sequence[Sample], routes: list[Routes] | None, dtype: str, progress: Progress
) -> _Passes:
    """Run every pass with one load of the model: first in float32, then in bfloat16, then with float32 routers."""
    count, lives = len(samples), {}
    replayed = followed = split = None
    splitting = None if routes is None else Splitting(trainer, samples, routes)
    for name in ("float32", "bfloat16", "bfloat16 with float32 routers"):
        if name == "bfloat16":
            trainer.to_bfloat16()
        elif name != "float32" and not trainer.to_float32_routers():
            break
        lives[name] = trainer.live(samples, progress(f"live, {name}", count))
        if name == dtype and routes is not None:
            replayed, followed = trainer.replayed(samples, routes, progress("replayed", count))
        if splitting is not None and not splitting.why_not and name == "float32":
            splitting.in_float32(progress("gate weights of float32", len(splitting)))
        elif splitting is not None and not splitting.why_not and name == "bfloat16":
            split = splitting.in_bfloat16(progress("bfloat16 with them", len(splitting)))
    if splitting is not None and splitting.why_not:
        split = Split(None, None, None, 0.0, 0.0, 0, splitting.why_not)
    variants = {name: live.ids for name, live in lives.items() if name != dtype}
    return _Passes(lives[dtype], variants, replayed, followed, split)


def _judged(
    evidence: Evidence,
    samples: Sequence[Sample],
    captured: Sequence[np.ndarray],
    passes: _Passes,
    **where: str,
) -> Verdict:
    live = _gap(samples, passes.live.logprobs)
    replayed = _gap(samples, passes.replayed) if passes.replayed is not None else None
    k3 = (live.k3, replayed.k3) if live is not None and replayed is not None else None
    finding = diagnose(evidence, k3, passes.followed)
    needed = [~mask[:-1] & sample.loss_mask[1:] for mask, sample in zip(captured, samples, strict=True)]
    missing_loss = int(sum(mask.sum() for mask in needed))
    if finding is None and missing_loss:
        finding = Finding(
            "missing", "the engine did not return rows that bear loss", f"{missing_loss} such rows are not captured"
        )
    spec, split = evidence.spec, passes.split
    equal_NL = (np.sort(evidence.rows, axis=2) == np.sort(evidence.live, axis=2)).all(axis=2)
    differs = (1 - equal_NL.mean(axis=0)).tolist()
    variants = [np.sort(one, axis=2) for one in evidence.variants.values()]
    noise = [1 - float((one == np.sort(evidence.live, axis=2)).all(axis=2).mean()) for one in variants]
    return Verdict(
        **where,
        sequences=len(samples),
        sampled=int(sum(sample.loss_mask.sum() for sample in samples)),
        rows=len(evidence.rows),
        missing=int(sum((~mask[:-1]).sum() for mask in captured)),
        missing_loss=missing_loss,
        impossible=evidence.impossible,
        disagree=float(1 - equal_NL.mean()),
        tokens_disagree=float(1 - equal_NL.all(axis=1).mean()),
        expected=max(noise, default=0.0),
        per_layer=dict(zip(spec.layers, differs, strict=True)),
        live=live,
        replayed=replayed,
        split=None if finding is not None or replayed is None or split is None else fitting(split, replayed.k3),
        finding=finding,
        notes=tuple(_notes(evidence, finding, where["dtype"])),
        seen=seen(evidence, equal_NL, samples, passes.live.logprobs, passes.replayed),
    )


def _notes(evidence: Evidence, finding: Finding | None, dtype: str) -> list[str]:
    notes = []
    if finding is None and evidence.drifted:
        notes.append(
            "the rows differ more than rounding to bfloat16 explains, and replaying them does no harm: the engine's "
            "weights are quantized or slightly older, or its router computes in another precision"
            + by_version(evidence)
        )
    if finding is None and (name := nearer_precision(evidence)) is not None:
        notes.append(f"the rows agree better with the trainer in {name} than in {dtype}")
    if len(evidence.rows) < FEW:
        notes.append(f"{len(evidence.rows)} rows are few: give more tokens for a firm verdict")
    return notes


def _gap(samples: Sequence[Sample], logprobs: Sequence[np.ndarray]) -> Gap | None:
    """Return the gap over all sampled tokens; None if no token was sampled, or no log-probs were recorded."""
    masks = [sample.loss_mask[1:] for sample in samples]
    if not sum(int(mask.sum()) for mask in masks):
        return None
    train = np.concatenate([own[mask] for own, mask in zip(logprobs, masks, strict=True)])
    rollout = np.concatenate([sample.logprobs[1:][mask] for sample, mask in zip(samples, masks, strict=True)])
    gap = logprob_gap(train, rollout)
    return Gap(gap.k3, gap.extreme(2.0), gap.abs_mean)
