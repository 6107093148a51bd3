"""Samples with rows of their own, a store that holds them, and the ways in which trainers lay them out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from router_replay import RouterSpec, Routes, RouteStore, Sample
from tests.makers import random_routes
from tests.replay import tiny

PAD = 0


@dataclasses.dataclass(frozen=True)
class Laid:
    """The inputs of a pass, and for each slot the sample and the token in it; -1 in padding."""

    inputs: dict[str, Any]
    sample_T: np.ndarray
    place_T: np.ndarray


def samples_of(lengths: Sequence[int], spec: RouterSpec, seed: int = 0) -> list[Sample]:
    """Random samples of three tokens or more, of which the first two are those of all; the last row is missing."""
    rng = np.random.default_rng(seed)
    found = []
    for number, length in enumerate(lengths):
        tokens = np.concatenate([[3, 4, 10 + number], rng.integers(1, tiny.VOCAB, length - 3)])
        captured = np.arange(length) < length - 1
        routes = Routes(random_routes(length, spec, seed + number).ids, spec, captured)
        found.append(Sample(tokens, np.zeros(length, np.float32), np.ones(length, bool), routes))
    return found


def store_of(samples: Sequence[Sample], spec: RouterSpec) -> RouteStore:
    store = RouteStore(spec)
    for sample in samples:
        store.add_trajectory(sample)
    return store


def padded(samples: Sequence[Sample], left: Sequence[int], right: int = 0) -> Laid:
    """One sample per row, with `left[i]` or more slots of padding before it, and `right` or more after the longest."""
    width = max(before + len(one) for before, one in zip(left, samples, strict=True)) + right
    shape = len(samples), width
    tokens, mask = np.full(shape, PAD), np.zeros(shape, np.int64)
    sample, place = np.full(shape, -1), np.full(shape, -1)
    for row, (before, one) in enumerate(zip(left, samples, strict=True)):
        inside = slice(before, before + len(one))
        tokens[row, inside], mask[row, inside] = one.token_ids, 1
        sample[row, inside], place[row, inside] = row, np.arange(len(one))
    inputs = {"input_ids": torch.from_numpy(tokens), "attention_mask": torch.from_numpy(mask)}
    return Laid(inputs, sample.reshape(-1), place.reshape(-1))


def padded_left(samples: Sequence[Sample]) -> Laid:
    longest = max(map(len, samples))
    return padded(samples, [longest - len(one) for one in samples])


def padded_right(samples: Sequence[Sample]) -> Laid:
    return padded(samples, [0] * len(samples))


def padded_on_both_sides(samples: Sequence[Sample]) -> Laid:
    """As TRL does: prompts padded left, completions padded right, with positions that count real tokens."""
    laid = padded(samples, [number % 3 for number in range(len(samples))], right=2)
    positions = (laid.inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    return dataclasses.replace(laid, inputs={**laid.inputs, "position_ids": positions})


def packed(samples: Sequence[Sample]) -> Laid:
    tokens = np.concatenate([one.token_ids for one in samples])
    place = np.concatenate([np.arange(len(one)) for one in samples])
    sample = np.repeat(np.arange(len(samples)), [len(one) for one in samples])
    inputs = {"input_ids": torch.from_numpy(tokens)[None], "position_ids": torch.from_numpy(place)[None]}
    return Laid(inputs, sample, place)


LAYOUTS = (padded_left, padded_right, padded_on_both_sides, packed)


def rows_of(laid: Laid, samples: Sequence[Sample]) -> Routes:
    """The rows of the samples in the slots of their tokens, laid out without the code under test."""
    every = Routes.concat([one.routes for one in samples if one.routes is not None])
    starts = np.cumsum([0, *(len(one) for one in samples)])
    index = np.where(laid.sample_T < 0, -1, starts[laid.sample_T] + laid.place_T)
    return every.take(index)


def logits_of(model: Any, laid: Laid) -> torch.Tensor:
    return model(**laid.inputs, use_cache=False).logits
